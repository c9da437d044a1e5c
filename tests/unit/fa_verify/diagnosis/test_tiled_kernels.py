"""Faults of a kernel that visits tiles are named, whichever pass has them."""

from __future__ import annotations

import math

import pytest
import torch

from fa_kernels.kernels.common.tile_ranges import TileRange, split_range, visible_tiles
from fa_verify.diagnosis.explain import diagnose
from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.problem import Problem
from fa_verify.properties.kernels.subject import Subject

BLOCK_M, BLOCK_N = 16, 32
CAUSAL = Problem(M=35, N=37, dtype="fp64", mask=Mask(causal=True))
SPLITS = 2


def visited(tiles: TileRange, fault: str) -> list[tuple[int, bool]]:
    """The visited tiles, each with whether it is masked."""
    edges = [*range(tiles.lo, tiles.full_lo), *range(tiles.full_hi, tiles.hi)]
    full = [*range(tiles.full_lo, tiles.full_hi)]
    left_out = {"first tile left out": tiles.lo, "last tile left out": tiles.hi - 1}.get(fault)
    if fault == "edge tiles twice":
        edges *= 2
    if fault == "early edges left out":
        edges = [x for x in edges if x >= tiles.full_hi]
    if fault == "full tiles left out":
        full = []
    found = [(x, fault != "unmasked") for x in edges] + [(x, False) for x in full]
    return sorted(x for x in found if x[0] != left_out)


class Passes:
    """The mask, and a fault that some of the passes have."""

    def __init__(self, mask: Mask, M: int, N: int, scale: float, faults: dict[str, str]) -> None:
        self.seen = mask.dense(1, 1, M, N)[0, 0]
        self.M, self.N, self.scale, self.faults = M, N, scale, faults
        self.right = M + N if mask.right is None else mask.right
        self.left = M + N if mask.window_left is None else mask.window_left

    def pairs(self, name: str, split: int = 0):
        """Yield (rows, keys, visible pairs) of the tiles that a pass visits."""
        over_rows = name == "dkdv"
        sizes = (self.N, self.M) if over_rows else (self.M, self.N)
        blocks = (BLOCK_N, BLOCK_M) if over_rows else (BLOCK_M, BLOCK_N)
        window = (self.right, self.left) if over_rows else (self.left, self.right)
        for start in range(0, sizes[0], blocks[0]):
            tiles = TileRange(*visible_tiles.fn(start, *sizes, *window, *blocks))
            if name == "forward":
                tiles = TileRange(*split_range.fn(tiles, split, SPLITS))
            here = slice(start, start + blocks[0])
            for tile, masked in visited(tiles, self.faults.get(name, "")):
                there = slice(tile * blocks[1], (tile + 1) * blocks[1])
                rows, keys = (there, here) if over_rows else (here, there)
                seen = self.seen[rows, keys]
                yield rows, keys, seen if masked else torch.ones_like(seen)


class Tiled(torch.autograd.Function):
    """Attention in float64 by tiles, with an online softmax in each split of the keys."""

    @staticmethod
    def forward(ctx, q, k, v, passes):
        states = []
        for split in range(SPLITS):
            m = q.new_full((*q.shape[:3], 1), -math.inf)
            total, acc = torch.zeros_like(m), q.new_zeros((*q.shape[:3], v.shape[3]))
            for rows, keys, seen in passes.pairs("forward", split):
                s = q[:, :, rows] @ k[:, :, keys].mT * passes.scale
                s = s.masked_fill(~seen, -math.inf)
                new = torch.maximum(m[:, :, rows], s.amax(3, keepdim=True))
                pivot = torch.where(new == -math.inf, 0.0, new)
                if passes.faults.get("forward") == "unguarded":
                    pivot = new
                p, alpha = torch.exp(s - pivot), torch.exp(m[:, :, rows] - pivot)
                m[:, :, rows] = new
                total[:, :, rows] = total[:, :, rows] * alpha + p.sum(3, keepdim=True)
                acc[:, :, rows] = acc[:, :, rows] * alpha + p @ v[:, :, keys]
            states.append((m, total, acc))
        most = torch.stack([m for m, _, _ in states]).amax(0)
        pivot = torch.where(most == -math.inf, 0.0, most)
        total = sum(torch.exp(m - pivot) * x for m, x, _ in states)
        acc = sum(torch.exp(m - pivot) * x for m, _, x in states)
        lse = torch.where(total == 0, -math.inf, pivot + total.log())
        out = acc / torch.where(total == 0, 1.0, total)
        ctx.passes = passes
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.mark_non_differentiable(lse)
        return out, lse.squeeze(3)

    @staticmethod
    def backward(ctx, dout, _):
        q, k, v, out, lse = ctx.saved_tensors
        scale, delta = ctx.passes.scale, (out * dout).sum(3, keepdim=True)
        dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
        for name in ("dq", "dkdv"):
            for rows, keys, seen in ctx.passes.pairs(name):
                s = q[:, :, rows] @ k[:, :, keys].mT * scale
                p = torch.exp(s - lse[:, :, rows]).where(seen, 0.0)
                p = torch.where(lse[:, :, rows] == -math.inf, 0.0, p)
                dp = dout[:, :, rows] @ v[:, :, keys].mT
                ds = p * (dp - delta[:, :, rows]) * scale
                if name == "dq":
                    dq[:, :, rows] += ds @ k[:, :, keys]
                else:
                    dk[:, :, keys] += ds.mT @ q[:, :, rows]
                    dv[:, :, keys] += p.mT @ dout[:, :, rows]
        return dq, dk, dv, None


def subject_of(faults: dict[str, str], masks: tuple[str, ...] = ("causal",)) -> Subject:
    def attention(q, k, v, *, mask, sm_scale):
        return Tiled.apply(q, k, v, Passes(mask, q.shape[2], k.shape[2], sm_scale, faults))

    attention.gqa, attention.masks, attention.dtypes = False, masks, ("fp64",)
    attention.returns_lse, attention.zero_sizes, attention.splits = True, False, SPLITS
    attention.tiles = lambda problem: (BLOCK_M, BLOCK_N)
    return Subject.of(attention, "tiled")


def everywhere(fault: str) -> dict[str, str]:
    return dict.fromkeys(("forward", "dq", "dkdv"), fault)


@pytest.mark.parametrize(
    ("faults", "name", "place"),
    [
        ({}, "", ""),
        ({"dq": "first tile left out"}, "first tile left out", "dq"),
        ({"dkdv": "last tile left out"}, "last tile left out", "dk and dv"),
        ({"dq": "edge tiles twice", "dkdv": "edge tiles twice"}, "edge tiles twice", "backward"),
        (everywhere("full tiles left out"), "full tiles left out", "everywhere"),
        ({"dkdv": "unmasked"}, "right edge ignored", "dk and dv"),
    ],
)  # fmt: skip
def test_faults_of_tiles_are_named_in_each_pass(faults, name, place):
    found = diagnose(subject_of(faults), CAUSAL, seconds=60)
    names = [(x.name, x.place) for x in found.explanations if x.name == name or not name]
    assert names == ([(name, place)] if name else [])
    assert not name or found.explanations[0].tile == "tiles of 16 rows and 32 keys"
    assert not any(x.outputs for x in found.explanations)


def test_passes_with_different_faults_are_named_apart():
    found = diagnose(
        subject_of({"dq": "first tile left out", "dkdv": "unmasked"}), CAUSAL, seconds=60
    )
    named = [(x.name, x.outputs) for x in found.explanations]
    assert ("first tile left out", ("dq",)) in named
    assert ("right edge ignored", ("dk", "dv")) in named


def test_a_forward_is_named_alone_and_no_gradients_that_read_it_are():
    faults = {"forward": "unguarded", "dq": "first tile left out", "dkdv": "edge tiles twice"}
    found = diagnose(subject_of(faults), CAUSAL, seconds=60)
    assert [(x.name, x.outputs) for x in found.explanations] == [("unguarded rows", ("out", "lse"))]


def test_no_tiles_are_named_where_nothing_is_left():
    """A window of fewer keys than two tiles leaves every visited tile an edge."""

    def nothing(q, k, v, *, mask, sm_scale):
        out = 0 * (q.sum() + k.sum() + v.sum())
        return out.expand(*q.shape[:3], v.shape[3]), q.new_full(q.shape[:3], -math.inf)

    nothing.returns_lse, nothing.masks = True, ("window",)
    window = Problem(M=48, N=48, dtype="fp64", mask=Mask(window_left=20, window_right=9))
    assert diagnose(Subject.of(nothing, "nothing"), window, seconds=60).explanations == ()


def test_edge_tiles_on_one_side_are_not_called_all_edge_tiles():
    """The edge tiles of dk and dv under a causal mask lie before the full ones. A window adds some
    after them."""
    faults = everywhere("early edges left out")
    found = diagnose(subject_of(faults, ("causal", "window")), CAUSAL, seconds=60)
    assert found.explanations == ()
    assert found.complete
