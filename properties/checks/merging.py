"""S1 and S2: the guarantees of merged attention states, each a function to its findings.

A subject with ``states`` is judged. It gets lses in its declared convention: base e or 2, and its
value for parts that saw nothing. The truth is computed from the numbers that it gets.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import product
from typing import NamedTuple

import torch

from fa_verify.oracles.bounds.merging import merge_bound
from fa_verify.oracles.cache_problem import CacheProblem
from fa_verify.oracles.merge_problem import MergeProblem
from fa_verify.oracles.outputs import Numerics
from fa_verify.oracles.problem import Problem
from fa_verify.oracles.reference.merging import Merged, merged
from fa_verify.properties.checks.memory import FAR, arena_of
from fa_verify.properties.comparison.compare import ratios, same_bits
from fa_verify.properties.execution.guard_bands import GuardBands
from fa_verify.properties.execution.replay_line import replay_line
from fa_verify.properties.execution.trial import SubjectError, run_states
from fa_verify.properties.inputs.states import States, make_states, stored_states
from fa_verify.properties.subjects.subject import Subject

__all__ = ["MERGES", "MergeCheck", "MergeFinding", "found_elements", "found_in"]

_LN2 = math.log(2.0)
_AXES = {
    "out": "bhmd", "lse": "bhm", "douts": "pbhmd", "dlses": "pbhm",
    "dq": "bhmd", "dk": "bhnd", "dv": "bhnd", "k_cache": "pnhd", "v_cache": "pnhd",
}  # fmt: skip


@dataclass(frozen=True)
class MergeFinding:
    """A violation, with its worst element. ``str`` is the failure message.

    ``kernel`` and ``mask`` are the values of --fa-kernel and --fa-mask; they are empty for the
    project's own kernels and masks.
    """

    guarantee: str
    claim: str
    subject: str
    problem: MergeProblem | CacheProblem | Problem
    output: str = ""
    where: str = ""
    got: float = math.nan
    want: float = math.nan
    bound: float = 0.0
    bad: int = 0
    total: int = 0
    told: str = ""
    kernel: str = ""
    mask: str = ""

    @property
    def replay(self) -> str:
        """The command that runs every check on the problem; empty for a ring, which has none."""
        if isinstance(self.problem, Problem):
            return ""
        return replay_line(self.problem.to_json(), self.kernel, self.mask)

    def __str__(self) -> str:
        what = f"{self.output} of {self.subject}" if self.output else self.subject
        lines = [f"{self.guarantee}: {what} {self.claim}"]
        if self.total:
            lines.append(
                f"  worst at {self.where}: got {self.got!r}, want {self.want!r}, "
                f"error {abs(self.got - self.want):.4g}, bound {self.bound:.4g}"
            )
            verb = "is" if self.bad == 1 else "are"
            lines.append(f"  {self.bad} of {self.total} elements {verb} bad")
        lines += [f"  {line}" for line in self.told.splitlines()]
        lines.append(f"  replay: {self.replay}" if self.replay else f"  problem: {self.problem!r}")
        return "\n".join(lines)


MergeCheck = Callable[[Subject, MergeProblem], list[MergeFinding]]


class _Convention(NamedTuple):
    """The convention of lses: base 2 or e, and ``empty`` for a part that saw nothing."""

    is_base_2: bool
    empty: float

    @classmethod
    def of(cls, subject: Subject) -> _Convention:
        return cls(subject.lse_base == "2", float(subject.empty_lse))

    def written(self, lses: torch.Tensor) -> torch.Tensor:
        """Convert natural lses to those that the subject gets, in the same dtype and strides."""
        if self == (False, -math.inf):
            return lses
        values = lses.to(torch.float64) / (_LN2 if self.is_base_2 else 1.0)
        values = torch.where(lses == -math.inf, self.empty, values)
        return torch.empty_like(lses).copy_(values)

    def natural(self, lses: torch.Tensor) -> torch.Tensor:
        """Convert lses of the subject to float64 natural ones, -inf for what saw nothing."""
        values = lses.to(torch.float64)
        values = torch.where(values == self.empty, -math.inf, values)
        return values * _LN2 if self.is_base_2 else values


def found_elements(
    subject: Subject,
    problem: MergeProblem | CacheProblem | Problem,
    guarantee: str,
    claim: str,
    output: str,
    values: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    bad: torch.Tensor,
) -> list[MergeFinding]:
    """Return a finding at the worst bad element, if any. ``values`` are ``got, want, bound``."""
    if not bool(bad.any()):
        return []
    got, want, bound = (x.to(torch.float64) for x in values)
    error = torch.where(bad, ratios(got, want, bound).nan_to_num(nan=math.inf), -1.0)
    index = tuple(int(i) for i in torch.unravel_index(error.flatten().argmax(), bad.shape))
    where = " ".join(f"{axis}={i}" for axis, i in zip(_AXES[output], index, strict=True))
    return [
        MergeFinding(
            guarantee, claim, subject.name, problem, output, where, float(got[index]),
            float(want[index]), float(bound[index]), int(bad.sum()), bad.numel(),
            kernel=subject.source,
        )
    ]  # fmt: skip


def _run(subject: Subject, states: States, *, gradients: bool = False) -> Merged:
    """Run the subject on states in its convention; its lse is converted to float64, natural."""
    with GuardBands() as guards:
        got = run_states(subject, states, gradients=gradients and subject.backward)
    if overruns := guards.overruns():
        raise SubjectError(
            f"a tensor of shape {tuple(overruns[0].tensor.shape)} {overruns[0].place}"
        )
    return got._replace(lse=_Convention.of(subject).natural(got.lse))


def _made(subject: Subject, problem: MergeProblem) -> tuple[States, States]:
    """Return the tensors of a problem as the subject gets them, and with natural lses."""
    convention, states = _Convention.of(subject), make_states(problem)
    given = states._replace(lses=convention.written(states.lses))
    return given, given._replace(lses=convention.natural(given.lses))


def _bound(
    subject: Subject, problem: MergeProblem, exact: States, **errors: torch.Tensor
) -> Merged:
    numerics = Numerics(flushes=subject.numerics.flushes)
    return merge_bound(*exact, in_dtype=problem.dtype, numerics=numerics, **errors)


def _outside(
    subject: Subject,
    problem: MergeProblem,
    guarantee: str,
    claim: str,
    got: Merged,
    want: Merged,
    bound: Merged,
) -> list[MergeFinding]:
    """Return the findings where an output leaves a bound.

    Raises:
        RuntimeError: A bound is not finite, an error of the suite.
    """
    findings = []
    for name, limit in zip(Merged._fields, bound, strict=True):
        x, y = getattr(got, name), getattr(want, name)
        if not bool(limit.isfinite().all()):
            raise RuntimeError(f"the bound is not finite, so nothing was judged: {problem}")
        if not _is_absent(x):
            bad = ratios(x, y, limit) > 1
            findings += found_elements(subject, problem, guarantee, claim, name, (x, y, limit), bad)
    return findings


def _differs(
    subject: Subject,
    problem: MergeProblem,
    promise: str,
    claim: str,
    first: Merged,
    again: Merged,
    bound: Merged,
) -> list[MergeFinding]:
    """Return findings where two runs differ: in a bit if that is promised, or by 2 bounds."""
    findings = []
    for name, limit in zip(Merged._fields, bound, strict=True):
        x, y = getattr(first, name), getattr(again, name)
        if _is_absent(x):
            continue
        if _promises(subject, promise):
            limit, bad = torch.zeros_like(limit), ~same_bits(x, y)
        else:
            limit = 2 * limit
            # NaN in both runs is a finding of accuracy, not of this check.
            bad = (ratios(y, x.to(torch.float64), limit) > 1) & ~(x.isnan() & y.isnan())
        findings += found_elements(subject, problem, "S1 merging", claim, name, (y, x, limit), bad)
    return findings


def _promises(subject: Subject, guarantee: str) -> bool:
    """Return whether the subject promises a guarantee to the bit."""
    return bool(subject.promises(guarantee, next(iter(subject.configs))))


def _is_absent(x: torch.Tensor) -> bool:
    """Return whether a gradient was not computed."""
    return x.ndim == 1


def accuracy(subject: Subject, problem: MergeProblem) -> list[MergeFinding]:
    """S1: out, lse and gradients lie within the derived bound of the float64 oracle."""
    given, exact = _made(subject, problem)
    got = _run(subject, given, gradients=True)
    want, bound = merged(*exact), _bound(subject, problem, exact)
    claim = "leaves the derived bound"
    return _outside(subject, problem, "S1 merging", claim, got, want, bound)


class _Group(NamedTuple):
    """A merge of some parts: of the subject, exact in float64, and how far they may be apart."""

    out: torch.Tensor
    lse: torch.Tensor
    exact: Merged
    bound: Merged


def grouping(subject: Subject, problem: MergeProblem) -> list[MergeFinding]:
    """S1: parts in another order, merged in groups or one after the other, stay within the bound.

    The bound of the whole then holds the roundings of the groups, as errors of its parts.
    """
    given, exact = _made(subject, problem)
    parts = len(problem.parts)
    if parts < 2:
        return []
    order = sorted(range(parts), key=lambda p: hash((problem.seed, p)))
    shuffled = States(given.outs[order], given.lses[order], given.dout, given.dlse)
    same = States(exact.outs[order], exact.lses[order], exact.dout, exact.dlse)
    zeros = torch.zeros_like(same.outs, dtype=torch.float64), torch.zeros_like(same.lses)
    leaves = [
        _Group(x, y, Merged(x, z, x, y), Merged(a, b, a, b))
        for x, y, z, a, b in zip(
            shuffled.outs, shuffled.lses, same.lses, *zeros, strict=True
        )
    ]  # fmt: skip

    def joined(groups: Sequence[_Group]) -> _Group:
        """Merge the results of groups, one alone without a call."""
        if len(groups) == 1:
            return groups[0]
        made = States(
            torch.stack([x.out for x in groups]), torch.stack([x.lse for x in groups]),
            given.dout, given.dlse,
        )  # fmt: skip
        truth = States(
            torch.stack([x.exact.out for x in groups]), torch.stack([x.exact.lse for x in groups]),
            given.dout, given.dlse,
        )  # fmt: skip
        bound = _bound(
            subject, problem, truth,
            out_errors=torch.stack([x.bound.out for x in groups]),
            lse_errors=torch.stack([x.bound.lse for x in groups]),
        )  # fmt: skip
        with GuardBands():
            got = run_states(subject, made, gradients=False)
        return _Group(got.out, got.lse, merged(*truth), bound)

    def in_groups(width: int) -> _Group:
        groups = leaves
        while len(groups) > 1:
            starts = range(0, len(groups), width)
            groups = [joined(groups[start : start + width]) for start in starts]
        return groups[0]

    width = 2 + problem.seed % 3
    try:
        grouped = in_groups(width)
    except NotImplementedError:
        # A function that merges two states at a time.
        width, grouped = 2, in_groups(2)
    findings = []
    for claim, whole in (
        (f"leaves the bound where parts {order} are merged in groups of {width}", grouped),
        (f"leaves the bound where parts {order} are merged one after the other",
         reduce(lambda a, b: joined([a, b]), leaves)),
    ):  # fmt: skip
        natural = _Convention.of(subject).natural(whole.lse)
        none = whole.out.new_empty(0)
        got = Merged(whole.out, natural, none, none)
        findings += _outside(
            subject, problem, "S1 merging", claim, got, merged(*exact), whole.bound
        )
    return findings


def silent_parts(subject: Subject, problem: MergeProblem) -> list[MergeFinding]:
    """S1: parts that saw nothing change no bit, whatever their out holds, and get no gradient."""
    given, exact = _made(subject, problem)
    first = _run(subject, given, gradients=True)
    bound = _bound(subject, problem, exact)
    place = problem.seed % (len(problem.parts) + 1)
    findings = []
    for value in (math.nan, math.inf, 0.0):
        with_it = _beside_silence(subject, given, value, place)
        again = _run(subject, with_it, gradients=True)
        claim = f"changes with a part that saw nothing, whose out holds {value}"
        if not _is_absent(again.douts):
            for name, x in (("douts", again.douts), ("dlses", again.dlses)):
                zeros = torch.zeros_like(x[place : place + 1])
                findings += found_elements(
                    subject, problem, "S1 merging", "is not 0 for a part that saw nothing", name,
                    (x[place : place + 1], zeros, zeros), x[place : place + 1] != 0,
                )  # fmt: skip
            kept = [p for p in range(len(again.douts)) if p != place]
            again = again._replace(douts=again.douts[kept], dlses=again.dlses[kept])
        findings += _differs(subject, problem, "G4", claim, first, again, bound)
    return findings


def alone(subject: Subject, problem: MergeProblem) -> list[MergeFinding]:
    """S1: a part alone, or beside one that saw nothing, is the result to the bit.

    out is 0 where the part saw nothing. Gradients are asked if the subject promises G4 to the bit.

    Raises:
        NotImplementedError: The subject takes neither one part nor two.
    """
    given, exact = _made(subject, problem)
    refused, judged = None, False
    compared: list[tuple[str, str, torch.Tensor, torch.Tensor]] = []
    for p, beside in product(range(len(problem.parts)), (None, math.nan, math.inf, 0.0)):
        part, at = given._replace(outs=given.outs[p : p + 1], lses=given.lses[p : p + 1]), 0
        claim = f"is not that of part {p}, which is alone"
        if beside is not None:
            place = problem.seed % 2
            part, at = _beside_silence(subject, part, beside, place), 1 - place
            claim = f"is not that of part {p} beside one that saw nothing, whose out holds {beside}"
        try:
            got = _run(subject, part, gradients=True)
        except NotImplementedError as error:
            refused = error
            continue
        judged = True
        if not _is_absent(got.douts):
            got = got._replace(douts=got.douts[at : at + 1], dlses=got.dlses[at : at + 1])
        seen = exact.lses[p] != -math.inf
        dout, dlse = given.dout[None], given.dlse[None]
        want = Merged(
            torch.where(seen[..., None], given.outs[p], 0.0), exact.lses[p],
            torch.where(seen[..., None], dout, 0.0), torch.where(seen, dlse, 0.0),
        )  # fmt: skip
        for name, y in zip(Merged._fields, want, strict=True):
            x = getattr(got, name)
            is_gradient = name in ("douts", "dlses")
            if not is_gradient or (not _is_absent(x) and _promises(subject, "G4")):
                compared.append((claim, name, x, y.to(x.dtype)))
    if refused and not judged:
        raise refused
    if not compared:
        return []
    bad = [~same_bits(x, y) for *_, x, y in compared]
    # Wait for a GPU once, not for each output of each run.
    is_any = torch.stack([x.any() for x in bad]).tolist()
    return [
        finding
        for (claim, name, x, y), where, is_bad in zip(compared, bad, is_any, strict=True)
        if is_bad
        for finding in found_elements(
            subject, problem, "S1 merging", claim, name, (x, y, torch.zeros_like(y)), where
        )
    ]


def _beside_silence(subject: Subject, states: States, value: float, place: int) -> States:
    """Insert a part that saw nothing, whose out holds a value, before the part of a number."""
    silent_out = states.outs.new_full((1, *states.outs.shape[1:]), value)
    silent_lse = states.lses.new_full((1, *states.lses.shape[1:]), float(subject.empty_lse))
    return states._replace(
        outs=torch.cat((states.outs[:place], silent_out, states.outs[place:])),
        lses=torch.cat((states.lses[:place], silent_lse, states.lses[place:])),
    )


def storage(subject: Subject, problem: MergeProblem) -> list[MergeFinding]:
    """S1: strides, slices and shared memory change no bit, nor does a slice of heads and rows."""
    given, exact = _made(subject, problem)
    first, bound = _run(subject, given, gradients=True), _bound(subject, problem, exact)
    plain = States(*(x.clone(memory_format=torch.contiguous_format) for x in given))
    again = _run(subject, plain, gradients=True)
    claim = "depends on the strides of its inputs"
    findings = _differs(subject, problem, "G8", claim, first, again, bound)
    if 0 in (problem.B, problem.M):
        return findings
    b, h, m = problem.seed % problem.B, problem.seed % problem.H, problem.seed % problem.M
    at = slice(b, b + 1), slice(h, None), slice(m, None)
    part = States(given.outs[:, *at], given.lses[:, *at], given.dout[at], given.dlse[at])
    sliced = _run(subject, part, gradients=True)

    def cut(x: Merged) -> Merged:
        of_parts = (y if _is_absent(y) else y[:, *at] for y in (x.douts, x.dlses))
        return Merged(x.out[at], x.lse[at], *of_parts)

    claim = f"differs for b={b}, heads from {h} and rows from {m} alone"
    return findings + _differs(subject, problem, "G9", claim, cut(first), sliced, cut(bound))


def not_hidden(subject: Subject, problem: MergeProblem) -> list[MergeFinding]:
    """S1: an lse of NaN or +inf of a part that is not empty shows, in its own row alone."""
    given, exact = _made(subject, problem)
    if 0 in (len(problem.parts), problem.B, problem.M):
        return []
    first = _run(subject, given)
    at = tuple(problem.seed % size for size in (problem.B, problem.H, problem.M))
    p = problem.seed % len(problem.parts)
    findings = []
    for value in (math.nan, math.inf):
        if value == float(subject.empty_lse):
            continue
        # A part that saw a key has numbers as its out.
        broken = stored_states(given.lses, "parts")
        broken[p, *at] = value
        outs = given.outs.clone(memory_format=torch.contiguous_format)
        outs[p, *at] = outs[p, *at].nan_to_num(nan=1.0)
        got = _run(subject, given._replace(outs=outs, lses=broken))
        shown = (got.lse[at].isnan() | (got.lse[at] == math.inf)).view(1)
        if not bool(shown):
            findings.append(
                MergeFinding(
                    "S1 merging", f"hides an lse of {value} of part {p}", subject.name, problem,
                    "lse", " ".join(f"{a}={i}" for a, i in zip("bhm", at, strict=True)),
                    float(got.lse[at]), value, 0.0, 1, got.lse.numel(), kernel=subject.source,
                )
            )  # fmt: skip
        others = torch.ones_like(exact.lses[0], dtype=torch.bool)
        others[at] = False
        for name, kept in (("out", others[..., None].expand_as(got.out)), ("lse", others)):
            x, y = getattr(got, name), getattr(first, name)
            findings += found_elements(
                subject, problem, "S1 merging", f"changes with an lse of {value} of another row",
                name, (x, y, torch.zeros_like(y)), kept & ~same_bits(x, y),
            )  # fmt: skip
    return findings


def far_apart(subject: Subject, problem: MergeProblem) -> list[MergeFinding]:
    """S1: elements that lie 2**31 elements or more apart are read where they are.

    One axis of one tensor, chosen by the seed, spans that many elements.

    Raises:
        NotImplementedError: No axis is longer than 1, or the device has too little memory.
    """
    given, exact = _made(subject, problem)
    name = States._fields[problem.seed % len(States._fields)]
    x = getattr(given, name)
    axes = [axis for axis in range(x.ndim) if x.shape[axis] > 1 and x.numel()]
    if not axes:
        raise NotImplementedError(f"no axis of {name} is longer than 1")
    axis = axes[problem.seed // 4 % len(axes)]
    step = -(-FAR // (x.shape[axis] - 1) // x.numel()) * x.numel()
    strides = [*x.contiguous().stride()]
    strides[axis] = step
    # An offset that wraps to a 32-bit int leads to elsewhere in the arena, before or behind.
    elements = FAR + max(FAR, step * (x.shape[axis] - 1)) + x.numel()
    first, bound = _run(subject, given, gradients=True), _bound(subject, problem, exact)
    try:
        arena = arena_of(elements, problem.device, x.dtype)
    except MemoryError as error:
        raise NotImplementedError(str(error)) from error
    moved = arena[FAR:].as_strided(x.shape, strides).copy_(x)
    made = given._replace(**{name: moved})
    again = run_states(subject, made, gradients=subject.backward)
    del arena, moved, made
    if problem.device == "cuda":
        torch.cuda.empty_cache()
    again = again._replace(lse=_Convention.of(subject).natural(again.lse))
    claim = f"is wrong where {name} spans 2**31 elements along axis {axis}"
    return _differs(subject, problem, "G8", claim, first, again, bound)


# The checks of S1 by name.
MERGES: dict[str, MergeCheck] = {
    "accuracy": accuracy,
    "grouping": grouping,
    "silent parts": silent_parts,
    "one part": alone,
    "storage": storage,
    "not hidden": not_hidden,
    "far apart": far_apart,
}


def found_in(subject: Subject, problem: MergeProblem, check: MergeCheck) -> list[MergeFinding]:
    """Return the findings of a check; an exception of the subject is one.

    Raises:
        NotImplementedError: The subject refuses the problem.
    """
    try:
        return check(subject, problem)
    except SubjectError as error:
        return [
            MergeFinding(
                "S1 merging", error.claim, subject.name, problem, told=str(error),
                kernel=subject.source,
            )
        ]  # fmt: skip
