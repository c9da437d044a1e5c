"""Faults of masks and lengths."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch.nn.functional import pad

from fa_verify.diagnosis.named.named import Change, InapplicableError, Named, untiled
from fa_verify.diagnosis.named.passes import Pass
from fa_verify.diagnosis.named.ranges import full, visited

__all__ = ["MASKS", "axes", "finite", "inside", "sees", "used", "window"]


def axes(p: Pass) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return m (M, 1), n (N,), and the valid rows and keys (B, 1, 1, 1)."""
    x = p.case.problem
    m = torch.arange(x.M, device=x.device).view(-1, 1)
    return m, torch.arange(x.N, device=x.device), *p.case.lengths()


def inside(p: Pass, *, rows: bool = True, keys: bool = True) -> torch.Tensor:
    """Return the pairs whose row and key are no padding; either may be left out."""
    m, n, seqlens_q, seqlens_k = axes(p)
    seen = torch.ones_like(p.seen)
    if rows:
        seen = seen & (m < seqlens_q)
    return seen & (n < seqlens_k) if keys else seen


def predicate(p: Pass) -> torch.Tensor:
    """Return the mask without its window.

    Raises:
        InapplicableError: The mask is no intersection of a window and a predicate.
    """
    mask = p.case.problem.mask
    if mask.is_plain:
        return torch.ones_like(p.seen)
    beyond = p.case.visible(causal=False, window_left=None, window_right=None)
    if not torch.equal(beyond & window(p, mask.window_left, mask.right), p.seen):
        raise InapplicableError
    return beyond


def window(
    p: Pass, left: int | None, right: int | None, ahead: torch.Tensor | int | None = None
) -> torch.Tensor:
    """Return the pairs within a window: position - left <= n <= position + right."""
    m, n, rows, keys = axes(p)
    position = m + (keys - rows if ahead is None else ahead)
    seen = torch.ones_like(p.seen)
    if left is not None:
        seen = seen & (n >= position - left)
    if right is not None:
        seen = seen & (n <= position + right)
    return seen


def sees(p: Pass, seen: torch.Tensor) -> bool:
    """Change the visible pairs; False if they stay the same."""
    changed = not torch.equal(seen, p.seen)
    p.seen = seen
    # Values of pairs that become visible: the plain pass holds zeros for unread ones.
    given = p.case.inputs
    live, read = seen.any(3, keepdim=True), used(p, seen)
    p.q, p.dout = (torch.where(live, t.double(), 0.0) for t in (given.q, given.dout))
    p.k, p.v = (torch.where(read, t.double(), 0.0) for t in (given.k, given.v))
    if given.dlse is not None:
        p.dlse = torch.where(live[..., 0], given.dlse.double(), 0.0)
    if given.bias is not None:
        p.bias = torch.where(seen, given.bias.double().expand(seen.shape), 0.0)
    return changed


def used(p: Pass, seen: torch.Tensor) -> torch.Tensor:
    """Return the keys that a row of the group sees, bool (B, Hk, N, 1)."""
    x = p.case.problem
    return seen.any(2).view(x.B, x.Hk, x.G, x.N, 1).any(2)


def _edges(left: int, right: int) -> Change:
    """Return a change that moves the edges of the window outward by so many keys."""

    def change(p: Pass, block_m: int, block_n: int) -> bool:
        mask = p.case.problem.mask
        if (left and mask.window_left is None) or (right and mask.right is None):
            return False
        new_left = None if mask.window_left is None else mask.window_left + left
        new_right = None if mask.right is None else mask.right + right
        return sees(p, inside(p) & predicate(p) & window(p, new_left, new_right))

    return change


def _top_left(p: Pass, block_m: int, block_n: int) -> bool:
    mask = p.case.problem.mask
    return sees(p, inside(p) & predicate(p) & window(p, mask.window_left, mask.right, 0))


def _always_causal(p: Pass, block_m: int, block_n: int) -> bool:
    return sees(p, p.seen & window(p, None, 0))


def _without(left: bool, right: bool, beyond: bool) -> Change:
    """Return a change that ignores parts of the mask."""

    def change(p: Pass, block_m: int, block_n: int) -> bool:
        mask = p.case.problem.mask
        kept = window(p, None if left else mask.window_left, None if right else mask.right)
        if not beyond:
            kept = kept & predicate(p)
        return sees(p, inside(p) & kept)

    return change


def _padded_keys_seen(p: Pass, block_m: int, block_n: int) -> bool:
    mask = p.case.problem.mask
    if not mask.is_plain:
        return False
    return sees(p, inside(p, keys=False) & window(p, mask.window_left, mask.right))


def _padded_keys_past(p: Pass, block_m: int, block_n: int) -> bool:
    _, n, _, keys = axes(p)
    return sees(p, p.seen | (inside(p, keys=False) & (n >= keys)))


def _lengthened(p: Pass, block_n: int) -> torch.Tensor:
    """Lengthen the keys by zeros to whole tiles; return their positions."""
    more = -p.case.problem.N % block_n
    p.k, p.v = (pad(torch.where(used(p, p.seen), t, 0.0), (0, 0, 0, more))
                for t in (p.k, p.v))  # fmt: skip
    p.seen = pad(p.seen, (0, more))
    p.distance = pad(p.distance, (0, more))
    if p.bias is not None:
        p.bias = pad(p.bias, (0, more))
    return torch.arange(p.seen.shape[3], device=p.seen.device)


def _zero_keys(windowed: bool, of_visited: bool, of_tile: bool) -> Change:
    """Return a change that sees keys of zeros up to the end of a tile."""

    def change(p: Pass, block_m: int, block_n: int) -> bool:
        x = p.case.problem
        m, _, rows, keys = axes(p)
        n = _lengthened(p, block_n)
        end = (keys + block_n - 1) // block_n * block_n if of_tile else n.numel()
        let_in = (n >= keys) & (n < end) & (m < rows)
        position = m + (keys - rows)
        if windowed and x.mask.right is not None:
            let_in = let_in & (n <= position + x.mask.right)
        if windowed and x.mask.window_left is not None:
            let_in = let_in & (n >= position - x.mask.window_left)
        if of_visited:
            let_in = let_in & visited(p, block_m, block_n)
        p.seen = p.seen | let_in
        return bool(let_in.any())

    return change


def _padded_rows(p: Pass, block_m: int, block_n: int) -> bool:
    m, _, rows, _ = axes(p)
    past = (m >= rows).expand(p.seen.shape[0], 1, -1, 1)
    p.lse_of_padding = 0.0
    sees(p, p.seen | (past & inside(p, rows=False)))
    return bool(past.any())


def finite(value: Callable[[Pass], float | None], of_visited: bool, selects: bool) -> Change:
    """Return a change that gives hidden pairs a finite score, or those of visited tiles.

    Args:
        value: The score; None if the fault changes nothing.
        of_visited: Keys that are padded with zeros to whole tiles, and hidden tiles are left out.
        selects: Whether the gradient of hidden scores is 0.
    """

    def change(p: Pass, block_m: int, block_n: int) -> bool:
        score = value(p)
        if score is None or bool(p.seen.all()):
            return False
        given = p.case.inputs
        # Rows and keys of padding are not read.
        valid = inside(p)
        p.q, p.dout = (torch.where(valid.any(3, keepdim=True), t.double(), 0.0)
                       for t in (given.q, given.dout))  # fmt: skip
        p.k, p.v = (torch.where(used(p, valid), t.double(), 0.0) for t in (given.k, given.v))
        p.hidden, p.hides_gradients = score, selects
        if of_visited:
            p.k, p.v = (pad(t, (0, 0, 0, -t.shape[2] % block_n)) for t in (p.k, p.v))
            p.seen, p.distance = (pad(t, (0, -t.shape[3] % block_n)) for t in (p.seen, p.distance))
            if p.bias is not None:
                p.bias = pad(p.bias, (0, -p.bias.shape[3] % block_n))
            m, _, rows, _ = axes(p)
            p.hidden = torch.where(visited(p, block_m, block_n) & (m < rows), score, -math.inf)
        return True

    # The other forms do not depend on tiles.
    return change if of_visited else untiled(change)


def _constant(value: float, scaled: bool) -> Callable[[Pass], float]:
    return lambda p: value * p.scale if scaled else value


_HIDDEN = tuple(
    finite(_constant(value, scaled), visited, selects)
    for value in (-1e4, -1e9, -1e30, -1e5, -1e6, -1e8, -torch.finfo(torch.float32).max,
                  -torch.finfo(torch.float16).max)
    for scaled in (False, True)
    for visited, selects in ((False, False), (False, True), (True, False))
    if not visited or value == -1e4
)  # fmt: skip


def _of_elements(change: Change) -> Change:
    """Return a change of the mask that leaves the visited tiles, and those without a mask."""

    def changed(p: Pass, block_m: int, block_n: int) -> bool:
        right = p.seen
        unmasked = full(p, block_m, block_n, True)
        there = visited(p, block_m, block_n)
        if change(p, block_m, block_n) is False:
            return False
        faulty, p.seen = p.seen, right
        return sees(p, there & torch.where(unmasked, right, faulty))

    return changed


def _of_ranges(change: Change) -> Change:
    """Return a change of the visited tiles, and of those without a mask, that leaves the mask."""

    def changed(p: Pass, block_m: int, block_n: int) -> bool:
        right = p.seen
        if change(p, block_m, block_n) is False:
            return False
        unmasked = full(p, block_m, block_n, True) & p.seen
        seen, p.seen = visited(p, block_m, block_n) & right | unmasked, right
        return sees(p, seen)

    return changed


def _mask(name: str, says: str, change: Change, on_record: str = "") -> Named:
    """Return a fault of the mask of elements, of the ranges of tiles, or of both."""
    forms = (untiled(change), _of_elements(change), _of_ranges(change))
    return Named(name, says, forms, tiles="mn", on_record=on_record)


MASKS: tuple[Named, ...] = (
    _mask("diagonal hidden", "the mask's right edge were one key too near: the diagonal of a "
          "causal mask is hidden", _edges(0, -1),
          on_record="transformers#39408, #29623; vllm#3385"),
    _mask("right edge late", "the mask's right edge let one key more in", _edges(0, 1)),
    _mask("window edge hidden", "the far edge of the window were hidden", _edges(-1, 0),
          on_record="transformers#39408, #29623; vllm#3385"),
    _mask("window edge late", "the far edge of the window let one key more in", _edges(1, 0)),
    _mask("top left", "positions were aligned to the top left, not to the bottom right",
          _top_left, on_record="flash-attention#282, #402, @9e5e8bc9; ffpa-attn#300"),
    _mask("always causal", "the mask were always causal", _always_causal,
          on_record="triton#4541, #5660, #4174, #7216"),
    _mask("right edge ignored", "keys to the right were never hidden",
          _without(False, True, False)),
    _mask("window ignored", "the window had no far edge", _without(True, False, False)),
    _mask("predicate ignored", "the mask's predicate were ignored",
          _without(False, False, True)),
    _mask("mask ignored", "the mask hid nothing but padding", _without(True, True, True)),
    Named("padded keys", "keys past the end of a sequence took part, with what they hold",
          (_padded_keys_seen, _padded_keys_past),
          on_record="flashinfer#5090; fla@d7150bf9; FlagAttention@18a4f44; "
                    "flash-attention@a4f148b6, @c65b5106, #443; pytorch#196678; trl#7181; "
                    "cudnn-frontend#160"),
    Named("zero keys", "the padding of the ragged last key tile took part, with scores of 0",
          (_zero_keys(False, True, True), _zero_keys(False, False, True),
           _zero_keys(True, False, True), _zero_keys(False, False, False)), tiles="mn",
          on_record="flashinfer#5090; fla@d7150bf9; FlagAttention@18a4f44; "
                    "flash-attention@a4f148b6, @c65b5106, #443; pytorch#196678; trl#7181; "
                    "cudnn-frontend#160"),
    Named("padded rows", "rows past the end of a sequence took part, with an lse of 0",
          (_padded_rows,), ("dk and dv",),
          on_record="cudnn-frontend#1072; tokamax#316; tilelang#2461"),
    Named("finite mask", "hidden keys had a finite score in place of -inf",
          _HIDDEN, ("everywhere", "forward", "the forward alone"), "mn",
          on_record="lattice#361, #373; TransformerLens#366"),
)  # fmt: skip
