"""Mechanical mutants of the harness: operators, the tests that judge them, and sampling."""

from __future__ import annotations

import ast

import pytest

from tests.mutation.catalogue.copies import sources_of
from tests.mutation.catalogue.mutant import mutated
from tests.mutation.catalogue.operators import mechanical
from tests.mutation.harness.first_failure import unit_test_file
from tests.mutation.harness.operators import HARNESS_OPERATORS
from tests.mutation.harness.sites import FOLDERS, TESTS, rate_interval, sample

SOURCES = sources_of("oracles", "properties", "fa_verify")


def made(expression: str) -> set[str]:
    """The mutants that the operators make of an expression in a function."""
    sources = {"a/b.py": f"\ndef f(got, want, rows, keys):\n    y = {expression}\n    return y\n"}
    return {
        mutated(sources, mutant)["a/b.py"].split("y = ")[1].split("\n")[0]
        for mutant in mechanical(sources, ("a/b.py",), HARNESS_OPERATORS)
    }


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        (
            "got and not want",
            {"((not want))", "((got))", "((got) or (not want))", "got and (want)"},
        ),
        ("torch.where(got, want, 0.0)", {"(want)", "(0.0)"}),
        ("got.abs().sum()", {"got.sum()", "got.abs().amax()"}),
        ("got.mT @ want", {"got @ want", "want.mT @ want", "(got.mT)"}),
        ("[got, want]", {"[got,]", "[want,]", "[want, want]"}),
        ("got[rows:keys]", {"got[rows :]", "got[: keys]", "got[keys:keys]"}),
        ("[x for x in got]", {"[x for x in [*(got)][:1]]", "[x for x in [*(got)][:-1]]"}),
        ("{'a': got, 'b': want}", {"{'b': want}", "{'a': got}"}),
        ("got * 0.5", {"got * 1.0", "got * 0.25"}),
        ("got.rows", {"got.keys", "want.rows"}),
    ],
)
def test_an_operator_makes_what_it_says(expression, expected):
    assert expected <= made(expression)


def test_statements_and_constants_are_mutated():
    text = "A = (1, 2)\n\n\ndef f(x, y):\n    x += y\n    x.add(y)\n"
    sources = {"a/b.py": text}
    mutants = mechanical(sources, ("a/b.py",), HARNESS_OPERATORS, constants=True)
    texts = {mutated(sources, mutant)["a/b.py"] for mutant in mutants}
    for old, new in (
        ("(1, 2)", "(1,)"),
        ("x += y", "x = y"),
        ("x += y", "pass"),
        ("x.add(y)", "pass"),
    ):
        assert text.replace(old, new) in texts


def test_every_module_of_the_harness_has_tests_that_judge_it():
    modules = {
        path
        for path in SOURCES
        if path.startswith(tuple(f"{folder}/" for folder in FOLDERS))
        and not path.endswith("__init__.py")
    }
    assert modules - TESTS.keys() == set()
    assert TESTS.keys() - SOURCES.keys() == set()
    assert [unit_test_file(name) for names in TESTS.values() for name in names.split()]


def test_a_sample_is_of_all_files_and_valid_python():
    sampled = sample(SOURCES, 100, 1)
    assert len(sample(SOURCES, 50, 1)) == pytest.approx(2 * len(sampled), abs=1)
    assert len({x.edits[0].file for x in sampled}) > len(TESTS) / 2
    for mutant in sampled:
        ast.parse(mutated(SOURCES, mutant)[mutant.edits[0].file])
        assert mutant.caught_by


def test_the_interval_of_a_rate_is_wilsons():
    """The values are those of Newcombe (1998), table I, method 3."""
    assert rate_interval(81, 263) == pytest.approx((0.2553, 0.3662), abs=1e-4)
    assert rate_interval(0, 20) == pytest.approx((0.0, 0.1611), abs=1e-4)
