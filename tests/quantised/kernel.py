"""Attention over a cache of codes in plain PyTorch, in steps that a fault replaces one of.

``--fa-kernel=tests/quantised/kernel.py:attention``. Caches hold e4m3, e5m2 or int8, or the dtype of
q. ``divided`` has scales that divide, ``dequantising`` rounds products of codes and scales to bf16,
and ``scaling_p`` multiplies P by the scales of values and rounds it.
"""

from __future__ import annotations

import math

import torch

from fa_verify import attention_kernel

__all__ = ["CodesKernel", "attention", "declared", "dequantising", "divided", "scaling_p"]

LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0, torch.int8: 127.0}
LEAST_SCALE = 2.0**-40


class CodesKernel:
    """The right kernel. Pages (pages, page_size, Hk, columns), tables as in ``CacheInputs``."""

    divides = False

    def __call__(
        self, q, k_cache, v_cache, *, cache_seqlens, page_table=None, cache_batch_idx=None, k=None,
        v=None, k_scale=None, v_scale=None, causal, window_size, sm_scale,
    ):  # fmt: skip
        table = (cache_batch_idx[:, None] if page_table is None else page_table).long()
        size, new = k_cache.shape[1], 0 if k is None else k.shape[2]
        held = cache_seqlens.long() + new
        if k is not None:
            rows = cache_seqlens.long()[:, None] + torch.arange(new)
            places = table.gather(1, rows // size), rows % size
            self.write("k", k_cache, k_scale, k, places)
            self.write("v", v_cache, v_scale, v, places)
        # Other places read the first row of page 0, and are 0 after it.
        n = torch.arange(int(held.max()) if len(held) and len(k_cache) else 0)
        seen = self.seen(q.shape[2], n, held, causal, window_size)
        # Pages whose keys a window hides from all rows belong to others.
        used = seen.any(2).squeeze(1) & (n // size < table.shape[1])
        places = (n // size).clamp(max=max(0, table.shape[1] - 1)).expand_as(used)
        page = torch.where(used, table.gather(1, places) if n.numel() else places, 0)
        row = torch.where(used, n % size, 0)
        of_cache = ("k", k_cache, k_scale), ("v", v_cache, v_scale)
        keys, values = (self.numbers(*x, page, row, used) for x in of_cache)
        scores = (q.float() @ grouped(keys, q).mT * sm_scale).masked_fill(~seen, -math.inf)
        top = scores.amax(3, keepdim=True) if n.numel() else scores.sum(3, keepdim=True) - math.inf
        weights = (scores - top.clamp(min=-1e30)).exp()
        total = weights.sum(3, keepdim=True)
        out = self.sums(weights, values, v_scale, page, row, used)
        out = out / torch.where(total > 0, total, 1.0)
        lse = torch.where(total > 0, top + total.log(), -math.inf).squeeze(3)
        return out.to(q.dtype), lse

    def seen(self, M, n, held, causal, window_size):
        """The keys that each row sees, bool (B, 1, M, N)."""
        last = torch.arange(M) + (held[:, None] - M)
        left, right = window_size
        seen = (n < held[:, None])[:, None].expand(-1, M, -1)
        if causal or right is not None:
            seen = seen & (n <= last[:, :, None] + (0 if causal else right))
        if left is not None:
            seen = seen & (n >= last[:, :, None] - left)
        return seen[:, None]

    def numbers(self, name, cache, scale, page, row, used):
        """The keys or values of each entry, float32 (B, N, Hk, columns), 0 in unused places."""
        if scale is None:
            found = cache[page, row].float()
        else:
            codes = self.codes(cache, page, row)
            found = self.dequantised(codes, self.scales(name, scale, page, row, codes))
        return found.masked_fill(~used[:, :, None, None], 0.0)

    def codes(self, cache, page, row):
        """The codes of each key, as float32."""
        return self.read(cache.view(torch.uint8)[page, row], cache.dtype)

    def read(self, codes, dtype):
        """The numbers of codes."""
        return codes.view(dtype).float()

    def scales(self, name, scale, page, row, codes):
        """The scale of each key and head, (B, N, Hk)."""
        if scale.ndim > 1:
            scale = scale[page] if scale.ndim == 2 else scale[page, row]
        return scale.expand(codes.shape[:3])

    def dequantised(self, codes, scales):
        """The numbers of codes and their scales."""
        return codes / scales[..., None] if self.divides else codes * scales[..., None]

    def sums(self, weights, values, v_scale, page, row, used):
        """The weighted sums of values, float32 (B, H, M, Dv)."""
        return weights @ grouped(values, weights)

    def write(self, name, cache, scale, new, places):
        """Append (B, Hk, L, columns) in place."""
        x = new.transpose(1, 2)
        if scale is None:
            cache[places] = x
            return
        x = x.float()
        if scale.ndim == 3:
            factor = self.made_scales(x, LARGEST[cache.dtype])
            scale[places] = factor
        else:
            factor = scale.expand(x.shape[:3])
        codes = self.cast(self.quotient(x, factor[..., None]), cache.dtype)
        cache.view(torch.uint8)[places] = codes.view(torch.uint8)

    def made_scales(self, x, largest):
        """The scale of each token and head."""
        return (x.abs().amax(-1) / largest).clamp(min=LEAST_SCALE)

    def quotient(self, x, factor):
        """The number that is cast to a code."""
        return x * factor if self.divides else x / factor

    def cast(self, x, dtype):
        """The nearest code; numbers beyond the range have the largest."""
        if dtype == torch.int8:
            return x.round().clamp(-128, 127).to(dtype)
        return x.clamp(-LARGEST[dtype], LARGEST[dtype]).to(dtype)


def grouped(x, of_heads):
    """(B, N, Hk, columns) as (B, H, N, columns), for the heads of (B, H, ...)."""
    return x.transpose(1, 2).repeat_interleave(of_heads.shape[1] // x.shape[2], 1)


class _Divided(CodesKernel):
    divides = True


class _Dequantising(CodesKernel):
    def dequantised(self, codes, scales):
        return super().dequantised(codes, scales).bfloat16().float()


class _ScalingP(CodesKernel):
    def numbers(self, name, cache, scale, page, row, used):
        if name == "v" and scale is not None:
            found = self.codes(cache, page, row)
            return found.masked_fill(~used[:, :, None, None], 0.0)
        return super().numbers(name, cache, scale, page, row, used)

    def sums(self, weights, values, v_scale, page, row, used):
        if v_scale is not None:
            scales = self.scales("v", v_scale, page, row, values)[..., None]
            weights = weights * grouped(scales.masked_fill(~used[..., None, None], 0.0), weights).mT
        return super().sums(weights.half().float(), values, v_scale, page, row, used)


def declared(kernel, **words):
    """Return the call of a kernel as a function with the declarations of this file."""

    def attention(q, k_cache, v_cache, **given):
        return kernel(q, k_cache, v_cache, **given)

    of_all = {
        "cache": ("contiguous", "paged", "append"),
        "cache_formats": ("input", "e4m3fn", "e5m2", "int8"),
        "cache_scales": ("tensor", "head", "page", "token_head"),
        "dtypes": ("fp16", "bf16", "fp32"), "masks": ("causal", "window"), "p_dtype": "fp32",
        "writing": {"least_scale": LEAST_SCALE}, "devices": ("cpu",),
    }  # fmt: skip
    return attention_kernel(**of_all | words)(attention)


attention = declared(CodesKernel())
divided = declared(_Divided(), scale_divides=True)
dequantising = declared(_Dequantising(), dtypes=("bf16",), dequantised="rounded")
scaling_p = declared(_ScalingP(), dtypes=("fp16",), v_scale_on="p", p_dtype="input")
