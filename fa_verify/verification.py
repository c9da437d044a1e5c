"""``verify``: run the conformance checks on a kernel and return the result as a value."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, ParamSpec, TypeVar

import torch
from hypothesis import strategies as st

from fa_verify.oracles.call import Call
from fa_verify.oracles.guarantee import EXCEPTION, FORM, G1, INPUTS, T3, guarantee_of, named
from fa_verify.oracles.renamed import SPELLINGS
from fa_verify.properties.guarantees.claims import (
    CLAIMS,
    Claim,
    accuracy_of_all,
    in_turn,
    standing_of,
)
from fa_verify.properties.guarantees.compare import Finding, Violation
from fa_verify.properties.kernels.declared_values import examples, not_drawn
from fa_verify.properties.kernels.subject import Subject
from fa_verify.properties.kernels.supported import ExcludedError
from fa_verify.properties.kernels.without_gpu import CANNOT_RUN
from fa_verify.properties.kinds.registry import KINDS, kinds_of
from fa_verify.properties.running.tally import Tally
from fa_verify.properties.search.search import Runner, attack, attack_one, draws
from fa_verify.repaired_fork import REPAIR_FIRST, in_repaired_fork
from fa_verify.simulator.interpreter.dot_order import dots_in_order
from fa_verify.simulator.interpreter.repair import is_needed

__all__ = ["Report", "verify"]

_P = ParamSpec("_P")
_T = TypeVar("_T")


@dataclass(frozen=True)
class Report:
    """The result of ``verify``.

    ``bool(report)`` is True where ``fa-verify check`` says HOLDS: at least one problem was judged,
    and there are no findings. The kernel refused at most half of the calls of each guarantee, and
    no narrowing is assumed.
    ``str(report)`` lists the findings, followed by the summary of the run.

    Args:
        kernel: Name of the kernel.
        declared: The kernel's declarations, on one line.
        findings: The findings on the simplest failing problem of each violated guarantee.
        judged: Number of distinct problems on which all outputs were judged.
        out_of_range: Number of drawn problems whose results exceed the range of the dtype, so that
            a correct kernel may fail on them.
        unsupported: Number of problems that the kernel refused, by reason.
        worst: Largest error divided by its bound, by "output dtype".
        unchecked: Why a guarantee, or a part of it, was checked on no problem, by guarantee. It was
            applicable to none, or the kernel refuses the calls that it needs. Where it failed in
            one dtype and was not tried in others, the key names these: "G1 in bf16, fp32". Declared
            values that no judged problem had are keys too: "head_dims 512, 576".
        summary: The summary table, one line per output and dtype.
        mostly_refused: Share of the calls that the kernel refused though no declaration excludes
            them, by guarantee, where it exceeds a half. "" stands for calls of several guarantees.
        contradiction: The evidence of an error of the suite, against a report without findings.
        assumed: Narrowings that no declaration makes: see ``Subject``.
    """

    kernel: str
    declared: str
    findings: tuple[Finding, ...]
    judged: int
    out_of_range: int
    unsupported: dict[str, int]
    worst: dict[str, float]
    unchecked: dict[str, str]
    summary: str
    mostly_refused: dict[str, float] = dataclasses.field(default_factory=dict)
    contradiction: str = ""
    assumed: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        limited = any(CANNOT_RUN in why for why in self.unsupported)
        doubts = (self.mostly_refused, self.contradiction, self.assumed, limited)
        return self.judged > 0 and not self.findings and not any(doubts)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            new = SPELLINGS["Report"].get(name)
            now = f"; {name} is now called {new}" * (new is not None)
            raise AttributeError(f"Report has no attribute {name!r}{now}")

    def __str__(self) -> str:
        lines = [str(finding) for finding in self.findings]
        lines += [f"{self.kernel} declares {self.declared}", self.summary]
        lines += [f"{name} was not checked: {why}" for name, why in self.unchecked.items()]
        lines += [
            f"not verified: {share:.0%} of the problems {f'of {key} ' if key else ''}were refused"
            for key, share in self.mostly_refused.items()
        ]
        if self.contradiction and not self.findings:
            lines.append(f"an error of the suite: {self.contradiction}, and there is no finding")
        lines += [f"not verified: assumed, and not declared: {x}" for x in self.assumed]
        if not self.judged:
            lines.append("no problem was judged, so nothing is verified")
        return "\n".join(lines)


def _refusing_old_names(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Return a function that raises an error with the new name of an argument for its old one."""

    @functools.wraps(function)
    def checked(*args: _P.args, **options: _P.kwargs) -> _T:
        for old, new in SPELLINGS[function.__name__].items():
            if old in options:
                raise TypeError(
                    f"{function.__name__} has no argument {old}; it is called {new} now"
                )
        return function(*args, **options)

    return checked


@_refusing_old_names
def verify(
    kernel: Subject | Callable[..., Any],
    *,
    problems: Iterable[Call] | int = 20,
    guarantees: Sequence[str] | None = None,
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
        kernel: A callable ``f(q, k, v, *, mask, sm_scale)`` whose attributes declare what it
            supports and how it rounds, or a ``Subject``. Tensors are (B, H, S, D). Or a function
            that merges states (``states=True``), or attends to a cache (``cache``).
        problems: The calls to check, each with every guarantee of its kind; or the number of calls
            to draw for each check, dtype and configuration that the kernel declares.
        guarantees: The guarantees to check, by key or title, such as "G8", "layout" or "S1". None
            checks all that are asked of single calls, of every kind that the kernel takes. G1 is
            asked besides, on problems of declared values that no draw had.
        device: Device of drawn problems, "cpu" or "cuda".
        max_seqlen: Largest sequence length to draw.
        seed: Seed of the draw. The same seed draws the same problems.

    Returns:
        A report that is true if no guarantee was violated and the kernel was verified, see
        ``Report``.

    Raises:
        TypeError: ``kernel`` is neither callable nor a ``Subject``.
        ValueError: ``guarantees`` is empty or has an unknown name, ``device`` is unknown,
            ``problems`` is less than 1, or the kernel's declarations are invalid.
        RuntimeError: The interpreter is not repaired, and no fork can repair it.
    """
    if isinstance(kernel, Subject):
        subject = kernel
    elif callable(kernel):
        subject = Subject.of(kernel, getattr(kernel, "__name__", type(kernel).__name__))
    else:
        raise TypeError(
            f"kernel is {kernel!r}; needs a callable f(q, k, v, *, mask, sm_scale), or a Subject"
        )
    if guarantees is not None and not guarantees:
        raise ValueError("guarantees is empty; needs keys or titles, such as 'G8' or 'layout'")
    claims = _asked(subject, guarantees)
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
        return _verify(subject, problems, guarantees, claims, device, max_seqlen, seed)

    if not is_needed():
        return run()
    if "cuda" in devices or torch.cuda.is_initialized():
        raise RuntimeError(
            "Triton's interpreter is not repaired, and a fork that repairs it cannot use the GPU; "
            f"{REPAIR_FIRST}"
        )
    return in_repaired_fork(run)


def _asked(subject: Subject, guarantees: Sequence[str] | None) -> tuple[Claim, ...]:
    """Return the claims to check on the kinds of calls that a kernel takes.

    A guarantee is asked of single calls, of the gradients of a bias and of sinks, of pooled
    probabilities where a kernel returns them, and of parts whose bits a kernel promises. By name,
    one that is not among these is asked as it can be.
    """
    kinds = kinds_of(subject)
    mine = [claim for claim in CLAIMS if claim.kind in kinds]
    usual = [claim for claim in mine if _is_usual(subject, claim)]
    if guarantees is None:
        return tuple(usual)
    found: list[Claim] = []
    for guarantee in named(guarantees):
        if guarantee in (EXCEPTION, FORM, INPUTS):  # asked of every call
            found += [claim for claim in usual if claim.bounded]
        for kind in kinds:
            asks = [x for x in mine if x.kind == kind and x.guarantee is guarantee]
            found += [x for x in asks if x in usual] or asks
    return tuple(dict.fromkeys(found))


def _is_usual(subject: Subject, claim: Claim) -> bool:
    """Return whether a claim is asked of a kernel that no guarantees are named for."""
    if claim.group == "parts":
        return any(subject.promises(claim.guarantee.key, config) for config in subject.configs)
    if claim.group == "refused":
        return bool(subject.refuses)
    if claim.group == "added":
        return subject.backward and {*claim.needs["score_mods"]} <= {*subject.score_mods}
    return claim.group == "call" or (claim.group == "pooled" and subject.pooled is not None)


def _verify(
    subject: Subject,
    problems: tuple[Call, ...] | int,
    guarantees: Sequence[str] | None,
    claims: Sequence[Claim],
    device: str,
    max_seqlen: int,
    seed: int,
) -> Report:
    """Return the report of ``verify`` for valid arguments."""
    runner = Runner(subject, Tally())
    unchecked = {
        guarantee.key: f"{subject.name} takes no call that asks for it"
        for guarantee in named(guarantees or ())
        if guarantee not in (EXCEPTION, FORM, INPUTS)
        and not any(claim.guarantee is guarantee for claim in claims)
    }
    found: Iterator[Finding]
    if isinstance(problems, int):
        found = itertools.chain(
            _drawn(runner, claims, problems, device, max_seqlen, seed, unchecked),
            _declared(runner, device, unchecked),
        )
    else:
        found = _given(runner, claims, problems, unchecked)
    # A kernel that was passed as an object has no name on a command line. Several claims may lead
    # to the same finding.
    findings = tuple(
        dict.fromkeys(x if x.kernel else dataclasses.replace(x, call=subject.name) for x in found)
    )
    tally = runner.tally
    unchecked = runner.not_applicable() | unchecked
    return Report(
        kernel=subject.name,
        declared=subject.declared(),
        findings=findings,
        judged=len(tally.problems),
        out_of_range=len(tally.out_of_range),
        unsupported={why: len(which) for why, which in tally.unsupported.items()},
        worst={key: ratio for key, (ratio, _) in tally.worst.items()},
        unchecked=unchecked,
        summary="\n".join(tally.lines()),
        mostly_refused=tally.mostly_refused(),
        contradiction=tally.contradiction(),
        assumed=subject.assumed,
    )


def _given(
    runner: Runner, claims: Sequence[Claim], problems: Iterable[Call], unchecked: dict[str, str]
) -> Iterator[Finding]:
    """Yield the findings of the claims and of the standing ones on every given call."""
    for problem in problems:
        asked = (*(x for x in claims if x.kind == problem.kind), *standing_of(problem.kind))
        checks = {_name(claim): claim.check for claim in asked}
        with dots_in_order() if problem.kind == "cache" else nullcontext():
            yield from runner.findings(problem, in_turn(checks, unchecked))


def _declared(runner: Runner, device: str, unchecked: dict[str, str]) -> Iterator[Finding]:
    """Yield the findings on problems of declared values that no draw had; note values left out."""
    subject, values = runner.subject, runner.tally.values
    if G1.key not in runner.reported:
        try:
            for problem in examples(subject, device, frozenset(values)):
                attack_one(runner, accuracy_of_all, problem)
        except Violation as violation:
            yield from violation.findings
    # Without a judged problem, the report says that nothing is verified.
    for word, missing in (not_drawn(subject, values) if runner.tally.problems else {}).items():
        unchecked[f"{word} {missing}".strip()] = "no problem that was judged has it"


def _drawn(
    runner: Runner,
    claims: Sequence[Claim],
    count: int,
    device: str,
    max_seqlen: int,
    seed: int,
    unchecked: dict[str, str],
) -> Iterator[Finding]:
    """Draw calls for each claim and yield the findings on the simplest failing one."""
    settings, subject = draws(count), runner.subject
    for claim in claims:
        name = _name(claim)
        runner.asks = claim.guarantee.key
        variants = _variants(subject, claim)
        if not variants:
            unchecked[name] = (
                f"not applicable without fp64: {subject.name} declares dtypes={subject.dtypes}"
            )
        for number, (dtype, config) in enumerate(variants, 1):
            wanted = {"dtype": dtype, "device": device, **claim.needs}
            if claim.kind == "attention":
                wanted = {"max_seqlen": max_seqlen, "configs": (config,), **wanted}
            # In the interpreter, a product's bits else depend on its row in the tile.
            in_order = claim.kind == "cache" or claim.group == "parts"
            try:
                with dots_in_order() if in_order else nullcontext():
                    attack(
                        runner, claim.check, _calls(subject, claim, wanted),
                        seed=f"{seed}/{name}/{dtype}/{config}", settings=settings,
                    )  # fmt: skip
            except (ExcludedError, MemoryError) as reason:
                unchecked[name] = str(reason)
            except Violation as violation:
                yield from violation.findings
                # This guarantee has failed and is reported; leave it out so that others can show.
                runner.reported.add(guarantee_of(violation.findings[0].guarantee))
                if left := _named(variants[number:]):
                    unchecked[f"{name} in {left}"] = f"it failed in {_named([(dtype, config)])}"
                break


def _calls(subject: Subject, claim: Claim, wanted: Mapping[str, Any]) -> st.SearchStrategy[Any]:
    """Return calls for a claim; half of those that may have one have a score modification."""
    draw = KINDS[claim.kind].draw
    plain = draw(subject, **wanted)
    mods = subject.score_mods if claim.kind == "attention" and claim.group != "pooled" else ()
    if not mods or "score_mods" in wanted:
        return plain
    return st.one_of(
        *[plain] * len(mods), *(draw(subject, **wanted, score_mods=(mod,)) for mod in mods)
    )


def _name(claim: Claim) -> str:
    """Return the name of a claim in a report: "G8" for attention, "C1 page sizes" for others."""
    return claim.name if claim.kind == "attention" else f"{claim.guarantee.key} {claim.name}"


def _named(variants: Sequence[tuple[str, str]]) -> str:
    """Format (dtype, configuration) pairs for a message."""
    return ", ".join(
        dtype if config == "default" else f"{dtype} with config {config}"
        for dtype, config in variants
    )


def _variants(subject: Subject, claim: Claim) -> list[tuple[str, str]]:
    """Return the (dtype, configuration) pairs of the kernel to which a claim applies."""
    if claim.kind != "attention":
        return [(dtype, "default") for dtype in subject.dtypes]
    return [
        (dtype, config)
        for config, replaced in subject.configs.items()
        for dtype in replaced.get("dtypes", subject.dtypes)
        if dtype == "fp64" or claim.guarantee is not T3
    ]
