"""Problems of fixed size shrink for kernels that are slow on a CPU."""

from __future__ import annotations

import dataclasses
from contextlib import contextmanager

import pytest
import torch

from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.problem import Problem
from fa_verify.properties.kernels.subject import Subject
from fa_verify.properties.running.tally import Tally
from fa_verify.properties.search.search import Runner
from fa_verify.properties.search.sizing import sized

PROBLEM = Problem(M=1024, N=2048, D=8, Dv=8, mask=Mask(causal=True), seed=3)


class Slow:
    """A kernel whose time is counted: so many seconds for each pair, and some for each call."""

    def __init__(self, of_a_pair=0.0, of_a_call=0.0, raises=None, **declared):
        self.of_a_pair, self.of_a_call, self.raises = of_a_pair, of_a_call, raises
        self.seconds, self.ran, self.watched = 0.0, [], []
        declared = {"backward": False, "masks": ("causal",)} | declared
        subject = Subject("slow", self.run, dtypes=("fp32",), **declared)
        self.runner = Runner(subject, Tally(), self.watching)

    def run(self, q, k, v, *, mask, sm_scale):
        if self.raises is not None:
            raise self.raises
        M, N = q.shape[2], k.shape[2]
        self.ran.append((M, N))
        self.seconds += self.of_a_call + self.of_a_pair * M * N
        seen = torch.ones(M, N, dtype=torch.bool).tril(N - M)
        scores = (q @ k.mT * sm_scale).masked_fill(~seen, -torch.inf)
        return scores.softmax(-1).nan_to_num() @ v

    @contextmanager
    def watching(self, problem):
        self.watched.append((problem.M, problem.N))
        yield

    def sized(self, problem=PROBLEM):
        return sized(self.runner, problem, seconds=20.0, clock=lambda: self.seconds)


def test_a_problem_of_a_quick_kernel_keeps_its_size():
    slow = Slow(of_a_pair=20 / PROBLEM.pairs / 1.01)
    assert slow.sized() == PROBLEM
    # A part was timed, with the watchdog.
    assert slow.watched == slow.ran
    assert all(m * n <= PROBLEM.pairs / 32 for m, n in slow.ran)


@pytest.mark.parametrize("factor", [1.5, 4, 10])
def test_a_problem_of_a_slow_kernel_takes_the_time_that_it_may(factor):
    slow = Slow(of_a_pair=factor * 20 / PROBLEM.pairs)
    found = slow.sized()
    assert 0.9 < found.pairs * factor / PROBLEM.pairs <= 1
    assert found == dataclasses.replace(PROBLEM, M=found.M, N=found.N)
    assert found.N / found.M == pytest.approx(2, rel=0.02)


def test_a_very_slow_kernel_gets_the_part_that_was_timed():
    slow = Slow(of_a_call=1000.0)
    found = slow.sized()
    assert [(found.M, found.N)] == slow.ran


def test_small_problems_are_not_timed():
    slow = Slow(of_a_call=1000.0)
    small = dataclasses.replace(PROBLEM, M=300, N=400)
    assert slow.sized(small) == small
    assert slow.ran == []


def test_sizes_stay_multiples():
    slow = Slow(of_a_pair=40 / PROBLEM.pairs, seqlen_multiple=32)
    found = slow.sized()
    assert found != PROBLEM
    assert (found.M % 32, found.N % 32) == (0, 0)


@pytest.mark.parametrize("raises", [NotImplementedError("no"), ValueError("wrong")])
def test_a_kernel_that_raises_is_asked_the_problem(raises):
    assert Slow(raises=raises).sized() == PROBLEM


def test_a_mask_of_lengths_keeps_its_problem():
    problem = dataclasses.replace(PROBLEM, mask=Mask(seqlens_k=(2000,)))
    assert Slow(of_a_call=1000.0, masks=("padding",)).sized(problem) == problem
