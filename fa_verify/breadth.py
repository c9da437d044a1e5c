"""Breadth: the number and size of the problems of a kernel, by the time that it takes on a CPU."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import pytest

from fa_verify.forks import in_forks
from fa_verify.oracles.problem import Problem
from fa_verify.properties.kernels.covering_caches import covering_caches
from fa_verify.properties.kernels.covering_calls import CoveringCalls
from fa_verify.properties.kernels.covering_merges import covering_merges
from fa_verify.properties.kernels.covering_problems import covering_problems
from fa_verify.properties.kernels.fitting import fitted
from fa_verify.properties.kernels.refusals import RefusedError
from fa_verify.properties.kernels.subject import Subject
from fa_verify.properties.running.trial import SubjectError, run_trial
from fa_verify.session import device_of, is_ours, mask_of, subject_of
from fa_verify.shards import shared_kernels

__all__ = ["BREADTHS", "Breadth", "breadth_of", "choose_breadth", "combinations_of"]


class Breadth(NamedTuple):
    """A number and size of problems.

    Args:
        seconds: CPU time of a pair of tiles, of 64 rows and keys, that a kernel takes at most.
        tile_pairs: Limit on the tile pairs of a problem of the covering array; None is no limit.
        batched: Factor on the number of problems that tests of batches draw.
    """

    seconds: float
    tile_pairs: int | None
    batched: int

    @property
    def described(self) -> str:
        """The limits in words, for the header of a run."""
        most = "" if self.tile_pairs is None else f" of up to {self.tile_pairs} pairs of tiles"
        return f"combinations of values{most}, {self.batched} times the least size of batches"


# The first one that a kernel is fast enough for. A function of PyTorch takes 3 to 8 ms, with the
# oracle, and the interpreter 100 ms and more.
BREADTHS = {
    "wide": Breadth(0.02, None, 10),
    "medium": Breadth(0.08, 48, 3),
    "narrow": Breadth(float("inf"), 24, 1),
}
_UNCHANGED = Breadth(0.0, None, 1)
# Limit of the project's own kernels in the interpreter, in tiles of up to 32 rows and keys.
_OURS_ON_CPU = 20
_TILES, _TILE, _LIMIT = 8, 64, 30.0
_COMBINATIONS = pytest.StashKey[dict[str, CoveringCalls[Any]]]()


def choose_breadth(config: pytest.Config) -> None:
    """Set the option --fa-breadth by the time that the kernel takes, unless it is given."""
    if hasattr(config, "workerinput"):
        config.option.fa_breadth = config.workerinput["breadth"]
        return
    given = config.getoption("--fa-breadth", None)
    if given is not None and given not in BREADTHS:
        raise pytest.UsageError(f"--fa-breadth is {given!r}; needs one of {', '.join(BREADTHS)}")
    of_few = config.getoption("--fa-quick", False) or config.getoption("--fa-replay", None)
    draws = not (of_few or config.getoption("collectonly", False))
    if given is None and not is_ours(config) and draws:
        subject = subject_of(config)
        if device_of(config) == "cpu" and subject.attends:
            seconds = _seconds(subject)
            config.option.fa_breadth = next(k for k, x in BREADTHS.items() if seconds <= x.seconds)


def breadth_of(config: pytest.Config) -> Breadth:
    """Return the breadth of a run. On a GPU, and for the project's own kernels, there is one."""
    return BREADTHS.get(config.getoption("--fa-breadth", None) or "", _UNCHANGED)


def _seconds(subject: Subject) -> float:
    """Return the CPU time of a pair of tiles, with the oracle's; infinite without a result."""
    problem = fitted(subject, Problem(H=2, Hk=2, M=2 * _TILE, N=2 * _TILE, D=64, Dv=64), "cpu")
    if problem is None:
        return float("inf")

    def timed() -> float:
        # The first call imports modules.
        for _ in range(2):
            start = time.process_time()
            try:
                if run_trial(subject, problem) is None:
                    return float("inf")
            except (SubjectError, RefusedError):
                return float("inf")
        return time.process_time() - start

    # In a fork, which the kernel may end.
    (ended,) = in_forks([timed], jobs=1, seconds=_LIMIT)
    return float("inf") if ended.value is None else ended.value / _TILES


def combinations_of(config: pytest.Config, kind: str) -> CoveringCalls[Any]:
    """Return the covering array of a kind of call, made once in a process."""
    arrays = config.stash.setdefault(_COMBINATIONS, {})
    if kind not in arrays:
        arrays[kind] = _combinations(config, kind)
    return arrays[kind]


def _combinations(config: pytest.Config, kind: str) -> CoveringCalls[Any]:
    subject, device, mask = subject_of(config), device_of(config), mask_of(config)
    # No kernel is compiled for the array alone.
    if kind == "cache":
        return covering_caches(subject, device, "caches of " if device == "cuda" else None)
    if kind == "merge":
        return covering_merges(subject, device)
    # Masks do not depend on dtype, configuration and head dims.
    kernels = shared_kernels(subject, device, one=mask is not None)
    most = breadth_of(config).tile_pairs
    if kernels:
        most = _OURS_ON_CPU if device == "cpu" else None
    return covering_problems(subject, device, most=most, mask=mask, kernels=kernels)
