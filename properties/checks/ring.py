"""A ring on one device: attention to parts of the keys, merged, equals attention to all keys.

In context parallelism each device holds a part of the keys, and queries meet all parts in turn. The
gradient of the merge gives each part its dout and dlse, and its backward its dq, dk and dv.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch

from fa_verify.oracles.bounds.error_model import Judgement, judge
from fa_verify.oracles.bounds.merging import merge_bound
from fa_verify.oracles.bounds.ring import KeyErrors, gradient_errors
from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.problem import Problem
from fa_verify.oracles.reference.torch_reference import attention
from fa_verify.oracles.stream import normal
from fa_verify.properties.checks.merging import MergeFinding, found_elements
from fa_verify.properties.comparison.compare import ratios
from fa_verify.properties.inputs.tensors import make
from fa_verify.properties.subjects.subject import Subject

__all__ = ["part_problems", "ring"]


class _Part(NamedTuple):
    """A part of the keys: its problem, its keys, the tensors of its call, and its exact results."""

    problem: Problem
    keys: slice
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    judgement: Judgement


def part_problems(problem: Problem, lengths: Sequence[int]) -> list[tuple[Problem, slice]]:
    """Return the problem and the keys of each part of ``lengths`` keys.

    Causal masks are aligned to the bottom right. In a part that ends before the last key, that
    diagonal lies as many keys to the right as follow the part.
    """
    found = []
    for stop, length in zip(accumulate(lengths), lengths, strict=True):
        mask = Mask(window_right=problem.N - stop) if problem.mask.causal else Mask()
        part = dataclasses.replace(problem, N=length, mask=mask)
        found.append((part, slice(stop - length, stop)))
    return found


def ring(subject: Subject, problem: Problem, lengths: Sequence[int]) -> list[MergeFinding]:
    """S1: out, lse and gradients of a ring lie within the derived bound of the whole attention.

    The bounds of the parts are carried through the merge. Errors of their out and lse are errors of
    its inputs. Errors of its gradients are errors of the dout and dlse of each part.

    Args:
        subject: A subject that attends, merges, and differentiates both.
        problem: The whole attention, with a mask that is causal or shows everything.
        lengths: The number of keys of each part; N in sum.

    Raises:
        NotImplementedError: The subject refuses a part, or a part is out of range.
    """
    if sum(lengths) != problem.N or problem.mask not in (Mask(), Mask(causal=True)):
        raise ValueError(
            f"lengths are {lengths!r} and the mask {problem.mask}; needs N keys in sum"
        )
    q, k, v, dout = make(problem).tensors
    of_lse = torch.float64 if problem.dtype == "fp64" else torch.float32
    dlse = normal(problem.seed, "dlse", dout.shape[:3]).to(of_lse).to(q.device)
    made = part_problems(problem, lengths)
    leaves, states = [], []
    for part, keys in made:
        given = [x.detach().requires_grad_() for x in (q, k[:, :, keys], v[:, :, keys])]
        out, lse = subject.run(given[0], given[1], given[2], part)
        if lse is None:
            raise NotImplementedError(f"{subject.name} returns no lse")
        for x in (out, lse):
            x.retain_grad()
        leaves.append(given)
        states.append((out, lse))
    outs, lses = (list(x) for x in zip(*states, strict=True))
    merge = subject.run_states(torch.stack(outs), torch.stack(lses))
    torch.autograd.backward(list(merge), [dout, dlse])

    parts = []
    for (part, keys), (q_p, k_p, v_p), (out, lse) in zip(made, leaves, states, strict=True):
        # The backward of a part is judged on the gradients that the merge gave it.
        dout_p, dlse_p = _gradient_of(out), _gradient_of(lse)
        judged = judge(
            q, k[:, :, keys], v[:, :, keys], dout_p, dlse_p, mask=part.mask,
            sm_scale=problem.scale, in_dtype=problem.dtype, numerics=subject.numerics_of(part),
        )  # fmt: skip
        if judged.out_of_range is not None:
            raise NotImplementedError(judged.out_of_range)
        exact = attention(
            q, k[:, :, keys], v[:, :, keys], dout, mask=part.mask, sm_scale=problem.scale
        )
        parts.append(_Part(part, keys, q_p, k_p, v_p, exact.out, exact.lse, judged))

    whole = attention(q, k, v, dout, dlse, mask=problem.mask, sm_scale=problem.scale)
    bound = merge_bound(
        torch.stack([x.out for x in parts]), torch.stack([x.lse for x in parts]), dout, dlse,
        in_dtype=problem.dtype, out_errors=torch.stack([x.judgement.bound.out for x in parts]),
        lse_errors=torch.stack([x.judgement.bound.lse for x in parts]),
    )  # fmt: skip
    moved = [
        _moved(x, *of_part) for x, *of_part in zip(parts, bound.douts, bound.dlses, strict=True)
    ]
    judged_as = [
        ("out", merge[0].detach(), whole.out, bound.out),
        ("lse", merge[1].detach(), whole.lse, bound.lse),
        (
            "dq",
            torch.stack([_gradient(x.q) for x in parts]).sum(0),
            whole.dq,
            torch.stack(
                [x.judgement.bound.dq + y.dq for x, y in zip(parts, moved, strict=True)]
            ).sum(0),
        ),
    ]
    for of_keys, error in zip(parts, moved, strict=True):
        limits, at = of_keys.judgement.bound, of_keys.keys
        judged_as += [
            ("dk", _gradient(of_keys.k), whole.dk[:, :, at], limits.dk + error.dk),
            ("dv", _gradient(of_keys.v), whole.dv[:, :, at], limits.dv + error.dv),
        ]
    findings = []
    claim = f"of a ring over parts of {tuple(lengths)} keys leaves the bound of the whole"
    for name, got, want, limit in judged_as:
        if not bool(limit.isfinite().all()):
            raise RuntimeError(f"the bound is not finite, so nothing was judged: {problem}")
        bad = ratios(got, want, limit) > 1
        findings += found_elements(
            subject, problem, "S1 merging", claim, name, (got, want, limit), bad
        )
    return findings


def _gradient_of(x: torch.Tensor) -> torch.Tensor:
    """Return the gradient of a tensor; zeros if nothing depends on it."""
    return torch.zeros_like(x) if x.grad is None else x.grad


def _gradient(x: torch.Tensor) -> torch.Tensor:
    """Return the gradient of a leaf in float64."""
    return _gradient_of(x).to(torch.float64)


def _moved(part: _Part, off_dout: torch.Tensor, off_dlse: torch.Tensor) -> KeyErrors:
    """Return how far the gradients of a part move with errors of its dout and dlse."""
    p = part.problem
    sizes = p.B, p.H, p.M, p.N
    seen = p.mask.dense(*sizes, device=part.q.device).expand(*sizes)
    tensors = (x.detach() for x in (part.q, part.k, part.v))
    return gradient_errors(
        *tensors, seen=seen, sm_scale=p.scale, off_dout=off_dout, off_dlse=off_dlse
    )
