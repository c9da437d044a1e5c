"""The portable kernels visit no tile in vain: the interpreter counts their products."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

pytest.importorskip("triton")

from triton.runtime.interpreter import InterpreterBuilder

import fa_kernels
from fa_kernels.configs import CONFIGS
from fa_kernels.launch import portable
from fa_verify.adapters.ours import adapted
from fa_verify.oracles.masks.block_sparse import BlockSparse
from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.masks.prefix_lm import PrefixLM

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="runs in the interpreter")

B, H, HK, M, N = 2, 2, 1, 50, 70
# Lengths, which a mask with a predicate needs for packed sequences.
WHOLE = {"seqlens_q": (M, M), "seqlens_k": (N, N)}
MASKS = {
    "full": Mask(),
    "causal": Mask(causal=True),
    "window": Mask(window_left=20, window_right=3),
    "lengths": Mask(causal=True, seqlens_q=(33, 50), seqlens_k=(64, 0)),
    "predicate": PrefixLM(prefix=20, **WHOLE),
    "block mask": BlockSparse(side=32, percent=50, seed=1, per_head=True, **WHOLE),
}
# Products of a tile.
PRODUCTS = {"forward": 2, "dkdv": 4, "dq": 3}
IN_ONE_PASS = {"forward": 2, "dkdv": 5}
# Windows over a cache, by their reach to the left and right.
WINDOWS = {"full": (None, None), "causal": (None, 0), "left": (20, 0), "right": (3, 20)}


@pytest.fixture
def visits(monkeypatch):
    """Counts products by kernel."""
    seen: Counter[str] = Counter()
    running = [""]
    run, product = portable.run, InterpreterBuilder.create_dot

    def launched(kernel, grid, named, kinds=None):
        running[0] = kernel.fn.__name__.removesuffix("_kernel")
        run(kernel, grid, named, kinds)

    def counted(self, *operands):
        seen[running[0]] += 1
        return product(self, *operands)

    monkeypatch.setattr(portable, "run", launched)
    monkeypatch.setattr(InterpreterBuilder, "create_dot", counted)
    return seen


def visible(mask: Mask, block_m: int, block_n: int) -> int:
    """The number of tiles with a visible pair."""
    return tiles_of(mask.dense(B, H, M, N).expand(B, H, M, N), block_m, block_n)


def tiles_of(seen: torch.Tensor, block_m: int, block_n: int) -> int:
    """The number of tiles of a dense mask (entries, heads, rows, keys) with a visible pair."""
    rows = torch.stack([x.any(2) for x in seen.split(block_m, 2)], 2)
    return sum(int(x.any(3).sum()) for x in rows.split(block_n, 3))


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("config", ["16x32", "32x16-one_pass", "16x16-split3", "16x16-packed"])
def test_kernels_visit_the_tiles_with_a_visible_pair_alone(mask, config, visits):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(B, heads, length, 16, generator=generator).requires_grad_()
        for heads, length in ((H, M), (HK, N), (HK, N))
    )
    # Mutants run these tests on a copy of the package, which is imported here.
    flash_attention = adapted(fa_kernels)
    out, _ = flash_attention(q, k, v, mask=mask, sm_scale=0.25, config=config)
    out.sum().backward()
    tile = CONFIGS[config.removesuffix("-packed").removesuffix("-one_pass")].forward
    tiles = visible(mask, tile.block_m, tile.block_n)
    products = IN_ONE_PASS if "one_pass" in config else PRODUCTS
    assert visits == {kernel: number * tiles for kernel, number in products.items()}


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("window", WINDOWS.values(), ids=WINDOWS)
@pytest.mark.parametrize("programs", [0, 10**6], ids=["in turn", "apart"])
def test_calls_with_a_cache_visit_the_tiles_with_a_visible_pair_alone(
    programs, window, group, visits, monkeypatch
):
    monkeypatch.setattr(portable, "PROGRAMS_IN_TURN", programs)
    # Under a causal mask, 16 rows of the second entry see two whole tiles of keys.
    lengths = (N, 36)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(B, *axes, 16, generator=generator)
        for axes in ((HK * group, 20), (N, HK), (N, HK))
    )
    fa_kernels.flash_attention_with_kvcache(
        q, k, v, cache_seqlens=lengths, window_size=window, config="16x16"
    )
    left, right = window
    mask = Mask(window_left=left, window_right=right, seqlens_k=lengths)
    # The rows of a group's heads lie query by query.
    seen = mask.dense(B, HK, 20, N).repeat_interleave(group, 2)
    tile = CONFIGS["16x16"].cache
    assert visits == {"kvcache": 2 * tiles_of(seen, tile.block_m, tile.block_n)}
