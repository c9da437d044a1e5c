"""One run of a subject: initial memory, required outputs, and restored state."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fa_verify import simulator
from fa_verify.oracles.bounds import error_model
from fa_verify.oracles.problem import Problem
from fa_verify.properties.inputs.tensors import make
from fa_verify.properties.kernels.subject import Subject
from fa_verify.properties.running.trial import SubjectError, plan_run, run_subject, run_trial
from tests.unit.properties.kernels.broken_subjects import Eager

PROBLEM = Problem(M=20, N=7, D=5, Dv=3, dtype="fp64")


def test_unwritten_elements_are_nan():
    subject = Subject.of(Eager("last row not written"), "eager")
    out = run_subject(subject, PROBLEM, make(PROBLEM)).out
    assert out[:, :, 16:].isnan().all()
    assert out[:, :, :16].isfinite().all()


@pytest.mark.parametrize("fault", ["", "raises"])
def test_a_run_leaves_the_modes_of_torch_as_they_were(fault):
    class Raising(Eager):
        def spoil(self, out, lse, live, N, config):
            if self.fault == "raises":
                raise ValueError("no")
            return out, lse

    def modes():
        fills = torch.utils.deterministic.fill_uninitialized_memory
        return torch.get_deterministic_debug_mode(), fills

    torch.set_deterministic_debug_mode("default")
    before = modes()
    try:
        run_subject(Subject.of(Raising(fault), "eager"), PROBLEM, make(PROBLEM))
    except SubjectError:
        assert fault
    assert modes() == before


def test_the_reason_of_a_compilation_error_is_told_and_the_line_that_calls_the_kernel():
    """Triton raises one for the caller of a function, caused by one inside of it."""
    errors = pytest.importorskip("triton.compiler.errors")

    class DoesNotCompile(Eager):
        def spoil(self, out, lse, live, N, config):
            inner = errors.CompilationError("dot(p, v)", None, "operands are fp16 and fp32")
            raise errors.CompilationError("inner(p, v)", None, None) from inner

    with pytest.raises(SubjectError, match=r"(?s)operands are fp16 and fp32.*test_trial.py, line"):
        run_subject(Subject.of(DoesNotCompile(), "eager"), PROBLEM, make(PROBLEM))


def test_an_error_inside_the_simulator_is_told_with_the_line_of_the_kernel():
    """The blame follows from paths, so a simulator in another folder would be blamed in silence."""
    inside = str(Path(simulator.__file__).parent / "interpreter" / "functions.py")
    simulated: dict[str, Callable[[], None]] = {}
    exec(compile("def run():\n    raise ValueError('no')", inside, "exec"), simulated)

    class Simulated(Eager):
        def spoil(self, out, lse, live, N, config):
            simulated["run"]()

    with pytest.raises(SubjectError, match=r"ValueError: no\n\(.*test_trial.py, line"):
        run_subject(Subject.of(Simulated(), "eager"), PROBLEM, make(PROBLEM))


def test_a_subject_runs_between_guard_bands_on_a_cpu():
    class Looks(Eager):
        def spoil(self, out, lse, live, N, config):
            seen.append(torch.empty(1).untyped_storage().nbytes())
            return out, lse

    seen = []
    run_trial(Subject.of(Looks(), "looks"), PROBLEM)
    assert seen == [4 + 2 * 1024]


@pytest.mark.parametrize("output", ["out", "lse"])
@pytest.mark.parametrize(
    "change", [lambda x: x[:, :, 1:], lambda x: x.half()], ids=["shape", "dtype"]
)
def test_an_output_of_another_form_is_refused(output, change):
    class Other(Eager):
        def spoil(self, out, lse, live, N, config):
            return (change(out), lse) if output == "out" else (out, change(lse))

    with pytest.raises(SubjectError, match=rf"{output} has shape .* and dtype .*; needs \("):
        run_subject(Subject.of(Other(), "other"), PROBLEM, make(PROBLEM))


def test_an_output_without_a_gradient_is_refused():
    class Detached(Eager):
        def spoil(self, out, lse, live, N, config):
            return out.detach(), lse

    with pytest.raises(SubjectError, match="out of detached has no gradient"):
        run_subject(Subject.of(Detached(), "detached"), PROBLEM, make(PROBLEM))


@pytest.mark.parametrize(("tensor", "gradient"), [("q", "dq"), ("k", "dk"), ("v", "dv")])
def test_an_output_that_ignores_an_input_is_refused(tensor, gradient):
    class Ignores(Eager):
        def misread(self, q, k, v, sm_scale):
            read = {"q": q, "k": k, "v": v}
            read[tensor] = read[tensor].detach()
            return *read.values(), sm_scale

    with pytest.raises(
        SubjectError, match=f"does not depend on the input that {gradient} is the gradient of"
    ):
        run_subject(Subject.of(Ignores(), "ignores"), PROBLEM, make(PROBLEM))


@pytest.mark.parametrize("value", [math.inf, math.nan], ids=str)
def test_a_bound_that_is_not_finite_is_a_fault_of_the_suite(value, monkeypatch):
    honest = error_model._finish_rows

    def finished(*arguments):
        rows = honest(*arguments)
        rows.bound_lse.view(-1)[-1] = value
        return rows

    monkeypatch.setattr(error_model, "_finish_rows", finished)
    with pytest.raises(RuntimeError, match=r'^the bound is not finite, .*"M":20'):
        plan_run(Subject.of(Eager(), "eager"), PROBLEM)


def test_the_bound_is_that_of_the_configuration():
    subject = Eager()
    subject.configs = {"default": {}, "coarse": {"accumulator": 64.0}}
    made = Subject.of(subject, "eager")
    fine, coarse = (
        plan_run(made, dataclasses.replace(PROBLEM, config=config)).judgement.bound.out
        for config in ("default", "coarse")
    )
    assert (coarse > fine).all()


def test_variances_are_those_of_the_configuration():
    subject = Eager()
    subject.configs = {"default": {}, "coarse": {"ds_roundings": 3}}
    made = Subject.of(subject, "eager")
    fine, coarse = (
        run_trial(made, dataclasses.replace(PROBLEM, config=config)).variances.dv
        for config in ("default", "coarse")
    )
    assert (coarse > fine).all()
