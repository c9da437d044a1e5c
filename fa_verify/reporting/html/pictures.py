"""Draw the pictures of a report with matplotlib, as base64-encoded PNG."""

from __future__ import annotations

import base64
import importlib.util
import io
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["can_draw", "distribution", "heat_map"]

INK, MUTED, LIMIT = "#1f2933", "#7b8794", "#c81e1e"
# Distinct in hue and in lightness.
COLOURS = {
    "fp16": "#1d4ed8", "bf16": "#d97706", "fp32": "#047857", "tf32": "#9333ea", "fp64": "#4b5563",
}  # fmt: skip


def can_draw() -> bool:
    """Return whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def _figure(width: float, height: float) -> Any:
    """Create a figure without pyplot: it needs no display and leaves global settings alone."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _png(figure: Any) -> str:
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=110)
    return base64.b64encode(file.getvalue()).decode("ascii")


def distribution(edges: Sequence[float], counts: Mapping[str, Sequence[int]]) -> str:
    """Draw the distribution of error/bound: axes per output, a line per dtype, logarithmic x.

    Args:
        edges: Edges of the bins, see ``Tally.distribution``.
        counts: "output dtype" to the number of problems in each bin.
    """
    names = list(dict.fromkeys(key.split()[0] for key in ("out", "lse", "dq", "dk", "dv")))
    outputs = [x for x in names if any(key.split()[0] == x for key in counts)]
    figure = _figure(11, 1.2 + 1.25 * len(outputs))
    axes = figure.subplots(len(outputs), 1, sharex=True, squeeze=False)[:, 0]
    # The first bin has no lower edge, the last no upper one.
    ends = [edges[0] / 10**0.25, *edges, edges[-1] * 10**0.25]
    for axis, output in zip(axes, outputs, strict=True):
        for dtype, colour in COLOURS.items():
            if f"{output} {dtype}" in counts:
                found = counts[f"{output} {dtype}"]
                axis.stairs(found, ends, color=colour, label=dtype, linewidth=1.6)
        axis.axvline(1, color=LIMIT, linewidth=1.2)
        axis.set_ylabel(output, rotation=0, ha="right", va="center", color=INK)
        axis.tick_params(colors=MUTED, labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
        axis.set_ylim(bottom=0)
    axes[-1].set_xscale("log")
    occupied = [i for found in counts.values() for i, count in enumerate(found) if count]
    axes[-1].set_xlim(ends[max(0, min(occupied) - 1)], max(2, ends[max(occupied) + 1]))
    axes[-1].set_xlabel(
        "largest error / bound of a problem (red: the bound; leftmost: 1e-6 and less)", color=INK
    )
    handles = {
        label: handle for axis in axes
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
    }  # fmt: skip
    figure.legend(
        handles.values(), handles.keys(), loc="outside upper center", ncols=5, frameon=False
    )
    return _png(figure)


def heat_map(heat: Mapping[str, Any], output: str) -> str:
    """Draw the heat map of one head of a tensor, with lines between tiles.

    Args:
        heat: A record of ``HeatMap``.
        output: Name of the output.
    """
    import numpy as np
    from matplotlib import colormaps
    from matplotlib.colors import LogNorm
    from matplotlib.ticker import MaxNLocator

    values = np.array(heat["values"], dtype=float)  # None becomes NaN
    rows, columns = heat["rows"], heat["columns"]
    positive = values[np.isfinite(values) & (values > 0)]
    least, most = (positive.min(), positive.max()) if positive.size else (0.1, 1.0)
    if heat["is_ratio"]:
        # White is the bound, blue is within it, red exceeds it.
        most = min(max(most, 1 / max(least, 1e-3), 10.0), 1e6)
        least, palette = 1 / most, colormaps["RdBu_r"]
    else:
        most, palette = max(most, 1.01 * least), colormaps["cividis_r"]
    figure = _figure(4.4, 3.0)
    axis = figure.subplots()
    image = axis.imshow(
        np.clip(values, least, most),  # 0 has no logarithm
        cmap=palette.with_extremes(bad="black"), norm=LogNorm(least, most), aspect="auto",
        interpolation="nearest", extent=(-0.5, columns - 0.5, rows - 0.5, -0.5),
    )  # fmt: skip
    for start in range(heat["tile"], rows, heat["tile"]):
        axis.axhline(start - 0.5, color=INK, linewidth=1.3, linestyle=(0, (6, 3)))
    axis.yaxis.set_major_locator(MaxNLocator(integer=True))
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    if rows == 1:
        axis.set_yticks([0])
    axis.set_ylabel(heat["axis"], color=INK)
    axis.set_xlabel("d" if columns > 1 else "", color=INK)
    if columns == 1:
        axis.set_xticks([])
    legend = f"dashed: tiles of {heat['tile']}; black: NaN or infinite"
    title = f"{output}, {heat['head']}\n{legend}"
    axis.set_title(title, loc="left", fontsize=9, color=MUTED)
    bar = figure.colorbar(image, ax=axis)
    bar.set_label("error / bound" if heat["is_ratio"] else "difference", color=INK)
    return _png(figure)
