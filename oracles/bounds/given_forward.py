"""The backward given the forward's own results: dq, dk, dv, dbias and the bounds of their errors.

A FlashAttention-2 backward reads out and lse as the forward stored them. Their errors are known in
a run. With L and out as returned, and f the slope of a softcap::

    P = exp(s - L)    D = sum_d dout out - dlse    dS = P (dP - D) f
    dq = t dS K       dk = t dS' Q                 dv = P' dout

in float64, where P need not sum to 1. A correct kernel differs from these by the roundings of its
backward alone. The bound is that of ``backward_error`` with B_out = 0 and, in place of F::

    F0 = (error of dots, prescaling, softcap and added terms) + 5u |s| + 3u |L| + u_exp

No maximum enters the exponent: F0 has no rescales R u_exp, no 3u |s - m| and no lag. The roundings
of s log2(e) and of its difference to L log2(e) are 5u |s|. Those of L are 3u |L|: the product, the
constant and the difference. A kernel that keeps L in base 2 multiplies it by ln 2 where it returns
it, which 3u |L| covers as well. A kernel that keeps the maximum m and the sum l errs further by
(u_log + 3u)(1 + |ln l| + r) + u |L|: by m + ln l in what it returns, and by s - m and the division
by l in P. A gradient of lse that passes through base 2 errs by 3u |dlse|.

If the conversion of the operands of TF32 dots is declared, q, k, v and dout are converted before
all of these steps. Only delta reads dout as it is stored.

Casts to 16 bits, casts to TF32 and the last rounding are replayed, and sums over consecutive tiles
are bounded by their running sums (``replay``). dq, dk and dv are then the middle of what a correct
kernel may store, and their bounds half the width of it.

Both bounds, of the forward and of the backward given it, imply the bound of the whole. With B the
bound of lse::

    exp(B) (exp(F0) - 1) + (exp(B) - 1) = exp(B + F0) - 1

The true dS differs from this dS by at most p [(exp(B) - 1) |dP - D| + exp(B) |dout|.B_out]. So the
distance of these gradients from the true ones, plus the bound around them, is at most the bound of
``error_model.judge``. Three terms may exceed it: 3u B in the exponent, because 3u |L| reads the
returned lse; FTZ |dout|.B_out in e, because FTZ |D| reads the returned out; and 3u |dlse|.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from fa_verify.oracles.bounds.backward import KeySums, Read, add_keys, backward_error, read_of
from fa_verify.oracles.bounds.constants import Constants, constants
from fa_verify.oracles.bounds.error_model import EXACT_SPREAD, chunks, finish_dq, finish_keys
from fa_verify.oracles.bounds.forward import (
    Chunk,
    forward_error,
    joined,
    live_tiles,
    logits,
    put_off,
)
from fa_verify.oracles.bounds.replay import operand_format, stored_format
from fa_verify.oracles.outputs import Numerics
from fa_verify.oracles.reference.torch_reference import DenseMask

__all__ = ["Gradients", "Returned", "given_forward", "read_given", "returned", "row_error"]

_DLSE_ROUNDINGS = 4  # its subtraction, and 3u |dlse| through base 2


class Returned(NamedTuple):
    """The results of a forward pass that its backward reads; None where it reads none."""

    out: torch.Tensor | None  # (B, H, M, Dv)
    lse: torch.Tensor | None  # (B, H, M), natural

    def rows(self, here: slice) -> Returned:
        """Returns the results of a chunk of rows."""
        return Returned(*(None if x is None else x[:, :, here] for x in self))


class Gradients(NamedTuple):
    """dq, dk and dv given the forward, with their bounds, shaped as q, k and v."""

    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor
    dq_bound: torch.Tensor
    dk_bound: torch.Tensor
    dv_bound: torch.Tensor


def returned(out: torch.Tensor, lse: torch.Tensor | None, numerics: Numerics) -> Returned:
    """Returns the outputs that the backward reads as they were returned."""
    reads = numerics.backward_reads
    return Returned(
        out.detach() if "out" in reads else None,
        lse.detach() if lse is not None and {"lse", "m_and_l"} & {*reads} else None,
    )


def row_error(
    x: Chunk, s: torch.Tensor, lse: torch.Tensor, c: Constants, numerics: Numerics,
    tiles: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """Returns the terms of F0 that all keys of a row share, (Z, R); ``lse`` is (Z, R)."""
    per_row = 3 * c.u * lse.abs() + c.u_exp
    if "m_and_l" in numerics.backward_reads:
        m = s.masked_fill(x.hidden, -math.inf).amax(2)
        if x.sink is not None:
            m = torch.maximum(m, x.sink)
        m = m.masked_fill_(x.blank, 0.0)
        spread = 1 + (lse - m).abs() + put_off(tiles + x.sink_there, numerics)
        per_row = per_row + (c.u_log + 3 * c.u) * spread + c.u * lse.abs()
    return per_row


def read_given(
    x: Chunk,
    given: Returned,
    *,
    sm_scale: float,
    c: Constants,
    numerics: Numerics,
    exact_spread: bool,
    softcap: float | None,
) -> Read:
    """Returns the results of a forward pass: as returned if given, else true with their errors.

    Args:
        x: The chunk.
        given: Results of the chunk's rows.
        sm_scale: Factor on q.k.
        c: The constants of the bound.
        numerics: The kernel's declared numerics.
        exact_spread: As in ``forward_error``.
        softcap: As in ``reference.attention``.
    """
    Z, R = x.empty.shape
    fwd = None
    if given.out is None or given.lse is None:
        fwd = forward_error(
            x, sm_scale=sm_scale, c=c, numerics=numerics, exact_spread=exact_spread, softcap=softcap
        )
    if given.out is None:
        assert fwd is not None
        out, out_bound = fwd.out, fwd.out_bound
    else:
        out = given.out.to(torch.float64).reshape(Z, R, -1)
        out = out.masked_fill(x.empty.unsqueeze(2), 0.0)
        out_bound = torch.zeros_like(out)
    if given.lse is None:
        assert fwd is not None
        read = read_of(fwd, c)
        return read._replace(out=out, out_bound=out_bound, dlse_roundings=_DLSE_ROUNDINGS)
    s, _, error, slope, slope_error, size, _ = logits(x, sm_scale, c, numerics, softcap)
    lse = given.lse.to(torch.float64).reshape(Z, R).masked_fill(x.empty, 0.0)
    tiles = live_tiles(x, numerics.block_n).sum(2, dtype=torch.float64)
    p = (s - lse.unsqueeze(2)).exp_().masked_fill_(x.hidden, 0.0)
    per_row = row_error(x, s, lse, c, numerics, tiles).unsqueeze(2)
    exponent_error = error.add_(size, alpha=5 * c.u).add_(per_row)
    return Read(p, exponent_error, out, out_bound, tiles, slope, slope_error, _DLSE_ROUNDINGS)


def given_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
    dlse: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    *,
    given: Returned,
    mask: DenseMask,
    sm_scale: float,
    in_dtype: str,
    numerics: Numerics,
    softcap: float | None = None,
    rows: int | None = None,
) -> Gradients:
    """Returns dq, dk and dv of a backward that reads ``given``, and the bounds of their errors.

    The bounds are finite if the forward lies within its own bound on a problem in range. The other
    arguments are those of ``error_model.judge``.

    Source: the steps of FlashAttention-2 (arXiv:2307.08691), algorithm 2.
    """
    operands, stored = operand_format(in_dtype, numerics), stored_format(in_dtype)
    c = constants(in_dtype, numerics, replayed=operands is not None)
    (B, H, M, _), (Hk, N) = q.shape, k.shape[1:3]
    if 0 in (B, M, N):
        return Gradients(*(torch.zeros_like(x, dtype=torch.float64) for x in (q, k, v) * 2))
    apart = H // Hk if numerics.group_sum == "dtype" else 1
    exact_spread = M * N * v.shape[3] <= EXACT_SPREAD
    inputs = (q, k, v, dout, dlse, alibi_slopes, bias, sinks)
    of_rows: list[tuple[torch.Tensor, torch.Tensor]] = []
    sums: KeySums | None = None
    blocks = chunks(
        *inputs, mask=mask, apart=apart, rows=rows, tile=numerics.block_n, operands=operands
    )
    for here, x in blocks:
        read = read_given(
            x, given.rows(here), sm_scale=sm_scale, c=c, numerics=numerics,
            exact_spread=exact_spread, softcap=softcap,
        )  # fmt: skip
        bwd = backward_error(
            x, read, sm_scale=sm_scale, c=c, numerics=numerics, in_dtype=in_dtype, before=sums
        )
        dq, bound = (y.view(B, H, -1, y.shape[2]) for y in finish_dq(x, bwd, c, numerics, stored))
        of_rows.append((dq, bound))
        sums = add_keys(sums, bwd.keys, x)
    assert sums is not None  # M > 0
    dq, dq_bound = (joined(parts, 2) for parts in zip(*of_rows, strict=True))
    keys = finish_keys(sums, sm_scale, c, apart, numerics, stored)
    dk, dv, dk_bound, dv_bound = (
        y.view(B, Hk, N, -1) for y in (keys.dk, keys.dv, keys.bound_dk, keys.bound_dv)
    )
    return Gradients(dq, dk, dv, dq_bound, dk_bound, dv_bound)
