"""Problems have every declared value, and values that no call had are named."""

from __future__ import annotations

import pytest

from fa_verify.oracles.calls.cache import CacheProblem
from fa_verify.oracles.calls.merge import MergeProblem
from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.problem import Problem
from fa_verify.properties.kernels.declared_values import (
    Value,
    declared_values,
    examples,
    not_drawn,
    values_of,
)
from fa_verify.properties.kernels.subject import Subject
from fa_verify.properties.kernels.vocabulary import SCORE_MODS
from fa_verify.properties.running.tally import Tally
from fa_verify.quick import entries_for
from fa_verify.shards import shards_of
from tests.unit.properties.kernels.test_supported import DECLARED, subject

# Kernels of which every value has a problem, but for those named.
FURTHER = {
    "two sizes": {"head_dims": (64, 112)},
    "latent attention": {"head_dims": (128, 512, 576)},
    "multiples of 8": {"head_dims": tuple(range(8, 257, 8)), "dv_ne_d": False},
    "all modifications": {"score_mods": SCORE_MODS, "lse_grad": True},
    "configurations of other dtypes": {"configs": {"a": {}, "b": {"dtypes": ("fp32",)}}},
}
# Aligned to the top left, causal masks are drawn without lengths.
LEFT_OUT = {
    "always causal, top-left": {"masks": "padding", "dirty": "zero, nan, inf, max and 1 others"}
}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", [*DECLARED, *FURTHER])
def test_examples_are_supported_and_have_every_value(name, device):
    made = subject(**{**DECLARED, **FURTHER}[name])
    found = [*examples(made, device)]
    if device not in made.devices:
        assert found == []
        return
    assert [made.excludes(problem) for problem in found] == [None] * len(found)
    had = set().union(*(values_of(made, problem) for problem in found))
    assert not_drawn(made, had) == LEFT_OUT.get(name, {})
    assert len(found) <= len(declared_values(made))


def pairs_of(problems) -> tuple[set[int], set[int]]:
    pairs = [(x.D, x.Dv) for x in problems]
    return {D for D, _ in pairs}, {Dv for _, Dv in pairs}


@pytest.mark.parametrize("dims", [(64, 112), (64, 72), (128, 512, 576), (16, 256)])
def test_every_declared_head_dim_is_drawn_in_both_places(dims):
    made = subject(head_dims=dims)
    everything = {*dims}, {*dims}
    assert pairs_of(examples(made, "cpu")) == everything
    assert pairs_of(x.problem for x in entries_for(made, "cpu")) == everything
    assert {D for shard in shards_of(made) for D in shard.head_dims} == {*dims}
    alone = subject(head_dims=dims, dv_ne_d=False)
    assert pairs_of(x.problem for x in entries_for(alone, "cpu")) == everything
    assert {D for shard in shards_of(alone) for D in shard.head_dims} == {*dims}


def test_two_sizes_differ_in_a_group_of_larger_ones():
    groups = {shard.head_dims for shard in shards_of(subject(head_dims=(64, 112)))}
    assert groups == {(64,), (112, 64)}
    alone = {x.head_dims for x in shards_of(subject(head_dims=(64, 112), dv_ne_d=False))}
    assert alone == {(64,), (112,)}


def test_a_kernel_of_any_head_dim_is_asked_for_odd_and_large_ones():
    for problems in (
        examples(subject(), "cpu"),
        (x.problem for x in entries_for(subject(), "cpu")),
    ):
        D, Dv = pairs_of(problems)
        assert {256, 255} <= D & Dv
    assert {256, 129, 255} <= {D for shard in shards_of(subject()) for D in shard.head_dims}


def test_every_configuration_has_shards_whatever_its_name():
    made = subject(configs={"default": {}, "fast": {"dtypes": ("fp16",)}})
    assert {x.config for x in shards_of(made)} == {"default", "fast"}


def test_the_longest_declared_sequence_has_a_problem_where_it_takes_seconds():
    (longest,) = (x for x in examples(subject(max_seqlen=2048), "cpu") if x.N > 100)
    assert (longest.M, longest.N) == (3, 2048)
    made = subject(max_seqlen=2**20)
    had = set().union(*(values_of(made, problem) for problem in examples(made, "cpu")))
    assert not_drawn(made, had) == {"max_seqlen": "1,048,576"}
    square = subject(max_seqlen=2048, m_ne_n=False)
    assert max(x.N for x in examples(square, "cpu")) < 100


def test_values_that_no_call_had_are_named_by_declaration():
    made = subject(head_dims=(64, 72, 80, 96, 104, 112), dv_ne_d=False, masks=("causal",))
    had = {*declared_values(made)} - {Value("masks", "causal"), Value("gqa")}
    assert not_drawn(made, had) == {"masks": "causal", "gqa": ""}
    none = not_drawn(made, set())
    assert none["head_dims"] == "64, 72, 80, 96 and 2 others"


def test_a_packed_function_that_nothing_compares_is_named():
    made = subject(packed=lambda *_: None)
    assert not_drawn(made, {*declared_values(made)} - {Value("packed")}) == {"packed": ""}
    assert Value("packed") not in declared_values(
        subject(packed=lambda *_: None, same_bits=("varlen",))
    )


def test_a_call_with_a_cache_has_values_of_caches():
    call = CacheProblem(attention=Problem(D=8, Dv=8, mask=Mask(seqlens_k=(1,))), page_size=4)
    beside = subject(kvcache=lambda *_: None, page_sizes=(4, 16))
    assert values_of(beside, call) == {Value("cache", "paged"), Value("page_sizes", 4)}
    assert {x for x in declared_values(beside) if x.word == "page_sizes"} == {
        Value("page_sizes", 4), Value("page_sizes", 16)
    }  # fmt: skip

    def decode(q, k_cache, v_cache, *, cache_seqlens, page_table, sm_scale): ...

    decode.cache, decode.head_dims, decode.score_mods = ("paged",), (8, 64), ("softcap", "bias")
    alone = Subject.of(decode, "decode")
    assert {Value("D", 8), Value("cache", "paged")} <= values_of(alone, call)
    assert not_drawn(alone, values_of(alone, call))["D"] == "64"
    assert not_drawn(alone, set())["score_mods"] == "softcap"
    assert [*examples(alone, "cpu")] == []


def test_a_merge_has_a_dtype_alone():
    def merge(outs, lses): ...

    merge.states, merge.dtypes = True, ("fp32", "bf16")
    made = Subject.of(merge, "merge")
    assert not_drawn(made, values_of(made, MergeProblem(dtype="fp32"))) == {"dtypes": "bf16"}


def test_a_tally_adds_the_values_of_judged_problems():
    made, tally = subject(head_dims=(16, 64)), Tally()
    tally.judged(made, Problem(), {"out": 0.5})
    total = Tally()
    total.add(tally.hand_over())
    assert total.values == values_of(made, Problem())
    assert tally.values == set()
