"""One element of out and its bound, term by term, for the page of the error bound.

``score_terms``, ``out_terms`` and ``lse_terms`` evaluate the terms as the page writes them, on the
numbers that ``oracles/bounds`` computes. ``sources`` computes the bounds of all outputs without the
constants of one kind of rounding. ``docs.tables`` writes the tables.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import torch

from fa_verify.oracles.bounds.backward import backward_error, read_of
from fa_verify.oracles.bounds.constants import Constants, constants
from fa_verify.oracles.bounds.error_model import chunks, finish_dq, finish_keys
from fa_verify.oracles.bounds.forward import Chunk, Forward, forward_error, softmax_additions
from fa_verify.oracles.outputs import OUTPUTS, Numerics, Outputs
from fa_verify.oracles.problem import Problem
from fa_verify.properties.inputs.tensors import make

__all__ = [
    "PROBLEM", "bounds", "lse_terms", "out_terms", "quantities", "row", "score_terms", "sources",
]  # fmt: skip

PROBLEM = Problem(N=128, D=64, Dv=64, dtype="bf16")
NUMERICS = Numerics()
# The element is out[0, 0, 0, COLUMN], and the score that of KEY.
COLUMN, KEY = 0, 0
# Kinds of roundings, and the constants of their errors.
SOURCES = {
    "casts of P and dS to bf16": ("u_p",),
    "results stored in bf16": ("u_in",),
    "arithmetic in fp32": ("u",),
    "exponentials and logarithm": ("u_exp", "u_log"),
    "underflow": ("eta_in", "eta_p", "eta_x", "eta_a", "ftz"),
}


class Row(NamedTuple):
    """The inputs of the row, the constants, and the numbers of the forward."""

    chunk: Chunk
    c: Constants
    forward: Forward


@cache
def row(c: Constants | None = None) -> Row:
    """Return the row under the constants of the problem, or under others."""
    c = c or constants(PROBLEM.dtype, NUMERICS)
    given = make(PROBLEM)
    options = {"mask": PROBLEM.mask, "apart": 1, "rows": None, "tile": NUMERICS.block_n}
    ((_, chunk),) = chunks(*given, **options)
    forward = forward_error(
        chunk, sm_scale=PROBLEM.scale, c=c, numerics=NUMERICS, exact_spread=True
    )
    return Row(chunk, c, forward)


def quantities() -> dict[str, float]:
    """Return the numbers of the row, its key and its element that the terms are made of."""
    _, c, forward = row()
    scores = forward.scores
    s, p, reach = (float(x[0, 0, KEY]) for x in (scores.s, scores.p, scores.reach))
    return {
        "$s$": s,
        r"$\mu$": float(scores.m[0, 0]),
        "$L$": float(scores.lse[0, 0]),
        "$p$": p,
        r"$\mathrm{out}$": float(forward.out[0, 0, COLUMN]),
        r"$\sum p\,\lvert v\rvert$": float(forward.out_terms[0, 0, COLUMN]),
        "$A_0$": PROBLEM.scale * reach,
        "$T$": float(scores.tiles[0, 0]),
        "$R$": float(scores.rescales[0, 0, 0]),
        "$u_{in}$": c.u_in,
        "$u$": c.u,
    }


def score_terms() -> dict[str, float]:
    """Return the terms of E of a key, which add up to it."""
    chunk, c, forward = row()
    scores = forward.scores
    s, reach = (float(x[0, 0, KEY]) for x in (scores.s, scores.reach))
    rescales = float(scores.rescales[0, 0, 0])
    return {
        r"$(a_D + 5u\,u_d)\,A_0$": (
            (c.short_dot(PROBLEM.D) + 5 * c.u * c.u_dot) * PROBLEM.scale * reach
        ),
        r"$5u\,\lvert s\rvert$": 5 * c.u * abs(s),
        r"$3u\,\lvert s - \mu\rvert$": 3 * c.u * abs(s - float(scores.m[0, 0])),
        r"$(1 + R)\,u_{exp}$": (1 + rescales) * c.u_exp,
        "subnormal operands": c.eta_dot * PROBLEM.scale * float(
            chunk.abs_q[0, 0].sum() + chunk.abs_k[0, KEY].sum()
        ),
    }  # fmt: skip


def out_terms() -> dict[str, float]:
    """Return the terms of the bound of the element of out, which add up to it."""
    chunk, c, forward = row()
    scores = forward.scores
    p, E, v = scores.p[0, 0], scores.error[0, 0], chunk.v[0, :, COLUMN]
    out, m, lse = forward.out[0, 0, COLUMN].abs(), scores.m[0, 0], scores.lse[0, 0]
    Z, largest = (p * (-E).exp()).sum(), (p * E.exp() * v.abs()).sum()
    accumulated = c.g(float((NUMERICS.block_n + 2) * scores.tiles[0, 0]))
    lost = min(1.0, float((m - lse + 2 * E.max()).exp())) * (c.eta_p + c.ftz)
    core = {
        r"errors of scores, $\sum p\,\mathrm{expm1}(E)\,\lvert v - \mathrm{out}\rvert / Z$": (
            (p * E.expm1() * (v - forward.out[0, 0, COLUMN]).abs()).sum() / Z
        ),
        r"cast of P, $u_c \sum p\,e^E\,\lvert v\rvert / Z$": c.u_cast * largest / Z,
        r"sum of P v, $g\,(1 + u_c) \sum p\,e^E\,\lvert v\rvert / Z$": (
            accumulated * (1 + c.u_cast) * largest / Z
        ),
        "underflow of P": lost * v.abs().sum() + c.eta_dot * (p * E.exp()).sum() / Z,
    }
    before = sum(core.values())
    gamma = float(c.gamma(softmax_additions(chunk, scores, NUMERICS))[0, 0])
    divided = (gamma + 4 * c.u) * (out + before)
    whole = before + divided
    terms = core | {
        r"softmax sum and division, $(\gamma_l + 4u)(\lvert\mathrm{out}\rvert + \mathrm{core})$": (
            divided
        ),
        r"stored result, $u_{in}\,(\lvert\mathrm{out}\rvert + \mathrm{core})$": (
            c.u_in * (out + whole)
        ),
        r"underflow of the result, $\eta_{in}$": c.eta_in,
    }
    return {name: float(x) for name, x in terms.items()}


def lse_terms() -> dict[str, float]:
    """Return the terms of the bound of the row's lse, which add up to it."""
    chunk, c, forward = row()
    scores = forward.scores
    m, lse = float(scores.m[0, 0]), float(scores.lse[0, 0])
    return {
        r"errors of scores, $\ln \sum p\,e^E$": float(
            (scores.p[0, 0] * scores.error[0, 0].expm1()).sum().log1p()
        ),
        r"softmax sum, $\gamma_l$": float(
            c.gamma(softmax_additions(chunk, scores, NUMERICS))[0, 0]
        ),
        r"logarithm, $u_{log}\,(1 + \lvert\ln l\rvert)$": (
            c.u_log * (1 + abs(float(scores.log_l[0, 0])))
        ),
        r"sum with the maximum, $4u \max(\lvert\mu\rvert, \lvert L\rvert)$": (
            4 * c.u * max(abs(m), abs(lse))
        ),
    }  # fmt: skip


def bounds(c: Constants) -> Outputs[torch.Tensor]:
    """Return the bounds of all outputs under given constants."""
    chunk, _, forward = row(c)
    backward = backward_error(
        chunk, read_of(forward, c), sm_scale=PROBLEM.scale, c=c, numerics=NUMERICS
    )
    dq = finish_dq(chunk, backward, c, NUMERICS)[1]
    keys = finish_keys(backward.keys, PROBLEM.scale, c, 1, NUMERICS)
    return Outputs(forward.out_bound, forward.lse_bound, dq, keys.bound_dk, keys.bound_dv)


def sources() -> Iterator[tuple[str, dict[str, float]]]:
    """Yield each kind of rounding, and the share of each bound that goes without its constants."""
    c = row().c
    whole = bounds(c)
    for source, names in SOURCES.items():
        without = bounds(dataclasses.replace(c, **dict.fromkeys(names, 0.0)))
        yield (
            source,
            {
                output: 1 - float(getattr(without, output).sum() / getattr(whole, output).sum())
                for output in OUTPUTS
            },
        )
