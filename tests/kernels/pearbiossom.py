"""A tutorial's FlashAttention with tensor descriptors. Its file needs Python 3.12, and a GPU."""

import sys

from brought import FOLDER, file

from fa_verify import attention_kernel

REPOSITORY = "Pearbiossom-M/FlashAttention-from-Scratch-with-Triton"
file(REPOSITORY, "code/My_FlashAttention_optimized.py")
sys.path.append(str(FOLDER / REPOSITORY / "code"))
from My_FlashAttention_optimized import FlashAttentionFunction


@attention_kernel(
    devices=("cuda",), dtypes=("fp16", "bf16"), fixed_scale="1/sqrt(D)", head_dims=(32, 64, 128),
    masks=("causal",), gqa=False, dv_ne_d=False, zero_sizes=False, causal_alignment="top-left",
    backward_reads=("out", "lse"), ds_scaled=False,
)  # fmt: skip
def attention(q, k, v, *, mask):
    """Attend as its documentation says."""
    return FlashAttentionFunction.apply(q, k, v, mask.causal)
