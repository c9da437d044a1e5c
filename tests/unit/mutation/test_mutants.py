"""Every listed mutant still changes the current sources; a stale mutant would test nothing."""

from __future__ import annotations

import ast
from collections import Counter
from functools import cache

import pytest

from tests.mutation.catalogue.copies import sources_of
from tests.mutation.catalogue.faults import FAULTS
from tests.mutation.catalogue.hardware import HARDWARE
from tests.mutation.catalogue.independent import INDEPENDENT
from tests.mutation.catalogue.mutant import Edit, Mutant, StaleError, mutated
from tests.mutation.catalogue.subtle import SUBTLE
from tests.mutation.harness.first_failure import unit_test_file
from tests.mutation.harness.mutants import HARNESS

LISTS: dict[str, tuple[Mutant, ...]] = {
    "faults": FAULTS,
    "independent": INDEPENDENT,
    "subtle": SUBTLE,
    "harness": HARNESS,
    "hardware": tuple(x.mutant for x in HARDWARE),
}
ALL = [
    pytest.param(mutant, id=f"{name}: {mutant.name}") for name in LISTS for mutant in LISTS[name]
]


@cache
def sources() -> dict[str, str]:
    return sources_of("fa_kernels", "oracles", "properties", "fa_verify")


@pytest.mark.parametrize("mutant", ALL)
def test_a_mutant_changes_the_source_to_other_python(mutant):
    changed = mutated(sources(), mutant)
    for edit in mutant.edits:
        assert ast.dump(ast.parse(changed[edit.file])) != ast.dump(parsed(edit.file))


@cache
def parsed(file: str) -> ast.Module:
    return ast.parse(sources()[file])


@pytest.mark.parametrize("name", LISTS)
def test_no_two_mutants_have_one_name(name):
    counts = Counter(mutant.name for mutant in LISTS[name])
    assert [mutant for mutant, count in counts.items() if count > 1] == []


@pytest.mark.parametrize("name", LISTS)
def test_no_two_mutants_are_one(name):
    counts = Counter(mutant.edits for mutant in LISTS[name])
    assert [edits for edits, count in counts.items() if count > 1] == []


@pytest.mark.parametrize("mutant", HARNESS, ids=lambda mutant: mutant.name)
def test_a_mutant_of_the_harness_names_the_tests_that_kill_it(mutant):
    assert mutant.caught_by
    assert [unit_test_file(name) for name in mutant.caught_by]


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (Edit("a.py", "x", "z"), "its text occurs 2 times in a.py; needs exactly one"),
        (Edit("a.py", "w", "z"), "its text occurs 0 times in a.py; needs exactly one"),
        (Edit("b.py", "x", "z"), "there is no b.py"),
    ],
)
def test_an_edit_that_does_not_match_exactly_once_is_stale(edit, says):
    with pytest.raises(StaleError, match=f"^mutant 'name': {says}"):
        mutated({"a.py": "x = y + x"}, Mutant("name", (edit,)))
