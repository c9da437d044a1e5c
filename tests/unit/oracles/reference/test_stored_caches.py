"""The two writings of caches of codes agree: their numbers, and the codes that an append writes."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from fa_verify.oracles.calls.cache import SCALES, CacheProblem
from fa_verify.oracles.formats.element import FORMATS
from fa_verify.oracles.formats.writing import Writing
from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.problem import Problem
from fa_verify.oracles.reference import caches, numpy_stored_caches, stored_caches
from fa_verify.properties.inputs.caches import CacheInputs, make_cache, shared_inputs
from fa_verify.properties.inputs.stored import scales_of

PROBLEM = CacheProblem(
    attention=Problem(
        B=3, H=4, Hk=2, M=2, N=19, D=6, Dv=5, dtype="bf16", seed=4,
        mask=Mask(seqlens_k=(19, 8, 11)),
    ),
    page_size=3, shared=1, spare=1,
)  # fmt: skip
RULES = (
    Writing(), Writing(by="reciprocal", least_scale=1e-6), Writing(rounding="half_added"),
    Writing(rounding="truncate"), Writing(overflow="nan", least_scale=2.0**-9),
)  # fmt: skip
BOTH = pytest.mark.parametrize("divides", [False, True])
OF_FORMATS = pytest.mark.parametrize("stored", FORMATS)
OF_SCALES = pytest.mark.parametrize("scales", SCALES)


def problem_of(stored: str, scales: str, divides: bool, **fields) -> CacheProblem:
    return dataclasses.replace(PROBLEM, stored=stored, scales=scales, divides=divides, **fields)


def called(problem: CacheProblem) -> CacheInputs:
    return make_cache(problem, shared_inputs(problem))


def bits(x: torch.Tensor) -> np.ndarray:
    return x.contiguous().view(torch.uint8).numpy()


@BOTH
@OF_SCALES
@OF_FORMATS
def test_both_writings_read_the_numbers_that_the_problem_has(stored, scales, divides):
    problem = problem_of(stored, scales, divides)
    x, inputs, form = called(problem), shared_inputs(problem), FORMATS[stored]
    for codes, scale, want in (
        (x.k_cache, x.k_scale, inputs.k), (x.v_cache, x.v_scale, inputs.v)
    ):  # fmt: skip
        for to in (None, "bf16", "fp16", "fp32"):
            first = stored_caches.numbers_of(codes, scale, form, divides=divides, rounds_to=to)
            second = numpy_stored_caches.numbers_of(
                bits(codes), scale.numpy(), form, divides=divides, rounds_to=to
            )
            assert np.array_equal(first.numpy(), second, equal_nan=True)
        exact = stored_caches.numbers_of(codes, scale, form, divides=divides)
        lengths = torch.tensor(problem.seqlens)
        held = caches.gathered(exact, lengths, x.table, problem.attention.N)
        for b, length in enumerate(problem.seqlens):
            assert torch.equal(held[b, :, :length], want[b, :, :length])


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("scales", ["tensor", "head", "token_head"])
@OF_FORMATS
def test_both_writings_append_the_same_codes_and_scales(stored, scales, rule):
    for divides in (False, True):
        if divides and scales == "token_head":
            continue
        problem = problem_of(stored, scales, divides, new=3)
        x, form = called(problem), FORMATS[stored]
        # Zeros, ties and numbers beyond the range are among the new ones.
        new = x.k.clone()
        new[0, 0, 0], new[0, 1], new[1, 0, 1, 0] = 0.0, new[0, 1].sign() * 2, 1e6
        first = stored_caches.appended_codes(
            x.k_cache, x.k_scale, new, x.cache_seqlens, x.table, form, rule, divides=divides
        )
        second = numpy_stored_caches.appended_codes(
            bits(x.k_cache), x.k_scale.numpy(), new.double().numpy(), x.cache_seqlens.numpy(),
            x.table.numpy(), form, rule, divides=divides,
        )  # fmt: skip
        assert np.array_equal(bits(first[0]), second[0])
        assert np.array_equal(first[1].numpy(), second[1], equal_nan=True)
        changed = (first[0].view(torch.uint8) != x.k_cache.contiguous().view(torch.uint8)).any(3)
        assert int(changed.any(2).sum()) <= 9


def test_a_scale_of_a_token_is_its_largest_over_the_format_s():
    problem = problem_of("e4m3fn", "token_head", False, new=1)
    x = called(problem)
    new = torch.zeros_like(x.k)
    new[:, :, 0, 1], new[:, :, 0, 2] = -3.5, 1.75
    codes, scale = stored_caches.appended_codes(
        x.k_cache, x.k_scale, new, x.cache_seqlens, x.table, FORMATS["e4m3fn"], Writing(),
        divides=False,
    )  # fmt: skip
    length = int(x.cache_seqlens[0])
    page, row = int(x.table[0, length // 3]), length % 3
    assert scale[page, row].tolist() == [3.5 / 448] * 2
    assert codes[page, row, 0].float().tolist() == [0.0, -448.0, 224.0, 0.0, 0.0, 0.0]


@OF_SCALES
@OF_FORMATS
def test_no_scale_is_that_of_a_neighbour(stored, scales):
    """Along heads, entries and tokens or pages, and from keys to values, by 7/4 and more."""
    of_keys, of_values = scales_of(problem_of(stored, scales, False, shared=0))
    pairs = [(of_keys, of_values)]
    if scales != "tensor":
        pairs += [(x[:, 1:], x[:, :-1]) for x in (of_keys, of_values)]
    if scales in ("page", "token_head"):
        step = 3 if scales == "page" else 1
        pairs += [(x[:, :, step:], x[:, :, :-step]) for x in (of_keys, of_values)]
        pairs += [(x[1:], x[:-1]) for x in (of_keys, of_values)]
    for one, other in pairs:
        ratio = torch.maximum(one / other, other / one)
        assert float(ratio.min()) > 1.75


def test_entries_have_the_scales_of_the_pages_that_they_share():
    problem = problem_of("int8", "token_head", False)
    for scale in scales_of(problem):
        assert torch.equal(scale[0, :, :3], scale[2, :, :3])
        assert not torch.equal(scale[0, :, 3:], scale[2, :, 3:])
