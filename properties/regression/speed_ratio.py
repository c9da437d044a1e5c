"""Whether a kernel has become slower: its speed as a ratio to another kernel's, then and now.

Both kernels take turns within a run, so that clocks and heat, which drift, reach both alike and
leave their ratio.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from fa_verify.properties.regression.difference import Difference

__all__ = ["LOSS", "Shift", "moved_speed", "shift_of"]

# Halfway to the loss that has to be seen: a kernel that takes a tenth longer has 0.91 of the ratio.
# Processes of one kernel differ too (where memory lies, which clocks), beside their rounds.
LOSS = 0.05
# Probability that the interval ends too high, or too low, by chance.
LEVEL = 0.005
_RESAMPLES = 5_000


class Shift(NamedTuple):
    """The median ratio of now over that of then: 0.9 is a tenth slower; and what it may as well be.

    Args:
        median: Observed.
        low: End of the interval.
        high: End of the interval.
    """

    median: float
    low: float
    high: float

    @property
    def is_loss(self) -> bool:
        """Whether more than LOSS is lost, and by more than the rounds' spread explains."""
        return self.median < 1 - LOSS and self.high < 1


def shift_of(then: Sequence[float], now: Sequence[float], seed: int = 0) -> Shift:
    """How the median of the rounds moved, with its bootstrap interval.

    Args:
        then: Ratios of the baseline's rounds, > 0.
        now: Ratios of this run's rounds.
        seed: Of the resampling.
    """
    generator = np.random.default_rng(seed)
    medians = [
        np.median(generator.choice(np.asarray(rounds), (_RESAMPLES, len(rounds))), axis=1)
        for rounds in (now, then)
    ]
    low, high = np.quantile(medians[0] / medians[1], [LEVEL, 1 - LEVEL])
    return Shift(statistics.median(now) / statistics.median(then), float(low), float(high))


def moved_speed(
    then: Mapping[str, Sequence[float]], now: Mapping[str, Sequence[float]], why_not: str = ""
) -> Iterable[Difference]:
    """How the ratios moved; a loss beyond LOSS and beyond their spread is an alarm.

    Args:
        then: Timed pass to the ratios of its rounds, of the baseline.
        now: Those of this run.
        why_not: Why this run timed nothing.
    """
    for name in sorted({*then, *now}):
        if name not in now:
            text = f"{name}: timed in the baseline, not now" + (f": {why_not}" if why_not else "")
            yield Difference("speed", text, alarm=True)
        elif name not in then:
            yield Difference("speed", f"{name}: new, {statistics.median(now[name]):.3f}")
        else:
            shift = shift_of(then[name], now[name])
            if shift.is_loss or not shift.low <= 1 <= shift.high:
                yield Difference(
                    "speed", f"{name}: {_told(then[name], now[name], shift)}", shift.is_loss
                )


def _told(then: Sequence[float], now: Sequence[float], shift: Shift) -> str:
    before, after = (
        f"{statistics.median(x):.3f} [{min(x):.3f}, {max(x):.3f}]" for x in (then, now)
    )
    low, high = (100 * (end - 1) for end in (shift.low, shift.high))
    return (
        f"SDPA flash / subject {before} -> {after}, {100 * (shift.median - 1):+.1f} % "
        f"[{low:+.1f} %, {high:+.1f} %]"
    )
