"""Packed sequences: convert padded tensors to them and back, and call a varlen kernel."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from fa_verify.oracles.masks.mask import Mask

__all__ = ["OF_VARLEN", "PACKED", "Packing", "called_packed", "with_kept_offsets"]

# The keyword arguments of a varlen kernel.
PACKED = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
# Declarations of a varlen kernel, which its own declarations override: packing makes contiguous
# copies, and a CUDA graph cannot capture the copy of the offsets from the host.
OF_VARLEN: dict[str, Any] = {"layouts": ("bhsd",), "cuda_graphs": False}
# Rows of NaN before and after the packed rows, so that a read out of bounds shows. 16 rows keep the
# alignment of 16 bytes.
_MARGIN = 16


class Packing(NamedTuple):
    """A permutation of rows: the valid rows of each sequence in turn, then all padding.

    Args:
        order: (B M,), index in the flattened (B, M) of each packed row.
        back: (B M,), index of each row of the flattened (B, M) in the packed order.
        offsets: B + 1 ints, cu_seqlens. Rows from the last offset on belong to no sequence.
        shape: (B, M).
    """

    order: torch.Tensor
    back: torch.Tensor
    offsets: tuple[int, ...]
    shape: tuple[int, int]

    @classmethod
    def of(cls, lengths: tuple[int, ...], longest: int, device: torch.device) -> Packing:
        """Create the packing of sequences with these lengths, padded to ``longest``."""
        place = torch.arange(longest)
        valid = place < torch.tensor(lengths, dtype=torch.int64).view(-1, 1)
        order = torch.cat([kind.flatten().nonzero()[:, 0] for kind in (valid, ~valid)])
        offsets = torch.tensor([0, *lengths]).cumsum(0).tolist()
        return cls(
            order.to(device), order.argsort().to(device), tuple(offsets), (len(lengths), longest)
        )

    @property
    def total(self) -> int:
        """Number of valid rows."""
        return self.offsets[-1]

    @property
    def longest(self) -> int:
        """Number of rows of the longest sequence; 0 without sequences."""
        return max((b - a for a, b in zip(self.offsets, self.offsets[1:], strict=False)), default=0)

    def packed(self, x: torch.Tensor) -> torch.Tensor:
        """Pack (B, H, M, D) to (B M, H, D)."""
        return x.transpose(1, 2).flatten(0, 1)[self.order]

    def valid(self, x: torch.Tensor) -> torch.Tensor:
        """Pack (B, H, M, D) to (total, H, D), without padding and between rows of NaN."""
        rows = self.packed(x)[: self.total]
        surrounded = rows.new_full((self.total + 2 * _MARGIN, *rows.shape[1:]), math.nan)
        return surrounded[_MARGIN : _MARGIN + self.total].copy_(rows)

    def padded(self, x: torch.Tensor, fill: float = 0.0) -> torch.Tensor:
        """Unpack (B M, H, ...), or (total, H, ...), to (B, H, M, ...); padding is ``fill``."""
        missing = self.order.numel() - x.shape[0]
        x = torch.cat([x, x.new_full((missing, *x.shape[1:]), fill)]) if missing else x
        rows: torch.Tensor = x[self.back].unflatten(0, self.shape)
        return rows.transpose(1, 2)

    def cu_seqlens(self) -> torch.Tensor:
        """Return the offsets as an int32 tensor of B + 1 elements."""
        return torch.tensor(self.offsets, dtype=torch.int32, device=self.order.device)


def called_packed(
    call: Callable[..., Any],
    name: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: Mask,
) -> Any:
    """Call a varlen kernel on the valid rows of padded tensors, and unpack its results.

    Args:
        call: The kernel, which takes the keywords ``PACKED``.
        name: Name of the kernel, for messages.
        q: Queries (B, H, M, D).
        k: Keys (B, Hk, N, D).
        v: Values (B, Hk, N, Dv).
        mask: The mask, which has the lengths of the sequences.

    Returns:
        The result of the kernel, with each out (total_q, H, Dv) as (B, H, M, Dv) with zeros in
        padding, and each lse (H, total_q) as (B, H, M) with -inf in padding. A result that has
        another form than out or (out, lse) is returned as it is.

    Raises:
        AssertionError: A tensor of the result has another shape.
    """
    (B, H, M, _), (N, Dv) = q.shape, v.shape[2:]
    of_q, of_k = (
        Packing.of(lengths, longest, q.device)
        for lengths, longest in zip(mask.lengths(B, M, N), (M, N), strict=True)
    )
    result = call(
        of_q.valid(q), of_k.valid(k), of_k.valid(v),
        cu_seqlens_q=of_q.cu_seqlens(), cu_seqlens_k=of_k.cu_seqlens(),
        max_seqlen_q=of_q.longest, max_seqlen_k=of_k.longest,
    )  # fmt: skip
    parts = result if isinstance(result, tuple | list) else (result,)
    forms = (("out", (of_q.total, H, Dv)), ("lse", (H, of_q.total)))
    if len(parts) > len(forms) or not all(isinstance(x, torch.Tensor) for x in parts):
        return result
    for part, (what, shape) in zip(parts, forms, strict=False):
        if tuple(part.shape) != shape:
            raise AssertionError(
                f"{name} returns {what} of shape {tuple(part.shape)}; needs {shape}, for packed "
                "sequences"
            )
    out = of_q.padded(parts[0])
    return out if len(parts) == 1 else (out, of_q.padded(parts[1].mT, -math.inf))


def with_kept_offsets(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a varlen kernel whose calls, of as many sequences each, get offsets at one address."""
    kept: dict[str, torch.Tensor] = {}

    @functools.wraps(call)
    def called(*tensors: torch.Tensor, **given: Any) -> Any:
        for name in PACKED[:2]:
            given[name] = kept.setdefault(name, given[name]).copy_(given[name])
        return call(*tensors, **given)

    return called
