"""Caches of codes in NumPy, place by place: a second writing of ``stored_caches.py``."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fa_verify.oracles.formats.element import ElementFormat
from fa_verify.oracles.formats.in_numpy import decoded, scales_written, written
from fa_verify.oracles.formats.writing import Writing

__all__ = ["appended_codes", "numbers_of"]

Array = NDArray[Any]


def numbers_of(
    codes: Array,
    scale: Array,
    form: ElementFormat,
    *,
    divides: bool,
    rounds_to: str | None = None,
) -> Array:
    """Returns the numbers of codes, which are unsigned bytes; see ``stored_caches.numbers_of``."""
    found = np.empty(codes.shape)
    for page, row, head in np.ndindex(codes.shape[:3]):
        place = {
            1: (head % len(scale),), 2: (page, head), 3: (page, row, head),
        }[scale.ndim]  # fmt: skip
        plain, factor = decoded(codes[page, row, head], form), np.float64(scale[place])
        found[page, row, head] = plain / factor if divides else plain * factor
    if rounds_to is None:
        return found
    single = found.astype(np.float32)
    if rounds_to == "bf16":
        # The upper half of the bits, to nearest with ties to even; NaN keeps its own.
        bits = single.view(np.uint32)
        nearest = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
        single = np.where(np.isnan(single), bits, nearest).astype(np.uint32).view(np.float32)
    elif rounds_to == "fp16":
        single = single.astype(np.float16).astype(np.float32)
    return single.astype(np.float64)


def appended_codes(
    codes: Array,
    scale: Array,
    new: Array,
    before: Array,
    table: Array,
    form: ElementFormat,
    rule: Writing,
    *,
    divides: bool,
) -> tuple[Array, Array]:
    """Returns copies of codes (bytes) and scales with new rows; see ``appended_codes``."""
    codes, scale = codes.copy(), scale.copy()
    for entry, head, i in np.ndindex(new.shape[:3]):
        page, row = divmod(int(before[entry]) + i, codes.shape[1])
        place = table[entry, page], row, head
        x = new[entry, head, i]
        if scale.ndim == 3:
            scale[place] = scales_written(x, form, rule)
            factor = scale[place]
        else:
            factor = scale[head % len(scale)]
        codes[place] = written(x, np.asarray(factor), form, rule, divides=divides)
    return codes, scale
