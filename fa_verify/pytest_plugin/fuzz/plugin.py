"""A pytest plugin for ``--fa-minutes``: draw new problems until the time is over.

``fa_verify.pytest_plugin.running`` registers it if the option is given.
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

from fa_verify.properties.guarantees.compare import Finding, Violation
from fa_verify.properties.running.tally import Tally, ratio_text
from fa_verify.properties.search.corpus import Cause, CorpusEntry
from fa_verify.properties.search.search import Runner
from fa_verify.pytest_plugin.fuzz.causes import Causes
from fa_verify.pytest_plugin.fuzz.clock import Clock, seconds_of_a_turn
from fa_verify.pytest_plugin.fuzz.hunter import Hunter
from fa_verify.pytest_plugin.options import number_of
from fa_verify.pytest_plugin.progress import IN_A_LOG, ON_A_TERMINAL, clock
from fa_verify.pytest_plugin.regression_files import is_regression
from fa_verify.session import is_turn, select

__all__ = ["PROFILE", "Fuzzing", "choose_workers", "minutes_of"]

# The Hypothesis profile of a fuzzing run, which draws new examples every time.
PROFILE = "fuzz"
WEEK = 7 * 24 * 60.0
# xdist's name for the phase of a test whose worker died.
DIED = "???"
# Number of dead workers after which a test is no longer scheduled.
DEATHS = 3


def minutes_of(config: pytest.Config) -> float | None:
    """Return the option --fa-minutes, or None if it is not given.

    Raises:
        pytest.UsageError: The value is not a number, not above 0, or more than a week; or
            another option contradicts it.
    """
    minutes = number_of(config, "minutes", "minutes", WEEK)
    if minutes is None:
        return None
    if config.getoption("--fa-replay"):
        raise pytest.UsageError("--fa-minutes and --fa-replay exclude each other: pass one of them")
    profile = config.getoption("--hypothesis-profile")
    if profile not in (None, PROFILE):
        raise pytest.UsageError(
            f"--fa-minutes needs the profile {PROFILE}; --hypothesis-profile is {profile!r}"
        )
    return minutes


def choose_workers(config: pytest.Config) -> None:
    """Set the profile, tests and workers that --fa-minutes implies, before xdist reads its options.

    Raises:
        pytest.UsageError: There are no workers, another scheduler is requested, or --fa-minutes is
            invalid, see ``minutes_of``.
    """
    if minutes_of(config) is None:
        return
    option = config.option
    option.hypothesis_profile = PROFILE
    if config.args_source is not pytest.Config.ArgsSource.ARGS:
        select(config)
    # Only the controller starts workers.
    if hasattr(config, "workerinput"):
        return
    if not hasattr(option, "numprocesses") or option.numprocesses == 0:
        raise pytest.UsageError("--fa-minutes needs pytest-xdist workers; pass -n auto or -n 1")
    if option.dist not in ("no", "load"):
        raise pytest.UsageError(
            f"--fa-minutes schedules the tests and needs --dist=load; --dist is {option.dist!r}"
        )
    if option.numprocesses is None:
        option.numprocesses = "auto"


class Fuzzing:
    """Holds the deadline and the causes found, in the controller and in its workers.

    Args:
        config: The pytest configuration.
        tally: The tally of this process.
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
        # Number of tests in this process that draw problems.
        self._drawing = 1
        self._rotation: Any = None
        self._summarising = False
        self._deaths: dict[str, int] = {}
        # The findings that could not be written, by cause, and why.
        self._unkept: dict[str, str] = {}
        self._why_unkept = ""
        self._done = threading.Event()
        if worker:
            # Ctrl-C on a terminal signals the whole process group. A group of its own protects a
            # worker's compiler processes; the controller stops the worker through the clock.
            os.setpgid(0, 0)

    def hunter(self, runner: Runner) -> Hunter:
        """Return the runner for one turn of a test."""
        workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
        return Hunter(
            runner,
            folder=self.corpus,
            causes=self.causes,
            clock=self.clock,
            seconds=seconds_of_a_turn(self.seconds, workers, self._drawing),
            unkept=self._note_unkept,
        )

    def _note_unkept(self, cause: Cause, finding: Finding, error: OSError) -> None:
        """Note a finding that the corpus lacks, instead of a larger one of its cause."""
        self._unkept[str(cause)] = _in_short(str(finding))
        self._why_unkept = f"{type(error).__name__}: {error.strerror or error}"

    # In a worker.

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        """Deselect the tests that do not draw problems, except the regressions."""
        drawn = [item for item in items if "drawing" in getattr(item, "fixturenames", ())]
        self._drawing = len(drawn)
        kept = [item for item in items if is_regression(item.nodeid)] + drawn
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = kept

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> Any:
        """Tear a test down between two turns, even if its next turn follows immediately."""
        if nextitem is not item:
            return None
        return item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, call: pytest.CallInfo[None]) -> Iterator[None]:
        """Attach the findings, and the counts since the last report, to a test's report.

        A worker that dies therefore loses the counts of at most one turn.
        """
        report = yield
        # pytest's list belongs to the test item and would grow from turn to turn.
        report.user_properties = []
        if report.when == "call":
            report.user_properties.append(("tally", self.tally.hand_over()))
            if self._unkept:
                report.user_properties.append(("unkept", [self._why_unkept, {**self._unkept}]))
            if call.excinfo is not None and isinstance(call.excinfo.value, Violation):
                found = [str(finding) for finding in call.excinfo.value.findings]
                report.user_properties.append(("found", found))
        return report

    # In the controller.

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add a worker's counts, print failures, and drop a test that gets no more turns."""
        if self._own is None:
            return
        told = dict(report.user_properties)
        # The terminal reporter keeps all reports to the end, and there are many. Drop those of
        # setups and teardowns, which it stores under the name "" and never prints.
        report.user_properties = []
        if terminal := self._terminal():
            terminal.stats.get("", []).clear()
        if "tally" in told:
            self.tally.add(told["tally"])
        if "unkept" in told:
            if not self._why_unkept:
                self._say(
                    f"{self.corpus} cannot be written, findings are kept here alone: "
                    f"{told['unkept'][0]}"
                )
            self._why_unkept = told["unkept"][0]
            self._unkept |= told["unkept"][1]
        if report.failed:
            self._say(f"failed: {report.nodeid.rpartition('::')[2]}")
            # The crash reports have put the problem of a dead worker into its report.
            died = [str(report.longrepr)] if report.when == DIED else []
            for message in [*told.get("found", []), *died][:1]:
                self._say(f"  {_in_short(message)}")
        if self._rotation is not None and self._is_at_its_end(report, "found" in told):
            self._rotation.leave_out(report.nodeid)

    def _is_at_its_end(self, report: pytest.TestReport, found: bool) -> bool:
        """Return whether a test gets no more turns."""
        # After a finding a test goes on: its next turns ignore the cause that it found.
        if is_regression(report.nodeid) or report.passed or found or is_turn(report):
            return False
        if report.when != DIED:
            return True
        self._deaths[report.nodeid] = self._deaths.get(report.nodeid, 0) + 1
        return self._deaths[report.nodeid] >= DEATHS

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Send the folder of the deadline and the causes to a worker."""
        node.workerinput["fuzzing"] = self._own.name

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_make_scheduler(self, config: pytest.Config, log: Any) -> Any:
        """Schedule tests until the time is over."""
        from fa_verify.pytest_plugin.fuzz.rotation import Rotation

        self._rotation = Rotation(config, log, self.clock, self.seconds)
        return self._rotation

    @pytest.hookimpl(wrapper=True)
    def pytest_runtestloop(self) -> Iterator[None]:
        """Handle Ctrl-C in the controller: the first ends the drawing, the second the run."""
        if self._own is None:
            return (yield)
        before = {name: signal.getsignal(name) for name in (signal.SIGINT, signal.SIGTERM)}

        def stop(number: int, frame: object) -> None:
            for name, handler in before.items():
                signal.signal(name, handler)
            self.clock.stop()
            self._say(
                "stopping: workers finish their current problem; interrupt again to end without a "
                "summary"
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
        """Print nothing for a turn: there are many, and the progress line counts problems."""
        if getattr(report, "when", None) in ("setup", "teardown") and report.passed:
            return "", "", ""
        drawn = not is_regression(report.nodeid)
        if drawn and (report.passed or is_turn(report)):
            return "turns", "", ""
        return report.outcome, "", report.outcome.upper() if self._summarising else ""

    @pytest.hookimpl(trylast=True)
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print what was found and the regression files that hold it."""
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
        if self._unkept:
            terminalreporter.write_line(
                f"{len(self._unkept)} not kept, {self.corpus}: {self._why_unkept}"
            )
        for message in self._unkept.values():
            terminalreporter.write_line(f"  {message}")
        if files:
            terminalreporter.write_line("every run replays these first: commit them with the fix")

    def pytest_unconfigure(self) -> None:
        """Remove the files that the processes shared."""
        if self._own:
            self._own.cleanup()

    def _report(self) -> None:
        """Print progress lines until the run is over."""
        terminal = self._terminal()
        seconds = ON_A_TERMINAL if terminal and terminal.isatty else IN_A_LOG
        while not self._done.wait(seconds):
            self._say(self._progress())

    def _progress(self) -> str:
        """Return the progress line."""
        if not self.clock.path.exists():
            return "starting workers and replaying earlier failures"
        # Shrinking continues after the deadline.
        passed = min(self.clock.passed(), self.seconds)
        problems = len(self.tally.problems)
        worst = max((ratio for ratio, _ in [*self.tally.worst.values()]), default=0.0)
        entries = len(self.causes.files())
        return (
            f"{clock(passed)} of {clock(self.seconds)}: {problems:,} problems, "
            f"{problems / max(passed, 1.0):.1f}/s; worst error/bound {ratio_text(worst)}; "
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


def _in_short(message: str) -> str:
    """Return the first line of a failure message and its replay line."""
    first, *rest = message.splitlines()
    return "\n  ".join([first, *(line.strip() for line in rest if "replay: " in line)])
