"""A kernel that calls ``tanh_dtanh``."""

import triton.language as tl

from fa_kernels.kernels.common.jit import kernel
from fa_kernels.kernels.common.score_mod import tanh_dtanh

__all__ = ["tanh_kernel"]


@kernel
def tanh_kernel(x_ptr, tanh_ptr, slope_ptr, BLOCK: tl.constexpr):
    """Writes tanh and the derivative of tanh for BLOCK numbers."""
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tanh, dtanh = tanh_dtanh(tl.load(x_ptr + places))
    tl.store(tanh_ptr + places, tanh)
    tl.store(slope_ptr + places, dtanh)
