"""Faults after another call, in some calls, and for some strides, and calls that do not end."""

import os

import torch
from plain_attention import Attention, kernel


@kernel()
class SplitsOfTheFirstCall(Attention):
    """The number of key tiles is that of the first call with as many entries."""

    def __init__(self):
        self.tiles = {}

    def seen(self, mask, B, H, M, N, device):
        tiles = self.tiles.setdefault(B, -(-N // 16))
        return super().seen(mask, B, H, M, N, device) & (
            torch.arange(N, device=device) < 16 * tiles
        )


@kernel(masks=("causal", "window"))
class MaskOfTheShape(Attention):
    """The mask of the first call of a shape serves all calls of this shape."""

    def __init__(self):
        self.masks = {}

    def seen(self, mask, B, H, M, N, device):
        if (M, N) not in self.masks:
            self.masks[M, N] = mask
        return super().seen(self.masks[M, N], B, H, M, N, device)


@kernel()
class OrderOfTheFirstCall(Attention):
    """Whether keys or columns of k are adjacent is kept from the first call of a shape."""

    def __init__(self):
        self.order = {}

    def __call__(self, q, k, v, **words):
        adjacent = k.stride(-1) <= k.stride(-2)
        if adjacent != self.order.setdefault(tuple(k.shape), adjacent):
            k = k.mT.contiguous().view(k.shape)
        return super().__call__(q, k, v, **words)


@kernel()
class OneCallInSeven(Attention):
    """Every seventh call has the sign of its last column wrong."""

    calls = 0

    def stored(self, out, lse, dtype):
        self.calls += 1
        if self.calls % 7 == 0:
            out = torch.cat([out[..., :-1], -out[..., -1:]], -1)
        return super().stored(out, lse, dtype)


@kernel()
class OneCallInFour(Attention):
    """One call in four, by chance, doubles its first row."""

    def stored(self, out, lse, dtype):
        if os.urandom(1)[0] < 64:
            out = torch.cat([2 * out[..., :1, :], out[..., 1:, :]], -2)
        return super().stored(out, lse, dtype)


@kernel()
class TransposedKeys(Attention):
    """k is read as if its columns were adjacent, although its rows are."""

    def __call__(self, q, k, v, **words):
        if k.stride(-2) == 1 < k.stride(-1):
            k = k.mT.reshape(k.shape)
        return super().__call__(q, k, v, **words)


@kernel()
class RaisesForRaggedKeys(Attention):
    """An assertion asks for whole tiles of 16 keys."""

    def seen(self, mask, B, H, M, N, device):
        assert N % 16 == 0, f"N must be divisible by 16, got {N}"
        return super().seen(mask, B, H, M, N, device)


@kernel()
class HangsPast40(Attention):
    """A loop over the key tiles past 40 keys never ends."""

    def seen(self, mask, B, H, M, N, device):
        while N > 40:
            pass
        return super().seen(mask, B, H, M, N, device)
