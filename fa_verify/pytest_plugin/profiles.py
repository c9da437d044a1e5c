"""Hypothesis profiles: how much a run draws, and whether it draws the same again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import hypothesis

from fa_verify.pytest_plugin.environment import ON_GPU

__all__ = ["EXAMPLES", "EXAMPLES_OF_A_TURN", "PARENT", "PROFILES", "register"]

# Examples a test and shard; a GPU judges about twenty times as many problems a second.
EXAMPLES = 60 if ON_GPU else 6
ALWAYS = {
    "deadline": None,
    "suppress_health_check": list(hypothesis.HealthCheck),
    "print_blob": False,
    # Explaining traces every line of the interpreter, and searching on for other bugs spends the
    # time that shrinking the first one needs.
    "report_multiple_bugs": False,
    "phases": [phase for phase in hypothesis.Phase if phase is not hypothesis.Phase.explain],
}
# Two that draw the same in every run, and one that remembers what it found and draws anew.
PROFILES = {
    "gate": {"max_examples": EXAMPLES, "derandomize": True, "database": None},
    "dev": {"max_examples": EXAMPLES // 3, "derandomize": True, "database": None},
    "fuzz": {"max_examples": 50 * EXAMPLES},
    # For a mask that is being written: in under a minute.
    "mask": {"max_examples": EXAMPLES // 2, "derandomize": True, "database": None},
}
# With --minutes tests take turns: of each that many examples, then the next.
EXAMPLES_OF_A_TURN = 3 * EXAMPLES
# Not those of Hypothesis where CI is set: they would draw the same in every run.
PARENT = hypothesis.settings.get_profile("default")


def register(**profiles: Mapping[str, Any]) -> None:
    """Makes profiles known to Hypothesis, or known anew."""
    for name, settings in profiles.items():
        hypothesis.settings.register_profile(name, PARENT, **settings, **ALWAYS)


register(**PROFILES)
hypothesis.settings.load_profile("gate")
