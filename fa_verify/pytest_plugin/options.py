"""The command-line options, except those that ``gate`` and ``report`` define."""

from __future__ import annotations

import argparse

import pytest

from fa_verify.oracles import renamed
from fa_verify.pytest_plugin.crash_reports import DEFAULT_SECONDS
from fa_verify.pytest_plugin.gate import plugin as gate
from fa_verify.pytest_plugin.report import plugin as report

__all__ = ["add_options"]


def add_options(group: pytest.OptionGroup) -> None:
    """Add the options of the suite to pytest's own."""
    group.addoption(
        "--kernel",
        metavar="KERNEL",
        help="verify this kernel instead of the project's own: path/to/file.py:name, "
        "package.module:name, or a name of --list-kernels; the callable is "
        "f(q, k, v, *, mask, sm_scale) or f(q, k, v, causal, sm_scale)",
    )
    group.addoption(
        "--forward-only",
        action="store_true",
        help="verify no gradients, as if the kernel declared backward=False",
    )
    group.addoption(
        "--quick",
        action="store_true",
        help="run only the problems that kill most known faults, and regression files",
    )
    group.addoption(
        "--list-kernels",
        action="store_true",
        help="print the names that --kernel accepts and whether each kernel can run here",
    )
    group.addoption(
        "--findings",
        metavar="FILE",
        help="write the outcome of every test and all findings to this file, one JSON object a "
        "line",
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
        help="check that this GPU detects the mutants that only a GPU can detect",
    )
    group.addoption(
        "--minutes",
        metavar="NUMBER",
        help="draw new problems for this many minutes, on all workers, and keep those that fail",
    )
    group.addoption(
        "--corpus",
        metavar="FOLDER",
        help="folder of problems that failed: a run replays them first, and --minutes adds to it "
        "(default: tests/regressions)",
    )
    group.addoption(
        "--example-db",
        metavar="URL",
        help="share Hypothesis's examples with other machines, in the profile fuzz: "
        "redis://host:port[/number], rediss:// or unix://",
    )
    group.addoption(
        "--problem-timeout",
        metavar="SECONDS",
        default=DEFAULT_SECONDS,
        help="end and report a process that uses more CPU time than this for one problem, 5 times "
        "as long by the clock, or 10 times as long to compile its kernels (default: 60)",
    )
    gate.add_options(group)
    report.add_options(group)
    for old in renamed.OPTIONS:
        group.addoption(old, help=argparse.SUPPRESS)
