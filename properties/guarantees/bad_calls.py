"""G14: a kernel refuses the bad calls that it declares to refuse, and leaves their inputs alone."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from fa_verify.oracles.guarantee import G14
from fa_verify.oracles.masks.mask import Mask
from fa_verify.properties.guarantees.compare import Finding, same_bits
from fa_verify.properties.inputs.alibi_families import NO_ALIBI
from fa_verify.properties.inputs.bad_calls import (
    OF_ALL,
    OF_CACHES,
    OF_PACKED,
    OF_PADDED,
    Arguments,
    Change,
)
from fa_verify.properties.inputs.bias_families import NO_BIAS
from fa_verify.properties.inputs.caches import make_cache, shared_inputs
from fa_verify.properties.inputs.dlse_families import NO_DLSE
from fa_verify.properties.inputs.sink_families import NO_SINKS
from fa_verify.properties.inputs.tensors import make
from fa_verify.properties.kernels.refusals import CannotRunError, NoRoomError
from fa_verify.properties.kernels.without_gpu import CANNOT_RUN, asks_for_a_gpu
from fa_verify.properties.kinds.caches import CacheTrial, run_cache
from fa_verify.properties.running.guard_bands import GuardBands
from fa_verify.properties.running.large_memory import no_room
from fa_verify.properties.running.trial import (
    AttentionTrial,
    SubjectError,
    Trial,
    kept_settings,
)

__all__ = ["bad_calls", "bad_calls_of_caches"]

_PLAIN: dict[str, Any] = {
    "softcap": None, "alibi": NO_ALIBI, "bias": NO_BIAS, "sinks": NO_SINKS, "dlse": NO_DLSE,
}  # fmt: skip
# Entries of a padded or packed call. Two offsets of them can change places.
_ENTRIES = 3
_OUT_OF_BOUNDS = ("OutOfBoundsError", "CUDA error")
_GoodCall = tuple[Callable[..., Any], Arguments, Mapping[str, Change]]


def bad_calls(trial: AttentionTrial) -> list[Finding]:
    """G14: padded tensors and packed sequences, if the kernel has a function of these.

    Bad calls are made of a good one without score modifications, in the first configuration of the
    dtype.
    """
    problem, subject = trial.problem, trial.subject
    configs = subject.configs.items()
    usual = [x for x, of in configs if problem.dtype in of.get("dtypes", subject.dtypes)]
    least = subject.seqlen_multiple
    M, N = max(problem.M, 1 if subject.one_query else least), max(problem.N, least)
    good = dataclasses.replace(
        problem, B=_ENTRIES, M=M, N=N, seeds=(), config=usual[0], dirty="zero",
        mask=Mask(causal=subject.always_causal), **_PLAIN,
    )  # fmt: skip
    of_form = OF_PACKED if subject.varlen else OF_PADDED
    forms = [(subject, {**OF_ALL, **of_form})]
    if subject.packed is not None:
        packed = dataclasses.replace(subject, call=subject.packed, varlen=True)
        forms.append((packed, {**OF_ALL, **OF_PACKED}))

    def calls() -> Iterator[_GoodCall]:
        q, k, v, *_ = make(good)
        for form, changes in forms:
            given: dict[str, Any] = {}
            recording = _recording(form.call, ("q", "k", "v"), given)
            dataclasses.replace(form, call=recording, returns_lse=None).run(q, k, v, good)
            yield form.call, given, changes

    return _asked(trial, calls())


def bad_calls_of_caches(trial: CacheTrial) -> list[Finding]:
    """G14: calls with a cache, made of one of the same sizes without score modifications."""
    problem, subject = trial.problem, trial.subject
    attention = dataclasses.replace(problem.attention, **_PLAIN)
    if 0 in (attention.B, attention.M, *problem.seqlens) or not attention.mask.is_plain:
        trial.not_applicable(G14.key, "to empty entries, and masks with a predicate")
        return []
    good = dataclasses.replace(problem, attention=attention)

    def calls() -> Iterator[_GoodCall]:
        assert subject.kvcache is not None
        given: dict[str, Any] = {}
        recording = _recording(subject.kvcache, ("q", "k_cache", "v_cache"), given)
        run_cache(
            dataclasses.replace(subject, kvcache=recording), good,
            make_cache(good, shared_inputs(good)),
        )  # fmt: skip
        yield subject.kvcache, given, {**OF_ALL, **OF_CACHES}

    return _asked(trial, calls())


def _recording(
    call: Callable[..., Any], names: tuple[str, ...], given: dict[str, Any]
) -> Callable[..., torch.Tensor]:
    """Return a function that writes the arguments of a kernel to ``given``, without calling it."""

    @functools.wraps(call)
    def record(*tensors: torch.Tensor, **words: Any) -> torch.Tensor:
        given.update(zip(names, tensors, strict=True), **words)
        q, _, v = tensors
        return q.new_zeros(*q.shape[:-1], v.shape[-1])

    return record


def _asked(trial: Trial, calls: Iterator[_GoodCall]) -> list[Finding]:
    """Return the findings of the declared bad calls, each made of a good call."""
    subject, findings = trial.subject, []
    if not subject.refuses:
        trial.not_applicable(G14.key, f"to {subject.name}, which declares no refuses")
        return []
    for call, given, changes in calls:
        for name in (x for x in subject.refuses if x in changes):
            changed = changes[name](given)
            if changed is None:
                why = "on cpu" if name == "devices differ" else "to a contiguous cache"
                trial.not_applicable(f"{G14.key} {name}", why)
                continue
            trial.applies(f"{G14.key} {name}")
            if fault := _fault(call, {**given, **changed}):
                findings.append(_finding(trial, name, changed, *fault))
    return findings


def _fault(call: Callable[..., Any], given: Arguments) -> tuple[str, str] | None:
    """Make a bad call. Return what it does wrong, and details; None if it is refused.

    Raises:
        SubjectError: The call changes a global setting of PyTorch.
        RefusedError: Other processes hold the memory that it needs, or it needs a GPU.
    """
    tensors = {name: x for name, x in given.items() if isinstance(x, torch.Tensor)}
    before = {name: x.clone() for name, x in tensors.items()}
    # The tensors of queries, keys and values come first.
    names = [*given]
    try:
        with GuardBands(), kept_settings():
            call(*(given[x] for x in names[:3]), **{x: given[x] for x in names[3:]})
            if given["q"].is_cuda:
                torch.cuda.synchronize()
    except SubjectError:
        raise
    except (Exception, SystemExit) as error:
        if reason := no_room(error):
            raise NoRoomError(reason) from error
        if reason := asks_for_a_gpu(error):
            raise CannotRunError(f"{CANNOT_RUN}{reason}") from error
        told = _told(error)
        if isinstance(error, SystemExit):
            return "exits in", told[0]
        if out_of_bounds := [x for x in told if any(word in x for word in _OUT_OF_BOUNDS)]:
            return "leaves its tensors in", out_of_bounds[0]
    else:
        return "returns from", "no exception"
    changed = [name for name, x in tensors.items() if not bool(same_bits(x, before[name]).all())]
    return ("changes inputs in", f"{', '.join(changed)} changed") if changed else None


def _told(error: BaseException) -> list[str]:
    """Return the type and first line of an exception and of its causes, the first cause first."""
    led = _told(error.__cause__) if error.__cause__ is not None else []
    return [*led, f"{type(error).__name__}: {error}".partition("\n")[0]]


def _finding(
    trial: Trial, name: str, changed: Mapping[str, Any], fault: str, details: str
) -> Finding:
    """Return the finding of a bad call that is not refused."""
    device = trial.problem.device
    where = ", ".join(f"{word} is {_described(x, device)}" for word, x in changed.items())
    return Finding(
        guarantee=G14, claim=f"{fault} a call that it declares to refuse: {name}",
        subject=trial.subject.name, output="", where=where, got=math.nan, want=math.nan, bound=0.0,
        bad=0, total=1, places=details, problem=trial.problem,
    )  # fmt: skip


def _described(value: object, device: str) -> str:
    """Describe an argument: a tensor of floats by dtype and shape, others by value."""
    if not isinstance(value, torch.Tensor):
        return repr(value)
    if not value.dtype.is_floating_point:
        return str(value.tolist())
    dtype, place = str(value.dtype).removeprefix("torch."), value.device.type
    return f"{dtype} {tuple(value.shape)}" + f" on {place}" * (place != device)
