"""G16: a call gives the same result in every way in which PyTorch lets it be made."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator

import torch

from fa_verify.oracles.guarantee import G16, I6
from fa_verify.oracles.outputs import Outputs
from fa_verify.properties.comparison.agreement import agree
from fa_verify.properties.comparison.compare import Finding
from fa_verify.properties.execution.trial import (
    AttentionTrial,
    SubjectError,
    open_call,
    run_gradients,
    run_subject,
)
from fa_verify.properties.inputs.tensors import Inputs, make
from fa_verify.properties.subjects.refusals import RefusedError

__all__ = ["WAYS", "one_way"]


# A kernel run in another way: the results, and the guarantee that promises their bits.
_Runs = Iterator[tuple[Outputs[torch.Tensor | None], str]]
_GRADIENTS = ("dq", "dk", "dv")


def _without_gradients(trial: AttentionTrial) -> _Runs:
    """Yield runs of the forward alone, of tensors that require gradients."""
    for mode in (torch.no_grad, torch.inference_mode):
        with open_call(trial.subject, trial.problem, trial.inputs, mode) as call:
            got = call.forward
        yield got, I6.key


def _second_backward(trial: AttentionTrial) -> _Runs:
    """Yield two backwards of one forward, each with the results of the forward after it."""
    with open_call(trial.subject, trial.problem, trial.inputs) as call:
        runs = [call.backward(retain_graph=True) for _ in range(2)]
    yield from ((got, G16.key) for got in runs)


def _some_gradients(trial: AttentionTrial) -> _Runs:
    """Yield a backward of some gradients, which the seed chooses."""
    sets = [x for size in (1, 2) for x in itertools.combinations(_GRADIENTS, size)]
    # The remainder chooses the way.
    wanted = sets[trial.problem.seed // len(WAYS) % len(sets)]
    found = run_gradients(trial.subject, trial.problem, trial.inputs, wanted)
    yield Outputs(None, None, *(found.get(name) for name in _GRADIENTS)), G16.key


def _change(inputs: Inputs) -> list[bool]:
    """Change the values of q, k, v and dout in place; return which ones could be changed.

    Heads that share their memory cannot be written apart.
    """
    own = [0 not in x.stride() for x in inputs.tensors]
    for x in itertools.compress(inputs.tensors, own):
        x.mul_(-0.5)
    return own


def _changed_in_place(trial: AttentionTrial) -> _Runs:
    """Yield a call whose inputs held other values, at the same addresses, in the call before."""
    given = make(trial.problem)
    before = [x.clone() for x in given.tensors]
    own = _change(given)
    run_subject(trial.subject, trial.problem, given)
    for x, old, is_changed in zip(given.tensors, before, own, strict=True):
        if is_changed:
            x.copy_(old)
    yield run_subject(trial.subject, trial.problem, given), G16.key


def _interleaved(trial: AttentionTrial) -> _Runs:
    """Yield the backward of a call, after forward and backward of another one."""
    subject, problem, inputs = trial.subject, trial.problem, trial.inputs
    other = make(problem)
    _change(other)
    with open_call(subject, problem, inputs) as first:
        with open_call(subject, problem, other) as second:
            second.backward()
        got = first.backward()
    yield got, G16.key


def _after_an_exception(trial: AttentionTrial) -> _Runs:
    """Yield a call after one that raises, whose k has another head_dim than its q."""
    inputs = trial.inputs
    bad = inputs._replace(k=torch.cat((inputs.k, inputs.k[..., :1]), -1))
    with contextlib.suppress(SubjectError, RefusedError):
        run_subject(trial.subject, trial.problem, bad)
    yield run_subject(trial.subject, trial.problem, inputs), G16.key


_Way = Callable[[AttentionTrial], _Runs]
_OF_FORWARD: dict[str, _Way] = {
    "after a call with other values at the same addresses": _changed_in_place,
    "after a call that raises": _after_an_exception,
}
_OF_BACKWARD: dict[str, _Way] = {
    "without gradients, for inputs that require them": _without_gradients,
    "in two backwards of one forward": _second_backward,
    "in a backward of some gradients alone": _some_gradients,
    "with another call between its forward and backward": _interleaved,
}
WAYS = (*_OF_FORWARD, *_OF_BACKWARD)


def one_way(trial: AttentionTrial) -> list[Finding]:
    """G16: one way of making the call, which the seed chooses, gives the same result."""
    ways = {**_OF_FORWARD, **(_OF_BACKWARD if trial.subject.backward else {})}
    words = [*ways][trial.problem.seed % len(ways)]
    try:
        for got, promise in ways[words](trial):
            promised = trial.subject.promises(promise, trial.problem.config)
            findings = agree(trial, got, G16, f"differs {words}", promised=promised)
            if findings:
                return findings
    except RefusedError as refusal:
        trial.not_applicable(f"{G16.key} {words}", f"to {trial.subject.name}: {refusal}")
    else:
        trial.applies(f"{G16.key} {words}")
    return []
