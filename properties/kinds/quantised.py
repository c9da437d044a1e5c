"""Attention to codes with scales: how calls are run, shrunk and described."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st

from fa_verify.oracles.bounds.quantised import OutOfRangeError, Replayed, replayed_attention
from fa_verify.oracles.call import variants
from fa_verify.oracles.calls.quantised import (
    CODE_FAMILIES,
    QUANTISED_DTYPES,
    QuantisedProblem,
    plainer,
)
from fa_verify.oracles.formats.element import FORMATS
from fa_verify.oracles.formats.in_torch import decoded
from fa_verify.oracles.problem import LAYOUTS
from fa_verify.properties.inputs.quantised import QuantisedInputs, make_quantised, whole_scales
from fa_verify.properties.kernels.refusals import ExcludedCallError
from fa_verify.properties.kernels.subject import Subject
from fa_verify.properties.kernels.supported import ExcludedError, problems_of
from fa_verify.properties.kinds import features as of_attention
from fa_verify.properties.kinds import reductions as simpler
from fa_verify.properties.kinds.feature import Feature, present
from fa_verify.properties.kinds.kind import Kind
from fa_verify.properties.running.guard_bands import GuardBands, fill_of
from fa_verify.properties.running.trial import (
    Judged,
    SubjectError,
    Trial,
    quantised_call,
    running,
)

__all__ = ["QUANTISED", "QuantisedTrial", "Result", "replayed", "run_quantised"]

# out, and lse if the kernel returns it.
Result = tuple[torch.Tensor, torch.Tensor | None]
# Fields with their plainest values, and the words for others.
_PLAIN = {
    "codes": "normal", "qk_scales": "tensor", "v_scales": "tensor", "qk": "e4m3fn", "v": "e4m3fn"
}  # fmt: skip
_TOLD = {
    "codes": "codes of the family {}", "qk_scales": "scales of q and k by {}",
    "v_scales": "scales of v by {}", "qk": "q and k in {}", "v": "v in {}",
}  # fmt: skip
# Tiles that a drawn sequence has at most, and pairs of tiles of a problem.
_TILES, _PAIRS = 4, 24


@dataclass(frozen=True)
class QuantisedTrial(Trial):
    """A run of a call with codes and scales.

    Args:
        problem: The call.
        inputs: Its tensors.
        got: Out and lse.
        replayed: The results of correct kernels.
    """

    problem: QuantisedProblem
    inputs: QuantisedInputs
    got: Result
    replayed: Replayed

    @property
    def outputs(self) -> Mapping[str, Judged]:
        """Out and lse, if the kernel returned them."""
        x = self.replayed
        wanted = ((x.out, x.out_bound), (x.lse, x.lse_bound))
        return {
            name: Judged(got, *want)
            for name, got, want in zip(("out", "lse"), self.got, wanted, strict=True)
            if got is not None
        }


def replayed(subject: Subject, problem: QuantisedProblem, x: QuantisedInputs) -> Replayed:
    """Return the middles and bounds of the results of correct kernels.

    Raises:
        OutOfRangeError: A correct kernel may overflow.
    """
    a, numerics = problem.attention, subject.numerics_of(problem.attention)
    forms = (problem.qk, problem.qk, problem.v)
    q, k, v = (
        decoded(codes, FORMATS[form]) if form in FORMATS else codes.to(torch.float64)
        for codes, form in zip(x[:3], forms, strict=True)
    )
    seen = a.mask.dense(a.B, a.H, a.M, a.N, device=a.device).expand(a.B, a.H, a.M, a.N)
    with torch.inference_mode():
        return replayed_attention(
            q, k, v, *whole_scales(problem, x), seen, sm_scale=a.scale, out_dtype=problem.dtype,
            is_integer=problem.qk == "int8", block_n=numerics.block_n,
            rescale_threshold=numerics.rescale_threshold, l_from=numerics.l_from,
            numerics=subject.quantised_numerics,
        )  # fmt: skip


def run(subject: Subject, problem: QuantisedProblem) -> QuantisedTrial | None:
    """Run a call with codes and scales, and replay it.

    Returns:
        The trial; None if a correct kernel may overflow.

    Raises:
        SubjectError: The kernel raises, changes an input, or an output has a wrong form.
        RefusedError: The kernel refuses the call, or its declarations exclude it.
    """
    if reason := excludes(subject, problem):
        raise ExcludedCallError(reason)
    x = make_quantised(problem)
    try:
        wanted = replayed(subject, problem, x)
    except OutOfRangeError:
        return None
    return QuantisedTrial(subject, problem, x, run_quantised(subject, problem, x), wanted)


def run_quantised(subject: Subject, problem: QuantisedProblem, x: QuantisedInputs) -> Result:
    """Run a kernel with guard bands around what it allocates.

    Raises:
        SubjectError: As ``run``.
        RefusedError: The kernel refuses the call.
    """
    fill = fill_of(problem.seed)
    with GuardBands(fill) as guards, running(x):
        found = quantised_call(subject, problem, x).forward
    if overruns := guards.overruns():
        raise SubjectError(
            f"a tensor of shape {tuple(overruns[0].tensor.shape)} {overruns[0].place}"
        )
    return found["out"], found.get("lse")


def draw(
    subject: Subject, *, dtype: str, device: str, max_seqlen: int | None = None, **needs: Any
) -> st.SearchStrategy[QuantisedProblem]:
    """Return calls of a dtype of out that a kernel takes, which shrink to one scale a tensor.

    Raises:
        ExcludedError: The kernel takes no such call.
    """
    if subject.quantised is None:
        raise ExcludedError(f"{subject.name} declares no quantised")
    if dtype not in QUANTISED_DTYPES:
        raise ExcludedError(f"out of codes is in {' or '.join(QUANTISED_DTYPES)}")
    # Sequences of several key tiles, as the pivot changes between them.
    tile = max(16, subject.numerics.block_n)
    attention = problems_of(
        subject, dtype=dtype, device=device, max_seqlen=max_seqlen or _TILES * tile, tile=tile,
        max_cost=_PAIRS, layouts=LAYOUTS[:1], **needs,
    ).map(plainer)  # fmt: skip
    return st.builds(
        QuantisedProblem,
        attention=attention,
        codes=st.sampled_from(CODE_FAMILIES),
        qk=st.sampled_from(subject.qk_formats),
        v=st.sampled_from(subject.v_formats),
        qk_scales=st.sampled_from(subject.qk_scales),
        v_scales=st.sampled_from(subject.v_scales),
        blocks=st.just(tuple(subject.scale_blocks)),
    )


def excludes(subject: Subject, problem: QuantisedProblem) -> str | None:
    """Return the declaration that excludes a call, as a sentence; None if none does."""
    if subject.quantised is None:
        return f"{subject.name} declares no quantised"
    for word, value in (
        ("qk_formats", problem.qk), ("v_formats", problem.v),
        ("qk_scales", problem.qk_scales), ("v_scales", problem.v_scales),
    ):  # fmt: skip
        if value not in getattr(subject, word):
            return f"{subject.name} declares {word} {getattr(subject, word)!r}"
    if problem.qk_scales == "block" and problem.blocks != tuple(subject.scale_blocks):
        return f"{subject.name} declares scale_blocks {subject.scale_blocks!r}"
    return subject.excludes(problem.attention)


def complexity(problem: QuantisedProblem) -> tuple[float, ...]:
    """Return a sort key: that of the attention, with the fields of the codes."""
    sizes, fields, *others = simpler.complexity(problem.attention)
    own = sum(getattr(problem, name) != plain for name, plain in _PLAIN.items())
    return (sizes, fields + own, *others)


def reductions(problem: QuantisedProblem) -> Iterator[QuantisedProblem]:
    """Yield calls that are simpler in one field: plainer codes, then a simpler attention."""
    before = complexity(problem)
    changes: list[dict[str, Any]] = [
        *({name: plain} for name, plain in _PLAIN.items()),
        *({"attention": x} for x in simpler.reductions(problem.attention)),
    ]
    for other in variants(problem, iter(changes)):
        if complexity(other) < before:
            yield other


def features(problem: QuantisedProblem) -> list[Feature]:
    """Return the features of a call: those of its codes and scales, and of its attention."""
    own = [
        Feature(_TOLD[name].format(getattr(problem, name)))
        for name, plain in _PLAIN.items()
        if getattr(problem, name) != plain
    ]
    return [*own, *of_attention.features_of(problem.attention)]


def holds(feature: Feature, problem: QuantisedProblem) -> bool:
    """Return whether a call has a feature."""
    told = {_TOLD[name].format(getattr(problem, name)) for name in _PLAIN}
    if feature.name in told:
        return True
    if _is_own(feature):
        return False
    if feature in of_attention.features_of(problem.attention):
        return True
    return of_attention.holds(feature, problem.attention) or present(feature, problem, features)


def _is_own(feature: Feature) -> bool:
    """Return whether a feature is one of codes and scales."""
    return feature.name.startswith(tuple(x.partition("{")[0] for x in _TOLD.values()))


def without(
    feature: Feature, problem: QuantisedProblem, configs: Iterable[str] = ()
) -> Iterator[QuantisedProblem]:
    """Yield calls without a feature that a call has, nearest first."""
    changes: Iterable[dict[str, Any]]
    if _is_own(feature):
        changes = (
            {name: plain}
            for name, plain in _PLAIN.items()
            if feature.name == _TOLD[name].format(getattr(problem, name))
        )
    else:
        changes = (
            {"attention": x}
            for x in of_attention.without(feature, problem.attention, configs)
            if math.isfinite(x.scale)
        )
    for other in variants(problem, changes):
        if not holds(feature, other):
            yield other


QUANTISED = Kind(draw, excludes, run, reductions, complexity, features, holds, without)
