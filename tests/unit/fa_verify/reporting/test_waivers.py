"""Known failures: they are listed with their reasons, and hide no other failure."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace

import pytest

from fa_verify.oracles.problem import Problem
from fa_verify.properties.guarantees.compare import Finding
from fa_verify.reporting.waivers import Waiver, Waivers, read
from tests.unit.fa_verify.test_command import ACCURACY, folder, run

__all__ = ["folder"]

FILE = """
# guarantee, pattern, reason
G1, out of broken *, the factor is intended, see #7
G3, "causal":true*"dtype", never
"""


def waivers_of(tmp_path, text: str) -> Waivers:
    """The waivers of a file with a text."""
    path = tmp_path / "known.txt"
    path.write_text(text)
    return Waivers(SimpleNamespace(getoption={"--fa-waive": str(path)}.get))


def finding(problem: Problem, guarantee: str = "G1 accuracy") -> Finding:
    """A finding on a problem."""
    return Finding(
        guarantee, "leaves the derived bound", "attention", "out", "b=0", 1.0, 2.0, 0.1, 1, 2, "",
        problem,
    )  # fmt: skip


def test_a_line_has_a_guarantee_a_pattern_and_a_reason_with_commas(tmp_path):
    path = tmp_path / "known.txt"
    path.write_text(FILE)
    assert read(path) == [
        Waiver("G1", "out of broken *", "the factor is intended, see #7", 3),
        Waiver("G3", '"causal":true*"dtype"', "never", 4),
    ]


@pytest.mark.parametrize("line", ["G1, out", "G1", "G1, , reason", ", out, reason", "G1, out,"])
def test_a_line_without_a_part_is_refused_with_its_number(tmp_path, line):
    says = rf"^--fa-waive: .*known.txt:2 is '{re.escape(line)}'; needs 'guarantee, pattern, reason'"
    with pytest.raises(pytest.UsageError, match=says):
        waivers_of(tmp_path, f"G1, out, reason\n{line}\n")
    with pytest.raises(ValueError, match=r"none.txt cannot be read: .*No such file"):
        read(tmp_path / "none.txt")


@pytest.mark.parametrize(
    ("waiver", "matches"),
    [
        ("G1, out of attention, r", True),
        ("G1 accuracy, leaves*bound, r", True),
        ("*, test_it, r", True),
        ('*, "M":7*"dtype":"fp16", r', True),
        # Not across lines, not as a regular expression, not another guarantee or output.
        ("G1, bound*replay, r", False),
        ("G1, o.t of, r", False),
        ("G, out of attention, r", False),
        ("G10, out of attention, r", False),
        ("G1, dq of attention, r", False),
    ],
)
def test_a_waiver_matches_text_of_one_line(tmp_path, waiver, matches):
    waivers = waivers_of(tmp_path, waiver)
    assert waivers.waived(finding(Problem(M=7, dtype="fp16")), "test_it") == matches
    assert waivers.records()[0]["matched"] == matches


def test_a_waived_crash_is_an_expected_failure(tmp_path):
    waivers = waivers_of(tmp_path, "*, died of signal 11, the driver is old")
    for text, outcome in (("died of signal 11 in one problem", "skipped"), ("hang", "failed")):
        report = SimpleNamespace(outcome="failed", longrepr=text)
        waivers.pytest_handlecrashitem("test_it.py::test_it", report)
        assert report.outcome == outcome
        assert getattr(report, "wasxfail", None) == (
            "the driver is old" if outcome == "skipped" else None
        )


def test_counts_of_workers_are_added(tmp_path):
    worker, controller = (waivers_of(tmp_path, "G1, out, r") for _ in range(2))
    assert worker.waived(finding(Problem()), "")
    worker.config.workeroutput = {}
    next(worker.pytest_sessionfinish())
    for _ in range(2):
        controller.pytest_testnodedown(SimpleNamespace(workeroutput=worker.config.workeroutput))
    (record,) = controller.records()
    assert record["matched"] == 2
    assert record["example"].startswith("G1 accuracy: out of attention")


def test_a_run_with_known_failures_passes_and_other_failures_are_found(folder):
    (folder / "known.txt").write_text(FILE)
    words = "check", "my.py:broken", "--waive=known.txt", "--json=waived.jsonl"
    # At larger head dims, limits find the factor where the bound does not.
    done = run(folder, *words, "--forward-only", *ACCURACY[:-1], f"{ACCURACY[-1]} and d16")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(
        r"^\d+ x G1, out of broken \*: the factor is intended, see #7", done.stdout, re.M
    )
    assert "known.txt:4 matched nothing in this run: G3, " in done.stdout
    records = [json.loads(x) for x in (folder / "waived.jsonl").read_text().splitlines()]
    matched = [x["matched"] for x in records if x["kind"] == "waiver"]
    assert matched[0] > 0
    assert matched[1] == 0
    done = run(folder, *words, *ACCURACY)
    assert done.returncode == 1, done.stdout + done.stderr
    records = [json.loads(x) for x in (folder / "waived.jsonl").read_text().splitlines()]
    found = [y["message"] for x in records for y in x.get("findings", ())]
    assert any(x.startswith("G1 accuracy: dv of broken leaves the derived bound") for x in found)
    assert not any(x.startswith("G1 accuracy: out of broken") for x in found)
    assert re.search(r"^1  .* wrong dv, dq, dk +explains", done.stdout, re.M), done.stdout
