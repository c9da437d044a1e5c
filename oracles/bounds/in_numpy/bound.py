"""The error bound in NumPy: a second implementation, independent of the PyTorch one.

The two check each other. This one loops over batch entries and heads, and numbers the steps of each
head. Suffixes of locals name axes: m query row, n key, d head_dim, e head_dim of v.

Every sum runs over visible pairs only. The model assumes accumulation in fp32 or wider in any
order, P and dS rounded to nearest, and a backward that recomputes P from the stored lse and delta
from the stored output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fa_verify.oracles.bounds.in_numpy.units import (
    Units,
    in_order_error,
    lag_of,
    prescale_underflow,
    replayed,
    replayed_operand,
    rescales,
    rounded,
    seen_tiles,
    sink_exponent_error,
    sunk,
    units_of,
)
from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.outputs import Numerics, Outputs
from fa_verify.oracles.reference.numpy_reference import (
    Head,
    added_terms,
    attend_head,
    seen_keys,
    sinks_of_rows,
)

__all__ = [
    "HeadBound",
    "Replay",
    "backward_bound",
    "bound",
    "forward_bound",
    "group_bound",
    "groups",
    "head_bound",
    "logit_error",
    "recomputed_error",
    "recomputed_sink_error",
    "score_error",
    "sink_dscore_error",
    "sink_error",
]

FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]

_ROW_TILE = 16
_SHORTEST_DOT = 16


class HeadBound(NamedTuple):
    """One head's bounds; bounds of gradients exclude the rounding of the stored result."""

    out_me: FloatArray
    lse_m: FloatArray
    dq_md: FloatArray
    dk_nd: FloatArray
    dv_ne: FloatArray
    dscores_mn: FloatArray  # bound of dS before a softcap's slope and before its cast
    # dS and P as operands of their dots, if their casts were replayed
    ds_mn: FloatArray | None = None
    p_mn: FloatArray | None = None
    # the largest sums of |terms| of dq, dk and dv
    terms: tuple[FloatArray, ...] = ()


class Replay(NamedTuple):
    """Says which roundings are replayed, and which sums run in the order of their tiles."""

    cast: str | None  # the format that P and dS are rounded to once, as in ``units.rounded``
    stored: str | None  # the dtype of the gradients, "fp16" or "bf16"
    keys_in_order: bool
    rows_in_order: bool  # unless atomics add dk or dv


_NO_REPLAY = Replay(None, None, False, False)


def _prescale_error(
    head: Head, magnitude_mn: FloatArray, sm_scale: float, numerics: Numerics, units: Units
) -> FloatArray:
    """Returns the error of a score from rounding the prescaled operands."""
    u_in = units.u_stored
    underflow = prescale_underflow(numerics, sm_scale, units)
    error_mn = np.zeros_like(magnitude_mn)
    if numerics.prescales in ("q", "qk"):
        error_mn += u_in * magnitude_mn + underflow * np.abs(head.k_nd).sum(axis=1)[None, :]
    if numerics.prescales in ("k", "qk"):
        error_mn += u_in * magnitude_mn + underflow * np.abs(head.q_md).sum(axis=1)[:, None]
    if numerics.prescales == "qk":
        error_mn += u_in**2 * magnitude_mn
    return error_mn


def _dot_error(head: Head, sm_scale: float, numerics: Numerics, units: Units) -> FloatArray:
    """Returns the error of the dots of q and k, times the scale."""
    u_dot, D = units.u_dot, head.q_md.shape[1]
    magnitude_mn = sm_scale * (np.abs(head.q_md) @ np.abs(head.k_nd).T)
    error_mn: FloatArray = (
        (units.g(max(D, _SHORTEST_DOT)) * (1 + u_dot) + u_dot) * magnitude_mn
        + 5 * units.u * u_dot * magnitude_mn
        + _prescale_error(head, magnitude_mn, sm_scale, numerics, units)
        + sm_scale * units.subnormal_operands(head.q_md, head.k_nd)
    )
    return error_mn


def _capped_error(
    head: Head, dot_error_mn: FloatArray, softcap: float, numerics: Numerics, units: Units
) -> tuple[FloatArray, FloatArray]:
    """Returns the errors of softcap * tanh(x / softcap) and of its derivative by x.

    x is multiplied by a rounded 1 / softcap, and tanh by a rounded softcap: four roundings. The
    relative error of tanh is at most 9u + u_exp. The relative error of its derivative is 14u +
    u_exp, and two roundings of the exponent -2 |x / softcap|. Both are 0 or 1 beyond an exponent of
    800.

    A derivative 1 - tanh^2 has twice the error of tanh and the rounding of its square, all in units
    of tanh^2. The error of the exponential in tanh is a share of 1 - tanh^2, which the relative
    error covers. Seven roundings remain: two sums, a reciprocal of 2 ulps, and a product.
    """
    u, size_mn = units.u, np.abs(head.scaled_mn)
    input_error_mn = dot_error_mn + 3 * u * size_mn
    nearest_mn = np.maximum(0.0, size_mn - input_error_mn)
    steepest_mn = 1 / np.cosh(nearest_mn / softcap) ** 2
    moved_mn = steepest_mn * input_error_mn
    capped_mn = softcap * np.tanh(size_mn / softcap)
    score_error_mn = moved_mn + (3 * u + (9 * u + units.u_exp)) * (capped_mn + moved_mn)
    score_error_mn += 2 * units.flush * softcap
    exponent_mn = np.minimum(2 * size_mn / softcap, 800.0)
    relative_mn = np.minimum(1.0, 2 * input_error_mn / softcap)
    relative_mn = relative_mn + 14 * u + units.u_exp + 2 * u * exponent_mn
    slope_error_mn = steepest_mn * relative_mn + 4 * units.flush
    if numerics.softcap_slope != "exact":
        roundings_of_tanh, rounding_of_square = 7, 1
        most_mn = np.tanh((size_mn + input_error_mn) / softcap) ** 2
        slope_error_mn += (2 * roundings_of_tanh + rounding_of_square) * u * most_mn
    return score_error_mn, slope_error_mn


def _sum_error(head: Head, units: Units) -> FloatArray:
    """Returns the error from adding terms to a score, besides the error of the score itself.

    A term is a product of two rounded numbers, or a scaled dot: two roundings. There is one more
    per sum, and one for products of roundings.
    """
    terms = len(head.added_mn)
    added_mn = sum(head.added_mn, np.zeros_like(head.scores_mn))
    total_mn = np.abs(head.scores_mn - added_mn)
    for term_mn in head.added_mn:
        total_mn = total_mn + np.abs(term_mn)
    error_mn: FloatArray = (2 + terms + 1) * units.u * total_mn
    return error_mn


def logit_error(
    head: Head, sm_scale: float, numerics: Numerics, units: Units, softcap: float | None
) -> FloatArray:
    """Returns the error of a score's dot, softcap and added terms, on all pairs."""
    error_mn = _dot_error(head, sm_scale, numerics, units)
    if softcap is not None:
        error_mn, _ = _capped_error(head, error_mn, softcap, numerics, units)
    if head.added_mn:
        error_mn = error_mn + _sum_error(head, units)
    return error_mn


def score_error(
    head: Head,
    sm_scale: float,
    numerics: Numerics,
    units: Units,
    any_order: bool,
    softcap: float | None = None,
) -> FloatArray:
    """Returns E, the error of s - running maximum and of its exponential, on visible pairs.

    Args:
        head: The passes of the reference.
        sm_scale: t, the factor on q.k.
        numerics: The kernel's declared numerics.
        units: The constants of the model.
        any_order: Whether a kernel may visit the key tiles of a row in any order.
        softcap: c, where a scaled score x becomes c tanh(x / c); None without a softcap.

    Returns:
        (M, N), 0 on hidden pairs.
    """
    u = units.u
    s_mn = head.scores_mn
    error_mn = (
        logit_error(head, sm_scale, numerics, units, softcap)
        + 5 * u * np.abs(s_mn)
        + 3 * u * np.abs(s_mn - head.row_max_m[:, None])
        + 3 * u * lag_of(head, numerics)[:, None]
        + units.u_exp
    )
    sink_error_m = sink_exponent_error(head, numerics, units)
    rescales_mn = rescales(head, error_mn, sink_error_m, numerics, any_order)
    return np.where(head.seen_mn, error_mn + rescales_mn * units.u_exp, 0.0)


def sink_error(head: Head, numerics: Numerics, units: Units) -> FloatArray:
    """Returns E of the sinks, (M,), of which every tile may rescale the weight."""
    tiles_m = sunk(head) * seen_tiles(head.seen_mn, numerics.block_n)
    return sink_exponent_error(head, numerics, units) + tiles_m * units.u_exp


def forward_bound(
    head: Head, error_mn: FloatArray, numerics: Numerics, units: Units
) -> tuple[FloatArray, FloatArray]:
    """Returns bounds of out (M, Dv) and lse (M,), over the visible keys and the sink.

    out is exact in rows without a visible key, and lse in those without a sink either.
    """
    u, uc = units.u, units.u_cast_dot
    lost = units.eta_x * (1 + units.u_dot)
    bound_out_me = np.zeros_like(head.out_me)
    bound_lse_m = np.zeros_like(head.lse_m)
    tiles_m = seen_tiles(head.seen_mn, numerics.block_n)
    lag_m, sunk_m = lag_of(head, numerics), sunk(head)
    sink_error_m = sink_error(head, numerics, units)
    for m in range(head.seen_mn.shape[0]):
        seen_n, extra = head.seen_mn[m], sunk_m[m]
        if not seen_n.any() and not extra:
            continue
        p_sink, error_sink = head.sink_probs_m[m], sink_error_m[m]
        p_n, error_n, v_ne = head.probs_mn[m, seen_n], error_mn[m, seen_n], head.v_ne[seen_n]
        out_e, row_max, lse = head.out_me[m], head.row_max_m[m], head.lse_m[m]
        tiles = tiles_m[m]
        keys = numerics.block_n * tiles

        # 1: the softmax sum
        depth = keys
        if numerics.l_order == "tile":
            # A tile adds the weights of its keys; those of hidden keys are 0, which is exact.
            most = min(float(seen_n.sum()), float(numerics.l_tile))
            depth = max(float(numerics.block_n), most)
        gamma_l = units.gamma(depth + 2 * (tiles + extra) + 4)
        if numerics.l_from == "rounded":
            gamma_l = gamma_l + units.u_cast * (1 + gamma_l)

        # 2: out. P is cast relative to the running maximum, so its underflow weighs less if the
        # softmax of a row is spread out: exp(max - L) is 1 / l.
        z = (p_n * np.exp(-error_n)).sum() + p_sink * np.exp(-error_sink)
        spread = 1.0
        if not numerics.p_normalised:
            spread = np.exp(min(0.0, row_max - lse + 2 * error_n.max(initial=error_sink)))
        core_e = (p_n * np.expm1(error_n)) @ np.abs(v_ne - out_e) / z
        core_e += p_sink * np.expm1(error_sink) * np.abs(0 - out_e) / z  # the sink's value is 0
        core_e += (
            (uc + units.g(keys + 2 * tiles + extra) * (1 + uc))
            * ((p_n * np.exp(error_n)) @ np.abs(v_ne))
            / z
        )
        underflow = (units.eta_cast + units.flush) / units.p_factor
        core_e += underflow * spread * np.abs(v_ne).sum(axis=0)
        core_e += lost * (p_n * np.exp(error_n)).sum() / z
        # rescales, and the division by l
        core_e += units.flush_op * (tiles + extra) + units.flush_op
        if numerics.splits > 1:
            parts = min(float(numerics.splits), tiles)
            core_e += units.flush_op * 2 * parts  # each split is weighted, and added
        core_e += (gamma_l + 4 * u) * (np.abs(out_e) + core_e)
        if seen_n.any():
            bound_out_me[m] = core_e + units.u_stored * (np.abs(out_e) + core_e) + units.eta_stored

        # 3: lse. Since sum p = 1, log(sum p exp(E)) is log1p(sum p expm1(E)), without cancellation.
        bound_lse_m[m] = (
            np.log1p((p_n * np.expm1(error_n)).sum() + p_sink * np.expm1(error_sink))
            + gamma_l
            + units.u_log * (1 + abs(lse - row_max) + lag_m[m])
            + 4 * u * (max(abs(row_max), abs(lse)) + lag_m[m])
        )
    return bound_out_me, bound_lse_m


def _delta_error(head: Head, bound_out_me: FloatArray, units: Units, of_dlse: int) -> FloatArray:
    """Returns the error of delta, (M,); ``of_dlse`` is that of ``_dscore_error``."""
    dout_me, Dv = np.abs(head.stored_dout_me), head.v_ne.shape[1]
    error_delta_m = (dout_me * bound_out_me).sum(axis=1)
    error_delta_m += units.gamma(Dv + 4) * (dout_me * (np.abs(head.out_me) + bound_out_me)).sum(1)
    operands_me = dout_me + np.abs(head.out_me) + bound_out_me
    error_delta_m += units.flush_op * (operands_me + 2).sum(axis=1)  # operands, products, sums
    if of_dlse:
        error_delta_m += units.u * (np.abs(head.delta_m) + of_dlse * np.abs(head.dlse_m))
        error_delta_m += 2 * units.flush_op
    return np.asarray(error_delta_m)


def sink_dscore_error(
    head: Head, bound_out_me: FloatArray, prob_error_m: FloatArray, units: Units, of_dlse: int
) -> FloatArray:
    """Returns the error of the sink's dS = P (0 - delta), (M,), for an error of P's exponent."""
    error_delta_m = _delta_error(head, bound_out_me, units, of_dlse) + units.flush_op
    delta_m, p_m = np.abs(head.delta_m), head.sink_probs_m
    difference_m = error_delta_m + 3 * units.u * (delta_m + error_delta_m)
    grown_m = np.expm1(prob_error_m) * delta_m + np.exp(prob_error_m) * difference_m
    return np.asarray(sunk(head) * (p_m * grown_m + units.flush * (1 + delta_m)))


def _dscore_error(
    head: Head,
    bound_out_me: FloatArray,
    prob_error_mn: FloatArray,
    units: Units,
    of_dlse: int,
    from_rounded: bool,
) -> FloatArray:
    """Returns e, the error of dS before its cast.

    ``of_dlse`` is the number of roundings of the gradient of lse, 0 if the kernel got none. With
    ``from_rounded``, P is rounded first.
    """
    u, u_dot = units.u, units.u_dot
    Dv = head.v_ne.shape[1]
    dout_me, dprobs_mn, p_mn = np.abs(head.dout_me), head.dprobs_mn, head.probs_mn
    delta_m1 = head.delta_m[:, None]

    error_dprobs_mn = (units.g(max(Dv, _SHORTEST_DOT)) * (1 + u_dot) + u_dot) * (
        dout_me @ np.abs(head.v_ne).T
    )
    error_dprobs_mn += units.subnormal_operands(head.dout_me, head.v_ne)
    error_delta_m = _delta_error(head, bound_out_me, units, of_dlse)

    inputs_mn = error_dprobs_mn + error_delta_m[:, None] + units.flush_op  # flush of dP - delta
    terms_mn = np.abs(dprobs_mn) + np.abs(delta_m1)
    factor_mn = np.abs(dprobs_mn - delta_m1)
    factor_error_mn = inputs_mn + 3 * u * (terms_mn + inputs_mn)
    error_mn = p_mn * (
        np.expm1(prob_error_mn) * factor_mn + np.exp(prob_error_mn) * factor_error_mn
    ) + units.flush * (1 + terms_mn)
    if from_rounded:
        rounding_mn = units.u_cast * p_mn * np.exp(prob_error_mn) + units.eta_cast
        error_mn += rounding_mn * (factor_mn + factor_error_mn)
    return np.where(head.seen_mn, error_mn, 0.0)


def head_bound(
    head: Head,
    sm_scale: float,
    numerics: Numerics,
    units: Units,
    chain_n: FloatArray,
    with_dlse: bool,
    any_order: bool,
    softcap: float | None,
) -> HeadBound:
    """Returns all bounds of one head, before results are stored.

    Args:
        head: The passes of the reference.
        sm_scale: Factor on q.k, > 0.
        numerics: The kernel's declared numerics.
        units: The constants of the model.
        chain_n: (N,), the length of the sums for dk and dv.
        with_dlse: Whether the kernel was given a gradient of lse.
        any_order: Whether a kernel may visit the key tiles of a row in any order.
        softcap: As in ``numpy_reference.attention``.
    """
    # 1: scores, forward
    error_mn = score_error(head, sm_scale, numerics, units, any_order, softcap)
    bound_out_me, bound_lse_m = forward_bound(head, error_mn, numerics, units)

    # 2: P recomputed from the stored LSE
    prob_error_mn = recomputed_error(head, error_mn, bound_lse_m, units)
    bounds = backward_bound(
        head, bound_out_me, prob_error_mn, sm_scale, numerics, units, chain_n, int(with_dlse),
        softcap,
    )  # fmt: skip
    return bounds._replace(out_me=bound_out_me, lse_m=bound_lse_m)


def recomputed_error(
    head: Head, error_mn: FloatArray, bound_lse_m: FloatArray, units: Units
) -> FloatArray:
    """Returns F, the error of the exponent of P, recomputed from the stored LSE."""
    lse_m = np.where(head.seen_mn.any(axis=1), head.lse_m, 0.0)
    magnitudes_mn = np.abs(head.scores_mn) + np.abs(lse_m)[:, None]
    prob_error_mn = error_mn + bound_lse_m[:, None] + 3 * units.u * magnitudes_mn + units.u_exp
    return np.where(head.seen_mn, prob_error_mn, 0.0)


def recomputed_sink_error(
    head: Head, bound_lse_m: FloatArray, numerics: Numerics, units: Units
) -> FloatArray:
    """Returns F of the sinks, (M,), as ``recomputed_error``; 0 for a sink that weighs nothing."""
    there_m = head.sink_probs_m > 0
    magnitude_m = np.abs(np.where(there_m, head.sink_m, 0.0))
    magnitude_m = magnitude_m + np.abs(np.where(there_m, head.lse_m, 0.0))
    error_m = sink_error(head, numerics, units) + bound_lse_m + units.u_exp
    return np.where(there_m, error_m + 3 * units.u * magnitude_m, 0.0)


def backward_bound(
    head: Head,
    bound_out_me: FloatArray,
    prob_error_mn: FloatArray,
    sm_scale: float,
    numerics: Numerics,
    units: Units,
    chain_n: FloatArray,
    of_dlse: int,
    softcap: float | None,
    replay: Replay = _NO_REPLAY,
) -> HeadBound:
    """Returns the bounds of one head's gradients before they are stored; out and lse get 0.

    Args:
        head: The passes, with the probabilities and the output that the backward reads.
        bound_out_me: The error of that output.
        prob_error_mn: The error of the exponent of the probabilities.
        sm_scale: Factor on q.k, > 0.
        numerics: The kernel's declared numerics.
        units: The constants of the model.
        chain_n: (N,), the length of the sums for dk and dv.
        of_dlse: The number of roundings of the gradient of lse; 0 if the kernel got none.
        softcap: As in ``numpy_reference.attention``.
        replay: The roundings to replay; none by default.
    """
    t, u, uc = sm_scale, units.u, units.u_cast_dot
    seen_mn, p_mn = head.seen_mn, head.probs_mn
    q_md, k_nd, dout_me = np.abs(head.q_md), np.abs(head.k_nd), np.abs(head.dout_me)

    # 3: dS before and after its cast
    from_rounded = numerics.ds_from == "rounded"
    e_mn = _dscore_error(head, bound_out_me, prob_error_mn, units, of_dlse, from_rounded)
    dscores_error_mn = e_mn
    dscaled_mn = head.dscores_mn * head.slope_mn
    if softcap is not None:
        dot_error_mn = _dot_error(head, t, numerics, units)
        slope_error_mn = _capped_error(head, dot_error_mn, softcap, numerics, units)[1]
        largest_mn = (np.abs(head.dscores_mn) + e_mn) * (head.slope_mn + slope_error_mn)
        e_mn = e_mn * (head.slope_mn + slope_error_mn) + np.abs(head.dscores_mn) * slope_error_mn
        e_mn = np.where(seen_mn, e_mn + u * largest_mn + units.flush, 0.0)
    top_mn = np.abs(dscaled_mn) + e_mn
    eta_ds = (units.eta_cast + units.flush_op) * (1 + units.u_x)
    if numerics.ds_scaled:
        eta_ds *= max(1.0, 1 / t)
    cast_mn = np.where(seen_mn, e_mn + uc * top_mn + eta_ds, 0.0)
    ds_mn = dscaled_mn
    if replay.cast is not None and numerics.ds_scaled:
        known_mn = e_mn + 2 * u * top_mn + units.flush_op / min(t, 1.0)
        ds_mn, cast_mn = (
            x / t for x in replayed_operand(t * ds_mn, t * known_mn, replay.cast, units)
        )
    elif replay.cast is not None:
        ds_mn, cast_mn = replayed_operand(ds_mn, e_mn, replay.cast, units)
    cast_mn = np.where(seen_mn, cast_mn, 0.0)

    # 4: dQ = t dS K
    tiles_m = seen_tiles(seen_mn, numerics.block_n)
    sum_m = units.g(numerics.block_n * tiles_m + 2 * tiles_m)[:, None]
    added_md = sum_m * (1 + uc) * (top_mn @ k_nd)
    if replay.keys_in_order:
        args = ds_mn, head.k_nd, cast_mn @ k_nd, top_mn @ k_nd, numerics.block_n, units
        added_md = np.minimum(added_md, in_order_error(*args))
    bound_dq_md = t * (cast_mn @ k_nd + added_md)

    # 5: dK = t dS' Q
    sum_n = units.g(chain_n + 2)[:, None]
    bound_dk_nd = t * (cast_mn.T @ q_md)

    # errors of subnormal k and q as operands of these dots
    lost = t * units.eta_x * (1 + units.u_dot)
    bound_dq_md += lost * top_mn.sum(axis=1)[:, None]
    bound_dk_nd += lost * top_mn.sum(axis=0)[:, None]

    # flushes of tile sums, before or after the factor t, which is one more product
    bound_dq_md += units.flush_op * (max(t, 1.0) * tiles_m[:, None] + 1)
    if "dq" in numerics.atomic:  # flushes of a subnormal addend and a subnormal sum
        bound_dq_md += 2 * units.flush * max(t, 1.0) * tiles_m[:, None]

    # 6: the gradient of the other operand reads the rounded prescaled operand again
    reused = prescale_underflow(numerics, t, units)
    if numerics.prescales in ("q", "qk"):
        bound_dk_nd += t * units.u_stored * (top_mn.T @ q_md) + reused * top_mn.sum(0)[:, None]
    if numerics.prescales in ("k", "qk"):
        bound_dq_md += t * units.u_stored * (top_mn @ k_nd) + reused * top_mn.sum(1)[:, None]
    added_nd = sum_n * (1 + uc) * t * (top_mn.T @ q_md)
    if replay.rows_in_order and "dk" not in numerics.atomic:
        args = t * ds_mn.T, head.q_md, bound_dk_nd, t * top_mn.T @ q_md, _ROW_TILE, units
        added_nd = np.minimum(added_nd, in_order_error(*args))
    bound_dk_nd = bound_dk_nd + added_nd

    # 7: dV = P' dO
    largest_mn = p_mn * np.exp(prob_error_mn)
    underflow = (units.eta_cast + units.flush) * (1 + units.u_x)
    cast_p_mn = p_mn * np.expm1(prob_error_mn) + uc * largest_mn + underflow
    if replay.cast is not None:
        grown_mn = p_mn * np.expm1(prob_error_mn) + units.flush
        p_mn, cast_p_mn = replayed_operand(p_mn, grown_mn, replay.cast, units)
    cast_p_mn = np.where(seen_mn, cast_p_mn, 0.0)
    bound_dv_ne = cast_p_mn.T @ dout_me
    lost = units.eta_x * (1 + units.u_dot)
    bound_dv_ne += lost * np.where(seen_mn, largest_mn, 0.0).sum(axis=0)[:, None]
    added_ne = sum_n * (1 + uc) * (largest_mn.T @ dout_me)
    if replay.rows_in_order and "dv" not in numerics.atomic:
        args = p_mn.T, head.dout_me, bound_dv_ne, largest_mn.T @ dout_me, _ROW_TILE, units
        added_ne = np.minimum(added_ne, in_order_error(*args))
    bound_dv_ne = bound_dv_ne + added_ne

    nothing = np.zeros_like(head.out_me), np.zeros_like(head.lse_m)
    terms = t * (top_mn @ k_nd), t * (top_mn.T @ q_md), largest_mn.T @ dout_me
    return HeadBound(
        *nothing, bound_dq_md, bound_dk_nd, bound_dv_ne, dscores_error_mn, ds_mn, p_mn, terms
    )


def _stored(bound: FloatArray, value: FloatArray, u_result: float, eta: float) -> FloatArray:
    """Adds the rounding of a result to its bound: B + u(|x| + B) + eta."""
    return bound + u_result * (np.abs(value) + bound) + eta


def _summed_in_dtype(
    bound: FloatArray, terms: FloatArray, u_before: float, count: FloatArray, units: Units
) -> FloatArray:
    """Returns the error of ``count`` partial sums, each rounded to the dtype and added in it.

    The first addition, to 0, is exact: a partial sum is rounded ``count`` times. Each loses
    eta_stored to its rounding, and may be flushed, as may each result.
    """
    grown = np.expm1(u_before + count * np.log1p(units.u_stored))
    lost = count * (units.eta_stored + 2 * units.flush)
    return np.asarray(bound + grown * (terms + bound) + (1 + grown) * lost)


def _stored_value(
    bound: FloatArray, value: FloatArray, u_result: float, units: Units, stored: str | None
) -> tuple[FloatArray, FloatArray]:
    """Returns a result and its bound once it is stored; see ``_group_sum``."""
    if stored is None:
        return value, _stored(bound, value, u_result, units.eta_stored)
    return replayed(value, _stored(bound, value, u_result - units.u_stored, units.flush), stored)


def _group_sum(
    bounds: list[FloatArray],
    values: list[FloatArray],
    u_result: float,
    per_head: bool,
    units: Units,
    flushed: FloatArray,
    stored: str | None,
    in_dtype: tuple[list[FloatArray], FloatArray] | None,
) -> tuple[FloatArray, FloatArray]:
    """Returns a sum over a group's heads, in one fp32 chain or stored head by head, and its bound.

    ``flushed`` is the most that a chain of additions loses to flushes. ``u_result`` includes the
    rounding to the dtype, which is replayed if ``stored`` names the dtype. ``in_dtype`` has the
    sums of |terms| of each head, and the number of partial sums, if these are rounded.
    """
    eta, value = units.eta_stored, sum(values[1:], values[0])
    u_before = u_result - units.u_stored
    if not per_head and in_dtype is not None:
        terms, count = in_dtype
        size = sum(terms[1:], terms[0])
        return value, _summed_in_dtype(sum(bounds, flushed), size, u_before, count, units)
    if not per_head:
        return _stored_value(sum(bounds, flushed), value, u_result, units, stored)
    total = np.zeros_like(bounds[0])
    largest = np.zeros_like(bounds[0])
    for i, (head_bound, of_head) in enumerate(zip(bounds, values, strict=True)):
        finished = _stored(head_bound + flushed, of_head, u_result, eta)
        if in_dtype is not None:
            terms, count = in_dtype
            finished = _summed_in_dtype(head_bound + flushed, terms[i], u_before, count, units)
        total += finished
        largest += np.abs(of_head) + finished
    return value, total + len(bounds) * units.u_stored * largest + (len(bounds) - 1) * eta


def group_bound(
    heads: list[Head],
    sm_scale: float,
    numerics: Numerics,
    units: Units,
    bound_of: Callable[[int, FloatArray], HeadBound],
    stored: str | None = None,
) -> tuple[Outputs[FloatArray], Outputs[FloatArray]]:
    """Returns the values and bounds of a group: out, lse and dq stacked, dk and dv summed.

    ``bound_of`` returns the bounds of a head by its place in the group and the lengths of the sums
    for dk and dv. ``stored`` is the dtype of gradients whose last rounding is replayed.
    """
    seen_mn = heads[0].seen_mn
    live_m: BoolArray = np.any(seen_mn, axis=1)
    used_n: BoolArray = np.any(seen_mn, axis=0)
    per_head = numerics.group_sum == "dtype" and len(heads) > 1
    rows_n = _ROW_TILE * seen_tiles(seen_mn.T, _ROW_TILE)
    chain_n = rows_n if per_head else len(heads) * rows_n
    bounds = [bound_of(i, chain_n) for i in range(len(heads))]

    tiles_n1 = (chain_n / _ROW_TILE)[:, None]
    flushed = units.flush_op * (max(sm_scale, 1.0) * tiles_n1 + 1)
    flushed_of = {"dk": flushed, "dv": flushed}
    for name, factor in (("dk", max(sm_scale, 1.0)), ("dv", 1.0)):
        if name in numerics.atomic and name not in numerics.rounded_sums:
            flushed_of[name] = flushed + 2 * units.flush * factor * tiles_n1
    in_dtype = {
        name: ([x.terms[place] for x in bounds], tiles_n1)
        for place, name in enumerate(("dq", "dk", "dv"))
        if name in numerics.rounded_sums
    }
    u_scaled = units.u_stored + 4 * units.u  # dq and dk are multiplied by t after the dot
    # gradients of operands whose casts were replayed
    dq_heads, dk_heads, dv_heads = [], [], []
    for x, head in zip(bounds, heads, strict=True):
        ds_mn = head.dscores_mn * head.slope_mn if x.ds_mn is None else x.ds_mn
        p_mn = head.probs_mn if x.p_mn is None else x.p_mn
        dq_heads.append(sm_scale * (ds_mn @ head.k_nd))
        dk_heads.append(sm_scale * (ds_mn.T @ head.q_md))
        dv_heads.append(p_mn.T @ head.dout_me)
    tiles_m1 = seen_tiles(seen_mn, numerics.block_n)[:, None]
    dq = [
        (dq_md, _summed_in_dtype(x.dq_md, x.terms[0], 4 * units.u, tiles_m1, units))
        if "dq" in in_dtype
        else _stored_value(x.dq_md, dq_md, u_scaled, units, stored)
        for x, dq_md in zip(bounds, dq_heads, strict=True)
    ]
    dk_nd, bound_dk_nd = _group_sum(
        [x.dk_nd for x in bounds], dk_heads, u_scaled, per_head, units, flushed_of["dk"], stored,
        in_dtype.get("dk"),
    )  # fmt: skip
    dv_ne, bound_dv_ne = _group_sum(
        [x.dv_ne for x in bounds], dv_heads, units.u_stored, per_head, units, flushed_of["dv"],
        stored, in_dtype.get("dv"),
    )  # fmt: skip
    out, lse = np.stack([x.out_me for x in bounds]), np.stack([x.lse_m for x in bounds])
    value = Outputs(out, lse, np.stack([x for x, _ in dq]), dk_nd, dv_ne)
    bound = Outputs(
        out=out,
        lse=lse,
        dq=np.stack([np.where(live_m[:, None], x, 0.0) for _, x in dq]),
        dk=np.where(used_n[:, None], bound_dk_nd, 0.0),
        dv=np.where(used_n[:, None], bound_dv_ne, 0.0),
    )
    return value, bound


def groups(
    q: FloatArray,
    k: FloatArray,
    v: FloatArray,
    dout: FloatArray,
    mask: Mask,
    sm_scale: float,
    dlse: FloatArray | None,
    softcap: float | None,
    alibi_slopes: FloatArray | None,
    bias: FloatArray | None,
    conversion: str | None = None,
    sinks: FloatArray | None = None,
) -> Iterator[tuple[int, int, slice, list[Head]]]:
    """Yields batch entry, key/value head, its query heads, and their passes, group by group.

    ``conversion`` is that of the operands to TF32, if it is replayed.
    """
    B, H, M, _ = q.shape
    stored_dout = dout
    if conversion is not None:
        q, k, v, dout = (rounded(x, conversion) for x in (q, k, v, dout))
    Hk, N = k.shape[1:3]
    group = H // Hk
    seen_bmn = seen_keys(mask, B, M, N)
    dlse_bhm = np.zeros((B, H, M)) if dlse is None else dlse
    added = added_terms(mask, (B, H, M, N), alibi_slopes, bias)
    for b in range(B):
        for g in range(Hk):
            hs = slice(g * group, (g + 1) * group)
            heads = [
                attend_head(
                    q[b, h], k[b, g], v[b, g], dout[b, h], dlse_bhm[b, h], seen_bmn[b], sm_scale,
                    softcap, tuple(term_bhmn[b, h] for term_bhmn in added),
                    sinks_of_rows(sinks, mask, b, h, M),
                )
                for h in range(hs.start, hs.stop)
            ]  # fmt: skip
            live_m: BoolArray = np.any(seen_bmn[b], axis=1)
            yield (
                b,
                g,
                hs,
                [
                    head._replace(stored_dout_me=np.where(live_m[:, None], stored_dout[b, h], 0.0))
                    for h, head in enumerate(heads, hs.start)
                ],
            )


def bound(
    q: FloatArray,
    k: FloatArray,
    v: FloatArray,
    dout: FloatArray,
    *,
    mask: Mask,
    sm_scale: float,
    in_dtype: str,
    numerics: Numerics,
    dlse: FloatArray | None = None,
    softcap: float | None = None,
    alibi_slopes: FloatArray | None = None,
    bias: FloatArray | None = None,
    sinks: FloatArray | None = None,
    dequantised: bool = False,
    p_factor: float = 1.0,
) -> Outputs[FloatArray]:
    """Returns the largest error of each element of a correct kernel's outputs.

    The bound is 0 where a result is exact: out, lse and dq of rows without a visible key, dk and
    dv of keys that no row sees. A value that is not finite means that the inputs are outside the
    range of the model; it does not accept arbitrary results.

    Args:
        q: (B, H, M, D) float64, with the values that the kernel was given.
        k: (B, Hk, N, D) float64, as q.
        v: (B, Hk, N, Dv) float64, as q.
        dout: (B, H, M, Dv) float64, as q; the gradient of out.
        mask: The mask.
        sm_scale: Factor on q.k, > 0.
        in_dtype: The kernel's dtype, "fp16", "bf16", "fp32" or "fp64".
        numerics: The kernel's declared numerics.
        dlse: (B, H, M) gradient of lse, if the kernel was given one.
        softcap: As in ``numpy_reference.attention``.
        alibi_slopes: As in ``numpy_reference.attention``.
        bias: As in ``numpy_reference.attention``.
        sinks: As in ``numpy_reference.attention``.
        dequantised: As in ``units_of``.
        p_factor: As in ``units_of``.

    Returns:
        Bounds shaped as the outputs; doubled for "fp64", because the reference has an error of the
        same size.

    Raises:
        ValueError: in_dtype is unknown.

    Source: Higham, Accuracy and Stability of Numerical Algorithms, ch. 3; Blanchard, Higham and
    Higham 2021 (doi 10.1093/imanum/draa038) for the softmax.
    """
    units = units_of(in_dtype, numerics, dequantised=dequantised, p_factor=p_factor)
    result = Outputs(
        out=np.zeros(dout.shape),
        lse=np.zeros(q.shape[:3]),
        dq=np.zeros(q.shape),
        dk=np.zeros(k.shape),
        dv=np.zeros(v.shape),
    )
    passes = groups(q, k, v, dout, mask, sm_scale, dlse, softcap, alibi_slopes, bias, sinks=sinks)
    with np.errstate(over="ignore", invalid="ignore"):
        for b, g, hs, heads in passes:

            def bound_of(i: int, chain_n: FloatArray, heads: list[Head] = heads) -> HeadBound:
                return head_bound(
                    heads[i], sm_scale, numerics, units, chain_n, dlse is not None,
                    not mask.is_plain, softcap,
                )  # fmt: skip

            _, one = group_bound(heads, sm_scale, numerics, units, bound_of)
            result.out[b, hs], result.lse[b, hs], result.dq[b, hs] = one.out, one.lse, one.dq
            result.dk[b, g], result.dv[b, g] = one.dk, one.dv
    if in_dtype == "fp64":
        return Outputs(*(2 * x for x in result))
    return result
