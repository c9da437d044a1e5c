"""Puts mutants before their judges: ``python -m tests.mutation [source ...] [options]``."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from fa_verify.diagnosis.copies import PACKAGE, sources_of
from fa_verify.diagnosis.faults import FAULTS
from fa_verify.diagnosis.forks import in_forks
from fa_verify.diagnosis.independent import BLIND
from fa_verify.diagnosis.mutant import Mutant, StaleError
from fa_verify.diagnosis.outcomes import Outcome, outcome, write
from fa_verify.diagnosis.subtle import SUBTLE
from tests.mutation.equivalent import EQUIVALENT
from tests.mutation.interpreting import interpret
from tests.mutation.operators import HOPPER_SITES, mechanical
from tests.mutation.report import summary, tables

SOURCES = ("referee", "faults", "blind", "subtle", "mechanical", "hopper")
# Those that nobody notices take 100 to 300, by the machine and by what runs beside them.
SECONDS = 400.0


def main(arguments: list[str] | None = None) -> int:
    """Returns 0 if nothing survived that should not."""
    options = _options(arguments)
    kernels = sources_of(PACKAGE)
    found: list[Outcome] = []
    # Forks share the CPUs. As ``keep_to_one_thread``, but that is a part of the referee, which
    # nothing may import before its mutants do.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if "referee" in options.sources:
        found += _referee(options)
    if chosen := _chosen(kernels, options):
        found += _kernels(kernels, chosen, options)
    folder = Path(options.out)
    write(found, folder / "outcomes.jsonl")
    (folder / "kills.md").write_text(tables(found, full=options.full), encoding="utf-8")
    if options.full:
        from tests.mutation.picture import draw

        draw(found, folder / "kills.png")
    print(summary(found))
    print(f"written to {folder}")
    return int(any(x.unexplained for x in found))


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    parser.add_argument("sources", nargs="*", metavar="source", help=f"out of {', '.join(SOURCES)}")
    parser.add_argument("--full", action="store_true", help="every check of every mutant, untimed")
    parser.add_argument(
        "--remember", action="store_true", help="ask what kills a fault first from now on"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="mutants at a time")
    parser.add_argument("--only", default="", metavar="TEXT", help="names that hold this text")
    parser.add_argument("--out", default="build/mutation", metavar="FOLDER", help="for the reports")
    options = parser.parse_args(arguments)
    # Those of Hopper's kernels take long, and what lives of them is not explained yet.
    options.sources = options.sources or [x for x in SOURCES if x != "hopper"]
    unknown = set(options.sources) - set(SOURCES)
    if unknown:
        parser.error(f"source is {', '.join(sorted(unknown))}; needs some of {', '.join(SOURCES)}")
    return options


def _chosen(kernels: dict[str, str], options: argparse.Namespace) -> list[tuple[str, Mutant]]:
    """(source, mutant) of what the options ask for, of the kernels."""
    made, on_hopper = mechanical(kernels), mechanical(kernels, HOPPER_SITES)
    stale = EQUIVALENT.keys() - {mutant.name for mutant in (*made, *on_hopper)}
    if stale:
        raise StaleError(f"listed as equivalent, but no such mutant is made: {sorted(stale)}")
    lists = {"faults": FAULTS, "blind": BLIND, "subtle": SUBTLE, "mechanical": made}
    lists["hopper"] = on_hopper
    return [
        (source, mutant)
        for source, mutants in lists.items()
        for mutant in mutants
        if source in options.sources
        and options.only in mutant.name
        # They take all of the time that there is to show that nothing happens.
        and (options.full or not (mutant.equivalent or mutant.name in EQUIVALENT))
    ]


def _referee(options: argparse.Namespace) -> list[Outcome]:
    from tests.mutation.referee import REFEREE
    from tests.mutation.referee_verdict import judged_referee, warm_up

    warm_up()
    chosen = [("referee", x) for x in REFEREE if options.only in x.name]
    return _judged(chosen, [partial(judged_referee, mutant) for _, mutant in chosen], options)


def _kernels(
    kernels: dict[str, str], chosen: list[tuple[str, Mutant]], options: argparse.Namespace
) -> list[Outcome]:
    interpret()
    from fa_verify.subjects.emulation import emulate
    from tests.mutation.asked_first import asked_first, remember
    from tests.mutation.hopper import ON_HOPPER
    from tests.mutation.trials import ORDINARY, QUICK, STEPS
    from tests.mutation.verdict import asked, judged_kernels, warmed

    # Subtle faults are about what companions see that the bound does not: nothing else is asked.
    of_sources = {"subtle": ORDINARY, "hopper": ON_HOPPER}
    units = {"subtle": -1, "hopper": len(ON_HOPPER) - 1}
    lists = {source: of_sources.get(source, STEPS) for source, _ in chosen}
    questions = {steps: asked(steps) for steps in set(lists.values())}
    warmed(next(iter(questions.values())))
    firsts = asked_first()
    works = [
        partial(
            judged_kernels, kernels, mutant, lists[source], questions[lists[source]],
            first=firsts.get(mutant.name, "") if source == "faults" else "",
            full=options.full, units=units.get(source, len(QUICK)),
            prepare=emulate if source == "hopper" else None,
        )
        for source, mutant in chosen
    ]  # fmt: skip
    found = _judged(chosen, works, options)
    if options.remember:
        remember(found, STEPS)
    return found


def _judged(
    chosen: list[tuple[str, Mutant]],
    works: Iterable[Callable[[], object]],
    options: argparse.Namespace,
) -> list[Outcome]:
    """The outcomes in the order of the lists; a line for each as it ends."""
    started = time.monotonic()
    found: dict[int, Outcome] = {}
    # Without a limit a loop that never ends would hold the run: an hour is none.
    seconds = 3600.0 if options.full else SECONDS
    for ended in in_forks(works, jobs=options.jobs, seconds=seconds):
        source, mutant = chosen[ended.number]
        reason = mutant.equivalent or EQUIVALENT.get(mutant.name, "")
        result = found[ended.number] = outcome(source, mutant, ended, reason)
        by = f" by {', '.join(result.checks)}" if result.checks else ""
        print(
            f"[{len(found)}/{len(chosen)}, {time.monotonic() - started:.0f} s] "
            f"{result.end}{by} in {result.seconds:.1f} s: {mutant.name}",
            flush=True,
        )
    return [found[number] for number in sorted(found)]


if __name__ == "__main__":
    sys.exit(main())
