"""vLLM's Triton kernels that read pages, and the one that merges attention states."""

import enum
import logging
import types

import torch
import triton
from brought import importable, stand_in

from fa_verify import attention_kernel

importable("vllm-project/vllm", "vllm/v1/attention/ops/triton_unified_attention.py")
stand_in("vllm.envs", VLLM_BATCH_INVARIANT=False)
stand_in("vllm.logger", init_logger=logging.getLogger)
stand_in("vllm.triton_utils", triton=triton, tl=triton.language)
stand_in(
    "vllm.platforms",
    current_platform=types.SimpleNamespace(
        fp8_dtype=lambda: torch.float8_e4m3fn, is_rocm=lambda: False,
        has_device_capability=lambda at_least: True, get_device_capability=lambda: (9, 0),
        is_device_capability_family=lambda family: False,
    ),
)  # fmt: skip


class KVQuantMode(enum.IntEnum):
    """The modes that the kernels' wrappers name."""

    NONE, FP8_PER_TENSOR, INT8_PER_TOKEN_HEAD, FP8_PER_TOKEN_HEAD, INT4_PER_TOKEN_HEAD = range(5)


stand_in("vllm.v1.kv_cache_interface", KVQuantMode=KVQuantMode)
from vllm.v1.attention.ops.prefix_prefill import context_attention_fwd
from vllm.v1.attention.ops.triton_decode_attention import decode_attention_fwd
from vllm.v1.attention.ops.triton_merge_attn_states import merge_attn_states
from vllm.v1.attention.ops.triton_unified_attention import unified_attention

# The engine allocates pages of multiples of 16, and attends to at least the new tokens.
paged = {"cache": ("paged",), "page_sizes": (16, 32, 48), "dtypes": ("fp16", "bf16")}
paged |= {"zero_sizes": False, "m_gt_n": False, "dv_ne_d": False}
SEGMENTS, SPLITS = 16, 4


def _tokens(q):
    """Return (B, H, M, D) as packed tokens (B M, H, D), and their offsets."""
    B, H, M, D = q.shape
    offsets = torch.arange(B + 1, dtype=torch.int32, device=q.device) * M
    return q.transpose(1, 2).reshape(B * M, H, D), offsets


def _entries(out, q):
    return out.unflatten(0, (q.shape[0], q.shape[2])).transpose(1, 2)


def _wide(table):
    """Return a table as wide as the engine's, as kernels read the places of whole tiles."""
    return torch.nn.functional.pad(table, (0, 1))


def _of_heads(mods):
    """Return slopes and sinks as the engine has them: contiguous, those of heads in all entries."""
    slopes, sinks = (mods.get(name) for name in ("alibi_slopes", "sinks"))
    if slopes is not None and slopes.ndim == 2:
        raise NotImplementedError("slopes are those of heads, in all entries")
    return tuple(None if x is None else x.contiguous() for x in (slopes, sinks))


def unified_call(
    q, k_cache, v_cache, lengths, table, scale, window, mods, causal=True, scales=None, **others
):
    """Attend with unified_attention, whose other arguments are given by name."""
    if not causal and window != (None, None):
        raise NotImplementedError("without causal=True, a window is as wide to the right")
    (slopes, sinks), (packed, offsets) = _of_heads(mods), _tokens(q)
    out, ones = torch.empty_like(packed), torch.ones(1, device=q.device)
    k_scale, v_scale = scales or (ones, ones)
    left = -1 if window[0] is None else window[0]
    unified_attention(
        packed, k_cache, v_cache, out, offsets, q.shape[2], lengths, int(lengths.max()), scale,
        causal, (left, 0), _wide(table), mods.get("softcap") or 0, None, k_scale, v_scale,
        alibi_slopes=slopes, sinks=sinks, **others,
    )  # fmt: skip
    return _entries(out, q)


@attention_kernel(
    **paged, masks=("causal", "window"), score_mods=("softcap", "alibi", "sinks"), block_n=32,
    # VLLM_BATCH_INVARIANT=1 takes this path, so that no bit depends on the batch.
    same_bits=("batch",),
)  # fmt: skip
def unified(
    q, k_cache, v_cache, *, cache_seqlens, page_table, sm_scale, causal, window_size, **mods
):
    """unified_attention with one program for all keys of a row."""
    return unified_call(
        q, k_cache, v_cache, cache_seqlens, page_table, sm_scale, window_size, mods, causal
    )


@attention_kernel(
    **paged, masks=("causal", "window"), always_causal=True, one_query=True, splits=SEGMENTS,
    score_mods=("softcap", "alibi", "sinks"),
)  # fmt: skip
def unified_decode(
    q, k_cache, v_cache, *, cache_seqlens, page_table, sm_scale, window_size, **mods
):
    """unified_attention with a program for each of 16 segments of the keys."""
    shape = (len(q), q.shape[1], SEGMENTS)
    segments = {
        "seq_threshold_3D": len(q), "num_par_softmax_segments": SEGMENTS,
        "softmax_segm_output": q.new_empty(
            *shape, triton.next_power_of_2(q.shape[3]), dtype=torch.float32
        ),
        "softmax_segm_max": q.new_empty(shape, dtype=torch.float32),
        "softmax_segm_expsum": q.new_empty(shape, dtype=torch.float32),
    }  # fmt: skip
    return unified_call(
        q, k_cache, v_cache, cache_seqlens, page_table, sm_scale, window_size, mods,
        **segments,
    )  # fmt: skip


@attention_kernel(
    **paged | {"dv_ne_d": True, "page_sizes": (1, 16)}, masks=(), one_query=True, splits=SPLITS,
    score_mods=("softcap",), block_n=32,
)  # fmt: skip
def decode(q, k_cache, v_cache, *, cache_seqlens, page_table, sm_scale, softcap=0.0):
    """decode_attention_fwd, from which latent attention decodes."""
    (B, H, _, _), Dv = q.shape, v_cache.shape[3]
    out, lse = q.new_empty(B, H, Dv), q.new_empty(B, H, dtype=torch.float32)
    sums = q.new_empty(B, H, SPLITS, Dv + 1, dtype=torch.float32)
    decode_attention_fwd(
        q[:, :, 0].contiguous(), k_cache, v_cache, out, lse, page_table, cache_seqlens, sums,
        SPLITS, sm_scale, k_cache.shape[1], softcap,
    )  # fmt: skip
    return out.unsqueeze(2), lse.unsqueeze(2)


@attention_kernel(
    **paged, masks=("causal", "window"), always_causal=True, score_mods=("sinks",), block_n=64,
    head_dims=(16, 8, 40, 64, 128),
)  # fmt: skip
def prefix(q, k_cache, v_cache, *, cache_seqlens, page_table, sm_scale, window_size, **mods):
    """context_attention_fwd, with the new keys in the cache."""
    # Keys lie in pieces of 8 columns.
    pieces = k_cache.unflatten(3, (-1, 8)).permute(0, 2, 3, 1, 4)
    (_, sinks), (packed, offsets) = _of_heads(mods), _tokens(q)
    width = None if window_size[0] is None else window_size[0] + 1
    out, one = torch.empty_like(packed), torch.ones(1, device=q.device)
    context_attention_fwd(
        packed, None, None, out, "auto", pieces, v_cache.permute(0, 2, 3, 1), _wide(page_table),
        offsets, cache_seqlens, int(cache_seqlens.max()), q.shape[2], one, one,
        sliding_window=width, sm_scale=sm_scale, sinks=sinks,
    )  # fmt: skip
    return _entries(out, q)


@attention_kernel(states=True, dtypes=("fp16", "bf16", "fp32"), backward=False)
def merge(outs, lses):
    """merge_attn_states: two states."""
    if len(outs) != 2:
        raise NotImplementedError("merge_attn_states takes two states")
    one, other = (_tokens(x)[0].contiguous() for x in outs)
    first, second = (x.transpose(0, 1).flatten(1).contiguous() for x in lses)
    out, lse = torch.empty_like(one), torch.empty_like(first)
    if len(out):
        merge_attn_states(out, one, first, other, second, lse)
    return _entries(out, outs[0]), lse.unflatten(1, (outs.shape[1], outs.shape[3])).transpose(0, 1)
