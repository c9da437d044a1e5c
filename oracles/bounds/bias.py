"""The error bound of the gradient of a bias."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from fa_verify.oracles.bounds.backward import read_of, score_gradient
from fa_verify.oracles.bounds.constants import constants
from fa_verify.oracles.bounds.error_model import gather
from fa_verify.oracles.bounds.forward import forward_error
from fa_verify.oracles.bounds.given_forward import Returned, read_given
from fa_verify.oracles.bounds.replay import operand_format
from fa_verify.oracles.outputs import Numerics
from fa_verify.oracles.reference.score_mods import Additions
from fa_verify.oracles.reference.torch_reference import DenseMask, RowMasks, sinks_of_rows

__all__ = ["BiasBound", "bias_error"]


class BiasBound(NamedTuple):
    """The bound of each element of dbias, float64 in the shape of the bias."""

    dbias: torch.Tensor  # the exact gradient, or that given a forward
    bound: torch.Tensor
    terms: torch.Tensor  # the sum of |terms| of each element
    out_of_range: str | None  # as in ``error_model.Judgement``


def _shared(x: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Sums over the axes that have size 1 in ``shape``."""
    axes = [axis for axis, size in enumerate(shape) if size == 1]
    return x.sum(axes, keepdim=True) if axes else x


def bias_error(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
    bias: torch.Tensor,
    sinks: torch.Tensor | None = None,
    *,
    mask: DenseMask,
    sm_scale: float,
    in_dtype: str,
    bias_dtype: str,
    numerics: Numerics,
    softcap: float | None = None,
    given: Returned | None = None,
) -> BiasBound:
    """Returns the largest error of a correct kernel's dbias against ``reference.bias_gradient``.

    Sums run over the n visible pairs that share an element, in any order. e is the error of dS
    before any cast, and u_out and eta_out belong to the dtype of the bias::

        B = sum e + gamma(n + 2) sum (|dS| + e);  B + u_out (|dbias| + B) + eta_out

    The bound is 0 where no row sees a key. The slope of a softcap does not enter, because the bias
    is added after it.

    If ``given`` holds the forward's results that the backward reads, the gradient and the error are
    those given the forward; see ``given_forward``.

    The other arguments are those of ``error_model.judge``, and the dtype of the bias. All rows are
    in memory at once.
    """
    operands = None if given is None else operand_format(in_dtype, numerics)
    c = constants(in_dtype, numerics, replayed=operands is not None)
    stored = constants(bias_dtype, Numerics())
    (B, H, M, _), N = q.shape, k.shape[2]
    zeros = torch.zeros(bias.shape, dtype=torch.float64, device=q.device)
    if 0 in (B, M, N):
        return BiasBound(zeros, zeros, zeros, None)
    masks = RowMasks(mask, B, H, M, N, q.device)
    seen = masks.between(0, M)
    added = Additions(mask, (B, H, M, N), q.device, alibi_slopes, bias.detach()).between(0, M)
    x = gather(
        q.detach(), k.detach(), v.detach(), dout.detach(), dlse, seen, added, masks.has_predicate,
        operands, None if sinks is None else sinks_of_rows(sinks, mask, (B, H, M, N), slice(M)),
    )  # fmt: skip
    options: dict[str, Any] = {
        "sm_scale": sm_scale, "c": c, "numerics": numerics, "exact_spread": True,
        "softcap": softcap,
    }  # fmt: skip
    if given is None:
        read = read_of(forward_error(x, **options), c)
    else:
        read = read_given(x, given, **options)
    gradient = score_gradient(x, read, c, numerics.ds_from == "rounded")
    ds, error, reach, terms, count = (
        _shared(y.reshape(B, H, M, N), bias.shape)
        for y in (
            gradient.ds, gradient.error, gradient.ds.abs() + gradient.error, gradient.terms,
            x.seen.to(torch.float64),
        )
    )  # fmt: skip
    bound = error + c.gamma(count + 2) * reach + c.eta_op * count
    bound = bound + stored.u_in * (ds.abs() + bound) + stored.eta_in
    bound = (c.times * bound).masked_fill_(count == 0, 0.0)
    largest = float((ds.abs() + bound).amax())
    reason = None
    if not largest <= stored.max_in:  # NaN fails
        reason = f"|dbias| + bound reaches {largest:.6g}; needs to be at most {stored.max_in:.6g}"
    return BiasBound(ds, bound, terms, reason)
