"""List the differences between a run and its baseline."""

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
    """Return all differences of a run from its baseline.

    Args:
        then: The baseline.
        now: Index in the baseline's entries to the entry measured in this run.
        reasons: Index to the reason why nothing was measured or the check was not made.
        kernels: Name of a compiled kernel to its resources.
        speed: Name of a timed pass to its ratios to SDPA flash, one per round.
        why_not: Why nothing was timed; empty if something was.
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
    """Return the kept entries, followed by the entries of problems that are new."""
    known = {entry.problem for entry in kept}
    return (*kept, *(entry for entry in made if entry.problem not in known))


def _rounded(entry: Entry) -> Entry:
    """Round an entry to the digits stored in a file, so that unchanged values compare equal."""
    errors = {name: (digits(a), digits(b)) for name, (a, b) in entry.errors.items()}
    return Entry(entry.problem, entry.check, entry.arithmetic, errors)
