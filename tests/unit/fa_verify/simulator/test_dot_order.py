"""Products of every element add from the first to the last, wherever its row lies."""

from __future__ import annotations

import numpy as np
import pytest

from fa_verify.simulator.interpreter.dot_order import dots_in_order, product_in_order


def drawn(*shape: int, dtype: type = np.float32) -> np.ndarray:
    return np.random.default_rng(shape).standard_normal(shape).astype(dtype)


def one_by_one(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The product, each sum in Python."""
    out = np.zeros((a.shape[0], b.shape[1]), a.dtype)
    for m, n in np.ndindex(*out.shape):
        for k in range(a.shape[1]):
            out[m, n] = out[m, n] + a[m, k] * b[k, n]
    return out


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(
    ("M", "K", "N"), [(5, 33, 4), (1, 100, 1), (1, 100, 2), (3, 100, 1), (33, 100, 40), (2, 0, 3)]
)
def test_products_add_from_the_first_to_the_last(dtype, M, K, N):
    a, b = drawn(M, K, dtype=dtype), drawn(K, N, dtype=dtype)
    wanted = one_by_one(a, b)
    with dots_in_order():
        for left, right in ((a, b), (np.asfortranarray(a), np.asfortranarray(b))):
            got = product_in_order(left, right, dtype)
            assert got.dtype == dtype
            assert np.array_equal(got, wanted)


def test_a_sum_of_products_begins_with_zero():
    a, b = np.float32([[-0.0, 1.0]]), np.float32([[1.0, 1.0], [-0.0, 2.0]])
    with dots_in_order():
        got = product_in_order(a, b, np.float32)
    assert not np.signbit(got).any()


def test_batches_of_matrices_are_multiplied():
    a, b = drawn(3, 5, 8), drawn(3, 8, 4)
    with dots_in_order():
        got = product_in_order(a, b, np.float32)
    assert np.array_equal(got, np.stack([one_by_one(*pair) for pair in zip(a, b, strict=True)]))


def test_operands_in_half_precision_have_products_in_float32():
    a, b = drawn(5, 33).astype(np.float16), drawn(33, 4).astype(np.float16)
    with dots_in_order():
        got = product_in_order(a, b, np.float32)
    assert np.array_equal(got, one_by_one(a.astype(np.float32), b.astype(np.float32)))


def test_only_the_block_orders_products():
    a, b = drawn(2, 3), drawn(3, 2)
    assert product_in_order(a, b, np.float32) is None
    with dots_in_order():
        with pytest.raises(ZeroDivisionError), dots_in_order():
            raise ZeroDivisionError
        assert product_in_order(a, b, np.float32) is not None
    assert product_in_order(a, b, np.float32) is None
