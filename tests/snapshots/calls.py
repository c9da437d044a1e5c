"""Runs the public calls on tensors that a case's key determines."""

from __future__ import annotations

import dataclasses
import zlib
from itertools import accumulate
from typing import Any

import torch

from fa_kernels import (
    combine_attention_states,
    flash_attention,
    flash_attention_varlen,
    flash_attention_with_kvcache,
    pooled_attention_probs,
)
from fa_verify.oracles.masks.mask import Mask
from fa_verify.properties.inputs.layouts import lay_out
from tests.snapshots.cases import Case

__all__ = ["Inputs", "answer"]

_DTYPES = {
    "fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64,
}  # fmt: skip
_LAYOUTS = {
    "rows": "bhsd", "heads inside": "bshd", "offset": "offset", "columns": "transposed",
    "wide": "padded",
}  # fmt: skip


class Inputs:
    """The tensors of a case, drawn by a generator that the key seeds."""

    def __init__(self, case: Case, device: str) -> None:
        self.case, self.device = case, device
        self.generator = torch.Generator().manual_seed(zlib.crc32(case.key.encode()))
        self.dtype = _DTYPES[case.dtype]
        # Packed sequences start after two rows and end before three rows of no sequence.
        rows, keys = case.of_lengths()
        self.cu_q, self.cu_k = (list(accumulate(x, initial=2)) for x in (rows, keys))
        B, M, N = case.B, case.M, case.N
        if case.call == "varlen":
            B, M, N = 1, self.cu_q[-1] + 3, self.cu_k[-1] + 3
        shapes = {
            "q": (B, case.H, M, case.D), "k": (B, case.Hk, N, case.D),
            "v": (B, case.Hk, N, case.Dv), "dout": (B, case.H, M, case.Dv),
        }  # fmt: skip
        self.q, self.k, self.v, self.dout = (
            lay_out(self.drawn(shape).to(self.dtype), _LAYOUTS[case.layout])
            for shape in shapes.values()
        )
        accumulated = torch.float64 if case.dtype == "fp64" else torch.float32
        self.dlse = None
        if case.dlse != "none":
            self.dlse = self.drawn((B, case.H, M)).to(accumulated)
        self.slopes = self.bias = self.sinks = None
        if case.alibi:
            shape = (case.B, case.H) if case.alibi == "BH" else (case.H,)
            self.slopes = self.drawn(shape).abs() / 8
        if case.bias is not None:
            shape = (B, case.H, M, N)
            axes = tuple(
                size if name in case.bias else 1 for name, size in zip("BHMN", shape, strict=True)
            )
            self.bias = self.drawn(axes).to(torch.float32 if "+" in case.bias else self.dtype)
        if case.sinks:
            self.sinks = self.drawn((case.H,))

    def drawn(self, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator).to(self.device)

    def leaves(self) -> dict[str, torch.Tensor]:
        """The tensors that require gradients, by the name of the gradient."""
        others = [name for name in ("bias", "sinks") if getattr(self, name) is not None]
        names = [*self.case.needs, *others]
        return {f"d{name}": getattr(self, name).requires_grad_() for name in names}


# Wrappers of the public calls.


def _options(case: Case) -> dict[str, Any]:
    """The options that all calls share."""
    return {
        "config": case.config, "return_lse": True,
        "deterministic": not case.one_pass,
    }  # fmt: skip


def _window(mask: Mask) -> dict[str, Any]:
    return {"causal": mask.causal, "window_size": (mask.window_left, mask.window_right)}


def _masking(x: Inputs) -> dict[str, Any]:
    """The mask as keyword arguments; a mask object only where the plain arguments do not do."""
    case, mask = x.case, x.case.of()
    lengths = {"seqlens_q": mask.seqlens_q, "seqlens_k": mask.seqlens_k}
    if case.lengths == "tensors":
        lengths = {
            name: torch.tensor(values, dtype=torch.int32, device=x.device)
            for name, values in lengths.items()
        }
    if case.is_of_blocks:
        blocks = mask.blocks(case.H, case.M, case.N).to(x.device)
        return {**_window(mask), **lengths, "block_mask": blocks, "block_size": mask.side}
    return {**_window(mask), **lengths} if mask.is_plain else {"mask": mask}


def _padded(x: Inputs) -> dict[str, torch.Tensor]:
    out, lse = flash_attention(
        x.q, x.k, x.v, **_masking(x), **_options(x.case),
        softcap=x.case.softcap, alibi_slopes=x.slopes, bias=x.bias, sinks=x.sinks,
    )  # fmt: skip
    return {"out": out, "lse": lse}


def _pooled(x: Inputs) -> dict[str, torch.Tensor]:
    pool = x.case.call.removeprefix("pooled ")
    masking = _masking(x)
    _, lse = flash_attention(x.q, x.k, x.v, **masking, **_options(x.case))
    pooled = pooled_attention_probs(
        x.q, x.k, lse, **masking, config=x.case.config, pool=pool, pool_size=x.case.pool
    )
    return {"pooled": pooled}


def _merged(x: Inputs) -> dict[str, torch.Tensor]:
    """The merge of three parts, one of which saw nothing in the first row, and its gradients."""
    case = x.case
    shape = (3, case.B, case.H, case.M)
    of_lse = torch.float64 if case.dtype == "fp64" else torch.float32
    lses = 4 * x.drawn(shape).to(of_lse)
    lses[1, :, :, 0] = -torch.inf
    leaves = [x.drawn((*shape, case.Dv)).to(x.dtype).requires_grad_(), lses.requires_grad_()]
    out, lse = combine_attention_states(*leaves)
    dlse = torch.zeros_like(lse) if x.dlse is None else x.dlse
    douts, dlses = torch.autograd.grad([out, lse], leaves, [x.dout, dlse])
    return {"out": out, "lse": lse, "douts": douts, "dlses": dlses}


def _kvcache(x: Inputs) -> dict[str, torch.Tensor]:
    """Attention over pages of 8 rows, the last page first, with an append of three keys."""
    case, mask, places = x.case, x.case.of(), -(-x.case.N // 8)
    pages = torch.arange(case.B * places, dtype=torch.int32).flip(0)
    lengths = torch.tensor([case.N - 3 - b for b in range(case.B)], dtype=torch.int32)
    caches = [
        x.drawn((case.B * places, 8, case.Hk, columns)).to(x.dtype) for columns in (case.D, case.Dv)
    ]
    new = [x.drawn((case.B, case.Hk, 3, columns)).to(x.dtype) for columns in (case.D, case.Dv)]
    out, lse = flash_attention_with_kvcache(
        x.q.detach(), *caches, k=new[0], v=new[1], cache_seqlens=lengths.to(x.device),
        page_table=pages.view(case.B, places).to(x.device), **_window(mask), softcap=case.softcap,
        alibi_slopes=x.slopes, return_lse=True, config=case.config,
    )  # fmt: skip
    return {"out": out, "lse": lse, "k_cache": caches[0], "v_cache": caches[1]}


def _varlen(x: Inputs) -> dict[str, torch.Tensor]:
    case, mask, longest = x.case, x.case.of(), {}
    offsets = {"cu_seqlens_q": x.cu_q, "cu_seqlens_k": x.cu_k}
    if case.lengths != "ints":
        offsets = {
            name: torch.tensor(values, dtype=torch.int32, device=x.device)
            for name, values in offsets.items()
        }
    if case.lengths == "longest":
        longest = {"max_seqlen_q": case.M, "max_seqlen_k": case.N}
    if mask.is_plain:
        masking = _window(mask)
    else:
        rows, keys = case.of_lengths()
        masking = {"mask": dataclasses.replace(mask, seqlens_q=rows, seqlens_k=keys)}
    q, k, v = (y[0].transpose(0, 1) for y in (x.q, x.k, x.v))
    out, lse = flash_attention_varlen(
        q, k, v, **offsets, **longest, **masking, **_options(case),
        softcap=case.softcap, alibi_slopes=x.slopes, sinks=x.sinks,
    )  # fmt: skip
    return {"out": out.transpose(0, 1)[None], "lse": lse[None]}


def answer(x: Inputs) -> dict[str, torch.Tensor]:
    """The outputs and requested gradients of a case, by name."""
    case = x.case
    if case.call.startswith("pooled"):
        return _pooled(x)
    if case.call == "merge":
        return _merged(x)
    if case.call == "kvcache":
        return _kvcache(x)
    leaves = x.leaves()
    got = (_varlen if case.call == "varlen" else _padded)(x)
    losses = {"out": x.dout, "lse": x.dlse}
    asked = {"none": ("out",), "beside": ("out", "lse"), "alone": ("lse",)}[case.dlse]
    gradients = torch.autograd.grad(
        [got[name] for name in asked],
        list(leaves.values()),
        [losses[name] for name in asked],
        allow_unused=True,
    )
    of_leaves = zip(leaves, gradients, strict=True)
    return got | {name: gradient for name, gradient in of_leaves if gradient is not None}
