"""The hooks that set up a run and select its tests, and its fixtures.

``plugin`` loads this module if an option of the suite is given. The conftest.py of a checkout
always does.
"""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fa_verify.pytest_plugin.environment import (  # isort: skip  # before torch
    HAS_TRITON,
    ON_GPU,
    WITHOUT_TRITON,
)

import hypothesis
import pytest
import torch

from fa_verify.adapters.registry import kernel_table
from fa_verify.breadth import choose_breadth
from fa_verify.oracles.call import Call
from fa_verify.oracles.calls.codec import call_from_json
from fa_verify.oracles.renamed import SPELLINGS
from fa_verify.properties.running import replay_line, workers
from fa_verify.properties.running.large_memory import (
    large_memory,
    larger_than_the_machine,
    leaves_room,
    limit_memory,
    spare_memory,
)
from fa_verify.properties.running.tally import Tally
from fa_verify.properties.running.watchdog import Watchdog
from fa_verify.pytest_plugin import profiles
from fa_verify.pytest_plugin.causes.plugin import Causes
from fa_verify.pytest_plugin.crash_reports import CrashReports
from fa_verify.pytest_plugin.example_database import example_database
from fa_verify.pytest_plugin.fuzz.plugin import Fuzzing, choose_workers, minutes_of
from fa_verify.pytest_plugin.options import number_of
from fa_verify.pytest_plugin.outside_programs import OutsidePrograms
from fa_verify.pytest_plugin.progress import Progress
from fa_verify.pytest_plugin.regression_files import RegressionFiles
from fa_verify.pytest_plugin.summary import REPLAY, Summary
from fa_verify.reporting.gate.plugin import Gate
from fa_verify.reporting.recording import Recording
from fa_verify.reporting.sarif import Sarif
from fa_verify.reporting.waivers import Waivers
from fa_verify.session import (
    CONFORMANCE,
    device_of,
    in_checkout,
    is_ours,
    mask_of,
    paths_of,
    select,
    subject_of,
)

__all__ = [
    "device",
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

pytest_plugins = ["fa_verify.pytest_plugin.plugin", "fa_verify.pytest_plugin.wrong_usage"]

# Seconds for one test, for a hang outside of a problem. The watchdog limits each problem, and
# compilation in it, which may take 600 s.
TIMEOUT = 900.0
# Warnings of the suite are errors. Those of a kernel are not: a warning is not a wrong result.
WARNINGS = (
    "default",
    r"error:::fa_verify\.",
    # torch 2.11 warns so of its own modules, as torch.compile and forward mode import them.
    "ignore:.torch.jit.script(_method)?. is deprecated:DeprecationWarning",
    # NumPy inside the Triton interpreter: exp2 overflows in lanes that a select then discards.
    "ignore::RuntimeWarning:triton.runtime.interpreter",
)
QUICK = "test_quick"
# The test files that --fa-mask runs.
OF_MASKS = (
    "test_replay", "test_masks", "test_combinations", "test_claims", "test_accuracy", "test_memory"
)  # fmt: skip


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> int | None:
    """Handle --fa-list-kernels, and apply the settings that --fa-minutes implies."""
    if config.getoption("--fa-list-kernels"):
        print("\n".join(kernel_table()))
        return 0
    choose_workers(config)
    return None


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Check the options before anything runs, and register the plugins of the suite."""
    for old, new in SPELLINGS["options"].items():
        if config.getoption(old, None) is not None:
            raise pytest.UsageError(f"{old} is now called {new}")
    profile = config.getoption("--hypothesis-profile")
    if profile is not None and profile not in profiles.PROFILES:
        raise pytest.UsageError(
            f"--hypothesis-profile is {profile!r}; needs one of {', '.join(profiles.PROFILES)}"
        )
    config.addinivalue_line("markers", "shards(start, step, float64): the shards that a test runs")
    config.addinivalue_line("markers", "asks(guarantee): the guarantee that a test asks for")
    if not in_checkout(config):
        _set_up_elsewhere(config)
    _choose_replay_line(config)
    _gpu_memory(config)
    # Loaded first: the problem of --fa-replay may use this mask.
    mask = mask_of(config)
    if profile is None:
        # Again, because a conftest.py may have loaded a profile of its own.
        hypothesis.settings.load_profile("gate" if mask is None else "mask")
    if mask is not None:
        select(config, *OF_MASKS)
    text = config.getoption("--fa-replay")
    if config.getoption("--fa-quick"):
        others = ("--fa-mask", "--fa-replay", "--fa-minutes")
        beside = [x for x in others if config.getoption(x) is not None]
        if beside:
            raise pytest.UsageError(
                f"--fa-quick has problems of its own; needs to be without {beside[0]}"
            )
        # The last three are for subjects of merges and caches alone, and left out for others.
        select(
            config, "test_replay", QUICK, "test_combinations", "test_merging", "test_caches",
            "test_quantised",
        )  # fmt: skip
    if text is not None:
        try:
            config.stash[REPLAY] = call_from_json(text)
            on_cpu = not ON_GPU or (subject_of(config) and device_of(config) == "cpu")
            if on_cpu and (too_large := larger_than_the_machine(config.stash[REPLAY])):
                raise ValueError(too_large)
        except ValueError as error:
            raise pytest.UsageError(f"--fa-replay: {error}") from None
        select(config, "test_replay")
    chosen = text is not None or mask is not None or config.getoption("--fa-quick")
    if not is_ours(config) and not chosen:
        _select_conformance(config)
    database = example_database(config, profiles.PARENT.database)
    fuzz = dict(profiles.PROFILES["fuzz"], database=database)
    summary = Summary()
    config.pluginmanager.register(summary, "summary")
    files = RegressionFiles(config)
    config.pluginmanager.register(files, "regression-files")
    config.pluginmanager.register(OutsidePrograms(), "outside-programs")
    if not is_ours(config) or (not HAS_TRITON and _verifies(config)):
        _load_subject(config)
    choose_breadth(config)
    if minutes_of(config) is not None:
        fuzz["max_examples"] = profiles.EXAMPLES_OF_A_TURN
        config.pluginmanager.register(Fuzzing(config, summary.tally, files.folder), "fuzzing")
    profiles.register(fuzz=fuzz)
    config.pluginmanager.register(CrashReports(config), "crash-reports")
    config.pluginmanager.register(Causes(config), "causes")
    if config.getoption("--fa-waive"):
        config.pluginmanager.register(Waivers(config), "waivers")
    if config.getoption("--fa-findings"):
        config.pluginmanager.register(
            Recording(config, subject_of(config), summary.tally), "findings"
        )
    if config.getoption("--fa-sarif"):
        config.pluginmanager.register(Sarif(config), "sarif")
    if _shows_progress(config):
        config.pluginmanager.register(Progress(config), "progress")
    # Registered before the gate, so that its pytest_sessionfinish ends after the gate's.
    if config.getoption("--fa-report") is not None:
        from fa_verify.reporting.html.plugin import RunReport

        config.pluginmanager.register(RunReport(config, summary.tally), "report")
    config.pluginmanager.register(Gate(config), "gate")
    # No timeout for a test: the watchdog limits the time of each problem.
    if profile == "fuzz":
        config.option.timeout = 0


def _load_subject(config: pytest.Config) -> None:
    """Load the kernel, so that an error ends the run before its tests.

    Raises:
        pytest.UsageError: It cannot be loaded.
    """
    try:
        subject_of(config)
    except pytest.UsageError as error:
        if WITHOUT_TRITON and "triton" in str(error).lower():
            raise pytest.UsageError(f"{error}; {WITHOUT_TRITON}") from None
        raise


def _shows_progress(config: pytest.Config) -> bool:
    """Return whether the command fa-verify runs in this process, and shows no test by name."""
    by_command = config.rootpath == CONFORMANCE and not hasattr(config, "workerinput")
    # --fa-minutes has a line of progress of its own.
    return by_command and minutes_of(config) is None and config.option.verbose <= 0


def _choose_replay_line(config: pytest.Config) -> None:
    """Choose a command that replays a problem in the folder of this run."""
    # The command fa-verify makes this the root.
    form = replay_line.COMMAND if config.rootpath == CONFORMANCE else replay_line.PLUGIN
    more = ["forward-only"] if config.getoption("--fa-forward-only") else []
    assumed = config.getoption("--fa-assume")
    if assumed not in (None, "{}"):
        more.append(f"assume={shlex.quote(assumed)}")
    replay_line.set_form(form, more)


def _set_up_elsewhere(config: pytest.Config) -> None:
    """Set the timeout and the warnings that the pyproject.toml of a checkout sets for its runs."""
    if getattr(config.option, "timeout", TIMEOUT) is None:
        config.option.timeout = TIMEOUT
    for line in WARNINGS:
        config.addinivalue_line("filterwarnings", line)


def _select_conformance(config: pytest.Config) -> None:
    """Run the conformance tests where the command line names no tests.

    Raises:
        pytest.UsageError: It names other tests only.
    """
    if config.args_source is not pytest.Config.ArgsSource.ARGS:
        select(config)
    elif not _verifies(config):
        raise pytest.UsageError(
            f"--fa-kernel runs the tests of fa_verify.conformance; got {' '.join(config.args)}; "
            "needs --pyargs fa_verify.conformance, or no tests at all"
        )


def _verifies(config: pytest.Config) -> bool:
    """Return whether the command line selects any conformance test."""
    named = paths_of(config)
    return any(CONFORMANCE.is_relative_to(x) or x.is_relative_to(CONFORMANCE) for x in named)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Collect only the conformance tests with --fa-kernel, and those of --fa-quick with it."""
    path = collection_path.resolve()
    if path == CONFORMANCE / f"{QUICK}.py" and not config.getoption("--fa-quick"):
        return True
    if is_ours(config) or path in CONFORMANCE.parents:
        return None
    return None if path.is_relative_to(CONFORMANCE) else True


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """Return the number of workers for ``-n auto`` on a GPU."""
    return workers.num_workers(limit=_gpu_memory(config)) if ON_GPU else None


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
    device = device_of(pytestconfig)
    gib = _gpu_memory(pytestconfig)
    if device == "cuda" and gib is not None:
        try:
            limit_memory(gib, workers.sharing(os.environ))
        except ValueError as error:
            pytest.exit(f"--fa-gpu-memory is {error}", pytest.ExitCode.USAGE_ERROR)
    return device


def _gpu_memory(config: pytest.Config) -> float | None:
    """Return the option --fa-gpu-memory, in GiB."""
    return number_of(config, "gpu-memory", "GiB")


@pytest.fixture
def gpu_memory(device: str) -> Iterator[Callable[[int], None]]:
    """A function that reserves GiB of the GPU for the test, and skips the test if fewer are free.

    Until the test ends, no other worker of this GPU gets such memory. Tests that reserve none find
    half a GiB for each worker.
    """
    with contextlib.ExitStack() as stack:

        def reserve(gib: int) -> None:
            size = gib * 2**30
            if not leaves_room(size):
                pytest.skip(f"needs {gib} GiB of GPU memory; start fewer workers with -n")
            has_room = stack.enter_context(large_memory(device, size + spare_memory()))
            stack.callback(torch.cuda.empty_cache)
            if not has_room:
                pytest.skip(f"needs {gib} GiB of free GPU memory, and some for other workers")
            # PyTorch's cache must not hold the memory meanwhile. A small tensor in it that outlives
            # the test, such as a workspace of cuBLAS, would keep all of it.

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
def replayed(pytestconfig: pytest.Config) -> Call | None:
    """The problem of --fa-replay, or None."""
    return pytestconfig.stash.get(REPLAY, None)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown() -> Iterator[None]:
    """Empty PyTorch's cache if this worker holds more than its share of 1/16 of the GPU's memory.

    Memory that one process caches is not available to the other processes on the GPU, some of whose
    tests need half of it.
    """
    yield
    if ON_GPU and torch.cuda.is_initialized():
        total = torch.cuda.get_device_properties().total_memory
        if torch.cuda.memory_reserved() > total / 16 / workers.sharing(os.environ):
            torch.cuda.empty_cache()
