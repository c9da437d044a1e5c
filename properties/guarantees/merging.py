"""S1 and S2: the guarantees of merged attention states, each a function from a trial to findings.

Runs that have to agree are compared to the bit where the kernel promises it, and within the bound
otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import product

import torch

from fa_verify.oracles.guarantee import G4, G8, G9, S1, S2
from fa_verify.oracles.reference.merging import Merged
from fa_verify.properties.guarantees.agreement import exact, outside, same_or_inside
from fa_verify.properties.guarantees.compare import Finding
from fa_verify.properties.guarantees.memory import FAR, arena_of
from fa_verify.properties.inputs.states import States, stored_states
from fa_verify.properties.kernels.refusals import RefusedError
from fa_verify.properties.kinds.merges import (
    Convention,
    MergeTrial,
    merge_in_groups,
    run_merge,
    silent_part,
)
from fa_verify.properties.running.trial import Judged, Trial, run_states

__all__ = [
    "accuracy", "alone", "conventions", "far_apart", "grouping", "not_hidden", "of_a_ring",
    "silent_parts", "storage",
]  # fmt: skip


_FAR_APART = f"{S1.key} far apart"


def _run(
    trial: MergeTrial, given: States, *, gradients: bool = True, in_turn: bool = True
) -> Merged:
    """Run the kernel on other tensors in its convention; lse is converted to float64, natural."""
    natural = given._replace(lses=Convention.of(trial.subject).natural(given.lses))
    wanted = gradients and trial.subject.backward
    return run_merge(
        trial.subject, trial.problem.dtype, given, natural, gradients=wanted, in_turn=in_turn
    )[0]


def _agree(
    trial: MergeTrial,
    again: Merged,
    promise: str,
    claim: str,
    where: Mapping[str, torch.Tensor | None] | None = None,
) -> list[Finding]:
    """Return findings where a second run differs, in a bit if the kernel promises ``promise``."""
    outputs = {name: x for name, x in again._asdict().items() if not _is_absent(x)}
    promised = tuple(outputs) if _promises(trial, promise) else ()
    return same_or_inside(trial, outputs, S1, claim, where=where, promised=promised)


def _promises(trial: MergeTrial, guarantee: str) -> bool:
    """Return whether the kernel promises a guarantee to the bit."""
    return bool(trial.subject.promises(guarantee, next(iter(trial.subject.configs))))


def _is_absent(x: torch.Tensor) -> bool:
    """Return whether a gradient was not computed."""
    return x.ndim == 1


def accuracy(trial: MergeTrial) -> list[Finding]:
    """S1: out, lse and gradients lie within the derived bound of the float64 oracle."""
    return outside(trial, trial.outputs, S1, "leaves the derived bound")


def conventions(trial: MergeTrial) -> list[Finding]:
    """S2: lse has the declared base, and the declared value where no part saw a key."""
    base, empty = trial.subject.lse_base, trial.subject.empty_lse
    claim = f"is not that of base {base}, or not {empty} where nothing was seen, as declared"
    return outside(trial, {"lse": trial.outputs["lse"]}, S2, claim)


def grouping(trial: MergeTrial) -> list[Finding]:
    """S1: parts in another order, merged in groups or one after the other, stay within the bound.

    The bound of the whole then holds the roundings of the groups, as errors of its parts.
    """
    problem, parts = trial.problem, len(trial.problem.parts)
    if parts < 2:
        return []
    order = sorted(range(parts), key=lambda p: hash((problem.seed, p)))

    def merged_by(width: int | None) -> tuple[Merged, Merged]:
        return merge_in_groups(
            trial.subject, problem.dtype, trial.inputs, trial.exact, order, width
        )

    width = 2 + problem.seed % 3
    try:
        grouped = merged_by(width)
    except RefusedError:
        # A function that merges two states at a time.
        width, grouped = 2, merged_by(2)
    findings = []
    for how, (got, bound) in (
        (f"in groups of {width}", grouped),
        ("one after the other", merged_by(None)),
    ):
        judged = {
            name: Judged(getattr(got, name), getattr(trial.want, name), getattr(bound, name))
            for name in ("out", "lse")
        }
        claim = f"leaves the bound where parts {order} are merged {how}"
        findings += outside(trial, judged, S1, claim)
    return findings


def silent_parts(trial: MergeTrial) -> list[Finding]:
    """S1: parts that saw nothing change no bit, whatever their out holds, and get no gradient."""
    problem, given = trial.problem, trial.inputs
    place = problem.seed % (len(problem.parts) + 1)
    empty = float(trial.subject.empty_lse)
    findings = []
    for value in (math.nan, math.inf, 0.0):
        again = _run(trial, silent_part(given, empty, value, place))
        claim = f"changes with a part that saw nothing, whose out holds {value}"
        if not _is_absent(again.douts):
            for name in ("douts", "dlses"):
                x = getattr(again, name)[place : place + 1]
                everywhere = torch.ones((), dtype=torch.bool, device=x.device)
                findings += exact(
                    trial, name, x, torch.zeros_like(x), everywhere, S1,
                    "is not 0 for a part that saw nothing",
                )  # fmt: skip
            kept = [p for p in range(len(again.douts)) if p != place]
            again = again._replace(douts=again.douts[kept], dlses=again.dlses[kept])
        findings += _agree(trial, again, G4, claim)
    return findings


def alone(trial: MergeTrial) -> list[Finding]:
    """S1: a part alone, or beside one that saw nothing, is the result to the bit.

    out is 0 where the part saw nothing. Gradients are asked if the kernel promises G4 to the bit.
    """
    problem, given = trial.problem, trial.inputs
    empty = float(trial.subject.empty_lse)
    findings: list[Finding] = []
    for p, beside in product(range(len(problem.parts)), (None, math.nan, math.inf, 0.0)):
        part, at = given._replace(outs=given.outs[p : p + 1], lses=given.lses[p : p + 1]), 0
        claim = f"is not that of part {p}, which is alone"
        if beside is not None:
            place = problem.seed % 2
            part, at = silent_part(part, empty, beside, place), 1 - place
            claim = f"is not that of part {p} beside one that saw nothing, whose out holds {beside}"
        try:
            got = _run(trial, part, in_turn=False)
        except RefusedError:
            if beside is None:  # it takes no part alone
                continue
            raise
        if not _is_absent(got.douts):
            got = got._replace(douts=got.douts[at : at + 1], dlses=got.dlses[at : at + 1])
        seen = trial.exact.lses[p] != -math.inf
        dout, dlse = given.dout[None], given.dlse[None]
        want = Merged(
            torch.where(seen[..., None], given.outs[p], 0.0), trial.exact.lses[p],
            torch.where(seen[..., None], dout, 0.0), torch.where(seen, dlse, 0.0),
        )  # fmt: skip
        everywhere = torch.ones((), dtype=torch.bool, device=seen.device)
        for name, y in zip(Merged._fields, want, strict=True):
            x = getattr(got, name)
            is_gradient = name in ("douts", "dlses")
            if not is_gradient or (not _is_absent(x) and _promises(trial, G4)):
                findings += exact(trial, name, x, y.to(x.dtype), everywhere, S1, claim)
    return findings


def storage(trial: MergeTrial) -> list[Finding]:
    """S1: strides, slices and shared memory change no bit, nor does a slice of heads and rows."""
    problem, given = trial.problem, trial.inputs
    plain = States(*(x.clone(memory_format=torch.contiguous_format) for x in given))
    claim = "depends on the strides of its inputs"
    findings = _agree(trial, _run(trial, plain), G8, claim)
    if 0 in (problem.B, problem.M):
        return findings
    b, h, m = problem.seed % problem.B, problem.seed % problem.H, problem.seed % problem.M
    at = slice(b, b + 1), slice(h, None), slice(m, None)
    part = States(given.outs[:, *at], given.lses[:, *at], given.dout[at], given.dlse[at])
    sliced = _run(trial, part)
    # The whole, with the slice in its place.
    again = {}
    for name, x in sliced._asdict().items():
        whole = getattr(trial.got, name)
        again[name] = whole
        if not _is_absent(whole):
            again[name] = whole.clone()
            again[name][(slice(None), *at) if name in ("douts", "dlses") else at] = x
    claim = f"differs for b={b}, heads from {h} and rows from {m} alone"
    return findings + _agree(trial, Merged(**again), G9, claim)


def not_hidden(trial: MergeTrial) -> list[Finding]:
    """S1: an lse of NaN or +inf of a part that is not empty shows, in its own row alone."""
    problem, given = trial.problem, trial.inputs
    if 0 in (len(problem.parts), problem.B, problem.M):
        return []
    at = tuple(problem.seed % size for size in (problem.B, problem.H, problem.M))
    p = problem.seed % len(problem.parts)
    row = torch.zeros_like(trial.got.lse, dtype=torch.bool)
    row[at] = True
    findings = []
    for value in (math.nan, math.inf):
        if value == float(trial.subject.empty_lse):
            continue
        # A part that saw a key has numbers as its out.
        broken = stored_states(given.lses, "parts")
        broken[p, *at] = value
        outs = given.outs.clone(memory_format=torch.contiguous_format)
        outs[p, *at] = outs[p, *at].nan_to_num(nan=1.0)
        got = _run(trial, given._replace(outs=outs, lses=broken), gradients=False)
        shown = got.lse.isnan() | (got.lse == math.inf)
        findings += _where(
            trial, "lse", row & ~shown, got.lse, torch.full_like(got.lse, value),
            f"hides an lse of {value} of part {p}",
        )  # fmt: skip
        claim = f"changes with an lse of {value} of another row"
        others = {"out": ~row[..., None], "lse": ~row}
        # The tensors of the trial may have other strides.
        findings += _agree(trial, got, G8, claim, others)
    return findings


def _where(
    trial: MergeTrial,
    name: str,
    bad: torch.Tensor,
    got: torch.Tensor,
    want: torch.Tensor,
    claim: str,
) -> list[Finding]:
    """Return a finding at the first bad element, if any."""
    if not bad.any():
        return []
    return [
        Finding.at(
            bad, bad, guarantee=S1, claim=claim, subject=trial.subject, problem=trial.problem,
            output=name, got=got, want=want,
        )
    ]  # fmt: skip


def far_apart(trial: MergeTrial) -> list[Finding]:
    """S1: elements that lie 2**31 elements or more apart are read where they are.

    One axis of one tensor, chosen by the seed, spans that many elements.
    """
    problem, given = trial.problem, trial.inputs
    name = States._fields[problem.seed % len(States._fields)]
    x = getattr(given, name)
    axes = [axis for axis in range(x.ndim) if x.shape[axis] > 1 and x.numel()]
    if not axes:
        trial.not_applicable(_FAR_APART, f"to {name} without an axis longer than 1")
        return []
    axis = axes[problem.seed // 4 % len(axes)]
    step = -(-FAR // (x.shape[axis] - 1) // x.numel()) * x.numel()
    strides = [*x.contiguous().stride()]
    strides[axis] = step
    # An offset that wraps to a 32-bit int leads to elsewhere in the arena, before or behind.
    elements = FAR + max(FAR, step * (x.shape[axis] - 1)) + x.numel()
    try:
        arena = arena_of(elements, problem.device, x.dtype)
    except MemoryError as error:
        trial.not_applicable(_FAR_APART, f"here: {error}")
        return []
    trial.applies(_FAR_APART)
    moved = arena[FAR:].as_strided(x.shape, strides).copy_(x)
    made = given._replace(**{name: moved})
    again = run_states(trial.subject, made, gradients=trial.subject.backward)
    del arena, moved, made
    if problem.device == "cuda":
        torch.cuda.empty_cache()
    again = again._replace(lse=Convention.of(trial.subject).natural(again.lse))
    claim = f"is wrong where {name} spans 2**31 elements along axis {axis}"
    return _agree(trial, again, G8, claim)


def of_a_ring(trial: Trial) -> list[Finding]:
    """S1: out, lse and gradients of a ring lie within the derived bound of the whole attention."""
    outputs: Mapping[str, Judged] = trial.outputs
    lengths = tuple(trial.problem.lengths)
    claim = f"of a ring over parts of {lengths} keys leaves the bound of the whole"
    return outside(trial, outputs, S1, claim)
