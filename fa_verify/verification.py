"""The verdict of the conformance tests as a value, for people who want it in their own tests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from fa_verify.oracles.problem import Problem
from fa_verify.properties.checks.guarantees import GUARANTEES, STANDING
from fa_verify.properties.comparison.compare import Finding, Violation
from fa_verify.properties.execution.tally import Tally
from fa_verify.properties.execution.trial import Trial
from fa_verify.properties.search.search import Runner, attack, draws
from fa_verify.properties.subjects.subject import Subject
from fa_verify.properties.subjects.supported import ExcludedError, problems_of

__all__ = ["Report", "verify"]

# What a guarantee has to have in its problems, beside what chance brings.
_FORCED: dict[str, dict[str, Any]] = {
    "G3": {"empty_rows": True},
    "G4": {"padding": True},
    "G5": {"hidden": True},
    # Few elements, so that they fit between others that lie 2**31 apart.
    "G12": {"max_seqlen": 32},
}


@dataclass(frozen=True)
class Report:
    """What was found, and on how much.

    ``bool(report)`` is the verdict; ``str(report)`` is the findings and the summary of a run.

    Args:
        subject: Name of the subject.
        declared: Its declarations, in a line.
        findings: Of the simplest problem found for each guarantee that is violated.
        judged: Distinct problems judged on all outputs.
        out_of_range: Problems drawn that no correct kernel need survive.
        unsupported: Reason to number of problems refused for it.
        worst: "output dtype" to the largest error/bound.
        unchecked: Guarantee to the reason why it was not checked.
        summary: The table of a run.
    """

    subject: str
    declared: str
    findings: tuple[Finding, ...]
    judged: int
    out_of_range: int
    unsupported: dict[str, int]
    worst: dict[str, float]
    unchecked: dict[str, str]
    summary: str

    def __bool__(self) -> bool:
        return self.judged > 0 and not self.findings

    def __str__(self) -> str:
        lines = [str(finding) for finding in self.findings]
        lines += [f"{self.subject} declares {self.declared}", self.summary]
        lines += [f"{name} was not checked: {why}" for name, why in self.unchecked.items()]
        if not self.judged:
            lines.append("nothing was judged, so nothing is verified")
        return "\n".join(lines)


def verify(
    subject: Subject | Callable[..., Any],
    *,
    problems: Iterable[Problem] | int = 20,
    guarantees: Sequence[str] = tuple(GUARANTEES),
    device: str = "cpu",
    max_seqlen: int = 64,
    seed: int = 0,
) -> Report:
    """Checks what a correct kernel guarantees on problems given or drawn.

    Example::

        report = verify(my_attention, device="cuda", problems=50)
        assert report, str(report)

    A Triton kernel on a CPU needs ``TRITON_INTERPRET=1`` before Triton is imported, and
    ``fa_verify.simulator.interpreter.repair.repair()`` before the kernel is.

    Args:
        subject: A callable ``f(q, k, v, *, mask, sm_scale)`` whose attributes declare what it can
            and how it rounds, or a ``Subject``.
        problems: These, each with every guarantee, or how many to draw for each guarantee, dtype
            and configuration inside what the subject declares.
        guarantees: Which to check, names in ``GUARANTEES``.
        device: Where drawn problems run, "cpu" or "cuda".
        max_seqlen: Largest drawn length.
        seed: Of the draw; the same seed draws the same problems.

    Returns:
        The report: true if problems were judged and none of the guarantees was violated.

    Raises:
        ValueError: A guarantee, device or declaration is unknown, or problems is less than 1.
    """
    if not isinstance(subject, Subject):
        subject = Subject.of(subject, getattr(subject, "__name__", type(subject).__name__))
    unknown = [name for name in guarantees if name not in GUARANTEES]
    if unknown or not guarantees:
        raise ValueError(f"guarantees has {unknown}; needs some of {tuple(GUARANTEES)}")
    if device not in ("cpu", "cuda"):
        raise ValueError(f"device is {device!r}; needs 'cpu' or 'cuda'")
    runner = Runner(subject, Tally())
    unchecked: dict[str, str] = {}
    if isinstance(problems, int):
        if problems < 1:
            raise ValueError(f"problems is {problems}; needs at least 1, or the problems")
        found = _drawn(runner, guarantees, problems, device, max_seqlen, seed, unchecked)
    else:
        found = _given(runner, guarantees, problems, unchecked)
    findings = tuple(found)
    tally = runner.tally
    return Report(
        subject=subject.name,
        declared=subject.declared(),
        findings=findings,
        judged=len(tally.problems),
        out_of_range=len(tally.out_of_range),
        unsupported={why: len(which) for why, which in tally.unsupported.items()},
        worst={key: ratio for key, (ratio, _) in tally.worst.items()},
        unchecked=unchecked,
        summary="\n".join(tally.lines()),
    )


def _given(
    runner: Runner,
    guarantees: Sequence[str],
    problems: Iterable[Problem],
    unchecked: dict[str, str],
) -> Iterator[Finding]:
    """The findings of every guarantee, and of what every problem is held to, on every problem."""
    checks = {**{name: GUARANTEES[name] for name in guarantees}, **STANDING}

    def every(trial: Trial) -> list[Finding]:
        found = []
        for name, check in checks.items():
            try:
                found += check(trial)
            except (MemoryError, NotImplementedError) as error:
                unchecked[name] = str(error)
        return found

    for problem in problems:
        yield from runner.findings(problem, every)


def _drawn(
    runner: Runner,
    guarantees: Sequence[str],
    count: int,
    device: str,
    max_seqlen: int,
    seed: int,
    unchecked: dict[str, str],
) -> Iterator[Finding]:
    """The findings of the simplest problem for each guarantee, dtype and configuration."""
    settings = draws(count)
    for name in guarantees:
        for dtype, config in _variants(runner.subject, name):
            wanted = {"max_seqlen": max_seqlen, **_FORCED.get(name, {})}
            try:
                strategy: st.SearchStrategy[Problem] = problems_of(
                    runner.subject, dtype=dtype, device=device, configs=(config,), **wanted
                )
                attack(
                    runner,
                    GUARANTEES[name],
                    strategy,
                    seed=f"{seed}/{name}/{dtype}/{config}",
                    settings=settings,
                )
            except (ExcludedError, MemoryError) as reason:
                unchecked[name] = str(reason)
            except Violation as violation:
                yield from violation.findings
                # Known by now: the others are to show what else there is.
                runner.standing.pop(violation.findings[0].guarantee.split()[0], None)
                break


def _variants(subject: Subject, guarantee: str) -> list[tuple[str, str]]:
    """The (dtype, configuration) pairs of a subject that a guarantee speaks of."""
    return [
        (dtype, config)
        for config, replaced in subject.configs.items()
        for dtype in replaced.get("dtypes", subject.dtypes)
        if dtype == "fp64" or guarantee != "T3"
    ]
