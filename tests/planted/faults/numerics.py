"""Conventions that are not declared, and numerics that a declaration covers or none."""

import math

import torch
from plain_attention import Attention, kernel, with_gradient


@kernel(dtypes=("fp16", "fp32"))
class LogarithmsInBase2(Attention):
    """lse is a logarithm in base 2."""

    def stored(self, out, lse, dtype):
        return super().stored(out, lse / math.log(2.0), dtype)


@kernel(masks=("causal", "padding"))
class EmptyLseIsPositive(Attention):
    """lse is +inf where a row sees no key."""

    def stored(self, out, lse, dtype):
        return super().stored(out, torch.where(lse == -torch.inf, torch.inf, lse), dtype)


@kernel(dtypes=("fp16", "bf16", "fp32"))
class RoundedWeights(Attention):
    """P is rounded to the dtype of the inputs before its product with V."""

    def __call__(self, q, *rest, **words):
        self.dtype = q.dtype
        return super().__call__(q, *rest, **words)

    def values(self, p, v):
        return super().values(p.to(self.dtype).to(p.dtype), v)


@kernel(dtypes=("fp16", "fp32"))
class ScoresIn16Bits(Attention):
    """The scores of fp16 inputs are rounded to fp16 before the scale."""

    def __call__(self, q, *rest, **words):
        self.dtype = q.dtype
        return super().__call__(q, *rest, **words)

    def scores(self, q, k, sm_scale):
        return (q @ k.mT).to(self.dtype).to(q.dtype) * sm_scale


@kernel(dtypes=("fp16", "bf16", "fp32"))
class TruncatedInBf16(Attention):
    """bf16 results are cut off, not rounded."""

    def stored(self, out, lse, dtype):
        if dtype == torch.bfloat16:
            out = (out.contiguous().view(torch.int32) & -65536).view(torch.float32)
        return super().stored(out, lse, dtype)


@kernel()
class NoMaximum(Attention):
    """exp is taken of the scores themselves, which overflow or underflow."""

    def averaged(self, scores, v, sink):
        p = torch.exp(scores)
        total = p.sum(-1)
        return p @ v / total[..., None], torch.log(total)


@kernel(dtypes=("fp16", "fp32"))
class LseIn16Bits(Attention):
    """lse passes through the dtype of the inputs."""

    def stored(self, out, lse, dtype):
        return super().stored(out, lse.to(dtype).to(lse.dtype), dtype)


@kernel(dtypes=("fp32", "fp64"))
class LseOfFp64InFp32(Attention):
    """lse is float32 for float64 inputs."""

    def stored(self, out, lse, dtype):
        return super().stored(out, lse.float(), dtype)


@kernel(dtypes=("fp16", "bf16"))
class OutOfBf16InFp32(Attention):
    """out is float32 for bf16 inputs."""

    def stored(self, out, lse, dtype):
        return super().stored(out, lse, torch.float32 if dtype == torch.bfloat16 else dtype)


@kernel(dtypes=("fp16", "fp32"), masks=("padding",))
class LseIn16BitsAndPaddedKey(Attention):
    """Two faults: lse in 16 bits, and the first padded key is seen."""

    def seen(self, mask, B, H, M, N, device):
        seen = super().seen(mask, B, H, M, N, device)
        if not N:
            return seen
        return seen | torch.cat([seen[..., :1], seen[..., :-1]], -1)

    def stored(self, out, lse, dtype):
        return super().stored(out, lse.to(dtype).to(lse.dtype), dtype)


@kernel(backward=True, max_seqlen=100)
class LongKeysAndLostGradient(Attention):
    """Two faults: keys past 64 get no weight, and dv lacks the first key."""

    def seen(self, mask, B, H, M, N, device):
        return super().seen(mask, B, H, M, N, device) & (torch.arange(N, device=device) < 64)

    def values(self, p, v):
        first = torch.arange(v.shape[2], device=v.device)[:, None] == 0
        return super().values(p, with_gradient(v, lambda d: torch.where(first, 0.0, d)))
