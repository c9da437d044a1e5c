"""G8, G9, G10 and G13: results do not depend on strides, neighbours, repetition or history."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

from fa_verify.oracles.bounds import error_model
from fa_verify.oracles.guarantee import G8, G9, G10, G13
from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.outputs import OUTPUTS, Outputs
from fa_verify.oracles.problem import DTYPES, Problem
from fa_verify.oracles.reference import torch_reference
from fa_verify.properties.guarantees.accuracy import accuracy, logic
from fa_verify.properties.guarantees.agreement import agree
from fa_verify.properties.guarantees.compare import Finding
from fa_verify.properties.inputs.families import NO_ALIBI, NO_BIAS, NO_DLSE, NO_SINKS
from fa_verify.properties.inputs.layouts import lay_out
from fa_verify.properties.inputs.tensors import Inputs, make
from fa_verify.properties.kernels.refusals import RefusedError
from fa_verify.properties.running.trial import AttentionTrial, SubjectError, plan_run, run_subject

__all__ = [
    "OTHER_DTYPE",
    "independence",
    "layout",
    "neighbours",
    "one_change_each",
    "repeatable",
    "sequence",
    "state",
]

_REPEATS = 3
# The other dtype of 16 bits, or the other of the two wider ones.
OTHER_DTYPE = {"fp16": "bf16", "bf16": "fp16", "fp32": "fp64", "fp64": "fp32"}
# Axes along which a dout has stride 0: all for a sum of out, some for a sum or mean over these.
_SHARED = (
    (0, 1, 2, 3),
    *itertools.chain(*(itertools.combinations(range(4), size) for size in (1, 2))),
)
_CONTIGUOUS = ("bhsd", "bhsd", "bhsd", "bhsd")


def layout(trial: AttentionTrial) -> list[Finding]:
    """G8: inputs with any strides, different for each tensor, give the same as contiguous copies.

    So does a dout with stride 0 along some axes, as in ``out.mean(2).backward()``, or along all, as
    in ``out.sum().backward()``. The seed chooses them.
    """
    problem, inputs = trial.problem, trial.inputs
    declared = trial.subject.layouts
    findings: list[Finding] = []
    if declared is None or "bhsd" in declared:
        again = run_subject(trial.subject, problem, make(problem, layouts=_CONTIGUOUS))
        findings = agree(trial, again, G8, "depends on the strides of its inputs")
    summable = trial.subject.backward and (declared is None or {"bhsd", "expanded"} <= {*declared})
    if findings or not summable or 0 in inputs.dout.shape:
        return findings
    axes = _SHARED[problem.seed % len(_SHARED)]
    first = tuple(slice(0, 1) if axis in axes else slice(None) for axis in range(4))
    # Padding may hold no numbers.
    dout = inputs.dout[first].nan_to_num(1.0, 1.0, 1.0).contiguous().expand(inputs.dout.shape)
    full = _judged(trial, inputs._replace(dout=dout.contiguous()))
    if full is None:
        return findings
    shared = run_subject(trial.subject, problem, inputs._replace(dout=dout))
    of = f"with stride 0 along {', '.join('BHMD'[axis] for axis in axes)}"
    of = "of out.sum().backward()" if len(axes) == 4 else of
    return agree(full, shared, G8, f"differs between a dout {of} and a contiguous copy")


def _judged(trial: AttentionTrial, inputs: Inputs) -> AttentionTrial | None:
    """Return the trial with other inputs and what ``agree`` needs; None if it is out of range."""
    subject, problem = trial.subject, trial.problem
    got = run_subject(subject, problem, inputs)
    if len(subject.promises(G8, problem.config)) == len(OUTPUTS):
        return dataclasses.replace(trial, inputs=inputs, got=got)
    scores: Any = {"mask": problem.mask, "sm_scale": problem.scale, "softcap": problem.softcap}
    judgement = error_model.judge(
        *inputs, **scores, in_dtype=problem.dtype, numerics=subject.numerics_of(problem)
    )
    if judgement.out_of_range is not None:
        return None
    want = torch_reference.attention(*inputs, **scores)
    return dataclasses.replace(trial, inputs=inputs, got=got, want=want, judgement=judgement)


def independence(trial: AttentionTrial) -> list[Finding]:
    """G9: one batch entry and one key/value head with its group give the same result alone.

    The seed chooses one such slice. It is computed alone, on views of the same tensors, and
    compared with its part of the whole result. A subject that declares layouts gets copies in the
    layouts of the problem, because the strides of a view may be of no declared layout.
    """
    problem = trial.problem
    if problem.B == 0 or problem.B * problem.Hk == 1:
        trial.not_applicable(G9.key, "to one batch entry and one key/value head")
        return []
    b, group = problem.seed % problem.B, problem.seed // problem.B % problem.Hk
    heads = slice(group * problem.G, (group + 1) * problem.G)
    of_rows = (slice(b, b + 1), heads)
    of_keys = (slice(b, b + 1), slice(group, group + 1))
    q, k, v, dout, dlse, slopes, bias, sinks = trial.inputs
    mask = problem.mask.sliced((b,), tuple(range(problem.H))[heads])
    alone = dataclasses.replace(problem, B=1, H=problem.G, Hk=1, mask=mask)
    try:
        of_dlse = None if dlse is None else dlse[of_rows]
        of_slopes = None if slopes is None else slopes[of_rows[-slopes.ndim :]]
        parts = [q[of_rows], k[of_keys], v[of_keys], dout[of_rows]]
        if trial.subject.layouts is not None:
            parts = [lay_out(x, name) for x, name in zip(parts, problem.layouts, strict=True)]
        of_bias = None if bias is None else bias.expand(problem.B, problem.H, -1, -1)[of_rows]
        of_sinks = None if sinks is None else sinks[heads]
        inputs = Inputs(*parts)._replace(
            dlse=of_dlse, alibi_slopes=of_slopes, bias=of_bias, sinks=of_sinks
        )
        part = run_subject(trial.subject, alone, inputs)
    except RefusedError as refusal:  # for example, too few heads for the subject
        why = f"to {trial.subject.name}, which refuses one batch entry and head alone: {refusal}"
        trial.not_applicable(G9.key, why)
        return []
    trial.applies(G9.key)
    whole = Outputs(*(None if x is None else x.clone() for x in trial.got))
    for name, into, piece in zip(OUTPUTS, whole, part, strict=True):
        if into is not None and piece is not None:
            into[of_keys if name in ("dk", "dv") else of_rows] = piece
    claim = f"computed for b={b}, key/value head {group} alone differs from the whole result"
    return agree(trial, whole, G9, claim)


def repeatable(trial: AttentionTrial) -> list[Finding]:
    """G10: repeated runs on the same inputs give bitwise equal results."""
    for _ in range(_REPEATS):
        try:
            again = run_subject(trial.subject, trial.problem, trial.inputs)
        except RefusedError as refusal:
            raise SubjectError(f"NotImplementedError in a second run: {refusal}") from refusal
        findings = agree(trial, again, G10, "differs from run to run")
        if findings:
            return findings
    return []


def state(trial: AttentionTrial) -> list[Finding]:
    """G13: a call gives the same result after calls with other arguments.

    Each of the other calls differs from the problem in one property: values, a length, heads,
    head_dim, scale, mask or dtype.
    """
    for neighbour in neighbours(trial.problem):
        inputs = make(neighbour)
        try:
            run_subject(trial.subject, neighbour, inputs)
        except RefusedError as refusal:
            _refused(trial, neighbour, str(refusal))
            continue
        except SubjectError as error:
            found = Finding.of_exception(error, trial.subject, trial.problem)
            return [dataclasses.replace(found, called=neighbour)]
        trial.applies(_part(trial.problem, neighbour))
        again = run_subject(trial.subject, trial.problem, trial.inputs)
        changed = _difference(trial.problem, neighbour)
        findings = agree(trial, again, G13, f"differs after a call with {changed}")
        if findings:
            return findings
    return []


def sequence(trial: AttentionTrial) -> list[Finding]:
    """G13: a call is right after one that differs from it in one argument, whichever it is.

    A call errs itself if it takes what an earlier one left behind, and ``state`` judges only the
    problem's own calls. So each other call is held to its own bound, and in float64 to the logic.
    """
    problem, subject = trial.problem, trial.subject
    for other in one_change_each(problem, subject.configs):
        planned = None if subject.excludes(other) else plan_run(subject, other)
        if planned is None:
            continue
        try:
            called = planned.run(subject)
        except RefusedError as refusal:
            _refused(trial, other, str(refusal))
            continue
        except SubjectError as error:
            found = Finding.of_exception(error, subject, problem)
            return [dataclasses.replace(found, called=other)]
        trial.applies(_part(problem, other))
        changed = _difference(problem, other)
        findings = [
            dataclasses.replace(
                found, guarantee=G13, problem=problem, called=other,
                claim=f"{found.claim} in a call with {changed}, which follows one without",
            )
            for found in accuracy(called) or logic(called)
        ]  # fmt: skip
        # The next call follows one of the problem again.
        again = run_subject(subject, problem, trial.inputs)
        findings += agree(trial, again, G13, f"differs after a call with {changed}")
        if findings:
            return findings
    return []


def one_change_each(
    problem: Problem, configs: Iterable[str], dtypes: Iterable[str] = DTYPES
) -> Iterator[Problem]:
    """Yield problems that differ from a problem in one field: every field, and each of the mask.

    Args:
        problem: The problem.
        configs: The configurations to change to.
        dtypes: The dtypes to change to.
    """
    layouts = ("bshd", "padded", "transposed", "bshd")
    others: dict[str, Iterable[Any]] = {
        "B": (problem.B + 1,),
        "H": (2 * problem.H,),
        "Hk": (problem.H if problem.Hk == 1 else 1,),
        # By one in the same tiles, and to more tiles.
        "M": (problem.M + 1, 2 * problem.M),
        "N": (problem.N - 1, 2 * problem.N),
        "D": (_other_columns(problem.D),),
        "Dv": (_other_columns(problem.Dv),),
        "dtype": dtypes,
        "mask": _changed_masks(problem.mask, problem),
        "sm_scale": (2 * problem.scale,),
        "layouts": (layouts,),
        "dlse": ("normal" if problem.dlse == NO_DLSE else NO_DLSE,),
        "config": configs,
        "softcap": (None, 0.5, 1.0),
        "alibi": ("normal" if problem.alibi == NO_ALIBI else NO_ALIBI,),
        "bias": ("normal/hmn" if problem.bias == NO_BIAS else NO_BIAS,),
        "sinks": ("ordinary" if problem.sinks == NO_SINKS else NO_SINKS,),
        "seed": (problem.seed ^ 1,),
        # They change the contents of tensors alone, as the seed does.
        **dict.fromkeys(("inputs", "dout", "dirty"), ()),
        # A run has one device and no batches of problems.
        **dict.fromkeys(("device", "seeds"), ()),
    }
    for item in dataclasses.fields(problem):
        for value in others[item.name]:
            if value == getattr(problem, item.name):
                continue
            try:
                yield dataclasses.replace(problem, **{item.name: value})
            except ValueError:  # the lengths of the mask forbid this size
                continue


def _changed_masks(mask: Mask, problem: Problem) -> Iterator[Mask]:
    """Yield masks that differ from a mask in one field, for each field that holds plain values."""
    lengths = mask.lengths(problem.B, problem.M, problem.N)
    shorter = [tuple(max(0, x - 1 - place) for place, x in enumerate(of)) for of in lengths]
    # The same lengths in another order too.
    of_q, of_k = (tuple(dict.fromkeys((x, x[::-1]))) for x in shorter)
    others: dict[str, tuple[Any, ...]] = {
        "window_left": (3, 7), "window_right": (3, 7),
        "seqlens_q": of_q, "seqlens_k": of_k,
    }  # fmt: skip
    for item in dataclasses.fields(mask):
        value = getattr(mask, item.name)
        own: tuple[Any, ...] = ()
        if isinstance(value, bool):
            own = (not value,)
        elif isinstance(value, int):
            own = (2 * value, value + 7, value // 2)
        for other in others.get(item.name, own):
            try:
                changed = dataclasses.replace(mask, **{item.name: other})
            except ValueError:  # out of the range of this field
                continue
            if changed != mask:
                yield changed
                if isinstance(other, int):
                    break


def neighbours(problem: Problem) -> Iterator[Problem]:
    """Yield problems of similar cost that differ from a problem in one property each."""
    mask, scale = problem.mask, problem.scale
    for change in (
        {"seed": problem.seed ^ 1},
        {"M": problem.M + 1},
        # Fewer keys, unless the lengths of the mask forbid it: a kernel may reuse the results or
        # buffers of a longer call.
        {"N": problem.N - 1 if problem.N > 1 and mask.seqlens_k is None else problem.N + 1},
        {"H": problem.Hk if problem.G > 1 else 2 * problem.H},
        {"D": _other_columns(problem.D)},
        {"sm_scale": 2 * scale if scale < 1 else scale / 2},
        {"mask": dataclasses.replace(mask, causal=mask.right != 0, window_right=None)},
        {"dtype": OTHER_DTYPE[problem.dtype]},
    ):
        yield dataclasses.replace(problem, **change)


def _other_columns(D: int) -> int:
    """Return a number of columns for which no kernel is compiled.

    It is padded to the same power of two, and it is a multiple of 8 where D is one, so that rows
    are aligned as before.
    """
    if D % 8 == 0:
        return ((D // 8 - 1 ^ 1) + 1) * 8
    return D - 1 if D % 8 == 7 else (D - 1 ^ 1) + 1


def _refused(trial: AttentionTrial, other: Problem, refusal: str) -> None:
    """Note that the subject refuses another call, so that none can follow it."""
    why = f"to {trial.subject.name}, which refuses it: {refusal}"
    trial.not_applicable(_part(trial.problem, other), why)


def _part(problem: Problem, other: Problem) -> str:
    """Name the part of G13 that another problem checks, such as "G13 after another H"."""
    return f"G13 after another {' and '.join(_changed(problem, other))}"


def _difference(problem: Problem, other: Problem) -> str:
    """Format the fields in which another problem differs, such as "M=18, mask=..."."""
    return ", ".join(f"{name}={getattr(other, name)}" for name in _changed(problem, other))


def _changed(problem: Problem, other: Problem) -> list[str]:
    """Return the names of the fields in which another problem differs."""
    names = (item.name for item in dataclasses.fields(problem))
    return [name for name in names if getattr(problem, name) != getattr(other, name)]
