"""``fa-verify probe``: print what a probe finds, and write it as JSON."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from fa_verify.pytest_plugin.environment import ON_GPU  # isort: skip  # before torch

import torch

from fa_verify.adapters.registry import NAMED, spec_of
from fa_verify.conformance_process import Status
from fa_verify.probing.answers import lines
from fa_verify.probing.domain import DEFECT
from fa_verify.probing.experiments import Experiment, observe
from fa_verify.probing.picture import svg, text
from fa_verify.probing.probe import BITS, RAISES, TOPICS, Probed, probe, refuted
from fa_verify.probing.same_bits import same_bits_of
from fa_verify.probing.trying import declares, stripped, watched
from fa_verify.properties.guarantees.caches import OTHER_CALLS
from fa_verify.properties.kernels.declared import narrowings
from fa_verify.properties.kernels.loading import load
from fa_verify.properties.kernels.subject import Subject
from fa_verify.properties.kernels.vocabulary import SAME_BITS
from fa_verify.properties.running.watchdog import Watchdog

__all__ = ["run", "subject_and_device"]

VERSION = 1
_MOST_NUMBERS = 6
# Topics that take a few seconds.
_CHEAP = ("domain", "conventions", "numerics")


def run(options: argparse.Namespace) -> int:
    """Probe the kernel of a command line; return 0, 1 if it refutes a declaration, 2 for usage."""
    # The checks run in pytest, where files of kernels may choose other configurations.
    os.environ.setdefault("PYTEST_VERSION", importlib.metadata.version("pytest"))
    try:
        subject, device = subject_and_device(options.kernel)
    except ValueError as error:
        print(f"fa-verify probe: {error}", file=sys.stderr)
        return Status.USAGE
    with tempfile.TemporaryDirectory() as folder:
        record = options.record or Path(folder) / "record.json"
        watchdog = Watchdog(record, options.problem_timeout, kernel=options.kernel)
        try:
            with watched(watchdog.watching):
                return _probe(options, subject, device)
        finally:
            watchdog.close()


def _probe(options: argparse.Namespace, subject: Subject, device: str) -> int:
    if options.assume is not None:
        return _assume(subject, device, Path(options.assume), bits=options.bits)
    if options.replay is not None:
        return _replay(subject, options.replay)
    probed = probe(subject, device, _progress(sys.stderr), topics=(*TOPICS, BITS))
    wrong = refuted(subject, probed)
    print(f"{probed.kernel} on {probed.device}")
    print("\n".join(lines(probed.answers)))
    print("\n".join(line for one in probed.sums for line in text(one)))
    print("\n".join(f"refuted: {sentence}" for sentence in wrong) or "no declaration is refuted")
    if options.json is not None:
        Path(options.json).write_text(_to_json(probed, wrong) + "\n", encoding="utf-8")
    if options.pictures is not None:
        folder = Path(options.pictures)
        folder.mkdir(parents=True, exist_ok=True)
        for one in probed.sums:
            name = f"{one.output}-along-{one.axis}-{one.dtype}.svg"
            (folder / name).write_text(svg(one) + "\n", encoding="utf-8")
    return Status.FAILED if wrong else Status.HOLDS


def _assume(subject: Subject, device: str, file: Path, *, bits: bool) -> int:
    """Write the declarations that the checks assume, and print them with their evidence.

    Nothing is written for a kernel that declares anything.
    """
    if declares(subject):
        return _tell_bits(subject, device) if bits else Status.HOLDS
    print(f"{subject.name} declares nothing: probing it", flush=True)
    began = time.monotonic()
    probed = probe(subject, device, _progress(sys.stdout), topics=_CHEAP)
    assumed = probed.assumed()
    seconds = time.monotonic() - began
    if raises := [answer for answer in probed.answers if answer.word == RAISES]:
        print(f"nothing is assumed after {seconds:.0f} s of probing:")
        print("\n".join(lines(raises)))
        return Status.HOLDS
    if defects := [answer for answer in probed.answers if answer.word == DEFECT]:
        print("\n".join(lines(defects)))
    what = "assume" if assumed else "assume nothing"
    print(f"the checks {what} after {seconds:.0f} s of probing{':' if assumed else ''}")
    print("\n".join(lines(dataclasses.replace(probed[x], value=y) for x, y in assumed.items())))
    if left := narrowings(assumed):
        print(f"the run can hold for {', '.join(left)}, which is NOT VERIFIED until it is declared")
    file.write_text(json.dumps(assumed), encoding="utf-8")
    return _tell_bits(subject.assuming(assumed), device) if bits else Status.HOLDS


def _tell_bits(subject: Subject, device: str) -> int:
    """Print which parts of a problem have the same bits, unless the kernel declares them all."""
    if {*(OTHER_CALLS if subject.reads_caches_alone else SAME_BITS)} <= {*subject.same_bits}:
        return Status.HOLDS
    print("the same bits in parts of a problem, which are not declared, so no check asks for them:")
    known = ("", *(f"_{word}" for word in subject.same_bits))
    of_word = same_bits_of(subject, device)
    print("\n".join(lines(x for x in of_word if x.word.removeprefix("same_bits") not in known)))
    return Status.HOLDS


def _replay(subject: Subject, line: str) -> int:
    """Run one experiment again, and print what each answer predicts."""
    try:
        which = Experiment.from_json(line)
    except ValueError as error:
        print(f"fa-verify probe: --replay: {error}", file=sys.stderr)
        return Status.USAGE
    seen = observe(stripped(subject), which)
    if seen.got is None:
        print(seen.error)
        return Status.HOLDS
    print(f"got {_numbers(seen.got)}")
    fits = seen.fits()
    for name, want in seen.expected.items():
        print(f"{'fits' if name in fits else 'no  '} {_numbers(want)} if {name}")
    return Status.HOLDS


def _numbers(x: torch.Tensor) -> str:
    """Format the first numbers of an observation."""
    shown = " ".join(f"{number:.9g}" for number in x.flatten()[:_MOST_NUMBERS].tolist())
    return shown + (" ..." if x.numel() > _MOST_NUMBERS else "")


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


def _progress(stream: TextIO) -> Callable[[str], None]:
    """Return a function that shows the property under way, if the stream is a terminal."""
    if not stream.isatty():
        return lambda _: None
    return lambda word: print(f"\r\033[K{word}\r", end="", file=stream, flush=True)


def _to_json(probed: Probed, wrong: list[str]) -> str:
    """Return the answers and the refuted declarations as one line of JSON."""
    record = {
        "version": VERSION, "kernel": probed.kernel, "device": probed.device,
        "declarations": probed.declarations(), "refuted": wrong,
        "answers": [answer.to_record() for answer in probed.answers],
        "sums": [json.loads(one.to_json()) for one in probed.sums],
    }  # fmt: skip
    return json.dumps(record, separators=(",", ":"))
