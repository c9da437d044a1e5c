"""Group the failures of a run by cause: the features that failing problems cannot do without.

A failure has a known cause if its problem has the features of the cause and passes without them.
Else it has a new one. Its problem is minimised, and every feature that the smallest problem needs
is found by a problem beside it that lacks the feature and passes.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Protocol

from fa_verify.oracles.call import Call, changed
from fa_verify.oracles.calls.codec import call_from_json
from fa_verify.oracles.guarantee import (
    BACKWARD,
    BIAS,
    EXCEPTION,
    FORM,
    IDENTITIES,
    INPUTS,
    LIMIT,
    RMS,
    guarantee_of,
)
from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.problem import DTYPES, Problem
from fa_verify.properties.checks.claims import Check
from fa_verify.properties.comparison.compare import Finding
from fa_verify.properties.execution.replay_line import COMMAND, replay_line
from fa_verify.properties.kinds.feature import Feature, is_soft
from fa_verify.properties.kinds.registry import kind_of
from fa_verify.properties.search.corpus import Cause
from fa_verify.properties.search.declaring import declarations_that_fit
from fa_verify.properties.search.minimize import minimized
from fa_verify.properties.search.search import Runner
from fa_verify.properties.subjects.subject import Subject

__all__ = ["Beyond", "Failure", "Known", "RootCause", "Store", "described", "difference"]

# Time to minimise a problem and to find its features.
SECONDS = 30.0
# An error of at most so many bounds may come from roundings.
_SLIGHT = 100.0
# Rows and keys that are added to the smallest problem, so that a picture shows where it errs.
_GROWN = 39
# Factor of the sizes at which a fault of tiles is sought in dtypes whose tiles may be wider.
_WIDER = 4
# Problems without a feature that are tried: one of them may fail for another cause.
_NEAREST = 3
# Causes that one failure is searched for.
_MOST_NEW = 3
_STATISTICS = tuple(x.key for x in (RMS, BIAS, LIMIT, IDENTITIES, BACKWARD))


@dataclass(frozen=True)
class RootCause:
    """A cause of failures, with the evidence for it.

    Args:
        number: Number of the cause in its run; 0 until it is stored.
        kind: "NaN", "Inf", "error" for wrong values, "slight" for errors of at most 100 bounds;
            "raises ..." for an exception; or the guarantee of another fault.
        features: The features that failing problems need; none if every problem fails.
        outputs: The outputs that are wrong.
        dtypes: The dtypes in which the smallest problem fails.
        all_dtypes: Whether these are all that the subject supports.
        guarantee: The guarantee of the finding that is shown.
        told: The failure message on the smallest problem, without the replay line.
        replay: The command that runs every check on the smallest problem.
        problem: The smallest failing problem.
        passing: The nearest problem that passes; None if none was found.
        declarations: Declarations with each of which the failing problems pass.
        finding: Fields of the finding as plain values, by their names in ``Finding``.
        diagnosis: The named faults that the subject agrees with, as plain values; None if none was
            sought.
    """

    number: int
    kind: str
    features: tuple[Feature, ...]
    outputs: tuple[str, ...]
    dtypes: tuple[str, ...]
    all_dtypes: bool
    guarantee: str
    told: str
    replay: str
    problem: Call
    passing: Call | None
    declarations: tuple[str, ...] = ()
    finding: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)
    diagnosis: dict[str, Any] | None = field(default=None, compare=False, repr=False)

    def record(self) -> dict[str, Any]:
        """Return the cause as plain values."""
        passing = None if self.passing is None else self.passing.to_json()
        return {
            **vars(self),
            "features": [[name, value] for name, value in self.features],
            "problem": self.problem.to_json(),
            "passing": passing,
        }

    @classmethod
    def of(cls, record: dict[str, Any]) -> RootCause:
        """Read the output of ``record``, also after JSON."""
        passing = record["passing"]
        found = dict(
            record,
            features=tuple(
                Feature(name, tuple(value) if isinstance(value, list) else value)
                for name, value in record["features"]
            ),
            problem=call_from_json(record["problem"]),
            passing=None if passing is None else call_from_json(passing),
        )
        for name in ("outputs", "dtypes", "declarations"):
            found[name] = tuple(record[name])
        return cls(**found)

    @property
    def hard(self) -> tuple[Feature, ...]:
        """The features that every failing problem has; the soft ones if there are no others."""
        return tuple(x for x in self.features if not is_soft(x)) or self.features

    def is_like(self, kind: str, outputs: Iterable[str]) -> bool:
        """Return whether a failure of a kind in some outputs may have this cause."""
        both = {*self.outputs} & {*outputs} or not (self.outputs and [*outputs])
        return bool(both) and _family(kind) == _family(self.kind)

    def covers(self, other: RootCause) -> bool:
        """Return whether another cause is this one, or a part of it."""
        if self.problem.kind != other.problem.kind or not self.is_like(other.kind, other.outputs):
            return False
        if bool(self.features) != bool(other.features):
            return False
        theirs = {x.name: x.value for x in other.features}
        if " at " in self.kind:  # an exception of the same line
            return not self.hard or any(x.name in theirs for x in self.hard)
        if not self.features and guarantee_of(self.guarantee) != guarantee_of(other.guarantee):
            return False
        return all(
            x.name in theirs and (x.name != "dtype" or _within(theirs[x.name], x.value))
            for x in self.hard
        )


def _within(one: object, other: object) -> bool:
    return {*one} <= {*other} if isinstance(one, tuple) and isinstance(other, tuple) else True


def _family(kind: str) -> str:
    """Return the same word for all kinds of wrong values: one fault may give several."""
    return kind if kind.startswith("raises ") or kind in (FORM, INPUTS) else "values"


def _vanished(kind: str, other: str) -> bool:
    """Return whether a kind is an exception, and another is one of wrong values."""
    return " at " in kind and _family(other) == "values"


def _kind(finding: Finding) -> str:
    """Return the kind of a finding, see ``RootCause``."""
    first = guarantee_of(finding.guarantee)
    if finding.raised:
        if finding.guarantee != EXCEPTION:
            return finding.guarantee
        cause = Cause.of(finding)
        return "raises " + " at ".join(filter(None, (cause.output, cause.tile)))
    if math.isnan(finding.got) and math.isnan(finding.want):
        return finding.guarantee
    if math.isnan(finding.got):
        return "NaN"
    if math.isinf(finding.got):
        return "Inf"
    error = abs(finding.got - finding.want)
    small = finding.bound > 0 and error <= _SLIGHT * finding.bound
    return "slight" if small or first in _STATISTICS else "error"


class Store(Protocol):
    """Holds the causes of a run; processes may share it."""

    def known(self) -> list[RootCause]:
        """Return the causes found so far."""

    def add(self, cause: RootCause) -> int:
        """Store a cause, or join it with one that covers it; return the number."""

    def replace(self, cause: RootCause) -> None:
        """Store a cause again, with a smaller problem, more outputs or fewer features."""


class Known:
    """A store in the memory of one process."""

    def __init__(self) -> None:
        self.causes: dict[int, RootCause] = {}
        # Number of a cause to that of the cause that it was joined with.
        self.joined: dict[int, int] = {}

    def known(self) -> list[RootCause]:
        """Return the causes found so far."""
        return [x for number, x in self.causes.items() if number not in self.joined]

    def add(self, cause: RootCause) -> int:
        """Store a cause, or join it with one that covers it; return the number."""
        for known in self.known():
            if known.covers(cause):
                self.replace(_joined(known, cause))
                return known.number
        number = len(self.causes) + 1
        self.replace(dataclasses.replace(cause, number=number))
        return number

    def replace(self, cause: RootCause) -> None:
        """Store a cause again, with a smaller problem, more outputs or fewer features.

        It may cover others now.
        """
        for known in self.known():
            if known.number != cause.number and cause.covers(known):
                cause = _joined(cause, known)
                self.joined[known.number] = cause.number
        self.causes[cause.number] = cause

    def number(self, number: int) -> int:
        """Return the number of the cause that a cause was joined with, or its own."""
        while number in self.joined:
            number = self.joined[number]
        return number


def _joined(cause: RootCause, part: RootCause) -> RootCause:
    """Return a cause with the outputs of a part of it, and the smaller problem of the two.

    A part that needs more features is not shown: its problem may fail for another cause as well.
    An exception needs the features that both have: more were noted where the time ran out.
    """
    outputs = tuple(dict.fromkeys((*cause.outputs, *part.outputs)))
    alike = {x.name for x in cause.hard} == {x.name for x in part.hard}
    shown = min(
        cause, part, key=lambda x: (x.kind == "slight", kind_of(x.problem).complexity(x.problem))
    )
    shown = shown if alike else cause
    features = tuple(
        next((x.joined(y) for y in part.features if x.is_of(y)), x) for x in cause.features
    )
    common = tuple(x for x in features if any(x.is_of(y) for y in part.features))
    if " at " in cause.kind and not all(map(is_soft, common)):
        features = common
    return dataclasses.replace(
        shown, number=cause.number, features=features, outputs=outputs,
        dtypes=tuple(x for x in DTYPES if x in (*cause.dtypes, *part.dtypes)),
        all_dtypes=cause.all_dtypes or part.all_dtypes,
        declarations=tuple(x for x in cause.declarations if x in part.declarations or not alike),
        diagnosis=shown.diagnosis or cause.diagnosis or part.diagnosis,
    )  # fmt: skip


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
        return _kind(self.findings[0])


class Failure:
    """A failing problem with its check, to be explained by causes.

    Args:
        runner: The runner that judges problems.
        claim: The check that failed.
        findings: Its findings.
        store: The causes of the run.
    """

    def __init__(self, runner: Runner, claim: Check, findings: list[Finding], store: Store) -> None:
        self.runner = runner
        self.claim = claim
        self.store = store
        self.problem = findings[0].problem
        self.kind = kind_of(self.problem)
        self._end = time.monotonic() + SECONDS
        self._seen: dict[Call, _Outcome] = {}
        # Numbers of causes that raise in the problem, and beyond which its values are wrong.
        self._raised: list[int] = []
        # Numbers of the causes that this failure showed.
        self._tried: list[int] = []
        self._of(self.problem)
        if not self._seen[self.problem].findings:  # it fails only sometimes
            outputs = tuple(dict.fromkeys(x.output for x in findings if x.output))
            self._seen[self.problem] = _Outcome(findings, True, outputs)

    def causes(self) -> list[int]:
        """Return the numbers of the causes that explain the failure, at least one."""
        found = self._known(self.problem, self.store.known(), note=True)
        for _ in range(_MOST_NEW):
            if isinstance(found, list):
                break
            number = self.store.add(self._new(found))
            # The smallest failing problem may fail for another cause than this one.
            again = self._known(self.problem, self.store.known(), note=True)
            found = [number] if again == found and number in self._tried else again
            self._tried.append(number)
        found = found if isinstance(found, list) else self._tried[-1:]
        return [*dict.fromkeys((*self._raised, *found))]

    def is_explained(self, causes: list[RootCause]) -> bool:
        """Return whether some of the causes explain the failure."""
        return isinstance(self._known(self.problem, causes, note=True), list)

    def _of(self, problem: Call) -> _Outcome:
        """Run the check on a problem, once. A problem that is excluded counts as not judged."""
        if problem not in self._seen:
            if self.kind.excludes(self.runner.subject, problem):
                return _Outcome([], False, ())
            judged = self.runner.judged
            findings = self.runner.findings(problem, self.claim)
            if not problem.seeds:
                # Those of another call, which is wrong by itself, are not the problem's.
                findings = [x for x in findings if x.problem == problem]
            outputs = dict.fromkeys(x.output.split(" of ")[0] for x in findings if x.output)
            if findings:
                outputs |= {name: None for name, peak in self.runner.peaks.items() if peak > 1}
            self._seen[problem] = _Outcome(
                findings, bool(findings) or self.runner.judged > judged, tuple(outputs)
            )
        return self._seen[problem]

    def _known(
        self, problem: Call, causes: list[RootCause], *, note: bool = False
    ) -> list[int] | Call:
        """Return the known causes of a failing problem; else a failing problem without them."""
        outcome = self._of(problem)
        left = None
        for cause in causes:
            if cause.problem.kind != problem.kind or not cause.is_like(
                outcome.kind, outcome.outputs
            ):
                continue
            if not cause.features:
                if self._fails_plainly(cause, problem):
                    return [cause.number]
                continue
            features = [x for x in cause.features if self.kind.holds(x, problem)]
            if not {*cause.hard} <= {*features}:
                continue
            for beside in self._beside(problem, cause.hard):
                beyond = self._of(beside)
                if beyond.passes:
                    if note:
                        self._note(cause, features, problem, outcome)
                    return [cause.number]
                if beyond.findings and left is None:
                    left = beside, [x for x in causes if x != cause]
                    if note and _vanished(cause.kind, beyond.kind):
                        self._note(cause, features, problem, outcome)
                        self._raised.append(cause.number)
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
        self, cause: RootCause, features: list[Feature], problem: Call, outcome: _Outcome
    ) -> None:
        """Add to a cause what one more of its failures shows."""
        # Another process may have changed it meanwhile.
        cause = next((x for x in self.store.known() if x.number == cause.number), cause)
        outputs = tuple(dict.fromkeys((*cause.outputs, *outcome.outputs)))
        of_both = tuple(
            x.joined(y) for x in features for y in self.kind.features(problem) if x.is_of(y)
        )
        if (outputs, of_both) != (cause.outputs, cause.features):
            self.store.replace(dataclasses.replace(cause, outputs=outputs, features=of_both))

    def _unexplained(self, problem: Call) -> list[Finding]:
        """Return the findings of a problem, unless known causes explain them.

        A problem that fails without the features of a cause too counts as explained: its other
        failure is found on the problem beside it.
        """
        if time.monotonic() > self._end:
            return []
        findings = self._of(problem).findings
        if not findings or self._known(problem, self._causes) != problem:
            return []
        return findings

    def _new(self, problem: Call) -> RootCause:
        """Minimise a failing problem that no known cause explains, and find its features."""
        self._causes = self.store.known()
        subject = self.runner.subject
        plain: list[dict[str, Any]] = [
            *({"dtype": dtype} for dtype in ("fp32", "fp16") if dtype in subject.dtypes),
            {"config": next(iter(subject.configs))},
        ]
        before = self._of(problem)
        found = minimized(problem, before.findings, self._unexplained, plain)
        smallest = found[0].problem
        outcome = self._of(smallest) if smallest in self._seen else before
        needed: list[Feature] = []
        passing: list[tuple[bool, Call]] = []
        for feature in self.kind.features(smallest):
            if feature.name == "dtype":
                continue
            if time.monotonic() > self._end:
                # Too many features split a cause, too few hide another one in it.
                needed += [] if is_soft(feature) else [feature]
                continue
            beside = self._needs(feature, smallest, outcome.kind, needed)
            if beside is not None:
                needed.append(feature)
                if self._of(beside).passes:
                    passing.append((is_soft(feature), beside))
        ranked = min(passing, key=lambda x: (x[0], _distance(x[1], smallest)), default=None)
        nearest = None if ranked is None else ranked[1]
        dtypes = self._dtypes(smallest, nearest, needed, outcome.kind)
        others = [x for x in _dtypes_of(subject) if x not in dtypes and self._judges(smallest, x)]
        if others:
            needed.append(Feature("dtype", dtypes))
            nearest = nearest or _in_dtype(smallest, others[0])
        shown = found[0]
        return RootCause(
            number=0,
            kind=_kind(shown),
            features=tuple(needed),
            outputs=outcome.outputs,
            dtypes=dtypes,
            all_dtypes=not others,
            guarantee=shown.guarantee,
            told=shown.told,
            replay=replay_line(smallest.to_json(), shown.kernel, shown.mask, COMMAND),
            problem=smallest,
            passing=nearest,
            declarations=declarations_that_fit(
                self.runner, self.claim, dict.fromkeys((smallest, problem)), needed
            ),
            finding={
                **{name: getattr(shown, name) for name in ("output", "where", "bad", "total")},
                **{name: str(getattr(shown, name)) for name in ("got", "want", "bound")},
                "places": shown.places,
                "heat": self._heat(shown),
            },
        )

    def _heat(self, finding: Finding) -> dict[str, Any] | None:
        """Return the heat map of a larger problem that fails alike, else of the smallest one."""
        problem, larger = finding.problem, []
        if isinstance(problem, Problem):
            grown = {name: getattr(problem, name) + _GROWN for name in ("M", "N")}
            larger = self._unexplained(dataclasses.replace(problem, **grown))
        like = (x for x in larger if x.output == finding.output and x.heat is not None)
        found = next(like, finding).heat
        return None if found is None else found.record()

    def _needs(
        self, feature: Feature, problem: Call, kind: str, needed: list[Feature]
    ) -> Call | None:
        """Return a passing problem that lacks a feature and has those needed already.

        A problem without an exception counts as passing if the failure of this kind is one, though
        its values may be wrong for another cause. So does one that known causes explain, if none
        passes.
        """
        explained = None
        for beside in self._without(feature, problem):
            if not all(self.kind.holds(x, beside) for x in needed):
                continue
            outcome = self._of(beside)
            if outcome.passes:
                return beside
            if outcome.findings and _vanished(kind, outcome.kind):
                return beside
            if outcome.findings:
                if not isinstance(self._known(beside, self._causes), list):
                    return None
                explained = explained or beside
        return explained

    def _dtypes(
        self, problem: Call, passing: Call | None, needed: list[Feature], kind: str
    ) -> tuple[str, ...]:
        """Return the dtypes in which a problem fails, and the one beside it passes.

        If the failure of this kind is an exception, wrong values are no failure.

        Tiles of another dtype may be wider, so that its problem fails from larger sizes on.
        """
        grown = {
            size: _WIDER * getattr(problem, size)
            for size in ("M", "N")
            if isinstance(problem, Problem)
            and Feature(f"{size} above", getattr(problem, size) - 1) in needed
        }
        pairs = [(problem, passing)]
        if grown:
            larger: Call = changed(problem, **grown)
            hard = [x for x in needed if not is_soft(x)]
            beside = next(self._beside(larger, hard), None) if hard else None
            pairs.append((larger, beside))
        return tuple(
            dtype
            for dtype in _dtypes_of(self.runner.subject)
            if dtype == problem.dtype or any(self._parts(*pair, dtype, kind) for pair in pairs)
        )

    def _parts(self, problem: Call, passing: Call | None, dtype: str, kind: str) -> bool:
        """Return whether, in a dtype, one problem fails and the other passes."""
        found = self._unexplained(_in_dtype(problem, dtype))
        if not found or _vanished(kind, _kind(found[0])):
            return False
        return passing is None or self._of(_in_dtype(passing, dtype)).passes

    def _judges(self, problem: Call, dtype: str) -> bool:
        """Return whether a problem is judged in a dtype."""
        return self._of(_in_dtype(problem, dtype)).judged


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
        if found and Failure(self._runner, claim, found, self.store).is_explained(self._causes):
            return []
        return found


def _dtypes_of(subject: Subject) -> tuple[str, ...]:
    return tuple(x for x in DTYPES if x in subject.dtypes)


def _in_dtype(call: Call, dtype: str, config: str | None = None) -> Call:
    """Return a call in a dtype and, where its kind has one, a tile configuration."""
    fields = {"dtype": dtype}
    if config is not None and call.attention is not None:
        fields["config"] = config
    other: Call = changed(call, **fields)
    return other


def _distance(call: Call, other: Call) -> tuple[int, tuple[float, ...]]:
    """Return a sort key of calls by the number of fields in which they differ from another."""
    fields, others = _fields(call), _fields(other)
    differing = sum(value != others[name] for name, value in fields.items())
    return differing, kind_of(call).complexity(call)


def difference(call: Call, other: Call) -> str:
    """Format the fields in which another call differs, such as "N=1, no mask"."""
    return ", ".join(_formatted(_fields(call), _fields(other)))


def described(call: Call) -> str:
    """Format the lengths and the fields that are not at their defaults: "M=2 N=1 causal"."""
    plain = {**_fields(type(call)()), "device": call.device, "mask": Mask(), **_SHOWN}
    return " ".join(_formatted(plain, _fields(call)))


# Fields that are shown whatever their values are, and a value that they have not.
_SHOWN = {"M": 0, "N": 0, "dtype": "fp64", "parts": None, "lengths": None}


def _fields(call: Call) -> dict[str, object]:
    """Return the fields of a call: those of its attention, then its own."""
    found = {item.name: getattr(call, item.name) for item in dataclasses.fields(call)}  # type: ignore[arg-type]
    attention = found.pop("attention", None)
    return found if attention is None else {**_fields(attention), **found}


def _formatted(plain: Mapping[str, object], fields: Mapping[str, object]) -> Iterator[str]:
    for name, value in fields.items():
        if value == plain[name]:
            continue
        if isinstance(value, Mask):
            yield " and ".join(_parts(value)) or "no mask"
        elif name == "layouts" and isinstance(value, tuple):
            yield "layouts=" + "/".join(value)
        else:
            yield str(value) if name == "dtype" else f"{name}={value}".replace(" ", "")


def _parts(mask: Mask) -> Iterator[str]:
    """Yield the parts of a mask in words."""
    if not mask.is_plain:
        yield type(mask).__name__
    for item in dataclasses.fields(Mask):
        value = getattr(mask, item.name)
        if value != item.default:
            yield "causal" if item.name == "causal" else f"{item.name}={value}".replace(" ", "")
