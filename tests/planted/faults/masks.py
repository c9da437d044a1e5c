"""Faults of masks, alone and in combination."""

import dataclasses

import torch
from plain_attention import Attention, kernel


def columns(N, device):
    return torch.arange(N, device=device)


@kernel(masks=("causal",), m_gt_n=False)
class TopLeft(Attention):
    """The causal mask is aligned to the top left."""

    def seen(self, mask, B, H, M, N, device):
        seen = super().seen(mask, B, H, M, N, device)
        if not (mask.causal or mask.window_right == 0):
            return seen
        return (columns(N, device) <= torch.arange(M, device=device)[:, None]).expand(1, 1, M, N)


@kernel(masks=("causal", "window"))
class WindowOneWider(Attention):
    """A window to the left is inclusive twice: one key too many is seen."""

    def seen(self, mask, B, H, M, N, device):
        if mask.window_left is not None:
            mask = dataclasses.replace(mask, window_left=mask.window_left + 1)
        return super().seen(mask, B, H, M, N, device)


@kernel(masks=("causal", "window"))
class CausalDropsWindow(Attention):
    """The causal path forgets the window to the left."""

    def seen(self, mask, B, H, M, N, device):
        if mask.causal or mask.window_right == 0:
            mask = dataclasses.replace(mask, window_left=None)
        return super().seen(mask, B, H, M, N, device)


@kernel(masks=("causal", "window", "padding"))
class EmptyRowsDivide(Attention):
    """A row that sees no key is divided by its sum, 0."""

    def averaged(self, scores, v, sink):
        _, lse = super().averaged(scores, v, sink)
        return torch.softmax(scores, -1) @ v, lse


@kernel(masks=("padding",))
class OnePaddedKey(Attention):
    """The first padded key is seen."""

    def seen(self, mask, B, H, M, N, device):
        if mask.seqlens_k is not None:
            mask = dataclasses.replace(mask, seqlens_k=tuple(min(x + 1, N) for x in mask.seqlens_k))
        return super().seen(mask, B, H, M, N, device)


@kernel(masks=("padding",))
class LengthsOfTheFirst(Attention):
    """All entries have the number of keys of the first."""

    def seen(self, mask, B, H, M, N, device):
        if mask.seqlens_k is not None:
            mask = dataclasses.replace(mask, seqlens_k=mask.seqlens_k[:1] * B)
        return super().seen(mask, B, H, M, N, device)
