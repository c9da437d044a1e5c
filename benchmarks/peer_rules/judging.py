"""Runs other projects' rules and this project's on the same mutants and the same inputs.

A rule's verdict counts only on problems on which the unmutated kernel passes the rule. On the other
problems the rule raises a false alarm, which is counted separately.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.peer_rules.case import Case
from benchmarks.peer_rules.inputs import PLAIN, plain
from benchmarks.peer_rules.rules import RULES
from fa_verify.diagnosis.mutant import Mutant
from fa_verify.oracles.problem import Problem
from fa_verify.properties.checks import claims, closed_form, identities, statistics
from fa_verify.properties.execution.trial import AttentionTrial, PlannedRun, SubjectError, plan_run
from fa_verify.properties.inputs.dlse_families import NO_DLSE
from fa_verify.properties.inputs.tensors import Inputs
from fa_verify.properties.subjects.subject import Subject
from fa_verify.subjects.ours import flash_attention
from tests.mutation.judging.trials import CHECKS, STEPS
from tests.mutation.judging.verdict import subject_of

__all__ = ["COLUMNS", "JUDGES", "Asked", "asked_of", "judged_by_all"]

COLUMNS = ("ours", "theirs")
PROBED = 4
# Configuration for the other projects' problems. They have many heads, and the interpreter takes as
# long for a small tile as for a large one.
_CONFIG = "64x32"


class Asked(NamedTuple):
    """A problem, with the judges that decide about it.

    Args:
        column: The origin of the inputs, out of ``COLUMNS``.
        rule: The rule whose suite has these inputs; empty for this project's inputs.
        checks: Further checks of this project, names in ``CHECKS``.
        probed: Whether the closed-form checks run on it, as on one problem in PROBED.
        question: The problem, with the oracle's answer.
        in_float64: The problem in float64; None if that is out of range.
        passed: The judges that the unmutated kernel passes.
        failed: The judges that the unmutated kernel fails: false alarms.
    """

    column: str
    rule: str
    checks: tuple[str, ...]
    probed: bool
    question: PlannedRun
    in_float64: PlannedRun | None
    passed: frozenset[str] = frozenset()
    failed: frozenset[str] = frozenset()


@dataclass(frozen=True)
class _Answer:
    """A subject's answer to one problem, in the forms that judges read."""

    subject: Subject
    asked: Asked

    @cached_property
    def trial(self) -> AttentionTrial:
        return self.asked.question.run(self.subject)

    @cached_property
    def in_float64(self) -> AttentionTrial | None:
        asked = self.asked.in_float64
        return None if asked is None else asked.run(self.subject)

    @cached_property
    def case(self) -> Case:
        made = self.asked.question
        return Case(
            inputs=made.inputs,
            got=self.trial.got,
            mask=made.problem.mask,
            sm_scale=made.problem.scale,
            want=made.want,
        )


def _bound(answer: _Answer) -> bool:
    return not claims.accuracy(answer.trial)


def _averages(answer: _Answer) -> bool:
    return _bound(answer) and not statistics.rms(answer.trial) + statistics.bias(answer.trial)


def _logic(answer: _Answer) -> bool:
    trial = answer.in_float64
    return trial is None or not claims.logic(trial)


def _probes(answer: _Answer) -> bool:
    if not answer.asked.probed:
        return True
    checks = (
        closed_form.counts,
        closed_form.mask_read_back,
        closed_form.unit_values,
        closed_form.doubled_values,
        closed_form.permuted,
        identities.identities,
    )
    return not any(check(answer.trial) for check in checks)


def _everything(answer: _Answer) -> bool:
    checks = (CHECKS[name] for name in answer.asked.checks)
    return (
        _averages(answer)
        and _logic(answer)
        and _probes(answer)
        and not any(check(answer.trial) for check in checks)
    )


JUDGES: dict[str, Callable[[_Answer], bool]] = {
    **{
        rule.name: lambda answer, rule=rule: all(rule.judge(answer.case).values())
        for rule in RULES
    },
    "bound": _bound,
    "bound, RMS and bias": _averages,
    "T3": _logic,
    "probes and identities": _probes,
    "everything": _everything,
}  # fmt: skip
_DTYPES = {rule.name: rule.dtypes for rule in RULES}


def _speaks_of(judge: str, asked: Asked) -> bool:
    """Whether a judge decides about a problem; this project's judges decide about all."""
    if judge not in _DTYPES:
        return True
    problem = asked.question.problem
    if asked.column == "theirs":
        return asked.rule == judge
    return problem.dtype in _DTYPES[judge] and 0 not in (problem.M, problem.N)


def _passes(judge: str, answer: _Answer) -> bool:
    """Whether an answer passes a judge; a kernel that raises fails every judge."""
    try:
        return JUDGES[judge](answer)
    except (SubjectError, NotImplementedError):
        return False


def asked_of(judges: Collection[str]) -> list[Asked]:
    """Every problem, with the judges that the unmutated kernel passes and fails."""
    subject = Subject.of(flash_attention, "flash_attention")
    # No suite tests losses on lse.
    steps = [step for step in STEPS if step.problem.dlse == NO_DLSE]
    made = [_asked(subject, step.problem, None, checks=step.checks) for step in steps]
    made += [
        _asked(subject, replace(problem, config=_CONFIG), plain(rule, problem), rule=rule)
        for rule, problems in PLAIN.items()
        for problem in problems
    ]
    decided = []
    for number, asked in enumerate(made):
        asked = asked._replace(probed=number % PROBED == 0)
        answer = _Answer(subject, asked)
        speaking = [judge for judge in judges if _speaks_of(judge, asked)]
        passed = frozenset(judge for judge in speaking if _passes(judge, answer))
        decided.append(asked._replace(passed=passed, failed=frozenset(speaking) - passed))
    return decided


def _asked(
    subject: Subject,
    problem: Problem,
    inputs: Inputs | None,
    *,
    rule: str = "",
    checks: tuple[str, ...] = (),
) -> Asked:
    made = plan_run(subject, problem, inputs)
    wide = replace(problem, dtype="fp64", config=problem.config.removesuffix("-tf32"))
    widened = None if inputs is None else Inputs(*(x.to(torch.float64) for x in inputs.tensors))
    if made is None:
        raise ValueError(f"out of range, so it judges nothing: {problem.to_json()}")
    column = "theirs" if rule else "ours"
    return Asked(column, rule, checks, False, made, plan_run(subject, wide, widened))


def judged_by_all(
    sources: Mapping[str, str], mutant: Mutant, everything: Sequence[Asked]
) -> dict[str, frozenset[str]]:
    """The judges that a mutant fails, by column of inputs.

    Call it in a process that ends afterwards. A judge stops at its first failure.
    """
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        subject = subject_of(sources, mutant, Path(folder))
        kills: dict[str, set[str]] = {column: set() for column in COLUMNS}
        for asked in everything:
            judges = asked.passed - kills[asked.column]
            if judges:
                answer = _Answer(subject, asked)
                kills[asked.column] |= {x for x in judges if not _passes(x, answer)}
    return {column: frozenset(found) for column, found in kills.items()}
