"""The declarations of a subject: their names, allowed values and error messages."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType, MethodType
from typing import Any

from fa_verify.oracles.calls.cache import OF_INPUTS, SCALES
from fa_verify.oracles.formats.element import FORMATS
from fa_verify.oracles.formats.writing import Writing
from fa_verify.oracles.guarantee import G4, G5, G8, G9, G10, I1, I2, I4, I5, I6
from fa_verify.oracles.outputs import Numerics
from fa_verify.oracles.problem import DTYPES, LAYOUTS
from fa_verify.properties.inputs.bad_calls import BAD_CALLS, OF_CACHES, OF_PACKED, OF_PADDED
from fa_verify.properties.inputs.padding_values import PADDING_VALUES

__all__ = [
    "ASSUMED_CONVENTIONS",
    "BITWISE",
    "CACHES",
    "CACHE_FORMATS",
    "DEFAULT_SCALE",
    "NARROWINGS",
    "NUMERICS",
    "NUMERICS_THAT_DIFFER",
    "SAME_BITS",
    "SCORE_MODS",
    "WORDS",
    "check_declarations",
    "declared_by",
    "narrowings",
    "unknown_word",
    "without_none",
]

# Score modifications that a subject may support.
SCORE_MODS = ("softcap", "alibi", "bias", "sinks")
BITWISE = tuple(x.key for x in (G4, G5, G8, G9, G10))
# Words of ``same_bits``, and the guarantee that each promises.
SAME_BITS = {
    "batch": I1.key, "chunks": I2.key, "heads": I4.key, "varlen": I5.key, "inference": I6.key
}  # fmt: skip
# Features of calls with a cache: one row of the cache an entry, pages, and new keys.
CACHES = ("contiguous", "paged", "append")
# Formats of a cache: the dtype of q, and codes.
CACHE_FORMATS = (OF_INPUTS, *FORMATS)
NUMERICS = tuple(item.name for item in dataclasses.fields(Numerics))
# The values of numerics that differ from the defaults, those that widen the bound least first.
NUMERICS_THAT_DIFFER: tuple[dict[str, object], ...] = (
    {"group_sum": "dtype"}, {"p_normalised": True}, {"ds_scaled": True}, {"ds_from": "rounded"},
    {"l_from": "rounded"}, {"ds_roundings": 2}, {"prescales": "q"}, {"prescales": "k"},
    {"prescales": "qk"}, {"flushes": True}, {"dots": "tf32"}, {"softcap_slope": "difference"},
    {"atomic": ("dk", "dv"), "partial_sums": "input"},
)  # fmt: skip
# Declarations that are a subset of these values.
_SUBSETS: dict[str, tuple[str, ...]] = {
    "dtypes": DTYPES,
    "masks": ("causal", "window", "padding", "custom"),
    "layouts": LAYOUTS,
    "dirty": tuple(PADDING_VALUES),
    "devices": ("cpu", "cuda"),
    "bitwise": BITWISE,
    "same_bits": tuple(SAME_BITS),
    "atomic": ("dq", "dk", "dv"),
    "backward_reads": ("out", "lse", "m_and_l"),
    "score_mods": SCORE_MODS,
    "cache": CACHES,
    "cache_formats": CACHE_FORMATS,
    "cache_scales": SCALES,
    "refuses": BAD_CALLS,
}
_NOT_SUPPORTED = re.compile("f(p|loat)8|int8|dropout|quant|hip|rocm|amd", re.IGNORECASE)
# Subsets that must not be empty, as there would be nothing to verify.
_NEVER_EMPTY = (
    "dtypes", "layouts", "dirty", "devices", "cache", "cache_formats", "cache_scales"
)  # fmt: skip
# Declarations that are one of these values.
_CHOICES: dict[str, tuple[Any, ...]] = {
    "gqa": (True, False),
    "m_ne_n": (True, False),
    "m_gt_n": (True, False),
    "one_query": (False, True),
    "dv_ne_d": (True, False),
    "zero_sizes": (True, False),
    "backward": (True, False),
    "always_causal": (False, True),
    "varlen": (False, True),
    "returns_lse": (True, False),
    "lse_grad": (True, False),
    "cuda_graphs": (True, False),
    "lse_base": ("e", "2"),
    "empty_lse": ("-inf", "+inf", 0),
    "causal_alignment": ("bottom-right", "top-left"),
    "ds_scaled": (False, True),
    "p_normalised": (False, True),
    "flushes": (False, True),
    "scale_divides": (False, True),
}
_COUNTS = ("seqlen_multiple", "max_seqlen", "block_n", "ds_roundings", "splits")
# Declarations that are callables.
_FUNCTIONS = ("tiles", "paths", "pooled", "states", "packed", "kvcache", "kvcache_splits")
# The value of ``fixed_scale`` for a kernel that divides by the root of D.
DEFAULT_SCALE = "1/sqrt(D)"
# All declarations.
_OTHERS = (
    "head_dims", "page_sizes", "fixed_scale", *_COUNTS, *NUMERICS, "configs", "writing",
    *_FUNCTIONS,
)  # fmt: skip
WORDS = tuple(dict.fromkeys((*_SUBSETS, *_CHOICES, *_OTHERS)))
# Declarations for which None means the same as no declaration.
_NONE_IS_NOTHING = (
    "head_dims", "page_sizes", "max_seqlen", "layouts", "dirty", "returns_lse", "fixed_scale",
    *_FUNCTIONS,
)  # fmt: skip


def _without(known: tuple[str, ...]) -> Callable[[Sequence[str]], str]:
    """Return a function that names what is missing, or what is left if that is shorter."""

    def phrase(given: Sequence[str]) -> str:
        missing = [x for x in known if x not in given]
        if given and len(given) < len(missing):
            return f"{' and '.join(given)} alone"
        return f"no {' or '.join(missing)}" if missing else ""

    return phrase


def _masks(given: Sequence[str]) -> str:
    """Name the kinds of masks that are missing."""
    missing = [x for x in _SUBSETS["masks"] if x not in given]
    if not missing or not given:
        return "no mask" if missing else ""
    return f"no {' or '.join(missing)} masks"


def _sizes_of(name: str) -> Callable[[Sequence[int] | None], str]:
    """Return a function that names the sizes that are left."""
    return lambda sizes: f"{name} of {', '.join(map(str, sizes))}" if sizes else ""


def _only(phrase: str) -> Callable[[bool], str]:
    """Return a function that says a phrase if True is declared."""
    return lambda given: phrase if given else ""


def _no(phrase: str) -> Callable[[bool], str]:
    """Return a function that says a phrase if False is declared."""
    return lambda given: "" if given else phrase


# Declarations that leave problems or outputs out, and a phrase for those that remain. A kernel that
# holds under one that it has not made holds for less than it was asked for.
NARROWINGS: Mapping[str, Callable[[Any], str]] = {
    "always_causal": _only("always causal"),
    "dtypes": _without(DTYPES),
    "head_dims": _sizes_of("D"),
    "seqlen_multiple": lambda n: f"M and N in multiples of {n}" if n > 1 else "",
    "max_seqlen": lambda n: f"M and N up to {n:,}" if n else "",
    "one_query": _only("M = 1"),
    "m_ne_n": _no("M = N"),
    "m_gt_n": _no("M <= N"),
    "gqa": _no("no grouped heads"),
    "dv_ne_d": _no("Dv = D"),
    "zero_sizes": _no("no size of 0"),
    "masks": _masks,
    "layouts": lambda given: "" if given is None else _without(LAYOUTS)(given),
    "dirty": lambda given: "" if given is None else _without(tuple(PADDING_VALUES))(given),
    "backward": _no("no gradients"),
    "fixed_scale": lambda scale: "" if scale is None else f"sm_scale = {scale}",
    "devices": _without(_SUBSETS["devices"]),
    "cache": _without(CACHES),
    "page_sizes": _sizes_of("pages"),
    "cuda_graphs": _no("no CUDA graphs"),
}  # fmt: skip
# Declarations that say how a result is read, and where it may be rounded. Under the wrong one a
# correct kernel fails. They leave nothing out, but for the alignment, which leaves M = N to a
# diagonal that is not this project's. ``fa-verify check`` assumes them as a probe finds them. It
# assumes no others: no stricter bound, and no sum that is rounded twice.
ASSUMED_CONVENTIONS = (
    "lse_base", "empty_lse", "causal_alignment", "dots", "prescales", "p_normalised", "ds_scaled",
    "ds_from", "l_from", "splits", "rescale_threshold",
)  # fmt: skip


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
    said = (say(declared[x]) for x, say in NARROWINGS.items() if x in declared and x not in covered)
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
        if not ((inspect.ismethod(value) or _is_code(call, word)) and word not in _FUNCTIONS)
    }


def without_none(declared: Mapping[str, Any]) -> dict[str, Any]:
    """Drop the declarations that are None and for which None means no declaration."""
    return {
        word: value
        for word, value in declared.items()
        if value is not None or word not in _NONE_IS_NOTHING
    }


def unknown_word(name: str, word: str) -> ValueError:
    """Return the error for an unknown declaration, which suggests a similar one."""
    close = _close_match(word)
    hint = f" (did you mean {close!r}?)" if close else ""
    known = f"known are {sorted(WORDS)}"
    return ValueError(f"{name} declares {word!r}{hint}; {known}{_not_supported(word)}")


def _not_supported(*words: object) -> str:
    """Return a sentence for words that ask for a feature that is not supported; else nothing."""
    asks = any(_NOT_SUPPORTED.search(str(word)) for word in words)
    return "; fp8 and int8 of q, dropout and AMD GPUs are not supported" if asks else ""


def _close_match(word: str) -> str | None:
    """Return the declaration most similar to an unknown one, if any."""
    return next(iter(difflib.get_close_matches(word, WORDS, 1)), None)


def _is_code(call: object, word: str) -> bool:
    """Return whether an attribute is a method of a class, such as ``backward``."""
    return inspect.isclass(call) and inspect.isroutine(getattr(call, word))


def check_declarations(name: str, declared: dict[str, Any]) -> None:
    """Check the values of declarations, and convert sequences to tuples in place.

    Raises:
        ValueError: A declaration has an invalid value. The message begins with ``name``.
    """
    for word, known in _SUBSETS.items():
        if word in declared:
            declared[word] = _words(f"{name}.{word}", declared[word], known)
            if word in _NEVER_EMPTY and not declared[word]:
                raise ValueError(f"{name}.{word} is empty; needs some of {known}")
    for word, choices in _CHOICES.items():
        given = declared.get(word, choices[0])
        # Compare types too, since True == 1 and False == 0.
        if not any(type(given) is type(choice) and given == choice for choice in choices):
            raise ValueError(f"{name}.{word} is {given!r}; needs one of {choices}")
    for word in _COUNTS:
        if word in declared:
            _check_int(f"{name}.{word} is", declared[word])
    if declared.get("max_seqlen", math.inf) < declared.get("seqlen_multiple", 1):
        raise ValueError(
            f"{name}.max_seqlen is {declared['max_seqlen']}; "
            f"needs at least {declared['seqlen_multiple']}, its seqlen_multiple"
        )
    for word in ("head_dims", "page_sizes"):
        if word in declared:
            declared[word] = _sizes(f"{name}.{word}", declared[word])
    if "cache" in declared and set(declared["cache"]) <= {"append"}:
        raise ValueError(f"{name}.cache is {declared['cache']!r}; needs 'contiguous' or 'paged'")
    if "writing" in declared:
        declared["writing"] = _writing(f"{name}.writing", declared["writing"])
    if "fixed_scale" in declared:
        _check_scale(f"{name}.fixed_scale", declared["fixed_scale"])
    _check_masks(name, declared)
    _check_refuses(name, declared)
    if "l_tile" in declared:
        _check_int(f"{name}.l_tile is", declared["l_tile"], least=0)
    if "accumulator" in declared:
        _check_accumulator(f"{name}.accumulator", declared["accumulator"])
    if "rescale_threshold" in declared:
        _check_number(f"{name}.rescale_threshold", declared["rescale_threshold"])
    try:
        Numerics(**{word: declared[word] for word in NUMERICS if word in declared})
    except ValueError as error:  # the message begins with the name of the declaration
        raise ValueError(f"{name}.{error}") from None
    if "configs" in declared:
        _check_configs(f"{name}.configs", declared["configs"])
    for word in ("tiles", "paths", "kvcache_splits"):
        if word in declared and not callable(declared[word]):
            raise ValueError(f"{name}.{word} is {declared[word]!r}; needs a function of a problem")
    states = declared.get("states", True)
    if states is not True and not callable(states):
        raise ValueError(
            f"{name}.states is {states!r}; needs a function of (outs, lses), or True for a kernel "
            "that is one"
        )
    if "packed" in declared and not callable(declared["packed"]):
        raise ValueError(
            f"{name}.packed is {declared['packed']!r}; needs a function of packed sequences"
        )
    if "kvcache" in declared and not callable(declared["kvcache"]):
        raise ValueError(
            f"{name}.kvcache is {declared['kvcache']!r}; needs a function of (q, k_cache, v_cache)"
        )
    if "pooled" in declared and not callable(declared["pooled"]):
        raise ValueError(
            f"{name}.pooled is {declared['pooled']!r}; needs a function that returns the pooled "
            "probabilities"
        )


def _words(where: str, given: object, known: tuple[str, ...]) -> tuple[str, ...]:
    """Convert a sequence of known words to a tuple. A str is refused: it would yield letters."""
    if not isinstance(given, list | tuple | set | frozenset):
        raise ValueError(f"{where} is {given!r}; needs a tuple of words out of {known}")
    unknown = [word for word in given if word not in known]
    if unknown:
        raise ValueError(f"{where} has {unknown}; known are {known}{_not_supported(*unknown)}")
    return tuple(word for word in known if word in given)


def _writing(where: str, given: object) -> Writing:
    """Convert a dict of the fields of ``Writing``."""
    if isinstance(given, Writing):
        return given
    if not isinstance(given, Mapping):
        raise ValueError(f"{where} is {given!r}; needs a dict of the fields of Writing")
    try:
        return Writing(**given)
    except TypeError:
        known = tuple(item.name for item in dataclasses.fields(Writing))
        raise ValueError(f"{where} is {given!r}; needs fields out of {known}") from None
    except ValueError as error:  # the message begins with the name of the field
        raise ValueError(f"{where}.{error}") from None


def _sizes(where: str, given: object) -> tuple[int, ...]:
    """Convert a sequence of sizes to a tuple; sort a set."""
    if not isinstance(given, list | tuple | set | frozenset | range) or not given:
        raise ValueError(f"{where} is {given!r}; needs a sequence of sizes")
    for size in given:
        _check_int(f"{where} has", size)
    return tuple(sorted(given) if isinstance(given, set | frozenset) else given)


def _check_int(where: str, given: object, least: int = 1) -> None:
    if isinstance(given, bool) or not isinstance(given, int) or given < least:
        raise ValueError(f"{where} {given!r}; needs an int >= {least}")


def _check_accumulator(where: str, given: object) -> None:
    number = isinstance(given, int | float) and not isinstance(given, bool)
    if not number or not 1 <= given < math.inf:  # type: ignore[operator]
        raise ValueError(f"{where} is {given!r}; needs a finite number >= 1")


def _check_scale(where: str, given: object) -> None:
    number = isinstance(given, int | float) and not isinstance(given, bool)
    if given != DEFAULT_SCALE and not (number and 0 < given < math.inf):  # type: ignore[operator]
        raise ValueError(f"{where} is {given!r}; needs {DEFAULT_SCALE!r} or a finite number > 0")


def _check_masks(name: str, declared: Mapping[str, Any]) -> None:
    """Check that masks and score modifications exist under the other declarations."""
    masks = declared.get("masks", _SUBSETS["masks"])
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


def _check_number(where: str, given: object) -> None:
    if not isinstance(given, int | float) or isinstance(given, bool):
        raise ValueError(f"{where} is {given!r}; needs a number")


def _check_configs(where: str, given: object) -> None:
    """Check that every configuration replaces dtypes or numerics with valid values."""
    if not isinstance(given, Mapping) or not given:
        raise ValueError(f"{where} is {given!r}; needs a dict of names to declarations")
    known = ("dtypes", "same_bits", *NUMERICS)
    for config, replaced in given.items():
        if not isinstance(config, str):
            raise ValueError(f"{where} has {config!r}; needs names, which are str")
        if not isinstance(replaced, Mapping):
            raise ValueError(f"{where}[{config!r}] is {replaced!r}; needs a dict of declarations")
        unknown = [word for word in replaced if word not in known]
        if unknown:
            raise ValueError(f"{where}[{config!r}] has {unknown}; known are {known}")
        check_declarations(f"{where}[{config!r}]", dict(replaced))
