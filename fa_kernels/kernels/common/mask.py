"""Visibility of the (query, key) pairs of a tile."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

__all__ = ["AttentionMask", "element_mask", "pairs_seen"]


class AttentionMask(NamedTuple):
    """The mask of one head: valid lengths, the window, and the arguments of a predicate.

    A predicate is a jit function of (b, h, m, n, args).
    """

    seqlen_q: Any
    seqlen_k: Any
    window_left: Any
    window_right: Any
    b: Any
    h: Any
    args: Any


@triton.jit
def element_mask(offs_m, offs_n, mask, PREDICATE: tl.constexpr):
    """Returns True where query m sees key n, for offsets that broadcast against each other."""
    distance = offs_n - (offs_m + (mask.seqlen_k - mask.seqlen_q))
    in_window = (distance >= -mask.window_left) & (distance <= mask.window_right)
    seen = in_window & (offs_m < mask.seqlen_q) & (offs_n < mask.seqlen_k)
    if PREDICATE is not None:
        # A predicate never gets a padding row or key, so it can index tables with them.
        m = tl.minimum(offs_m, mask.seqlen_q - 1)
        n = tl.minimum(offs_n, mask.seqlen_k - 1)
        seen = seen & (PREDICATE(mask.b, mask.h, m, n, mask.args) != 0)
    return seen


@triton.jit
def pairs_seen(here, there, seqlen_here, seqlen_there, before, after):
    """Returns True where elements of this sequence (rows) see elements of the other (columns).

    The result equals ``element_mask`` with one comparison per element, because a row sees
    consecutive columns. See ``visible_tiles`` for the arguments.
    """
    own = here + (seqlen_there - seqlen_here)
    first = own - before
    # equivalent: before and after are not negative, so a row before its end has a count above 0.
    count = tl.maximum(tl.minimum(own + after + 1, seqlen_there) - first, 0)
    count = tl.where(here < seqlen_here, count, 0)
    # Columns before the first become large as unsigned numbers, past the last column.
    return (there[None, :] - first[:, None]).to(tl.uint32) < count.to(tl.uint32)[:, None]
