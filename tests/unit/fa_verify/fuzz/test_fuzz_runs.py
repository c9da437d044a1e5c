"""Runs with --fa-minutes in processes of their own, on a plain PyTorch kernel with a fault."""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pytest

from fa_verify.properties.search.corpus import CorpusEntry
from fa_verify.pytest_plugin.regression_files import FOLDER

ROOT = Path(__file__).parents[4]
# Hides Triton, because imports without it are faster.
PYTEST = """
import sys
sys.modules["triton"] = None
import pytest
if __name__ == "__main__":
    sys.exit(pytest.main(["-p", "no:cacheprovider", *sys.argv[1:]]))
"""
KERNEL = '''
import math
import torch


def attention(q, k, v, *, mask, sm_scale):
    """Right, but for rows with more than 20 keys."""
    (B, H, M, _), (Hk, N) = q.shape, k.shape[1:3]
    seen = mask.dense(B, H, M, N).expand(B, H, M, N)
    k, v = (x.repeat_interleave(H // Hk, 1) for x in (k, v))
    scores = torch.where(seen, q @ k.mT * sm_scale, -math.inf)
    out = torch.softmax(scores, 3) @ v
    return out * 1.01 if N > 20 else out


attention.dtypes = ("fp64",)
attention.masks = ()
attention.zero_sizes = False
attention.p_normalised = True
'''
TESTS = "test_regression or (lies_within_its_bound and d16)"


class Run:
    """A run in progress and its output so far."""

    def __init__(self, folder: Path, *options: str, **environ: str) -> None:
        self.corpus = folder / "corpus"
        self.output = folder / "output"
        (folder / "kernel.py").write_text(KERNEL)
        inherited = {key: x for key, x in os.environ.items() if not key.startswith("PYTEST_")}
        with self.output.open("w") as file:
            self.process = subprocess.Popen(
                [
                    sys.executable, "-c", PYTEST, f"--fa-kernel={folder / 'kernel.py'}:attention",
                    f"--fa-corpus={self.corpus}", f"-k{TESTS}", *options,
                ],
                cwd=ROOT,
                env=inherited | {
                    "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "0",
                    "HYPOTHESIS_STORAGE_DIRECTORY": str(folder / "examples"),
                } | environ,
                stdout=file,
                stderr=subprocess.STDOUT,
            )  # fmt: skip

    def said(self) -> str:
        return self.output.read_text()

    def wait_for(self, what) -> None:
        """Waits until a condition holds; fails if the run ends first."""
        end = time.monotonic() + 120
        while not what():
            assert self.process.poll() is None, self.said()
            assert time.monotonic() < end, self.said()
            time.sleep(0.05)

    def ended(self) -> tuple[int, str]:
        """Waits for the end of the run; (exit status, output)."""
        return self.process.wait(timeout=120), self.said()

    def workers(self) -> list[int]:
        """Process ids of the workers."""
        of = f"/proc/{self.process.pid}/task/{self.process.pid}/children"
        return [int(pid) for pid in Path(of).read_text().split()]


class Ended(NamedTuple):
    """A finished run: its corpus folder, the first files in it, its exit status and output."""

    corpus: Path
    found: dict[str, str]
    status: int
    output: str


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder that the workers of this test run share, with the results of runs."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base) / "fuzzing"
    folder.mkdir(exist_ok=True)
    return folder


def once(folder: Path, name: str, run) -> Ended:
    """The result of a run that one worker starts and the others wait for."""
    with (folder / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        result = folder / f"{name}.result"
        if not result.exists():
            found, status, output = run(folder)
            result.write_text(json.dumps([found, status, output]))
        return Ended(folder / "corpus", *json.loads(result.read_text()))


def killed_and_interrupted(folder: Path):
    """Runs, kills the worker after its first finding, and interrupts the next worker."""
    run = Run(folder, "--fa-minutes=10", "-n1")
    try:
        run.wait_for(lambda: [*run.corpus.glob("*.json")])
        found = {path.name: path.read_text() for path in run.corpus.glob("*.json")}
        os.kill(run.workers()[0], signal.SIGKILL)
        # The next worker has a finding too.
        run.wait_for(
            lambda: "failed: test_claim[G1-float64" in run.said().partition("replacing")[2]
        )
        run.process.send_signal(signal.SIGINT)
        return found, *run.ended()
    finally:
        run.process.kill()
        run.process.wait()


def run_again(folder: Path):
    """Runs for a few seconds, beside files that are no corpus entries."""
    corpus = folder / "corpus"
    (corpus / "damaged.json").write_text('{"problem": ')
    foreign = {"problem": {"version": 1, "mask": {"type": "MaskOfAnotherProject"}}}
    (corpus / "foreign.json").write_text(json.dumps(foreign))
    found = {path.name: path.read_text() for path in corpus.glob("attention-*.json")}
    return found, *Run(folder, "--fa-minutes=0.05", "-n1").ended()


@pytest.fixture(scope="module")
def first(folder):
    """A run whose worker is killed, and which is interrupted."""
    return once(folder, "first", killed_and_interrupted)


@pytest.fixture(scope="module")
def second(first, folder):
    """A run after the first one."""
    return once(folder, "second", run_again)


def test_a_find_is_on_disk_before_anything_is_reported(first):
    assert first.found
    for text in first.found.values():
        assert json.loads(text)["problem"]["N"] > 20


def test_a_find_survives_the_death_of_its_worker(first):
    assert {*first.found} <= {path.name for path in first.corpus.iterdir()}


def test_a_killed_worker_is_reported_and_replaced(first):
    at_once = first.output.partition("= FAILURES =")[0]
    assert re.search(
        r"^failed: test_claim\[G1-float64\S+\n  died of signal 9 \(Killed\)", at_once, re.MULTILINE
    )
    assert "replacing crashed worker gw0" in first.output


@pytest.fixture
def entries(first):
    """The corpus entries of the first run, by their files."""
    return {path: CorpusEntry.read(path) for path in first.corpus.glob("attention-*.json")}


def test_corpus_entries_are_of_one_cause_each(entries):
    causes = [entry.cause for entry in entries.values()]
    assert len({*causes}) == len(causes)
    assert {(cause.guarantee, cause.output) for cause in causes} == {("G1", "out")}


def test_a_search_that_came_to_its_end_has_a_minimal_problem(entries):
    # The search of the killed worker may have stopped early.
    assert 21 in {entry.problem.N for entry in entries.values()}


def test_an_interrupted_run_has_the_status_of_its_corpus(first):
    assert first.status == pytest.ExitCode.TESTS_FAILED
    assert "KeyboardInterrupt" not in first.output


def test_an_interrupted_run_sums_up(first, entries):
    assert "stopping: workers finish their current problem" in first.output
    assert re.search(r"\n[1-9]\d* distinct problems judged on all outputs", first.output)
    for path in entries:
        assert f"corpus: {os.path.relpath(path, ROOT)} (" in first.output


def test_a_run_says_how_it_goes(first):
    line = r"\n\d:\d\d of 10:00: \d+ problems, [\d.]+/s; worst error/bound [\d.e+]+; \d corpus entr"
    assert re.search(line, first.output)


def test_the_next_run_replays_the_corpus_first_and_says_so_at_once(second):
    failed = re.findall(r"^failed: (\w+)\[(.*)\]$", second.output, re.MULTILINE)
    replayed = sorted(name for test, name in failed if test == "test_regression")
    assert replayed == sorted([*(name.removesuffix(".json") for name in second.found), "damaged"])
    assert {test for test, _ in failed[: len(replayed)]} == {"test_regression"}
    assert second.status == pytest.ExitCode.TESTS_FAILED


def test_a_damaged_file_fails_its_own_test_by_name(second):
    assert f"{second.corpus / 'damaged.json'}: Expecting value" in second.output


def test_a_mask_that_is_not_registered_is_reported_as_not_replayable(second):
    assert "mask type 'MaskOfAnotherProject' is not replayable" in second.output


def test_unsupported_problems_are_not_kept(second):
    names = {path.stem for path in FOLDER.glob("*.json")}
    failed = re.findall(r"^failed: test_regression\[(.*)\]$", second.output, re.MULTILINE)
    assert names.isdisjoint(failed)
