"""The error bound of every element of every output, derived from the inputs.

No tolerance is tuned. A bound is the sum of the errors from roundings, from the approximate exp and
log, and from underflow, along the steps of a kernel like FlashAttention-2.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.nn.functional import pad

from fa_verify.oracles.bounds.backward import (
    QUERY_TILE,
    Backward,
    KeySums,
    add_keys,
    backward_error,
    read_of,
    terms_of,
)
from fa_verify.oracles.bounds.constants import Constants, constants
from fa_verify.oracles.bounds.forward import Chunk, Forward, added_up, forward_error, joined
from fa_verify.oracles.bounds.replay import SEGMENT, Format, lost_of_running
from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.outputs import Numerics, Outputs
from fa_verify.oracles.reference.score_mods import Additions
from fa_verify.oracles.reference.torch_reference import (
    DenseMask,
    RowMasks,
    chunk_height,
    row_chunks,
    sinks_of_rows,
)

__all__ = ["EXACT_SPREAD", "Judgement", "chunks", "finish_dq", "finish_keys", "gather", "judge"]

EXACT_SPREAD = 2**28  # largest M * N * Dv for which |v - out| is formed element by element
_LARGEST_LSE = 1e5
# Largest terms of a score: a rounding of larger ones exceeds the error that an exponent may have.
_LARGEST_TERMS = 1e7


@dataclass(frozen=True)
class Judgement:
    """The errors that a correct kernel may have on a problem.

    Args:
        bound: Largest error of each element of each output.
        terms: Sum of |terms| of each element.
        max_score: The largest |score| of a visible pair, or the largest sum of |terms| if terms are
            added to scores. Sinks that weigh anything count.
        out_of_range: None, or a sentence on the first range condition that fails. No accuracy is
            promised if one fails. One fails if a bound of out or of a gradient is not finite.
        largest_lse_bound: The largest bound of lse, which no range condition reads.
    """

    bound: Outputs[torch.Tensor]
    terms: Outputs[torch.Tensor]
    max_score: float
    out_of_range: str | None
    largest_lse_bound: float


class _Rows(NamedTuple):
    """The bounds and terms of a chunk's rows, (Z, R, ...)."""

    bound_out: torch.Tensor
    bound_lse: torch.Tensor
    bound_dq: torch.Tensor
    terms_out: torch.Tensor
    terms_lse: torch.Tensor
    terms_dq: torch.Tensor


class _Keys(NamedTuple):
    """The gradients of keys over all rows and their bounds, (B * Hk, N, D or Dv)."""

    dk: torch.Tensor
    dv: torch.Tensor
    bound_dk: torch.Tensor
    bound_dv: torch.Tensor


class _Part(NamedTuple):
    """The results of a chunk that are kept."""

    rows: _Rows
    keys: KeySums
    terms: tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # dk, dv, and the reach of dk
    peaks: torch.Tensor


def gather(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    seen: torch.Tensor,
    added: tuple[torch.Tensor, ...],
    any_order: bool,
    operands: Format | None = None,
    sink: torch.Tensor | None = None,
) -> Chunk:
    """Returns the inputs of a chunk of rows in float64, with a group's heads folded into rows.

    Args:
        q: (B, H, R, D), the rows of the chunk.
        k: (B, Hk, N, D).
        v: (B, Hk, N, Dv).
        dout: (B, H, R, Dv).
        dlse: (B, H, R), or None.
        seen: Bool (B or 1, H or 1, R, N).
        added: Terms that are added to scores, (B, H, R, N) each.
        any_order: Whether a kernel may visit the key tiles of a row in any order.
        operands: The format that dots convert their operands to, if that is replayed.
        sink: (B, H, R), the sinks of the rows, if there are any.
    """

    def whole(x: torch.Tensor) -> torch.Tensor:
        # Contiguous, so that folding heads into rows copies nothing.
        return x.to(torch.float64, memory_format=torch.contiguous_format)

    def read(x: torch.Tensor) -> torch.Tensor:
        return whole(x) if operands is None else operands.rounded(whole(x))

    (B, H, M, D), (Hk, N) = q.shape, k.shape[1:3]
    Z, R = B * Hk, H // Hk * M
    seen = seen.expand(B, H, M, N)
    tiled = pad(seen, (0, 0, 0, -M % QUERY_TILE)).reshape(Z, -1, QUERY_TILE, N)
    query_tiles = tiled.any(2).sum(1, dtype=torch.float64)
    seen = seen.reshape(Z, R, N)
    empty = ~seen.any(2)
    # Rows and keys without a visible pair may hold NaN.
    unread, unseen = empty.unsqueeze(2), (query_tiles == 0).unsqueeze(2)
    stored_dout = whole(dout).reshape(Z, R, -1).masked_fill(unread, 0.0)
    hidden = ~seen
    return Chunk(
        q=read(q).reshape(Z, R, D).masked_fill(unread, 0.0),
        k=read(k).reshape(Z, N, D).masked_fill(unseen, 0.0),
        v=read(v).reshape(Z, N, -1).masked_fill(unseen, 0.0),
        dout=stored_dout if operands is None else operands.rounded(stored_dout),
        stored_dout=stored_dout,
        dlse=None if dlse is None else dlse.to(torch.float64).reshape(Z, R).masked_fill(empty, 0.0),
        seen=seen,
        hidden=hidden,
        empty=empty,
        query_tiles=query_tiles,
        added=tuple(x.reshape(Z, R, N).masked_fill(hidden, 0.0) for x in added),
        any_order=any_order,
        one_head=H == Hk,
        sink=None if sink is None else sink.reshape(Z, R),
    )


def _finish(bound: torch.Tensor, value: torch.Tensor, u: float, eta: float) -> torch.Tensor:
    """Adds the last rounding to a bound: B + u (|value| + B) + eta."""
    if u:
        bound = torch.add(bound, value.abs().add_(bound), alpha=u)
    return bound + eta


def _store(
    value: torch.Tensor, bound: torch.Tensor, u: float, c: Constants, stored: Format | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a gradient and its bound once it is rounded to its dtype.

    ``u`` is the error of the operations before. With ``stored`` the rounding is replayed.
    """
    if stored is None:
        return value, _finish(bound, value, c.u_in + u, c.eta_in)
    # Sums of subnormal numbers err by up to FTZ, however small their terms are.
    return stored.between(value, _finish(bound, value, u, c.ftz))


def finish_dq(
    x: Chunk, bwd: Backward, c: Constants, numerics: Numerics, stored: Format | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a chunk's dq and its bound, rounded to its dtype; empty rows are exact."""
    if "dq" in numerics.rounded_sums:
        tiles = bwd.tiles.unsqueeze(2)
        dq, bound = bwd.dq, c.in_memory(bwd.dq_bound, bwd.dq_products, tiles, 4 * c.u)
    else:
        dq, bound = _store(bwd.dq, bwd.dq_bound, 4 * c.u, c, stored)
    return dq, (c.times * bound).masked_fill_(x.empty.unsqueeze(2), 0.0)


def _finish_rows(
    x: Chunk, fwd: Forward, bwd: Backward, dq_terms: torch.Tensor, c: Constants, numerics: Numerics
) -> _Rows:
    """Returns bounds and terms of a chunk's rows; empty rows are exact."""
    empty = x.empty.unsqueeze(2)
    scores = fwd.scores
    return _Rows(
        bound_out=(c.times * fwd.out_bound).masked_fill_(empty, 0.0),
        bound_lse=(c.times * fwd.lse_bound).masked_fill_(x.blank, 0.0),
        bound_dq=finish_dq(x, bwd, c, numerics)[1],
        terms_out=fwd.out_terms,
        terms_lse=1 + scores.m.abs() + scores.log_l.abs(),
        terms_dq=dq_terms,
    )


def _by_group(x: torch.Tensor, heads: int) -> torch.Tensor:
    """Splits the first axis into groups of heads: (groups, heads, ...)."""
    return x.view(-1, heads, *x.shape[1:])


def finish_keys(
    sums: KeySums, sm_scale: float, c: Constants, apart: int, numerics: Numerics,
    stored: Format | None = None,
) -> _Keys:  # fmt: skip
    """Returns dk and dv with their bounds.

    ``apart`` is 1 if one chain of additions runs through a group's heads. Otherwise it is the
    number of heads whose rounded gradients are added; Z then counts query heads. Each of the
    ``apart - 1`` additions rounds to the dtype, so each loses u_in of a partial sum, and eta_in if
    it underflows. With ``stored`` the one rounding to the dtype is replayed. Sums of tiles in
    memory have no rounding after their last addition.
    """
    per_product = (c.g(QUERY_TILE * sums.query_tiles + 2) * (1 + c.u_cast)).unsqueeze(2)
    tiles = sums.query_tiles.unsqueeze(2)
    unseen = tiles == 0
    finished = []
    for name, value, errors, products, running, u, factor in (
        ("dk", sums.dk, sums.dk_errors, sums.dk_products, sums.dk_running, 4 * c.u, sm_scale),
        ("dv", sums.dv, sums.dv_errors, sums.dv_products, sums.dv_running, 0.0, 1.0),
    ):
        added = per_product * products
        if running is not None:
            lost = lost_of_running(
                value, running, errors, products, count=sums.additions, tile=QUERY_TILE,
                hu=c.h * c.u,
            )  # fmt: skip
            added = torch.minimum(added, lost.mul_(1 + c.u_cast))
        once = None if apart > 1 else stored
        bound = errors + added
        if c.eta_op:
            bound += c.eta_op * (max(1.0, sm_scale) * tiles + 1)
        if name in numerics.rounded_sums:
            bound = c.in_memory(bound, products, tiles, u)
        else:
            if name in numerics.atomic:
                bound += 2 * c.ftz * max(1.0, factor) * tiles
            value, bound = _store(value, bound, u, c, once)
        bound.masked_fill_(unseen, 0.0)
        if apart > 1:
            added = c.u_in * apart * _by_group(value.abs() + bound, apart).sum(1)
            added += (apart - 1) * c.eta_in
            added.masked_fill_(_by_group(unseen, apart).all(1), 0.0)
            bound = _by_group(bound, apart).sum(1) + added
            value = _by_group(value, apart).sum(1)
        finished.append((value, bound.mul_(c.times)))
    (dk, bound_dk), (dv, bound_dv) = finished
    return _Keys(dk, dv, bound_dk, bound_dv)


def _row_peaks(
    x: Chunk, fwd: Forward, bwd: Backward, dq_reach: torch.Tensor, rows: _Rows, factor: float
) -> torch.Tensor:
    """Returns the largest |s| of a chunk, and those of the range conditions and of lse's bound.

    ``factor`` is that of dS before it is multiplied by the slope of a softcap.
    """
    scores, capped = fwd.scores, bwd.grads.capped
    unnormalised = fwd.out_terms * (scores.log_l + scores.lag).exp().unsqueeze(2)
    largest = scores.parts
    if x.sink is not None and scores.sink is not None:
        of_sinks = x.sink.abs().masked_fill_(scores.sink.p == 0, 0.0)
        largest = torch.maximum(largest.amax(2), of_sinks)
    peaks = (
        largest,
        scores.reach,
        capped.dp_reach,
        dq_reach,
        unnormalised,
        bwd.grads.reach,
        factor * (capped.ds.abs() + capped.error),
        fwd.out.abs() + rows.bound_out,
        bwd.dq.abs() + rows.bound_dq,
        scores.lse.abs(),
        rows.bound_lse,
    )
    return torch.stack([peak.amax() for peak in peaks])


def _judge_chunk(
    x: Chunk, t: float, c: Constants, numerics: Numerics, exact: bool, softcap: float | None
) -> _Part:
    """Runs both passes over a chunk and returns the results to keep."""
    fwd = forward_error(x, sm_scale=t, c=c, numerics=numerics, exact_spread=exact, softcap=softcap)
    read = read_of(fwd, c)
    bwd = backward_error(x, read, sm_scale=t, c=c, numerics=numerics)
    terms = terms_of(x, read, bwd.grads, t, numerics.softcap_slope)
    rows = _finish_rows(x, fwd, bwd, terms.dq, c, numerics)
    # Automatic differentiation multiplies dS by the softcap before it divides by it.
    factor = softcap if softcap is not None and numerics.softcap_slope == "difference" else 0.0
    peaks = _row_peaks(x, fwd, bwd, terms.dq_reach, rows, factor)
    return _Part(rows, bwd.keys, (terms.dk, terms.dv, terms.dk_reach), peaks)


def _range(peaks: list[float], key_peaks: list[float], c: Constants) -> str | None:
    """Returns a sentence on the first range condition that fails, or None."""
    reach, dp, dq, values, ds, softcapped, out, dq_stored, lse = peaks
    dk, dk_stored, dv_stored = key_peaks
    for name, value, limit in (
        ("|q|.|k|", reach, c.max_acc),
        ("|dout|.|v|", dp, c.max_acc),
        ("sum_j |dS||K|", dq, c.max_acc),
        ("sum_i |dS||Q|", dk, c.max_acc),
        ("the sum of unnormalised P|v|", values, c.max_acc),
        ("|dS| + its error", ds, c.max_p),
        ("the softcap times |dS| + its error", softcapped, c.max_acc),
        ("|out| + bound", out, c.max_in),
        ("|dq| + bound", dq_stored, c.max_in),
        ("|dk| + bound", dk_stored, c.max_in),
        ("|dv| + bound", dv_stored, c.max_in),
        ("|lse|", lse, _LARGEST_LSE),
    ):
        if not value <= limit:  # NaN fails
            return f"{name} reaches {value:.6g}; needs to be at most {limit:.6g}"
    return None


def _range_of_terms(largest: float) -> str | None:
    """Returns a sentence if the terms of a score are too large, or None."""
    if largest <= _LARGEST_TERMS:
        return None
    return (
        f"the sum of a score's |terms| reaches {largest:.6g}; needs to be at most "
        f"{_LARGEST_TERMS:.6g}"
    )


def _all_exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Judgement:
    """Returns the judgement of a problem with a size of 0, where every output is exact."""
    shapes = ((*q.shape[:3], v.shape[3]), q.shape[:3], q.shape, k.shape, v.shape)
    bound, terms = (
        Outputs(*(torch.zeros(shape, dtype=torch.float64, device=q.device) for shape in shapes))
        for _ in range(2)
    )
    terms.lse.fill_(1.0)
    return Judgement(bound, terms, 0.0, None, 0.0)


def _without_keys(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor, sinks: torch.Tensor,
    mask: DenseMask, **options: Any,
) -> Judgement:  # fmt: skip
    """Returns the judgement of a problem with N = 0 and sinks: that of one key that nobody sees."""
    (B, _, M, _), Hk = q.shape, k.shape[1]
    k, v = (x.new_zeros((B, Hk, 1, x.shape[3])) for x in (k, v))
    rows = mask.lengths(B, M, 0)[0] if hasattr(mask, "lengths") else None
    hidden = Mask(seqlens_q=rows, seqlens_k=(0,) * B)
    found = judge(q, k, v, dout, sinks=sinks, mask=hidden, **options)
    bound, terms = (
        x._replace(dk=x.dk[:, :, :0], dv=x.dv[:, :, :0]) for x in (found.bound, found.terms)
    )
    return dataclasses.replace(found, bound=bound, terms=terms)


def chunks(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
    bias: torch.Tensor | None,
    sinks: torch.Tensor | None,
    *,
    mask: DenseMask,
    apart: int,
    rows: int | None,
    tile: int,
    operands: Format | None = None,
) -> Iterator[tuple[slice, Chunk]]:
    """Yields the rows of each chunk and its inputs; the arguments are those of ``judge``.

    ``apart`` is the number of copies of each key/value head: that of heads whose gradients are
    rounded before they are added. ``tile`` is the width of a key tile. ``operands`` is that of
    ``gather``.
    """
    q, k, v, dout = (x.detach() for x in (q, k, v, dout))
    if apart > 1:
        k, v = (x.repeat_interleave(apart, dim=1) for x in (k, v))
    (B, H, M, _), N = q.shape, k.shape[2]
    masks = RowMasks(mask, B, H, M, N, q.device)
    additions = Additions(mask, (B, H, M, N), q.device, alibi_slopes, bias)
    blocks = row_chunks(
        masks, chunk_height(rows, B, H, N), row_step=QUERY_TILE, key_step=math.lcm(tile, SEGMENT)
    )
    for here, keys in blocks:
        of_lse = None if dlse is None else dlse[:, :, here].detach()
        seen = masks.between(here.start, here.stop, keys)
        added = additions.between(here.start, here.stop, keys)
        sink = None if sinks is None else sinks_of_rows(sinks.detach(), mask, (B, H, M, N), here)
        chunk = gather(
            q[:, :, here],
            k[:, :, keys],
            v[:, :, keys],
            dout[:, :, here],
            of_lse,
            seen,
            added,
            masks.has_predicate,
            operands,
            sink,
        )
        yield here, chunk._replace(around=(keys.start, N - keys.stop))


def judge(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
    dlse: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    *,
    mask: DenseMask,
    sm_scale: float,
    in_dtype: str,
    numerics: Numerics,
    softcap: float | None = None,
    rows: int | None = None,
    p_factor: float = 1.0,
) -> Judgement:
    """Returns the bound of every element of every output, its sum of |terms|, and the range check.

    If ``out_of_range`` is None, a correct kernel's result lies within ``bound`` of the float64
    reference. The bound is 0 where every rounding is exact: for rows without a visible key, and for
    keys that no row sees. Padding may hold anything.

    Args:
        q: (B, H, M, D), the kernel's inputs, any float dtype and strides.
        k: (B, Hk, N, D). In another dtype than q, it is dequantised; see ``constants``.
        v: (B, Hk, N, Dv), as k.
        dout: (B, H, M, Dv).
        dlse: (B, H, M), the gradient of lse, if the kernel was given one.
        alibi_slopes: (H,) or (B, H), if the kernel was given them.
        bias: (B or 1, H or 1, M or 1, N or 1), if the kernel was given one; ``bias_error`` bounds
            its gradient.
        sinks: (H,), if the kernel was given them; ``sink_error`` bounds their gradient.
        mask: The mask.
        sm_scale: Factor on q.k, > 0.
        in_dtype: "fp16", "bf16", "fp32" or "fp64": the dtype the kernel reads and writes.
        numerics: The subject's declared numerics.
        softcap: c of scores c tanh(sm_scale q.k / c), > 0; None without a softcap.
        rows: Height of a chunk, rounded up to a multiple of 16, and more where its rows see few
            keys; None limits its memory.
        p_factor: The least factor, at most 1, on P before its cast: a scale of values. An underflow
            then loses as much more of P.

    Returns:
        Float64 tensors on q's device.

    Raises:
        ValueError: in_dtype is unknown or rows is less than 1.

    Numerics: all float64. The error of the scores is weighted by |v - out| if M N Dv <= 2**28, and
    by the larger |v| + |out|, which takes two GEMMs, otherwise.

    Source: Higham, Accuracy and Stability of Numerical Algorithms, chapter 3; Blanchard, Higham,
    Higham 2021 (doi 10.1093/imanum/draa038); the algorithm is FlashAttention-2's
    (arXiv:2307.08691).
    """
    c = constants(in_dtype, numerics, dequantised=not q.dtype == k.dtype == v.dtype)
    c = dataclasses.replace(c, p_factor=p_factor)
    (B, H, M, _), (Hk, N) = q.shape, k.shape[1:3]
    if N == 0 < B * M and sinks is not None:
        return _without_keys(
            q, k, v, dout, sinks, mask, sm_scale=sm_scale, in_dtype=in_dtype, numerics=numerics
        )
    if 0 in (B, M, N):
        return _all_exact(q, k, v)
    apart = H // Hk if numerics.group_sum == "dtype" else 1
    exact_spread = M * N * v.shape[3] <= EXACT_SPREAD
    given = (q, k, v, dout, dlse, alibi_slopes, bias, sinks)
    parts: list[_Rows] = []
    peaks: list[torch.Tensor] = []
    sums: KeySums | None = None
    of_terms: tuple[torch.Tensor | None, ...] = (None, None, None)
    for _, chunk in chunks(*given, mask=mask, apart=apart, rows=rows, tile=numerics.block_n):
        part = _judge_chunk(chunk, sm_scale, c, numerics, exact_spread, softcap)
        parts.append(_Rows(*(x.view(B, H, -1, *x.shape[2:]) for x in part.rows)))
        peaks.append(part.peaks)
        sums = add_keys(sums, part.keys, chunk)
        of_terms = tuple(
            added_up(total, x, 1, chunk.around)
            for total, x in zip(of_terms, part.terms, strict=True)
        )
    assert sums is not None  # M > 0
    of_rows = _Rows(*(joined(pieces, 2) for pieces in zip(*parts, strict=True)))
    dk, dv, *bounds = finish_keys(sums, sm_scale, c, apart, numerics)
    *terms, dk_reach = (x for x in of_terms if x is not None)
    of_keys = (dk_reach, dk.abs() + bounds[0], dv.abs() + bounds[1])
    # One transfer: a small problem spends most of its time on waiting for the GPU.
    largest = [torch.stack(peaks).amax(0), *(x.amax().view(1) for x in of_keys)]
    max_score, *of_all = torch.cat(largest).tolist()
    *row_peaks, largest_lse_bound = of_all[: -len(of_keys)]
    key_peaks = of_all[-len(of_keys) :]
    if apart > 1:
        terms = [_by_group(x, apart).sum(1) for x in terms]
    bound_dk, bound_dv, terms_dk, terms_dv = (x.view(B, Hk, N, -1) for x in (*bounds, *terms))
    return Judgement(
        bound=Outputs(of_rows.bound_out, of_rows.bound_lse, of_rows.bound_dq, bound_dk, bound_dv),
        terms=Outputs(of_rows.terms_out, of_rows.terms_lse, of_rows.terms_dq, terms_dk, terms_dv),
        max_score=max_score,
        out_of_range=_range(row_peaks, key_peaks, c)
        or _range_of_terms(0.0 if alibi_slopes is None and bias is None else max_score),
        largest_lse_bound=largest_lse_bound,
    )
