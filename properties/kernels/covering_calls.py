"""The calls of a covering array, and the words for what they cover."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from fa_verify.oracles.call import Call
from fa_verify.properties.kernels.ways import WAY
from fa_verify.properties.problems.covering import Combination, Covering, Row

__all__ = ["CoveringCalls", "combinations_line", "named"]

# Combinations that a line names.
_NAMED = 4
_OF_WHAT = {
    "attention": "three values of shape and mask, or two of others,",
    "cache": "two values of calls with a cache",
    "merge": "two values of merges",
}
OneCall = TypeVar("OneCall", bound=Call)


@dataclass(frozen=True)
class CoveringCalls(Generic[OneCall]):
    """The calls of a covering array.

    Args:
        calls: The calls, those that cover most first.
        combinations: The combinations that each call has.
        left_out: Combinations that the declarations allow, and that only larger calls have.
        asks: The numbers of the calls that are made in the way of their seed, too.
    """

    calls: tuple[OneCall, ...]
    combinations: tuple[frozenset[Combination], ...]
    left_out: frozenset[Combination] = frozenset()
    asks: frozenset[int] = frozenset()

    @classmethod
    def of(cls, array: Covering, call: Callable[[Row], OneCall]) -> CoveringCalls[OneCall]:
        """Return the calls of rows. As few of them as have every two values with a way ask for it.

        Args:
            array: The rows.
            call: Returns the call of a row.
        """
        calls = tuple(map(call, array.rows))
        of_ways = [frozenset(x for x in row if WAY in dict(x)) for row in array.combinations]
        left = Counter(itertools.chain(*of_ways))
        asks = {*range(len(calls))}
        # The largest calls take longest.
        for number in sorted(asks, key=lambda x: -calls[x].pairs):
            if all(left[x] > 1 for x in of_ways[number]):
                left.subtract(of_ways[number])
                asks.remove(number)
        combinations = tuple(
            row if number in asks else row - of_ways[number]
            for number, row in enumerate(array.combinations)
        )
        return cls(calls, combinations, array.left_out, frozenset(asks))

    def missing(self, judged: Iterable[int]) -> tuple[set[Combination], int]:
        """Return the combinations that none of the numbered calls has, and how many exist."""
        every = self.left_out.union(*self.combinations)
        return set(every).difference(*(self.combinations[x] for x in judged)), len(every)


def named(combination: Combination) -> str:
    """Return the words of a combination, "causal, G>4, 2 tiles of N"."""
    return ", ".join(_words(name, value) for name, value in combination)


def _words(name: str, value: Any) -> str:
    if isinstance(value, bool | None):
        return name if value else f"no {name}"
    if isinstance(value, tuple) and all(type(x) is int for x in value):
        return f"{name}={value[0]}" + f"-{value[-1]}" * (len(value) > 1)
    text = str(value)
    if text[:1] in "BHGMn" or name in ("causal", WAY):
        return text
    return f"{text} of {name[-1]}" if name.startswith(("tiles", "end")) else f"{name} {text}"


def combinations_line(missing: Iterable[Combination], count: int, kind: str) -> str:
    """Return how many combinations judged calls of a kind have, and a few that none has."""
    left = sorted(missing, key=str)
    shown = "; ".join(map(named, left[:_NAMED])) + (" ..." if len(left) > _NAMED else "")
    return (
        f"{count - len(left):,} of {count:,} combinations of {_OF_WHAT[kind]} were judged"
        f"{'; not ' * bool(left)}{shown}"
    )
