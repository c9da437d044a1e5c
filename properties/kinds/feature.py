"""The features of a call that a failure may need, as plain data, and their words.

A feature is a name and, for a threshold or a set, a value: ``("N above", 16)``. Processes exchange
the features of a cause. Names read as phrases, unless ``_PHRASES`` has other words.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import NamedTuple, TypeVar

__all__ = [
    "FIELDS", "HIDING", "Feature", "is_of_size", "is_soft", "phrase", "present",
    "sharpest",
]  # fmt: skip

Value = int | tuple[str, ...] | None
_Call = TypeVar("_Call")
# Fields whose default value is the plain one, and the words for any other value.
FIELDS = {
    "softcap": "a softcap", "alibi": "ALiBi", "bias": "a bias", "sinks": "sinks",
    "dlse": "a gradient of lse", "dirty": "padding that holds {}", "inputs": "inputs={}",
    "dout": "dout={}", "sm_scale": "a scale that is not D**-0.5",
}  # fmt: skip
# Features at which an error first shows, beside those of sizes.
_SOFT = frozenset(("inputs", "dout", "sm_scale", "config", "lse family", "out family"))
# The ways to hide keys.
HIDING = (
    "empty rows", "padded keys", "predicate", "window left of 0", "window left", "right bound",
    "causal", "diagonal",
)  # fmt: skip
_OF_SIZES = re.compile(r" (above|up to|is \d+|is (?:no|a) multiple of \d+|is no power of two)$")


class Feature(NamedTuple):
    """A feature: its name, and its value if it is a threshold or a set."""

    name: str
    value: Value = None

    def is_of(self, other: Feature) -> bool:
        """Return whether another feature has the same name."""
        return self.name == other.name

    def joined(self, other: Feature) -> Feature:
        """Return the feature of either of two problems: the lower threshold, or both values."""
        if isinstance(self.value, int) and isinstance(other.value, int):
            return Feature(self.name, min(self.value, other.value))
        if isinstance(self.value, tuple) and isinstance(other.value, tuple):
            return Feature(self.name, tuple(dict.fromkeys((*self.value, *other.value))))
        return self


def is_of_size(feature: Feature) -> bool:
    """Return whether a feature is a threshold or a multiple of a size."""
    return bool(_OF_SIZES.search(feature.name))


def is_soft(feature: Feature) -> bool:
    """Return whether another failure of the same cause may lack the feature.

    A threshold of a size, or a family of inputs, is the one at which the error first shows.
    """
    return is_of_size(feature) or feature.name in _SOFT


def _implied(features: Iterable[Feature]) -> set[str]:
    """Return the names of features that a call with the given ones has anyway."""
    names = {x.name for x in features}
    found = {"hidden keys"} if names & {*HIDING} else set()
    found |= {"right bound"} if names & {"causal", "window right"} else set()
    found |= {"not causal"} if "window right" in names else set()
    found |= {"empty rows"} if "padded rows" in names else set()
    found |= {"M != N"} if names & {"M > N", "M < N"} else set()
    found |= {"D != Dv"} if names & {"D > Dv", "D < Dv"} else set()
    found |= {"window left"} if "window left of 0" in names else set()
    bounds = {"window left of 0", "window left", "right bound", "causal"}
    found |= {"diagonal"} if names & bounds else set()
    for name in names:
        if " stride of " in name:
            tensor = name.split()[-1]
            found |= {f"layout of {tensor}"}
            # No layout has the one without the other.
            implied = {"column": ("row",), "batch": ("head", "row")}.get(name.split()[0], ())
            found |= {f"{x} stride of {tensor}" for x in implied}
        size, _, what = name.partition(" ")
        if what.startswith("is no multiple"):  # no power of two leaves a larger tile ragged
            found.add(f"{size} is no power of two")
        if size in ("M", "N") and what.startswith("is no multiple"):
            found.add(f"M or N {what}")
        if size == "G" and what != "up to" and not what.startswith("is no multiple"):
            found.add("grouped heads")
        if name == "H is no multiple of 2":
            found.add("G is no multiple of 2")
    return found


def sharpest(features: Iterable[Feature]) -> list[Feature]:
    """Return features without those that others imply, and without multiples of an exact size."""
    features = [*features]
    exact = tuple(f"{x.name.split()[0]} is no" for x in features if re.search(r" is \d+$", x.name))
    return [
        x for x in features if x.name not in _implied(features) and not x.name.startswith(exact)
    ]


def present(feature: Feature, call: _Call, features: Callable[[_Call], list[Feature]]) -> bool:
    """Return whether a call has a feature, by the list of its features.

    It has the name, a value above the threshold, and one of the dtypes or configurations. A size is
    one more than the threshold that the call itself has, and 1 without one.
    """
    size, _, exactly = feature.name.partition(" is ")
    if feature.name.endswith(" up to") or (exactly.isdigit() and exactly != "1"):
        size = size.removesuffix(" up to")
        above = next((x.value for x in features(call) if x.name == f"{size} above"), 0)
        assert isinstance(above, int)
        most = int(exactly) if exactly else feature.value
        assert isinstance(most, int)
        return above + 1 == most if exactly else above + 1 <= most
    for own in features(call):
        if own.is_of(feature):
            if isinstance(own.value, int) and isinstance(feature.value, int):
                return own.value >= feature.value
            if own.name in ("dtype", "config"):
                return bool({*_values(own)} & {*_values(feature)})
            return True
    return False


def _values(feature: Feature) -> tuple[str, ...]:
    return feature.value if isinstance(feature.value, tuple) else ()


def phrase(feature: Feature) -> str:
    """Describe a feature in a few words."""
    name, value = feature
    if name in FIELDS:
        return FIELDS[name].format(*(value if isinstance(value, tuple) else ("?",)))
    if name in ("dtype", "config"):
        words = ", ".join(value if isinstance(value, tuple) else ())
        return f"inputs in {words}" if name == "dtype" else f"the configuration {words}"
    if name in _PHRASES:
        return _PHRASES[name]
    if name.endswith(" family"):
        return f"{name.split()[0]}={', '.join(value if isinstance(value, tuple) else ('?',))}"
    if name.endswith(" above"):
        return f"{name.removesuffix(' above')} > {value}"
    if name.endswith(" up to"):
        return f"{name.removesuffix(' up to')} <= {value}"
    if name.endswith(" is no multiple of 2"):
        return f"{'H / Hk' if name[0] == 'G' else name.split()[0]} odd"
    if name.endswith(" is no power of two"):
        return f"{'H / Hk' if name[0] == 'G' else name.split()[0]} not a power of two"
    if " is no multiple " in name or " is a multiple " in name:
        return name.replace(" is no ", " not a ").replace(" is a ", " a ")
    if _OF_SIZES.search(name):
        return name.replace(" is ", " = ")
    if name.startswith("layout of "):
        return f"{name.split()[2]} not contiguous"
    if " stride of " in name:
        dimension, tensor = name.split(" stride of ")
        sizes = [*("Hk N" if tensor in "kv" else "H M").split(), "D" if tensor in "qk" else "Dv"]
        inner = sizes[("batch", "head", "row", "column").index(dimension) :]
        return f"a {dimension} stride of {tensor} other than {' * '.join(inner) or 1}"
    return name


_PHRASES = {
    "zero size": "a size of 0",
    "empty sequences": "a sequence of length 0",
    "empty rows": "rows that see no key",
    "hidden keys": "a mask that hides keys",
    "padded keys": "padded keys",
    "padded rows": "padded rows",
    "predicate": "a mask with a predicate",
    "window left of 0": "window_left = 0",
    "window left": "a window to the left",
    "right bound": "keys hidden to the right",
    "window right": "a window to the right",
    "causal": "a causal mask",
    "diagonal": "a causal mask or a window",
    "not causal": "no causal mask",
    "not grouped": "H = Hk",
    "D != Dv": "Dv other than D",
    "D > Dv": "Dv < D",
    "D < Dv": "Dv > D",
    "q and k of other strides": "strides of k that differ from those of q",
    "q and v of other strides": "strides of v that differ from those of q",
    "k and v of other strides": "strides of v that differ from those of k",
    "several problems": "several problems in a batch",
}
