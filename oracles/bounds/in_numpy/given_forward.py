"""The backward given the forward's results, and its bound, in NumPy: a second implementation.

``given_forward`` has the derivation. Suffixes of locals name axes: m query row, n key, d head_dim,
e head_dim of v.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fa_verify.oracles.bounds.in_numpy.bound import (
    HeadBound,
    Replay,
    backward_bound,
    forward_bound,
    group_bound,
    groups,
    logit_error,
    recomputed_error,
    recomputed_sink_error,
    score_error,
)
from fa_verify.oracles.bounds.in_numpy.units import Units, conversion_of, lag_of, units_of
from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.outputs import Numerics, Outputs
from fa_verify.oracles.reference.numpy_reference import Head, seen_keys

__all__ = ["GivenHead", "backward", "bias_backward", "given_head"]

FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]
_WIDEST_TILE = 256
_DLSE_ROUNDINGS = 4  # one of its subtraction, three of its way through base 2


class GivenHead(NamedTuple):
    """The passes of a head given its forward, and the errors of the results that it reads."""

    head: Head
    prob_error_mn: FloatArray  # error of the exponent of P
    out_error_me: FloatArray
    sink_error_m: FloatArray  # error of the exponent of the sink's P


def _exponent_error(
    head: Head, lse_m: FloatArray, sm_scale: float, numerics: Numerics, units: Units,
    softcap: float | None,
) -> tuple[FloatArray, FloatArray]:  # fmt: skip
    """Returns the errors of the exponents of P = exp(s - lse), of keys and of the sink."""
    error_mn = logit_error(head, sm_scale, numerics, units, softcap) + units.u_exp
    error_mn = error_mn + 5 * units.u * np.abs(head.scores_mn)
    error_m = 3 * units.u * np.abs(lse_m)
    if "m_and_l" in numerics.backward_reads:
        log_l_m = np.abs(lse_m - head.row_max_m)
        error_m = error_m + units.u * np.abs(lse_m)
        error_m = error_m + units.u_log * (1 + log_l_m + lag_of(head, numerics))
        error_m = error_m + 3 * units.u * (1 + log_l_m + lag_of(head, numerics))
    of_sink_m = units.u_exp + 5 * units.u * np.abs(head.sink_m) + error_m
    return np.where(head.seen_mn, error_mn + error_m[:, None], 0.0), of_sink_m


def given_head(
    head: Head,
    out_me: FloatArray,
    lse_m: FloatArray,
    sm_scale: float,
    numerics: Numerics,
    units: Units,
    any_order: bool,
    softcap: float | None,
) -> GivenHead:
    """Runs the backward of a head on the output and lse that the kernel returned.

    A result that the backward does not read is the true one, with its error.

    Args:
        head: The passes of the reference.
        out_me: (M, Dv), the returned output.
        lse_m: (M,), the returned lse.
        sm_scale: t, the factor on q.k.
        numerics: The kernel's declared numerics.
        units: The constants of the model.
        any_order: Whether a kernel may visit the key tiles of a row in any order.
        softcap: As in ``numpy_reference.attention``.
    """
    live_m: BoolArray = np.any(head.seen_mn, axis=1)
    error_mn = score_error(head, sm_scale, numerics, units, any_order, softcap)
    true_out_error_me, true_lse_error_m = forward_bound(head, error_mn, numerics, units)

    # P, from the lse that was returned or from the true one
    probs_mn, sink_probs_m = head.probs_mn, head.sink_probs_m
    if {"lse", "m_and_l"} & set(numerics.backward_reads):
        lse_m = np.where(live_m | (head.sink_m > -np.inf), lse_m, 0.0)
        exponent_mn = np.where(head.seen_mn, head.scores_mn - lse_m[:, None], 0.0)
        probs_mn = np.where(head.seen_mn, np.exp(exponent_mn), 0.0)
        sink_probs_m = np.exp(head.sink_m - lse_m)
        prob_error_mn, sink_error_m = _exponent_error(
            head, lse_m, sm_scale, numerics, units, softcap
        )
        sink_error_m = np.where(sink_probs_m > 0, sink_error_m, 0.0)
    else:
        prob_error_mn = recomputed_error(head, error_mn, true_lse_error_m, units)
        sink_error_m = recomputed_sink_error(head, true_lse_error_m, numerics, units)

    # delta, from the output that was returned or from the true one
    used_me, out_error_me = head.out_me, true_out_error_me
    if "out" in numerics.backward_reads:
        used_me = np.where(live_m[:, None], out_me, 0.0)
        out_error_me = np.zeros_like(used_me)
    delta_m = (head.stored_dout_me * used_me).sum(axis=1) - head.dlse_m

    # dS; the gradients follow from it and P in ``group_bound``
    given = head._replace(
        probs_mn=probs_mn,
        out_me=used_me,
        delta_m=delta_m,
        dscores_mn=np.where(head.seen_mn, probs_mn * (head.dprobs_mn - delta_m[:, None]), 0.0),
        sink_probs_m=sink_probs_m,
        sink_dscores_m=sink_probs_m * (0 - delta_m),
    )
    return GivenHead(given, prob_error_mn, out_error_me, sink_error_m)


def backward(
    q: FloatArray,
    k: FloatArray,
    v: FloatArray,
    dout: FloatArray,
    *,
    out: FloatArray,
    lse: FloatArray,
    mask: Mask,
    sm_scale: float,
    in_dtype: str,
    numerics: Numerics,
    dlse: FloatArray | None = None,
    softcap: float | None = None,
    alibi_slopes: FloatArray | None = None,
    bias: FloatArray | None = None,
    sinks: FloatArray | None = None,
) -> tuple[Outputs[FloatArray], Outputs[FloatArray]]:
    """Returns the gradients given out and lse, and the bounds of their errors.

    Args:
        q: (B, H, M, D) float64, with the values that the kernel was given.
        k: (B, Hk, N, D) float64, as q.
        v: (B, Hk, N, Dv) float64, as q.
        dout: (B, H, M, Dv) float64, as q; the gradient of out.
        out: (B, H, M, Dv) float64, as the kernel returned it.
        lse: (B, H, M) float64, as the kernel returned it.
        mask: The mask.
        sm_scale: Factor on q.k, > 0.
        in_dtype: The kernel's dtype, "fp16", "bf16", "fp32" or "fp64".
        numerics: The kernel's declared numerics.
        dlse: (B, H, M) gradient of lse, if the kernel was given one.
        softcap: As in ``numpy_reference.attention``.
        alibi_slopes: As in ``numpy_reference.attention``.
        bias: As in ``numpy_reference.attention``.
        sinks: As in ``numpy_reference.attention``.

    Returns:
        Two sets of outputs; out and lse are the given ones, with bounds of 0. Bounds are doubled
        for "fp64", because the gradients have an error of the same size.
    """
    conversion = conversion_of(in_dtype, numerics)
    units = units_of(in_dtype, numerics, conversion is not None)
    narrow = in_dtype if in_dtype in ("fp16", "bf16") else None
    cast = conversion if numerics.p_dtype == "fp32" else conversion or narrow
    in_order = mask.is_plain and numerics.block_n <= _WIDEST_TILE
    replay = Replay(
        cast=cast if numerics.ds_roundings == 1 else None,
        stored=narrow,
        keys_in_order=in_order and "dq" not in numerics.atomic,
        rows_in_order=in_order and (q.shape[1] == k.shape[1] or numerics.group_sum == "dtype"),
    )
    value = Outputs(out, lse, np.zeros(q.shape), np.zeros(k.shape), np.zeros(v.shape))
    limit = Outputs(*(np.zeros_like(x) for x in value))
    passes = groups(
        q, k, v, dout, mask, sm_scale, dlse, softcap, alibi_slopes, bias, conversion, sinks
    )
    with np.errstate(over="ignore", invalid="ignore"):
        for b, g, hs, heads in passes:
            given = [
                given_head(*one, sm_scale, numerics, units, not mask.is_plain, softcap)
                for one in zip(heads, out[b, hs], lse[b, hs], strict=True)
            ]

            def bound_of(i: int, chain_n: FloatArray, given: list[GivenHead] = given) -> HeadBound:
                one = given[i]
                return backward_bound(
                    one.head, one.out_error_me, one.prob_error_mn, sm_scale, numerics, units,
                    chain_n, 0 if dlse is None else _DLSE_ROUNDINGS, softcap, replay,
                )  # fmt: skip

            values, limits = group_bound(
                [x.head for x in given], sm_scale, numerics, units, bound_of, replay.stored
            )
            value.dq[b, hs], value.dk[b, g], value.dv[b, g] = values[2:]
            limit.dq[b, hs], limit.dk[b, g], limit.dv[b, g] = limits[2:]
    if in_dtype == "fp64":
        limit = Outputs(*(2 * x for x in limit))
    return value, limit


def bias_backward(
    q: FloatArray,
    k: FloatArray,
    v: FloatArray,
    dout: FloatArray,
    bias: FloatArray,
    *,
    out: FloatArray,
    lse: FloatArray,
    mask: Mask,
    sm_scale: float,
    in_dtype: str,
    bias_dtype: str,
    numerics: Numerics,
    dlse: FloatArray | None = None,
    softcap: float | None = None,
    alibi_slopes: FloatArray | None = None,
    sinks: FloatArray | None = None,
) -> tuple[FloatArray, FloatArray]:
    """Returns dbias given out and lse, and the bound of its error, in the shape of the bias.

    The arguments are those of ``backward``, and the dtype of the bias.
    """
    conversion = conversion_of(in_dtype, numerics)
    units = units_of(in_dtype, numerics, conversion is not None)
    stored = units_of(bias_dtype, Numerics())
    (B, _, M, _), N = q.shape, k.shape[2]
    seen_bmn = seen_keys(mask, B, M, N)
    value, error, size, count = (np.zeros(bias.shape) for _ in range(4))
    passes = groups(
        q, k, v, dout, mask, sm_scale, dlse, softcap, alibi_slopes, bias, conversion, sinks
    )
    with np.errstate(over="ignore", invalid="ignore"):
        for b, _, hs, heads in passes:
            for h, head in enumerate(heads, hs.start):
                one = given_head(
                    head, out[b, h], lse[b, h], sm_scale, numerics, units, not mask.is_plain,
                    softcap,
                )  # fmt: skip
                e_mn = backward_bound(
                    one.head, one.out_error_me, one.prob_error_mn, sm_scale, numerics, units,
                    np.ones(N), 0 if dlse is None else _DLSE_ROUNDINGS, softcap,
                ).dscores_mn  # fmt: skip
                for m, n in np.argwhere(seen_bmn[b]):
                    place = tuple(
                        0 if length == 1 else i
                        for i, length in zip((b, h, m, n), bias.shape, strict=True)
                    )
                    ds = one.head.dscores_mn[m, n]
                    value[place] += ds
                    error[place] += e_mn[m, n]
                    size[place] += abs(ds) + e_mn[m, n]
                    count[place] += 1
    bound = error + units.gamma(count + 2) * size + units.flush_op * count
    bound = bound + stored.u_stored * (np.abs(value) + bound) + stored.eta_stored
    bound = np.where(count > 0, bound, 0.0)
    return value, 2 * bound if in_dtype == "fp64" else bound
