"""A call that ends its process, or hangs, is minimised in processes of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from fa_verify.oracles.calls.codec import call_from_json
from fa_verify.oracles.calls.merge import MergeProblem
from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.problem import Problem
from fa_verify.properties.kinds.feature import Feature
from fa_verify.pytest_plugin.smallest_death import death_of

ROOT = Path(__file__).parents[3]
KERNELS = """
import os, time, torch
from fa_verify import attention_kernel


def attend(q, k, v, mask, sm_scale):
    seen = mask.dense(*q.shape[:3], k.shape[2])
    return torch.softmax((q @ k.mT * sm_scale).masked_fill(~seen, -torch.inf), -1) @ v


@attention_kernel(dtypes=("fp32",), gqa=False, backward=False)
def hangs(q, k, v, *, mask, sm_scale):
    print("a kernel may print")
    while k.shape[2] > 40:
        time.sleep(0.1)
    return attend(q, k, v, mask, sm_scale)


@attention_kernel(dtypes=("fp32",), gqa=False, masks=("causal",))
def dies(q, k, v, *, mask, sm_scale):
    if mask.window_left is not None or (q.requires_grad and k.shape[2] > 3):
        os.abort()
    return attend(q, k, v, mask, sm_scale)


@attention_kernel(dtypes=("fp32",), gqa=False, backward=False)
def raises(q, k, v, *, mask, sm_scale):
    raise ValueError("no death")


@attention_kernel(states=True, dtypes=("fp32",), backward=False)
def aborts(outs, lses):
    if len(outs) > 2:
        os.abort()
    w = torch.softmax(lses, 0)
    return (w[..., None] * outs).sum(0), lses.logsumexp(0)
"""
MERGE = MergeProblem(parts=(3, 2, 17, 9), H=2, M=3, Dv=5, dtype="fp32", layout="gaps")
ATTENTION = Problem(M=3, N=50, D=16, Dv=16, dtype="fp32", mask=Mask(causal=True))


@pytest.fixture
def there(tmp_path, monkeypatch):
    (tmp_path / "kernels.py").write_text(KERNELS)
    monkeypatch.chdir(tmp_path)
    # The project need not be installed.
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


@pytest.mark.usefixtures("there")
@pytest.mark.parametrize(
    ("name", "call", "how", "title", "beside", "features"),
    [
        (
            "aborts", MERGE, "died of signal 6 (Aborted)",
            "Problems with parts > 2 end the process, which died of signal 6 (Aborted)",
            "passes with parts=(1,1)", [Feature("parts above", 2)],
        ),
        (
            "hangs", ATTENTION, "hang", "Problems with N > 40 do not return within ",
            "passes with N=40", [Feature("N above", 40)],
        ),
    ],
)  # fmt: skip
def test_a_death_is_minimised_and_named(name, call, how, title, beside, features):
    death = death_of({"kernel": f"kernels.py:{name}"}, call.to_json(), how)
    assert death.lines[0].startswith(title)
    assert f"  {beside}" in death.lines
    assert death.features == features
    replay = death.lines[-1]
    assert f"replay: fa-verify explain --kernel=kernels.py:{name} '" in replay
    smallest = call_from_json(replay.split("'")[1])
    size = (41, 1) if name == "hangs" else ((1, 1, 1), 1)
    assert (smallest.N if name == "hangs" else smallest.parts, smallest.M) == size
    assert death.explains(call.to_json())
    other = Problem(N=40) if name == "hangs" else MergeProblem(parts=(1, 1))
    assert not death.explains(other.to_json())


@pytest.mark.usefixtures("there")
@pytest.mark.parametrize("kernel", ["kernels.py:raises", "kernels.py:hangs", "kernels.py:absent"])
def test_a_call_that_returns_by_itself_is_not_called_a_death(kernel):
    call = Problem(M=2, N=3, dtype="fp32").to_json()
    assert not death_of({"kernel": kernel}, call, "died of signal 11 (Segmentation fault)").lines


@pytest.mark.usefixtures("there")
def test_a_death_is_sought_under_the_options_of_the_run():
    """It is one of windows, which --fa-assume adds, and not of gradients, which are not run."""
    window = Problem(M=2, N=9, dtype="fp32", mask=Mask(causal=True, window_left=2))
    kernel = {
        "kernel": "kernels.py:dies", "assumed": '{"masks":["causal","window"]}',
        "forward_only": True,
    }  # fmt: skip
    death = death_of(kernel, window.to_json(), "died of signal 6 (Aborted)")
    assert [x.name for x in death.features] == ["window left"]
