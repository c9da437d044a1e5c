"""Runs packed sequences in one call and in a call for each, to compare the bits."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from fa_kernels import flash_attention, flash_attention_varlen

__all__ = ["WILD", "assert_equal_bits", "in_a_row", "one_by_one"]

# Invalid offsets on the device, for 62 rows and 83 keys.
WILD = {
    "past the end": ((0, 17, 200), (0, 21, 300)),
    "negative": ((-5, 17, 62), (-9, 21, 83)),
    "falling": ((0, 60, 17, 62), (0, 70, 21, 83)),
    "far": ((0, 2**30, -(2**30)), (-(2**31), 2**31 - 1, 0)),
}
_NAMES = ("out", "lse", "dq", "dk", "dv")


def in_a_row(
    inputs: Sequence[torch.Tensor],
    cu_q: Sequence[int] | torch.Tensor,
    cu_k: Sequence[int] | torch.Tensor,
    **options: object,
) -> list[torch.Tensor]:
    """out, lse (rows first), dq, dk, dv of q, k, v, dout."""
    leaves = [x.detach().requires_grad_() for x in inputs[:3]]
    out, lse = flash_attention_varlen(
        *leaves, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, return_lse=True, **options
    )
    return [out.detach(), lse.detach().mT, *torch.autograd.grad(out, leaves, inputs[3])]


def one_by_one(
    inputs: Sequence[torch.Tensor],
    cu_q: Sequence[int],
    cu_k: Sequence[int],
    masks=None,
    **options: object,
) -> list[torch.Tensor]:
    """The same outputs by a ``flash_attention`` for each sequence; 0 and -inf in other rows."""
    q, k, v, dout = inputs
    lse = torch.full(q.shape[:2], -torch.inf, dtype=torch.float64, device=q.device)
    found = [torch.zeros_like(dout), lse, *map(torch.zeros_like, (q, k, v))]
    for b, ((m, m_end), (n, n_end)) in enumerate(zip(pairwise(cu_q), pairwise(cu_k), strict=True)):
        rows, keys = slice(m, m_end), slice(n, n_end)
        parts = [
            x[at].transpose(0, 1)[None]
            for x, at in zip(inputs, (rows, keys, keys, rows), strict=True)
        ]
        leaves = [x.detach().requires_grad_() for x in parts[:3]]
        mask = {} if masks is None else {"mask": masks.sliced((b,))}
        out, lse = flash_attention(*leaves, return_lse=True, **mask, **options)
        gradients = torch.autograd.grad(out, leaves, parts[3])
        for x, part, at in zip(
            found, (out, lse, *gradients), (rows, rows, rows, keys, keys), strict=True
        ):
            x[at] = part[0].detach().transpose(0, 1).to(x.dtype)
    return found


def assert_equal_bits(got: Sequence[torch.Tensor], want: Sequence[torch.Tensor]) -> None:
    """Compares out, lse, dq, dk and dv; ``want`` is cast to the dtypes of ``got``."""
    for name, x, y in zip(_NAMES, got, want, strict=True):
        assert x.shape == y.shape, name
        assert torch.equal(x, y.to(x.dtype)), name
