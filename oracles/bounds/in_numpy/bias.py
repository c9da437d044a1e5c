"""The gradient of a bias and its bound in NumPy: second implementations, pair by pair."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fa_verify.oracles.bounds.in_numpy.bound import head_bound
from fa_verify.oracles.bounds.in_numpy.units import units_of
from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.outputs import Numerics
from fa_verify.oracles.reference.numpy_reference import (
    added_terms,
    attend_head,
    seen_keys,
    sinks_of_rows,
)

__all__ = ["bias_gradient"]

FloatArray = npt.NDArray[np.float64]


def bias_gradient(
    q: FloatArray,
    k: FloatArray,
    v: FloatArray,
    dout: FloatArray,
    bias: FloatArray,
    *,
    mask: Mask,
    sm_scale: float,
    in_dtype: str,
    bias_dtype: str,
    numerics: Numerics,
    softcap: float | None = None,
    alibi_slopes: FloatArray | None = None,
    sinks: FloatArray | None = None,
) -> tuple[FloatArray, FloatArray]:
    """Returns dbias and the bound of a correct kernel's error, both in the shape of the bias.

    Every visible pair adds its dS and its error to one element. Sums have one rounding per term.

    Args:
        q: (B, H, M, D) float64, with the values that the kernel was given.
        k: (B, Hk, N, D) float64, as q.
        v: (B, Hk, N, Dv) float64, as q.
        dout: (B, H, M, Dv) float64, as q; the gradient of out.
        bias: (B or 1, H or 1, M or 1, N or 1) float64, as q.
        mask: The mask.
        sm_scale: Factor on q.k, > 0.
        in_dtype: The kernel's dtype, "fp16", "bf16", "fp32" or "fp64".
        bias_dtype: The dtype of the bias, one of the same.
        numerics: The kernel's declared numerics.
        softcap: As in ``numpy_reference.attention``.
        alibi_slopes: As in ``numpy_reference.attention``.
        sinks: As in ``numpy_reference.attention``.
    """
    units, stored = units_of(in_dtype, numerics), units_of(bias_dtype, Numerics())
    B, H, M, _ = q.shape
    Hk, N = k.shape[1:3]
    seen_bmn = seen_keys(mask, B, M, N)
    added = added_terms(mask, (B, H, M, N), alibi_slopes, bias)
    value, error, size, count = (np.zeros(bias.shape) for _ in range(4))
    with np.errstate(over="ignore", invalid="ignore"):
        for b in range(B):
            for h in range(H):
                g = h // (H // Hk)
                head = attend_head(
                    q[b, h], k[b, g], v[b, g], dout[b, h], np.zeros(M), seen_bmn[b], sm_scale,
                    softcap, tuple(term_bhmn[b, h] for term_bhmn in added),
                    sinks_of_rows(sinks, mask, b, h, M),
                )  # fmt: skip
                of_head = head_bound(
                    head, sm_scale, numerics, units, np.ones(N), False, not mask.is_plain, softcap
                )
                for m, n in np.argwhere(seen_bmn[b]):
                    pair = zip((b, h, m, n), bias.shape, strict=True)
                    place = tuple(i % length for i, length in pair)
                    value[place] += head.dscores_mn[m, n]
                    error[place] += of_head.dscores_mn[m, n]
                    size[place] += abs(head.dscores_mn[m, n]) + of_head.dscores_mn[m, n]
                    count[place] += 1
    bound = error + units.gamma(count + 2) * size + units.flush_op * count
    bound = bound + stored.u_stored * (np.abs(value) + bound) + stored.eta_stored
    bound = np.where(count > 0, bound, 0.0)
    return value, 2 * bound if in_dtype == "fp64" else bound
