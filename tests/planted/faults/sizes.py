"""Faults past a size: of keys, of columns, of a group of heads."""

import torch
from plain_attention import Attention, kernel, weights


@kernel(masks=("causal",))
class KeysPast17(Attention):
    """Keys past the 17th get no weight."""

    def seen(self, mask, B, H, M, N, device):
        return super().seen(mask, B, H, M, N, device) & (torch.arange(N, device=device) < 17)


@kernel(dtypes=("fp16", "fp32"), max_seqlen=300)
class SecondSplit(Attention):
    """The softmax sum of keys past 128 is left out where the splits are joined."""

    def averaged(self, scores, v, sink):
        p, top, _ = weights(scores)
        total = p[..., :128].sum(-1)
        divisor = torch.where(total > 0, total, 1.0)
        lse = torch.where(total > 0, top + torch.log(divisor), -torch.inf)
        return p / divisor[..., None] @ v, lse


@kernel(head_dims=None)
class ColumnsPast96(Attention):
    """Three tiles of 32 columns are multiplied; the others are lost."""

    def scores(self, q, k, sm_scale):
        return q[..., :96] @ k[..., :96].mT * sm_scale


@kernel(head_dims=(64, 96, 112, 128), dtypes=("fp16", "fp32"))
class HeadDim112(Attention):
    """With D = 112 the swizzled load reads column 110 twice and column 111 never."""

    def scores(self, q, k, sm_scale):
        if q.shape[-1] == 112:
            k = torch.cat([k[..., :111], k[..., 110:111]], -1)
        return super().scores(q, k, sm_scale)


@kernel(head_dims=None)
class OddHeadDim(Attention):
    """Columns are loaded in pairs, so that the last of an odd number is lost."""

    def scores(self, q, k, sm_scale):
        even = q.shape[-1] // 2 * 2
        return q[..., :even] @ k[..., :even].mT * sm_scale


@kernel(gqa=True)
class GroupPast8(Attention):
    """Heads past the eighth of a group are not written, in a tile of 16 rows."""

    def expand(self, x, H):
        self.group = H // x.shape[1]
        return super().expand(x, H)

    def stored(self, out, lse, dtype):
        heads = torch.arange(out.shape[1], device=out.device) % self.group
        return super().stored(torch.where((heads < 8)[:, None, None], out, 0.0), lse, dtype)


@kernel(masks=("causal",))
class SecondBlockOfRows(Attention):
    """Rows past 64 see one key past the diagonal."""

    def seen(self, mask, B, H, M, N, device):
        seen = super().seen(mask, B, H, M, N, device)
        if M <= 64 or not N:
            return seen
        later = torch.cat([seen[..., 1:, :], torch.ones_like(seen[..., :1, :])], -2)
        rows = torch.arange(M, device=device)[:, None]
        return torch.where(rows >= 64, later, seen)
