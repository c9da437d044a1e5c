"""The gradient of a bias in NumPy, and its bound: both written a second time, pair by pair."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fa_verify.oracles.bounds.numpy_check import head_bound
from fa_verify.oracles.bounds.numpy_units import units_of
from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.outputs import Numerics
from fa_verify.oracles.reference.numpy_reference import added_terms, attend_head, seen_keys

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
) -> tuple[FloatArray, FloatArray]:
    """Returns dbias, and how far a correct kernel's may be from it, in the shape of the bias.

    Every pair of a row and a key that it sees adds its dS to one element, and its error; sums are
    rounded as often as there are terms.

    Args:
        q: (B, H, M, D) float64 holding the values that the kernel was given.
        k: (B, Hk, N, D) likewise.
        v: (B, Hk, N, Dv) likewise.
        dout: (B, H, M, Dv) likewise, gradient of out.
        bias: (B or 1, H or 1, M or 1, N or 1) likewise.
        mask: What each query sees.
        sm_scale: Factor on q.k, > 0.
        in_dtype: The kernel's dtype, "fp16", "bf16", "fp32" or "fp64".
        bias_dtype: The bias's own dtype, likewise.
        numerics: What the kernel declares of its rounding.
        softcap: As of ``numpy_reference.attention``.
        alibi_slopes: Likewise.
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
                )  # fmt: skip
                of_head = head_bound(head, sm_scale, numerics, units, np.ones(N), False, softcap)
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
