"""Softcap c tanh(x / c): in the oracles, the kernels, the call, and declarations of subjects."""

from __future__ import annotations

import dataclasses

import mpmath
import numpy as np
import pytest
import torch

from fa_verify.oracles import stream
from fa_verify.oracles.bounds import error_model
from fa_verify.oracles.bounds.constants import constants
from fa_verify.oracles.bounds.in_numpy import bound as numpy_check
from fa_verify.oracles.bounds.softcap import cap_error
from fa_verify.oracles.bounds.variance import variances
from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.outputs import Numerics, Outputs
from fa_verify.oracles.problem import Problem
from fa_verify.oracles.reference import numpy_reference, torch_reference
from fa_verify.oracles.reference.softcap import capped, slope
from fa_verify.properties.guarantees import claims
from fa_verify.properties.guarantees.claims import checks_of
from fa_verify.properties.guarantees.identities import identities
from fa_verify.properties.guarantees.statistics import is_valid
from fa_verify.properties.inputs.tensors import make
from fa_verify.properties.kernels.subject import Subject
from fa_verify.properties.kinds.feature import Feature
from fa_verify.properties.problems.strategies import SOFTCAPS, problems
from fa_verify.properties.running.tally import Tally
from fa_verify.properties.running.trial import run_trial
from fa_verify.properties.search.declaring import declarations_that_fit
from fa_verify.properties.search.search import Runner
from tests.unit.oracles.bounds.test_bounds_agree import DTYPES, a_problem, as_arrays, assert_within
from tests.unit.properties.kernels.broken_subjects import Eager
from tests.unit.properties.problems.sampling import drawn

ASKED = Problem(
    B=2, H=2, M=6, N=4, D=3, Dv=2, dtype="fp64", dirty="nan", softcap=0.7,
    mask=Mask(causal=True, seqlens_q=(5, 0), seqlens_k=(3, 4)),
)  # fmt: skip
# Errors of the subject below follow the predicted variances.
MEASURED = Problem(H=2, M=40, N=40, D=16, dtype="bf16", softcap=5.0)
# Scores far above the cap: the slope is a small difference, and an exact one smaller than it errs.
SATURATED = Problem(N=32, dtype="fp32", inputs="times40", softcap=5.0)
EXACT, DIFFERENCE = (Numerics(softcap_slope=x) for x in ("exact", "difference"))
# Values of x / c: near 0, on both sides of the change of formulas, and where tanh is 1.
RATIOS = [0.0, 1e-300, 1e-9, 0.3, 0.4999, 0.5001, 1.0, 3.0, 19.0, 40.0, 300.0, 1e5]


class Rounding(Eager):
    """A correct subject that rounds only its results."""

    score_mods = ("softcap",)

    def __call__(self, q, k, v, **arguments):
        out, lse = super().__call__(q.double(), k.double(), v.double(), **arguments)
        return out.to(q.dtype), lse if q.dtype == torch.float64 else lse.float()


class Automatic(Rounding):
    """As ``Rounding``, in float32 for inputs of 32 and 16 bits."""

    def __call__(self, q, k, v, **arguments):
        in_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        out, lse = Eager.__call__(self, *(x.to(in_dtype) for x in (q, k, v)), **arguments)
        return out.to(q.dtype), lse


class _Sloping(torch.autograd.Function):
    """c tanh(x / c) with another slope."""

    @staticmethod
    def forward(ctx, x, softcap, slope_of):
        ctx.save_for_backward(slope_of(x, softcap))
        return softcap * torch.tanh(x / softcap)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.saved_tensors[0], None, None


# Slopes that kernels have by mistake.
WRONG_SLOPES = {
    "1": lambda x, c: torch.ones_like(x),
    "1 - |tanh|": lambda x, c: 1 - (x / c).tanh().abs(),
    "1 - tanh(x)**2": lambda x, c: 1 - x.tanh() ** 2,
    "1 - s**2": lambda x, c: 1 - (c * (x / c).tanh()) ** 2,
    "1 / c of it": lambda x, c: (1 - (x / c).tanh() ** 2) / c,
    "tanh in bf16": lambda x, c: 1 - (x / c).tanh().bfloat16().to(x.dtype) ** 2,
    "tanh in TF32": lambda x, c: 1 - (x / c).tanh().mul(2**13).float().round().div(2**13) ** 2,
}


class WrongSlope(Automatic):
    def capped(self, scores, softcap):
        return _Sloping.apply(scores, softcap, WRONG_SLOPES[self.fault])


def found(subject, problem, claim):
    return Runner(Subject.of(subject, "subject"), Tally()).findings(problem, claim)


@pytest.mark.parametrize("softcap", [1e-3, 1.0, 30.0, 1e9])
def test_the_oracle_has_every_digit_of_scores_and_slopes(softcap):
    x = torch.tensor([sign * y * softcap for y in RATIOS for sign in (1, -1)], dtype=torch.float64)
    x.requires_grad_()
    s = capped(x, softcap)
    (by_autograd,) = torch.autograd.grad(s.sum(), x)
    with mpmath.workdps(60):
        for value, given, *slopes in zip(
            s.tolist(), x.tolist(), by_autograd.tolist(), slope(x, softcap).tolist(), strict=True
        ):
            y = mpmath.mpf(given) / softcap
            want, want_slope = softcap * mpmath.tanh(y), mpmath.sech(y) ** 2
            assert abs(value - want) <= abs(want) * 2.0**-50
            for got in slopes:
                # The error of exp(-2 |y|), whose argument is rounded.
                assert abs(got - want_slope) <= want_slope * 2.0**-50 * (1 + abs(y)) + 2.0**-1021


@pytest.mark.parametrize("softcap_slope", ["exact", "difference"])
@pytest.mark.parametrize("case", range(3))
@pytest.mark.parametrize("dtype", DTYPES)
def test_references_and_bounds_agree(dtype, case, softcap_slope):
    inputs, call, block_n = a_problem(f"{dtype}/softcap/{case}")
    call["softcap"] = (0.1, 2.0, 1e4)[case]
    got = torch_reference.attention(*inputs, **call, rows=20)
    want = numpy_reference.attention(*as_arrays(inputs), **call)
    numerics = Numerics(block_n=block_n, prescales="q", softcap_slope=softcap_slope)
    call |= {"in_dtype": dtype, "numerics": numerics}
    judged = error_model.judge(*inputs, **call, rows=32)
    assert_within(got, want, Outputs(*(1e-12 * x for x in judged.terms)))
    want_bound = numpy_check.bound(*as_arrays(inputs), **call)
    closely = Outputs(*(1e-10 * torch.from_numpy(x) for x in want_bound))
    assert_within(judged.bound, want_bound, closely)


@pytest.mark.parametrize("dtype", ["fp32", "fp64"])
def test_bounds_agree_where_every_product_underflows(dtype):
    inputs, call, block_n = a_problem(f"{dtype}/softcap/0")
    tiny = 2.0**-126 if dtype == "fp32" else 2.0**-1022
    call |= {"in_dtype": dtype, "numerics": Numerics(block_n=block_n), "softcap": 1e-3 / tiny}
    want = numpy_check.bound(*as_arrays(inputs), **call)
    judged = error_model.judge(*inputs, **call)
    assert_within(judged.bound, want, Outputs(*(1e-10 * torch.from_numpy(x) for x in want)))
    plain = error_model.judge(*inputs, **(call | {"softcap": None})).bound
    assert (judged.bound.lse >= plain.lse + 1e-3)[plain.lse > 0].all()


@pytest.mark.parametrize("dtype", ["fp32", "fp64"])
def test_bounds_agree_where_only_what_is_flushed_errs(dtype):
    """dS is 0 and f is nearly 0, so that only the last term of e f + FTZ remains."""
    (*inputs, dout), call, block_n = a_problem(f"{dtype}/softcap/0")
    inputs = [*inputs, dout * 0]
    call |= {"in_dtype": dtype, "numerics": Numerics(block_n=block_n), "softcap": 1e-3}
    want = numpy_check.bound(*as_arrays(inputs), **call)
    assert want.dq.any()
    judged = error_model.judge(*inputs, **call)
    assert_within(judged.bound, want, Outputs(*(1e-10 * torch.from_numpy(x) for x in want)))


@pytest.mark.parametrize("numerics", [EXACT, DIFFERENCE], ids=["exact", "difference"])
def test_terms_of_dq_have_those_of_the_slope(numerics):
    q, k, v, dout, *_ = make(dataclasses.replace(MEASURED, dtype="fp64", H=1))
    call = {"mask": Mask(), "sm_scale": 0.25, "softcap": 0.5}
    x = q @ k.mT * 0.25
    p = capped(x, 0.5).softmax(-1)
    out = p @ v
    of_delta = (dout.abs() * out.abs()).sum(-1, keepdim=True)
    of_slope = slope(x, 0.5) if numerics == EXACT else 1 + (x / 0.5).tanh() ** 2
    of_ds = p * (dout.abs() @ v.abs().mT + of_delta) * of_slope
    judged = error_model.judge(q, k, v, dout, **call, in_dtype="fp64", numerics=numerics)
    torch.testing.assert_close(judged.terms.dq, 0.25 * of_ds @ k.abs(), rtol=1e-12, atol=0)


def test_a_cap_that_no_score_comes_near_changes_nothing():
    inputs, call, _ = a_problem("fp64/softcap/1")
    plain, near = (torch_reference.attention(*inputs, **call, softcap=c) for c in (None, 1e12))
    judged = error_model.judge(*inputs, **call, in_dtype="fp64", numerics=Numerics())
    assert_within(
        near, Outputs(*map(np.asarray, plain)), Outputs(*(1e-11 * x for x in judged.terms))
    )


def test_scores_are_never_larger_than_the_cap():
    inputs, call, _ = a_problem("fp64/softcap/1")
    call |= {"in_dtype": "fp64", "numerics": Numerics()}
    assert error_model.judge(*inputs, **call).max_score > 0.2
    assert error_model.judge(*inputs, **call, softcap=0.2).max_score <= 0.2


def _swept(dtype: torch.dtype) -> torch.Tensor:
    """Numbers of either sign between 0 and 100, dense where the formulas change."""
    sizes = torch.cat([
        torch.linspace(0, 100, 2**11, dtype=torch.float64),
        torch.linspace(0.4, 0.6, 2**11 - 64, dtype=torch.float64),
        torch.logspace(-30, 0, 64, dtype=torch.float64),
    ])  # fmt: skip
    signs = torch.where(stream.uniform(0, "signs", sizes.shape) < 0.5, -1.0, 1.0)
    return (sizes * signs).to(dtype)


@pytest.mark.parametrize("dtype", ["fp32", "fp64"])
def test_the_kernels_tanh_is_as_close_as_the_bound_takes_it_to_be(dtype, device):
    pytest.importorskip("triton")
    from tests.unit.fa_kernels.kernels.tanh_kernel import tanh_kernel

    x = _swept(DTYPES[dtype]).to(device)
    tanh, dtanh = torch.empty_like(x), torch.empty_like(x)
    tanh_kernel[(len(x) // 64,)](x, tanh, dtanh, BLOCK=64)
    c = constants(dtype, Numerics())
    with mpmath.workdps(40):
        exact = [mpmath.mpf(y) for y in x.tolist()]
        for y, got, got_slope in zip(exact, tanh.tolist(), dtanh.tolist(), strict=True):
            want, want_slope = mpmath.tanh(y), mpmath.sech(y) ** 2
            assert abs(got - want) <= (9 * c.u + c.u_exp) * abs(want) + c.ftz
            relative = 14 * c.u + c.u_exp + 4 * c.u * abs(y)
            assert abs(got_slope - want_slope) <= relative * want_slope + 4 * c.ftz


def test_what_is_allowed_of_a_score_is_contracted_by_its_slope():
    c = constants("fp16", Numerics())
    x = torch.tensor([0.0, 1.0, 5.0, 500.0], dtype=torch.float64)
    cap = cap_error(x, torch.full_like(x, 1e-3), 1.0, c, "exact")
    contracted = 1e-3 * slope((x - 1e-3).clamp(min=0), 1.0)
    roundings = 16 * c.u * (cap.s.abs() + cap.s_error)
    assert ((cap.s_error - contracted).abs() <= 1e-3 * contracted + roundings).all()
    # Near the steep part, where the kernel may be on either side, any slope is allowed.
    wide = cap_error(x, torch.full_like(x, 1e3), 1.0, c, "exact")
    assert ((wide.slope_error >= 1 - wide.slope) & (wide.slope_error < 1.1)).all()
    assert cap.slope_error[-1] == 4 * c.ftz


def _by_exp(y: torch.Tensor) -> torch.Tensor:
    """(1 - e) / (1 + e), with a reciprocal that errs by two units in the last place."""
    e = torch.exp(-2 * y.abs())
    above = torch.full_like(y, 2.0)
    inverse = (1 / (1 + e)).nextafter(above).nextafter(above)
    return torch.where(y < 0, e - 1, 1 - e) * inverse


@pytest.mark.parametrize(("tanh", "least"), [(torch.tanh, 1), (_by_exp, 9)])
@pytest.mark.parametrize("dtype", ["fp32", "fp64"])
def test_a_slope_that_is_a_difference_errs_by_the_error_of_tanh(dtype, tanh, least):
    c, x = constants(dtype, Numerics()), _swept(DTYPES[dtype])
    # 1 - e cancels in a small tanh; the kernels take a continued fraction there.
    x = x[x.abs() >= 0.5]
    got = 1 - tanh(x).square()
    with mpmath.workdps(40):
        wants = [mpmath.sech(mpmath.mpf(y)) ** 2 for y in x.tolist()]
        pairs = zip(got.tolist(), wants, strict=True)
        errors = torch.tensor([float(abs(y - want)) for y, want in pairs], dtype=torch.float64)
    bounds = {
        form: cap_error(x.double(), 0 * x.double(), 1.0, c, form).slope_error
        for form in ("exact", "difference")
    }
    assert (errors <= bounds["difference"]).all()
    assert (errors > bounds["exact"]).any()
    # The bound is 15u.
    assert errors.amax() >= least * c.u


@pytest.mark.parametrize("dtype", ["bf16", "fp32", "fp64"])
def test_automatic_differentiation_of_a_softcap_holds_unless_its_slope_is_declared_exact(dtype):
    problem = dataclasses.replace(SATURATED, dtype=dtype)
    checks = [claims.accuracy, *([claims.logic] if dtype == "fp64" else [])]
    subject = Subject.of(Automatic(), "automatic")
    exact = dataclasses.replace(subject, numerics=EXACT)
    for check in checks:
        assert Runner(subject, Tally()).findings(problem, check) == []
        findings = Runner(exact, Tally()).findings(problem, check)
        assert {"dk"} <= {x.output for x in findings} <= {"dq", "dk"}
    features = [Feature("softcap")]
    offered = declarations_that_fit(
        Runner(exact, Tally()), claims.accuracy, [problem], features, ["dk"]
    )
    assert offered == ('softcap_slope="difference"',)


def test_dS_times_a_softcap_has_to_be_finite_in_automatic_differentiation():
    problem = Problem(M=8, N=19, inputs="near_max", dout="one_hot", seed=3887, softcap=1e6)
    subject = Subject.of(Automatic(), "automatic")
    exact = dataclasses.replace(subject, numerics=EXACT)
    assert run_trial(subject, problem) is None
    assert not run_trial(exact, problem).got.dq.isfinite().all()
    assert run_trial(subject, dataclasses.replace(problem, softcap=1.0)) is not None


@pytest.mark.parametrize("wrong", WRONG_SLOPES)
def test_a_wrong_slope_is_found_where_it_may_be_a_difference(wrong):
    problem = dataclasses.replace(SATURATED, dtype="fp32", inputs="normal", M=32, softcap=0.7)
    findings = found(WrongSlope(wrong), problem, claims.accuracy)
    assert [x.output for x in findings] == ["dq", "dk"]


@pytest.mark.parametrize("name", checks_of("call", "statistics", "closed forms"))
def test_a_right_subject_holds_every_guarantee(name):
    check = checks_of("call", "statistics", "closed forms")[name]
    if name == "G12":
        pytest.skip("needs much memory")
    problem = MEASURED if name in {*checks_of("statistics", "closed forms")} else ASKED
    assert found(Rounding(), problem, check) == []


def test_a_slope_that_is_left_out_is_found_in_dq_and_dk():
    flat = Rounding("no slope of a softcap")
    findings = found(flat, ASKED, claims.accuracy)
    assert [x.output for x in findings] == ["dq", "dk"]
    assert '"softcap":0.7' in findings[0].replay
    assert found(flat, dataclasses.replace(ASKED, softcap=None), claims.accuracy) == []


def test_the_sum_of_dk_is_not_checked_with_a_softcap():
    trial = run_trial(Subject.of(Rounding(), "right"), dataclasses.replace(MEASURED, H=4))
    assert trial is not None
    assert identities(trial) == []
    assert trial.want.dk.sum(2).abs().max() > 0.01
    wrong = trial.got._replace(dk=trial.got.dk + 1, dv=trial.got.dv + 1)
    assert {x.output for x in identities(dataclasses.replace(trial, got=wrong))} == {"dv"}


def test_errors_of_a_cap_that_makes_scores_alike_follow_no_average():
    assert is_valid(MEASURED)
    assert not is_valid(dataclasses.replace(MEASURED, softcap=1.0))


def test_the_spread_follows_the_slope():
    inputs = make(MEASURED)
    call = {"mask": MEASURED.mask, "sm_scale": MEASURED.scale, "numerics": Numerics()}
    # At 0.001 one score in a thousand is not at the cap.
    plain, flat = (variances(*inputs, **call, in_dtype="bf16", softcap=c) for c in (None, 0.001))
    assert flat.dq.mean() < 0.001 * plain.dq.mean()
    assert flat.dk.mean() < 0.001 * plain.dk.mean()


def test_a_subject_that_does_not_declare_softcap_excludes_it():
    subject = Subject.of(Eager(), "plain")
    assert subject.excludes(ASKED) == "plain declares score_mods ()"
    assert Subject.of(Rounding(), "right").excludes(ASKED) is None


def test_a_softcap_is_drawn_only_when_requested():
    some = drawn(problems(softcaps=(None, *SOFTCAPS)), 200)
    assert {x.softcap for x in some} == {None, *SOFTCAPS}
    assert {x.softcap for x in drawn(problems(), 20)} == {None}


@pytest.mark.parametrize("wanted", ["q", "qkv"])
def test_the_call_takes_a_softcap_and_differentiates_it(wanted, device):
    pytest.importorskip("triton")
    from fa_kernels import flash_attention

    problem = dataclasses.replace(ASKED, M=17, N=21, mask=Mask(causal=True), device=device)
    inputs = make(problem)
    leaves = [
        x.detach().requires_grad_(name in wanted) for name, x in zip("qkv", inputs[:3], strict=True)
    ]
    out = flash_attention(*leaves, causal=True, softcap=0.7, sm_scale=0.9, config="16x16")
    asked = [x for x in leaves if x.requires_grad]
    got = torch.autograd.grad(out, asked, inputs.dout)
    call = {"mask": problem.mask, "sm_scale": 0.9, "softcap": 0.7}
    want = torch_reference.attention(*inputs, **call)
    judged = error_model.judge(*inputs, **call, in_dtype="fp64", numerics=Numerics())
    for x, true, bound in zip(got, want[2:], judged.bound[2:], strict=False):
        assert ((x - true).abs() <= bound).all()
