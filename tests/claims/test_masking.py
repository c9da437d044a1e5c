"""Claims K5, K6, K9 and K14: tails without a mask, dropped rows, and additive masks."""

from __future__ import annotations

import math

import pytest
import torch

from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.stream import normal
from fa_verify.properties.guarantees.compare import same_bits
from fa_verify.properties.inputs.families import TORCH_DTYPES
from tests.claims.launching import differentiate, tensors
from tests.claims.online import attend, blocks, softmax
from tests.mutation.catalogue.mutant import Edit

LN2, LOG2E = math.log(2), 1 / math.log(2)
# Rounding error of float64, in units of the sum of |terms|.
SHARE = 1e-12
MASK = "fa_kernels/kernels/common/mask.py"
FORWARD, DQ = (f"fa_kernels/kernels/portable/{name}.py" for name in ("forward", "dq"))
NO_MASK_OVER_KEYS = Edit(MASK, " & (offs_n < mask.seqlen_k)", "")
NO_SELECT_IN_DQ = Edit(DQ, "ds = tl.where(seen, ds, 0.0)", "ds = ds")
ADDED_MASK = Edit(
    FORWARD,
    'tl.where(seen, scores, -float("inf"))',
    "scores + tl.where(seen, 0.0, -1e6)",
)


@pytest.mark.parametrize("N", [16, 17, 25, 31])
@pytest.mark.parametrize("offset", [-40.0, -10.0, 0.0, 10.0])
def test_k05_unmasked_zero_padding_inflates_l_by_2_to_the_minus_m_for_each_key(N, offset):
    """K5 is wrong: padding adds 2^-m each, not 1. Padding makes the running maximum m >= 0."""
    scores2 = normal(1, "scores", (9, N)) + offset
    v, n_pad = normal(1, "v", (N, 4)), -N % 16
    padded = torch.nn.functional.pad(scores2, (0, n_pad))
    padded_v = torch.nn.functional.pad(v, (0, 0, 0, n_pad))
    clean = attend(scores2, v, blocks(N, 16), exp=torch.exp2)
    got = attend(padded, padded_v, blocks(N + n_pad, 16), exp=torch.exp2)
    m = clean.m.clamp(min=0) if n_pad else clean.m
    l = clean.l * torch.exp2(clean.m - m) + n_pad * torch.exp2(-m)  # noqa: E741
    assert torch.equal(got.m, m)
    assert ((got.l - l).abs() <= SHARE * l).all()


@pytest.mark.parametrize("N", [16, 17, 25, 31])
@pytest.mark.parametrize("offset", [-40.0, -10.0, 0.0, 10.0])
def test_k05_it_shrinks_out_by_1_plus_n_pad_2_to_the_minus_lse2(edited, device, N, offset):
    """K5 in a float64 kernel: the LSE grows by the logarithm of the factor that divides out."""
    copy = edited("k05_no_mask_over_keys", NO_MASK_OVER_KEYS)
    scores, v = normal(2, "scores", (9, N)) + offset, normal(2, "v", (N, 4))
    inputs = tensors(device, torch.float64, scores, torch.eye(N), v, torch.ones(9, 4))
    got = differentiate(copy, *inputs, sm_scale=1.0)
    truth = softmax(scores, v)
    growth = 1 + -N % 16 * torch.exp2(-truth.lse * LOG2E)
    lse = truth.lse + growth.log()
    assert ((got.lse[0, 0].cpu() - lse).abs() <= SHARE * (1 + lse.abs() + truth.lse.abs())).all()
    terms = softmax(scores, v.abs()).out
    # exp(-LSE) carries the rounding of LSE.
    assert (
        (got.out[0, 0].cpu() * growth[:, None] - truth.out).abs()
        <= SHARE * (1 + truth.lse.abs())[:, None] * terms
    ).all()


FIRST_NAN = {
    # The largest LSE2 at which the tail of dq is NaN, for |delta| of 0, 1/16, 1 and 16.
    "fp16": (-128, -20, -16, -12),
    "bf16": (-128, -128, -128, -124),
    "fp32": (-128, -128, -128, -124),
}
DELTAS = (0.0, 1 / 16, 1.0, 16.0)


@pytest.mark.parametrize("dtype", FIRST_NAN)
def test_k06_without_a_mask_on_its_tail_dq_is_nan_where_delta_2_to_the_minus_lse2_overflows(
    kernels, edited, device, dtype
):
    """K6 rightly demands a mask, for another reason: the tail's dS is -delta 2^-LSE2, not 2^-LSE2.

    In fp16 it is NaN if |delta| 2^-LSE2 >= 65520 (at LSE2 = -20 for delta = 1/16), or if P is
    infinite, from LSE2 = -128. In bf16 and fp32 it is NaN if P or the product overflows. For larger
    LSE2 no bit changes. Rows have one key with v = 1: LSE2 is the score and delta is dout.
    """
    copy = edited("k06_no_select_in_dq", NO_SELECT_IN_DQ)
    rows = [
        (delta * sign, first + step)
        for delta, first in zip(DELTAS, FIRST_NAN[dtype], strict=True)
        for sign in (1, -1)
        for step in (1 / 16, -1 / 16)
    ]
    delta, lse2 = torch.tensor(rows, dtype=torch.float64).T
    # Two columns hold the score, since -128 - 1/16 has too many digits for bf16. The scale ln 2
    # makes q.k the score in base 2.
    q = torch.stack([lse2.ceil(), lse2 - lse2.ceil()], 1)
    inputs = tensors(
        device, TORCH_DTYPES[dtype], q, torch.ones(1, 2), torch.ones(1, 1), delta[:, None]
    )
    got, want = (differentiate(x, *inputs, sm_scale=LN2) for x in (copy, kernels))
    is_nan = got.dq[0, 0].isnan().any(1).cpu()
    first = torch.tensor(FIRST_NAN[dtype]).repeat_interleave(4)
    assert torch.equal(is_nan, lse2 <= first)
    assert same_bits(got.dq, want.dq)[0, 0, ~is_nan].all()
    assert all(
        same_bits(getattr(got, x), getattr(want, x)).all() for x in ("out", "lse", "dk", "dv")
    )


@pytest.mark.parametrize(("step", "overflows"), [(2.0**-16, True), (-(2.0**-16), False)])
def test_k06_fp16_overflows_from_65520_on(edited, device, step, overflows):
    """K6 at its threshold: two columns of v and dout make delta 2^-LSE2 = 65520 +- 1."""
    copy = edited("k06_no_select_in_dq", NO_SELECT_IN_DQ)
    dout = torch.tensor([[1, -(2.0**-12) + step]])
    inputs = tensors(
        device, torch.float16, torch.full((1, 1), -16.0), torch.ones(1, 1), torch.ones(1, 2), dout
    )
    assert differentiate(copy, *inputs, sm_scale=LN2).dq.isnan().all() == overflows


KEPT, ROWS = 5, 8
IS_KEPT = torch.arange(ROWS) < KEPT
FLAT = torch.tensor([0, 1, 2, 3, 4, 8, 9, 10, 11, 12])  # the kept rows of both batch entries
DROPS = {
    "slice": lambda out: out[:, :, :KEPT],
    "index": lambda out: out[:, :, torch.tensor([4, 0, 2, 1, 3])],
    "index_select": lambda out: out.index_select(2, torch.arange(KEPT)),
    "masked_select": lambda out: out.masked_select(IS_KEPT[:, None]),
    "boolean_index": lambda out: out[:, :, IS_KEPT],
    "unpad": lambda out: out.transpose(1, 2).flatten(0, 1)[FLAT],
    "where": lambda out: torch.where(IS_KEPT[:, None], out, 0.0),
}


@pytest.mark.parametrize("drop", DROPS.values(), ids=DROPS)
def test_k09_rows_dropped_after_attention_get_exact_zeros_as_dout(drop):
    """K9 holds for any loss if a slice, an index, a selection or an unpadding drops the rows."""
    out = normal(3, "out", (2, 3, ROWS, 4)).requires_grad_()
    (dout,) = torch.autograd.grad(drop(out).exp().square().sum(), out)
    assert (dout[:, :, KEPT:] == 0).all()
    assert (dout[:, :, :KEPT] != 0).all()


TOUCHING = {
    # Losses that drop padding too late or not at all, and a property of padding's dout.
    "mean": (lambda out: out.mean(), torch.isfinite),
    "sqrt_then_where": (
        lambda out: torch.where(IS_KEPT, out.square().sum(3).sqrt(), 0.0).sum(),
        torch.isnan,
    ),
}


@pytest.mark.parametrize(("loss", "kind"), TOUCHING.values(), ids=TOUCHING)
def test_k09_a_loss_that_touches_padding_gives_it_a_dout_that_the_kernel_has_to_ignore(
    kernels, device, loss, kind
):
    """K9 fails for a mean over padding, and for a late where, which gives sqrt'(0) * 0 = NaN.

    With the lengths, the kernel returns the bits for dout = 0 in padding, and zeros as dq there.
    Without the lengths, the dout in padding reaches the gradients of every key.
    """
    q, k, v = (normal(4, x, (ROWS, 4)) for x in "qkv")
    q, k, v, _ = inputs = tensors(device, torch.float32, q, k, v, v)
    lengths = {"seqlens_q": (KEPT,), "seqlens_k": (ROWS,)}
    out = differentiate(kernels, *inputs, **lengths).out.cpu().requires_grad_()
    (dout,) = torch.autograd.grad(loss(out), out)
    assert (kind(dout) & (dout != 0))[:, :, KEPT:].all()
    dropped = torch.where(IS_KEPT[:, None], dout, 0.0)
    of_touching, of_dropped = (
        differentiate(kernels, q, k, v, x.to(device), **lengths) for x in (dout, dropped)
    )
    assert all(same_bits(x, y).all() for x, y in zip(of_touching, of_dropped, strict=True))
    assert (of_touching.dq[:, :, KEPT:] == 0).all()
    untold = differentiate(kernels, q, k, v, dout.to(device))
    assert (untold.dv != of_dropped.dv).all()


def test_k14_an_added_mask_gives_a_row_that_sees_no_key_an_ordinary_softmax(edited, device):
    """K14 is wrong for all scores: the row gets the softmax of its hidden scores, and LSE - 1e6."""
    copy = edited("k14_added_mask", ADDED_MASK)
    M, N = 20, 16
    scores, v = normal(5, "scores", (M, N)), normal(5, "v", (N, 4))
    inputs = tensors(device, torch.float64, scores, torch.eye(N), v, torch.ones(M, 4))
    got = differentiate(copy, *inputs, sm_scale=1.0, causal=True)
    empty = slice(0, M - N)
    unmasked, terms = softmax(scores, v), softmax(scores, v.abs()).out
    # The tolerance is a few roundings of 1e6 in the exponent.
    rounding = 8 * 2.0**-53 * 1e6
    assert ((got.out[0, 0].cpu() - unmasked.out).abs() <= rounding * terms)[empty].all()
    assert ((got.lse[0, 0].cpu() - (unmasked.lse - 1e6)).abs() <= rounding)[empty].all()
    assert (softmax(scores, v, Mask(causal=True).dense(1, 1, M, N)[0, 0]).out[empty] == 0).all()


def one_hidden_key(device: str, gap: float) -> tuple[torch.Tensor, ...]:
    """A row, a hidden key with score gap / 2, v = 1, and a visible one with -gap / 2, v = 0."""
    k, v = torch.tensor([[gap / 2], [-gap / 2]]), torch.tensor([[1.0], [0.0]])
    return tensors(device, torch.float64, torch.ones(1, 1), k, v, torch.ones(1, 1))


@pytest.mark.parametrize("gap", [0.0, 2e5, 1e6 - 800])
def test_k14_between_visible_and_hidden_keys_it_is_the_same_while_exp_underflows(
    kernels, edited, device, gap
):
    """K14 holds bitwise for scores that differ by up to 1e6 - 745, as for all |s| <= 1e5."""
    copy = edited("k14_added_mask", ADDED_MASK)
    inputs = one_hidden_key(device, gap)
    got, want = (
        differentiate(x, *inputs, sm_scale=1.0, window_size=(0, None)) for x in (copy, kernels)
    )
    assert all(same_bits(x, y).all() for x, y in zip(got, want, strict=True))
    assert want.out == 0


@pytest.mark.parametrize("excess", [-20.0, 0.0, 20.0])
def test_k14_from_half_a_million_on_a_hidden_key_wins_over_a_visible_one(edited, device, excess):
    """K14 fails for scores 1e6 apart, such as +-5e5: a hidden key gets the weight of a sigmoid."""
    copy = edited("k14_added_mask", ADDED_MASK)
    inputs = one_hidden_key(device, 1e6 + excess)
    got = differentiate(copy, *inputs, sm_scale=1.0, window_size=(0, None)).out.item()
    want = 1 / (1 + math.exp(-excess))
    assert abs(got - want) <= 8 * 2.0**-53 * 1e6 * want
