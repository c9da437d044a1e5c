"""Records of runs that finish, crash, hang or cannot start."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.findings.collecting import collected, recorded
from benchmarks.findings.process import FINISHED, conformance_of
from fa_verify.oracles.problem import Problem

ROOT = Path(__file__).parents[4]

CONFTEST = """
import pytest
from fa_verify.properties.running.tally import Tally
from fa_verify.properties.kernels.subject import Subject
from fa_verify.pytest_plugin.crash_reports import CrashReports
from fa_verify.reporting.recording import Recording

def attention(q, k, v, *, mask, sm_scale):
    return q
attention.dtypes = ("fp16",)

def pytest_addoption(parser):
    parser.addoption("--fa-problem-timeout")
    parser.addoption("--fa-findings")

def pytest_configure(config):
    config.pluginmanager.register(CrashReports(config), "crashes")
    config.pluginmanager.register(Recording(config, Subject.of(attention, "it"), Tally()))

@pytest.fixture(scope="session")
def watchdog(pytestconfig):
    return pytestconfig.pluginmanager.get_plugin("crashes").watchdog
"""
TESTS = """
import os, signal
import pytest
import torch
from fa_verify.oracles.problem import Problem
from fa_verify.properties.guarantees.compare import Finding, Violation
from fa_verify.properties.running.trial import SubjectError
from fa_verify.properties.kernels.subject import Subject

def test_holds():
    pass

def test_is_skipped():
    pytest.skip("it declares nothing")

def test_is_violated():
    subject = Subject.of(lambda q, k, v, *, mask, sm_scale: q, "it")
    finding = Finding.of_exception(SubjectError("no"), subject, Problem(M=3))
    raise Violation([finding])

def test_says_no():
    pytest.fail("only 1 problems were judged", pytrace=False)

def test_asserts():
    assert 1 == 2, "not the same"

def test_dies(watchdog):
    with watchdog.watching(Problem(seed=11)):
        os.kill(os.getpid(), signal.SIGSEGV)
"""


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    """The records of a run with workers, one of which dies, by test."""
    folder = tmp_path_factory.mktemp("recorded")
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_it.py").write_text(TESTS)
    environ = {key: x for key, x in os.environ.items() if not key.startswith("PYTEST_")}
    environ |= {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-m", "pytest", "-p", "xdist", "-p", "no:cacheprovider"]
    path = folder / "records"
    subprocess.run(
        [*command, "-n1", "--max-worker-restart=9", f"--fa-findings={path}"],
        cwd=folder, env=environ, capture_output=True, timeout=120,
    )  # fmt: skip
    return recorded(path)


def record_of(records, test: str) -> dict:
    (found,) = [x for x in records if x["kind"] == "test" and x["test"].endswith(f"::{test}")]
    return found


def test_the_record_begins_with_the_subject_and_ends_with_what_was_judged(records):
    assert records[0]["kind"] == "subject"
    assert records[0]["version"] == 1
    assert records[0]["declares"] == {"dtypes": ["fp16"]}
    assert records[-1]["kind"] == "end"
    assert records[-1]["judged"] == 0
    assert len(records) == 8


@pytest.mark.parametrize(
    ("test", "outcome", "said"),
    [
        ("test_holds", "passed", ""),
        ("test_is_skipped", "skipped", "it declares nothing"),
        ("test_says_no", "failed", "only 1 problems were judged"),
        ("test_asserts", "failed", "AssertionError: not the same\nassert 1 == 2"),
    ],
)
def test_the_outcome_of_a_test_is_recorded_with_what_it_said(records, test, outcome, said):
    record = record_of(records, test)
    assert (record["outcome"], record["said"], record["findings"]) == (outcome, said, [])


def test_findings_are_recorded_with_their_problem(records):
    (finding,) = record_of(records, "test_is_violated")["findings"]
    assert finding["guarantee"] == "exception"
    assert finding["problem"] == Problem(M=3).to_json()
    assert f"replay: pytest --fa-replay='{Problem(M=3).to_json()}'" in finding["message"]


def test_a_crash_is_recorded_with_the_problem_under_way(records):
    record = record_of(records, "test_dies")
    assert record["outcome"] == "crashed"
    assert record["said"].startswith("died of signal 11 (Segmentation fault) after ")
    assert Problem(seed=11).to_json() in record["said"]


def test_a_crash_does_not_take_the_other_tests_along(records):
    assert collected(records)["tests"] == 6


def run(text: str, tmp_path, *, seconds: float = 100.0, options: Sequence[str] = ()) -> dict:
    path = tmp_path / "kernels.py"
    path.write_text(text)
    return conformance_of(
        f"{path}:attention", profile="dev", workers="1", seconds=seconds, options=options
    )


def test_a_kernel_that_kills_its_process_as_it_is_imported_is_a_result(tmp_path):
    found = run("import os\nos.kill(os.getpid(), 11)", tmp_path)
    assert found["ended"] == "died of signal 11"
    assert found["tests"] == 0


def test_a_kernel_that_cannot_be_imported_is_a_result(tmp_path):
    found = run("1 / 0", tmp_path)
    assert found["ended"] == "exit code 2"
    assert "cannot be imported: ZeroDivisionError" in found["said"]


def test_a_kernel_that_hangs_as_it_is_imported_is_ended(tmp_path):
    found = run("import time\ntime.sleep(1000)", tmp_path, seconds=6.0)
    assert found["ended"] == "out of time after 6 s"


def test_an_exception_of_a_kernel_is_collected(tmp_path):
    text = "def attention(q, k, v, *, mask, sm_scale): raise KeyError('no')"
    found = run(text, tmp_path, options=["-k", "hundredth"])
    assert (found["ended"], found["tests"]) == (FINISHED, 1)
    assert found["guarantees"]["exception"]["failed"] == 1
    assert found["guarantees"]["G13"]["undecided"] == 1
    assert "KeyError: 'no'" in found["guarantees"]["exception"]["findings"][0]["message"]
