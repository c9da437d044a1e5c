"""A pytest plugin for ``--fa-baseline=FILE``: run a baseline's problems and report differences.

``fa_verify.pytest_plugin.running`` registers it. ``tests/conformance/test_baseline.py`` measures
errors. When the workers have ended, the controller times the subject alone on the GPU and compares
the run with the baseline.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from fa_verify.conformance_process import Status
from fa_verify.properties.regression.baseline import Baseline, Entry
from fa_verify.properties.regression.compiled_kernels import Resources, loaded_kernels
from fa_verify.properties.regression.difference import Difference
from fa_verify.reporting.gate.comparison import combined, differences
from fa_verify.reporting.gate.environment import compiles, environment_of
from fa_verify.reporting.gate.problems import arithmetic_of, chosen
from fa_verify.reporting.gate.timing import timed
from fa_verify.session import CONFORMANCE, device_of, subject_of

__all__ = ["Gate"]

ABSENT = "it did not run or did not finish"
TESTS = CONFORMANCE / "test_baseline.py"


class Gate:
    """Collects measurements in every process and compares them in the controller.

    Attributes:
        differences: The differences from the baseline, once the run has ended.
        verdict: The result in one line; empty until the run has ended.
    """

    def __init__(self, config: pytest.Config) -> None:
        """Read the baseline. Call in ``pytest_configure``.

        Raises:
            pytest.UsageError: The options contradict each other, or the file cannot be compared
                with this run.
        """
        given = config.getoption("--fa-baseline")
        self.config = config
        self.updates: bool = config.getoption("--fa-update-baseline")
        self.differences: list[Difference] = []
        self.verdict = ""
        self.path: Path | None = None
        if given is None:
            if self.updates:
                raise pytest.UsageError(
                    "--fa-update-baseline needs --fa-baseline=FILE, the file to write"
                )
            return
        if config.getoption("--fa-replay") is not None:
            raise pytest.UsageError(
                "--fa-baseline and --fa-replay exclude each other: pass one of them"
            )
        self.path = Path(given)
        self.subject = subject_of(config)
        self.device = device_of(config)
        self.environment = environment_of(self.device)
        self.then = self._read(self.path)
        self.entries = self.then.entries if self.then else ()
        if self.updates:
            self.entries = combined(self.entries, chosen(self.subject, self.device))
        if not self.entries:
            raise pytest.UsageError(f"--fa-baseline: {given} has no problems; needs at least one")
        self.now: dict[int, Entry] = {}
        self.reasons: dict[int, str] = {}
        self.kernels: dict[str, Resources] = {}
        self._loaded = loaded_kernels() if compiles(self.device) else {}
        self._choose_tests()

    @property
    def _is_controller(self) -> bool:
        return not hasattr(self.config, "workerinput")

    def _read(self, path: Path) -> Baseline | None:
        """Read the baseline; return None if --fa-update-baseline creates it.

        Raises:
            pytest.UsageError: The file is missing or damaged; it was measured on another device;
                or, without --fa-update-baseline, with another version of torch or Triton.
        """
        if self.updates and not path.exists():
            return None
        try:
            then = Baseline.read(path)
        except ValueError as error:
            hint = "" if path.exists() else "; --fa-update-baseline creates it"
            raise pytest.UsageError(f"--fa-baseline: {error}{hint}") from None
        different = then.environment.differences(self.environment)
        # An update may change the versions. Each device has its own file.
        if different and not (self.updates and not different[0].startswith("device")):
            raise pytest.UsageError(
                f"--fa-baseline: {path} differs from this run: {'; '.join(different)}; "
                + ("needs a file of this device" if different[0].startswith("device")
                   else "--fa-update-baseline measures it again with these versions")
            )  # fmt: skip
        return then

    def _choose_tests(self) -> None:
        """Select the baseline's problems, in addition to tests named on the command line."""
        if self.config.args_source is not pytest.Config.ArgsSource.ARGS:
            self.config.args[:] = [str(TESTS)]
        else:
            self.config.args.append(str(TESTS))

    def pytest_report_header(self) -> str | None:
        """Return a line with the baseline's file, subject and number of problems."""
        if self.path is None:
            return None
        of = f"of {self.then.subject}, " if self.then else ""
        update = ", to be written" if self.updates else ""
        return f"attention: baseline {self.path}, {of}{len(self.entries)} problems{update}"

    def pytest_ignore_collect(self, collection_path: Path) -> bool | None:
        """Ignore the baseline's tests without --fa-baseline."""
        return True if self.path is None and collection_path == TESTS else None

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Parametrize the baseline's test with its entries."""
        if self.path is not None and metafunc.definition.path == TESTS:
            ids = [f"{x.arithmetic}-{x.mask}-{i}" for i, x in enumerate(self.entries)]
            metafunc.parametrize(("place", "entry"), [*enumerate(self.entries)], ids=ids)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Collect the measurements of a test."""
        if report.when != "call":
            return
        for name, found in report.user_properties:
            if name == "baseline":
                self._take(**found)

    def _take(self, place: int, errors: dict[str, Any], unchecked: str) -> None:
        entry = self.entries[place]
        if errors:
            pairs = {name: tuple(pair) for name, pair in errors.items()}
            arithmetic = arithmetic_of(self.subject, entry.problem)
            self.now[place] = Entry(entry.problem, entry.check, arithmetic, pairs)
        if unchecked:
            self.reasons[place] = unchecked

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Collect the resources of the kernels that a worker compiled."""
        for name, taken in getattr(node, "workeroutput", {}).get("kernels", {}).items():
            self.kernels[name] = Resources(*taken).most(self.kernels.get(name))

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Iterator[None]:
        """Compare after the workers have ended and before the summary is printed."""
        if self.path is None or self.config.option.collectonly:
            yield
            return
        if not self._is_controller:
            self.config.workeroutput["kernels"] = {
                name: list(vars(taken).values()) for name, taken in self._loaded.items()
            }
            yield
            return
        self.kernels |= self._loaded
        yield
        if session.exitstatus not in (Status.HOLDS, Status.FAILED, Status.NOT_VERIFIED):
            self.verdict = "not compared: the run did not finish"
        elif self.updates:
            self._update(session)
        else:
            self._compare(session)

    def _compare(self, session: pytest.Session) -> None:
        speed, why_not = self._timed(self.then.speed)
        self.differences = differences(
            self.then, self.now, self._missing(), self.kernels, speed, why_not
        )  # fmt: skip
        alarms = sum(change.alarm for change in self.differences)
        self.verdict = f"{len(self.now)} problems compared, " + (
            f"{_counted(alarms, 'alarm')}: failed"
            if alarms
            else f"no alarm, {_counted(len(self.differences), 'change')}"
        )
        if alarms and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def _update(self, session: pytest.Session) -> None:
        missing = self._missing()
        absent = sum(reason == ABSENT for reason in missing.values())
        if session.exitstatus != pytest.ExitCode.OK or absent or not self.now:
            ran = f", and {_counted(absent, 'problem')} did not run" if absent else ""
            self.verdict = f"not written: a baseline needs a complete run that passes{ran}"
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
            return
        speed, why_not = self._timed({})
        if self.then:
            found = differences(
                self.then, {i: x for i, x in self.now.items() if i < len(self.then.entries)},
                {i: x for i, x in missing.items() if i < len(self.then.entries)},
                self.kernels, speed, why_not,
            )  # fmt: skip
            # An update accepts all differences, so none is an alarm.
            self.differences = [dataclasses.replace(change, alarm=False) for change in found]
        entries = tuple(self.now[i] for i in sorted(self.now) if i not in missing)
        baseline = Baseline(self.subject.name, self.environment, entries, self.kernels, speed)
        try:
            baseline.write(self.path)
        except OSError as error:
            self.verdict = f"not written: {error}"
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
            return
        dropped = f"; {_counted(len(missing), 'problem')} left out" if missing else ""
        self.verdict = (
            f"written: {_counted(len(entries), 'problem')}, "
            f"{_counted(len(self.kernels), 'kernel')}, {len(speed)} timed passes{dropped}"
        )

    def _timed(self, then: Mapping[str, Sequence[float]]) -> tuple[Any, str]:
        """Return the speed ratios, and the reason if there are none (nothing is compiled here)."""
        return (
            timed(self.subject, then) if compiles(self.device) else ({}, "nothing is compiled here")
        )

    def _missing(self) -> dict[int, str]:
        """Return, by index, why a problem was not measured or its check was not made."""
        places = range(len(self.entries))
        return {
            i: "it did not run or did not finish" for i in places if i not in self.now
        } | self.reasons

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the differences, alarms first, and the verdict."""
        if not self.verdict:
            return
        terminalreporter.section(f"baseline {self.path}")
        for change in sorted(self.differences, key=lambda change: not change.alarm):
            terminalreporter.write_line(str(change), red=change.alarm)
        terminalreporter.write_line(f"baseline {self.path}: {self.verdict}")


def _counted(count: int, word: str) -> str:
    return f"{count} {word}" + "s" * (count != 1)
