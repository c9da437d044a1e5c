"""Find the cause of a failure: the features that its calls need.

A sentence about a failure is a conjecture, which stands as long as no call refutes it. A feature is
needed if calls without it pass, with other values and larger sizes too. A threshold stands if the
call below it passes and larger ones fail. A cause lists the features and dtypes that were not
tried, where the time was too short.
"""

from __future__ import annotations

import dataclasses
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

from fa_verify.oracles.call import Call, changed, variants
from fa_verify.oracles.guarantee import (
    G5,
    G6,
    G7,
    G8,
    G9,
    G10,
    G12,
    G13,
    G14,
    G16,
    guarantee_of,
)
from fa_verify.oracles.problem import DTYPES, LAYOUTS, Problem
from fa_verify.properties.guarantees.claims import (
    CLAIMS,
    Check,
    accuracy,
    far_offsets,
    layout,
    standing_of,
)
from fa_verify.properties.guarantees.compare import Finding
from fa_verify.properties.inputs.tensors import make
from fa_verify.properties.kernels.refusals import RefusedError
from fa_verify.properties.kernels.subject import Subject
from fa_verify.properties.kinds.feature import HIDING, Feature, is_of_size, is_soft, sharpest
from fa_verify.properties.kinds.features import of_sizes, resized, size_of
from fa_verify.properties.kinds.registry import kind_of
from fa_verify.properties.running.guard_bands import GuardBands
from fa_verify.properties.running.replay_line import COMMAND, replay_line
from fa_verify.properties.running.trial import SubjectError, run_subject
from fa_verify.properties.search.causes import (
    RootCause,
    Store,
    distance,
    kind_of_finding,
    vanished,
)
from fa_verify.properties.search.declaring import declarations_that_fit
from fa_verify.properties.search.minimize import minimized
from fa_verify.properties.search.search import Runner

__all__ = ["Beyond", "Failure", "Fresh"]

# CPU time to find the cause of a failure, and the factor of the time on the clock, which other
# processes share.
SECONDS, _BUSY = 30.0, 3.0
# Runs of a failing problem, and runs in all if the first ones differ.
_RUNS, _MORE_RUNS = 3, 9
# Rows and keys that are added to a problem, so that it spans several tiles of most kernels.
_GROWN = 39
# Factor of the sizes at which a fault of tiles is sought in dtypes whose tiles may be wider.
_WIDER = 4
# Sizes whose thresholds and multiples larger problems may refute.
_OF_CALLS = ("M", "N", "D", "Dv", "B", "G")
_SHARPENED = (*_OF_CALLS, "Hk", "B * H", "M * G", "seqlens_q", "seqlens_k")
# Other seeds that all fail if sizes are to be named.
_SEEDS = 4
# Problems without a feature that are tried: one of them may fail for another cause.
_NEAREST = 3
# Causes that one failure is searched for.
_MOST_NEW = 3
# Runs of sequences of calls in fresh processes, and calls of the first of them.
_MOST_FRESH, _EARLIER = 8, 64
# Distance of seeds with the same way of calling: a multiple of counts of ways and gradients.
_SAME_WAY = 720

# Layouts of which no two tensors have the same strides, and with each tensor's columns apart.
_STRIDED = (
    ("bshd", "padded", "transposed", "bhsd"), ("transposed", "bhsd", "padded", "bshd"),
    ("bhsd", "transposed", "bshd", "transposed"),
)  # fmt: skip
# Characters of an exception that are the same in every run.
_SAME = 20
# Fields of a finding that a cause keeps.
_TOLD = ("output", "claim", "where", "bad", "total", "places")
# Guarantees whose checks call the kernel with other tensors, or other calls in turn.
_OTHER_CALLS = tuple(x.key for x in (G5, G6, G7, G8, G9, G10, G12, G13, G14, G16))

# Runs calls in turn in a fresh process, with the claim of a name beside the standing ones; returns
# for each whether it passes, None if it is not judged. Returns None if the kernel cannot be loaded
# there.
Fresh = Callable[[Sequence[Call], str], "list[bool | None] | None"]


@dataclass(frozen=True)
class _Outcome:
    """The result of a check on a problem: its findings and the wrong outputs."""

    findings: list[Finding]
    judged: bool
    outputs: tuple[str, ...]

    @property
    def passes(self) -> bool:
        return self.judged and not self.findings

    @property
    def kind(self) -> str:
        return kind_of_finding(self.findings[0])


class _OutOfTimeError(Exception):
    """The time for a search is over."""


class Failure:
    """A failing problem with its check, to be explained by causes.

    Args:
        runner: The runner that judges problems.
        claim: The check that failed.
        findings: Its findings.
        store: The causes of the run.
        fresh: Runs calls in a fresh process; None where no process can load the kernel.
        seconds: CPU time to find the cause.
    """

    def __init__(
        self,
        runner: Runner,
        claim: Check,
        findings: list[Finding],
        store: Store,
        fresh: Fresh | None = None,
        seconds: float | None = None,
    ) -> None:
        self.runner = runner
        self.claim = claim
        self.store = store
        self.problem = findings[0].problem
        self.kind = kind_of(self.problem)
        self._findings = findings
        self._fresh = fresh
        seconds = SECONDS if seconds is None else seconds
        self._end = time.process_time() + seconds
        self._end_of_clock = time.monotonic() + _BUSY * seconds
        self._seen: dict[Call, _Outcome] = {}
        # Whether the problem's own call passes.
        self._alone: dict[Call, bool] = {}
        # Numbers of causes of a part of the failure: an exception, or some wrong outputs.
        self._parts: list[int] = []
        # Numbers of the causes that this failure showed.
        self._tried: list[int] = []
        # The calls of this process before the failure, the failing one last.
        self._before = [call for call, _ in runner.tally.history]
        self._narrow()
        self._key = _guarantee_of_check(self.claim)
        self._step = _SAME_WAY if self._key == G16.key else 1
        self._of(self.problem)
        if not self._seen[self.problem].findings:  # it fails only sometimes
            outputs = tuple(dict.fromkeys(x.output for x in findings if x.output))
            self._seen[self.problem] = _Outcome(findings, True, outputs)

    def causes(self) -> list[int]:
        """Return the numbers of the causes that explain the failure, at least one."""
        unsteady = self._unsteady()
        if unsteady is not None:
            return [self.store.add(unsteady)]
        found = self._known(self.problem, self.store.known(), note=True)
        if not isinstance(found, list) and (old := self._of_history(found)):
            return [old.number]
        for _ in range(_MOST_NEW):
            if isinstance(found, list):
                break
            new = self._new(found)
            number = self.store.add(new)
            if new.depends_on:
                return [number]
            # The smallest failing problem may fail for another cause than this one.
            again = self._known(self.problem, self.store.known(), note=True)
            found = [number] if again == found and number in self._tried else again
            self._tried.append(number)
        found = found if isinstance(found, list) else self._tried[-1:]
        return [*dict.fromkeys((*self._parts, *found))]

    def without_each(self, numbers: Sequence[int]) -> Iterator[Call]:
        """Yield the problem nearest to the failing one without each feature of some causes.

        The check that failed passes there, and others may not: they saw the fault that it found.
        """
        for cause in self.store.known():
            if cause.number in numbers and cause.problem.kind == self.problem.kind:
                for feature in cause.features:
                    yield from islice(self._beside(self.problem, [feature]), 1)

    def is_explained(self, causes: list[RootCause]) -> bool:
        """Return whether some of the causes explain the failure."""
        return isinstance(self._known(self.problem, causes, note=True), list)

    # Runs of the check on a problem.

    def _narrow(self) -> None:
        """Take, of several checks in turn, the one that fails, and strides before far ones."""
        for check in getattr(self.claim, "checks", {}).values():
            found = self._run(self.problem, check).findings
            if found and (found[0].guarantee, found[0].raised[:_SAME]) == (
                self._findings[0].guarantee, self._findings[0].raised[:_SAME]
            ):  # fmt: skip
                self.claim = check
                break
        if self.claim is far_offsets and isinstance(self.problem, Problem):
            for strided in variants(self.problem, ({"layouts": x} for x in _STRIDED)):
                if self._run(strided, layout).findings:
                    # Near strides suffice.
                    self.claim, self.problem = layout, strided
                    break

    def _of(self, problem: Call) -> _Outcome:
        """Run the check on a problem, once. A problem that is excluded counts as not judged."""
        if problem not in self._seen:
            if self.kind.excludes(self.runner.subject, problem):
                return _Outcome([], False, ())
            self._seen[problem] = self._run(problem, self.claim)
        return self._seen[problem]

    def _run(self, problem: Call, claim: Check) -> _Outcome:
        judged = self.runner.judged
        findings = self.runner.findings(problem, claim)
        if not problem.seeds:
            # Those of another call, which is wrong by itself, are not the problem's.
            findings = [x for x in findings if x.problem == problem]
        outputs = dict.fromkeys(x.output.split(" of ")[0] for x in findings if x.output)
        if findings:
            outputs |= {name: None for name, peak in self.runner.peaks.items() if peak > 1}
        return _Outcome(findings, bool(findings) or self.runner.judged > judged, tuple(outputs))

    def _tried_in_time(self, problem: Call) -> _Outcome:
        """Run the check as ``_of`` does.

        Raises:
            _OutOfTimeError: The time is over, and the outcome is not known yet.
        """
        if problem not in self._seen and self._is_late:
            raise _OutOfTimeError
        return self._of(problem)

    def _passes(self, problem: Call) -> bool:
        return self._tried_in_time(problem).passes

    @property
    def _is_late(self) -> bool:
        return time.process_time() > self._end or time.monotonic() > self._end_of_clock

    def _unsteady(self) -> RootCause | None:
        """Return the cause of a problem that fails in some of its runs alone."""
        first = self._seen[self.problem]
        claim, count = self.claim, _RUNS
        if self.problem.kind == "attention" and self._key in _OTHER_CALLS:
            # Checks of several calls: one of them may have failed by chance.
            claim, count = accuracy, _MORE_RUNS
        runs = self._runs(self.problem, claim, count)
        if all(runs) or (claim is not self.claim and not any(runs)):
            return None
        shown = (first.findings or self._findings)[0]
        outcome = _Outcome([shown], True, first.outputs)
        return self._cause(outcome, runs=(sum(runs), len(runs)))

    def _runs(self, problem: Call, claim: Check, count: int) -> list[bool]:
        """Return whether each run of a check fails; there are more runs if some do not."""
        runs = [bool(self._run(problem, claim).findings) for _ in range(count)]
        more = 0 if all(runs) else _MORE_RUNS - count
        return runs + [bool(self._run(problem, claim).findings) for _ in range(more)]

    # The known causes of a problem.

    def _known(
        self, problem: Call, causes: list[RootCause], *, note: bool = False
    ) -> list[int] | Call:
        """Return the known causes of a failing problem; else a failing problem without them."""
        outcome = self._of(problem)
        left = None
        for cause in causes:
            if (
                cause.problem.kind != problem.kind
                or cause.depends_on
                or cause.check != self._check_of(problem)
            ):
                continue
            if cause.check == G12.key:
                return [cause.number]
            if not cause.is_like(outcome.kind, outcome.outputs):
                continue
            if not cause.features:
                # A feature that was not tried may be one of it, and other outputs wrong by another.
                whole = {*outcome.outputs} <= {*cause.outputs}
                if whole and not cause.untried and self._fails_plainly(cause, problem):
                    return [cause.number]
                continue
            features = [x for x in cause.features if self.kind.holds(x, problem)]
            # Lengths of 0 are padded keys, though no row sees some keys alone.
            if not {*sharpest(cause.hard)} <= {*features}:
                continue
            # NaN below the size from which values are wrong comes from another fault.
            if outcome.kind == "NaN" != cause.kind and len(features) < len(cause.features):
                continue
            for beside in self._beside(problem, cause.hard):
                beyond = self._of(beside)
                if beyond.passes:
                    if note:
                        self._note(cause, features, problem, outcome.outputs)
                    return [cause.number]
                if beyond.findings and left is None:
                    left = beside, [x for x in causes if x != cause]
                    # Another output may be wrong by what fails beside, in this dtype alone.
                    right = {*outcome.outputs} & {*cause.outputs} - {*beyond.outputs}
                    if note and (right or vanished(cause.kind, beyond.kind)):
                        self._note(cause, features, problem, right)
                        self._parts.append(cause.number)
        if left is None:
            return problem
        return self._known(*left, note=note)

    def _fails_plainly(self, cause: RootCause, problem: Call) -> bool:
        """Return whether the smallest problem of a cause fails the check in another's dtype."""
        plain = _in_dtype(cause.problem, problem.dtype, problem.config)
        outcome = self._of(plain)
        return bool(outcome.findings) and cause.is_like(outcome.kind, outcome.outputs)

    def _beside(self, problem: Call, features: Iterable[Feature]) -> Iterator[Call]:
        """Yield problems that each lack one of the features, those that can be judged."""
        for feature in features:
            judged = (x for x in self._without(feature, problem) if self._of(x).judged)
            yield from islice(judged, _NEAREST)

    def _without(self, feature: Feature, problem: Call) -> Iterator[Call]:
        yield from self.kind.without(feature, problem, self.runner.subject.configs)

    def _note(
        self, cause: RootCause, features: list[Feature], problem: Call, outputs: Iterable[str]
    ) -> None:
        """Add to a cause what one more of its failures shows."""
        # Another process may have changed it meanwhile.
        cause = next((x for x in self.store.known() if x.number == cause.number), cause)
        outputs = tuple(dict.fromkeys((*cause.outputs, *outputs)))
        of_both = tuple(
            next((x.joined(y) for y in self.kind.features(problem) if x.is_of(y)), x)
            for x in features
        )
        if (outputs, of_both) != (cause.outputs, cause.features):
            self.store.replace(dataclasses.replace(cause, outputs=outputs, features=of_both))

    def _unexplained(self, problem: Call) -> list[Finding]:
        """Return the findings of a problem, unless known causes explain them.

        A problem that fails without the features of a cause too counts as explained: its other
        failure is found on the problem beside it.
        """
        if self._is_late:
            return []
        findings = self._of(problem).findings
        if not findings or self._known(problem, self._causes) != problem:
            return []
        return findings

    # A new cause.

    def _new(self, problem: Call) -> RootCause:
        """Minimise a failing problem that no known cause explains, and find its features."""
        self._causes = self.store.known()
        before = self._of(problem)
        whole = guarantee_of(before.findings[0].guarantee) in (G10.key, G13.key)
        if whole or self._check_of(problem) == G12.key:
            # The sizes say nothing: calls in turn fail, or offsets that the check made large.
            return self._cause(before)
        subject = self.runner.subject
        plain: list[dict[str, Any]] = [
            *({"dtype": dtype} for dtype in ("fp32", "fp16") if dtype in subject.dtypes),
            {"config": next(iter(subject.configs))},
        ]
        self._drawn = problem
        found = minimized(problem, before.findings, self._unexplained, plain)
        smallest = found[0].problem
        outcome = self._of(smallest) if smallest in self._seen else before
        outcome = dataclasses.replace(outcome, findings=[found[0], *outcome.findings])
        after = self._after(smallest)
        if after is not None:
            fresh = self._runs_freshly(smallest, _MORE_RUNS)
            # A result that differs in the same calls depends on chance, on no call before.
            if fresh.count(False) and fresh[:-1] != self._runs_freshly(smallest, _MORE_RUNS - 1):
                return self._cause(outcome, runs=(fresh.count(False), len(fresh)))
            return self._cause(outcome, after=after)
        cause = self._with_features(outcome, problem)
        # A fault of chance fails the first runs now and then, and no feature tells it apart.
        featureless = not (cause.features or cause.every)
        runs = self._runs(smallest, self.claim, _MORE_RUNS if featureless else _RUNS)
        return cause if all(runs) else self._cause(outcome, runs=(sum(runs), len(runs)))

    def _with_features(self, outcome: _Outcome, problem: Call) -> RootCause:
        """Return the cause of a minimised problem, with all features that it needs."""
        smallest, kind = outcome.findings[0].problem, outcome.kind
        needed: list[Feature] = []
        try:
            steady = self._steady(smallest, kind)
        except _OutOfTimeError:
            steady = smallest
        # A feature is tried on a problem that fails whatever its values are, if there is one.
        tried = steady or smallest
        passing, untried = self._try_features(tried, smallest, steady, kind, needed)
        kept = self._unrefuted(needed, tried, kind)
        if kept != needed:
            # A feature may be needed with those that are, though not with a refuted one.
            needed = kept
            more, untried = self._try_features(tried, smallest, steady, kind, needed)
            passing += more
            needed = self._unrefuted(needed, tried, kind)
        with suppress(_OutOfTimeError):
            needed = self._supported(needed, tried, kind)
            needed += self._separating(needed, tried, kind) if steady is not None else []
        needed = _told_apart(needed)
        # There are more ways to lack a feature of masks that others imply.
        sharp = sharpest(needed)
        needed = [x for x in needed if x in sharp or x.name in ("hidden keys", "right bound")]
        ranked = min(passing, key=lambda x: (x[0], distance(x[1], smallest)), default=None)
        nearest = None if ranked is None else ranked[1]
        dtypes, passes, not_run = self._dtypes(tried, problem, nearest, needed, kind)
        if passes:
            needed.append(Feature("dtype", dtypes))
            nearest = nearest or _in_dtype(smallest, passes[0])
        untried += not_run
        offered: tuple[str, ...] = ()
        try:
            failing = [x for x in self._alike(tried) if self._fails_alike(x, kind, needed)]
            if not needed and not passes and isinstance(smallest, Problem):
                # One key alone has no gradient of a score.
                N = {"N": smallest.N + 1}
                longer = variants(smallest, (N, {**N, "M": smallest.M + 1}))
                outputs = [y for x in longer for y in self._tried_in_time(x).outputs]
                outputs = [*dict.fromkeys((*outcome.outputs, *outputs))]
                outcome = dataclasses.replace(outcome, outputs=tuple(outputs))
            failing = [*dict.fromkeys((smallest, problem, tried, *failing))]
            offered = declarations_that_fit(
                self.runner, self.claim, failing, needed, outcome.outputs
            )
        except _OutOfTimeError:
            untried.append("declarations")
        return self._cause(
            outcome, features=tuple(needed), dtypes=dtypes, all_dtypes=not passes, passing=nearest,
            declarations=offered, untried=tuple(untried),
        )  # fmt: skip

    def _try_features(
        self, tried: Call, smallest: Call, steady: Call | None, kind: str, needed: list[Feature]
    ) -> tuple[list[tuple[bool, Call]], list[str]]:
        """Add to the needed features; return passing problems and the names of those not tried.

        Each passing problem stands with whether the feature that it lacks is a soft one.
        """
        passing, untried = [], []
        for feature in self.kind.features(tried):
            known = any(feature.is_of(x) for x in needed)
            if known or feature.name == "dtype" or not self.kind.holds(feature, smallest):
                continue
            if steady is None and is_of_size(feature):
                continue
            try:
                beside = self._needs(feature, tried, kind, needed)
                if beside is not None:
                    needed += self._sharpened(feature, tried, beside, kind, needed)
                    near = (x for x in self._without(feature, smallest) if self._passes(x))
                    passing += [(is_soft(feature), x) for x in islice(near, 1)]
            except _OutOfTimeError:
                untried.append(feature.name)
        return passing, untried

    def _cause(self, outcome: _Outcome, **fields: Any) -> RootCause:
        """Return a cause with the first of some findings, and other fields."""
        shown = outcome.findings[0]
        problem = shown.problem
        return RootCause(**{
            "number": 0,
            "kind": kind_of_finding(shown),
            "features": (),
            "outputs": outcome.outputs,
            "dtypes": (problem.dtype,),
            "all_dtypes": len(_dtypes_of(self.runner.subject)) == 1,
            "guarantee": shown.guarantee,
            "told": shown.told,
            "replay": replay_line(problem.to_json(), shown.kernel, shown.mask, COMMAND),
            "problem": problem,
            "passing": None,
            "check": self._check_of(problem),
            "every": not any(right for _, right in self.runner.tally.history),
            "origin": self._origin(problem) if kind_of_finding(shown) == "NaN" else "",
            "finding": {
                **{name: getattr(shown, name) for name in _TOLD},
                **{name: str(getattr(shown, name)) for name in ("got", "want", "bound")},
                "heat": self._heat(shown) if hasattr(self, "_causes") else None,
            },
            **fields,
        })  # fmt: skip

    def _origin(self, problem: Call) -> str:
        """Return the memory from which a result is NaN, if it is right where that holds 0."""
        if not isinstance(problem, Problem) or problem.seeds:
            return ""
        subject = self.runner.subject

        def gives_nan(around: float = math.nan) -> bool:
            got = run_subject(subject, problem, make(problem, around=around))
            return any(x is not None and bool(x.isnan().any()) for x in got)

        with suppress(RefusedError, SubjectError):
            if gives_nan():
                if not gives_nan(around=0.0):
                    return "memory beside the inputs"
                with GuardBands(0.0):
                    if not gives_nan():
                        return "memory that the kernel allocates and does not write"
        return ""

    def _check_of(self, problem: Call) -> str:
        """Return the guarantee of the check, if a problem passes but for the calls of the check."""
        outcome = self._of(problem)
        key = self._key
        if not key or not outcome.findings or (problem.kind != "attention" and key != G16.key):
            return ""
        if problem not in self._alone:
            bounded = next(x.check for x in standing_of(problem.kind) if x.bounded)
            self._alone[problem] = self._run(problem, bounded).passes
        return key if self._alone[problem] else ""

    def _heat(self, finding: Finding) -> dict[str, Any] | None:
        """Return the heat map of a larger problem that fails alike, else of the smallest one."""
        problem, larger = finding.problem, []
        if isinstance(problem, Problem):
            grown = {name: getattr(problem, name) + _GROWN for name in ("M", "N")}
            larger = self._unexplained(dataclasses.replace(problem, **grown))
        like = (x for x in larger if x.output == finding.output and x.heat is not None)
        found = next(like, finding).heat
        return None if found is None else found.record()

    # Features, each of which is refuted by a call without it that fails.

    def _needs(
        self, feature: Feature, problem: Call, kind: str, needed: list[Feature]
    ) -> Call | None:
        """Return a passing problem that lacks a feature and has those needed already.

        A problem without an exception counts as passing if the failure of this kind is one, though
        its values may be wrong for another cause. So does one that known causes explain, if none
        passes.

        Raises:
            _OutOfTimeError: The time is over.
        """
        explained = None
        # A kernel may support one way alone to hide keys.
        alone = feature.name in HIDING and Feature("hidden keys") in needed
        for near in self._without(feature, problem):
            beside = self._completed(near, needed)
            if self.kind.holds(feature, beside) or not self._has(beside, needed):
                continue
            outcome = self._tried_in_time(beside)
            alone = alone and not outcome.judged
            if outcome.passes or (outcome.findings and vanished(kind, outcome.kind)):
                others = [*dict.fromkeys(self._without(feature, problem))][:_NEAREST]
                refuting = (
                    x for x in chain(self._alike(beside), others)
                    if not self.kind.holds(feature, x) and self._fails_alike(x, kind, needed)
                )  # fmt: skip
                refuted = next(refuting, None) is not None
                return None if refuted or self._fails_larger(feature, kind, needed) else beside
            if outcome.findings:
                if not isinstance(self._known(beside, self._causes), list):
                    return None
                explained = explained or beside
        return problem if alone else explained

    def _fails_larger(self, feature: Feature, kind: str, needed: list[Feature]) -> bool:
        """Return whether the problem before it was minimised fails alike without a feature.

        The smallest problem may have it by accident: no window of 0 keys crosses a tile.
        """
        nearest = [*dict.fromkeys(self._without(feature, self._drawn))][:_NEAREST]
        nearest += [] if self.kind.holds(feature, self._drawn) else [self._drawn]
        outcomes = [self._of(x) for x in nearest if self._fails_alike(x, kind, needed)]
        outputs = {*self._of(self._drawn).outputs}
        # It may fail for another cause.
        return any({*x.outputs} == outputs and _is_alike(x.kind, kind) for x in outcomes)

    def _has(self, problem: Call, features: Iterable[Feature]) -> bool:
        return all(self.kind.holds(x, problem) for x in features)

    def _unrefuted(self, needed: list[Feature], problem: Call, kind: str) -> list[Feature]:
        """Return the needed features without those that a failing problem with the others lacks.

        The first features are tried before the later ones are known, which the problems without the
        first ones may lack. Here they are given the later ones.
        """
        for feature in needed:
            others = [x for x in needed if x != feature]
            for beside in self._without(feature, problem):
                try:
                    whole = self._completed(beside, others)
                    if self.kind.holds(feature, whole) or whole == beside:
                        continue
                    if self._fails_alike(whole, kind, others):
                        return self._unrefuted(others, problem, kind)
                except _OutOfTimeError:
                    return needed
        return needed

    def _supported(self, needed: list[Feature], problem: Call, kind: str) -> list[Feature]:
        """Return the needed features without multiples and powers that no problem shows.

        Whole tiles below a threshold pass anyway, and those above it may be out of range.
        """
        sizes = {x.name.removesuffix(" above") for x in needed if x.name.endswith(" above")}
        for feature in needed:
            size, _, whole = feature.name.partition(" is no ")
            others = [x for x in needed if x != feature]
            if whole and size in sizes and not self._needs(feature, problem, kind, others):
                return self._supported(others, problem, kind)
        return needed

    def _separating(self, needed: list[Feature], problem: Call, kind: str) -> list[Feature]:
        """Return a feature that tells failing problems from passing ones with the needed features.

        Of all problems that ran, passing ones may have what every failing one has, so that there is
        a feature which no change of one field shows.
        """
        ran = [(x, y) for x, y in self._seen.items() if self._has(x, needed)]
        passing = [x for x, y in ran if y.passes]
        failing = [x for x, y in ran if y.findings and not vanished(kind, y.kind)]
        if not passing:
            return []
        # A product of sizes says less than one of them.
        features = self.kind.features(problem)
        if isinstance(problem, Problem):  # sizes of 1 have no threshold, and may have a limit
            features += [Feature(f"{size} above", 1) for size in _OF_CALLS]
        for feature in sorted(features, key=lambda x: (is_of_size(x), " * " not in x.name)):
            if feature.name == "dtype" or feature in needed:
                continue
            if not feature.name.endswith(" above"):
                apart = all(self.kind.holds(feature, x) for x in failing)
                apart = apart and not any(self.kind.holds(feature, x) for x in passing)
                if apart and self._needs(feature, problem, kind, needed) is not None:
                    return [feature]
                continue
            size = feature.name.removesuffix(" above")
            right, wrong = (
                {x: size_of(x, size) for x in calls if isinstance(x, Problem)}
                for calls in (passing, failing)
            )
            if right and wrong and 0 < max(wrong.values()) < min(right.values()):
                return self._up_to(size, max(wrong, key=wrong.__getitem__), right, needed, kind)
            if not (right and wrong and 0 < max(right.values()) < min(wrong.values())):
                continue
            least, below = min(wrong, key=wrong.__getitem__), max(right, key=right.__getitem__)
            feature = Feature(feature.name, wrong[least] - 1)
            if self._needs(feature, least, kind, needed) is not None:
                return self._sharpened(feature, least, below, kind, needed)
        return []

    def _up_to(
        self, size: str, largest: Problem, right: Iterable[Problem], needed: list[Feature],
        kind: str,
    ) -> list[Feature]:  # fmt: skip
        """Return the limit of a size up to which problems fail."""
        low, high = size_of(largest, size), min(size_of(x, size) for x in right)
        while high - low > 1:
            middle = (low + high) // 2
            changes = variants(largest, resized(largest, {size: middle}))
            of_size = (x for x in changes if size_of(x, size) == middle and self._has(x, needed))
            other = next(of_size, None)
            if other is None:
                return []
            if self._fails_alike(other, kind, []):
                low = middle
            else:
                high = middle
        return [Feature(f"{size} up to", low)]

    def _completed(self, problem: Call, features: list[Feature]) -> Call:
        """Return a problem with larger sizes, so that it has features of sizes that it lacks."""
        for feature in features:
            if self.kind.holds(feature, problem) or not isinstance(problem, Problem):
                continue
            size, _, what = feature.name.partition(" is a multiple of ")
            if what:
                number = -(-size_of(problem, size) // int(what)) * int(what)
            elif feature.name.endswith(" above") and isinstance(feature.value, int):
                size, number = feature.name.removesuffix(" above"), feature.value + 1
            else:
                continue
            problem = next(variants(problem, resized(problem, {size: number})), problem)
        return problem

    def _steady(self, problem: Call, kind: str) -> Call | None:
        """Return a failing problem, or a wider one, that fails whatever its values are.

        If there is none, some elements err, of more elements more, and a size at which one of them
        first does is no property of the kernel.
        """
        for wide in self._wider(problem):
            try:
                seeds = [
                    changed(wide, seed=wide.seed + (10 + x) * self._step) for x in range(_SEEDS)
                ]
            except ValueError:  # calls of this kind have no other seed
                return problem
            if all(self._fails_alike(x, kind, []) for x in seeds):
                if wide != problem:
                    for size in ("N", "M"):
                        wide = self._with_fewest(size, wide, kind)
                return wide
        return None

    def _wider(self, problem: Call) -> Iterator[Call]:
        """Yield a problem, then those with more rows and heads, the most first."""
        yield problem
        of = problem.attention or problem
        M, H, Hk = (getattr(of, x, 0) for x in ("M", "H", "Hk"))
        rows, heads = {"M": M + _GROWN}, {"H": 4 * H, "Hk": 4 * Hk}
        yield from variants(problem, ({**rows, **heads}, rows, heads))

    def _with_fewest(self, size: str, wide: Call, kind: str) -> Call:
        """Return a failing problem with the fewest rows or keys with which it fails."""
        low, high = 0, getattr(wide.attention, size, 0)
        while high - low > 1:
            middle = (low + high) // 2
            fewer = next(variants(wide, [{size: middle}]), None)
            if fewer is not None and self._fails_alike(fewer, kind, []):
                wide, high = fewer, middle
            else:
                low = middle
        return wide

    def _alike(self, problem: Call) -> Iterator[Call]:
        """Yield problems like a problem, with other values, more rows and keys, or more heads."""
        attention, seed, step = problem.attention, problem.seed, self._step
        changes: list[dict[str, Any]] = [{"seed": seed + 1 * step}, {"seed": seed + 2 * step}]
        if attention is not None and isinstance(problem, Problem) and not problem.seeds:
            M, N = attention.M + _GROWN, attention.N + _GROWN
            changes += [
                {"M": M, "N": N, "seed": seed + 3 * step},
                {"M": M, "seed": seed + 4 * step},
                {"N": N, "seed": seed + 5 * step},
                {"H": 2 * attention.H, "Hk": 2 * attention.Hk, "seed": seed + 6 * step},
                *([{"H": 3 * attention.H}] if attention.G > 1 else []),
                *islice(resized(problem, {"B": 2 * attention.B}), 1),
                {"M": M, "N": N, "mask": of_sizes(attention, M=M, N=N), "seed": seed + 7 * step},
            ]
            for place in range(3):  # other strides of q, of k and of v
                if problem.layouts[place] == LAYOUTS[0]:
                    before, after = problem.layouts[:place], problem.layouts[place + 1 :]
                    changes.append({"layouts": (*before, "padded", *after)})
            mask = attention.mask
            half = {
                x: side // 2 for x in ("window_left", "window_right")
                if (side := getattr(mask, x)) and not (mask.causal and x == "window_right")
            }  # fmt: skip
            changes += [{"mask": dataclasses.replace(mask, **half)}] if half else []
            if {*problem.layouts} != {LAYOUTS[0]}:
                for other in ("strided", "transposed"):
                    layouts = tuple(x if x == LAYOUTS[0] else other for x in problem.layouts)
                    changes.append({"layouts": layouts})
        yield from variants(problem, changes)

    def _fails_alike(self, problem: Call, kind: str, needed: list[Feature]) -> bool:
        """Return whether a problem with the needed features fails as one of a kind does."""
        if not self._has(problem, needed):
            return False
        outcome = self._tried_in_time(problem)
        if not outcome.findings or vanished(kind, outcome.kind):
            return False
        return not isinstance(self._known(problem, self._causes), list)

    def _sharpened(
        self, feature: Feature, problem: Call, below: Call, kind: str, needed: list[Feature]
    ) -> list[Feature]:
        """Return what is true of larger sizes in place of a feature of a size.

        A threshold says that all larger sizes fail, and a multiple that all others do. Where they
        do not, the failing sizes are those up to a second threshold.
        """
        size, what = (*re.split(r" (?=above|up to|is |or )", feature.name, maxsplit=1), "")[:2]
        attention = problem.attention
        if attention is not None and what.startswith("or N is no multiple"):
            # All other lengths fail, longer ones too.
            more = int(what.split()[-1])
            for M, N in ((more, more), (3 * more, 3 * more), (1, 0), (0, 1), (1, 1)):
                longer = changed(problem, M=attention.M + M, N=attention.N + N)
                alike = self._has(longer, [feature, *needed])
                if alike and self._passes(longer):
                    return []
            return [feature]
        sized = what in ("above", "is no power of two") or what.startswith("is no multiple of")
        own = isinstance(problem, Problem)
        if attention is None or not sized or size not in (_SHARPENED if own else _OF_CALLS):
            return [feature]
        number, lower = (size_of(x.attention or attention, size) for x in (problem, below))
        if lower == number - 2:  # the size between lacks another needed feature
            lower += 1

        def fails(resize: int, features: Sequence[Feature] = (feature, *needed)) -> bool | None:
            fields = {"H": attention.Hk * resize} if size == "G" else {size: resize}
            changes = resized(attention, {size: resize}) if own else [fields]
            for other in variants(problem, changes):
                exact = size_of(other.attention or attention, size) == resize
                if exact and self._has(other, features) and self._tried_in_time(other).judged:
                    return self._fails_alike(other, kind, [])
            return None

        if what == "is no power of two":
            # Three tiles are no power of two either.
            lower = 1 << number.bit_length() - 1
            others = [x for x in (3 * lower, 3 * lower // 2, 6 * lower) if x != number]
            return [] if any(fails(x) is False for x in others) else [feature]
        if what != "above":
            multiple = int(what.split()[-1])
            others = [number + 1, number + multiple, number + 3 * multiple]
            if size in ("D", "Dv"):
                others += [40, 72, 80, 96]  # head dims that kernels declare
            same = [x for x in others if x > number and x % multiple]
            ends = [how for x in same if (how := fails(x)) is not None]
            if not ends and size in ("D", "Dv"):
                ends = [how for x in (8, 24, 40, 72) if x % multiple and (how := fails(x))]
            if False in ends or (size in ("D", "Dv") and not ends):
                return []
            return [feature]
        # A problem below may be far below.
        assert isinstance(feature.value, int)
        least = feature.value + 1
        while least - lower > 1 and (how := fails((lower + least) // 2, needed)) is not None:
            lower, least = (lower, (lower + least) // 2) if how else ((lower + least) // 2, least)
        above = [number + 1, 2 * number, 2 * number + 1, 4 * number + 1]
        if size in ("D", "Dv"):
            above = [number + 1, number + 16, 128, 256]
        failing = {x: how for x in sorted({*above}) if x > number and (how := fails(x)) is not None}
        if not failing and lower < number - 1:
            return [Feature(f"{size} is {number}")]
        if all(failing.values()):
            return [Feature(f"{size} above", lower)]
        low = max((x for x, how in failing.items() if how), default=number)
        if any(x < low and not how for x, how in failing.items()):
            # Neither all larger ones nor those up to a second threshold fail: it may be a parity.
            smaller = {lower - 1, lower - 2, lower // 2, lower // 2 + 1, lower * 3 // 4}
            right = [fails(x, needed) is False for x in smaller if x > 0]
            return [Feature(f"{size} above", lower)] if right and all(right) else []
        high = min((x for x, how in failing.items() if not how and x > low), default=None)
        if high is None:
            return [Feature(f"{size} above", lower)]
        while high - low > 1:
            middle = (low + high) // 2
            how = fails(middle)
            if how is None:
                break
            low, high = (middle, high) if how else (low, middle)
        if low == number == lower + 1 or low == number:
            return [Feature(f"{size} is {number}")]
        return [Feature(f"{size} above", lower), Feature(f"{size} up to", low)]

    # Dtypes.

    def _dtypes(
        self,
        smallest: Call,
        first: Call,
        passing: Call | None,
        needed: list[Feature],
        kind: str,
    ) -> tuple[tuple[str, ...], list[str], list[str]]:
        """Return the dtypes in which problems fail, in which all pass, and that were not tried.

        Tiles of another dtype may be wider, so that its problem fails from larger sizes on. A dtype
        in which the problem beside the smallest one fails too is none in which all pass.
        """
        fails, passes, untried = [], [], []
        wider = {
            size: _WIDER * getattr(smallest, size)
            for size in ("M", "N")
            if isinstance(smallest, Problem) and any(x.name == f"{size} above" for x in needed)
        }
        larger: list[Call] = [changed(smallest, **wider)] if wider else []
        for dtype in _dtypes_of(self.runner.subject):
            if dtype == smallest.dtype:
                fails.append(dtype)
                continue
            same = [first] if first.dtype == smallest.dtype else []
            tries = (smallest, *same, *larger, *self._alike(smallest))
            try:
                outcomes = [
                    (y, self._tried_in_time(y)) for y in (_in_dtype(x, dtype) for x in tries)
                ]
                beside = None if passing is None else self._tried_in_time(_in_dtype(passing, dtype))
            except _OutOfTimeError:
                untried.append(dtype)
                continue
            wrong = [(x, y) for x, y in outcomes if y.findings and not vanished(kind, y.kind)]
            if not wrong:
                passes += [dtype] if any(y.judged for _, y in outcomes) else []
            elif beside is None or beside.passes:
                new = any(not isinstance(self._known(x, self._causes), list) for x, _ in wrong)
                fails += [dtype] if new else []
            elif any({*y.outputs} - {*beside.outputs} for _, y in wrong):
                # Another fault of the dtype shows in fewer outputs.
                fails.append(dtype)
        return tuple(fails), passes, untried

    # Calls before, in this process or in a fresh one.

    def _of_history(self, problem: Call) -> RootCause | None:
        """Return a known cause of calls that depend on earlier ones, if a problem has it."""
        outcome = self._of(problem)
        for cause in self.store.known():
            like = cause.after is not None and cause.is_like(outcome.kind, outcome.outputs)
            if like and self._passes_freshly([problem]):
                return cause
        return None

    def _after(self, problem: Call) -> tuple[Call, ...] | None:
        """Return the shortest sequence of calls found that makes a problem fail.

        None if it fails by itself: in a fresh process, or where none can be asked. The sequence is
        empty if none was found.
        """
        if self._key == G8.key and isinstance(problem, Problem):
            # The check calls copies in turn. A call of them may leave something behind.
            plain = dataclasses.replace(problem, layouts=Problem().layouts)
            alone, both = (self._passes_freshly(x, "") for x in ([problem], [plain, problem]))
            if (alone, both) == (True, False):
                return (plain,)
            if self._check_of(problem):
                return None
        if self._passes_freshly([problem]) is not True:
            return None
        before = [x for x in self._before if x != problem]
        left = _MOST_FRESH

        def fails(calls: Sequence[Call]) -> bool:
            nonlocal left
            left -= 1
            return left >= 0 and self._passes_freshly([*calls, problem]) is False

        for one in (before[:1], before[-1:]):
            if one and fails(one):
                return tuple(one)
        calls = next((x for x in (before[-_EARLIER:], before[:_EARLIER]) if fails(x)), [])
        while len(calls) > 1:
            half = len(calls) // 2
            shorter = next((x for x in (calls[half:], calls[:half]) if fails(x)), None)
            if shorter is None:
                break
            calls = shorter
        return tuple(calls)

    def _runs_freshly(self, problem: Call, count: int) -> list[bool | None]:
        """Return whether a problem passes, each time that one fresh process runs it."""
        return self._freshly([problem] * count) or []

    def _passes_freshly(self, calls: Sequence[Call], name: str | None = None) -> bool | None:
        """Return whether the last of some calls passes in a fresh process; None if unknown."""
        found = self._freshly(calls, name)
        return None if found is None else found[-1]

    def _freshly(self, calls: Sequence[Call], name: str | None = None) -> list[bool | None] | None:
        """Return whether each of some calls passes in a fresh process; None if unknown.

        The check has a name; that of the failure by default, empty for the standing ones alone.
        """
        if self._fresh is None or (name is None and self._check_of(calls[-1])):
            return None
        if name is None and self._key:
            name = ""  # its own call fails here, and those of the check may fail there
        elif name is None:
            name = next((x.name for x in CLAIMS if x.check is self.claim), "")
            standing = {x.guarantee.key for x in standing_of(self.problem.kind)}
            first = self._of(calls[-1]).findings or self._findings
            if not name and guarantee_of(first[0].guarantee) not in standing:
                return None  # the check is no row of claims
        return self._fresh(calls, name)


class Beyond(Runner):
    """Judges problems beyond known causes: a failure that they explain counts as passing.

    Each such failure is judged on a problem beside it that avoids a cause. Causes that other
    processes find meanwhile do not count: a failure that is being shrunk has to go on failing.

    Args:
        runner: Provides the subject, the tally and the watchdog.
        store: The causes of the run.
        seconds: Time after which problems count as passing.
    """

    def __init__(self, runner: Runner, store: Store, seconds: float) -> None:
        super().__init__(runner.subject, runner.tally, runner.watching, runner.mask, runner.waived)
        self.store = store
        self._causes = store.known()
        self._end = time.monotonic() + seconds
        # Judges the problems beside a failing one.
        self._runner = runner

    def findings(self, problem: Call, claim: Check) -> list[Finding]:
        """Return the findings of a problem, unless known causes explain them."""
        if time.monotonic() > self._end:
            return []
        found = super().findings(problem, claim)
        if found and any(x.depends_on for x in self._causes):
            return []  # a cause that is not the problem's would be found again without end
        if found and Failure(self._runner, claim, found, self.store).is_explained(self._causes):
            return []
        return found


def _told_apart(features: list[Feature]) -> list[Feature]:
    """Return features in fewer words: the length that is no multiple, and a whole threshold."""
    names, found = {x.name for x in features}, []
    for name, value in features:
        if name in ("M < N", "M != N") and "M is 1" in names:
            if "N above" in names:
                continue
            name, value = "N above", 1
        if name.startswith("M or N is no"):
            tile = name.split()[-1]
            for size, other in (("M", "N"), ("N", "M")):
                if f"{other} is a multiple of {tile}" in names:
                    name = f"{size} is no multiple of {tile}"
        elif name.endswith(" above") and isinstance(value, int):
            # The next size is none of those that fail.
            start = f"{name.removesuffix(' above')} is no multiple of "
            if any(x.startswith(start) and (value + 1) % int(x.split()[-1]) == 0 for x in names):
                value += 1
        found.append(Feature(name, value))
    return found


def _guarantee_of_check(claim: Check) -> str:
    """Return the key of the guarantee that a check asks, if it makes calls of its own."""
    keys = (x.guarantee.key for x in CLAIMS if x.check is claim and not x.standing)
    return next((x for x in keys if x in _OTHER_CALLS), "")


def _is_alike(kind: str, other: str) -> bool:
    """Return whether two kinds are one, or wrong numbers both."""
    return kind == other or {kind, other} == {"error", "slight"}


def _dtypes_of(subject: Subject) -> tuple[str, ...]:
    return tuple(x for x in DTYPES if x in subject.dtypes)


def _in_dtype(call: Call, dtype: str, config: str | None = None) -> Call:
    """Return a call in a dtype and, where its kind has one, a tile configuration."""
    fields = {"dtype": dtype}
    if config is not None and call.attention is not None:
        fields["config"] = config
    other: Call = changed(call, **fields)
    return other
