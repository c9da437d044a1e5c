"""Problems that compute a part of another one: an entry, chunks of queries, heads, other forms."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import torch
from torch.nn.functional import pad

from fa_verify.oracles.outputs import OUTPUTS, Outputs
from fa_verify.oracles.problem import Problem
from fa_verify.properties.inputs.alibi_families import NO_ALIBI
from fa_verify.properties.inputs.bias_families import NO_BIAS
from fa_verify.properties.inputs.layouts import lay_out
from fa_verify.properties.inputs.tensors import Inputs

__all__ = ["Part", "chunks", "entries_apart", "heads_apart", "merged", "other_forms"]

_OF_ROWS = ("out", "lse", "dq")
# Rows and keys of padding that another padded form adds: no multiple of a tile.
_MORE = (3, 21)


@dataclasses.dataclass(frozen=True)
class Part:
    """A problem that computes a part of another one, which is called the whole.

    Args:
        told: The part in words, such as "entry 1 alone".
        problem: The problem of the part.
        inputs: Its tensors, copies in the layouts of the whole.
        entries: The batch entry of the whole that each of its entries computes; None is a
            neighbour, whose results are not compared.
        heads: The query heads of the whole that it computes.
        groups: The key/value heads of the whole that it reads.
        row: The first row of the whole that it computes.
        outputs: The outputs that it computes in full.
        packed: Whether the kernel's function of packed sequences computes it.
    """

    told: str
    problem: Problem
    inputs: Inputs
    entries: tuple[int | None, ...]
    heads: slice
    groups: slice
    row: int = 0
    outputs: tuple[str, ...] = OUTPUTS
    packed: bool = False


def entries_apart(problem: Problem, inputs: Inputs) -> Iterator[Part]:
    """Yield a batch entry, which the seed chooses, alone and beside more or longer neighbours.

    A predicate may read the sizes of the tensors, so they stay. With a plain mask the entry alone
    has tensors of its own lengths.
    """
    if not problem.B:
        return
    rows, keys = problem.mask.lengths(problem.B, problem.M, problem.N)
    entry = problem.seed % problem.B
    other = (entry + 1) % problem.B
    told = f"entry {entry} alone"
    if problem.mask.is_plain:
        M, N = rows[entry], keys[entry]
        told += f" ({M} rows, {N} keys)"
        yield _cut(problem, inputs, told, [entry], rows=slice(0, M), keys=N, lengths=((M,), (N,)))
    else:
        yield _cut(problem, inputs, told, [entry])
    if problem.mask.uniform:
        beside = [other, entry, other, other]
        yield _cut(problem, inputs, f"entry {entry} as entry 1 of 4", beside, compared=1)
    if problem.mask.is_plain and problem.N:
        twice = 2 * problem.N
        yield _cut(
            problem, inputs, f"entry {entry} beside one of {twice} keys", [entry, other],
            lengths=((rows[entry], rows[other]), (keys[entry], twice)), more=(0, problem.N),
            compared=0,
        )  # fmt: skip


def heads_apart(problem: Problem, inputs: Inputs) -> Iterator[Part]:
    """Yield two slices of the heads, as tensor parallelism cuts them.

    The seed chooses the border. A single key/value head is copied to both slices of its query
    heads, whose dk and dv are then not compared.
    """
    size = problem.G if problem.Hk > 1 else 1
    most = problem.H // size - 1
    if not problem.B or not most:
        return
    border = size * (1 + problem.seed % most)
    for heads in (slice(0, border), slice(border, problem.H)):
        yield _cut(
            problem, inputs, f"heads {heads.start} to {heads.stop - 1} alone", range(problem.B),
            heads=heads, outputs=OUTPUTS if problem.Hk > 1 else _OF_ROWS,
        )  # fmt: skip


def chunks(problem: Problem, inputs: Inputs, tile: int) -> Iterator[Part]:
    """Yield chunks of the queries, with the keys that they see and with all keys.

    Borders lie on and off the borders of tiles, and one chunk is the last query. Under a causal
    mask the keys of a chunk end where its last query ends: as a prefix, or by their lengths.
    Masks, and ALiBi, that no mask of a chunk can express are not cut: predicates, other right
    bounds, and positions without a causal mask. A chunk is a step of inference, so out and lse
    alone are compared.

    Args:
        problem: The problem.
        inputs: Its tensors.
        tile: Rows of a tile.
    """
    mask, of_entries = problem.mask, problem.mask.lengths(problem.B, problem.M, problem.N)[0]
    positions = mask.window_left is not None or problem.alibi != NO_ALIBI
    M = max(of_entries, default=0)
    if M < 2 or not mask.is_plain or mask.right not in (0, None):
        return
    if mask.right is None and positions:
        return
    off = 1 + problem.seed % (M - 1)
    on = min(M - 1, max(1, tile * ((M - 1) // tile // 2 + 1)))
    borders = [0, *sorted({off, on}), M]
    for start, stop in dict.fromkeys((*itertools.pairwise(borders), (M - 1, M))):
        yield _chunk(problem, inputs, start, stop)
    if mask.right == 0:
        start, stop = borders[-3:-1]
        yield _chunk(problem, inputs, start, stop, prefix=False)


def _chunk(problem: Problem, inputs: Inputs, start: int, stop: int, *, prefix: bool = True) -> Part:
    """Return the rows from ``start`` to ``stop``, with a prefix of the keys or all keys."""
    rows, keys = problem.mask.lengths(problem.B, problem.M, problem.N)
    told = f"rows {start} to {stop - 1} alone" if stop - start > 1 else f"row {start} alone"
    if problem.mask.right == 0:
        told += " with the keys that they see" if prefix else " with all keys"
        keys = tuple(max(0, n - m + min(stop, m)) for m, n in zip(rows, keys, strict=True))
    if not prefix:
        # Keys after the prefix hold values, and not what the problem pads with.
        problem = dataclasses.replace(problem, dirty="noise")
    counts = tuple(max(0, min(stop, m) - start) for m in rows)
    return _cut(
        problem, inputs, told, range(problem.B), rows=slice(start, stop),
        keys=max(keys) if prefix else None, lengths=(counts, keys), outputs=("out", "lse"),
    )  # fmt: skip


def other_forms(problem: Problem, inputs: Inputs, *, packs: bool) -> Iterator[Part]:
    """Yield the problem packed and with more padding.

    Args:
        problem: The problem.
        inputs: Its tensors.
        packs: Whether to yield the packed form. Packed sequences take no bias.
    """
    if packs and problem.bias == NO_BIAS and problem.B:
        whole = _cut(problem, inputs, "packed sequences", range(problem.B))
        yield dataclasses.replace(whole, packed=True)
    if problem.mask.is_plain and problem.B:
        lengths = problem.mask.lengths(problem.B, problem.M, problem.N)
        told = f"{problem.M + _MORE[0]} rows and {problem.N + _MORE[1]} keys with padding"
        yield _cut(problem, inputs, told, range(problem.B), lengths=lengths, more=_MORE)


def _cut(
    problem: Problem,
    inputs: Inputs,
    told: str,
    entries: Sequence[int],
    *,
    heads: slice | None = None,
    rows: slice | None = None,
    keys: int | None = None,
    lengths: tuple[tuple[int, ...], tuple[int, ...]] | None = None,
    more: tuple[int, int] = (0, 0),
    compared: int | None = None,
    outputs: tuple[str, ...] = OUTPUTS,
) -> Part:
    """Return some batch entries, heads, rows and keys of a problem.

    Args:
        problem: The whole problem.
        inputs: Its tensors.
        told: See ``Part``.
        entries: The batch entries, in any order and number.
        heads: The query heads; None is all.
        rows: The rows of the tensors; None is all.
        keys: The number of keys of the tensors; None is all.
        lengths: Rows and keys of each entry, for a plain mask; None is those of the whole.
        more: Rows and keys of zeros after the others.
        compared: The entry of the part whose results are compared; None is all.
        outputs: See ``Part``.
    """
    entries = list(entries)
    heads = slice(0, problem.H) if heads is None else heads
    rows = slice(0, problem.M) if rows is None else rows
    groups = slice(heads.start // problem.G, -(-heads.stop // problem.G))
    of_keys = slice(0, problem.N if keys is None else keys)
    M, N = rows.stop - rows.start + more[0], of_keys.stop + more[1]
    if lengths is None:
        everyone = heads == slice(0, problem.H)
        mask = problem.mask.sliced(
            tuple(entries), None if everyone else tuple(range(problem.H))[heads]
        )
    else:
        # Lengths that are those of the tensors are left out: kernels may have a path without any.
        seqlens_q, seqlens_k = (
            None if {*x} <= {size} else x for x, size in zip(lengths, (M, N), strict=True)
        )
        mask = dataclasses.replace(problem.mask, seqlens_q=seqlens_q, seqlens_k=seqlens_k)

    def taken(x: torch.Tensor, of: slice, part: slice, extra: int) -> torch.Tensor:
        return pad(x[entries][:, of, part], (0, 0, 0, extra))

    q, k, v, dout, dlse, slopes, bias, sinks = inputs
    of_rows, of_columns = (heads, rows, more[0]), (groups, of_keys, more[1])
    pieces = (
        taken(q, *of_rows),
        taken(k, *of_columns),
        taken(v, *of_columns),
        taken(dout, *of_rows),
    )
    made = Inputs(*map(lay_out, pieces, problem.layouts))
    if dlse is not None:
        made = made._replace(dlse=taken(dlse[..., None], *of_rows)[..., 0].contiguous())
    if slopes is not None:
        cut = slopes[heads] if slopes.ndim == 1 else slopes[entries][:, heads]
        made = made._replace(alibi_slopes=cut.contiguous())
    if bias is not None:
        wide = bias.expand(problem.B, problem.H, problem.M, problem.N)[..., of_keys]
        made = made._replace(bias=pad(taken(wide, *of_rows), (0, more[1])))
    if sinks is not None:
        made = made._replace(sinks=sinks[heads].contiguous())
    part = dataclasses.replace(
        problem, B=len(entries), H=heads.stop - heads.start, Hk=groups.stop - groups.start, M=M,
        N=N, mask=mask, sm_scale=problem.scale, seeds=(),
    )  # fmt: skip
    places = tuple(b if compared in (None, at) else None for at, b in enumerate(entries))
    return Part(told, part, made, places, heads, groups, rows.start, outputs)


def merged(
    whole: Outputs[torch.Tensor | None], part: Part, got: Outputs[torch.Tensor | None]
) -> tuple[Outputs[torch.Tensor | None], torch.Tensor, torch.Tensor]:
    """Return the results of the whole with those of a part in their places, and these places.

    Args:
        whole: The outputs of the whole problem.
        part: The part.
        got: Its outputs.

    Returns:
        The outputs, bool (B, H, M) for rows that the part computes, and bool (B, Hk, N) for keys
        (B, H, 1 without gradients).
    """
    into = Outputs(*(None if x is None else x.clone() for x in whole))
    assert whole.out is not None
    rows = torch.zeros(whole.out.shape[:3], dtype=torch.bool, device=whole.out.device)
    keys = None if whole.dk is None else torch.zeros_like(whole.dk[..., 0], dtype=torch.bool)
    lengths = part.problem.mask.lengths(part.problem.B, part.problem.M, part.problem.N)
    for at, (entry, count, seen) in enumerate(zip(part.entries, *lengths, strict=True)):
        if entry is None:
            continue
        of_rows = (entry, part.heads, slice(part.row, part.row + count))
        of_keys = (entry, part.groups, slice(0, seen))
        rows[of_rows] = True
        if keys is not None:
            keys[of_keys] = True
        for name, x, piece in zip(OUTPUTS, into, got, strict=True):
            if x is None or piece is None or name not in part.outputs:
                continue
            if name in _OF_ROWS:
                x[of_rows] = piece[at, :, :count]
            else:
                x[of_keys] = piece[at, :, :seen]
    return into, rows, torch.zeros_like(rows[..., :1]) if keys is None else keys
