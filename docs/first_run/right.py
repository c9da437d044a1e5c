"""Attention in PyTorch, computed in float32 or float64."""

import torch


def attention(q, k, v, *, mask, sm_scale):
    """Return the output; nothing in hidden rows and keys reaches it or its gradients."""
    seen = mask.dense(*q.shape[:3], k.shape[2])
    has_keys, has_rows = seen.any(-1, keepdim=True), seen.any(-2)[..., None]
    wide = torch.promote_types(q.dtype, torch.float32)
    queries = q.to(wide).masked_fill(~has_keys, 0)
    groups = q.shape[1] // k.shape[1]
    # Wide before they are repeated, so that the gradients of a group are added in full.
    keys, values = (
        x.to(wide).repeat_interleave(groups, 1).masked_fill(~has_rows, 0) for x in (k, v)
    )
    scores = (queries @ keys.mT * sm_scale).masked_fill(~seen, -torch.inf)
    # The softmax of a row that sees no key would be NaN.
    weights = torch.softmax(scores.masked_fill(~has_keys, 0), -1).masked_fill(~seen, 0)
    return (weights @ values).masked_fill(~has_keys, 0).to(q.dtype)
