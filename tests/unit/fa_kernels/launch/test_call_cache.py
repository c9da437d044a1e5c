"""The call cache returns the results of validation, and forgets the oldest."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from fa_kernels import Config, flash_attention
from fa_kernels.launch import call_cache
from fa_kernels.validation import arguments
from fa_kernels.validation.arguments import Request
from fa_verify.oracles.masks.mask import Mask

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
OPTIONS = {
    "mask": None, "causal": False, "window_size": (None, None),
    "seqlens_q": None, "seqlens_k": None, "block_mask": None, "block_size": 128,
    "sm_scale": None, "deterministic": True,
    "config": None, "softcap": None, "alibi_slopes": None, "bias": None,
}  # fmt: skip
OTHER = (
    {"causal": True}, {"window_size": (3, None)}, {"window_size": (None, 3)}, {"sm_scale": 0.5},
    {"sm_scale": 1}, {"deterministic": False}, {"config": "64x32"}, {"config": Config(splits=2)},
    {"softcap": 2.0}, {"block_size": 256},
)  # fmt: skip


@pytest.fixture(autouse=True)
def forgotten(monkeypatch):
    """Empties the call cache."""
    for kept in ("_requests", "_arguments"):
        monkeypatch.setattr(call_cache, kept, {})


@pytest.fixture
def worked_out(monkeypatch):
    """Names of the validation steps that run, in order."""
    seen: list[str] = []
    for name in ("check", "prepared"):
        original = getattr(arguments, name)
        monkeypatch.setattr(
            arguments, name, lambda *a, n=name, f=original, **o: (seen.append(n), f(*a, **o))[1]
        )
    return seen


def tensors(*shape: int, dtype=torch.float16):
    return [torch.zeros(shape or (1, 2, 5, 16), dtype=dtype, device=DEVICE) for _ in range(3)]


def requested(inputs, **options) -> Request:
    return call_cache.check(*inputs, **OPTIONS | options)


def test_a_repeated_call_is_not_validated_again(worked_out):
    first, second = (flash_attention(*tensors(), causal=True) for _ in range(2))
    assert worked_out == ["check", "prepared"]
    assert torch.equal(first, second)


@pytest.mark.parametrize("other", OTHER, ids=str)
def test_a_call_with_another_option_is_validated(other, worked_out):
    for options in ({}, other, {}, other):
        inputs = tensors()
        request = requested(inputs, **options)
        assert request == arguments.check(*inputs, **OPTIONS | options)
        found = call_cache.prepared(*inputs, request, ("forward",))
        assert found == arguments.prepared(*inputs, request, ("forward",))
    assert worked_out.count("check") == 2 + 4


@pytest.mark.parametrize(
    "other", [((1, 2, 6, 16), {}), ((1, 2, 5, 24), {}), ((), {"dtype": torch.bfloat16})], ids=str
)
def test_a_call_of_other_tensors_is_validated(other, worked_out):
    shape, dtype = other
    for inputs in (tensors(), tensors(*shape, **dtype)):
        request = requested(inputs)
        assert call_cache.prepared(*inputs, request, ("forward",)).seqlens_q.tolist() == [
            inputs[0].shape[2]
        ]
    assert worked_out == ["check", "prepared"] * 2


@pytest.mark.parametrize("place", [0, 2])
def test_another_length_of_q_and_another_head_dim_of_v_are_other_calls(place, worked_out):
    for shape in ((1, 2, 5, 16), ((1, 2, 7, 16), None, (1, 2, 5, 24))[place]):
        inputs = tensors()
        inputs[place] = torch.zeros(shape, dtype=torch.float16, device=DEVICE)
        assert flash_attention(*inputs).shape == (1, 2, inputs[0].shape[2], inputs[2].shape[3])
    assert worked_out == ["check", "prepared"] * 2


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ({"causal": True}, {"causal": 1}),
        ({"window_size": (1, None)}, {"window_size": (True, None)}),
        ({"sm_scale": 1}, {"sm_scale": True}),
        ({"softcap": 1.0}, {"softcap": True}),
        ({"deterministic": True}, {"deterministic": [True]}),
        ({"block_size": 128}, {"config": "no name"}),
        ({"sm_scale": 2.0}, {"sm_scale": float("nan")}),
    ],
    ids=str,
)
def test_a_wrong_option_is_refused_after_a_right_one(right, wrong):
    requested(tensors(), **right)
    for _ in range(2):
        with pytest.raises((TypeError, ValueError)) as failure:
            requested(tensors(), **wrong)
        with pytest.raises(failure.type) as expected:
            arguments.check(*tensors(), **OPTIONS | wrong)
        assert str(failure.value) == str(expected.value)


@pytest.mark.parametrize("place", range(3))
def test_one_tensor_that_is_wrong_is_refused(place):
    requested(tensors())
    inputs = tensors()
    inputs[place] = inputs[place].double()
    with pytest.raises(ValueError, match="has dtype"):
        requested(inputs)
    inputs[place] = inputs[place].half()[0]
    with pytest.raises(ValueError, match="has shape"):
        requested(inputs)


@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU needs no interpreter")
def test_a_cached_call_is_refused_where_kernels_cannot_run(monkeypatch):
    requested(tensors())
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(NotImplementedError, match="needs a CUDA device"):
        requested(tensors())


def test_a_call_with_lengths_or_a_mask_is_validated_each_time(worked_out):
    inputs = tensors()
    lengths = torch.tensor([3], dtype=torch.int32, device=DEVICE)
    for options in ({"seqlens_k": lengths}, {"seqlens_k": (3,)}, {"mask": Mask(causal=True)}):
        for _ in range(2):
            flash_attention(*inputs, **options)
    assert worked_out == ["check", "prepared"] * 6


def test_the_call_cache_keeps_no_more_than_its_limit(monkeypatch, worked_out):
    monkeypatch.setattr(call_cache, "MOST", 3)
    for N in (1, 2, 3, 1, 2, 3, 4, 1):
        inputs = tensors(1, 1, N, 16)
        call_cache.prepared(*inputs, requested(inputs), ("forward",))
        assert len(call_cache._requests) <= 3
        assert len(call_cache._arguments) <= 3
    assert worked_out == ["check", "prepared"] * 5
