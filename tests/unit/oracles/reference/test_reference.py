from __future__ import annotations

import math

import pytest
import torch

from fa_verify.oracles import stream
from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.outputs import OUTPUTS, Outputs
from fa_verify.oracles.reference.torch_reference import RowMasks, attention

# Widths in rows that no tile or chunk divides; sm_scale differs from 1 and from D**-0.5.
B, H, Hk, M, N, D, Dv = 2, 4, 2, 23, 19, 5, 7
SCALE = 0.3
WINDOW = Mask(window_left=3, window_right=2, seqlens_q=(21, 9), seqlens_k=(10, 17))
EPS = torch.finfo(torch.float64).eps


def tensors(seed: int = 0) -> list[torch.Tensor]:
    shapes = {"q": (B, H, M, D), "k": (B, Hk, N, D), "v": (B, Hk, N, Dv), "dout": (B, H, M, Dv)}
    return [stream.normal(seed, name, shape) for name, shape in shapes.items()]


def seen(mask: Mask) -> torch.Tensor:
    return mask.dense(B, H, M, N).expand(B, H, M, N)


def by_torch(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor, visible: torch.Tensor
) -> Outputs[torch.Tensor]:
    """PyTorch's own attention, for masks in which every row sees a key; lse by logsumexp."""
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = torch.nn.functional.scaled_dot_product_attention(
        *leaves, attn_mask=visible, scale=SCALE, enable_gqa=True
    )
    grads = torch.autograd.grad(out, leaves, dout)
    scores = q @ k.repeat_interleave(H // Hk, 1).mT * SCALE
    lse = scores.masked_fill(~visible, -math.inf).logsumexp(-1)
    return Outputs(out.detach(), lse, *grads)


def assert_close(got: Outputs[torch.Tensor], want: Outputs[torch.Tensor]) -> None:
    """Compares up to the float64 rounding of sums of up to H M D terms of order 1."""
    for name, a, b in zip(OUTPUTS, got, want, strict=True):
        finite = b.isfinite()
        assert torch.equal(a[~finite], b[~finite]), name
        worst = (a - b)[finite].abs().max()
        assert worst <= EPS * M * H * D * (1 + b[finite].abs().max()), name


@pytest.mark.parametrize("mask", [Mask(), Mask(causal=True, seqlens_q=(9, 3), seqlens_k=(19, 5))])
def test_outputs_are_those_of_torch_attention(mask: Mask) -> None:
    q, k, v, dout = tensors()
    lengths = mask.lengths(B, M, N)[0]
    got = attention(q, k, v, dout, mask=mask, sm_scale=SCALE)
    for b, rows in enumerate(lengths):
        one = slice(b, b + 1)
        visible = seen(mask)[one, :, :rows]
        want = by_torch(q[one, :, :rows], k[one], v[one], dout[one, :, :rows], visible)
        part = Outputs(*(x[one, :, :rows] for x in got[:3]), *(x[one] for x in got[3:]))
        assert_close(part, want)


@pytest.mark.parametrize("rows", [1, 7, 16, 100])
def test_chunking_does_not_change_the_outputs(rows: int) -> None:
    inputs = tensors()
    whole = attention(*inputs, mask=WINDOW, sm_scale=SCALE)
    assert_close(attention(*inputs, mask=WINDOW, sm_scale=SCALE, rows=rows), whole)


@pytest.mark.parametrize(
    "mask",
    [Mask(), Mask(causal=True), Mask(window_left=0), Mask(window_left=4, window_right=1), WINDOW],
)
def test_rows_of_a_mask_are_the_predicate(mask: Mask) -> None:
    masks = RowMasks(mask, B, H, M, N, torch.device("cpu"))
    for start, stop in ((0, 5), (5, 6), (6, M)):
        rows = masks.between(start, stop).expand(B, H, stop - start, N)
        for b in range(B):
            want = [
                [mask.is_visible(b, 0, m, n, M=M, N=N) for n in range(N)]
                for m in range(start, stop)
            ]
            assert rows[b, H - 1].tolist() == want


class Checkerboard:
    """A mask that is not a ``Mask`` and differs by head."""

    def dense(
        self, B: int, H: int, M: int, N: int, device: torch.device | str | None = None
    ) -> torch.Tensor:
        h, m, n = (torch.arange(size, device=device) for size in (H, M, N))
        return ((h[:, None, None] + m[:, None] + n) % 2 == 0).unsqueeze(0)


class OneHead:
    """Each key is visible to a single head, which differs from that of its neighbours."""

    def dense(
        self, B: int, H: int, M: int, N: int, device: torch.device | str | None = None
    ) -> torch.Tensor:
        h, n = (torch.arange(size, device=device) for size in (H, N))
        return (n % H == h[:, None]).view(1, H, 1, N).expand(1, H, M, N)


class EveryThird(Mask):
    """A Mask with a dense form of its own."""

    def dense(
        self, B: int, H: int, M: int, N: int, device: torch.device | str | None = None
    ) -> torch.Tensor:
        return (torch.arange(N, device=device) % 3 == 0).expand(1, 1, M, N)


@pytest.mark.parametrize("mask", [Checkerboard(), OneHead(), EveryThird()])
def test_any_dense_mask_is_followed(mask: Checkerboard | OneHead | EveryThird) -> None:
    q, k, v, dout = tensors()
    want = by_torch(q, k, v, dout, mask.dense(B, H, M, N).expand(B, H, M, N))
    assert_close(attention(q, k, v, dout, mask=mask, sm_scale=SCALE, rows=5), want)


def test_rows_without_a_key_give_zero_and_minus_infinity() -> None:
    got = attention(*tensors(), mask=WINDOW, sm_scale=SCALE)
    empty = ~seen(WINDOW).any(-1)
    assert empty.any()
    assert not empty.all()
    assert (got.out[empty] == 0).all()
    assert (got.dq[empty] == 0).all()
    assert (got.lse[empty] == -math.inf).all()


@pytest.mark.parametrize("dirt", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("rows", [None, 6])
def test_values_outside_visible_pairs_change_no_bit(dirt: float, rows: int | None) -> None:
    inputs = tensors()
    clean = attention(*inputs, mask=WINDOW, sm_scale=SCALE, rows=rows)
    empty = ~seen(WINDOW).any(-1)
    unseen = ~seen(WINDOW).reshape(B, Hk, -1, N).any(2)
    for x, where in zip(inputs, (empty, unseen, unseen, empty), strict=True):
        assert where.any()
        x[where] = dirt
    dirty = attention(*inputs, mask=WINDOW, sm_scale=SCALE, rows=rows)
    for name, a, b in zip(OUTPUTS, dirty, clean, strict=True):
        assert torch.equal(a, b), name


def test_a_hidden_pair_that_overflows_adds_nothing() -> None:
    # Key 0 is near the largest float64 and visible only to row 0, whose gradient is 0.
    q, k, v, dout = tensors()
    mask = Mask(window_left=0, window_right=0, seqlens_q=(N, N))
    k[:, :, 0] *= 1e300
    v[:, :, 0] = 1e308
    q[:, :, 0] = 0
    q[:, :, 1:] *= 1e10
    dout *= 1e10
    dout[:, :, 0] = 0
    got = attention(q, k, v, dout, mask=mask, sm_scale=SCALE)
    alone = attention(
        q[:, :, 1:N],
        k[:, :, 1:],
        v[:, :, 1:],
        dout[:, :, 1:N],
        mask=Mask(window_left=0, window_right=0),
        sm_scale=SCALE,
    )
    assert torch.equal(got.dv[:, :, 1:], alone.dv)
    assert all(x.isfinite().all() for x in (got.out, got.dq, got.dk, got.dv))


@pytest.mark.parametrize("sizes", [(0, M, N), (B, 0, N), (B, M, 0)])
def test_size_zero_is_written(sizes: tuple[int, int, int]) -> None:
    b, m, n = sizes
    q, k, v, dout = tensors()
    got = attention(
        q[:b, :, :m], k[:b, :, :n], v[:b, :, :n], dout[:b, :, :m], mask=Mask(), sm_scale=SCALE
    )
    assert got.out.shape == (b, H, m, Dv)
    assert got.dk.shape == (b, Hk, n, D)
    assert (got.lse == -math.inf).all()
    assert all((x == 0).all() for x in (got.out, got.dq, got.dk, got.dv))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_low_precision_inputs_are_taken_exactly(dtype: torch.dtype) -> None:
    low = [x.to(dtype) for x in tensors()]
    got = attention(*low, mask=WINDOW, sm_scale=SCALE)
    want = attention(*(x.double() for x in low), mask=WINDOW, sm_scale=SCALE)
    for a, b in zip(got, want, strict=True):
        assert a.dtype == torch.float64
        assert torch.equal(a, b)


def test_strides_do_not_matter() -> None:
    inputs = tensors()
    inputs[3] = inputs[3][:, :, :1].expand(B, H, M, Dv)
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs[:3]]
    got = attention(*strided, inputs[3], mask=WINDOW, sm_scale=SCALE)
    assert_close(got, attention(*(x.contiguous() for x in inputs), mask=WINDOW, sm_scale=SCALE))


def test_inputs_are_left_alone() -> None:
    inputs = tensors()
    for x in inputs[:3]:
        x.requires_grad_()
    before = [x.detach().clone() for x in inputs]
    with torch.no_grad():
        got = attention(*inputs, mask=WINDOW, sm_scale=SCALE)
    assert not any(x.requires_grad for x in got)
    for x, y in zip(inputs, before, strict=True):
        assert x.grad is None
        assert torch.equal(x, y)


def test_a_chunk_of_no_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="rows is 0"):
        attention(*tensors(), mask=Mask(), sm_scale=SCALE, rows=0)


def test_long_rows_agree_with_their_chunks() -> None:
    long = 2**16
    shapes = {"q": (1, 2, 3, 4), "k": (1, 1, long, 4), "v": (1, 1, long, 3), "dout": (1, 2, 3, 3)}
    inputs = [stream.normal(1, name, shape) for name, shape in shapes.items()]
    mask = Mask(causal=True)
    got = attention(*inputs, mask=mask, sm_scale=SCALE, rows=2)
    want = attention(*inputs, mask=mask, sm_scale=SCALE)
    assert (got.lse - math.log(long)).abs().max() < 1
    assert_close(got, want)
