"""The measurement of diagnoses: the names that count as right, and the counts of outcomes."""

from __future__ import annotations

import tomllib

import pytest

from fa_verify.diagnosis.named.entries import DICTIONARY
from tests.mutation.catalogue.faults import FAULTS
from tests.mutation.catalogue.independent import INDEPENDENT
from tests.mutation.catalogue.named_faults import RECORDED
from tests.mutation.catalogue.subtle import SUBTLE
from tests.mutation.diagnosis import ACCEPTED, LISTS, Outcome, drawn, judged, table
from tests.unit.properties.guarantees.test_minimal_problems import BROKEN
from tests.unit.properties.search.test_causes import PLANTED

LISTED = tomllib.loads(ACCEPTED.read_text(encoding="utf-8"))


def outcome(names: tuple[str, ...], accepted: tuple[str, ...], source: str = "subtle") -> Outcome:
    return Outcome(source, "a fault", "diagnosed", names, accepted, True, 1.0)


def test_names_that_count_as_right_are_in_the_dictionary():
    known = {x.name for x in DICTIONARY} | {"constant factor"}
    given = {name for of in LISTED.values() for names in of.values() for name in names}
    assert given <= known
    assert {*LISTED} <= {*LISTS}


def test_entries_have_the_origins_of_faults_on_record():
    """The product has the origins without the faults, which are edits of the kernels here."""
    assert {*RECORDED} <= {x.name for x in DICTIONARY}
    for entry in DICTIONARY:
        origins: list[str] = []
        for part in RECORDED.get(entry.name, ()):
            faults = [x for x in FAULTS if part in x.name]
            assert faults, (entry.name, part)
            origins += [x.origin for x in faults]
        shipped = [x for x in origins if not x.startswith(("independent", "published"))]
        assert {*entry.on_record.split("; ")} == {*"; ".join(shipped).split("; ")}, entry.name


@pytest.mark.parametrize(
    ("source", "faults"),
    [
        ("independent", [x.name for x in INDEPENDENT]),
        ("subtle", [x.name for x in SUBTLE]),
        ("eager", [fault for fault, *_ in BROKEN.values()]),
        ("causes", [*PLANTED]),
    ],
)
def test_faults_with_a_right_name_exist(source, faults):
    assert {*LISTED[source]} <= {*faults}


@pytest.mark.parametrize(
    ("names", "accepted", "how"),
    [
        (("a", "b"), ("a",), "first"), (("b", "a"), ("a",), "one of three"), ((), ("a",), "none"),
        (("b",), ("a",), "wrong"), (("b",), (), "wrong"), ((), (), "none"),
    ],
)  # fmt: skip
def test_a_name_is_right_if_it_was_written_down(names, accepted, how):
    assert judged(outcome(names, accepted)) == how


def test_the_table_keeps_faults_without_an_entry_apart():
    found = [outcome(("a",), ("a",)), outcome((), ("a",)), outcome(("b",), ()),
             Outcome("subtle", "another", "raised", (), (), True, 0.0)]  # fmt: skip
    with_entry, without, *_ = table(found)[2:]
    assert "| yes | 2 | 1 (9% to 91%) | 1 (9% to 91%) | 1 | 0 (" in with_entry
    assert "| no | 1 | - | - | 0 (0% to 79%) | 1 (21% to 100%) |" in without


def test_a_sample_is_drawn_by_key_alone():
    keys = [f"common/mask.py:element_mask compare {i}" for i in range(400)]
    assert 70 < sum(drawn(key, 4) for key in keys) < 130
    assert [i for i, key in enumerate(keys[:12]) if drawn(key, 4)] == [2, 9, 11]
