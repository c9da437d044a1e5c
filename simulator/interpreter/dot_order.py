"""Dot products whose sums have one order, wherever in the tile a row or a column lies.

The interpreter multiplies tiles by NumPy's matmul. The order in which OpenBLAS 0.3.31 adds the
products of an element depends on its row: rows that move by one within a tile of 16 change up to
half of their bits. Tensor cores add in one order for all elements.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["dots_in_order", "product_in_order"]

Array = npt.NDArray[Any]
_ordered = False


@contextmanager
def dots_in_order() -> Iterator[None]:
    """Add the products of every element from the first to the last in ``tl.dot``, in the block.

    It has no effect outside of the repaired interpreter.
    """
    global _ordered
    before, _ordered = _ordered, True
    try:
        yield
    finally:
        _ordered = before


def product_in_order(a: Array, b: Array, dtype: Any) -> Array | None:
    """Return the product of (..., M, K) and (..., K, N); None outside of ``dots_in_order``.

    Args:
        a: The first operand.
        b: The second operand.
        dtype: The dtype of products and sums.
    """
    if not _ordered:
        return None
    total = np.zeros((*a.shape[:-1], b.shape[-1]), dtype)
    for k in range(a.shape[-1]):
        total += np.multiply(a[..., :, k, None], b[..., k, None, :], dtype=dtype)
    return total
