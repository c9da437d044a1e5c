"""The words of declarations, and whether a problem lies within what a kernel declares."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fa_verify.oracles.calls.cache import OF_INPUTS
from fa_verify.oracles.formats.element import FORMATS
from fa_verify.oracles.guarantee import G4, G5, G8, G9, G10, I1, I2, I4, I5, I6
from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.problem import Problem
from fa_verify.properties.inputs.alibi_families import NO_ALIBI
from fa_verify.properties.inputs.bias_families import NO_BIAS
from fa_verify.properties.inputs.padding_values import PADDING_VALUES
from fa_verify.properties.inputs.sink_families import NO_SINKS

__all__ = [
    "BITWISE",
    "CACHES",
    "CACHE_FORMATS",
    "DEFAULT_SCALE",
    "DEVICES",
    "LARGEST",
    "MASKS",
    "PADDINGS",
    "SAME_BITS",
    "SCORE_MODS",
    "any_longer",
    "has_multiples",
    "has_padding_of",
    "has_sizes",
    "is_aligned",
    "is_padded",
    "lengths_of",
    "masks_of",
    "score_mods_of",
]

# Score modifications that a kernel may support.
SCORE_MODS = ("softcap", "alibi", "bias", "sinks")
MASKS = ("causal", "window", "padding", "custom")
BITWISE = tuple(x.key for x in (G4, G5, G8, G9, G10))
# Words of ``same_bits``, and the guarantee that each promises.
SAME_BITS = {
    "batch": I1.key, "chunks": I2.key, "heads": I4.key, "varlen": I5.key, "inference": I6.key
}  # fmt: skip
# Features of calls with a cache: one row of the cache an entry, pages, and new keys.
CACHES = ("contiguous", "paged", "append")
# Formats of a cache: the dtype of q, and codes.
CACHE_FORMATS = (OF_INPUTS, *FORMATS)
PADDINGS = tuple(PADDING_VALUES)
DEVICES = ("cpu", "cuda")
# The value of ``fixed_scale`` for a kernel that divides by the root of D.
DEFAULT_SCALE = "1/sqrt(D)"
# The largest head dim, and multiple of lengths.
LARGEST = 8192


def score_mods_of(problem: Problem) -> tuple[str, ...]:
    """Return the score modifications of a problem, from ``SCORE_MODS``."""
    has = {
        "softcap": problem.softcap is not None,
        "alibi": problem.alibi != NO_ALIBI,
        "bias": problem.bias != NO_BIAS,
        "sinks": problem.sinks != NO_SINKS,
    }
    return tuple(mod for mod in SCORE_MODS if has[mod])


def masks_of(mask: Mask) -> set[str]:
    """Return the kinds of masks that a mask has, from ``MASKS``."""
    has = {
        "causal": mask.causal,
        "window": (mask.window_left, mask.window_right) != (None, None),
        "padding": is_padded(mask),
        "custom": not mask.is_plain,
    }
    return {kind for kind, holds in has.items() if holds}


def is_padded(mask: Mask) -> bool:
    """Return whether entries have lengths."""
    return (mask.seqlens_q, mask.seqlens_k) != (None, None)


def lengths_of(problem: Problem) -> tuple[Sequence[int], Sequence[int]]:
    """Return the rows and the keys of each entry."""
    return problem.mask.lengths(problem.B, problem.M, problem.N)


def any_longer(problem: Problem) -> bool:
    """Return whether any sequence has more rows than keys."""
    rows, keys = lengths_of(problem)
    pairs = zip((problem.M, *rows), (problem.N, *keys), strict=True)
    return any(m > n for m, n in pairs)


def has_multiples(of: Any, problem: Problem) -> bool:
    """Return whether N, and M of a kernel of several queries, are multiples as declared."""
    multiple: int = of.seqlen_multiple
    return problem.N % multiple == 0 and (bool(of.one_query) or problem.M % multiple == 0)


def has_sizes(of: Any, problem: Problem) -> bool:
    """Return whether no size is 0, nor a total of packed sequences, where that is declared."""
    if of.zero_sizes:
        return True
    totals = [sum(lengths) for lengths in lengths_of(problem)] if of.varlen else []
    return 0 not in (problem.B, problem.M, problem.N, *totals)


def has_padding_of(of: Any, problem: Problem) -> bool:
    """Return whether padding holds values that are declared, where there is padding."""
    return of.dirty is None or problem.dirty in of.dirty or not is_padded(problem.mask)


def is_aligned(of: Any, problem: Problem) -> bool:
    """Return whether both alignments of a causal mask or window agree where ours is not taken."""
    mask = problem.mask
    by_position = (mask.right, mask.window_left) != (None, None) or not mask.is_plain
    if of.causal_alignment == "bottom-right" or not by_position:
        return True
    rows, keys = lengths_of(problem)
    return rows == keys
