"""G16: a call gives the same result in every way in which PyTorch lets it be made."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from fa_verify.oracles.formats.element import format_of
from fa_verify.oracles.guarantee import G16, I6
from fa_verify.oracles.masks.mask import Mask
from fa_verify.properties.guarantees.agreement import same_or_inside
from fa_verify.properties.guarantees.compare import Finding
from fa_verify.properties.inputs.caches import CacheInputs, make_cache, shared_inputs
from fa_verify.properties.inputs.quantised import QuantisedInputs, make_quantised
from fa_verify.properties.inputs.states import make_states
from fa_verify.properties.inputs.tensors import make
from fa_verify.properties.kernels.packing import with_kept_offsets
from fa_verify.properties.kernels.refusals import RefusedError
from fa_verify.properties.kernels.ways import OF_BACKWARD, OF_FORWARD, way_of, ways_of
from fa_verify.properties.kinds.caches import CacheTrial
from fa_verify.properties.kinds.merges import Convention, MergeTrial
from fa_verify.properties.kinds.quantised import QuantisedTrial
from fa_verify.properties.running.taking_turns import in_turns
from fa_verify.properties.running.trial import (
    AttentionTrial,
    OpenCall,
    SubjectError,
    Trial,
    attention_call,
    cache_call,
    merge_call,
    quantised_call,
    running,
)

__all__ = ["one_way"]

_Results = Mapping[str, torch.Tensor]
# A kernel run in another way: the results, the guarantee that promises their bits, and words for
# this run, if the way makes others too.
_Runs = Iterator[tuple[_Results, str] | tuple[_Results, str, str]]
# The message of PyTorch for a backward that needs a tensor changed in place.
_CHANGED = "modified by an inplace operation"


@dataclass(frozen=True)
class _Calls:
    """The functions that make the calls of a trial; ``inputs`` are named tuples of tensors.

    Args:
        trial: The trial.
        given: Returns inputs to be read.
        make: Returns inputs in memory of their own.
        other: Returns other values of inputs, in other memory.
        bad: Returns inputs that a call has to refuse, and that are safe to read.
        call: Makes a call of inputs: as ``attention_call``, from the wanted gradients on.
        gradients: The names of the gradients.
        fixed: Returns those of the inputs that a call must not write to.
        in_place: Make the calls before and after a change in place, if not ``call`` does: lengths
            of sequences are no inputs.
    """

    trial: Trial
    given: Callable[[], Any]
    make: Callable[[], Any]
    other: Callable[[Any], Any]
    bad: Callable[[Any], Any]
    call: Callable[..., OpenCall]
    gradients: tuple[str, ...] = ()
    fixed: Callable[[Any], Any] = lambda inputs: inputs
    in_place: tuple[Callable[..., OpenCall], Callable[..., OpenCall]] | None = None

    def changed(self) -> Any:
        """Return inputs with other values and the same strides."""
        inputs = self.make()
        _write(inputs, self.other(inputs))
        return inputs

    def run(self, inputs: Any, **how: Any) -> _Results:
        """Make a call, forward and backward."""
        with self.open(inputs, **how) as call:
            return call.backward()

    @contextlib.contextmanager
    def open(
        self,
        inputs: Any,
        mode: Callable[[], AbstractContextManager[Any]] = nullcontext,
        wanted: tuple[str, ...] | None = None,
        **how: Any,
    ) -> Iterator[OpenCall]:
        """Run the forward of a call, whose backward may be called inside of the block."""
        with running(self.fixed(inputs)):
            with mode():
                call = self.call(inputs, self.gradients if wanted is None else wanted, **how)
            yield call


def _write(inputs: Any, values: Any) -> None:
    """Write values to the memory of inputs.

    Heads that share their memory cannot be written apart.
    """
    for x, value in zip(inputs, values, strict=True):
        if x is not None and x is not value and 0 not in x.stride():
            x.copy_(value)


def _changed_in_place(calls: _Calls) -> _Runs:
    """Yield calls whose inputs held other values, at the same addresses, in the call before.

    Without gradients they are the same objects, too.
    """
    before, after = calls.in_place or (calls.call, calls.call)
    for wanted in dict.fromkeys((calls.gradients, ())):
        inputs = calls.changed()
        dataclasses.replace(calls, call=before).run(inputs, wanted=wanted)
        _write(inputs, calls.make())
        yield dataclasses.replace(calls, call=after).run(inputs, wanted=wanted), G16.key


def _after_an_exception(calls: _Calls) -> _Runs:
    """Yield a call after one that raises."""
    with contextlib.suppress(SubjectError, RefusedError):
        calls.run(calls.bad(calls.given()))
    yield calls.run(calls.given()), G16.key


def _interleaved(calls: _Calls) -> _Runs:
    """Yield the backward of a call, and its results after that, after another call.

    Then the gradients of a call whose out the caller has changed in place, as ``out += x`` does. A
    backward that needs out may refuse.
    """
    with calls.open(calls.given()) as first:
        calls.run(calls.changed())
        got = first.backward()
    yield got, G16.key
    if not calls.gradients:
        return
    try:
        with calls.open(calls.given()) as call:
            try:
                with torch.no_grad():
                    call.results["out"].mul_(2)
            except RuntimeError:  # a view that a kernel made is not to be changed
                return
            got = call.backward()
    except SubjectError as error:
        if _CHANGED not in str(error):
            raise
        return
    # A merge of no parts has none.
    gradients = {name: x for name, x in got.items() if name in calls.gradients}
    yield gradients, G16.key, "in a backward after out was changed in place"


def _in_two_threads(calls: _Calls) -> _Runs:
    """Yield a call during which another thread makes another call."""
    inputs, others = calls.given(), calls.changed()
    with running(calls.fixed(inputs)):
        got = in_turns(
            lambda: calls.call(inputs, calls.gradients).backward(),
            lambda: calls.call(others, calls.gradients).backward(),
        )
    yield got, G16.key


def _without_gradients(calls: _Calls) -> _Runs:
    """Yield runs of the forward alone, of tensors that require gradients, after the next one."""
    for mode in (torch.no_grad, torch.inference_mode):
        with calls.open(calls.given(), mode) as call:
            got = call.forward
        # Results may lie in memory that every call of a shape writes to.
        with calls.open(calls.changed(), mode):
            pass
        yield got, I6.key if calls.trial.problem.kind == "attention" else G16.key


def _second_backward(calls: _Calls) -> _Runs:
    """Yield two backwards of one forward, each with the results of the forward after it.

    Then one in another thread than the forward.
    """
    with calls.open(calls.given()) as call:
        runs = [call.backward(retain_graph=True) for _ in range(2)]
    yield from ((got, G16.key) for got in runs)
    with calls.open(calls.given()) as call, ThreadPoolExecutor(1) as thread:
        got = thread.submit(call.backward).result()
    yield got, G16.key, "in a backward in another thread"


def _some_gradients(calls: _Calls) -> _Runs:
    """Yield a backward of one gradient, which the seed chooses, and one of all others."""
    names = calls.gradients
    _, number = way_of(calls.trial.problem.seed, _ways(calls.trial))
    one = names[number % len(names)]
    for wanted in ((one,), tuple(x for x in names if x != one)):
        yield calls.run(calls.given(), wanted=wanted), G16.key


def _recomputed(calls: _Calls) -> _Runs:
    """Yield a call whose backward computes the forward again, as ``checkpoint`` does it."""
    through = functools.partial(checkpoint, use_reentrant=False)
    yield calls.run(calls.given(), through=through), G16.key


_WAYS = dict(
    zip(
        (*OF_FORWARD, *OF_BACKWARD),
        (
            _changed_in_place, _after_an_exception, _interleaved, _in_two_threads,
            _without_gradients, _second_backward, _some_gradients, _recomputed,
        ),
        strict=True,
    )
)  # fmt: skip


def _ways(trial: Trial) -> tuple[str, ...]:
    return ways_of(trial.subject, trial.problem.kind)


def _of_attention(trial: AttentionTrial) -> _Calls:
    subject, problem = trial.subject, trial.problem
    # Other lengths of the same number, sum and maximum.
    before = dataclasses.replace(problem, mask=_rotated(problem.mask))
    if subject.varlen:
        subject = dataclasses.replace(subject, call=with_kept_offsets(subject.call))
    return _Calls(
        trial,
        given=lambda: trial.inputs,
        make=lambda: make(problem),
        other=lambda x: x._replace(q=-x.q / 2, k=-x.k / 2, v=-x.v / 2, dout=-x.dout / 2),
        # k has another head_dim than q.
        bad=lambda x: x._replace(k=torch.cat((x.k, x.k[..., :1]), -1)),
        call=functools.partial(attention_call, trial.subject, problem),
        gradients=("dq", "dk", "dv") if subject.backward else (),
        in_place=(
            functools.partial(attention_call, subject, before),
            functools.partial(attention_call, subject, problem),
        ),
    )


def _rotated(mask: Mask) -> Mask:
    """Return a mask with the lengths of the first entry last."""
    rows, keys = (x and (*x[1:], x[0]) for x in (mask.seqlens_q, mask.seqlens_k))
    return dataclasses.replace(mask, seqlens_q=rows, seqlens_k=keys)


def _of_merges(trial: MergeTrial) -> _Calls:
    subject, problem = trial.subject, trial.problem
    convention = Convention.of(subject)

    def inputs() -> Any:
        states = make_states(problem)
        return states._replace(lses=convention.written(states.lses))

    def call(states: Any, wanted: tuple[str, ...], **how: Any) -> OpenCall:
        return merge_call(subject, states, wanted if states.outs.numel() else (), **how)

    return _Calls(
        trial,
        given=lambda: trial.inputs,
        make=inputs,
        # An infinite lse, that of an empty part, stays as it is.
        other=lambda x: type(x)(-x.outs / 2, x.lses / 2, -x.dout / 2, -x.dlse / 2),
        # There are more lses than outs.
        bad=lambda x: x._replace(lses=torch.cat((x.lses, x.lses, x.lses[:1]))),
        call=call,
        gradients=("douts", "dlses") if subject.backward else (),
    )


def _of_caches(trial: CacheTrial) -> _Calls:
    subject, problem = trial.subject, trial.problem
    least = 1 if subject.m_gt_n else max(1, problem.attention.M - problem.new)

    def other(x: CacheInputs) -> CacheInputs:
        """Return fewer keys, of other values, in other places."""
        shorter = torch.minimum(x.cache_seqlens, (x.cache_seqlens // 2).clamp(min=least))
        return x._replace(
            q=-x.q / 2, k_cache=_others(x.k_cache), v_cache=_others(x.v_cache),
            cache_seqlens=shorter,
            k=None if x.k is None else -x.k / 2, v=None if x.v is None else -x.v / 2,
            cache_batch_idx=None if x.cache_batch_idx is None else x.cache_batch_idx.flip(0),
        )  # fmt: skip

    def bad(x: CacheInputs) -> CacheInputs:
        """Return keys of another head_dim than the queries'."""
        k = None if x.k is None else torch.cat((x.k, x.k[..., :1]), -1)
        codes = x.k_cache if format_of(x.k_cache.dtype) is None else x.k_cache.view(torch.uint8)
        wider = torch.cat((codes, codes[..., :1]), -1).view(x.k_cache.dtype)
        return x._replace(k=k, k_cache=wider)

    return _Calls(
        trial,
        given=lambda: make_cache(problem, trial.inputs),
        make=lambda: make_cache(problem, shared_inputs(problem)),
        other=other,
        bad=bad,
        call=lambda x, wanted: cache_call(subject, problem.attention, x),
        fixed=lambda x: x.without_caches,
    )


def _others(cache: torch.Tensor) -> torch.Tensor:
    """Return other numbers in the place of those of a cache; codes change their first bit."""
    if format_of(cache.dtype) is None:
        return -cache / 2
    return (cache.view(torch.uint8) ^ 0x80).view(cache.dtype)


def _of_codes(trial: QuantisedTrial) -> _Calls:
    subject, problem = trial.subject, trial.problem

    def other(x: QuantisedInputs) -> QuantisedInputs:
        """Return codes of other tokens, and scales twice as large."""
        # PyTorch flips no codes of 8 bits.
        q, k, v = (
            y.index_select(2, torch.arange(y.shape[2], device=y.device).flip(0)) for y in x[:3]
        )
        return x._replace(
            q=q, k=k, v=v, q_scale=2 * x.q_scale, k_scale=x.k_scale / 8,
            v_scale=None if x.v_scale is None else 2 * x.v_scale,
        )  # fmt: skip

    return _Calls(
        trial,
        given=lambda: trial.inputs,
        make=lambda: make_quantised(problem),
        other=other,
        # k has another head_dim than q.
        bad=lambda x: x._replace(k=torch.cat((x.k, x.k[..., :1]), -1)),
        call=lambda x, wanted: quantised_call(subject, problem, x),
    )


_KINDS: dict[str, Callable[[Any], _Calls]] = {
    "attention": _of_attention, "merge": _of_merges, "cache": _of_caches, "quantised": _of_codes,
}  # fmt: skip


def one_way(trial: AttentionTrial | MergeTrial | CacheTrial | QuantisedTrial) -> list[Finding]:
    """G16: one way of making the call, which the seed chooses, gives the same result."""
    subject, kind = trial.subject, trial.problem.kind
    words, _ = way_of(trial.problem.seed, _ways(trial))
    # A kernel may write the next results where those of the trial are.
    got: Any = trial.got
    copies = (None if x is None else x.clone() for x in got)
    got = tuple(copies) if kind in ("cache", "quantised") else type(got)(*copies)
    trial = dataclasses.replace(trial, got=got)
    try:
        for again, promise, *own in _WAYS[words](_KINDS[kind](trial)):
            promised = subject.promises(promise, trial.problem.config)
            results = dict(again)
            if kind == "merge" and "lse" in results:
                results["lse"] = Convention.of(subject).natural(results["lse"])
            if kind == "merge":
                promised = tuple(results) if promised else ()
            claim = f"differs {own[0] if own else words}"
            findings = same_or_inside(trial, results, G16, claim, promised=promised)
            if findings:
                return findings
    except SubjectError as error:
        raised = Finding.of_exception(error, subject, trial.problem)
        return [dataclasses.replace(raised, guarantee=G16, claim=f"fails {words}")]
    except RefusedError as refusal:
        trial.not_applicable(f"{G16.key} {words}", f"to {subject.name}: {refusal}")
    else:
        trial.applies(f"{G16.key} {words}")
    return []
