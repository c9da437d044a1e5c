"""Gate runs: comparisons, alarms, reports, errors, and --fa-update-baseline."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fa_verify.conformance_process import Status
from fa_verify.oracles.problem import Problem
from fa_verify.properties.regression.baseline import Baseline, Entry, Environment

ROOT = Path(__file__).parents[5]
# A user's file. It computes in float64 and declares so little that a gate run takes seconds.
KERNELS = """
import math
import torch


def attention(q, k, v, *, mask, sm_scale, cast=False):
    seen = mask.dense(*q.shape[:3], k.shape[2])
    scores = torch.where(seen, q.double() @ k.double().mT * sm_scale, -math.inf)
    top = scores.detach().amax(3, keepdim=True)
    e = torch.exp(scores - top)
    p = torch.where(seen, e / e.sum(3, keepdim=True), 0.0)
    if cast:
        p = p + (p.to(q.dtype).double() - p).detach()
    return (p @ v.double()).to(q.dtype)


def coarse(q, k, v, *, mask, sm_scale):
    # What a kernel may do, and this one did not: P is rounded before its product with v.
    return attention(q, k, v, mask=mask, sm_scale=sm_scale, cast=True)


def narrow(q, k, v, *, mask, sm_scale):
    return attention(q, k, v, mask=mask, sm_scale=sm_scale)


for _each in (attention, coarse, narrow):
    _each.dtypes = ("fp16", "bf16")
    _each.head_dims = (16,)
    _each.max_seqlen = 40
    _each.masks = ("causal",)
    _each.m_ne_n = _each.gqa = _each.dv_ne_d = _each.zero_sizes = False
    _each.block_n = 64
narrow.dtypes = ("fp16",)
"""
# Runs pytest on each of several lists of arguments and prints the exit codes.
RUNS = """
import json, sys
sys.modules["triton"] = None
import pytest
for arguments in json.loads(sys.argv[1]):
    code = int(pytest.main(["-p", "no:cacheprovider", *arguments]))
    for stream in (sys.stdout, sys.stderr):
        print(f"\\n<exit code {code}>", file=stream, flush=True)
"""


def environment() -> dict[str, str]:
    """The environment of a process without a GPU and without this run's workers and options."""
    inherited = {key: x for key, x in os.environ.items() if not key.startswith("PYTEST_")}
    return inherited | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


def runs(*lists: list[str]) -> list[tuple[str, int]]:
    """(output, exit code) of pytest for each list of arguments, without Triton and a GPU."""
    done = subprocess.run(
        [sys.executable, "-c", RUNS, json.dumps(lists)],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=240,
    )
    said = [re.split(r"<exit code (\d+)>\n", x) for x in (done.stdout, done.stderr)]
    out, err = said
    return [(out[i] + err[i], int(out[i + 1])) for i in range(0, 2 * len(lists), 2)]


HERE = Environment("elsewhere", "1.0", "none")


def refused(folder) -> dict[str, str]:
    """Refused options and the error that each gets."""
    return {
        f"--fa-baseline={folder}/none.json": (
            f"--fa-baseline: {folder}/none.json cannot be read: No such file or directory; "
            "--fa-update-baseline creates it"
        ),
        f"--fa-baseline={folder}/damaged.json": f"{folder}/damaged.json is damaged: ",
        f"--fa-baseline={folder}/elsewhere.json": (
            f"--fa-baseline: {folder}/elsewhere.json differs from this run: "
            "device elsewhere, here CPU ("
        ),
        f"--fa-baseline={folder}/elsewhere.json --fa-update-baseline": "needs a file of this",
        f"--fa-baseline={folder}/damaged.json --fa-update-baseline": "is damaged: ",
        "--fa-update-baseline": "--fa-update-baseline needs --fa-baseline=FILE, the file to write",
        f'--fa-baseline={folder}/none.json --fa-replay={{"version":1}}': (
            "--fa-baseline and --fa-replay exclude each other: pass one of them"
        ),
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gate")
    (folder / "kernels.py").write_text(KERNELS)
    Baseline("attention", HERE, (Entry(Problem(), "G1", "fp32"),)).write(folder / "elsewhere.json")
    (folder / "damaged.json").write_text('{"version": 1,')
    return folder


@pytest.fixture(scope="module")
def told(folder):
    """(output, exit code) of the runs by name; the first run writes the baseline."""

    def of(kernel: str) -> list[str]:
        return [f"--fa-kernel={folder}/kernels.py:{kernel}", f"--fa-baseline={folder}/base.json"]

    lists = {
        "written": [*of("attention"), "--fa-update-baseline"],
        "the same": of("attention"),
        "coarse": of("coarse"),
        "narrow": of("narrow"),
        "a part": [*of("attention"), "-kcausal"],
        "a part, written": [*of("attention"), "-kcausal", "--fa-update-baseline"],
        "listed": [*of("attention"), "--collect-only", "-q"],
    }  # fmt: skip
    kernel, _ = of("attention")
    lists |= {options: [kernel, *options.split()] for options in refused(folder)}
    return dict(zip(lists, runs(*lists.values()), strict=True))


def verdict(said: str) -> str:
    return re.search(r"\nbaseline \S+: (.*)", said)[1]


def test_a_baseline_is_written_with_what_was_measured(told, folder):
    said, code = told["written"]
    assert code == 0, said
    written = Baseline.read(folder / "base.json")
    assert verdict(said) == f"written: {len(written.entries)} problems, 0 kernels, 0 timed passes"
    assert {entry.arithmetic for entry in written.entries} == {"fp16", "bf16"}
    assert all(set(entry.errors) == {"out", "dq", "dk", "dv"} for entry in written.entries)
    assert written.environment.triton == "none"


def test_the_same_kernel_raises_no_alarm(told, folder):
    said, code = told["the same"]
    count = len(Baseline.read(folder / "base.json").entries)
    assert code == 0, said
    assert verdict(said) == f"{count} problems compared, no alarm, 0 changes"
    assert f"{count} passed" in said


def test_a_kernel_that_errs_more_within_the_bound_fails_the_run_and_no_test(told):
    said, code = told["coarse"]
    assert code == pytest.ExitCode.TESTS_FAILED, said
    assert re.search(r"ALARM rms: out fp16: \+\d+\.\d\d % \[\+.*\] over \d+ problems", said)
    assert " failed in" not in said
    assert verdict(said).endswith("alarms: failed")


def test_a_dtype_that_is_no_longer_supported_is_an_alarm_with_the_reason(told):
    said, code = told["narrow"]
    assert code == pytest.ExitCode.TESTS_FAILED
    assert "ALARM coverage: dtype bf16 is no longer covered: none of its" in said
    assert re.search(
        r"ALARM coverage: \d+ problems were judged in the baseline, not now: narrow declares", said
    )


def test_a_part_of_the_problems_is_no_gate(told):
    said, code = told["a part"]
    assert code == pytest.ExitCode.TESTS_FAILED
    assert re.search(
        r"ALARM coverage: \d+ problems were judged in the baseline, not now: it did not run ", said
    )


def test_a_part_of_the_problems_is_not_written(told, folder):
    said, code = told["a part, written"]
    count = len(Baseline.read(folder / "base.json").entries)
    assert code == pytest.ExitCode.TESTS_FAILED
    absent = re.fullmatch(
        r"not written: a baseline needs a complete run that passes, and (\d+) problems did not run",
        verdict(said),
    )
    assert 0 < int(absent[1]) < count


def test_collecting_compares_nothing(told):
    said, code = told["listed"]
    assert code == Status.NOT_VERIFIED
    assert "tests/conformance/test_baseline.py::test_problem[fp16-causal-1]" in said
    assert "\nbaseline " not in said


def test_workers_measure_what_one_process_does(told, folder):
    # Workers import the installed Triton; a plain PyTorch kernel needs no interpreter.
    kernel = f"--fa-kernel={folder}/kernels.py:attention"
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-n2", kernel]
    command += [f"--fa-baseline={folder}/workers.json", "--fa-update-baseline"]
    command += [f"--fa-report={folder}/report"]
    environ = environment() | {"TRITON_INTERPRET": "0"}
    done = subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
    alone = Baseline.read(folder / "base.json").entries
    assert Baseline.read(folder / "workers.json").entries == alone
    report = json.loads((folder / "report" / "report.json").read_text())
    assert report["baseline"]["verdict"] == verdict(done.stdout)
    assert report["results"] == {"passed": len(alone)}


def test_incomparable_baselines_are_refused_in_a_line_before_anything_runs(told, folder):
    for options, says in refused(folder).items():
        text, code = told[options]
        assert code == 2
        assert says in text
        assert text.strip().startswith("ERROR: --")
        assert len(text.strip().splitlines()) == 1
    assert json.loads((folder / "elsewhere.json").read_text())["device"] == "elsewhere"


def test_other_versions_are_refused_until_the_baseline_is_updated(told, folder):
    path = folder / "old.json"
    here = Baseline.read(folder / "base.json")
    old = Environment(here.environment.device, "1.0", "none")
    Baseline("attention", old, here.entries[:3]).write(path)
    options = [f"--fa-kernel={folder}/kernels.py:attention", f"--fa-baseline={path}"]
    (refused, code), (updated, fine) = runs(options, [*options, "--fa-update-baseline"])
    assert code == 2
    assert f"{path} differs from this run: torch 1.0, here {here.environment.torch}; " in refused
    assert fine == 0, updated
    # Entries of the old baseline come first and are unchanged.
    assert Baseline.read(path).entries[:3] == here.entries[:3]
    assert Baseline.read(path).environment == here.environment
