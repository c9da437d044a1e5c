"""The number of workers of a machine, and the GPU of each worker."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fa_verify.properties.running import workers
from fa_verify.properties.running.workers import (
    auto_workers,
    keep_to_one_thread,
    num_workers,
    pin,
    sharing,
    visible_gpus,
)

ROOT = Path(__file__).parents[4]
THREE = "GPU 0: A (UUID: GPU-a)\nGPU 1: A (UUID: b)\n  MIG 1g Device 0: (UUID: c)\nGPU 2: B"


@pytest.fixture
def machine(tmp_path):
    """Makes a machine's environment from nvidia-smi's output for -L and for memory in MiB."""

    def make(listed=None, memory="", rc=0, first=""):
        script = tmp_path / "nvidia-smi"
        if listed is not None:
            answers = f'case "$1" in -L) echo "{listed}";; *) echo "{memory}";; esac'
            script.write_text(
                f"#!/bin/sh\necho x >>{tmp_path}/calls\n{first}\n{answers}\nexit {rc}\n"
            )
            script.chmod(0o755)
        return {"PATH": str(tmp_path)}

    return make


@pytest.mark.parametrize(
    ("given", "gpus"),
    [
        ("", []),
        ("-1", []),
        ("0", ["0"]),
        ("3, 1", ["3", "1"]),
        ("2,-1,0", ["2"]),
        ("1,none,0", ["1"]),
        ("0,1,0", []),
        ("GPU-8d3c,GPU-77", ["GPU-8d3c", "GPU-77"]),
        ("MIG-5b,MIG-GPU-9/1/0", ["MIG-5b", "MIG-GPU-9/1/0"]),
    ],
)
def test_the_variable_names_the_gpus(machine, given, gpus):
    assert visible_gpus({**machine(THREE), "CUDA_VISIBLE_DEVICES": given}) == gpus


def test_nvidia_smi_counts_the_gpus_without_the_variable(machine):
    assert visible_gpus(machine(THREE)) == ["0", "1", "2"]


def test_without_nvidia_smi_there_is_no_gpu(machine):
    assert visible_gpus(machine()) == []


def test_a_failing_nvidia_smi_is_no_gpu(machine):
    assert visible_gpus(machine(THREE, rc=9)) == []


def test_a_hanging_nvidia_smi_is_no_gpu(machine, monkeypatch):
    monkeypatch.setattr(workers, "NVIDIA_SMI_SECONDS", 0.2)
    start = time.monotonic()
    assert visible_gpus(machine(THREE, first="exec /bin/sleep 20")) == []
    assert time.monotonic() - start < 10


@pytest.mark.parametrize(
    ("worker", "gpu"), [("gw0", "0"), ("gw2", "2"), ("gw3", "0"), ("gw11", "2")]
)
def test_workers_take_the_gpus_in_turn(machine, worker, gpu):
    environ = {**machine(THREE), "PYTEST_XDIST_WORKER": worker}
    pin(environ)
    assert environ["CUDA_VISIBLE_DEVICES"] == gpu


def test_workers_take_the_gpus_that_the_variable_names(machine):
    environ = {
        **machine(THREE),
        "CUDA_VISIBLE_DEVICES": "GPU-8d3c,5",
        "PYTEST_XDIST_WORKER": "gw0",
    }
    pin(environ)
    assert environ["CUDA_VISIBLE_DEVICES"] == "GPU-8d3c"


def test_pinning_twice_is_pinning_once(machine):
    environ = {**machine(THREE), "PYTEST_XDIST_WORKER": "gw4"}
    pin(environ)
    once = dict(environ)
    pin(environ)
    assert environ == once


@pytest.mark.parametrize("worker", ["gw0", "gw1"])
def test_a_run_inside_a_worker_stays_on_its_gpu(machine, worker):
    environ = {**machine(THREE), "PYTEST_XDIST_WORKER": "gw4"}
    pin(environ)
    inner = {**environ, "PYTEST_XDIST_WORKER": worker}
    pin(inner)
    assert inner["CUDA_VISIBLE_DEVICES"] == "1"


def test_gpus_hidden_from_a_subprocess_stay_hidden(machine):
    environ = {**machine(THREE), "PYTEST_XDIST_WORKER": "gw4"}
    pin(environ)
    environ["CUDA_VISIBLE_DEVICES"] = ""
    pin(environ)
    assert environ["CUDA_VISIBLE_DEVICES"] == ""


@pytest.mark.parametrize("listed", [None, "GPU 0: A (UUID: GPU-a)"], ids=["none", "one"])
def test_there_is_nothing_to_choose_with_less_than_two_gpus(machine, listed):
    environ = {**machine(listed), "PYTEST_XDIST_WORKER": "gw1"}
    pin(environ)
    assert "CUDA_VISIBLE_DEVICES" not in environ


@pytest.mark.parametrize("worker", [None, "master", "popen-1"])
def test_only_workers_are_pinned(machine, worker):
    environ = {**machine(THREE), **({"PYTEST_XDIST_WORKER": worker} if worker else {})}
    pin(environ)
    assert "CUDA_VISIBLE_DEVICES" not in environ


@pytest.mark.parametrize("listed", [THREE, "No devices found"])
def test_a_run_asks_nvidia_smi_once(machine, tmp_path, listed):
    controller = machine(listed)
    pin(controller)
    for k in range(3):
        pin({**controller, "PYTEST_XDIST_WORKER": f"gw{k}"})
    assert (tmp_path / "calls").read_text() == "x\n"


@pytest.mark.parametrize(
    ("cpus", "gpus", "gib", "count"),
    [
        (64, 1, 80.0, 16),
        (12, 1, 80.0, 12),
        (128, 4, 80.0, 64),
        (64, 1, 23.9, 5),
        (64, 2, 8.0, 4),
        (64, 1, 2.0, 1),
        (64, 1, math.inf, 16),
        (3, 0, math.inf, 3),
        (0, 0, math.inf, 1),
    ],
)
def test_cpus_gpus_and_their_memory_bound_the_workers(cpus, gpus, gib, count):
    assert auto_workers(cpus, gpus, gib) == count


@pytest.mark.parametrize(
    ("count", "gpus", "share"),
    [("16", "0", 16), ("64", "0,1,2,3", 16), ("5", "0,1", 3), ("4", "", 4), (None, "0,1", 1)],
)
def test_workers_are_dealt_to_gpus_evenly(count, gpus, share):
    counted = {} if count is None else {"PYTEST_XDIST_WORKER_COUNT": count}
    assert sharing({**counted, workers.GPUS_OF_THE_RUN: gpus}) == share


@pytest.fixture
def cpus(monkeypatch):
    """A machine with 256 CPUs."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(256), raising=False)


@pytest.mark.usefixtures("cpus")
def test_the_smallest_gpu_bounds_the_workers(machine):
    assert num_workers(machine(THREE, memory="81559\n16384\n81559")) == 3 * 4


@pytest.mark.usefixtures("cpus")
def test_the_memory_that_they_may_take_bounds_the_workers(machine):
    assert num_workers(machine(THREE, memory="81559\n81559\n81559"), limit=20.0) == 3 * 5
    assert num_workers(machine(THREE, memory="16384\n16384\n16384"), limit=20.0) == 3 * 4


@pytest.mark.usefixtures("cpus")
def test_unknown_memory_does_not_bound_the_workers(machine):
    assert num_workers(machine(THREE, memory="[N/A]\n[N/A]\n[N/A]")) == 3 * 16


def test_xdist_chooses_where_there_is_no_gpu(machine):
    assert num_workers(machine()) is None


def test_xdists_own_variable_goes_first(machine):
    assert num_workers({**machine(THREE), "PYTEST_XDIST_AUTO_NUM_WORKERS": "2"}) is None


def test_choosing_a_gpu_does_not_import_torch():
    code = "import sys, fa_verify.properties.running.workers; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_a_number_of_threads_that_is_given_stays():
    environ = {"OMP_NUM_THREADS": "3"}
    keep_to_one_thread(environ)
    assert environ == {"OMP_NUM_THREADS": "3"}


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc")
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="needs two CPUs")
@pytest.mark.parametrize("worker", ["gw0", ""])
def test_a_process_of_a_run_has_one_thread_for_products(worker):
    code = (
        "import fa_verify.pytest_plugin.environment, pathlib, numpy, torch\n"
        "x = numpy.ones((999, 999)); x @ x\n"
        "names = [x.read_text().strip() for x in pathlib.Path('/proc/self/task').glob('*/comm')]\n"
        "print(torch.get_num_threads(), *names, sep='\\n')"
    )
    environ = {name: x for name, x in os.environ.items() if name != "OMP_NUM_THREADS"}
    # Without CUDA the interpreter is not needed, but its driver would start a thread.
    environ |= {"PYTEST_XDIST_WORKER": worker, "PYTHONPATH": ".", "CUDA_VISIBLE_DEVICES": ""}
    environ["TRITON_INTERPRET"] = "0"
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environ, capture_output=True, text=True
    )
    of_torch, *threads = run.stdout.splitlines()
    threads = [name for name in threads if not name.startswith("cuda")]
    assert (of_torch, len(threads)) == ("1", 1), f"{of_torch}, {threads}, {run.stderr}"
