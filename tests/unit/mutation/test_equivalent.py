"""Mutants listed as equivalent: their keys, and the mapping of keys to changed code."""

from __future__ import annotations

from pathlib import Path

import pytest

from fa_verify.diagnosis.mutant import StaleError
from tests.mutation.mutants import equivalent
from tests.mutation.mutants.changes import change_of
from tests.mutation.mutants.equivalent import EQUIVALENT, Group, check_listed, read, version, write
from tests.mutation.mutants.operators import mechanical
from tests.mutation.mutants.rekey import Version, rekeyed

FILE = "fa_kernels/kernels/portable/dq.py"
KEPT = """
def _accumulate(acc, offs_m, offs_n, view, M, N):
    live = offs_m < view[0]
    if M < N:
        acc = acc + offs_m * 2
    return acc - M


def _rest(acc, M, N):
    return acc * M
"""


def of(text: str, file: str = FILE) -> Version:
    return Version({file: text}, mechanical({file: text}, (file,)))


def keys_of(version: Version) -> list[str]:
    return [mutant.key for mutant in version.mutants]


def test_a_key_names_file_function_operator_and_number():
    keys = keys_of(of(KEPT))
    assert "portable/dq.py:_accumulate compare 2" in keys
    assert "portable/dq.py:_rest arithmetic 1" in keys
    assert len(set(keys)) == len(keys)


def test_every_equivalent_mutant_exists_once():
    check_listed(version().mutants)
    listed = [key for group in read() for key in group.mutants]
    assert len(set(listed)) == len(listed) == len(EQUIVALENT)


def test_an_entry_without_a_mutant_is_named(monkeypatch):
    monkeypatch.setitem(EQUIVALENT, "portable/dq.py:_accumulate compare 99", "why")
    with pytest.raises(
        StaleError, match=r"no such mutant is made: portable/dq\.py:_accumulate compare 99"
    ):
        check_listed(version().mutants)


def test_groups_are_read_as_they_were_written(tmp_path):
    groups = [Group("equivalent", 'an "x" \\ y', ("a", "b")), Group("hardware", "é", ("c",))]
    write(groups, tmp_path / "equivalent.toml")
    assert read(tmp_path / "equivalent.toml") == groups


CHANGES = {
    "nothing": (KEPT, FILE),
    "an earlier change": (
        KEPT.replace("    live =", "    more = M < offs_m * 3\n    live ="),
        FILE,
    ),
    "another file": (KEPT, "fa_kernels/kernels/hopper/gradient.py"),
    "another function": (KEPT.replace("_accumulate", "accumulate_tile"), FILE),
    "other names": (KEPT.replace("acc", "total").replace("_totalumulate", "_accumulate"), FILE),
    "an index for a field": (KEPT.replace("view[0]", "lengths.rows"), FILE),
    "another line break": (
        KEPT.replace("acc + offs_m * 2", "(\n        acc\n  + offs_m * 2)"),
        FILE,
    ),
    "a helper": (
        KEPT.replace("        acc = acc + offs_m * 2\n", "        acc = _more(acc, offs_m)\n")
        + "\n\ndef _more(acc, offs_m):\n    acc = acc + offs_m * 2\n    return acc\n",
        FILE,
    ),
}


@pytest.mark.parametrize("what", CHANGES)
def test_keys_follow_code_through(what):
    old, new = of(KEPT), of(*CHANGES[what])
    wanted = ["_accumulate compare 1", "_accumulate arithmetic 2", "_rest drop_operand 1"]
    found = rekeyed([f"portable/dq.py:{x}" for x in wanted], old, new)
    assert [x.old.key.split(":")[1] for x in found] == wanted
    for x in found:
        assert x.new is not None
        before, after = change_of(old.sources, x.old), change_of(new.sources, x.new)
        assert x.old.origin == x.new.origin
        assert len(before.removed) == len(after.removed)
    assert "<=" in found[0].new.edits[0].new
    assert "offs_m / 2" in found[1].new.edits[0].new
    assert "(acc)" in found[2].new.edits[0].new or "(total)" in found[2].new.edits[0].new


def test_a_mutant_of_code_that_is_gone_is_not_mapped():
    new = of(KEPT.replace("    live = offs_m < view[0]\n", ""))
    (found,) = rekeyed(["portable/dq.py:_accumulate compare 1"], of(KEPT), new)
    assert found.new is None


def test_the_command_maps_entries_of_another_tree(tmp_path, monkeypatch, capsys):
    """Keeps the groups of the old tree, and adds the entries that only this tree lists."""
    old, new = of(KEPT), of(CHANGES["an earlier change"][0])
    monkeypatch.setattr(equivalent, "FILE", tmp_path / "equivalent.toml")
    monkeypatch.setattr(equivalent, "version", lambda root=None: new if root is None else old)
    (tmp_path / "old" / "tests").mkdir(parents=True)
    listed = "portable/dq.py:_accumulate compare 1"
    write([Group("equivalent", "why", (listed,))], tmp_path / "old" / "tests" / "equivalent.toml")
    more = "portable/dq.py:_rest arithmetic 1"
    write([Group("hardware", "else", (more,))], tmp_path / "equivalent.toml")
    assert equivalent.main(["--rekey", str(tmp_path / "old"), "--apply"]) == 0
    assert "1 entries: 1 equal, 0 similar, 0 not mapped" in capsys.readouterr().out
    assert read(tmp_path / "equivalent.toml") == [
        Group("equivalent", "why", ("portable/dq.py:_accumulate compare 2",)),
        Group("hardware", "else", (more,)),
    ]


def test_another_tree_is_read_with_its_own_operators():
    tree = Path(equivalent.__file__).parents[3]
    assert [x.key for x in equivalent.version(tree).mutants] == [
        x.key for x in equivalent.version().mutants
    ]
