"""FlashAttention-2 in Triton: ``flash_attention``, and ``flash_attention_varlen`` of sequences.

Kernels run on CUDA devices, or on the CPU under Triton's interpreter (TRITON_INTERPRET=1).
"""

from fa_kernels.attention import flash_attention
from fa_kernels.configs import CONFIGS, Config, Tile
from fa_kernels.varlen import flash_attention_varlen

__all__ = ["CONFIGS", "Config", "Tile", "flash_attention", "flash_attention_varlen"]
