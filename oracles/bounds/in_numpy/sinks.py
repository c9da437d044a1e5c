"""The gradient of sinks and its bound in NumPy: second implementations, row by row."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fa_verify.oracles.bounds.in_numpy.bound import (
    forward_bound,
    groups,
    recomputed_sink_error,
    score_error,
    sink_dscore_error,
)
from fa_verify.oracles.bounds.in_numpy.given_forward import given_head
from fa_verify.oracles.bounds.in_numpy.units import units_of
from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.outputs import Numerics

__all__ = ["sink_gradient"]

FloatArray = npt.NDArray[np.float64]
_DLSE_ROUNDINGS = 4  # as in ``given_forward``


def sink_gradient(
    q: FloatArray,
    k: FloatArray,
    v: FloatArray,
    dout: FloatArray,
    sinks: FloatArray,
    *,
    mask: Mask,
    sm_scale: float,
    in_dtype: str,
    numerics: Numerics,
    dlse: FloatArray | None = None,
    softcap: float | None = None,
    alibi_slopes: FloatArray | None = None,
    bias: FloatArray | None = None,
    given: tuple[FloatArray, FloatArray] | None = None,
) -> tuple[FloatArray, FloatArray]:
    """Returns dsinks and the bound of a correct kernel's error, (H,) each.

    Every valid row adds dS of its sink and its error. Sums have one rounding per row, and the
    result is float32.

    Args:
        q: (B, H, M, D) float64, with the values that the kernel was given.
        k: (B, Hk, N, D) float64, as q.
        v: (B, Hk, N, Dv) float64, as q.
        dout: (B, H, M, Dv) float64, as q; the gradient of out.
        sinks: (H,) float64, as q.
        mask: The mask.
        sm_scale: Factor on q.k, > 0.
        in_dtype: The kernel's dtype, "fp16", "bf16", "fp32" or "fp64".
        numerics: The kernel's declared numerics.
        dlse: (B, H, M) gradient of lse, if the kernel was given one.
        softcap: As in ``numpy_reference.attention``.
        alibi_slopes: As in ``numpy_reference.attention``.
        bias: As in ``numpy_reference.attention``.
        given: out and lse as the kernel returned them, if dsinks is judged given these.
    """
    units, stored = units_of(in_dtype, numerics), units_of("fp32", Numerics())
    any_order = not mask.is_plain
    value, error, size, count = (np.zeros(len(sinks)) for _ in range(4))
    passes = groups(q, k, v, dout, mask, sm_scale, dlse, softcap, alibi_slopes, bias, sinks=sinks)
    with np.errstate(over="ignore", invalid="ignore"):
        for b, _, hs, heads in passes:
            for h, head in enumerate(heads, hs.start):
                if given is None:
                    error_mn = score_error(head, sm_scale, numerics, units, any_order, softcap)
                    out_error_me, lse_error_m = forward_bound(head, error_mn, numerics, units)
                    sink_error_m = recomputed_sink_error(head, lse_error_m, numerics, units)
                    of_dlse = 1
                else:
                    head, _, out_error_me, sink_error_m = given_head(
                        head, given[0][b, h], given[1][b, h], sm_scale, numerics, units,
                        any_order, softcap,
                    )  # fmt: skip
                    of_dlse = _DLSE_ROUNDINGS
                of_dlse = 0 if dlse is None else of_dlse
                e_m = sink_dscore_error(head, out_error_me, sink_error_m, units, of_dlse)
                value[h] += head.sink_dscores_m.sum()
                error[h] += e_m.sum()
                size[h] += (np.abs(head.sink_dscores_m) + e_m).sum()
                count[h] += (head.sink_m > -np.inf).sum()
    bound = error + units.gamma(count + 2) * size + units.flush_op * count
    bound = bound + stored.u_stored * (np.abs(value) + bound) + stored.eta_stored
    bound = np.where(count > 0, bound, 0.0)
    return value, 2 * bound if in_dtype == "fp64" else bound
