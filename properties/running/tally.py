"""Count the calls of a run: judged, out of range and refused, with the worst error/bound."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from fa_verify.oracles.call import Call
from fa_verify.oracles.outputs import OUTPUTS
from fa_verify.properties.kernels.declared_values import Value, values_of
from fa_verify.properties.kernels.subject import Subject
from fa_verify.properties.running.coverage import (
    COLUMNS,
    Cell,
    cells_of,
    describe_empty,
    label_of,
    rows,
)

__all__ = ["EDGES", "Tally", "ratio_text"]

# Edges of the bins of error/bound, four per decade. Everything below the first edge is one bin.
EDGES = tuple(10 ** (k / 4) for k in range(-24, 5))

# Judged calls that are kept, as a later call may depend on one of them.
_REMEMBERED = 4096


def ratio_text(value: float) -> str:
    """Format error/bound for a table of columns that are 9 characters wide."""
    return f"{value:.3f}" if value < 1e4 else f"{value:.3g}"


def _digest(problem: str) -> str:
    return hashlib.blake2b(problem.encode(), digest_size=8).hexdigest()


def _not_asked(subject: Subject) -> Iterator[str]:
    """Yield the outputs that a subject is not asked for, with the declaration that says so."""
    if not subject.backward:
        yield f"dq, dk and dv, as {subject.name} declares backward=False"
    if subject.returns_lse is False:
        yield f"lse, as {subject.name} declares returns_lse=False"


class Tally:
    """Counts the problems of one process; ``add`` merges the counts of other processes."""

    def __init__(self) -> None:
        """Start empty."""
        # Digest of a judged problem to (dtype label, whether M and N both span several tiles).
        self.problems: dict[str, tuple[str, bool]] = {}
        # "output dtype" to (worst error/bound, its problem as JSON).
        self.worst: dict[str, tuple[float, str]] = {}
        # Digest of a problem, judged whole or in sampled rows, to the cells that it counts in.
        self.cells: dict[str, tuple[Cell, ...]] = {}
        # Digest of a judged problem to the bin of its worst error/bound, by output.
        self.bins: dict[str, dict[str, int]] = {}
        # Digest of a judged problem to its family of inputs, the number of elements of its outputs,
        # and the number of these that limits of independent roundings judge.
        self.elements: dict[str, tuple[str, int, int]] = {}
        self.out_of_range: set[str] = set()
        # Reason to digests of the problems refused for it.
        self.unsupported: dict[str, set[str]] = {}
        # Numbers of the judged calls of the covering array of each kind of call.
        self.combined: dict[str, set[int]] = {}
        # The values of declarations that judged problems have.
        self.values: set[Value] = set()
        # Outputs that the subject is not asked for, with the declaration, to digests of problems.
        self.not_asked: dict[str, set[str]] = {}
        # Key of a guarantee to the numbers of calls that were judged for it and that were refused,
        # though no declaration excludes them; "" for calls that several guarantees are asked of.
        self.asked: dict[str, tuple[int, int]] = {}
        # The last judged calls of this process in their order, and whether each passed.
        self.history: deque[tuple[Call, bool]] = deque(maxlen=_REMEMBERED)

    @property
    def attends(self) -> bool:
        """Whether a problem of attention to padded tensors was judged, or none of any kind."""
        others = {"merge", "ring", "cache", "quantised"}
        return not self.cells or any(x.path not in others for y in self.cells.values() for x in y)

    def judged(
        self, subject: Subject, problem: Call, peaks: Mapping[str, float], limited: int = 0
    ) -> None:
        """Add a judged call with the worst error/bound of each output.

        ``limited`` is the number of elements that limits of independent roundings judge.
        """
        label = label_of(subject, problem)
        attention, several = problem.attention, False
        if attention is not None:
            block_m, block_n = subject.tile_of(attention)
            several = attention.M > block_m and attention.N > block_n and attention.B > 0
        text = problem.to_json()
        digest = _digest(text)
        self.problems[digest] = (label, several)
        self.cells[digest] = cells_of(subject, problem)
        self.values |= values_of(subject, problem)
        self.bins[digest] = {x: bisect_right(EDGES, peak) for x, peak in peaks.items()}
        self.elements[digest] = (problem.family, sum(problem.elements[x] for x in peaks), limited)
        for name, peak in peaks.items():
            self._keep(f"{name} {label}", peak, text)
        for what in _not_asked(subject) if problem.kind == "attention" else ():
            self.not_asked.setdefault(what, set()).add(digest)

    def sampled(self, subject: Subject, problem: Call) -> None:
        """Add a problem of which some rows are judged: it counts in the coverage alone."""
        self.cells[_digest(problem.to_json())] = cells_of(subject, problem)

    def rejected(self, problem: Call) -> None:
        """Add a problem that is out of range, on which a correct kernel may fail."""
        self.out_of_range.add(_digest(problem.to_json()))

    def refused(self, problem: Call, reason: str) -> None:
        """Add a problem that the subject refused, with the reason."""
        self.unsupported.setdefault(reason, set()).add(_digest(problem.to_json()))

    def asked_for(self, guarantee: str, *, judged: int = 0, refused: int = 0) -> None:
        """Count calls that a guarantee was asked of, by its key."""
        before = self.asked.get(guarantee, (0, 0))
        self.asked[guarantee] = (before[0] + judged, before[1] + refused)

    @property
    def refused_share(self) -> float:
        """The share of the calls that the kernel refused, though no declaration excludes them."""
        judged, refused = (sum(x) for x in zip((0, 0), *self.asked.values(), strict=True))
        return float(refused / max(1, judged + refused))

    def mostly_refused(self) -> dict[str, float]:
        """Return the share of refused calls by guarantee, where it exceeds a half."""
        return {
            key: refused / (judged + refused)
            for key, (judged, refused) in sorted(self.asked.items())
            if refused > judged
        }

    def contradiction(self) -> str:
        """Return what speaks against a run without findings; "" if nothing does.

        A finding follows from each error above its bound, and a judged call is counted.
        """
        above = [(ratio, key) for key, (ratio, _) in self.worst.items() if not ratio <= 1]
        if above:
            ratio, key = max(above)
            return f"error/bound is {ratio_text(ratio)} for {' in '.join(key.rsplit(' ', 1))}"
        judged = sum(judged for judged, _ in self.asked.values())
        if judged and not self.problems:
            return f"{judged} problems were judged, and none is counted"
        return ""

    def _keep(self, key: str, ratio: float, problem: str) -> None:
        if key not in self.worst or ratio > self.worst[key][0]:
            self.worst[key] = (ratio, problem)

    def record(self) -> dict[str, Any]:
        """Return the tally as plain lists, dicts and numbers, to send between processes."""
        return {
            "problems": {key: list(value) for key, value in self.problems.items()},
            "cells": {key: [list(cell) for cell in cells] for key, cells in self.cells.items()},
            "worst": {key: list(value) for key, value in self.worst.items()},
            "bins": dict(self.bins),
            "elements": {key: list(value) for key, value in self.elements.items()},
            "out_of_range": sorted(self.out_of_range),
            "unsupported": {key: sorted(value) for key, value in self.unsupported.items()},
            "not_asked": {key: sorted(value) for key, value in self.not_asked.items()},
            "combined": {kind: sorted(numbers) for kind, numbers in self.combined.items()},
            "values": sorted(map(list, self.values), key=str),
            "asked": {key: list(value) for key, value in self.asked.items()},
        }

    def hand_over(self) -> dict[str, Any]:
        """Return ``record()`` and reset the tally."""
        record = self.record()
        for part in vars(self).values():
            part.clear()
        return record

    def add(self, record: dict[str, Any]) -> None:
        """Add the ``record()`` of another process."""
        self.problems.update({key: tuple(value) for key, value in record["problems"].items()})
        self.cells.update(
            {key: tuple(Cell(*cell) for cell in cells) for key, cells in record["cells"].items()}
        )
        for key, (ratio, problem) in record["worst"].items():
            self._keep(key, ratio, problem)
        self.bins.update(record["bins"])
        self.elements.update({key: tuple(value) for key, value in record["elements"].items()})
        self.out_of_range.update(record["out_of_range"])
        for kind, numbers in record["combined"].items():
            self.combined.setdefault(kind, set()).update(numbers)
        self.values.update(Value(*value) for value in record["values"])
        for reason, digests in record["unsupported"].items():
            self.unsupported.setdefault(reason, set()).update(digests)
        for what, digests in record["not_asked"].items():
            self.not_asked.setdefault(what, set()).update(digests)
        for key, (judged, refused) in record["asked"].items():
            self.asked_for(key, judged=judged, refused=refused)

    def coverage(self, possible: Iterable[Cell]) -> dict[str, Any]:
        """Return the counts of problems by path, dtype and column, and the names of empty cells.

        Args:
            possible: The cells of problems that the declarations of the subject allow.
        """
        counts = Counter(cell for cells in self.cells.values() for cell in cells)
        return {
            "columns": [" ".join(column) for column in COLUMNS],
            "rows": [[path, dtype, *numbers] for path, dtype, numbers in rows(counts, possible)],
            "empty": describe_empty(counts, possible),
        }

    def distribution(self) -> dict[str, list[int]]:
        """Return the number of problems per bin of their worst error/bound, by "output dtype".

        Bin 0 lies below EDGES[0], bin i starts at EDGES[i - 1], the last bin has no upper edge.
        """
        found: dict[str, list[int]] = {}
        for digest, bins in self.bins.items():
            for name, place in bins.items():
                counts = found.setdefault(
                    f"{name} {self.problems[digest][0]}", [0] * (len(EDGES) + 1)
                )
                counts[place] += 1
        return dict(sorted(found.items()))

    def by_limits(self) -> dict[str, tuple[int, int]]:
        """Return the elements of each family of inputs, and those that limits judge."""
        found: dict[str, tuple[int, int]] = {}
        for family, count, limited in self.elements.values():
            before = found.get(family, (0, 0))
            found[family] = (before[0] + count, before[1] + limited)
        return dict(sorted(found.items()))

    def lines(self) -> Iterator[str]:
        """Yield the summary: a table of the worst error/bound, the worst problems, the counts."""
        yield from self.table()
        for name in self._names():
            found = [value for key, value in self.worst.items() if key.split()[0] == name]
            if found:
                yield f"worst {name}: {max(found)[1]}"
        yield from self.counts()
        by_family = self.by_limits()
        limited = sum(part for _, part in by_family.values())
        shares = ", ".join(f"{x} {part / n:.0%}" for x, (n, part) in by_family.items() if part)
        if by_family:
            yield (
                f"{sum(n for n, _ in by_family.values()):,} elements held to the bound, "
                f"{limited:,} of them to limits of independent roundings"
                f"{': ' if shares else ''}{shares}"
            )

    def table(self) -> Iterator[str]:
        """Yield the worst error/bound of each output, by dtype."""
        labels = [x for x in ("fp16", "bf16", "fp32", "tf32", "fp64") if self._count(x)]
        yield "worst error/bound".ljust(20) + "".join(label.rjust(9) for label in labels)
        yield "problems".ljust(20) + "".join(str(self._count(x)).rjust(9) for x in labels)
        for name in self._names():
            cells = (self.worst.get(f"{name} {label}") for label in labels)
            yield name.ljust(20) + "".join(
                ("-" if cell is None else ratio_text(cell[0])).rjust(9) for cell in cells
            )

    def _names(self) -> Iterable[str]:
        """Return the names of outputs. Those that a kernel of attention does not return are too."""
        judged = dict.fromkeys(key.split()[0] for key in self.worst)
        return dict.fromkeys((*(x for x in OUTPUTS if self.attends or x in judged), *judged))

    def counts(self, most: int | None = None) -> Iterator[str]:
        """Yield the counts of problems, and ``most`` reasons why others were not judged, or all."""
        several = sum(several for _, several in self.problems.values())
        refused = sum(map(len, self.unsupported.values()))
        yield (
            f"{len(self.problems)} distinct problems judged on all outputs, {several} of them "
            f"spanning several tiles both ways; {len(self.out_of_range)} drawn out of range; "
            f"{refused} unsupported ({100 * refused / max(1, refused + len(self.problems)):.0f} %)"
        )
        reasons = [
            *(
                f"  unsupported, {len(x)}: {reason}"
                for reason, x in sorted(self.unsupported.items())
            ),
            *(
                f"not asked in {len(x)} problems: {what}"
                for what, x in sorted(self.not_asked.items())
            ),
        ]
        yield from reasons[:most]
        if most is not None and len(reasons) > most:
            yield f"  {len(reasons) - most} other reasons"

    def _count(self, label: str) -> int:
        return sum(found == label for found, _ in self.problems.values())
