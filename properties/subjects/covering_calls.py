"""The calls of a covering array, and the words for what they cover."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from fa_verify.oracles.call import Call
from fa_verify.properties.problems.covering import Combination

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
    """

    calls: tuple[OneCall, ...]
    combinations: tuple[frozenset[Combination], ...]
    left_out: frozenset[Combination] = frozenset()

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
    if text[:1] in "BHGMn" or name == "causal":
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
