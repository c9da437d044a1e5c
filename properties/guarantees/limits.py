"""Every element, and sums over rows, tiles and outputs, against the spread of their roundings.

The bound G1 adds the largest error of every rounding. Independent roundings add up to far less in a
sum of many terms.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import torch

from fa_verify.oracles.bounds.replay import Format, power_of_two, stored_format
from fa_verify.oracles.bounds.spread import DEVIATIONS, FEW, Spread, Weights, spreads
from fa_verify.oracles.bounds.variance import rounding
from fa_verify.oracles.guarantee import LIMIT
from fa_verify.oracles.outputs import Numerics
from fa_verify.oracles.problem import Problem
from fa_verify.properties.guarantees.backward import forward_read
from fa_verify.properties.guarantees.compare import Finding, largest_ratios, ratios
from fa_verify.properties.guarantees.independence import Agreement
from fa_verify.properties.inputs.alibi_families import NO_ALIBI
from fa_verify.properties.inputs.bias_families import NO_BIAS
from fa_verify.properties.inputs.sink_families import NO_SINKS
from fa_verify.properties.kernels.subject import Subject
from fa_verify.properties.running.trial import AttentionTrial

__all__ = [
    "FAMILIES", "TILE", "applies", "judged_elements", "limits", "outside", "spreads_of",
    "unmodelled", "without_gradients",
]  # fmt: skip

# Families of continuous scores and values that differ from pair to pair, so that no roundings
# agree. Rows of needles agree with each other. With values of one sign, the elements of out are
# nearly equal and share their last rounding.
FAMILIES = frozenset({
    "normal", "times8", "times40", "outliers", "massive_channel", "lse_low_90", "lse_low_130",
    "lse_low_6e3", "lse_low_1e5", "lse_high_6e4", "lse_high_1e5",
})  # fmt: skip
# Smallest standard deviation of N(0, 1) scores: weights that are nearly equal share their rounding.
_FLATTEST = 0.1
_FEWEST_COLUMNS = 8
# Columns whose values differ by less than this many spacings may round alike in all rows.
_STEADY = 2.0
TILE = 64  # rows or keys of a tile
_U = 2.0**-24  # unit roundoff of float32
# Outputs whose rows share no source of errors.
_ALONE = ("out", "dq")
_OF_SUMS = f"{LIMIT.key} of sums"
_MEANING = "the errors are weighted by the true values"
_MEAN = "the mean error of lse"
_OUTSIDE = "leaves the limit of independent roundings{}"


def applies(problem: Problem, numerics: Numerics) -> bool:
    """Return whether the roundings of a problem are independent, and all of them are modelled.

    The values must be continuous and differ between heads, the weights must not be nearly equal,
    and the kernel must round P and dS once or not at all.
    """
    return (
        not unmodelled(problem, numerics)
        and problem.inputs in FAMILIES
        and problem.dout == "normal"
        and "expanded" not in problem.layouts
        and problem.scale * problem.D**0.5 >= _FLATTEST
        and problem.alibi == NO_ALIBI
        and problem.bias == NO_BIAS
        and problem.sinks == NO_SINKS
    )


def unmodelled(problem: Problem, numerics: Numerics) -> str:
    """Return why not all roundings of a problem are modelled, whatever its data; or nothing."""
    if problem.dtype == "fp64":
        return "the inputs are float64"
    if min(problem.D, problem.Dv) < _FEWEST_COLUMNS:
        return f"rows have fewer than {_FEWEST_COLUMNS} columns"
    if problem.softcap is not None:
        return "a softcap modifies the scores"
    if numerics.dots == "tf32" and numerics.tf32_conversion == "unknown":
        return 'tf32_conversion is "unknown"'
    if numerics.prescales != "none":
        return f"prescales is {numerics.prescales!r}"
    if numerics.ds_roundings != 1:
        return f"ds_roundings is {numerics.ds_roundings}"
    if numerics.ds_from != "unrounded":
        return f"ds_from is {numerics.ds_from!r}"
    return "" if problem.B * problem.M * problem.N else "the call has no pair"


def judged_elements(subject: Subject, problem: Problem, outputs: Collection[str]) -> int:
    """Return the number of elements that ``limits`` judges if the forward lies within its bound.

    Args:
        subject: The subject.
        problem: The problem.
        outputs: Names of the outputs that the subject returned.
    """
    numerics = subject.numerics_of(problem)
    if not applies(problem, numerics):
        return 0
    names = {"out", "lse"}
    if "lse" in outputs and not without_gradients(subject, problem, numerics):
        names |= {"dq", "dk", "dv"}
    return sum(problem.elements[name] for name in names & {*outputs})


def without_gradients(subject: Subject, problem: Problem, numerics: Numerics) -> str:
    """Return why gradients are not judged given a forward that returns lse, or nothing."""
    if not subject.backward:
        return "there are none"
    if subject.returns_lse is False:
        return "lse is not returned"
    if numerics.backward_reads != ("out", "lse"):
        return 'backward_reads=("out", "lse") is not declared'
    if numerics.rounded_sums:
        return f"partial sums of {' and '.join(numerics.rounded_sums)} are rounded"
    if numerics.group_sum == "dtype" and problem.H > problem.Hk:
        return "heads of a group are rounded before they are added"
    return ""


def spreads_of(trial: AttentionTrial, agreement: Agreement | None = None) -> dict[str, Spread]:
    """Return the errors of the outputs that are judged; empty if none is.

    The gradients are judged if the backward reads out and lse as they were returned, and the
    forward lies within its bound.

    Args:
        trial: The run.
        agreement: Errors that may agree, as the data says; None asks the problem's families.
    """
    problem, got = trial.problem, trial.got
    numerics = trial.subject.numerics_of(problem)
    judged = not unmodelled(problem, numerics) if agreement else applies(problem, numerics)
    if not judged or 0 in (problem.B, problem.M, problem.N):
        return {}
    given = None
    if not without_gradients(trial.subject, problem, numerics):
        given = forward_read(trial)
    of_outputs = (trial.want.out, trial.want.dq, trial.want.dk, trial.want.dv)
    found = spreads(
        *trial.inputs[:5], given=given, weights=Weights(*(_weight(x) for x in of_outputs)),
        mask=problem.mask, sm_scale=problem.scale, in_dtype=problem.dtype, numerics=numerics,
        copies=None if agreement is None else agreement.copies,
    )  # fmt: skip
    return {name: spread for name, spread in found.items() if getattr(got, name) is not None}


def _weight(want: torch.Tensor) -> torch.Tensor:
    """Return true values as weights: 0 below the smallest normal float32 number."""
    return want.masked_fill(want.abs() < 2.0**-126, 0.0)


def limits(trial: AttentionTrial) -> list[Finding]:
    """No element, and no sum over a row, a tile or an output, errs by more than its roundings do.

    A sum weights the errors by the true values. Divided by the sum of their squares, it is the
    factor by which an output is too large.
    """
    return outside(trial, spreads_of(trial))


def outside(
    trial: AttentionTrial, spreads: dict[str, Spread], agreement: Agreement | None = None
) -> list[Finding]:
    """Return the findings of ``limits``, given the spreads of the outputs to judge.

    Args:
        trial: The run.
        spreads: The errors, of ``spreads_of``.
        agreement: Errors that may agree; None if none do, on data of ``FAMILIES``.
    """
    found = _elements(trial, spreads, agreement)
    # In float32, an exponential or a reciprocal that errs to one side is as large as the roundings.
    # The kernels of these data are unknown, and SDPA's memory-efficient backend has such an error.
    if agreement is None or trial.problem.dtype != "fp32":
        found += _sums(trial, spreads, agreement)
    return found


def _elements(
    trial: AttentionTrial, spreads: dict[str, Spread], agreement: Agreement | None
) -> list[Finding]:
    """Check every element."""
    judged = []
    for name, spread in spreads.items():
        value, limit, stored = spread.value, spread.limit, _stored(trial, name)
        if stored is None:
            limit = torch.add(limit, value.abs() + limit, alpha=_U)
        else:
            value, limit = stored.between(value, limit)
        got = _got(trial, name)
        if agreement is not None:
            limit = limit.masked_fill(~agreement.judges(name, limit.shape[1]), torch.inf)
        if name == "lse":
            got, value, limit = (x.squeeze(3) for x in (got, value, limit))
        judged.append((name, (got, value, limit)))
    largest = largest_ratios([compared for _, compared in judged])
    findings = []
    for (name, (got, value, limit)), (peak,) in zip(judged, largest, strict=True):
        if peak > 1:
            ratio = ratios(got, value, limit)
            findings.append(
                Finding.at(
                    ratio > 1, ratio, guarantee=LIMIT,
                    claim=_OUTSIDE.format(_given(name)), subject=trial.subject,
                    problem=trial.problem, output=name, got=got, want=value, bound=limit,
                )
            )  # fmt: skip
    return findings


def _stored(trial: AttentionTrial, name: str) -> Format | None:
    """Return the 16-bit format of an output; None if it is float32."""
    return None if name == "lse" else stored_format(trial.problem.dtype)


def _got(trial: AttentionTrial, name: str) -> torch.Tensor:
    """Return an output; lse with a last axis, and 0 in rows without a visible key."""
    got: torch.Tensor = getattr(trial.got, name)
    if name != "lse":
        return got
    return torch.where(trial.want.lse == -torch.inf, 0.0, got).unsqueeze(3)


def _sums(
    trial: AttentionTrial, spreads: dict[str, Spread], agreement: Agreement | None
) -> list[Finding]:
    """Check the sums; one finding for each output."""
    if not spreads:
        return []
    numbers, of_outputs = _factors([_unit_sums(trial, *x, agreement) for x in spreads.items()])
    findings = []
    for name, factors, (bad, samples, squares) in zip(
        spreads, of_outputs, _judged(numbers, of_outputs), strict=True
    ):
        if bad:
            of_units = (_worst(trial, name, unit, factors) for unit in factors.shapes)
            found = [x for x in of_units if x is not None]
            # The unit that the fault covers exceeds its limit the most.
            findings.append(max(found, key=lambda x: abs(x.got - x.want) / max(x.bound, 1e-300)))
        elif name in _ALONE and (agreement is None or agreement.copies.none):
            findings += _mean_square(trial, name, int(samples), squares)
    return findings


def _mean_square(trial: AttentionTrial, name: str, samples: int, squares: float) -> list[Finding]:
    """Check the mean square of the rows' factors, in units of their standard deviations.

    Faults that enlarge some rows and shrink others move no other sum.
    """
    mean = squares / max(samples, 1)
    share = DEVIATIONS**2 / 2 / max(samples, 1)
    limit = 1 + 2 * share**0.5 + 2 * share  # Laurent and Massart 2000, lemma 1
    if not mean > limit:  # NaN is found in rows
        return []
    claim = f"has rows that are too large and rows that are too small{_given(name)}"
    return [Finding(
        guarantee=_OF_SUMS, claim=claim, subject=trial.subject.name, output=name,
        where=f"mean over {samples} rows", got=mean, want=1.0, bound=limit - 1, bad=0,
        total=samples, places="the mean square of a row's factor in units of its spread",
        problem=trial.problem, unit="rows",
    )]  # fmt: skip


def _given(name: str) -> str:
    return "" if name in ("out", "lse") else ", given out and lse as returned"


def _errors(
    trial: AttentionTrial, name: str, spread: Spread, agreement: Agreement | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the errors, the variance of the last rounding, and the largest one-sided error."""
    stored, got = _stored(trial, name), _got(trial, name).to(torch.float64)
    if stored is None:
        return got - spread.value, spread.value.square() * _U**2, spread.along
    # The last rounding is known but near a tie, or uniform.
    uniform = rounding(spread.value, stored.u, stored.smallest / 2)
    middle, half = stored.between(spread.value, spread.limit)
    squared = half.square()
    known = squared <= 3 * uniform
    error = got - torch.where(known | spread.peaked, middle, spread.value)
    systematic = spread.peaked
    if agreement is not None and spread.value.shape[2] > FEW:
        value = spread.value
        spacing = power_of_two(value.square().mean(2, keepdim=True).sqrt()).mul_(2 * stored.u)
        systematic = systematic | (value.std(2, keepdim=True) < _STEADY * spacing)
        half = torch.where(known, half, (3 * uniform).sqrt())
    last = torch.where(known, squared, uniform).masked_fill_(systematic, 0.0)
    along = spread.along + half.masked_fill(~systematic, 0.0)
    if agreement is not None:
        # Rounding to nearest drifts, because larger values are rarer than smaller ones.
        along = along + stored.u**2 * (1 + (name == "out")) * spread.value.abs()
    return error, last, along


class _UnitSums(NamedTuple):
    """Weighted sums over an output, its tiles and its rows.

    Args:
        sums: (5, units): of errors, of squared weights, of variances, of the deviations that all
            elements of a unit share, and of systematic errors.
        shapes: The kinds of units, "output", "tile" and "row", and their numbers (B, heads, n).
    """

    sums: torch.Tensor
    shapes: dict[str, torch.Size]


class _Factors(NamedTuple):
    """Factors of an output, of its tiles and of its rows, minus 1.

    Args:
        numbers: (3, units): the factors, the standard deviations of their random errors, which are
            0 where a unit has no factor, and their largest systematic errors.
        shapes: As in ``_UnitSums``.
    """

    numbers: torch.Tensor
    shapes: dict[str, torch.Size]

    def of(self, unit: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the factors of a kind of units, their spreads and their systematic errors."""
        place, sizes = [*self.shapes].index(unit), [shape.numel() for shape in self.shapes.values()]
        factor, spread, systematic = self.numbers.split(sizes, 1)[place].view(3, *self.shapes[unit])
        return factor, spread, systematic


def _unit_sums(
    trial: AttentionTrial, name: str, spread: Spread, agreement: Agreement | None
) -> _UnitSums:
    """Return the sums of an output; those of lse have the weight 1."""
    if name == "lse":
        want = (trial.want.lse != -torch.inf).double().unsqueeze(3)
    else:
        want = _weight(getattr(trial.want, name))
    error, last, along = _errors(trial, name, spread, agreement)
    squares, alone = want.square(), spread.alone + spread.across.square() + last
    if agreement is not None and name in agreement.columns:
        alone = alone * agreement.columns[name]
    # (terms, B, heads, rows): sums over the columns, signed for errors in known directions.
    sums = torch.stack([
        (want * error).sum(3), squares.sum(3), spread.of_sums + (squares * alone).sum(3),
        spread.shared.sqrt(), (want.abs() * along).sum(3), *(want * spread.shapes).sum(4),
    ])  # fmt: skip
    of_many = sums
    if agreement is not None:
        sums = sums.masked_fill(~agreement.judges(name, want.shape[1]).squeeze(3), 0.0)
        of_many = sums.clone()
        of_many[2] *= spread.copies.squeeze(3)
    whole = of_many.sum((1, 2, 3), keepdim=True)
    short = -sums.shape[3] % TILE
    tiles = torch.nn.functional.pad(of_many, (0, short)).unflatten(3, (-1, TILE)).sum(4)
    units = {"output": whole, "tile": tiles, "row": sums}
    of = torch.cat([x.flatten(1) for x in units.values()], 1)
    of[4] += of[5:].abs().sum(0)
    return _UnitSums(of[:5], {unit: x.shape[1:] for unit, x in units.items()})


def _factors(of_outputs: list[_UnitSums]) -> tuple[torch.Tensor, list[_Factors]]:
    """Return the factors of all outputs, and those of each; those of lse are mean errors."""
    found, weight, variance, shared, along = torch.cat([x.sums for x in of_outputs], 1)
    random = (variance + shared.square()).sqrt()
    # A row without a visible pair is exactly 0.
    weight = weight.masked_fill(weight == 0, torch.inf)
    numbers = torch.stack([found, random, along]) / weight
    parts = numbers.split([x.sums.shape[1] for x in of_outputs], 1)
    of_each = [_Factors(part, x.shapes) for part, x in zip(parts, of_outputs, strict=True)]
    return numbers, of_each


def _judged(numbers: torch.Tensor, of_outputs: list[_Factors]) -> list[tuple[float, float, float]]:
    """Return the number of bad factors, that of rows that count, and the sum of their squares.

    All outputs are judged at once, and a GPU is waited for once.
    """
    factor, spread, systematic = numbers
    bad = _limits(factor, spread, systematic)[1]
    beyond = (factor.abs() - systematic).clamp_(min=0).div_(spread).masked_fill_(spread == 0, 0.0)
    sizes = []
    for x in of_outputs:
        rows = x.shapes["row"].numel()  # the last units of an output
        sizes += [x.numbers.shape[1] - rows, rows]
    parts = torch.stack([bad.double(), (spread > 0).double(), beyond.square_()]).split(sizes, 1)
    totals = torch.stack([x.sum(1) for x in parts]).tolist()
    return [
        (others[0] + of_rows[0], of_rows[1], of_rows[2])
        for others, of_rows in zip(totals[::2], totals[1::2], strict=True)
    ]


def _limits(
    factor: torch.Tensor, spread: torch.Tensor, systematic: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the limits of factors, and where factors exceed them; NaN never lies within."""
    limit = torch.add(systematic, spread, alpha=DEVIATIONS).clamp_(min=1e-300)
    return limit, ~(factor.abs() <= limit)


def _worst(trial: AttentionTrial, name: str, unit: str, factors: _Factors) -> Finding | None:
    """Return a finding at the factor of a kind of units that is furthest beyond its limit."""
    factor, spread, systematic = factors.of(unit)
    limit, bad = _limits(factor, spread, systematic)
    if not bool(bad.any()):
        return None
    worst = (factor.abs() / limit).where(bad, 0.0).argmax()  # NaN, if there is one
    at = tuple(int(x) for x in torch.unravel_index(worst, bad.shape))
    b, h, place = at
    axis, upper = ("n", "keys") if name in ("dk", "dv") else ("m", "rows")
    rows = getattr(trial.want, name).shape[2]
    where = {
        "output": "all elements",
        "tile": f"b={b} h={h} {axis}={place * TILE}..{min(place * TILE + TILE, rows) - 1}",
        "row": f"b={b} h={h} {axis}={place}",
    }[unit]
    units = {"output": "outputs", "tile": f"tiles of {TILE} {upper}", "row": upper}[unit]
    size = float(factor[at])
    by, want, meaning = ("a factor", 1.0, _MEANING) if name != "lse" else ("a constant", 0.0, _MEAN)
    claim = f"is too {'large' if size > 0 else 'small'} by {by}{_given(name)}"
    return Finding(
        guarantee=_OF_SUMS, claim=claim, subject=trial.subject.name, output=name,
        where=where, got=want + size, want=want, bound=float(limit[at]), bad=int(bad.sum()),
        total=bad.numel(), places=meaning,
        problem=trial.problem, unit=units,
    )  # fmt: skip
