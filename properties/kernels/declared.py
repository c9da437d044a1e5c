"""The declarations that a callable makes: found, checked, and said in words."""

from __future__ import annotations

import difflib
import functools
import inspect
import math
from collections.abc import Callable, Mapping
from types import FunctionType, MethodType
from typing import Any

from fa_verify.oracles.declaration import Declaration, declarations_of
from fa_verify.oracles.outputs import Numerics
from fa_verify.oracles.quantised_numerics import QuantisedNumerics
from fa_verify.properties.inputs.bad_calls import OF_CACHES, OF_PACKED, OF_PADDED
from fa_verify.properties.kernels.declarations import Declarations, not_supported
from fa_verify.properties.kernels.vocabulary import MASKS

__all__ = [
    "ASSUMED_CONVENTIONS",
    "DECLARATIONS",
    "NARROWINGS",
    "NUMERICS",
    "NUMERICS_THAT_DIFFER",
    "WORDS",
    "check_declarations",
    "declared_by",
    "narrowings",
    "unknown_word",
    "without_none",
]

# All declarations, in the order of their page.
DECLARATIONS: dict[str, Declaration] = {
    **dict(declarations_of(Declarations)), **dict(declarations_of(Numerics))
}  # fmt: skip
WORDS = tuple(DECLARATIONS)
NUMERICS = tuple(word for word, _ in declarations_of(Numerics))
# Declarations that leave problems or outputs out, and a phrase for those that remain.
NARROWINGS: Mapping[str, Callable[[Any], str]] = {
    word: known.narrows for word, known in DECLARATIONS.items() if known.narrows
}
# Declarations that say how a result is read, and where it may be rounded.
ASSUMED_CONVENTIONS = tuple(word for word, known in DECLARATIONS.items() if known.is_assumed)
# The values of numerics that differ from the defaults, those that widen the bound least first.
NUMERICS_THAT_DIFFER: tuple[dict[str, object], ...] = (
    {"group_sum": "dtype"}, {"p_normalised": True}, {"ds_scaled": True}, {"ds_from": "rounded"},
    {"l_from": "rounded"}, {"ds_roundings": 2}, {"prescales": "q"}, {"prescales": "k"},
    {"prescales": "qk"}, {"flushes": True}, {"dots": "tf32"}, {"softcap_slope": "difference"},
    {"atomic": ("dk", "dv"), "partial_sums": "input"},
)  # fmt: skip
# The declarations that a configuration may replace.
_REPLACED = ("dtypes", "same_bits", *NUMERICS)


def narrowings(declared: Mapping[str, Any]) -> tuple[str, ...]:
    """Return a phrase for each declaration that leaves problems or outputs out.

    A narrower one covers a wider one: M = N is M <= N too, and a kernel that is always causal and
    takes the causal mask alone takes no other mask.
    """
    covered = set()
    if declared.get("always_causal") and declared.get("masks") == ("causal",):
        covered.add("masks")
    if not declared.get("m_ne_n", True):
        covered.add("m_gt_n")
    # The largest narrowing is said first.
    words = sorted(NARROWINGS, key="always_causal".__ne__)
    said = (NARROWINGS[x](declared[x]) for x in words if x in declared and x not in covered)
    return tuple(filter(None, said))


def declared_by(call: Callable[..., Any], name: str) -> dict[str, Any]:
    """Return the declarations among the attributes of a callable.

    Other attributes are accepted on an instance; and, unless their names resemble a declaration, on
    a class and on a function that wraps another.

    Raises:
        ValueError: Another attribute is not a declaration and would have no effect.
    """
    own_words = inspect.isclass(call) or hasattr(call, "__wrapped__")
    if inspect.isclass(call) or isinstance(call, FunctionType | MethodType | functools.partial):
        for word in vars(call):
            if word in WORDS or word.startswith("_") or _is_code(call, word):
                continue
            if _close_match(word) or not own_words:
                raise unknown_word(name, word)
    found = {word: getattr(call, word) for word in WORDS if hasattr(call, word)}
    return {
        word: value
        for word, value in without_none(found).items()
        if not (
            (inspect.ismethod(value) or _is_code(call, word)) and not DECLARATIONS[word].is_function
        )
    }


def without_none(declared: Mapping[str, Any]) -> dict[str, Any]:
    """Drop the declarations that are None and for which None means no declaration."""
    return {
        word: value
        for word, value in declared.items()
        if value is not None or not DECLARATIONS[word].none_is_nothing
    }


def unknown_word(name: str, word: str) -> ValueError:
    """Return the error for an unknown declaration, which suggests a similar one."""
    close = _close_match(word)
    hint = f" (did you mean {close!r}?)" if close else ""
    known = f"known are {sorted(WORDS)}"
    return ValueError(f"{name} declares {word!r}{hint}; {known}{not_supported(word)}")


def _close_match(word: str) -> str | None:
    """Return the declaration most similar to an unknown one, if any."""
    return next(iter(difflib.get_close_matches(word, WORDS, 1)), None)


def _is_code(call: object, word: str) -> bool:
    """Return whether an attribute is a method of a class, such as ``backward``."""
    return inspect.isclass(call) and inspect.isroutine(getattr(call, word))


def check_declarations(name: str, declared: dict[str, Any]) -> None:
    """Check the values of declarations, and convert sequences to tuples in place.

    Raises:
        ValueError: A declaration has an invalid value, or two exclude each other. The message
            begins with ``name``.
    """
    for word, known in DECLARATIONS.items():
        if word in declared:
            declared[word] = known.values(f"{name}.{word}", declared[word])
    if declared.get("max_seqlen", math.inf) < declared.get("seqlen_multiple", 1):
        raise ValueError(
            f"{name}.max_seqlen is {declared['max_seqlen']}; "
            f"needs at least {declared['seqlen_multiple']}, its seqlen_multiple"
        )
    if "cache" in declared and set(declared["cache"]) <= {"append"}:
        raise ValueError(f"{name}.cache is {declared['cache']!r}; needs 'contiguous' or 'paged'")
    _check_codes(name, declared)
    _check_masks(name, declared)
    _check_refuses(name, declared)
    for config, replaced in declared.get("configs", {}).items():
        where = f"{name}.configs[{config!r}]"
        unknown = [word for word in replaced if word not in _REPLACED]
        if unknown:
            raise ValueError(f"{where} has {unknown}; known are {_REPLACED}")
        check_declarations(where, dict(replaced))


def _check_codes(name: str, declared: Mapping[str, Any]) -> None:
    """Check that P, relative to a maximum that is put off, stays in the range of its format."""
    numerics: QuantisedNumerics = declared.get("quantised_numerics", QuantisedNumerics())
    threshold = declared.get("rescale_threshold", 0.0)
    if "quantised" in declared and numerics.saturates(threshold):
        raise ValueError(
            f"{name}.rescale_threshold is {threshold}; needs less, as P times 2**{threshold} and "
            f"its p_offset, {numerics.p_offset}, leaves the range of {numerics.p_format}"
        )


def _check_masks(name: str, declared: Mapping[str, Any]) -> None:
    """Check that masks and score modifications exist under the other declarations."""
    masks = declared.get("masks", MASKS)
    if declared.get("always_causal") and "causal" not in masks:
        raise ValueError(f"{name}.masks is {masks!r}; needs 'causal', as always_causal is declared")
    if declared.get("varlen") and "bias" in declared.get("score_mods", ()):
        raise ValueError(
            f"{name}.score_mods has 'bias'; varlen=True needs one without, as a bias is not packed"
        )


def _check_refuses(name: str, declared: Mapping[str, Any]) -> None:
    """Check that the kernel takes calls that can be bad in the declared ways."""
    is_packed = bool(declared.get("varlen"))
    takes_caches = not {"kvcache", "cache"}.isdisjoint(declared)
    needs = {
        **dict.fromkeys(OF_PADDED, ("padded tensors", not is_packed)),
        **dict.fromkeys(OF_PACKED, ("varlen=True or packed", is_packed or "packed" in declared)),
        **dict.fromkeys(OF_CACHES, ("kvcache or cache", takes_caches)),
    }
    for word in declared.get("refuses", ()):
        needed, is_there = needs.get(word, ("", True))
        if not is_there:
            raise ValueError(f"{name}.refuses has {word!r}; needs {needed}")
