"""Rows have every combination that exists, and say which ones a limit leaves out."""

from __future__ import annotations

import itertools

import pytest

from fa_verify.properties.problems.covering import Constraint, covering

FACTORS = {"a": (1, 2, 3), "b": "xyz", "c": (0, 1), "d": (0, 1, 2, 3), "e": "pq"}
NAMES = tuple(FACTORS)


def combinations_in(rows, t, names=NAMES):
    """Return all t values that some row has together."""
    return {
        tuple((name, row[name]) for name in chosen)
        for row in rows
        for chosen in itertools.combinations(names, t)
    }


def possible(t, holds=lambda row: True):
    rows = (
        dict(zip(FACTORS, values, strict=True)) for values in itertools.product(*FACTORS.values())
    )
    return combinations_in([row for row in rows if holds(row)], t)


@pytest.mark.parametrize("t", [1, 2, 3])
def test_every_combination_occurs(t):
    found = covering(FACTORS, [(NAMES, t)])
    assert combinations_in(found.rows, t) == possible(t)
    assert len(found.rows) < {1: 5, 2: 18, 3: 60}[t]
    assert set().union(*found.combinations) == possible(t)


def test_strengths_differ_between_factors():
    found = covering(FACTORS, [(("a", "b", "d"), 3), (NAMES, 2)])
    assert combinations_in(found.rows, 3, ("a", "b", "d")) == combinations_in(
        [dict(zip("abd", x, strict=True)) for x in itertools.product((1, 2, 3), "xyz", range(4))],
        3, ("a", "b", "d"),
    )  # fmt: skip
    assert combinations_in(found.rows, 2) == possible(2)


def test_no_row_breaks_a_constraint():
    def holds(row):
        return (row["a"] != 1 or row["b"] == "x") and (row["d"] < 2 or row["c"] == 1)

    constraints = [
        Constraint(("a", "b"), lambda row: row["a"] != 1 or row["b"] == "x"),
        Constraint(("c", "d"), lambda row: row["d"] < 2 or row["c"] == 1),
    ]
    found = covering(FACTORS, [(NAMES, 2)], constraints)
    assert all(map(holds, found.rows))
    assert combinations_in(found.rows, 2) == possible(2, holds)
    assert not found.left_out


def test_combinations_beyond_a_limit_are_left_out():
    limit = Constraint(("a", "d"), lambda row: row.get("a", 1) + row.get("d", 0) <= 4)
    found = covering(FACTORS, [(NAMES, 2)], limit=limit)
    assert all(row["a"] + row["d"] <= 4 for row in found.rows)
    assert found.left_out == {
        (("a", a), ("d", d)) for a in FACTORS["a"] for d in FACTORS["d"] if a + d > 4
    }
    assert combinations_in(found.rows, 2) == possible(2) - found.left_out


def test_a_constraint_of_an_absent_factor_is_not_asked():
    constraint = Constraint(("a", "absent"), lambda row: row["absent"] == row["a"])
    assert combinations_in(covering(FACTORS, [(NAMES, 2)], [constraint]).rows, 2) == possible(2)


def test_rows_depend_on_the_seed_alone():
    rows = [covering(FACTORS, [(NAMES, 2)], seed=seed).rows for seed in ("s", "s", "t")]
    assert rows[0] == rows[1] != rows[2]
