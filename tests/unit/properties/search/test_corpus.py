"""The files of the corpus: entries, entries that are never overwritten, and damaged files."""

from __future__ import annotations

import dataclasses
import json
import os

import pytest

from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.problem import Problem
from fa_verify.properties.guarantees.compare import Finding
from fa_verify.properties.search import corpus
from fa_verify.properties.search.corpus import Cause, CorpusEntry, NotReplayableError, keep
from fa_verify.pytest_plugin.regression_files import FOLDER

LARGE = Problem(B=2, M=40, N=70, mask=Mask(causal=True), inputs="needle", seed=3)
SMALL = Problem(M=2, N=3)
VERSIONS = {"torch": "2.13.0"}


def finding(problem: Problem, **fields: object) -> Finding:
    of = {
        "guarantee": "G1 accuracy",
        "claim": "leaves the derived bound",
        "subject": "attention",
        "output": "out",
        "where": "b=0 h=0 m=1 d=2",
        "got": 1.0,
        "want": 2.0,
        "bound": 0.1,
        "bad": 1,
        "total": 4,
        "places": "m tile 0 of 1 (width 16)",
        "tile": "ragged tail",
    }
    return Finding(**{**of, "problem": problem, **fields})


def entry(problem: Problem, **fields: object) -> CorpusEntry:
    return CorpusEntry.of(finding(problem, **fields), VERSIONS)


def fails(problem: Problem) -> bool:
    return True


def passes(problem: Problem) -> bool:
    return False


def kept(folder) -> dict[str, Problem]:
    """The problems in a folder by the names of their files."""
    return {path.name: CorpusEntry.read(path).problem for path in sorted(folder.iterdir())}


def test_a_file_says_all_that_a_find_is(tmp_path):
    found = entry(LARGE, kernel="a.py:attention")
    assert CorpusEntry.read(keep(tmp_path, found, fails)) == found


def test_a_file_is_named_for_subject_and_cause(tmp_path):
    path = keep(tmp_path / "made", entry(LARGE), fails)
    assert path == tmp_path / "made" / "attention-g1-out-ragged-tail.json"


@pytest.mark.parametrize("order", [(LARGE, SMALL), (SMALL, LARGE)], ids=["smaller", "larger"])
def test_of_one_cause_the_smallest_problem_is_kept(tmp_path, order):
    paths = {keep(tmp_path, entry(problem), fails) for problem in order}
    assert len(paths) == 1
    assert kept(tmp_path) == {"attention-g1-out-ragged-tail.json": SMALL}


@pytest.mark.parametrize(
    "other",
    [
        {"guarantee": "G5 masked"},
        {"output": "dq"},
        {"tile": "inner"},
        {"subject": "another"},
        {"raised": "ValueError: no\n(/home/me/a.py, line 12)"},
    ],
    ids=str,
)
def test_another_cause_has_another_file(tmp_path, other):
    keep(tmp_path, entry(SMALL), fails)
    keep(tmp_path, entry(LARGE, **other), fails)
    assert len(kept(tmp_path)) == 2


def test_kernels_of_one_name_do_not_share_a_file(tmp_path):
    keep(tmp_path, entry(SMALL, kernel="a.py:attention"), fails)
    keep(tmp_path, entry(LARGE, kernel="b.py:attention"), fails)
    assert [*kept(tmp_path).values()] == [LARGE, SMALL]


def test_a_find_that_fails_no_more_stays_beside_the_next(tmp_path):
    keep(tmp_path, entry(LARGE), passes)
    path = keep(tmp_path, entry(SMALL), passes)
    assert path.name == "attention-g1-out-ragged-tail-2.json"
    assert {*kept(tmp_path).values()} == {LARGE, SMALL}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff\x00",
        b'{"problem": 7}',
        b'{"subject": "attention", "guarantee": "G1", "why": "mine", "problem": {"version": 1}}',
    ],
)
def test_entries_that_a_person_wrote_or_that_cannot_be_read_are_kept(tmp_path, content):
    there = tmp_path / "attention-g1-out-ragged-tail.json"
    there.write_bytes(content)
    path = keep(tmp_path, entry(SMALL), fails)
    assert there.read_bytes() == content
    assert CorpusEntry.read(path).problem == SMALL


def test_a_find_that_a_person_has_explained_is_not_touched(tmp_path):
    explained = dataclasses.replace(entry(LARGE), why="the rescale is forgotten in the last tile")
    there = tmp_path / f"{explained.name}.json"
    there.write_text(explained.to_json())
    keep(tmp_path, entry(SMALL), fails)
    assert CorpusEntry.read(there) == explained
    assert {*kept(tmp_path).values()} == {LARGE, SMALL}


def test_a_link_to_nowhere_is_not_written_through(tmp_path):
    (tmp_path / "attention-g1-out-ragged-tail.json").symlink_to(tmp_path / "nowhere")
    path = keep(tmp_path, entry(SMALL), fails)
    assert path.name == "attention-g1-out-ragged-tail-2.json"
    assert not (tmp_path / "nowhere").exists()


def test_a_writing_that_is_cut_off_leaves_what_was_there(tmp_path, monkeypatch):
    keep(tmp_path, entry(LARGE), fails)

    def cut_off(*of):
        raise KeyboardInterrupt

    monkeypatch.setattr(corpus.os, "fsync", cut_off)
    with pytest.raises(KeyboardInterrupt):
        keep(tmp_path, entry(SMALL), fails)
    assert kept(tmp_path) == {"attention-g1-out-ragged-tail.json": LARGE}


def test_a_file_is_announced_before_it_is_written(tmp_path):
    told = []
    path = keep(tmp_path, entry(SMALL), fails, lambda path: told.append((path, path.exists())))
    keep(tmp_path, entry(LARGE), fails, lambda path: told.append((path, path.exists())))
    assert told == [(path, False), (path, True)]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "Expecting value"),
        ("[]", 'needs a JSON object with "problem"'),
        ('{"subject": "attention"}', 'needs a JSON object with "problem"'),
        ('{"problem": []}', "needs a JSON object"),
        ('{"problem": {"version": 7}}', "problem has version 7"),
        ('{"problem": {"version": 1, "M": -1}}', "M is -1"),
        ('{"problem": {"version": 1}, "versions": 3}', "versions is 3"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_a_damaged_file_says_its_name_and_what_is_wrong(tmp_path, content, says):
    path = tmp_path / "damaged.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"damaged\.json: ") as info:
        CorpusEntry.read(path)
    assert says in str(info.value)
    assert not isinstance(info.value, NotReplayableError)


def test_a_mask_that_is_not_registered_is_not_replayable(tmp_path):
    path = tmp_path / "foreign.json"
    path.write_text(json.dumps({"problem": {"version": 1, "mask": {"type": "os.system"}}}))
    with pytest.raises(NotReplayableError, match=r"mask type 'os\.system' is not replayable"):
        CorpusEntry.read(path)


def test_an_entry_that_a_person_wrote_has_no_cause():
    assert {CorpusEntry.read(path).cause for path in FOLDER.glob("*-at-*.json")} == {None}


@pytest.mark.parametrize(
    ("raised", "cause"),
    [
        ("ValueError: M: 3\nis odd\n(/home/me/a.py, line 12)", ("ValueError", "a.py:12")),
        ("AssertionError\n(<string>, line 3)", ("AssertionError", "<string>:3")),
        ("RuntimeError", ("RuntimeError", "")),
    ],
)
def test_the_cause_of_an_exception_is_its_type_and_line(raised, cause):
    found = finding(SMALL, guarantee="exception", raised=raised)
    assert Cause.of(found) == Cause("exception", *cause)


def test_the_shape_of_scratch_is_no_cause():
    causes = {Cause.of(finding(SMALL, output=f"scratch of shape ({n}, 2)")) for n in (3, 4)}
    assert causes == {Cause("G1", "scratch", "ragged tail")}


def test_two_subjects_whose_names_are_spelt_alike_do_not_share_a_file(tmp_path):
    keep(tmp_path, entry(LARGE, subject="Attention"), fails)
    keep(tmp_path, entry(SMALL, subject="attention"), fails)
    assert {*kept(tmp_path).values()} == {LARGE, SMALL}


def test_no_name_leaves_the_folder(tmp_path):
    path = keep(tmp_path, entry(SMALL, subject="../../etc/Attention<lambda>"), fails)
    assert path.name == "etc-attention-lambda-g1-out-ragged-tail.json"
    assert os.listdir(tmp_path) == [path.name]


def test_a_file_is_as_readable_as_others(tmp_path):
    path = keep(tmp_path, entry(SMALL), fails)
    assert path.stat().st_mode & 0o444 == 0o444


def test_a_problem_is_compared_on_all_that_it_is(tmp_path):
    other = dataclasses.replace(SMALL, inputs="needle")
    keep(tmp_path, entry(other), fails)
    keep(tmp_path, entry(SMALL), fails)
    assert [*kept(tmp_path).values()] == [SMALL]
