"""Merges of attention states: how they are run, shrunk and described.

A kernel gets lses in its declared convention: base e or 2, and its value for parts that saw
nothing. The truth is computed from the numbers that it gets.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st

from fa_verify.oracles.bounds.merging import merge_bound
from fa_verify.oracles.calls.merge import MergeProblem
from fa_verify.oracles.outputs import Numerics
from fa_verify.oracles.problem import DTYPES
from fa_verify.oracles.reference.merging import Merged, merged
from fa_verify.properties.inputs.states import States, empty_rows, make_states
from fa_verify.properties.kernels.refusals import ExcludedCallError, RefusedError
from fa_verify.properties.kernels.subject import Subject
from fa_verify.properties.kernels.supported import ExcludedError
from fa_verify.properties.kinds.feature import Feature
from fa_verify.properties.kinds.kind import Kind
from fa_verify.properties.kinds.reductions import steps
from fa_verify.properties.problems.merges import merges
from fa_verify.properties.running.guard_bands import GuardBands, fill_of
from fa_verify.properties.running.trial import Judged, SubjectError, Trial, run_states

__all__ = [
    "MERGE", "Convention", "MergeTrial", "merge_in_groups", "run_merge", "silent_part"
]  # fmt: skip

_LN2 = math.log(2.0)
_DEFAULT = MergeProblem()
# Fields whose default is the plain value, and those that count as sizes.
_PLAIN = ("lse", "out", "layout", "dout_layout", "hidden", "seed")
_SIZES = {"B": "B", "H": "H", "M": "M", "Dv": "Dv"}


class Convention(NamedTuple):
    """The convention of lses: base 2 or e, and ``empty`` for a part that saw nothing."""

    is_base_2: bool
    empty: float

    @classmethod
    def of(cls, subject: Subject) -> Convention:
        """Return the convention that a kernel declares."""
        return cls(subject.lse_base == "2", float(subject.empty_lse))

    def written(self, lses: torch.Tensor) -> torch.Tensor:
        """Convert natural lses to those that the kernel gets, in the same dtype and strides."""
        if self == (False, -math.inf):
            return lses
        values = lses.to(torch.float64) / (_LN2 if self.is_base_2 else 1.0)
        values = torch.where(lses == -math.inf, self.empty, values)
        return torch.empty_like(lses).copy_(values)

    def natural(self, lses: torch.Tensor) -> torch.Tensor:
        """Convert lses of the kernel to float64 natural ones, -inf for what saw nothing."""
        values = lses.to(torch.float64)
        values = torch.where(values == self.empty, -math.inf, values)
        return values * _LN2 if self.is_base_2 else values


@dataclass(frozen=True)
class MergeTrial(Trial):
    """A run of a merge.

    Args:
        problem: The merge.
        inputs: Its tensors, as the kernel gets them.
        exact: Its tensors with natural lses.
        got: The results; lse is float64 and natural, gradients without elements were not computed.
        want: The results of the float64 oracle.
        bound: The derived bound.
    """

    problem: MergeProblem
    inputs: States
    exact: States
    got: Merged
    want: Merged
    bound: Merged

    @property
    def outputs(self) -> Mapping[str, Judged]:
        """The results that were computed."""
        judged = zip(Merged._fields, self.got, self.want, self.bound, strict=True)
        return {name: Judged(*x) for name, *x in judged if x[0].shape == x[1].shape}


def run(subject: Subject, problem: MergeProblem) -> MergeTrial:
    """Run a merge with its gradients, and judge it. New memory holds ``fill_of`` the seed.

    Raises:
        SubjectError: The kernel raises, changes an input, or an output has a wrong shape or dtype.
        RefusedError: The kernel refuses the merge.
        RuntimeError: A bound is not finite, an error of the suite.
    """
    if reason := excludes(subject, problem):
        raise ExcludedCallError(reason)
    convention, states = Convention.of(subject), make_states(problem)
    given = states._replace(lses=convention.written(states.lses))
    exact = given._replace(lses=convention.natural(given.lses))
    got, bound = run_merge(
        subject, problem.dtype, given, exact, gradients=subject.backward,
        fill=fill_of(problem.seed),
    )  # fmt: skip
    if not all(bool(x.isfinite().all()) for x in bound):
        raise RuntimeError(f"the bound is not finite, so nothing was judged: {problem.to_json()}")
    return MergeTrial(subject, problem, given, exact, got, merged(*exact), bound)


def run_merge(
    subject: Subject,
    dtype: str,
    given: States,
    exact: States,
    *,
    gradients: bool,
    in_turn: bool = True,
    fill: float = math.nan,
) -> tuple[Merged, Merged]:
    """Return the results of a merge, with a natural lse in float64, and their bound.

    A kernel that refuses the number of parts, as it merges two at a time, merges them one after the
    other, beside a part that saw nothing where there are fewer. There are no gradients then.

    Args:
        subject: The kernel.
        dtype: The dtype of outs, as in problems.
        given: The tensors, with lses in the convention of the kernel.
        exact: The tensors with natural lses.
        gradients: Whether to compute gradients.
        in_turn: Whether a kernel that refuses the number of parts merges them in turn.
        fill: Value of what the kernel allocates.

    Raises:
        SubjectError: As ``run``.
        RefusedError: The kernel refuses the merge.
    """
    convention = Convention.of(subject)
    try:
        with GuardBands(fill) as guards:
            got = run_states(subject, given, gradients=gradients)
    except RefusedError:
        if len(given.outs) == 2 or not in_turn:
            raise
        while len(given.outs) < 2:
            given = silent_part(given, convention.empty, math.nan, len(given.outs))
            exact = silent_part(exact, -math.inf, math.nan, len(exact.outs))
        return merge_in_groups(subject, dtype, given, exact, range(len(given.outs)), None)
    if overruns := guards.overruns():
        raise SubjectError(
            f"a tensor of shape {tuple(overruns[0].tensor.shape)} {overruns[0].place}"
        )
    return got._replace(lse=convention.natural(got.lse)), _bound(subject, dtype, exact)


def silent_part(states: States, empty: float, value: float, place: int) -> States:
    """Insert a part that saw nothing before the part of a number.

    Args:
        states: The tensors of a merge.
        empty: The lse of the part.
        value: Its out.
        place: The number.
    """
    out = states.outs.new_full((1, *states.outs.shape[1:]), value)
    lse = states.lses.new_full((1, *states.lses.shape[1:]), empty)
    return states._replace(
        outs=torch.cat((states.outs[:place], out, states.outs[place:])),
        lses=torch.cat((states.lses[:place], lse, states.lses[place:])),
    )


def _bound(subject: Subject, dtype: str, exact: States, **errors: torch.Tensor) -> Merged:
    numerics = Numerics(flushes=subject.numerics.flushes)
    return merge_bound(*exact, in_dtype=dtype, numerics=numerics, **errors)


class _Group(NamedTuple):
    """A merge of some parts: of the kernel, exact in float64, and how far they may be apart."""

    out: torch.Tensor
    lse: torch.Tensor
    exact: Merged
    bound: Merged


def merge_in_groups(
    subject: Subject,
    dtype: str,
    given: States,
    exact: States,
    order: Iterable[int],
    width: int | None,
) -> tuple[Merged, Merged]:
    """Merge parts in groups, and the results of groups again, until one is left.

    The bound of the whole holds the roundings of the groups, as errors of its parts.

    Args:
        subject: The kernel.
        dtype: The dtype of outs, as in problems.
        given: The tensors, with lses in the convention of the kernel.
        exact: The tensors with natural lses.
        order: The parts, at least two.
        width: Parts of a group; None merges one part after the other.

    Returns:
        The results without gradients, and their bound.

    Raises:
        SubjectError: As ``run``.
        RefusedError: The kernel refuses groups of this width.
    """
    zeros = torch.zeros_like(exact.outs, dtype=torch.float64), torch.zeros_like(exact.lses)
    groups = [
        _Group(
            given.outs[p], given.lses[p],
            Merged(exact.outs[p], exact.lses[p], exact.outs[p], exact.lses[p]),
            Merged(zeros[0][p], zeros[1][p], zeros[0][p], zeros[1][p]),
        )
        for p in order
    ]  # fmt: skip

    def joined(some: Sequence[_Group]) -> _Group:
        """Merge the results of groups, one alone without a call."""
        if len(some) == 1:
            return some[0]
        made = States(
            torch.stack([x.out for x in some]), torch.stack([x.lse for x in some]),
            given.dout, given.dlse,
        )  # fmt: skip
        truth = States(
            torch.stack([x.exact.out for x in some]), torch.stack([x.exact.lse for x in some]),
            given.dout, given.dlse,
        )  # fmt: skip
        bound = _bound(
            subject, dtype, truth,
            out_errors=torch.stack([x.bound.out for x in some]),
            lse_errors=torch.stack([x.bound.lse for x in some]),
        )  # fmt: skip
        with GuardBands():
            got = run_states(subject, made, gradients=False)
        return _Group(got.out, got.lse, merged(*truth), bound)

    while len(groups) > 1:
        if width is None:
            groups = [joined(groups[:2]), *groups[2:]]
        else:
            starts = range(0, len(groups), width)
            groups = [joined(groups[start : start + width]) for start in starts]
    whole = groups[0]
    none = whole.out.new_empty(0)
    got = Merged(whole.out, Convention.of(subject).natural(whole.lse), none, none)
    return got, whole.bound


def draw(
    subject: Subject, *, dtype: str, device: str, **fixed: Any
) -> st.SearchStrategy[MergeProblem]:
    """Return merges of a dtype that a kernel takes; ``fixed`` are fields that are not drawn.

    Raises:
        ExcludedError: The kernel merges no states of the dtype.
    """
    if reason := excludes(subject, MergeProblem(dtype=dtype, device=device)):
        raise ExcludedError(reason)
    return merges(dtype, device, **fixed)


def excludes(subject: Subject, problem: MergeProblem) -> str | None:
    """Return the declaration that excludes a merge, as a sentence; None if none does."""
    for word, holds in (
        ("no states", subject.states is not None),
        (f"dtypes={subject.dtypes}", problem.dtype in subject.dtypes),
        (f"devices={subject.devices}", problem.device in subject.devices),
    ):
        if not holds:
            return f"{subject.name} declares {word}"
    return None


def complexity(problem: MergeProblem) -> tuple[float, ...]:
    """Return a sort key: sizes first, then the fields that differ from their default."""
    sizes = (problem.B, problem.H, problem.M, problem.Dv)
    fields = (getattr(problem, name) != getattr(_DEFAULT, name) for name in _PLAIN)
    # A part without keys is a feature, and plainer than one that hides all rows by chance.
    keys = sum(keys or 1 for keys in problem.parts)
    return sum(sizes) + len(problem.parts), sum(fields) + 0.1 * problem.parts.count(0), keys


def reductions(problem: MergeProblem) -> Iterator[MergeProblem]:
    """Yield merges that are simpler in one field: fewer parts, plain fields, smaller sizes."""
    parts, before = problem.parts, complexity(problem)
    changes: list[dict[str, Any]] = [
        *({"parts": parts[:count]} for count in (1, 2) if len(parts) > count),
        *({"parts": (*parts[:p], *parts[p + 1 :])} for p in range(len(parts)) if len(parts) > 1),
        *({name: getattr(_DEFAULT, name)} for name in _PLAIN),
        *({name: size} for name in _SIZES for size in steps(getattr(problem, name))),
        *({"parts": (*parts[:p], 1, *parts[p + 1 :])} for p, keys in enumerate(parts) if keys != 1),
    ]
    if problem.hidden:
        whole = empty_rows(problem).flatten(1).all(1).tolist()
        kept = tuple(keys * (not empty) for keys, empty in zip(parts, whole, strict=True))
        changes.insert(0, {"parts": kept, "hidden": 0})
    for change in changes:
        simpler = dataclasses.replace(problem, **change)
        if simpler != problem and complexity(simpler) < before:
            yield simpler


def _has_empty_rows(problem: MergeProblem) -> bool:
    return bool(empty_rows(problem).all(0).any())


def _has_partly_empty_parts(problem: MergeProblem) -> bool:
    empty = empty_rows(problem).flatten(1)
    return bool((empty.any(1) & ~empty.all(1)).any())


# Features of the states. One that implies another comes first: the other is no need of its own
# where the first one is.
_PREDICATES: Mapping[str, Callable[[MergeProblem], bool]] = {
    "no parts": lambda x: not x.parts,
    "B or M of 0": lambda x: 0 in (x.B, x.M),
    "parts without keys in some rows alone": _has_partly_empty_parts,
    "empty rows": _has_empty_rows,
    "parts without keys": lambda x: bool(empty_rows(x).any()),
    "parts that are not contiguous": lambda x: x.layout != "parts",
    "gradients that are not contiguous": lambda x: x.dout_layout != "parts",
}
# Sizes of which features are thresholds, and multiples that kernels take for granted.
_NUMBERS: Mapping[str, Callable[[MergeProblem], int]] = {
    "parts": lambda x: len(x.parts), "B": lambda x: x.B, "H": lambda x: x.H, "M": lambda x: x.M,
    "Dv": lambda x: x.Dv,
}  # fmt: skip
_MULTIPLES = {"Dv": 16}
_FAMILIES = {"lse family": "lse", "out family": "out"}


def features(problem: MergeProblem) -> list[Feature]:
    """Return the features of a merge."""
    found = [
        *map(Feature, _PREDICATES),
        Feature("dtype", (problem.dtype,)),
        *(Feature(name, (getattr(problem, field),)) for name, field in _FAMILIES.items()),
        *(Feature(f"{name} above", number(problem) - 1) for name, number in _NUMBERS.items()),
        *(Feature(f"{name} is no multiple of {x}") for name, x in _MULTIPLES.items()),
    ]
    return [x for x in found if holds(x, problem)]


def holds(feature: Feature, problem: MergeProblem) -> bool:
    """Return whether a merge has a feature."""
    name, value = feature
    if name in _PREDICATES:
        return _PREDICATES[name](problem)
    if name == "dtype":
        return isinstance(value, tuple) and problem.dtype in value
    if name in _FAMILIES:
        return bool(getattr(problem, _FAMILIES[name]) != "normal")
    size, _, rest = name.partition(" ")
    number = _NUMBERS[size](problem)
    if rest == "above":
        assert isinstance(value, int)
        return number > value >= 1
    return number % _MULTIPLES[size] > 0


def without(
    feature: Feature, problem: MergeProblem, configs: Iterable[str] = ()
) -> Iterator[MergeProblem]:
    """Yield merges without a feature that a merge has, nearest first."""
    for change in _changes(feature, problem):
        other = dataclasses.replace(problem, **change)
        if not holds(feature, other):
            yield other


def _changes(feature: Feature, problem: MergeProblem) -> Iterator[dict[str, Any]]:
    """Yield changes that may remove a feature, smallest change first."""
    name, value = feature
    parts = problem.parts
    with_keys = tuple(keys or 1 for keys in parts)
    if name == "no parts":
        yield from ({"parts": (1,)}, {"parts": (1, 1)})
    elif name == "B or M of 0":
        yield {field: max(1, getattr(problem, field)) for field in ("B", "M")}
    elif name == "parts without keys":
        yield {"parts": with_keys, "hidden": 0}
        if any(parts):
            yield {"parts": tuple(keys for keys in parts if keys), "hidden": 0}
    elif name == "parts without keys in some rows alone":
        # Whole parts saw nothing in place of some of their rows.
        empty = empty_rows(problem).flatten(1).any(1).tolist()
        yield {
            "parts": tuple(keys * (not x) for keys, x in zip(parts, empty, strict=True)),
            "hidden": 0,
        }
        yield {"hidden": 16}
        yield {"hidden": 0}
    elif name == "empty rows":
        # A part without keys beside others, then none.
        yield {"parts": (*with_keys, 0) if with_keys else (1, 0), "hidden": 0}
        yield from ({"parts": (*parts, *(1,) * more)} for more in range(1, 4))
        yield {"parts": with_keys or (1,), "hidden": 0}
    elif name == "parts that are not contiguous":
        yield {"layout": "parts"}
    elif name == "gradients that are not contiguous":
        yield {"dout_layout": "parts"}
    elif name == "dtype":
        yield from ({"dtype": dtype} for dtype in DTYPES)
    elif name in _FAMILIES:
        yield {_FAMILIES[name]: "normal"}
    elif name.endswith(" above"):
        assert isinstance(value, int)
        size = name.removesuffix(" above")
        yield {size: parts[:value] if size == "parts" else value}
        if size == "parts":
            yield {size: parts[len(parts) - value :]}
    else:
        size = name.partition(" ")[0]
        yield {size: -(-_NUMBERS[size](problem) // _MULTIPLES[size]) * _MULTIPLES[size]}


MERGE = Kind(draw, excludes, run, reductions, complexity, features, holds, without)
