"""The weights of key tiles in out, by their errors over all rows.

The error of a kernel that weights a tile of keys wrongly points along the tile's part of out,
sum_n p v, in every row. Sums over elements that are weighted by out miss it where the tile is one
of many.
"""

from __future__ import annotations

import torch

from fa_verify.oracles.bounds.constants import constants
from fa_verify.oracles.bounds.key_tiles import along_parts, parts
from fa_verify.oracles.bounds.spread import DEVIATIONS
from fa_verify.oracles.problem import Problem
from fa_verify.properties.comparison.compare import Finding
from fa_verify.properties.execution.trial import Trial

__all__ = ["TILE", "applies", "key_tiles"]

TILE = 64  # keys of a tile
# The largest weight of a row that counts. The rounding of out is not independent of the small
# weights beside a larger one.
_LARGEST = 0.5


def applies(problem: Problem) -> bool:
    """Return whether a problem has several key tiles, and rows enough to show a wrong weight."""
    return problem.N > TILE and problem.B * problem.H * problem.M > DEVIATIONS**2


def key_tiles(
    trial: Trial,
    error: torch.Tensor,
    variance: torch.Tensor,
    one_sided: torch.Tensor,
    shapes: torch.Tensor,
) -> list[Finding]:
    """No key tile has a wrong weight in out, in any head or in all of them.

    With sigma**2 the variance of an element, row m has the sum T_m of error x part / sigma**2,
    which a wrong weight moves to one side. The roundings of rows are independent and symmetric. The
    sum of such T_m exceeds x sqrt(sum of T_m**2) with a probability of at most exp(-x**2 / 2)
    on each side, whatever their variances are. x is DEVIATIONS, so that only problems of more than
    x**2 rows can show a fault.

    Rounding to nearest drifts by up to u_in of a spread, because larger values are rarer.
    Systematic errors add to the limit.

    Args:
        trial: The trial.
        error: Errors of out, (B, H, M, Dv).
        variance: Their variances.
        one_sided: Their largest one-sided parts, along the sign of out.
        shapes: (shapes, B, H, M, Dv): errors in known directions.

    Source: Efron 1969, Student's t-test under symmetry conditions, JASA 64: self-normalised sums.
    """
    problem, (q, k, v) = trial.problem, trial.inputs[:3]
    if not applies(problem):
        return []
    weight = torch.where(variance > 0, 1 / variance, 0.0)
    lse, mask = trial.want.lse, problem.mask
    signed, largest = along_parts(
        [x * weight for x in (error, *shapes)], q, k, v, lse=lse, mask=mask,
        sm_scale=problem.scale, tile=TILE,
    )  # fmt: skip
    counted = (largest <= _LARGEST).unsqueeze(3)
    weight = weight * counted
    u_in = constants(problem.dtype, trial.subject.numerics_of(problem)).u_in
    count = problem.B * problem.H
    found: list[Finding] = []
    for heads in ((count, problem.M), (1, count * problem.M)):
        of_heads = signed.masked_fill(~counted, 0.0).reshape(len(signed), *heads, -1)
        rows, of_shapes = of_heads[0], of_heads[1:]
        limit = DEVIATIONS * (_root(rows) + _root(of_shapes).sum(0))
        limit += 2 * u_in * rows.abs().sum(-2) + of_shapes.sum(-2).abs().sum(0)
        total = rows.sum(-2)
        ratio = torch.where(total.abs() > limit, total.abs() / limit, 0.0)  # elements find NaN
        if not bool(ratio.any()):
            continue
        head, tile = (int(x) for x in torch.unravel_index(ratio.argmax(), ratio.shape))
        keys = slice(tile * TILE, min(tile * TILE + TILE, problem.N))
        part = parts(keys, q, k, v, lse=lse, mask=mask, sm_scale=problem.scale)
        sizes, lost = (
            (x * weight).sum(3).reshape(*heads)[head]
            for x in (part.square(), part.abs() * one_sided)
        )
        size, largest_sum = float(sizes.sum()), float(limit[head, tile] + lost.sum())
        largest_sum += DEVIATIONS * float(lost.square().sum().sqrt())
        factor = float(total[head, tile]) / size
        where = "all heads" if len(total) == 1 else f"b={head // problem.H} h={head % problem.H}"
        found.append(Finding(
            guarantee="limit of key tiles",
            claim=f"weights keys too {'much' if factor > 0 else 'little'}, by a factor",
            subject=trial.subject.name, output="out",
            where=f"{where}, n={keys.start}..{keys.stop - 1}", got=1 + factor, want=1.0,
            bound=largest_sum / size, bad=int((ratio > 0).sum()), total=ratio.numel(),
            places="compared with the part of out that the keys make up",
            problem=problem, unit=f"tiles of {TILE} keys",
        ))  # fmt: skip
    beyond = [x for x in found if abs(x.got - 1) > x.bound]
    return [max(beyond, key=lambda x: abs(x.got - 1) / x.bound)] if beyond else []


def _root(x: torch.Tensor) -> torch.Tensor:
    """Return the root of the sum of squares over rows."""
    return x.square().sum(-2).sqrt()
