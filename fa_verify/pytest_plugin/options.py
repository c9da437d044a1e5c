"""The command-line options of the plugin. Imports neither torch nor Hypothesis."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from fa_verify.oracles.renamed import SPELLINGS

__all__ = ["DEFAULT_SECONDS", "add_options", "add_short_forms", "given", "number_of"]

DEFAULT_SECONDS = 60.0
_START = "--fa-"
# By name without "--fa-": arguments of ``addoption``.
_OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "kernel": {
        "metavar": "KERNEL",
        "help": "verify this kernel instead of the project's own: path/to/file.py:name, "
        "package.module:name, or a name of --fa-list-kernels; the callable is "
        "f(q, k, v, *, mask, sm_scale) or f(q, k, v, causal, sm_scale)",
    },
    "assume": {
        "metavar": "JSON",
        "help": "declarations of a kernel that declares nothing, as fa-verify check finds them",
    },
    "forward-only": {
        "action": "store_true",
        "help": "verify no gradients, as if the kernel declared backward=False",
    },
    "breadth": {
        "metavar": "NAME",
        "help": "give a kernel on a CPU wide, medium or narrow problems, by their number and size "
        "(default: by the time that it takes)",
    },
    "quick": {
        "action": "store_true",
        "help": "run only the problems that kill most known faults, and regression files",
    },
    "list-kernels": {
        "action": "store_true",
        "help": "print the names that --fa-kernel accepts and whether each kernel can run here",
    },
    "findings": {
        "metavar": "FILE",
        "help": "write the outcome of every test and all findings to this file, one JSON object a "
        "line",
    },
    "mask": {
        "metavar": "FILE:CLASS",
        "help": "verify kernels on this class of masks, a subclass of "
        "fa_verify.oracles.masks.mask.Mask: path/to/file.py:Class or package.module:Class",
    },
    "replay": {
        "metavar": "JSON",
        "help": "run every guarantee on one problem: the JSON of a failure message",
    },
    "minutes": {
        "metavar": "NUMBER",
        "help": "draw new problems for this many minutes, on all workers, and keep those that fail",
    },
    "corpus": {
        "metavar": "FOLDER",
        "help": "folder of problems that failed: a run replays them first, and --fa-minutes adds "
        "to it (default: fa-verify-problems; in a clone, tests/regressions)",
    },
    "waive": {
        "metavar": "FILE",
        "help": "failures that are known: lines of a guarantee, a pattern of the message and a "
        "reason, separated by commas; they do not fail the run",
    },
    "example-db": {
        "metavar": "URL",
        "help": "share Hypothesis's examples with other machines, in the profile fuzz: "
        "redis://host:port[/number], rediss:// or unix://",
    },
    "problem-timeout": {
        "metavar": "SECONDS",
        "default": DEFAULT_SECONDS,
        "help": "end and report a process that uses more CPU time than this for one problem, 5 "
        "times as long by the clock, or 10 times as long to compile its kernels (default: 60). "
        "Such a test runs again first, with 5 times the limits",
    },
    "gpu-memory": {
        "metavar": "GIB",
        "help": "take at most so many GiB of each GPU, by all workers together; problems that need "
        "more are not asked",
    },
    "baseline": {
        "metavar": "FILE",
        "help": "run the problems of this file, and fail if errors, kernels, speed or coverage are "
        "worse than recorded in it",
    },
    "update-baseline": {
        "action": "store_true",
        "help": "write the results of this run to the file of --fa-baseline instead of comparing",
    },
    "report": {
        "metavar": "DIR",
        "help": "write report.html, one self-contained page, and report.json to this folder",
    },
    "sarif": {
        "metavar": "FILE",
        "help": "write the findings to this file as SARIF 2.1.0, which code scanning reads",
    },
}


def add_options(group: pytest.OptionGroup) -> None:
    """Add the options of the plugin, whose names all start with ``--fa-``."""
    for name, attributes in _OPTIONS.items():
        group.addoption(f"{_START}{name}", dest=_dest(name), **attributes)


def add_short_forms(group: pytest.OptionGroup) -> None:
    """Add ``--kernel`` for ``--fa-kernel``, and so on, with the old names of options.

    Other plugins may have options of these names, so only a conftest.py adds them.
    """
    for name, attributes in _OPTIONS.items():
        short = {**attributes, "dest": _dest(name), "help": f"short for {_START}{name}"}
        group.addoption(f"--{name}", **short)
    for old in SPELLINGS["options"]:
        group.addoption(old, help=argparse.SUPPRESS)


def given(options: argparse.Namespace) -> Iterator[str]:
    """Yield the options of the plugin that are on the command line."""
    for name, attributes in _OPTIONS.items():
        value = getattr(options, _dest(name), None)
        if value not in (None, False, attributes.get("default")):
            yield f"{_START}{name}"


def number_of(config: pytest.Config, name: str, unit: str, most: float = math.inf) -> float | None:
    """Return an option as a positive number, or None if it is not given.

    Raises:
        pytest.UsageError: The value is not a number, not above 0, or more than ``most``.
    """
    given = config.getoption(f"{_START}{name}", None)
    if given is None:
        return None
    try:
        number = float(given)
    except ValueError:
        number = 0.0
    if not 0 < number <= most or math.isinf(number):
        limit = "" if math.isinf(most) else f", at most {most:g}"
        raise pytest.UsageError(f"{_START}{name} is {given!r}; needs a number of {unit} > 0{limit}")
    return number


def _dest(name: str) -> str:
    return f"{_START}{name}".lstrip("-").replace("-", "_")
