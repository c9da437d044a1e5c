"""Parts of out by key tile, and products with them."""

from __future__ import annotations

import pytest
import torch

from fa_verify.oracles.bounds import key_tiles
from fa_verify.oracles.masks.mask import Mask

TILE = 16
MASKS = (Mask(), Mask(causal=True), Mask(window_left=20, seqlens_q=(30, 37), seqlens_k=(41, 45)))


def problem(mask):
    generator = torch.Generator().manual_seed(4)
    q, k, v, x, y = (
        torch.randn(shape, generator=generator, dtype=torch.float64)
        for shape in ((2, 4, 37, 8), (2, 2, 45, 8), (2, 2, 45, 6), (2, 4, 37, 6), (2, 4, 37, 6))
    )
    scores = (q @ k.repeat_interleave(2, 1).mT * 0.3).masked_fill(
        ~mask.dense(2, 4, 37, 45), -torch.inf
    )
    lse = scores.logsumexp(3)
    p = scores.softmax(3).nan_to_num(0.0)
    return (q, k, v), {"lse": lse, "mask": mask, "sm_scale": 0.3}, p, (x, y)


@pytest.mark.parametrize("pairs", [2**22, 500], ids=["one chunk", "chunks"])
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_products_with_the_parts_of_out(mask, pairs, monkeypatch):
    monkeypatch.setattr(key_tiles, "_PAIRS", pairs)
    inputs, of, p, (x, y) = problem(mask)
    along, largest = key_tiles.along_parts([x, y], *inputs, tile=TILE, **of)
    assert along.shape == (2, 2, 4, 37, 3)
    torch.testing.assert_close(largest, p.amax(3))
    values = inputs[2].repeat_interleave(2, 1)
    for tile in range(3):
        keys = slice(tile * TILE, (tile + 1) * TILE)
        part = p[..., keys] @ values[:, :, keys]
        torch.testing.assert_close(key_tiles.parts(keys, *inputs, **of), part)
        for place, field in enumerate((x, y)):
            torch.testing.assert_close(along[place, ..., tile], (field * part).sum(3))
