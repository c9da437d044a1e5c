"""The covering array of merges has every two values that declarations allow."""

from __future__ import annotations

import itertools

import pytest
import torch

from fa_verify.oracles.calls.merge import LSE_FAMILIES, OUT_FAMILIES, STATE_LAYOUTS
from fa_verify.properties.guarantees.merging import accuracy
from fa_verify.properties.kernels.covering_merges import covering_merges
from fa_verify.properties.kernels.ways import way_of, ways_of
from fa_verify.properties.kinds.merges import MERGE
from tests.unit.properties.guarantees.calls import found_on
from tests.unit.properties.guarantees.test_merging_checks import subject, torch_merge


def values(call):
    """Classes of sizes of a merge, and its other fields, by name."""
    parts = call.parts
    return {
        "parts": (len(parts) > 1) + (len(parts) > 2) + (len(parts) > 8), "B": call.B > 1,
        "H": (call.H > 1) + (call.H > 16), "M": (call.M > 1) + (call.M > 8), "dtype": call.dtype,
        "Dv": call.Dv % 8 == 0, "first": parts[0] == 0, "last": parts[-1] == 0,
        "two": any(x == y == 0 for x, y in itertools.pairwise(parts)), "all": not any(parts),
        "rows": call.hidden > 0, "lse": call.lse, "out": call.out, "layout": call.layout,
        "dout": call.dout_layout,
    }  # fmt: skip


def test_every_two_values_occur():
    array = covering_merges(subject(torch_merge), "cpu")
    ranges = {
        "parts": range(4), "B": (False, True), "H": range(3), "M": range(3), "Dv": (False, True),
        "dtype": ("fp16", "bf16", "fp32", "fp64"), "lse": LSE_FAMILIES, "out": OUT_FAMILIES,
        "layout": STATE_LAYOUTS, "dout": STATE_LAYOUTS, "all": (False, True),
        "rows": (False, True), "first": (False, True), "last": (False, True),
    }  # fmt: skip
    found = {
        x for call in array.calls for x in itertools.combinations(sorted(values(call).items()), 2)
    }
    of_parts = {"all", "rows", "first", "last", "parts"}
    for one, other in itertools.combinations(sorted(ranges), 2):
        if not {one, other} <= of_parts:
            assert {((one, x), (other, y)) for x in ranges[one] for y in ranges[other]} <= found
    assert any(values(call)["two"] and any(call.parts) for call in array.calls)
    assert len(array.calls) < 80
    missing, count = array.missing(range(len(array.calls)))
    assert not missing
    assert count > 1000
    assert array.calls == covering_merges(subject(torch_merge), "cpu").calls


def test_every_way_of_merging_meets_every_number_of_parts_and_dtype():
    one = subject(torch_merge)
    array, ways = covering_merges(one, "cpu"), ways_of(one, "merge")
    asked = [array.calls[x] for x in array.asks]
    found = {(way_of(x.seed, ways)[0], values(x)["parts"], x.dtype) for x in asked}
    assert {(way, parts) for way, parts, _ in found} == {*itertools.product(ways, range(4))}
    assert {(way, dtype) for way, _, dtype in found} == {*itertools.product(ways, one.dtypes)}


@pytest.mark.parametrize("declared", [{}, {"dtypes": ("bf16",)}, {"backward": False}])
def test_no_merge_is_excluded(declared):
    one = subject(torch_merge, **declared)
    calls = covering_merges(one, "cpu").calls
    assert {x.dtype for x in calls} == {*one.dtypes}
    assert [MERGE.excludes(one, call) for call in calls] == [None] * len(calls)


def test_a_subject_without_merges_has_no_calls():
    assert covering_merges(subject(torch_merge, devices=("cuda",)), "cpu").calls == ()


def test_a_fault_of_many_heads_and_several_parts_is_found():
    """Draws have up to seven heads."""

    def wrong(outs, lses):
        out, lse = torch_merge(outs, lses)
        if outs.shape[2] > 16 and len(outs) > 2:
            out = torch.where(torch.arange(outs.shape[2]).view(-1, 1, 1) > 15, 1.1 * out, out)
        return out, lse

    one = subject(wrong, dtypes=("fp32",))
    assert any(found_on(one, call, accuracy) for call in covering_merges(one, "cpu").calls)
