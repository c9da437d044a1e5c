"""Attention in plain PyTorch: correct, or with a single fault for a guarantee to find."""

from __future__ import annotations

import math

import torch

__all__ = ["Eager"]


class Eager:
    """Attention by autograd in the dtype of its inputs, correct unless it has a fault."""

    returns_lse = True
    lse_grad = False
    score_mods: tuple[str, ...] = ()
    bitwise = ("G4", "G5", "G10")
    devices = ("cpu",)

    def __init__(self, fault: str = "") -> None:
        self.fault = fault
        self.calls = 0
        self.scales: dict[tuple[int, ...], float] = {}

    def __call__(
        self,
        q,
        k,
        v,
        *,
        mask,
        sm_scale,
        config="default",
        softcap=None,
        alibi_slopes=None,
        bias=None,
        sinks=None,
    ):
        self.calls += 1
        q, k, v, sm_scale = self.misread(q, k, v, sm_scale)
        (B, H, M, _), (Hk, N) = q.shape, k.shape[1:3]
        seen = mask.dense(B, H, M, N).expand(B, H, M, N)
        if self.fault == "sees one key more":
            seen = seen | seen.roll(1, 3)
        live = seen.any(3, keepdim=True)
        used = seen.any(2).view(B, Hk, H // Hk, N).any(2).unsqueeze(3)
        if self.fault != "reads padding":
            q, k, v = (
                torch.where(live, q, 0.0),
                torch.where(used, k, 0.0),
                torch.where(used, v, 0.0),
            )
        k, v = (x.repeat_interleave(H // Hk, 1) for x in (k, v))
        scores = q @ k.mT * sm_scale
        if softcap is not None:
            scores = self.capped(scores, softcap)
        if alibi_slopes is not None:
            scores = scores + self.alibi(alibi_slopes, mask, B, M, N)
        if bias is not None:
            scores = scores + self.visible(bias, seen)
        scores = torch.where(seen, scores, -math.inf)
        if sinks is not None and self.fault != "no sink":
            return self.with_sinks(scores, seen, v, sinks, mask.lengths(B, M, N)[0])
        m = scores.detach().amax(3, keepdim=True) if N else scores.new_zeros((B, H, M, 1))
        m = torch.where(live, m, 0.0)
        if self.fault == "no maximum subtracted":
            m = torch.zeros_like(m)
        e = torch.exp(scores - m)
        total = torch.where(live, e.sum(3, keepdim=True), 1.0)
        if self.fault != "no select on dP":
            p = torch.where(seen, e / total, 0.0)
        else:
            p = e / total
        out = p @ v
        if self.fault != "dout of empty rows":
            out = torch.where(live, out, 0.0)
        lse = torch.where(live, m + total.log(), -math.inf).squeeze(3)
        if not self.lse_grad:
            lse = lse.detach()
        return self.spoil(out, lse, live, N, config)

    def capped(self, scores, softcap):
        """c tanh(x / c), whose slope is 1 - tanh**2 by autograd."""
        capped = softcap * torch.tanh(scores / softcap)
        is_flat = self.fault == "no slope of a softcap"
        return scores + (capped - scores).detach() if is_flat else capped

    def alibi(self, slopes, mask, B, M, N):
        """(B, H, M, N): slopes times distances."""
        rows, keys = (torch.tensor(x).view(-1, 1, 1, 1) for x in mask.lengths(B, M, N))
        ahead = keys - rows
        if self.fault == "ALiBi from the first key":
            ahead = 0 * ahead
        distance = (torch.arange(M).view(-1, 1) + ahead - torch.arange(N)).abs()
        return -slopes.view(-1, slopes.shape[-1], 1, 1).double() * distance

    def visible(self, bias, seen):
        """A bias with zeros at hidden pairs."""
        if self.fault == "dbias of the first entry alone":
            bias = torch.cat([bias, bias.detach().expand(len(seen) - 1, -1, -1, -1)])
        if self.fault == "bias of the head before":
            bias = bias.roll(1, 1)
        if self.fault == "dbias is NaN" and bias.requires_grad:
            bias = bias * 1
            bias.register_hook(lambda gradient: gradient * math.nan)
        return torch.where(seen, bias, 0.0)

    def with_sinks(self, scores, seen, v, sinks, rows):
        """The results where each valid row has one more key, of value 0."""
        B, H, M, _ = scores.shape
        if self.fault == "sink of the head before":
            sinks = sinks.roll(1)
        if self.fault == "dsinks of the first entry alone":
            sinks = torch.cat([sinks[None], sinks.detach().expand(B - 1, -1)])
        valid = torch.arange(M).view(-1, 1) < torch.tensor(rows).view(-1, 1, 1, 1)
        sink = torch.where(valid, sinks.view(-1, H, 1, 1).double(), -math.inf).expand(B, H, M, 1)
        scores, seen = torch.cat([scores, sink], 3), torch.cat([seen, sink > -math.inf], 3)
        live = seen.any(3, keepdim=True)
        m = torch.where(live, scores.detach().amax(3, keepdim=True), 0.0)
        total = torch.where(seen, (scores - m).exp(), 0.0).sum(3, keepdim=True)
        total = torch.where(live, total, 1.0)
        p = torch.where(seen, (scores - m).exp() / total, 0.0)
        lse = torch.where(live, m + total.log(), -math.inf).squeeze(3)
        if self.fault == "lse without the sink":
            some = torch.where(seen, (scores - m).exp(), 0.0)[..., :-1].sum(3, keepdim=True)
            lse = (m + some.log()).squeeze(3)
        if not self.lse_grad:
            lse = lse.detach()
        return torch.where(live, p[..., :-1] @ v, 0.0), lse

    def misread(self, q, k, v, sm_scale):
        """The arguments changed by a fault."""
        if self.fault == "reads past the end":
            q = q + _after_the_end(q)
        if self.fault == "ignores strides":
            v = v.as_strided(v.shape, torch.empty(v.shape).stride())
        if self.fault == "offsets of 32 bits":
            q, k, v = (_gathered_by_int32(x) for x in (q, k, v))
        if self.fault == "v of the first batch entry for all":
            v = v[:1].expand(v.shape)
        if self.fault == "scale of the call before":
            used = self.scales.get(q.shape, sm_scale)
            self.scales[q.shape] = sm_scale
            sm_scale = used
        return q, k, v, sm_scale

    def spoil(self, out, lse, live, N, config):
        """The results changed by a fault."""
        if self.fault == "out scaled":
            out = out * 1.001
        if self.fault == "one element off":
            out = out + torch.zeros_like(out).index_put_(
                tuple(torch.tensor([i]) for i in (1, 2, 19, 1)), torch.tensor(1e-11).double()
            )
        if self.fault == "another tile past 16 keys" and config == "wide" and N > 16:
            out = out * 1.001
        if self.fault == "another result every call":
            out = out * (1 + 2.0**-50 * self.calls)
        if self.fault == "lse in base 2":
            lse = lse / math.log(2)
        if self.fault == "lse of empty rows is 0":
            lse = torch.where(live.squeeze(3), lse, 0.0)
        if self.fault == "NaN in lse":
            lse = torch.where(lse > 0.5, torch.nan, lse)
        if self.fault == "last row not written":
            out = _Copied.apply(out, 0, 16)
        if self.fault == "writes past the end":
            out = _Copied.apply(out, 1, None)
        return out, lse


def _after_the_end(x):
    """The element past the end, times 0."""
    last = sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
    return 0 * x.as_strided((), (), x.storage_offset() + last + 1) if x.numel() else 0


def _gathered_by_int32(x):
    """The elements at offsets that wrap around at 2**31, as in a kernel with 32-bit offsets."""
    offsets = torch.zeros((), dtype=torch.int32)
    for axis, (size, stride) in enumerate(zip(x.shape, x.stride(), strict=True)):
        steps = torch.arange(size, dtype=torch.int64) * stride
        steps = steps.to(torch.int32)  # wraps around
        offsets = offsets + steps.view(-1, *[1] * (3 - axis))
    with torch.no_grad():
        reach = x.untyped_storage().nbytes() // x.element_size()
        flat = x.as_strided((reach,), (1,), 0)
        wrong = flat[(x.storage_offset() + offsets.to(torch.int64)) % max(1, reach)] - x
    return x + wrong


class _Copied(torch.autograd.Function):
    """A copy into new memory that writes past the end, or leaves the last rows unwritten."""

    @staticmethod
    def forward(ctx, x, extra, rows):
        copy = torch.empty(x.shape, dtype=x.dtype)
        copy[:, :, :rows] = x[:, :, :rows]
        room = copy.untyped_storage().nbytes() // copy.element_size() - copy.storage_offset()
        if copy.numel() + extra <= room:
            copy.as_strided((copy.numel() + extra,), (1,))[copy.numel() :] = 0
        return copy

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None, None
