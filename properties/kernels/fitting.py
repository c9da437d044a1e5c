"""Fit a problem that was made for one subject to the declarations of another."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.problem import Problem
from fa_verify.properties.inputs.alibi_families import NO_ALIBI
from fa_verify.properties.inputs.bias_families import NO_BIAS
from fa_verify.properties.inputs.dlse_families import NO_DLSE
from fa_verify.properties.inputs.sink_families import NO_SINKS
from fa_verify.properties.kernels.narrowing import narrowed
from fa_verify.properties.kernels.subject import Subject

__all__ = ["fitted"]

# Dtypes to take in place of one that is not supported: those of similar precision first.
_NEAREST = {
    "fp64": ("fp32", "fp16", "bf16"),
    "fp32": ("fp64", "fp16", "bf16"),
    "fp16": ("bf16", "fp32", "fp64"),
    "bf16": ("fp16", "fp32", "fp64"),
}


def fitted(subject: Subject, problem: Problem, device: str) -> Problem | None:
    """Return the problem nearest to one that a subject supports; None if there is none.

    Unsupported parts are replaced, or dropped: the configuration, the dtype, head
    dims, sizes, parts of the mask, layouts, padding values and modifications of scores.

    Args:
        subject: The subject.
        problem: The problem, of any subject.
        device: "cpu" or "cuda".
    """
    config, dtype = _arithmetic(subject, problem)
    D, Dv = (_nearest(subject.head_dims, x) for x in (problem.D, problem.Dv))
    M, N = (_size(subject, x) for x in (problem.M, problem.N))
    M = 1 if subject.one_query else M
    if not subject.m_ne_n:
        M = N = max(M, N)
    mask = _mask(subject, problem.mask, M, N)
    positional = (mask.right, mask.window_left) != (None, None) or not mask.is_plain
    if subject.causal_alignment == "top-left" and (positional or subject.always_causal):
        M = N = M if subject.one_query else max(M, N)
        mask = dataclasses.replace(mask, seqlens_q=None, seqlens_k=None)
    layouts = problem.layouts
    if subject.layouts is not None:
        layouts = tuple(x if x in subject.layouts else subject.layouts[0] for x in layouts)  # type: ignore[assignment]
    dirty = problem.dirty
    if subject.dirty is not None and dirty not in subject.dirty:
        dirty = subject.dirty[0]
    mods = subject.score_mods
    has_dlse = subject.lse_grad and subject.backward
    changed = dataclasses.replace(
        problem, device=device, config=config, dtype=dtype, D=D,
        Dv=Dv if subject.dv_ne_d else D, M=M, N=N, mask=mask, layouts=layouts, dirty=dirty,
        Hk=problem.Hk if subject.gqa else problem.H,
        softcap=problem.softcap if "softcap" in mods else None,
        alibi=problem.alibi if "alibi" in mods else NO_ALIBI,
        bias=problem.bias if "bias" in mods else NO_BIAS,
        sinks=problem.sinks if "sinks" in mods else NO_SINKS,
        dlse=problem.dlse if has_dlse else NO_DLSE,
        # Without a loss on lse, a loss on out.
        dout="normal" if problem.dout == "zero" and not has_dlse else problem.dout,
    )  # fmt: skip
    found = narrowed(subject, changed)
    return None if subject.excludes(found) else found


def _arithmetic(subject: Subject, problem: Problem) -> tuple[str, str]:
    """Return a configuration of the subject and a dtype that it has, nearest to the problem's."""
    for dtype in (problem.dtype, *_NEAREST[problem.dtype]):
        having = [
            name
            for name, replaced in subject.configs.items()
            if dtype in replaced.get("dtypes", subject.dtypes)
        ]
        if having:
            return (problem.config if problem.config in having else having[0]), dtype
    return problem.config, problem.dtype


def _nearest(sizes: Iterable[int] | None, wanted: int) -> int:
    """Return the smallest supported size that is large enough, else the largest."""
    known = sorted(sizes or (wanted,))
    return next((x for x in known if x >= wanted), known[-1])


def _size(subject: Subject, length: int) -> int:
    """Return a length that is a multiple as declared, and not too long."""
    multiple, most = subject.seqlen_multiple, subject.max_seqlen
    length = -(-length // multiple) * multiple
    return length if most is None else min(length, most // multiple * multiple)


def _mask(subject: Subject, mask: Mask, M: int, N: int) -> Mask:
    """Return a mask without the parts that the subject does not support."""
    kinds = subject.masks
    if not mask.is_plain and "custom" in kinds:
        parts = mask
    else:
        windowed = "window" in kinds
        parts = Mask(
            causal=mask.causal and "causal" in kinds,
            window_left=mask.window_left if windowed else None,
            window_right=mask.window_right if windowed else None,
            seqlens_q=mask.seqlens_q,
            seqlens_k=mask.seqlens_k,
        )
    if "padding" not in kinds:
        return dataclasses.replace(parts, seqlens_q=None, seqlens_k=None)
    rows, keys = (
        None if of is None else tuple(min(x, size) for x in of)
        for of, size in ((parts.seqlens_q, M), (parts.seqlens_k, N))
    )
    return dataclasses.replace(parts, seqlens_q=rows, seqlens_k=keys)
