"""What a subject can declare, and whether it makes sense: the words, their values, the messages."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from oracles.outputs import Numerics
from oracles.problem import DTYPES, LAYOUTS

__all__ = ["BITWISE", "NUMERICS", "WORDS", "check_declarations", "declared_by"]

BITWISE = ("G4", "G5", "G8", "G9", "G10")
NUMERICS = tuple(item.name for item in dataclasses.fields(Numerics))
# Declarations that hold some of these words.
_SUBSETS: dict[str, tuple[str, ...]] = {
    "dtypes": DTYPES,
    "masks": ("causal", "window", "padding"),
    "layouts": LAYOUTS,
    "devices": ("cpu", "cuda"),
    "bitwise": BITWISE,
}
# Declarations that are one of these.
_CHOICES: dict[str, tuple[Any, ...]] = {
    "gqa": (True, False),
    "m_ne_n": (True, False),
    "dv_ne_d": (True, False),
    "backward": (True, False),
    "returns_lse": (True, False),
    "lse_grad": (True, False),
    "lse_base": ("e", "2"),
    "empty_lse": ("-inf", "+inf", 0),
    "causal_alignment": ("bottom-right", "top-left"),
}
_POSITIVE = ("seqlen_multiple", "max_seqlen")
# All declarations there are.
WORDS = (*_SUBSETS, *_CHOICES, "head_dims", *_POSITIVE, *NUMERICS, "configs", "tiles")


def declared_by(call: Callable[..., Any], name: str) -> dict[str, Any]:
    """The declarations among the attributes of a callable.

    Raises:
        ValueError: A function has an attribute that is no declaration, which would go unnoticed.
    """
    if inspect.isfunction(call):
        for word in vars(call):
            if word not in WORDS and not word.startswith("_"):
                close = difflib.get_close_matches(word, WORDS, 1)
                hint = f" (did you mean {close[0]!r}?)" if close else ""
                raise ValueError(f"{name} declares {word!r}{hint}; known are {sorted(WORDS)}")
    return {word: getattr(call, word) for word in WORDS if hasattr(call, word)}


def check_declarations(name: str, declared: dict[str, Any]) -> None:
    """Checks values, and turns sequences of words into tuples in place.

    Raises:
        ValueError: A declaration has a value that it cannot have.
    """
    for word, known in _SUBSETS.items():
        if word in declared:
            declared[word] = _words(f"{name}.{word}", declared[word], known)
    for word, choices in _CHOICES.items():
        given = declared.get(word, choices[0])
        # True equals 1 and False 0, which mean something else.
        if not any(given == choice and type(given) is type(choice) for choice in choices):
            raise ValueError(f"{name}.{word} is {given!r}; needs one of {choices}")
    for word in _POSITIVE:
        if word in declared:
            _check_positive(f"{name}.{word}", declared[word])
    if "head_dims" in declared:
        dims = declared["head_dims"]
        if not isinstance(dims, list | tuple | set | range) or not dims:
            raise ValueError(f"{name}.head_dims is {dims!r}; needs a sequence of sizes")
        for dim in dims:
            _check_positive(f"{name}.head_dims", dim)
        declared["head_dims"] = tuple(dims)
    try:
        Numerics(**{word: declared[word] for word in NUMERICS if word in declared})
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name}: {error}") from None
    if "configs" in declared:
        _check_configs(f"{name}.configs", declared["configs"])
    if "tiles" in declared and not callable(declared["tiles"]):
        raise ValueError(f"{name}.tiles is {declared['tiles']!r}; needs a function of a problem")


def _words(where: str, given: object, known: tuple[str, ...]) -> tuple[str, ...]:
    """A sequence of known words as a tuple; one word alone would be read letter by letter."""
    if not isinstance(given, list | tuple | set | frozenset):
        raise ValueError(f"{where} is {given!r}; needs a tuple of words out of {known}")
    unknown = [word for word in given if word not in known]
    if unknown:
        raise ValueError(f"{where} has {unknown}; known are {known}")
    return tuple(word for word in known if word in given)


def _check_positive(where: str, given: object) -> None:
    if isinstance(given, bool) or not isinstance(given, int) or given < 1:
        raise ValueError(f"{where} has {given!r}; needs an int >= 1")


def _check_configs(where: str, given: object) -> None:
    """Every configuration replaces dtypes or numerics, by valid values."""
    if not isinstance(given, Mapping) or not given:
        raise ValueError(f"{where} is {given!r}; needs a dict of names to declarations")
    for config, replaced in given.items():
        if not isinstance(replaced, Mapping):
            raise ValueError(f"{where}[{config!r}] is {replaced!r}; needs a dict of declarations")
        unknown = [word for word in replaced if word not in ("dtypes", *NUMERICS)]
        if unknown:
            raise ValueError(
                f"{where}[{config!r}] has {unknown}; known are {('dtypes', *NUMERICS)}"
            )
        check_declarations(f"{where}[{config!r}]", dict(replaced))
