"""Samples of a strategy."""

from __future__ import annotations

from hypothesis import Phase, given, seed, settings

__all__ = ["drawn"]


def drawn(strategy, count):
    """Draws ``count`` problems, the same in every run.

    The number does not follow the profile, because tests estimate shares from the sample.
    """
    found = []

    @seed(0)
    @settings(max_examples=count, database=None, deadline=None, phases=[Phase.generate])
    @given(strategy)
    def collect(problem):
        found.append(problem)

    collect()
    return found
