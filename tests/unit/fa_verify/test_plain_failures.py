"""A regression file that fails is shown on the plainest problem of its failure."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
STORED = {
    "version": 1, "H": 2, "Hk": 2, "M": 3, "N": 2, "dtype": "fp64", "inputs": "lse_high_6e4",
    "layouts": ["bhsd", "bshd", "bhsd", "bhsd"], "seed": 1,
}  # fmt: skip
# It takes the strides of k for those of a contiguous tensor.
STRIDES = """
import torch

def attention(q, k, v, *, mask, sm_scale):
    if not k.is_contiguous():
        k = k.transpose(1, 2).reshape(k.shape)
    s = (q.double() @ k.double().mT) * sm_scale
    s = s.masked_fill(~mask.dense(q.shape[0], q.shape[1], q.shape[2], k.shape[2]), -torch.inf)
    return (s.softmax(3).nan_to_num() @ v.double()).to(q.dtype)

attention.gqa = False
attention.devices = ("cpu",)
"""


def test_a_stride_fault_is_not_shown_at_the_inputs_of_another_fault(tmp_path):
    (tmp_path / "attention.py").write_text(STRIDES)
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "large.json").write_text(json.dumps({"problem": STORED}))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-v",
         "tests/conformance/test_replay.py", "-k", "[large]",
         f"--kernel={tmp_path}/attention.py:attention", f"--corpus={tmp_path}/corpus"],
        cwd=ROOT, capture_output=True, text=True, timeout=250, check=False,
        env={k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")},
    )  # fmt: skip
    assert done.returncode == 1
    plain = {
        "version": 1, "H": 2, "Hk": 2, "N": 2,
        "layouts": ["bhsd", "bshd", "bhsd", "bhsd"],
    }  # fmt: skip
    shown = [json.loads(x) for x in re.findall(r"replay: .*--fa-replay='(.*)'", done.stdout)]
    assert len(shown) > 1
    assert all(problem == plain for problem in shown)
