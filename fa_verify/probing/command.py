"""``fa-verify probe``: print what a probe finds, and write it as JSON."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

from fa_verify.pytest_plugin.environment import ON_GPU  # isort: skip  # before torch

from fa_verify.probing.answers import lines
from fa_verify.probing.probe import Probed, probe, refuted
from fa_verify.properties.subjects.loading import load
from fa_verify.properties.subjects.subject import Subject
from fa_verify.registry import NAMED, spec_of

__all__ = ["run", "subject_and_device"]

VERSION = 1
_HOLDS, _FOUND, _USAGE = 0, 1, 2


def run(options: argparse.Namespace) -> int:
    """Probe the kernel of a command line; return 0, 1 if it refutes a declaration, 2 for usage."""
    try:
        subject, device = subject_and_device(options.kernel)
    except ValueError as error:
        print(f"fa-verify probe: {error}", file=sys.stderr)
        return _USAGE
    probed = probe(subject, device, _progress())
    wrong = refuted(subject, probed)
    print(f"{probed.kernel} on {probed.device}")
    print("\n".join(lines(probed.answers)))
    print("\n".join(f"refuted: {sentence}" for sentence in wrong) or "no declaration is refuted")
    if options.json is not None:
        Path(options.json).write_text(_to_json(probed, wrong) + "\n", encoding="utf-8")
    return _FOUND if wrong else _HOLDS


def subject_and_device(given: str) -> tuple[Subject, str]:
    """Load a kernel, and choose the device that it runs on.

    Without a GPU, Triton kernels run in the interpreter.

    Raises:
        ValueError: The kernel cannot be loaded or run here.
    """
    device = "cuda" if ON_GPU else "cpu"
    sys.path.insert(0, os.getcwd())
    subject = load(spec_of(given))
    if device not in subject.devices:
        device = subject.devices[0]
        if device == "cuda":
            raise ValueError(f"{given} declares devices {subject.devices}, and no GPU is visible")
    name = given if given in NAMED else subject.name
    return dataclasses.replace(subject, name=name, source=given), device


def _progress() -> Callable[[str], None]:
    """Return a function that shows the property under way on a terminal."""
    if not sys.stderr.isatty():
        return lambda _: None
    return lambda word: print(f"\r\033[K{word}\r", end="", file=sys.stderr, flush=True)


def _to_json(probed: Probed, wrong: list[str]) -> str:
    """Return the answers and the refuted declarations as one line of JSON."""
    record = {
        "version": VERSION, "kernel": probed.kernel, "device": probed.device,
        "declarations": probed.declarations(), "refuted": wrong,
        "answers": [answer.to_record() for answer in probed.answers],
    }  # fmt: skip
    return json.dumps(record, separators=(",", ":"))
