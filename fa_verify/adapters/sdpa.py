"""PyTorch's scaled_dot_product_attention, one subject for each of its backends.

A mask without a native form is passed as a dense bool tensor. The function takes no sequence
lengths, so padding is not declared.
"""

from __future__ import annotations

import warnings

from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

__all__ = ["cudnn", "efficient", "flash", "flash_on_cpu", "math"]


def _attention(backend, q, k, v, mask, sm_scale, *, dense=True):
    """Call ``scaled_dot_product_attention`` with a single backend enabled."""
    sizes = (*q.shape[:3], k.shape[2])
    square = q.shape[2] == k.shape[2]
    bounded = mask.window_left is not None or mask.window_right is not None
    given, is_causal = None, mask.causal and square and not bounded
    if (mask.causal or bounded) and not is_causal:
        if not dense:
            raise NotImplementedError(
                "scaled_dot_product_attention: this backend accepts no dense mask"
            )
        given = mask.dense(*sizes, device=q.device)
    with sdpa_kernel(backend), warnings.catch_warnings(record=True, action="always") as told:
        try:
            return scaled_dot_product_attention(
                q, k, v, given, is_causal=is_causal, scale=sm_scale,
                enable_gqa=q.shape[1] != k.shape[1],
            )  # fmt: skip
        except RuntimeError as error:
            reason = _refusal(str(error), [str(warning.message) for warning in told])
            if reason is None:
                raise
            raise NotImplementedError(f"{backend.name}: {reason}") from None


def _refusal(error, told):
    """Return why a backend refuses a problem, from an error and warnings; None for other errors."""
    if "No available kernel" not in error and "No viable backend" not in error:
        return None
    # Skip the warning that introduces a backend's reasons, and those of disabled backends.
    reasons = [x for x in told if "kernel not used" not in x and "disabled" not in x]
    return reasons[0].partition(" (Triggered")[0] if reasons else "no available kernel"


def math(q, k, v, *, mask, sm_scale):
    """The math backend: matrix products and a softmax, in float32 for 16-bit inputs."""
    return _attention(SDPBackend.MATH, q, k, v, mask, sm_scale)


def flash(q, k, v, *, mask, sm_scale):
    """FlashAttention-2."""
    return _attention(SDPBackend.FLASH_ATTENTION, q, k, v, mask, sm_scale, dense=False)


def flash_on_cpu(q, k, v, *, mask, sm_scale):
    """The kernel of the same name for CPUs, whose tiles and casts are others."""
    return _attention(SDPBackend.FLASH_ATTENTION, q, k, v, mask, sm_scale)


def efficient(q, k, v, *, mask, sm_scale):
    """Memory-efficient attention, derived from xformers."""
    return _attention(SDPBackend.EFFICIENT_ATTENTION, q, k, v, mask, sm_scale)


def cudnn(q, k, v, *, mask, sm_scale):
    """cuDNN's attention. Empty rows, for which it returns the mean of v, are set to 0."""
    if 0 in q.stride() and q.shape[3] != v.shape[3]:
        raise NotImplementedError("cuDNN: a q of stride 0 with Dv != D is a segmentation fault")
    if k.shape[2] % 64 == 0 and q.requires_grad:
        raise NotImplementedError("cuDNN: gradients are NaN if N is a multiple of 64")
    if q.shape[0] * q.shape[1] > 65_535:
        raise NotImplementedError("cuDNN: B * H is more than 65,535")
    out = _attention(SDPBackend.CUDNN_ATTENTION, q, k, v, mask, sm_scale)
    if out.requires_grad:
        # PyTorch caches the backward's graph by the strides of q, k and v. A dout whose strides
        # differ from the first one's would be misread.
        out.register_hook(lambda dout: dout.contiguous())
    seen = mask.dense(*q.shape[:3], k.shape[2], device=q.device).any(3, keepdim=True)
    return out.where(seen, 0)


for _subject in (math, flash, flash_on_cpu, efficient, cudnn):
    _subject.masks = ("causal", "window")
    _subject.returns_lse = False
    _subject.zero_sizes = False

math.p_dtype = "fp32"
math.p_normalised = True
math.backward_reads = ()
# math stores the matrix of scores several times; the others receive a dense mask.
math.max_seqlen = efficient.max_seqlen = cudnn.max_seqlen = 8192

# Their loads are 16 bytes wide. PyTorch does not check a storage offset of one element, which
# results in a misaligned address. They refuse columns that are not adjacent.
ALIGNED = ("bhsd", "bshd", "padded", "expanded", "packed")
# With grouped heads, dk and dv are stored for each query head and then added.
flash.group_sum = cudnn.group_sum = "dtype"

flash.devices = efficient.devices = cudnn.devices = ("cuda",)
flash.layouts = efficient.layouts = cudnn.layouts = ALIGNED
flash.dtypes = cudnn.dtypes = ("fp16", "bf16")
flash.masks = ("causal",)
# is_causal is aligned to the top left; it is used for M = N only.
flash.causal_alignment = "top-left"
flash.head_dims = tuple(range(8, 257, 8))
flash.dv_ne_d = False
flash.flushes = True
flash.backward_reads = ("out", "lse")
flash_on_cpu.devices = ("cpu",)
flash_on_cpu.layouts = ("bhsd", "bshd", "padded", "offset", "expanded", "packed")
flash_on_cpu.dv_ne_d = False
flash_on_cpu.group_sum = "dtype"
flash_on_cpu.backward_reads = ("out",)

efficient.dtypes = ("fp16", "bf16", "fp32")
efficient.gqa = False
efficient.head_dims = tuple(range(8, 257, 8))
efficient.ds_scaled = True
# dS is (dP - delta) times the P that was rounded for dV.
efficient.ds_from = "rounded"

cudnn.head_dims = tuple(range(8, 129, 8))
# The adapter copies lengths from the host.
cudnn.cuda_graphs = False
cudnn.ds_scaled = True
cudnn.flushes = True
