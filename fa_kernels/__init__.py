"""FlashAttention-2 in Triton: ``flash_attention`` is all that a user imports.

Kernels run on CUDA devices, or on the CPU under Triton's interpreter (TRITON_INTERPRET=1).
"""

from fa_kernels.attention import flash_attention
from fa_kernels.configs import CONFIGS, Config, Tile

__all__ = ["CONFIGS", "Config", "Tile", "flash_attention"]
