"""The adapters of docs/the-first-hour.md hold, and a fault in the call of each is found.

flash-attn needs a GPU. PyTorch functions with the signatures of its functions stand for it, so the
adapters are tested here, and flash-attn is not.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from fa_verify import verify
from fa_verify.properties.kernels.loading import load
from tests.unit.fa_verify.test_inference_page import flash_attn_varlen_func, on_a_cpu

PAGE = Path(__file__).parents[3] / "docs" / "the-first-hour.md"
ADAPTERS = re.findall(
    r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
)


def flash_attn_func(q, k, v, softmax_scale=None, causal=False):
    """The function of flash-attn 2 in PyTorch, on tensors (B, S, H, D)."""
    outs = []
    for one in zip(q, k, v, strict=True):
        offsets = [torch.tensor([0, len(x)], dtype=torch.int32) for x in one[:2]]
        sizes = [len(x) for x in one[:2]]
        outs.append(flash_attn_varlen_func(*one, *offsets, *sizes, softmax_scale, causal))
    return torch.stack(outs)


@pytest.fixture
def subject(tmp_path, monkeypatch):
    """A function that imports an adapter of the page, and returns its subject on a CPU."""
    flash_attn = ModuleType("flash_attn")
    flash_attn.flash_attn_func = flash_attn_func
    flash_attn.flash_attn_varlen_func = flash_attn_varlen_func
    monkeypatch.setitem(sys.modules, "flash_attn", flash_attn)
    monkeypatch.setattr(sys, "path", sys.path.copy())

    def of(code):
        path = tmp_path / f"adapter_{len(list(tmp_path.iterdir()))}.py"
        path.write_text(code)
        return on_a_cpu(load(f"{path}:attention"))

    return of


@pytest.mark.parametrize("code", ADAPTERS, ids=["padded", "packed"])
def test_an_adapter_of_the_first_hour_holds(subject, code):
    report = verify(subject(code), problems=4, guarantees=("G1", "G3", "G9"))
    assert report, str(report)
    assert {"out fp16", "dq bf16"} <= {*report.worst}
    wrong = code.replace("causal=mask.causal", "causal=True")
    assert wrong != code
    assert verify(subject(wrong), problems=4, guarantees=("G1",)).findings


def test_a_call_by_position_needs_no_adapter(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", sys.path.copy())
    (tmp_path / "tutorial.py").write_text(
        "from torch.nn.functional import scaled_dot_product_attention as sdpa\n\n\n"
        "def attention(q, k, v, causal, sm_scale):\n"
        "    return sdpa(q, k, v, is_causal=causal, scale=sm_scale)\n"
    )
    tutorial = dataclasses.replace(
        load(f"{tmp_path}/tutorial.py:attention"), dtypes=("fp32",), zero_sizes=False
    )
    report = verify(tutorial, problems=4, guarantees=("G1",))
    assert report, str(report)
