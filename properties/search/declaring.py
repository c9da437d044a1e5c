"""Declarations with which failing problems pass, so that a convention is not taken for a fault."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

from fa_verify.oracles.call import Call
from fa_verify.properties.guarantees.claims import Check
from fa_verify.properties.kernels.declared import NUMERICS_THAT_DIFFER
from fa_verify.properties.kernels.subject import Subject
from fa_verify.properties.kinds.feature import Feature, is_soft
from fa_verify.properties.running.tally import Tally
from fa_verify.properties.search.search import Runner

__all__ = ["declarations_that_fit"]

_CONVENTIONS: tuple[dict[str, object], ...] = (
    {"lse_base": "2"}, {"empty_lse": 0}, {"empty_lse": "+inf"},
)  # fmt: skip
_ROUNDED_P: dict[str, object] = {"p_dtype": "input"}
# The features that a declaration is about; the others are about every problem.
_ABOUT = {
    "group_sum": {"grouped heads"}, "empty_lse": {"empty rows", "parts without keys"},
    "softcap_slope": {"softcap"},
}  # fmt: skip
# The declarations that are about gradients.
_OF_GRADIENTS = {"group_sum", "ds_scaled", "ds_from", "ds_roundings", "softcap_slope", "atomic"}
_OF_FORWARD = {"out", "lse"}


def declarations_that_fit(
    runner: Runner,
    claim: Check,
    problems: Iterable[Call],
    features: Iterable[Feature],
    outputs: Iterable[str],
) -> tuple[str, ...]:
    """Return the declarations, such as ``group_sum="dtype"``, with which all problems pass.

    A declaration fits only if it says something of the features: a convention that holds for every
    problem explains no failure of grouped heads alone. One of gradients explains no wrong out.

    Args:
        runner: The runner on whose subject they fail.
        claim: The check that fails.
        problems: The failing problems.
        features: The features that they need.
        outputs: The outputs that are wrong.
    """
    problems = tuple(problems)
    of_forward = bool({*outputs} & _OF_FORWARD)
    hard = {x.name for x in features if not is_soft(x)} - {"dtype"}
    return tuple(
        ", ".join(f"{word}={_literal(value)}" for word, value in change.items())
        for change, subject in _declaring(runner.subject)
        if not (of_forward and _OF_GRADIENTS & {*change})
        and hard <= _about(change)
        and bool(hard) == bool(_about(change))
        and _passes(subject, claim, problems)
    )


def _about(change: dict[str, object]) -> set[str]:
    """Return the features that a declaration is about."""
    return set().union(*(_ABOUT.get(word, set()) for word in change))


def _declaring(subject: Subject) -> Iterator[tuple[dict[str, object], Subject]]:
    """Yield declarations, and the subject with them, for each that it lacks."""
    for change in (_ROUNDED_P, *NUMERICS_THAT_DIFFER):
        numerics = dataclasses.replace(subject.numerics, **change)  # type: ignore[arg-type]
        if numerics != subject.numerics:
            yield change, dataclasses.replace(subject, numerics=numerics)
    for change in _CONVENTIONS:
        if any(getattr(subject, word) != value for word, value in change.items()):
            yield change, dataclasses.replace(subject, **change)  # type: ignore[arg-type]


def _literal(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value).replace("'", '"')


def _passes(subject: Subject, claim: Check, problems: tuple[Call, ...]) -> bool:
    """Return whether all problems are judged and pass."""
    runner = Runner(subject, Tally())
    for problem in problems:
        if runner.findings(problem, claim):
            return False
    return runner.judged >= len(problems) > 0
