"""Hypothesis profiles: how many examples a run draws, and whether every run draws the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import hypothesis

from fa_verify.pytest_plugin.environment import ON_GPU

__all__ = ["EXAMPLES", "EXAMPLES_OF_A_TURN", "PARENT", "PROFILES", "register"]

# Examples per test and shard. A GPU judges about twenty times as many problems a second as the
# interpreter.
EXAMPLES = 60 if ON_GPU else 6
ALWAYS = {
    "deadline": None,
    "suppress_health_check": list(hypothesis.HealthCheck),
    "print_blob": False,
    # The phase "explain" traces every line of the interpreter. Searching for further bugs takes the
    # time that is needed to shrink the first one.
    "report_multiple_bugs": False,
    "phases": [phase for phase in hypothesis.Phase if phase is not hypothesis.Phase.explain],
}
# All but "fuzz" draw the same problems in every run; "fuzz" keeps its examples and draws new ones.
PROFILES = {
    "gate": {"max_examples": EXAMPLES, "derandomize": True, "database": None},
    "dev": {"max_examples": EXAMPLES // 3, "derandomize": True, "database": None},
    "fuzz": {"max_examples": 50 * EXAMPLES},
    # For --fa-mask: a run takes less than a minute.
    "mask": {"max_examples": EXAMPLES // 2, "derandomize": True, "database": None},
}
# With --fa-minutes tests take turns; the number of examples in one turn.
EXAMPLES_OF_A_TURN = 3 * EXAMPLES
# Not Hypothesis's profile "ci", its default where CI is set: it draws the same in every run.
PARENT = hypothesis.settings.get_profile("default")


def register(**profiles: Mapping[str, Any]) -> None:
    """Register profiles with Hypothesis, replacing earlier ones of the same names."""
    for name, settings in profiles.items():
        hypothesis.settings.register_profile(name, PARENT, **settings, **ALWAYS)


register(**PROFILES)
hypothesis.settings.load_profile("gate")
