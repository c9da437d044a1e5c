"""Run the conformance tests on every registered kernel and write the results.

``python -m benchmarks.findings [NAME ...] [-- OPTION ...]`` writes
results/DEVICE/findings.json, and FINDINGS.md from all such files and
results/other-repositories.md. Options after ``--``, such as
``-k hidden``, are passed to pytest.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.findings.document import document
from benchmarks.findings.environment import device_name, versions
from benchmarks.findings.process import conformance_of
from benchmarks.findings.results import OTHERS, read_all, write
from fa_verify.adapters.registry import NAMED, named
from fa_verify.reporting.recording import ROOT

__all__ = ["main"]

SECONDS = 600.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run and write; return 0 if all kernels ran and all files were read, whatever was found."""
    options = _options(arguments)
    try:
        bad = not options.document_only and _run(options)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    results, damaged = read_all(options.results)
    for why in damaged:
        print(why, file=sys.stderr)
    others = options.results / OTHERS
    said = others.read_text(encoding="utf-8") if others.is_file() else ""
    options.document.write_text(document(results, damaged, said), encoding="utf-8")
    print(f"wrote {options.document} for {len(results)} devices")
    return int(bad or bool(damaged))


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.findings", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="kernels (default: all)")
    parser.add_argument("--profile", default="dev", help="Hypothesis profile (default: dev)")
    parser.add_argument("--workers", default="auto", help="worker processes (default: auto)")
    parser.add_argument(
        "--seconds", type=float, default=SECONDS, help="time per kernel (default: %(default)g)"
    )
    parser.add_argument("--results", type=Path, default=ROOT / "results", help="folder of results")
    parser.add_argument("--document", type=Path, default=ROOT / "FINDINGS.md", help="file to write")
    parser.add_argument(
        "--document-only", action="store_true", help="run no tests, write the document only"
    )
    given = list(sys.argv[1:] if arguments is None else arguments)
    ours = given.index("--") if "--" in given else len(given)
    options = parser.parse_args(given[:ours])
    options.of_pytest = given[ours + 1 :]
    for name in options.names:
        try:
            named(name)
        except ValueError as error:
            parser.error(str(error))
    return options


def _run(options: argparse.Namespace) -> bool:
    """Run the kernels, writing after each; return whether a requested kernel is unavailable."""
    device = device_name()
    # Writing nothing first raises before any test runs if the existing file cannot be read.
    write(options.results, device, {}, {})
    missing = {name: why for name, kernel in NAMED.items() if (why := kernel.missing())}
    for name in options.names or NAMED:
        if name in missing:
            print(f"{name}: unavailable, {missing[name]}")
            continue
        started = time.monotonic()
        subject = _subject(name, options)
        write(options.results, device, {name: subject}, missing)
        fails = ", ".join(key for key, x in subject["guarantees"].items() if x["failed"])
        print(
            f"{name}: {subject['ended']} after {time.monotonic() - started:.0f} s, "
            f"{subject['tests']} tests; fails: {fails or 'nothing'}",
            flush=True,
        )
    return any(name in missing for name in options.names)


def _subject(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run the tests on one kernel and return its entry in the file of results."""
    kernel = NAMED[name]
    found = conformance_of(
        name,
        profile=options.profile,
        workers=options.workers,
        seconds=options.seconds,
        options=options.of_pytest,
    )
    with_options = f" with {shlex.join(options.of_pytest)}" if options.of_pytest else ""
    return {
        **found,
        "about": kernel.about,
        "never_promised": dict(kernel.never_promised),
        "versions": versions(kernel.distributions),
        "profile": f"{options.profile}{with_options}",
    }


if __name__ == "__main__":
    sys.exit(main())
