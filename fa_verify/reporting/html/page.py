"""Render a report as one self-contained HTML file without scripts, from ``page.html``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jinja2

from fa_verify.reporting.html import pictures
from fa_verify.reporting.statuses import alike

__all__ = ["page"]

# Number of failures shown on the page; report.json has all of them.
FAILURES = 30
# Number of causes with a picture.
MAPS = 12
OUTPUTS = ("out", "lse", "dq", "dk", "dv")
DTYPES = ("fp16", "bf16", "fp32", "tf32", "fp64")


@cache
def _template() -> jinja2.Template:
    """Return the template. It escapes the text of subjects, and refuses unknown names."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["number"] = _number
    return environment.get_template("page.html")


def page(record: Mapping[str, Any]) -> str:
    """Return the HTML of a report. All text from subjects is escaped.

    Args:
        record: The content of the report, as returned by ``content.record``.
    """
    subject = record["subject"] or {"name": "no kernel", "declares": "", "source": ""}
    results, by_dtype = record["results"], record["problems"]["by_dtype"]
    ends = [word for word in ("failed", "passed", "not run") if word in results]
    distribution = record["distribution"]
    draws = pictures.can_draw()
    dtypes = [x for x in DTYPES if x in by_dtype]
    return _template().render(
        {
            **record,
            "title": f"Verification of {subject['name']}",
            "subject": subject,
            "verdict": "failed" if record["exit_code"] else "passed",
            "counts": ", ".join(f"{results[word]:,} {word}" for word in ends) or "no tests",
            "judged": f"{sum(by_dtype.values()):,}",
            "failed": results.get("failed", 0),
            "can_draw": draws,
            "causes": [*_causes(record["causes"], draws)],
            "holds": [*_holds(record["checked"])],
            "reasons": _reasons(record["not_run"]),
            "dtypes": dtypes,
            "sharpness": [*_sharpness(record, dtypes)],
            "distribution": draws
            and distribution["counts"]
            and pictures.distribution(distribution["edges"], distribution["counts"]),
            "shown": FAILURES,
            "coverage": record.get("coverage"),
        }
    )


def _causes(causes: Sequence[Mapping[str, Any]], draws: bool) -> Iterator[dict[str, Any]]:
    """Yield the causes with all fields that the template reads, and their pictures."""
    for place, cause in enumerate(causes):
        finding = cause.get("finding", {})
        heat = finding.get("heat")
        fields = ("evidence", "smallest", "difference", "if_intended", "explain")
        yield {
            **dict.fromkeys((*fields, "behaves_as", "told", "message")),
            **cause,
            "where": _where(finding),
            "picture": draws
            and place < MAPS
            and heat is not None
            and pictures.heat_map(heat, finding["output"]),
        }


def _where(finding: Mapping[str, Any]) -> str:
    """Format the worst element and where bad ones lie."""
    if not finding.get("where"):
        return ""
    values = f"got {finding['got']}, want {finding['want']}"
    return f"{finding['where']}: {values}; {finding['places']}"


def _holds(checked: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """Yield each claim of which no check failed and one passed, with its dtypes."""
    for claim in checked:
        ends = claim["by_dtype"].values()
        passed = [dtype for dtype, x in claim["by_dtype"].items() if x.get("passed")]
        if passed and not any(x.get("failed") for x in ends):
            yield claim["claim"], ", ".join(x for x in (*DTYPES, "") if x in passed) or "any"


def _reasons(not_run: Sequence[Mapping[str, Any]]) -> list[tuple[int, str]]:
    """Return the number of checks that were not made and the reason, one for each kind of it."""
    counts: Counter[str] = Counter()
    shown: dict[str, str] = {}
    for x in not_run:
        kind = alike(x["reason"])
        counts[kind] += x["tests"]
        shown.setdefault(kind, x["reason"])
    return [(count, shown[kind]) for kind, count in counts.most_common()]


def _sharpness(record: Mapping[str, Any], dtypes: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Yield the rows of the table of the largest error/bound, under the number of problems."""
    by_dtype = record["problems"]["by_dtype"]
    yield "problems", *(f"{by_dtype[x]:,}" for x in dtypes)
    found = {(x["output"], x["dtype"]): _number(x["ratio"]) for x in record["worst"]}
    for output in OUTPUTS:
        yield output, *(found.get((output, dtype), "-") for dtype in dtypes)


def _number(ratio: float | None) -> str:
    return "infinite" if ratio is None else f"{ratio:.3f}"
