"""Rows of ``benchmarks.speed`` as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

__all__ = ["FIELDS", "markdown", "memory_table", "table"]

FIELDS = (
    "problem",
    "causal",
    "pass",
    "name",
    "median_ms",
    "lowest_ms",
    "highest_ms",
    "TF",
    "of_matmul",
    "peak_MiB",
)
# The ratios compare ours with the best of ``_FIRST``, then with ``_NEXT``.
_FIRST = ("FlexAttention", "SDPA flash")
_NEXT = "cuDNN"
_OURS = ("ours", "ours, one pass")
_RATIOS = (
    *(f"best of {' and '.join(_FIRST)} / {name}" for name in _OURS),
    *(f"{_NEXT} / {name}" for name in _OURS),
)


def markdown(head: Sequence[object], rows: Iterable[Sequence[object]]) -> list[str]:
    """Returns the lines of a table in Markdown."""
    lines = [f"| {' | '.join(map(str, head))} |", "|---" * len(head) + "|"]
    return lines + [f"| {' | '.join(map(str, row))} |" for row in rows]


def _cell(row: Mapping[str, object]) -> str:
    if row["TF"] == "":
        return str(row["median_ms"])
    return "{median_ms:.3f} [{lowest_ms:.3f}, {highest_ms:.3f}] ({TF})".format(**row)


def _ratios(times: Mapping[str, object]) -> list[str]:
    first = min((times[name] for name in _FIRST if name in times), default=None)
    return [
        f"{other / times[name]:.2f}" if other is not None and name in times else ""
        for other in (first, times.get(_NEXT))
        for name in _OURS
    ]


def table(rows: Sequence[Mapping[str, object]], names: Sequence[str]) -> list[str]:
    """Returns a table with one line per problem and pass: ms (TF) of each function, and ratios."""
    titles = ["B x N x H x D", "causal", "pass", *names, *_RATIOS, "of a matmul"]
    lines = []
    for start in range(0, len(rows), len(names)):
        here = {str(row["name"]): row for row in rows[start : start + len(names)]}
        times = {name: row["median_ms"] for name, row in here.items() if row["TF"] != ""}
        first = rows[start]
        cells = [
            first["problem"], "yes" if first["causal"] else "no", first["pass"],
            *map(_cell, here.values()), *_ratios(times), here["ours"]["of_matmul"],
        ]  # fmt: skip
        lines.append(cells)
    return markdown(titles, lines)


def memory_table(rows: Sequence[Mapping[str, object]], names: Sequence[str]) -> list[str]:
    """Returns a table with one line per problem: peak MiB of a forward and backward per function.

    Peaks exclude the inputs.
    """
    titles = ["B x N x H x D, MiB", "causal", *names]
    found: dict[tuple[object, object], dict[str, object]] = {}
    for row in rows:
        of = found.setdefault((row["problem"], row["causal"]), {})
        of[str(row["name"])] = row["peak_MiB"] if row["TF"] != "" else row["median_ms"]
    lines = [
        [problem, "yes" if causal else "no", *(of[name] for name in names)]
        for (problem, causal), of in found.items()
    ]
    return markdown(titles, lines)
