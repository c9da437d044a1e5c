"""Where the forward rounds: operands of fp32 dots, prescaled operands, P and the softmax sum."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Any

import torch

from fa_verify.oracles.problem import Problem
from fa_verify.probing.answers import Answer
from fa_verify.probing.experiments import Experiment, Observation, decided, experiment, observe
from fa_verify.probing.formats import OPERANDS, UNIT, clear_of_ties, rounded, truncated
from fa_verify.probing.trying import attempt
from fa_verify.properties.inputs.families import TORCH_DTYPES
from fa_verify.properties.inputs.tensors import Inputs
from fa_verify.properties.kernels.subject import Subject

__all__ = [
    "FAR",
    "FLOAT32",
    "PRESCALES",
    "drawn",
    "mantissas",
    "resized",
    "rounding_of_forward",
    "score",
    "tensors",
    "untied",
]

_LOG2E = math.log2(math.e)
# The product of these, scaled, gives a weight of exactly 0: exp(-300) underflows.
FAR = 32.0
# Errors of float32 arithmetic: of exp, of the score, of a sum of two terms.
FLOAT32 = 2.0**-19

PRESCALES = {
    "none": ("none", 1.0), "q by sm_scale": ("q", 1.0), "q by sm_scale log2(e)": ("q", _LOG2E),
    "k by sm_scale": ("k", 1.0), "k by sm_scale log2(e)": ("k", _LOG2E),
    "both by sqrt(sm_scale)": ("qk", 1.0),
}  # fmt: skip
_P = ("P in fp32", "P cast", "P truncated", "P normalised, then cast")
_L = ("l of P before the cast", "l of P after the cast")


def tensors(problem: Problem, **given: torch.Tensor) -> Inputs:
    """Return inputs: tensors of 0 but for the given ones, which need the problem's shapes."""
    B, H, Hk, M, N, D, Dv = (getattr(problem, x) for x in ("B", "H", "Hk", "M", "N", "D", "Dv"))
    shapes = {"q": (B, H, M, D), "k": (B, Hk, N, D), "v": (B, Hk, N, Dv), "dout": (B, H, M, Dv)}
    dtype = TORCH_DTYPES[problem.dtype]
    made = {
        name: given.get(name, torch.zeros(shape)).expand(shape).to(dtype).contiguous()
        for name, shape in shapes.items()
    }
    return Inputs(**{name: x.to(problem.device) for name, x in made.items()})


def score(
    a: torch.Tensor, b: torch.Tensor, s: float, way: str, dtype: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scaled product of two elements, and whether its roundings are clear of ties.

    Args:
        a: An element of q, float64.
        b: An element of k, float64.
        s: The scale.
        way: The way of prescaling, a key of ``PRESCALES``.
        dtype: Dtype of q and k.
    """
    of, factor = PRESCALES[way]
    t = {"none": 1.0, "qk": math.sqrt(s * factor)}.get(of, s * factor)
    clear = torch.ones_like(a * b, dtype=torch.bool)
    if of in ("q", "qk"):
        clear, a = clear & clear_of_ties(a * t, dtype), rounded(a * t, dtype)
    if of in ("k", "qk"):
        clear, b = clear & clear_of_ties(b * t, dtype), rounded(b * t, dtype)
    return a * b * (s if of == "none" else 1 / factor), clear


def drawn(seed: int, *shape: int) -> torch.Tensor:
    """Return uniform float64 numbers in [0, 1), the same in every run."""
    return torch.rand(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def untied(problem: Problem, seed: int) -> torch.Tensor:
    """Return elements of k, (n,), whose roundings are clear of ties in each way of prescaling."""
    b = rounded(1 + drawn(seed, 64 * problem.B), problem.dtype)
    for way in PRESCALES:
        b = b[score(torch.ones_like(b), b, problem.scale, way, problem.dtype)[1]]
    return b


@experiment("weights")
def _weights(subject: Subject, which: Experiment) -> Observation:
    """Rows whose weight of key 1 cancels that of key 0 but for the roundings of the forward.

    Key 0 has score 0, key 1 a negative one, and the others weight 0. Column r of v holds -c and 1,
    where c is the weight of key 1 in row r, rounded to the dtype: out of row r in column r is the
    difference between the weight and its rounding.
    """
    problem = which.problem
    dtype, s = problem.dtype, problem.scale
    B, M, N, D, Dv = problem.B, problem.M, problem.N, problem.D, problem.Dv
    R = min(M, Dv)
    b = untied(problem, 1)[:B].view(-1, 1)
    a = rounded(-(0.5 + 2.5 * drawn(2, B, R)) / (b * s), dtype)
    q, k, v = (torch.zeros(B, 1, n, w, dtype=torch.float64) for n, w in ((M, D), (N, D), (N, Dv)))
    q[:, 0, :, 1] = FAR
    q[:, 0, :R, 0] = a
    k[:, 0, 1, 0] = b[:, 0]
    k[:, 0, 2:, 1] = -FAR * max(1.0, 2.0 ** math.ceil(math.log2(0.3 / s)))
    c = rounded((a * b * s).exp(), dtype)
    rows = torch.arange(R)
    v[:, 0, 1, :R] = 1
    v[:, 0, 0, :R] = -c
    expected, tolerance = {}, {}
    usable = torch.ones(B, R, dtype=torch.bool)
    if M > 1:
        usable[:, 0] = False  # in a causal kernel, row 0 sees key 0 alone
    for way, how, l_of in itertools.product(PRESCALES, _P, _L):
        if (how in _P[::3]) and l_of == _L[1]:
            continue  # there is no cast before the sum
        x, clear = score(a, b, s, way, dtype)
        usable &= clear
        p = x.exp()
        usable &= clear_of_ties(p, dtype, truncation=True) & clear_of_ties(p / (1 + p), dtype)
        usable &= clear_of_ties(1 / (1 + p), dtype)
        cast = {_P[1]: rounded, _P[2]: truncated}.get(how, lambda x, _: x)(p, dtype)
        total = 1 + (cast if l_of == _L[1] else p)
        if how == _P[3]:
            out = rounded(p / total, dtype) - c * rounded(1 / total, dtype)
        else:
            out = (cast - c) / total
        name = ", ".join((*([] if way == "none" else [f"prescaled {way}"]), how, l_of))
        expected[name] = out
        tolerance[name] = out.abs() * UNIT[dtype] * 1.01 + FLOAT32 * p + 2.0**-25
    return _read(
        subject, problem, tensors(problem, q=q, k=k, v=v), expected, tolerance, usable, rows
    )


@experiment("softmax_sum")
def _softmax_sum(subject: Subject, which: Experiment) -> Observation:
    """Rows whose out, the value of key 0 divided by l, rounds apart for the two sums.

    Key 0 has score 0, key 1 a negative one, and the others weight 0. The number is the way of
    prescaling.
    """
    problem = which.problem
    dtype, s = problem.dtype, problem.scale
    B, M, N, D, Dv = problem.B, problem.M, problem.N, problem.D, problem.Dv
    R = min(M, Dv)
    a = rounded(-(0.2 + 1.5 * drawn(5, B, R)) / s, dtype)
    q, k, v = (torch.zeros(B, 1, n, w, dtype=torch.float64) for n, w in ((M, D), (N, D), (N, Dv)))
    q[:, 0, :, 1] = FAR
    q[:, 0, :R, 0] = a
    k[:, 0, 1, 0] = 1
    k[:, 0, 2:, 1] = -FAR * max(1.0, 2.0 ** math.ceil(math.log2(0.3 / s)))
    way = [*PRESCALES][which.numbers[0]]
    x, usable = score(a, torch.ones_like(a), s, way, dtype)
    p = x.exp()
    sums = {"unrounded": 1 + p, "rounded": 1 + rounded(p, dtype)}
    usable &= clear_of_ties(p, dtype)
    if M > 1:
        usable[:, 0] = False
    # The value whose quotients round furthest apart, among all significands.
    values = rounded(1 + torch.arange(128, dtype=torch.float64) / 128, dtype).view(-1, 1, 1)
    quotients = {name: rounded(values / total, dtype) for name, total in sums.items()}
    good = quotients["rounded"] != quotients["unrounded"]
    for total in sums.values():
        good &= clear_of_ties(values / total, dtype)
    usable &= good.any(0)
    best = good.to(torch.int8).argmax(0)
    v[:, 0, 0, :R] = values.flatten()[best]
    rows = torch.arange(R)
    expected = {name: x.gather(0, best[None])[0] for name, x in quotients.items()}
    exact = {name: torch.zeros_like(x) for name, x in expected.items()}
    return _read(subject, problem, tensors(problem, q=q, k=k, v=v), expected, exact, usable, rows)


def _read(
    subject: Subject,
    problem: Problem,
    inputs: Inputs,
    expected: dict[str, torch.Tensor],
    tolerance: dict[str, torch.Tensor],
    usable: torch.Tensor,
    rows: torch.Tensor,
) -> Observation:
    """Run the forward, and read column r of row r where every answer's rounding is clear."""
    tried = attempt(subject, problem, inputs, backward=False)
    if tried.got is None:
        return Observation(None, {}, {}, tried.error)
    got = tried.got.out[:, 0, rows, rows].double().cpu()
    return Observation(
        got[usable],
        {name: x[usable] for name, x in expected.items()},
        {name: x[usable] for name, x in tolerance.items()},
    )


@experiment("v_operand")
def _v_operand(subject: Subject, which: Experiment) -> Observation:
    """Rows that see two keys with equal weights: out is half the sum of the v that the dot reads.

    The value of key 1 is a bf16 number of the opposite sign, so that a rounding of the sum does not
    look like one of v.
    """
    problem = which.problem
    B, N, D, Dv = problem.B, problem.N, problem.D, problem.Dv
    q, k = torch.zeros(B, 1, 1, D, dtype=torch.float64), torch.zeros(B, 1, N, D)
    q[..., 1] = FAR
    k[:, 0, 2:, 1] = -FAR * 64
    v = torch.zeros(B, 1, N, Dv, dtype=torch.float64)
    v[:, 0, 0] = mantissas(3, B, Dv)
    v[:, 0, 1] = -rounded(1.5 * v[:, 0, 0], "bf16")
    inputs = tensors(problem, q=q, k=k, v=v)
    tried = attempt(subject, problem, inputs, backward=False)
    if tried.got is None:
        return Observation(None, {}, {}, tried.error)
    got = tried.got.out[:, 0, -1].double().cpu()
    expected = {name: (cut(v[:, 0, 0]) + v[:, 0, 1]) / 2 for name, cut in OPERANDS.items()}
    # The weights are exact, and so are their products and the difference.
    return Observation(got, expected, {x: y.abs() * 2.0**-20 for x, y in expected.items()})


@experiment("q_operand")
def _q_operand(subject: Subject, which: Experiment) -> Observation:
    """Rows that see keys 0 and 1: out tells the score of key 1, and so the q that the dot reads."""
    return _score_operand(subject, which.problem, "q")


@experiment("k_operand")
def _k_operand(subject: Subject, which: Experiment) -> Observation:
    """As ``q_operand``, with the mantissas in k."""
    return _score_operand(subject, which.problem, "k")


def _score_operand(subject: Subject, problem: Problem, of: str) -> Observation:
    B, M, N, D, s = problem.B, problem.M, problem.N, problem.D, problem.scale
    number = mantissas(4, B, 1)
    # A power of two, so that the other operand is exact; the score is about -2.
    other = -(2.0 ** torch.tensor(round(math.log2(2 / s)), dtype=torch.float64))
    q, k = (torch.zeros(B, 1, n, D, dtype=torch.float64) for n in (M, N))
    q[:, 0, :, 1] = FAR
    k[:, 0, 2:, 1] = -FAR * 64
    q[:, 0, :, 0], k[:, 0, 1, 0] = (number, other) if of == "q" else (other, number[:, 0])
    v = torch.zeros(B, 1, N, problem.Dv, dtype=torch.float64)
    v[:, 0, 1] = 1
    tried = attempt(subject, problem, tensors(problem, q=q, k=k, v=v), backward=False)
    if tried.got is None:
        return Observation(None, {}, {}, tried.error)
    got = tried.got.out[:, 0, -1, 0].double().cpu()
    expected, tolerance = {}, {}
    for (read, cut), (held, weight) in itertools.product(OPERANDS.items(), OPERANDS.items()):
        if held not in ("ieee", read):
            continue
        p = (cut(number[:, 0]) * other * s).exp()
        # The dot with v may read P in the same format.
        name = read if held == read else f"{read}, P in fp32"
        expected[name] = weight(p) / (1 + p)
        tolerance[name] = FLOAT32 * expected[name]
    return Observation(got, expected, tolerance)


def mantissas(seed: int, *shape: int) -> torch.Tensor:
    """Return float32 numbers in [1, 2), in float64, whose roundings to shorter formats differ.

    Every second one is a tie of TF32, which goes down to the even neighbour or away from 0.
    """
    x = rounded(1 + drawn(seed, 128 * math.prod(shape)), "fp32")
    clear = clear_of_ties(x, "tf32", truncation=True) & clear_of_ties(x, "bf16", truncation=True)
    clear &= (OPERANDS["bf16x3"](x) - x).abs() > 2.0**-18
    x = x[clear][: math.prod(shape)]
    x[1::2] = (x[1::2] * 2**9).floor() / 2**9 + 2.0**-11
    return x.view(shape)


def rounding_of_forward(
    subject: Subject, base: Problem, dtypes: tuple[str, ...]
) -> Iterator[Answer]:
    """Yield where the forward rounds.

    Args:
        subject: The kernel without its declarations.
        base: A problem that the kernel takes, with a scale that is no power of two.
        dtypes: The dtypes that it takes.
    """
    if "fp32" in dtypes:
        yield from _operands(subject, base)
    narrow = [x for x in ("bf16", "fp16") if x in dtypes]
    seen = [_decided_weights(subject, base, dtype) for dtype in narrow]
    for answers in zip(*seen, strict=True):
        yield _agreed(answers)


def _operands(subject: Subject, base: Problem) -> Iterator[Answer]:
    problem = resized(base, "fp32")
    values: dict[str, Any] = {}
    for name in OPERANDS:
        values[name] = values[f"{name}, P in fp32"] = name
    for of in "qkv":
        which = Experiment(f"{of}_operand", problem)
        seen = observe(subject, which)
        yield decided(f"{of}_operand", which, seen, values)
        if of == "q":
            of_p = {x: "ieee" if "P in fp32" in x else values[x] for x in seen.expected}
            yield decided("p_operand", which, seen, of_p)


def _decided_weights(subject: Subject, base: Problem, dtype: str) -> list[Answer]:
    which = Experiment("weights", resized(base, dtype))
    seen = observe(subject, which)
    names = list(seen.expected)
    p_dtype = {x: "fp32" if _P[0] in x else None if _P[2] in x else "input" for x in names}
    normalised = {x: None if _P[0] in x else _P[3] in x for x in names}
    ways = {
        x: next((y for y in PRESCALES if x.startswith(f"prescaled {y},")), "none") for x in names
    }
    l_from = decided("l_from", which, seen, {
        x: "rounded" if _L[1] in x else "unrounded" for x in names
    })  # fmt: skip
    prescaling = decided("prescaling", which, seen, ways)
    if l_from.value is None and prescaling.value is not None:
        number = [*PRESCALES].index(prescaling.value)
        of_sum = Experiment("softmax_sum", which.problem, (number,))
        sums = observe(subject, of_sum)
        l_from = decided("l_from", of_sum, sums, {name: name for name in sums.expected})
    return [
        decided("p_dtype_of_out", which, seen, p_dtype),
        decided("p_normalised", which, seen, normalised),
        l_from,
        prescaling,
    ]  # fmt: skip


def _agreed(answers: tuple[Answer, ...]) -> Answer:
    """Return the first decided answer, unless answers for other dtypes contradict it."""
    known = [one for one in answers if one.certainty != "undecided"]
    if not known:
        return answers[0]
    if any(one.value != known[0].value for one in known):
        values = " and ".join(f"{one.value!r}: {one.evidence}" for one in known)
        return Answer(known[0].word, None, "undecided", f"dtypes differ, {values}", known[1].replay)
    return known[0]


def resized(base: Problem, dtype: str) -> Problem:
    """Return the problem with several batch entries, for more rows."""
    return dataclasses.replace(base, dtype=dtype, B=max(2, 32 // min(base.M, base.Dv)))
