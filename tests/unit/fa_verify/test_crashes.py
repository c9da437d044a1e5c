"""Runs in which problems crash, hang and lose the GPU: each is named, and other tests go on."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fa_verify.oracles.problem import Problem
from fa_verify.properties.running.watchdog import EXIT_CUDA_ERROR, EXIT_HANG
from fa_verify.pytest_plugin import crash_reports
from fa_verify.pytest_plugin.crash_reports import CrashReports

ROOT = Path(__file__).parents[3]

CONFTEST = """
import pytest
from fa_verify.pytest_plugin.crash_reports import CrashReports

def pytest_addoption(parser):
    parser.addoption("--fa-problem-timeout")

def pytest_configure(config):
    config.pluginmanager.register(CrashReports(config), "crashes")

@pytest.fixture(scope="session")
def watchdog(pytestconfig):
    return pytestconfig.pluginmanager.get_plugin("crashes").watchdog
"""

# A stub of torch with a lost GPU, because the real torch is slow to import.
TESTS = """
import os, signal, sys, time
from types import SimpleNamespace
import pytest
from fa_verify.oracles.problem import Problem

@pytest.mark.parametrize("k", range(3))
def test_before(k, watchdog):
    with watchdog.watching(Problem(seed=k)):
        pass

def test_dies(watchdog):
    with watchdog.watching(Problem(seed=11), "forward"):
        os.kill(os.getpid(), signal.SIGSEGV)

def test_hangs(watchdog):
    with watchdog.watching(Problem(seed=12)):
        time.sleep(1000)

def test_loses_the_gpu(watchdog, monkeypatch):
    def synchronize():
        raise RuntimeError("CUDA error")
    cuda = SimpleNamespace(is_initialized=lambda: True, synchronize=synchronize)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    with watchdog.watching(Problem(seed=13)):
        raise RuntimeError("an illegal memory access was encountered")

def test_dies_outside():
    os._exit(7)

@pytest.mark.parametrize("k", range(5))
def test_after(k, watchdog):
    with watchdog.watching(Problem(seed=k)):
        pass
"""

# A kernel that ends every process in one line, called by different tests.
KERNEL = """
import os, signal

def attention():
    os.kill(os.getpid(), signal.SIGSEGV)
"""
ALWAYS_DIES = """
import pytest
from fa_verify.oracles.problem import Problem
from kernel import attention

@pytest.mark.parametrize("k", range(8))
def test_dies(k, watchdog):
    with watchdog.watching(Problem(seed=k)):
        attention()
"""

# Over the first limit of a second by the clock, and below the second.
SLOW = """
import time
from fa_verify.oracles.problem import Problem

def test_is_slow(watchdog):
    with watchdog.watching(Problem(seed=21)):
        time.sleep(2)
"""

TERMINATED = """
import os, signal, time

def test_fails():
    assert 1 == 2, "a failure before the end"

def test_is_terminated():
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(100)
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Runs pytest on the tests above, in a process of its own."""
    folder = tmp_path_factory.mktemp("crashes")
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_it.py").write_text(TESTS)
    (folder / "test_slow.py").write_text(SLOW)
    (folder / "test_terminated.py").write_text(TERMINATED)
    (folder / "kernel.py").write_text(KERNEL)
    (folder / "test_always_dies.py").write_text(ALWAYS_DIES)
    (folder / "pytest.ini").write_text("[pytest]\nfilterwarnings = error\n")
    (folder / "tmp").mkdir()
    environ = {key: x for key, x in os.environ.items() if not key.startswith("PYTEST_")}
    environ |= {
        "PYTHONPATH": str(ROOT),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "TMPDIR": str(folder / "tmp"),
    }

    def go(*arguments: str, **popen: Any) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "pytest", "-p", "xdist", "-p", "no:cacheprovider"]
        command += ["--fa-problem-timeout=0.2", *arguments]
        done = subprocess.run(
            command, cwd=folder, env=environ, capture_output=True, text=True, timeout=120, **popen
        )
        done.left_behind = [*(folder / "tmp").glob("watchdog-*")]
        return done

    return go


@pytest.fixture(scope="module")
def parallel(run):
    """A run with two workers at a time, five of which die one after the other."""
    return run("test_it.py", "-n2", "--maxschedchunk=2")


def report_of(test: str, output: str) -> str:
    """The failure report of a test, up to the next report or the summary."""
    return re.split(r"\n(?:____|====)", output.partition(f" {test} __")[2])[0]


@pytest.mark.parametrize(
    ("test", "seed", "cause"),
    [
        ("test_dies", 11, "died of signal 11 (Segmentation fault) after "),
        ("test_hangs", 12, "hang: over 5 s in one problem"),
        ("test_loses_the_gpu", 13, "cuda error: RuntimeError: an illegal memory access was"),
    ],
)
def test_the_report_names_the_problem_and_what_became_of_it(parallel, test, seed, cause):
    report = report_of(test, parallel.stdout)
    assert "crashed while running" in report
    assert cause in report
    assert f"replay: pytest --fa-replay='{Problem(seed=seed).to_json()}'" in report


def test_the_report_says_what_was_done_with_the_problem(parallel):
    report = report_of("test_dies", parallel.stdout)
    assert "test: test_it.py::test_dies (call), forward" in report


def test_the_report_says_where_it_hangs(parallel):
    assert "test_it.py:18 in test_hangs" in report_of("test_hangs", parallel.stdout)


def test_a_hang_is_named_after_its_second_try(parallel):
    report = report_of("test_hangs", parallel.stdout)
    assert "It hung before, with the limit of 0.2 s." in report
    assert "It hung before" not in report_of("test_dies", parallel.stdout)


def test_a_slow_problem_is_no_hang(run):
    done = run("test_slow.py", "-n1")
    assert "1 passed, 1 runs again" in done.stdout
    assert done.returncode == pytest.ExitCode.OK
    assert done.left_behind == []


def test_the_report_says_where_it_dies(parallel):
    assert "  at " in report_of("test_dies", parallel.stdout)
    assert "test_it.py:14 in test_dies" in report_of("test_dies", parallel.stdout)
    assert "Segmentation fault" not in parallel.stderr


def test_no_frame_of_pytest_follows_the_kernel(parallel):
    report = report_of("test_dies", parallel.stdout)
    (line,) = (line for line in report.splitlines() if line.startswith("  at "))
    assert "test_it.py" in line


def test_a_death_outside_of_problems_blames_none(parallel):
    report = report_of("test_dies_outside", parallel.stdout)
    assert "died with exit code 7 between problems" in report
    assert "replay" not in report


def test_the_other_tests_run_once(parallel):
    assert "4 failed, 8 passed, 1 runs again" in parallel.stdout
    assert parallel.returncode == pytest.ExitCode.TESTS_FAILED


def test_the_records_are_removed(parallel):
    assert parallel.left_behind == []


def test_a_frame_that_ends_two_workers_in_a_row_ends_the_run(run):
    done = run("test_always_dies.py", "-n2", "--maxschedchunk=1")
    assert "2 failed" in done.stdout
    assert re.search(
        r"two workers in a row ended at \S*kernel.py:5 in attention; "
        r"--max-worker-restart=1000 runs the other tests",
        done.stdout,
    )
    assert done.returncode == pytest.ExitCode.INTERRUPTED
    assert done.left_behind == []


def test_workers_are_restarted_as_often_as_the_option_says(run):
    done = run("test_always_dies.py", "-n1", "--max-worker-restart=3")
    assert "4 failed" in done.stdout
    assert "two workers in a row" not in done.stdout


@pytest.mark.parametrize(("option", "failures"), [("-x", 1), ("--maxfail=2", 2)])
def test_a_death_counts_as_a_failure(run, option, failures):
    """Different frames end the workers."""
    done = run("test_it.py", "-n1", option)
    assert f"{failures} failed" in done.stdout
    assert f"stopping after {failures} failures" in done.stdout
    assert done.returncode == pytest.ExitCode.INTERRUPTED
    assert done.left_behind == []


@pytest.mark.parametrize("interrupts", [signal.default_int_handler, signal.SIG_IGN])
def test_a_terminated_run_reports_its_failures(run, interrupts):
    """As in the background of a shell, whose jobs ignore SIGINT."""
    done = run("test_terminated.py", preexec_fn=lambda: signal.signal(signal.SIGINT, interrupts))
    assert done.returncode == pytest.ExitCode.INTERRUPTED
    assert "AssertionError: a failure before the end" in done.stdout
    assert done.left_behind == []


@pytest.mark.parametrize(
    ("test", "seed", "code"),
    [("test_hangs", 12, EXIT_HANG), ("test_loses_the_gpu", 13, EXIT_CUDA_ERROR)],
)
def test_a_single_process_reports_a_crash_on_stderr(run, test, seed, code):
    done = run(f"test_it.py::{test}")
    assert done.returncode == code
    assert f"replay: pytest --fa-replay='{Problem(seed=seed).to_json()}'" in done.stderr
    assert done.left_behind == []


def test_a_stack_ends_with_the_frames_of_the_kernel():
    library, suite = Path(os.__file__), Path(crash_reports.__file__)
    stack = (f"{library}:1 in f", "/home/me/kernel.py:2 in g", f"{suite}:3 in h")
    assert crash_reports._of_kernel(stack) == stack[:2]
    assert crash_reports._of_kernel(stack[::2]) == stack[::2]
    assert crash_reports._of_kernel(()) == ()


@pytest.mark.parametrize("given", ["soon", "0", "-1", "nan", "inf", "", 0.0])
def test_a_timeout_that_is_none_is_refused(given):
    config = SimpleNamespace(getoption=lambda name, default: given)
    with pytest.raises(pytest.UsageError, match=r"-problem-timeout is .*; needs a number") as info:
        CrashReports(config)
    assert repr(given) in str(info.value)
