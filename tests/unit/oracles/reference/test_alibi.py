"""ALiBi: in the oracles, in the call, and in declarations of subjects."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from fa_verify.oracles import stream
from fa_verify.oracles.bounds import error_model
from fa_verify.oracles.bounds.in_numpy import bound as numpy_check
from fa_verify.oracles.bounds.variance import variances
from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.outputs import Numerics, Outputs
from fa_verify.oracles.problem import Problem
from fa_verify.oracles.reference import numpy_reference, torch_reference
from fa_verify.oracles.reference.score_mods import Additions
from fa_verify.properties.guarantees import claims
from fa_verify.properties.guarantees.claims import checks_of
from fa_verify.properties.guarantees.statistics import is_valid
from fa_verify.properties.inputs.families import ALIBI, NO_ALIBI
from fa_verify.properties.inputs.tensors import make
from fa_verify.properties.kernels.subject import Subject
from fa_verify.properties.problems.strategies import problems
from fa_verify.properties.running.tally import Tally
from fa_verify.properties.search.search import Runner
from tests.unit.oracles.bounds.test_bounds_agree import DTYPES, a_problem, as_arrays, assert_within
from tests.unit.properties.kernels.broken_subjects import Eager
from tests.unit.properties.problems.sampling import drawn

ASKED = Problem(
    B=2, H=2, M=6, N=4, D=3, Dv=2, dtype="fp64", dirty="nan", alibi="normal",
    mask=Mask(causal=True, seqlens_q=(5, 0), seqlens_k=(3, 4)),
)  # fmt: skip


class Falling(Eager):
    """A correct subject that rounds only its results."""

    score_mods = ("softcap", "alibi")

    def __call__(self, q, k, v, **arguments):
        out, lse = super().__call__(q.double(), k.double(), v.double(), **arguments)
        return out.to(q.dtype), lse if q.dtype == torch.float64 else lse.float()


def found(subject, problem, claim):
    return Runner(Subject.of(subject, "subject"), Tally()).findings(problem, claim)


def test_a_score_falls_by_its_slope_with_the_distance_from_the_row():
    # Row 0 of three is aligned with key 2 of five.
    mask, slopes = Mask(seqlens_q=(3,), seqlens_k=(5,)), torch.tensor([1.0, -0.5])
    (terms,) = Additions(mask, (1, 2, 4, 5), torch.device("cpu"), slopes).between(1, 3)
    assert terms[0, 0].tolist() == [[-3, -2, -1, 0, -1], [-4, -3, -2, -1, 0]]
    assert terms[0, 1].tolist() == [[1.5, 1, 0.5, 0, 0.5], [2, 1.5, 1, 0.5, 0]]
    assert not Additions(mask, (1, 2, 4, 5), torch.device("cpu"))


@pytest.mark.parametrize("case", range(3))
@pytest.mark.parametrize("dtype", DTYPES)
def test_references_and_bounds_agree(dtype, case):
    inputs, call, block_n = a_problem(f"{dtype}/alibi/{case}")
    B, H = inputs[0].shape[:2]
    slopes = stream.normal(case, "alibi", (B, H))
    slopes = slopes[0] if case == 0 else slopes
    call["softcap"] = (None, None, 2.0)[case]
    got = torch_reference.attention(*inputs, None, slopes, **call, rows=20)
    want = numpy_reference.attention(*as_arrays(inputs), alibi_slopes=slopes.numpy(), **call)
    call |= {"in_dtype": dtype, "numerics": Numerics(block_n=block_n)}
    judged = error_model.judge(*inputs, None, slopes, **call, rows=32)
    assert_within(got, want, Outputs(*(1e-12 * x for x in judged.terms)))
    want_bound = numpy_check.bound(*as_arrays(inputs), alibi_slopes=slopes.numpy(), **call)
    closely = Outputs(*(1e-10 * torch.from_numpy(x) for x in want_bound))
    assert_within(judged.bound, want_bound, closely)


def test_slopes_of_zero_change_nothing_and_their_sum_is_allowed_its_rounding():
    inputs, call, _ = a_problem("fp32/alibi/0")
    zeros = torch.zeros(inputs[0].shape[1])
    plain, flat = (torch_reference.attention(*inputs, None, x, **call) for x in (None, zeros))
    assert all(map(torch.equal, plain, flat))
    call |= {"in_dtype": "fp32", "numerics": Numerics()}
    plain, flat = (error_model.judge(*inputs, None, x, **call).bound for x in (None, zeros))
    assert all((x <= y).all() for x, y in zip(plain, flat, strict=True))
    assert (plain.dq < flat.dq).any()


def test_the_largest_score_counts_what_is_added_and_has_a_limit():
    problem = dataclasses.replace(ASKED, mask=Mask(), M=9, N=9, inputs="zero_k")
    inputs = make(problem)._replace(alibi_slopes=torch.tensor([3.0, -2.0]))
    call = {"mask": problem.mask, "sm_scale": 1.0, "in_dtype": "fp64", "numerics": Numerics()}
    judged = error_model.judge(*inputs, **call)
    assert (judged.max_score, judged.out_of_range) == (24.0, None)
    steep = inputs._replace(alibi_slopes=torch.full((2,), 2e6))
    says = error_model.judge(*steep, **call).out_of_range
    assert says == "the sum of a score's |terms| reaches 1.6e+07; needs to be at most 1e+07"


def test_terms_that_cancel_count_in_the_largest_score():
    # The row is aligned with key 1: scores are 3 - 3 and 0 - 0.
    q, k, v = (torch.tensor(x).view(1, 1, -1, 1).double() for x in ([1.0], [3.0, 0.0], [1.0, 1.0]))
    call = {"mask": Mask(), "sm_scale": 1.0, "in_dtype": "fp64", "numerics": Numerics()}
    judged = error_model.judge(q, k, v, q, None, torch.tensor([3.0]), **call)
    assert judged.max_score == 6.0


@pytest.mark.parametrize("family", ALIBI)
def test_slopes_have_their_shape_their_dtype_and_nan_around(family):
    slopes = make(dataclasses.replace(ASKED, alibi=family)).alibi_slopes
    assert slopes.shape in ((2,), (2, 2))
    assert slopes.dtype == torch.float32
    assert slopes.isfinite().all()
    assert slopes.stride(-1) == 2
    assert slopes.as_strided(slopes.shape, slopes.stride(), 1).isnan().all()


def test_a_batched_problem_has_the_slopes_of_its_problems():
    batched = dataclasses.replace(ASKED, mask=Mask(), B=6, seeds=(3, 4, 5), seed=0)
    whole = make(batched).alibi_slopes
    assert torch.equal(whole[2:4], make(batched.part(1, 2)).alibi_slopes)


def test_slopes_are_made_only_for_problems_with_alibi():
    assert make(Problem()).alibi_slopes is None
    with pytest.raises(ValueError, match="alibi is 'odd'; needs one of"):
        make(Problem(alibi="odd"))


@pytest.mark.parametrize("name", checks_of("call", "statistics", "closed forms"))
def test_a_right_subject_holds_every_guarantee(name):
    if name == "G12":
        pytest.skip("needs much memory")
    assert (
        found(
            Falling(),
            ASKED,
            checks_of("call", "statistics", "closed forms")[name],
        )
        == []
    )


def test_a_distance_from_the_first_key_is_found():
    # Below the diagonal the two distances differ by a constant for each row.
    both_sides = dataclasses.replace(ASKED, mask=Mask())
    findings = found(Falling("ALiBi from the first key"), both_sides, claims.accuracy)
    assert {x.output for x in findings} == {"out", "lse", "dq", "dk", "dv"}
    assert '"alibi":"normal"' in findings[0].replay
    level = dataclasses.replace(ASKED, M=4, mask=Mask())
    assert found(Falling("ALiBi from the first key"), level, claims.accuracy) == []


def test_errors_of_rows_that_few_keys_take_follow_no_average():
    ordinary = Problem(H=2, M=40, N=40, dtype="bf16")
    assert is_valid(ordinary)
    assert is_valid(dataclasses.replace(ordinary, alibi="none_at_all"))
    assert not is_valid(dataclasses.replace(ordinary, alibi="halving"))


def test_the_spread_follows_what_is_added():
    problem = Problem(H=2, M=40, N=40, dtype="bf16", alibi="steep")
    inputs = make(problem)
    call = {"mask": problem.mask, "sm_scale": problem.scale, "numerics": Numerics()}
    steep, plain = (
        variances(*x, **call, in_dtype="bf16") for x in (inputs, inputs._replace(alibi_slopes=None))
    )
    # One key takes all weight of a row: its weight is 1, whose cast is exact.
    assert steep.dv.mean() > 2 * plain.dv.mean()
    assert steep.out.mean() > plain.out.mean()


def test_a_subject_that_does_not_declare_alibi_excludes_it():
    assert Subject.of(Eager(), "plain").excludes(ASKED) == "plain declares score_mods ()"
    assert Subject.of(Falling(), "right").excludes(ASKED) is None


def test_alibi_is_drawn_only_when_requested():
    assert {x.alibi for x in drawn(problems(alibis=tuple(ALIBI)), 50)} == {*ALIBI}
    assert {x.alibi for x in drawn(problems(), 20)} == {NO_ALIBI}
    with pytest.raises(ValueError, match="alibis is"):
        problems(alibis=("odd",))


def _called(inputs, slopes, **arguments):
    from fa_kernels import flash_attention

    leaves = [x.detach().requires_grad_() for x in inputs[:3]]
    out = flash_attention(*leaves, alibi_slopes=slopes, config="16x16", **arguments)
    return out.detach(), *torch.autograd.grad(out, leaves, inputs.dout)


@pytest.mark.parametrize("of", ["heads", "entries", "expanded"])
def test_the_call_takes_slopes_of_any_strides(of, device):
    pytest.importorskip("triton")
    inputs = make(Problem(B=2, H=2, Hk=2, M=17, N=21, dtype="fp32", device=device))
    slopes = stream.normal(0, "slopes", (2, 2)).float().to(device)
    slopes = {"heads": slopes[0], "entries": slopes, "expanded": slopes[:1].expand(2, 2)}[of]
    strided = slopes if of == "expanded" else torch.stack([slopes, slopes + 9], -1)[..., 0]
    got, want = (_called(inputs, x) for x in (strided, slopes.contiguous()))
    assert all(map(torch.equal, got, want))


def test_slopes_that_change_before_the_backward_are_noticed(device):
    pytest.importorskip("triton")
    from fa_kernels import flash_attention

    inputs = make(Problem(M=5, N=5, device=device))
    slopes = torch.ones(1, device=device)
    out = flash_attention(inputs.q.requires_grad_(), *inputs[1:3], alibi_slopes=slopes)
    slopes += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_the_operators_pass_opcheck_with_everything_that_is_done_to_scores(device):
    pytest.importorskip("triton")
    from tests.unit.fa_kernels.call.test_opcheck import opcheck
    from tests.unit.fa_kernels.call.test_operators import drawn as tensors

    q, k, v, dout = tensors(device)
    slopes = torch.tensor([0.5, -0.25], device=device)
    opcheck([*(x.requires_grad_() for x in (q, k, v)), dout], softcap=2.0, alibi_slopes=slopes)
