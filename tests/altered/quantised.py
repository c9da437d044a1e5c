"""A forward of attention to codes with scales in PyTorch, by tiles, and copies of it with a fault.

It computes in float32 as kernels do: tiles of keys, P relative to the maximum in use, its cast, and
sums of a few bits. A fault changes one step. Some come from public repositories: ``FAULTS`` has
their origin.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from fa_verify.properties.kernels.subject import Subject

__all__ = ["FAULTS", "RIGHT", "QuantisedForward", "faulty", "right"]

Tensor = torch.Tensor
_FLOATS = {"e4m3fn": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
_SHORT = {"fp16": torch.float16, "bf16": torch.bfloat16}
_MOST = {"e4m3fn": 448.0, "e5m2": 57344.0}
_STEP = 32


@dataclass(frozen=True)
class QuantisedForward:
    """A kernel of codes with scales; its fields are what it does, not what it declares."""

    block_n: int = 32
    offset: float = 0.0
    threshold: float = 0.0
    p_format: str = "e4m3fn"
    truncates: bool = False
    qk_bits: int = 24
    pv_bits: int = 24
    promotion: str = "tile"
    key_order: str = "first"
    l_rounded: bool = False
    blocks: tuple[int, int] = (128, 64)
    faults: frozenset[str] = field(default_factory=frozenset)

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, q_scale: Tensor, k_scale: Tensor,
        v_scale: Tensor | None, *, mask: Any, sm_scale: float, out_dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Return out (B, H, M, Dv) and lse (B, H, M), float32."""
        has = self.faults.__contains__
        (B, H, M, _), (_, Hk, N, _) = q.shape, v.shape
        G = H // Hk
        of_v = torch.ones(1) if v_scale is None else v_scale
        q_scale, k_scale, of_v = self._faulty_scales(q_scale, k_scale, of_v, B, H, Hk)
        sq = _of_tokens(q_scale, M, self.blocks[0])
        k_block = 2 * self.blocks[1] if has("blocks of k twice as long") else self.blocks[1]
        sk = _of_tokens(k_scale, N, k_block)
        if has("k scale of the next token") and k_scale.ndim == 3 and k_scale.shape[2] == N:
            sk = sk.roll(-1, 2)
        if has("token scales swapped") and sq.shape[2] > 1 and 0 not in (M, N):
            sq, sk = (
                sk.repeat_interleave(H // sk.shape[1], 1)[:, :, torch.arange(M) % N],
                sq[:, :: H // sk.shape[1], torch.arange(N) % M],
            )
        grouped = torch.arange(H) % Hk if has("k scale of head h % Hk") else torch.arange(H) // G
        sk = sk[:, grouped] if sk.shape[1] > 1 else sk
        factor = sq[..., None] * sk[:, :, None, :] * sm_scale
        if has("scales divide"):
            factor = sm_scale / (sq[..., None] * sk[:, :, None, :])
        sv = of_v.view(*of_v.shape, *(1,) * (3 - of_v.ndim)) if of_v.ndim < 3 else of_v
        sv = sv.repeat_interleave(H // sv.shape[1], 1) if sv.shape[1] > 1 else sv
        seen = mask.dense(B, H, M, N).expand(B, H, M, N)
        if has("one key too many") and mask.causal:
            seen = seen | (seen.roll(1, 3) & (torch.arange(N) > 0) & seen.any(2, keepdim=True))
        if has("last key dropped") and N > 1:
            seen = seen & (torch.arange(N) < N - 1)
        _, keys = mask.lengths(B, M, N)
        held = torch.arange(N) < torch.tensor(keys, dtype=torch.int64).view(B, 1, 1)
        qf, kf, vf = (self._numbers(x) for x in (q, k, v))
        kf = kf.repeat_interleave(G, 1)
        if not has("padding of v is read"):
            vf = vf.masked_fill(~held.unsqueeze(3), 0.0)
        vf = vf.repeat_interleave(G, 1)
        out, lse = self._forward(qf, kf, vf, factor * math.log2(math.e), seen)
        return (out * sv[:, :, None].float()).to(out_dtype), lse

    def _faulty_scales(
        self, q_scale: Tensor, k_scale: Tensor, v_scale: Tensor, B: int, H: int, Hk: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the scales as a fault reads them."""
        has = self.faults.__contains__
        if has("k scale of head 0") and k_scale.ndim > 1:
            k_scale = k_scale[:, :1].expand_as(k_scale)
        if has("v scale of head 0") and v_scale.ndim > 1:
            v_scale = v_scale[:, :1].expand_as(v_scale)
        if has("k scale of entry 0") and k_scale.ndim > 1:
            k_scale = k_scale[:1].expand_as(k_scale)
        if has("v scale of the next channel") and v_scale.ndim == 3:
            v_scale = v_scale.roll(1, 2)
        if has("k and v scales swapped") and k_scale.shape == v_scale.shape:
            k_scale, v_scale = v_scale, k_scale
        for name in ("q", "k", "v"):
            if has(f"{name} scale dropped"):
                dropped = {"q": q_scale, "k": k_scale, "v": v_scale}[name]
                ones = torch.ones_like(dropped)
                q_scale, k_scale, v_scale = (
                    ones if x is dropped else x for x in (q_scale, k_scale, v_scale)
                )
        if has("q scale twice"):
            q_scale = q_scale * q_scale
        return q_scale, k_scale, v_scale

    def _numbers(self, codes: Tensor) -> Tensor:
        """Return the numbers of codes, float32."""
        if "int8 read as uint8" in self.faults and codes.dtype == torch.int8:
            return codes.view(torch.uint8).float()
        if "e5m2 read as e4m3" in self.faults and codes.dtype == torch.float8_e5m2:
            return codes.view(torch.float8_e4m3fn).float().nan_to_num(448.0)
        return codes.float()

    def _forward(
        self, q: Tensor, k: Tensor, v: Tensor, factor: Tensor, seen: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the sums of PV over l, float32, and lse."""
        has = self.faults.__contains__
        (B, H, M, _), N = q.shape, k.shape[2]
        m = torch.full((B, H, M, 1), -math.inf)
        l_sum, acc = torch.zeros((B, H, M, 1)), torch.zeros((B, H, M, v.shape[3]))
        starts = range(0, N, self.block_n)
        for start in starts if self.key_order == "first" else reversed(starts):
            here = slice(start, start + self.block_n)
            dots = _dot(q, k[:, :, here].mT, None, self.qk_bits)
            t = dots * (factor[..., here] if factor.shape[3] > 1 else factor)
            unmasked = t.nan_to_num(-math.inf, neginf=-math.inf, posinf=-math.inf)
            t = torch.where(seen[..., here], t, -math.inf)
            top = (unmasked if has("hidden keys in the maximum") else t).amax(3, keepdim=True)
            new = torch.maximum(m, top)
            new = torch.where((m > -math.inf) & (new - m <= self.threshold), m, new)
            safe = new.masked_fill(new == -math.inf, 0.0)
            alpha = torch.exp2(m - safe)
            l_sum = l_sum * alpha
            acc = acc if has("sums are not rescaled") else acc * alpha
            p = torch.exp2(t - safe + self.offset)
            cast = self._cast(p)
            l_sum = l_sum + (cast if self.l_rounded else p).sum(3, keepdim=True)
            acc = self._accumulated(acc, cast, v[:, :, here])
            m = new
        empty = l_sum == 0
        divisor = l_sum if has("NaN in empty rows") else l_sum.masked_fill(empty, 1.0)
        offset = 0.0 if has("lse with the offset") else self.offset
        lse = (m - offset) * math.log(2) + l_sum.log()
        return acc / divisor, lse.masked_fill(empty, -math.inf).squeeze(3)

    def _cast(self, p: Tensor) -> Tensor:
        """Return P rounded to its format, float32."""
        if self.p_format in _SHORT:
            return p.to(_SHORT[self.p_format]).float()
        dtype, most = _FLOATS[self.p_format], _MOST[self.p_format]
        cast = p.clamp(max=most).to(dtype)
        if self.truncates:
            # The next code toward 0 where the nearest lies above.
            lower = (cast.view(torch.uint8).to(torch.int16) - 1).clamp(min=0).to(torch.uint8)
            cast = torch.where(cast.float() > p, lower, cast.view(torch.uint8)).view(dtype)
        return cast.float()

    def _accumulated(self, acc: Tensor, p: Tensor, v: Tensor) -> Tensor:
        """Return the sums of PV after a tile."""
        if self.pv_bits == 24:
            return acc + p @ v
        if self.promotion == "row":
            return _dot(p, v, acc, self.pv_bits)
        if self.promotion == "tile":
            return acc + _dot(p, v, None, self.pv_bits)
        for start in range(0, p.shape[3], _STEP):
            here = slice(start, start + _STEP)
            acc = acc + _dot(p[..., here], v[:, :, here], None, self.pv_bits)
        return acc


def _of_tokens(scale: Tensor, tokens: int, block: int) -> Tensor:
    """Return a scale for each token, (B or 1, heads or 1, tokens)."""
    if scale.ndim < 3:
        return scale.view(*scale.shape, *(1,) * (3 - scale.ndim))
    if scale.shape[2] == tokens:
        return scale
    whole = scale.repeat_interleave(block, 2)[:, :, :tokens]
    # A block that is too long leaves none for the last tokens.
    return whole if whole.shape[2] == tokens else whole[:, :, torch.arange(tokens) % whole.shape[2]]


def _dot(a: Tensor, b: Tensor, acc: Tensor | None, bits: int) -> Tensor:
    """Return acc + a @ b with sums of some bits: 24, 11 for fp16, or 13 and 14 truncated.

    The latter align 32 products and the sum before them to the largest exponent, truncate each of
    them toward 0, add them, and truncate the result.
    """
    if bits == 24:
        return a @ b if acc is None else acc + a @ b
    if bits == 11:
        total = torch.zeros((*a.shape[:-1], b.shape[-1]), dtype=torch.float16)
        for n in range(a.shape[-1]):
            total = (total.float() + (a[..., n : n + 1] * b[..., n : n + 1, :])).half()
        return total.float()
    total = torch.zeros((*a.shape[:-1], b.shape[-1]), dtype=torch.float64)
    total = total if acc is None else acc.double()
    for start in range(0, a.shape[-1], _STEP):
        here = slice(start, start + _STEP)
        terms = a[..., here].double().unsqueeze(-1) * b[..., here, :].double().unsqueeze(-3)
        addends = torch.cat([terms, total.unsqueeze(-2)], -2)
        _, exponent = torch.frexp(addends.abs().amax(-2, keepdim=True))
        unit = torch.exp2((exponent - bits).double())
        total = ((addends / unit).trunc() * unit).sum(-2)
        _, exponent = torch.frexp(total)
        unit = torch.exp2((exponent - bits).double())
        total = (total / unit).trunc() * unit
    return total.float()


_ALL_SCALES = {
    "qk_scales": ("tensor", "head", "token", "block"), "v_scales": ("tensor", "head", "channel"),
    "block_n": 32, "scale_blocks": (8, 16),
}  # fmt: skip
_FP8 = {"qk_formats": ("e4m3fn", "e5m2"), "v_formats": ("e4m3fn", "e5m2"), **_ALL_SCALES}
_BLOCKS = {"blocks": (8, 16)}
# By name: the kernel, its numerics, and its declarations beside formats and scales.
RIGHT: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}, {}),
    "offset 8": ({"offset": 8.0}, {"p_offset": 8}, {}),
    "offset 448": ({"offset": math.log2(448)}, {"p_offset": "largest"}, {}),
    "threshold 4": (
        {"offset": 4.0, "threshold": 4.0}, {"p_offset": 4}, {"rescale_threshold": 4.0}
    ),
    "from the last tile": (
        {"key_order": "last", "offset": 8.0, "block_n": 16}, {"key_order": "last", "p_offset": 8},
        {"block_n": 16},
    ),
    "P in e5m2": ({"p_format": "e5m2", "offset": 8.0}, {"p_format": "e5m2", "p_offset": 8}, {}),
    "P truncated": (
        {"truncates": True, "offset": 8.0}, {"p_rounding": "truncate", "p_offset": 8}, {}
    ),
    "sum of rounded P": (
        {"l_rounded": True, "offset": 4.0}, {"p_offset": 4}, {"l_from": "rounded"}
    ),
    "PV in 14 bits by row": (
        {"pv_bits": 14, "promotion": "row", "offset": 8.0},
        {"pv_bits": 14, "pv_promotion": "row", "p_offset": 8}, {},
    ),
    "PV in 13 bits by tile": (
        {"pv_bits": 13, "block_n": 64}, {"pv_bits": 13}, {"block_n": 64},
    ),
    "PV in 14 bits by step": (
        {"pv_bits": 14, "promotion": "step", "block_n": 64},
        {"pv_bits": 14, "pv_promotion": "step"}, {"block_n": 64},
    ),
    "QK in 14 bits": ({"qk_bits": 14, "offset": 8.0}, {"qk_bits": 14, "p_offset": 8}, {}),
    "QK in 14 bits, threshold 4": (
        {"qk_bits": 14, "offset": 4.0, "threshold": 4.0, "block_n": 16},
        {"qk_bits": 14, "p_offset": 4}, {"rescale_threshold": 4.0, "block_n": 16},
    ),
    "int8 and fp16": (
        {"p_format": "fp16", "pv_bits": 11}, {"p_format": "fp16", "pv_bits": 11},
        {"qk_formats": ("int8",), "v_formats": ("input",), "dtypes": ("fp16",)},
    ),
}  # fmt: skip
# A fault, the right kernel that it is planted in, what it does otherwise, and its origin.
FAULTS: dict[str, tuple[str, dict[str, Any], str]] = {
    "P saturates": ("offset 8", {"threshold": 4.0}, "Dao-AILab/flash-attention#2716"),
    "v scale of head 0": ("offset 8", {}, "sgl-project/sgl-kernel-xpu#252"),
    "k scale of head 0": ("offset 8", {}, "sgl-project/sgl-kernel-xpu#252"),
    "k scale of entry 0": ("offset 8", {}, ""),
    "P is truncated": ("offset 8", {"truncates": True}, ""),
    "P is cast to e5m2": ("offset 8", {"p_format": "e5m2"}, ""),
    "PV sums of 14 bits": (
        "offset 8", {"pv_bits": 14, "promotion": "row"}, "Dao-AILab/flash-attention#2250"
    ),
    "QK sums of 14 bits": ("offset 8", {"qk_bits": 14}, ""),
    "last key dropped": ("offset 8", {}, ""),
    "one key too many": ("plain", {}, ""),
    "q scale dropped": ("plain", {}, "vllm-project/vllm#51363"),
    "k scale dropped": ("plain", {}, "vllm-project/vllm#51363"),
    "v scale dropped": ("plain", {}, "vllm-project/vllm#51363"),
    "token scales swapped": ("offset 8", {}, ""),
    "sum of rounded P": ("offset 8", {"l_rounded": True}, ""),
    "padding of v is read": ("plain", {}, ""),
    "k scale of the next token": ("offset 8", {}, "vllm-project/vllm#50085"),
    "k scale of head h % Hk": ("offset 8", {}, ""),
    "v scale of the next channel": ("plain", {}, ""),
    "k and v scales swapped": ("plain", {}, ""),
    "scales divide": ("plain", {}, ""),
    "q scale twice": ("plain", {}, ""),
    "blocks of k twice as long": ("plain", {}, ""),
    "lse with the offset": ("offset 8", {}, ""),
    "sums are not rescaled": ("offset 8", {}, ""),
    "int8 read as uint8": ("int8 and fp16", {}, ""),
    "e5m2 read as e4m3": ("plain", {}, ""),
    "no offset": ("offset 8", {"offset": 0.0}, ""),
    "wider tiles": ("offset 8", {"block_n": 64}, ""),
    "from the last tile": ("offset 8", {"key_order": "last"}, ""),
    "threshold 4": ("threshold 4", {"threshold": 0.0}, ""),
    "NaN in empty rows": ("plain", {}, ""),
    "hidden keys in the maximum": ("offset 8", {}, ""),
}  # fmt: skip


def _subject(name: str, kernel: QuantisedForward, of: str) -> Subject:
    """Return a kernel with the declarations of a right one."""
    _, numerics, others = RIGHT[of]
    declared = {**_FP8, "quantised_numerics": numerics, **others, "masks": (
        "causal", "window", "padding"
    ), "head_dims": (16, 64, 128, 32, 40), "max_seqlen": 300, "quantised": True}  # fmt: skip

    def call(*tensors: Tensor, **words: Any) -> tuple[Tensor, Tensor]:
        return kernel(*tensors, **words)

    vars(call).update(declared)
    return Subject.of(call, name)


def right(name: str) -> Subject:
    """Return a right kernel by its name in ``RIGHT``."""
    return _subject(name, QuantisedForward(**_BLOCKS, **RIGHT[name][0]), name)


def faulty(name: str) -> Subject:
    """Return a faulty kernel by its name in ``FAULTS``; it declares what the right one does."""
    of, otherwise, _ = FAULTS[name]
    kernel = QuantisedForward(**_BLOCKS, **RIGHT[of][0])
    kernel = replace(kernel, **otherwise) if otherwise else kernel
    return _subject(name, replace(kernel, faults=frozenset((name,))), of)
