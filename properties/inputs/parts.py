"""Problems that compute a part of another one: entries, chunks of queries, heads, other forms."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.outputs import OUTPUTS, Outputs
from fa_verify.oracles.problem import Problem
from fa_verify.properties.inputs.bias_families import NO_BIAS
from fa_verify.properties.inputs.layouts import lay_out
from fa_verify.properties.inputs.tensors import Inputs

__all__ = ["Part", "Place", "chunks", "entries_apart", "heads_apart", "merged", "other_forms"]

_OF_ROWS = ("out", "lse", "dq")
# Rows and keys of padding that another padded form adds: no multiple of a tile.
_MORE_ROWS, _MORE_KEYS = 3, 21
# Copies of an entry and its longer neighbours.
_COPIES = 2


class Place(NamedTuple):
    """Where the results of one batch entry of a part lie in the whole.

    Args:
        entry: The batch entry of the whole.
        at: The batch entry of the part.
        heads: The query heads of the whole.
        groups: The key/value heads of the whole.
        row: The first row of the whole; that of the part is 0.
        rows: How many rows are compared.
        keys: How many keys are compared, from the first one on.
    """

    entry: int
    at: int
    heads: slice
    groups: slice
    row: int
    rows: int
    keys: int


@dataclasses.dataclass(frozen=True)
class Part:
    """A problem whose results are a part of those of another one, if bits depend on nothing else.

    Args:
        told: What was computed, such as "entry 1 alone".
        problem: The problem of the part.
        inputs: Its tensors, copies in the layouts of the problem.
        places: Where its results lie in the whole.
        outputs: The outputs that the part computes in full.
        packed: Whether the sequences are packed for the kernel's function of packed sequences.
    """

    told: str
    problem: Problem
    inputs: Inputs
    places: tuple[Place, ...]
    outputs: tuple[str, ...] = OUTPUTS
    packed: bool = False


def entries_apart(problem: Problem, inputs: Inputs) -> Iterator[Part]:
    """Yield a batch entry, which the seed chooses, alone, and beside more and longer neighbours.

    With a plain mask the entry alone has tensors of its own lengths.
    """
    if not problem.B:
        return
    entry = problem.seed % problem.B
    yield _alone(problem, inputs, entry)
    others = [b for b in range(problem.B) if b != entry]
    beside = [*others[:1], *[entry] * _COPIES, *others[1:2], *[entry] * (not others)]
    places = ", ".join(str(at) for at, b in enumerate(beside) if b == entry)
    yield _cut(
        f"entry {entry} as entries {places} of {len(beside)}", problem, inputs, beside,
        compared=tuple(at for at, b in enumerate(beside) if b == entry),
    )  # fmt: skip
    if problem.mask.is_plain and problem.bias == NO_BIAS and problem.N:
        yield _beside_longer(problem, inputs, entry)


def _alone(problem: Problem, inputs: Inputs, entry: int) -> Part:
    """Return a batch entry in tensors of its own lengths, or of all if a predicate reads sizes."""
    if not problem.mask.is_plain:
        return _cut(f"entry {entry} alone", problem, inputs, [entry])
    rows, keys = (x[entry] for x in problem.mask.lengths(problem.B, problem.M, problem.N))
    told = f"entry {entry} alone ({rows} rows, {keys} keys)"
    return _cut(told, problem, inputs, [entry], ends=((0,), (rows,), (keys,)))


def _beside_longer(problem: Problem, inputs: Inputs, entry: int) -> Part:
    """Return a batch entry before a neighbour of twice as many keys, as padding of the entry."""
    rows, keys = problem.mask.lengths(problem.B, problem.M, problem.N)
    other = (entry + 1) % problem.B
    part = _cut("", problem, inputs, [entry, other], compared=(0,))
    doubled = {}
    for name in ("k", "v"):
        x = getattr(part.inputs, name)
        twice = torch.cat([x, x.flip(2)], 2)
        twice[0, :, keys[entry] :] = 0
        doubled[name] = lay_out(twice, problem.layouts[1 if name == "k" else 2])
    mask = dataclasses.replace(
        problem.mask, seqlens_q=(rows[entry], rows[other]),
        seqlens_k=(keys[entry], 2 * problem.N),
    )  # fmt: skip
    return dataclasses.replace(
        part, told=f"entry {entry} beside one of {2 * problem.N} keys",
        problem=dataclasses.replace(part.problem, N=2 * problem.N, mask=mask),
        inputs=part.inputs._replace(**doubled),
    )  # fmt: skip


def heads_apart(problem: Problem, inputs: Inputs) -> Iterator[Part]:
    """Yield two slices of the heads, as of tensor parallelism, and two of the batch entries.

    The seed chooses the border. One key/value head is copied to both slices of its query heads,
    whose dk and dv are then not compared.
    """
    everyone = range(problem.B)
    if problem.Hk > 1:
        cut = 1 + problem.seed % (problem.Hk - 1)
        for groups in (slice(0, cut), slice(cut, problem.Hk)):
            heads = slice(groups.start * problem.G, groups.stop * problem.G)
            told = f"heads {heads.start} to {heads.stop - 1} alone"
            yield _cut(told, problem, inputs, everyone, heads=heads, groups=groups)
    elif problem.H > 1:
        cut = 1 + problem.seed % (problem.H - 1)
        for heads in (slice(0, cut), slice(cut, problem.H)):
            told = f"heads {heads.start} to {heads.stop - 1} alone"
            yield _cut(told, problem, inputs, everyone, heads=heads, outputs=_OF_ROWS)
    if problem.B > 1:
        cut = 1 + problem.seed % (problem.B - 1)
        for entries in (everyone[:cut], everyone[cut:]):
            told = f"entries {entries[0]} to {entries[-1]} alone"
            yield _cut(told, problem, inputs, entries)


def chunks(problem: Problem, inputs: Inputs, tile: int) -> Iterator[Part]:
    """Yield chunks of the queries, with the keys that they may see and with all keys.

    Borders lie on and off the borders of tiles, and one chunk is the last query. Of a causal
    mask, a chunk sees the keys up to the last one of its last query: they are a prefix, or the
    length of each sequence says where it ends. A mask with another right bound is cut nowhere,
    as no mask of a chunk shows the same pairs. Nor is one with a predicate. A chunk is a step of
    inference, so out and lse are compared, and dq is not.

    Args:
        problem: The problem.
        inputs: Its tensors.
        tile: Rows of a tile.
    """
    M, mask = problem.M, problem.mask
    if M < 2 or not problem.B or not mask.is_plain or mask.right not in (0, None):
        return
    if mask.right is None and mask.window_left is not None:
        return
    odd = 1 + problem.seed % (M - 1)
    even = min(M - 1, max(1, tile * ((M - 1) // tile // 2 + 1)))
    borders = [0, *sorted({odd, even}), M]
    for start, stop in itertools.pairwise(borders):
        yield _chunk(problem, inputs, start, stop)
    yield _chunk(problem, inputs, M - 1, M)
    if mask.right == 0:
        start, stop = borders[-3:-1]
        yield _chunk(problem, inputs, start, stop, prefix=False)


def _chunk(problem: Problem, inputs: Inputs, start: int, stop: int, *, prefix: bool = True) -> Part:
    """Return the rows from ``start`` to ``stop``, with a prefix of the keys or all keys."""
    rows, keys = problem.mask.lengths(problem.B, problem.M, problem.N)
    starts = [min(start, x) for x in rows]
    stops = [min(stop, x) for x in rows]
    if problem.mask.right == 0:
        keys = tuple(max(0, n - m + end) for m, n, end in zip(rows, keys, stops, strict=True))
    counts = tuple(end - first for first, end in zip(starts, stops, strict=True))
    seen = " with the keys that they see" if prefix else " with all keys"
    plural = f"rows {start} to {stop - 1}" if stop - start > 1 else f"row {start}"
    if not prefix:
        # Keys after the prefix hold values, and not what the problem pads with.
        problem = dataclasses.replace(problem, dirty="noise")
    return _cut(
        f"{plural} alone{seen if problem.mask.right == 0 else ''}", problem, inputs,
        range(problem.B), ends=(tuple(starts), counts, keys), whole_keys=not prefix,
        outputs=("out", "lse"),
    )  # fmt: skip


def other_forms(problem: Problem, inputs: Inputs, *, packs: bool) -> Iterator[Part]:
    """Yield the problem with more padding, packed, and one batch entry of it contiguous.

    Args:
        problem: The problem.
        inputs: Its tensors.
        packs: Whether to yield the packed form.
    """
    if not problem.B:
        return
    if packs and problem.bias == NO_BIAS:
        whole = _cut("packed sequences", problem, inputs, range(problem.B))
        yield dataclasses.replace(whole, packed=True)
    if problem.mask.is_plain and problem.bias == NO_BIAS:
        yield _padded(problem, inputs)
    yield _alone(problem, inputs, problem.seed % problem.B)


def _padded(problem: Problem, inputs: Inputs) -> Part:
    """Return the problem with zeros after the rows and the keys."""
    part = _cut("", problem, inputs, range(problem.B))
    rows, keys = problem.mask.lengths(problem.B, problem.M, problem.N)
    M, N = problem.M + _MORE_ROWS, problem.N + _MORE_KEYS
    made = {
        name: lay_out(torch.nn.functional.pad(x, (0, 0, 0, more)), problem.layouts[place])
        for place, (name, more) in enumerate(
            (("q", _MORE_ROWS), ("k", _MORE_KEYS), ("v", _MORE_KEYS), ("dout", _MORE_ROWS))
        )
        for x in (getattr(part.inputs, name),)
    }
    if part.inputs.dlse is not None:
        made["dlse"] = torch.nn.functional.pad(part.inputs.dlse, (0, _MORE_ROWS))
    mask = dataclasses.replace(problem.mask, seqlens_q=rows, seqlens_k=keys)
    return dataclasses.replace(
        part, told=f"padded to {M} rows and {N} keys",
        problem=dataclasses.replace(part.problem, M=M, N=N, mask=mask),
        inputs=part.inputs._replace(**made),
    )  # fmt: skip


def _cut(
    told: str,
    problem: Problem,
    inputs: Inputs,
    entries: Sequence[int],
    *,
    heads: slice | None = None,
    groups: slice | None = None,
    ends: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]] | None = None,
    whole_keys: bool = False,
    compared: Sequence[int] | None = None,
    outputs: tuple[str, ...] = OUTPUTS,
) -> Part:
    """Return some batch entries, heads, rows and keys of a problem.

    Args:
        told: See ``Part``.
        problem: The whole problem.
        inputs: Its tensors.
        entries: The batch entries, in any order and number.
        heads: The query heads; None is all.
        groups: Their key/value heads; None is all.
        ends: First row, number of rows and number of keys of each entry, for a plain mask; None
            leaves rows and keys as they are.
        whole_keys: Whether the tensors keep all keys, so that ends are lengths.
        compared: The entries of the part whose results are compared; None is all.
        outputs: See ``Part``.
    """
    entries = list(entries)
    heads = slice(0, problem.H) if heads is None else heads
    groups = slice(0, problem.Hk) if groups is None else groups
    M, N = problem.M, problem.N
    if ends is None:
        rows, keys = problem.mask.lengths(problem.B, M, N)
        starts, counts, ends_of_keys = (
            (0,) * len(entries), tuple(rows[b] for b in entries), tuple(keys[b] for b in entries),
        )  # fmt: skip
        chosen = None if heads == slice(0, problem.H) else tuple(range(problem.H))[heads]
        mask = problem.mask.sliced(tuple(entries), chosen)
        first = 0
    else:
        starts, counts, ends_of_keys = ends
        # An entry that ends before a chunk begins has no rows in it.
        first, M = max(starts), max(counts)
        N = N if whole_keys else max(ends_of_keys)
        mask = _with_lengths(problem.mask, counts, ends_of_keys, M, N)
    of_rows = slice(first, first + M)

    def taken(x: torch.Tensor, of: slice, part: slice) -> torch.Tensor:
        return x[entries][:, of, part]

    q, k, v, dout, dlse, slopes, bias = inputs
    given = [
        taken(q, heads, of_rows), taken(k, groups, slice(0, N)), taken(v, groups, slice(0, N)),
        taken(dout, heads, of_rows),
    ]  # fmt: skip
    made = Inputs(*map(lay_out, given, problem.layouts))
    if dlse is not None:
        made = made._replace(dlse=taken(dlse, heads, of_rows).contiguous())
    if slopes is not None:
        cut = slopes[heads] if slopes.ndim == 1 else slopes[entries][:, heads]
        made = made._replace(alibi_slopes=cut.contiguous())
    if bias is not None:
        wide = bias.expand(problem.B, problem.H, problem.M, problem.N)
        made = made._replace(bias=taken(wide, heads, of_rows)[..., :N].contiguous())
    part = dataclasses.replace(
        problem, B=len(entries), H=heads.stop - heads.start, Hk=groups.stop - groups.start, M=M,
        N=N, mask=mask, sm_scale=problem.scale, seeds=(),
    )  # fmt: skip
    places = tuple(
        Place(entries[at], at, heads, groups, starts[at], counts[at], ends_of_keys[at])
        for at in (range(len(entries)) if compared is None else compared)
    )
    return Part(told, part, made, places, outputs)


def _with_lengths(mask: Mask, rows: tuple[int, ...], keys: tuple[int, ...], M: int, N: int) -> Mask:
    """Return a plain mask with lengths; None where they are all those of the tensors."""
    return dataclasses.replace(
        mask, seqlens_q=None if {*rows} <= {M} else rows, seqlens_k=None if {*keys} <= {N} else keys
    )


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
    for entry, at, heads, groups, row, count, seen in part.places:
        of_rows = (entry, heads, slice(row, row + count))
        rows[of_rows] = True
        if keys is not None:
            keys[entry, groups, :seen] = True
        for name, x, first, piece in zip(OUTPUTS, into, whole, got, strict=True):
            if x is None or first is None or piece is None or name not in part.outputs:
                continue
            of_x = of_rows if name in _OF_ROWS else (entry, groups, slice(0, seen))
            piece = piece[at, :, : count if name in _OF_ROWS else seen]
            # A place may be computed twice.
            old = first[of_x]
            equal = (piece == old) | (piece.isnan() & old.isnan())
            x[of_x] = torch.where(equal, x[of_x], piece)
    return into, rows, torch.zeros_like(rows[..., :1]) if keys is None else keys
