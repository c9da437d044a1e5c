"""Options, profiles, device choice, header and summary of every run."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import platform
import sys
from collections.abc import Iterator
from pathlib import Path

from fa_verify.properties.execution import workers

# Before torch, NumPy and Triton are imported: a worker of several keeps to one GPU, and to one
# thread; kernels run on the GPU if there is one, else in the interpreter. The fusion of multiply
# and add is pinned, because Triton's default for it changes between versions.
workers.pin(os.environ)
if os.environ.get("PYTEST_XDIST_WORKER"):
    workers.keep_to_one_thread(os.environ)
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import hypothesis
import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
HAS_TRITON = importlib.util.find_spec("triton") is not None
INTERPRETED = HAS_TRITON and os.environ.get("TRITON_INTERPRET") == "1"

if INTERPRETED:
    from fa_verify.simulator.interpreter import repair

    repair.repair()

from fa_verify.oracles import renamed
from fa_verify.oracles.problem import Problem
from fa_verify.properties.execution.tally import Tally
from fa_verify.properties.execution.watchdog import Watchdog
from fa_verify.pytest_plugin.crash_reports import DEFAULT_SECONDS, CrashReports
from fa_verify.pytest_plugin.example_database import example_database, without_passwords
from fa_verify.pytest_plugin.findings.recording import Recording
from fa_verify.pytest_plugin.fuzz.plugin import Fuzzing, choose_workers, minutes_of
from fa_verify.pytest_plugin.gate import plugin as gate
from fa_verify.pytest_plugin.outside_programs import OutsidePrograms
from fa_verify.pytest_plugin.regression_files import RegressionFiles
from fa_verify.pytest_plugin.report import plugin as reporting
from fa_verify.registry import kernel_table
from fa_verify.session import device_of, is_ours, mask_of, subject_of

CONFORMANCE = Path(__file__).parent / "tests" / "conformance"
HARDWARE = Path(__file__).parent / "tests" / "mutation" / "test_hardware.py"
# What --mask runs.
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
REPLAY = pytest.StashKey[Problem]()

# Examples a test and shard; a GPU judges about twenty times as many problems a second.
ON_GPU = torch.cuda.is_available() and not INTERPRETED
EXAMPLES = 60 if ON_GPU else 6
_ALWAYS = {
    "deadline": None,
    "suppress_health_check": list(hypothesis.HealthCheck),
    "print_blob": False,
    # Explaining traces every line of the interpreter, and searching on for other bugs spends the
    # time that shrinking the first one needs.
    "report_multiple_bugs": False,
    "phases": [phase for phase in hypothesis.Phase if phase is not hypothesis.Phase.explain],
}
# Two that draw the same in every run, and one that remembers what it found and draws anew.
PROFILES = {
    "gate": {"max_examples": EXAMPLES, "derandomize": True, "database": None},
    "dev": {"max_examples": EXAMPLES // 3, "derandomize": True, "database": None},
    "fuzz": {"max_examples": 50 * EXAMPLES},
    # For a mask that is being written: in under a minute.
    "mask": {"max_examples": EXAMPLES // 2, "derandomize": True, "database": None},
}
# With --minutes tests take turns: of each that many examples, then the next.
EXAMPLES_OF_A_TURN = 3 * EXAMPLES
# Not those of Hypothesis where CI is set: they would draw the same in every run.
_PARENT = hypothesis.settings.get_profile("default")
for _name, _settings in PROFILES.items():
    hypothesis.settings.register_profile(_name, _PARENT, **_settings, **_ALWAYS)
hypothesis.settings.load_profile("gate")

_TALLY = Tally()
_COMPILED = [0]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of the suite."""
    group = parser.getgroup("attention verification")
    group.addoption(
        "--kernel",
        metavar="KERNEL",
        help="verify this callable f(q, k, v, *, mask, sm_scale), or f(q, k, v, causal, sm_scale), "
        "path/to/file.py:name, package.module:name or a name of --list-kernels, in place of the "
        "project's own kernels",
    )
    group.addoption(
        "--list-kernels",
        action="store_true",
        help="print the names that --kernel knows, and which of them can run here",
    )
    group.addoption(
        "--findings",
        metavar="FILE",
        help="write the outcome of every test and all findings to this file, JSON by line",
    )
    group.addoption(
        "--mask",
        metavar="FILE:CLASS",
        help="verify kernels on this class of masks, a subclass of "
        "fa_verify.oracles.masks.mask.Mask: path/to/file.py:Class or package.module:Class",
    )
    group.addoption(
        "--replay",
        metavar="JSON",
        help="run every guarantee on one problem: the JSON of a failure message",
    )
    group.addoption(
        "--mutation",
        action="store_true",
        help="see that mutants which only a GPU shows are noticed on this one",
    )
    group.addoption(
        "--minutes",
        metavar="NUMBER",
        help="draw new problems for so long, on all workers, and keep those that fail",
    )
    group.addoption(
        "--corpus",
        metavar="FOLDER",
        help="folder of problems that failed: replayed first, and --minutes adds to them "
        "(default: tests/regressions)",
    )
    group.addoption(
        "--example-db",
        metavar="URL",
        help="share Hypothesis's examples with other machines: redis://host:port[/number], "
        "rediss:// or unix://; in the profile fuzz",
    )
    group.addoption(
        "--problem-timeout",
        metavar="SECONDS",
        default=DEFAULT_SECONDS,
        help="end a process that takes longer for one problem, and report it (default: 60)",
    )
    for old in renamed.OPTIONS:
        group.addoption(old, help=argparse.SUPPRESS)
    gate.add_options(group)
    reporting.add_options(group)


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> int | None:
    """--list-kernels prints its table in place of a run; what --minutes implies."""
    if config.getoption("--list-kernels"):
        print("\n".join(kernel_table()))
        return 0
    choose_workers(config, CONFORMANCE)
    return None


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Checks the options before anything runs, and registers the crash reports."""
    for old, new in renamed.OPTIONS.items():
        if config.getoption(old) is not None:
            raise pytest.UsageError(f"{old} is called {new}")
    profile = config.getoption("--hypothesis-profile")
    if profile is not None and profile not in PROFILES:
        raise pytest.UsageError(
            f"--hypothesis-profile is {profile!r}; needs one of {', '.join(PROFILES)}"
        )
    config.addinivalue_line("markers", "shards(start, step, float64): the shards that a test runs")
    # Before a problem is read that may be about it.
    mask = mask_of(config)
    if mask is not None:
        if profile is None:
            hypothesis.settings.load_profile("mask")
        config.args[:] = [str(CONFORMANCE / name) for name in OF_MASKS]
    text = config.getoption("--replay")
    if text is not None:
        try:
            config.stash[REPLAY] = Problem.from_json(text)
        except ValueError as error:
            raise pytest.UsageError(f"--replay: {error}") from None
        config.args[:] = [str(CONFORMANCE / "test_replay.py")]
    if config.getoption("--mutation"):
        if not ON_GPU:
            raise pytest.UsageError(
                "--mutation is about a GPU, and none is visible here; make mutation needs none"
            )
        config.args[:] = [str(HARDWARE)]
    fuzz = dict(PROFILES["fuzz"], database=example_database(config, _PARENT.database))
    files = RegressionFiles(config)
    config.pluginmanager.register(files, "regression-files")
    config.pluginmanager.register(OutsidePrograms(), "outside-programs")
    if not is_ours(config) or (not HAS_TRITON and _verifies(config)):
        subject_of(config)
    if minutes_of(config) is not None:
        fuzz["max_examples"] = EXAMPLES_OF_A_TURN
        config.pluginmanager.register(Fuzzing(config, _TALLY, files.folder), "fuzzing")
    hypothesis.settings.register_profile("fuzz", _PARENT, **fuzz, **_ALWAYS)
    config.pluginmanager.register(CrashReports(config), "crash-reports")
    if config.getoption("--findings"):
        config.pluginmanager.register(Recording(config, subject_of(config), _TALLY), "findings")
    # Its end of the session comes after that of what it reports on.
    config.pluginmanager.register(reporting.RunReport(config, _TALLY), "report")
    config.pluginmanager.register(gate.Gate(config), "gate")
    # Conformance tests are long and come first: xdist would deal them to a few workers in blocks.
    if getattr(config.option, "maxschedchunk", 0) is None:
        config.option.maxschedchunk = 2
    # A subject that crashes in every test is still to be run to the end.
    if getattr(config.option, "maxworkerrestart", 0) is None:
        config.option.maxworkerrestart = "1000"
    # A test of this profile takes as long as it takes; each of its problems is watched.
    if profile == "fuzz":
        config.option.timeout = 0
    if HAS_TRITON and not INTERPRETED:
        import triton

        triton.knobs.compilation.listener = _count_compilation


def _verifies(config: pytest.Config) -> bool:
    """Whether some of the conformance tests are among those that the command line names."""
    named = [Path(argument.partition("::")[0]).resolve() for argument in config.args]
    return any(CONFORMANCE.is_relative_to(x) or x.is_relative_to(CONFORMANCE) for x in named)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With --kernel, collects the conformance tests alone."""
    if is_ours(config) or collection_path in CONFORMANCE.parents:
        return None
    return None if collection_path.is_relative_to(CONFORMANCE) else True


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int | None:
    """-n auto where there are GPUs."""
    return workers.num_workers() if ON_GPU else None


def _count_compilation(**event: object) -> None:
    if not event.get("cache_hit"):
        _COMPILED[0] += 1


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Device, versions, subject, profile, workers, and every variable that steers a run."""
    if ON_GPU:
        device = f"{torch.cuda.get_device_name()}, {torch.cuda.device_count()} visible"
    else:
        device = f"CPU ({platform.machine()})" + ", Triton's interpreter" * INTERPRETED
    processes = getattr(config.option, "numprocesses", None) or 1
    steering = {
        key: without_passwords(value)
        for key, value in sorted(os.environ.items())
        if key.startswith(("TRITON_", "CUDA_VISIBLE", "HYPOTHESIS_", "PYTEST_ADDOPTS"))
    }
    lines = [
        f"attention: {device}; Triton {_version('triton')}, torch {torch.__version__}, "
        f"hypothesis {hypothesis.__version__}, Python {sys.version.split()[0]}",
        f"attention: profile {hypothesis.settings.get_current_profile_name()}, "
        f"{hypothesis.settings().max_examples} examples a test and shard, {processes} workers",
        "attention: " + " ".join(f"{key}={value}" for key, value in steering.items()),
    ]
    if INTERPRETED:
        lines.append(f"attention: {repair.describe()}")
    if not is_ours(config):
        subject = subject_of(config)
        lines.append(f"attention: subject {subject.name}, declares {subject.declared()}")
    if mask_of(config) is not None:
        lines.append(f"attention: masks of {config.getoption('--mask')}")
    if REPLAY in config.stash:
        lines.append(f"attention: replaying {config.stash[REPLAY].to_json()}")
    return lines


def _version(package: str) -> str:
    return importlib.metadata.version(package) if importlib.util.find_spec(package) else "none"


@pytest.fixture(scope="session")
def device(pytestconfig: pytest.Config) -> str:
    """Where the subject runs: "cuda" or "cpu"."""
    return device_of(pytestconfig)


@pytest.fixture(scope="session")
def tally() -> Tally:
    """What this process has judged."""
    return _TALLY


@pytest.fixture(scope="session")
def watchdog(pytestconfig: pytest.Config) -> Watchdog:
    """Writes down the problem under way, and ends the process if it takes too long."""
    return pytestconfig.pluginmanager.get_plugin("crash-reports").watchdog


@pytest.fixture(scope="session")
def replayed(pytestconfig: pytest.Config) -> Problem | None:
    """The problem of --replay."""
    return pytestconfig.stash.get(REPLAY, None)


@pytest.hookimpl(wrapper=True)
def pytest_sessionfinish(session: pytest.Session) -> Iterator[None]:
    """Workers send what they judged to the controller, where judging nothing is a failure."""
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["tally"] = _TALLY.record()
        output["compiled"] = _COMPILED[0]
    elif _TALLY.unsupported and not _TALLY.problems and session.exitstatus == 0:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown() -> Iterator[None]:
    """Workers keep at most half of their GPU's memory between tests, each its part of that.

    What PyTorch caches for one process is out of memory for the next.
    """
    yield
    if ON_GPU and torch.cuda.is_initialized():
        total = torch.cuda.get_device_properties().total_memory
        if torch.cuda.memory_reserved() > total / 2 / workers.sharing(os.environ):
            torch.cuda.empty_cache()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: object) -> None:
    """The controller adds up what its workers judged."""
    output = getattr(node, "workeroutput", {})
    if "tally" in output:
        _TALLY.add(output["tally"])
        _COMPILED[0] += output["compiled"]


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """What was checked, how close to the bound it came, and what was declared."""
    if not (_TALLY.problems or _TALLY.unsupported):
        return
    terminalreporter.section("attention verification")
    if not is_ours(config):
        subject = subject_of(config)
        terminalreporter.write_line(f"{subject.name} declares {subject.declared()}")
    for line in _TALLY.lines():
        terminalreporter.write_line(line)
    if not _TALLY.problems:
        terminalreporter.write_line("nothing was supported, so nothing was verified: failed")
    if ON_GPU and HAS_TRITON:
        terminalreporter.write_line(f"{_COMPILED[0]} kernels compiled")
