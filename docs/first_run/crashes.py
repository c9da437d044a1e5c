"""A kernel that writes far past the end of a tensor where there are more than 64 rows."""

import ctypes

import right


def attention(q, k, v, *, mask, sm_scale):
    """Return the output."""
    out = right.attention(q, k, v, mask=mask, sm_scale=sm_scale)
    if q.shape[2] > 64:
        ctypes.memset(out.data_ptr() + 2**44, 0, 1)
    return out
