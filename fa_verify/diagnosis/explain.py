"""Name the fault of a subject: the faulty result that it agrees with where it leaves the right one.

Every entry of the dictionary is computed on a failing problem, in float64. A fault explains the
failure if the subject agrees with its result in every element of every output. The allowed error
is the bound of the right result, scaled by the sums of |terms| of the faulty one. The subject has
to agree on larger problems too. Where several faults agree, problems on which their results differ
separate them.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from fa_verify.diagnosis.named.entries import variants
from fa_verify.diagnosis.named.named import Made, Named, Variant
from fa_verify.diagnosis.named.passes import (
    Case,
    Computed,
    Forward,
    Pass,
    computed,
    forward_of,
    gradients_of,
)
from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.outputs import OUTPUTS
from fa_verify.oracles.problem import Problem
from fa_verify.properties.inputs.families import NO_ALIBI, NO_BIAS, NO_SINKS, TORCH_DTYPES
from fa_verify.properties.inputs.tensors import Inputs, make
from fa_verify.properties.kernels.refusals import RefusedError
from fa_verify.properties.kernels.subject import Subject
from fa_verify.properties.running.trial import AttentionTrial, SubjectError, run_trial

__all__ = ["Diagnosis", "Explanation", "diagnose"]

SECONDS = 15.0
# The time on the clock may be so many times the time of the process, on a busy machine.
_BUSY = 3
# Pairs of rows and keys, over batch entries and heads, above which nothing is computed.
_MOST_PAIRS = 2**21
# The square of the share of the error, in bounds, that an explanation may leave.
_LEFT = 1 / 64
# Elements that are exact in the right result may err by so many of the largest relative bounds.
_OF_EXACT = 8
# Elements beyond the bound that an explanation has to agree with.
_LEAST = 2
# Names that are shown.
_MOST = 3
# Tile sizes that are tried beside those of the subject.
_TILES = ((16, 16), (32, 32), (64, 64), (128, 128), (128, 64), (64, 32), (32, 16), (16, 32))
# Pairs above which a problem is not made much larger: an interpreter would take seconds.
_GROWN = 2**14
# Softcap, ALiBi, bias and sinks of a problem without score modifications.
_UNMODIFIED = (None, NO_ALIBI, NO_BIAS, NO_SINKS)
# The outputs of each pass.
_OF_PASSES = (("out", "lse"), ("dq",), ("dk", "dv"))
Candidate = Callable[[Case], "Computed | None"]


@dataclass(frozen=True)
class Explanation:
    """A fault whose result the subject agrees with.

    Args:
        name: Name of the fault in the dictionary.
        says: The end of "behaves as if".
        place: The pass with the fault: "everywhere", "forward", "backward", "dq", "dk and dv", or
            an output.
        tile: The size of tiles that the fault implies; empty if it implies none.
        on_record: Projects that shipped the fault, with issues or commits; may be empty.
        elements: Elements beyond the bound of the right result that agree, over all problems.
        problems: Problems on which every element agrees.
        outputs: The outputs that it explains, if others are wrong in another way; else empty.
    """

    name: str
    says: str
    place: str
    tile: str
    on_record: str
    elements: int
    problems: int
    outputs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Diagnosis:
    """The explanations of a failure.

    Args:
        explanations: Faults that the evidence cannot tell apart, the likeliest first; none if the
            subject agrees with no faulty result.
        tried: Named faults that apply to the failing problem.
        complete: Whether all were tried in the time allowed.
        seconds: The time that it took.
    """

    explanations: tuple[Explanation, ...] = ()
    tried: int = 0
    complete: bool = True
    seconds: float = 0.0

    def record(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {
            "explanations": [vars(x) for x in self.explanations],
            "tried": self.tried,
            "complete": self.complete,
            "seconds": round(self.seconds, 3),
        }


def diagnose(
    subject: Subject,
    problem: Problem,
    *,
    also: Iterable[Problem] = (),
    seconds: float = SECONDS,
    run: Callable[[Problem], AttentionTrial | None] | None = None,
) -> Diagnosis:
    """Name the fault that a subject shows on a failing problem.

    Args:
        subject: The subject.
        problem: The failing problem.
        also: Other problems that fail for the same cause, or pass beside it.
        seconds: Time of the process after which nothing more is tried, or three times as long on
            the clock. An incomplete search names nothing.
        run: Runs the subject on a problem; None is ``run_trial``.

    Returns:
        The diagnosis; without explanations if the subject raises on the problem, or leaves the
        bound in no element.
    """
    return _Search(subject, run or (lambda x: run_trial(subject, x)), seconds).of(problem, also)


class _OutOfTimeError(Exception):
    """The time is over."""


class _Search:
    def __init__(
        self, subject: Subject, run: Callable[[Problem], AttentionTrial | None], seconds: float
    ) -> None:
        self.subject = subject
        self._run = run
        self._start = time.monotonic()
        self._ends = time.process_time() + seconds, self._start + _BUSY * seconds
        self._tried = 0
        self._runs: dict[Problem, AttentionTrial | None] = {}

    def of(self, problem: Problem, also: Iterable[Problem]) -> Diagnosis:
        threads = torch.get_num_threads()
        # Threads make products of small matrices many times slower on a busy machine.
        torch.set_num_threads(1)
        try:
            found, complete = self._found(problem, tuple(also)), True
        except _OutOfTimeError:
            found, complete = [], False
        finally:
            torch.set_num_threads(threads)
        return Diagnosis(
            tuple(found[:_MOST]), self._tried, complete, time.monotonic() - self._start
        )

    def _found(self, problem: Problem, also: tuple[Problem, ...]) -> list[Explanation]:
        """Return what explains all outputs, or else what explains those of one pass."""
        shown = self._sharpest(problem, OUTPUTS)
        found = [] if shown is None else self._explanations(shown, also)
        if shown is None or found:
            return found
        wrong = shown.wrong_outputs
        for outputs in _OF_PASSES:
            part = tuple(x for x in outputs if x in wrong)
            if part and part != wrong and (of_part := self._sharpest(problem, outputs)):
                found += [
                    dataclasses.replace(
                        x, outputs=part, place="forward" if "out" in outputs else x.place
                    )
                    for x in self._explanations(of_part, also)
                ]
            if part and "out" in outputs:
                # Nothing is known of the results that the backward reads.
                break
        return found

    def _explanations(self, shown: _Seen, also: Iterable[Problem]) -> list[Explanation]:
        outputs = shown.outputs
        others = (x for x in dict.fromkeys((*also, *_grown(shown.problem))) if x != shown.problem)
        seen = [shown, *(x for x in (self._seen(y, outputs) for y in others) if x is not None)]
        # Constants are fitted best where most elements are wrong.
        seen.sort(key=lambda x: -x.wrong)
        survivors = self._agreeing(seen[0])
        for other in seen[1:]:
            survivors = self._kept(survivors, other)
        if any(x.candidate.tile and not x.spans for x in survivors):
            # A fault of tiles has to show where there are several.
            wider = self._seen(_wide(survivors, shown.problem), outputs)
            survivors = survivors if wider is None else self._kept(survivors, wider)
        survivors = [x for x in survivors if x.spans or not x.candidate.tile]
        for other in _resized(shown.problem):
            if survivors and (more := self._seen(other, outputs)) is not None:
                survivors = self._kept(survivors, more)
        for other in _plainer(shown.problem):
            # A constant is fitted to the problems with the features of the failing one.
            named = [x for x in survivors if isinstance(x.candidate, Variant)]
            if named and (more := self._seen(other, outputs)) is not None:
                fitted = [x for x in survivors if isinstance(x.candidate, _Constant)]
                survivors = self._kept(named, more) + fitted
        for other in _windowed(shown.problem):
            if survivors and (more := self._seen(other, outputs)) is not None and more.wrong:
                survivors = self._kept(survivors, more)
        if len({x.name for x in survivors}) > 1:
            survivors = self._separated(survivors, shown)
        return [x.explanation() for x in _first_of_each(survivors) if x.elements >= _LEAST]

    def _sharpest(self, problem: Problem, outputs: tuple[str, ...]) -> _Seen | None:
        """Run the problem in fp32 if it fails there: bounds are small, and constants are held.

        A constant of a kernel, such as -1e4 for hidden scores, is often float32 for float64 inputs.
        Storage and padding are those of the plain problem if it fails with them.
        """
        default = Problem()
        plain = dataclasses.replace(problem, layouts=default.layouts, dirty=default.dirty)
        for one in dict.fromkeys((plain, problem)):
            for dtype in dict.fromkeys(("fp32", "fp64", problem.dtype)):
                seen = self._seen(dataclasses.replace(one, dtype=dtype), outputs)
                if seen is not None and seen.wrong:
                    return seen
        return None

    def _seen(self, problem: Problem, outputs: tuple[str, ...]) -> _Seen | None:
        """Run a problem, once, and return some of the outputs; None if it says nothing."""
        if problem not in self._runs:
            self._check_time()
            self._runs[problem] = self._trial(problem)
        trial = self._runs[problem]
        return trial and _Seen(trial, outputs, self.subject.numerics_of(problem).splits)

    def _trial(self, problem: Problem) -> AttentionTrial | None:
        if problem.B * problem.H * problem.M * max(1, problem.N) > _MOST_PAIRS:
            return None
        if self.subject.excludes(problem):
            return None
        try:
            return self._run(problem)
        except (SubjectError, RefusedError):
            return None

    def _check_time(self) -> None:
        if self._is_over():
            raise _OutOfTimeError

    def _is_over(self) -> bool:
        of_process, of_clock = self._ends
        return time.process_time() > of_process or time.monotonic() > of_clock

    def _agreeing(self, seen: _Seen) -> list[_Survivor]:
        """Return the variants that the subject agrees with on the failing problem."""
        tiles = dict.fromkeys((self.subject.tile_of(seen.problem), *_TILES))
        named: set[str] = set()
        found = []
        for variant in variants(tuple(tiles), seen.outputs):
            self._check_time()
            fits = seen.fits(variant)
            if fits is None:
                continue
            named.add(variant.named.name)
            if fits:
                found.append(_Survivor(variant, variant.named).agreeing(seen, variant(seen.case)))
        for factors in _constants(seen):
            if seen.agrees(result := factors(seen.case)):
                found.append(_Survivor(factors, factors.named).agreeing(seen, result))
        self._tried = max(self._tried, len(named))
        return found

    def _kept(self, survivors: list[_Survivor], seen: _Seen) -> list[_Survivor]:
        """Return the survivors that the subject agrees with on another problem."""
        kept = []
        for one in survivors:
            self._check_time()
            result = one.candidate(seen.case) or seen.case.right
            if seen.agrees(result):
                kept.append(one.agreeing(seen, result))
        return kept

    def _separated(self, survivors: list[_Survivor], shown: _Seen) -> list[_Survivor]:
        """Run problems on which the results of survivors differ, and keep those that agree."""
        for other in _featured(shown.problem):
            if len({x.name for x in survivors}) < 2 or self._is_over():
                break
            if self.subject.excludes(other) is not None:
                continue
            if _differ(survivors, other, shown.outputs, self.subject.numerics_of(other).splits):
                seen = self._seen(other, shown.outputs)
                # Another fault of the subject may show on a problem with another feature.
                survivors = (seen and self._kept(survivors, seen)) or survivors
        return survivors


class _Seen:
    """A run of the subject on a problem, to which faulty results are compared."""

    def __init__(self, trial: AttentionTrial, outputs: tuple[str, ...], splits: int) -> None:
        self.problem = trial.problem
        self.case = _on_cpu(trial.problem, trial.inputs, splits)
        self._outputs = [
            _Output(name, *(x.to("cpu", torch.float64) for x in tensors), trial.problem.dtype)
            for name, *tensors in zip(
                OUTPUTS, trial.got, trial.want, trial.judgement.bound, trial.judgement.terms,
                strict=True,
            )
            if name in outputs and tensors[0] is not None
        ]  # fmt: skip
        self.outputs = tuple(x.name for x in self._outputs)
        self.wrong_outputs = tuple(x.name for x in self._outputs if x.wrong)
        self.wrong = sum(x.wrong for x in self._outputs)
        self._form: tuple[Named, int, int, int] | None = None
        self._made: dict[str, Made] = {}
        self._forwards: dict[bool, Forward | None] = {}
        self._gradients: dict[tuple[str, bool, bool], bool] = {}

    def agrees(self, result: Computed) -> bool:
        """Return whether every element of its outputs agrees with a result."""
        return all(x.agrees(*_member(result, x.name)) for x in self._outputs)

    def lost_in(self, result: Computed | None) -> bool:
        """Return whether an output that is wrong has nothing left in a result."""
        values = [] if result is None else [_member(result, x)[0] for x in self.wrong_outputs]
        return not all(bool((~x.isinf() & (x != 0)).any()) for x in values)

    def fits(self, variant: Variant) -> bool | None:
        """Return whether the subject agrees with a variant; None if that changes nothing."""
        if variant.named.after is not None:
            result = variant(self.case)
            return None if result is None else self.agrees(result)
        form = variant.named, variant.form, variant.block_m, variant.block_n
        if form != self._form:
            # Variants that differ in the place alone follow each other.
            self._form, self._made, self._forwards, self._gradients = form, {}, {}, {}
        passes = variant.passes(self.case, self._made)
        if passes is None:
            return None
        if not variant.reaches.issuperset(self.wrong_outputs):
            return False
        # The results of the forward rule most variants out.
        faulty = "forward" in passes
        if faulty not in self._forwards:
            self._forwards[faulty] = self._agreeing(forward_of(self.case, passes))
        forward = self._forwards[faulty]
        if forward is None:
            return False
        read = forward if variant.reads else self.case.forward
        return all(self._gradients_agree(x, passes.get(x), read) for x in ("dq", "dkdv"))

    def _gradients_agree(self, name: str, changed: Pass | None, read: Forward) -> bool:
        """Return whether the subject agrees with the gradients of a pass of the last form."""
        key = name, changed is None, read is self.case.forward
        if key not in self._gradients:
            found = gradients_of(self.case, name, changed, read)
            self._gradients[key] = all(
                x.agrees(*found[x.name]) for x in self._outputs if x.name in found
            )
        return self._gradients[key]

    def _agreeing(self, forward: Forward) -> Forward | None:
        """Return the results of a forward if the subject agrees with them."""
        found = {"out": (forward.out, forward.out_terms), "lse": (forward.lse, forward.lse_terms)}
        agrees = all(x.agrees(*found[x.name]) for x in self._outputs if x.name in found)
        return forward if agrees else None

    def factors(self) -> dict[str, float]:
        """Return the factor of each wrong output that fits best."""
        return {x.name: x.factor() for x in self._outputs if x.wrong}


def _on_cpu(problem: Problem, inputs: Inputs, splits: int) -> Case:
    """Return a problem with its tensors on the CPU.

    A faulty result takes hundreds of operations on small tensors. On a GPU that other processes
    share, each waits for its turn.
    """
    tensors: Any = (x if x is None else x.cpu() for x in inputs)
    return Case(dataclasses.replace(problem, device="cpu"), Inputs(*tensors), splits)


def _member(result: Computed, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    return getattr(result.values, name), getattr(result.terms, name)


class _Output:
    """An output of the subject beside the right one and its bound."""

    def __init__(
        self,
        name: str,
        got: torch.Tensor,
        want: torch.Tensor,
        bound: torch.Tensor,
        terms: torch.Tensor,
        dtype: str,
    ) -> None:
        self.name = name
        self._got, self._want, self._bound = got, want, bound
        self._bad = ~_near(got, want, bound)
        self.wrong = int(self._bad.sum())
        stored = TORCH_DTYPES[dtype]
        if name == "lse" and dtype != "fp64":
            stored = torch.float32
        self._info = torch.finfo(stored)
        relative = torch.where(terms > 0, bound / terms, 0.0)
        peak = float(relative.amax()) if relative.numel() else 0.0
        # Where the right result is exact, all terms of the faulty one err.
        relative = torch.where(
            (terms > 0) & (bound > 0), relative, _OF_EXACT * max(peak, self._info.eps)
        )
        self._relative = relative

    def agrees(self, value: torch.Tensor, terms: torch.Tensor) -> bool:
        """Return whether all elements agree with a value, and the wrong ones better than before."""
        value = torch.where(value.abs() > self._info.max, math.inf * value.sign(), value)
        least = self._info.smallest_normal * self._info.eps
        allowed = torch.maximum(self._bound, self._relative * terms) + least
        if not bool(_near(self._got, value, allowed).all()):
            return False
        size = self._bound.clamp(min=least)
        before = ((self._got - self._want) / size).square()
        after = ((self._got - value) / size).square()
        counted = self._bad & before.isfinite() & after.isfinite()
        return bool(after[counted].sum() <= _LEFT * before[counted].sum())

    def factor(self) -> float:
        both = self._got.isfinite() & self._want.isfinite()
        got, want = self._got[both], self._want[both]
        return float((got * want).sum() / want.square().sum())


def _near(got: torch.Tensor, want: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
    """Return where two values agree: within a bound, or as the same infinity or NaN."""
    return ((got - want).abs() <= allowed) | (got == want) | (got.isnan() & want.isnan())


@dataclass(frozen=True)
class _Constant:
    """Outputs multiplied by constants."""

    factors: dict[str, float]
    read: bool
    named: Named

    def __call__(self, case: Case) -> Computed:
        result = case.right
        if self.read:
            forward: Pass = case.plain("forward")
            forward.factor = {"out": self.factors["out"]}
            result = computed(case, {"forward": forward})
        changed = {
            name: getattr(result.values, name) * factor
            for name, factor in self.factors.items()
            if not self.read or name != "out"
        }
        return Computed(result.values._replace(**changed), result.terms)

    @property
    def place(self) -> str:
        return ", ".join(self.factors)

    @property
    def tile(self) -> str:
        return ""


def _constants(seen: _Seen) -> Iterator[_Constant]:
    """Yield the factors that fit the wrong outputs best."""
    factors = {name: x for name, x in seen.factors().items() if math.isfinite(x)}
    if len(factors) < len(seen.factors()):
        return
    yield _constant(factors, read=False)
    if "out" in factors:
        yield _constant({"out": factors["out"]}, read=True)
        # The derivative of a multiple of out, some of whose gradients are 0.
        yield _constant(dict.fromkeys(("out", "dq", "dk", "dv"), factors["out"]), read=False)


def _constant(factors: dict[str, float], *, read: bool) -> _Constant:
    by: dict[str, list[str]] = {}
    for name, x in factors.items():
        by.setdefault(f"{x:.6g}", []).append(name)
    says = ", ".join(f"{', '.join(names)} were multiplied by {x}" for x, names in by.items())
    return _Constant(factors, read, Named("constant factor", says))


@dataclass(frozen=True)
class _Survivor:
    """A fault that the subject has agreed with so far."""

    candidate: Variant | _Constant
    named: Named
    elements: int = 0
    problems: int = 0
    # Whether a problem with wrong elements has more than one of the tiles that the fault implies,
    # and the fault leaves some of it.
    spans: bool = False

    @property
    def name(self) -> str:
        return self.named.name

    def agreeing(self, seen: _Seen, result: Computed | None) -> _Survivor:
        """Return the survivor with the evidence of one more problem."""
        return dataclasses.replace(
            self,
            elements=self.elements + seen.wrong,
            problems=self.problems + 1,
            spans=self.spans
            or (seen.wrong > 0 and self._spans(seen.problem) and not seen.lost_in(result)),
        )

    def _spans(self, problem: Problem) -> bool:
        if not isinstance(self.candidate, Variant):
            return True
        # Padding is no part of a tile that a kernel visits.
        lengths = problem.mask.lengths(problem.B, problem.M, problem.N)
        rows, keys = (max(x, default=0) for x in lengths)
        block_m, block_n = self.candidate.block_m, self.candidate.block_n
        return keys > block_n if block_n else rows > block_m

    def explanation(self) -> Explanation:
        return Explanation(
            name=self.name,
            says=self.named.says,
            place=self.candidate.place,
            tile=self.candidate.tile,
            on_record=self.named.on_record,
            elements=self.elements,
            problems=self.problems,
        )


def _wide(survivors: list[_Survivor], problem: Problem) -> Problem:
    """Return a problem with several tiles of each survivor, and other values."""
    tiles = [x.candidate for x in survivors if isinstance(x.candidate, Variant)]
    more = max(max(x.block_m, x.block_n) for x in tiles) + 7
    return _replaced(
        problem, M=problem.M + more, N=problem.N + more, seed=problem.all_seeds[0] + 5, seeds=()
    )


def _first_of_each(survivors: list[_Survivor]) -> list[_Survivor]:
    """Return one survivor of each name; a constant factor only if no other has survived."""
    first = {x.name: x for x in reversed(survivors)}
    order = [first[name] for name in dict.fromkeys(x.name for x in survivors)]
    named = [x for x in order if isinstance(x.candidate, Variant)]
    return named or order


def _differ(
    survivors: list[_Survivor], problem: Problem, outputs: tuple[str, ...], splits: int
) -> bool:
    """Return whether survivors of two names give different outputs on a problem."""
    problem = dataclasses.replace(problem, device="cpu")
    case = Case(problem, make(problem), splits)
    results = [x.candidate(case) or case.right for x in _first_of_each(survivors)]
    return any(_apart(results[0], x, name) for x in results[1:] for name in outputs)


def _apart(one: Computed, other: Computed, name: str) -> bool:
    (a, terms), (b, others) = _member(one, name), _member(other, name)
    return not bool(_near(a, b, 2.0**-6 * (terms + others)).all())


def _replaced(problem: Problem, **fields: Any) -> Problem:
    """Return a problem with other fields, whose sequences grow with its tensors.

    A sequence that is as short as before shows nothing of a larger size. An empty one stays empty.

    Raises:
        ValueError: The problem does not take the fields.
    """
    mask, B = problem.mask, fields.get("B", problem.B)
    for axis, name in (("M", "seqlens_q"), ("N", "seqlens_k")):
        lengths, size = getattr(mask, name), getattr(problem, axis)
        if lengths is not None and "mask" not in fields:
            new = fields.get(axis, size)
            grown = [x and max(1, min(x + new - size, new)) for x in lengths]
            grown += [new] * (B - len(grown))
            mask = dataclasses.replace(mask, **{name: tuple(grown)})
    return dataclasses.replace(problem, **{"mask": mask, **fields})


def _changed(problem: Problem, *changes: dict[str, Any]) -> Iterator[Problem]:
    """Yield a problem with each set of changes that it takes."""
    for change in changes:
        try:
            yield _replaced(problem, **change)
        except ValueError:
            continue


def _grown(problem: Problem) -> Iterator[Problem]:
    """Yield problems with the same features, longer sequences, and other values."""
    M, N, seed = problem.M, problem.N, problem.all_seeds[0]
    if problem.seeds:
        return
    yield from _changed(problem, {"seed": seed + 1}, {"M": M + 7, "N": N + 7, "seed": seed + 2})
    if problem.B * problem.H * max(M, N) ** 2 <= _GROWN:
        yield from _changed(problem, {"M": M + 39, "N": N + 39, "seed": seed + 3})


def _resized(problem: Problem) -> Iterator[Problem]:
    """Yield problems with other sizes, on which faults that fit by chance do not.

    They have no rows without a key, which another fault of the subject may spoil. Head dims that
    are powers of two leave no padding in a tile, and another entry of the batch and other heads
    show a wrong address of one of them.
    """
    M, N, seed = problem.M, problem.N, problem.all_seeds[0]
    size = max(M, N) + 5
    if not problem.seeds:
        yield from _changed(
            problem,
            {"M": size, "N": size, "seed": seed + 6},
            {"N": size + 13, "D": 24, "Dv": 40, "seed": seed + 7},
            {"N": size + 37, "seed": seed + 8, "sm_scale": 0.7 * problem.scale},
            {"N": size + 3, "D": 16, "Dv": 16, "seed": seed + 9},
            {"N": size + 9, "B": problem.B + 1, "seed": seed + 10},
            {"N": size + 9, "H": 2 * problem.H, "Hk": 2 * problem.Hk, "seed": seed + 11},
        )


def _plainer(problem: Problem) -> Iterator[Problem]:
    """Yield the problem without score modifications, if it has some.

    A fault of something else shows without them too.
    """
    if (problem.softcap, problem.alibi, problem.bias, problem.sinks) != _UNMODIFIED:
        softcap, alibi, bias, sinks = _UNMODIFIED
        yield from _changed(
            problem, {"softcap": softcap, "alibi": alibi, "bias": bias, "sinks": sinks}
        )


def _windowed(problem: Problem) -> Iterator[Problem]:
    """Yield problems with windows that leave no row without a key, if the mask has an edge.

    In the first, all pairs at one distance from the top left lie outside of the window. In the
    second, there are more rows than keys.
    """
    mask, size = problem.mask, max(problem.M, problem.N) + 5
    if mask.window_left is None and mask.right is None:
        return
    for M, N, left, right in ((size, size + 29, 5, 3), (size + 29, size, 5, 33)):
        plain = dataclasses.replace(mask, causal=False, window_left=left, window_right=right,
                                    seqlens_q=None, seqlens_k=None)  # fmt: skip
        yield from _changed(
            problem, {"M": M, "N": N, "mask": plain, "seed": problem.all_seeds[0] + 12, "seeds": ()}
        )


def _featured(problem: Problem) -> Iterator[Problem]:
    """Yield problems with one more feature each, on which the results of faults may differ."""
    M, N = problem.M + 19, problem.N + 19
    grown = _replaced(problem, M=M, N=N, seed=problem.all_seeds[0] + 4, seeds=())
    mask = grown.mask
    right = mask.right is not None
    yield from _changed(
        grown,
        {"N": N + 13},
        {"M": M + 13},
        {"sm_scale": 0.7 * problem.scale},
        {"D": 24, "Dv": 40},
        {"D": problem.D // 2 + 1},
        {"H": 4 * problem.Hk, "Hk": 2 * problem.Hk},
        {"H": 6 * problem.Hk, "Hk": 2 * problem.Hk},
        {"inputs": "rising_max"},
        {"inputs": "times8"},
        {"M": M + 128, "N": N + 128},
        {"N": 256},
        {"dlse": "normal"},
        {"mask": dataclasses.replace(mask, window_left=5)},
        {"mask": dataclasses.replace(mask, causal=False, window_right=3 if right else 0)},
        {"mask": Mask(), "N": N + 13},
        {"mask": Mask(causal=True), "M": M + 13},
        {"mask": Mask(causal=True), "N": N + 13},
        {"mask": Mask(causal=True, window_left=5), "N": N + 13},
        {"mask": Mask(window_left=3, window_right=2), "N": N + 13},
        {"mask": Mask(seqlens_k=(N - 5,) * problem.B), "dirty": "noise"},
        {"B": 2, "H": 2, "Hk": 2, "mask": Mask(seqlens_q=(M, M - 7), seqlens_k=(N - 9, N))},
        {"softcap": 2.0},
        {"alibi": "normal", "N": N + 13},
        {"bias": "normal/bhmn"},
        {"sinks": "ordinary"},
    )  # fmt: skip
