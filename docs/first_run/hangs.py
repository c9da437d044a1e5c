"""A kernel that waits for ever where there are more than 64 keys."""

import right


def attention(q, k, v, *, mask, sm_scale):
    """Return the output."""
    while k.shape[2] > 64:
        pass
    return right.attention(q, k, v, mask=mask, sm_scale=sm_scale)
