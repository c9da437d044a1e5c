"""Offsets and lengths of the sequences of a batch."""

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
    """The sequences of a call, as the host passes them.

    The pointers lead to int32 lengths (B,), under VARLEN to cumulative lengths (B + 1,). No
    sequence is longer than max_seqlen; total_q and total_k are the rows of the tensors.
    """

    seqlens_q_ptr: Any
    seqlens_k_ptr: Any
    max_seqlen_q: Any
    max_seqlen_k: Any
    total_q: Any
    total_k: Any


class SeqlenInfo(NamedTuple):
    """One batch entry: valid lengths, and offsets in units of the tensors' first strides."""

    offset_q: Any
    offset_k: Any
    seqlen_q: Any
    seqlen_k: Any


@triton.jit
def sequence(seqlens_ptr, b, length, total, VARLEN: tl.constexpr):
    """Returns (offset, seqlen) of a batch entry.

    ``offset`` is in units of the tensors' first stride: b, or the entry's first row under VARLEN,
    where ``seqlens_ptr`` points to cumulative lengths. Values are clamped, so that no sequence is
    longer than ``length`` or ends past ``total``.
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
    """Returns the ``SeqlenInfo`` of a batch entry."""
    offset_q, seqlen_q = sequence(batch.seqlens_q_ptr, b, batch.max_seqlen_q, batch.total_q, VARLEN)
    offset_k, seqlen_k = sequence(batch.seqlens_k_ptr, b, batch.max_seqlen_k, batch.total_k, VARLEN)
    return SeqlenInfo(offset_q, offset_k, seqlen_q, seqlen_k)


@triton.jit
def valid_lengths(seqlens_q_ptr, seqlens_k_ptr, b, M, N):
    """Returns (seqlen_q, seqlen_k) of a batch entry, clamped to the tensors' lengths."""
    _, seqlen_q = sequence(seqlens_q_ptr, b, M, M, False)
    _, seqlen_k = sequence(seqlens_k_ptr, b, N, N, False)
    return seqlen_q, seqlen_k


@triton.jit
def sequence_of_tile(place, cu_seqlens_ptr, entries, total, BLOCK: tl.constexpr):
    """Returns (b, tile) of a place, where tiles of all sequences are numbered consecutively.

    The first tile of sequence b has the place first_row // BLOCK + b. This leaves enough places for
    any lengths, and last_row // BLOCK + entries places suffice for all sequences. A place without a
    tile yields a tile past the last row of its sequence.

    Args:
        place: The place, >= 0.
        cu_seqlens_ptr: Cumulative lengths, as ``sequence`` reads them; they must ascend.
        entries: Number of sequences, >= 1.
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
    # A place before the first sequence gets a tile past all rows.
    return b, tl.where(tile < 0, tl.cdiv(total, BLOCK), tile)
