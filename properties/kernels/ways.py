"""The ways in which PyTorch lets a call be made, and the seeds that choose one.

Two calls of one process, or two backwards of one forward, meet what a kernel keeps between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from fa_verify.properties.kernels.subject import Subject

__all__ = ["OF_BACKWARD", "OF_FORWARD", "WAY", "seed_of", "way_of", "ways_of"]

# The name of the factor of covering arrays.
WAY = "way"

# The ways of every call, and of calls with a backward. They complete "differs ...".
OF_FORWARD = (
    "after a call with other values in the same memory",
    "after a call that raises",
    "while another call is alive",
    "beside a call in another thread",
)
OF_BACKWARD = (
    "without gradients, for inputs that require them",
    "in two backwards of one forward",
    "in a backward of some gradients alone",
    "in a backward that computes the forward again",
)


def ways_of(subject: Subject, kind: str) -> tuple[str, ...]:
    """Return the ways of a kernel's calls of a kind."""
    backward = kind not in ("cache", "quantised") and subject.backward
    return (*OF_FORWARD, *(OF_BACKWARD if backward else ()))


def way_of(seed: int, ways: Sequence[str]) -> tuple[str, int]:
    """Return the way that the seed of a call chooses, and a number that is left of the seed."""
    left, place = divmod(seed, len(ways))
    return ways[place], left


def seed_of(rng: Random, ways: Sequence[str], way: str) -> int:
    """Return a seed below 2**23 that chooses a way."""
    return rng.randrange(2**20) * len(ways) + ways.index(way)
