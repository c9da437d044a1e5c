"""Render a report as one self-contained HTML file without scripts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from typing import Any

from fa_verify.pytest_plugin.report import pictures

__all__ = ["page"]

# Number of failures shown on the page; report.json has all of them.
FAILURES = 30
MAPS = 6
OUTPUTS = ("out", "lse", "dq", "dk", "dv")
DTYPES = ("fp16", "bf16", "fp32", "tf32", "fp64")

_STYLE = """
:root { color-scheme: light; }
body { margin: 0; background: #f5f7fa; color: #1f2933;
       font: 15px/1.5 system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 24px 32px 64px; }
h1 { font-size: 24px; margin: 8px 0 4px; }
h2 { font-size: 18px; margin: 36px 0 8px; padding-top: 12px; border-top: 1px solid #cbd2d9; }
h3 { font-size: 15px; margin: 20px 0 6px; overflow-wrap: anywhere; }
p { margin: 6px 0; }
.verdict { padding: 10px 16px; border-radius: 6px; font-weight: 600; color: #fff; }
.passed { background: #046c4e; } .failed { background: #c81e1e; }
.muted { color: #52606d; }
.alarm { color: #c81e1e; font-weight: 600; }
table { border-collapse: collapse; margin: 8px 0; background: #fff; }
th, td { padding: 4px 12px; border: 1px solid #e4e7eb; text-align: left; vertical-align: top; }
th { background: #e4e7eb; font-weight: 600; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; }
code, pre { font: 13px/1.45 ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace; }
code { overflow-wrap: anywhere; }
pre { background: #fff; border: 1px solid #e4e7eb; border-radius: 4px; padding: 10px 12px;
      white-space: pre-wrap; overflow-wrap: anywhere; margin: 6px 0; }
img { max-width: 100%; background: #fff; border: 1px solid #e4e7eb; border-radius: 4px; }
details > summary { cursor: pointer; margin: 6px 0; }
"""


def page(record: Mapping[str, Any]) -> str:
    """Return the HTML of a report. All text from subjects is escaped.

    Args:
        record: The content of the report, as returned by ``content.record``.
    """
    subject = record["subject"] or {"name": "no kernel", "declares": "", "source": ""}
    title = f"Verification of {subject['name']}"
    parts = [
        *_head(record, subject),
        *_failures(record["failures"]),
        *_baseline(record["baseline"]),
        *_worst(record),
        *_distribution(record["distribution"]),
        *_coverage(record.get("coverage")),
        *_checked(record),
        *_mutants(record["mutants"]),
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<main>\n"
        f"<h1>{escape(title)}</h1>\n" + "\n".join(parts) + "\n</main>\n</body>\n</html>\n"
    )


def _head(record: Mapping[str, Any], subject: Mapping[str, str]) -> Iterator[str]:
    failed = record["exit_code"] != 0
    results = record["results"]
    ends = [word for word in ("failed", "passed", "not run") if word in results]
    counts = ", ".join(f"{results[word]:,} {word}" for word in ends)
    judged = sum(record["problems"]["by_dtype"].values())
    verdict = "failed" if failed else "passed"
    gate = f"; baseline: {record['baseline']['verdict']}" if record["baseline"] else ""
    yield (
        f'<p class="verdict {verdict}">{verdict.capitalize()}: {counts or "no tests"}; '
        f"{judged:,} distinct problems judged{escape(gate)}</p>"
    )
    yield f"<p>Declares: {escape(subject['declares'] or 'nothing')}</p>"
    lines = [*record["header"], record["command"]]
    when = f"{record['started']}, {record['seconds']:,} s"
    yield f"<pre>{escape(chr(10).join(lines))}</pre>\n<p class=muted>{escape(when)}</p>"
    if not pictures.can_draw():
        yield (
            "<p class=muted>There are no pictures: matplotlib is not installed "
            "(install the extra <code>report</code>).</p>"
        )


def _failures(failures: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    if not failures:
        return
    yield f"<h2>Failures ({len(failures):,})</h2>"
    maps = 0
    for failure in failures[:FAILURES]:
        yield f"<h3>{escape(failure['test'])}</h3>"
        findings = failure["findings"]
        texts = [f"<pre>{escape(x['text'])}</pre>" for x in findings or [failure]]
        yield texts[0]
        drawn = next((x for x in findings if x["heat"]), None)
        if drawn and maps < MAPS and pictures.can_draw():
            maps += 1
            yield _image(
                pictures.heat_map(drawn["heat"], drawn["output"]), f"Where {drawn['output']} errs"
            )
        if texts[1:]:
            others = "".join(texts[1:])
            yield f"<details><summary>{len(texts) - 1} more findings</summary>{others}</details>"
    if len(failures) > FAILURES:
        yield f"<p>{len(failures) - FAILURES:,} more are in report.json.</p>"


def _baseline(baseline: Mapping[str, Any] | None) -> Iterator[str]:
    if baseline is None:
        return
    yield f"<h2>Compared with the baseline {escape(baseline['file'])}</h2>"
    yield f"<p>{escape(baseline['verdict'])}</p>"
    changes = sorted(baseline["changes"], key=lambda change: not change["alarm"])
    if changes:
        rows = [
            (_Raw('<span class="alarm">alarm</span>') if x["alarm"] else "", x["part"], x["text"])
            for x in changes
        ]
        yield _table(("", "part", "difference"), rows)


def _worst(record: Mapping[str, Any]) -> Iterator[str]:
    worst, problems = record["worst"], record["problems"]
    yield "<h2>Largest error / bound</h2>"
    if not worst:
        yield "<p>No problem was judged.</p>"
        return
    found = {(x["output"], x["dtype"]): x["ratio"] for x in worst}
    dtypes = [x for x in DTYPES if x in problems["by_dtype"]]
    cells = [(output, *(_ratio(found, output, dtype) for dtype in dtypes)) for output in OUTPUTS]
    counts = [("problems", *(f"{problems['by_dtype'][x]:,}" for x in dtypes))]
    yield _table(("", *dtypes), counts + cells, numbers=True)
    yield (
        f"<p>{problems['several_tiles']:,} problems span several tiles both ways; "
        f"{problems['out_of_range']:,} were drawn out of range.</p>"
    )
    if problems["unsupported"]:
        yield _table(("not supported, because", "problems"), problems["unsupported"].items())
    yield "<h3>The worst problems</h3>"
    rows = [
        (x["output"], x["dtype"], _number(x["ratio"]), _Raw(f"<code>{escape(x['replay'])}</code>"))
        for x in worst[:10]
    ]
    yield _table(("output", "dtype", "error / bound", "replay"), rows)


def _ratio(found: Mapping[tuple[str, str], float | None], output: str, dtype: str) -> str:
    return _number(found[output, dtype]) if (output, dtype) in found else "-"


def _number(ratio: float | None) -> str:
    return "infinite" if ratio is None else f"{ratio:.3f}"


def _distribution(distribution: Mapping[str, Any]) -> Iterator[str]:
    if not distribution["counts"] or not pictures.can_draw():
        return
    yield "<h2>Distribution of error / bound</h2>"
    drawn = pictures.distribution(distribution["edges"], distribution["counts"])
    yield _image(drawn, "Number of problems by their largest error / bound, for each output")


def _coverage(coverage: Mapping[str, Any] | None) -> Iterator[str]:
    if coverage is None:
        return
    yield "<h2>Problems by path of the kernel</h2>"
    yield _table(("path", "dtype", *coverage["columns"]), coverage["rows"])
    if coverage["empty"]:
        yield f"<p>No problem has {escape(coverage['empty'])}.</p>"


def _checked(record: Mapping[str, Any]) -> Iterator[str]:
    checked = record["checked"]
    if checked:
        yield "<h2>What was checked</h2>"
        known = {dtype for claim in checked for dtype in claim["by_dtype"]}
        dtypes = [x for x in (*DTYPES, "") if x in known]
        rows = [
            (claim["file"], claim["claim"], *(_ends(claim["by_dtype"].get(x)) for x in dtypes))
            for claim in checked
        ]
        yield _table(("file", "claim", *(x or "any dtype" for x in dtypes)), rows)
    if record["not_run"]:
        yield "<h2>Not run</h2>"
        rows = [(x["tests"], x["reason"]) for x in record["not_run"]]
        yield _table(("tests", "because"), rows)


def _ends(counts: Mapping[str, int] | None) -> str | _Raw:
    """Format counts: "12" if all passed, else the number of each outcome."""
    if not counts:
        return ""
    if set(counts) == {"passed"}:
        return str(counts["passed"])
    words = [
        f'<span class="{"alarm" if end == "failed" else "muted"}">{count} {end}</span>'
        for end, count in sorted(counts.items())
    ]
    return _Raw(", ".join(words))


def _mutants(mutants: Mapping[str, Any] | None) -> Iterator[str]:
    if mutants is None:
        return
    yield "<h2>Mutation testing</h2>"
    if "damaged" in mutants:
        yield f"<p>{escape(mutants['file'])} cannot be read: {escape(mutants['damaged'])}</p>"
        return
    ends = list(next(iter(mutants["ends"].values()), {}))
    rows = [(name, *counts.values()) for name, counts in mutants["ends"].items()]
    yield _table(("mutants", *ends), rows, numbers=True)
    if mutants["survivors"]:
        names = "".join(f"<li>{escape(name)}</li>" for name in mutants["survivors"])
        yield f"<p>Survivors without an explanation:</p><ul>{names}</ul>"
    if mutants["matrix"] and pictures.can_draw():
        yield _image(pictures.kill_matrix(mutants["matrix"]), "Which check fails on which mutant")


class _Raw(str):
    """Markup built in this module, whose text is already escaped."""


def _table(
    head: Sequence[object], rows: Iterable[Sequence[object]], *, numbers: bool = False
) -> str:
    """Return an HTML table. With ``numbers``, all columns but the first are numeric."""

    def line(tag: str, cells: Sequence[object]) -> str:
        return "".join(
            f"<{tag}{' class=number' if numbers and i else ''}>{_text(x)}</{tag}>"
            for i, x in enumerate(cells)
        )

    body = "\n".join(f"<tr>{line('td', row)}</tr>" for row in rows)
    return f"<table>\n<tr>{line('th', head)}</tr>\n{body}\n</table>"


def _text(value: object) -> str:
    return value if isinstance(value, _Raw) else escape(str(value))


def _image(png: str, what: str) -> str:
    return f'<p><img src="data:image/png;base64,{png}" alt="{escape(what)}"></p>'
