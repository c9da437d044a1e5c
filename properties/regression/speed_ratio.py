"""Detect a slowdown of a kernel by its speed relative to another kernel, then and now.

Both kernels take turns within a run, so that drifting clocks and temperatures affect both and
cancel in the ratio.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from fa_verify.properties.regression.difference import Difference

__all__ = ["LOSS", "Shift", "moved_speed", "shift_of"]

# About half of the loss that must be detected: a kernel that takes 10 % longer has 0.91 of the
# ratio. Separate processes with the same kernel differ too (placement of memory, clocks).
LOSS = 0.05
# Probability that the true value lies below the interval; also that it lies above.
LEVEL = 0.005
_RESAMPLES = 5_000


class Shift(NamedTuple):
    """The median ratio now divided by the median ratio then, with its interval; 0.9 is 10 % slower.

    Args:
        median: Observed value.
        low: Lower end of the interval.
        high: Upper end of the interval.
    """

    median: float
    low: float
    high: float

    @property
    def is_loss(self) -> bool:
        """Whether the loss exceeds LOSS and the spread of the rounds does not explain it."""
        return self.median < 1 - LOSS and self.high < 1


def shift_of(then: Sequence[float], now: Sequence[float], seed: int = 0) -> Shift:
    """Return the change of the median over rounds with its bootstrap interval.

    Args:
        then: Ratios of the baseline's rounds, > 0.
        now: Ratios of this run's rounds.
        seed: Seed of the resampling.
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
    """Yield the changes of speed. A loss beyond LOSS and the spread of the rounds is an alarm.

    Args:
        then: Name of a timed pass to the ratios of its rounds in the baseline.
        now: The same for this run.
        why_not: Why this run timed nothing; empty if it did.
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
        f"SDPA flash / kernel {before} -> {after}, {100 * (shift.median - 1):+.1f} % "
        f"[{low:+.1f} %, {high:+.1f} %]"
    )
