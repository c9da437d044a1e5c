"""Score modifications (softcap, ALiBi, bias, sinks): every guarantee holds with them too."""

from __future__ import annotations

import dataclasses

import pytest

from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.problem import Problem
from fa_verify.properties.checks import guarantees
from fa_verify.properties.checks.guarantees import GUARANTEES, OF_ADDED
from fa_verify.properties.inputs.bias_families import grouped_biases
from fa_verify.properties.inputs.families import NO_ALIBI, NO_BIAS, NO_SINKS
from fa_verify.properties.subjects.declarations import SCORE_MODS

# Several tiles, padding, empty rows, and a tile that the window's edge crosses.
SOME = Problem(
    B=2, H=2, M=19, N=21, D=24, Dv=17, dtype="fp16", dirty="nan", seed=1,
    mask=Mask(window_left=9, window_right=3, seqlens_q=(19, 8), seqlens_k=(12, 21)),
    layouts=("bshd", "padded", "transposed", "bhsd"), config="16x16", softcap=2.0, alibi="normal",
    bias="normal/hmn",
)  # fmt: skip


# Combinations of head_dims and alignments, on a GPU.
COMBINED = 5
# The kernel of dbias has constants for the dtype of a bias and for the axes along which it varies.
# The other kernels have none for the axes, so that two shapes share them.
SHAPES = {"choices": {"biases": grouped_biases(shapes=2)}, "kernels": 4}


@pytest.mark.parametrize("mod", SCORE_MODS)
@pytest.mark.shards(2, 14)
def test_modified_scores_lie_within_the_derived_bound(for_all, shard, mod):
    for_all(guarantees.accuracy, shard, kernels="shared", score_mods=(mod,))


@pytest.mark.parametrize("mod", SCORE_MODS)
@pytest.mark.shards(0, 5, float64=True)
def test_modified_scores_have_the_logic_of_float64(for_all, shard, mod):
    for_all(guarantees.logic, shard, kernels="shared", score_mods=(mod,))


# One of them only, as each combination of score modifications compiles another kernel.
NO_OTHERS = {"softcaps": (None,), "alibis": (NO_ALIBI,)}
ALONE = {"score_mods": ("bias",), **NO_OTHERS, "sinks": (NO_SINKS,)}
SINKS_ALONE = {"score_mods": ("sinks",), **NO_OTHERS, "biases": (NO_BIAS,)}


@pytest.mark.shards(0, 13)
def test_the_gradient_of_a_bias_lies_within_the_derived_bound(for_all, shard):
    for_all(OF_ADDED["dbias"], shard, runs=2, **SHAPES, **ALONE)


@pytest.mark.shards(1, 6, float64=True)
def test_the_gradient_of_a_bias_has_the_logic_of_float64(for_all, shard):
    for_all(OF_ADDED["dbias"], shard, runs=2, inputs="normal", **SHAPES, **ALONE)


@pytest.mark.shards(0, 13)
def test_the_gradient_of_sinks_lies_within_the_derived_bound(for_all, shard):
    for_all(OF_ADDED["dsinks"], shard, runs=2, kernels=COMBINED, **SINKS_ALONE)


@pytest.mark.parametrize("sinks", [NO_SINKS, "some_absent"])
@pytest.mark.parametrize("guarantee", GUARANTEES)
def test_modified_scores_keep_every_guarantee(check_one, subject, device, guarantee, sinks):
    config = SOME.config if SOME.config in subject.configs else next(iter(subject.configs))
    dtype = "fp64" if guarantee == "T3" else SOME.dtype
    problem = dataclasses.replace(SOME, config=config, dtype=dtype, device=device, sinks=sinks)
    check_one(problem, GUARANTEES[guarantee])


@pytest.mark.parametrize(
    ("check", "sinks"), [("G1", NO_SINKS), ("dbias", NO_SINKS), ("dsinks", "some_absent")]
)
def test_modified_scores_have_the_precision_of_fp32(check_one, subject, device, check, sinks):
    # The fp32 shards of the gradients are of TF32, whose bound holds any dot in TF32.
    config = SOME.config if SOME.config in subject.configs else next(iter(subject.configs))
    problem = dataclasses.replace(SOME, config=config, dtype="fp32", device=device, sinks=sinks)
    check_one(problem, {**GUARANTEES, **OF_ADDED}[check])
