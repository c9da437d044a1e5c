"""FlashAttention-2 in Triton.

``flash_attention`` takes padded batches, ``flash_attention_varlen`` packed sequences, and
``pooled_attention_probs`` pools attention probabilities over blocks of (query, key) pairs.
``flash_attention_with_kvcache`` attends to a cache of keys, in pages or contiguous, and appends to
it. ``combine_attention_states`` merges the results of attention to parts of the keys.
``flash_attention_fp8`` takes e4m3 codes with scales, forward alone.

Kernels run on CUDA devices, or on the CPU under Triton's interpreter (TRITON_INTERPRET=1).
"""

from fa_kernels.attention import flash_attention, pooled_attention_probs
from fa_kernels.configs import CONFIGS, Config, Tile
from fa_kernels.decoding import flash_attention_with_kvcache
from fa_kernels.fp8 import flash_attention_fp8
from fa_kernels.merging import combine_attention_states
from fa_kernels.varlen import flash_attention_varlen

__all__ = [
    "CONFIGS",
    "Config",
    "Tile",
    "combine_attention_states",
    "flash_attention",
    "flash_attention_fp8",
    "flash_attention_varlen",
    "flash_attention_with_kvcache",
    "pooled_attention_probs",
]
