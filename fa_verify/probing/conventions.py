"""The conventions of a kernel: its lse, and the alignment of the causal diagonal."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.problem import Problem
from fa_verify.probing.answers import Answer, undecided
from fa_verify.probing.trying import Tried, attempt
from fa_verify.properties.kernels.subject import Subject

__all__ = ["TopLeft", "alignments", "conventions_of"]


@dataclasses.dataclass(frozen=True)
class TopLeft:
    """The causal mask whose diagonal begins at the first row and the first key."""

    def dense(
        self, B: int, H: int, M: int, N: int, device: torch.device | str | None = None
    ) -> torch.Tensor:
        """Return bool (1, 1, M, N), True where visible."""
        m, n = (torch.arange(size, device=device) for size in (M, N))
        return (n <= m.view(-1, 1)).view(1, 1, M, N)


def conventions_of(
    subject: Subject, base: Problem, found: Mapping[str, Answer]
) -> Iterator[Answer]:
    """Yield the conventions of a kernel.

    Args:
        subject: The kernel without its declarations.
        base: A problem that the kernel takes.
        found: The answers of ``domain_of`` by word.
    """
    tried = attempt(subject, base, backward=False)
    if tried.got is None:
        return
    lse = tried.got.lse
    if lse is None:
        yield Answer("returns_lse", False, "shown", "the call returns out alone", tried.replay)
    else:
        seen = f"the call returns (out, lse), lse of shape {tuple(lse.shape)}"
        yield Answer("returns_lse", True, "shown", seen, tried.replay)
        of_lse = _lse_base(tried)
        yield of_lse
        # Both questions below are about the natural logarithm.
        subject = dataclasses.replace(subject, lse_base=of_lse.value or "e")
        yield _empty_lse(subject, base, found)
        yield _lse_grad(subject, base, found)
    yield _alignment(subject, base, found)


def _lse_base(tried: Tried) -> Answer:
    """Compare lse with the reference in both bases."""
    want = tried.reference(tried.problem.mask, tried.problem.scale).lse
    fits = [
        base
        for base, factor in (("e", 1.0), ("2", 1 / math.log(2)))
        if tried.resembles(want * factor, "lse")
    ]
    assert tried.got is not None
    assert tried.got.lse is not None
    got = tried.got.lse.flatten()[0].item()
    seen = f"lse of the first row is {got:.7g}; its natural logarithm is {want.flatten()[0]:.7g}"
    if len(fits) == 1:
        return Answer("lse_base", fits[0], "shown", seen, tried.replay)
    return undecided("lse_base", seen, tried.replay)


def _empty_lse(subject: Subject, base: Problem, found: Mapping[str, Answer]) -> Answer:
    """Look at lse of rows that see no key."""
    word = "empty_lse"
    masks = found["masks"].value
    problems = []
    if "padding" in masks:
        mask = dataclasses.replace(base.mask, seqlens_k=(0,))
        problems.append(dataclasses.replace(base, mask=mask))
    if "causal" in masks and found["m_ne_n"].value and found["m_gt_n"].value and base.M > 1:
        problems.append(dataclasses.replace(base, M=2 * base.M, mask=Mask(causal=True)))
    if found["zero_sizes"].value:
        problems.append(dataclasses.replace(base, N=0))
    seen, replay = "no mask that it takes leaves a row without a key", ""
    for problem in problems:
        tried = attempt(subject, problem, backward=False)
        if tried.got is None or tried.got.lse is None:
            seen, replay = tried.error, tried.replay
            continue
        # The first row sees no key in each alignment but the top-left one.
        values = set(tried.got.lse[:, :, 0].flatten().tolist())
        value = values.pop()
        known: dict[float, Any] = {-math.inf: "-inf", math.inf: "+inf", 0.0: 0}
        seen, replay = f"lse of a row without a key is {value:g}", tried.replay
        if not values and value in known:
            return Answer(word, known[value], "shown", seen, replay)
    return undecided(word, seen, replay)


def _lse_grad(subject: Subject, base: Problem, found: Mapping[str, Answer]) -> Answer:
    """Compare the gradients of a loss on lse alone with the reference."""
    word = "lse_grad"
    if not found["backward"].value:
        return Answer(word, False, "shown", "the kernel has no gradients", base.to_json())
    tried = attempt(subject, dataclasses.replace(base, dout="zero", dlse="normal"))
    if tried.error:
        return Answer(word, False, "shown", tried.error, tried.replay)
    wrong = tried.wrong()
    seen = f"{wrong} far from the reference" if wrong else "dq and dk are those of the reference"
    return Answer(word, not wrong, "shown", f"for a loss on lse: {seen}", tried.replay)


def _alignment(subject: Subject, base: Problem, found: Mapping[str, Answer]) -> Answer:
    """Compare out for M != N with both alignments of the causal mask."""
    word = "causal_alignment"
    if "causal" not in found["masks"].value:
        return undecided(word, "the kernel takes no causal mask")
    if not found["m_ne_n"].value:
        return undecided(word, "the kernel takes M = N alone, where both alignments agree")
    longer = base.M > 1 and found["m_gt_n"].value
    sizes = [{"N": 2 * base.N}, *([{"M": 2 * base.M}] if longer else [])]
    fits, tried = alignments(subject, base, *sizes)
    if tried.error:
        return undecided(word, tried.error, tried.replay)
    seen = f"with M={tried.problem.M} and N={tried.problem.N}, out is "
    if len(fits) == 1:
        (one,) = fits
        return Answer(word, one, "shown", f"{seen}that of the {one} mask", tried.replay)
    return undecided(word, f"{seen}that of neither alignment", tried.replay)


def alignments(
    subject: Subject, base: Problem, *sizes: Mapping[str, int]
) -> tuple[set[str], Tried]:
    """Return the alignments of the causal mask that out resembles, and the last call.

    Args:
        subject: The kernel without its declarations.
        base: A problem that the kernel takes.
        sizes: The sizes that each call changes.
    """
    fits = {"bottom-right", "top-left"}
    for changes in sizes:
        problem = dataclasses.replace(base, mask=Mask(causal=True), **changes)
        tried = attempt(subject, problem, backward=False)
        if tried.error:
            return set(), tried
        masks = {"bottom-right": problem.mask, "top-left": TopLeft()}
        # Rows that see a key in both alignments: kernels differ on the others.
        rows = slice(max(0, problem.M - problem.N), None)
        fits &= {
            name
            for name, mask in masks.items()
            if tried.resembles(tried.reference(mask, base.scale).out, rows=rows)
        }
        if not fits:
            break
    return fits, tried
