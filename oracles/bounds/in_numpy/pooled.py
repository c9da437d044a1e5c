"""Pooled probabilities and their bound in NumPy float64: second implementations, pair by pair.

Suffixes of locals name axes: m query row, n key, i block of rows, j block of keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fa_verify.oracles.bounds.in_numpy.bound import bound, score_error
from fa_verify.oracles.bounds.in_numpy.units import Units, units_of
from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.outputs import Numerics
from fa_verify.oracles.reference.numpy_reference import Head, attend_head, seen_keys

__all__ = ["pooled_bound", "pooled_probabilities"]

FloatArray = npt.NDArray[np.float64]


class _Place(NamedTuple):
    """One head of one batch entry, with its valid lengths."""

    b: int
    h: int
    rows: int
    keys: int
    head: Head


def _heads(q: FloatArray, k: FloatArray, mask: Mask, sm_scale: float) -> Iterator[_Place]:
    """Yields the passes of every head, with values and gradients of 0."""
    B, H, M, _ = q.shape
    Hk, N = k.shape[1:3]
    seen_bmn = seen_keys(mask, B, M, N)
    for b in range(B):
        rows = M if mask.seqlens_q is None else mask.seqlens_q[b]
        keys = N if mask.seqlens_k is None else mask.seqlens_k[b]
        for h in range(H):
            none_m1, none_n1, none_m = np.zeros((M, 1)), np.zeros((N, 1)), np.zeros(M)
            head = attend_head(
                q[b, h], k[b, h // (H // Hk)], none_n1, none_m1, none_m, seen_bmn[b], sm_scale
            )
            yield _Place(b, h, rows, keys, head)


def _blocks(
    M: int, N: int, size: tuple[int, int], place: _Place
) -> Iterator[tuple[int, int, list[tuple[int, int]]]]:
    """Yields (i, j, valid pairs) for every block of a head."""
    for i, first_m in enumerate(range(0, M, size[0])):
        for j, first_n in enumerate(range(0, N, size[1])):
            pairs = [
                (m, n)
                for m in range(first_m, min(first_m + size[0], place.rows))
                for n in range(first_n, min(first_n + size[1], place.keys))
            ]
            yield i, j, pairs


def pooled_probabilities(
    q: FloatArray,
    k: FloatArray,
    *,
    mask: Mask,
    sm_scale: float,
    pool: str,
    size: tuple[int, int],
) -> FloatArray:
    """Returns the mean or maximum of P over the valid pairs of each block, 0 without valid pairs.

    P is 0 where a row does not see a key; such a pair counts in the mean.

    Args:
        q: (B, H, M, D) float64, with the given low-precision values.
        k: (B, Hk, N, D) float64, as q; H is a multiple of Hk.
        mask: The mask.
        sm_scale: Factor on q.k.
        pool: "mean" or "max".
        size: (rows, keys) of a block.

    Returns:
        (B, H, ceil(M / rows), ceil(N / keys)).
    """
    (B, H, M, _), N = q.shape, k.shape[2]
    pooled_bhij = np.zeros((B, H, -(-M // size[0]), -(-N // size[1])))
    # Pairs that a later select discards may overflow.
    with np.errstate(over="ignore", invalid="ignore"):
        for place in _heads(q, k, mask, sm_scale):
            for i, j, pairs in _blocks(M, N, size, place):
                if not pairs:
                    continue
                probs = [float(place.head.probs_mn[pair]) for pair in pairs]
                value = max(probs) if pool == "max" else sum(probs) / len(probs)
                pooled_bhij[place.b, place.h, i, j] = value
    return pooled_bhij


def _probability_error(
    head: Head,
    bound_lse_m: FloatArray,
    sm_scale: float,
    numerics: Numerics,
    units: Units,
    any_order: bool,
) -> FloatArray:
    """Returns the error of P recomputed from the stored lse, (M, N); 0 on hidden pairs."""
    lse_m = np.where(head.seen_mn.any(axis=1), head.lse_m, 0.0)
    # 1: the errors of the score, the lse, their scaling and difference, and the exponential
    exponent_mn = (
        score_error(head, sm_scale, numerics, units, any_order)
        + bound_lse_m[:, None]
        + 3 * units.u * (np.abs(head.scores_mn) + np.abs(lse_m)[:, None])
        + units.u_exp
    )
    # 2: the error of P, which may be flushed
    error_mn = head.probs_mn * np.expm1(np.where(head.seen_mn, exponent_mn, 0.0)) + units.flush
    return np.where(head.seen_mn, error_mn, 0.0)


def pooled_bound(
    q: FloatArray,
    k: FloatArray,
    *,
    mask: Mask,
    sm_scale: float,
    in_dtype: str,
    numerics: Numerics,
    pool: str,
    size: tuple[int, int],
) -> FloatArray:
    """Returns the largest error of each pooled probability of a correct kernel.

    A mean is a sum along one axis of a block and then along the other, divided by the number of
    pairs, which is a product of two rounded numbers. A maximum adds no error of its own. A block
    without a visible pair is exact.

    Args:
        q: (B, H, M, D) float64, with the values that the kernel was given.
        k: (B, Hk, N, D) float64, as q.
        mask: The mask.
        sm_scale: Factor on q.k, > 0.
        in_dtype: The kernel's dtype, "fp16", "bf16", "fp32" or "fp64".
        numerics: The kernel's declared numerics.
        pool: "mean" or "max".
        size: (rows, keys) of a block.

    Returns:
        Bounds shaped as the pooled probabilities; doubled for "fp64", because the reference has an
        error of the same size.
    """
    units = units_of(in_dtype, numerics)
    times = 2.0 if in_dtype == "fp64" else 1.0
    (B, H, M, _), N = q.shape, k.shape[2]
    of_outputs = bound(
        q, k, np.zeros((*k.shape[:3], 1)), np.zeros((B, H, M, 1)),
        mask=mask, sm_scale=sm_scale, in_dtype=in_dtype, numerics=numerics,
    )  # fmt: skip
    bound_bhij = np.zeros((B, H, -(-M // size[0]), -(-N // size[1])))
    with np.errstate(over="ignore", invalid="ignore"):
        for place in _heads(q, k, mask, sm_scale):
            head = place.head
            bound_lse_m = of_outputs.lse[place.b, place.h] / times
            error_mn = _probability_error(
                head, bound_lse_m, sm_scale, numerics, units, not mask.is_plain
            )
            for i, j, pairs in _blocks(M, N, size, place):
                visible = [pair for pair in pairs if head.seen_mn[pair]]
                if not visible:
                    continue
                probs = [float(head.probs_mn[pair]) for pair in visible]
                errors = [float(error_mn[pair]) for pair in visible]
                largest = [p + error for p, error in zip(probs, errors, strict=True)]
                if pool == "max":
                    value = max(largest) - max(probs)
                else:
                    rows = len({m for m, _ in pairs})
                    keys = len({n for _, n in pairs})
                    # Additions, two counts and their product, and a division with 2 ulp.
                    roundings = (rows - 1) + (keys - 1) + 3 + 4
                    value = sum(errors) + float(units.gamma(roundings)) * sum(largest)
                    value = value / (rows * keys) + units.flush
                bound_bhij[place.b, place.h, i, j] = times * value
    return bound_bhij
