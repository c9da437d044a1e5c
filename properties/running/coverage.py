"""The coverage of a run: judged problems by code path, dtype, head_dim and length."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from fa_verify.oracles.call import Call
from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.masks.prefix_lm import PrefixLM
from fa_verify.oracles.problem import DTYPES, Problem
from fa_verify.properties.kernels.narrowing import narrowed
from fa_verify.properties.kernels.subject import Subject

__all__ = [
    "COLUMNS", "Cell", "cells_of", "coverage_lines", "describe_empty", "label_of",
    "possible_cells", "rows",
]  # fmt: skip

# Classes: the larger of D and Dv up to a limit, and the larger of M and N from a length on. Drawn
# lengths end at 200 on a CPU and at 1,024 on a GPU; only tests of long sequences have more.
HEAD_DIMS = (64, 128, 256)
LENGTHS = (0, 64, 256, 4096)
_LENGTHS = ("N < 64", "N < 256", "N < 4096", "N >= 4096")
COLUMNS = tuple(itertools.product((f"D <= {x}" for x in HEAD_DIMS), _LENGTHS))
# The fields of problems that may take a path of their own.
_MODS: tuple[dict[str, Any], ...] = (
    {}, {"softcap": 1.0}, {"alibi": "normal"}, {"bias": "normal/hmn"}, {"sinks": "ordinary"}
)  # fmt: skip


class Cell(NamedTuple):
    """A path of the kernel, a label of a dtype and the number of a column."""

    path: str
    dtype: str
    column: int


def label_of(subject: Subject, problem: Call) -> str:
    """Return the dtype of a call; "tf32" if its dots run in TF32."""
    attention = problem.attention
    is_tf32 = (
        attention is not None
        and problem.dtype == "fp32"
        and subject.numerics_of(attention).dots == "tf32"
    )
    return "tf32" if is_tf32 else problem.dtype


def cells_of(subject: Subject, problem: Call) -> tuple[Cell, ...]:
    """Return the cells that a call counts in: one for each path that the kernel declares.

    Calls of other kinds than attention count in a row of their kind.
    """
    place = bisect_left(HEAD_DIMS[:-1], problem.columns) * len(LENGTHS)
    column = place + bisect_right(LENGTHS, problem.longest) - 1
    paths: tuple[str, ...] = ("-",) if problem.kind == "attention" else (problem.kind,)
    if isinstance(problem, Problem) and subject.paths:
        paths = subject.paths(problem)
    return tuple(Cell(path, label_of(subject, problem), column) for path in paths)


def possible_cells(subject: Subject, device: str) -> set[Cell]:
    """Return the cells of problems that the declarations of a subject allow."""
    if not subject.attends:
        return set()
    step, most = subject.seqlen_multiple, subject.max_seqlen or math.inf
    ends = (*LENGTHS[1:], math.inf)
    longest = {first: -(-max(first, 1) // step) * step for first in LENGTHS}
    sizes = [x for x, end in zip(longest.values(), ends, strict=True) if x < end and x <= most]
    dims = {bisect_left(HEAD_DIMS[:-1], x): x for x in subject.head_dims or HEAD_DIMS}
    found: set[Cell] = set()
    for config, dtype, size, D, mask, mods in itertools.product(
        subject.configs, DTYPES, sizes, dims.values(), (Mask(), PrefixLM(prefix=1)), _MODS
    ):
        problem = narrowed(subject, Problem(
            M=size, N=size, D=D, Dv=D, dtype=dtype, config=config, mask=mask, device=device, **mods
        ))  # fmt: skip
        if subject.excludes(problem) is None:
            found.update(cells_of(subject, problem))
    return found


def rows(
    counts: Mapping[Cell, int], possible: Iterable[Cell]
) -> Iterator[tuple[str, str, list[str]]]:
    """Yield (path, dtype, counts by column): 0 in an empty cell, "-" in an impossible one."""
    known = {*possible, *counts}
    for path, dtype in sorted({cell[:2] for cell in known}):
        cells = (Cell(path, dtype, column) for column in range(len(COLUMNS)))
        yield path, dtype, [str(counts.get(x, 0)) if x in known else "-" for x in cells]


def describe_empty(counts: Mapping[Cell, int], possible: Iterable[Cell]) -> str:
    """Name the possible cells that no problem counts in, grouped by columns; "" if none is left."""
    of_rows: dict[tuple[str, str], set[int]] = defaultdict(set)
    for path, dtype, column in possible:
        of_rows[path, dtype].add(column)
    grouped: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for (path, dtype), known in sorted(of_rows.items()):
        empty = {x for x in known if Cell(path, dtype, x) not in counts}
        if empty:
            grouped[_named(empty, known)][path].append(dtype)
    return "; ".join(
        f"{columns}: " + ", ".join(f"{path} ({' '.join(of)})" for path, of in by_path.items())
        for columns, by_path in grouped.items()
    )


def coverage_lines(coverage: Mapping[str, Any]) -> Iterator[str]:
    """Yield the table of ``Tally.coverage``, and a line that names the empty cells."""
    names = [f"{path} {dtype}" for path, dtype, *_ in coverage["rows"]]
    width = max(map(len, ["problems by path", *names]))
    dims = (f"D <= {dim}".rjust(7 * len(LENGTHS)) for dim in HEAD_DIMS)
    yield "problems by path".ljust(width) + "".join(dims)
    lengths = "".join(x.removeprefix("N ").replace(" ", "").rjust(7) for x in _LENGTHS)
    yield "N".ljust(width) + lengths * len(HEAD_DIMS)
    for name, (_, _, *numbers) in zip(names, coverage["rows"], strict=True):
        yield name.ljust(width) + "".join(number.rjust(7) for number in numbers)
    if coverage["empty"]:
        yield f"no problem has {coverage['empty']}"


def _named(empty: set[int], known: set[int]) -> str:
    """Name the empty ones of known columns, by head_dim or length alone where all are empty."""
    if empty == known:
        return "any size"
    parts, left, others = [], set(empty), set(known)
    for axis in (0, 1):
        for name in dict.fromkeys(column[axis] for column in COLUMNS):
            whole = {x for x in others if COLUMNS[x][axis] == name}
            if whole and whole <= left:
                left -= whole
                others -= whole
                parts.append(name)
    return ", ".join([*parts, *(" ".join(COLUMNS[x]) for x in sorted(left))])
