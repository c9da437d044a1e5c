"""The random and systematic errors of a correct kernel, in NumPy: a second implementation.

``spread`` has the derivation. It forms sums over pairs as products of matrices; here the influence
of each error on each element is formed, and its square is summed. Suffixes of locals name axes: m
query row, n key, d head_dim, e head_dim of v, s shapes.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fa_verify.oracles.bounds.in_numpy.bound import groups, logit_error, score_error
from fa_verify.oracles.bounds.in_numpy.units import (
    Units,
    conversion_of,
    replayed,
    seen_tiles,
    units_of,
)
from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.outputs import Numerics, Outputs
from fa_verify.oracles.reference.numpy_reference import Head

__all__ = ["FIELDS", "spreads"]

FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]
Fields = dict[str, FloatArray]

FIELDS = ("value", "variance", "shapes", "along", "across", "of_sums", "shared", "alone", "peaked")
_LIMIT = 9.6  # largest |error| in standard deviations
_CHUNK = 16  # rows of a tile that a key's chain of additions counts


class _Model:
    """The errors of sums of products in one dtype."""

    def __init__(self, in_dtype: str, numerics: Numerics) -> None:
        self.tf32 = conversion_of(in_dtype, numerics)
        self.units: Units = units_of(in_dtype, numerics, self.tf32 is not None)
        self.narrow = in_dtype if in_dtype in ("fp16", "bf16") else None
        self.cast = self.narrow if numerics.p_dtype == "input" else None
        if self.tf32 is not None:
            self.cast = self.tf32
        self.u_cast = 2.0**-11 if self.tf32 else self.units.u_stored
        self.numerics = numerics

    def random(self, total: FloatArray, squares: FloatArray, terms: npt.ArrayLike) -> FloatArray:
        """Returns the variance of a sum of products."""
        each = self.units.accumulator * self.units.u
        return np.asarray(each**2 * np.asarray(terms) * (total**2 + squares))

    def truncated(self, size: FloatArray, terms: npt.ArrayLike) -> FloatArray:
        """Returns what tensor cores cut off partial sums of a size."""
        if self.narrow is None and self.tf32 is None:
            return np.zeros_like(size)
        each = 2 * self.units.accumulator * self.units.u
        at_once = 16 if self.tf32 is None else 4
        return np.asarray(each * (np.asarray(terms) / at_once + 1) * size)

    def cut_off(
        self, total: FloatArray, squares: FloatArray, left: FloatArray, right: FloatArray
    ) -> FloatArray:
        """Returns what tensor cores cut off the products of two rows each, on average at most."""
        if self.narrow is None and self.tf32 is None:
            return np.zeros_like(total)
        half_spacing = self.units.accumulator * self.units.u * np.maximum(
            np.abs(total), np.sqrt(squares)
        )  # fmt: skip
        agree = (np.sign(left)[:, None, :] * np.sign(right)[None, :, :]).sum(axis=2)
        return np.asarray(half_spacing * agree.reshape(total.shape))

    def window(
        self, x: FloatArray, variance: FloatArray, systematic: FloatArray
    ) -> tuple[FloatArray, FloatArray]:
        """Returns values after their cast, and the variances of their errors."""
        if self.cast is None:
            return x, variance
        middle, half = replayed(x, systematic + _LIMIT * np.sqrt(variance), self.cast)
        return middle, half**2


class _Scores:
    """Scores of a head and the errors of their dots, (M, N)."""

    def __init__(self, head: Head, t: float, model: _Model) -> None:
        D = head.q_md.shape[1]
        squares_mn = np.zeros_like(head.scores_mn)
        for d in range(D):
            squares_mn += (t * np.outer(head.q_md[:, d], head.k_nd[:, d])) ** 2
        self.s_mn = np.where(head.seen_mn, head.scores_mn, 0.0)
        squares_mn = np.where(head.seen_mn, squares_mn, 0.0)
        self.variance_mn = model.random(self.s_mn, squares_mn, D)
        sizes_mn = np.abs(self.s_mn) + 4 * np.sqrt(squares_mn)
        self.one_sided_mn = np.where(head.seen_mn, model.truncated(sizes_mn, D), 0.0)
        self.cut_off_mn = model.cut_off(self.s_mn, squares_mn, head.q_md, head.k_nd)


def _forward(
    head: Head, scores: _Scores, w_me: FloatArray, t: float, model: _Model, any_order: bool
) -> tuple[Fields, Fields]:
    """Returns the errors of out and lse of one head, row by row."""
    units, numerics = model.units, model.numerics
    M = head.out_me.shape[0]
    E_mn = score_error(head, t, numerics, units, any_order)
    dots_mn = logit_error(head, t, numerics, units, None)
    tiles_m = seen_tiles(head.seen_mn, numerics.block_n)
    found = _nothing(head.out_me, shapes=4)
    # P after its conversion to TF32: a truncation loses between 0 and 2**-11 of it on average.
    mean_loss = 2.0**-12 if model.tf32 == "truncate" else 0.0
    tf32_var = 0.0 if model.tf32 is None else (2.0**-11) ** 2 / 3 + mean_loss**2
    found["value"][:] = head.out_me - mean_loss * head.out_me
    found["shapes"][3] = mean_loss * head.out_me
    of_lse = _nothing(np.zeros((M, 1)), shapes=1)
    for m in range(M):
        seen_n = head.seen_mn[m]
        if not seen_n.any():
            continue
        p_n, v_ne = head.probs_mn[m, seen_n], head.v_ne[seen_n]
        rest_n = np.maximum(E_mn[m, seen_n] - dots_mn[m, seen_n], 0.0)
        systematic_n = rest_n + scores.one_sided_mn[m, seen_n]
        var_n = p_n**2 * (scores.variance_mn[m, seen_n] + systematic_n**2)
        top = np.exp(head.row_max_m[m] - head.lse_m[m])
        lost = units.eta_cast * (1.0 if numerics.p_normalised else top)
        cast_n = ((p_n * units.u_cast) ** 2 + lost**2) / 3
        # lse
        lse, row_max = head.lse_m[m], head.row_max_m[m]
        additions_l = numerics.block_n * tiles_m[m]
        if numerics.l_order == "tile":
            widest = max(numerics.block_n, numerics.l_tile)
            additions_l = min(max(seen_n.sum(), numerics.block_n), widest)
        additions_l += 2 * tiles_m[m] + 4
        lse_var = (p_n**2 * scores.variance_mn[m, seen_n]).sum() + additions_l * units.u**2 / 3
        if numerics.l_from == "rounded":
            lse_var += cast_n.sum()
        lag = numerics.rescale_threshold * np.log(2) * (tiles_m[m] > 1)
        of_lse["value"][m] = lse
        of_lse["variance"][m], of_lse["of_sums"][m] = lse_var, lse_var
        cut_off_n = scores.cut_off_mn[m, seen_n]
        of_lse["along"][m] = np.log((p_n * np.exp(systematic_n + np.abs(cut_off_n))).sum())
        of_lse["along"][m] += units.u_log * (1 + abs(lse - row_max) + lag)
        of_lse["along"][m] += 4 * units.u * (max(abs(lse), abs(row_max)) + lag)
        # out
        gaps_ne = v_ne - head.out_me[m]
        through_ne = gaps_ne if numerics.l_from == "rounded" else v_ne
        additions = (numerics.block_n + 2) * tiles_m[m]
        of_l = units.u**2 * (additions + 2 * tiles_m[m] + 16)
        squares_e = (p_n[:, None] ** 2 * v_ne**2).sum(axis=0)
        alone_e = model.random(head.out_me[m], squares_e, additions)
        pairs_e = (var_n[:, None] * gaps_ne**2 + cast_n[:, None] * through_ne**2).sum(axis=0)
        pairs_e += tf32_var * squares_e
        found["variance"][m] = pairs_e + alone_e + of_l * head.out_me[m] ** 2
        found["alone"][m] = alone_e
        along_n, through_n = gaps_ne @ w_me[m], through_ne @ w_me[m]
        found["of_sums"][m] = (var_n * along_n**2 + cast_n * through_n**2).sum()
        found["of_sums"][m] += tf32_var * ((p_n * (v_ne @ w_me[m])) ** 2).sum()
        found["of_sums"][m] += of_l * (w_me[m] @ head.out_me[m]) ** 2
        for place, sign_n in enumerate((1.0, np.sign(scores.s_mn[m, seen_n]))):
            found["shapes"][place, m] = (p_n * systematic_n * sign_n) @ gaps_ne
        found["shapes"][2, m] = (p_n * cut_off_n) @ gaps_ne
        found["along"][m] = model.truncated(np.abs(head.out_me[m]), additions)
        found["along"][m] += units.flush * (np.abs(v_ne).sum(axis=0) + tiles_m[m] + 2)
        found["across"][m] = model.truncated(4 * np.sqrt(squares_e), additions)
        found["peaked"][m] = top > 1 - 16 * units.u_stored
    return found, of_lse


def _nothing(like: FloatArray, shapes: int) -> Fields:
    rows = like.shape[:1]
    found = {
        name: np.zeros_like(like) for name in ("value", "variance", "along", "across", "alone")
    }
    found |= {"of_sums": np.zeros(rows), "shared": np.zeros(rows)}
    return found | {"shapes": np.zeros((shapes, *like.shape)), "peaked": np.zeros((*rows, 1))}


class _KeySums:
    """dk or dv of a key/value head: terms of pairs, added up over the rows of its group."""

    def __init__(self, shapes: int, N: int, columns: int) -> None:
        self.found = _nothing(np.zeros((N, columns)), shapes)
        self.squares_nd = np.zeros((N, columns))
        self.weight_n, self.light_n = np.zeros(N), np.zeros(N)

    def add(
        self, operand_n: FloatArray, random_n: FloatArray, shared_n: FloatArray,
        shapes_sn: list[FloatArray], flushed_n: FloatArray, row_d: FloatArray, along_n: FloatArray,
    ) -> None:  # fmt: skip
        """Adds a row's terms: operands times ``row_d``, with their variances."""
        found, squared_d = self.found, row_d**2
        found["value"] += np.outer(operand_n, row_d)
        self.squares_nd += np.outer(operand_n**2, squared_d)
        found["variance"] += np.outer(random_n + shared_n, squared_d)
        for place, shape_n in enumerate(shapes_sn):
            found["shapes"][place] += np.outer(shape_n, row_d)
        found["of_sums"] += random_n * along_n**2
        found["shared"] += shared_n * along_n**2
        found["along"] += np.outer(flushed_n, np.abs(row_d))

    def finished(self, tiles_n: FloatArray, model: _Model, in_p: bool) -> Fields:
        units, found = model.units, self.found
        additions_n1 = (tiles_n * (_CHUNK + 2))[:, None]
        value_nd = found["value"]
        found["alone"] = model.random(value_nd, self.squares_nd, additions_n1)
        found["variance"] += found["alone"]
        found["along"] += model.truncated(np.abs(value_nd), additions_n1)
        found["along"] += 4 * units.u * np.abs(value_nd) + units.flush * (additions_n1 + 2)
        found["across"] = model.truncated(4 * np.sqrt(self.squares_nd), additions_n1)
        if in_p:
            found["peaked"][:, 0] = self.light_n < 16 * units.u_stored * self.weight_n
        return found


def _backward(
    head: Head, scores: _Scores, out_me: FloatArray, lse_m: FloatArray,
    weights: Outputs[FloatArray], t: float, model: _Model, with_dlse: bool, dk: _KeySums,
    dv: _KeySums,
) -> Fields:  # fmt: skip
    """Returns the errors of dq of a head, row by row, and adds its terms of dk and dv."""
    units, numerics, u = model.units, model.numerics, model.units.u
    M, Dv = head.dout_me.shape
    found = _nothing(head.q_md, shapes=6)
    for m in range(M):
        seen_n = head.seen_mn[m]
        if not seen_n.any():
            continue
        here_n = seen_n.astype(np.float64)
        s_n, lse = scores.s_mn[m], lse_m[m]
        p_n = np.where(seen_n, np.exp(np.where(seen_n, s_n - lse, 0.0)), 0.0)
        systematic_n = scores.one_sided_mn[m] + 5 * u * np.abs(s_n) + units.u_exp
        of_lse = 3 * u * abs(lse)
        p_var_n = p_n**2 * (scores.variance_mn[m] + systematic_n**2)
        p_cast_n, p_random_n = model.window(
            p_n, p_var_n, p_n * (systematic_n + of_lse) + units.flush
        )
        # dP - delta
        products_ne = head.v_ne * head.dout_me[m]
        dp_n = np.where(seen_n, products_ne.sum(axis=1), 0.0)
        dp_squares_n = np.where(seen_n, (products_ne**2).sum(axis=1), 0.0)
        dp_cut_n = model.truncated(np.abs(dp_n) + 4 * np.sqrt(dp_squares_n), Dv)
        terms_e = head.stored_dout_me[m] * out_me[m]
        delta = terms_e.sum()
        delta_var = (terms_e**2).sum() + delta**2
        if with_dlse:
            delta = delta - head.dlse_m[m]
            delta_var += delta**2 + 16 * head.dlse_m[m] ** 2
        delta_var *= u**2 * (Dv + 4)
        gap_n = dp_n - delta
        gap_systematic_n = dp_cut_n + 3 * u * (np.abs(dp_n) + abs(delta))
        gap_var_n = model.random(dp_n, dp_squares_n, Dv) + gap_systematic_n**2
        # dS
        ds_n = p_n * gap_n
        ds_var_n = p_var_n * gap_n**2 + p_n**2 * gap_var_n
        flushed_n = units.flush * (1 + np.abs(dp_n) + abs(delta)) * here_n
        e_n = np.abs(ds_n) * (systematic_n + of_lse) + flushed_n
        e_n = e_n + p_n * (gap_systematic_n + _LIMIT * np.sqrt(delta_var))
        factor = 1.0
        if numerics.ds_scaled:
            factor = t
            e_n = e_n + 2 * u * np.abs(ds_n) + units.flush_op / min(t, 1.0)
        ds_cast_n, ds_random_n = model.window(ds_n * factor, ds_var_n * factor**2, e_n * factor)
        ds_cast_n, ds_random_n = ds_cast_n / factor * here_n, ds_random_n / factor**2 * here_n
        p_cast_n, p_random_n = p_cast_n * here_n, p_random_n * here_n
        by_score_n, by_gap_n = ds_n * systematic_n, p_n * gap_systematic_n
        dp_cut_off_n = model.cut_off(
            dp_n[None], dp_squares_n[None], head.dout_me[m : m + 1], head.v_ne
        )[0]
        shapes = [
            by_score_n, by_score_n * np.sign(s_n), ds_n * scores.cut_off_mn[m],
            by_gap_n, by_gap_n * np.sign(dp_n), p_n * dp_cut_off_n,
        ]  # fmt: skip
        # dq
        tk_nd = t * head.k_nd
        tiles = np.ceil(seen_n.sum() / numerics.block_n) + 1
        additions = (numerics.block_n + 2) * tiles
        value_d = ds_cast_n @ tk_nd
        squares_d = (ds_cast_n[:, None] ** 2 * tk_nd**2).sum(axis=0)
        by_delta_d = np.sqrt(delta_var) * (p_n @ tk_nd)
        w_d = weights.dq[m]
        found["value"][m], found["alone"][m] = value_d, model.random(value_d, squares_d, additions)
        found["variance"][m] = (ds_random_n[:, None] * tk_nd**2).sum(axis=0)
        found["variance"][m] += by_delta_d**2 + found["alone"][m]
        found["of_sums"][m] = (ds_random_n * (tk_nd @ w_d) ** 2).sum() + (w_d @ by_delta_d) ** 2
        for place, shape_n in enumerate(shapes):
            found["shapes"][place, m] = shape_n @ tk_nd
        found["along"][m] = model.truncated(np.abs(value_d), additions)
        found["along"][m] += (of_lse + 4 * u) * np.abs(value_d)
        found["along"][m] += flushed_n @ np.abs(tk_nd) + units.flush * (tiles + 2)
        found["across"][m] = model.truncated(4 * np.sqrt(squares_d), additions)
        # dk and dv
        tq_d = t * head.q_md[m]
        ds_shared_n = ds_n**2 * of_lse**2 + p_n**2 * delta_var
        dk.add(
            ds_cast_n, ds_random_n, ds_shared_n, [*shapes, ds_n * of_lse], flushed_n, tq_d,
            weights.dk @ tq_d,
        )  # fmt: skip
        ones_n = np.where(p_n < 1 - 16 * model.u_cast, 0.0, np.sqrt(p_random_n))
        by_p_n = p_n * systematic_n
        dv.add(
            p_cast_n, p_random_n, p_n**2 * of_lse**2,
            [by_p_n, by_p_n * np.sign(s_n), p_n * scores.cut_off_mn[m], p_n * of_lse, ones_n],
            units.flush * here_n, head.dout_me[m], weights.dv @ head.dout_me[m],
        )  # fmt: skip
        dv.weight_n += p_n
        dv.light_n += np.where(p_n < 0.5, p_n, 0.0)
    return found


def spreads(
    q: FloatArray,
    k: FloatArray,
    v: FloatArray,
    dout: FloatArray,
    *,
    out: FloatArray,
    lse: FloatArray,
    weights: Outputs[FloatArray],
    mask: Mask,
    sm_scale: float,
    in_dtype: str,
    numerics: Numerics,
    dlse: FloatArray | None = None,
) -> dict[str, Fields]:
    """Returns the errors of out and lse, and of dq, dk and dv given both, by output and ``FIELDS``.

    Args:
        q: (B, H, M, D) float64, with the values that the kernel was given.
        k: (B, Hk, N, D) float64, as q.
        v: (B, Hk, N, Dv) float64, as q.
        dout: (B, H, M, Dv) float64, as q.
        out: (B, H, M, Dv) float64, as the kernel returned it.
        lse: (B, H, M) float64, as the kernel returned it.
        weights: Weights of sums over a row or key, shaped as the outputs; lse is ignored.
        mask: The mask.
        sm_scale: Factor on q.k, > 0.
        in_dtype: "fp16", "bf16" or "fp32".
        numerics: The kernel's declared numerics.
        dlse: (B, H, M), if the kernel was given one.
    """
    model = _Model(in_dtype, numerics)
    (B, H, _, D), (Hk, N), Dv = q.shape, k.shape[1:3], v.shape[3]
    parts: dict[str, list[Fields]] = {name: [] for name in ("out", "lse", "dq", "dk", "dv")}
    passes = groups(q, k, v, dout, mask, sm_scale, dlse, None, None, None, model.tf32)
    for b, g, hs, heads in passes:
        dk, dv = _KeySums(7, N, D), _KeySums(5, N, Dv)
        tiles_n = np.zeros(N)
        for h, head in enumerate(heads, hs.start):
            scores = _Scores(head, sm_scale, model)
            of_head = Outputs(
                weights.out[b, h], weights.lse, weights.dq[b, h], weights.dk[b, g], weights.dv[b, g]
            )
            live_m: BoolArray = np.any(head.seen_mn, axis=1)
            out_me = np.where(live_m[:, None], out[b, h], 0.0)
            lse_m = np.where(live_m, lse[b, h], 0.0)
            tiles_n += seen_tiles(head.seen_mn.T, _CHUNK)
            of_out, of_lse = _forward(head, scores, of_head.out, sm_scale, model, not mask.is_plain)
            of_dq = _backward(
                head, scores, out_me, lse_m, of_head, sm_scale, model, dlse is not None, dk, dv
            )
            parts["out"].append(of_out)
            parts["lse"].append(of_lse)
            parts["dq"].append(of_dq)
        parts["dk"].append(dk.finished(tiles_n, model, in_p=False))
        parts["dv"].append(dv.finished(tiles_n, model, in_p=True))
    found = {}
    for name, of_heads in parts.items():
        heads_of = (B, Hk if name in ("dk", "dv") else H)
        found[name] = {
            field: _joined([x[field] for x in of_heads], heads_of, field == "shapes")
            for field in FIELDS
        }
    return found


def _joined(parts: list[FloatArray], heads: tuple[int, int], shapes: bool) -> FloatArray:
    """Joins the results of heads; the axis of shapes stays the first."""
    joined = np.stack(parts, axis=1 if shapes else 0)
    lead = joined.shape[:1] if shapes else ()
    return joined.reshape(*lead, *heads, *joined.shape[len(lead) + 1 :])
