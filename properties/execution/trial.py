"""One problem through a subject and through the oracle: everything that a check looks at."""

from __future__ import annotations

import sysconfig
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from fa_verify.oracles.bounds import error_model
from fa_verify.oracles.bounds.error_model import Judgement
from fa_verify.oracles.bounds.variance import Variances, variances
from fa_verify.oracles.outputs import Outputs
from fa_verify.oracles.problem import Problem
from fa_verify.oracles.reference import torch_reference
from fa_verify.properties.execution.guard_bands import GuardBands
from fa_verify.properties.inputs.tensors import Inputs, make
from fa_verify.properties.subjects.subject import Subject

__all__ = [
    "PlannedRun",
    "SubjectError",
    "Trial",
    "plan_run",
    "run_bias_gradient",
    "run_pooled",
    "run_subject",
    "run_trial",
]

_SUITE = Path(__file__).parents[2]
_LIBRARIES = (
    str(_SUITE / "properties"),
    str(_SUITE / "simulator"),
    sysconfig.get_path("purelib"),
    sysconfig.get_path("stdlib"),
)


@dataclass(frozen=True)
class Trial:
    """A judged run.

    Args:
        subject: What ran.
        problem: What it ran on.
        inputs: The tensors it was given.
        got: Its outputs, detached; lse is None where it returns none.
        want: The float64 oracle's.
        judgement: Bound, sums of |terms| and range of the problem.
    """

    subject: Subject
    problem: Problem
    inputs: Inputs
    got: Outputs[torch.Tensor | None]
    want: Outputs[torch.Tensor]
    judgement: Judgement

    @cached_property
    def variances(self) -> Variances:
        """How far roundings that are independent let the outputs stray."""
        return variances(
            *self.inputs,
            mask=self.problem.mask,
            sm_scale=self.problem.scale,
            in_dtype=self.problem.dtype,
            numerics=self.subject.numerics_of(self.problem),
            softcap=self.problem.softcap,
        )


class SubjectError(Exception):
    """The subject raised something else than NotImplementedError, or broke its form."""


@contextmanager
def _poisoned_allocations() -> Iterator[None]:
    """``torch.empty`` gives NaN inside, so that an element nobody writes shows.

    Torch fills it in its deterministic mode alone. That mode only warns here, so that a library
    runs the algorithm that its users run; warnings are ignored: results are judged, not words.
    """
    fill: Any = torch.utils.deterministic  # its attribute is not in the stubs
    mode = torch.get_deterministic_debug_mode()
    fills = fill.fill_uninitialized_memory
    torch.set_deterministic_debug_mode("warn")
    fill.fill_uninitialized_memory = True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_deterministic_debug_mode(mode)
        fill.fill_uninitialized_memory = fills


def _check_form(name: str, got: torch.Tensor, like: torch.Tensor, shape: tuple[int, ...]) -> None:
    """The contract on shapes and dtypes, which no comparison of values would notice."""
    dtype = like.dtype
    if name in ("lse", "pooled"):
        dtype = torch.float64 if dtype == torch.float64 else torch.float32
    if tuple(got.shape) != shape or got.dtype != dtype:
        raise AssertionError(
            f"{name} has shape {tuple(got.shape)} and dtype {got.dtype}; needs {shape} and {dtype}"
        )


def run_subject(subject: Subject, problem: Problem, inputs: Inputs) -> Outputs[torch.Tensor | None]:
    """Forward and backward, on outputs that start as NaN.

    Raises:
        SubjectError: It raises, or an output has another shape or dtype than the contract says.
        NotImplementedError: The subject refuses the problem.
    """
    with _faults_of_the_subject():
        return _run(subject, problem, inputs)


def run_bias_gradient(subject: Subject, problem: Problem, inputs: Inputs) -> torch.Tensor:
    """The bias's gradient, of the same loss as those of ``run_subject``.

    Raises:
        SubjectError: It raises, or the gradient has another shape or dtype than the bias.
        NotImplementedError: The subject refuses the problem.
    """
    with _faults_of_the_subject():
        return _run_bias(subject, problem, inputs)


def run_pooled(
    subject: Subject, problem: Problem, inputs: Inputs, pool: str, size: tuple[int, int]
) -> torch.Tensor:
    """Probabilities pooled over blocks of ``size`` pairs, on memory that starts as NaN.

    Raises:
        SubjectError: It raises, or returns another shape or dtype than the contract says.
        NotImplementedError: The subject refuses the problem, or pools nothing.
    """
    q, k, v = inputs[:3]
    shape = (*q.shape[:2], -(-problem.M // size[0]), -(-problem.N // size[1]))
    with _faults_of_the_subject():
        with _poisoned_allocations():
            pooled = subject.run_pooled(q, k, v, problem, pool, size)
        _check_form("pooled", pooled, q, shape)
        return pooled.detach()


@contextmanager
def _faults_of_the_subject() -> Iterator[None]:
    """Whatever is raised inside is the subject's, but for its refusals."""
    try:
        yield
    except NotImplementedError:
        raise
    except Exception as error:
        raise SubjectError(_told(error)) from error


def _run_bias(subject: Subject, problem: Problem, inputs: Inputs) -> torch.Tensor:
    assert inputs.bias is not None
    bias = inputs.bias.detach().requires_grad_()
    added = {"alibi_slopes": inputs.alibi_slopes, "bias": bias}
    with _poisoned_allocations():
        out, lse = subject.run(inputs.q, inputs.k, inputs.v, problem, **added)
        (found,) = _gradients(problem, (bias,), inputs, out, lse)
    if found is None:
        raise AssertionError(f"out of {subject.name} does not depend on the bias")
    if found.shape != bias.shape or found.dtype != bias.dtype:
        raise AssertionError(
            f"dbias has shape {tuple(found.shape)} and dtype {found.dtype}; needs "
            f"{tuple(bias.shape)} and {bias.dtype}"
        )
    return found


def _told(error: BaseException) -> str:
    """What was raised, and the last line that is no library's: in a kernel, say."""
    # The interpreter's own exception holds the kernel's as text.
    while type(error).__name__ == "InterpreterError" and error.__cause__ is not None:
        error = error.__cause__
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(_LIBRARIES)]
    frame = (own or frames)[-1]
    return f"{text}\n({frame.filename}, line {frame.lineno})"


def _run(subject: Subject, problem: Problem, inputs: Inputs) -> Outputs[torch.Tensor | None]:
    # A kernel without a backward may refuse inputs that ask for one.
    q, k, v = (x.detach().requires_grad_(subject.backward) for x in inputs[:3])
    with _poisoned_allocations():
        added = {"alibi_slopes": inputs.alibi_slopes, "bias": inputs.bias}
        out, lse = subject.run(q, k, v, problem, **added)
        _check_form("out", out, q, (*q.shape[:3], v.shape[3]))
        if lse is not None:
            _check_form("lse", lse, q, tuple(q.shape[:3]))
        got_lse = None if lse is None else lse.detach()
        if not subject.backward:
            return Outputs(out.detach(), got_lse, None, None, None)
        if not out.requires_grad:
            raise AssertionError(
                f"out of {subject.name} has no gradient; a subject without one declares "
                "backward=False"
            )
        gradients = _gradients(problem, (q, k, v), inputs, out, lse)
    for name, gradient, x in zip(("dq", "dk", "dv"), gradients, (q, k, v), strict=True):
        if gradient is None:
            raise AssertionError(f"out of {subject.name} does not depend on what {name} belongs to")
        _check_form(name, gradient, x, tuple(x.shape))
    return Outputs(out.detach(), got_lse, *gradients)


def _gradients(
    problem: Problem,
    leaves: tuple[torch.Tensor, ...],
    inputs: Inputs,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> tuple[torch.Tensor | None, ...]:
    """dq, dk, dv of a loss on out, on out and lse, or where dout is zero on lse alone."""
    if inputs.dlse is None:
        return torch.autograd.grad(out, leaves, inputs.dout, allow_unused=True)
    if lse is None or not lse.requires_grad:
        raise AssertionError("lse has no gradient; a subject without one declares lse_grad=False")
    losses = [(out, inputs.dout), (lse, inputs.dlse)][problem.dout == "zero" :]
    of, gradients = zip(*losses, strict=True)
    found = torch.autograd.grad(of, leaves, gradients, allow_unused=True)
    if len(losses) == 1 and len(found) == 3 and found[2] is None:
        # lse does not depend on v.
        found = (*found[:2], torch.zeros_like(leaves[2]))
    return found


@dataclass(frozen=True)
class PlannedRun:
    """A problem with everything that does not depend on the subject's outputs; it runs many times.

    Args:
        problem: The problem.
        inputs: Its tensors.
        judgement: Bound, sums of |terms| and range, for the numerics of a subject.
        want: The float64 oracle's outputs.
    """

    problem: Problem
    inputs: Inputs
    judgement: Judgement
    want: Outputs[torch.Tensor]

    def run(self, subject: Subject) -> Trial:
        """Runs a subject of the numerics that the run was planned for.

        Raises:
            SubjectError: It raises, or an output has another shape or dtype than the contract says.
            NotImplementedError: The subject refuses the problem.
        """
        # On a CPU a write out of bounds would corrupt the heap, and end the process elsewhere.
        with GuardBands() if self.problem.device == "cpu" else nullcontext():
            got = run_subject(subject, self.problem, self.inputs)
        return Trial(subject, self.problem, self.inputs, got, self.want, self.judgement)


def plan_run(subject: Subject, problem: Problem, inputs: Inputs | None = None) -> PlannedRun | None:
    """Makes inputs, bound and reference; None where a correct kernel need not survive the problem.

    Args:
        subject: Its numerics choose the bound.
        problem: The problem.
        inputs: Other tensors than the problem's own, of its shapes and dtype.

    Raises:
        RuntimeError: A bound is not finite although the problem is in range: the suite is at fault.
    """
    inputs = make(problem) if inputs is None else inputs
    judgement = error_model.judge(
        *inputs,
        mask=problem.mask,
        sm_scale=problem.scale,
        in_dtype=problem.dtype,
        numerics=subject.numerics_of(problem),
        softcap=problem.softcap,
    )
    if judgement.out_of_range is not None:
        return None
    # One answer from the GPU instead of five: waiting for it is what a small problem costs.
    if not bool(torch.stack([bound.isfinite().all() for bound in judgement.bound]).all()):
        raise RuntimeError(f"the bound is not finite, so nothing is judged: {problem.to_json()}")
    want = torch_reference.attention(
        *inputs, mask=problem.mask, sm_scale=problem.scale, softcap=problem.softcap
    )
    return PlannedRun(problem, inputs, judgement, want)


def run_trial(subject: Subject, problem: Problem) -> Trial | None:
    """Runs and judges a problem; None where a correct kernel need not survive it.

    Raises:
        SubjectError: It raises, or an output has another shape or dtype than the contract says.
        NotImplementedError: The subject refuses the problem.
        RuntimeError: A bound is not finite although the problem is in range: the suite is at fault.
    """
    planned = plan_run(subject, problem)
    return None if planned is None else planned.run(subject)
