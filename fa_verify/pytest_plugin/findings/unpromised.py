"""What a kernel never promised, in words: what is not asked of it, or asked in a weaker form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["unpromised"]

_TO_THE_BIT = ("G4", "G5", "G8", "G9", "G10")
_PADDING = {"nan": "NaN", "inf": "Inf", "max": "the largest finite values", "noise": "noise"}
_MASKS = {
    "causal": "causal masks",
    "window": "sliding windows",
    "padding": "lengths, so neither padding nor what stands in it",
}
# Declarations that say no, in words.
_REFUSED = {
    "gqa": "grouped heads",
    "m_ne_n": "M other than N",
    "dv_ne_d": "Dv other than D",
    "zero_sizes": "B, M or N of 0",
    "backward": "gradients",
    "returns_lse": "a log-sum-exp",
}


def unpromised(declares: Mapping[str, Any]) -> list[str]:
    """Clauses about what the declarations of a kernel take away from the guarantees.

    Args:
        declares: ``Subject.declarations``, as read from JSON.
    """
    masks = _words(declares, "masks", (*_MASKS,))
    away = [words for kind, words in _MASKS.items() if kind not in masks]
    away += [words for word, words in _REFUSED.items() if declares.get(word) is False]
    if "layouts" in declares:
        away.append(f"layouts other than {', '.join(_words(declares, 'layouts'))}")
    found = [f"not asked for {', '.join(away)}"] if away else []
    if "padding" in masks and "dirty" in declares:
        values = [
            words for kind, words in _PADDING.items() if kind not in _words(declares, "dirty")
        ]
        if values:
            found.append(
                f"{' and '.join(values)} in padding may reach valid results: not asked (G4), and "
                "padding holds nothing of the kind in any test"
            )
    if declares.get("causal_alignment") == "top-left":
        found.append("causal masks start at the top left: asked where M = N, where both agree")
    if declares.get("empty_lse", "-inf") != "-inf":
        found.append(
            f"the log-sum-exp of a row that sees no key is {declares['empty_lse']} where ours is "
            "-inf: taken for it"
        )
    if declares.get("lse_base", "e") != "e":
        found.append(f"the log-sum-exp has base {declares['lse_base']}: converted")
    if declares.get("flushes"):
        found.append("subnormal numbers may count as 0: the bound allows for it")
    loose = [name for name in _TO_THE_BIT if name not in _words(declares, "bitwise")]
    if loose:
        found.append(f"no promise to the bit of {', '.join(loose)}: held to the bound")
    return found


def _words(
    declares: Mapping[str, Any], word: str, undeclared: tuple[str, ...] = ()
) -> tuple[str, ...]:
    """A declaration that is a sequence of words."""
    given = declares.get(word, undeclared)
    return tuple(map(str, given)) if isinstance(given, list | tuple) else undeclared
