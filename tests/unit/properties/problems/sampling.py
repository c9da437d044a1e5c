"""What a strategy draws, as a list."""

from __future__ import annotations

from hypothesis import Phase, given, seed, settings

__all__ = ["drawn"]


def drawn(strategy, count):
    """Problems drawn one after the other, the same ones in every run.

    Not as many as the profile says: a share is estimated, and that takes a number of its own.
    """
    found = []

    @seed(0)
    @settings(max_examples=count, database=None, deadline=None, phases=[Phase.generate])
    @given(strategy)
    def collect(problem):
        found.append(problem)

    collect()
    return found
