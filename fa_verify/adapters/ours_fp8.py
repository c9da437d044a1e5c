"""``flash_attention_fp8`` of this repository, with the accumulator "promoted"."""

from __future__ import annotations

import torch

from fa_kernels import Config, Tile, flash_attention_fp8
from fa_verify.properties.kernels.attention_kernel import attention_kernel

__all__ = ["attention"]

_CONFIG = Config(forward=Tile(64, 64, 4, 3))


@attention_kernel(
    quantised=True,
    qk_formats=("e4m3fn",),
    v_formats=("e4m3fn",),
    qk_scales=("tensor", "head", "token"),
    v_scales=("tensor", "head"),
    block_n=64,
    # Tensor cores of Hopper add 32 products so; the interpreter adds in fp32.
    quantised_numerics={"p_offset": 8, "qk_bits": 14, "pv_bits": 14, "pv_promotion": "step"},
)
def attention(q, k, v, q_scale, k_scale, v_scale, *, mask, sm_scale, out_dtype):
    """Call the kernel with the scales in its shapes."""
    scales = {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale}
    for name, scale in scales.items():
        axes = 2 if name == "v_scale" else 3
        scales[name] = scale.reshape((1,) * axes if scale.ndim == 1 else _padded(scale, axes))
    return flash_attention_fp8(
        q, k, v, **scales, mask=mask, sm_scale=sm_scale, dtype=out_dtype, config=_CONFIG,
        return_lse=True,
    )  # fmt: skip


def _padded(scale: torch.Tensor, axes: int) -> tuple[int, ...]:
    """Return the shape with axes of size 1 behind it."""
    return (*scale.shape, *(1,) * (axes - scale.ndim))
