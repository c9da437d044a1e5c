"""Alarms are counted by kernel, and bound their rate."""

from __future__ import annotations

import json
import math

import pytest
import torch

from benchmarks import false_alarms
from fa_verify.properties.kernels.loading import load

EMULATED = "benchmarks/emulated.py:attention"


@pytest.mark.parametrize(
    ("alarms", "known"), [(0, 2.996), (1, 4.744), (10, 16.962), (400, 434.497)]
)
def test_the_largest_rate_is_that_of_a_table_of_poisson_limits(alarms, known):
    assert false_alarms.most_likely(alarms) == pytest.approx(known, abs=1e-3)


def test_a_correct_kernel_raises_no_alarm_and_a_wrong_one_is_counted(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(false_alarms, "ROOT", tmp_path)
    monkeypatch.setattr(false_alarms, "DRAWN", 3)
    monkeypatch.setattr(false_alarms, "PAIRS", {"cpu": 2**13})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    wrong = tmp_path / "wrong.py"
    wrong.write_text(
        "import torch\n"
        "from benchmarks.emulated import attention\n"
        "def wrong(q, k, v, *, mask, sm_scale):\n"
        "    out, lse = attention(q, k, v, mask=mask, sm_scale=sm_scale)\n"
        "    return 1.1 * out, lse\n"
        "wrong.dtypes, wrong.masks, wrong.gqa = attention.dtypes, (), False\n"
        "wrong.zero_sizes, wrong.returns_lse = False, True\n"
    )
    kernels = [EMULATED, f"{wrong}:wrong"]
    arguments = ["--workers=1", "--seconds=4", "--kernels", *kernels]
    assert false_alarms.main(arguments) == 1
    record = json.loads((tmp_path / "build/false-alarms.json").read_text())["kernels"]
    correct, faulty = (record[name] for name in kernels)
    assert correct["problems"] > 0
    assert correct["elements"] > 10 * correct["problems"]
    assert correct["alarms"] == 0
    assert correct["rate_below"] == pytest.approx(3 / correct["problems"], rel=0.01)
    assert 0 < faulty["alarms"] <= faulty["problems"]
    assert faulty["checks"]["G1 accuracy"] > 0
    assert "replay: pytest" in faulty["messages"][0]
    said = capsys.readouterr().out
    assert f"{EMULATED}: {correct['problems']:,} problems" in said
    assert math.isfinite(faulty["rate_below"])


def test_the_problems_of_another_seed_are_others():
    subject = load(EMULATED)
    shard = false_alarms.shards_of(subject)[0]
    one, other, again = (false_alarms.drawn(subject, shard, "cpu", seed) for seed in "011")
    assert one != other
    assert other == again
    assert any(problem.seeds for problem in one)


def test_problems_of_an_array_are_batched_and_those_of_another_seed_are_others():
    subject = load(EMULATED)
    one, other, again = (false_alarms.combined(subject, "cpu", seed) for seed in "011")
    assert one != other
    assert other == again
    assert sum(len(x.all_seeds) for x in one) > 2 * len(one)
    assert any(x.H > 16 and x.M > x.N for x in one)


def test_problems_of_arrays_are_judged():
    counts = false_alarms.counted(load(EMULATED), 1.0, "cpu", "0", combinations=True)
    assert counts.problems > 0
    assert counts.alarms == 0
