"""Choose a few combinations of the constants of kernels.

A GPU takes a second to compile a kernel, and a problem milliseconds. A test whose problems draw
each constant of a kernel independently compiles a kernel for every few problems. With a few
combinations, each kernel serves many problems, and every value of every constant still occurs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

__all__ = ["combinations", "padded_groups"]

# The columns of a tile are a power of two, and at least as many.
_NARROWEST = 16
# Columns of 16 bits in 16 bytes.
_OF_16_BYTES = 8


def combinations(
    axes: Mapping[str, Sequence[Any]], count: int, seed: str
) -> tuple[dict[str, Any], ...]:
    """Return ``count`` combinations, in which the values of an axis occur equally often, or nearly.

    Args:
        axes: The values of each axis. No axis is empty.
        count: The number of combinations. They lack some values of an axis with more.
        seed: Another seed gives other combinations.
    """
    rng = Random(seed)
    columns = []
    for values in axes.values():
        shuffled = rng.sample(values, len(values))
        cycled = [shuffled[place % len(shuffled)] for place in range(count)]
        columns.append(rng.sample(cycled, count))
    return tuple(dict(zip(axes, row, strict=True)) for row in zip(*columns, strict=True))


def padded_groups(
    head_dims: Sequence[int], *, by_bytes: bool = False
) -> tuple[tuple[int, ...], ...]:
    """Return head_dims in groups that are padded to the same number of columns, in their order.

    Args:
        head_dims: Sizes of D or Dv.
        by_bytes: Whether rows of whole tiles, rows of whole 16 bytes and ragged ones, in 16 bits,
            are groups of their own, because kernels load them in other ways.
    """
    groups: dict[tuple[int, int], list[int]] = {}
    for dim in head_dims:
        padded = max(_NARROWEST, 1 << (dim - 1).bit_length())
        kind = (dim == padded) + (dim % _OF_16_BYTES == 0) if by_bytes else 0
        groups.setdefault((padded, kind), []).append(dim)
    return tuple(map(tuple, groups.values()))
