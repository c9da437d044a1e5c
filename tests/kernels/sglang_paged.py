"""SGLang's Triton kernels that read a table of slots, and the one that merges attention states."""

import types

import torch
from brought import importable, stand_in
from slots import slots, slots_of

from fa_verify import attention_kernel

importable(
    "sgl-project/sglang", "python/sglang/kernels/ops/attention/decode_attention.py", root="python"
)
stand_in(
    "sglang.srt.utils", get_device_core_count=lambda: 0,
    **dict.fromkeys(
        ("is_cuda", "is_hip", "is_gfx95_supported", "is_gfx1250_supported"), lambda: False
    ),
)  # fmt: skip
stand_in("sglang.srt.environ", envs=types.SimpleNamespace())
from sglang.kernels.ops.attention.decode_attention import decode_attention_fwd
from sglang.kernels.ops.attention.extend_attention import extend_attention_fwd
from sglang.kernels.ops.attention.merge_state import merge_state_triton

SPLITS = 8
paged = {"cache": ("paged",), "dtypes": ("fp16", "bf16"), "zero_sizes": False, "m_gt_n": False}


def _slots(k_cache, v_cache, table, lengths):
    """Return the slots of the first ``lengths`` keys of each entry, packed, and their offsets."""
    found = slots_of(k_cache, v_cache, table, int(lengths.max()))
    used = torch.arange(found.shape[1], device=found.device) < lengths[:, None]
    return found[used], torch.nn.functional.pad(lengths.cumsum(0).int(), (1, 0))


@attention_kernel(
    **paged, masks=(), one_query=True, score_mods=("softcap", "sinks"), splits=SPLITS, block_n=32,
)  # fmt: skip
def decode(q, k_cache, v_cache, **given):
    """decode_attention_fwd, with the default of at most 8 splits."""
    return token_by_token(q, k_cache, v_cache, **given)


def token_by_token(
    q, k_cache, v_cache, *, cache_seqlens, page_table, sm_scale, softcap=0.0, sinks=None,
    k_scale=1.0, v_scale=1.0,
):  # fmt: skip
    """Attend with one query of each entry, to slots of numbers or of codes."""
    (B, H, _, _), Dv = q.shape, v_cache.shape[3]
    indices, offsets = _slots(k_cache, v_cache, page_table, cache_seqlens)
    out = q.new_empty(B, H, Dv)
    decode_attention_fwd(
        q[:, :, 0].contiguous(), slots(k_cache), slots(v_cache), out, offsets, indices,
        q.new_empty(B, H, SPLITS, Dv, dtype=torch.float32),
        q.new_empty(B, H, SPLITS, dtype=torch.float32),
        torch.full_like(cache_seqlens, SPLITS), SPLITS, sm_scale, k_scale, v_scale, softcap,
        None if sinks is None else sinks.contiguous(),
    )  # fmt: skip
    return out.unsqueeze(2)


@attention_kernel(**paged, masks=("causal", "window"), score_mods=("softcap", "sinks"), block_n=32)
def extend(
    q, k_cache, v_cache, *, cache_seqlens, page_table, sm_scale, causal, window_size, softcap=0.0,
    sinks=None,
):  # fmt: skip
    """extend_attention_fwd, which reads new keys outside of the cache, and all others there."""
    left, right = window_size
    if left == 0 or right:
        raise NotImplementedError("a window is 1 to the left or more, and none to the right")
    B, H, M, _ = q.shape
    indices, offsets = _slots(k_cache, v_cache, page_table, cache_seqlens - M)
    longest = slots_of(k_cache, v_cache, page_table, int(cache_seqlens.max()))
    last = cache_seqlens[:, None] - M + torch.arange(M, device=q.device)
    new = longest.gather(1, last).flatten()
    packed = q.transpose(1, 2).reshape(B * M, H, -1)
    out = q.new_empty(B * M, H, v_cache.shape[3])
    extend_attention_fwd(
        packed, slots(k_cache)[new], slots(v_cache)[new], out, slots(k_cache), slots(v_cache),
        torch.arange(B + 1, dtype=torch.int32, device=q.device) * M, offsets, indices, None,
        causal, None, M, 1.0, 1.0, sm_scale, softcap,
        sliding_window_size=-1 if left is None else left,
        sinks=None if sinks is None else sinks.contiguous(),
    )  # fmt: skip
    return out.unflatten(0, (B, M)).transpose(1, 2)


@attention_kernel(states=True, dtypes=("fp16", "bf16", "fp32"), backward=False)
def merge(outs, lses):
    """merge_state_triton: two states."""
    if len(outs) != 2:
        raise NotImplementedError("merge_state_triton takes two states")
    (v, other), (s, other_s) = (
        [one.transpose(1, 2).flatten(0, 1).contiguous() for one in x] for x in (outs, lses)
    )
    if not len(v):
        return outs[0], lses[0]
    out, lse = merge_state_triton(v, s, other, other_s)
    return tuple(x.unflatten(0, (outs.shape[1], -1)).transpose(1, 2) for x in (out, lse))
