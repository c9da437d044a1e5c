"""SGLang's decode_attention_fwd over a cache of e4m3 with scales of the tensor."""

from brought import importable
from sglang_paged import paged, token_by_token

from fa_verify import attention_kernel

importable(
    "sgl-project/sglang", "python/sglang/kernels/ops/attention/decode_attention.py", root="python"
)

codes = paged | {"cache_formats": ("e4m3fn",), "masks": (), "one_query": True, "splits": 8}
codes |= {"score_mods": ("softcap", "sinks"), "block_n": 32}


def _decode(q, k_cache, v_cache, k_scale, v_scale, **given):
    return token_by_token(
        q, k_cache, v_cache, k_scale=float(k_scale), v_scale=float(v_scale), **given
    )


@attention_kernel(**codes, gqa=False)
def ungrouped(q, k_cache, v_cache, *, k_scale, v_scale, **given):
    """The kernel for H = Hk, which multiplies in the dtype of q."""
    return _decode(q, k_cache, v_cache, k_scale, v_scale, **given)


@attention_kernel(**codes)
def decode(q, k_cache, v_cache, *, k_scale, v_scale, **given):
    """Both kernels. That of grouped heads casts q and P to e4m3 as well."""
    return _decode(q, k_cache, v_cache, k_scale, v_scale, **given)
