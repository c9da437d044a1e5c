"""Renders outcomes in Markdown: kills, the checks and times that they took, and survivors."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence

from tests.mutation.catalogue.outcomes import ENDS, Outcome
from tests.mutation.harness.sites import rate_interval

__all__ = ["failed", "markdown_table", "summary", "tables"]

# Sources of mechanical mutants, with what they are mutants of. Their survivors lower a share.
SAMPLED = {"sampled": "harness", "mechanical": "kernels", "hopper": "Hopper kernels"}
# The share of mechanical mutants of the kernels that is noticed, on record.
ON_RECORD = 0.92


def summary(outcomes: Sequence[Outcome]) -> str:
    """A line for each source, and every unexplained survivor."""
    lines = []
    for source in dict.fromkeys(x.source for x in outcomes):
        of_source = [x for x in outcomes if x.source == source]
        ends = Counter(x.end for x in of_source)
        counted = ", ".join(f"{ends[end]} {end}" for end in ENDS if ends[end])
        killing = [x.seconds for x in of_source if x.end == "killed"]
        speed = f"; median kill {statistics.median(killing):.2f} s" if killing else ""
        lines.append(f"{source}: {len(of_source)} mutants, {counted}{speed}")
    for source, of in SAMPLED.items():
        noticed, asked = _share(outcomes, source)
        if asked:
            low, high = rate_interval(noticed, asked)
            lines.append(
                f"mechanical mutants of the {of}: {noticed / asked:.1%} of {asked} "
                f"noticed, of all {low:.1%} to {high:.1%} (95 %)"
            )
    lines += [f"NOT KILLED: {x.name}" for x in outcomes if x.unexplained]
    lines += [f"CUT OFF, {x.detail}: {x.name}" for x in outcomes if x.end == "cut off"]
    lines += [
        f"LISTED AS EQUIVALENT, BUT {x.end.upper()} by {', '.join(x.checks) or 'itself'}: {x.name}"
        for x in outcomes
        if x.refuted
    ]
    lines += [
        f"missed, as is known: {x.name}" for x in outcomes if x.end == "survived" and x.missed
    ]
    return "\n".join(lines)


def _share(outcomes: Iterable[Outcome], source: str) -> tuple[int, int]:
    """(noticed, asked) of a source, without survivors that their line explains."""
    asked = [x for x in outcomes if x.source == source and not x.equivalent]
    return sum(x.noticed for x in asked), len(asked)


def failed(outcomes: Sequence[Outcome]) -> bool:
    """Whether a run fails: by a named fault, or by the share of the kernels' mutants.

    A named fault fails it by surviving without a reason, or by being noticed although it is said
    to be equivalent. The share fails it if its confidence interval lies below ``ON_RECORD``.
    """
    named = [x for x in outcomes if x.source not in SAMPLED]
    _, high = rate_interval(*_share(outcomes, "mechanical"))
    return high < ON_RECORD or any(x.refuted or x.unexplained for x in named)


def tables(outcomes: Sequence[Outcome], *, full: bool) -> str:
    """The whole report.

    Args:
        outcomes: The outcomes of one run.
        full: Whether every check ran on every mutant; the report then has a matrix.
    """
    parts = ["# What became of the mutants", _totals(outcomes), _by_check(outcomes)]
    if full:
        parts.append(_matrix(outcomes))
    survivors = [x for x in outcomes if x.end == "survived"]
    rows = [
        (x.name, x.equivalent or f"**missed**: {x.missed or 'why is not known'}") for x in survivors
    ]
    parts.append("## Survivors\n\n" + markdown_table(("mutant", "why no input shows it"), rows))
    if refuted := [
        (x.name, x.equivalent, ", ".join((x.end, *x.checks))) for x in outcomes if x.refuted
    ]:
        head = ("mutant", "listed as equivalent because", "end")
        parts.append("## Reasons that are false\n\n" + markdown_table(head, refuted))
    return "\n\n".join(parts) + "\n"


def _totals(outcomes: Sequence[Outcome]) -> str:
    """Counts by source and file, with the kill rates of mutants that are not equivalent."""
    rows = []
    for source, file in dict.fromkeys((x.source, x.file) for x in outcomes):
        part = [x for x in outcomes if (x.source, x.file) == (source, file)]
        ends = Counter(x.end for x in part if x.end != "survived")
        left = [x for x in part if x.end == "survived"]
        unexplained = sum(not x.equivalent for x in left)
        noticed = sum(x.noticed for x in part)
        decided = ends["killed"] + unexplained
        seconds = sorted(x.seconds for x in part if x.end == "killed")
        rows.append(
            (
                source, file, len(part), *(ends[end] for end in ENDS[:-1]),
                len(left) - unexplained, unexplained,
                f"{ends['killed'] / decided:.1%}" if decided else "-",
                f"{noticed / (noticed + unexplained):.1%}" if noticed + unexplained else "-",
                f"{statistics.median(seconds):.2f}" if seconds else "-",
            )
        )  # fmt: skip
    head = (
        "source", "file", "mutants", *ENDS[:-1], "equivalent", "not killed",
        "killed by a check, of those that ran", "noticed, crashes included", "median s",
    )  # fmt: skip
    return markdown_table(head, rows)


def _by_check(outcomes: Sequence[Outcome]) -> str:
    """Counts of mutants by the first check to fail."""
    first = Counter(x.checks[0] for x in outcomes if x.end == "killed")
    return "## The first check to fail\n\n" + markdown_table(
        ("check", "mutants"), first.most_common()
    )


def _matrix(outcomes: Sequence[Outcome]) -> str:
    """Every failing check of each named mutant, and each check's share of mechanical mutants."""
    checks = list(dict.fromkeys(check for x in outcomes for check in x.checks))
    named = [x for x in outcomes if x.source in ("faults", "independent", "subtle")]
    rows = [
        (x.name, *("x" if check in x.checks else "" for check in checks)) for x in named if x.checks
    ]
    shares = []
    for file in dict.fromkeys(x.file for x in outcomes if x.source == "mechanical"):
        part = [x for x in outcomes if (x.source, x.file) == ("mechanical", file) and x.checks]
        hits = Counter(check for x in part for check in x.checks)
        shares.append((file, len(part), *(f"{hits[check] / len(part):.0%}" for check in checks)))
    alone = Counter(x.checks[0] for x in outcomes if len(x.checks) == 1)
    return "\n\n".join(
        (
            "## Mutants against checks",
            markdown_table(("mutant", *checks), rows),
            "## Mechanical mutants: the share that each check fails on",
            markdown_table(("file", "mutants", *checks), shares),
            "## Mutants that one check alone fails on",
            markdown_table(("check", "mutants"), alone.most_common()),
        )
    )


def markdown_table(head: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """A table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(_cell(x) for x in line) + " |" for line in lines)


def _cell(value: object) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")
