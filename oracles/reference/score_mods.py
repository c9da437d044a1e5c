"""Terms added to scores before masking, ALiBi and a bias, in float64 and by rows."""

from __future__ import annotations

from typing import Protocol

import torch

__all__ = ["Additions", "Lengths"]


class Lengths(Protocol):
    """The part of a mask that positions depend on."""

    def lengths(self, B: int, M: int, N: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns the valid rows and the valid keys of each batch entry."""


class Additions:
    """The terms that are added to a scaled or capped score.

    ALiBi adds -slope |p - n|, where query m has position p = m + seqlens_k[b] - seqlens_q[b], as in
    masks. A bias is added unchanged.

    Source: Press, Smith, Lewis 2022 (arXiv:2108.12409).
    """

    def __init__(
        self,
        mask: object,
        shape: tuple[int, int, int, int],
        device: torch.device,
        alibi_slopes: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
    ) -> None:
        """Takes a mask with ``lengths``, (B, H, M, N), the device, and a call's slopes and bias."""
        B, H, M, N = self.shape = shape
        self.device = device
        self._slopes: torch.Tensor | None = None
        self._bias = None if bias is None else bias.to(torch.float64)
        if alibi_slopes is not None:
            slopes = alibi_slopes.detach().to(torch.float64)
            self._slopes = (
                slopes.view(-1, H, 1, 1) if slopes.ndim == 1 else slopes[:, :, None, None]
            )
            assert hasattr(mask, "lengths")
            rows, keys = torch.tensor(mask.lengths(B, M, N), dtype=torch.int64, device=device)
            self._ahead = (keys - rows).view(B, 1, 1, 1)

    def __bool__(self) -> bool:
        """Whether there are any terms."""
        return self._slopes is not None or self._bias is not None

    def between(self, start: int, stop: int, keys: slice | None = None) -> tuple[torch.Tensor, ...]:
        """Returns the terms of rows [start, stop), (B, H, stop - start, keys); None is all N."""
        B, H, _, N = self.shape
        keys = keys or slice(0, N)
        terms = []
        if self._slopes is not None:
            m = torch.arange(start, stop, device=self.device).view(-1, 1)
            n = torch.arange(keys.start, keys.stop, device=self.device)
            distance = (m + self._ahead - n).abs()
            terms.append(-self._slopes * distance.to(torch.float64))
        if self._bias is not None:
            _, _, rows, columns = self._bias.shape
            of_rows = self._bias if rows == 1 else self._bias[:, :, start:stop]
            terms.append(of_rows if columns == 1 else of_rows[:, :, :, keys])
        return tuple(x.expand(B, H, stop - start, keys.stop - keys.start) for x in terms)
