"""Draws the pictures of the documentation: ``python -m docs.pictures``.

``images/caught-bug.png`` comes from a run in Triton's interpreter of the kernels, and of a copy
that lacks one line. ``images/bound-and-errors.svg`` shows the row of ``worked_element``, of these
kernels and of two other attentions. ``images/speed.png`` comes from
``results/nvidia-h200/speed.csv``.
"""

from __future__ import annotations

import csv
import os
import re
import tempfile
from pathlib import Path
from typing import Any

__all__ = ["bound_and_errors", "caught_bug", "speed"]

ROOT = Path(__file__).parents[1]
IMAGES = Path(__file__).parent / "images"
KERNEL = "fa_kernels/kernels/portable/forward.py"
LINE = "        acc = acc * alpha[:, None]\n"
PROBLEM = (
    '{"version":1,"M":64,"N":96,"D":64,"Dv":64,"dtype":"fp16","config":"16x32",'
    '"mask":{"type":"Mask","causal":true}}'
)
# Names of the results, and of the picture.
ATTENTIONS = {
    "ours": "fa_kernels",
    "ours, one pass": "fa_kernels, deterministic=False",
    "cuDNN": "cuDNN",
    "FlexAttention": "FlexAttention",
    "SDPA flash": "SDPA flash (FlashAttention-2)",
}


def caught_bug(path: Path) -> None:
    """Error/bound of every element of out, of the kernel as it is and without its rescaling."""
    os.environ["TRITON_INTERPRET"] = "1"
    from fa_verify.simulator.interpreter.repair import repair

    repair()
    from fa_verify.adapters import ours
    from tests.mutation.catalogue.copies import load, sources_of

    sources = sources_of("fa_kernels")
    assert sources[KERNEL].count(LINE) == 1
    with tempfile.TemporaryDirectory() as folder:
        broken = load(
            sources | {KERNEL: sources[KERNEL].replace(LINE, "")},
            Path(folder) / "without_rescaling",
        )
        ratios = [_ratios(ours.flash_attention), _ratios(_as_subject(broken.flash_attention))]
    _draw_ratios(ratios, path)


def _as_subject(attention: Any) -> Any:
    def subject(q: Any, k: Any, v: Any, *, mask: Any, sm_scale: float, config: str) -> Any:
        return attention(q, k, v, mask=mask, sm_scale=sm_scale, config=config, return_lse=True)

    from fa_verify.adapters import ours

    vars(subject).update(vars(ours.flash_attention))
    return subject


def _ratios(attention: Any) -> Any:
    from fa_verify.oracles.problem import Problem
    from fa_verify.properties.guarantees.compare import ratios
    from fa_verify.properties.kernels.subject import Subject
    from fa_verify.properties.running.trial import run_trial

    trial = run_trial(Subject.of(attention, "attention"), Problem.from_json(PROBLEM))
    assert trial is not None
    return ratios(trial.got.out, trial.want.out, trial.judgement.bound.out)[0, 0].numpy()


def _draw_ratios(ratios: list[Any], path: Path) -> None:
    import numpy as np
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    titles = (
        f"forward.py as it is: at most {ratios[0].max():.2f}",
        f"without the line acc = acc * alpha[:, None]: {ratios[1].max():,.0f}",
    )
    for panel, title, values in zip(panels, titles, ratios, strict=True):
        image = panel.imshow(
            np.clip(values, 1e-3, 1e3), norm=LogNorm(1e-3, 1e3), cmap="RdBu_r", aspect="auto",
            interpolation="nearest",
        )  # fmt: skip
        panel.set_title(title, fontsize=10)
        panel.set_xlabel("column d of out")
        for row in range(16, values.shape[0], 16):
            panel.axhline(row - 0.5, color="black", linewidth=0.8, linestyle=(0, (5, 3)))
    panels[0].set_ylabel("query row m")
    bar = figure.colorbar(image, ax=panels)
    bar.set_label("error / bound of out[m, d]")
    figure.savefig(path, dpi=110)


def _in_bf16(q: Any, k: Any, v: Any, *, mask: Any, sm_scale: float) -> Any:
    """Attention without a mask whose scores, weights and output are bf16."""
    del mask
    return (q @ k.mT * sm_scale).softmax(-1) @ v


def _without_last_tile(q: Any, k: Any, v: Any, *, mask: Any, sm_scale: float) -> Any:
    """Attention without a mask that leaves out the last 16 keys."""
    del mask
    scores = q.float() @ k[:, :, :-16].float().mT * sm_scale
    return (scores.softmax(-1) @ v[:, :, :-16].float()).to(q.dtype)


def bound_and_errors(path: Path) -> None:
    """Bound and error of the elements of a row of out, for the kernels and for two others."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    from docs.worked_element import PROBLEM
    from fa_verify.adapters import ours
    from fa_verify.properties.kernels.subject import Subject
    from fa_verify.properties.running.trial import run_trial

    mpl.rcParams.update({"svg.hashsalt": "fa-verify", "svg.fonttype": "none"})
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    panel = figure.subplots()
    for attention, name, marker, color in (
        (ours.flash_attention, "fa_kernels", "o", "tab:blue"),
        (_in_bf16, "scores and weights in bf16", "+", "tab:green"),
        (_without_last_tile, "without the last 16 keys", "x", "tab:red"),
    ):
        trial = run_trial(Subject.of(attention, "attention"), PROBLEM)
        assert trial is not None
        want, bound = trial.want.out[0, 0, 0], trial.judgement.bound.out[0, 0, 0]
        errors = trial.got.out[0, 0, 0].double() - want
        ratio = float((errors.abs() / bound).max())
        panel.plot(errors.numpy(), marker, color=color, markersize=4, label=f"{name}: {ratio:.2f}")
    columns = range(PROBLEM.Dv)
    stored = want.abs().numpy() * 2.0**-8
    whole = bound.numpy()
    for height, color, name in (
        (whole, "0.85", "bound"), (stored, "0.65", "of it: stored result")
    ):  # fmt: skip
        panel.fill_between(columns, -height, height, step="mid", color=color, label=name, zorder=0)
    panel.set_xlabel("column d of out[0, 0, 0]")
    panel.set_ylabel("error")
    panel.set_yscale("symlog", linthresh=0.005)
    panel.set_yticks([-0.1, -0.01, 0.0, 0.01, 0.1])
    panel.set_xlim(-0.5, PROBLEM.Dv - 0.5)
    figure.legend(loc="outside upper center", ncols=5, frameon=False, fontsize=8)
    figure.savefig(path, metadata={"Date": None})


def speed(path: Path) -> None:
    """TF of the forward and the backward beside the fastest others."""
    from benchmarks.plot import draw

    with (ROOT / "results" / "nvidia-h200" / "speed.csv").open(
        encoding="utf-8", newline=""
    ) as file:
        rows = [
            row
            | {
                "problem": re.sub(r"^(\d+x\d+)x", r"\1x\n", row["problem"]),
                "name": ATTENTIONS[row["name"]],
                "causal": row["causal"] == "True",
                "TF": float(row["TF"]),
            }
            for row in csv.DictReader(file)
            if row["name"] in ATTENTIONS and row["pass"] != "both" and row["TF"]
        ]
    draw(rows, path, width=10.0)


if __name__ == "__main__":
    IMAGES.mkdir(exist_ok=True)
    caught_bug(IMAGES / "caught-bug.png")
    bound_and_errors(IMAGES / "bound-and-errors.svg")
    speed(IMAGES / "speed.png")
