"""C7: the codes and scales that an append writes, to the bit, where their rule is hardest."""

from __future__ import annotations

import dataclasses

import torch

from fa_verify.oracles.formats.element import ElementFormat
from fa_verify.oracles.guarantee import C7
from fa_verify.properties.guarantees.caches import left_by_append
from fa_verify.properties.guarantees.compare import Finding
from fa_verify.properties.inputs.caches import make_cache
from fa_verify.properties.kinds.caches import CacheTrial, expected, run_cache

__all__ = ["codes_written"]

# Scales of few digits, so that products with ties have those of 16 bits. A quotient by 3, 5 or 7 is
# a tie exactly; a product with the rounded reciprocal is so or not.
_SCALES = (1.0, 3 / 16, 5 / 8, 7 / 32)
# Numbers beyond the largest one, relative to it.
_BEYOND = (1.0, 1.03125, 1.0625, 1.5, 4.0)


def codes_written(trial: CacheTrial) -> list[Finding]:
    """C7: an append of ties, of numbers beyond the range and of zeros leaves the declared codes.

    Each number lies in the middle of two codes times the scale, which is one of a few. Scales of
    tokens follow from the largest number of a row, which is the format's times such a scale.
    """
    problem, form = trial.problem, trial.problem.format
    if form is None or not problem.new or not problem.attention.B:
        trial.not_applicable(C7.key, "to a call that appends to no cache of codes")
        return []
    trial.applies(C7.key)
    of_tokens = problem.scales == "token_head"
    cases = [("numbers between two codes", i) for i in range(len(_SCALES))]
    cases += [("zeros", 0)] + ([] if of_tokens else [("numbers beyond the range", 0)])
    for words, i in cases:
        x = make_cache(problem, trial.inputs)
        assert x.k is not None
        assert x.v is not None
        new = []
        for j, (tensor, scale) in enumerate(((x.k, x.k_scale), (x.v, x.v_scale))):
            # Keys and values have other scales.
            factor = _SCALES[(i + j) % len(_SCALES)]
            assert scale is not None
            if not of_tokens:
                scale.fill_(1 / factor if problem.divides else factor)
            new.append(_numbers(words, form, tensor, factor, of_tokens))
        x = x._replace(k=new[0], v=new[1])
        want = expected(trial.subject, problem, x)
        run_cache(trial.subject, problem, x)
        findings = left_by_append(trial, x, want)
        claim = f"is not what the declared rule makes of {words}"
        if findings:
            return [dataclasses.replace(f, guarantee=C7, claim=claim) for f in findings]
    return []


def _numbers(
    words: str, form: ElementFormat, like: torch.Tensor, factor: float, of_tokens: bool
) -> torch.Tensor:
    """Return new keys or values for one case, of the shape and dtype of others."""
    if words == "zeros":
        return torch.zeros_like(like)
    sizes = torch.tensor([form.magnitude(c) for c in range(form.largest_code + 1)]).double()
    if words == "numbers between two codes":
        exact = factor * torch.cat(((sizes[1:] + sizes[:-1]) / 2, sizes[1:]))
        exact = exact[exact == exact.to(like.dtype).double()]
    else:
        exact = factor * form.largest * torch.tensor(_BEYOND, dtype=torch.float64)
        exact = exact[exact.to(like.dtype).isfinite()]
    # Other numbers for each row, in steps that share no divisor with their count, usually.
    index = torch.arange(like.numel(), dtype=torch.int64) * 17
    drawn = exact[index % len(exact)] * (1 - 2 * (index // 17 % 2))
    found = drawn.view(like.shape).clone()
    largest = form.largest * factor
    if of_tokens and largest == float(torch.tensor(largest).to(like.dtype)):
        found[..., 0] = largest
    return found.to(like.dtype).to(like.device)
