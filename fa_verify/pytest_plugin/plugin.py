"""The plugin's entry point: the hooks that select the tests of a run, and its fixtures.

Load it from a conftest with ``pytest_plugins = ["fa_verify.pytest_plugin.plugin"]``.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fa_verify.pytest_plugin.environment import HAS_TRITON, ON_GPU  # isort: skip  # before torch

import hypothesis
import pytest
import torch

from fa_verify.oracles import renamed
from fa_verify.oracles.problem import Problem
from fa_verify.properties.execution import workers
from fa_verify.properties.execution.large_memory import large_memory
from fa_verify.properties.execution.tally import Tally
from fa_verify.properties.execution.watchdog import Watchdog
from fa_verify.pytest_plugin import options, profiles
from fa_verify.pytest_plugin.crash_reports import CrashReports
from fa_verify.pytest_plugin.example_database import example_database
from fa_verify.pytest_plugin.findings.recording import Recording
from fa_verify.pytest_plugin.fuzz.plugin import Fuzzing, choose_workers, minutes_of
from fa_verify.pytest_plugin.gate.plugin import Gate
from fa_verify.pytest_plugin.outside_programs import OutsidePrograms
from fa_verify.pytest_plugin.regression_files import RegressionFiles
from fa_verify.pytest_plugin.report.plugin import RunReport
from fa_verify.pytest_plugin.summary import REPLAY, Summary
from fa_verify.registry import kernel_table
from fa_verify.session import CONFORMANCE, device_of, is_ours, mask_of, subject_of

__all__ = [
    "device",
    "pytest_addoption",
    "pytest_cmdline_main",
    "pytest_configure",
    "pytest_ignore_collect",
    "pytest_runtest_teardown",
    "pytest_xdist_auto_num_workers",
    "pytest_xdist_make_scheduler",
    "replayed",
    "tally",
    "watchdog",
]

# Tests of the mutants that only a GPU can detect; present in a checkout only.
HARDWARE = CONFORMANCE.parent / "mutation" / "test_hardware.py"
# The test file that --quick runs.
QUICK = "test_quick.py"
# The test files that --mask runs.
OF_MASKS = tuple(
    f"test_{name}.py"
    for name in (
        "replay",
        "masks",
        "logic",
        "accuracy",
        "rows_and_padding",
        "memory",
        "invariance",
        "closed_form",
    )
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of the suite."""
    options.add_options(parser.getgroup("attention verification"))


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> int | None:
    """Handle --list-kernels, and apply the settings that --minutes implies."""
    if config.getoption("--list-kernels"):
        print("\n".join(kernel_table()))
        return 0
    choose_workers(config, CONFORMANCE)
    return None


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Check the options before anything runs, and register the plugins of the suite."""
    for old, new in renamed.OPTIONS.items():
        if config.getoption(old) is not None:
            raise pytest.UsageError(f"{old} is now called {new}")
    profile = config.getoption("--hypothesis-profile")
    if profile is not None and profile not in profiles.PROFILES:
        raise pytest.UsageError(
            f"--hypothesis-profile is {profile!r}; needs one of {', '.join(profiles.PROFILES)}"
        )
    config.addinivalue_line("markers", "shards(start, step, float64): the shards that a test runs")
    # Loaded first: the problem of --replay may use this mask.
    mask = mask_of(config)
    if mask is not None:
        if profile is None:
            hypothesis.settings.load_profile("mask")
        config.args[:] = [str(CONFORMANCE / name) for name in OF_MASKS]
    text = config.getoption("--replay")
    if config.getoption("--quick"):
        beside = [x for x in ("--mask", "--replay", "--minutes") if config.getoption(x) is not None]
        if beside:
            raise pytest.UsageError(
                f"--quick has problems of its own; needs to be without {beside[0]}"
            )
        config.args[:] = [str(CONFORMANCE / "test_replay.py"), str(CONFORMANCE / QUICK)]
    if text is not None:
        try:
            config.stash[REPLAY] = Problem.from_json(text)
        except ValueError as error:
            raise pytest.UsageError(f"--replay: {error}") from None
        config.args[:] = [str(CONFORMANCE / "test_replay.py")]
    if config.getoption("--mutation"):
        if not ON_GPU:
            raise pytest.UsageError(
                "--mutation needs a GPU, and none is visible; make mutation runs without one"
            )
        config.args[:] = [str(HARDWARE)]
    database = example_database(config, profiles.PARENT.database)
    fuzz = dict(profiles.PROFILES["fuzz"], database=database)
    summary = Summary()
    config.pluginmanager.register(summary, "summary")
    files = RegressionFiles(config)
    config.pluginmanager.register(files, "regression-files")
    config.pluginmanager.register(OutsidePrograms(), "outside-programs")
    if not is_ours(config) or (not HAS_TRITON and _verifies(config)):
        subject_of(config)
    if minutes_of(config) is not None:
        fuzz["max_examples"] = profiles.EXAMPLES_OF_A_TURN
        config.pluginmanager.register(Fuzzing(config, summary.tally, files.folder), "fuzzing")
    profiles.register(fuzz=fuzz)
    config.pluginmanager.register(CrashReports(config), "crash-reports")
    if config.getoption("--findings"):
        config.pluginmanager.register(
            Recording(config, subject_of(config), summary.tally), "findings"
        )
    # Registered before the gate, so that its pytest_sessionfinish ends after the gate's.
    config.pluginmanager.register(RunReport(config, summary.tally), "report")
    config.pluginmanager.register(Gate(config), "gate")
    # No timeout for a test: the watchdog limits the time of each problem.
    if profile == "fuzz":
        config.option.timeout = 0


def _verifies(config: pytest.Config) -> bool:
    """Return whether the command line selects any conformance test."""
    named = [Path(argument.partition("::")[0]).resolve() for argument in config.args]
    return any(CONFORMANCE.is_relative_to(x) or x.is_relative_to(CONFORMANCE) for x in named)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Collect only the conformance tests with --kernel, and those of --quick only with it."""
    if collection_path == CONFORMANCE / QUICK and not config.getoption("--quick"):
        return True
    if is_ours(config) or collection_path in CONFORMANCE.parents:
        return None
    return None if collection_path.is_relative_to(CONFORMANCE) else True


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int | None:
    """Return the number of workers for ``-n auto`` on a GPU."""
    return workers.num_workers() if ON_GPU else None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Schedule tests with ``Dealing``, unless options choose how xdist schedules them."""
    if config.option.dist != "load" or config.option.maxschedchunk is not None:
        return None
    from fa_verify.pytest_plugin.dealing import Dealing

    return Dealing(config, log)


@pytest.fixture(scope="session")
def device(pytestconfig: pytest.Config) -> str:
    """The device that the subject runs on, "cuda" or "cpu"."""
    return device_of(pytestconfig)


@pytest.fixture
def gpu_memory(device: str) -> Iterator[Callable[[int], None]]:
    """A function that reserves GiB of the GPU for the test, and skips the test if fewer are free.

    One worker at a time has such memory. The GPU's memory that the test no longer uses is freed.
    """
    with contextlib.ExitStack() as stack:

        def reserve(gib: int) -> None:
            stack.enter_context(large_memory(device))
            stack.callback(torch.cuda.empty_cache)
            if torch.cuda.mem_get_info()[0] < gib * 2**30:
                pytest.skip(f"needs {gib} GiB of free GPU memory")

        yield reserve


@pytest.fixture(scope="session")
def tally(pytestconfig: pytest.Config) -> Tally:
    """The tally of the problems that this process has judged."""
    return pytestconfig.pluginmanager.get_plugin("summary").tally


@pytest.fixture(scope="session")
def watchdog(pytestconfig: pytest.Config) -> Watchdog:
    """The watchdog, which records the current problem and ends the process if it takes too long."""
    return pytestconfig.pluginmanager.get_plugin("crash-reports").watchdog


@pytest.fixture(scope="session")
def replayed(pytestconfig: pytest.Config) -> Problem | None:
    """The problem of --replay, or None."""
    return pytestconfig.stash.get(REPLAY, None)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown() -> Iterator[None]:
    """Empty PyTorch's cache if this worker holds more than its share of half of the GPU's memory.

    Memory that one process caches is not available to the other processes on the GPU.
    """
    yield
    if ON_GPU and torch.cuda.is_initialized():
        total = torch.cuda.get_device_properties().total_memory
        if torch.cuda.memory_reserved() > total / 2 / workers.sharing(os.environ):
            torch.cuda.empty_cache()
