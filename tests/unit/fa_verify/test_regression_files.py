"""The files that a run replays and their order, and tests whose program is not installed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from fa_verify.pytest_plugin.outside_programs import NEEDS, OutsidePrograms
from fa_verify.pytest_plugin.regression_files import FOLDER, RegressionFiles
from fa_verify.session import CONFORMANCE

IN_THE_CHECKOUT = sorted(FOLDER.glob("*.json"))


def files_of(corpus: object, **rest: object) -> RegressionFiles:
    return RegressionFiles(
        SimpleNamespace(getoption=lambda name: corpus, rootpath=CONFORMANCE.parents[1], **rest)
    )


def test_regression_files_of_the_checkout_are_replayed():
    files = files_of(None)
    assert files.paths == IN_THE_CHECKOUT
    assert files.folder == FOLDER


def test_entries_of_another_corpus_come_before_those_of_the_checkout(tmp_path):
    for name in ("b.json", "a.json", ".a.writing", "notes.txt"):
        (tmp_path / name).touch()
    files = files_of(str(tmp_path))
    assert files.paths == [tmp_path / "a.json", tmp_path / "b.json", *IN_THE_CHECKOUT]


def test_a_folder_that_is_not_there_yet_is_no_error(tmp_path):
    assert files_of(str(tmp_path / "later")).paths == IN_THE_CHECKOUT


def test_workers_replay_what_the_first_process_has_listed(tmp_path):
    (tmp_path / "a.json").touch()
    files, node = files_of(str(tmp_path)), SimpleNamespace(workerinput={})
    files.pytest_configure_node(node)
    (tmp_path / "b.json").touch()
    assert files_of(str(tmp_path), workerinput=node.workerinput).paths == files.paths


def test_masks_come_first_then_regressions_and_the_rest_stays_in_order():
    names = ["x.py::test_b", "r.py::test_regression[z]", "x.py::test_a", "r.py::test_regression[y]"]
    names += ["m.py::test_the_forms_of_a_mask_agree[Tree-kernel]"]
    items = [SimpleNamespace(nodeid=name) for name in names]
    files_of(None).pytest_collection_modifyitems(items)
    assert [names.index(item.nodeid) for item in items] == [4, 1, 3, 0, 2]


@pytest.fixture
def marked():
    """A test that needs a program."""
    return SimpleNamespace(get_closest_marker=lambda name: name == "redis")


def test_a_test_without_its_program_is_listed_as_not_run(monkeypatch, marked):
    monkeypatch.setitem(NEEDS, "redis", ("no-such-server", "json"))
    programs, lines = OutsidePrograms(), []
    with pytest.raises(pytest.skip.Exception) as info:
        programs.pytest_runtest_setup(marked)
    reason = f"Skipped: {info.value}"
    for report in (
        SimpleNamespace(skipped=True, longrepr=("file", 1, reason)),
        SimpleNamespace(skipped=True, longrepr=("file", 1, "Skipped: needs a GPU")),
        SimpleNamespace(skipped=False, longrepr=None),
    ):
        programs.pytest_runtest_logreport(report)
    terminal = SimpleNamespace(write_line=lambda line, **markup: lines.append(line))
    programs.pytest_terminal_summary(terminal)
    assert lines == ["not run: 1 tests that need the program no-such-server"]


def test_a_test_whose_program_is_there_runs(monkeypatch, marked):
    monkeypatch.setitem(NEEDS, "redis", ("sh", "json"))
    OutsidePrograms().pytest_runtest_setup(marked)
