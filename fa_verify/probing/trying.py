"""Run a kernel, without its declarations, on problems and tensors of a probe."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from fa_verify.oracles.outputs import Outputs
from fa_verify.oracles.problem import Problem
from fa_verify.oracles.reference import torch_reference
from fa_verify.oracles.reference.torch_reference import DenseMask
from fa_verify.properties.inputs.tensors import Inputs, make
from fa_verify.properties.kernels.declared import declared_by
from fa_verify.properties.kernels.packing import OF_VARLEN
from fa_verify.properties.kernels.subject import Subject
from fa_verify.properties.kernels.tutorial_call import TutorialCall, takes
from fa_verify.properties.kernels.vocabulary import SCORE_MODS
from fa_verify.properties.running.guard_bands import GuardBands
from fa_verify.properties.running.trial import (
    ChangedInputError,
    SubjectError,
    WrongFormError,
    run_subject,
)

__all__ = ["Tried", "attempt", "declares", "stripped", "watched"]

# An error of this share of the largest value shows another computation, not another rounding: P
# rounded to bf16 loses less than 2**-8.
_COARSE = 2.0**-5
# The inputs are N(0, 1): gradients that cancel to 0 have rounding errors of larger terms.
_LEAST = 0.25
_DEFECTS = (WrongFormError, ChangedInputError)
# An exception of the repaired interpreter, which wraps it.
_OUT_OF_BOUNDS = "OutOfBoundsError"
_LONGEST = 160
# Limits the time of each call, where ``watched`` has set it.
_watching: Callable[[Problem], AbstractContextManager[object]] = nullcontext


@dataclass(frozen=True)
class Tried:
    """The results of a kernel on one problem.

    Args:
        problem: The problem.
        inputs: Its tensors.
        got: The outputs, without gradients if they were not wanted; None if the kernel raised.
        message: The exception, with its type; empty if the kernel returned.
        refused: Whether the exception says that the kernel does not take the problem. An output of
            a wrong form, an input that was changed or an access out of bounds is a defect, which a
            probe leaves to the checks.
        seen: The pairs that the kernel attends to, where its convention differs from the
            problem's mask.
    """

    problem: Problem
    inputs: Inputs
    got: Outputs[torch.Tensor | None] | None
    message: str = ""
    refused: bool = False
    seen: DenseMask | None = None

    @property
    def error(self) -> str:
        """The exception in one line; empty if the kernel returned."""
        return _line(self.message)

    @property
    def replay(self) -> str:
        """The problem, as one line of JSON."""
        return self.problem.to_json()

    @cached_property
    def _want(self) -> Outputs[torch.Tensor]:
        return self.reference(self.seen or self.problem.mask, self.problem.scale)

    def reference(self, mask: DenseMask, scale: float) -> Outputs[torch.Tensor]:
        """Return the outputs of the oracle with another mask or scale."""
        softcap = self.problem.softcap
        return torch_reference.attention(*self.inputs, mask=mask, sm_scale=scale, softcap=softcap)

    def resembles(self, want: torch.Tensor, name: str = "out", rows: slice = slice(None)) -> bool:
        """Return whether some rows of an output are roughly as wanted, NaN excluded."""
        got = None if self.got is None else getattr(self.got, name)
        if got is None or got.shape != want.shape:
            return False
        got, want = got[:, :, rows], want[:, :, rows]
        if not want.numel():
            return True
        largest = want[want.isfinite()].abs().amax().item() if want.isfinite().any() else 0.0
        error = (got.double() - want).masked_fill(got.double() == want, 0.0)
        return bool((error.abs() <= _COARSE * max(largest, _LEAST)).all())

    def error_of_out(self) -> float | None:
        """Return the largest error of out in shares of its largest value; None without one."""
        if self.got is None or self.got.out is None or self.got.out.shape != self._want.out.shape:
            return None
        largest = self._want.out.abs().amax().item() if self._want.out.numel() else 0.0
        error = (self.got.out.double() - self._want.out).abs().amax().item() if largest else 0.0
        return error / largest if largest else None

    def wrong(self) -> str:
        """Return which outputs differ from the oracle's, as words; empty if none does."""
        assert self.got is not None
        names = [
            name
            for name, value in self.got._asdict().items()
            if value is not None and name != "lse"
            and not self.resembles(getattr(self._want, name), name)
        ]  # fmt: skip
        return " and ".join(names)


def stripped(subject: Subject) -> Subject:
    """Return a subject without its declarations, except for those that its signature implies."""
    call, implied = subject.call, {}
    if isinstance(call, TutorialCall):
        implied = call.declarations(subject.name, {})
    elif subject.varlen:
        implied = {"varlen": True, **OF_VARLEN}
    if missing := [word for word in ("mask", "sm_scale") if not takes(call, word)]:
        call = functools.partial(_called_without, call, missing)
    return Subject(
        name=subject.name, call=call, source=subject.source, takes=subject.takes,
        score_mods=SCORE_MODS, lse_grad=True, **implied,
    )  # fmt: skip


def _called_without(
    call: Callable[..., Any], missing: Sequence[str], *tensors: torch.Tensor, **given: Any
) -> Any:
    """Call a kernel without the keywords that its signature lacks, as with its declarations."""
    return call(*tensors, **{word: x for word, x in given.items() if word not in missing})


def declares(subject: Subject) -> bool:
    """Return whether a subject has declarations beyond those that its signature implies."""
    call = subject.call
    if declared_by(call.owner if isinstance(call, TutorialCall) else call, subject.name):
        return True
    implied = call.declarations(subject.name, {}) if isinstance(call, TutorialCall) else {}
    words = {word: x for word, x in subject.declarations().items() if word != "takes"}
    return any(implied.get(word) != value for word, value in words.items())


@contextmanager
def watched(watching: Callable[[Problem], AbstractContextManager[object]]) -> Iterator[None]:
    """Enter the context that ``watching`` returns for each call that the block probes."""
    global _watching
    _watching = watching
    try:
        yield
    finally:
        _watching = nullcontext


def attempt(
    subject: Subject,
    problem: Problem,
    inputs: Inputs | None = None,
    *,
    backward: bool = True,
    guarded: bool = True,
) -> Tried:
    """Run a kernel on a problem, or on other tensors of its shapes, and note how it ended.

    ``guarded`` surrounds allocations on a CPU with guard bands, which takes longer than many calls.
    """
    subject = dataclasses.replace(subject, backward=backward)
    inputs = make(problem) if inputs is None else inputs
    try:
        guards = guarded and problem.device == "cpu"
        with _watching(problem), GuardBands() if guards else nullcontext():
            return Tried(problem, inputs, run_subject(subject, problem, inputs))
    except NotImplementedError as reason:
        return Tried(problem, inputs, None, f"NotImplementedError: {reason}", True)
    except SubjectError as reason:
        message = str(reason)
        is_defect = isinstance(reason, _DEFECTS) or _OUT_OF_BOUNDS in message
        return Tried(problem, inputs, None, message, not is_defect)


def _line(text: str) -> str:
    """Shorten a message to one line."""
    text = " ".join(text.split())
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."
