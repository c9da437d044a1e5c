"""lmdeploy's paged decoding kernel, with its default of 16 tokens a page and more."""

import logging

import torch
from brought import importable, stand_in

from fa_verify import attention_kernel

importable("InternLM/lmdeploy", "lmdeploy/pytorch/kernels/cuda/pagedattention.py")
stand_in("lmdeploy.utils", get_logger=logging.getLogger)


class _QuantPolicy:
    """Of the policies, the one of a cache that is not quantised."""

    NONE, INT4, INT8, FP8, FP8_E5M2, TURBO_QUANT = 0, 4, 8, 16, 17, 42


stand_in("lmdeploy.messages", QuantPolicy=_QuantPolicy)
from lmdeploy.pytorch.kernels.cuda.pagedattention import flash_attn_with_kvcache

PAGE = 16


@attention_kernel(
    one_query=True, backward=False, masks=("padding",), dtypes=("fp16", "bf16"), dv_ne_d=False,
    zero_sizes=False, devices=("cuda",), head_dims=(32, 64, 128), splits=64, block_n=PAGE,
)  # fmt: skip
def attention(q, k, v, *, mask, sm_scale):
    """Attend with one query, to pages that lie backwards in the cache."""
    (B, _, _, D), (Hk, S) = q.shape, k.shape[1:3]
    pages = -(-S // PAGE)
    room = (0, 0, 0, pages * PAGE - S)
    cached = [
        torch.nn.functional.pad(x, room).transpose(1, 2).reshape(B * pages, PAGE, Hk, D).flip(0)
        for x in (k, v)
    ]
    table = torch.arange(B * pages, dtype=torch.int32, device=q.device).flip(0).view(B, pages)
    lengths = torch.tensor(mask.lengths(B, 1, S)[1], dtype=torch.int32, device=q.device)
    out = flash_attn_with_kvcache(q[:, :, 0], *cached, lengths, table, softmax_scale=sm_scale)
    return out.unsqueeze(2)
