"""Checks of attention to codes find every planted fault, and right kernels hold."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch

from fa_verify.oracles.calls.quantised import CODE_FAMILIES, QuantisedProblem
from fa_verify.oracles.guarantee import Q1
from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.problem import Problem
from fa_verify.properties.guarantees.claims import checks_of, standing_of
from fa_verify.properties.inputs.quantised import make_quantised, whole_scales
from fa_verify.properties.kernels.loading import load
from fa_verify.properties.kernels.subject import Subject
from fa_verify.properties.kernels.supported import ExcludedError
from fa_verify.properties.kinds.quantised import draw, excludes, run
from fa_verify.verification import verify
from tests.altered.quantised import FAULTS, RIGHT, QuantisedForward, _dot, faulty, right
from tests.unit.properties.problems.sampling import drawn

CHECKS = checks_of(kind="quantised")
PROBLEM = QuantisedProblem(
    attention=Problem(
        B=2, H=4, Hk=2, M=7, N=70, D=32, dtype="bf16", dirty="nan",
        mask=Mask(causal=True, seqlens_k=(70, 33)),
    ),
    qk_scales="token", v_scales="channel",
)  # fmt: skip


def _findings(subject: Subject, count: int):
    """Yield the findings on drawn calls, those of Q1 on calls with padding and hidden keys."""
    for dtype, needs in itertools.product(subject.dtypes, ({}, {"padding": True, "hidden": True})):
        for problem in drawn(draw(subject, dtype=dtype, device="cpu", **needs), count):
            trial = run(subject, problem)
            if trial is not None:
                for name, check in CHECKS.items():
                    if needs or name == "accuracy":
                        yield from check(trial)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found(name):
    assert next(_findings(faulty(name), 40), None) is not None


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_kernel_holds(name):
    assert [*_findings(right(name), 5)] == []


@pytest.mark.parametrize("name", ["padding of v is read", "hidden keys in the maximum"])
def test_codes_that_a_row_does_not_see_change_a_bit_of_a_faulty_kernel(name):
    asked = {x.guarantee for x in _findings(faulty(name), 20)}
    assert Q1 in asked


def test_hidden_and_padded_codes_change_no_bit_of_a_right_kernel():
    trial = run(right("offset 8"), PROBLEM)
    for name in ("padded codes", "hidden codes"):
        assert CHECKS[name](trial) == []
    assert trial.asked[Q1.key] == ""


def test_a_problem_without_hidden_keys_says_so():
    plain = dataclasses.replace(PROBLEM.attention, mask=Mask())
    trial = run(right("plain"), dataclasses.replace(PROBLEM, attention=plain))
    for name in ("padded codes", "hidden codes"):
        assert CHECKS[name](trial) == []
        assert trial.asked[Q1.key].startswith("not applicable")


def _in_the_same_memory(problem: QuantisedProblem) -> QuantisedProblem:
    """Return a problem whose seed chooses a call after another one in the same memory."""
    attention = dataclasses.replace(problem.attention, seed=0)
    return dataclasses.replace(problem, attention=attention)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("D", [1, 32])
def test_every_way_of_a_call_gives_the_same_result(seed, D):
    attention = dataclasses.replace(PROBLEM.attention, seed=seed, D=D)
    trial = run(
        dataclasses.replace(right("plain"), head_dims=None),
        dataclasses.replace(PROBLEM, attention=attention),
    )
    assert CHECKS["ways"](trial) == []
    assert len(trial.asked) == 1


@pytest.mark.parametrize("name", ["q_scale", "k_scale", "v_scale"])
def test_a_scale_that_a_kernel_keeps_is_found(name):
    kept = {}

    def attention(q, k, v, q_scale, k_scale, v_scale, *, mask, sm_scale, out_dtype):
        scales = {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale}
        scales[name] = kept.setdefault(scales[name].data_ptr(), scales[name].clone())
        return QuantisedForward(block_n=32)(
            q, k, v, *scales.values(), mask=mask, sm_scale=sm_scale, out_dtype=out_dtype
        )

    plain = right("plain")
    trial = run(plain, _in_the_same_memory(PROBLEM))
    subject = dataclasses.replace(plain, call=attention, quantised=attention)
    assert CHECKS["ways"](dataclasses.replace(trial, subject=subject)) != []


@pytest.mark.parametrize("codes", CODE_FAMILIES)
@pytest.mark.parametrize("layout", ["head", "token", "block"])
def test_scales_of_neighbours_differ_by_nearly_a_power_of_two(codes, layout):
    problem = dataclasses.replace(PROBLEM, codes=codes, qk_scales=layout, blocks=(2, 8))
    problem = dataclasses.replace(
        problem, attention=dataclasses.replace(problem.attention, dirty="zero")
    )
    x = make_quantised(problem)
    for scale in (x.q_scale, x.k_scale, x.v_scale):
        for axis in range(scale.ndim):
            ratio = scale.diff(dim=axis).abs() / scale.narrow(axis, 0, scale.shape[axis] - 1)
            assert (ratio.amin() > 0.4) if ratio.numel() else True
    whole = whole_scales(problem, x)
    assert whole.k.shape == (2, 2, 70)
    assert float(whole.v[0, 0, 3]) == float(x.v_scale[0, 0, 3])


def test_codes_have_their_families():
    for codes in CODE_FAMILIES:
        x = make_quantised(dataclasses.replace(PROBLEM, codes=codes))
        q = x.q.float()
        sizes = {
            "extreme": (q.abs() == 448).float().mean() > 0.2,
            "zeros": (q == 0).float().mean() > 0.4,
            "subnormal": bool((q.abs() <= 2.0**-6).all()),
        }
        assert sizes.get(codes, True)
        # Entry 1 has padding from key 33 on.
        assert bool(x.k[1, :, 33:].float().isnan().all())
        assert bool(x.k_scale[1, :, 33:].isnan().all())
        assert not bool(x.k[1, :, :33].float().isnan().any())


def test_declarations_leave_formats_and_scales_out():
    subject = dataclasses.replace(right("plain"), qk_formats=("e5m2",), qk_scales=("head",))
    assert "qk_formats" in excludes(subject, PROBLEM)
    assert "qk_scales" in excludes(subject, dataclasses.replace(PROBLEM, qk="e5m2"))
    for problem in drawn(draw(subject, dtype="bf16", device="cpu"), 10):
        assert (problem.qk, problem.qk_scales) == ("e5m2", "head")
    with pytest.raises(ExcludedError, match="out of codes is in fp16 or bf16"):
        draw(subject, dtype="fp32", device="cpu")
    block = dataclasses.replace(PROBLEM, qk_scales="block")
    assert "scale_blocks" in excludes(right("plain"), block)


def _kernel(**declared):
    def attention(q, k, v, q_scale, k_scale, v_scale, *, mask, sm_scale, out_dtype):
        return QuantisedForward()(
            q, k, v, q_scale, k_scale, v_scale, mask=mask, sm_scale=sm_scale, out_dtype=out_dtype
        )

    vars(attention).update(quantised=True, block_n=32, **declared)
    return attention


def test_a_declared_p_that_saturates_is_refused():
    numerics = {"p_offset": 8}
    Subject.of(_kernel(quantised_numerics=numerics), "kernel")
    with pytest.raises(ValueError, match="leaves the range of e4m3fn"):
        Subject.of(_kernel(quantised_numerics=numerics, rescale_threshold=4.0), "kernel")
    with pytest.raises(ValueError, match="known are"):
        Subject.of(_kernel(quantised_numerics={"p_type": "e4m3fn"}), "kernel")
    with pytest.raises(ValueError, match="needs one of"):
        Subject.of(_kernel(quantised_numerics={"qk_bits": 22}), "kernel")


def test_verify_judges_a_kernel_of_codes_alone():
    report = verify(_kernel(max_seqlen=64), problems=3, device="cpu")
    assert report.findings == ()
    assert report.judged > 0
    assert {key.split()[0] for key in report.worst} == {"out", "lse"}


def test_a_kernel_without_the_scales_is_refused(tmp_path):
    file = tmp_path / "kernel.py"
    file.write_text("def attention(q, k, v, *, mask, sm_scale): ...\nattention.quantised = True\n")
    with pytest.raises(ValueError, match="needs \\(q, k, v, q_scale, k_scale, v_scale"):
        load(f"{file}:attention")


def test_sums_of_14_bits_keep_13_below_the_leading_one():
    """The measured tensor core: 2**12 + 2**-1 keeps the summand, and 2**12 + 2**-2 loses it."""
    for exponent, kept in ((-1, True), (-2, False)):
        a = torch.tensor([[64.0, 2.0**exponent, -(2.0**exponent)][:2]])
        b = torch.tensor([[64.0], [1.0]])
        want = 4096 + (2.0**exponent if kept else 0.0)
        assert float(_dot(a, b, None, 14)) == want
    # Both signs are truncated toward 0, and so is a sum with an earlier one.
    a, b = torch.tensor([[1.5 * 2.0**-2]]), torch.ones(1, 1)
    assert float(_dot(-a, b, torch.tensor([[4096.0]]), 14)) == 4096
    assert math.isclose(float(_dot(a, b, torch.tensor([[4096.0]]), 24)), 4096.375)


def test_the_standing_claim_is_the_bound():
    assert [x.name for x in standing_of("quantised")] == ["accuracy"]
