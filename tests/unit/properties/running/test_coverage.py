"""The coverage of a run: cells of problems, empty cells, and the table that a run prints."""

from __future__ import annotations

import dataclasses

import pytest

from fa_verify.oracles.problem import Problem
from fa_verify.properties.kernels.subject import Subject
from fa_verify.properties.running.coverage import (
    COLUMNS,
    Cell,
    cells_of,
    coverage_lines,
    describe_empty,
    possible_cells,
)
from fa_verify.properties.running.tally import Tally
from tests.unit.properties.kernels.broken_subjects import Eager

GOOD = Problem(M=3, N=4, dtype="fp16")


def subject(**declared: object) -> Subject:
    call = Eager()
    for word, value in declared.items():
        setattr(call, word, value)
    return Subject.of(call, "eager")


def places(cells) -> set[str]:
    return {" ".join(COLUMNS[cell.column]) for cell in cells}


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({}, "D <= 64 N < 64"),
        ({"M": 0, "N": 0}, "D <= 64 N < 64"),
        ({"D": 64, "N": 63}, "D <= 64 N < 64"),
        ({"D": 65, "N": 64}, "D <= 128 N < 256"),
        ({"Dv": 128, "M": 255}, "D <= 128 N < 256"),
        ({"Dv": 129, "M": 256}, "D <= 256 N < 4096"),
        ({"D": 256, "N": 4095}, "D <= 256 N < 4096"),
        ({"N": 4096}, "D <= 64 N >= 4096"),
        ({"M": 10**6}, "D <= 64 N >= 4096"),
    ],
    ids=str,
)
def test_a_problem_counts_at_its_larger_head_dim_and_length(fields, place):
    cells = cells_of(subject(), dataclasses.replace(GOOD, **fields))
    assert places(cells) == {place}
    assert [cell[:2] for cell in cells] == [("-", "fp16")]


def test_a_problem_counts_once_for_each_path_and_tf32_is_a_dtype_of_its_own():
    both = subject(paths=lambda problem: ("a", f"b {problem.config}"), dots="tf32")
    asked = dataclasses.replace(GOOD, dtype="fp32")
    assert {x[:2] for x in cells_of(both, asked)} == {("a", "tf32"), ("b default", "tf32")}


def test_possible_cells_are_those_of_declared_problems():
    narrow = subject(
        dtypes=("fp16",), head_dims=(64, 80), max_seqlen=256, seqlen_multiple=128,
        paths=lambda problem: ("custom" if problem.softcap else "plain",),
    )  # fmt: skip
    found = possible_cells(narrow, "cpu")
    assert places(found) == {f"D <= {d} N < {n}" for d in (64, 128) for n in (256, 4096)}
    assert {x[:2] for x in found} == {("plain", "fp16")}
    capped = dataclasses.replace(narrow, score_mods=("softcap",))
    assert {x.path for x in possible_cells(capped, "cpu")} == {"plain", "custom"}


def test_empty_cells_are_named_by_groups_and_shown_as_zeros():
    one = subject(dtypes=("fp16", "bf16"), max_seqlen=255)
    possible = possible_cells(one, "cpu")
    tally = Tally()
    tally.judged(one, GOOD, {})
    tally.sampled(one, dataclasses.replace(GOOD, D=128))
    other = Tally()
    other.add(tally.record())
    coverage = other.coverage(possible)
    assert coverage["rows"] == [
        ["-", "bf16", *["0", "0", "-", "-"] * 3],
        ["-", "fp16", "1", "0", "-", "-", "1", "0", "-", "-", "0", "0", "-", "-"],
    ]
    assert coverage["empty"] == ("any size: - (bf16); D <= 256, N < 256: - (fp16)")
    lines = list(coverage_lines(coverage))
    assert len({len(line) for line in lines[:-1]}) == 1
    assert lines[3].split() == ["-", "fp16", *coverage["rows"][1][2:]]
    assert lines[-1] == f"no problem has {coverage['empty']}"


def test_paths_and_dtypes_that_lack_the_same_cells_are_named_together():
    possible = {Cell(path, dtype, i) for path in "ab" for dtype in ("fp16", "bf16") for i in (2, 3)}
    counts = {Cell(path, dtype, 2): 1 for path, dtype, _ in possible}
    named = describe_empty(counts | {Cell("b", "bf16", 3): 1}, possible)
    assert named == "N >= 4096: a (bf16 fp16), b (fp16)"
    of_rows = {Cell("a", "fp16", i) for i in (0, 1, 4, 5, 8)}
    assert describe_empty({Cell("a", "fp16", 1): 1}, of_rows) == (
        "D <= 128, D <= 256, N < 64: a (fp16)"
    )
    assert describe_empty(dict.fromkeys(possible, 1), possible) == ""
