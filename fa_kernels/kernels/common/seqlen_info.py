"""Where the sequences of a batch lie, and how long they are."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

__all__ = [
    "Batch",
    "SeqlenInfo",
    "seqlen_info",
    "sequence",
    "sequence_of_tile",
    "valid_lengths",
]


class Batch(NamedTuple):
    """The sequences of a call, as the host gives them.

    The pointers lead to int32 lengths (B,), or under VARLEN to cumulative ones (B + 1,). No
    sequence is longer than max_seqlen; total_q and total_k are the rows of the tensors.
    """

    seqlens_q_ptr: Any
    seqlens_k_ptr: Any
    max_seqlen_q: Any
    max_seqlen_k: Any
    total_q: Any
    total_k: Any


class SeqlenInfo(NamedTuple):
    """One batch entry: valid lengths, and what the tensors' first strides count."""

    offset_q: Any
    offset_k: Any
    seqlen_q: Any
    seqlen_k: Any


@triton.jit
def sequence(seqlens_ptr, b, length, total, VARLEN: tl.constexpr):
    """(offset, seqlen) of a batch entry.

    ``offset`` is what the tensors' first stride counts: b, or the entry's first row under VARLEN.
    Then ``seqlens_ptr`` leads to the offsets of all entries and the end of the last. Whatever
    stands there, no sequence is longer than ``length`` or reaches past ``total``.
    """
    if VARLEN:
        offset = tl.minimum(tl.maximum(tl.load(seqlens_ptr + b), 0), total)
        end = tl.minimum(tl.load(seqlens_ptr + b + 1), total)
        seqlen = tl.minimum(tl.maximum(end - offset, 0), length)
    else:
        offset = b
        seqlen = tl.minimum(tl.maximum(tl.load(seqlens_ptr + b), 0), length)
    return offset, seqlen


@triton.jit
def seqlen_info(batch, b, VARLEN: tl.constexpr):
    """The ``SeqlenInfo`` of a batch entry."""
    offset_q, seqlen_q = sequence(batch.seqlens_q_ptr, b, batch.max_seqlen_q, batch.total_q, VARLEN)
    offset_k, seqlen_k = sequence(batch.seqlens_k_ptr, b, batch.max_seqlen_k, batch.total_k, VARLEN)
    return SeqlenInfo(offset_q, offset_k, seqlen_q, seqlen_k)


@triton.jit
def valid_lengths(seqlens_q_ptr, seqlens_k_ptr, b, M, N):
    """(seqlen_q, seqlen_k) of a batch entry, clamped to the tensors' lengths."""
    _, seqlen_q = sequence(seqlens_q_ptr, b, M, M, False)
    _, seqlen_k = sequence(seqlens_k_ptr, b, N, N, False)
    return seqlen_q, seqlen_k


@triton.jit
def sequence_of_tile(place, cu_seqlens_ptr, entries, total, BLOCK: tl.constexpr):
    """(b, tile) at a place where the tiles of all sequences follow each other.

    The first of sequence b stands at first_row // BLOCK + b, which leaves each enough places for
    any lengths: last_row // BLOCK + entries are enough for all. At a place that no tile has stands
    one behind the last row of its sequence.

    Args:
        place: Which.
        cu_seqlens_ptr: Cumulative lengths, as ``sequence`` reads them; they must ascend.
        entries: How many sequences there are, >= 1.
        total: Rows of the tensors.
        BLOCK: Rows of a tile.
    """
    low, high = 1, entries
    while low < high:
        middle = (low + high) // 2
        if tl.load(cu_seqlens_ptr + middle) // BLOCK + middle <= place:
            low = middle + 1
        else:
            high = middle
    b = low - 1
    first = tl.minimum(tl.maximum(tl.load(cu_seqlens_ptr + b), 0), total)
    tile = place - (first // BLOCK + b)
    # Before the first sequence.
    return b, tl.where(tile < 0, tl.cdiv(total, BLOCK), tile)
