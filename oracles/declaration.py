"""The description of one declaration of a kernel, which stands beside its field."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
import numbers
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

if TYPE_CHECKING:
    from fa_verify.oracles.problem import Problem

__all__ = [
    "Declaration",
    "Values",
    "declarations_of",
    "declared",
    "function",
    "one_of",
    "sizes",
    "some_number",
    "some_of",
    "whole_number",
]  # fmt: skip

# Takes the name of a declaration and a value; returns the value, a sequence as a tuple, or raises
# ValueError with the name, the value and the allowed values.
Values: TypeAlias = Callable[[str, object], Any]
_T = TypeVar("_T")
_LINK = re.compile(r"\[([^]]*)\]\([^)]*\)")


@dataclass(frozen=True, kw_only=True)
class Declaration:
    """One declaration; documentation, errors and the domain are read from it.

    Args:
        meaning: Its meaning, as a cell of a table in Markdown.
        values: Its values.
        part: The part of the page: "domain", "conventions", "numerics" or "promises".
        none_is_nothing: None means the same as no declaration.
        narrows: Function from a value to a phrase for the problems and outputs that it leaves; an
            empty phrase if it leaves all. A kernel that holds under a declaration that it has not
            made holds for less than it was asked for.
        is_assumed: ``fa-verify check`` assumes the declaration as a probe finds it. Under the wrong
            one a correct kernel fails; no value makes a bound stricter or leaves a problem out.
        is_function: The value may be a function, which a class may define as a method.
        admits: Function from the declarations of a kernel and a problem to whether the
            declaration leaves the problem.
    """

    meaning: str
    values: Values
    part: str
    none_is_nothing: bool = False
    narrows: Callable[[Any], str] | None = None
    is_assumed: bool = False
    is_function: bool = False
    admits: Callable[[Any, Problem], bool] | None = None

    @property
    def text(self) -> str:
        """The meaning without the markup of links and tables."""
        return _LINK.sub(r"\1", self.meaning).replace("\\|", "|")


def declared(default: _T, meaning: str, values: Values, part: str, **known: Any) -> _T:
    """Return a field with its default, which says its type, and a ``Declaration``.

    A dict or another mutable default is copied for each instance.
    """
    described = {"declaration": Declaration(meaning=meaning, values=values, part=part, **known)}
    if type(default).__hash__ is None:
        made: _T = field(default_factory=functools.partial(copy.copy, default), metadata=described)
        return made
    made = field(default=default, metadata=described)
    return made


def declarations_of(owner: Any) -> Iterator[tuple[str, Declaration]]:
    """Yield the name and the description of each field of a dataclass that is a declaration."""
    for item in dataclasses.fields(owner):
        if "declaration" in item.metadata:
            yield item.name, item.metadata["declaration"]


def one_of(*choices: object) -> Values:
    """Return the values that are one of some choices."""

    def check(where: str, given: object) -> object:
        # Compare types too, since True == 1 and False == 0.
        if not any(type(given) is type(choice) and given == choice for choice in choices):
            raise ValueError(f"{where} is {given!r}; needs one of {choices}")
        return given

    return check


def some_of(
    known: Sequence[str], *, hint: Callable[..., str] = lambda *_: "", least: int = 0
) -> Values:
    """Return the values that are sequences of known words.

    Args:
        known: The words, in the order that a value gets.
        hint: Function from unknown words to the end of the message.
        least: The smallest number of words.
    """
    words = tuple(known)

    def check(where: str, given: object) -> tuple[str, ...]:
        if not isinstance(given, list | tuple | set | frozenset):  # a str would yield letters
            raise ValueError(f"{where} is {given!r}; needs a tuple of words out of {words}")
        unknown = [word for word in given if word not in words]
        if unknown:
            raise ValueError(f"{where} has {unknown}; known are {words}{hint(*unknown)}")
        if len(given) < least:
            raise ValueError(f"{where} is empty; needs some of {words}")
        return tuple(word for word in words if word in given)

    return check


def whole_number(least: int, most: int, verb: str = "is") -> Values:
    """Return the values that are ints of a range, both ends included."""

    def check(where: str, given: object) -> object:
        is_int = isinstance(given, numbers.Integral) and not isinstance(given, bool)
        if not is_int or not least <= given <= most:  # type: ignore[operator]
            raise ValueError(f"{where} {verb} {given!r}; needs an int from {least} to {most:,}")
        return given

    return check


def some_number(least: float, most: float, why: str = "") -> Values:
    """Return the values that are numbers of a range, both ends included, and its reason."""

    def check(where: str, given: object) -> object:
        is_number = isinstance(given, int | float) and not isinstance(given, bool)
        if not is_number or math.isnan(given) or not least <= given <= most:  # type: ignore[arg-type, operator]
            raise ValueError(f"{where} is {given!r}; needs a number from {least} to {most}{why}")
        return given

    return check


def sizes(most: int) -> Values:
    """Return the values that are sequences of sizes up to the largest."""
    one = whole_number(1, most, "has")

    def check(where: str, given: object) -> tuple[int, ...]:
        if not isinstance(given, list | tuple | set | frozenset | range) or not given:
            raise ValueError(f"{where} is {given!r}; needs a sequence of sizes")
        for size in given:
            one(where, size)
        return tuple(sorted(given) if isinstance(given, set | frozenset) else given)

    return check


def function(needs: str, *others: object) -> Values:
    """Return the values that are functions, or one of others; the phrase says of which."""

    def check(where: str, given: object) -> object:
        if not callable(given) and not any(given is other for other in others):
            raise ValueError(f"{where} is {given!r}; needs {needs}")
        return given

    return check
