"""The options of a run. Those of the gate and of the report stand in their folders."""

from __future__ import annotations

import argparse

import pytest

from fa_verify.oracles import renamed
from fa_verify.pytest_plugin.crash_reports import DEFAULT_SECONDS
from fa_verify.pytest_plugin.gate import plugin as gate
from fa_verify.pytest_plugin.report import plugin as report

__all__ = ["add_options"]


def add_options(group: pytest.OptionGroup) -> None:
    """Adds the options of the suite to pytest's own."""
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
    gate.add_options(group)
    report.add_options(group)
    for old in renamed.OPTIONS:
        group.addoption(old, help=argparse.SUPPRESS)
