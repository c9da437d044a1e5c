"""The search for a problem that violates a claim: draw, judge, shrink."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress

import hypothesis
from hypothesis import strategies as st

from fa_verify.oracles.outputs import OUTPUTS
from fa_verify.oracles.problem import Problem
from fa_verify.properties.checks import guarantees
from fa_verify.properties.checks.guarantees import Check
from fa_verify.properties.comparison.compare import Finding, Violation, ratios, worst_of_parts
from fa_verify.properties.execution.tally import Tally
from fa_verify.properties.execution.trial import SubjectError, Trial, run_trial
from fa_verify.properties.search.minimize import minimized
from fa_verify.properties.subjects.subject import Subject

__all__ = ["Runner", "attack", "draws", "peaks"]

SHRINK_SECONDS = 30.0


class Runner:
    """Judges problems of one subject on all of its outputs, and checks claims on them.

    Args:
        subject: What is verified.
        tally: Where it is written down.
        watching: Takes a problem and gives a context: what goes on while it is being judged.
    """

    def __init__(
        self,
        subject: Subject,
        tally: Tally,
        watching: Callable[[Problem], AbstractContextManager[object]] | None = None,
    ) -> None:
        self.subject = subject
        self.tally = tally
        self.watching = watching or (lambda problem: nullcontext())
        # What every problem is held to beside the claim.
        self.standing = dict(guarantees.STANDING)
        self.judged = 0
        self.out_of_range = 0
        self.refusals: Counter[str] = Counter()
        # Worst error/bound of the last problem, or batch of problems, that was judged.
        self.peaks: dict[str, float] = {}

    def findings(self, problem: Problem, claim: Check) -> list[Finding]:
        """What violates the claim, or else accuracy, RMS or bias; nothing where unsupported."""
        found = self._findings(problem, claim)
        source = self.subject.source
        return [dataclasses.replace(x, kernel=source) for x in found] if source else found

    def _findings(self, problem: Problem, claim: Check) -> list[Finding]:
        self.peaks = {}
        try:
            # Around everything, so that it sees an exception that leaves a GPU unusable.
            with self.watching(problem):
                return self._judge(problem, claim)
        except NotImplementedError as refusal:
            reason = (str(refusal) or "NotImplementedError without a reason").splitlines()[0]
            self.refusals[reason] += 1
            self.tally.refused(problem, reason)
            return []
        except SubjectError as error:
            parts = (problem.part(i, i + 1) for i in range(len(problem.seeds)))
            alone = next(filter(None, (self._findings(part, claim) for part in parts)), None)
            return alone or [Finding.of_exception(error, self.subject, problem)]

    def _judge(self, problem: Problem, claim: Check) -> list[Finding]:
        """``findings`` of a problem that the subject computes."""
        trial = run_trial(self.subject, problem)
        if trial is None:
            if problem.seeds:
                return self._judge_parts(problem, claim)
            self.out_of_range += 1
            self.tally.rejected(problem)
            return []
        of_problems = peaks(trial)
        self.peaks = {name: max(x[name] for x in of_problems) for name in of_problems[0]}
        for i, of_one in enumerate(of_problems):
            one = problem.part(i, i + 1) if problem.seeds else problem
            self.tally.judged(self.subject, one, of_one)
        findings: list[Finding] = []
        try:
            findings = claim(trial)
            self.judged += len(of_problems)
        except NotImplementedError as refusal:  # of strides that it does not declare, say
            self.refusals[f"in a second run: {refusal}"] += 1
        findings = findings or [x for check in self._standing() for x in check(trial)]
        if findings and problem.seeds:
            return self._alone(problem, of_problems, claim) or findings
        return findings

    def _judge_parts(self, batched: Problem, claim: Check) -> list[Finding]:
        """``findings`` of the halves of a batched problem: not all of its problems are in range."""
        largest: dict[str, float] = {}
        count = len(batched.seeds)
        for start, stop in ((0, count // 2), (count // 2, count)):
            self.peaks = {}
            if found := self._judge(batched.part(start, stop), claim):
                return found
            for name, peak in self.peaks.items():
                largest[name] = max(peak, largest.get(name, 0.0))
        self.peaks = largest
        return []

    def _alone(
        self, batched: Problem, of_problems: list[dict[str, float]], claim: Check
    ) -> list[Finding]:
        """The findings of the first problem of a failing batch that fails alone, likely ones first.

        Nothing where all of them pass, or are refused alone: then it is the batch that fails.
        """
        order = sorted(
            range(len(of_problems)), key=lambda i: max(of_problems[i].values()), reverse=True
        )
        together = self.peaks
        for i in order:
            with suppress(NotImplementedError, SubjectError):
                if found := self._judge(batched.part(i, i + 1), claim):
                    return found
        self.peaks = together
        return []

    def _standing(self) -> list[Check]:
        """What the last problem is still to be held to: its peaks say whether it is within G1."""
        inside = max(self.peaks.values()) <= 1
        return [check for name, check in self.standing.items() if name != "G1" or not inside]


def peaks(trial: Trial) -> list[dict[str, float]]:
    """The worst error/bound of each output that there is, of each problem of a batched problem."""
    found = {
        name: ratios(got, want, bound)
        for name, got, want, bound in zip(
            OUTPUTS, trial.got, trial.want, trial.judgement.bound, strict=True
        )
        if got is not None
    }
    of_outputs = worst_of_parts(len(trial.problem.all_seeds), *found.values())
    return [dict(zip(found, numbers, strict=True)) for numbers in zip(*of_outputs, strict=True)]


def draws(count: int) -> hypothesis.settings:
    """Settings of a draw that depends on its seed alone, outside of pytest's profiles."""
    return hypothesis.settings(
        max_examples=count, derandomize=True, database=None, deadline=None,
        suppress_health_check=list(hypothesis.HealthCheck), report_multiple_bugs=False,
        phases=[phase for phase in hypothesis.Phase if phase is not hypothesis.Phase.explain],
    )  # fmt: skip


def attack(
    runner: Runner,
    claim: Check,
    strategy: st.SearchStrategy[Problem],
    *,
    seed: str,
    steer: bool = False,
    settings: hypothesis.settings | None = None,
) -> None:
    """Draws problems, as many as the Hypothesis settings say, and checks a claim on each.

    In a deterministic profile the draw is a function of ``seed``; in the others it is new every
    time.

    Args:
        runner: Judges them.
        claim: What has to hold.
        strategy: What to draw.
        seed: Such as the name of the test.
        steer: Let Hypothesis look for larger error/bound.
        settings: Of Hypothesis; None takes those of its profile in force.

    Raises:
        Violation: With the findings of the smallest problem found.
    """
    outcomes = _Outcomes(lambda problem: runner.findings(problem, claim))

    @hypothesis.given(problem=strategy)
    def holds(problem: Problem) -> None:
        __tracebackhide__ = True
        findings = outcomes.of(problem)
        if findings:
            raise Violation(findings)
        if steer:
            for output, peak in runner.peaks.items():
                hypothesis.target(min(peak, 1e6), label=f"{output} error/bound")

    settings = settings or hypothesis.settings()
    if settings.derandomize:
        hypothesis.seed(seed)(holds)
    try:
        settings(holds)()
    except Violation as violation:
        __tracebackhide__ = True
        first = violation.findings
        raise Violation(minimized(first[0].problem, first, _of_supported(runner, claim))) from None


def _of_supported(runner: Runner, claim: Check) -> Callable[[Problem], list[Finding]]:
    """Findings, but of what the subject declares alone."""
    return lambda problem: (
        [] if runner.subject.excludes(problem) else runner.findings(problem, claim)
    )


class _Outcomes:
    """Findings by problem, so that the search for a smaller failing problem ends in time.

    Once SHRINK_SECONDS have passed since the first failure, problems not seen before count as
    passing: the search then stops at the smallest failure found, which is remembered.
    """

    def __init__(self, check: Callable[[Problem], list[Finding]]) -> None:
        self.check = check
        self.seen: dict[Problem, list[Finding]] = {}
        self.first_failure: float | None = None

    def of(self, problem: Problem) -> list[Finding]:
        """The findings of a problem, computed once."""
        if problem not in self.seen:
            first = self.first_failure
            if first is not None and time.monotonic() - first > SHRINK_SECONDS:
                return []
            self.seen[problem] = self.check(problem)
            if self.seen[problem] and first is None:
                self.first_failure = time.monotonic()
        return self.seen[problem]
