"""Rings: attention to parts of the keys, merged, equals attention to all keys.

In context parallelism each device holds a part of the keys, and queries meet all parts in turn. The
gradient of the merge gives each part its dout and dlse, and its backward its dq, dk and dv. Here
all parts are on one device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st

from fa_verify.oracles.bounds.error_model import Judgement, judge
from fa_verify.oracles.bounds.merging import merge_bound
from fa_verify.oracles.bounds.ring import KeyErrors, gradient_errors
from fa_verify.oracles.call import changed
from fa_verify.oracles.calls.ring import RingProblem
from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.outputs import Outputs
from fa_verify.oracles.problem import Problem
from fa_verify.oracles.reference.torch_reference import attention
from fa_verify.oracles.stream import normal
from fa_verify.properties.inputs.tensors import Inputs, make
from fa_verify.properties.kernels.refusals import ExcludedCallError
from fa_verify.properties.kernels.subject import Subject
from fa_verify.properties.kernels.supported import ExcludedError
from fa_verify.properties.kinds import features as of_attention
from fa_verify.properties.kinds import reductions as simpler
from fa_verify.properties.kinds.feature import Feature, present
from fa_verify.properties.kinds.kind import Kind
from fa_verify.properties.problems.merges import rings
from fa_verify.properties.running.trial import (
    Judged,
    SubjectError,
    Trial,
    faults_of_the_subject,
    kept_settings,
)

__all__ = ["RING", "RingTrial", "part_problems"]


@dataclass(frozen=True)
class RingTrial(Trial):
    """A run of a ring.

    Args:
        problem: The ring.
        inputs: The tensors of the whole attention.
        got: The results, float64 gradients; those of all parts, joined.
        want: The results of the whole attention.
        bound: The bounds of the parts, carried through the merge.
    """

    problem: RingProblem
    inputs: Inputs
    got: Outputs[torch.Tensor]
    want: Outputs[torch.Tensor]
    bound: Outputs[torch.Tensor]

    @property
    def outputs(self) -> Mapping[str, Judged]:
        """Out, lse, dq, dk and dv."""
        judged = zip(Outputs._fields, self.got, self.want, self.bound, strict=True)
        return {name: Judged(*x) for name, *x in judged}


class _Part(NamedTuple):
    """A part of the keys: its problem, its keys, the leaves of its call, and its exact results."""

    problem: Problem
    keys: slice
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    judgement: Judgement


def part_problems(problem: Problem, lengths: Sequence[int]) -> list[tuple[Problem, slice]]:
    """Return the problem and the keys of each part of ``lengths`` keys.

    Causal masks are aligned to the bottom right. In a part that ends before the last key, that
    diagonal lies as many keys to the right as follow the part.
    """
    found = []
    for stop, length in zip(accumulate(lengths), lengths, strict=True):
        mask = Mask(window_right=problem.N - stop) if problem.mask.causal else Mask()
        part = dataclasses.replace(problem, N=length, mask=mask)
        found.append((part, slice(stop - length, stop)))
    return found


def run(subject: Subject, ring: RingProblem) -> RingTrial | None:
    """Run a ring and its backward, and carry the bounds of its parts through the merge.

    Errors of their out and lse are errors of the inputs of the merge. Errors of its gradients are
    errors of the dout and dlse of each part.

    Returns:
        The trial; None if a part is out of range.

    Raises:
        SubjectError: The kernel raises.
        RefusedError: The kernel refuses a part, or its declarations exclude the ring.
        RuntimeError: A bound is not finite, an error of the suite.
    """
    if reason := excludes(subject, ring):
        raise ExcludedCallError(reason)
    problem = ring.attention
    inputs = make(problem)
    q, k, v, dout = inputs.tensors
    of_lse = torch.float64 if problem.dtype == "fp64" else torch.float32
    dlse = normal(problem.seed, "dlse", dout.shape[:3]).to(of_lse).to(q.device)
    made = part_problems(problem, ring.lengths)
    with faults_of_the_subject(inputs), kept_settings():
        merge, leaves, states = _called(subject, made, inputs, dlse)

    parts = []
    for (part, keys), (q_p, k_p, v_p), (out, lse) in zip(made, leaves, states, strict=True):
        # The backward of a part is judged on the gradients that the merge gave it.
        judged = judge(
            q, k[:, :, keys], v[:, :, keys], _gradient_of(out), _gradient_of(lse), mask=part.mask,
            sm_scale=problem.scale, in_dtype=problem.dtype, numerics=subject.numerics_of(part),
        )  # fmt: skip
        if judged.out_of_range is not None:
            return None
        exact = attention(
            q, k[:, :, keys], v[:, :, keys], dout, mask=part.mask, sm_scale=problem.scale
        )
        parts.append(_Part(part, keys, q_p, k_p, v_p, exact.out, exact.lse, judged))

    whole = attention(q, k, v, dout, dlse, mask=problem.mask, sm_scale=problem.scale)
    bound = merge_bound(
        torch.stack([x.out for x in parts]), torch.stack([x.lse for x in parts]), dout, dlse,
        in_dtype=problem.dtype, out_errors=torch.stack([x.judgement.bound.out for x in parts]),
        lse_errors=torch.stack([x.judgement.bound.lse for x in parts]),
    )  # fmt: skip
    moved = [_moved(x, *off) for x, *off in zip(parts, bound.douts, bound.dlses, strict=True)]
    limits = [x.judgement.bound for x in parts]
    got = Outputs(
        merge[0].detach(), merge[1].detach(),
        torch.stack([_gradient(x.q) for x in parts]).sum(0),
        torch.cat([_gradient(x.k) for x in parts], 2),
        torch.cat([_gradient(x.v) for x in parts], 2),
    )  # fmt: skip
    allowed = Outputs(
        bound.out, bound.lse,
        torch.stack([x.dq + y.dq for x, y in zip(limits, moved, strict=True)]).sum(0),
        torch.cat([x.dk + y.dk for x, y in zip(limits, moved, strict=True)], 2),
        torch.cat([x.dv + y.dv for x, y in zip(limits, moved, strict=True)], 2),
    )  # fmt: skip
    if not all(bool(x.isfinite().all()) for x in allowed):
        raise RuntimeError(f"the bound is not finite, so nothing was judged: {ring.to_json()}")
    return RingTrial(subject, ring, inputs, got, whole, allowed)


_States = list[tuple[torch.Tensor, torch.Tensor]]


def _called(
    subject: Subject, made: Sequence[tuple[Problem, slice]], inputs: Inputs, dlse: torch.Tensor
) -> tuple[Sequence[torch.Tensor], list[list[torch.Tensor]], _States]:
    """Attend to each part, merge, and differentiate; return the merge, the leaves, the states."""
    q, k, v, dout = inputs.tensors
    leaves: list[list[torch.Tensor]] = []
    states: _States = []
    for part, keys in made:
        given = [x.detach().requires_grad_() for x in (q, k[:, :, keys], v[:, :, keys])]
        out, lse = subject.run(given[0], given[1], given[2], part)
        if lse is None:
            raise ExcludedCallError(f"{subject.name} returns no lse")
        if not (out.requires_grad and lse.requires_grad):
            raise SubjectError("out or lse of a part has no gradient")
        for x in (out, lse):
            x.retain_grad()
        leaves.append(given)
        states.append((out, lse))
    outs, lses = (list(x) for x in zip(*states, strict=True))
    merge = subject.run_states(torch.stack(outs), torch.stack(lses))
    torch.autograd.backward(list(merge), [dout, dlse])
    return merge, leaves, states


def _gradient_of(x: torch.Tensor) -> torch.Tensor:
    """Return the gradient of a tensor; zeros if nothing depends on it."""
    return torch.zeros_like(x) if x.grad is None else x.grad


def _gradient(x: torch.Tensor) -> torch.Tensor:
    """Return the gradient of a leaf in float64."""
    return _gradient_of(x).to(torch.float64)


def _moved(part: _Part, off_dout: torch.Tensor, off_dlse: torch.Tensor) -> KeyErrors:
    """Return how far the gradients of a part move with errors of its dout and dlse."""
    p = part.problem
    sizes = p.B, p.H, p.M, p.N
    seen = p.mask.dense(*sizes, device=part.q.device).expand(*sizes)
    tensors = (x.detach() for x in (part.q, part.k, part.v))
    return gradient_errors(
        *tensors, seen=seen, sm_scale=p.scale, off_dout=off_dout, off_dlse=off_dlse
    )


def draw(subject: Subject, *, dtype: str, device: str, **_: Any) -> st.SearchStrategy[RingProblem]:
    """Return rings of a dtype that a kernel takes.

    Raises:
        ExcludedError: The kernel does not attend, merge and differentiate both, or its declarations
            exclude the plainest ring.
    """
    config = "16x16" if "16x16" in subject.configs else next(iter(subject.configs))
    D, step = min(subject.head_dims or (16,)), subject.seqlen_multiple
    whole = Problem(M=step, N=step, D=D, Dv=D, dtype=dtype, device=device, config=config)
    if reason := excludes(subject, RingProblem(attention=whole, lengths=(step,))):
        raise ExcludedError(reason)
    fixed: dict[str, st.SearchStrategy[Any]] = {}
    causal = dataclasses.replace(whole, M=2 * step, N=2 * step, mask=Mask(causal=True))
    if excludes(subject, RingProblem(attention=causal, lengths=(step, step))):
        fixed["mask"] = st.just(Mask())
    if subject.head_dims is not None:
        fixed |= {name: st.sampled_from(subject.head_dims) for name in ("D", "Dv")}
    if not subject.gqa:
        fixed["G"] = st.just(1)
    if step > 1:
        fixed["M"] = st.sampled_from((step, 2 * step))
        fixed["lengths"] = st.lists(fixed["M"], min_size=1, max_size=3).map(tuple)
    drawn = rings(dtype, device, config, **fixed)
    return drawn if subject.dv_ne_d else drawn.map(lambda x: changed(x, Dv=x.attention.D))


def excludes(subject: Subject, ring: RingProblem) -> str | None:
    """Return the declaration that excludes a ring, as a sentence; None if none does."""
    if subject.states is None:
        return f"{subject.name} declares no states"
    if subject.merges_alone or not (subject.backward and subject.lse_grad):
        return f"{subject.name} does not attend, merge and differentiate both"
    parts = part_problems(ring.attention, ring.lengths)
    return next(filter(None, (subject.excludes(part) for part, _ in parts)), None)


def complexity(ring: RingProblem) -> tuple[float, ...]:
    """Return a sort key: that of the attention, and the number of parts."""
    sizes, *others = simpler.complexity(ring.attention)
    return sizes + len(ring.lengths), *others


def reductions(ring: RingProblem) -> Iterator[RingProblem]:
    """Yield rings that are simpler in one field: fewer or shorter parts, a simpler attention."""
    lengths = ring.lengths
    fewer = [(*lengths[:p], *lengths[p + 1 :]) for p in range(len(lengths)) if len(lengths) > 1]
    shorter = [
        (*lengths[:p], size, *lengths[p + 1 :])
        for p, length in enumerate(lengths)
        for size in simpler.steps(length)
    ]
    for others in (*fewer, *shorter):
        yield _of_lengths(ring, others)
    for whole in simpler.reductions(ring.attention):
        if whole.N == ring.attention.N and whole.mask in (Mask(), Mask(causal=True)):
            yield dataclasses.replace(ring, attention=whole)


def _of_lengths(ring: RingProblem, lengths: tuple[int, ...]) -> RingProblem:
    """Return a ring over other parts."""
    whole = dataclasses.replace(ring.attention, N=sum(lengths))
    return RingProblem(attention=whole, lengths=lengths)


def features(ring: RingProblem) -> list[Feature]:
    """Return the features of a ring: those of its parts, and of its attention."""
    found = [Feature("parts without keys")] if 0 in ring.lengths else []
    parts = [Feature("parts above", len(ring.lengths) - 1)] if len(ring.lengths) > 1 else []
    return [*found, *of_attention.features_of(ring.attention), *parts]


def holds(feature: Feature, ring: RingProblem) -> bool:
    """Return whether a ring has a feature."""
    if feature.name.startswith("parts "):
        return present(feature, ring, features)
    return of_attention.holds(feature, ring.attention)


def without(
    feature: Feature, ring: RingProblem, configs: Iterable[str] = ()
) -> Iterator[RingProblem]:
    """Yield rings without a feature that a ring has, nearest first."""
    lengths = ring.lengths
    if feature.name == "parts without keys":
        yield _of_lengths(ring, tuple(x or 1 for x in lengths))
    elif feature.name == "causal":
        yield dataclasses.replace(ring, attention=dataclasses.replace(ring.attention, mask=Mask()))
    elif feature.name == "parts above":
        assert isinstance(feature.value, int)
        last = feature.value - 1
        yield _of_lengths(ring, (*lengths[:last], sum(lengths[last:])))
    else:
        for whole in of_attention.without(feature, ring.attention, configs):
            if whole.mask in (Mask(), Mask(causal=True)):
                # The last parts have fewer keys, or the first one more.
                left = whole.N
                kept = [min(x, max(0, left - sum(lengths[:p]))) for p, x in enumerate(lengths)]
                kept[0] += left - sum(kept)
                yield RingProblem(attention=whole, lengths=tuple(kept))


RING = Kind(draw, excludes, run, reductions, complexity, features, holds, without)
