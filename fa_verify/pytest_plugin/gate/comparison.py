"""A run against its baseline: everything that moved, as a list."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fa_verify.properties.regression.baseline import Baseline, Entry, digits
from fa_verify.properties.regression.compiled_kernels import Resources, moved_kernels
from fa_verify.properties.regression.difference import Difference
from fa_verify.properties.regression.drift import moved_coverage, moved_maxima, moved_rms
from fa_verify.properties.regression.speed_ratio import moved_speed

__all__ = ["combined", "differences"]


def differences(
    then: Baseline,
    now: Mapping[int, Entry],
    reasons: Mapping[int, str],
    kernels: Mapping[str, Resources],
    speed: Mapping[str, Sequence[float]],
    why_not: str = "",
) -> list[Difference]:
    """What moved.

    Args:
        then: The baseline.
        now: Place among its entries to what was measured.
        reasons: Place to why nothing was measured, or the check not made.
        kernels: What was compiled.
        speed: What was timed.
        why_not: Why nothing was.
    """
    pairs = [(then.entries[i], _rounded(now[i])) for i in sorted(now)]
    return [
        *moved_coverage(then, now, reasons),
        *moved_rms(pairs),
        *moved_maxima(pairs),
        *moved_kernels(then.kernels, kernels),
        *moved_speed(then.speed, speed, why_not),
    ]


def combined(kept: Sequence[Entry], made: Sequence[Entry]) -> tuple[Entry, ...]:
    """The entries of a file and, after them, the new ones of problems that it lacks."""
    known = {entry.problem for entry in kept}
    return (*kept, *(entry for entry in made if entry.problem not in known))


def _rounded(entry: Entry) -> Entry:
    """To the digits that a file keeps, so that what has not changed is equal."""
    errors = {name: (digits(a), digits(b)) for name, (a, b) in entry.errors.items()}
    return Entry(entry.problem, entry.check, entry.arithmetic, errors)
