"""Counts the alarms of the checks on drawn problems: ``python -m benchmarks.false_alarms``.

The problems are those of the conformance tests, or of covering arrays, in batches. Every check that
runs on each of them judges them: the bound, the backward given the forward, limits, statistics. On
a correct kernel, each alarm is a false one. The command prints the problems, elements and alarms of
each kernel, and the largest rate of alarms that is consistent with them.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import math
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hypothesis
import torch
from hypothesis import strategies as st

from benchmarks.findings.environment import device_name, versions
from benchmarks.saving import saved
from fa_verify.adapters.registry import NAMED, spec_of
from fa_verify.oracles.problem import Problem
from fa_verify.properties.guarantees.claims import Check, checks_of, standing_of
from fa_verify.properties.guarantees.compare import Finding
from fa_verify.properties.guarantees.limits import FAMILIES, judged_elements
from fa_verify.properties.kernels.covering_problems import covering_problems
from fa_verify.properties.kernels.loading import load
from fa_verify.properties.kernels.subject import Subject
from fa_verify.properties.kernels.supported import ExcludedError, problems_of
from fa_verify.properties.kernels.vocabulary import SCORE_MODS
from fa_verify.properties.problems.batched import batched_problems
from fa_verify.properties.running.trial import AttentionTrial, SubjectError, run_trial
from fa_verify.properties.search.search import draws
from fa_verify.shards import Shard, shards_of, shared_kernels

__all__ = [
    "CHECKS",
    "CONFIDENCE",
    "DRAWN",
    "KEPT",
    "MAX_SEQLEN",
    "ON_CPU",
    "PAIRS",
    "SHOWN",
    "TILE",
    "Counts",
    "combined",
    "counted",
    "drawn",
    "main",
    "most_likely",
]

ROOT = Path(__file__).parents[1]
CHECKS: dict[str, Check] = {
    **{x.name: x.check for x in standing_of("attention")},
    **checks_of("statistics"),
}
# Kernels on a CPU that need no interpreter.
ON_CPU = ("sdpa-math", "benchmarks/emulated.py:attention")
MAX_SEQLEN = {"cpu": 200, "cuda": 512}
# Rows and keys of a tile of the problems of an array.
TILE = 64
# Pairs of rows and keys of a batch, over all heads.
PAIRS = {"cpu": 2**18, "cuda": 2**23}
# Batches that are drawn at a time.
DRAWN = 8
# Alarms whose replay lines are kept.
KEPT = 20
# Alarms of a kernel that are printed.
SHOWN = 3
CONFIDENCE = 0.95


@dataclass
class Counts:
    """The counts of one kernel. Those of several processes add up."""

    problems: int = 0
    elements: int = 0
    by_limits: int = 0  # elements that limits judge
    alarms: int = 0
    checks: Counter[str] = field(default_factory=Counter)
    messages: list[str] = field(default_factory=list)

    def add(self, other: Counts) -> None:
        """Adds the counts of another process."""
        self.problems += other.problems
        self.elements += other.elements
        self.by_limits += other.by_limits
        self.alarms += other.alarms
        self.checks += other.checks
        self.messages = (self.messages + other.messages)[:KEPT]

    def alarm(self, findings: Sequence[Finding]) -> None:
        """Counts the findings of a problem as one alarm."""
        self.alarms += 1
        self.checks.update({finding.guarantee for finding in findings})
        self.messages = [*self.messages, str(findings[0])][:KEPT]

    def record(self) -> dict[str, Any]:
        """Returns the counts as JSON, with the largest rate of alarms a problem."""
        record = {**vars(self), "checks": dict(self.checks)}
        if self.problems:
            record["rate_below"] = float(f"{most_likely(self.alarms) / self.problems:.3g}")
        return record


def most_likely(alarms: int) -> float:
    """Returns the largest mean of a Poisson distribution that is consistent with a count.

    With a larger mean, so few alarms would have a probability below 1 - ``CONFIDENCE``. For no
    alarm it is 3.0.
    """

    def at_most(mean: float) -> float:
        # By logarithms: powers and factorials of hundreds exceed the range of a float.
        return sum(
            math.exp(k * math.log(mean) - mean - math.lgamma(k + 1)) for k in range(alarms + 1)
        )

    low, high = 0.0, 10.0 + 2 * alarms
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if at_most(middle) > 1 - CONFIDENCE else (low, middle)
    return high


def drawn(subject: Subject, shard: Shard, device: str, seed: str, **wanted: Any) -> list[Problem]:
    """Returns batches of problems; none if the subject's declarations exclude them.

    ``wanted`` are further arguments of ``problems_of``.
    """
    cost = max(4, PAIRS[device] // shard.tile**2)
    try:
        problems = problems_of(
            subject, dtype=shard.dtype, configs=(shard.config,), head_dims=shard.head_dims,
            tile=shard.tile, max_seqlen=MAX_SEQLEN[device], max_cost=max(4, cost // 3),
            max_pairs=0, zero_sizes=False, device=device, **wanted,
        )  # fmt: skip
    except ExcludedError:
        return []
    return _batches(subject, problems, DRAWN, shard.tile, device, seed)


def combined(subject: Subject, device: str, seed: str) -> list[Problem]:
    """Returns batches of the problems of a covering array, which depends on the seed."""
    of_seed = dataclasses.replace(subject, name=seed)
    calls = covering_problems(of_seed, device, kernels=shared_kernels(subject, device)).calls
    # Most are drawn, some of them twice.
    return _batches(subject, st.sampled_from(calls), 2 * len(calls), TILE, device, seed)


def _batches(
    subject: Subject, problems: st.SearchStrategy[Problem], count: int, tile: int, device: str,
    seed: str,
) -> list[Problem]:  # fmt: skip
    cost = max(4, PAIRS[device] // tile**2)
    found: list[Problem] = []

    @hypothesis.seed(seed)
    @draws(count)
    @hypothesis.given(batched_problems(problems, tile=tile, max_cost=cost, m_gt_n=subject.m_gt_n))
    def collect(problem: Problem) -> None:
        found.append(problem)

    collect()
    return found


def counted(
    subject: Subject, seconds: float, device: str, seed: str, score_mods: Sequence[str] = (),
    *, combinations: bool = False,
) -> Counts:  # fmt: skip
    """Judges problems for some seconds, each with these score modifications; returns the counts.

    With ``combinations`` they are of covering arrays.
    """
    counts, until = Counts(), time.monotonic() + seconds
    if combinations:
        problems = _of_arrays(subject, device, seed, until)
    else:
        problems = _problems(subject, device, seed, until, score_mods)
    for problem in problems:
        try:
            for trial in _trials(subject, problem):
                counts.problems += len(trial.problem.all_seeds)
                counts.elements += sum(x.numel() for x in trial.got if x is not None)
                counts.by_limits += judged_elements(subject, trial.problem, trial.peaks[0])
                for findings in _alarms(trial):
                    counts.alarm(findings)
        except SubjectError as error:
            counts.alarm([Finding.of_exception(error, subject, problem)])
    return counts


def _alarms(trial: AttentionTrial) -> list[list[Finding]]:
    """Returns the findings of each problem that fails alone, or else those of the batch."""
    findings, problem = _findings(trial), trial.problem
    if not findings:
        return []
    parts = (problem.part(i, i + 1) for i in range(len(problem.all_seeds)))
    alone = (_findings(x) for part in parts for x in _trials(trial.subject, part))
    return list(filter(None, alone)) or [findings]


def _findings(trial: AttentionTrial) -> list[Finding]:
    found = [x for check in CHECKS.values() for x in check(trial)]
    return [dataclasses.replace(x, kernel=trial.subject.source) for x in found]


def _trials(subject: Subject, problem: Problem) -> Iterator[AttentionTrial]:
    """Yields the run of a batch, or of the parts of it that are in range and not refused."""
    try:
        trial = run_trial(subject, problem)
    except NotImplementedError:
        return
    if trial is not None:
        yield trial
    elif problem.seeds:
        half = len(problem.seeds) // 2
        yield from _trials(subject, problem.part(0, half))
        yield from _trials(subject, problem.part(half, len(problem.seeds)))


def _problems(
    subject: Subject, device: str, seed: str, until: float, score_mods: Sequence[str]
) -> Iterator[Problem]:
    """Yields one new problem, and more of every shard in turn until a time of the monotonic clock.

    In every second turn, limits judge all of them.
    """
    families = itertools.cycle(sorted(FAMILIES))
    turn = 0
    while True:
        none = True
        for shard in shards_of(subject):
            wanted: dict[str, Any] = {"score_mods": tuple(score_mods)}
            if turn % 2:
                wanted |= {"inputs": next(families), "dout": "normal"}
            for problem in drawn(subject, shard, device, f"{seed}/{shard}/{turn}", **wanted):
                none = False
                yield problem
                if time.monotonic() > until:
                    return
        if none:
            return
        turn += 1


def _of_arrays(subject: Subject, device: str, seed: str, until: float) -> Iterator[Problem]:
    """Yields problems of one covering array after the other until a time of the monotonic clock."""
    for turn in itertools.count():
        for problem in combined(subject, device, f"{seed}/{turn}"):
            yield problem
            if time.monotonic() > until:
                return


def _subject(name: str) -> Subject:
    subject = load(spec_of(name))
    return dataclasses.replace(subject, name=name, source=name)


def _worker(
    number: int, kernels: Sequence[str], seconds: float, device: str, seed: str,
    score_mods: Sequence[str], *, combinations: bool,
) -> dict[str, Counts]:  # fmt: skip
    """Counts on every kernel, for an equal share of the time."""
    torch.set_num_threads(1)
    share = seconds / len(kernels)
    return {
        name: counted(
            _subject(name),
            share,
            device,
            f"{seed}/{number}/{name}",
            score_mods,
            combinations=combinations,
        )
        for name in kernels
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 1 after an alarm."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.false_alarms")
    parser.add_argument("--seconds", type=float, default=60.0, help="default: %(default)s")
    parser.add_argument(
        "--kernels", nargs="+", help="names, or files as in --kernel (default: all)"
    )
    parser.add_argument(
        "--score-mods", nargs="+", default=(), choices=SCORE_MODS,
        help="score modifications of every problem (default: none)",
    )  # fmt: skip
    parser.add_argument("--combinations", action="store_true", help="problems of covering arrays")
    parser.add_argument("--workers", type=int, help="processes (default: all CPUs, at most 8)")
    parser.add_argument("--seed", default="0", help="another seed draws other problems")
    parser.add_argument("--write", action="store_true", help="write to results/ instead of build/")
    options = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    workers = options.workers or min(8, os.cpu_count() or 1)
    here = [name for name, kernel in NAMED.items() if kernel.missing() is None]
    kernels = options.kernels or (here if device == "cuda" else ON_CPU)
    one = functools.partial(
        _worker, kernels=kernels, seconds=options.seconds, device=device, seed=options.seed,
        score_mods=options.score_mods, combinations=options.combinations,
    )  # fmt: skip
    found = {name: Counts() for name in kernels}
    for counts in _each(one, workers):
        for name, of in counts.items():
            found[name].add(of)
    record = {
        "device": device_name(), "versions": versions(), "seconds": options.seconds,
        "seed": options.seed, "score_mods": options.score_mods,
        "combinations": options.combinations,
        "confidence": CONFIDENCE, "kernels": {name: of.record() for name, of in found.items()},
    }  # fmt: skip
    path = saved(ROOT, "false-alarms.json", record, device=device, keep=options.write)
    for name, of in found.items():
        print(_line(name, of), *of.messages[:SHOWN], sep="\n")
    print(f"wrote {path}")
    return int(any(of.alarms for of in found.values()))


def _each(one: functools.partial[dict[str, Counts]], workers: int) -> Iterator[dict[str, Counts]]:
    if workers == 1:
        yield one(0)
        return
    with ProcessPoolExecutor(
        workers,
        mp_context=multiprocessing.get_context("spawn"),  # CUDA does not survive a fork
    ) as pool:
        yield from pool.map(one, range(workers))


def _line(name: str, of: Counts) -> str:
    if not of.problems:
        return f"{name}: no problem was judged"
    rate = most_likely(of.alarms) / of.problems
    checks = "".join(f", {count} by {check}" for check, count in of.checks.most_common())
    return (
        f"{name}: {of.problems:,} problems, {of.elements:,} elements ({of.by_limits:,} by limits), "
        f"{of.alarms} alarms{checks}; rate below {rate:.2g} a problem"
    )


if __name__ == "__main__":
    sys.exit(main())
