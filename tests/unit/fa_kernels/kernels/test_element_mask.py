"""The kernels' element masks, evaluated inside a kernel, against the definition of a mask."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.stream import integers

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

from fa_kernels.kernels.common.mask import AttentionMask, element_mask, pairs_seen  # noqa: E402
from fa_kernels.validation.arguments import MAX_SEQLEN  # noqa: E402

ROWS, COLUMNS = 16, 32
COUNT = 40


@triton.jit
def mask_kernel(
    views,
    seen,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    KEYS_FIRST: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """Writes the mask of one tile, ROWS queries by COLUMNS keys, transposed if KEYS_FIRST.

    PAIRS selects ``pairs_seen``, otherwise ``element_mask``.
    """
    at = views + tl.program_id(0) * 6
    mask = AttentionMask(tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3), 0, 0, 0)
    offs_m = tl.arange(0, ROWS)
    offs_n = tl.arange(0, COLUMNS)
    tile = seen + tl.program_id(0) * ROWS * COLUMNS
    m = tl.load(at + 4) + offs_m
    n = tl.load(at + 5) + offs_n
    if KEYS_FIRST:
        if PAIRS:
            visible = pairs_seen(
                n, m, mask.seqlen_k, mask.seqlen_q, mask.window_right, mask.window_left
            )
        else:
            visible = element_mask(m[None, :], n[:, None], mask, None)
        tl.store(tile + (offs_n[:, None] * ROWS + offs_m[None, :]), visible.to(tl.int8))
    else:
        if PAIRS:
            visible = pairs_seen(
                m, n, mask.seqlen_q, mask.seqlen_k, mask.window_left, mask.window_right
            )
        else:
            visible = element_mask(m[:, None], n[None, :], mask, None)
        tl.store(tile + (offs_m[:, None] * COLUMNS + offs_n[None, :]), visible.to(tl.int8))


class View(NamedTuple):
    """The arguments of element_mask for a batch entry, and the place of the tile."""

    seqlen_q: int
    seqlen_k: int
    window_left: int
    window_right: int
    start_m: int
    start_n: int


def drawn_views(size: int) -> list[View]:
    """Draws lengths up to ``size``, windows up to twice that, tiles at the diagonal and anywhere.

    One window in four is unbounded, given as the sum of the longest lengths.
    """
    words = [integers(0, f"element_mask/{name}", (COUNT,)).abs() for name in View._fields]
    lengths = [(word >> 8) % (size + 1) for word in words[:2]]
    windows = [
        torch.where(word % 4 == 0, 2 * size, (word >> 8) % (2 * min(size, ROWS) + 1))
        for word in words[2:4]
    ]
    start_m = (words[4] >> 8) % (max(size - ROWS, 0) + 1)
    on_the_diagonal = (start_m + lengths[1] - lengths[0]).clamp(0, size)
    anywhere = (words[5] >> 8) % (max(size - COLUMNS, 0) + 1)
    start_n = torch.where(words[5] % 4 == 0, anywhere, on_the_diagonal)
    return [
        View(*row) for row in torch.stack([*lengths, *windows, start_m, start_n], dim=1).tolist()
    ]


def by_definition(view: View, size: int) -> list[list[bool]]:
    """The tile by Mask.is_visible, in which an unbounded window is None."""
    bounds = [None if bound == 2 * size else bound for bound in view[2:4]]
    mask = Mask(
        window_left=bounds[0],
        window_right=bounds[1],
        seqlens_q=(view.seqlen_q,),
        seqlens_k=(view.seqlen_k,),
    )
    return [
        [
            mask.is_visible(0, 0, m, n, M=size, N=size)
            for n in range(view.start_n, view.start_n + COLUMNS)
        ]
        for m in range(view.start_m, view.start_m + ROWS)
    ]


@pytest.mark.parametrize("keys_first", [False, True])
@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("size", [16, 100, MAX_SEQLEN])
def test_a_kernels_element_mask_equals_the_definition(size, pairs, keys_first, device):
    views = drawn_views(size)
    want = torch.tensor([by_definition(view, size) for view in views])
    assert 0.05 < want.double().mean() < 0.95  # visible and hidden pairs are both frequent
    arguments = torch.tensor(views, dtype=torch.int32, device=device)
    seen = torch.full((COUNT, ROWS * COLUMNS), -1, dtype=torch.int8, device=device)
    mask_kernel[(COUNT,)](
        arguments, seen, ROWS=ROWS, COLUMNS=COLUMNS, KEYS_FIRST=keys_first, PAIRS=pairs
    )
    if keys_first:
        got = seen.view(COUNT, COLUMNS, ROWS).mT
    else:
        got = seen.view(COUNT, ROWS, COLUMNS)
    wrong = (got.cpu() != want.to(torch.int8)).nonzero().tolist()
    assert not wrong, [(views[i], m, n) for i, m, n in wrong[:3]]
