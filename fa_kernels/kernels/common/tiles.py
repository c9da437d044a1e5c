"""The acts that all kernels share: addressing, loads, the element mask, the scale.

A ``matrix`` is the tuple (pointer, row stride, column stride, number of columns) of one head; a
``view`` is the tuple (seqlen_q, seqlen_k, window_left, window_right) of one batch entry, followed,
for masks with a predicate, by (b, h, the predicate's arguments). ``tiles`` is what
``visible_tiles`` or ``listed_tiles`` gives: four numbers, and where the list begins.
"""

import triton
import triton.language as tl

__all__ = [
    "LN2",
    "LOG2E",
    "element_mask",
    "head_matrix",
    "listed_tiles",
    "load_tile",
    "normalised",
    "nth_tile",
    "pairs_seen",
    "scale_from_bits",
    "scratch_row",
    "sequence",
    "sequence_of_tile",
    "store_rows",
    "stored_rows",
    "tile_count",
    "tile_index",
    "tile_of_program",
    "valid_lengths",
    "whole_rows",
]

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)


@triton.jit
def scale_from_bits(sm_scale_bits):
    """The softmax scale as float64.

    A Python float arrives as float32; its bits in an int64 keep every digit, which float64 inputs
    need.
    """
    return tl.cast(sm_scale_bits, tl.float64, bitcast=True)


@triton.jit
def head_matrix(ptr, b, h, stride_b, stride_h, stride_row, stride_column, columns):
    """The matrix of one head; offsets of heads and tiles are 64-bit."""
    pointer = ptr + b.to(tl.int64) * stride_b + h.to(tl.int64) * stride_h
    return pointer, stride_row, stride_column, columns


@triton.jit
def load_tile(
    matrix, start, rows, columns, inside, ALIGNED: tl.constexpr, CHECK_ROWS: tl.constexpr
):
    """Rows ``start + rows`` of ``matrix``, zeros past its last column.

    ``rows`` (R, 1) and ``columns`` (1, C) give the tile, (1, R) and (C, 1) its transpose. With
    CHECK_ROWS, rows that are not ``inside`` (shaped as ``rows``) are zeros and are not read.

    ALIGNED, if not 0: unit column stride, rows on 16-byte boundaries, 16-bit numbers, a multiple of
    8 of them in a row, and offsets within a tile that fit 32 bits; 2: no column to mask. The host
    has checked it; it is said here so that the compiler can make loads 16 bytes wide.
    """
    if ALIGNED:
        stride_row = (matrix[1] // 8).to(tl.int32) * 8
        pointer = tl.multiple_of(matrix[0] + tl.cast(start, tl.int64) * stride_row, 16)
        places = pointer + (rows * stride_row + columns)
        kept = columns < matrix[3] // 8 * 8
        if ALIGNED == 1 and CHECK_ROWS:
            tile = tl.load(places, mask=inside & kept, other=0.0)
        elif ALIGNED == 1:
            tile = tl.load(places, mask=kept, other=0.0)
        elif CHECK_ROWS:
            tile = tl.load(places, mask=inside, other=0.0)
        else:
            tile = tl.load(places)
    else:
        row_offsets = (start + rows).to(tl.int64) * matrix[1]
        pointers = matrix[0] + (row_offsets + columns.to(tl.int64) * matrix[2])
        if CHECK_ROWS:
            tile = tl.load(pointers, mask=inside & (columns < matrix[3]), other=0.0)
        else:
            tile = tl.load(pointers, mask=columns < matrix[3], other=0.0)
    return tile


@triton.jit
def stored_rows(b, h, H, place, length, seqlen, rows, PACKED: tl.constexpr):
    """(first, end) of one head in a contiguous tensor of all heads' rows.

    ``first`` is where its row 0 stands; rows from ``end`` on are not its own. Padding is.
    """
    if PACKED:
        first, end = h.to(tl.int64) * rows + place, seqlen
    else:
        first, end = (b * H + h).to(tl.int64) * length, length
    return first, end


@triton.jit
def scratch_row(b, h, H, place, M_padded, BLOCK: tl.constexpr, PACKED: tl.constexpr):
    """Where row 0 of one head stands in scratch that has whole tiles of rows for each sequence.

    M_padded: rows of a head's scratch, of all sequences if PACKED; those that follow each other
    begin at multiples of BLOCK then, far enough apart for any lengths.
    """
    if PACKED:
        row = h.to(tl.int64) * M_padded + (place + b * BLOCK) // BLOCK * BLOCK
    else:
        row = (b * H + h).to(tl.int64) * M_padded
    return row


@triton.jit
def whole_rows(ptr, first, rows, columns, D):
    """Places in rows ``first + rows`` of D columns, where rows begin at multiples of 16 bytes.

    So that they are read and written as many at a time. ``first`` is 64-bit, and no constant: what
    is said of a parameter alone the compiler forgets.
    """
    pointer = tl.multiple_of(ptr + first * D, 16)
    return pointer + (rows.to(tl.int64)[:, None] * D + columns[None, :])


@triton.jit
def store_rows(
    ptr, first, end, rows, columns, tile, D, BLOCK_D: tl.constexpr, ALIGNED: tl.constexpr
):
    """Writes ``tile``, cast to the tensor's dtype, as rows ``first + rows`` of D columns.

    Those from ``end`` on are not written; ``first`` is 64-bit. ALIGNED as of ``load_tile``.
    """
    tile = tile.to(ptr.dtype.element_ty)
    if ALIGNED == 2:
        places = whole_rows(ptr, first, rows, columns, BLOCK_D)
        tl.store(places, tile, mask=rows[:, None] < end)
    elif ALIGNED == 1:
        D = D // 8 * 8
        inside = (rows[:, None] < end) & (columns[None, :] < D)
        tl.store(whole_rows(ptr, first, rows, columns, D), tile, mask=inside)
    else:
        inside = (rows[:, None] < end) & (columns[None, :] < D)
        tl.store(ptr + ((first + rows)[:, None] * D + columns[None, :]), tile, mask=inside)


@triton.jit
def normalised(acc, l_i, m_i, live):
    """(out, lse) of a softmax's sums in base 2; rows that are not ``live`` give 0 and -inf."""
    l_safe = tl.where(live, l_i, 1.0)
    out = tl.where(live[:, None], acc / l_safe[:, None], 0.0)
    lse = tl.where(live, m_i * LN2 + tl.log(l_safe), -float("inf"))
    return out, lse


@triton.jit
def sequence(seqlens_ptr, b, length, rows, PACKED: tl.constexpr):
    """(place, seqlen) of a batch entry.

    ``place`` is what the tensors' first stride counts: b, or the entry's first row if PACKED. Then
    ``seqlens_ptr`` leads to the places of all entries and the end of the last. Whatever stands
    there, no sequence is longer than ``length`` or reaches past ``rows``.
    """
    if PACKED:
        place = tl.minimum(tl.maximum(tl.load(seqlens_ptr + b), 0), rows)
        end = tl.minimum(tl.load(seqlens_ptr + b + 1), rows)
        seqlen = tl.minimum(tl.maximum(end - place, 0), length)
    else:
        place = b
        seqlen = tl.minimum(tl.maximum(tl.load(seqlens_ptr + b), 0), length)
    return place, seqlen


@triton.jit
def sequence_of_tile(place, offsets_ptr, entries, rows, BLOCK: tl.constexpr):
    """(b, tile) at a place where packed sequences have their tiles one behind the other.

    The first of sequence b stands at first_row // BLOCK + b, which leaves each enough places for
    any lengths: last_row // BLOCK + entries are enough for all. At a place that no tile has stands
    one behind the last row of its sequence.

    Args:
        place: Which.
        offsets_ptr: As of ``sequence``; places are found if offsets ascend.
        entries: How many sequences there are, >= 1.
        rows: Of the tensors.
        BLOCK: Rows of a tile.
    """
    low, high = 1, entries
    while low < high:
        middle = (low + high) // 2
        if tl.load(offsets_ptr + middle) // BLOCK + middle <= place:
            low = middle + 1
        else:
            high = middle
    b = low - 1
    first = tl.minimum(tl.maximum(tl.load(offsets_ptr + b), 0), rows)
    tile = place - (first // BLOCK + b)
    # Before the first sequence.
    return b, tl.where(tile < 0, tl.cdiv(rows, BLOCK), tile)


@triton.jit
def tile_of_program(
    program,
    tiles,
    entries,
    heads,
    offsets_ptr,
    rows,
    BLOCK: tl.constexpr,
    LATE_FIRST: tl.constexpr,
    PACKED: tl.constexpr,
):
    """(tile, b, h) of a program, where heads follow each other, and ``tiles`` within a head.

    They are those of one sequence; or, where there are ``entries``, of so many packed ones, as of
    ``sequence_of_tile``. LATE_FIRST: under causal masking late query tiles are the long ones.
    """
    tile = program % tiles
    head = program // tiles
    if LATE_FIRST:
        tile = tiles - 1 - tile
    b = head // heads
    if PACKED:
        if entries > 0:
            b, tile = sequence_of_tile(tile, offsets_ptr, entries, rows, BLOCK)
    return tile, b, head % heads


@triton.jit
def valid_lengths(seqlens_q_ptr, seqlens_k_ptr, b, M, N):
    """(seqlen_q, seqlen_k) of a batch entry, clamped to the tensors' lengths."""
    seqlen_q = sequence(seqlens_q_ptr, b, M, M, False)[1]
    seqlen_k = sequence(seqlens_k_ptr, b, N, N, False)[1]
    return seqlen_q, seqlen_k


@triton.jit
def tile_count(tiles, MASKED: tl.constexpr):
    """How many edge tiles (MASKED) or full tiles ``visible_tiles`` gave."""
    full = tiles[2] - tiles[1]
    return tiles[3] - tiles[0] - full if MASKED else full


@triton.jit
def nth_tile(i, tiles, MASKED: tl.constexpr):
    """The i-th full tile, or (MASKED) edge tile; those lie on both sides of the full."""
    if MASKED:
        tile = tiles[0] + i
        tile = tl.where(tile >= tiles[1], tile + (tiles[2] - tiles[1]), tile)
    else:
        tile = tiles[1] + i
    return tile


@triton.jit
def listed_tiles(lists_ptr, b, h, tile, stride_b, stride_h, stride_tile):
    """A tile's row of a block map, read like a range whose edge tiles all come first.

    Strides are 64-bit.

    Returns:
        (0, mixed, mixed + full, mixed + full, pointer to the indices): the edge tiles are those
        that a mask divides.
    """
    row = b * stride_b + h * stride_h + tile * stride_tile
    mixed = tl.load(lists_ptr + row)
    visited = mixed + tl.load(lists_ptr + row + 1)
    return 0, mixed, visited, visited, lists_ptr + row + 2


@triton.jit
def tile_index(place, tiles, PREDICATE: tl.constexpr):
    """The index of a tile: its place in a range, or what stands there in a list."""
    if PREDICATE is not None:
        place = tl.load(tiles[4] + place)
    return place


@triton.jit
def element_mask(offs_m, offs_n, view, PREDICATE: tl.constexpr):
    """Where query m sees key n, for offsets that broadcast against each other."""
    distance = offs_n - (offs_m + (view[1] - view[0]))
    in_window = (distance >= -view[2]) & (distance <= view[3])
    seen = in_window & (offs_m < view[0]) & (offs_n < view[1])
    if PREDICATE is not None:
        # Padding is not asked about, so that a predicate can look rows and keys up in tables.
        m = tl.minimum(offs_m, view[0] - 1)
        n = tl.minimum(offs_n, view[1] - 1)
        seen = seen & (PREDICATE(view[4], view[5], m, n, view[6]) != 0)
    return seen


@triton.jit
def pairs_seen(here, there, seqlen_here, seqlen_there, before, after):
    """Where elements of this sequence (rows) pair with elements of the other (columns).

    What ``element_mask`` says, but a column is compared once: what a row sees follows each other.
    Arguments are those of ``visible_tiles``.
    """
    own = here + (seqlen_there - seqlen_here)
    first = own - before
    count = tl.maximum(tl.minimum(own + after + 1, seqlen_there) - first, 0)
    count = tl.where(here < seqlen_here, count, 0)
    # What comes before the first is as an unsigned number behind the last.
    return (there[None, :] - first[:, None]).to(tl.uint32) < count.to(tl.uint32)[:, None]
