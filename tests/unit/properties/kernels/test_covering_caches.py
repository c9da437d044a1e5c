"""The covering array of calls with a cache has every two values that declarations allow."""

from __future__ import annotations

import itertools

import pytest
import torch

from fa_verify.oracles.calls.cache import PAGE_ORDERS
from fa_verify.oracles.problem import DTYPES
from fa_verify.properties.kernels.covering_caches import covering_caches
from fa_verify.properties.kernels.supported_caches import kernels_of
from fa_verify.properties.kinds.caches import CACHE
from tests.unit.properties.guarantees.calls import found_on
from tests.unit.properties.guarantees.test_cache_checks import CACHES, attend, of_pages, subject_of


def values(call):
    """Classes of sizes of a call, and its other fields, by name."""
    a = call.attention
    return {
        "B": (a.B > 1) + (a.B > 8), "Hk": a.Hk > 1, "G": (a.G > 1) + (a.G > 4) + (a.G > 8),
        "M": a.M > 1, "page": call.page_size, "append": call.new > 0, "causal": a.mask.causal,
        "window": a.mask.window_left, "dtype": a.dtype, "D": a.D, "Dv": a.Dv,
        "differ": len({*call.seqlens}) > 1,
        "whole pages": call.page_size > 0 and call.seqlens[0] % call.page_size == 0,
    }  # fmt: skip


def pairs(call):
    return {*itertools.combinations(sorted(values(call).items()), 2)}


def test_every_two_values_occur():
    calls = covering_caches(subject_of(attend), "cpu", None).calls
    found = set().union(*map(pairs, calls))
    ranges = {
        "B": range(3), "Hk": (False, True), "G": range(4), "M": (False, True),
        "page": (0, 1, 3, 16, 64), "append": (False, True), "causal": (False, True),
        "window": (None, 0, 3, 20), "dtype": DTYPES, "D": (16, 17, 24, 64, 128),
        "Dv": (16, 17, 24, 64, 128), "differ": (False, True), "whole pages": (False, True),
    }  # fmt: skip
    # Rows of a contiguous cache are no page, a page of one row is whole, and one entry has one
    # length.
    impossible = {
        (("page", 0), ("whole pages", True)), (("page", 1), ("whole pages", False)),
        (("B", 0), ("differ", True)),
    }  # fmt: skip
    for one, other in itertools.combinations(sorted(ranges), 2):
        wanted = {((one, x), (other, y)) for x in ranges[one] for y in ranges[other]} - impossible
        assert wanted <= found, wanted - found
    assert len(calls) < 60
    assert {call.order for call in calls} == {*PAGE_ORDERS}
    assert any(0 in call.seqlens for call in calls)
    assert calls == covering_caches(subject_of(attend), "cpu", None).calls


@pytest.mark.parametrize(
    "declared",
    [{}, {"gqa": False, "masks": ("causal",)}, {"zero_sizes": False, "page_sizes": (16,)}],
)
def test_no_call_is_excluded(declared):
    subject = of_pages(**declared)
    calls = covering_caches(subject, "cpu", None).calls
    assert calls
    assert [CACHE.excludes(subject, call) for call in calls] == [None] * len(calls)
    assert {call.attention.G > 1 for call in calls} == ({True, False} if subject.gqa else {False})
    assert any(0 in call.seqlens for call in calls) == subject.zero_sizes


def test_a_subject_without_a_cache_has_no_calls():
    assert covering_caches(subject_of(None), "cpu", None).calls == ()
    assert covering_caches(subject_of(attend, devices=("cuda",)), "cpu", None).calls == ()


def test_calls_for_a_gpu_have_the_kernels_that_are_drawn():
    subject = subject_of(attend, score_mods=("softcap", "alibi"), dtypes=("fp16", "fp32"))
    subject = subject.assuming({"devices": ("cpu", "cuda")})
    compiled = {
        (dtype, config, D, Dv, softcap, alibi)
        for dtype in ("fp16", "fp32")
        for kernel in kernels_of(subject, [*subject.configs], f"caches of {dtype}")
        for config, D, Dv, softcap, alibi in itertools.product(*kernel.values())
    }
    found = {
        (x.dtype, x.config, x.D, x.Dv, x.softcap, x.alibi)
        for x in (call.attention for call in covering_caches(subject, "cuda", "caches of ").calls)
    }
    assert len(found) > 4
    assert found <= compiled


def test_a_fault_of_many_entries_of_different_lengths_is_found():
    """Draws have three entries, and calls of copies of an entry have nine alike."""

    def wrong(q, k_cache, v_cache, *, cache_seqlens, **given):
        # Entries past the eighth have at most the keys of the first.
        least = torch.where(torch.arange(len(q)) < 8, cache_seqlens, cache_seqlens[:1])
        lengths = torch.minimum(cache_seqlens, least)
        return attend(q, k_cache, v_cache, cache_seqlens=lengths, **given)

    subject = subject_of(wrong, dtypes=("fp32",))
    calls = (x for x in covering_caches(subject, "cpu", None).calls if x.attention.B > 8)
    assert any(found_on(subject, call, CACHES["accuracy"]) for call in calls)
