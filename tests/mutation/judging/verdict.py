"""Runs the steps on one mutant of the kernels, up to the first failing check or all of them."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import islice
from pathlib import Path
from types import ModuleType

from fa_verify.adapters.ours import adapted, flash_attention
from fa_verify.properties.guarantees.compare import Finding
from fa_verify.properties.kernels.subject import Subject
from fa_verify.properties.running.trial import AttentionTrial, PlannedRun, SubjectError, plan_run
from fa_verify.simulator.interpreter.addresses import OutOfBoundsError
from fa_verify.simulator.interpreter.dot_order import dots_in_order
from tests.mutation.catalogue.copies import load
from tests.mutation.catalogue.mutant import Kill, Mutant, Verdict, mutated
from tests.mutation.judging.caches import is_of_caches, kills_by_caches
from tests.mutation.judging.hangs import kills_within
from tests.mutation.judging.merging import FILES as MERGED
from tests.mutation.judging.merging import kills_by_merging
from tests.mutation.judging.trials import CHECKS, QUICK, Step
from tests.mutation.judging.unit_tests import TESTED_ALONE, failure_of, files_for, is_of_hopper
from tests.mutation.kill_order import UNIT_TESTS

__all__ = ["asked", "judged_kernels", "judges_of", "killed_by", "subject_of", "warmed"]

# Unit tests run before the slow steps. On mutants of a file with tests of its own, they run after
# this many steps, which kill most mutants. Only unit tests find redundant work and code that does
# not run here.
_FIRST = 22
# Seconds of CPU time of one judge, above which the mutant hangs, and of a mutant, after which no
# further judge runs. ``judged_kernels`` allows more on a slow machine.
HANG = 120.0
LIMIT = 180.0
_SLOWER = 1.2

# Yields the kills of a mutant.
Judge = Callable[[], Iterator[Kill]]


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
    first: Sequence[str] = (),
    full: bool = False,
    units: int = len(QUICK),
    unmutated: float = 0.0,
    prepare: Callable[[ModuleType], None] | None = None,
) -> Verdict:
    """Loads a mutant of ``fa_kernels`` and runs the judges on it: steps, other calls, unit tests.

    Call it in a process that does nothing else afterwards: the mutant may write anywhere.

    Args:
        sources: The unmutated package.
        mutant: The mutant's edits; without edits, all judges run.
        steps: The steps.
        questions: The planned run of each step.
        first: Names of the judges to run first: a step's problem as JSON, the path of a file of
            unit tests, UNIT_TESTS, or a name of ``kills_by_caches`` or ``kills_by_merging``. Other
            names are left out.
        full: Continue after the first kill, to find every check that fails. No time limit applies.
        units: The unit tests run before the step of this index; -1 runs none.
        unmutated: Seconds of CPU time that all judges take on the unmutated kernels; 0 if unknown.
            Each judge may take as long, and all of them together 1.2 times as long.
        prepare: Called with the package before the steps.
    """
    verdict = Verdict()
    hang, limit = max(HANG, unmutated), max(LIMIT, _SLOWER * unmutated)
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        try:
            package = _loaded(sources, mutant, Path(folder))
            if prepare is not None:
                prepare(package)
        except Exception as error:
            verdict.kills.append(Kill("raised", -1, f"{type(error).__name__}: {error}"[:500]))
            verdict.seconds = time.process_time()
            return verdict
        usual, alone = judges_of(package, mutant, steps, questions, units)
        judges = {**usual, **alone}
        order = dict.fromkeys(name for name in (*first, *usual) if name in judges)
        for number, name in enumerate(order):
            if not full and time.process_time() > limit:
                verdict.cut = f"{number} of {len(order)} judges ran in {limit:.0f} s of CPU time"
                break
            kills = kills_within(hang, islice(judges[name](), None if full else 1), name)
            if kills and not verdict.kills:
                verdict.seconds = time.process_time()
                verdict.judge = _file_of(kills[0]) if name == UNIT_TESTS else name
            verdict.kills += kills
            if kills and not full:
                break
    verdict.seconds = verdict.seconds or time.process_time()
    return verdict


def _file_of(kill: Kill) -> str:
    """The file of the unit test that killed; UNIT_TESTS if there is none."""
    file, _, test = kill.detail.partition("::")
    return file if test and file.endswith(".py") else UNIT_TESTS


def judges_of(
    package: ModuleType,
    mutant: Mutant,
    steps: Sequence[Step],
    questions: Sequence[PlannedRun],
    units: int,
) -> tuple[dict[str, Judge], dict[str, Judge]]:
    """The judges of a mutant by name in their usual order, and files of unit tests by themselves.

    pytest collects all files of a run before the first test, which takes longer than most tests. So
    files about the mutated ones run alone, the others together. A caller may ask for one of these.
    """
    subject = Subject.of(adapted(package), "mutant")
    edited = {edit.file for edit in mutant.edits}
    merges, caches = kills_by_merging(subject), kills_by_caches(subject)
    first = {
        **(merges if not edited.isdisjoint(MERGED) else {}),
        **(caches if is_of_caches(mutant) else {}),
    }
    judges: dict[str, Judge] = {**first}
    if units > _FIRST and not edited.isdisjoint(TESTED_ALONE):
        units = _FIRST
    about, others = files_for(edited) if units >= 0 else ([], [])
    alone = {x: partial(_of_unit_tests, package, [x], units) for x in (*about, *others)}
    for number, (step, asking) in enumerate(zip(steps, questions, strict=True)):
        if number == units:
            judges |= {x: alone[x] for x in about}
            judges[UNIT_TESTS] = partial(_of_unit_tests, package, others, number)
        judges[step.problem.to_json()] = partial(_of_step, subject, step, asking, number)
    if units >= 0 and not is_of_hopper(edited):
        # Other kernels share code with these calls.
        judges |= {name: x for name, x in {**caches, **merges}.items() if name not in first}
    return judges, alone


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


def _of_unit_tests(package: ModuleType, files: Sequence[str], number: int) -> Iterator[Kill]:
    """The first unit test that fails, if any."""
    failed = failure_of(package, files)
    if failed is not None:
        yield Kill(UNIT_TESTS, number, f"{failed.check}: {failed.detail}"[:500])


def _root(error: BaseException) -> BaseException:
    """The innermost cause of an error."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _findings(check: str, trial: AttentionTrial) -> list[str]:
    """At most one finding of a check, as text; an exception in a second run is a finding."""
    try:
        found: list[Finding] = CHECKS[check](trial)
    except (SubjectError, NotImplementedError) as error:
        return [f"raised in a second run: {error}"[:500]]
    return [str(finding)[:500] for finding in found[:1]]
