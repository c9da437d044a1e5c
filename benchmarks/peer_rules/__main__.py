"""Compares all rules in a Markdown table: ``python -m benchmarks.peer_rules``."""

from __future__ import annotations

import argparse
import os
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from fa_verify.diagnosis.copies import PACKAGE, sources_of
from fa_verify.diagnosis.faults import FAULTS
from fa_verify.diagnosis.independent import INDEPENDENT
from fa_verify.diagnosis.mutant import Mutant
from fa_verify.forks import Ended, in_forks
from tests.mutation.judging.interpreting import interpret
from tests.mutation.mutants.operators import mechanical
from tests.mutation.report import markdown_table

__all__ = ["main"]

# One in so many mechanical mutants takes part.
EVERY = 20
SECONDS = 300.0


def main() -> None:
    """Judges mutants by every rule and writes the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peer_rules")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="mutants at a time")
    parser.add_argument("--only", default="", metavar="TEXT", help="rules whose name holds this")
    parser.add_argument("--out", default="results/peer-rules.md", metavar="FILE")
    options = parser.parse_args()
    interpret()
    from benchmarks.peer_rules.judging import COLUMNS, JUDGES, asked_of, judged_by_all

    sources = sources_of(PACKAGE)
    mutants = _mutants(sources)
    judges = [judge for judge in JUDGES if options.only in judge]
    asked = asked_of(judges)
    works = [partial(judged_by_all, sources, mutant, asked) for mutant in mutants]
    ends = []
    for ended in in_forks(works, jobs=options.jobs, seconds=SECONDS):
        ends.append(ended)
        print(f"[{len(ends)}/{len(mutants)}] {ended.how}: {mutants[ended.number].name}", flush=True)
    alarms = {
        (column, judge): (
            sum(judge in x.failed for x in asked if x.column == column),
            sum(judge in x.failed | x.passed for x in asked if x.column == column),
        )
        for column in COLUMNS
        for judge in judges
    }
    text = _report(ends, judges, COLUMNS, alarms)
    path = Path(options.out)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    print(text)


def _mutants(sources: dict[str, str]) -> list[Mutant]:
    """Recorded faults, independent mutants and a share of the mechanical mutants."""
    named = [x for x in (*FAULTS, *INDEPENDENT) if not x.equivalent]
    return [*named, *mechanical(sources)[::EVERY]]


def _report(
    ends: Sequence[Ended],
    judges: Sequence[str],
    columns: Sequence[str],
    alarms: dict[tuple[str, str], tuple[int, int]],
) -> str:
    """A table with a row for each rule, without the mutants that crash or hang."""
    returned = [ended.value for ended in ends if ended.how == "returned"]
    rest = len(ends) - len(returned)
    killed = Counter(
        (column, judge) for by in returned for column in columns for judge in by[column]
    )
    rows = []
    for judge in judges:
        row: list[object] = [judge]
        for column in columns:
            false, of = alarms[column, judge]
            row += [f"{killed[column, judge]} of {len(returned)}", f"{false} of {of}"]
        rows.append(row)
    head = ["rule"]
    for column in columns:
        head += [f"killed on {column}", f"false alarms on {column}"]
    note = f"{len(ends)} mutants; {rest} more crashed or hung and are in no count."
    return f"{note}\n\n{markdown_table(head, rows)}\n"


if __name__ == "__main__":
    main()
