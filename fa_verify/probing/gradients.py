"""Where the backward rounds: dS, P, the operands of its dots, sums over a group of heads."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator

import torch

from fa_verify.oracles.problem import Problem
from fa_verify.probing.answers import Answer, undecided
from fa_verify.probing.experiments import Experiment, Observation, decided, experiment, observe
from fa_verify.probing.formats import OPERANDS, UNIT, clear_of_ties, rounded, truncated
from fa_verify.probing.rounding import (
    FAR,
    FLOAT32,
    PRESCALES,
    drawn,
    mantissas,
    resized,
    score,
    tensors,
    untied,
)
from fa_verify.probing.trying import attempt
from fa_verify.properties.inputs.families import TORCH_DTYPES
from fa_verify.properties.kernels.subject import Subject

__all__ = ["rounding_of_backward"]

_LOG2E = math.log2(math.e)
# Keys of weight 1/3 that each row sees.
_SEEN = 3


def _hidden(problem: Problem, q: torch.Tensor, k: torch.Tensor, seen: int) -> None:
    """Give weight 0 to the keys from ``seen`` on, by the second column of q and k."""
    q[..., 1] = FAR
    k[:, :, seen:, 1] = -FAR * max(1.0, 2.0 ** math.ceil(math.log2(0.3 / problem.scale)))


def _zeros(problem: Problem) -> tuple[torch.Tensor, ...]:
    """Return q, k, v and dout of zeros in float64."""
    B, H, Hk, M, N, D, Dv = (getattr(problem, x) for x in ("B", "H", "Hk", "M", "N", "D", "Dv"))
    shapes = ((B, H, M, D), (B, Hk, N, D), (B, Hk, N, Dv), (B, H, M, Dv))
    return tuple(torch.zeros(shape, dtype=torch.float64) for shape in shapes)


@experiment("dS")
def _ds(subject: Subject, which: Experiment) -> Observation:
    """Columns of dk that cancel but for the roundings of dS.

    Each row sees three keys of weight 1/3. Column d of q holds 1 and -c in two rows, where c is the
    ratio of their dS rounded to the dtype.
    """
    problem = which.problem
    dtype, s, B, M = problem.dtype, problem.scale, problem.B, problem.M
    q, k, v, dout = _zeros(problem)
    _hidden(problem, q, k, _SEEN)
    v[:, 0, :_SEEN, :2] = rounded(1 + drawn(6, B, _SEEN, 2), dtype)
    # dP of key 0 exceeds that of the others.
    v[:, 0, 0, :2] *= 4
    dout[:, 0, :, :2] = rounded(16 + 16 * drawn(7, B, M, 2), dtype)
    # Rows 0 and 1 of a causal kernel do not see three keys.
    rows = torch.arange(2, min(M - 1, problem.D - 1))
    dp = torch.einsum("bmc,bnc->bmn", dout[:, 0], v[:, 0, :_SEEN])
    exact = (dp - dp.mean(-1, keepdim=True))[..., 0]
    c = rounded(exact[:, rows] / exact[:, rows + 1], dtype)
    q[:, 0, rows, rows] = 1
    q[:, 0, rows + 1, rows] = -c
    tried = attempt(subject, problem, tensors(problem, q=q, k=k, v=v, dout=dout))
    if tried.got is None or tried.got.dk is None:
        return Observation(None, {}, {}, tried.error)
    out = tried.got.out[:, 0, :, :2].double().cpu()
    deltas = {"out as returned": (dout[:, 0, :, :2] * out).sum(-1), "exact sums": None}
    usable = torch.ones(B, len(rows), dtype=torch.bool)
    expected, tolerance = {}, {}
    for (source, delta), (of, p), dp_cast, cast, (way, factor) in itertools.product(
        deltas.items(),
        {"P": 1 / 3, "P cast": float(rounded(torch.tensor(1 / 3).double(), dtype))}.items(),
        (False, True),
        ("in fp32", "cast", "scaled, then cast"),
        {"q": 0.0, "q scaled and cast": 1.0, "q scaled by log2(e) and cast": _LOG2E}.items(),
    ):
        given = rounded(dp, dtype) if dp_cast else dp
        # Without out, as in automatic differentiation, delta is a sum of the same dP.
        ds = p * (given[..., 0] - (given.mean(-1) if delta is None else delta))
        for one in (ds, ds * s):
            clear = clear_of_ties(one, dtype)
            usable &= clear[:, rows] & clear[:, rows + 1]
        ds = {"in fp32": ds * s, "cast": rounded(ds, dtype) * s}.get(cast, rounded(ds * s, dtype))
        first, second = torch.ones_like(c), c
        if factor:
            first, second = (rounded(x * s * factor, dtype) / (s * factor) for x in (first, second))
        terms = ds[:, rows] * first, ds[:, rows + 1] * second
        name = f"dS {cast}, from {of}, delta from {source}" + (", dP cast" if dp_cast else "")
        name += "" if way == "q" else f", dk from {way}"
        expected[name] = terms[0] - terms[1]
        rounding = expected[name].abs() * UNIT[dtype] * 1.01
        tolerance[name] = rounding + FLOAT32 * terms[0].abs() * 4 + 2.0**-25
    got = tried.got.dk[:, 0, 0, rows].double().cpu()
    return Observation(
        got[usable],
        {name: x[usable] for name, x in expected.items()},
        {name: x[usable] for name, x in tolerance.items()},
    )


@experiment("P_of_dv")
def _p_of_dv(subject: Subject, which: Experiment) -> Observation:
    """The last row alone has a gradient, and sees three keys of weight 1/3: dv is dout times P."""
    problem = which.problem
    dtype = problem.dtype
    q, k, v, dout = _zeros(problem)
    _hidden(problem, q, k, _SEEN)
    third = torch.tensor(1 / 3).double()
    given = rounded(1 + torch.arange(128, dtype=torch.float64) / 128, dtype)
    weights = {"fp32": third, "input": rounded(third, dtype)}
    products = {name: given * p for name, p in weights.items()}
    good = rounded(products["fp32"], dtype) != rounded(products["input"], dtype)
    for x in products.values():
        good &= clear_of_ties(x, dtype)
    given = given[good][: problem.Dv]
    dout[:, 0, -1, : len(given)] = given
    tried = attempt(subject, problem, tensors(problem, q=q, k=k, v=v, dout=dout))
    if tried.got is None or tried.got.dv is None:
        return Observation(None, {}, {}, tried.error)
    got = tried.got.dv[0, 0, 0, : len(given)].double().cpu()
    expected = {name: rounded(given * p, dtype) for name, p in weights.items()}
    return Observation(got, expected, {name: torch.zeros_like(x) for name, x in expected.items()})


@experiment("weights_of_dv")
def _weights_of_dv(subject: Subject, which: Experiment) -> Observation:
    """Dv of key 1, in which each weight of the backward cancels but for its roundings.

    Row r sees key 0 with score 0 and key 1 with a negative one, and has a dout of 1 in column r.
    The last row sees both with weight 1/2, and has a dout of -2c in column r, where c is the weight
    of key 1 in row r, rounded to the dtype. The number is the forward's way of prescaling, on which
    the lse depends.
    """
    problem = which.problem
    dtype, s, B, M = problem.dtype, problem.scale, problem.B, problem.M
    R = min(M - 1, problem.Dv)
    q, k, v, dout = _zeros(problem)
    _hidden(problem, q, k, 2)
    b = untied(problem, 9)
    # The elements of k whose roundings differ most between the ways of prescaling k.
    lost = torch.stack([score(torch.ones_like(b), b, s, way, dtype)[0] / (b * s) - 1
                        for way, (of, _) in PRESCALES.items() if of == "k"])  # fmt: skip
    apart = torch.cat([lost, lost[:1] - lost[1:]]).abs().amin(0)
    b = b[apart.argsort(descending=True)][:B].view(-1, 1)
    a = rounded(-(0.5 + 2.5 * drawn(10, B, R)) / (b * s), dtype)
    q[:, 0, :R, 0], k[:, 0, 1, 0] = a, b[:, 0]
    x = a * b * s
    c = rounded(x.exp() / (1 + x.exp()), dtype)
    rows = torch.arange(R)
    dout[:, 0, rows, rows] = 1
    dout[:, 0, -1, :R] = -2 * c
    tried = attempt(subject, problem, tensors(problem, q=q, k=k, v=v, dout=dout))
    if tried.got is None or tried.got.dv is None:
        return Observation(None, {}, {}, tried.error)
    forward, usable = score(a, b, s, [*PRESCALES][which.numbers[0]], dtype)
    p = forward.exp()
    sums = {"": 1 + p, ", l of P rounded": 1 + rounded(p, dtype),
            ", l of P truncated": 1 + truncated(p, dtype)}  # fmt: skip
    casts = {"in fp32": lambda x, _: x, "cast": rounded, "truncated": truncated}
    expected, tolerance = {}, {}
    for way, (l_of, total) in itertools.product(PRESCALES, sums.items()):
        again, clear = score(a, b, s, way, dtype)
        weight = again.exp() / total
        usable &= clear & clear_of_ties(p, dtype, truncation=True)
        usable &= clear_of_ties(weight, dtype, truncation=True)
        for how, cast in casts.items():
            name = ("" if way == "none" else f"prescaled {way}, ") + f"P {how}{l_of}"
            expected[name] = cast(weight, dtype) - c
            rounding = expected[name].abs() * UNIT[dtype] * 1.01
            tolerance[name] = rounding + FLOAT32 * weight + 2.0**-25
    got = tried.got.dv[:, 0, 1, :R].double().cpu()
    return Observation(
        got[usable],
        {name: x[usable] for name, x in expected.items()},
        {name: x[usable] for name, x in tolerance.items()},
    )


@experiment("group_sum")
def _group_sum(subject: Subject, which: Experiment) -> Observation:
    """Two heads of a group whose dv cancel but for a bit that the dtype does not hold.

    Each row sees key 0 alone, so dv is the sum of dout.
    """
    problem = which.problem
    q, k, v, dout = _zeros(problem)
    _hidden(problem, q, k, 1)
    bit = UNIT[problem.dtype] / 4
    dout[:, 0, -1], dout[:, 0, -2], dout[:, 1, -1] = 1, bit, -1
    tried = attempt(subject, problem, tensors(problem, q=q, k=k, v=v, dout=dout))
    if tried.got is None or tried.got.dv is None:
        return Observation(None, {}, {}, tried.error)
    got = tried.got.dv[:, 0, 0].double().cpu()
    expected = {"fp32": torch.full_like(got, bit), "dtype": torch.zeros_like(got)}
    return Observation(got, expected, {name: torch.zeros_like(got) for name in expected})


def _operand(subject: Subject, problem: Problem, of: str) -> Observation:
    """Read an operand of the backward's dots of fp32 inputs from a product with exact numbers.

    Rows see keys 0 and 1 with weights of 1/2. The last row has a one-hot dout, so dS is half the
    difference between two elements of v.
    """
    q, k, v, dout = _zeros(problem)
    _hidden(problem, q, k, 2)
    numbers = mantissas(8, 1, min(problem.D - 2, problem.Dv))
    width = numbers.shape[1]
    dout[:, 0, -1, 0] = 1
    v[:, 0, 0, 0], v[:, 0, 1, 0] = 1, -1
    if of == "dout":
        dout[:, 0, -1, :width] = numbers
    elif of == "q":
        q[:, 0, -1, 2 : 2 + width] = numbers
    else:
        # The scores of both keys stay 0, as q is 0 in these columns.
        k[:, 0, 0, 2 : 2 + width] = numbers
    tried = attempt(subject, problem, tensors(problem, q=q, k=k, v=v, dout=dout))
    if tried.got is None or tried.got.dk is None:
        return Observation(None, {}, {}, tried.error)
    name = {"dout": "dv", "q": "dk", "k": "dq"}[of]
    result = getattr(tried.got, name).double().cpu()
    if of == "dout":
        got, factor = result[:, 0, 0, :width], 0.5
    else:
        row = 0 if of == "q" else -1
        got, factor = result[:, 0, row, 2 : 2 + width], 0.5 * problem.scale
    expected = {how: (cut(numbers) * factor).expand_as(got) for how, cut in OPERANDS.items()}
    return Observation(got, expected, {x: FLOAT32 * y.abs() for x, y in expected.items()})


@experiment("dout_operand")
def _dout_operand(subject: Subject, which: Experiment) -> Observation:
    """Dv is half of the dout that its dot reads."""
    return _operand(subject, which.problem, "dout")


@experiment("q_operand_of_dk")
def _q_operand(subject: Subject, which: Experiment) -> Observation:
    """Dk is a multiple of the q that its dot reads."""
    return _operand(subject, which.problem, "q")


@experiment("k_operand_of_dq")
def _k_operand(subject: Subject, which: Experiment) -> Observation:
    """Dq is a multiple of the k that its dot reads."""
    return _operand(subject, which.problem, "k")


def rounding_of_backward(
    subject: Subject,
    base: Problem,
    exact: Problem,
    dtypes: tuple[str, ...],
    gqa: bool,
    way: str | None,
) -> Iterator[Answer]:
    """Yield where the backward rounds.

    Args:
        subject: The kernel without its declarations.
        base: A problem that the kernel takes, with a scale that is no power of two.
        exact: The problem with a scale that is a power of two.
        dtypes: The dtypes that it takes.
        gqa: Whether it takes grouped heads.
        way: The forward's way of prescaling, a key of ``PRESCALES``; None if it is undecided.
    """
    if "fp32" in dtypes:
        for name in ("dout_operand", "q_operand_of_dk", "k_operand_of_dq"):
            which = Experiment(name, dataclasses.replace(exact, dtype="fp32"))
            yield decided(name, which, observe(subject, which), {x: x for x in OPERANDS})
    narrow = [x for x in ("bf16", "fp16") if x in dtypes]
    if not narrow:
        return
    problem = dataclasses.replace(base, dtype=narrow[0])
    of_ds = [*_of_ds(subject, dataclasses.replace(problem, B=2))]
    reads = _reads(subject, problem)
    exact = any((x.word, x.value) == ("delta_from", "exact sums") for x in of_ds)
    if exact and "out" in (reads.value or ()):
        # An error that no answer has, such as that of a short exponential, looks like this.
        said = f"an exact delta explains dS, but {reads.evidence}"
        of_ds = [undecided(x.word, said, x.replay) for x in of_ds]
    yield from of_ds
    which = Experiment("P_of_dv", problem)
    seen = observe(subject, which)
    yield decided("p_dtype_of_dv", which, seen, {x: x for x in seen.expected})
    yield _prescaling(subject, problem, way)
    if gqa:
        which = Experiment("group_sum", dataclasses.replace(problem, H=2))
        seen = observe(subject, which)
        yield decided("group_sum", which, seen, {x: x for x in seen.expected})
    yield reads


def _prescaling(subject: Subject, problem: Problem, way: str | None) -> Answer:
    word = "prescaling_of_backward"
    if way is None:
        return undecided(word, "prescaling of the forward is undecided")
    which = Experiment("weights_of_dv", resized(problem, problem.dtype), ([*PRESCALES].index(way),))
    seen = observe(subject, which)
    ways = {x: next((y for y in PRESCALES if x.startswith(f"prescaled {y},")), "none")
            for x in seen.expected}  # fmt: skip
    return decided(word, which, seen, ways)


def _of_ds(subject: Subject, problem: Problem) -> Iterator[Answer]:
    which = Experiment("dS", problem)
    seen = observe(subject, which)
    names = list(seen.expected)
    for word, values in (
        ("ds_dtype", {x: "fp32" if "dS in fp32" in x else "input" for x in names}),
        ("ds_scaled", {x: None if "dS in fp32" in x else "scaled, then" in x for x in names}),
        ("ds_from", {x: "rounded" if "from P cast" in x else "unrounded" for x in names}),
        ("delta_from", {x: "out" if "as returned" in x else "exact sums" for x in names}),
        ("dp_dtype", {x: "input" if "dP cast" in x else "fp32" for x in names}),
    ):
        yield decided(word, which, seen, values)


def _reads(subject: Subject, problem: Problem) -> Answer:
    """Change what the forward returned, before the backward: gradients that follow have read it."""
    which = Experiment("reads", problem)
    seen = observe(subject, which)
    if seen.got is None:
        return undecided("backward_reads", seen.error, which.to_json())
    moved = [name for name, x in zip(("out", "lse"), seen.got.tolist(), strict=False) if x > 0]
    if moved:
        said = f"gradients follow a change of {' and '.join(moved)} between the two passes"
        return Answer("backward_reads", tuple(moved), "shown", said, which.to_json())
    return undecided("backward_reads", "it reads neither, or copies of them", which.to_json())


@experiment("reads")
def _reading(subject: Subject, which: Experiment) -> Observation:
    """Changes of dq that follow a change of the returned out, and of lse, before the backward."""
    problem = which.problem
    dtype = TORCH_DTYPES[problem.dtype]

    def gradient(changed: str) -> torch.Tensor:
        q, k, v = (
            drawn(n, 1, 1, size, width).to(dtype).to(problem.device).requires_grad_()
            for n, (size, width) in enumerate(
                ((problem.M, problem.D), (problem.N, problem.D), (problem.N, problem.Dv))
            )
        )
        out, lse = subject.run(q, k, v, problem)
        dout = torch.ones_like(out)
        if changed == "out":
            out.data.add_(1)
        elif changed == "lse" and lse is not None:
            lse.data.add_(1)
        return torch.autograd.grad(out, q, dout)[0].double().cpu()

    try:
        plain = gradient("")
        got = torch.stack([(gradient(x) - plain).abs().amax() for x in ("out", "lse")])
    except Exception as error:
        return Observation(None, {}, {}, f"{type(error).__name__}: {error}")
    return Observation(got, {}, {})
