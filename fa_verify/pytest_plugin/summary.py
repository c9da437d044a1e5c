"""The header and the terminal summary of a run, with the counts of all workers."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import hypothesis
import pytest
import torch

from fa_verify.breadth import breadth_of, combinations_of
from fa_verify.oracles.call import Call
from fa_verify.properties.kernels.covering_calls import combinations_line
from fa_verify.properties.problems.mask_examples import pictures
from fa_verify.properties.running.coverage import coverage_lines, possible_cells
from fa_verify.properties.running.tally import Tally
from fa_verify.pytest_plugin.environment import HAS_TRITON, INTERPRETED, ON_GPU
from fa_verify.pytest_plugin.example_database import without_passwords
from fa_verify.session import CONFORMANCE, device_of, is_ours, is_whole, mask_of, subject_of

__all__ = ["REPLAY", "Summary"]

# The problem of --fa-replay.
REPLAY = pytest.StashKey[Call]()
# In a run of the command without -v: the lines of the header that are shown beside the device, and
# the most reasons for which problems were not judged.
_SHOWN_IN_BRIEF = ("attention: kernel", "attention: masks", "attention: breadth")
_MOST_REASONS = 3


class Summary:
    """Counts judged problems and compiled kernels, in a process and its workers."""

    def __init__(self) -> None:
        self.tally = Tally()
        # The hash of each compiled kernel, and the number of processes that compiled it.
        self.compiled: Counter[str] = Counter()
        self.compiling = 0.0
        if HAS_TRITON and not INTERPRETED:
            import triton

            triton.knobs.compilation.listener = self._count_compilation

    def _count_compilation(
        self, *, metadata: Mapping[str, Any], times: Any, cache_hit: bool, **_: object
    ) -> None:
        if not cache_hit:
            self.compiled[metadata["hash"]] += 1
            self.compiling += times.total / 1e6

    def pytest_report_header(self, config: pytest.Config) -> list[str]:
        """Return device, versions, kernel, profile, workers and relevant environment variables."""
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
            from fa_verify.simulator.interpreter import repair

            lines.append(f"attention: {repair.describe()}")
        if not is_ours(config):
            subject = subject_of(config)
            lines.append(f"attention: kernel {subject.name}, declares {subject.declared()}")
        if breadth := config.getoption("--fa-breadth", None):
            lines.append(f"attention: breadth {breadth}: {breadth_of(config).described}")
        if mask_of(config) is not None:
            lines.append(f"attention: masks of {config.getoption('--fa-mask')}")
        if REPLAY in config.stash:
            lines.append(f"attention: replaying {config.stash[REPLAY].to_json()}")
        return lines

    @pytest.hookimpl(trylast=True)
    def pytest_sessionstart(self, session: pytest.Session) -> None:
        """Print device, versions and kernel where the command leaves out pytest's header."""
        terminal = session.config.pluginmanager.get_plugin("terminalreporter")
        if terminal is None or not _is_brief(session.config):
            return
        device, *others = self.pytest_report_header(session.config)
        for line in (device, *(x for x in others if x.startswith(_SHOWN_IN_BRIEF))):
            terminal.write_line(line.removeprefix("attention: "))

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Give a worker the breadth of this process."""
        node.workerinput["breadth"] = node.config.getoption("--fa-breadth", None)

    @pytest.hookimpl(wrapper=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Iterator[None]:
        """Send a worker's counts to the controller."""
        output = getattr(session.config, "workeroutput", None)
        if output is not None:
            output["tally"] = self.tally.record()
            output["compiled"] = dict(self.compiled), self.compiling
        yield

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: object) -> None:
        """Add a worker's counts in the controller."""
        output = getattr(node, "workeroutput", {})
        if "tally" in output:
            self.tally.add(output["tally"])
            compiled, seconds = output["compiled"]
            self.compiled.update(compiled)
            self.compiling += seconds

    def pytest_terminal_summary(
        self, terminalreporter: pytest.TerminalReporter, config: pytest.Config
    ) -> None:
        """Print the counts, the largest error/bound of each output, and the declarations."""
        # pytest-xdist discards a worker's output, and listing the possible cells takes a second.
        if hasattr(config, "workerinput") or config.option.collectonly:
            return
        if (mask := mask_of(config)) is not None:
            terminalreporter.section("the mask: is this what you mean?")
            try:
                for line in pictures(mask):
                    terminalreporter.write_line(line)
            except Exception as error:
                # A test has failed with it.
                terminalreporter.write_line(f"no picture: {type(error).__name__}: {error}")
        if not (self.tally.problems or self.tally.unsupported):
            return
        brief = _is_brief(config)
        if brief:
            terminalreporter.write_line("")
            holds = not terminalreporter.stats.keys() & {"failed", "error"}
            lines = [*(self.tally.table() if holds else ()), *self.tally.counts(_MOST_REASONS)]
        else:
            terminalreporter.section("attention verification")
            if not is_ours(config):
                subject = subject_of(config)
                terminalreporter.write_line(f"{subject.name} declares {subject.declared()}")
            lines = [*self.tally.lines()]
        for line in lines:
            terminalreporter.write_line(line)
        if is_whole(config) and not brief:
            possible = possible_cells(subject_of(config), device_of(config))
            for line in coverage_lines(self.tally.coverage(possible)):
                terminalreporter.write_line(line)
        for kind, numbers in sorted(self.tally.combined.items()):
            missing, count = combinations_of(config, kind).missing(numbers)
            terminalreporter.write_line(combinations_line(missing, count, kind))
        if not self.tally.problems:
            terminalreporter.write_line("the kernel refused all problems, so nothing was verified")
        if ON_GPU and HAS_TRITON:
            terminalreporter.write_line(
                f"{len(self.compiled):,} kernels compiled in {self.compiled.total():,} "
                f"compilations, which took {self.compiling:,.0f} s"
            )


def _is_brief(config: pytest.Config) -> bool:
    """Return whether the command fa-verify runs without -v."""
    return config.rootpath == CONFORMANCE and config.option.verbose < 0


def _version(package: str) -> str:
    return importlib.metadata.version(package) if importlib.util.find_spec(package) else "none"
