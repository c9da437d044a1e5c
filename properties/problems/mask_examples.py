"""Draw small problems whose masks have their edges inside: for comparisons without attention."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from random import Random

from fa_verify.oracles.masks.mask import Mask, shown
from fa_verify.oracles.problem import Problem
from fa_verify.properties.problems.mask_classes import bounds_of, instance_near

__all__ = ["mask_example", "pictures", "small_sizes"]

_SIZES = (*range(1, 10), 12, 15, 16, 17, 31, 32, 33)
# More sizes for a class with a method ``draw``, whose parameters have no declared bounds.
_LARGER = (47, 48, 49, 63, 64, 65, 96, 128, 129)
# Largest size that is added so that a field's smallest value has its edge inside.
_FURTHEST = 200
_HEADS = 2
# Largest M and N of a picture, and draws of which one is shown.
_WIDEST, _DRAWS = 17, 20


def small_sizes(mask: type[Mask]) -> tuple[int, ...]:
    """Return values of M and N at which the edges of a class's masks lie inside of the sequences.

    Args:
        mask: A class of masks.
    """
    if hasattr(mask, "draw"):
        return (*_SIZES * 2, *_LARGER)
    lows = (bounds.start for name in _own_fields(mask) if (bounds := bounds_of(mask, name)))
    near = {low + more for low in lows for more in (0, 1, 2, 3)}
    further = sorted(size for size in near if max(_SIZES) < size <= _FURTHEST)
    return (*_SIZES, *further * 4)


def _own_fields(mask: type[Mask]) -> list[str]:
    return [item.name for item in dataclasses.fields(mask)][len(dataclasses.fields(Mask)) :]


def mask_example(
    rng: Random, mask: type[Mask], *, sizes: Sequence[int], entries: int, device: str
) -> Problem:
    """Draw a problem with a mask, whose batch entries have lengths of their own.

    Ints of the mask lie near their bounds, 0, M, N and N - M, where its edge crosses the sequences.

    Args:
        rng: The source of random numbers.
        mask: The class of the mask.
        sizes: Values of M and N to draw from.
        entries: Batch entries, each with another length of queries and keys.
        device: "cpu" or "cuda".
    """
    M, N = rng.choice(sizes), rng.choice(sizes)
    drawn = instance_near(rng, mask, entries, _HEADS, M, N)
    given = rng.choice(("none", "k", "q", "both", "both"))
    rows, keys = (
        tuple(_length(rng, size) for _ in range(entries)) if given in (which, "both") else None
        for size, which in ((M, "q"), (N, "k"))
    )
    return Problem(
        B=entries, H=_HEADS, Hk=_HEADS, M=M, N=N, device=device,
        mask=dataclasses.replace(drawn, seqlens_q=rows, seqlens_k=keys),
    )  # fmt: skip


def pictures(mask: type[Mask], count: int = 2) -> Iterator[str]:
    """Yield lines that draw the dense form of small examples: a row for each query, # is visible.

    No comparison finds a fault that the predicate and the dense form share.

    Args:
        mask: The class of masks.
        count: The number of examples.
    """
    rng = Random(mask.__name__)
    sizes = [size for size in small_sizes(mask) if 8 <= size <= _WIDEST]
    for _ in range(count):
        drawn = (
            mask_example(rng, mask, sizes=sizes, entries=1, device="cpu") for _ in range(_DRAWS)
        )
        # The example with the most edges.
        problem, rows = max(map(_drawn_whole, drawn), key=lambda x: len({*map(tuple, x[1])}))
        yield f"{shown(problem.mask)}, b=0, h=0: {problem.M} queries down, {problem.N} keys across"
        yield from ("  " + "".join(".#"[seen] for seen in row) for row in rows)


def _drawn_whole(problem: Problem) -> tuple[Problem, list[list[bool]]]:
    """Return a problem whose sequences are whole, and the dense mask of its first head."""
    mask = dataclasses.replace(problem.mask, seqlens_q=None, seqlens_k=None)
    sizes = problem.B, problem.H, problem.M, problem.N
    rows = mask.dense(*sizes, device="cpu").expand(sizes)[0, 0].tolist()
    return dataclasses.replace(problem, mask=mask), rows


def _length(rng: Random, size: int) -> int:
    """Draw a length in [0, size], most often full, one less or one."""
    return rng.choice((size, size, size - 1, 1, 0, size // 2, rng.randint(0, size)))
