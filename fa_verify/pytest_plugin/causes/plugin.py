"""A pytest plugin that explains failures by causes, prints the verdict of a run, and ends it so.

``fa_verify.pytest_plugin.running`` registers it. A failing test is explained in its own process,
where its check and its subject are. The processes of a run share the causes in a folder.
"""

from __future__ import annotations

import dataclasses
import sysconfig
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from fa_verify.breadth import combinations_of
from fa_verify.conformance_process import Status
from fa_verify.oracles.problem import Problem
from fa_verify.properties.guarantees.compare import Violation
from fa_verify.properties.kernels.declared_values import not_drawn
from fa_verify.properties.kernels.refusals import RefusedError
from fa_verify.properties.kernels.without_gpu import CANNOT_RUN
from fa_verify.properties.running.trial import AttentionTrial, SubjectError, run_trial
from fa_verify.properties.search.failure import SECONDS as FAILURE_SECONDS
from fa_verify.properties.search.failure import Beyond, Failure
from fa_verify.properties.search.search import Runner
from fa_verify.pytest_plugin.causes.confirming import answers_of, confirmed
from fa_verify.pytest_plugin.causes.fresh import FreshProcesses
from fa_verify.pytest_plugin.causes.shared import Shared
from fa_verify.reporting.statuses import Counts, gives_status
from fa_verify.reporting.verdict import Explained, explained, fitted, title, verdict
from fa_verify.session import (
    CONFORMANCE,
    NOT_ASKED,
    TooFewError,
    assumed_by,
    in_checkout,
    is_ours,
    is_turn,
    is_whole,
    selects,
    subject_of,
)

__all__ = ["Causes"]

# Names of the properties of a report: the numbers of causes, the number of problems judged beyond
# them, the seconds that the causes took, and the messages of a replay.
_CAUSES, _BEYOND, _SEARCHED, _MESSAGES = "causes", "beyond causes", "seconds", "messages"
# Most reasons for which parts of passed tests are not asked.
_MOST_PARTS = 2
# Name of the property of a failure that no kernel is to blame for: _BROKEN or _TOO_FEW.
_ENDED = "ended"
_BROKEN, _TOO_FEW = "broken", "too few"
_SUITE = Path(__file__).parents[2]
# Frames of the suite and of libraries. The adapters of kernels are the kernels' own.
_NOT_OF_KERNELS = (
    str(_SUITE), str(CONFORMANCE), sysconfig.get_path("purelib"), sysconfig.get_path("stdlib")
)  # fmt: skip
_ADAPTERS = str(_SUITE / "adapters")
# Time to draw the problems of a failed test again.
SECONDS = 60.0
# Features of a mask that is aligned to another corner.
_OF_ALIGNMENT = {"causal", "right bound", "hidden keys", "empty rows", "M < N", "M > N"}
# CPU time of a process for causes: a minute and a part of all its time; and the least time for a
# failure, in which known causes explain it.
_FREE, _PART, _LEAST = 60.0, 1 / 3, 5.0


class Causes:
    """Explains the failures of conformance tests.

    Args:
        config: The pytest configuration.
    """

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        worker: dict[str, Any] | None = getattr(config, "workerinput", None)
        self._own = None if worker else tempfile.TemporaryDirectory(prefix="causes-")
        self.store = Shared(Path(worker["causes"] if worker else self._own.name))
        # In the controller: the outcome of each test, and the causes of those that failed.
        self._outcomes: dict[str, str] = {}
        self._tests: dict[int, list[str]] = {}
        self._others: dict[str, str] = {}
        self._reasons: Counter[str] = Counter()
        # The parts that passed tests did not ask, with the reasons, in order.
        self._parts: dict[str, None] = {}
        self._beyond = 0
        # The messages of a failed replay, which is not searched for causes.
        self._replays = config.option.fa_replay is not None
        self._messages: list[str] = []
        self._interrupted = False
        # Seconds that this process took for causes, and in the controller those of all.
        self._spent = self._all_spent = 0.0
        self._fresh = FreshProcesses(config)
        # Numbers of the causes whose declarations were compared with the answers of a probe.
        self._confirmed: set[int] = set()
        self._answers: dict[str, Any] | None = None

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Send the folder of the causes to a worker."""
        node.workerinput["causes"] = self._own.name

    @pytest.hookimpl(wrapper=True)
    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> Generator[None, Any, Any]:
        """Explain the failure of a test while it runs, so that its limits of time apply."""
        try:
            return (yield)
        except Violation as violation:
            if not self._replays:
                self._explain(pyfuncitem, violation)
            raise

    def _explain(self, item: pytest.Function, violation: Violation) -> None:
        """Note the causes of a failure; an exception leaves its findings as they are."""
        runner = item.funcargs.get("runner")
        if runner is None or violation.claim is None:
            return
        started = time.process_time()
        try:
            failure = self._failure(runner, violation)
            violation.causes = failure.causes()
            self._confirm(runner, violation.causes)
            self._diagnose(runner, violation.causes)
            if not self._stops:
                self._ask_beside(runner, violation, failure)
                self._go_on(runner, violation)
        except Exception as error:
            violation.add_note(f"it has no cause: {type(error).__name__}: {error}")
        finally:
            violation.searched = time.process_time() - started
            self._spent += violation.searched

    def _failure(self, runner: Runner, violation: Violation) -> Failure:
        """Return a failure whose search takes no more time than is left."""
        left = min(FAILURE_SECONDS, max(_LEAST, self._left))
        assert violation.claim is not None
        return Failure(runner, violation.claim, violation.findings, self.store, self._fresh, left)

    @property
    def _left(self) -> float:
        """Seconds of CPU time that this process may still take for causes."""
        return _FREE + _PART * time.process_time() - self._spent

    @property
    def _stops(self) -> bool:
        """Whether the run ends with its first failure, or draws on by itself."""
        return self.config.option.maxfail == 1 or self.config.pluginmanager.has_plugin("fuzzing")

    def _ask_beside(self, runner: Runner, violation: Violation, failure: Failure) -> None:
        """Make all of several checks on problems without the causes, where one problem was given.

        A problem that is wrong by itself hides what other checks find.
        """
        if not hasattr(violation.claim, "checks"):
            return
        assert violation.claim is not None
        seconds = min(SECONDS, max(0.0, self._left - FAILURE_SECONDS))
        beyond = Beyond(runner, self.store, seconds)
        for problem in failure.without_each(tuple(violation.causes)):
            found = beyond.findings(problem, violation.claim)
            if found:
                violation.findings += found
                more = Violation(found, violation.claim)
                numbers = self._failure(runner, more).causes()
                violation.causes += numbers
                self._confirm(runner, numbers)
                self._diagnose(runner, numbers)
        violation.beyond += beyond.judged

    def _go_on(self, runner: Runner, violation: Violation) -> None:
        """Draw the problems of a failed test again, and explain failures beyond known causes.

        The findings of each new cause follow those that the test has.
        """
        # The time of a failure is added when it is over.
        seconds = min(SECONDS, max(0.0, self._left - FAILURE_SECONDS))
        again, end = violation.again, time.monotonic() + seconds
        while again is not None and (left := end - time.monotonic()) > 0:
            beyond = Beyond(runner, self.store, left)
            try:
                again(beyond)
            except Violation as more:
                violation.findings += more.findings
                numbers = self._failure(runner, more).causes()
                violation.causes += numbers
                self._confirm(runner, numbers)
                self._diagnose(runner, numbers)
            else:
                again = None
            violation.beyond += beyond.judged

    def _confirm(self, runner: Runner, numbers: Sequence[int]) -> None:
        """Leave out the declarations of causes that a probe does not confirm; add an alignment.

        The probe asks once, when a cause first has a declaration or concerns unequal lengths.
        """
        for cause in self.store.known():
            if cause.number not in numbers or cause.number in self._confirmed:
                continue
            self._confirmed.add(cause.number)
            names = {x.name for x in cause.hard}
            aligned = names <= _OF_ALIGNMENT and bool(names & {"M < N", "M > N"})
            if not (aligned or cause.declarations):
                continue
            if self._answers is None:
                self._answers = answers_of(runner.subject, cause.problem.device)
            kept = [*confirmed(cause.declarations, self._answers, cause.outputs)]
            if aligned and self._answers.get("causal_alignment") == "top-left":
                kept.append('causal_alignment="top-left"')
            self.store.replace(dataclasses.replace(cause, declarations=tuple(kept)))

    def _diagnose(self, runner: Runner, numbers: list[int]) -> None:
        """Name the fault behind causes that no process has sought a name for.

        The causes are stored without a name before, so that an interrupt leaves them. The problem
        that first failed is left out: another fault may show there too.
        """
        from fa_verify.diagnosis.explain import diagnose

        def run(other: Problem) -> AttentionTrial | None:
            with runner.watching(other):
                return run_trial(runner.subject, other)

        for cause in self.store.known():
            if cause.number not in numbers or cause.diagnosis is not None:
                continue
            if not isinstance(cause.problem, Problem):
                continue  # the named faults are those of attention to padded tensors
            self.store.replace(dataclasses.replace(cause, diagnosis={}))
            beside = [cause.passing] if isinstance(cause.passing, Problem) else []
            found = diagnose(runner.subject, cause.problem, also=beside, run=run).record()
            for now in self.store.known():
                if now.number == self.store.number(cause.number):
                    self.store.replace(dataclasses.replace(now, diagnosis=found))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, call: pytest.CallInfo[Any]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Attach the numbers of the causes to the report of a failed test."""
        report = yield
        error = call.excinfo.value if call.excinfo else None
        if isinstance(error, Violation) and error.causes:
            report.user_properties.append((_CAUSES, sorted({*error.causes})))
            report.user_properties.append((_BEYOND, error.beyond))
            report.user_properties.append((_SEARCHED, error.searched))
        elif isinstance(error, Violation) and self._replays:
            report.user_properties.append((_MESSAGES, [x.told for x in error.findings]))
        elif report.failed and isinstance(error, TooFewError | RefusedError):
            report.user_properties.append((_ENDED, _TOO_FEW))
        elif report.failed and error is not None and _is_of_the_suite(error):
            report.user_properties.append((_ENDED, _BROKEN))
        return report

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note the outcome of a conformance test."""
        if hasattr(self.config, "workerinput") or not _is_conformance(self.config, report):
            return
        if report.failed:
            told = dict(report.user_properties)
            if self._outcomes.get(report.nodeid) != "failed":
                self._outcomes[report.nodeid] = told.get(_ENDED, "failed")
            numbers = told.get(_CAUSES, ())
            self._beyond += told.get(_BEYOND, 0)
            self._all_spent += told.get(_SEARCHED, 0.0)
            self._messages += told.get(_MESSAGES, ())
            for number in numbers:
                self._tests.setdefault(number, []).append(report.nodeid)
            if not numbers:
                of_suite = "an error of the suite: " * (told.get(_ENDED) == _BROKEN)
                self._others[report.nodeid] = of_suite + _message(report)
        elif is_turn(report):
            self._outcomes.setdefault(report.nodeid, "passed")
        elif report.skipped:
            self._outcomes.setdefault(report.nodeid, "skipped")
            why = report.longrepr
            why = str(why[2]) if isinstance(why, tuple) else str(why)
            why = why.removeprefix("Skipped: ")
            self._reasons[why] += 1
            if CANNOT_RUN in why:
                self._parts[why] = None
        elif report.when == "call":
            self._outcomes.setdefault(report.nodeid, "passed")
            parts = [str(why) for name, why in report.user_properties if name == NOT_ASKED]
            self._reasons.update(parts)
            self._parts |= dict.fromkeys(parts)

    def first(self) -> str:
        """Return the first cause in a line, as soon as one is known; later ones may extend it."""
        for cause in self.store.known()[:1]:
            return f"a first cause: {title(cause)}    {cause.replay}"
        return ""

    def explained(self) -> list[Explained]:
        """Return the causes of the run, those that explain most failures first."""
        known = self.store.known()
        tests: dict[int, list[str]] = {}
        for number, names in self._tests.items():
            tests.setdefault(self.store.number(number), []).extend(names)
        return explained(known, tests, self._others)

    def counts(self) -> Counts:
        """Return the counts of the run."""
        ends = Counter(self._outcomes.values())
        manager = self.config.pluginmanager
        tally, waivers = manager.get_plugin("summary").tally, manager.get_plugin("waivers")
        return Counts(
            ends["failed"], ends["passed"], self._reasons, broken=ends[_BROKEN],
            too_few=ends[_TOO_FEW], judged=len(tally.cells), refused=tally.refused_share,
            mostly=tally.mostly_refused(), contradiction=tally.contradiction(),
            waived=waivers.total if waivers else (0, 0),
            # Without a kernel named, those of this repository may have no part in the run.
            assumed=assumed_by(self.config) if gives_status(self.config) else (),
            not_drawn=self._not_drawn(), interrupted=self._interrupted,
        )  # fmt: skip

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        """Note an interrupt by the user. Others end a run too, such as that of -x with workers."""
        self._interrupted = type(excinfo.value) is KeyboardInterrupt

    def _end(self, session: pytest.Session) -> None:
        """Give a run that judges a kernel the status of its verdict."""
        ended, counts = session.exitstatus, self.counts()
        if ended == pytest.ExitCode.USAGE_ERROR:
            session.exitstatus = Status.USAGE
        elif ended != pytest.ExitCode.INTERNAL_ERROR and not self._interrupted:
            session.exitstatus = counts.status
            failures = ended not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
            if failures and not (counts.failed or counts.too_few):
                # Tests of something else failed, or could not be collected.
                session.exitstatus = Status.SUITE

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Generator[None, None, None]:
        """Set the status, before other plugins write it or add reasons of their own to fail.

        Let the verdict stand for the failures of conformance tests, unless -v or --tb is given,
        before the terminal prints its summary.
        """
        if not hasattr(self.config, "workerinput") and gives_status(self.config):
            self._end(session)
        terminal = self.config.pluginmanager.get_plugin("terminalreporter")
        option = self.config.option
        quiet = option.verbose <= 0 and option.tbstyle == "auto" and not option.usepdb
        if terminal is not None and quiet and self._all_ours(terminal):
            option.tbstyle = "no"
            # The reasons of skipped tests stand in no other place.
            terminal.reportchars = "s" * ("s" in terminal.reportchars)
        yield

    def _all_ours(self, terminal: Any) -> bool:
        failed = [x.nodeid for x in terminal.getreports("failed") + terminal.getreports("error")]
        return {*failed} <= {*self._outcomes}

    @pytest.hookimpl(tryfirst=True)
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the verdict."""
        collects = self.config.option.collectonly
        if not gives_status(self.config) and (not self._outcomes or collects):
            return
        terminalreporter.section("verdict")
        for line in self._lines():
            terminalreporter.write_line(line)

    def _lines(self) -> Iterator[str]:
        """Yield the lines of the verdict."""
        name = "fa_kernels" if is_ours(self.config) else subject_of(self.config).source
        full = self.config.option.verbose > 0
        counts = self.counts()
        if self._messages:
            yield from _of_replay(name, self._messages, full=full)
        else:
            yield from verdict(name, counts, self.explained(), full=full)
        parts = [*self._parts]
        most = len(parts) if full or len(parts) <= _MOST_PARTS + 1 else _MOST_PARTS
        yield from (f"   not asked: {why}" for why in parts[:most])
        if most < len(parts):
            yield f"   not asked: {len(parts) - most} others"
        if counts.failed:
            yield ""
        if self._beyond:
            yield (
                f"The failed checks drew again, without these causes: {self._beyond:,} problems, "
                "no other cause."
            )
        if self._all_spent >= 1:
            yield (
                f"The causes took {self._all_spent:,.0f} s of CPU time: at most "
                f"{FAILURE_SECONDS:.0f} s a failure, and in each process a third of its time "
                f"beside {_FREE:.0f} s."
            )
        if counts.failed and not full:
            by_command = self.config.rootpath == CONFORMANCE
            ways = "-v after --" if by_command else "-v"
            if not self._replays:
                files = ("--json=FILE", "--report=DIR")
                files = files if by_command else ("--fa-findings=FILE", "--fa-report=DIR")
                ways = f"{ways}, or {' or '.join(files)}"
            yield f"All messages: {ways}"

    def _not_drawn(self) -> dict[str, str]:
        """Return the declared values that a run drew no problem of, unless tests were selected."""
        if selects(self.config) or not (
            is_whole(self.config) or self.config.getoption("--fa-quick")
        ):
            return {}
        tally = self.config.pluginmanager.get_plugin("summary").tally
        found = not_drawn(subject_of(self.config), tally.values)
        for kind, numbers in sorted(tally.combined.items()):
            missing, count = combinations_of(self.config, kind).missing(numbers)
            if missing:
                name = "combinations" if kind == "attention" else f"combinations of {kind}s"
                found[name] = f"{len(missing):,} of {count:,}"
        return found

    def pytest_unconfigure(self) -> None:
        """Remove the folder that the processes shared."""
        if self._own:
            self._own.cleanup()


def _is_conformance(config: pytest.Config, report: pytest.TestReport) -> bool:
    """Return whether a report is of a conformance test."""
    if gives_status(config) and not in_checkout(config):
        return True  # no other tests are collected, and pytest shortens the names of these
    path = (config.rootpath / report.nodeid.partition("::")[0]).resolve()
    return path.is_relative_to(CONFORMANCE)


def _of_replay(name: str, messages: Sequence[str], *, full: bool) -> Iterator[str]:
    """Yield the lines of a failed replay: its findings, those of the first guarantees in full."""
    findings = [message.splitlines() for message in messages]
    count = "1 finding" if len(findings) == 1 else f"{len(findings)} findings"
    yield f"{name}  FAILED  {count} on this problem"
    if full:
        yield from (line for lines in findings for line in ("", *lines))
    else:
        yield from fitted(findings, [lines[0] for lines in findings], "{} other findings")


def _is_of_the_suite(error: BaseException) -> bool:
    """Return whether an exception comes from the suite or a library, and not from a kernel.

    An assertion speaks of the kernel, as does the end of a test that takes too long.
    """
    if isinstance(error, AssertionError | SubjectError | pytest.fail.Exception):
        return False
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    return all(x.startswith(_NOT_OF_KERNELS) and not x.startswith(_ADAPTERS) for x in files)


def _message(report: pytest.TestReport) -> str:
    """Return the message of a failure without findings: its last words, or how a worker died."""
    crash = getattr(report.longrepr, "reprcrash", None)
    text = str(crash.message if crash else report.longrepr or report.outcome)
    return text.removeprefix(f"{TooFewError.__name__}: ")
