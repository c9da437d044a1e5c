"""The table of speeds: numbers, ratios, and reasons for missing numbers."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise, permutations
from types import SimpleNamespace

import pytest
import torch

from fa_verify.oracles.masks.mask import Mask

pytest.importorskip("triton")

from benchmarks import host, speed, verification
from benchmarks.plot import draw
from benchmarks.table import memory_table, table
from fa_verify import timing

NAMES = ("ours", "ours, one pass", "cuDNN", "FlexAttention", "SDPA flash")


def row(name, ms, rate=100):
    """A row for a forward pass; ``ms`` may be a reason."""
    measured = isinstance(ms, float)
    return {
        "problem": "1x64x2x32", "causal": True, "pass": "forward", "name": name, "median_ms": ms,
        "lowest_ms": ms - 0.5 if measured else "", "highest_ms": ms + 0.5 if measured else "",
        "TF": rate if measured else "", "of_matmul": 0.125 if measured else "",
        "peak_MiB": 64.5 if measured else "",
    }  # fmt: skip


def cells(*rows):
    """The cells of the last line, stripped."""
    line = table(rows, NAMES)[-1]
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_a_line_has_every_attention_and_ratios_to_ours():
    times = dict(zip(NAMES, (2.0, 2.5, 1.0, 5.0, 4.0), strict=True))
    assert cells(*(row(name, ms) for name, ms in times.items())) == [
        "1x64x2x32", "yes", "forward", "2.000 [1.500, 2.500] (100)", "2.500 [2.000, 3.000] (100)",
        "1.000 [0.500, 1.500] (100)", "5.000 [4.500, 5.500] (100)", "4.000 [3.500, 4.500] (100)",
        "2.00", "1.60", "0.50", "0.40", "0.125",
    ]  # fmt: skip


REASONS = {"cuDNN": "out of memory", "FlexAttention": "RuntimeError: no"}


def test_what_could_not_run_says_why_and_has_no_ratio():
    rows = [row(name, REASONS.get(name, 3.0)) for name in NAMES]
    assert cells(*rows)[5:] == [
        "out of memory", "RuntimeError: no", "3.000 [2.500, 3.500] (100)", "1.00", "1.00", "", "",
        "0.125",
    ]  # fmt: skip


class Once(torch.autograd.Function):
    """A function whose backward keeps nothing for a second time."""

    @staticmethod
    def forward(ctx, x):
        ctx.runs = 0
        return x.clone()

    @staticmethod
    def backward(ctx, dx):
        ctx.runs += 1
        if ctx.runs > 1:
            raise RuntimeError("not twice")
        return dx


def test_what_cannot_be_timed_as_the_others_are_is_left_out_with_its_reason(monkeypatch):
    composed = torch.nn.functional.scaled_dot_product_attention

    def timed(calls, *_):
        for call in calls.values():
            call()
            call()
        return {name: [1.0] for name in calls}

    monkeypatch.setattr(timing, "interleaved", timed)
    attentions = {
        "composed": lambda q, k, v, causal: composed(q, k, v, is_causal=causal),
        "once": lambda q, k, v, causal: Once.apply(composed(q, k, v, is_causal=causal)),
    }
    failed: dict[str, str] = {}
    found = timing.measure(
        attentions, 1, 5, 2, 8, True, torch.float32,
        failed=failed, passes=tuple(speed.PASSES), device="cpu",
    )  # fmt: skip
    assert failed == {"once": "RuntimeError: not twice"}
    assert found == {name: {"composed": [1.0]} for name in speed.PASSES}


@pytest.mark.parametrize(
    ("names", "rounds", "times"), [("ab", 2, 1), ("abcdef", 6, 1), ("abc", 6, 2)]
)
def test_everybody_follows_everybody_as_often(names, rounds, times, monkeypatch):
    order = []
    monkeypatch.setattr("triton.testing.do_bench", lambda call, **_: order.append(call()) or 1.0)
    timing.interleaved({name: lambda name=name: name for name in names}, rounds=rounds)
    of_rounds = ["".join(x) for x in zip(*[iter(order)] * len(names), strict=True)]
    assert all(sorted(x) == sorted(names) for x in of_rounds)
    followed = Counter(pair for x in of_rounds for pair in pairwise(x))
    assert followed == dict.fromkeys(permutations(names, 2), times)


def test_a_slow_call_has_one_round_and_the_others_all(monkeypatch):
    clock = iter(range(1000))
    seconds = {"fast": 0, "slow": 3}

    def timed(call, **_):
        for _ in range(seconds[call()]):
            next(clock)
        return 1.0

    monkeypatch.setattr("triton.testing.do_bench", timed)
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    calls = {name: lambda name=name: name for name in seconds}
    assert timing.interleaved(calls, rounds=5) == {"fast": [1.0] * 5, "slow": [1.0] * 5}
    assert timing.interleaved(calls, rounds=5, limit_s=4) == {"fast": [1.0] * 4, "slow": [1.0]}


def test_memory_has_a_line_a_problem_and_the_reason_where_there_is_none():
    rows = [row(name, REASONS.get(name, 3.0)) | {"pass": of} for of in "ab" for name in NAMES]
    assert memory_table(rows, NAMES)[2:] == [
        "| 1x64x2x32 | yes | 64.5 | 64.5 | out of memory | RuntimeError: no | 64.5 |"
    ]


def test_a_picture_is_drawn_of_what_ran(tmp_path):
    draw([row(name, REASONS.get(name, 3.0)) for name in NAMES], tmp_path / "speed.png")
    assert (tmp_path / "speed.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("benchmark", [host, speed, verification])
def test_without_a_gpu_it_ends_with_two_and_one_line(benchmark, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert benchmark.main([]) == 2
    said = capsys.readouterr().out
    assert said.startswith("benchmarks need a CUDA GPU; none is visible")
    assert said.count("\n") == 1


def test_names_that_there_are_not_are_refused_with_those_that_there_are(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(SystemExit):
        speed.main(["cuDNN", "FA9"])
    assert "name is ['FA9']; needs some of ['FlexAttention'" in capsys.readouterr().err


@pytest.mark.parametrize("name", verification.BROKEN)
def test_the_kernels_that_are_timed_until_they_are_found_are_wrong(name):
    mask = Mask(window_left=3, window_right=2, seqlens_k=(4,))
    assert verification.BROKEN[name](mask) != mask
