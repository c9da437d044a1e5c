"""Differences between a baseline and a run in coverage, mean square errors and largest errors."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from fa_verify.properties.regression.baseline import Baseline, Entry
from fa_verify.properties.regression.bootstrap import Interval, mean_difference
from fa_verify.properties.regression.difference import Difference

__all__ = ["FALSE_ALARMS", "grouped", "moved_coverage", "moved_maxima", "moved_rms"]

# Probability of a false alarm about RMS in any of the groups.
FALSE_ALARMS = 0.005
# Ratios of root mean squares are clipped to this: beyond it, one of them is about 0.
_FARTHEST = 1000.0
# Smallest number of problems in a group: with fewer, resampling cannot estimate the variation.
FEWEST = 6

Pair = tuple[Entry, Entry]

_KINDS: dict[str, Callable[[Entry], str]] = {
    "guarantee": lambda entry: entry.check,
    "dtype": lambda entry: entry.arithmetic,
    "mask": lambda entry: entry.mask,
    "configuration": lambda entry: entry.problem.config,
}


def grouped(pairs: Iterable[Pair]) -> dict[str, list[float]]:
    """Return log(RMS now / RMS then) by group: each output by dtype, and each output by mask.

    A fault of one dtype appears in the groups of the dtype, one of a mask in those of the mask.
    Groups by dtype and mask together would be smaller and more numerous.
    """
    found: dict[str, list[float]] = defaultdict(list)
    for then, now in pairs:
        for output in then.errors.keys() & now.errors.keys():
            ratio = _log_ratio(now.errors[output][1], then.errors[output][1])
            found[f"{output} {then.arithmetic}"].append(ratio)
            found[f"{output} {then.mask}"].append(ratio)
    return {name: ratios for name, ratios in sorted(found.items()) if len(ratios) >= FEWEST}


def moved_rms(pairs: Iterable[Pair]) -> Iterator[Difference]:
    """Yield the groups whose RMS of errors changed significantly. An increase is an alarm.

    The paired differences are logarithms of ratios, one for each problem. Their mean has a
    bootstrap interval, whose level is divided by the number of groups (Bonferroni).
    """
    groups = grouped(pairs)
    level = FALSE_ALARMS / max(1, len(groups))
    for name, ratios in groups.items():
        interval = mean_difference(ratios, level)
        if interval.low > 0 or interval.high < 0:
            yield Difference(
                "rms",
                f"{name}: {_percent(interval)} over {len(ratios)} problems",
                alarm=interval.low > 0,
            )


def moved_maxima(pairs: Sequence[Pair]) -> Iterator[Difference]:
    """Yield changes of the largest error/bound of each output and dtype; above 1 is an alarm."""
    then: dict[str, float] = defaultdict(float)
    now: dict[str, float] = defaultdict(float)
    for before, after in pairs:
        for output in before.errors.keys() & after.errors.keys():
            group = f"{output} {before.arithmetic}"
            then[group] = max(then[group], before.errors[output][0])
            now[group] = max(now[group], after.errors[output][0])
    for name in sorted(now):
        if now[name] != then[name] or now[name] > 1:
            text = f"largest error/bound of {name}: {then[name]:.3f} -> {now[name]:.3f}"
            yield Difference("maxima", text, alarm=now[name] > 1)


def moved_coverage(
    then: Baseline, now: Mapping[int, Entry], reasons: Mapping[int, str]
) -> Iterator[Difference]:
    """Yield an alarm for everything that the baseline checked and this run did not.

    Args:
        then: The baseline.
        now: Index in the baseline's entries to the entry measured in this run.
        reasons: Index to the reason why nothing was measured or the check was not made.
    """
    for kind, word in _KINDS.items():
        had = Counter(word(x) for x in then.entries)
        has = {word(x) for i, x in now.items() if kind != "guarantee" or i not in reasons}
        for name in sorted(had.keys() - has):
            none = f"none of its {had[name]} problems was judged"
            none = none if had[name] > 1 else "its problem was not judged"
            text = f"{kind} {name} is no longer covered: {none}"
            yield Difference("coverage", text, alarm=True)
    for reason, count in Counter(reasons.values()).most_common():
        problems = "1 problem was" if count == 1 else f"{count} problems were"
        yield Difference(
            "coverage", f"{problems} judged in the baseline, not now: {reason}", alarm=True
        )
    lost = Counter(
        output
        for i, entry in now.items()
        for output in then.entries[i].errors.keys() - entry.errors.keys()
    )
    for output, count in sorted(lost.items()):
        yield Difference(
            "coverage", f"{output} is no longer returned for {count} problems", alarm=True
        )


def _log_ratio(now: float, then: float) -> float:
    """Return log(now / then), with the ratio clipped to [1 / _FARTHEST, _FARTHEST]; 0 if equal."""
    if now == then:
        return 0.0
    ratio = now / then if then else math.inf
    return math.log(min(max(ratio, 1 / _FARTHEST), _FARTHEST))


def _percent(interval: Interval) -> str:
    mean, low, high = (100 * math.expm1(min(x, _log_ratio(_FARTHEST, 1.0))) for x in interval)
    return f"{mean:+.2f} % [{low:+.2f} %, {high:+.2f} %]"
