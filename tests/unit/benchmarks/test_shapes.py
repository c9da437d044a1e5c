"""The problems of ``benchmarks.shapes`` mean the same to every attention."""

from __future__ import annotations

import pytest
import torch

from benchmarks import shapes

SMALL = {
    "causal": shapes.Shape(2, 40, 2, 2, 16, 32),
    "group": shapes.Shape(1, 40, 4, 1, 16, 16),
    "window": shapes.Shape(1, 48, 1, 1, 16, 16, window=7),
    "varlen": shapes.Shape(1, 60, 2, 2, 16, 16, lengths=(20, 7, 33)),
    "blocks": shapes.Shape(1, 300, 2, 2, 16, 16, causal=False, visible=0.5),
}


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("name", SMALL)
def test_all_attentions_compute_the_same(name, device):
    if device == "cuda":
        pytest.skip("runs in the interpreter")
    shape = SMALL[name]
    q, k, v, _ = shapes.inputs(shape, device, torch.float32)
    found = shapes.attentions(shape, device)
    outs = {"ours": found["ours"](q, k, v), "FlexAttention": found["FlexAttention"](q, k, v)}
    if name == "group":
        outs["SDPA flash"] = found["SDPA flash"](q, k, v)
    errors = shapes.errors(shape, q, k, v, outs)
    assert max(errors.values()) < 2e-5, errors


def test_a_table_names_the_fastest_peer():
    found = {
        "ms": {"forward": {"ours": [2.0], "ours, one pass": [1.0], "cuDNN": [3.0, 1.5]}},
        "errors": {"ours": 1e-3, "ours, one pass": 1e-3, "cuDNN": 2e-3},
    }
    assert shapes.table({"problems": {"D = 96": found}})[2].endswith("| - | 2.25 (cuDNN) |")
