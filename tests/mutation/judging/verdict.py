"""Runs the steps on one mutant of the kernels, up to the first failing check or all of them."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType

from fa_verify.diagnosis.copies import load
from fa_verify.diagnosis.mutant import Kill, Mutant, Verdict, mutated
from fa_verify.properties.comparison.compare import Finding
from fa_verify.properties.execution.trial import PlannedRun, SubjectError, Trial, plan_run
from fa_verify.properties.subjects.subject import Subject
from fa_verify.simulator.interpreter.addresses import OutOfBoundsError
from fa_verify.simulator.interpreter.dot_order import dots_in_order
from fa_verify.subjects.ours import adapted, flash_attention
from tests.mutation.judging.caches import is_of_caches, kills_by_caches
from tests.mutation.judging.merging import FILES as MERGED
from tests.mutation.judging.merging import kills_by_merging
from tests.mutation.judging.trials import CHECKS, QUICK, Step
from tests.mutation.judging.unit_tests import TESTED_ALONE, failure_of
from tests.mutation.kill_order import UNIT_TESTS

__all__ = ["asked", "judged_kernels", "killed_by", "subject_of", "warmed"]

# Unit tests run before the slow steps. On mutants of a file with tests of its own, they run after
# this many steps, which kill most mutants. Only unit tests find redundant work and code that does
# not run here.
_FIRST = 22


def asked(steps: Sequence[Step]) -> list[PlannedRun]:
    """The planned runs of the steps, with the oracle's answers.

    Raises:
        ValueError: A step is out of range and cannot judge a mutant.
    """
    subject = Subject.of(flash_attention, "flash_attention")
    questions = [plan_run(subject, step.problem) for step in steps]
    for step, made in zip(steps, questions, strict=True):
        if made is None:
            raise ValueError(f"out of range, so it judges nothing: {step.problem.to_json()}")
    return questions


def subject_of(sources: Mapping[str, str], mutant: Mutant, folder: Path) -> Subject:
    """A mutant of ``fa_kernels`` as a subject, loaded from files written below ``folder``."""
    return Subject.of(adapted(_loaded(sources, mutant, folder)), "mutant")


def _loaded(sources: Mapping[str, str], mutant: Mutant, folder: Path) -> ModuleType:
    return load(mutated(sources, mutant), folder / folder.name.replace("-", "_"))


def warmed(questions: Sequence[PlannedRun]) -> None:
    """Runs the unmutated kernel once, so that forks inherit its imports."""
    questions[0].run(Subject.of(flash_attention, "flash_attention"))


def judged_kernels(
    sources: Mapping[str, str],
    mutant: Mutant,
    steps: Sequence[Step],
    questions: Sequence[PlannedRun],
    *,
    first: str = "",
    full: bool = False,
    units: int = len(QUICK),
    prepare: Callable[[ModuleType], None] | None = None,
) -> Verdict:
    """Loads a mutant of ``fa_kernels`` and runs the steps on it.

    Call it in a process that does nothing else afterwards: the mutant may write anywhere.

    Args:
        sources: The unmutated package.
        mutant: The mutant's edits.
        steps: The steps.
        questions: The planned run of each step.
        first: The step to run first: its problem as JSON, the path of a file of unit tests, or
            "unit tests".
        full: Continue after the first kill, to find every check that fails.
        units: The unit tests run before the step of this index; -1 runs none.
        prepare: Called with the package before the steps.
    """
    started = time.monotonic()
    verdict = Verdict()
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        kills = _kills(sources, mutant, steps, questions, first, Path(folder), units, prepare)
        for kill in kills:
            if not verdict.kills:
                verdict.seconds = time.monotonic() - started
            verdict.kills.append(kill)
            if not full:
                return verdict
    verdict.seconds = verdict.seconds or time.monotonic() - started
    return verdict


def _kills(
    sources: Mapping[str, str],
    mutant: Mutant,
    steps: Sequence[Step],
    questions: Sequence[PlannedRun],
    first: str,
    folder: Path,
    units: int,
    prepare: Callable[[ModuleType], None] | None,
) -> Iterator[Kill]:
    try:
        package = _loaded(sources, mutant, folder)
        if prepare is not None:
            prepare(package)
    except Exception as error:
        yield Kill("raised", -1, f"{type(error).__name__}: {error}"[:500])
        return
    subject = Subject.of(adapted(package), "mutant")
    edited = {edit.file for edit in mutant.edits}
    if not edited.isdisjoint(MERGED):
        yield from kills_by_merging(subject)
    if is_of_caches(mutant):
        yield from kills_by_caches(subject)
    if units > _FIRST and not edited.isdisjoint(TESTED_ALONE):
        units = _FIRST
    if units >= 0 and (first == UNIT_TESTS or first.endswith(".py")):
        yield from _of_unit_tests(package, edited, units, first)
        units = -1
    order = sorted(range(len(steps)), key=lambda i: (steps[i].problem.to_json() != first, i))
    for number in order:
        if number == units:
            yield from _of_unit_tests(package, edited, number)
        yield from _of_step(subject, steps[number], questions[number], number)


def killed_by(
    sources: Mapping[str, str],
    mutant: Mutant,
    steps: Sequence[Step],
    questions: Sequence[PlannedRun],
    folder: Path,
    goes_on: Callable[[], bool],
) -> Iterator[Kill]:
    """Yields the kills of the steps in order, without unit tests, while ``goes_on`` says so."""
    try:
        package = _loaded(sources, mutant, folder)
    except Exception as error:
        yield Kill("raised", -1, f"{type(error).__name__}: {error}"[:500])
        return
    subject = Subject.of(adapted(package), "mutant")
    for number, (step, asking) in enumerate(zip(steps, questions, strict=True)):
        if not goes_on():
            return
        yield from _of_step(subject, step, asking, number)


def _of_step(subject: Subject, step: Step, asking: PlannedRun, number: int) -> Iterator[Kill]:
    """The kills of one step, with its index."""
    with dots_in_order() if step.in_order else nullcontext():
        try:
            trial = asking.run(subject)
        except (SubjectError, NotImplementedError) as error:
            # An out-of-bounds address in the interpreter counts as a check of its own.
            wild = isinstance(_root(error), OutOfBoundsError)
            yield Kill("addresses" if wild else "raised", number, str(error)[:500])
            return
        for check in step.checks:
            for finding in _findings(check, trial):
                yield Kill(check, number, finding)


def _of_unit_tests(
    package: ModuleType, edited: set[str], number: int, first: str = ""
) -> Iterator[Kill]:
    """The first unit test that fails, if any."""
    failed = failure_of(package, edited, first)
    if failed is not None:
        yield Kill(UNIT_TESTS, number, f"{failed.check}: {failed.detail}"[:500])


def _root(error: BaseException) -> BaseException:
    """The innermost cause of an error."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _findings(check: str, trial: Trial) -> list[str]:
    """At most one finding of a check, as text; an exception in a second run is a finding."""
    try:
        found: list[Finding] = CHECKS[check](trial)
    except (SubjectError, NotImplementedError) as error:
        return [f"raised in a second run: {error}"[:500]]
    return [str(finding)[:500] for finding in found[:1]]
