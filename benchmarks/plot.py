"""Plots rows of ``benchmarks.speed``: TF of each attention function, one panel per pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib import pyplot as plt

__all__ = ["draw"]


def draw(rows: Sequence[Mapping[str, object]], path: Path, width: float = 14.0) -> None:
    """Writes the plot as PNG, ``width`` inches wide; functions that failed have no bar."""
    mpl.use("agg")
    passes = list(dict.fromkeys(str(row["pass"]) for row in rows))
    names = list(dict.fromkeys(str(row["name"]) for row in rows))
    problems = list(dict.fromkeys((row["problem"], row["causal"]) for row in rows))
    figure, panels = plt.subplots(
        len(passes), figsize=(width, width / 4 * len(passes)), layout="constrained", sharex=True,
        squeeze=False,
    )  # fmt: skip
    bar = 0.85 / len(names)
    for panel, of in zip(panels[:, 0], passes, strict=True):
        for number, name in enumerate(names):
            rates = {
                (row["problem"], row["causal"]): row["TF"]
                for row in rows
                if (row["pass"], row["name"]) == (of, name) and row["TF"] != ""
            }
            places = [i + (number + 0.5) * bar - 0.425 for i in range(len(problems))]
            heights = [rates.get(problem, 0) for problem in problems]
            panel.bar(places, heights, bar, label=name)
        panel.set_ylabel(f"{of}, TF")
        panel.grid(axis="y", linewidth=0.3)
        panel.set_axisbelow(True)
    labels = [f"{problem}\n{'causal' if causal else 'full'}" for problem, causal in problems]
    panels[-1, 0].set_xticks(range(len(problems)), labels, fontsize=8)
    figure.legend(
        *panels[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=5,
        frameon=False, fontsize=8,
    )  # fmt: skip
    figure.savefig(path, dpi=100)
    plt.close(figure)
