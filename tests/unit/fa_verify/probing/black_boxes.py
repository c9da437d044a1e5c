"""Attention kernels in plain PyTorch whose conventions and roundings are arguments.

``BOXES`` names some of them, and ``truth`` says what a probe should find about each.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

LOG2E = math.log2(math.e)


def tf32(x: torch.Tensor) -> torch.Tensor:
    """Clear the 13 bits that TF32 does not have."""
    return (x.view(torch.int32) & -(2**13)).view(torch.float32)


def tf32_nearest(x: torch.Tensor) -> torch.Tensor:
    """Round to TF32, ties to even."""
    bits = x.view(torch.int32)
    return tf32((bits + 0xFFF + ((bits >> 13) & 1)).view(torch.float32))


def tf32_away(x: torch.Tensor) -> torch.Tensor:
    """Round to TF32, ties away from 0."""
    return tf32((x.view(torch.int32) + 0x1000).view(torch.float32))


def bf16x3(x: torch.Tensor) -> torch.Tensor:
    """The sum of two bf16 numbers."""
    high = x.bfloat16().float()
    return high + (x - high).bfloat16().float()


def bf16(x: torch.Tensor) -> torch.Tensor:
    return x.bfloat16().float()


def whole(x: torch.Tensor) -> torch.Tensor:
    return x


@dataclass(frozen=True)
class Box:
    """A kernel ``f(q, k, v, *, mask, sm_scale)`` with a backward like FlashAttention-2's.

    Args:
        width: Keys of a tile, and rows of a tile of the backward.
        backwards: Whether the last key tile comes first.
        splits: Programs that share the key tiles.
        p: "cast", "fp32", "normalised" or "truncated": P before its dot.
        l_rounded: Whether the softmax sum adds the P that was cast.
        lse: Base of the lse that is returned, "e" or "2"; None returns out alone.
        empty_lse: lse of rows without a key.
        top_left: Whether causal masks begin at the first row and key.
        prescale: "none", "q", "k", "qk", "q log2e" or "k log2e": operands that the dot reads scaled
            and rounded.
        again: The same of the scores that the backward computes again; None is ``prescale``.
        cut: A function of an operand: dots of fp32 inputs read its result.
        threshold: Powers of 2 by which the maximum may rise without a rescale.
        fused: Terms that a step of the dot with V adds at once, truncated; 0 leaves it to BLAS.
        later: Bits that such a step keeps below the last one of its largest term.
        narrow: Whether out is rounded to bf16 after every tile.
        ds_scaled: Whether dS is scaled before its cast.
        ds_from_cast: Whether dS is computed from the P that was cast.
        group_cast: Whether dk and dv of a group are rounded before they are added.
    """

    width: int = 64
    backwards: bool = False
    splits: int = 1
    p: str = "cast"
    l_rounded: bool = False
    lse: str | None = None
    empty_lse: float = -math.inf
    top_left: bool = False
    prescale: str = "none"
    again: str | None = None
    cut: object = whole
    threshold: float = 0.0
    fused: int = 0
    later: int = 0
    narrow: bool = False
    ds_scaled: bool = False
    ds_from_cast: bool = False
    group_cast: bool = False

    def __call__(self, q, k, v, *, mask, sm_scale):
        if q.dtype == torch.float64 or 0 in (q.shape[0], q.shape[2], k.shape[2]):
            raise NotImplementedError("float64, or a size of 0")
        out, lse = Attention.apply(q, k, v, self, mask, sm_scale)
        return out if self.lse is None else (out, lse)

    def seen(self, q, k, mask):
        seen = mask.dense(*q.shape[:3], k.shape[2], device=q.device)
        return torch.ones_like(seen).tril() if self.top_left and mask.causal else seen

    def cast(self, x, dtype):
        """Round P or dS."""
        if self.p == "fp32":
            return x
        if self.p == "truncated" and dtype != torch.float32:
            bits = 16 if dtype == torch.bfloat16 else 13
            return (x.view(torch.int32) & -(2**bits)).view(torch.float32)
        return x.to(dtype).float()

    def scores(self, q, k, s, prescale):
        """Scores in base e."""
        dtype = q.dtype
        factor = LOG2E if "log2e" in prescale else 1.0
        q, k = q.float(), k.float()
        if prescale in ("q", "q log2e"):
            q, s = (q * (s * factor)).to(dtype).float(), 1 / factor
        elif prescale in ("k", "k log2e"):
            k, s = (k * (s * factor)).to(dtype).float(), 1 / factor
        elif prescale == "qk":
            q, k = ((x * math.sqrt(s)).to(dtype).float() for x in (q, k))
            s = 1.0
        return self.dot(q, k.mT, dtype) * s

    def dot(self, a, b, dtype):
        cut = self.cut if dtype == torch.float32 else whole
        return cut(a) @ cut(b)

    def add(self, acc, p, v, dtype):
        """acc + p v, in the order of the dot."""
        if self.narrow:
            return bf16(acc + self.dot(p, v, dtype))
        if not self.fused:
            return acc + self.dot(p, v, dtype)
        for start in range(0, v.shape[2], self.fused):
            here = slice(start, start + self.fused)
            products = (p[:, :, :, here, None] * v[:, :, None, here]).double()
            terms = torch.cat([acc.double().unsqueeze(3), products], 3)
            # Terms are aligned to the largest one, and lose what lies below its last bit.
            exponent = torch.frexp(terms.abs().amax(3, keepdim=True))[1]
            last = 2.0 ** (exponent - 24 - self.later).double()
            total = ((terms / last).trunc().sum(3, keepdim=True) * last).squeeze(3)
            digits, exponent = torch.frexp(total)
            acc = torch.ldexp((digits * 2.0**24).trunc(), exponent - 24).float()
        return acc


class Attention(torch.autograd.Function):
    """The forward and the backward of a box."""

    @staticmethod
    def forward(ctx, q, k, v, box, mask, s):
        dtype, groups = q.dtype, q.shape[1] // k.shape[1]
        wide_k, wide_v = (x.repeat_interleave(groups, 1) for x in (k, v))
        scores = box.scores(q, wide_k, s, box.prescale).masked_fill(
            ~box.seen(q, k, mask), -torch.inf
        )
        starts = [*range(0, k.shape[2], box.width)]
        starts = starts[::-1] if box.backwards else starts
        each = -(-len(starts) // box.splits)
        parts = [
            _attend(box, scores, wide_v, starts[first : first + each], dtype)
            for first in range(0, len(starts), each)
        ]
        m = torch.stack([part[2] for part in parts]).amax(0)
        pivot = m.masked_fill(m == -torch.inf, 0)
        acc = sum(part[0] * (part[2] - pivot).exp().unsqueeze(-1) for part in parts)
        total = sum(part[1] * (part[2] - pivot).exp() for part in parts)
        empty = total == 0
        total = total.masked_fill(empty, 1)
        natural = (pivot + total.log()).masked_fill(empty, -torch.inf)
        out = acc / total.unsqueeze(-1)
        if box.p == "normalised":
            p = (scores - natural.masked_fill(empty, 0).unsqueeze(-1)).exp()
            out = box.cast(p, dtype) @ wide_v.float()
        out = out.to(dtype)
        ctx.box, ctx.mask, ctx.s = box, mask, s
        ctx.save_for_backward(q, k, v, out, natural)
        lse = natural / math.log(2) if box.lse == "2" else natural
        lse = lse.masked_fill(empty, box.empty_lse)
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx, dout, _):
        q, k, v, out, natural = ctx.saved_tensors
        box, s, dtype = ctx.box, ctx.s, q.dtype
        (B, H), Hk = q.shape[:2], k.shape[1]
        wide_k, wide_v = (x.repeat_interleave(H // Hk, 1).float() for x in (k, v))
        scores = box.scores(q, wide_k.to(dtype), s, box.again or box.prescale)
        scores = scores.masked_fill(~box.seen(q, k, ctx.mask), -torch.inf)
        p = (scores - natural.masked_fill(natural == -torch.inf, 0).unsqueeze(-1)).exp()
        dout = dout.float()
        delta = (dout * out.float()).sum(-1, keepdim=True)
        dp = box.dot(dout, wide_v.mT, dtype)
        cast = box.cast(p, dtype)
        ds = (cast if box.ds_from_cast else p) * (dp - delta)
        ds = box.cast(ds * s, dtype) if box.ds_scaled else box.cast(ds, dtype) * s
        dq = torch.zeros_like(q, dtype=torch.float32)
        for start in range(0, k.shape[2], box.width):
            here = slice(start, start + box.width)
            dq = dq + box.dot(ds[..., here], wide_k[:, :, here], dtype)
        dk, dv = torch.zeros_like(wide_k), torch.zeros_like(wide_v)
        for start in range(0, q.shape[2], box.width):
            here = slice(start, start + box.width)
            dk = dk + box.dot(ds[:, :, here].mT, q[:, :, here].float(), dtype)
            dv = dv + box.dot(cast[:, :, here].mT, dout[:, :, here], dtype)
        grouped = (x.to(dtype) if box.group_cast else x for x in (dk, dv))
        dk, dv = (x.view(B, Hk, H // Hk, *x.shape[2:]).sum(2).to(dtype) for x in grouped)
        return dq.to(dtype), dk, dv, None, None, None


def _attend(box, scores, v, starts, dtype):
    """(acc, l, m) of some tiles."""
    m = torch.full(scores.shape[:3], -torch.inf)
    total = torch.zeros(scores.shape[:3])
    acc = torch.zeros(*scores.shape[:3], v.shape[3])
    for start in starts:
        here = slice(start, start + box.width)
        part = scores[..., here]
        highest = torch.maximum(m, part.amax(-1))
        keep = (highest - m) * LOG2E <= box.threshold
        new = torch.where(keep & (m > -torch.inf), m, highest)
        pivot = new.masked_fill(new == -torch.inf, 0)
        p = (part - pivot.unsqueeze(-1)).exp()
        alpha = (m - pivot).exp()
        cast = p if box.p == "normalised" else box.cast(p, dtype)
        total = total * alpha + (cast if box.l_rounded else p).sum(-1)
        acc = box.add(acc * alpha.unsqueeze(-1), cast, v[:, :, here].float(), dtype)
        m = new
    return acc, total, m


def kernel(**how):
    """A kernel without declarations; the arguments are those of ``Box``."""
    box = Box(**how)

    def attention(q, k, v, *, mask, sm_scale):
        return box(q, k, v, mask=mask, sm_scale=sm_scale)

    return attention


BOXES = {
    "like FlashAttention-2": {},
    "last tile first, lse in base 2": {
        "width": 32,
        "backwards": True,
        "lse": "2",
        "empty_lse": 0.0,
    },
    "four splits": {"width": 16, "splits": 4, "lse": "e"},
    "P in fp32, top-left": {"p": "fp32", "top_left": True},
    "P normalised before its cast": {"p": "normalised"},
    "P truncated": {"p": "truncated"},
    "l of the P that was cast": {"width": 128, "l_rounded": True},
    "q scaled and cast": {"prescale": "q"},
    "k scaled and cast": {"prescale": "k", "ds_scaled": True},
    "both scaled and cast": {"prescale": "qk", "ds_from_cast": True},
    "q scaled to base 2": {"prescale": "q log2e", "lse": "2", "empty_lse": math.inf},
    "k scaled to base 2 in the backward alone": {"again": "k log2e"},
    "both scaled in the backward alone": {"again": "qk", "l_rounded": True, "lse": "e"},
    "q scaled in the backward, k in the forward": {"prescale": "k", "again": "q"},
    "TF32": {"cut": tf32},
    "TF32 to nearest": {"cut": tf32_nearest},
    "TF32 away from 0": {"cut": tf32_away},
    "bf16x3": {"cut": bf16x3},
    "fp32 through bf16": {"cut": bf16},
    "threshold of 2**8": {"threshold": 8.0},
    "threshold of 2**3": {"width": 32, "threshold": 3.0, "group_cast": True},
    "16 keys at once, truncated": {"fused": 16},
    "out in bf16 between tiles": {"narrow": True},
    "8 keys at once, truncated": {"width": 32, "fused": 8},
    "16 keys at once, truncated 1 bit later": {"fused": 16, "later": 1},
    "16 keys at once, truncated 2 bits later": {"fused": 16, "later": 2, "backwards": True},
}
_CUTS = {
    tf32: "tf32, truncated", tf32_nearest: "tf32, nearest", tf32_away: "tf32, nearest_away",
    bf16x3: "bf16x3", bf16: "bf16, rounded", whole: "ieee",
}  # fmt: skip
_TRUNCATED = ("truncated when aligned", "truncated 1 bit later", "truncated 2 bits later")
_CONVERSIONS = {tf32: "truncate", tf32_nearest: "nearest", tf32_away: "nearest_away"}
_WAYS = {
    "none": ("none", "none"), "q": ("q", "q by sm_scale"), "k": ("k", "k by sm_scale"),
    "qk": ("qk", "both by sqrt(sm_scale)"), "q log2e": ("q", "q by sm_scale log2(e)"),
    "k log2e": ("k", "k by sm_scale log2(e)"),
}  # fmt: skip


def truth(**how) -> dict[str, object]:
    """The right answer of each word about conventions and numerics; None where none applies."""
    box = Box(**how)
    p = {"fp32": "fp32", "truncated": None}.get(box.p, "input")
    cut = _CUTS[box.cut]
    forward, backward = _WAYS[box.prescale], _WAYS[box.again or box.prescale]
    scaled = (forward[0] + backward[0]).replace("none", "")
    # One tile holds all keys, or the roundings of P show no tiles.
    tiled = box.p == "cast"
    found = {
        "returns_lse": box.lse is not None,
        "causal_alignment": "top-left" if box.top_left else "bottom-right",
        "p_dtype": p, "p_dtype_of_out": p, "p_dtype_of_dv": p, "ds_dtype": p,
        "p_normalised": None if box.p == "fp32" else box.p == "normalised",
        "l_from": "rounded" if box.l_rounded else "unrounded",
        "prescales": "".join(x for x in "qk" if x in scaled) or "none",
        "prescaling": forward[1], "prescaling_of_backward": backward[1],
        **dict.fromkeys(("q_operand", "k_operand", "v_operand", "dout_operand"), cut),
        **dict.fromkeys(("q_operand_of_dk", "k_operand_of_dq"), cut),
        "dots": {"ieee": "ieee", "bf16, rounded": None}.get(cut, "tf32"),
        "tf32_conversion": _CONVERSIONS.get(box.cut),
        "ds_scaled": None if p != "input" else box.ds_scaled,
        "ds_from": None if p != "input" else "rounded" if box.ds_from_cast else "unrounded",
        "delta_from": None if p is None else "out", "dp_dtype": None if p is None else "fp32",
        "group_sum": "dtype" if box.group_cast else "fp32", "backward_reads": ("out",),
        "block_n": box.width if tiled else None,
        "tile_order": ("descending" if box.backwards else "ascending") if tiled else None,
        "splits": box.splits if tiled else None,
        "rescale_threshold": box.threshold if tiled and box.splits == 1 else None,
        "accumulation": _TRUNCATED[box.later] if box.fused
        else "narrower than float32" if box.narrow else "to nearest", "flushes": False,
        **{f"order_of_{name}_{dtype}": box.width for name in ("dv", "dk", "dq")
           for dtype in ("bf16", "fp32")},
    }  # fmt: skip
    # The sums of splits are added last.
    of_out = box.fused or (256 // box.splits if box.splits > 1 else box.width)
    # The whole row is one product, in the order of the machine's BLAS.
    if box.p != "normalised":
        found |= {f"order_of_out_{dtype}": of_out for dtype in ("bf16", "fp32")}
    found["l_order"] = "tile" if box.width <= 64 and not box.backwards else None
    if box.narrow:
        # A rounding of out hides those of the operands.
        found |= dict.fromkeys(("q_operand", "k_operand", "v_operand", "dots"))
    if box.lse is not None:
        known = {-math.inf: "-inf", math.inf: "+inf", 0.0: 0}
        found |= {"lse_base": box.lse, "empty_lse": known[box.empty_lse], "lse_grad": False}
    return found
