"""Covering arrays: few rows in which all combinations of a few values of factors occur."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np

__all__ = ["Combination", "Constraint", "Covering", "Row", "covering", "random_of"]

Row = Mapping[str, Any]
# Values of factors, in the order of the factors.
Combination = tuple[tuple[str, Any], ...]
# Starts of a row that are compared, and values that are tried before a combination is given up.
_STARTS, _STEPS = 2, 400
# Weight of a combination that a row has, beside one that lacks one value.
_HAD = 20


@dataclass(frozen=True)
class Constraint:
    """Combinations of values that a row may have.

    Args:
        names: The factors that it concerns; it is asked once a row has them all.
        holds: Returns whether a row may have their values.
    """

    names: tuple[str, ...]
    holds: Callable[[Row], bool]


@dataclass(frozen=True)
class Covering:
    """The rows of a covering array.

    Args:
        rows: Values by factor, those that cover most first.
        combinations: The combinations that each row has.
        left_out: The combinations that exist, and that no row may have under the limit.
    """

    rows: tuple[Row, ...]
    combinations: tuple[frozenset[Combination], ...]
    left_out: frozenset[Combination]


def covering(
    factors: Mapping[str, Sequence[Any]],
    strengths: Sequence[tuple[Sequence[str], int]],
    constraints: Sequence[Constraint] = (),
    limit: Constraint | None = None,
    seed: str = "",
) -> Covering:
    """Return rows in which every combination that exists occurs, found greedily.

    Args:
        factors: The values of each factor; they are hashable.
        strengths: Names of factors and a number t: all combinations of the values of any t of these
            factors are wanted. Names without a factor are ignored.
        constraints: Conditions on every row. Combinations that they exclude do not exist.
        limit: A further condition, asked of rows that lack factors, too. It must not become True
            again when factors are added. Combinations that it excludes are left out.
        seed: Another seed gives other rows.

    Source: the greedy construction of D. Cohen et al., "The AETG system", IEEE Transactions on
    Software Engineering 23 (1997).
    """
    search = _Search(factors, strengths, constraints, limit, Random(seed))
    left_out: set[Combination] = set()
    rows: list[Row] = []
    while starts := search.uncovered(_STARTS):
        found: list[tuple[int, Row]] = []
        for number in starts:
            start = dict(search.combinations[number])
            if (row := search.completed(start)) is not None:
                found.append((len(search.new(row)), row))
                continue
            search.left[number] = False
            if limit is not None and search.completed(start, limited=False) is not None:
                left_out.add(search.combinations[number])
        if found:
            _, row = max(found, key=lambda x: x[0])
            search.left[search.new(row)] = False
            rows.append(row)
    found_in = tuple(map(search.of_row, rows))
    return Covering(tuple(rows), found_in, frozenset(left_out.difference(*found_in)))


def random_of(row: Row) -> Random:
    """Return a source of random numbers that depends on a row alone."""
    return Random(repr(sorted(map(str, row.items()))))


def _combinations(
    factors: Mapping[str, Sequence[Any]], strengths: Sequence[tuple[Sequence[str], int]]
) -> Iterator[Combination]:
    """Yield the combinations of values that are wanted, the larger ones first.

    The rows that these need have most of the others.
    """
    seen: list[set[str]] = []
    for names, t in sorted(strengths, key=lambda x: -x[1]):
        known = [name for name in factors if name in names]
        for chosen in itertools.combinations(known, min(t, len(known))):
            if not any({*chosen} <= x for x in seen):
                seen.append({*chosen})
                for values in itertools.product(*(factors[name] for name in chosen)):
                    yield tuple(zip(chosen, values, strict=True))


class _Search:
    """Completes combinations to rows.

    ``left`` says which of the combinations no row has yet. ``lacks`` counts the values that the
    row at hand lacks of each.
    """

    def __init__(
        self,
        factors: Mapping[str, Sequence[Any]],
        strengths: Sequence[tuple[Sequence[str], int]],
        constraints: Sequence[Constraint],
        limit: Constraint | None,
        random: Random,
    ) -> None:
        self.factors = factors
        self.limit = limit
        self.random = random
        self.combinations = [*_combinations(factors, strengths)]
        self.left = np.ones(len(self.combinations), dtype=bool)
        self.lacks = np.array([len(x) for x in self.combinations], dtype=np.int8)
        # The numbers of the combinations that have a value.
        having: dict[tuple[str, Any], list[int]] = {
            (name, value): [] for name, values in factors.items() for value in values
        }
        for number, combination in enumerate(self.combinations):
            for value in combination:
                having[value].append(number)
        self.having = {value: np.array(of, dtype=np.intp) for value, of in having.items()}
        # Those of all factors are asked of whole rows, the others by factor.
        self.of_rows = [x.holds for x in constraints if {*x.names} == factors.keys()]
        self.constraints: dict[str, list[tuple[frozenset[str], Callable[[Row], bool]]]] = {}
        for constraint in constraints:
            names = frozenset(constraint.names)
            for name in names if names < factors.keys() else ():
                self.constraints.setdefault(name, []).append((names, constraint.holds))
        self.tied = self.constraints.keys() | (limit.names if limit else ())
        self._steps = 0

    def uncovered(self, count: int) -> list[int]:
        """Return the numbers of the first combinations that no row has, those of most values."""
        return [int(x) for x in np.flatnonzero(self.left)[:count]]

    def new(self, row: Row) -> Any:
        """Return the numbers of the combinations that a row is the first to have."""
        return np.flatnonzero((self._lacking(row) == 0) & self.left)

    def of_row(self, row: Row) -> frozenset[Combination]:
        """Return all combinations of a row."""
        return frozenset(self.combinations[x] for x in np.flatnonzero(self._lacking(row) == 0))

    def _lacking(self, row: Row) -> Any:
        """Return the number of values that a row lacks of each combination."""
        lacks = self.lacks.copy()
        for value in row.items():
            lacks[self.having[value]] -= 1
        return lacks

    def completed(self, start: Row, *, limited: bool = True) -> Row | None:
        """Return a row with values for the other factors, which cover much; None if none exists."""
        if not all(self._may(start, name, limited) for name in start):
            return None
        left = [name for name in self.factors if name not in start]
        self.random.shuffle(left)
        # Values that several constraints tie together first: no dead end comes after the others.
        left.sort(key=lambda name: -len(self.constraints.get(name, ())))
        before, self.lacks = self.lacks, self._lacking(start)
        self._steps = 0
        found = self._filled(start, left, limited)
        self.lacks = before
        return found

    def _filled(self, row: Row, left: list[str], limited: bool) -> Row | None:
        if not left:
            return row if all(holds(row) for holds in self.of_rows) else None
        # A factor that others leave one value comes next: a dead end shows early.
        tied = (name for name in left if name in self.tied)
        forced = (name for name in tied if len(self._allowed(row, name, limited)) < 2)
        name = next(forced, left[0])
        values = self._allowed(row, name, limited)
        self.random.shuffle(values)
        values.sort(key=lambda value: -self._gain((name, value)))
        rest = [x for x in left if x != name]
        for value in values:
            self._steps += 1
            if self._steps > _STEPS:
                return None
            having = self.having[name, value]
            self.lacks[having] -= 1
            if (found := self._filled({**row, name: value}, rest, limited)) is not None:
                return found
            self.lacks[having] += 1
        return None

    def _allowed(self, row: Row, name: str, limited: bool) -> list[Any]:
        """Return the values of a factor that a row may have."""
        return [x for x in self.factors[name] if self._may({**row, name: x}, name, limited)]

    def _gain(self, value: tuple[str, Any]) -> int:
        """Return how much a value adds: combinations that are then had, and those in sight."""
        having = self.having[value]
        lacks = self.lacks[having][self.left[having]]
        return _HAD * int((lacks == 1).sum()) + int((lacks == 2).sum())

    def _may(self, row: Row, name: str, limited: bool) -> bool:
        """Return whether a row may have the value of a factor that was just added."""
        limit = self.limit if limited else None
        if limit is not None and name in limit.names and not limit.holds(row):
            return False
        of = self.constraints.get(name, ())
        return all(holds(row) for names, holds in of if names <= row.keys())
