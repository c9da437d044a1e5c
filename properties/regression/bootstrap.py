"""How sure a change is: a bootstrap interval for the mean of paired differences."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["RESAMPLES", "Interval", "mean_difference"]

# At a level of 1e-4 the end of an interval rests on the ten most extreme of them.
RESAMPLES = 100_000
# Resamples that are held at a time.
_CHUNK = 10_000


class Interval(NamedTuple):
    """A mean, and what it may as well be."""

    mean: float
    low: float
    high: float


def mean_difference(
    differences: npt.ArrayLike, level: float, *, resamples: int = RESAMPLES, seed: int = 0
) -> Interval:
    """The mean of paired differences, with its bootstrap-t interval.

    The differences are drawn again with replacement, and each mean so found is measured in its own
    standard error: that keeps the ends honest for the few dozen, skewed differences that there are,
    where percentiles of the means would be too narrow. Equal differences leave no doubt.

    Args:
        differences: One for each pair, finite.
        level: Probability that the mean lies below the interval, and that it lies above.
        resamples: How many.
        seed: Of the draw: the same differences give the same interval.

    Raises:
        ValueError: There are fewer than two differences, one is not finite, or level is not in
            (0, 0.5).

    Source: Efron and Tibshirani, An Introduction to the Bootstrap (1993), section 12.5.
    """
    x = np.asarray(differences, dtype=np.float64)
    if x.ndim != 1 or x.size < 2 or not np.isfinite(x).all():
        raise ValueError(f"differences is {differences!r}; needs two or more finite numbers")
    if not 0 < level < 0.5:
        raise ValueError(f"level is {level}; needs to be in (0, 0.5)")
    mean, error = float(x.mean()), float(x.std(ddof=1)) / x.size**0.5
    if np.ptp(x) == 0:
        return Interval(float(x[0]), float(x[0]), float(x[0]))
    generator = np.random.default_rng(seed)
    found = []
    for start in range(0, resamples, _CHUNK):
        again = x[generator.integers(x.size, size=(min(_CHUNK, resamples - start), x.size))]
        errors = again.std(axis=1, ddof=1) / x.size**0.5
        # A resample of one difference many times has no error of its own, and says nothing.
        varied = errors > 0
        found.append((again.mean(axis=1)[varied] - mean) / errors[varied])
    below, above = np.quantile(np.concatenate(found), [level, 1 - level])
    return Interval(mean, mean - float(above) * error, mean - float(below) * error)
