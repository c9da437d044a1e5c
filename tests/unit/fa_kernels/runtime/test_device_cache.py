"""Cached tensors outlive every kernel that reads them, on other streams and in graphs."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from fa_kernels import flash_attention
from fa_kernels.launch import call_cache
from fa_kernels.runtime import device_cache
from fa_kernels.runtime.device_cache import cached_on_device
from fa_verify.oracles.masks.prefix_lm import PrefixLM

SAYS = "flash_attention is captured in a CUDA graph with lengths or a mask that are not on the"


@pytest.fixture
def capturing(monkeypatch):
    """Sets whether calls take themselves to be captured; empties the list of what graphs read."""
    monkeypatch.setattr(device_cache, "_of_graphs", {})

    def pretend(value: bool) -> None:
        for module in (device_cache, call_cache):
            monkeypatch.setattr(module, "is_capturing", lambda: value)

    return pretend


@pytest.fixture
def made():
    """A cached function of a number, and the numbers for which it ran."""
    seen: list[int] = []

    @cached_on_device(most=3)
    def make(number: int) -> tuple[torch.Tensor, ...]:
        seen.append(number)
        return (torch.tensor(number),)

    return make, seen


def test_a_cached_function_runs_once_for_each_argument(made):
    make, seen = made
    assert [int(make(x)[0]) for x in (1, 2, 1, 3, 2)] == [1, 2, 1, 3, 2]
    assert seen == [1, 2, 3]


def test_a_full_cache_is_emptied_after_the_kernels_that_read_it(made, monkeypatch):
    make, seen = made
    waits = []
    monkeypatch.setattr(device_cache, "_devices", {torch.device("cuda", 0)})
    monkeypatch.setattr(torch.cuda, "synchronize", waits.append)
    for x in (1, 2, 3, 4, 1):
        make(x)
    assert waits == [torch.device("cuda", 0)]
    assert seen == [1, 2, 3, 4, 1]


def test_a_capture_makes_nothing_keeps_what_it_reads_and_empties_no_cache(made, capturing):
    make, seen = made
    found = [make(x) for x in (1, 2, 3)]
    capturing(True)
    assert make(2) is found[1]
    with pytest.raises(RuntimeError, match=SAYS):
        make(4)
    full = dict.fromkeys(range(5))
    device_cache.forget(full)
    assert len(full) == 5
    capturing(False)
    for x in (4, 5, 6, 7):
        make(x)
    assert [*device_cache._of_graphs.values()] == [found[1]]
    assert seen == [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize(
    "asked", [{}, {"seqlens_k": (3, 1, 4, 1, 5)}, {"mask": PrefixLM(prefix=3)}], ids=str
)
def test_a_captured_call_needs_one_before_and_keeps_its_tensors(asked, capturing, device):
    # Lengths that no other test has.
    q = torch.zeros(5, 1, 43, 16, device=device)
    capturing(True)
    with pytest.raises(RuntimeError, match=SAYS):
        flash_attention(q, q, q, **asked)
    capturing(False)
    first = flash_attention(q, q, q, **asked)
    capturing(True)
    device_cache._of_graphs.clear()
    assert torch.equal(flash_attention(q, q, q, **asked), first)
    kept = [x for value in device_cache._of_graphs.values() for x in _of(value)]
    lengths = asked.get("seqlens_k", (43,) * 5)
    assert any(x.tolist() == [*lengths] for x in kept)
    assert ("mask" in asked) == any(x.ndim == 4 for x in kept)


def _of(value):
    if isinstance(value, call_cache.Arguments):
        value = (value.seqlens_q, value.seqlens_k)
    return device_cache._tensors(value)
