"""Strategies draw supported problems, and exclusions are reported with their declaration."""

from __future__ import annotations

import contextlib
import itertools
import random
import re

import pytest
from hypothesis import errors, find, given
from hypothesis import strategies as st

from fa_verify.oracles.masks.prefix_lm import PrefixLM
from fa_verify.properties.kernels.subject import Subject
from fa_verify.properties.kernels.supported import (
    ExcludedError,
    problems_of,
    problems_of_few_kernels,
)
from fa_verify.properties.kernels.vocabulary import SCORE_MODS, score_mods_of
from tests.unit.properties.problems.sampling import drawn

LIMITS = {"dtype": "fp16", "device": "cpu", "max_seqlen": 96, "max_cost": 24}
# Features that the tests of guarantees force.
FORCED = ({}, {"padding": True}, {"hidden": True}, {"empty_rows": True})
DECLARED = {
    "nothing": {},
    "dtypes": {"dtypes": ("fp16",)},
    "devices": {"devices": ("cpu",)},
    "head_dims": {"head_dims": (8, 64)},
    "head_dims that nobody asked for": {"head_dims": (72, 160)},
    "seqlen_multiple": {"seqlen_multiple": 32},
    "seqlen_multiple of much": {"seqlen_multiple": 256},
    "configs": {"configs": {"narrow": {}, "tf32": {"dtypes": ("fp32",)}, "wide": {}}},
    "dtypes of configs": {"dtypes": ("fp32",), "configs": {"a": {}, "b": {"dtypes": ("fp16",)}}},
    "max_seqlen": {"max_seqlen": 40},
    "max_seqlen of little": {"max_seqlen": 1},
    "multiple and max_seqlen": {"seqlen_multiple": 24, "max_seqlen": 80},
    "gqa": {"gqa": False},
    "m_ne_n": {"m_ne_n": False},
    "dv_ne_d": {"dv_ne_d": False},
    "no masks": {"masks": ()},
    "causal": {"masks": ("causal",)},
    "window": {"masks": ("window",)},
    "padding": {"masks": ("padding",)},
    "causal and padding": {"masks": ("causal", "padding")},
    "window and padding": {"masks": ("window", "padding")},
    "causal and window": {"masks": ("causal", "window")},
    "layouts": {"layouts": ("bshd", "packed")},
    "dirty": {"dirty": ("zero", "noise_k")},
    "no zero_sizes": {"zero_sizes": False},
    "no zero_sizes, no masks": {"zero_sizes": False, "masks": ()},
    "no zero_sizes, top-left": {
        "zero_sizes": False,
        "causal_alignment": "top-left",
        "masks": ("causal",),
    },
    "top-left": {"causal_alignment": "top-left"},
    "top-left, causal": {"causal_alignment": "top-left", "masks": ("causal",)},
    "top-left, padding": {"causal_alignment": "top-left", "masks": ("padding",)},
    "top-left, no masks": {"causal_alignment": "top-left", "masks": ()},
    "top-left, M = N": {"causal_alignment": "top-left", "m_ne_n": False},
    "M <= N": {"m_gt_n": False},
    "M <= N, padding": {"m_gt_n": False, "masks": ("padding",)},
    "M <= N, causal": {"m_gt_n": False, "masks": ("causal",), "zero_sizes": False},
    "M <= N, top-left": {"m_gt_n": False, "causal_alignment": "top-left"},
    "M <= N of 24": {"m_gt_n": False, "seqlen_multiple": 24},
    "one query": {"one_query": True},
    "one query, no masks": {"one_query": True, "masks": ()},
    "one query, padding": {"one_query": True, "masks": ("padding",), "zero_sizes": False},
    "one query, windows": {"one_query": True, "masks": ("causal", "window", "padding")},
    "one query, M <= N": {"one_query": True, "m_gt_n": False, "seqlen_multiple": 32},
    "one query, top-left": {"one_query": True, "causal_alignment": "top-left"},
    "always causal": {"always_causal": True},
    "always causal, alone": {"always_causal": True, "masks": ("causal",)},
    "always causal, windows": {"always_causal": True, "masks": ("causal", "window")},
    "always causal, top-left": {"always_causal": True, "causal_alignment": "top-left"},
    "default scale": {"fixed_scale": "1/sqrt(D)"},
    "a fixed scale": {"fixed_scale": 0.5},
    "packed": {"varlen": True},
    "packed, no zero_sizes": {"varlen": True, "zero_sizes": False, "masks": ("padding",)},
    "a prefill": {
        "varlen": True,
        "zero_sizes": False,
        "m_gt_n": False,
        "always_causal": True,
        "masks": ("causal", "padding"),
        "fixed_scale": "1/sqrt(D)",
    },
    "softcap": {"score_mods": ("softcap",)},
    "alibi": {"score_mods": ("alibi",)},
    "bias": {"score_mods": ("bias",)},
    "much": {
        "head_dims": (64, 128),
        "seqlen_multiple": 16,
        "gqa": False,
        "m_ne_n": False,
        "dv_ne_d": False,
        "masks": ("causal", "window"),
        "layouts": ("bshd",),
        "causal_alignment": "top-left",
    },
}


def attention(q, k, v, *, mask, sm_scale):
    return q


def subject(**declared) -> Subject:
    return Subject(name="attention", call=attention, **declared)


def possible(made: Subject) -> st.SearchStrategy:
    """Problems with and without a forced feature, as far as the declarations allow."""
    strategies = []
    for forced in FORCED:
        try:
            strategies.append(problems_of(made, **LIMITS, **forced))
        except ExcludedError:
            continue
    return st.one_of(strategies)


@pytest.mark.parametrize("declared", DECLARED)
@given(data=st.data())
def test_drawn_problems_are_supported(data, declared):
    made = subject(**DECLARED[declared])
    # Each example draws several problems, so that a profile of few examples has dozens.
    for problem in data.draw(st.lists(possible(made), min_size=6, max_size=6)):
        assert made.excludes(problem) is None


@pytest.mark.parametrize(
    ("declared", "condition"),
    [
        ("nothing", lambda p: p.G > 1 and p.M != p.N and p.D != p.Dv),
        ("nothing", lambda p: p.mask.causal and p.mask.window_left and p.mask.seqlens_k),
        ("nothing", lambda p: p.D == 256 and p.Dv == 255),
        ("head_dims", lambda p: p.D == 64),
        ("head_dims that nobody asked for", lambda p: (p.D, p.Dv) == (160, 72)),
        ("head_dims that nobody asked for", lambda p: (p.D, p.Dv) == (72, 160)),
        ("seqlen_multiple", lambda p: p.M == 96),
        ("seqlen_multiple of much", lambda p: p.M == p.N == 512),
        ("configs", lambda p: p.config == "wide"),
        ("max_seqlen", lambda p: p.N == 40),
        ("causal", lambda p: p.mask.causal and p.M != p.N),
        ("causal", lambda p: not p.mask.causal),
        ("window", lambda p: p.mask.window_left is not None),
        ("padding", lambda p: p.mask.seqlens_k is not None),
        ("dirty", lambda p: p.dirty == "noise_k"),
        ("layouts", lambda p: p.layouts == ("packed", "bshd", "bshd", "packed")),
        ("top-left", lambda p: p.mask.causal and p.M > 16),
        ("top-left", lambda p: p.mask.window_left is not None),
        ("top-left", lambda p: p.M != p.N and p.mask.seqlens_k is not None),
        ("top-left", lambda p: p.M == p.N > 16 and p.mask.seqlens_k is not None),
        ("top-left, causal", lambda p: p.M != p.N),
        ("top-left, padding", lambda p: p.mask.seqlens_q is not None),
        ("top-left, no masks", lambda p: p.M != p.N),
        ("softcap", lambda p: p.softcap is None),
        ("M <= N", lambda p: p.M < p.N and p.mask.seqlens_k not in (None, (0,))),
        ("M <= N", lambda p: p.M == 0 and p.N > 0),
        ("M <= N", lambda p: p.M == p.N > 32),
        ("M <= N of 24", lambda p: (p.M, p.N) == (24, 48)),
        ("one query", lambda p: p.N > 96),
        ("one query", lambda p: p.N == 0),
        ("one query", lambda p: p.mask.seqlens_k is not None and 0 in p.mask.seqlens_k),
        ("one query, no masks", lambda p: p.N > 96),
        ("one query, M <= N", lambda p: p.N == 96),
        ("always causal", lambda p: p.M > p.N > 16),
        ("always causal, windows", lambda p: p.mask.window_left is not None),
        ("a fixed scale", lambda p: p.D > 16),
        ("packed, no zero_sizes", lambda p: p.mask.lengths(p.B, p.M, p.N)[0][:2] == (p.M, 0)),
        ("a prefill", lambda p: p.M < p.N and p.mask.seqlens_q is not None),
    ],
)
def test_every_declared_value_is_drawn(declared, condition):
    strategy = problems_of(subject(**DECLARED[declared]), **LIMITS)
    # Two head dims at their limits meet in one of some thousand draws.
    for seed in range(10):
        with contextlib.suppress(errors.NoSuchExample):
            find(strategy, condition, random=random.Random(seed))
            return
    pytest.fail("no problem has the value")


@pytest.mark.parametrize(
    ("mod", "condition"),
    [
        ("softcap", lambda p: p.softcap < 1 and p.alibi == "none"),
        ("softcap", lambda p: p.bias != "none"),
        ("alibi", lambda p: p.alibi == "steep" and p.softcap is None),
        ("bias", lambda p: p.bias.startswith("needles") and p.alibi == "none"),
        ("bias", lambda p: p.alibi != "none"),
    ],
)
def test_score_modifications_are_drawn_beside_forced_features(mod, condition):
    strategy = problems_of(subject(score_mods=SCORE_MODS), **LIMITS, score_mods=(mod,))
    find(strategy, condition, random=random.Random(0))


@pytest.mark.parametrize("mod", SCORE_MODS)
@given(data=st.data())
def test_score_modifications_can_be_forced(data, mod):
    made = subject(score_mods=SCORE_MODS)
    problem = data.draw(problems_of(made, **LIMITS, score_mods=(mod,)))
    assert mod in score_mods_of(problem)
    assert score_mods_of(data.draw(problems_of(made, **LIMITS))) == ()
    alone = problems_of(subject(score_mods=(mod,)), **LIMITS, score_mods=(mod,))
    assert score_mods_of(data.draw(alone)) == (mod,)
    with pytest.raises(ExcludedError, match=re.escape("attention declares score_mods=()")):
        problems_of(subject(), **LIMITS, score_mods=(mod,))


@given(data=st.data())
def test_requested_values_are_drawn_within_the_declarations(data):
    made = subject(head_dims=(8, 16, 64), layouts=("bhsd", "bshd"), gqa=False)
    wanted = {"head_dims": (64, 24, 8), "layouts": ("bshd", "offset"), "inputs": "two_level"}
    problem = data.draw(problems_of(made, **LIMITS, **wanted))
    assert {problem.D, problem.Dv} <= {8, 64}
    assert set(problem.layouts) == {"bshd"}
    assert problem.inputs == "two_level"
    assert problem.G == 1


@pytest.mark.parametrize(
    ("declared", "wanted", "says"),
    [
        ({"dtypes": ("bf16",)}, {}, "dtypes=('bf16',)"),
        ({"devices": ("cuda",)}, {}, "devices=('cuda',)"),
        ({"masks": ("causal",)}, {"padding": True}, "masks=('causal',)"),
        ({"masks": ("padding",)}, {"hidden": True}, "masks=('padding',)"),
        ({"max_seqlen": 1}, {"hidden": True}, "max_seqlen=1"),
        ({"dirty": ("zero",)}, {"dirty": "nan"}, "dirty=('zero',)"),
        ({"seqlen_multiple": 64, "max_seqlen": 64}, {"empty_rows": True}, "max_seqlen=64"),
        ({"masks": (), "m_ne_n": False}, {"empty_rows": True}, "m_ne_n=False"),
        ({"masks": (), "zero_sizes": False}, {"empty_rows": True}, "zero_sizes=False"),
        (
            {"masks": ("causal",), "zero_sizes": False, "causal_alignment": "top-left"},
            {"empty_rows": True},
            "zero_sizes=False",
        ),
        ({"m_gt_n": False}, {"empty_rows": True}, "m_gt_n=False"),
        ({"one_query": True, "masks": ("causal",)}, {"hidden": True}, "one_query=True"),
        ({"one_query": True}, {"hidden": True, "empty_rows": True}, "one_query=True"),
        ({"varlen": True}, {"padding": True}, "varlen=True"),
        ({"always_causal": True}, {"mask": PrefixLM}, "always_causal=True"),
        (
            {"causal_alignment": "top-left"},
            {"hidden": True, "padding": True},
            "causal_alignment='top-left'",
        ),
        (
            {"causal_alignment": "top-left"},
            {"hidden": True, "empty_rows": True},
            "causal_alignment='top-left'",
        ),
    ],
)
def test_exclusions_name_their_declaration(declared, wanted, says):
    with pytest.raises(ExcludedError, match=f"^attention declares {re.escape(says)}$"):
        problems_of(subject(**declared), **LIMITS, **wanted)


def kernel_of(problem) -> tuple:
    """Return the constants of the kernel of a problem with contiguous tensors."""
    dims = (problem.D, problem.Dv)
    of_bias = None if problem.bias == "none" else problem.bias.startswith("shifted")
    mods = problem.softcap is None, problem.alibi == "none", of_bias, problem.sinks == "none"
    return (*(max(16, 1 << (x - 1).bit_length()) for x in dims), min(x % 8 for x in dims), *mods)


def mods_of(kernel: tuple) -> set[str]:
    """Return the score modifications of a result of ``kernel_of``."""
    softcap, alibi, of_bias, sinks = kernel[3:]
    absent = softcap, alibi, of_bias is None, sinks
    return {word for word, is_absent in zip(SCORE_MODS, absent, strict=True) if not is_absent}


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("mods", [(), ("bias",)])
def test_problems_are_drawn_for_few_kernels_and_those_of_another_seed_for_others(count, mods):
    made = subject(score_mods=SCORE_MODS, head_dims=(16, 8, 32, 24), layouts=("bhsd",))
    found = set()
    for seed in map(str, range(12)):
        few = problems_of_few_kernels(
            made, count=count, seed=seed, choices={}, score_mods=mods, **LIMITS
        )
        problems = drawn(few, 40)
        assert all(made.excludes(problem) is None for problem in problems)
        kernels = {*map(kernel_of, problems)}
        assert len(kernels) <= count
        found |= kernels
    assert len({x[:2] for x in found}) == 4
    assert len(found) > (20 if count > 1 and mods else 3)


def test_few_kernels_have_each_class_of_head_dims_with_the_wanted_score_mods_alone():
    made = subject(score_mods=SCORE_MODS, head_dims=(64, 33, 80, 128), layouts=("bhsd",))
    for seed in map(str, range(6)):
        few = problems_of_few_kernels(
            made, count=3, seed=seed, choices={}, score_mods=("sinks",), **LIMITS
        )
        alone = {
            max(problem.D, problem.Dv)
            for problem in drawn(few, 60)
            if (problem.softcap, problem.alibi, problem.bias) == (None, "none", "none")
        }
        assert {64, 128} <= alone


def test_tests_of_other_score_mods_share_kernels_of_each_two_of_them_and_of_all():
    made = subject(score_mods=SCORE_MODS, head_dims=(64, 33, 80, 128), layouts=("bhsd",))
    kernels: set[tuple] = set()
    for word in SCORE_MODS:
        few = problems_of_few_kernels(
            made, count=None, seed="", choices={}, score_mods=(word,), **LIMITS
        )
        found = {*map(kernel_of, drawn(few, 150))}
        assert all(word in mods_of(kernel) for kernel in found)
        kernels |= found
    words = [mods_of(kernel) for kernel in kernels]
    # One alone in two classes of head_dims, six pairs, and all of them.
    assert sorted(map(len, words)) == [1] * 8 + [2] * 6 + [4]
    # Any three of them occur in all ways, beside tests without any.
    for three in itertools.combinations(SCORE_MODS, 3):
        assert len({tuple(word in x for word in three) for x in (*words, set())}) == 8


@pytest.mark.parametrize("declared", [("softcap",), ("softcap", "sinks")])
def test_a_subject_of_few_score_mods_has_kernels_to_share(declared):
    made = subject(score_mods=declared, head_dims=(16,), layouts=("bhsd",))
    few = problems_of_few_kernels(
        made, count=None, seed="", choices={}, score_mods=("softcap",), **LIMITS
    )
    found = {frozenset(mods_of(kernel_of(problem))) for problem in drawn(few, 40)}
    assert found == {frozenset({"softcap"}), frozenset(declared)}


def test_choices_and_declarations_hold_for_few_kernels():
    made = subject(dv_ne_d=False, head_dims=(16, 64), layouts=("bshd", "strided"))
    few = problems_of_few_kernels(
        made, count=3, seed="", choices={"inputs": ("normal", "outliers")},
        head_dims=(8, 16, 64), **LIMITS,
    )  # fmt: skip
    problems = drawn(few, 60)
    assert {(x.D, x.Dv) for x in problems} == {(16, 16), (64, 64)}
    assert {x.inputs for x in problems} == {"normal", "outliers"}
    assert {y for x in problems for y in x.layouts} == {"bshd", "strided"}
