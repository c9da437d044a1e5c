"""The search for a call that violates a check: draw, judge and shrink."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import hypothesis
import torch
from hypothesis import strategies as st

from fa_verify.oracles.call import Call
from fa_verify.oracles.outputs import Numerics
from fa_verify.oracles.problem import Problem
from fa_verify.properties.guarantees.claims import Check, Claim, accuracy, standing_of
from fa_verify.properties.guarantees.compare import Finding, Violation
from fa_verify.properties.guarantees.limits import judged_elements
from fa_verify.properties.kernels.refusals import (
    CannotRunError,
    ExcludedCallError,
    NoRoomError,
    RefusedError,
)
from fa_verify.properties.kernels.subject import Subject
from fa_verify.properties.kernels.without_gpu import CANNOT_RUN
from fa_verify.properties.kinds.registry import kind_of
from fa_verify.properties.running.large_memory import refusal_without_room
from fa_verify.properties.running.tally import Tally
from fa_verify.properties.running.trial import SubjectError, plan_run
from fa_verify.properties.search.minimize import minimized

__all__ = ["Runner", "attack", "attack_one", "draws", "of_supported", "plainest"]

SHRINK_SECONDS = 30.0


class Runner:
    """Runs calls of any kind on a kernel, judges all outputs, and runs checks on them.

    Args:
        subject: The subject under test.
        tally: The tally to update.
        watching: Returns a context manager that is active while a problem is judged.
        mask: Value of --fa-mask, for replay lines.
        waived: Returns whether a finding is known and counts as none.
        asks: Key of the guarantee that the calls are judged for, for the tally; "" for several.
    """

    def __init__(
        self,
        subject: Subject,
        tally: Tally,
        watching: Callable[[Call], AbstractContextManager[object]] | None = None,
        mask: str = "",
        waived: Callable[[Finding], bool] | None = None,
        asks: str = "",
    ) -> None:
        self.subject = subject
        self.asks = asks
        self.mask = mask
        self.waived = waived or (lambda finding: False)
        self.tally = tally
        self.watching = watching or (lambda problem: nullcontext())
        # Keys of guarantees whose standing checks are left out, as they have failed.
        self.reported: set[str] = set()
        self.judged = 0
        self.out_of_range = 0
        # Those that are in range for the default numerics, but not for the declared ones.
        self.out_by_numerics = 0
        self.refusals: Counter[str] = Counter()
        # The guarantees and parts of them that claims have checked, and the reasons of others.
        self.applied: set[str] = set()
        self._inapplicable: dict[str, str] = {}
        # Worst error/bound of each output in the last judged call or batch of calls.
        self.peaks: dict[str, float] = {}

    def findings(self, problem: Call, claim: Check) -> list[Finding]:
        """Return the findings of the claim, else those of the standing checks.

        The list is empty if the problem is out of range or the subject refuses it. Another
        NotImplementedError than that of the kernel's call is an error of the suite. A check of many
        calls names the one that is wrong (``Finding.called``). If that call, or the problem, is
        wrong by itself, the findings are its own: its sizes are those of the fault.
        """
        found = self._findings(problem, claim)
        if found and found[0].called is not None:
            check = next(x.check for x in standing_of(problem.kind) if x.bounded)
            alone = (self._findings(call, check) for call in (problem, found[0].called))
            found = next(filter(None, alone), found)
        source, mask = self.subject.source, self.mask
        if source or mask:
            found = [dataclasses.replace(x, kernel=source, mask=mask) for x in found]
        kept = [x for x in found if not self.waived(x)]
        if len(kept) < len(found):
            # The error of an output with known failures alone leads no search.
            known = {x.output for x in found} - {x.output for x in kept}
            self.peaks = {name: peak for name, peak in self.peaks.items() if name not in known}
        return kept

    def _findings(self, problem: Call, claim: Check) -> list[Finding]:
        self.peaks = {}
        try:
            # Encloses all work, so that the watchdog sees an exception that loses the GPU. The
            # oracle or a check may find no room, too.
            with self.watching(problem), refusal_without_room():
                return self._judge(problem, claim)
        except RefusedError as refusal:
            reason = (str(refusal) or "NotImplementedError without a reason").splitlines()[0]
            self.tally.refused(problem, reason)
            self._refuse(problem, refusal, reason)
            return []
        except SubjectError as error:
            parts = (problem.part(i, i + 1) for i in range(len(problem.seeds)))
            alone = next(filter(None, (self._findings(part, claim) for part in parts)), None)
            # The exception may come after a forward that is wrong.
            before = [] if error.trial is None else accuracy(error.trial)
            return alone or [*before, Finding.of_exception(error, self.subject, problem)]

    @property
    def limits(self) -> str:
        """The reasons for which problems cannot run on this machine, whatever the kernel."""
        return ", ".join(why for why in self.refusals if CANNOT_RUN in why)

    def _refuse(self, problem: Call, refusal: RefusedError, reason: str) -> None:
        """Count a refusal: of the kernel, unless declarations or the machine exclude the call."""
        self.refusals[reason] += 1
        if not isinstance(refusal, CannotRunError | ExcludedCallError | NoRoomError):
            self.tally.asked_for(self.asks, refused=max(1, len(problem.seeds)))

    def _judge(self, problem: Call, claim: Check) -> list[Finding]:
        """Run and check a call; raises what the kernel raises."""
        trial = kind_of(problem).run(self.subject, problem)
        if trial is None:
            if problem.seeds:
                return self._judge_parts(problem, claim)
            self.out_of_range += 1
            self.out_by_numerics += self._in_range_by_default(problem)
            self.tally.rejected(problem)
            return []
        of_problems = trial.peaks
        self.peaks = {name: max(x[name] for x in of_problems) for name in trial.outputs}
        for i, of_one in enumerate(of_problems):
            one = problem.part(i, i + 1) if problem.seeds else problem
            limited = 0
            if isinstance(one, Problem):
                limited = judged_elements(self.subject, one, of_one)
            self.tally.judged(self.subject, one, of_one, limited)
        findings: list[Finding] = []
        raised: list[Finding] = []
        try:
            findings = claim(trial)
            self.judged += len(of_problems)
            self.tally.asked_for(self.asks, judged=len(of_problems))
        except RefusedError as refusal:  # for example, of strides that it does not declare
            self._refuse(problem, refusal, f"in a second run: {refusal}")
        except SubjectError as error:
            raised = [Finding.of_exception(error, self.subject, problem)]
        self._note(trial.asked)
        # No standing check runs the subject.
        with torch.inference_mode():
            findings = findings or [x for y in self._standing(problem) for x in y.check(trial)]
        findings += raised
        self.tally.history.append((problem, not findings))
        if findings and problem.seeds:
            return self._alone(problem, of_problems, claim) or findings
        return findings

    def _note(self, asked: Mapping[str, str]) -> None:
        for name, why in asked.items():
            if why:
                self._inapplicable.setdefault(name, why)
            else:
                self.applied.add(name)

    def not_applicable(self) -> dict[str, str]:
        """Return why guarantees, or parts of them, were applicable to no problem."""
        return {k: why for k, why in self._inapplicable.items() if k not in self.applied}

    def _in_range_by_default(self, problem: Call) -> bool:
        """Return whether a problem out of range is in range for the default numerics."""
        if not isinstance(problem, Problem) or self.subject.numerics_of(problem) == Numerics():
            return False
        plain = dataclasses.replace(self.subject, numerics=Numerics(), configs={})
        return plan_run(plain, problem) is not None

    def _judge_parts(self, batched: Call, claim: Check) -> list[Finding]:
        """Judge the halves of a batched problem, some of whose problems are out of range."""
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
        self, batched: Call, of_problems: list[dict[str, float]], claim: Check
    ) -> list[Finding]:
        """Return the findings of the first problem of a failing batch that fails alone.

        Tries the problems with the largest error/bound first. Returns an empty list if none of them
        fails alone, so that the failure is one of the batch.
        """
        order = sorted(
            range(len(of_problems)), key=lambda i: max(of_problems[i].values()), reverse=True
        )
        together = self.peaks
        for i in order:
            with suppress(RefusedError, SubjectError):
                if found := self._judge(batched.part(i, i + 1), claim):
                    return found
        self.peaks = together
        return []

    def _standing(self, call: Call) -> list[Claim]:
        """Return the standing claims to check: the bound, only if the last peaks exceed 1."""
        inside = max(self.peaks.values(), default=0.0) <= 1
        return [
            claim
            for claim in standing_of(call.kind)
            if not (claim.bounded and inside) and claim.guarantee.key not in self.reported
        ]


def draws(count: int) -> hypothesis.settings:
    """Return Hypothesis settings for a deterministic draw of ``count`` examples."""
    return hypothesis.settings(
        max_examples=count, derandomize=True, database=None, deadline=None,
        suppress_health_check=list(hypothesis.HealthCheck), report_multiple_bugs=False,
        phases=[phase for phase in hypothesis.Phase if phase is not hypothesis.Phase.explain],
    )  # fmt: skip


def attack(
    runner: Runner,
    claim: Check,
    strategy: st.SearchStrategy[Any],
    *,
    seed: str,
    steer: bool = False,
    settings: hypothesis.settings | None = None,
) -> None:
    """Draw as many problems as the Hypothesis settings say, and run a check on each.

    In a deterministic profile the draw depends on ``seed`` only. In other profiles every run draws
    new problems.

    Args:
        runner: The runner that judges the problems.
        claim: The check.
        strategy: Strategy for the problems.
        seed: Seed of the draw, such as the name of the test.
        steer: Whether Hypothesis targets larger error/bound.
        settings: Hypothesis settings; None uses the current profile.

    Raises:
        Violation: A problem fails. Holds the findings of the smallest failing problem found.
    """
    outcomes = _Outcomes(lambda problem: runner.findings(problem, claim))

    @hypothesis.given(problem=strategy)
    def holds(problem: Call) -> None:
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
        smallest = minimized(first[0].problem, first, of_supported(runner, claim))

        def again(other: Runner) -> None:
            attack(other, claim, strategy, seed=seed, steer=steer, settings=settings)

        raise Violation(smallest, claim, again) from None


def attack_one(runner: Runner, claim: Check, problem: Call) -> None:
    """Run a check on a problem that was not drawn.

    Raises:
        Violation: The problem fails. Holds the findings of the plainest problem found, which may
            fail for another cause than this one.
    """
    __tracebackhide__ = True
    if findings := runner.findings(problem, claim):
        plain = plainest(runner, findings, claim)
        raise Violation(plain, claim, lambda other: attack_one(other, claim, problem))


def plainest(runner: Runner, findings: list[Finding], claim: Check) -> list[Finding]:
    """Shrink a stored problem that fails, and return the findings on the simplest one.

    A stored problem has the inputs, dtype and configuration of the fault for which it was stored.
    Those of the default problem are tried first.

    Args:
        runner: The runner that judges the problems.
        findings: The findings of the stored problem.
        claim: A check that gives the first of them.
    """
    config = next(iter(runner.subject.configs))
    plain: list[dict[str, object]] = [{"dtype": Problem().dtype}, {"config": config}]
    return minimized(findings[0].problem, findings, of_supported(runner, claim), plain)


def of_supported(runner: Runner, claim: Check) -> Callable[[Call], list[Finding]]:
    """Return a check that passes calls which the kernel's declarations exclude."""
    return lambda call: (
        [] if kind_of(call).excludes(runner.subject, call) else runner.findings(call, claim)
    )


class _Outcomes:
    """Caches findings by problem and limits the time of shrinking.

    Once SHRINK_SECONDS have passed since the first failure, problems that were not seen before
    count as passing. The search then ends at the smallest failure found.
    """

    def __init__(self, check: Callable[[Call], list[Finding]]) -> None:
        self.check = check
        self.seen: dict[Call, list[Finding]] = {}
        self.first_failure: float | None = None

    def of(self, problem: Call) -> list[Finding]:
        """Return the findings of a problem, computed once."""
        if problem not in self.seen:
            first = self.first_failure
            if first is not None and time.monotonic() - first > SHRINK_SECONDS:
                return []
            self.seen[problem] = self.check(problem)
            if self.seen[problem] and first is None:
                self.first_failure = time.monotonic()
        return self.seen[problem]
