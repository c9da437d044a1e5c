"""Sinks and their gradient: in the oracles, in the call, and in declarations of subjects."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from fa_verify.oracles import stream
from fa_verify.oracles.bounds import error_model
from fa_verify.oracles.bounds.given_forward import Returned, given_forward, returned
from fa_verify.oracles.bounds.in_numpy import bound as numpy_check
from fa_verify.oracles.bounds.in_numpy.given_forward import backward
from fa_verify.oracles.bounds.in_numpy.sinks import sink_gradient as by_rows
from fa_verify.oracles.bounds.sinks import sink_error
from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.outputs import Numerics, Outputs
from fa_verify.oracles.problem import Problem
from fa_verify.oracles.reference import numpy_reference, torch_reference
from fa_verify.properties.guarantees import claims
from fa_verify.properties.guarantees.claims import checks_of
from fa_verify.properties.guarantees.compare import ratios
from fa_verify.properties.guarantees.identities import identities
from fa_verify.properties.guarantees.statistics import is_valid
from fa_verify.properties.inputs.families import SINKS
from fa_verify.properties.inputs.sink_families import NO_SINKS
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

# Padding, rows without a visible key, and a head without a sink.
ASKED = Problem(
    B=2, H=2, M=6, N=4, D=3, Dv=2, dtype="fp64", dirty="nan", sinks="some_absent", seed=1,
    mask=Mask(causal=True, seqlens_q=(5, 6), seqlens_k=(3, 4)), dlse="normal",
)  # fmt: skip
MEASURED = Problem(H=2, M=40, N=40, dtype="bf16", sinks="ordinary")

READS = ((), ("out",), ("lse",), ("out", "lse"), ("out", "m_and_l"))


def sinks_of(seed, H):
    """Sinks of which one is -inf, one far below all scores, and one far above them."""
    sinks = stream.normal(seed, "sinks", (H,))
    for place, value in enumerate((-math.inf, 30.0, -1e4)[: H - 1], 1):
        sinks[place] = value
    return sinks


def close(got, want, scale):
    return bool(((got - torch.from_numpy(want)).abs() <= 1e-10 * scale + 1e-300).all())


@pytest.mark.parametrize("case", range(6))
@pytest.mark.parametrize("dtype", DTYPES)
def test_references_and_bounds_agree(dtype, case):
    inputs, call, block_n = a_problem(f"{dtype}/sinks/{case}")
    B, H, M, _ = inputs[0].shape
    sinks, dlse = sinks_of(case, H), stream.normal(case, "dlse", (B, H, M)) if case % 2 else None
    softcap = 2.0 if case == 3 else None
    given, arrays = (*inputs, dlse, None, None, sinks), as_arrays(inputs)
    call["softcap"] = softcap
    in_numpy = {"dlse": None if dlse is None else dlse.numpy(), **call}
    got = torch_reference.attention(*given, **call, rows=20)
    want = numpy_reference.attention(*arrays, sinks=sinks.numpy(), **in_numpy)
    numerics = Numerics(
        block_n=block_n, splits=1 + 2 * (case == 1), l_order="tile" if case == 2 else "any",
        rescale_threshold=8.0 * (case == 4), flushes=case == 5,
        backward_reads=READS[case % len(READS)],
    )  # fmt: skip
    dsinks = torch_reference.sink_gradient(*given, **call, rows=20)
    of_dtype = {"in_dtype": dtype, "numerics": numerics}
    call |= of_dtype
    in_numpy |= of_dtype
    judged = error_model.judge(*given, **call, rows=32)
    assert_within(got, want, Outputs(*(1e-12 * x for x in judged.terms)))
    want_bound = numpy_check.bound(*arrays, sinks=sinks.numpy(), **in_numpy)
    closely = Outputs(*(1e-10 * torch.from_numpy(x) for x in want_bound))
    assert_within(judged.bound, want_bound, closely)
    of_sinks = sink_error(*given, **call, rows=32)
    value, bound = by_rows(*arrays, sinks.numpy(), **in_numpy)
    assert close(dsinks, value, of_sinks.terms)
    assert close(of_sinks.dsinks, value, of_sinks.terms)
    assert close(of_sinks.bound, bound, of_sinks.bound)
    # As a kernel might return them.
    out, lse = got.out * (1 + 1e-3), got.lse + 1e-3
    read = returned(out, lse, numerics)
    of_sinks = sink_error(*given, **call, given=read, rows=32)
    value, bound = by_rows(*arrays, sinks.numpy(), **in_numpy, given=(out.numpy(), lse.numpy()))
    assert close(of_sinks.dsinks, value, of_sinks.terms)
    assert close(of_sinks.bound, bound, of_sinks.bound)
    gradients = given_forward(*given, given=read, **call, rows=32)
    values, bounds = backward(
        *arrays, out=out.numpy(), lse=lse.numpy(), sinks=sinks.numpy(), **in_numpy
    )
    for name in ("dq", "dk", "dv"):
        limit = getattr(gradients, f"{name}_bound")
        terms = getattr(judged.terms, name)
        assert close(getattr(gradients, name), getattr(values, name), terms)
        assert close(limit, getattr(bounds, name), limit)


class Sunk(Eager):
    """A subject that rounds only its results, and is correct unless it has a fault."""

    score_mods = ("softcap", "alibi", "bias", "sinks")
    lse_grad = True

    def __call__(self, q, k, v, **arguments):
        out, lse = super().__call__(q.double(), k.double(), v.double(), **arguments)
        return out.to(q.dtype), lse if q.dtype == torch.float64 else lse.float()


def found(subject, problem, claim):
    return Runner(Subject.of(subject, "subject"), Tally()).findings(problem, claim)


@pytest.mark.parametrize(
    "name",
    checks_of("call", "statistics", "closed forms", "added"),
)
@pytest.mark.parametrize("family", SINKS)
def test_a_right_subject_holds_every_guarantee(name, family):
    if name == "G12":
        pytest.skip("needs much memory")
    problem = MEASURED if name in {*checks_of("statistics", "closed forms")} else ASKED
    checks = {
        **checks_of("call", "statistics", "closed forms", "added"),
    }
    assert found(Sunk(), dataclasses.replace(problem, sinks=family), checks[name]) == []


@pytest.mark.parametrize("sizes", [{"N": 0}, {"M": 0}, {"B": 0}], ids=str)
def test_a_right_subject_lies_within_the_bound_of_sizes_of_zero(sizes):
    problem = dataclasses.replace(ASKED, mask=Mask(), **sizes)
    assert found(Sunk(), problem, claims.accuracy) == []


def test_without_keys_lse_is_the_sink_and_takes_its_gradient():
    inputs = make(dataclasses.replace(ASKED, N=0, sinks="ordinary", mask=Mask(seqlens_q=(5, 6))))
    call = {"mask": Mask(seqlens_q=(5, 6)), "sm_scale": 1.0}
    got = torch_reference.attention(*inputs, **call)
    assert torch.equal(got.lse[1], inputs.sinks.double()[:, None].expand(2, 6))
    assert (got.lse[0, :, 5] == -math.inf).all()
    dsinks = torch_reference.sink_gradient(*inputs, **call)
    dlse = torch.where(got.lse > -math.inf, inputs.dlse, 0.0)
    assert torch.allclose(dsinks, dlse.sum((0, 2)))


@pytest.mark.parametrize("fault", ["sink of the head before", "lse without the sink"])
def test_a_wrong_sink_is_found(fault):
    problem = dataclasses.replace(ASKED, sinks="ordinary")
    findings = found(Sunk(fault), problem, claims.accuracy)
    assert findings
    assert '"sinks":"ordinary"' in findings[0].replay


def test_a_gradient_that_is_not_summed_is_found():
    wrong = Sunk("dsinks of the first entry alone")
    assert found(wrong, ASKED, claims.accuracy) == []
    [finding] = found(wrong, ASKED, checks_of("added")["dsinks"])
    assert (finding.guarantee, finding.output) == ("G1 accuracy", "dsinks")


def test_neither_identity_is_asked_of_sinks():
    trial = run_trial(Subject.of(Sunk(), "right"), MEASURED)
    assert is_valid(MEASURED)
    assert identities(trial) == []
    assert not is_valid(dataclasses.replace(MEASURED, sinks="dominant"))


def test_problems_with_sinks_are_not_batched():
    some = drawn(batched_problems(problems(sinks=tuple(SINKS)), tile=16, max_cost=40), 40)
    assert not any(x.seeds for x in some)


def test_a_subject_that_does_not_declare_sinks_excludes_them():
    plain = dataclasses.replace(ASKED, dlse="none")
    assert Subject.of(Eager(), "plain").excludes(plain) == "plain declares score_mods ()"
    assert Subject.of(Sunk(), "right").excludes(ASKED) is None


def test_sinks_are_drawn_only_when_requested():
    assert {x.sinks for x in drawn(problems(sinks=tuple(SINKS)), 60)} == {*SINKS}
    assert {x.sinks for x in drawn(problems(), 20)} == {NO_SINKS}


def test_sinks_are_made_as_problems_name_them():
    made = make(dataclasses.replace(ASKED, H=4, sinks="some_absent")).sinks
    assert made.dtype == torch.float32
    assert made.stride() == (2,)
    assert made.isinf().tolist() == [False, True, False, True]
    assert make(Problem()).sinks is None
    with pytest.raises(ValueError, match="sinks is 'odd'; needs one of"):
        make(Problem(sinks="odd"))


CONFIGS = ["16x32", "16x16-split3"]


def called(inputs, sinks, **options):
    """out, lse, and the gradients of q, k, v and the sinks, by the kernels."""
    from fa_kernels import flash_attention

    leaves = [x.detach().requires_grad_() for x in (*inputs[:3], sinks)]
    out, lse = flash_attention(*leaves[:3], sinks=leaves[3], return_lse=True, **options)
    losses = [inputs.dout, torch.ones_like(lse) if inputs.dlse is None else inputs.dlse]
    return out, lse, torch.autograd.grad([out, lse], leaves, losses)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("dtype", ["fp16", "fp64"])
def test_sinks_of_minus_infinity_change_no_bit(dtype, config, device):
    pytest.importorskip("triton")
    from fa_kernels import flash_attention

    inputs = make(Problem(H=2, M=37, N=41, dtype=dtype, device=device))
    options = {"causal": True, "config": config, "return_lse": True}
    none = torch.full((2,), -math.inf, device=device)
    got = flash_attention(*inputs[:3], sinks=none, **options)
    want = flash_attention(*inputs[:3], **options)
    assert all(map(torch.equal, got, want))
    _, _, gradients = called(inputs, none, causal=True, config=config)
    assert not gradients[3].any()


@pytest.mark.parametrize("config", CONFIGS)
def test_sinks_of_any_stride_get_a_gradient_of_fixed_bits(config, device):
    pytest.importorskip("triton")
    problem = Problem(B=2, H=4, Hk=2, M=33, N=35, dtype="bf16", device=device, dlse="normal")
    inputs = make(dataclasses.replace(problem, sinks="ordinary"))
    strided, options = inputs.sinks, {"causal": True, "config": config}
    assert not strided.is_contiguous()
    results = [called(inputs, x, **options) for x in (strided, strided.contiguous(), strided)]
    for other in results[1:]:
        assert torch.equal(results[0][2][3], other[2][3])
        assert all(map(torch.equal, results[0][:2], other[:2]))
    alone = called(inputs, strided, **options)[2][3]
    assert torch.equal(alone, results[0][2][3])


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("value", [1e38, 3e4, -1e38, 0.0])
def test_a_row_without_a_key_has_the_lse_of_its_sink(value, config, device):
    pytest.importorskip("triton")
    inputs = make(Problem(B=2, M=5, N=7, mask=Mask(seqlens_k=(0, 7)), device=device))
    sinks = torch.full((1,), value, device=device)
    out, lse, gradients = called(inputs, sinks, seqlens_k=(0, 7), config=config)
    assert not out[0].any()
    assert ((lse[0] - value).abs() <= abs(value) * 2.0**-22).all()
    assert out[1].isfinite().all()
    assert all(x.isfinite().all() for x in gradients)
    # Every row of the first entry passes its gradient of lse, 1, to the sink.
    assert float(gradients[3]) >= 5 - 1e-3


@pytest.mark.parametrize("sizes", [{"N": 0}, {"M": 0}, {"B": 0}], ids=str)
def test_kernels_take_sinks_of_sizes_of_zero(sizes, device):
    pytest.importorskip("triton")
    inputs = make(Problem(**{"H": 2, "M": 5, "N": 5, "device": device, **sizes}))
    sinks = torch.tensor([0.5, -1.0], device=device)
    _, lse, gradients = called(inputs, sinks)
    assert torch.equal(gradients[3], torch.full((2,), float(lse.shape[0] * lse.shape[2])).to(lse))


def test_packed_sequences_leave_rows_of_no_sequence_out_of_dsinks(device):
    pytest.importorskip("triton")
    from fa_kernels import flash_attention_varlen

    q, k, v = (stream.normal(i, "packed", (150, 2, 8), device).half() for i in range(3))
    for x in (q, k, v):
        x[:3] = x[140:] = math.nan
    sinks = torch.tensor([0.5, -1.0], device=device, requires_grad=True)
    offsets = {"cu_seqlens_q": (3, 3, 90, 140), "cu_seqlens_k": (3, 40, 100, 140)}
    _, lse = flash_attention_varlen(q, k, v, sinks=sinks, **offsets, return_lse=True)
    dlse = torch.full_like(lse, math.nan)
    dlse[:, 3:140] = 1.0
    (dsinks,) = torch.autograd.grad(lse, sinks, dlse)
    shares = (sinks.detach().view(-1, 1) - lse[:, 3:140]).exp().sum(1)
    assert torch.allclose(dsinks, shares, rtol=1e-5)


def test_dsinks_lie_within_the_bound_beside_every_score_modification(device):
    pytest.importorskip("triton")
    problem = Problem(
        B=2, H=4, Hk=2, M=21, N=35, dtype="fp32", device=device, softcap=2.0, alibi="normal",
        bias="normal/hmn", sinks="dominant", dlse="normal", seed=3,
    )  # fmt: skip
    inputs = make(problem)
    out, lse, gradients = called(
        inputs, inputs.sinks, softcap=2.0, alibi_slopes=inputs.alibi_slopes, bias=inputs.bias,
        config="16x32",
    )  # fmt: skip
    call = {"mask": problem.mask, "sm_scale": problem.scale, "softcap": 2.0}
    numbers = {"in_dtype": "fp32", "numerics": Numerics(backward_reads=("out", "lse"))}
    want = torch_reference.sink_gradient(*inputs, **call)
    bound = sink_error(*inputs, **call, **numbers).bound
    assert float(ratios(gradients[3], want, bound).amax()) <= 1
    read = Returned(out.detach(), lse.detach())
    given = sink_error(*inputs, **call, **numbers, given=read)
    assert (given.bound < bound).all()
    assert float(ratios(gradients[3], given.dsinks, given.bound).amax()) <= 1


def test_autocast_leaves_sinks_as_they_are(device):
    pytest.importorskip("triton")
    from fa_kernels import flash_attention

    inputs = make(Problem(M=5, N=5, dtype="fp32", sinks="ordinary", device=device))
    with torch.autocast(torch.device(device).type, torch.bfloat16):
        got = flash_attention(*inputs[:3], sinks=inputs.sinks)
    cast = [x.bfloat16() for x in inputs[:3]]
    assert torch.equal(got, flash_attention(*cast, sinks=inputs.sinks))


def test_the_operators_pass_opcheck(device):
    pytest.importorskip("triton")
    from fa_kernels import operators
    from tests.unit.fa_kernels.call.test_opcheck import opcheck_backward
    from tests.unit.fa_kernels.call.test_operators import drawn as tensors
    from tests.unit.fa_kernels.call.test_operators import request

    q, k, v, dout = tensors(device)
    sinks = stream.normal(0, "sinks", (2,)).float().to(device).requires_grad_()
    asked = request((q, k, v), sinks=sinks)
    torch.library.opcheck(operators.forward, (q.requires_grad_(), k, v, *asked))
    asked = request((q, k, v), sinks=sinks.detach())
    saved = (q.detach(), k, v, *operators.forward(q.detach(), k, v, *asked), dout, None)
    opcheck_backward(
        saved, (True, False, False), (*asked, False, True), ("test_schema", "test_faketensor")
    )
