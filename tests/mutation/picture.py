"""Draws the kill matrix: a column for each mutant, a row for each check, a mark for a failure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

import matplotlib as mpl
from matplotlib import pyplot as plt

from tests.mutation.catalogue.outcomes import Outcome

__all__ = ["draw"]


def draw(outcomes: Sequence[Outcome], path: Path) -> None:
    """Writes the picture as PNG.

    Args:
        outcomes: The outcomes of a run with ``--full``.
        path: Path of the file.
    """
    mpl.use("agg")
    killed = [x for x in outcomes if x.checks and x.source != "harness"]
    killed.sort(key=lambda x: (x.source, x.file, x.checks))
    checks = list(dict.fromkeys(check for x in killed for check in x.checks))
    marks = [[check in x.checks for x in killed] for check in checks]
    figure, axes = plt.subplots(figsize=(14, 0.3 * len(checks) + 2), layout="constrained")
    axes.imshow(marks, aspect="auto", cmap="Greys", interpolation="nearest")
    axes.set_yticks(range(len(checks)), checks)
    ticks, labels, at = [], [], 0
    for (source, file), part in groupby(killed, key=lambda x: (x.source, x.file)):
        count = len(list(part))
        axes.axvline(at - 0.5, color="tab:red", linewidth=0.5)
        if count > len(killed) / 40:
            ticks.append(at + count / 2)
            labels.append(f"{source}\n{file.rpartition('/')[2]}")
        at += count
    axes.set_xticks(ticks, labels, rotation=90)
    axes.set_xlabel(f"{len(killed)} mutants that a check fails on")
    figure.savefig(path, dpi=150)
    plt.close(figure)
