"""The error bound of the gradient of sinks."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from fa_verify.oracles.bounds.backward import read_of, score_gradient
from fa_verify.oracles.bounds.constants import Constants, constants
from fa_verify.oracles.bounds.error_model import EXACT_SPREAD, chunks
from fa_verify.oracles.bounds.forward import Chunk, Forward, forward_error
from fa_verify.oracles.bounds.given_forward import Returned, read_given, row_error
from fa_verify.oracles.outputs import Numerics
from fa_verify.oracles.reference.torch_reference import DenseMask

__all__ = ["SinkBound", "sink_error"]


class SinkBound(NamedTuple):
    """The bound of each element of dsinks, float64 (H,)."""

    dsinks: torch.Tensor  # the exact gradient, or that given a forward
    bound: torch.Tensor
    terms: torch.Tensor  # the sum of |terms| of each element


def _weights(
    x: Chunk,
    fwd: Forward,
    lse: torch.Tensor | None,
    c: Constants,
    numerics: Numerics,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns P of the sink and the error of its exponent, (Z, R), from ``lse`` or the true one."""
    scores = fwd.scores
    assert x.sink is not None
    assert scores.sink is not None
    if lse is None:
        p, true_lse = scores.sink.p, scores.lse
        error = scores.sink.error + fwd.lse_bound + 3 * c.u * (x.sink.abs() + true_lse.abs())
        error += c.u_exp
    else:
        lse = lse.to(torch.float64).reshape(x.empty.shape).masked_fill(x.blank, 0.0)
        p = (x.sink - lse).exp()
        error = 5 * c.u * x.sink.abs() + row_error(x, scores.s, lse, c, numerics, scores.tiles)
    return p, error.masked_fill(p == 0, 0.0)


def sink_error(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
    bias: torch.Tensor | None,
    sinks: torch.Tensor,
    *,
    mask: DenseMask,
    sm_scale: float,
    in_dtype: str,
    numerics: Numerics,
    softcap: float | None = None,
    given: Returned | None = None,
    rows: int | None = None,
) -> SinkBound:
    """Returns the largest error of a correct kernel's dsinks against ``reference.sink_gradient``.

    A sink is one more key with v = 0: its dS is -P D, where D is delta. F is the error of the
    exponent of P, which is that of any key, E_sink + B_lse + 3u (|s| + |L|) + u_exp. Sums run over
    the n valid rows of a head, in any order. e is the error of dS before any cast, and the result
    is float32::

        B = sum e + gamma(n + 2) sum (|dS| + e);  B + u (|dsinks| + B) + FTZ

    If ``given`` holds the forward's results that the backward reads, the gradient and the error are
    those given the forward; F is then 5u |s| + 3u |L| + u_exp.

    The other arguments are those of ``error_model.judge``. N is at least 1.
    """
    c, stored = constants(in_dtype, numerics), constants("fp32", Numerics())
    (B, H, M, _), N = q.shape, k.shape[2]
    found = [torch.zeros(H, dtype=torch.float64, device=q.device) for _ in range(5)]
    inputs = (q, k, v, dout, dlse, alibi_slopes, bias, sinks)
    blocks = (
        chunks(*inputs, mask=mask, apart=1, rows=rows, tile=numerics.block_n)
        if 0 not in (B, M, N)
        else ()
    )
    options: dict[str, Any] = {
        "sm_scale": sm_scale, "c": c, "numerics": numerics, "softcap": softcap,
        "exact_spread": M * N * v.shape[3] <= EXACT_SPREAD,
    }  # fmt: skip
    for here, x in blocks:
        fwd = forward_error(x, **options)
        read, lse = read_of(fwd, c), None
        if given is not None:
            read, lse = read_given(x, given.rows(here), **options), given.rows(here).lse
        p, error = _weights(x, fwd, lse, c, numerics)
        of_lse = None
        if dlse is not None:
            of_lse = dlse[:, :, here].to(torch.float64).reshape(x.empty.shape)
            of_lse = of_lse.masked_fill(x.blank, 0.0)
        # The sink as the only key of the chunk. Its dP is exactly 0.
        there = x.sink_there.bool().unsqueeze(2)
        value = x.v.new_zeros((x.v.shape[0], 1, x.v.shape[2]))
        key = x._replace(
            v=value, dout=torch.zeros_like(x.dout), seen=there, hidden=~there, dlse=of_lse
        )
        of_key = read._replace(
            p=p.unsqueeze(2), exponent_error=error.unsqueeze(2),
            out_bound=read.out_bound.masked_fill(x.empty.unsqueeze(2), 0.0),
        )  # fmt: skip
        gradient = score_gradient(key, of_key, c, p_rounded=False)
        parts = (
            gradient.ds, gradient.error, gradient.ds.abs() + gradient.error, gradient.terms,
            key.seen.to(torch.float64),
        )  # fmt: skip
        for total, part in zip(found, parts, strict=True):
            total += part.view(B, H, -1).sum((0, 2))
    ds, error, reach, terms, count = found
    bound = error + c.gamma(count + 2) * reach + c.eta_op * count
    bound = bound + stored.u_in * (ds.abs() + bound) + stored.eta_in
    bound = (c.times * bound).masked_fill_(count == 0, 0.0)
    return SinkBound(ds, bound, terms)
