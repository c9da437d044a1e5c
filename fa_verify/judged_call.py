"""The checks of a call that a test has made by itself, with a report of their shares."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from fa_verify.oracles.guarantee import BACKWARD, BIAS, LIMIT, RMS
from fa_verify.oracles.outputs import Numerics, Outputs
from fa_verify.oracles.problem import Problem
from fa_verify.properties.guarantees import limits
from fa_verify.properties.guarantees.accuracy import accuracy
from fa_verify.properties.guarantees.added_gradients import judge_bias_gradient, judge_sink_gradient
from fa_verify.properties.guarantees.backward import backward, forward_read
from fa_verify.properties.guarantees.compare import Finding
from fa_verify.properties.guarantees.independence import Agreement, agreement, is_ordinary
from fa_verify.properties.guarantees.statistics import bias, is_valid, rms
from fa_verify.properties.inputs.tensors import Inputs
from fa_verify.properties.kernels.declared import NUMERICS_THAT_DIFFER
from fa_verify.properties.kernels.subject import Subject
from fa_verify.properties.running.trial import (
    AttentionTrial,
    GradientRun,
    OutOfRangeError,
    plan_in_range,
)

__all__ = ["CallReport", "JudgedCall", "declarations_that_pass", "judge_call"]

_BOUND = "the bound"
_GIVEN = "the backward given the forward"
_LIMITS = "limits of independent roundings"
_STATISTICS = "statistics of errors"
# The checks beside the bound, by the first words of what they find.
_CHECKS = {
    BACKWARD.key: _GIVEN, LIMIT.key: _LIMITS, RMS.key: _STATISTICS, BIAS.key: _STATISTICS
}  # fmt: skip
_ADDED = ("alibi_slopes", "bias", "sinks")
# Values of numerics that a kernel may have beside those that widen the defaults.
_OTHERS: tuple[dict[str, object], ...] = (
    {"p_dtype": "input"}, {"p_dtype": "fp32"}, {"p_normalised": False},
)  # fmt: skip
_MOST_PASSING = 3  # candidates that are tried on the whole call


@dataclass(frozen=True)
class CallReport:
    """The figures of one call. ``str(report)`` says which check judged what.

    Args:
        largest: The largest error / bound of each output.
        judged: By check and output, the share of elements that it judged, from 0 to 1.
        left_out: By check, why it did not judge all outputs.
    """

    largest: Mapping[str, float]
    judged: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        told = []
        for check, shares in self.judged.items():
            whole = [name for name, share in shares.items() if share == 1]
            parts = [
                f"{100 * share:.0f} % of {name}" for name, share in shares.items() if 0 < share < 1
            ]
            judged = ", ".join([*([f"all of {', '.join(whole)}"] if whole else []), *parts])
            why = self.left_out.get(check)
            told.append(f"{check}: {judged or 'nothing'}{f' ({why})' if why else ''}")
        return "judged by " + "; ".join(told)


@dataclass(frozen=True)
class JudgedCall:
    """A call and its results.

    Args:
        subject: The kernel, which is not called, with the declared numerics.
        problem: The sizes, the mask and the scale.
        inputs: The tensors of the call; dout is 0 without gradients.
        got: The results; None for those that are not given.
        dbias: The gradient of the bias, if given.
        dsinks: The gradient of the sinks, if given.
    """

    subject: Subject
    problem: Problem
    inputs: Inputs
    got: Outputs[torch.Tensor | None]
    dbias: torch.Tensor | None = None
    dsinks: torch.Tensor | None = None

    @property
    def gradients(self) -> bool:
        """Whether dq, dk or dv is given."""
        return any(x is not None for x in self.got[2:])

    def declaring(self, numerics: Numerics) -> JudgedCall:
        """Return the call with other declared numerics."""
        subject = dataclasses.replace(self.subject, numerics=numerics)
        return dataclasses.replace(self, subject=subject)

    def part(self, b: int, group: int) -> JudgedCall:
        """Return the call of one key/value head of one entry; masks differ by entry and head."""
        problem, x, G = self.problem, self.inputs, self.problem.H // self.problem.Hk
        of_entry, heads = slice(b, b + 1), slice(group * G, (group + 1) * G)

        def of_rows(y: Any) -> Any:
            return None if y is None else y[of_entry, heads]

        def of_keys(y: Any) -> Any:
            return None if y is None else y[of_entry, group : group + 1]

        inputs = Inputs(of_rows(x.q), of_keys(x.k), of_keys(x.v), of_rows(x.dout))
        inputs = inputs._replace(dlse=of_rows(x.dlse))
        out, lse, dq, dk, dv = self.got
        got = Outputs(of_rows(out), of_rows(lse), of_rows(dq), of_keys(dk), of_keys(dv))
        mask = problem.mask
        lengths = mask.lengths(problem.B, problem.M, problem.N)
        mask = dataclasses.replace(mask, seqlens_q=(lengths[0][b],), seqlens_k=(lengths[1][b],))
        sizes = dataclasses.replace(problem, B=1, H=G, Hk=1, mask=mask)
        return dataclasses.replace(self, problem=sizes, inputs=inputs, got=got)


def judge_call(call: JudgedCall) -> tuple[list[Finding], CallReport]:
    """Return the findings of the checks that need one run alone, and what they judged.

    An output that leaves its bound is not named again by a sharper check.

    Raises:
        OutOfRangeError: The inputs are out of range.
    """
    trial = plan_in_range(call.subject, call.problem, call.inputs).trial(call.subject, call.got)
    names = [*trial.outputs]
    judged: dict[str, dict[str, float]] = {_BOUND: dict.fromkeys(names, 1.0)}
    left_out: dict[str, str] = {}
    findings = accuracy(trial)
    gradients = [name for name in names if name in ("dq", "dk", "dv")]
    if gradients:
        findings += backward(trial)
        given = forward_read(trial) is not None
        judged[_GIVEN] = dict.fromkeys(gradients, float(given))
        if not given:
            left_out[_GIVEN] = _unread(call)
    assert call.got.out is not None
    if call.dbias is not None:
        of_bias = GradientRun(call.got.out, call.got.lse, call.dbias)
        findings += judge_bias_gradient(trial, lambda: of_bias)
        judged[_BOUND]["dbias"] = 1.0
    if call.dsinks is not None and call.problem.N:
        of_sinks = GradientRun(call.got.out, call.got.lse, call.dsinks)
        findings += judge_sink_gradient(trial, lambda: of_sinks)
        judged[_BOUND]["dsinks"] = 1.0
    reason, found = _unmodelled(call), None
    if not reason:
        found = agreement(call.problem, call.inputs, call.subject.numerics_of(call.problem))
    sharper = _limits(call, trial, found, reason, judged, left_out)
    sharper += _statistics(call, trial, found, reason, judged, left_out)
    named = {x.output for x in findings}
    findings += [x for x in sharper if x.output not in named]
    return findings, CallReport(trial.peaks[0], judged, left_out)


def _unread(call: JudgedCall) -> str:
    """Return why gradients are not judged given the forward."""
    if not call.subject.numerics_of(call.problem).backward_reads:
        return "backward_reads is not declared"
    return "what it reads leaves its bound, or is not given"


def _unmodelled(call: JudgedCall) -> str:
    """Return why neither limits nor statistics apply, or nothing."""
    x = call.inputs
    if not x.q.dtype == x.k.dtype == x.v.dtype:
        return f"k and v are {x.k.dtype} and {x.v.dtype} beside {x.q.dtype}"
    added = [name for name in _ADDED if getattr(x, name) is not None]
    if added:
        return f"{' and '.join(added)} modify the scores"
    return limits.unmodelled(call.problem, call.subject.numerics_of(call.problem))


def _limits(
    call: JudgedCall, trial: AttentionTrial, found: Agreement | None, reason: str,
    judged: dict[str, dict[str, float]], left_out: dict[str, str],
) -> list[Finding]:  # fmt: skip
    """Return the findings of the limits; write what they judged."""
    shares = judged[_LIMITS] = dict.fromkeys(trial.outputs, 0.0)
    if found is None:
        left_out[_LIMITS] = reason
        return []
    if not call.gradients:  # dout is none
        trial = dataclasses.replace(
            trial, subject=dataclasses.replace(trial.subject, backward=False)
        )
    of_outputs = limits.spreads_of(trial, found)
    share = float(found.judged.double().mean())
    shares.update(dict.fromkeys(of_outputs, share))
    reasons = []
    if share < 1:
        reasons.append("in other heads, weights are nearly equal or have few values")
    if call.gradients and "dq" not in of_outputs and "dk" not in of_outputs:
        numerics = trial.subject.numerics_of(trial.problem)
        why = limits.without_gradients(trial.subject, trial.problem, numerics)
        why = why or ("lse is not given" if call.got.lse is None else "out or lse is out of bound")
        reasons.append(f"gradients: {why}")
    if trial.problem.dtype == "fp32":
        reasons.append("sums of float32 results, whose exponentials may err to one side")
    if reasons:
        left_out[_LIMITS] = "; ".join(reasons)
    return limits.outside(trial, of_outputs, found)


def _statistics(
    call: JudgedCall, trial: AttentionTrial, found: Agreement | None, reason: str,
    judged: dict[str, dict[str, float]], left_out: dict[str, str],
) -> list[Finding]:  # fmt: skip
    """Return the findings of RMS and bias; write what they judged."""
    names = [name for name in trial.outputs if name != "lse"]
    if found is not None and not is_valid(call.problem):
        reason = "the inputs are no 16-bit data with scores of a spread of 0.1 to 2"
    elif found is not None and not is_ordinary(call.inputs, found):
        reason = "rows are short, or the data is not like N(0, 1)"
    judged[_STATISTICS] = dict.fromkeys(names, 0.0 if reason else 1.0)
    if reason:
        left_out[_STATISTICS] = reason
        return []
    if not call.gradients:
        trial = dataclasses.replace(trial, got=trial.got._replace(dq=None, dk=None, dv=None))
    return [*rms(trial), *bias(trial)]


def declarations_that_pass(call: JudgedCall, findings: list[Finding]) -> list[str]:
    """Return a line with the other declared numerics with which a call passes, if there are any.

    A declaration passes if the checks that failed judge the same outputs and find nothing. Those
    with which fewer checks judge are not named beside others, nor where a few rows or columns fail:
    a rounding errs everywhere. Declarations are tried on the head of the first finding, and those
    that pass there on the whole call.

    Args:
        call: A call that fails.
        findings: Its findings.
    """
    part = _failing_part(call, findings)
    failed = judge_call(part)
    if not failed[0]:  # the fault does not show in one head
        return []
    whole = 0.0
    if any("bad only at" in x.places for x in failed[0]):
        whole = sum(sum(x.values()) for x in failed[1].judged.values())
    passing: list[tuple[float, str, JudgedCall]] = []
    for change in (*_OTHERS, *NUMERICS_THAT_DIFFER):
        other = dataclasses.replace(call.subject.numerics, **change)  # type: ignore[arg-type]
        if other == call.subject.numerics:
            continue
        share = _share_if_passing(part.declaring(other), failed)
        if share and share >= whole:
            told = " and ".join(f"{word}={value!r}" for word, value in change.items())
            passing.append((share, told, call.declaring(other)))
    most = max((share for share, _, _ in passing), default=0.0)
    best = [(told, of) for share, told, of in passing if share == most][:_MOST_PASSING]
    named = [told for told, of in best if part is call or _share_if_passing(of, (findings, None))]
    if not named:
        return []
    return [f"passes with {' or '.join(named)} in numerics: declare what the kernel does"]


def _share_if_passing(call: JudgedCall, failed: tuple[list[Finding], CallReport | None]) -> float:
    """Return what checks judge of a call, added up; 0 if one fails, or a failed one judges less."""
    try:
        findings, figures = judge_call(call)
    except OutOfRangeError:
        return 0.0
    before = failed[1] or figures
    for x in failed[0]:
        check = next((name for key, name in _CHECKS.items() if x.guarantee.startswith(key)), _BOUND)
        shares = figures.judged.get(check, {})
        if shares.get(x.output, 0.0) < before.judged.get(check, {}).get(x.output, 0.0):
            return 0.0
    return 0.0 if findings else sum(sum(x.values()) for x in figures.judged.values())


def _failing_part(call: JudgedCall, findings: list[Finding]) -> JudgedCall:
    """Return the head of the first finding, or the whole call where no head can be taken alone."""
    added = any(getattr(call.inputs, name) is not None for name in _ADDED)
    if added or call.dbias is not None or not call.problem.mask.is_plain:
        return call
    place = dict(x.split("=") for x in findings[0].where.split() if x[:2] in ("b=", "h="))
    b, h = (int(place.get(axis, 0)) for axis in "bh")
    of_keys = findings[0].output in ("dk", "dv")
    return call.part(b, h if of_keys else h // (call.problem.H // call.problem.Hk))
