"""Options, profiles, device choice, header and summary of every run."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator
from pathlib import Path

# Before Triton is imported: kernels run on the GPU if there is one, else in the interpreter. The
# fusion of multiply and add is pinned, because Triton's default for it changes between versions.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import hypothesis
import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

from properties import interpreter

if INTERPRETED:
    interpreter.repair()

import triton

from oracles.problem import Problem
from properties.ledger import Ledger

DEVICE = "cpu" if INTERPRETED else "cuda"
REPLAY_TEST = Path(__file__).parent / "tests" / "conformance" / "test_replay.py"

# Examples a test and shard; a GPU judges about twenty times as many problems a second.
GATE_EXAMPLES = 8 if INTERPRETED else 60
_ALWAYS = {
    "deadline": None,
    "suppress_health_check": list(hypothesis.HealthCheck),
    "print_blob": False,
    # Explaining traces every line of the interpreter, and searching on for other bugs spends the
    # time that shrinking the first one needs.
    "report_multiple_bugs": False,
    "phases": [phase for phase in hypothesis.Phase if phase is not hypothesis.Phase.explain],
}
hypothesis.settings.register_profile(
    "gate", max_examples=GATE_EXAMPLES, derandomize=True, database=None, **_ALWAYS
)
hypothesis.settings.register_profile(
    "dev", max_examples=GATE_EXAMPLES // 4 or 1, derandomize=True, database=None, **_ALWAYS
)
hypothesis.settings.register_profile("fuzz", max_examples=50 * GATE_EXAMPLES, **_ALWAYS)
hypothesis.settings.load_profile("gate")

# One process a core: threads inside it would only take turns.
if os.environ.get("PYTEST_XDIST_WORKER"):
    torch.set_num_threads(1)

_LEDGER = Ledger()
_COMPILED = [0]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of the suite."""
    group = parser.getgroup("attention verification")
    group.addoption(
        "--replay",
        metavar="JSON",
        help="run every guarantee on one problem: the JSON of a failure message",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Turns --replay into a run of the replay test alone; counts compilations."""
    text = config.getoption("--replay")
    if text is not None:
        try:
            config.stash[REPLAY] = Problem.from_json(text)
        except ValueError as error:
            raise pytest.UsageError(f"--replay: {error}") from None
        config.args[:] = [str(REPLAY_TEST)]
    # Conformance tests are long and come first: xdist would deal them to a few workers in blocks.
    if getattr(config.option, "maxschedchunk", 0) is None:
        config.option.maxschedchunk = 2
    if not INTERPRETED:
        triton.knobs.compilation.listener = _count_compilation


REPLAY = pytest.StashKey[Problem]()


def _count_compilation(**event: object) -> None:
    if not event.get("cache_hit"):
        _COMPILED[0] += 1


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Device, versions, profile, workers, the repair, and every variable that steers a run."""
    if INTERPRETED:
        device = f"CPU ({platform.machine()}), Triton's interpreter"
    else:
        device = f"{torch.cuda.get_device_name()}, {torch.cuda.device_count()} visible"
    workers = getattr(config.option, "numprocesses", None) or 1
    steering = {
        key: value
        for key, value in sorted(os.environ.items())
        if key.startswith(("TRITON_", "CUDA_VISIBLE", "HYPOTHESIS_", "PYTEST_ADDOPTS"))
    }
    lines = [
        f"attention: {device}; Triton {triton.__version__}, torch {torch.__version__}, "
        f"hypothesis {hypothesis.__version__}, Python {sys.version.split()[0]}",
        f"attention: profile {hypothesis.settings.get_current_profile_name()}, "
        f"{hypothesis.settings().max_examples} examples a test and shard, {workers} workers",
        "attention: " + " ".join(f"{key}={value}" for key, value in steering.items()),
    ]
    if INTERPRETED:
        lines.append(f"attention: {interpreter.describe()}")
    if REPLAY in config.stash:
        lines.append(f"attention: replaying {config.stash[REPLAY].to_json()}")
    return lines


@pytest.fixture(scope="session")
def device() -> str:
    """Where kernels run: "cuda", or "cpu" under the interpreter."""
    return DEVICE


@pytest.fixture(scope="session")
def ledger() -> Ledger:
    """What this process has judged."""
    return _LEDGER


@pytest.fixture(scope="session")
def replayed(pytestconfig: pytest.Config) -> Problem | None:
    """The problem of --replay."""
    return pytestconfig.stash.get(REPLAY, None)


@pytest.hookimpl(wrapper=True)
def pytest_sessionfinish(session: pytest.Session) -> Iterator[None]:
    """Workers send what they judged to the controller."""
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["ledger"] = _LEDGER.record()
        output["compiled"] = _COMPILED[0]
    yield


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: object) -> None:
    """The controller adds up what its workers judged."""
    output = getattr(node, "workeroutput", {})
    if "ledger" in output:
        _LEDGER.add(output["ledger"])
        _COMPILED[0] += output["compiled"]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What was checked, and how close to the bound it came."""
    if not (_LEDGER.problems or _LEDGER.unsupported):
        return
    terminalreporter.section("attention verification")
    for line in _LEDGER.lines():
        terminalreporter.write_line(line)
    if not INTERPRETED:
        terminalreporter.write_line(f"{_COMPILED[0]} kernels compiled")
