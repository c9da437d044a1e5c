"""Runs the checks on mutants of the kernels and of the harness.

python -m tests.mutation [source ...] [options]
python -m tests.mutation harness [--every N] [--seed S]
python -m tests.mutation mechanical [--draw N | --full] [--seed S]
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from fa_verify.forks import Ended, in_forks
from tests.mutation.catalogue.copies import PACKAGE, sources_of
from tests.mutation.catalogue.faults import FAULTS
from tests.mutation.catalogue.independent import INDEPENDENT
from tests.mutation.catalogue.mutant import Mutant, Verdict
from tests.mutation.catalogue.operators import HOPPER_SITES, draw, mechanical
from tests.mutation.catalogue.outcomes import Outcome, outcome, write
from tests.mutation.catalogue.subtle import SUBTLE
from tests.mutation.harness import sites
from tests.mutation.judging.interpreting import interpret
from tests.mutation.report import failed, summary, tables

if TYPE_CHECKING:
    from fa_verify.properties.running.trial import PlannedRun
    from tests.mutation.judging.trials import Step

SOURCES = ("harness", "faults", "independent", "subtle", "mechanical", "hopper")
# Seconds of wall time, which end mutants that wait forever. Limits of CPU time end the others.
SECONDS = 900.0
# One in so many mechanical mutants of the harness is run.
EVERY = 300
# So many mechanical mutants of the kernels are judged. One in 12 survives, and runs all judges.
DRAW = 100


def main(arguments: list[str] | None = None) -> int:
    """Returns 0 if every named fault is killed and the share of the others holds."""
    options = _options(arguments)
    kernels = sources_of(PACKAGE)
    found: list[Outcome] = []
    # Forks share the CPUs. ``keep_to_one_thread`` does the same, but belongs to the harness, and
    # the harness must not be imported before its mutants.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if "harness" in options.sources:
        found += _harness(options)
    if chosen := _chosen(kernels, options):
        found += _kernels(kernels, chosen, options)
    folder = Path(options.out)
    write(found, folder / "outcomes.jsonl")
    (folder / "kills.md").write_text(tables(found, full=options.matrix), encoding="utf-8")
    if options.matrix:
        from tests.mutation import picture

        picture.draw(found, folder / "kills.png")
    print(summary(found))
    print(f"written to {folder}")
    return int(failed(found))


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("sources", nargs="*", metavar="source", help=f"out of {', '.join(SOURCES)}")
    parser.add_argument("--full", action="store_true", help="all mechanical mutants of the kernels")
    parser.add_argument(
        "--draw",
        type=int,
        default=DRAW,
        metavar="N",
        help=f"so many mechanical mutants of the kernels, {DRAW} unless given",
    )
    parser.add_argument(
        "--matrix", action="store_true", help="every check of every mutant, untimed"
    )
    parser.add_argument(
        "--remember", action="store_true", help="run the step that kills a fault first from now on"
    )
    parser.add_argument(
        "--every",
        type=int,
        default=EVERY,
        metavar="N",
        help=f"one in N mechanical mutants of the harness, {EVERY} unless given; 0: none",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="which of both")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="mutants at a time")
    parser.add_argument("--only", default="", metavar="TEXT", help="names that hold this text")
    parser.add_argument("--out", default="build/mutation", metavar="FOLDER", help="for the reports")
    options = parser.parse_args(arguments)
    # Mutants of Hopper's kernels take long.
    options.sources = options.sources or [x for x in SOURCES if x != "hopper"]
    unknown = set(options.sources) - set(SOURCES)
    if unknown:
        parser.error(f"source is {', '.join(sorted(unknown))}; needs some of {', '.join(SOURCES)}")
    return options


def _chosen(kernels: dict[str, str], options: argparse.Namespace) -> list[tuple[str, Mutant]]:
    """Mutants of the kernels that the options select, as (source, mutant)."""
    made, on_hopper = mechanical(kernels), mechanical(kernels, HOPPER_SITES)
    made = [x for x in made if options.only in x.name]
    drawn = made if options.full else draw(made, options.draw, options.seed)
    if len(drawn) < len(made) and "mechanical" in options.sources:
        print(
            f"{len(drawn)} of {len(made)} mechanical mutants of the kernels, of seed {options.seed}"
        )
    lists = {
        "faults": FAULTS, "independent": INDEPENDENT, "subtle": SUBTLE, "mechanical": drawn,
        "hopper": on_hopper,
    }  # fmt: skip
    return [
        (source, mutant)
        for source, mutants in lists.items()
        for mutant in mutants
        if source in options.sources
        and options.only in mutant.name
        # A named fault without effect passes every step, so it takes the longest.
        and (options.matrix or mutant.key or not mutant.equivalent)
    ]


def _harness(options: argparse.Namespace) -> list[Outcome]:
    """Runs the harness mutants written by hand and a sample of the mechanical ones."""
    from tests.mutation.harness.mutants import HARNESS
    from tests.mutation.harness.verdict import judged_harness, warm_up

    warm_up()
    chosen = [("harness", x) for x in HARNESS]
    if options.every:
        sources = sources_of("oracles", "properties", "fa_verify")
        sampled = sites.sample(sources, options.every, options.seed)
        chosen += [("sampled", x) for x in sampled]
    chosen = [(source, x) for source, x in chosen if options.only in x.name]
    return _judged(chosen, [partial(judged_harness, mutant) for _, mutant in chosen], options)


def _kernels(
    kernels: dict[str, str], chosen: list[tuple[str, Mutant]], options: argparse.Namespace
) -> list[Outcome]:
    interpret()
    from tests.altered.emulation import emulate
    from tests.mutation.judging.hopper import ON_HOPPER
    from tests.mutation.judging.trials import ORDINARY, QUICK, STEPS
    from tests.mutation.judging.verdict import asked, judged_kernels, warmed
    from tests.mutation.kill_order import History, kill_order, remember

    # Subtle faults lie below the bound: only the steps on ordinary data can find them.
    of_sources = {"subtle": ORDINARY, "hopper": ON_HOPPER}
    units = {"subtle": -1, "hopper": len(ON_HOPPER) - 1}
    lists = {source: of_sources.get(source, STEPS) for source, _ in chosen}
    questions = {steps: asked(steps) for steps in set(lists.values())}
    warmed(next(iter(questions.values())))
    history = History(kill_order())
    unmutated = 0.0
    if any(source == "mechanical" for source, _ in chosen):
        unmutated = _control(kernels, STEPS, questions[STEPS])

    def works() -> Iterator[Callable[[], Verdict]]:
        """Yields the work of each mutant once it can start, so that earlier kills are known."""
        for source, mutant in chosen:
            steps = lists[source]
            yield partial(
                judged_kernels, kernels, mutant, steps, questions[steps],
                first=history.first(source, mutant),
                full=options.matrix, units=units.get(source, len(QUICK)),
                unmutated=unmutated,
                prepare=emulate if source == "hopper" else None,
            )  # fmt: skip

    found = _judged(chosen, works(), options, history.add)
    if options.remember:
        remember(found, STEPS)
    return found


def _control(
    kernels: dict[str, str], steps: tuple[Step, ...], questions: list[PlannedRun]
) -> float:
    """Checks that all judges pass the unmutated kernels; returns the CPU time that they take.

    Raises:
        RuntimeError: One does not, so that its kills say nothing about mutants.
    """
    from tests.mutation.judging.trials import QUICK
    from tests.mutation.judging.verdict import judged_kernels

    nothing = Mutant("the unmutated kernels", ())
    # Only the wall time limits them.
    work = partial(
        judged_kernels, kernels, nothing, steps, questions, units=len(QUICK), unmutated=SECONDS
    )
    (ended,) = in_forks([work], jobs=1, seconds=SECONDS)
    if ended.how != "returned" or ended.value.kills or ended.value.cut:
        raise RuntimeError(f"the unmutated kernels do not pass: {ended}")
    print(f"all judges pass the unmutated kernels, in {ended.seconds:.0f} s", flush=True)
    seconds: float = ended.value.seconds
    return seconds


def _judged(
    chosen: list[tuple[str, Mutant]],
    works: Iterable[Callable[[], object]],
    options: argparse.Namespace,
    tell: Callable[[str, Mutant, Ended], None] = lambda *_: None,
) -> list[Outcome]:
    """Prints a line as each mutant ends and returns the outcomes in the order of the lists.

    ``tell`` is called with the source, the mutant and the end of each.
    """
    started = time.monotonic()
    found: dict[int, Outcome] = {}
    seconds = 3600.0 if options.matrix else SECONDS
    for ended in in_forks(works, jobs=options.jobs, seconds=seconds):
        source, mutant = chosen[ended.number]
        tell(source, mutant, ended)
        result = found[ended.number] = outcome(source, mutant, ended)
        by = f" by {', '.join(result.checks)}" if result.checks else ""
        print(
            f"[{len(found)}/{len(chosen)}, {time.monotonic() - started:.0f} s] "
            f"{result.end}{by} in {result.seconds:.1f} s: {mutant.name}",
            flush=True,
        )
    return [found[number] for number in sorted(found)]


if __name__ == "__main__":
    sys.exit(main())
