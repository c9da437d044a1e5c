"""Faults of modified scores."""

import torch
from plain_attention import Attention, kernel


@kernel(score_mods=("softcap", "bias"))
class CapAfterBias(Attention):
    """The softcap is applied to the scores with their bias."""

    def modified(self, scores, softcap, extra):
        scores = scores + extra
        return scores if softcap is None else softcap * torch.tanh(scores / softcap)


@kernel(score_mods=("alibi",), gqa=True)
class SlopesOfKeyHeads(Attention):
    """The slopes are indexed by the head of the keys."""

    def slopes(self, slopes, H, Hk):
        slopes = super().slopes(slopes, H, Hk)
        return slopes[:, :Hk].repeat_interleave(H // Hk, 1)


@kernel(score_mods=("alibi",))
class SlopesOfTheFirst(Attention):
    """All entries have the slopes of the first."""

    def slopes(self, slopes, H, Hk):
        return super().slopes(slopes, H, Hk)[:1]


@kernel(score_mods=("sinks",))
class SinksInLseAlone(Attention):
    """The sums that divide out lack the sinks; those in lse have them."""

    def averaged(self, scores, v, sink):
        _, lse = super().averaged(scores, v, sink)
        return super().averaged(scores, v, None)[0], lse
