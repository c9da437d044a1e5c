"""Losses on lse: problems, declarations of subjects, and the checks that faulty subjects fail."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from fa_verify.oracles.bounds import error_model
from fa_verify.oracles.bounds.variance import variances
from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.outputs import Numerics
from fa_verify.oracles.problem import Problem
from fa_verify.oracles.reference import torch_reference
from fa_verify.properties.guarantees import claims
from fa_verify.properties.guarantees.claims import checks_of
from fa_verify.properties.guarantees.identities import identities
from fa_verify.properties.inputs.dlse_families import NO_DLSE
from fa_verify.properties.inputs.families import DLSE, PADDING_VALUES
from fa_verify.properties.inputs.tensors import make
from fa_verify.properties.kernels.subject import Subject
from fa_verify.properties.problems.strategies import problems
from fa_verify.properties.running.tally import Tally
from fa_verify.properties.running.trial import run_trial
from fa_verify.properties.search.search import Runner
from tests.unit.properties.kernels.broken_subjects import Eager
from tests.unit.properties.problems.sampling import drawn

PADDED = Mask(causal=True, seqlens_q=(5, 0), seqlens_k=(3, 4))
ASKED = Problem(
    B=2, H=2, M=6, N=4, D=3, Dv=2, dtype="fp64", mask=PADDED, dlse="normal", dirty="nan",
    layouts=("bshd", "padded", "transposed", "strided"),
)  # fmt: skip
# Errors of the subject below follow the predicted variances.
MEASURED = Problem(H=2, M=40, N=40, D=16, dtype="bf16", dlse="large")


class Differentiable(Eager):
    """A correct subject with a gradient of lse that rounds only its results."""

    lse_grad = True

    def __call__(self, q, k, v, **arguments):
        out, lse = super().__call__(q.double(), k.double(), v.double(), **arguments)
        return out.to(q.dtype), lse if q.dtype == torch.float64 else lse.float()


class Ignored(Differentiable):
    """A subject that ignores the gradient of lse."""

    def spoil(self, out, lse, live, N, config):
        return out, lse.detach() + 0 * out.sum(3)


class OfEmptyRows(Differentiable):
    """A subject that adds the dlse of an empty row to dq of another, negligibly if it is finite."""

    def __call__(self, q, k, v, **arguments):
        out, lse = super().__call__(q, k, v, **arguments)
        moved = 1e-300 * q.roll(1, 2).sum(3)
        return out, lse + torch.where(lse == -math.inf, moved - moved.detach(), 0.0)


def found(subject, problem, claim):
    return Runner(Subject.of(subject, "subject"), Tally()).findings(problem, claim)


@pytest.mark.parametrize("dtype", ["fp16", "fp64"])
@pytest.mark.parametrize("family", DLSE)
def test_a_gradient_has_the_shape_of_lse_and_is_finite(family, dtype):
    dlse = make(dataclasses.replace(ASKED, dlse=family, dtype=dtype, dirty="zero")).dlse
    assert dlse.shape == (2, 2, 6)
    assert dlse.dtype == (torch.float64 if dtype == "fp64" else torch.float32)
    assert dlse.isfinite().all()
    assert (dlse[0, :, :5] != 0).all()


def test_dlse_is_made_only_for_problems_with_one():
    assert make(Problem()).dlse is None
    with pytest.raises(ValueError, match="dlse is 'odd'; needs one of"):
        make(Problem(dlse="odd"))


@pytest.mark.parametrize("dirty", PADDING_VALUES)
def test_padding_holds_the_values_of_dout(dirty):
    inputs = make(dataclasses.replace(ASKED, dirty=dirty))
    padding = torch.zeros(2, 2, 6, dtype=torch.bool)
    padding[0, :, 5:], padding[1] = True, True
    got, want = inputs.dlse[padding], inputs.dout[..., 0][padding]
    assert torch.equal(got.nan_to_num(7.5), want.nan_to_num(7.5))


def test_chunks_of_rows_have_their_own_gradients():
    q, k, v, dout, dlse, *_ = make(dataclasses.replace(ASKED, dirty="zero"))
    call = {"mask": PADDED, "sm_scale": 0.5}
    whole = torch_reference.attention(q, k, v, dout, dlse, **call)
    chunked = torch_reference.attention(q, k, v, dout, dlse, **call, rows=2)
    for a, b in zip(whole, chunked, strict=True):
        torch.testing.assert_close(a, b)


def test_a_gradient_counts_among_the_terms_and_in_the_spread():
    inputs = make(MEASURED)
    call = {"mask": MEASURED.mask, "sm_scale": MEASURED.scale, "numerics": Numerics()}
    for measure in (
        lambda x: error_model.judge(*x, **call, in_dtype="bf16").terms.dq,
        lambda x: variances(*x, **call, in_dtype="bf16").dq,
    ):
        assert measure(inputs).mean() > 2 * measure(inputs._replace(dlse=None)).mean()


@pytest.mark.parametrize("name", checks_of("call", "statistics", "closed forms"))
def test_a_right_subject_holds_every_guarantee(name):
    check = checks_of("call", "statistics", "closed forms")[name]
    if name == "G12":
        pytest.skip("needs much memory")
    for problem in (ASKED, MEASURED, dataclasses.replace(ASKED, dout="zero", dlse="constant")):
        assert found(Differentiable(), problem, check) == []


def test_a_gradient_that_is_ignored_is_found_in_dq_and_dk():
    findings = found(Ignored(), ASKED, claims.accuracy)
    assert [x.output for x in findings] == ["dq", "dk"]
    assert '"dlse":"normal"' in findings[0].replay


def test_a_gradient_of_empty_rows_is_found():
    empty = Problem(M=3, N=2, dtype="fp64", mask=Mask(causal=True))
    assert found(OfEmptyRows(), empty, claims.accuracy) == []
    [first, *_] = found(OfEmptyRows(), dataclasses.replace(empty, dlse="normal"), claims.empty_rows)
    assert (first.guarantee, first.output) == ("G3 empty rows", "dq")


def test_a_loss_on_lse_alone_leaves_out_alone():
    class Alone(Differentiable):
        def __call__(self, q, k, v, **arguments):
            out, lse = super().__call__(q, k, v, **arguments)
            out = out * 1
            out.register_hook(lambda gradient: pytest.fail("out has a gradient"))
            return out, lse

    problem = dataclasses.replace(ASKED, dout="zero")
    assert found(Alone(), problem, claims.accuracy) == []
    with pytest.raises(pytest.fail.Exception):
        found(Alone(), ASKED, claims.accuracy)


def test_a_subject_that_does_not_declare_lse_grad_excludes_dlse():
    subject = Subject.of(Eager(), "eager")
    assert subject.excludes(ASKED) == "eager declares lse_grad False"
    assert subject.excludes(dataclasses.replace(ASKED, dlse=NO_DLSE)) is None
    assert Subject.of(Differentiable(), "right").excludes(ASKED) is None


def test_a_subject_that_declares_lse_grad_without_having_it_fails():
    class Boasting(Eager):
        lse_grad = True

        def spoil(self, out, lse, live, N, config):
            return out, lse.detach()

    [finding] = found(Boasting(), ASKED, claims.accuracy)
    assert "declares lse_grad=False" in str(finding)


def test_identities_do_not_apply_to_losses_on_lse():
    trial = run_trial(Subject.of(Differentiable(), "right"), MEASURED)
    assert identities(trial) == []
    assert identities(dataclasses.replace(trial, inputs=trial.inputs._replace(dlse=None))) != []


def test_losses_on_lse_are_drawn_where_they_are_declared():
    with_lse = drawn(problems(lse_grad=True), 200)
    assert {x.dlse for x in with_lse} == {NO_DLSE, *DLSE}
    assert {x.dlse for x in drawn(problems(), 20)} == {NO_DLSE}
