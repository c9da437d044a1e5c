"""Chooses the problems of ``fa-verify check --quick`` by the mutants that they kill.

python -m tests.mutation.quick choose [--every N] [--jobs J]
python -m tests.mutation.quick fill [--budget SECONDS] [--jobs J]
python -m tests.mutation.quick measure [--every N] [--jobs J] [--seed S]

``choose`` writes fa_verify/quick.json. It starts from the kills of half of the faults on record,
which kill_order.json holds. Half of the independent and of the subtle faults follow, and one in N
mechanical mutants. Batch by batch, each mutant meets the problems chosen so far, the deadliest
first, and then all others in their usual order. The first that kills it is chosen.

``fill`` measures the CPU time of all problems and keeps those of the most kills a second, up to
the budget. A problem counts half a kill more than were measured, because a sample of mutants does
not show the use of each.

``measure`` takes the other half, and other mechanical mutants. It counts those that the chosen
problems kill and those that only the other problems kill, and names the latter. Mutants that
nothing kills within the time limit are counted apart: only unit tests, or later problems, find
them.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fa_verify.forks import in_forks
from tests.mutation.catalogue.copies import PACKAGE, sources_of
from tests.mutation.catalogue.faults import FAULTS
from tests.mutation.catalogue.independent import INDEPENDENT
from tests.mutation.catalogue.mutant import Mutant
from tests.mutation.catalogue.operators import mechanical
from tests.mutation.catalogue.subtle import SUBTLE
from tests.mutation.harness.sites import rate_interval
from tests.mutation.judging.interpreting import interpret

if TYPE_CHECKING:
    from fa_verify.properties.running.trial import PlannedRun
    from tests.mutation.judging.trials import Step

BATCH = 12


def main(arguments: list[str] | None = None) -> int:
    """Choose or measure, and print the counts; returns 0."""
    options = _options(arguments)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    interpret()
    from tests.mutation.judging.trials import ORDINARY, STEPS
    from tests.mutation.judging.verdict import asked, warmed

    pool = [*STEPS, *ORDINARY]
    planned = asked(pool)
    warmed(planned)
    sources = sources_of(PACKAGE)
    halves = _mutants(sources, options.every, options.command == "measure")
    mutants = [x for x in halves if options.only in ("", x[0])]
    if options.command == "fill":
        _fill(pool, planned, options)
    elif options.command == "choose":
        _choose(sources, mutants, pool, planned, options)
    else:
        _measure(sources, mutants, pool, planned, options)
    return 0


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutation.quick",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=("choose", "fill", "measure"))
    parser.add_argument("--every", type=int, default=20, help="one in so many mechanical mutants")
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="CPU time of a mutant that nothing kills"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="mutants at a time")
    parser.add_argument(
        "--budget", type=float, default=30.0, help="fill: CPU time of all problems, in seconds"
    )
    parser.add_argument("--only", default="", metavar="LIST", help="measure: mutants of this list")
    parser.add_argument("--seed", type=int, default=0, help="measure: other values in the problems")
    return parser.parse_args(arguments)


def _mutants(sources: dict[str, str], every: int, held_out: bool) -> Iterator[tuple[str, Mutant]]:
    """Yields (list, mutant) of one half, without named faults that no problem can kill."""
    made = mechanical(sources)
    lists: dict[str, Sequence[Mutant]] = {
        "on record": FAULTS, "independent": INDEPENDENT, "subtle": SUBTLE,
        "mechanical": made[every // 2 * held_out :: every],
    }  # fmt: skip
    for source, mutants in lists.items():
        for mutant in mutants:
            digest = hashlib.blake2b(mutant.name.encode(), digest_size=1).digest()[0]
            chosen = source == "mechanical" or digest % 2 == held_out
            if chosen and (mutant.key or not (mutant.equivalent or mutant.missed)):
                yield source, mutant


def _first_kill(
    sources: dict[str, str],
    mutant: Mutant,
    pool: Sequence[Step],
    planned: Sequence[PlannedRun],
    order: Sequence[int],
    most: float,
) -> tuple[int | None, str, float]:
    """The step that first kills a mutant, or None, with the check and the CPU time."""
    from tests.mutation.judging.verdict import killed_by

    started = time.process_time()
    with tempfile.TemporaryDirectory(prefix="quick-") as folder:
        kills = killed_by(
            sources, mutant, [pool[i] for i in order], [planned[i] for i in order], Path(folder),
            lambda: time.process_time() - started < most,
        )  # fmt: skip
        kill = next(kills, None)
    seconds = time.process_time() - started
    if kill is None:
        return None, "", seconds
    # A mutant that cannot be imported is found by any problem.
    return (order[kill.step] if kill.step >= 0 else -1), kill.check, seconds


def _judged(
    sources: dict[str, str],
    mutants: Sequence[tuple[str, Mutant]],
    pool: Sequence[Step],
    planned: Sequence[PlannedRun],
    order: Sequence[int],
    options: argparse.Namespace,
) -> Iterator[tuple[str, Mutant, int | None, str]]:
    """Yields (list, mutant, step, check) as mutants end; a crash is a kill at the start."""
    works = [
        partial(_first_kill, sources, x, pool, planned, order, options.seconds) for _, x in mutants
    ]
    for ended in in_forks(works, jobs=options.jobs, seconds=20 * options.seconds):
        source, mutant = mutants[ended.number]
        # A busy machine ends slow mutants by the clock, so this is no kill.
        lost = (None if ended.how == "timed out" else -1, ended.how, 0.0)
        step, check, seconds = ended.value or lost
        print(f"{check or 'not killed'} at {step} in {seconds:.1f} s: {mutant.name}", flush=True)
        yield source, mutant, step, check


def _choose(
    sources: dict[str, str],
    mutants: Sequence[tuple[str, Mutant]],
    pool: Sequence[Step],
    planned: Sequence[PlannedRun],
    options: argparse.Namespace,
) -> None:
    from fa_verify.quick import FILE
    from tests.mutation.kill_order import kill_order

    numbers = {step.problem.to_json(): i for i, step in enumerate(pool)}
    recorded = kill_order()
    killers = [numbers.get(recorded.get(x.name, ""), -1) for _, x in mutants]
    kills = Counter(number for number in killers if number >= 0)
    mutants = [x for x, number in zip(mutants, killers, strict=True) if number < 0]
    # Batches of all lists, so that the choice does not depend on one.
    mixed = sorted(mutants, key=lambda x: hashlib.blake2b(x[1].name.encode()).digest())
    for start in range(0, len(mixed), BATCH):
        order = [
            *(i for i, _ in kills.most_common()),
            *(i for i in range(len(pool)) if i not in kills),
        ]
        batch = mixed[start : start + BATCH]
        for _, _, step, _ in _judged(sources, batch, pool, planned, order, options):
            if step is not None and step >= 0:
                kills[step] += 1
    chosen = [
        {"problem": json.loads(pool[i].problem.to_json()), "checks": pool[i].checks, "kills": count}
        for i, count in kills.most_common()
    ]
    FILE.write_text(json.dumps(chosen, indent=1) + "\n", encoding="utf-8")
    print(f"{len(chosen)} of {len(pool)} problems kill {kills.total()} mutants")


def _cost(step: Step, planned: PlannedRun) -> float:
    """The CPU time of a problem and its checks on the correct kernels."""
    from fa_verify.adapters.ours import flash_attention
    from fa_verify.properties.kernels.subject import Subject
    from tests.mutation.judging.trials import CHECKS

    started = time.process_time()
    trial = planned.run(Subject.of(flash_attention, "flash_attention"))
    for name in step.checks:
        CHECKS[name](trial)
    return time.process_time() - started


def _key(record: dict[str, Any]) -> str:
    """An entry of quick.json without its kills."""
    return json.dumps([record["problem"], record["checks"]])


def _fill(pool: Sequence[Step], planned: Sequence[PlannedRun], options: argparse.Namespace) -> None:
    from fa_verify.quick import FILE

    kills = {_key(x): x["kills"] for x in json.loads(FILE.read_text(encoding="utf-8"))}
    works = [partial(_cost, *x) for x in zip(pool, planned, strict=True)]
    costs = {x.number: x.value for x in in_forks(works, jobs=options.jobs, seconds=3600.0)}
    records = [
        {"problem": json.loads(x.problem.to_json()), "checks": list(x.checks), "kills": 0}
        for x in pool
    ]
    for record in records:
        record["kills"] = kills.get(_key(record), 0)
    order = sorted(costs, key=lambda i: -(records[i]["kills"] + 0.5) / costs[i])
    total, chosen = 0.0, []
    for number in order:
        if total + costs[number] <= options.budget:
            total += costs[number]
            chosen.append(number)
    content = [records[i] for i in sorted(chosen, key=lambda i: -records[i]["kills"])]
    FILE.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print(
        f"{len(chosen)} of {len(pool)} problems take {total:.0f} s of {sum(costs.values()):.0f} s"
    )
    for number in sorted({*costs} - {*chosen}):
        checks, problem = ", ".join(pool[number].checks), pool[number].problem.to_json()
        print(
            f"left out: {costs[number]:.1f} s, {records[number]['kills']} kills, "
            f"{checks}: {problem}"
        )


def _measure(
    sources: dict[str, str],
    mutants: Sequence[tuple[str, Mutant]],
    pool: Sequence[Step],
    planned: Sequence[PlannedRun],
    options: argparse.Namespace,
) -> None:
    from fa_verify.quick import entries
    from tests.mutation.judging.trials import Step
    from tests.mutation.judging.verdict import asked

    quick = [
        Step(dataclasses.replace(x.problem, seed=x.problem.seed + 840 * options.seed), x.checks)
        for x in entries()
    ]
    steps, order = [*quick, *pool], [*range(len(quick) + len(pool))]
    counts: dict[str, Counter[str]] = {}
    missed = []
    for source, mutant, step, check in _judged(
        sources, mutants, steps, [*asked(quick), *planned], order, options
    ):
        how = "not killed" if step is None else "quick" if step < len(quick) else "full alone"
        counts.setdefault(source, Counter())[how] += 1
        if how == "full alone":
            missed.append(f"{mutant.name} ({check} on {steps[step].problem.to_json()})")
    print(f"seed {options.seed}:")
    for source, found in [*counts.items(), ("all", sum(counts.values(), Counter()))]:
        quickly, both = found["quick"], found["quick"] + found["full alone"]
        low, high = rate_interval(quickly, both)
        print(
            f"{source}: {quickly} of {both} ({low:.0%} to {high:.0%}); "
            f"{found['not killed']} not killed by either"
        )
    print(*(f"only full: {x}" for x in missed), sep="\n")


if __name__ == "__main__":
    sys.exit(main())
