"""Calls of every kind have one JSON form, and one way to change a field."""

from __future__ import annotations

import json

import pytest

from fa_verify.oracles.call import Call, changed
from fa_verify.oracles.calls.cache import CacheProblem
from fa_verify.oracles.calls.codec import call_from_json, call_from_record
from fa_verify.oracles.calls.merge import MergeProblem
from fa_verify.oracles.calls.quantised import QuantisedProblem
from fa_verify.oracles.calls.ring import RingProblem
from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.problem import Problem

CALLS = {
    "attention": Problem(B=2, H=4, Hk=2, M=3, N=9, D=5, Dv=7, dtype="bf16", seed=3),
    "batch": Problem(B=2, seeds=(3, 5)),
    "cache": CacheProblem(
        attention=Problem(N=9, dtype="fp16", seed=7, mask=Mask(causal=True, seqlens_k=(9,))),
        page_size=4, new=2, shared=1, spare=1,
    ),
    "cache of codes": CacheProblem(
        attention=Problem(N=9, dtype="bf16", seed=7, mask=Mask(causal=True, seqlens_k=(9,))),
        page_size=4, stored="e4m3fn", scales="page", divides=True,
    ),
    "merge": MergeProblem(parts=(3, 0, 5), B=2, H=3, M=4, Dv=5, dtype="fp64", hidden=3, lse="low"),
    "quantised": QuantisedProblem(
        attention=Problem(B=2, H=4, Hk=2, M=3, N=9, dtype="fp16", mask=Mask(causal=True), seed=5),
        qk="int8", v="input", qk_scales="block", blocks=(2, 4), codes="peaked",
    ),
    "ring": RingProblem(
        attention=Problem(M=3, N=9, mask=Mask(causal=True), inputs="times8"), lengths=(4, 0, 5)
    ),
}  # fmt: skip
LISTED = (
    "kind",
    "dtype",
    "device",
    "seed",
    "family",
    "config",
    "elements",
    "pairs",
    "longest",
    "columns",
)


@pytest.mark.parametrize("name", CALLS)
def test_a_call_is_read_from_its_json(name):
    call = CALLS[name]
    line = call.to_json()
    assert "\n" not in line
    assert json.loads(line) == json.loads(json.dumps(call.record()))
    assert call_from_json(line) == call
    assert call_from_record(json.loads(line)) == call


@pytest.mark.parametrize("name", CALLS)
def test_a_call_has_what_every_call_has(name):
    call = CALLS[name]
    assert isinstance(call, Call)
    for word in LISTED:
        assert getattr(call, word) is not None
    assert all(count > 0 for count in call.elements.values())
    assert (call.attention is None) == (call.kind == "merge")
    assert bool(call.seeds) == (name == "batch")


@pytest.mark.parametrize("name", CALLS)
def test_a_field_of_a_call_or_of_its_attention_is_changed(name):
    call = CALLS[name]
    dtype = "bf16" if name == "quantised" else "fp32"
    other = changed(call, dtype=dtype, device="cuda", seed=0)
    assert (other.dtype, other.device, other.seed) == (dtype, "cuda", 0)
    assert type(other) is type(call)
    assert changed(other, dtype=call.dtype, device=call.device, seed=call.seed) == call


def test_a_field_that_a_kind_lacks_is_named():
    with pytest.raises(ValueError, match="a merge has no config and N"):
        changed(CALLS["merge"], config="16x16", N=3)


@pytest.mark.parametrize(
    ("record", "says"),
    [
        ({"ring": {"lengths": [1, 1]}}, "needs N = 1 keys in sum"),
        ({"N": 2, "ring": {"lengths": [3, -1]}}, r"lengths are \(3, -1\)"),
        ({"N": 2, "ring": {"lengths": [2.0]}}, "needs lengths alone, a list of ints"),
        ({"N": 2, "ring": {"lengths": [2], "more": 1}}, "needs lengths alone"),
        ({"N": 2, "ring": {"parts": [2]}}, "needs lengths alone"),
        ({"N": 2, "ring": 3}, "malformed"),
        ({"N": 2, "M": 0, "mask": {"type": "Mask", "window_left": 1}, "ring": {"lengths": [2]}},
         "needs one that is causal, or none"),
    ],
)  # fmt: skip
def test_a_malformed_ring_is_refused(record, says):
    with pytest.raises(ValueError, match=says):
        call_from_record({"version": 1, **record})


def test_a_cache_of_the_dtype_of_q_has_the_json_that_it_had_before_there_were_codes():
    line = CALLS["cache"].to_json()
    assert line.endswith('"cache":{"page_size":4,"new":2,"shared":1,"spare":1}}')
    of_codes = CALLS["cache of codes"].to_json()
    assert of_codes.endswith(
        '"cache":{"page_size":4,"stored":"e4m3fn","scales":"page","divides":true}}'
    )
