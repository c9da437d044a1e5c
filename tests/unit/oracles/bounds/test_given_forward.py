"""The backward given the forward's results: two implementations, and the bound that they imply."""

from __future__ import annotations

import dataclasses
import math
import random
import sys
from typing import Any

import numpy as np
import pytest
import torch

from fa_verify.oracles import stream
from fa_verify.oracles.bounds import backward as backward_module
from fa_verify.oracles.bounds import error_model, given_forward, replay
from fa_verify.oracles.bounds.bias import bias_error
from fa_verify.oracles.bounds.constants import constants
from fa_verify.oracles.bounds.in_numpy import given_forward as numpy_given_forward
from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.outputs import Numerics, Outputs
from fa_verify.oracles.reference import torch_reference
from tests.unit.oracles.bounds.emulated_kernel import CASTS, FAMILIES, Case, Emulated, draw
from tests.unit.oracles.bounds.test_bounds_agree import (
    DECLARATIONS,
    DTYPES,
    a_problem,
    as_arrays,
    assert_within,
)
from tests.unit.oracles.bounds.test_numpy_bound import DECLARATIONS as EMULATED
from tests.unit.oracles.bounds.test_numpy_bound import RUNGS


def reading(**numerics: Any) -> Numerics:
    """Numerics of a backward that reads out and lse."""
    return Numerics(**{"backward_reads": ("out", "lse"), **numerics})


READS = [(), ("out",), ("lse",), ("out", "lse"), ("m_and_l",), ("out", "m_and_l")]
ADDED = ["", "softcap", "alibi", "bias", "dlse", "softcap alibi bias dlse"]


class Drawn:
    """A problem, its score modifications, and a forward that errs by up to its bound."""

    def __init__(self, seed: str, numerics: Numerics, added: str = "", share: float = 1.0) -> None:
        draw = random.Random(seed)
        self.inputs, self.call, _ = a_problem(seed)
        self.dtype = seed.split("/")[0]
        q, k = self.inputs[:2]
        (B, H, M, _), N = q.shape, k.shape[2]
        rows = self.call["mask"].lengths(B, M, N)[0]
        self.mods: dict[str, torch.Tensor | None] = {"dlse": None, "alibi_slopes": None}
        self.bias = None
        if "dlse" in added:
            dlse = stream.normal(1, "dlse", (B, H, M)) * draw.choice([1, 30])
            for b, length in enumerate(rows):
                dlse[b, :, length:] = math.nan
            self.mods["dlse"] = dlse
        if "alibi" in added:
            self.mods["alibi_slopes"] = torch.rand(H, dtype=torch.float64)
        if "bias" in added:
            shape = tuple(draw.choice([1, size]) for size in (B, H, M, N))
            self.bias = stream.normal(2, "bias", shape)
        if "softcap" in added:
            self.call["softcap"] = draw.choice([0.7, 5.0])
        given = (*self.inputs, *self.mods.values(), self.bias)
        self.given_inputs = given
        self.truth = torch_reference.attention(*given, **self.call)
        self.call |= {"in_dtype": self.dtype, "numerics": numerics}
        self.judged = error_model.judge(*given, **self.call)
        generator = torch.Generator().manual_seed(draw.randrange(2**31))

        def moved(x: torch.Tensor, bound: torch.Tensor) -> torch.Tensor:
            signs = torch.randint(0, 2, x.shape, generator=generator) * 2 - 1
            return x + share * signs * bound

        self.out = moved(self.truth.out, self.judged.bound.out)
        self.lse = moved(self.truth.lse, self.judged.bound.lse)

    def conditioned(self, **options: Any) -> given_forward.Gradients:
        given = given_forward.returned(self.out, self.lse, self.call["numerics"])
        return given_forward.given_forward(*self.given_inputs, given=given, **self.call, **options)

    def arrays(self) -> dict[str, Any]:
        mods = {name: None if x is None else x.numpy() for name, x in self.mods.items()}
        return {"out": self.out.numpy(), "lse": self.lse.numpy(), **self.call, **mods}


def assert_both_agree(drawn: Drawn) -> None:
    got = drawn.conditioned()
    bias = None if drawn.bias is None else drawn.bias.numpy()
    value, limit = numpy_given_forward.backward(
        *as_arrays(drawn.inputs), bias=bias, **drawn.arrays()
    )
    terms = drawn.judged.terms
    scale = Outputs(*(1e-11 * x for x in terms))
    assert_within(Outputs(value.out, value.lse, *got[:3])._replace(
        out=drawn.out, lse=drawn.lse), value, scale)  # fmt: skip
    closely = Outputs(*(1e-10 * torch.from_numpy(x) for x in limit))
    nothing = torch.zeros_like(drawn.out), torch.zeros_like(drawn.lse)
    assert_within(Outputs(*nothing, *got[3:]), limit, closely)


@pytest.mark.parametrize("case", range(3))
@pytest.mark.parametrize("declared", DECLARATIONS)
@pytest.mark.parametrize("in_dtype", DTYPES)
def test_both_implementations_agree_for_every_declaration(in_dtype, declared, case):
    reads = READS[(case + len(declared)) % len(READS)] if case else ("out", "lse")
    numerics = Numerics(**DECLARATIONS[declared], backward_reads=reads)
    assert_both_agree(Drawn(f"{in_dtype}/{declared} given/{case}", numerics, share=0.5))


@pytest.mark.parametrize("case", range(2))
@pytest.mark.parametrize("added", ADDED)
@pytest.mark.parametrize("reads", READS)
@pytest.mark.parametrize("in_dtype", ["bf16", "fp32", "fp64"])
def test_both_implementations_agree_for_all_results_read_and_score_modifications(
    in_dtype, reads, added, case
):
    numerics = Numerics(backward_reads=reads, rescale_threshold=8.0 * case)
    assert_both_agree(Drawn(f"{in_dtype}/{reads} {added}/{case}", numerics, added, share=0.5))


@pytest.mark.parametrize("case", range(4))
@pytest.mark.parametrize("reads", READS)
@pytest.mark.parametrize("in_dtype", ["bf16", "fp32"])
def test_both_implementations_agree_on_the_gradient_of_a_bias(in_dtype, reads, case):
    added = ("bias", "softcap alibi bias dlse")[case % 2]
    conversion = ("unknown", "truncate")[case // 2]
    numerics = Numerics(backward_reads=reads, dots="tf32", tf32_conversion=conversion)
    drawn = Drawn(f"{in_dtype}/{reads} dbias/{case}", numerics, added, share=0.5)
    given = given_forward.returned(drawn.out, drawn.lse, numerics)
    got = bias_error(*drawn.given_inputs, **drawn.call, bias_dtype=in_dtype, given=given)
    value, limit = numpy_given_forward.bias_backward(
        *as_arrays(drawn.inputs), drawn.bias.numpy(), bias_dtype=in_dtype, **drawn.arrays()
    )
    assert ((got.dbias - torch.from_numpy(value)).abs() <= 1e-10 * got.terms + 1e-300).all()
    assert ((got.bound - torch.from_numpy(limit)).abs() <= 1e-10 * torch.from_numpy(limit)).all()


# With so many, the bound of running sums is the smaller one.
MANY_ROWS, MANY_KEYS = 1_700, 1_600


def of_many_keys(in_dtype: str, rows: int | None = None) -> given_forward.Gradients:
    """Gradients of many rows and keys given a forward, by PyTorch; NumPy's must agree."""
    sizes = (MANY_ROWS, MANY_KEYS, MANY_KEYS, MANY_ROWS)
    inputs = [stream.normal(i, "many", (1, 1, size, 3)) for i, size in enumerate(sizes)]
    call = {"mask": Mask(causal=True), "sm_scale": 0.7}
    truth = torch_reference.attention(*inputs, **call)
    call |= {"in_dtype": in_dtype, "numerics": reading(block_n=16)}
    given = given_forward.Returned(truth.out, truth.lse)
    got = given_forward.given_forward(*inputs, given=given, rows=rows, **call)
    if rows is None:
        _, limit = numpy_given_forward.backward(
            *as_arrays(inputs), out=truth.out.numpy(), lse=truth.lse.numpy(), **call
        )
        for x, want in zip(got[3:], limit[2:], strict=True):
            assert ((x - torch.from_numpy(want)).abs() <= 1e-9 * torch.from_numpy(want)).all()
    return got


@pytest.mark.parametrize("in_dtype", DTYPES)
def test_both_implementations_agree_on_running_sums(
    in_dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    got = of_many_keys(in_dtype)

    def unknown(total: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        return torch.full_like(total, torch.inf)

    for module in (backward_module, error_model):
        monkeypatch.setattr(module, "lost_of_running", unknown)
    in_any_order = of_many_keys(in_dtype, rows=MANY_ROWS)
    for bound, larger in zip(got[3:], in_any_order[3:], strict=True):
        assert (bound < larger).any()


@pytest.mark.parametrize("rows", [32, 256])
def test_chunks_of_rows_change_the_running_sums_by_little(rows: int) -> None:
    whole, chunked = of_many_keys("fp32"), of_many_keys("fp32", rows)
    for x, y in zip(whole, chunked, strict=True):
        assert ((x - y).abs() <= 0.1 * x.abs() + 1e-12).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_values_are_rounded_as_a_cast_rounds_them(dtype: torch.dtype) -> None:
    of = replay.stored_format({torch.float16: "fp16", torch.bfloat16: "bf16"}[dtype])
    assert of is not None
    # Exact in float32, whose casts round once: ties, subnormal numbers, both signs.
    bits = torch.randint(-(2**31), 2**31, (200_000,), generator=torch.Generator().manual_seed(0))
    x = bits.to(torch.int32).view(torch.float32)
    ties = torch.arange(-4000, 4000).to(torch.float32) * of.smallest / 2
    x = torch.cat([x[x.abs() < torch.finfo(dtype).max / 2], ties])
    got = replay.nearest(x.to(torch.float64), of.u, of.smallest)
    assert torch.equal(got, x.to(dtype).to(torch.float64))


def test_the_largest_and_the_smallest_numbers_have_their_power_of_two() -> None:
    powers = {
        1.0: 1.0, 1.5: 1.0, -2.0: 2.0, 0.75: 0.5, -0.0: 0.0, -1.5 * 2.0**1023: 2.0**1023,
        sys.float_info.max: 2.0**1023, sys.float_info.min: 2.0**-1022, 2.0**-1060: 0.0,
    }  # fmt: skip
    x, want = (torch.tensor([*y], dtype=torch.float64) for y in (powers, powers.values()))
    assert torch.equal(replay.power_of_two(x), want)
    assert torch.equal(replay.nearest(x[:6], 2.0**-11, 2.0**-24), x[:6])


@pytest.mark.parametrize("how", ["truncate", "nearest", "nearest_away"])
def test_operands_are_converted_to_tf32_as_their_bits_say(how: str) -> None:
    numerics = Numerics(dots="tf32", tf32_conversion=how)
    of = replay.operand_format("fp32", numerics)
    assert of is not None
    bits = torch.randint(-(2**31), 2**31, (200_000,), generator=torch.Generator().manual_seed(0))
    # Ties and their neighbours, and subnormal numbers.
    bits[:50_000] = (bits[:50_000] & ~0x1FFF) + 0x1000 + torch.arange(50_000) % 3 - 1
    x = torch.cat([bits, torch.arange(40_000)]).to(torch.int32).view(torch.float32)
    x = x[x.abs() < 2.0**127]
    want = Emulated(dtype="fp32", numerics=numerics).to_tf32(x.numpy())
    assert torch.equal(of.rounded(x.to(torch.float64)), torch.from_numpy(want).to(torch.float64))


def test_a_rounding_is_known_unless_two_neighbours_are_as_near() -> None:
    of = replay.stored_format("bf16")
    assert of is not None
    x = torch.tensor([1.0, 1 + 2.0**-8, 1 + 2.0**-9, 2.0**-127, -(2.0**-130)], dtype=torch.float64)
    middle, half = of.between(x, torch.full_like(x, 2.0**-12).minimum(x.abs() / 64))
    assert middle.tolist() == [1.0, 1 + 2.0**-8, 1.0, 65 * 2.0**-134, -(2.0**-131)]
    assert half.tolist() == [0.0, 2.0**-8, 0.0, 65 * 2.0**-134, 2.0**-131]


def test_sums_of_subnormal_numbers_may_err_by_more_than_their_roundings() -> None:
    """An H200 stored dv 3 x 2**-133 off, where u times the terms is 2**-150."""
    inputs = [stream.normal(i, "tiny", (1, 1, 40, 8)) for i in range(4)]
    inputs[3] *= 2.0**-133
    call = {"mask": Mask(), "sm_scale": 0.3}
    truth = torch_reference.attention(*inputs, **call)
    got = given_forward.given_forward(
        *inputs, given=given_forward.Returned(truth.out, truth.lse), in_dtype="bf16",
        numerics=reading(), **call,
    )  # fmt: skip
    assert (got.dv_bound >= 3 * 2.0**-133).all()


@pytest.mark.parametrize("added", ["", "softcap", "alibi", "bias"])
@pytest.mark.parametrize("in_dtype", DTYPES)
def test_given_the_true_forward_the_gradients_are_the_true_ones(in_dtype, added):
    drawn = Drawn(f"{in_dtype}/true {added}/0", reading(), added, share=0.0)
    got = drawn.conditioned()
    for name in ("dq", "dk", "dv"):
        want, terms = (getattr(x, name) for x in (drawn.truth, drawn.judged.terms))
        # Casts to 16 bits are replayed.
        most = getattr(drawn.judged.bound, name) if in_dtype in ("fp16", "bf16") else 0.0
        error = (getattr(got, name) - want).abs()
        assert (error <= most + 1e-12 * terms + 1e-300).all(), name


def whole_bound(drawn: Drawn, monkeypatch: pytest.MonkeyPatch) -> Outputs[torch.Tensor]:
    """The bound of the gradients with 3u B in the exponent and FTZ |dout|.B_out in e."""
    read_of, gradient = backward_module.read_of, backward_module.score_gradient

    def with_lse(fwd, c):
        read = read_of(fwd, c)
        more = 3 * c.u * fwd.lse_bound.unsqueeze(2)
        return read._replace(exponent_error=read.exponent_error + more)

    def with_out(x, read, c, p_rounded):
        of = gradient(x, read, c, p_rounded)
        more = c.ftz * (x.dout.abs() * read.out_bound).sum(2, keepdim=True)
        return of._replace(error=(of.error + more).masked_fill(x.hidden, 0.0))

    monkeypatch.setattr(error_model, "read_of", with_lse)
    monkeypatch.setattr(backward_module, "score_gradient", with_out)
    bound = error_model.judge(*drawn.given_inputs, **drawn.call).bound
    monkeypatch.undo()
    return bound


@pytest.mark.parametrize("case", range(8))
@pytest.mark.parametrize("declared", DECLARATIONS)
@pytest.mark.parametrize("in_dtype", DTYPES)
def test_the_bounds_of_forward_and_backward_imply_the_bound_of_the_whole(
    in_dtype, declared, case, monkeypatch
):
    added = ("", "softcap", "alibi", "bias")[case % 4]
    numerics = reading(**DECLARATIONS[declared])
    # A float64 bound is doubled: one half is the error of the oracle.
    share = 0.5 if in_dtype == "fp64" else 1.0
    drawn = Drawn(f"{in_dtype}/{declared} whole/{case}", numerics, added, share)
    given, bound = drawn.conditioned(), whole_bound(drawn, monkeypatch)
    for name in ("dq", "dk", "dv"):
        value, limit = getattr(given, name), getattr(given, f"{name}_bound")
        want, most = getattr(drawn.truth, name), getattr(bound, name)
        terms = getattr(drawn.judged.terms, name)
        implied = (value - want).abs() + limit
        assert (implied <= most * (1 + 1e-12) + 1e-14 * terms).all(), name


def worst_shares(kernel: Emulated, case: Case) -> list[float]:
    """The largest error of dq, dk and dv as shares of their bounds given out and lse."""
    got = kernel(case)
    numerics = dataclasses.replace(kernel.numerics, backward_reads=("out", "lse"))
    value, limit = numpy_given_forward.backward(
        *case.arrays, out=got.out.astype(float), lse=got.lse.astype(float), mask=case.mask,
        sm_scale=case.sm_scale, in_dtype=case.dtype, numerics=numerics, dlse=case.dlse,
    )  # fmt: skip
    shares = []
    for x, y, most in zip(got[2:], value[2:], limit[2:], strict=True):
        error = np.abs(x - y)
        assert np.isfinite(most).all()
        assert ((error == 0) | (most > 0)).all()
        shares.append(float((error / np.where(most > 0, most, 1)).max(initial=0.0)))
    return shares


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("rung", RUNGS)
def test_an_emulated_backward_stays_within_the_bound_given_its_forward(rung, family):
    dtype, numerics = RUNGS[rung]
    for seed in range(4):
        case = draw(100 + seed, dtype, family)
        if seed % 2:
            dlse = np.random.default_rng(seed).standard_normal(case.arrays[0].shape[:3])
            case = case._replace(dlse=CASTS["fp32"](10 * dlse) * 1.0)
        kernel = Emulated(dtype=dtype, numerics=numerics, reverse=seed >= 2)
        assert max(worst_shares(kernel, case)) <= 1, seed


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("declaration", EMULATED)
def test_an_emulated_backward_stays_within_the_bound_of_what_it_declares(declaration, dtype):
    kernel = Emulated(dtype=dtype, numerics=EMULATED[declaration])
    for seed, family in enumerate(("normal", "scores times 8", "tiny values", "low lse")):
        assert max(worst_shares(kernel, draw(200 + seed, dtype, family))) <= 1, family


@pytest.mark.parametrize("implementation", ["PyTorch", "NumPy"])
def test_a_subnormal_operand_costs_the_other_products_their_last_digits(implementation) -> None:
    """An H100 stored dv one spacing off where dout was subnormal and dv near half a spacing.

    Here P' dout is -2.50007 spacings after the cast of P, and -2.5 if tensor cores cut off each
    product 25 digits below 2**-15: the exponent of P = 0.83 and that of the smallest normal number.
    """
    q = torch.tensor([-11.4, -13.1, -8.55, 1.58]).half().double().view(1, 1, 4, 1)
    k = torch.tensor([1.0, 0.0], dtype=torch.float64).view(1, 1, 2, 1)
    spacing = 2.0**-24
    dout = spacing * torch.tensor([-46.0, -12.0, -63.0, -3.0], dtype=torch.float64).view(1, 1, 4, 1)
    inputs, call = (q, k, k, dout), {"mask": Mask(), "sm_scale": 1.0}
    truth = torch_reference.attention(*inputs, **call)
    call |= {"in_dtype": "fp16", "numerics": reading()}
    if implementation == "PyTorch":
        given = given_forward.Returned(truth.out, truth.lse)
        got = given_forward.given_forward(*inputs, given=given, **call)
        dv, most = got.dv[0, 0, 0].item(), got.dv_bound[0, 0, 0].item()
    else:
        value, limit = numpy_given_forward.backward(
            *as_arrays(inputs), out=truth.out.numpy(), lse=truth.lse.numpy(), **call
        )
        dv, most = value.dv[0, 0, 0].item(), limit.dv[0, 0, 0].item()
    assert abs(-3 * spacing - dv) <= most
    assert abs(-2 * spacing - dv) <= most


def test_a_row_and_a_key_without_a_partner_are_exact() -> None:
    drawn = Drawn("fp16/empty/0", reading())
    mask = Mask(causal=True, seqlens_q=(30,), seqlens_k=(20,))
    inputs = [stream.normal(i, "x", (1, 2, 40, 8)) for i in range(4)]
    call = drawn.call | {"mask": mask}
    truth = torch_reference.attention(*inputs, mask=mask, sm_scale=call["sm_scale"])
    out = truth.out.index_fill(2, torch.arange(10), math.nan)
    given = given_forward.Returned(out, truth.lse)
    got = given_forward.given_forward(*inputs, given=given, **call)
    assert all(x.isfinite().all() for x in got)
    for x in (got.dq, got.dq_bound):
        assert (x[:, :, :10] == 0).all()
        assert (x[:, :, 30:] == 0).all()
    for x in (got.dk_bound, got.dv_bound):
        assert (x[:, :, 20:] == 0).all()
    for x in (got.dk, got.dv):
        assert (x[:, :, :20] != 0).all()


def test_the_sum_and_the_maximum_cost_the_roundings_of_a_logarithm() -> None:
    """One key: P is 1 and lse is s, so dv_bound has expm1(F0) and the casts."""
    one = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    bounds = {}
    for reads in (("out", "lse"), ("out", "m_and_l")):
        numerics = Numerics(backward_reads=reads, p_dtype="fp32")
        given = given_forward.Returned(one, 3 * one[..., 0])
        bounds[reads[1]] = given_forward.given_forward(
            one, 3 * one, one, one, given=given, mask=Mask(), sm_scale=1.0, in_dtype="fp32",
            numerics=numerics,
        ).dv_bound.item()  # fmt: skip
    c = constants("fp32", reading())
    assert bounds["m_and_l"] - bounds["lse"] == pytest.approx(c.u_log + 6 * c.u, rel=1e-4)


@pytest.mark.parametrize("sizes", [(0, 5, 4), (2, 0, 4), (2, 5, 0)])
def test_sizes_of_zero_are_exact(sizes: tuple[int, int, int]) -> None:
    B, M, N = sizes
    q, k = torch.zeros(B, 2, M, 3), torch.zeros(B, 1, N, 3)
    given = given_forward.Returned(q, q[..., 0])
    got = given_forward.given_forward(
        q, k, k, q, given=given, mask=Mask(), sm_scale=1.0, in_dtype="fp32", numerics=Numerics()
    )
    assert [tuple(x.shape) for x in got] == [tuple(x.shape) for x in (q, k, k) * 2]
    assert not any(np.any(x.numpy()) for x in got)
