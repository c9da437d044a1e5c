"""A bootstrap confidence interval for the mean of paired differences."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["RESAMPLES", "Interval", "mean_difference"]

# With a level of 1e-4, the ten most extreme resamples determine the end of an interval.
RESAMPLES = 100_000
# Number of resamples in memory at a time.
_CHUNK = 10_000


class Interval(NamedTuple):
    """A mean and its confidence interval."""

    mean: float
    low: float
    high: float


def mean_difference(
    differences: npt.ArrayLike, level: float, *, resamples: int = RESAMPLES, seed: int = 0
) -> Interval:
    """Return the mean of paired differences with its bootstrap-t interval.

    The differences are resampled with replacement, and the mean of each resample is measured in its
    own standard error. For a few dozen skewed differences, a percentile interval of the means would
    be too narrow. If all differences are equal, the interval is a point.

    Args:
        differences: The differences, one for each pair, finite.
        level: Probability that the mean lies below the interval; also that it lies above.
        resamples: Number of resamples.
        seed: Seed of the resampling. The same differences give the same interval.

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
        # Drop resamples in which all differences are equal: their standard error is 0.
        varied = errors > 0
        found.append((again.mean(axis=1)[varied] - mean) / errors[varied])
    below, above = np.quantile(np.concatenate(found), [level, 1 - level])
    return Interval(mean, mean - float(above) * error, mean - float(below) * error)
