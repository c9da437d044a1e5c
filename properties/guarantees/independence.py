"""Whether the roundings of a call are independent, asked of its tensors.

The suite draws problems by families, and ``limits`` holds a list of their names. The data of a
user has no name. Equal rows, keys and columns are counted, and widen the limits. Heads whose
weights round alike for another reason are left to the bound.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch

from fa_verify.oracles import stream
from fa_verify.oracles.bounds.constants import constants
from fa_verify.oracles.bounds.replay import cast_format
from fa_verify.oracles.bounds.spread import FEW, FLAT, Copies
from fa_verify.oracles.bounds.variance import rounding
from fa_verify.oracles.outputs import Numerics
from fa_verify.oracles.problem import Problem
from fa_verify.oracles.reference.torch_reference import RowMasks
from fa_verify.properties.inputs.tensors import Inputs

__all__ = ["Agreement", "agreement", "is_ordinary"]

_SAMPLED = 32  # rows of a head whose casts are computed
_PAIRS = 2**25  # pairs of them, at most
# The maximum that a kernel subtracts from scores before the cast of P depends on its tiles.
_PIVOTS = (1.0, 0.77, 0.59)
_DEVIATIONS = 6.0  # largest sum of independent casts; limits allow more
# N(0, 1) data for the statistics: deviation of scores, mean and largest value of a tensor in RMS.
_SPREADS = (0.1, 2.0)
_MEAN = 0.2
_LARGEST = 8.0


class Agreement(NamedTuple):
    """Errors of a call that may agree.

    Args:
        copies: Rows and keys that are equal.
        columns: By output, the numbers of equal columns, (B, heads, 1, D or Dv): equal columns of
            v give equal columns of out.
        judged: Bool (B, Hk), the heads whose casts do not agree.
        spread: The smallest and the largest standard deviation of the scores of sampled rows.
    """

    copies: Copies
    columns: Mapping[str, torch.Tensor]
    judged: torch.Tensor
    spread: tuple[float, float]

    def judges(self, name: str, heads: int) -> torch.Tensor:
        """Returns the judged heads of an output, bool (B, heads, 1, 1)."""
        judged = self.judged.repeat_interleave(heads // self.judged.shape[1], 1)
        return judged[:, :, None, None]


@torch.inference_mode()
def agreement(problem: Problem, inputs: Inputs, numerics: Numerics) -> Agreement:
    """Return which errors of a call may agree. No axis of q, k and v is empty.

    Args:
        problem: The sizes, the mask and the scale.
        inputs: The tensors.
        numerics: The declared numerics.
    """
    B, H, Hk = problem.B, problem.H, problem.Hk
    q, k, v, dout = inputs[:4]
    rows, keys = _hashes(q), _hashes(k)
    local = _counts(rows.reshape(B * Hk, -1), apart=True).view(B, H, -1)
    of_keys = _counts(keys.reshape(B * Hk, -1), apart=True).view(B, Hk, -1)
    # Keys of other heads matter only if the queries that read them are equal as well.
    heads = _counts(_hash_of(rows.reshape(B * Hk, -1)).view(1, -1), apart=False).view(B, Hk, 1)
    copies = Copies(
        local, of_keys, _counts(rows.reshape(1, -1), apart=False).view(B, H, -1), of_keys * heads
    )
    # Rows of padding may hold anything: they change hashes, which can only hide equal columns that
    # a caller made equal in the rest.
    repeat = H // Hk
    columns = {
        "out": _columns(v).repeat_interleave(repeat, 1),
        "dq": _columns(k).repeat_interleave(repeat, 1),
        "dk": _columns(q.reshape(B, Hk, -1, q.shape[3])),
        "dv": _columns(dout.reshape(B, Hk, -1, dout.shape[3])),
    }
    judged, spread = _sampled(problem, inputs, numerics, of_keys)
    return Agreement(copies, columns, judged, spread)


def is_ordinary(inputs: Inputs, found: Agreement) -> bool:
    """Return whether the data is like N(0, 1), as the statistics assume."""
    low, high = _SPREADS
    if not (low <= found.spread[0] and found.spread[1] <= high):
        return False
    if not found.copies.none or not bool(found.judged.all()):
        return False
    for x in inputs[:4]:
        of = x.float()
        size = of.square().mean((2, 3), keepdim=True).sqrt()
        mean = of.mean(2, keepdim=True).abs().amax((2, 3), keepdim=True)
        rows = x.shape[2]
        allowed = (_MEAN + _DEVIATIONS / math.sqrt(rows)) * size
        if not bool(((mean <= allowed) & (of.abs().amax((2, 3), True) <= _LARGEST * size)).all()):
            return False
    return True


def _hash_of(x: torch.Tensor) -> torch.Tensor:
    """Returns a hash of the last axis of integers, int64: a sum with odd random factors."""
    factors = stream.integers(0, "hash", (x.shape[-1],), x.device) | 1
    hashed: torch.Tensor = (x.to(torch.int64) * factors).sum(-1)
    return hashed


def _hashes(x: torch.Tensor) -> torch.Tensor:
    """Returns a hash of each row of floats, int64 of shape x.shape[:-1], one entry at a time."""
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    # -0 + 0 is 0.
    return torch.stack([_hash_of((of + 0.0).contiguous().view(bits)) for of in x])


def _counts(hashes: torch.Tensor, *, apart: bool) -> torch.Tensor:
    """Returns how often each hash occurs, in its row if ``apart``, float64 of the same shape."""
    if apart:
        places = torch.arange(len(hashes), device=hashes.device)
        hashes = hashes + stream.integers(1, "place", places.shape, hashes.device).view(-1, 1)
    _, inverse, counts = hashes.unique(return_inverse=True, return_counts=True)
    found: torch.Tensor = counts.to(torch.float64)[inverse]
    return found


def _columns(x: torch.Tensor) -> torch.Tensor:
    """Returns how often each column occurs in its head, float64 (B, heads, 1, columns)."""
    B, heads, _, columns = x.shape
    hashes = _hashes(x.mT).reshape(B * heads, columns)
    return _counts(hashes, apart=True).view(B, heads, 1, columns)


def _sampled(
    problem: Problem, inputs: Inputs, numerics: Numerics, of_keys: torch.Tensor
) -> tuple[torch.Tensor, tuple[float, float]]:
    """Return the heads whose sampled casts of P do not agree, and the deviations of scores.

    The casts of a row are computed. If they are independent, their sum is a few standard deviations
    at most, and so is the sum over rows.
    """
    B, H, Hk, M, N = problem.B, problem.H, problem.Hk, problem.M, problem.N
    q, k = inputs.q, inputs.k
    count = max(1, min(M, _SAMPLED, _PAIRS // (B * H * N)))
    places = [round(i * (M - 1) / max(1, count - 1)) for i in range(count)]
    masks = RowMasks(problem.mask, B, H, M, N, q.device)
    seen = torch.cat([masks.between(m, m + 1) for m in places], 2)
    seen = seen.expand(B, H, count, N).reshape(B, Hk, -1, N)
    live, used = seen.any(3, True), seen.any(2).unsqueeze(3)
    at = torch.tensor(places, device=q.device)
    rows = q[:, :, at].double().reshape(B, Hk, -1, problem.D).masked_fill(~live, 0.0)
    s = rows @ k.double().masked_fill(~used, 0.0).mT * problem.scale
    s.masked_fill_(~seen, -math.inf)
    e = (s - s.amax(3, keepdim=True).masked_fill(~live, 0.0)).exp()
    p = e / e.sum(3, keepdim=True).masked_fill(~live, 1.0)
    keys = seen.sum(3, True).clamp(min=1)
    centred = (s - s.masked_fill(~seen, 0.0).sum(3, True) / keys).masked_fill(~seen, 0.0)
    deviations = (centred.square().sum(3, True) / keys).sqrt()[(keys > _SAMPLED) & live]
    spread = (0.0, math.inf)
    if len(deviations):
        spread = float(deviations.amin()), float(deviations.amax())
    judged = torch.ones(B, Hk, dtype=torch.bool, device=q.device)
    cast = cast_format(problem.dtype, numerics)
    if cast is None:
        return judged, spread
    c = constants(problem.dtype, numerics)
    x, copies = p if numerics.p_normalised else e, of_keys.unsqueeze(2)
    # Rows of nearly equal scores have wider limits. The maximum itself is 1, unless a kernel
    # subtracts another one, which differs from row to row.
    flat = (keys * p.square().sum(3, True) < 1 + FLAT) & (keys > FEW)
    left_out = flat if numerics.p_normalised else flat | (e == 1)
    for pivot in _PIVOTS:
        moved = x * pivot
        error = (cast.rounded(moved) - moved).masked_fill_(left_out, 0.0)
        variance = (copies * rounding(moved, cast.u, c.eta_p)).masked_fill_(left_out, 0.0)
        # Rounding to nearest itself drifts by u**2: larger values are rarer than smaller ones.
        drift = moved.sum(3) * cast.u**2
        for axis in (3, (2, 3)):
            total, allowed = error.sum(axis).abs(), variance.sum(axis).sqrt() * _DEVIATIONS
            bad = total > allowed + (drift if axis == 3 else drift.sum(2))
            judged &= ~(bad.any(2) if axis == 3 else bad)
    return judged, spread
