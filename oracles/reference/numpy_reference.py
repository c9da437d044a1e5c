"""Attention forward and backward in NumPy float64: numbered passes, one head at a time.

The code is written for comparison with the formulas, not for speed. Suffixes of locals name axes: b
batch, h query head, m query row, n key, d head_dim, e head_dim of v.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.outputs import Outputs

__all__ = [
    "Head",
    "added_terms",
    "attend_head",
    "attention",
    "distances",
    "seen_keys",
    "sinks_of_rows",
]

FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]


class Head(NamedTuple):
    """The passes of one batch entry and query head; matrices are 0 where a row does not see a key.

    The inputs come first, with rows without a visible key and keys that no row sees set to 0. A row
    without a visible key has lse_m = -inf and row_max_m = 0. scaled_mn are the scores before a
    softcap, and slope_mn is the derivative of the capped scores by them, 1 without a softcap.
    added_mn are the terms added after the softcap. A row with a sink has one more key, whose score
    is sink_m and whose value is 0; sink_m is -inf without one.
    """

    q_md: FloatArray
    k_nd: FloatArray
    v_ne: FloatArray
    dout_me: FloatArray
    stored_dout_me: FloatArray  # as delta reads it, where dots read a conversion of it
    dlse_m: FloatArray
    seen_mn: BoolArray
    scores_mn: FloatArray
    row_max_m: FloatArray
    lse_m: FloatArray
    probs_mn: FloatArray
    out_me: FloatArray
    dprobs_mn: FloatArray
    delta_m: FloatArray
    dscores_mn: FloatArray
    dq_md: FloatArray
    dk_nd: FloatArray
    dv_ne: FloatArray
    scaled_mn: FloatArray
    slope_mn: FloatArray
    added_mn: tuple[FloatArray, ...]
    sink_m: FloatArray
    sink_probs_m: FloatArray
    sink_dscores_m: FloatArray


def seen_keys(mask: Mask, B: int, M: int, N: int) -> BoolArray:
    """Returns the keys that each row sees, bool (B, M, N).

    They are one inclusive range of keys per row, of which a predicate may hide some.
    The last valid row is level with the last valid key, and the row i rows above it with the key i
    keys before. A row sees valid keys from ``window_left`` keys before its level to
    ``window_right`` keys after it (0 if causal). This implementation of the definition is
    independent: it calls no other form of the mask.

    Args:
        mask: The mask: a window, lengths, and a predicate that does not depend on the head.
        B: Batch entries.
        M: Query rows.
        N: Keys.

    Raises:
        ValueError: The predicate depends on the head.
    """
    if not mask.uniform:
        raise ValueError(f"mask is {mask!r}; needs one that is the same for all heads")
    seen_bmn = np.zeros((B, M, N), dtype=np.bool_)
    for b in range(B):
        rows = M if mask.seqlens_q is None else mask.seqlens_q[b]
        keys = N if mask.seqlens_k is None else mask.seqlens_k[b]
        for m in range(rows):
            rows_below = rows - 1 - m
            level = keys - 1 - rows_below
            first, last = 0, keys - 1
            if mask.window_left is not None:
                first = max(first, level - mask.window_left)
            if mask.causal:
                last = min(last, level)
            if mask.window_right is not None:
                last = min(last, level + mask.window_right)
            for n in range(first, last + 1):
                seen_bmn[b, m, n] = bool(mask.mask_mod(b, 0, m, n, M=M, N=N))
    return seen_bmn


def distances(mask: Mask, B: int, M: int, N: int) -> FloatArray:
    """Returns the distance of each key from each row's level, (B, M, N); see ``seen_keys``.

    Args:
        mask: The mask, for its lengths.
        B: Batch entries.
        M: Query rows.
        N: Keys.
    """
    apart_bmn = np.zeros((B, M, N))
    for b in range(B):
        rows = M if mask.seqlens_q is None else mask.seqlens_q[b]
        keys = N if mask.seqlens_k is None else mask.seqlens_k[b]
        for m in range(M):
            level = keys - (rows - m)
            for n in range(N):
                apart_bmn[b, m, n] = max(n - level, level - n)
    return apart_bmn


def added_terms(
    mask: Mask,
    shape: tuple[int, int, int, int],
    alibi_slopes: FloatArray | None,
    bias: FloatArray | None = None,
) -> list[FloatArray]:
    """Returns the terms that are added to scores, (B, H, M, N) each.

    Args:
        mask: The mask, for its lengths.
        shape: (B, H, M, N).
        alibi_slopes: (H,) or (B, H): slope times distance is subtracted from a score.
        bias: (B or 1, H or 1, M or 1, N or 1).
    """
    added = []
    B, H, M, N = shape
    if alibi_slopes is not None:
        slopes_bh = np.broadcast_to(alibi_slopes, (B, H))
        added.append(-slopes_bh[:, :, None, None] * distances(mask, B, M, N)[:, None])
    if bias is not None:
        added.append(np.broadcast_to(bias, shape))
    return added


def sinks_of_rows(sinks: FloatArray | None, mask: Mask, b: int, h: int, M: int) -> FloatArray:
    """Returns the sinks of a head's rows, (M,): -inf in padding, and without ``sinks`` (H,)."""
    sink_m = np.full(M, -np.inf)
    if sinks is not None:
        rows = M if mask.seqlens_q is None else mask.seqlens_q[b]
        sink_m[:rows] = sinks[h]
    return sink_m


def attend_head(
    q_md: FloatArray,
    k_nd: FloatArray,
    v_ne: FloatArray,
    dout_me: FloatArray,
    dlse_m: FloatArray,
    seen_mn: BoolArray,
    sm_scale: float,
    softcap: float | None = None,
    added_mn: tuple[FloatArray, ...] = (),
    sink_m: FloatArray | None = None,
) -> Head:
    """Runs forward and backward of one query head of one batch entry.

    Args:
        q_md: (M, D) float64.
        k_nd: (N, D) float64.
        v_ne: (N, Dv) float64.
        dout_me: (M, Dv) float64, gradient of out.
        dlse_m: (M,) float64, gradient of lse.
        seen_mn: (M, N) bool, True where row m sees key n.
        sm_scale: Factor on q.k.
        softcap: c of c tanh(s / c), > 0; None without a softcap.
        added_mn: (M, N) float64 each, added to the scores; hidden pairs may hold anything.
        sink_m: (M,) float64, the sinks, -inf in rows without one; None without any.

    Returns:
        All passes; dk_nd and dv_ne are the contributions of this head.

    Source: FlashAttention-2 (arXiv:2307.08691), section 2.2 and algorithm 2, untiled.
    """
    # Pass 0: padding may hold NaN or Inf, and 0 * NaN is NaN, so it is replaced by 0.
    live_m: BoolArray = np.any(seen_mn, axis=1)
    used_n: BoolArray = np.any(seen_mn, axis=0)
    if sink_m is None:
        sink_m = np.full(len(live_m), -np.inf)
    sunk_m: BoolArray = sink_m > -np.inf
    summed_m: BoolArray = live_m | sunk_m
    q_md = np.where(live_m[:, None], q_md, 0.0)
    k_nd = np.where(used_n[:, None], k_nd, 0.0)
    v_ne = np.where(used_n[:, None], v_ne, 0.0)
    dout_me = np.where(live_m[:, None], dout_me, 0.0)
    dlse_m = np.where(summed_m, dlse_m, 0.0)

    # Pass 1: scores s = t q.k, or c tanh(t q.k / c), whose slope is 1 / cosh^2
    scaled_mn = scores_mn = np.where(seen_mn, sm_scale * (q_md @ k_nd.T), 0.0)
    slope_mn = np.ones_like(scores_mn)
    if softcap is not None:
        scores_mn = softcap * np.tanh(scaled_mn / softcap)
        slope_mn = np.cosh(scaled_mn / softcap) ** -2.0
    added_mn = tuple(np.where(seen_mn, term_mn, 0.0) for term_mn in added_mn)
    for term_mn in added_mn:
        scores_mn = scores_mn + term_mn
    # Pass 2: row maximum over the visible keys and the sink
    row_max_m = np.max(np.where(seen_mn, scores_mn, -np.inf), axis=1, initial=-np.inf)
    row_max_m = np.where(summed_m, np.maximum(row_max_m, sink_m), 0.0)
    # Pass 3: softmax P = exp(s - max) / l, and L = max + ln l
    weights_mn = np.where(seen_mn, np.exp(np.where(seen_mn, scores_mn - row_max_m[:, None], 0)), 0)
    sink_weight_m = np.where(sunk_m, np.exp(sink_m - row_max_m), 0.0)
    row_sum_m = np.where(summed_m, weights_mn.sum(axis=1) + sink_weight_m, 1.0)
    probs_mn = weights_mn / row_sum_m[:, None]
    sink_probs_m = sink_weight_m / row_sum_m
    lse_m = np.where(summed_m, row_max_m + np.log(row_sum_m), -np.inf)
    # Pass 4: O = P V
    out_me = probs_mn @ v_ne
    # Pass 5: dP = dO V'
    dprobs_mn = np.where(seen_mn, dout_me @ v_ne.T, 0.0)
    # Pass 6: delta = rowsum(dO * O) - dL
    delta_m = (dout_me * out_me).sum(axis=1) - dlse_m
    # Pass 7: dS = P (dP - delta)
    dscores_mn = np.where(seen_mn, probs_mn * (dprobs_mn - delta_m[:, None]), 0.0)
    sink_dscores_m = sink_probs_m * (0 - delta_m)
    # Pass 8: dQ = t dX K, dK = t dX' Q, dV = P' dO, where dX is dS times the slope
    dscaled_mn = dscores_mn * slope_mn
    dq_md = sm_scale * (dscaled_mn @ k_nd)
    dk_nd = sm_scale * (dscaled_mn.T @ q_md)
    dv_ne = probs_mn.T @ dout_me
    return Head(
        q_md=q_md,
        k_nd=k_nd,
        v_ne=v_ne,
        dout_me=dout_me,
        stored_dout_me=dout_me,
        dlse_m=dlse_m,
        seen_mn=seen_mn,
        scores_mn=scores_mn,
        row_max_m=row_max_m,
        lse_m=lse_m,
        probs_mn=probs_mn,
        out_me=out_me,
        dprobs_mn=dprobs_mn,
        delta_m=delta_m,
        dscores_mn=dscores_mn,
        dq_md=dq_md,
        dk_nd=dk_nd,
        dv_ne=dv_ne,
        scaled_mn=scaled_mn,
        slope_mn=slope_mn,
        added_mn=added_mn,
        sink_m=sink_m,
        sink_probs_m=sink_probs_m,
        sink_dscores_m=sink_dscores_m,
    )


def attention(
    q: FloatArray,
    k: FloatArray,
    v: FloatArray,
    dout: FloatArray,
    *,
    mask: Mask,
    sm_scale: float,
    dlse: FloatArray | None = None,
    softcap: float | None = None,
    alibi_slopes: FloatArray | None = None,
    bias: FloatArray | None = None,
    sinks: FloatArray | None = None,
) -> Outputs[FloatArray]:
    """Returns out, lse and the analytic gradients of sum(out * dout) + sum(lse * dlse).

    A row without a visible key has out 0, lse -inf and dq 0, and adds nothing to dk and dv; its
    dout and dlse are ignored. Padding may hold NaN or Inf. A hidden key with finite values adds
    exactly zero to a row.

    Args:
        q: (B, H, M, D) float64, with the given low-precision values.
        k: (B, Hk, N, D) float64, as q; H is a multiple of Hk.
        v: (B, Hk, N, Dv) float64, as q.
        dout: (B, H, M, Dv) float64, as q; the gradient of out.
        mask: The mask.
        sm_scale: Factor on q.k.
        dlse: (B, H, M) gradient of lse; None is zero.
        softcap: c, > 0, where a scaled score s becomes c tanh(s / c); None without a softcap.
        alibi_slopes: (H,) or (B, H): slope times distance is subtracted from a score.
        bias: (B or 1, H or 1, M or 1, N or 1), added to the scores.
        sinks: (H,): the score of one more key of each valid row, whose value is 0.

    Returns:
        out (B, H, M, Dv), lse (B, H, M) in natural log, dq, dk, dv shaped as q, k, v.

    Numerics: within half of ``in_numpy.bound.bound(..., in_dtype="fp64")`` of the true values.
    """
    B, H, M, _ = q.shape
    Hk, N = k.shape[1:3]
    result = Outputs(
        out=np.zeros_like(dout, dtype=np.float64),
        lse=np.zeros((B, H, M)),
        dq=np.zeros_like(q, dtype=np.float64),
        dk=np.zeros_like(k, dtype=np.float64),
        dv=np.zeros_like(v, dtype=np.float64),
    )
    seen_bmn = seen_keys(mask, B, M, N)
    dlse_bhm = np.zeros((B, H, M)) if dlse is None else dlse
    added = added_terms(mask, (B, H, M, N), alibi_slopes, bias)
    # Pairs that a later select discards may overflow.
    with np.errstate(over="ignore", invalid="ignore"):
        for b in range(B):
            for h in range(H):
                g = h // (H // Hk)
                head = attend_head(
                    q[b, h], k[b, g], v[b, g], dout[b, h], dlse_bhm[b, h], seen_bmn[b], sm_scale,
                    softcap, tuple(term_bhmn[b, h] for term_bhmn in added),
                    sinks_of_rows(sinks, mask, b, h, M),
                )  # fmt: skip
                result.out[b, h] = head.out_me
                result.lse[b, h] = head.lse_m
                result.dq[b, h] = head.dq_md
                result.dk[b, g] += head.dk_nd
                result.dv[b, g] += head.dv_ne
    return result
