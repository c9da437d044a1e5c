"""The causes of a run's failures: the features that failing problems cannot do without.

A failure has a known cause if its problem has the features of the cause and passes without them.
Else it has a new one, which ``failure`` finds.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from fa_verify.oracles.call import Call
from fa_verify.oracles.calls.codec import call_from_json
from fa_verify.oracles.guarantee import (
    BACKWARD,
    BIAS,
    EXCEPTION,
    FORM,
    G10,
    G12,
    G13,
    G16,
    IDENTITIES,
    INPUTS,
    LIMIT,
    RMS,
    guarantee_of,
)
from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.problem import DTYPES
from fa_verify.properties.guarantees.compare import Finding
from fa_verify.properties.kinds.feature import Feature, is_of_size, is_soft
from fa_verify.properties.kinds.registry import kind_of
from fa_verify.properties.search.corpus import Cause

__all__ = [
    "Known", "RootCause", "Store", "described", "difference", "distance", "kind_of_finding",
    "vanished",
]  # fmt: skip

# Exceptions of an index past the end of a tensor. A wrong index inside gives wrong values.
_OUTSIDE = ("raises OutOfBoundsError", "raises IndexError")
# An error of at most so many bounds may come from roundings.
_SLIGHT = 100.0
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
        check: Key of the guarantee whose check makes calls of its own that fail, such as one with
            distant strides; empty if the problem's own call fails.
        after: The calls after which the problem fails, the shortest sequence found, if it passes in
            a fresh process; empty if none was found, None if it fails by itself.
        runs: How many of how many runs of one problem fail, if some do and others do not.
        every: Whether no problem passed in the process that found the cause.
        origin: The memory from which a result is NaN, if it is right where that holds 0.
        untried: Dtypes and features that were not tried, as the time was too short.
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
    check: str = ""
    after: tuple[Call, ...] | None = None
    runs: tuple[int, int] | None = None
    every: bool = False
    origin: str = ""
    untried: tuple[str, ...] = ()
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
            "after": self.after if self.after is None else [x.to_json() for x in self.after],
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
        if record["after"] is not None:
            found["after"] = tuple(call_from_json(x) for x in record["after"])
        found["runs"] = record["runs"] and tuple(record["runs"])
        for name in ("outputs", "dtypes", "declarations", "untried"):
            found[name] = tuple(record[name])
        return cls(**found)

    @property
    def hard(self) -> tuple[Feature, ...]:
        """The features that every failing problem has; the soft ones if there are no others."""
        return tuple(x for x in self.features if not is_soft(x)) or self.features

    @property
    def is_hurried(self) -> bool:
        """Whether the time was too short to try all features."""
        return any(x not in DTYPES for x in self.untried)

    @property
    def depends_on(self) -> str:
        """Return "chance" or "earlier calls", if the failure depends on them, else empty."""
        key = guarantee_of(self.guarantee)
        if self.runs is not None or key == G10.key:
            return "chance"
        return "earlier calls" if self.after is not None or key == G13.key else ""

    def is_like(self, kind: str, outputs: Iterable[str]) -> bool:
        """Return whether a failure of a kind in some outputs may have this cause."""
        both = {*self.outputs} & {*outputs} or not (self.outputs and [*outputs])
        families = {_family(kind), _family(self.kind)}
        outside = "values" in families and any(x.startswith(_OUTSIDE) for x in families)
        return bool(both) and (len(families) == 1 or outside)

    def covers(self, other: RootCause) -> bool:
        """Return whether another cause is this one, or a part of it."""
        if self.problem.kind != other.problem.kind:
            return False
        if self.check == other.check == G12.key:
            return True
        by_chance = self.depends_on == other.depends_on == "chance"
        if not self.is_like(self.kind if by_chance else other.kind, other.outputs):
            return False
        if self.depends_on or other.depends_on:
            # One call of a check of many fails by chance, too.
            many = other.after is None and guarantee_of(other.guarantee) == G13.key
            of_many = self.runs is not None and self.runs[0] > 0 and many
            return self.depends_on == other.depends_on or of_many
        theirs = {x.name: x.value for x in other.features}
        if self.check != other.check:
            return False
        below = any(is_of_size(x) and x.name not in theirs for x in self.features)
        if other.kind == "NaN" != self.kind and below:
            return False  # it needs no size from which values are wrong
        if other.is_hurried and not self.is_hurried:
            # It may be this cause, if nothing speaks against it.
            holds = kind_of(other.problem).holds
            return " at " in self.kind or all(holds(x, other.problem) for x in self.hard)
        if bool(self.features) != bool(other.features):
            return False
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
    if kind.startswith(("raises ", FORM, INPUTS, G16.key)):
        return re.sub(r"\([\d, ]*\)", "(...)", kind)  # the shapes are those of the problem
    return "values"


def vanished(kind: str, other: str) -> bool:
    """Return whether a kind is an exception, and another is one of wrong values."""
    return " at " in kind and not kind.startswith(_OUTSIDE) and _family(other) == "values"


def kind_of_finding(finding: Finding) -> str:
    """Return the kind of a finding, see ``RootCause``."""
    first = guarantee_of(finding.guarantee)
    if first == G16.key:
        return f"{first}: {finding.claim}"  # each way has causes of its own
    if finding.raised:
        if finding.guarantee != EXCEPTION:
            # The output, its form, and the form that it needs.
            return f"{finding.guarantee}: {finding.raised.splitlines()[0]}"
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
    An exception needs the features that both have.
    """
    outputs = tuple(dict.fromkeys((*cause.outputs, *part.outputs)))
    alike = {x.name for x in cause.hard} == {x.name for x in part.hard}
    alike = alike and cause.depends_on == part.depends_on

    def rank(x: RootCause) -> tuple[bool, bool, tuple[float, ...]]:
        never = x.runs is not None and not x.runs[0]
        return x.kind == "slight", never, kind_of(x.problem).complexity(x.problem)

    shown = min(cause, part, key=rank)
    shown = shown if alike else cause
    features = tuple(
        next((x.joined(y) for y in part.features if x.is_of(y)), x) for x in cause.features
    )
    common = tuple(x for x in features if any(x.is_of(y) for y in part.features))
    if " at " in cause.kind and not all(map(is_soft, common)):
        features = common
    if cause.is_hurried != part.is_hurried:
        shown, features = (part, part.features) if cause.is_hurried else (cause, cause.features)
    return dataclasses.replace(
        shown, number=cause.number, features=features, outputs=outputs,
        dtypes=tuple(x for x in DTYPES if x in (*cause.dtypes, *part.dtypes)),
        all_dtypes=cause.all_dtypes or part.all_dtypes, every=cause.every and part.every,
        untried=tuple(x for x in cause.untried if x in part.untried),
        declarations=tuple(x for x in cause.declarations if x in part.declarations or not alike),
        diagnosis=shown.diagnosis or cause.diagnosis or part.diagnosis,
    )  # fmt: skip


def distance(call: Call, other: Call) -> tuple[int, tuple[float, ...]]:
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
