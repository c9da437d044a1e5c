"""G15: results do not depend on the stream, on work beside the call, or on a CUDA graph.

These checks need a GPU. Where a subject or a problem does not allow one, it has no findings.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator

import torch
from torch import cuda

from fa_verify.oracles.guarantee import G15
from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.masks.prefix_lm import PrefixLM
from fa_verify.oracles.outputs import Outputs
from fa_verify.oracles.problem import Problem
from fa_verify.properties.guarantees.accuracy import accuracy
from fa_verify.properties.guarantees.agreement import agree
from fa_verify.properties.guarantees.compare import Finding
from fa_verify.properties.inputs.tensors import Inputs, make
from fa_verify.properties.kernels.refusals import RefusedError
from fa_verify.properties.kernels.subject import Subject
from fa_verify.properties.running.trial import (
    AttentionTrial,
    SubjectError,
    run_subject,
    run_trial,
)

__all__ = [
    "beside_other_kernels",
    "captured",
    "first_captured",
    "on_a_side_stream",
    "on_another_device",
    "on_two_streams",
    "overwrite_free_memory",
    "replayed",
]

# Calls between two replays: more than a cache of a kernel is likely to hold.
_CALLS = 1100
_LENGTHS = 300
_MASKS = 70
# Clock cycles of a producer: 10 ms, much longer than a call takes to launch.
_CYCLES = 20_000_000
_ROUNDS = 10
# Products of matrices of this size compete for the multiprocessors: 0.3 ms each on an H200.
_SIDE, _PRODUCTS = 4096, 8
# Tensors that overwrite freed memory, each as large as the smallest block of the allocator.
_BLOCKS = 4096

_REPLAYED = "replayed in a CUDA graph differs from a call"
_Run = Callable[[], Outputs[torch.Tensor | None]]
# No call may wait for the GPU: a capture forbids it, and it would order the streams.
_run = functools.partial(run_subject, asynchronous=True)


def replayed(trial: AttentionTrial) -> list[Finding]:
    """A replay gives what a call on the same contents gives, now and after many other calls."""
    subject, problem = trial.subject, trial.problem
    if not subject.cuda_graphs or problem.seeds or "expanded" in problem.layouts:
        return []
    other = run_trial(subject, dataclasses.replace(problem, seed=problem.seed ^ 1))
    buffers = make(problem)
    try:
        replay, found = captured(lambda: _run(subject, problem, buffers))
    except SubjectError as error:
        raise SubjectError(
            f"a call cannot be captured in a CUDA graph: {error}; a kernel that does not support "
            "graphs declares cuda_graphs=False"
        ) from error
    for of in (other, trial):
        if of is None:
            continue
        _copy(of.inputs, buffers)
        replay()
        if findings := agree(of, found, G15, _REPLAYED):
            return findings
    calls = _call_others(trial)
    overwrite_free_memory()
    replay()
    return agree(trial, found, G15, f"{_REPLAYED} after {calls} others")


def first_captured(trial: AttentionTrial) -> list[Finding]:
    """A captured call whose mask is new to its configuration works, or raises and leaves no trace.

    Calls with fewer rows come first, so that all kernels are compiled.
    """
    subject, problem = trial.subject, trial.problem
    fresh = _in_another_config(subject, problem)
    if not subject.cuda_graphs or fresh is None:
        return []
    inputs = make(fresh)
    replay = None
    try:
        replay, found = captured(lambda: _run(subject, fresh, inputs), warm_ups=0)
    except SubjectError:
        cuda.synchronize()
    after = run_trial(subject, fresh)
    if after is None:
        return []
    if findings := accuracy(after):
        return [
            _renamed(x, "after a first call in a CUDA graph leaves the bound") for x in findings
        ]
    if replay is None:
        return []
    replay()
    return agree(after, found, G15, _REPLAYED)


def on_a_side_stream(trial: AttentionTrial) -> list[Finding]:
    """A call on a side stream waits for what the stream computes before, and for nothing else."""
    subject, problem = trial.subject, trial.problem
    if "expanded" in problem.layouts:
        return []
    buffers = make(problem)
    for x in buffers:
        if x is not None:
            x.fill_(torch.nan)
    cuda.synchronize()
    with cuda.stream(cuda.Stream()):
        cuda._sleep(_CYCLES)
        _copy(trial.inputs, buffers)
        found = _run(subject, problem, buffers)
    cuda.synchronize()
    claim = "on a side stream whose producer still runs differs from a call on the default stream"
    return agree(trial, found, G15, claim)


def on_two_streams(trial: AttentionTrial) -> list[Finding]:
    """Calls on two streams do not disturb each other, nor a second one what a first one left."""
    subject, problem = trial.subject, trial.problem
    other = None
    if not problem.seeds:
        other = run_trial(subject, dataclasses.replace(problem, seed=problem.seed ^ 1))
    both = [trial, trial if other is None else other]
    streams = [cuda.Stream() for _ in both]
    fresh = _in_another_config(subject, problem)
    made, founds = None if fresh is None else make(fresh), []
    cuda.synchronize()
    if fresh is not None and made is not None:
        for stream in streams:
            with cuda.stream(stream):
                if stream is streams[0]:
                    cuda._sleep(_CYCLES)
                founds.append(_run(subject, fresh, made))
        cuda.synchronize()
        if (after := run_trial(subject, fresh)) is not None:
            claim = "on a stream that does not wait for the first call, on another, differs"
            if findings := agree(after, founds[1], G15, claim):
                return findings
    for _ in range(_ROUNDS):
        founds = []
        for of, stream in zip(both, streams, strict=True):
            with cuda.stream(stream):
                founds.append(_run(subject, of.problem, of.inputs))
        cuda.synchronize()
        for of, found in zip(both, founds, strict=True):
            if findings := agree(of, found, G15, "beside a call on another stream differs"):
                return findings
    return []


def beside_other_kernels(trial: AttentionTrial) -> list[Finding]:
    """Other kernels on the multiprocessors change nothing, and no program waits for ever."""
    left = torch.ones(_SIDE, _SIDE, dtype=torch.bfloat16, device=trial.problem.device)
    streams = [cuda.Stream() for _ in range(2)]
    cuda.synchronize()
    for _ in range(_ROUNDS):
        for stream in streams:
            with cuda.stream(stream):
                for _ in range(_PRODUCTS):
                    left @ left
        found = _run(trial.subject, trial.problem, trial.inputs)
        claim = "beside kernels that compete for the multiprocessors differs"
        if findings := agree(trial, found, G15, claim):
            return findings
    cuda.synchronize()
    return []


def on_another_device(trial: AttentionTrial) -> list[Finding]:
    """A call gives the same while another GPU is current."""
    if cuda.device_count() < 2:
        return []
    here = trial.inputs.q.device.index or 0
    with cuda.device((here + 1) % cuda.device_count()):
        found = _run(trial.subject, trial.problem, trial.inputs)
    return agree(trial, found, G15, "while another GPU is current differs")


def captured(
    run: _Run, warm_ups: int = 2
) -> tuple[Callable[[], None], Outputs[torch.Tensor | None]]:
    """Capture a call in a CUDA graph; return its replay, and the outputs that it writes."""
    stream = cuda.Stream()
    stream.wait_stream(cuda.current_stream())
    with cuda.stream(stream):
        for _ in range(warm_ups):
            run()
    cuda.current_stream().wait_stream(stream)
    graph = cuda.CUDAGraph()
    try:
        with cuda.graph(graph):
            found = run()
    except (RefusedError, SubjectError):
        raise
    except Exception as error:  # the capture ends with an error of its own
        raise SubjectError(f"{type(error).__name__}: {error}") from error
    return graph.replay, found


def overwrite_free_memory() -> None:
    """Overwrite the memory of small tensors that have been freed."""
    held = [torch.full((128,), 7, dtype=torch.int32, device="cuda") for _ in range(_BLOCKS)]
    del held


def _copy(inputs: Inputs, into: Inputs) -> None:
    for x, buffer in zip(inputs, into, strict=True):
        if x is not None and buffer is not None:
            buffer.copy_(x)


def _in_another_config(subject: Subject, problem: Problem) -> Problem | None:
    """Return the problem in a configuration that no call has had, with compiled kernels.

    A call with one row less compiles them. None if its mask has no predicate, for which a kernel
    may keep tensors, or if the subject has no other configuration.
    """
    if problem.mask.is_plain:
        return None
    for config in subject.configs:
        fresh = dataclasses.replace(problem, config=config)
        shorter = dataclasses.replace(fresh, M=problem.M - 1)
        if config == problem.config or subject.excludes(fresh) or subject.excludes(shorter):
            continue
        _run(subject, shorter, make(shorter))
        return fresh
    return None


def _call_others(trial: AttentionTrial) -> int:
    """Call the forward with other lengths and masks; return the number of calls."""
    (q, _, v, *_), calls = trial.inputs, 0
    keys, values = (x.new_zeros(1, 1, _CALLS, x.shape[3]) for x in (q, v))
    for other in _others(trial.subject, trial.problem):
        if trial.subject.excludes(other):
            continue
        M, N = other.M, other.N
        with torch.no_grad():
            trial.subject.run(keys[:, :, :M], keys[:, :, :N], values[:, :, :N], other)
        calls += 1
    return calls


def _others(subject: Subject, problem: Problem) -> Iterator[Problem]:
    """Yield problems of one head with lengths that differ, if the subject takes lengths."""
    plain = Problem(
        D=problem.D, Dv=problem.Dv, dtype=problem.dtype, config=problem.config,
        device=problem.device,
    )  # fmt: skip
    if "padding" not in subject.masks:
        # A library may build a kernel for each shape.
        yield from itertools.repeat(dataclasses.replace(plain, M=128, N=128), _MASKS)
        return
    multiple = subject.seqlen_multiple
    for i in range(1, 1 + _CALLS // multiple):
        yield dataclasses.replace(plain, M=i * multiple, N=i * multiple)
    for i in range(_LENGTHS):
        mask = Mask(seqlens_q=(i,), seqlens_k=(_LENGTHS - i,))
        yield dataclasses.replace(plain, M=_LENGTHS, N=_LENGTHS, mask=mask)
    if not problem.mask.is_plain:
        for i in range(_MASKS):
            yield dataclasses.replace(plain, M=128, N=128, mask=PrefixLM(prefix=i))


def _renamed(finding: Finding, claim: str) -> Finding:
    return dataclasses.replace(finding, guarantee=G15, claim=claim)
