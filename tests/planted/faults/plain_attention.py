"""The right parts of planted faults: attention in PyTorch, of which a fault overrides one step.

Automatic differentiation gives the gradients. ``with_gradient`` replaces the gradient of one step.
"""

import torch

from fa_verify import attention_kernel

# The smallest domain: faults widen it by the words that they need.
NARROW = {
    "dtypes": ("fp32",), "backward": False, "masks": (), "gqa": False, "max_seqlen": 80,
    "head_dims": (16, 24),
    "p_dtype": "fp32", "p_normalised": True,
}  # fmt: skip


class WithGradient(torch.autograd.Function):
    """The identity, or another function of one tensor, with a gradient of its own."""

    @staticmethod
    def forward(ctx, x, function, gradient):
        ctx.gradient = gradient
        return function(x)

    @staticmethod
    def backward(ctx, d):
        return ctx.gradient(d), None, None


def with_gradient(x, gradient, function=torch.clone):
    """Apply a function whose backward is ``gradient``, a function of the gradient."""
    return WithGradient.apply(x, function, gradient)


class Attention:
    """Right attention. Tensors are (B, H, S, D) of the dtype that ``wide`` returns."""

    def __call__(
        self, q, k, v, *, mask, sm_scale, softcap=None, alibi_slopes=None, bias=None, sinks=None
    ):
        (B, H, M, _), N = q.shape, k.shape[2]
        seen = self.seen(mask, B, H, M, N, q.device)
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        qw, kw, vw = q.to(wide), self.expand(k.to(wide), H), self.expand(v.to(wide), H)
        # Keys that no row sees may hold NaN, and so may rows that see no key.
        used = seen.any(2).expand(B, H, N)[..., None]
        busy = seen.any(3).expand(B, H, M)[..., None]
        qw, kw, vw = (torch.where(mine, x, 0.0) for mine, x in ((busy, qw), (used, kw), (used, vw)))
        scores = torch.where(seen, self.scores(qw, kw, sm_scale), 0.0)
        extra = 0.0 if bias is None else bias.to(wide)
        if alibi_slopes is not None:
            slopes = self.slopes(alibi_slopes, H, k.shape[1]).to(wide)
            extra = extra - slopes[:, :, None, None] * distances(mask, B, M, N, q.device)
        scores = self.modified(scores, softcap, extra)
        sink = None
        if sinks is not None:
            rows = torch.tensor(mask.lengths(B, M, N)[0], device=q.device)[:, None, None]
            valid = torch.arange(M, device=q.device) < rows
            sink = torch.where(valid, sinks.to(wide)[:, None], -torch.inf)
        out, lse = self.averaged(torch.where(seen, scores, -torch.inf), vw, sink)
        return self.stored(out, lse, q.dtype)

    def seen(self, mask, B, H, M, N, device):
        """Return the visible pairs, bool, broadcastable to (B, H, M, N)."""
        return mask.dense(B, H, M, N, device=device)

    def expand(self, x, H):
        """Repeat key/value heads for the query heads of their group."""
        return x.repeat_interleave(H // x.shape[1], 1)

    def scores(self, q, k, sm_scale):
        """Return scaled scores."""
        return q @ k.mT * sm_scale

    def slopes(self, slopes, H, Hk):
        """Return ALiBi's slopes (B or 1, H)."""
        return slopes if slopes.ndim == 2 else slopes[None]

    def modified(self, scores, softcap, extra):
        """Cap the scores, then add the bias and ALiBi."""
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        return scores + extra

    def averaged(self, scores, v, sink):
        """Return out and lse of masked scores."""
        p, top, total = weights(scores, sink)
        divisor = torch.where(total > 0, total, 1.0)
        lse = torch.where(total > 0, top + torch.log(divisor), -torch.inf)
        # Neither a hidden pair nor an empty row has a gradient, whatever v and dout hold.
        p = torch.where(scores == -torch.inf, 0.0, p / divisor[..., None])
        return torch.where((total > 0)[..., None], self.values(p, v), 0.0), lse

    def values(self, p, v):
        """Return the weighted sum of the values."""
        return p @ v

    def stored(self, out, lse, dtype):
        """Return the results in their dtypes."""
        return out.to(dtype), lse


def weights(scores, sink=None):
    """Return exp(scores - top), top and the sums of rows; top is finite."""
    if scores.shape[-1]:
        top = scores.detach().amax(-1)
    else:
        top = scores.new_full(scores.shape[:-1], -torch.inf)
    if sink is not None:
        top = torch.maximum(top, sink.detach())
    top = torch.where(top == -torch.inf, 0.0, top)
    p = torch.exp(scores - top[..., None])
    total = p.sum(-1)
    return p, top, total if sink is None else total + torch.exp(sink - top)


def distances(mask, B, M, N, device):
    """Return the distances of rows and keys, (B, 1, M, N)."""
    rows, keys = (torch.tensor(x, device=device) for x in mask.lengths(B, M, N))
    m = torch.arange(M, device=device)[:, None] + (keys - rows)[:, None, None, None]
    return (m - torch.arange(N, device=device)).abs()


def kernel(**words):
    """Make a class of attention a kernel that declares these words."""

    def of(steps):
        """Return the kernel, named as the class."""
        made = steps()

        @attention_kernel(**NARROW | words)
        def attention(q, k, v, *, mask, sm_scale, **mods):
            return made(q, k, v, mask=mask, sm_scale=sm_scale, **mods)

        attention.__name__ = attention.__qualname__ = steps.__name__
        return attention

    return of
