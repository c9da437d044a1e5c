"""The problems of the covering array have the values that their row says."""

from __future__ import annotations

import pytest
import torch

from fa_verify.oracles.masks.prefix_lm import PrefixLM
from fa_verify.properties.guarantees.accuracy import accuracy
from fa_verify.properties.guarantees.ways import one_way
from fa_verify.properties.kernels.covering_calls import combinations_line, named
from fa_verify.properties.kernels.covering_problems import SharedKernel, covering_problems
from fa_verify.properties.kernels.subject import Subject
from fa_verify.properties.kernels.vocabulary import SCORE_MODS
from fa_verify.properties.kernels.ways import way_of, ways_of
from tests.unit.properties.guarantees.calls import found_on
from tests.unit.properties.kernels.test_supported import DECLARED, subject

FURTHER = {
    "nothing": {},
    "all modifications": {"score_mods": SCORE_MODS, "lse_grad": True},
    "multiples of 64": {"seqlen_multiple": 64, "head_dims": (64, 128), "masks": ("causal",)},
    "latent attention": {"head_dims": (128, 512, 576)},
    "multiples of 8": {"head_dims": tuple(range(8, 257, 8)), "dv_ne_d": False},
}
KERNELS = (SharedKernel("fp16", "default", 64, 128), SharedKernel("fp32", "default", 16, 16))


# All declarations take a minute.
@pytest.mark.parametrize("name", [*FURTHER, *[*DECLARED][1::3]])
def test_problems_are_within_the_declarations(name):
    """The subject's declarations exclude none, and every value that can be drawn occurs."""
    one = subject(**{**DECLARED, **FURTHER}[name])
    if one.merges_alone or one.reads_caches_alone:
        pytest.skip("takes no padded tensors")
    array = covering_problems(one, one.devices[0])
    assert array.calls
    assert not array.left_out
    assert [x for x in array.calls if one.excludes(x)] == []
    assert {x.dtype for x in array.calls} == {*one.dtypes}
    assert len(array.calls) == len({x.to_json() for x in array.calls})


def test_three_conditions_meet():
    """Conjunctions that a thousand random problems lack."""
    problems = covering_problems(subject(), "cpu").calls
    for what in (
        lambda x: x.G > 4 and x.M > 64,
        lambda x: x.H > 16 and x.mask.window_left is not None,
        lambda x: x.B > 8 and x.mask.causal and x.H > 16,
        lambda x: x.N > 128 and x.M > x.N,
        lambda x: x.M == x.N > 128 and x.mask.causal,
        lambda x: x.mask.causal and (x.mask.window_left or 0) > 64,
        lambda x: x.mask.causal and x.mask.window_left is not None and x.G > 4,
        lambda x: x.D > 128 and x.G > 4 and x.M > 64,
    ):
        assert any(map(what, problems))


def test_a_limit_leaves_large_problems_out():
    array = covering_problems(subject(), "cpu", most=24)
    assert all(-(-x.M // 64) * -(-x.N // 64) * x.B * x.H <= 24 for x in array.calls)
    missing, count = array.missing(range(len(array.calls)))
    assert missing == array.left_out
    line = combinations_line(missing, count, "attention")
    assert line.startswith(f"{count - len(missing):,} of {count:,} combinations")
    assert "H>16" in line


def test_problems_of_few_kernels_compile_no_others():
    array = covering_problems(subject(score_mods=SCORE_MODS), "cuda", kernels=KERNELS)
    assert {(x.dtype, x.config, x.D) for x in array.calls} == {x[:3] for x in KERNELS}
    assert all(x.D == x.Dv and len({*x.layouts}) == 1 for x in array.calls)
    assert all(x.softcap is None and x.bias == "none" for x in array.calls)
    # Lengths end at the tiles of the kernel.
    assert {x.M % 128 for x in array.calls if x.dtype == "fp16"} >= {0, 1}


def test_problems_have_the_masks_of_a_class():
    array = covering_problems(subject(), "cpu", mask=PrefixLM)
    assert all(isinstance(x.mask, PrefixLM) for x in array.calls)
    assert any(x.mask.seqlens_k and x.G > 4 for x in array.calls)


def test_what_is_not_judged_is_missing():
    array = covering_problems(subject(), "cpu")
    missing, count = array.missing(range(1, len(array.calls)))
    assert 0 < len(missing) < count
    assert missing < array.combinations[0]


def test_combinations_are_named():
    words = named((("G", "G>4"), ("tiles of N", "2 tiles"), ("left window", "over tiles")))
    assert words == "G>4, 2 tiles of N, left window over tiles"
    words = named((("append", True), ("causal", False), ("G", (2, 3, 4)), ("page", 16)))
    assert words == "append, no causal, G=2-4, page 16"
    assert named((("window", None), ("M", (1,)))) == "no window, M=1"


@pytest.mark.parametrize("name", ["nothing", "one query, top-left", "a prefill", "packed"])
def test_declarations_exclude_few_of_the_rows_that_are_made(monkeypatch, name):
    """A row is made and refused in 100 us; constraints on its factors exclude most before."""
    asked = []
    excludes = Subject.excludes
    monkeypatch.setattr(
        Subject, "excludes", lambda self, problem: asked.append(problem) or excludes(self, problem)
    )
    one = subject(**DECLARED[name])
    array = covering_problems(one, one.devices[0])
    assert len(array.calls) > 20
    assert len(asked) < 20 * len(array.calls)


def test_a_subject_of_one_query_has_one():
    array = covering_problems(subject(one_query=True), "cpu")
    assert {x.M for x in array.calls} == {1}


def test_packed_sequences_are_empty_at_the_ends_and_in_a_row():
    array = covering_problems(subject(**DECLARED["packed"]), "cpu")
    lengths = [x.mask.seqlens_k for x in array.calls if x.mask.seqlens_k]
    assert any(x[0] == 0 < x[-1] for x in lengths)
    assert any(x[-1] == 0 < x[0] for x in lengths)
    assert any((0, 0) == x[i : i + 2] for x in lengths for i in range(1, len(x) - 2))
    # An offset of the queries stays too, or some rows see no key.
    rows = [(x.mask.seqlens_q or (x.M,) * x.B, x.mask.seqlens_k) for x in array.calls]
    empty = [(m == 0) for q, k in rows if k for m, n in zip(q, k, strict=True) if n == 0]
    assert {*empty} == {True, False}


def test_every_way_of_calling_meets_every_shape():
    one = subject()
    array, ways = covering_problems(one, "cpu"), ways_of(one, "attention")
    assert len(array.asks) < len(array.calls) / 2
    asked = [array.calls[x] for x in array.asks]
    for what in (
        lambda x: (x.B > 1) + (x.B > 8), lambda x: (x.G > 1) + (x.G > 4), lambda x: x.dtype,
        lambda x: x.mask.causal, lambda x: x.mask.window_left is None,
        lambda x: x.mask.seqlens_k is None, lambda x: (x.M > x.N) - (x.M < x.N),
    ):  # fmt: skip
        values = {what(x) for x in asked}
        assert {(way_of(x.seed, ways)[0], what(x)) for x in asked} == {
            (way, value) for way in ways for value in values
        }
    # Those that do not ask cover no way.
    missing, _ = array.missing({*range(len(array.calls))} - array.asks)
    of_ways = {x for x in missing if "way" in dict(x)}
    assert {x for row in array.combinations for x in row if "way" in dict(x)} == of_ways


class _ForGroups(torch.autograd.Function):
    """Attention whose dk is wrong where q needs no gradient and groups are large."""

    @staticmethod
    def forward(ctx, q, k, v, seen, scale):
        ctx.save_for_backward(q, k, v, seen)
        ctx.scale = scale
        return _attention(q, k, v, seen, scale)

    @staticmethod
    def backward(ctx, dout):
        q, k, v, seen = ctx.saved_tensors
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in (q, k, v)]
            out = _attention(*leaves, seen, ctx.scale)
        dq, dk, dv = torch.autograd.grad(out, leaves, dout)
        wrong = not ctx.needs_input_grad[0] and q.shape[1] > 4 * k.shape[1]
        return dq, dk * (2 if wrong else 1), dv, None, None


def _attention(q, k, v, seen, scale):
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = (q @ k.mT * scale).masked_fill(~seen, -1e9)
    return torch.where(seen.any(-1, keepdim=True), scores.softmax(-1) @ v, 0.0)


def test_a_fault_of_a_way_and_of_groups_is_found():
    def kernel(q, k, v, *, mask, sm_scale):
        seen = mask.dense(*q.shape[:3], k.shape[2])
        return _ForGroups.apply(q, k, v, seen, sm_scale)

    kernel.dtypes, kernel.masks, kernel.head_dims = ("fp64",), ("causal",), (16,)
    kernel.returns_lse = False
    one = Subject.of(kernel, "kernel")
    array, ways = covering_problems(one, "cpu"), ways_of(one, "attention")
    calls = [array.calls[x] for x in array.asks if array.calls[x].G > 4]
    calls = [x for x in calls if "some gradients" in way_of(x.seed, ways)[0]]
    assert not any(found_on(one, call, accuracy) for call in calls)
    findings = [x for call in calls for x in found_on(one, call, one_way)]
    assert {x.output for x in findings} == {"dk"}
