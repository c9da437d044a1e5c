"""Faults of the backward alone."""

import torch
from plain_attention import Attention, kernel, with_gradient

BACKWARD = {"backward": True, "max_seqlen": 40}


@kernel(**BACKWARD, gqa=True)
class FirstOfTheGroup(Attention):
    """The first query head of a group alone adds to dk and dv."""

    def expand(self, x, H):
        heads = x.shape[1]
        return with_gradient(
            x, lambda d: d.unflatten(1, (heads, -1))[:, :, 0], lambda x: repeated(x, H)
        )


def repeated(x, H):
    return x.repeat_interleave(H // x.shape[1], 1)


@kernel(**BACKWARD)
class ScaleOfTheHeadDim(Attention):
    """dq is scaled by D**-0.5, whatever the scale of the call."""

    def scores(self, q, k, sm_scale):
        own = q.shape[-1] ** -0.5
        return super().scores(with_gradient(q, lambda d: d * (own / sm_scale)), k, sm_scale)


@kernel(**BACKWARD, lse_grad=True)
class LseIsConstant(Attention):
    """A gradient of lse does not reach q and k."""

    def stored(self, out, lse, dtype):
        return super().stored(out, with_gradient(lse, torch.zeros_like), dtype)


@kernel(**BACKWARD, score_mods=("bias",))
class BiasOfTheLast(Attention):
    """The gradient of a bias that all entries share is that of the last entry."""

    def __call__(self, q, k, v, *, bias=None, **rest):
        if bias is not None and bias.shape[0] == 1 < q.shape[0]:
            B = q.shape[0]
            bias = with_gradient(
                bias, lambda d: d[-1:], lambda x: x.expand(B, *x.shape[1:]).clone()
            )
        return super().__call__(q, k, v, bias=bias, **rest)


@kernel(**BACKWARD, dtypes=("fp16", "fp32"), gqa=True)
class SumsOfHeadsRounded(Attention):
    """dk and dv of each query head are rounded, and added in 16 bits."""

    def __call__(self, q, *rest, **words):
        self.dtype = q.dtype
        return super().__call__(q, *rest, **words)

    def expand(self, x, H):
        heads, dtype = x.shape[1], self.dtype

        def rounded_sum(d):
            return d.to(dtype).unflatten(1, (heads, -1)).sum(2).to(d.dtype)

        return with_gradient(x, rounded_sum, lambda x: repeated(x, H))
