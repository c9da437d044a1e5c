"""A bias and its gradient: in the oracles, in the call, and in declarations of subjects."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch

from fa_verify.oracles import stream
from fa_verify.oracles.bounds import error_model
from fa_verify.oracles.bounds.bias import bias_error
from fa_verify.oracles.bounds.in_numpy import bound as numpy_check
from fa_verify.oracles.bounds.in_numpy.bias import bias_gradient as by_pairs
from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.outputs import Numerics, Outputs
from fa_verify.oracles.problem import Problem
from fa_verify.oracles.reference import numpy_reference, torch_reference
from fa_verify.properties.guarantees import claims
from fa_verify.properties.guarantees.claims import checks_of
from fa_verify.properties.guarantees.compare import ratios
from fa_verify.properties.guarantees.identities import identities
from fa_verify.properties.guarantees.statistics import is_valid
from fa_verify.properties.inputs.bias_families import BIASES, NO_BIAS
from fa_verify.properties.inputs.tensors import make
from fa_verify.properties.kernels.subject import Subject
from fa_verify.properties.problems.batched import batched_problems
from fa_verify.properties.problems.strategies import problems
from fa_verify.properties.running.tally import Tally
from fa_verify.properties.running.trial import run_trial
from fa_verify.properties.search.search import Runner
from tests.unit.oracles.bounds.test_bounds_agree import DTYPES, a_problem, as_arrays, assert_within
from tests.unit.properties.kernels.broken_subjects import Eager
from tests.unit.properties.problems.sampling import drawn

ASKED = Problem(
    B=2, H=2, M=6, N=4, D=3, Dv=2, dtype="fp64", dirty="nan", bias="normal/hmn", seed=1,
    mask=Mask(causal=True, seqlens_q=(5, 6), seqlens_k=(3, 4)),
)  # fmt: skip
MEASURED = Problem(H=2, M=40, N=40, dtype="bf16", bias="normal/hmn")
AXES = ["".join(axes) for count in range(5) for axes in itertools.combinations("bhmn", count)]


class Biased(Eager):
    """A subject that rounds only its results, and is correct unless it has a fault."""

    score_mods = ("softcap", "alibi", "bias")

    def __call__(self, q, k, v, **arguments):
        out, lse = super().__call__(q.double(), k.double(), v.double(), **arguments)
        return out.to(q.dtype), lse if q.dtype == torch.float64 else lse.float()


def found(subject, problem, claim):
    return Runner(Subject.of(subject, "subject"), Tally()).findings(problem, claim)


def a_bias(seed, shape, axes):
    sizes = [size if axis in axes else 1 for axis, size in zip("bhmn", shape, strict=True)]
    return stream.normal(seed, "bias", sizes)


@pytest.mark.parametrize("case", range(3))
@pytest.mark.parametrize("dtype", DTYPES)
def test_references_and_bounds_agree(dtype, case):
    inputs, call, block_n = a_problem(f"{dtype}/bias/{case}")
    shape = (*inputs[0].shape[:3], inputs[1].shape[2])
    bias, slopes = a_bias(case, shape, ("bhmn", "hn", "bm")[case]), None
    # Hidden elements of the bias may have any value.
    seen = call["mask"].dense(*shape).expand(shape)
    for axis, size in enumerate(bias.shape):
        seen = seen.any(axis, keepdim=True) if size == 1 else seen
    bias = torch.where(seen, bias, math.nan)
    if case == 2:
        call["softcap"], slopes = 2.0, stream.normal(case, "alibi", shape[:2])
    as_array = {"alibi_slopes": None if slopes is None else slopes.numpy()}
    got = torch_reference.attention(*inputs, None, slopes, bias, **call, rows=20)
    arrays = as_arrays(inputs)
    want = numpy_reference.attention(*arrays, bias=bias.numpy(), **as_array, **call)
    dbias = torch_reference.bias_gradient(*inputs, None, slopes, bias, **call, rows=20)
    call |= {"in_dtype": dtype, "numerics": Numerics(block_n=block_n)}
    judged = error_model.judge(*inputs, None, slopes, bias, **call, rows=32)
    assert_within(got, want, Outputs(*(1e-12 * x for x in judged.terms)))
    want_bound = numpy_check.bound(*arrays, bias=bias.numpy(), **as_array, **call)
    closely = Outputs(*(1e-10 * torch.from_numpy(x) for x in want_bound))
    assert_within(judged.bound, want_bound, closely)
    call["bias_dtype"] = "fp32" if case == 1 and dtype != "fp64" else dtype
    judged_bias = bias_error(*inputs, None, slopes, bias, **call)
    value, bound = by_pairs(*arrays, bias.numpy(), **as_array, **call)
    assert ((dbias - torch.from_numpy(value)).abs() <= 1e-12 * judged_bias.terms).all()
    bound = torch.from_numpy(bound)
    assert ((judged_bias.bound - bound).abs() <= 1e-10 * bound).all()
    assert (judged_bias.bound[~seen] == 0).all()


def test_a_gradient_past_its_dtype_is_out_of_range():
    problem = dataclasses.replace(ASKED, mask=Mask(), dirty="zero")
    inputs = make(problem)
    inputs = inputs._replace(v=inputs.v * 1e5, dout=inputs.dout * 1e3)
    call = {"mask": Mask(), "sm_scale": 1.0, "in_dtype": "fp32", "numerics": Numerics()}
    assert bias_error(*inputs, **call, bias_dtype="fp32").out_of_range is None
    says = bias_error(*inputs, **call, bias_dtype="fp16").out_of_range
    assert says.startswith("|dbias| + bound reaches")
    assert says.endswith("needs to be at most 65504")


@pytest.mark.parametrize("name", BIASES)
def test_a_bias_is_finite_where_it_is_seen_and_dirty_elsewhere(name):
    problem = dataclasses.replace(ASKED, bias=name, dtype="fp16", dirty="inf")
    bias = make(problem).bias
    axes = name.partition("/")[2]
    sizes = {"b": 2, "h": 2, "m": 6, "n": 4}
    assert bias.shape == tuple(sizes[axis] if axis in axes else 1 for axis in "bhmn")
    assert bias.dtype == (torch.float32 if name.startswith("shifted") else torch.float16)
    of_all = bias.expand(2, 2, 6, 4)
    assert of_all[problem.mask.dense(2, 2, 6, 4).expand(2, 2, 6, 4)].isfinite().all()
    if {"m", "n"} <= set(axes):
        assert of_all[:, :, 0, 3].isinf().all()
    clean = make(problem, dirty="zero").bias
    assert clean.isfinite().all()


def test_a_bias_lies_in_memory_as_the_seed_says():
    strides = {
        make(dataclasses.replace(ASKED, bias="normal/bhmn", seed=seed)).bias.stride()
        for seed in range(5)
    }
    assert len(strides) == 5
    plain = make(ASKED, layouts=("bhsd",) * 4).bias
    assert plain.is_contiguous()


def test_a_bias_is_made_only_for_problems_with_one():
    assert make(Problem()).bias is None
    with pytest.raises(ValueError, match="bias is 'odd'; needs one of"):
        make(Problem(bias="odd"))


def test_problems_that_share_a_bias_are_not_batched():
    shared = problems(biases=("normal/hn",), max_seqlen=20, zero_sizes=False)
    apart = problems(biases=("normal/bn",), max_seqlen=20, zero_sizes=False)
    some = [drawn(batched_problems(x, tile=16, max_cost=40), 40) for x in (shared, apart)]
    assert not any(x.seeds for x in some[0])
    batched = next(x for x in some[1] if len(x.seeds) > 1)
    entries = batched.B // len(batched.seeds)
    whole, part = make(batched).bias, make(batched.part(1, 2)).bias
    assert torch.equal(whole[entries : 2 * entries], part)


@pytest.mark.parametrize(
    "name",
    checks_of("call", "statistics", "closed forms", "added"),
)
def test_a_right_subject_holds_every_guarantee(name):
    if name == "G12":
        pytest.skip("needs much memory")
    problem = MEASURED if name in {*checks_of("statistics", "closed forms")} else ASKED
    assert (
        found(
            Biased(),
            problem,
            {
                **checks_of("call", "statistics", "closed forms", "added"),
            }[name],
        )
        == []
    )


def test_a_bias_of_another_head_is_found():
    findings = found(Biased("bias of the head before"), ASKED, claims.accuracy)
    assert {x.output for x in findings} >= {"out", "lse"}
    assert '"bias":"normal/hmn"' in findings[0].replay


def test_a_gradient_that_is_not_summed_is_found():
    wrong = Biased("dbias of the first entry alone")
    assert found(wrong, ASKED, claims.accuracy) == []
    [finding] = found(wrong, ASKED, checks_of("added")["dbias"])
    assert (finding.guarantee, finding.output) == ("G1 accuracy", "dbias")
    assert str(finding).startswith("G1 accuracy: dbias of subject leaves the derived bound")


def test_a_gradient_of_nan_is_found():
    [finding] = found(Biased("dbias is NaN"), ASKED, checks_of("added")["dbias"])
    assert math.isnan(finding.got)


def test_both_identities_hold_of_a_bias():
    trial = run_trial(Subject.of(Biased(), "right"), MEASURED)
    assert identities(trial) == []
    wrong = trial.got._replace(dk=trial.got.dk + 1, dv=trial.got.dv + 1)
    assert {x.output for x in identities(dataclasses.replace(trial, got=wrong))} == {"dk", "dv"}


def test_errors_of_rows_that_few_keys_take_follow_no_average():
    assert is_valid(MEASURED)
    assert not is_valid(dataclasses.replace(MEASURED, bias="needles/hmn"))


def test_a_subject_that_does_not_declare_bias_excludes_it():
    assert Subject.of(Eager(), "plain").excludes(ASKED) == "plain declares score_mods ()"
    assert Subject.of(Biased(), "right").excludes(ASKED) is None


def test_a_bias_is_drawn_only_when_requested():
    assert len({x.bias for x in drawn(problems(biases=BIASES), 60)}) > 20
    assert {x.bias for x in drawn(problems(), 20)} == {NO_BIAS}
    with pytest.raises(ValueError, match="biases is"):
        problems(biases=("odd",))


def _called(inputs, bias, **arguments):
    from fa_kernels import flash_attention

    leaves = [x.detach().requires_grad_() for x in (*inputs[:3], bias)]
    out = flash_attention(*leaves[:3], bias=leaves[3], config="16x16", **arguments)
    return out.detach(), *torch.autograd.grad(out, leaves, inputs.dout)


@pytest.mark.parametrize("axes", AXES)
def test_the_call_has_the_gradient_of_any_shape(axes, device):
    pytest.importorskip("triton")
    mask = Mask(causal=True, seqlens_q=(17, 9), seqlens_k=(21, 5))
    problem = Problem(
        B=2, H=2, M=17, N=21, D=8, Dv=6, dtype="fp64", mask=mask, dirty="nan", device=device
    )
    inputs = make(problem)
    inputs = inputs._replace(bias=a_bias(0, (2, 2, 17, 21), axes).to(device))
    out, *gradients = _called(inputs, inputs.bias, mask=mask, sm_scale=0.4)
    call = {"mask": mask, "sm_scale": 0.4}
    want = torch_reference.attention(*inputs, **call)
    numbers = {"in_dtype": "fp64", "numerics": Numerics()}
    judged = error_model.judge(*inputs, **call, **numbers).bound
    dbias = torch_reference.bias_gradient(*inputs, **call)
    bound = bias_error(*inputs, **call, **numbers, bias_dtype="fp64").bound
    for got, true, most in zip(
        (out, *gradients),
        (want.out, *want[2:], dbias),
        (judged.out, *judged[2:], bound),
        strict=True,
    ):
        assert ((got - true).abs() <= most).all()


def test_a_bias_without_a_gradient_launches_nothing_for_it(device, monkeypatch):
    pytest.importorskip("triton")
    from fa_kernels import flash_attention
    from fa_kernels.launch import portable

    monkeypatch.setattr(portable, "dbias_kernel", None)
    inputs = make(Problem(M=5, N=5, dtype="fp32", bias="normal/mn", device=device))
    out = flash_attention(inputs.q.requires_grad_(), *inputs[1:3], bias=inputs.bias)
    out.sum().backward()
    assert inputs.q.grad is not None


@pytest.mark.parametrize("sizes", [{"M": 0}, {"N": 0}, {"B": 0}], ids=str)
def test_the_gradient_of_what_is_added_to_nothing_is_zero(sizes, device):
    pytest.importorskip("triton")
    inputs = make(Problem(**{"M": 5, "N": 5, "device": device, **sizes}))
    bias = torch.ones(1, 1, 1, 1, device=device)
    assert _called(inputs, bias)[-1].item() == 0.0


def test_an_expanded_bias_gets_the_gradient_of_every_element(device):
    pytest.importorskip("triton")
    inputs = make(Problem(B=2, M=17, N=5, dtype="fp64", device=device))
    row = stream.normal(0, "bias", (1, 1, 1, 5)).to(device)
    asked = {"mask": Mask(), "sm_scale": inputs.q.shape[3] ** -0.5, "softcap": None}
    for bias in (row.expand(2, 1, 17, 5), row):
        given = (*inputs.tensors, None, None, bias)
        bound = bias_error(
            *given, **asked, in_dtype="fp64", bias_dtype="fp64", numerics=Numerics()
        ).bound
        got, want = _called(inputs, bias)[-1], torch_reference.bias_gradient(*given, **asked)
        assert got.shape == bias.shape
        assert float(ratios(got, want, bound).amax()) <= 1


def test_autocast_casts_a_bias_as_it_does_the_rest(device):
    pytest.importorskip("triton")
    from fa_kernels import flash_attention

    inputs = make(Problem(M=5, N=5, dtype="fp32", bias="normal/mn", device=device))
    with torch.autocast(torch.device(device).type, torch.bfloat16):
        got = flash_attention(*inputs[:3], bias=inputs.bias)
    cast = [x.bfloat16() for x in (*inputs[:3], inputs.bias)]
    assert torch.equal(got, flash_attention(*cast[:3], bias=cast[3]))


def test_of_a_size_of_1_a_refusal_asks_for_1(device):
    from fa_kernels import flash_attention

    q, bias = torch.zeros(1, 2, 3, 8, device=device), torch.zeros(2, 3, device=device)
    one_key = q[:, :1, :1]
    with pytest.raises(ValueError, match=r"\(2, 3\); needs \(1, 2 or 1, 3 or 1, 1\)"):
        flash_attention(q, one_key, one_key, bias=bias)


def test_the_operators_pass_opcheck(device):
    pytest.importorskip("triton")
    from fa_kernels import operators
    from tests.unit.fa_kernels.call.test_opcheck import opcheck_backward
    from tests.unit.fa_kernels.call.test_operators import drawn as tensors
    from tests.unit.fa_kernels.call.test_operators import request

    q, k, v, dout = tensors(device)
    bias = a_bias(0, (2, 2, 5, 7), "hm").float().to(device).requires_grad_()
    asked = request((q, k, v), bias=bias)
    torch.library.opcheck(operators.forward, (q.requires_grad_(), k, v, *asked))
    asked = request((q, k, v), bias=bias.detach())
    saved = (q.detach(), k, v, *operators.forward(q.detach(), k, v, *asked), dout, None)
    opcheck_backward(
        saved, (True, False, False), (*asked, True), ("test_schema", "test_faketensor")
    )
