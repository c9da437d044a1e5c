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
# Products that are computed at a time, a few hundred KiB.
_MOST_PRODUCTS = 2**15


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
    columns, rows = np.moveaxis(a, -1, 0)[..., None], np.moveaxis(b, -2, 0)[..., None, :]
    # NumPy sums along the first axis from the first to the last. A single element's products lie
    # beside each other, and those it sums in pairs.
    step = 1 if total.size == 1 else max(1, _MOST_PRODUCTS // max(1, total.size))
    for k in range(0, len(columns), step):
        some = slice(k, k + step)
        terms = np.empty((1 + len(columns[some]), *total.shape), dtype)
        terms[0] = total
        np.multiply(columns[some], rows[some], out=terms[1:], dtype=dtype)
        total = np.add.reduce(terms, axis=0)
    return total
