"""A pytest plugin: ``--minutes`` makes a run draw new problems until the time is over.

``plugin`` adds its options, and registers it where the option is given.
"""

from __future__ import annotations

import os
import signal
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fa_verify.properties.comparison.compare import Violation
from fa_verify.properties.execution.tally import Tally
from fa_verify.properties.search.corpus import CorpusEntry
from fa_verify.properties.search.search import Runner
from fa_verify.pytest_plugin.fuzz.causes import Causes
from fa_verify.pytest_plugin.fuzz.clock import Clock, seconds_of_a_turn
from fa_verify.pytest_plugin.fuzz.hunter import TURN_OVER, Hunter
from fa_verify.pytest_plugin.regression_files import is_regression

__all__ = ["PROFILE", "Fuzzing", "choose_workers", "minutes_of"]

# Of Hypothesis: it draws anew every time.
PROFILE = "fuzz"
WEEK = 7 * 24 * 60.0
# Seconds between lines of progress, on a terminal and in a log.
ON_A_TERMINAL, IN_A_LOG = 3.0, 10.0
# So xdist calls the phase of a test that its worker died in.
DIED = "???"
# A test that died so often is dealt no more.
DEATHS = 3


def minutes_of(config: pytest.Config) -> float | None:
    """The option --minutes; None where it is not given.

    Raises:
        pytest.UsageError: It is no number of minutes from above 0 to a week, or does not go
            together with another option.
    """
    given = config.getoption("--minutes")
    if given is None:
        return None
    try:
        minutes = float(given)
    except ValueError:
        minutes = 0.0
    if not 0 < minutes <= WEEK:
        raise pytest.UsageError(
            f"--minutes is {given!r}; needs a number of minutes > 0, at most {WEEK:g}"
        )
    for option in ("--replay", "--mutation"):
        if config.getoption(option):
            raise pytest.UsageError(f"--minutes draws new problems; {option} names what to run")
    profile = config.getoption("--hypothesis-profile")
    if profile not in (None, PROFILE):
        raise pytest.UsageError(
            f"--minutes draws by the profile {PROFILE}; --hypothesis-profile is {profile!r}"
        )
    return minutes


def choose_workers(config: pytest.Config, conformance: Path) -> None:
    """What --minutes implies, before xdist reads its options: its profile, tests, and workers.

    Raises:
        pytest.UsageError: There are to be no workers, or as ``minutes_of``.
    """
    if minutes_of(config) is None:
        return
    option = config.option
    option.hypothesis_profile = PROFILE
    if config.args_source is not pytest.Config.ArgsSource.ARGS:
        config.args[:] = [str(conformance)]
    # A worker has read the same command line.
    if hasattr(config, "workerinput"):
        return
    if not hasattr(option, "numprocesses") or option.numprocesses == 0:
        raise pytest.UsageError("--minutes needs workers of pytest-xdist; give -n auto or -n 1")
    if option.dist not in ("no", "load"):
        raise pytest.UsageError(f"--minutes deals tests itself; --dist is {option.dist!r}")
    if option.numprocesses is None:
        option.numprocesses = "auto"


class Fuzzing:
    """Keeps the time and the causes found, in the controller and in its workers.

    Args:
        config: Pytest's.
        tally: Of this process.
        corpus: The folder of the corpus.
    """

    def __init__(self, config: pytest.Config, tally: Tally, corpus: Path) -> None:
        self.config = config
        self.tally = tally
        self.corpus = corpus
        self.seconds = 60 * (minutes_of(config) or 0.0)
        worker: dict[str, Any] | None = getattr(config, "workerinput", None)
        self._own = None if worker else tempfile.TemporaryDirectory(prefix="fuzzing-")
        folder = Path(worker["fuzzing"] if worker else self._own.name)
        self.clock = Clock(folder / "end")
        self.causes = Causes(folder)
        # Tests of this process that draw.
        self._drawing = 1
        self._rotation: Any = None
        self._summarising = False
        self._deaths: dict[str, int] = {}
        self._done = threading.Event()
        if worker:
            # Ctrl-C on a terminal goes to a whole group: the controller tells its workers, and the
            # compilers that they call are not to die in the middle of a problem.
            os.setpgid(0, 0)

    def hunter(self, runner: Runner) -> Hunter:
        """The runner of one turn of a test."""
        workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
        return Hunter(
            runner,
            folder=self.corpus,
            causes=self.causes,
            clock=self.clock,
            seconds=seconds_of_a_turn(self.seconds, workers, self._drawing),
        )

    # In a worker.

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        """Leaves out the tests that would do the same every time; the regressions stay, once."""
        drawn = [item for item in items if "for_all" in getattr(item, "fixturenames", ())]
        self._drawing = len(drawn)
        kept = [item for item in items if is_regression(item.nodeid)] + drawn
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = kept

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> Any:
        """A test whose next turn follows at once is torn down in between all the same."""
        if nextitem is not item:
            return None
        return item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, call: pytest.CallInfo[None]) -> Iterator[None]:
        """Puts what was violated into the report, and what was judged since the last one.

        So a worker that dies takes the counts of one turn with it at most.
        """
        report = yield
        # Pytest's own list is the test's, and would grow from turn to turn.
        report.user_properties = []
        if report.when == "call":
            report.user_properties.append(("tally", self.tally.hand_over()))
            if call.excinfo is not None and isinstance(call.excinfo.value, Violation):
                found = [str(finding) for finding in call.excinfo.value.findings]
                report.user_properties.append(("found", found))
        return report

    # In the controller.

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Takes over what a worker judged, says what failed, and who gets no more turns."""
        if self._own is None:
            return
        told = dict(report.user_properties)
        # The terminal keeps all reports to the end, and there are many: those of setups and
        # teardowns, which have no name in its counts, are of no use to it.
        report.user_properties = []
        if terminal := self._terminal():
            terminal.stats.get("", []).clear()
        if "tally" in told:
            self.tally.add(told["tally"])
        if report.failed:
            self._say(f"failed: {report.nodeid.rpartition('::')[2]}")
            # What a worker died in was put there by the crash reports.
            died = [str(report.longrepr)] if report.when == DIED else []
            for message in [*told.get("found", []), *died][:1]:
                self._say(f"  {_in_short(message)}")
        if self._rotation is not None and self._is_at_its_end(report, "found" in told):
            self._rotation.leave_out(report.nodeid)

    def _is_at_its_end(self, report: pytest.TestReport, found: bool) -> bool:
        """Whether another turn of a test is of no use."""
        # What was found is known from now on, and passed over.
        if is_regression(report.nodeid) or report.passed or found or _is_turn(report):
            return False
        if report.when != DIED:
            return True
        self._deaths[report.nodeid] = self._deaths.get(report.nodeid, 0) + 1
        return self._deaths[report.nodeid] >= DEATHS

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Tells a worker where time and causes are kept."""
        node.workerinput["fuzzing"] = self._own.name

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_make_scheduler(self, config: pytest.Config, log: Any) -> Any:
        """Deals tests for as long as there is time."""
        from fa_verify.pytest_plugin.fuzz.rotation import Rotation

        self._rotation = Rotation(config, log, self.clock, self.seconds)
        return self._rotation

    @pytest.hookimpl(wrapper=True)
    def pytest_runtestloop(self) -> Iterator[None]:
        """In the controller a first Ctrl-C ends the drawing, a second one the run."""
        if self._own is None:
            return (yield)
        before = {name: signal.getsignal(name) for name in (signal.SIGINT, signal.SIGTERM)}

        def stop(number: int, frame: object) -> None:
            for name, handler in before.items():
                signal.signal(name, handler)
            self.clock.stop()
            self._say(
                "stopping: workers finish the problem they are at; again to end without a summary"
            )

        for name in before:
            signal.signal(name, stop)
        progress = threading.Thread(target=self._report, name="progress", daemon=True)
        progress.start()
        try:
            return (yield)
        finally:
            self._done.set()
            progress.join()
            for name, handler in before.items():
                signal.signal(name, handler)

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report: Any) -> tuple[str, str, str] | None:
        """Prints no letter a turn: there are many, and lines of progress say more."""
        if getattr(report, "when", None) in ("setup", "teardown") and report.passed:
            return "", "", ""
        drawn = not is_regression(report.nodeid)
        if drawn and (report.passed or _is_turn(report)):
            return "turns", "", ""
        return report.outcome, "", report.outcome.upper() if self._summarising else ""

    @pytest.hookimpl(trylast=True)
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """What was found, and where it is kept."""
        self._summarising = True
        terminalreporter.section("fuzzing")
        terminalreporter.write_line(self._progress())
        files = self.causes.files()
        for path in files:
            shown = os.path.relpath(path)
            try:
                entry = CorpusEntry.read(path)
            except ValueError as error:
                terminalreporter.write_line(f"corpus: {error}")
                continue
            terminalreporter.write_line(f"corpus: {shown} ({entry.cause})")
            terminalreporter.write_line(f"  {_in_short(entry.message)}")
        if files:
            terminalreporter.write_line(
                "every run replays these first: commit them with the repair"
            )

    def pytest_unconfigure(self) -> None:
        """Removes what processes told one another."""
        if self._own:
            self._own.cleanup()

    def _report(self) -> None:
        """Says how it goes, until it is over."""
        terminal = self._terminal()
        seconds = ON_A_TERMINAL if terminal and terminal.isatty else IN_A_LOG
        while not self._done.wait(seconds):
            self._say(self._progress())

    def _progress(self) -> str:
        """How it goes, in one line."""
        if not self.clock.path.exists():
            return "starting workers, and replaying what was found before"
        # Past the end, corpus entries are still made smaller.
        passed = min(self.clock.passed(), self.seconds)
        problems = len(self.tally.problems)
        worst = max((ratio for ratio, _ in [*self.tally.worst.values()]), default=0.0)
        entries = len(self.causes.files())
        return (
            f"{_clock(passed)} of {_clock(self.seconds)}: {problems:,} problems, "
            f"{problems / max(passed, 1.0):.1f}/s; worst error/bound {worst:.3f}; "
            f"{entries} corpus entr{'y' if entries == 1 else 'ies'}"
        )

    def _say(self, line: str) -> None:
        terminal = self._terminal()
        if terminal:
            terminal.ensure_newline()
            terminal.write_line(line)
            terminal.flush()

    def _terminal(self) -> Any:
        return self.config.pluginmanager.get_plugin("terminalreporter")


def _is_turn(report: Any) -> bool:
    """Whether a test was skipped because its turn was over, and not for good."""
    return report.skipped and TURN_OVER in str(report.longrepr)


def _in_short(message: str) -> str:
    """What a failure message says first, and how it is replayed."""
    first, *rest = message.splitlines()
    return "\n  ".join([first, *(line.strip() for line in rest if "replay: " in line)])


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes}:{rest:02d}"
