"""Faults of scales, delta and the gradient of lse."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from fa_verify.diagnosis.named.named import BACKWARD, Change, Named
from fa_verify.diagnosis.named.passes import Pass

__all__ = ["GRADIENTS"]


def _times(name: str, factor: Callable[[float], float]) -> Change:
    """Return a change that multiplies a gradient by a function of the scale."""

    def change(p: Pass, block_m: int, block_n: int) -> None:
        p.factor[name] = factor(p.case.problem.scale)

    return change


def _scale(make: Callable[[Pass], float], *, both: bool = True) -> Change:
    """Return a change of the scale of scores, and of the gradients with it."""

    def change(p: Pass, block_m: int, block_n: int) -> bool:
        right = p.scale
        p.scale = make(p)
        if both:
            p.factor = dict.fromkeys(("dq", "dk"), p.scale / right)
        return p.scale != right

    return change


def _delta(kind: str) -> Change:
    def change(p: Pass, block_m: int, block_n: int) -> None:
        p.delta, p.tile = kind, block_n or 1

    return change


def _dlse(factor: float) -> Change:
    def change(p: Pass, block_m: int, block_n: int) -> bool:
        p.dlse_factor = factor
        return p.case.inputs.dlse is not None

    return change


def _rounded_operands(dots: str, bits: int, truncates: bool) -> Change:
    """Return a change that rounds the operands of dots to so many bits, as a TF32 dot does."""

    def change(p: Pass, block_m: int, block_n: int) -> bool:
        if p.case.problem.dtype != "fp32":
            return False
        p.rounds = dict.fromkeys(dots.split(), lambda x: _short(x, bits, truncates))
        return True

    return change


def _power(size: int) -> int:
    """Return the least power of 2 that is not below a size."""
    return 1 << (size - 1).bit_length()


def _short(x: torch.Tensor, bits: int, truncates: bool) -> torch.Tensor:
    fraction, exponent = torch.frexp(x)
    scaled = fraction * 2.0 ** (bits + 1)
    return torch.ldexp(scaled.trunc() if truncates else scaled.round(), exponent - bits - 1)


GRADIENTS: tuple[Named, ...] = (
    Named("dq without scale", "dq were not multiplied by the scale",
          (_times("dq", lambda x: 1 / x),), ("dq",),
          on_record="flashinfer#787; vllm#32149; fla#47; tilelang-ascend#1670"),
    Named("dq scaled twice", "dq were multiplied by the scale twice",
          (_times("dq", lambda x: x),), ("dq",),
          on_record="flashinfer#787; vllm#32149; fla#47; tilelang-ascend#1670"),
    Named("dk without scale", "dk were not multiplied by the scale",
          (_times("dk", lambda x: 1 / x),), ("dk and dv",),
          on_record="flashinfer#787; vllm#32149; fla#47; tilelang-ascend#1670"),
    Named("dk scaled twice", "dk were multiplied by the scale twice",
          (_times("dk", lambda x: x),), ("dk and dv",),
          on_record="flashinfer#787; vllm#32149; fla#47; tilelang-ascend#1670"),
    Named("scale of padded head_dim", "the scale were that of the padded head_dim",
          (_scale(lambda p: _power(p.case.problem.D) ** -0.5),), ("everywhere",),
          on_record="flashinfer#787; vllm#32149; fla#47; tilelang-ascend#1670"),
    Named("scale of Dv", "the scale were Dv**-0.5",
          (_scale(lambda p: p.case.problem.Dv**-0.5),), ("everywhere",)),
    Named("default scale", "the scale were D**-0.5, whatever sm_scale says",
          (_scale(lambda p: p.case.problem.D**-0.5),)),
    Named("no scale", "scores were not scaled", (_scale(lambda p: 1.0),
          _scale(lambda p: 1.0, both=False))),
    Named("scaled twice", "scores were scaled twice", (_scale(lambda p: p.scale**2),
          _scale(lambda p: p.scale**2, both=False))),
    Named("base 2 scores", "scores to base e were exponentiated in base 2, or the other way",
          tuple(_scale(lambda p, f=f: p.scale * f, both=False)
                for f in (math.log(2), math.log2(math.e)))),
    Named("delta of a tile", "delta were the row sum of one key tile",
          (_delta("tile"), _delta("tile unmasked")), BACKWARD, "n"),
    Named("no delta", "delta were not subtracted from dP", (_delta("none"),), BACKWARD),
    Named("no dlse", "the gradient of lse were left out", (_dlse(0.0),), BACKWARD),
    Named("dlse negated", "the gradient of lse had the other sign", (_dlse(-1.0),), BACKWARD),
    Named("dots in TF32", "dots of float32 ran in TF32",
          tuple(_rounded_operands(names, 10, truncates) for names in ("s", "dp", "s dp")
                for truncates in (True, False)),
          on_record="triton#1671, #1821; triton_docs_tutorials#6"),
)  # fmt: skip
