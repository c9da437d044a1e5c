"""The gate's speed comparison, on measured numbers: a 10 % loss raises an alarm, noise does not."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from fa_verify.adapters.ours import flash_attention
from fa_verify.properties.kernels.subject import Subject
from fa_verify.properties.regression.speed_ratio import moved_speed, shift_of
from fa_verify.reporting.gate.timing import ROUNDS, decoding, timed

# Standard deviations between rounds and between processes.
OF_ROUNDS = 0.02
OF_PROCESSES = 0.007


def measured(seed: int, factor: float = 1.0, rounds: int = ROUNDS) -> tuple[float, ...]:
    """Speed ratios of a run whose kernel is ``factor`` * 1.4 times as fast as SDPA flash."""
    generator = np.random.default_rng(seed)
    process = 1 + OF_PROCESSES * generator.standard_normal()
    return tuple(1.4 * factor * process * (1 + OF_ROUNDS * generator.standard_normal(rounds)))


def test_no_alarm_in_fifty_runs_of_the_same_kernel():
    then = measured(0)
    changes = [x for seed in range(1, 51) for x in moved_speed({"f": then}, {"f": measured(seed)})]
    assert [x.text for x in changes if x.alarm] == []


def test_a_kernel_that_takes_a_tenth_longer_is_stopped_in_fifty_runs_of_fifty():
    then = measured(0)
    slower = [[*moved_speed({"f": then}, {"f": measured(seed, 1 / 1.1)})] for seed in range(1, 51)]
    assert sum(x.alarm for changes in slower for x in changes) == 50


def test_a_faster_kernel_is_told_and_is_no_alarm():
    (change,) = moved_speed({"f": (1.0, 1.0, 1.0)}, {"f": (1.25, 1.25, 1.25)})
    assert change.text == (
        "f: SDPA flash / kernel 1.000 [1.000, 1.000] -> 1.250 [1.250, 1.250], "
        "+25.0 % [+25.0 %, +25.0 %]"
    )
    assert not change.alarm


def test_a_small_loss_is_told_and_is_no_alarm():
    (change,) = moved_speed({"f": (1.0, 1.0, 1.0)}, {"f": (0.97, 0.97, 0.97)})
    assert change.text.endswith("-3.0 % [-3.0 %, -3.0 %]")
    assert not change.alarm


def test_the_interval_is_told_from_its_low_end_to_its_high_end():
    then, now = (1.0,) * 9, tuple(np.linspace(1.1, 1.5, 9))
    shift = shift_of(then, now)
    (change,) = moved_speed({"f": then}, {"f": now})
    low, high = (100 * (end - 1) for end in (shift.low, shift.high))
    assert change.text.endswith(f"[{low:+.1f} %, {high:+.1f} %]")
    assert shift.low < shift.high


def test_rounds_that_scatter_widen_the_interval():
    narrow = shift_of((1.0,) * 9, tuple(np.linspace(0.99, 1.01, 9)))
    wide = shift_of((1.0,) * 9, tuple(np.linspace(0.7, 1.3, 9)))
    assert wide.low < narrow.low < 1 < narrow.high < wide.high


def test_a_loss_that_the_rounds_spread_explains_is_no_alarm():
    scattered = tuple(np.linspace(0.6, 1.2, 9))
    assert shift_of((1.0,) * 9, scattered).median == pytest.approx(0.9)
    assert [x for x in moved_speed({"f": (1.0,) * 9}, {"f": scattered}) if x.alarm] == []


def test_a_pass_that_is_no_longer_timed_is_an_alarm_with_its_reason():
    (change,) = moved_speed({"f": (1.0, 1.0)}, {}, "there is no GPU")
    assert change.alarm
    assert change.text == "f: timed in the baseline, not now: there is no GPU"


def test_a_pass_timed_for_the_first_time_is_told():
    (change,) = moved_speed({}, {"f": (1.0, 1.5, 2.0)})
    assert (change.text, change.alarm) == ("f: new, 1.500", False)


@pytest.mark.parametrize(("second", "counts"), [(1.0, 1.0), (1 / 1.1, 1 / 1.1)])
def test_an_apparent_loss_is_timed_once_more_and_that_counts(second, counts):
    then = {"f": measured(0)}
    runs = [{"f": measured(1, 0.8)}, {"f": measured(2, second)}]
    found, why = timed(None, then, lambda subject: runs.pop(0))
    assert found == {"f": measured(2, counts)}
    assert (runs, why) == ([], "")


def test_a_speed_without_loss_is_timed_once():
    runs = [{"f": measured(1)}, {"f": measured(2)}]
    timed(None, {"f": measured(0)}, lambda subject: runs.pop(0))
    assert len(runs) == 1


@pytest.mark.parametrize("error", [NotImplementedError("no bf16\nhere"), RuntimeError("no flash")])
def test_a_subject_that_cannot_be_timed_says_why(error):
    def fails(subject):
        raise error

    found, why = timed(None, {}, fails)
    assert found == {}
    assert why == f"{type(error).__name__}: {str(error).splitlines()[0]}"


@pytest.mark.parametrize(("cache", "page_sizes"), [(("paged",), (8,)), (("contiguous",), None)])
def test_the_calls_that_decode_attend_to_the_same_keys(cache, page_sizes, device):
    ours = Subject.of(flash_attention, "flash_attention")
    subject = dataclasses.replace(ours, cache=cache, page_sizes=page_sizes)
    calls = decoding(subject, 2, 32, 4, 2, 16, device=device)
    mine, flash = calls["subject"](), calls["SDPA flash"]()
    assert mine.shape == flash.shape == (2, 4, 1, 16)
    torch.testing.assert_close(mine, flash, rtol=2**-7, atol=2**-7)
