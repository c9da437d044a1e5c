"""S1 and S2: merged attention states, and a ring over parts of the keys.

For subjects that declare ``states``. ``properties/checks/merging.py`` holds the checks.
"""

from __future__ import annotations

import functools

import pytest
import torch

from fa_verify.conformance.drawn_calls import hold
from fa_verify.oracles.problem import DTYPES
from fa_verify.properties.checks.merging import MERGES, found_in
from fa_verify.properties.checks.ring import ring
from fa_verify.properties.inputs.families import TORCH_DTYPES
from fa_verify.properties.problems.merges import merges, rings


@pytest.fixture(autouse=True)
def merging(subject):
    """Skip subjects that merge no states."""
    if subject.states is None:
        pytest.skip(f"{subject.name} declares no states")


@pytest.fixture
def for_all_merges(subject):
    """A function that draws problems, and fails with the findings of a check on the smallest."""

    return functools.partial(hold, subject)


def numbers_of_parts(subject, dtype, device) -> dict[str, int]:
    """Return the limits of a function that merges two states alone, and none for others."""

    def is_taken(parts: int) -> bool:
        outs = torch.zeros(
            parts, 1, 1, 1, min(subject.head_dims or (16,)), dtype=TORCH_DTYPES[dtype]
        )
        lses = torch.zeros(
            parts, 1, 1, 1, dtype=torch.float64 if dtype == "fp64" else torch.float32
        )
        try:
            subject.run_states(outs.to(device), lses.to(device))
        except NotImplementedError:
            return False
        except Exception:  # a finding of the checks
            return True
        return True

    least, most = (0 if is_taken(1) else 2), (9 if is_taken(3) else 2)
    return {"least_parts": least, "most_parts": most}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("check", MERGES)
def test_merged_states_keep_every_guarantee(for_all_merges, subject, device, check, dtype):
    if dtype not in subject.dtypes:
        pytest.skip(f"{subject.name} declares dtypes={subject.dtypes}")
    # Groups and silent parts are merged two at a time where the subject takes no more.
    any_number = check in ("grouping", "one part")
    limits = {} if any_number else numbers_of_parts(subject, dtype, device)
    for_all_merges(
        merges(dtype, device, **limits),
        lambda problem: found_in(subject, problem, MERGES[check]),
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_ring_gives_the_attention_to_all_keys(for_all_merges, subject, device, dtype):
    if subject.merges_alone or not (subject.backward and subject.lse_grad):
        pytest.skip(f"{subject.name} does not attend, merge and differentiate both")
    if dtype not in subject.dtypes:
        pytest.skip(f"{subject.name} declares dtypes={subject.dtypes}")
    config = "16x16" if "16x16" in subject.configs else next(iter(subject.configs))
    for_all_merges(rings(dtype, device, config), lambda drawn: ring(subject, *drawn))
