"""The dictionary: all faults that a diagnosis can name.

The list was made from ``faults.py``. An entry names the faults on record whose computation it
repeats; others complete a series, such as the second edge of a window.
"""

from __future__ import annotations

from collections.abc import Iterator

from fa_verify.diagnosis.named.gradients import GRADIENTS
from fa_verify.diagnosis.named.heads import HEADS
from fa_verify.diagnosis.named.masks import MASKS
from fa_verify.diagnosis.named.memory import MEMORY
from fa_verify.diagnosis.named.named import BACKWARD, FORWARD, Named, Variant
from fa_verify.diagnosis.named.score_mods import SCORE_MODS
from fa_verify.diagnosis.named.softmax import SOFTMAX
from fa_verify.diagnosis.named.tiles import TILES

__all__ = ["DICTIONARY", "variants"]

DICTIONARY: tuple[Named, ...] = (
    *MASKS, *TILES, *SOFTMAX, *GRADIENTS, *HEADS, *SCORE_MODS, *MEMORY,
)  # fmt: skip


def variants(tiles: tuple[tuple[int, int], ...], *, backward: bool) -> Iterator[Variant]:
    """Yield all variants.

    Args:
        tiles: Sizes (block_m, block_n) of tiles to try, the likeliest first.
        backward: Whether the subject has a backward.
    """
    for named in DICTIONARY:
        places = named.places if named.after is None else ("",)
        if not backward:
            kept = (x for x in places if x not in BACKWARD)
            places = tuple(dict.fromkeys("everywhere" if x in FORWARD else x for x in kept))
        for form in range(max(1, len(named.changes))):
            axes = named.axes(form)
            sizes = {(m * ("m" in axes), n * ("n" in axes)): None for m, n in tiles}
            for place in places:
                for m, n in sizes:
                    yield Variant(named, place, form, m, n)
