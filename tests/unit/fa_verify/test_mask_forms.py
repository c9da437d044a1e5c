"""The forms of a mask: a fault in one of them is found, and named before a kernel is blamed."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from random import Random
from typing import Annotated

import pytest

from fa_verify.oracles.masks.mask import Between, Mask
from fa_verify.oracles.masks.prefix_lm import PrefixLM
from fa_verify.oracles.masks.sink_window import SinkWindow
from fa_verify.properties.problems.mask_examples import mask_example, small_sizes

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

from fa_kernels.schedule import block_sparse  # noqa: E402
from fa_verify.mask_forms import FORMS, first_disagreement  # noqa: E402
from fa_verify.oracles.masks import triton_predicates  # noqa: E402


@triton.jit
def one_row_more(b, h, m, n, args):
    """args: (tokens,)."""
    return (m <= args[0]) | (n <= m)


@dataclass(frozen=True, kw_only=True)
class Registers(Mask, uniform=True):
    """Causal, and the first tokens see every key; off by one in the jit form."""

    tokens: Annotated[int, Between(4, 500)] = 4

    def mask_mod(self, b, h, m, n, *, M, N):
        return (m < self.tokens) | (n <= m)

    def native(self, B, H, M, N, device):
        return one_row_more, (self.tokens,)


@dataclass(frozen=True, kw_only=True)
class Far(Mask, uniform=True):
    far: Annotated[int, Between(100, 1000)] = 100

    def mask_mod(self, b, h, m, n, *, M, N):
        return n < self.far


@triton.jit
def wrong_sign(b, h, m, n, args):
    """args: (offsets (B,), window_left, window_right)."""
    distance = n - (m + tl.load(args[0] + b))
    return (distance >= args[1]) & (distance <= args[2])


def found(form, mask, device, seed=0):
    return first_disagreement(form, mask, device, Random(seed))


@pytest.mark.parametrize("seed", range(10))
def test_a_row_too_many_in_the_jit_form_is_found(seed, device):
    fault = found("kernel", Registers, device, seed)
    order = "rows by keys" if "rows by keys" in fault.first[0] else "keys by rows"
    assert str(fault) == (
        "two forms of the mask Registers() disagree, at (m, n) = (4, 5), b=0, h=0, M=5, N=6\n"
        f"  the jit predicate, {order}, says visible\n"
        "  the dense tensor says hidden"
    )
    assert found("definition", Registers, device, seed) is None


def test_a_tile_called_full_one_key_early_is_found(monkeypatch, device):
    def off_by_one(some, full, fine, tile):
        """Does not look at the last of the small columns of a tile."""
        columns = tile.block_n // fine.block_n
        if columns > 1:
            full = full.clone()
            full[..., columns - 1 :: columns] = True
        return lists(some, full, fine, tile)

    lists = block_sparse._lists
    monkeypatch.setattr(block_sparse, "_lists", off_by_one)
    assert str(found("block_map", PrefixLM, device)) == (
        "two forms of the mask PrefixLM(prefix=1) disagree, at (m, n) = (32, 0), b=0, h=0, M=32, "
        "N=1\n"
        "  the block map of dkdv, tiles 64x16, says its tile is full\n"
        "  the dense tensor says its tile is partial, and the pair is past the end"
    )


def test_a_wrong_sign_in_a_combination_is_found(monkeypatch, device):
    monkeypatch.setattr(triton_predicates, "_in_window", wrong_sign)
    assert str(found("relation", PrefixLM, device)) == (
        "two forms of the mask Both(first=Mask(), second=Mask(window_left=5, window_right=2)) "
        "disagree, at (m, n) = (0, 0), b=0, h=0, M=1, N=1\n"
        "  the jit predicate, rows by keys, says hidden\n"
        "  the dense tensor says visible"
    )


def test_no_form_of_a_shipped_mask_is_blamed(device):
    for form in FORMS:
        assert found(form, SinkWindow, device) is None


def test_examples_reach_the_edge_of_a_far_parameter():
    """The smallest value is 100, so that sequences are as long."""
    sizes = small_sizes(Far)
    assert {100, 101, 102} <= {*sizes}
    drawn = [mask_example(Random(i), Far, sizes=sizes, entries=2, device="cpu") for i in range(64)]
    assert sum(0 < x.mask.far < x.N for x in drawn) >= 5


def test_parameters_lie_at_their_bounds_and_at_the_sizes():
    drawn = [
        mask_example(Random(i), Registers, sizes=(6, 8, 11), entries=3, device="cpu")
        for i in range(64)
    ]
    tokens = Counter(
        name
        for x in drawn
        for name, value in {"4": 4, "500": 500, "M": x.M, "M - 1": x.M - 1, "N": x.N}.items()
        if x.mask.tokens == value
    )
    assert min(tokens.values()) >= 3
    assert len(tokens) == 5
