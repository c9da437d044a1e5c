"""The error bound of pooled probabilities, derived from the inputs."""

from __future__ import annotations

import torch

from fa_verify.oracles.bounds.constants import Constants, constants
from fa_verify.oracles.bounds.error_model import gather
from fa_verify.oracles.bounds.forward import forward_error
from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.outputs import Numerics
from fa_verify.oracles.reference.pooled import POOLS, key_blocks, row_blocks, valid_pairs
from fa_verify.oracles.reference.torch_reference import RowMasks, chunk_height

__all__ = ["pooled_bound"]


def _probabilities(
    q: torch.Tensor,
    k: torch.Tensor,
    seen: torch.Tensor,
    any_order: bool,
    sm_scale: float,
    c: Constants,
    numerics: Numerics,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns P of a chunk of rows and the bound of its error, (B,H,R,N); 0 on hidden pairs."""
    B, H, R, _ = q.shape
    N = k.shape[2]
    # P does not depend on values or gradients: one column of zeros replaces each.
    v, dout = k.new_zeros((*k.shape[:3], 1)), q.new_zeros((B, H, R, 1))
    x = gather(q, k, v, dout, None, seen, (), any_order)
    fwd = forward_error(x, sm_scale=sm_scale, c=c, numerics=numerics, exact_spread=False)
    scores = fwd.scores
    # P is recomputed from the stored lse.
    magnitudes = scores.s.abs() + scores.lse.abs().unsqueeze(2)
    exponent = scores.error + fwd.lse_bound.unsqueeze(2) + 3 * c.u * magnitudes + c.u_exp
    error = (scores.p * exponent.expm1_()).add_(c.ftz).masked_fill_(x.hidden, 0.0)
    return scores.p.view(B, H, R, N), error.view(B, H, R, N)


def pooled_bound(
    q: torch.Tensor,
    k: torch.Tensor,
    *,
    mask: Mask,
    sm_scale: float,
    in_dtype: str,
    numerics: Numerics,
    pool: str,
    size: tuple[int, int],
    chunk: int | None = None,
) -> torch.Tensor:
    """Returns the bound of each element of ``pooled_probabilities``.

    F is the error of the exponent of P, which is recomputed from the stored lse::

        F    = E + B_lse + 3u (|s| + |L|) + u_exp
        e    = p expm1(F) + FTZ                        for a visible pair, 0 for others
        mean: [sum e + gamma(R + C + 5) sum (p + e)] / (R C) + FTZ
        max:  max (p + e) - max p

    R and C are the valid rows and keys of the block. Its sum runs along one axis and then along the
    other, in any order: at most R - 1 + C - 1 consecutive additions, where additions of 0 are
    exact. R, C and their product take 3 roundings; the division counts as 4. Maxima are exact, and
    |max a - max b| <= max |a - b|; the bound takes the larger side. A block without a visible pair
    is exactly 0.

    Args:
        q: (B, H, M, D), the kernel's input, any float dtype and strides.
        k: (B, Hk, N, D).
        mask: The mask.
        sm_scale: Factor on q.k, > 0.
        in_dtype: "fp16", "bf16", "fp32" or "fp64": the dtype the kernel reads.
        numerics: The subject's declared numerics.
        pool: "mean" or "max".
        size: (rows, keys) of a block, >= 1.
        chunk: Rows of q at a time; None limits memory.

    Returns:
        (B, H, ceil(M / rows), ceil(N / keys)) float64 on q's device; doubled for "fp64", because
        the reference has an error of the same size.

    Raises:
        ValueError: in_dtype or pool is unknown.

    Source: Higham, Accuracy and Stability of Numerical Algorithms, chapters 3 and 4.
    """
    if pool not in POOLS:
        raise ValueError(f"pool is {pool!r}; needs one of {POOLS}")
    c = constants(in_dtype, numerics)
    (B, H, M, _), N = q.shape, k.shape[2]
    rows, keys = size
    shape = (B, H, -(-M // rows), -(-N // keys))
    p_of, e_of, largest = (q.new_zeros(shape, dtype=torch.float64) for _ in range(3))
    if 0 in (B, M, N):
        return e_of
    masks = RowMasks(mask, B, H, M, N, q.device)
    height = chunk_height(chunk, B, H, N)
    for start in range(0, M, height):
        stop = min(start + height, M)
        seen = masks.between(start, stop)
        p, e = _probabilities(
            q[:, :, start:stop], k, seen, masks.has_predicate, sm_scale, c, numerics
        )
        for into, part in ((p_of, p), (e_of, e), (largest, p + e)):
            row_blocks(into, key_blocks(part, keys, pool), start, rows, pool)
    if pool == "max":
        return c.times * (largest - p_of)
    rows_of, keys_of = valid_pairs(mask, B, M, N, size, q.device)
    additions = c.gamma((rows_of + keys_of + 5).to(torch.float64))
    mean = (e_of + additions * largest) / (rows_of * keys_of).clamp(min=1) + c.ftz
    # Each visible pair has an error > 0, so a sum of 0 means that no pair is visible.
    return c.times * mean.masked_fill_(e_of == 0, 0.0)
