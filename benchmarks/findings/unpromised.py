"""Describe what a kernel's declarations exclude from the guarantees, or weaken in them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fa_verify.properties.kernels.vocabulary import BITWISE

__all__ = ["unpromised"]

_PADDING = {"nan": "NaN", "inf": "Inf", "max": "the largest finite values", "noise": "noise"}
_MASKS = {
    "causal": "causal masks",
    "window": "sliding windows",
    "padding": "sequence lengths (so G4, dirty padding, does not apply)",
}
# Declaration that is False to the inputs or outputs that it excludes.
_REFUSED = {
    "gqa": "grouped heads",
    "m_ne_n": "M other than N",
    "m_gt_n": "M greater than N",
    "dv_ne_d": "Dv other than D",
    "zero_sizes": "B, M or N of 0",
    "backward": "gradients",
    "returns_lse": "a log-sum-exp",
}

# Declaration that is not False to the inputs that it excludes.
_NARROWED = {
    "always_causal": "masks that are not causal",
    "fixed_scale": "another scale",
    "one_query": "M other than 1",
    "varlen": "padding in the tensors",
}


def unpromised(declares: Mapping[str, Any]) -> list[str]:
    """Return a clause for each way in which declarations exclude or weaken guarantees.

    Args:
        declares: ``Subject.declarations``, as read from JSON.
    """
    masks = _words(declares, "masks", (*_MASKS,))
    away = [words for kind, words in _MASKS.items() if kind not in masks]
    away += [words for word, words in _REFUSED.items() if declares.get(word) is False]
    away += [words for word, words in _NARROWED.items() if declares.get(word)]
    if "layouts" in declares:
        away.append(f"layouts other than {', '.join(_words(declares, 'layouts'))}")
    found = [f"not tested with {', '.join(away)}"] if away else []
    if "padding" in masks and "dirty" in declares:
        values = [
            words for kind, words in _PADDING.items() if kind not in _words(declares, "dirty")
        ]
        if values:
            found.append(
                f"{' and '.join(values)} in padding may reach valid results: no test fills padding "
                "with them (G4)"
            )
    if declares.get("causal_alignment") == "top-left":
        found.append("causal masks start at the top left: tested with M = N, where both agree")
    if declares.get("empty_lse", "-inf") != "-inf":
        found.append(
            f"the log-sum-exp of a row that sees no key is {declares['empty_lse']}, not -inf: "
            "accepted in its place"
        )
    if declares.get("lse_base", "e") != "e":
        found.append(f"the log-sum-exp has base {declares['lse_base']}: converted")
    if declares.get("flushes"):
        found.append("subnormal numbers may be flushed to 0: the bound allows for it")
    reads = _words(declares, "backward_reads", ())
    if "out" not in reads:
        found.append("no backward_reads with out: gradients are not judged given the forward")
    loose = [name for name in BITWISE if name not in _words(declares, "bitwise")]
    if loose:
        found.append(f"not promised bitwise: {', '.join(loose)}; compared within the bound")
    return found


def _words(
    declares: Mapping[str, Any], word: str, undeclared: tuple[str, ...] = ()
) -> tuple[str, ...]:
    """Return a declaration that is a sequence of words, or ``undeclared``."""
    given = declares.get(word, undeclared)
    return tuple(map(str, given)) if isinstance(given, list | tuple) else undeclared
