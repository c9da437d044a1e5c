"""I1, I2, I4, I5 and I6: parts of a problem, or another form of it, give the same bits.

A subject declares them by ``same_bits``, a word for each. I1 covers slices of the batch, and I4
those of the heads. G9 asks for the smallest slice, one batch entry and one key/value head.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import torch

from fa_verify.oracles.guarantee import GUARANTEES, I6
from fa_verify.oracles.outputs import OUTPUTS, Outputs
from fa_verify.oracles.problem import Problem
from fa_verify.properties.guarantees.agreement import agree
from fa_verify.properties.guarantees.compare import Finding, same_bits
from fa_verify.properties.inputs.parts import (
    Part,
    chunks,
    entries_apart,
    heads_apart,
    merged,
    other_forms,
)
from fa_verify.properties.inputs.tensors import Inputs
from fa_verify.properties.kernels.refusals import RefusedError
from fa_verify.properties.kernels.subject import Subject
from fa_verify.properties.kernels.vocabulary import SAME_BITS
from fa_verify.properties.running.trial import AttentionTrial, run_subject

__all__ = ["CHECKS", "difference", "parts_of", "subject_of"]


def parts_of(word: str, subject: Subject, problem: Problem, inputs: Inputs) -> Iterator[Part]:
    """Yield the parts that a word of ``same_bits`` compares, and that the subject takes.

    Args:
        word: One of ``SAME_BITS``; "inference" has no parts.
        subject: The subject, which leaves out what its declarations exclude.
        problem: The problem.
        inputs: Its tensors.
    """
    match word:
        case "batch":
            parts = entries_apart(problem, inputs)
        case "chunks":
            parts = chunks(problem, inputs, subject.tile_of(problem)[0])
        case "heads":
            parts = heads_apart(problem, inputs)
        case "varlen":
            parts = other_forms(problem, inputs, packs=subject.packed is not None)
        case _:
            return
    for part in parts:
        is_another = part.packed or part.problem != problem
        if is_another and subject.excludes(part.problem) is None:
            yield part


def subject_of(subject: Subject, part: Part) -> Subject:
    """Return the subject that computes a part: another function if sequences are packed."""
    if not part.packed:
        return subject
    assert subject.packed is not None
    return dataclasses.replace(subject, call=subject.packed, varlen=True)


def difference(
    whole: Outputs[torch.Tensor | None],
    again: Outputs[torch.Tensor | None],
    only: tuple[str, ...] = OUTPUTS,
) -> str:
    """Say where two runs part: the first element, the largest distance, how many elements.

    The distance counts representable numbers between two elements, units in the last place. +0 and
    -0 are equal, and so are all NaN.

    Returns:
        A text such as "out parts first at b=0 h=1 m=16 d=3, by at most 2 ulp, in 5 of 96
        elements"; empty if all bits agree.
    """
    for name, first, second in zip(OUTPUTS, whole, again, strict=True):
        if first is None or second is None or name not in only:
            continue
        bad = ~same_bits(first, second)
        if not bad.any():
            continue
        place = bad.nonzero()[0].tolist()
        axes = "bhnd" if name in ("dk", "dv") else "bhmd"
        where = " ".join(f"{axis}={i}" for axis, i in zip(axes, place, strict=False))
        numbers = (first[bad], second[bad])
        finite = numbers[0].isfinite() & numbers[1].isfinite()
        apart = f"at most {_ulps(*numbers)} ulp" if finite.all() else "NaN or Inf"
        return (
            f"{name} parts first at {where}, by {apart}, in {int(bad.sum()):,} of "
            f"{bad.numel():,} elements"
        )
    return ""


def _ulps(a: torch.Tensor, b: torch.Tensor) -> int:
    """Return the largest number of representable numbers from an element of a to that of b."""
    kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    largest = torch.iinfo(kind).max
    bits = [x.contiguous().view(kind).to(torch.int64) for x in (a, b)]
    places = [torch.where(x < 0, -(x & largest), x) for x in bits]
    return int((places[0] - places[1]).abs().max())


def _of(word: str) -> Callable[[AttentionTrial], list[Finding]]:
    """Return the check of a word of ``same_bits``."""
    guarantee = SAME_BITS[word]

    def check(trial: AttentionTrial) -> list[Finding]:
        """Hold the parts of a problem to the bits of the whole; see ``parts_of``."""
        subject, problem = trial.subject, trial.problem
        promised = subject.promises(guarantee, problem.config)
        if not promised:
            why = f"to {subject.name}, which declares no same_bits {word!r}"
            trial.not_applicable(guarantee, why)
            return []
        for part in parts_of(word, subject, problem, trial.inputs):
            try:
                got = run_subject(subject_of(subject, part), part.problem, part.inputs)
            except RefusedError as refusal:
                why = f"to {subject.name}, which refuses {part.told}: {refusal}"
                trial.not_applicable(guarantee, why)
                continue
            trial.applies(guarantee)
            again, rows, keys = merged(trial.got, part, got)
            told = difference(trial.got, again, tuple(x for x in part.outputs if x in promised))
            findings = agree(
                trial, again, GUARANTEES[guarantee],
                f"has other bits for {part.told} than in the whole: {told}",
                rows=rows, keys=keys, only=part.outputs,
            )  # fmt: skip
            if findings:
                return findings
        trial.not_applicable(guarantee, f"to a problem without parts for {word!r}")
        return []

    check.__name__ = word
    return check


def inference(trial: AttentionTrial) -> list[Finding]:
    """I6: the forward without gradients gives what the forward of training gives.

    To the bit where it is promised, else both lie within the bound.
    """
    subject = trial.subject
    if not subject.backward:
        trial.not_applicable(I6.key, f"to {subject.name}, which has no gradients")
        return []
    without = dataclasses.replace(subject, backward=False)
    again = run_subject(without, trial.problem, trial.inputs)
    told = difference(trial.got, again, ("out", "lse"))
    trial.applies(I6.key)
    claim = f"has other bits without gradients than with them: {told}"
    return agree(trial, again, I6, claim, only=("out", "lse"))


CHECKS: dict[str, Callable[[AttentionTrial], list[Finding]]] = {
    **{SAME_BITS[word]: _of(word) for word in SAME_BITS if word != "inference"},
    SAME_BITS["inference"]: inference,
}
