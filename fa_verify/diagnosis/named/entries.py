"""The dictionary: all faults that a diagnosis can name.

The list was made from faults that projects have shipped, which its entries name; others complete a
series, such as the second edge of a window.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from fa_verify.diagnosis.named.gradients import GRADIENTS
from fa_verify.diagnosis.named.heads import HEADS
from fa_verify.diagnosis.named.masks import MASKS
from fa_verify.diagnosis.named.memory import MEMORY
from fa_verify.diagnosis.named.named import BACKWARD, FORWARD, Named, Variant
from fa_verify.diagnosis.named.score_mods import SCORE_MODS
from fa_verify.diagnosis.named.softmax import SOFTMAX
from fa_verify.diagnosis.named.tiles import TILES
from fa_verify.oracles.outputs import OUTPUTS

__all__ = ["DICTIONARY", "variants"]

DICTIONARY: tuple[Named, ...] = (
    *MASKS, *TILES, *SOFTMAX, *GRADIENTS, *HEADS, *SCORE_MODS, *MEMORY,
)  # fmt: skip


def variants(
    tiles: tuple[tuple[int, int], ...], outputs: Collection[str] = OUTPUTS
) -> Iterator[Variant]:
    """Yield all variants that some outputs tell apart.

    Args:
        tiles: Sizes (block_m, block_n) of tiles to try, the likeliest first.
        outputs: The outputs: all of them, those of the forward, or those of a pass of the backward.
    """
    for named in DICTIONARY:
        places = named.places if named.after is None else ("",)
        if "dq" not in outputs and "dk" not in outputs:
            kept = (x for x in places if x not in BACKWARD)
            places = tuple(dict.fromkeys("everywhere" if x in FORWARD else x for x in kept))
        elif "out" not in outputs:
            places = tuple(x for x in places if x == ("dq" if "dq" in outputs else "dk and dv"))
        for form in range(max(1, len(named.changes))):
            axes = named.axes(form)
            sizes = {(m * ("m" in axes), n * ("n" in axes)): None for m, n in tiles}
            for m, n in sizes:
                for place in places:
                    yield Variant(named, place, form, m, n)
