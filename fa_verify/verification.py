"""``verify``: run the conformance checks on a kernel and return the result as a value."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st

from fa_verify.oracles.problem import Problem
from fa_verify.properties.checks.guarantees import GUARANTEES, STANDING, in_turn
from fa_verify.properties.comparison.compare import Finding, Violation
from fa_verify.properties.execution.tally import Tally
from fa_verify.properties.search.search import Runner, attack, draws
from fa_verify.properties.subjects.subject import Subject
from fa_verify.properties.subjects.supported import ExcludedError, problems_of
from fa_verify.repaired_fork import REPAIR_FIRST, in_repaired_fork
from fa_verify.simulator.interpreter.repair import is_needed

__all__ = ["Report", "verify"]

# Features that every problem drawn for a guarantee must have: arguments of ``problems_of``.
_FORCED: dict[str, dict[str, Any]] = {
    "G3": {"empty_rows": True},
    "G4": {"padding": True},
    "G5": {"hidden": True},
    # G12 places elements 2**31 apart: short sequences keep the buffers small.
    "G12": {"max_seqlen": 32},
}


@dataclass(frozen=True)
class Report:
    """The result of ``verify``.

    ``bool(report)`` is True if at least one problem was judged and there are no findings.
    ``str(report)`` lists the findings, followed by the summary of the run.

    Args:
        subject: Name of the subject.
        declared: The subject's declarations, on one line.
        findings: The findings on the simplest failing problem of each violated guarantee.
        judged: Number of distinct problems on which all outputs were judged.
        out_of_range: Number of drawn problems whose results exceed the range of the dtype, so that
            a correct kernel may fail on them.
        unsupported: Number of problems that the subject refused, by reason.
        worst: Largest error divided by its bound, by "output dtype".
        unchecked: Why a guarantee, or a part of it, was checked on no problem, by guarantee. It was
            applicable to none, or the subject refuses the calls that it needs. Where it failed in
            one dtype and was not tried in others, the key names these: "G1 in bf16, fp32".
        summary: The summary table, one line per output and dtype.
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
            lines.append("no problem was judged, so nothing is verified")
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
    """Check the guarantees of a correct attention kernel on given or drawn problems.

    Example::

        report = verify(my_attention, device="cuda", problems=50)
        assert report, str(report)

    To run a Triton kernel on a CPU, set ``TRITON_INTERPRET=1`` before Triton is imported. The
    checks then run in a fork of this process, which repairs the interpreter. They run in this
    process if it has called ``fa_verify.simulator.interpreter.repair.repair()``.

    Args:
        subject: A callable ``f(q, k, v, *, mask, sm_scale)`` whose attributes declare what it
            supports and how it rounds, or a ``Subject``. Tensors are (B, H, S, D).
        problems: The problems to check, each with every guarantee; or the number of problems to
            draw for each guarantee, dtype and configuration that the subject declares.
        guarantees: Names of the guarantees to check, keys of ``GUARANTEES``.
        device: Device of drawn problems, "cpu" or "cuda".
        max_seqlen: Largest sequence length to draw.
        seed: Seed of the draw. The same seed draws the same problems.

    Returns:
        A report that is true if at least one problem was judged and no guarantee was violated.

    Raises:
        TypeError: ``subject`` is neither callable nor a ``Subject``.
        ValueError: ``guarantees`` is empty or has an unknown name, ``device`` is unknown,
            ``problems`` is less than 1, or the subject's declarations are invalid. Or it takes
            caches or states in place of padded tensors.
        RuntimeError: The interpreter is not repaired, and no fork can repair it.
    """
    if not isinstance(subject, Subject):
        if not callable(subject):
            raise TypeError(
                f"subject is {subject!r}; needs a callable f(q, k, v, *, mask, sm_scale), or a "
                "Subject"
            )
        subject = Subject.of(subject, getattr(subject, "__name__", type(subject).__name__))
    if subject.merges_alone or subject.reads_caches_alone:
        kind = "merges states" if subject.merges_alone else "attends to caches"
        raise ValueError(
            f"{subject.name} {kind} alone, and verify draws no such calls; run fa-verify check, or "
            "pytest with --fa-kernel"
        )
    unknown = [name for name in guarantees if name not in GUARANTEES]
    if unknown or not guarantees:
        raise ValueError(f"guarantees has {unknown}; needs some of {tuple(GUARANTEES)}")
    if device not in ("cpu", "cuda"):
        raise ValueError(f"device is {device!r}; needs 'cpu' or 'cuda'")
    if isinstance(problems, int):
        if problems < 1:
            raise ValueError(
                f"problems is {problems}; needs at least 1, or an iterable of problems"
            )
        devices = {device}
    else:
        problems = tuple(problems)
        devices = {problem.device for problem in problems}

    def run() -> Report:
        return _verify(subject, problems, guarantees, device, max_seqlen, seed)

    if not is_needed():
        return run()
    if "cuda" in devices or torch.cuda.is_initialized():
        raise RuntimeError(
            "Triton's interpreter is not repaired, and a fork that repairs it cannot use the GPU; "
            f"{REPAIR_FIRST}"
        )
    return in_repaired_fork(run)


def _verify(
    subject: Subject,
    problems: tuple[Problem, ...] | int,
    guarantees: Sequence[str],
    device: str,
    max_seqlen: int,
    seed: int,
) -> Report:
    """Return the report of ``verify`` for valid arguments."""
    runner = Runner(subject, Tally())
    unchecked: dict[str, str] = {}
    if isinstance(problems, int):
        found = _drawn(runner, guarantees, problems, device, max_seqlen, seed, unchecked)
    else:
        found = _given(runner, guarantees, problems, unchecked)
    # A kernel that was passed as an object has no name on a command line.
    findings = tuple(x if x.kernel else dataclasses.replace(x, call=subject.name) for x in found)
    tally = runner.tally
    unchecked = runner.not_applicable() | unchecked
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
    """Yield the findings of the guarantees and of the standing checks on every given problem."""
    checks = {**{name: GUARANTEES[name] for name in guarantees}, **STANDING}
    for problem in problems:
        yield from runner.findings(problem, in_turn(checks, unchecked))


def _drawn(
    runner: Runner,
    guarantees: Sequence[str],
    count: int,
    device: str,
    max_seqlen: int,
    seed: int,
    unchecked: dict[str, str],
) -> Iterator[Finding]:
    """Draw problems for each guarantee and yield the findings on the simplest failing one."""
    settings = draws(count)
    for name in guarantees:
        variants = _variants(runner.subject, name)
        if not variants:
            unchecked[name] = (
                f"not applicable without fp64: {runner.subject.name} declares "
                f"dtypes={runner.subject.dtypes}"
            )
        for number, (dtype, config) in enumerate(variants, 1):
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
                # This check has failed and is reported; drop it so that others can show.
                runner.standing.pop(violation.findings[0].guarantee.split()[0], None)
                if left := _named(variants[number:]):
                    unchecked[f"{name} in {left}"] = f"it failed in {_named([(dtype, config)])}"
                break


def _named(variants: Sequence[tuple[str, str]]) -> str:
    """Format (dtype, configuration) pairs for a message."""
    return ", ".join(
        dtype if config == "default" else f"{dtype} with config {config}"
        for dtype, config in variants
    )


def _variants(subject: Subject, guarantee: str) -> list[tuple[str, str]]:
    """Return the (dtype, configuration) pairs of the subject to which a guarantee applies."""
    return [
        (dtype, config)
        for config, replaced in subject.configs.items()
        for dtype in replaced.get("dtypes", subject.dtypes)
        if dtype == "fp64" or guarantee != "T3"
    ]
