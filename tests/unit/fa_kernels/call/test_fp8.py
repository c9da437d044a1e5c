"""flash_attention_fp8: values beside a replay of its casts, equal bits, padding, errors."""

from __future__ import annotations

import math
import re

import pytest
import torch

from fa_verify.oracles.formats.element import FORMATS
from fa_verify.oracles.formats.in_torch import decoded, encoded
from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.stream import normal

pytest.importorskip("triton")

from fa_kernels import Config, Tile, flash_attention, flash_attention_fp8

E4M3 = FORMATS["e4m3fn"]
B, H, HK, M, N, D, DV = 2, 4, 2, 37, 75, 40, 72
BLOCK_N = 32
CONFIG = Config(forward=Tile(16, BLOCK_N, 4, 2))
U = 2.0**-24


def codes(name: str, *sizes: int, scale: float = 1.0) -> torch.Tensor:
    """Codes of N(0, scale**2)."""
    return encoded(normal(3, name, sizes).to(torch.float64) * scale, E4M3)


def powers(*sizes: int, step: int = 3) -> torch.Tensor:
    """Float32 powers of 2 that differ between neighbours along every axis."""
    count = torch.arange(math.prod(sizes)).reshape(sizes)
    return torch.exp2((count * step % 7 - 3).to(torch.float32))


def drawn(tokens: bool) -> dict[str, torch.Tensor]:
    rows, keys = (M, N) if tokens else (1, 1)
    return {
        "q": codes("q", B, H, M, D), "k": codes("k", B, HK, N, D), "v": codes("v", B, HK, N, DV),
        "q_scale": powers(B, H, rows), "k_scale": powers(B, HK, keys, step=5) / 4,
        "v_scale": powers(B, HK) * 3,
    }  # fmt: skip


def called(inputs: dict[str, torch.Tensor], device: str, **options):
    on_device = {name: x.to(device) for name, x in inputs.items()}
    return flash_attention_fp8(**on_device, **{"config": CONFIG, "return_lse": True, **options})


def replayed(inputs: dict[str, torch.Tensor], mask: Mask) -> tuple[torch.Tensor, ...]:
    """Returns (out, its largest error, lse, its largest error), float64.

    P is cast as the kernel does. A P so near a tie that its error may cross it has the error of one
    spacing.
    """
    group = H // HK
    q, k, v = (decoded(inputs[name], E4M3) for name in "qkv")
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    scales = inputs["k_scale"].repeat_interleave(group, 1).double().expand(B, H, N)
    of_pairs = inputs["q_scale"].double().unsqueeze(3) * scales.unsqueeze(2) * D**-0.5
    scores = q @ k.mT * of_pairs
    error = (D + 16) * U * (q.abs() @ k.abs().mT) * of_pairs + 2.0**-21
    scores = scores.masked_fill(~mask.dense(B, H, M, N), -math.inf)
    m = torch.full((B, H, M, 1), -math.inf, dtype=torch.float64)
    largest = torch.zeros_like(m)
    l_sum, acc, width, size = (torch.zeros_like(m) for _ in range(4))
    for start in range(0, N, BLOCK_N):
        here = slice(start, start + BLOCK_N)
        s, e, values = scores[..., here], error[..., here], v[..., here, :]
        new = torch.maximum(m, s.amax(3, True))
        largest = torch.maximum(largest, e.amax(3, True))
        pivot = new.masked_fill(new == -math.inf, 0.0)
        alpha, p = (m - pivot).exp(), (s - pivot).exp()
        low, middle, high = (
            decoded(encoded(256 * p * (1 + sign * (e + largest)), E4M3), E4M3) / 256
            for sign in (-1, 0, 1)
        )
        l_sum = l_sum * alpha + p.sum(3, True)
        acc, width, size = (
            total * alpha + weights @ of
            for total, weights, of in (
                (acc, middle, values),
                (width, high - low, values.abs()),
                (size, middle, values.abs()),
            )
        )
        m = new
    of_v = inputs["v_scale"].repeat_interleave(group, 1).double()[..., None, None]
    live = l_sum > 0
    out = torch.where(live, acc / l_sum * of_v, 0.0)
    lse = torch.where(live, m + l_sum.log(), -math.inf)
    relative = (2 * N + 16) * U
    bound = torch.where(live, (width + relative * size) / l_sum * of_v, 0.0)
    bound = bound + (2 * largest + relative) * out.abs()
    # The cast to float16, and its underflow.
    bound = bound + 2.0**-11 * (out.abs() + bound) + 2.0**-25
    of_lse = largest + relative + 4 * U * lse.abs().masked_fill(~live, 0.0)
    return out, bound, lse.squeeze(3), of_lse.squeeze(3)


MASKS = {
    "full": Mask(),
    "causal": Mask(causal=True),
    "window": Mask(window_left=9, window_right=30),
    "lengths": Mask(causal=True, seqlens_q=(37, 20), seqlens_k=(41, 75)),
}


@pytest.mark.parametrize("tokens", [False, True], ids=["heads", "tokens"])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_out_and_lse_lie_within_the_error_of_a_replay(device, mask, tokens):
    inputs = drawn(tokens)
    out, lse = called(inputs, device, mask=mask, dtype=torch.float16)
    right, bound, right_lse, lse_bound = replayed(inputs, mask)
    assert bool(((out.cpu().double() - right).abs() <= bound).all())
    live = right_lse != -math.inf
    assert torch.equal(lse.cpu() == -math.inf, ~live)
    wrong = (lse.cpu().double() - right_lse).abs()[live] > lse_bound[live]
    assert not bool(wrong.any())


@pytest.mark.parametrize("name", ["q_scale", "k_scale", "v_scale"])
def test_a_replay_without_a_scale_of_its_own_head_is_left(name, device):
    inputs = drawn(tokens=False)
    out, _ = called(inputs, device, dtype=torch.float16)
    first = inputs[name][:, :1].expand_as(inputs[name])
    right, bound, _, _ = replayed({**inputs, name: first}, Mask())
    assert bool(((out.cpu().double() - right).abs() > bound).any())


def test_powers_of_two_move_between_the_scales_of_q_and_k(device):
    inputs = drawn(tokens=True)
    moved = {**inputs, "q_scale": inputs["q_scale"] * 8, "k_scale": inputs["k_scale"] / 8}
    for one, other in zip(called(inputs, device), called(moved, device), strict=True):
        assert torch.equal(one, other)


def test_scales_that_heads_share_have_the_bits_of_scales_of_each_token(device):
    inputs = drawn(tokens=False)
    each = {
        **inputs,
        "q_scale": inputs["q_scale"].expand(B, H, M).contiguous(),
        "k_scale": torch.ones(B, HK, N),
    }
    shared = {**inputs, "k_scale": torch.ones(1, 1, 1)}
    for one, other in zip(called(shared, device), called(each, device), strict=True):
        assert torch.equal(one, other)


def test_codes_and_scales_of_padding_and_hidden_keys_change_no_bit(device):
    mask = Mask(causal=True, seqlens_q=(30, 37), seqlens_k=(50, 60))
    clean = drawn(tokens=True)
    dirty = {name: x.clone() for name, x in clean.items()}
    nan = torch.tensor(math.nan).to(torch.float8_e4m3fn)
    for b, (rows, keys) in enumerate(zip(mask.seqlens_q, mask.seqlens_k, strict=True)):
        dirty["q"][b, :, rows:], dirty["q_scale"][b, :, rows:] = nan, math.nan
        for name in ("k", "v"):
            dirty[name][b, :, keys:] = nan
        dirty["k_scale"][b, :, keys:] = math.nan
    for one, other in zip(
        called(clean, device, mask=mask), called(dirty, device, mask=mask), strict=True
    ):
        assert torch.equal(one, other)


@pytest.mark.parametrize("tokens", [False, True], ids=["heads", "tokens"])
def test_packed_sequences_have_the_bits_of_padded_ones(device, tokens):
    rows, keys = (37, 20), (41, 75)
    inputs = drawn(tokens)
    if not tokens:  # packed sequences share the scales of heads
        inputs |= {name: inputs[name][:1] for name in ("q_scale", "k_scale")}
    mask = Mask(causal=True, seqlens_q=rows, seqlens_k=keys)
    out, lse = called(inputs, device, mask=mask)

    def packed(x: torch.Tensor, lengths: tuple[int, ...]) -> torch.Tensor:
        if x.ndim == 3 and not tokens:
            return x[0].mT
        return torch.cat([x[b, :, :n].transpose(0, 1) for b, n in enumerate(lengths)])

    flat = {
        name: packed(inputs[name], rows if name[0] == "q" else keys)
        for name in ("q", "k", "v", "q_scale", "k_scale")
    }
    packed_out, packed_lse = called(
        {**flat, "v_scale": inputs["v_scale"]}, device, causal=True, cu_seqlens_q=(0, 37, 57),
        cu_seqlens_k=(0, 41, 116),
    )  # fmt: skip
    first = 0
    for b, n in enumerate(rows):
        assert torch.equal(packed_out[first : first + n].transpose(0, 1), out[b, :, :n])
        assert torch.equal(packed_lse[:, first : first + n], lse[b, :, :n])
        first += n


def test_sinks_and_softcap_are_those_of_a_16_bit_call_of_the_numbers(device):
    """Codes and scales of small powers of two are exact in float32, whose P is not cast."""
    inputs = drawn(tokens=False)
    options = {"softcap": 3.0, "sinks": torch.tensor([0.5, -1.0, 2.0, 0.0], device=device)}
    out, lse = called(inputs, device, dtype=torch.float32, **options)
    q, k, v = (decoded(inputs[name], E4M3) for name in "qkv")
    numbers = (
        q * inputs["q_scale"].double().unsqueeze(3),
        k * inputs["k_scale"].double().unsqueeze(3),
        v * inputs["v_scale"].double()[..., None, None],
    )
    want, want_lse = flash_attention(
        *(x.float().to(device) for x in numbers), return_lse=True, **options
    )
    assert (lse - want_lse).abs().max() < 1e-4
    # A P of e4m3 errs by 2**-4.
    assert ((out - want).abs() <= 2.0**-4 * v.abs().max() * inputs["v_scale"].max()).all()
    assert (out - want).norm() < 0.05 * want.norm()


@pytest.mark.parametrize("columns", [1, 2, 9, 16])
def test_every_column_of_out_is_written_beside_aligned_queries(device, columns):
    """Queries and keys of 16 columns are loaded 16 bytes at a time, and out may have other rows."""
    q, k = codes("q", 1, 2, 5, 16), codes("k", 1, 1, 7, 16)
    inputs = {
        "q": q, "k": k, "v": codes("v", 1, 1, 7, columns), "q_scale": powers(1, 1, 1),
        "k_scale": powers(1, 1, 1), "v_scale": powers(1, 1),
    }  # fmt: skip
    wide = {**inputs, "v": torch.cat([inputs["v"].view(torch.uint8)] * 16, 3).view(q.dtype)}
    out, want = (called(x, device)[0] for x in (inputs, wide))
    assert torch.equal(out, want[..., :columns])


def test_no_keys_give_zero(device):
    inputs = {**drawn(False), "k": codes("k", B, HK, 0, D), "v": codes("v", B, HK, 0, DV)}
    out, lse = called(inputs, device)
    assert not out.any()
    assert (lse == -math.inf).all()


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"q": torch.zeros(B, H, M, D)}, NotImplementedError, "q has dtype torch.float32; supp"),
        ({"q_scale": 1.0}, TypeError, "q_scale is float; needs a torch.Tensor"),
        (
            {"k_scale": torch.ones(B, H, 1)}, ValueError,
            "k_scale has shape (2, 4, 1); needs (2 or 1, 2 or 1, 75 or 1)",
        ),
        ({"v_scale": torch.ones(B, HK).half()}, TypeError, "v_scale has dtype torch.float16; nee"),
        ({"dtype": torch.float64}, ValueError, "dtype is torch.float64; needs one of"),
        ({"accumulator": "exact"}, ValueError, "accumulator is 'exact'; needs one of ('fp32', "),
        ({"config": "16x16"}, NotImplementedError, "config has a forward tile of 16 keys; supp"),
        ({"cu_seqlens_q": (0, 3)}, ValueError, "cu_seqlens_k is None; needs cumulative lengths"),
    ],
)  # fmt: skip
def test_errors_name_the_argument_and_its_needs(device, options, error, says):
    given = {**drawn(False), "config": CONFIG, **options}
    on_device = {
        name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in given.items()
    }
    with pytest.raises(error, match="^" + re.escape(says)):
        flash_attention_fp8(**on_device)
