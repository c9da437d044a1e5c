"""A kernel that promises no equal bits is asked for calls that differ in one argument, in turn."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
# It keeps dense masks, by all lengths or by the sum and the maximum of each kind.
KEPT = """
import torch

MAPS = {{}}

def attention(q, k, v, *, mask, sm_scale):
    sizes = (*q.shape[:3], k.shape[2])
    lengths = mask.lengths(q.shape[0], q.shape[2], k.shape[2])
    key = (sizes, mask.causal, mask.window_left, mask.window_right, *({kept} for x in lengths))
    if key not in MAPS:
        MAPS[key] = mask.dense(*sizes)
    s = (q.float() @ k.float().mT * sm_scale).masked_fill(~MAPS[key], -torch.inf)
    return (s.softmax(3).nan_to_num() @ v.nan_to_num().float()).to(q.dtype)

attention.gqa = False
attention.backward = False
attention.dtypes = ("fp32",)
attention.dirty = ("zero",)
attention.masks = ("causal", "window", "padding")
attention.p_dtype, attention.p_normalised = "fp32", True
attention.devices = ("cpu",)
"""


@pytest.mark.parametrize(("kept", "status"), [("tuple(x)", 0), ("(sum(x), max(x))", 1)])
def test_lengths_of_one_sum_and_maximum_are_not_taken_for_each_other(kept, status, tmp_path):
    (tmp_path / "attention.py").write_text(KEPT.format(kept=kept))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "-n0", "-x",
         "tests/conformance/test_state.py", "-k", "differ_in_one_argument",
         f"--fa-kernel={tmp_path}/attention.py:attention"],
        cwd=ROOT, capture_output=True, text=True, timeout=250, check=False,
        env={k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")},
    )  # fmt: skip
    assert done.returncode == status, done.stdout[-2000:]
    assert ("only after other calls" in done.stdout) == bool(status), done.stdout[-2000:]
