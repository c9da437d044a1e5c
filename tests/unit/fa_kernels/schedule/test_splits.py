"""Key splits: the tiles of each split, and the combination of their partial results."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import NamedTuple

import pytest
import torch

from fa_verify import assert_attention_close
from fa_verify.oracles.bounds.error_model import judge
from fa_verify.oracles.masks.block_sparse import BlockSparse
from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.outputs import OUTPUTS, Numerics, Outputs
from fa_verify.oracles.reference.torch_reference import attention
from fa_verify.oracles.stream import normal

pytest.importorskip("triton")

from fa_kernels import CONFIGS, Config, flash_attention
from fa_kernels.configs import MAX_SPLITS
from fa_kernels.kernels.common.tile_ranges import TileRange, split_range
from fa_kernels.launch.combine import COMBINE_ROWS, launch_combine_splits
from fa_kernels.runtime import allocation

SCALE = 0.3
MOST = 6


def tilings() -> list[TileRange]:
    """Every order of up to four numbers below MOST."""
    numbers = range(MOST)
    return [
        TileRange(lo, full_lo, full_hi, hi)
        for lo in numbers
        for full_lo in numbers[lo:]
        for full_hi in numbers[full_lo:]
        for hi in numbers[full_hi:]
    ]


@pytest.mark.parametrize("parts", range(1, MOST + 3))
def test_every_tile_is_in_one_split_in_order_and_splits_differ_by_at_most_one_tile(parts):
    for tiles in tilings():
        found = [split_range.fn(tiles, part, parts) for part in range(parts)]
        shares = [list(range(lo, hi)) for lo, _, _, hi in found]
        assert [*itertools.chain(*shares)] == list(range(tiles[0], tiles[3])), tiles
        lengths = [len(share) for share in shares]
        assert lengths == sorted(lengths, reverse=True), tiles
        assert lengths[0] - lengths[-1] <= 1, tiles


@pytest.mark.parametrize("parts", range(1, MOST + 3))
def test_a_tile_needs_a_mask_in_its_split_if_it_does_without_splits(parts):
    for tiles in tilings():
        full = []
        for part in range(parts):
            lo, full_lo, full_hi, hi = split_range.fn(tiles, part, parts)
            assert lo <= full_lo <= full_hi <= hi, tiles
            full += range(full_lo, full_hi)
        assert full == list(range(tiles[1], tiles[2])), tiles


def test_indices_of_the_most_tiles_and_splits_fit_32_bits():
    tiles, parts = 2**25, MAX_SPLITS

    class Narrow(int):
        """An int that refuses results outside int32 and negative dividends."""

        def __mul__(self, other):
            return checked(int(self) * int(other))

        __rmul__ = __mul__

        def __add__(self, other):
            return checked(int(self) + int(other))

        __radd__ = __add__

        def __sub__(self, other):
            return checked(int(self) - int(other))

        def __floordiv__(self, other):
            assert self >= 0
            return checked(int(self) // int(other))

        def __mod__(self, other):
            assert self >= 0
            return checked(int(self) % int(other))

    def checked(value: int) -> Narrow:
        assert -(2**31) <= value < 2**31
        return Narrow(value)

    every = TileRange(*map(Narrow, (0, 0, tiles - 1, tiles)))
    lo, *_, hi = split_range.fn(every, Narrow(parts - 1), Narrow(parts))
    assert (lo, hi) == (tiles - tiles // parts, tiles)


class Inputs(NamedTuple):
    """q (B,H,M,D), k (B,Hk,N,D), v (B,Hk,N,Dv), dout (B,H,M,Dv)."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor


def drawn(device: str, dtype: torch.dtype, M: int, N: int, H: int = 1, Dv: int = 6) -> Inputs:
    """Two batch entries, one head of keys and values."""
    shapes = {"q": (2, H, M, 8), "k": (2, 1, N, 8), "v": (2, 1, N, Dv), "dout": (2, H, M, Dv)}
    return Inputs(*(normal(0, x, shape).to(dtype).to(device) for x, shape in shapes.items()))


def forward(inputs: Inputs, splits: int | None, mask: Mask, tiles: str = "16x16"):
    """(out, lse)."""
    config = dataclasses.replace(CONFIGS[tiles], splits=splits)
    call = {"mask": mask, "sm_scale": SCALE, "return_lse": True}
    return flash_attention(*inputs[:3], **call, config=config)


def called(inputs: Inputs, splits: int | None, mask: Mask, tiles: str = "16x16") -> Outputs:
    """All five outputs."""
    leaves = [x.detach().requires_grad_() for x in inputs[:3]]
    out, lse = forward(Inputs(*leaves, inputs.dout), splits, mask, tiles)
    gradients = torch.autograd.grad(out, leaves, inputs.dout)
    return Outputs(out.detach(), lse.detach(), *gradients)


@pytest.fixture
def poisoned(monkeypatch) -> list[torch.Tensor]:
    """The allocations of fa_kernels in order, filled with NaN before the kernels run."""
    made = []
    empty = allocation.empty

    def record(*args: object, **kwargs: object) -> torch.Tensor:
        made.append(empty(*args, **kwargs))
        if made[-1].is_floating_point():
            made[-1].fill_(math.nan)
        return made[-1]

    monkeypatch.setattr(allocation, "empty", record)
    return made


MASKS = {
    "full": Mask(),
    "causal": Mask(causal=True),
    "window": Mask(window_left=20, window_right=2),
    "lengths": Mask(causal=True, seqlens_q=(18, 3), seqlens_k=(5, 70)),
    "predicate": BlockSparse(side=12, percent=60, seed=19),
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_one_split_equals_no_split(mask, dtype, device, poisoned):
    """Equal bitwise in the interpreter; a GPU runs other code for splits, in another order."""
    inputs = drawn(device, dtype, 20, 70)
    one, whole = called(inputs, 1, mask), called(inputs, None, mask)
    assert device != "cpu" or all(map(torch.equal, one, whole))
    assert_attention_close(**inputs._asdict(), **one._asdict(), mask=mask, sm_scale=SCALE)


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_splits_without_tiles_change_no_bit(mask, device, poisoned):
    # At most five tiles, so that each has a split of its own.
    inputs = drawn(device, torch.float32, 20, 70)
    want = forward(inputs, 5, mask)
    assert want[0].isfinite().all()
    assert all(map(torch.equal, forward(inputs, 17, mask), want))


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("splits", [2, 3, 7])
def test_any_number_of_splits_is_within_the_bound_and_1e_12_of_the_terms(
    mask, splits, device, poisoned
):
    inputs = drawn(device, torch.float64, 20, 70)
    got, call = forward(inputs, splits, mask), {"mask": mask, "sm_scale": SCALE}
    judged = judge(*inputs, **call, in_dtype="fp64", numerics=Numerics(splits=splits))
    want = attention(*inputs, **call)
    for name, x, y, bound, terms in zip(
        OUTPUTS[:2], got, want[:2], judged.bound[:2], judged.terms[:2], strict=True
    ):
        error = torch.where(x == y, 0.0, (x - y).abs())
        assert (error <= bound).all(), name
        assert (error <= 1e-12 * terms).all(), name


@pytest.mark.parametrize("tiles", ["16x16", "default"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_one_query_against_long_keys_is_within_the_bound(tiles, dtype, device):
    inputs = drawn(device, dtype, 1, 400)
    got = called(inputs, 8, Mask(), tiles)
    numerics = Numerics(splits=8)
    assert_attention_close(**inputs._asdict(), **got._asdict(), sm_scale=SCALE, numerics=numerics)


@pytest.mark.parametrize(("M", "N"), [(3, 0), (0, 5), (0, 0), (1, 1)])
def test_splits_of_a_size_of_0_or_1_equal_no_split(M, N, device, poisoned):
    inputs = drawn(device, torch.float32, M, N)
    got = called(inputs, 3, Mask())
    assert all(map(torch.equal, got, called(inputs, None, Mask())))
    assert N or (got.lse == -math.inf).all()


def test_rows_of_padding_and_rows_that_see_nothing_are_exact(device, poisoned):
    mask = Mask(causal=True, seqlens_q=(20, 4), seqlens_k=(3, 70))
    got = called(drawn(device, torch.float32, 20, 70), 3, mask)
    empty = ~mask.dense(2, 1, 20, 70).any(3).to(device)
    assert (got.lse == -math.inf).equal(empty)
    assert not got.out[empty].any()
    assert not got.dq[empty].any()


def test_padding_that_overflows_the_sums_of_a_split_stays_in_padding(device):
    # A padding row weights all keys of a full tile equally, and their sum overflows fp32.
    inputs = drawn(device, torch.bfloat16, 20, 70)
    mask = Mask(seqlens_q=(20, 1))
    out, _ = forward(inputs._replace(v=torch.full_like(inputs.v, 3e38)), 3, mask)
    assert not out[1, :, 1:].any()


def test_scratch_holds_partial_results_of_every_split(device, poisoned):
    inputs = drawn(device, torch.bfloat16, 5, 70)
    flash_attention(*inputs[:3], config=dataclasses.replace(CONFIGS["16x16"], splits=3))
    shapes = [(tuple(x.shape), x.dtype) for x in poisoned]
    wide = torch.float32
    rows = ((3, 2, 1, 5), wide)
    assert shapes == [
        ((2, 1, 5, 6), torch.bfloat16), ((2, 1, 5), wide), ((3, 2, 1, 5, 6), wide), rows, rows
    ]  # fmt: skip


@pytest.mark.parametrize("rows", [1, COMBINE_ROWS, COMBINE_ROWS + 1, 3 * COMBINE_ROWS - 1])
def test_combine_weights_every_split_by_its_maximum(rows, device):
    parts, Dv = 5, 6
    acc, l_sum = normal(0, "acc", (parts, rows, Dv)), normal(0, "l", (parts, rows)).abs() + 0.1
    m = 40 * normal(0, "m", (parts, rows))
    # One split has no visible key; for the first row, no split has.
    m[1], l_sum[1], acc[1] = -math.inf, 0.0, 0.0
    m[:, 0], l_sum[:, 0], acc[:, 0] = -math.inf, 0.0, 0.0
    acc, m, l_sum = (x.to(device) for x in (acc, m, l_sum))
    out, lse = torch.full_like(acc[0], math.nan), torch.full_like(m[0], math.nan)
    launch_combine_splits(acc[:, None, None], m[:, None, None], l_sum, out, lse)
    weights = torch.exp2(m - m.amax(0).clamp(min=-1e300))
    total = (weights * l_sum).sum(0)
    want = torch.where(total[:, None] > 0, (weights[:, :, None] * acc).sum(0) / total[:, None], 0.0)
    want_lse = torch.logsumexp(m * math.log(2) + l_sum.log(), 0)
    assert ((out - want).abs() <= 1e-13 * (weights[:, :, None] * acc.abs()).sum(0).add(1)).all()
    assert (lse == want_lse).logical_or((lse - want_lse).abs() <= 1e-12).all()
    assert lse[0] == -math.inf
    assert not out[0].any()


@pytest.mark.parametrize("given", [2.0, "3", True, (2,)])
def test_splits_that_are_not_an_int_are_refused(given):
    with pytest.raises(TypeError, match=r"^splits is .*; needs an int or None$"):
        Config(splits=given)


@pytest.mark.parametrize("given", [0, -1, MAX_SPLITS + 1])
def test_splits_out_of_range_are_refused(given):
    with pytest.raises(ValueError, match=rf"^splits is {given}; needs an int in \[1, 256\]$"):
        Config(splits=given)


@pytest.mark.parametrize("given", [None, 1, MAX_SPLITS])
def test_splits_in_range_are_kept(given):
    assert Config(splits=given).splits == given
