"""A few combinations of constants hold every value, and seeds reach every combination."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from fa_verify.properties.problems.kernel_classes import combinations, padded_groups

AXES = {"config": ("a", "b", "c"), "D": (16, 64), "mods": (None,)}


@pytest.mark.parametrize("count", range(1, 9))
@pytest.mark.parametrize("seed", ["", "fp16", "bf16"])
def test_the_values_of_an_axis_occur_equally_often(count, seed):
    chosen = combinations(AXES, count, seed)
    assert len(chosen) == count
    for name, values in AXES.items():
        times = Counter(row[name] for row in chosen)
        assert {*times} <= {*values}
        assert {times[x] for x in values} <= {count // len(values), -(-count // len(values))}


@pytest.mark.parametrize("count", [1, 3])
def test_seeds_reach_every_combination(count):
    drawn = [combinations(AXES, count, f"{seed}") for seed in range(200)]
    found = {tuple(row.values()) for chosen in drawn for row in chosen}
    assert found == {*itertools.product(*AXES.values())}


def test_a_seed_gives_the_same_combinations_again():
    assert combinations(AXES, 4, "a") == combinations(AXES, 4, "a")


@pytest.mark.parametrize(
    ("by_bytes", "groups"),
    [
        (False, ((64, 33), (16, 1, 8), (128, 80, 127), (192,))),
        (True, ((64,), (33,), (16,), (1,), (8,), (128,), (80,), (127,), (192,))),
    ],
)
def test_groups_hold_head_dims_that_kernels_load_alike(by_bytes, groups):
    dims = (64, 33, 16, 1, 8, 128, 80, 127, 192)
    assert padded_groups(dims, by_bytes=by_bytes) == groups
    assert padded_groups((80, 96, 65, 127), by_bytes=True) == ((80, 96), (65, 127))
