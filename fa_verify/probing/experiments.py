"""Experiments: a problem with exact tensors, whose result depends on one property alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from fa_verify.oracles.problem import Problem
from fa_verify.probing.answers import Answer, undecided
from fa_verify.properties.kernels.subject import Subject

__all__ = ["EXPERIMENTS", "Experiment", "Observation", "decided", "experiment", "observe"]


@dataclass(frozen=True)
class Observation:
    """The results of an experiment, and those that each answer predicts.

    Args:
        got: (n,) float64, what the kernel returned; None if it raised.
        expected: (n,) float64 by answer.
        tolerance: (n,) float64 by answer, the largest error that arithmetic in float32 explains.
        error: The exception, if the kernel raised.
    """

    got: torch.Tensor | None
    expected: dict[str, torch.Tensor]
    tolerance: dict[str, torch.Tensor]
    error: str = ""

    def fits(self) -> tuple[str, ...]:
        """Return the answers that explain every result."""
        if self.got is None or not self.got.numel():
            return ()
        return tuple(
            name
            for name, want in self.expected.items()
            if bool(((self.got - want).abs() <= self.tolerance[name]).all())
        )

    def said(self, fits: tuple[str, ...], others: tuple[str, ...]) -> str:
        """Describe the result that tells an answer that fits from the nearest of the others."""
        if self.got is None:
            return self.error
        if not self.got.numel():
            return "no number tells the answers apart"
        got, table = self.got.flatten(), {name: x.flatten() for name, x in self.expected.items()}
        # Against an answer that fits, or against the result if none does.
        known = table[fits[0]] if fits else got
        # The answer that is hardest to tell apart, where it differs most.
        apart = {name: (table[name] - known).abs() for name in others}
        rival = min(apart, key=lambda name: float(apart[name].max()), default=None)
        at = int(got.abs().argmax() if rival is None else apart[rival].argmax())
        shown = (*fits[:1], *([] if rival is None else [rival]))
        wants = ", ".join(f"{table[name][at].item():.9g} if {name}" for name in shown)
        return f"got {got[at].item():.9g}; {wants}"


@dataclass(frozen=True)
class Experiment:
    """An experiment on a problem's sizes and dtype.

    Args:
        name: Key of ``EXPERIMENTS``.
        problem: Sizes, dtype, scale and device. Its input families are not used.
        numbers: Further arguments of the experiment.
    """

    name: str
    problem: Problem
    numbers: tuple[int, ...] = ()

    def to_json(self) -> str:
        """Return one line of JSON."""
        record: dict[str, Any] = {"experiment": self.name}
        if self.numbers:
            record["numbers"] = self.numbers
        record["problem"] = json.loads(self.problem.to_json())
        return json.dumps(record, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Experiment:
        """Read the output of ``to_json``.

        Raises:
            ValueError: The text is not the JSON of an experiment, or its name is unknown.
        """
        try:
            record = json.loads(text)
            found = cls(
                record["experiment"], Problem.from_record(record["problem"]),
                tuple(int(x) for x in record.get("numbers", ())),
            )  # fmt: skip
        except (json.JSONDecodeError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"experiment is {text[:80]!r} ({error}); needs its JSON") from None
        if found.name not in EXPERIMENTS:
            raise ValueError(f"experiment is {found.name!r}; needs one of {tuple(EXPERIMENTS)}")
        return found


Run = Callable[[Subject, Experiment], Observation]
EXPERIMENTS: dict[str, Run] = {}


def experiment(name: str) -> Callable[[Run], Run]:
    """Register the function that runs an experiment."""

    def register(run: Run) -> Run:
        EXPERIMENTS[name] = run
        return run

    return register


def observe(subject: Subject, which: Experiment) -> Observation:
    """Run an experiment."""
    return EXPERIMENTS[which.name](subject, which)


def decided(word: str, which: Experiment, seen: Observation, values: dict[str, Any]) -> Answer:
    """Return an answer if all answers of an experiment that fit give one value.

    Args:
        word: The property.
        which: The experiment.
        seen: Its observation.
        values: The value of the property by answer of the experiment.
    """
    fits = seen.fits()
    found = {repr(values[name]): values[name] for name in fits}
    others = tuple(name for name in seen.expected if repr(values[name]) not in found)
    if len(found) == 1:
        (value,) = found.values()
        if value is not None:
            return Answer(word, value, "shown", seen.said(fits, others), which.to_json())
    why = f"explained by {' and by '.join(fits)}" if fits else "explained by no known answer"
    return undecided(word, f"{why}: {seen.said(fits, others)}", which.to_json())
