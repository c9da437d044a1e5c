"""Attention in PyTorch with three defects."""

import torch


def attention(q, k, v, *, mask, sm_scale):
    """Return the output."""
    seen = mask.dense(*q.shape[:3], k.shape[2], device=q.device)
    has_keys, has_rows = seen.any(-1, keepdim=True), seen.any(-2)[..., None]
    wide = torch.promote_types(q.dtype, torch.float32)
    queries = q.to(wide).masked_fill(~has_keys, 0)
    groups = q.shape[1] // k.shape[1]
    # The gradients of the heads of a group are rounded before they are added.
    keys, values = (x.repeat_interleave(groups, 1).to(wide) for x in (k, v))
    keys, values = (x.masked_fill(~has_rows, 0) for x in (keys, values))
    scores = (queries @ keys.mT * sm_scale).masked_fill(~seen, -torch.inf)
    # A row that sees no key is NaN. In the gradient, the weight 0 of a hidden key is multiplied by
    # dout v, which may be infinite.
    weights = torch.softmax(scores, -1)
    return (weights @ values).to(q.dtype)
