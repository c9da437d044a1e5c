"""Calls go through the operators if a mode or profiler is active, and bypass them otherwise."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")

from fa_kernels import flash_attention, operators
from fa_verify.oracles.stream import normal

CONFIG = "16x16"
OURS = ["forward", "backward"]


def drawn(device):
    shapes = ((1, 2, 17, 8), (1, 1, 21, 8), (1, 1, 21, 6), (1, 2, 17, 6))
    return [
        normal(0, name, shape).to(device)
        for name, shape in zip(("q", "k", "v", "dout"), shapes, strict=True)
    ]


def both_passes(q, k, v, dout):
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = flash_attention(*leaves, config=CONFIG)
    return out, *torch.autograd.grad(out, leaves, dout)


@pytest.fixture
def called(monkeypatch):
    """Names of the operators that are called, in order."""
    names: list[str] = []
    for name in OURS:
        operator = getattr(operators, name)

        def noted(*arguments, name=name, operator=operator):
            names.append(name)
            return operator(*arguments)

        monkeypatch.setattr(operators, name, noted)
    return names


class OfOperators(TorchDispatchMode):
    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        return operator(*args, **(kwargs or {}))


class OfFunctions(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


@contextmanager
def profiled():
    with torch.autograd.profiler.profile():
        yield


# A function mode is inactive while autograd runs a backward.
@pytest.mark.parametrize(
    ("listener", "names"), [(OfOperators, OURS), (OfFunctions, OURS[:1]), (profiled, OURS)]
)
def test_modes_and_profilers_receive_the_operators(listener, names, device, called):
    inputs = drawn(device)
    want = both_passes(*inputs)
    assert called == []
    with listener():
        found = both_passes(*inputs)
    assert list(dict.fromkeys(called)) == names
    assert all(map(torch.equal, found, want))


def test_a_profile_names_both_passes(device):
    with torch.autograd.profiler.profile() as profile:
        both_passes(*drawn(device))
    package = operators.__name__.partition(".")[0]
    assert {f"{package}::{name}" for name in OURS} <= {x.name for x in profile.function_events}


@pytest.mark.parametrize("place", range(4))
def test_a_subclass_of_tensor_is_left_to_the_dispatcher(place, device, called):
    class Subclass(torch.Tensor):
        pass

    inputs = drawn(device)
    want = both_passes(*inputs)
    inputs[place] = inputs[place].as_subclass(Subclass)
    found = both_passes(*inputs)
    assert called
    assert all(
        torch.equal(x.as_subclass(torch.Tensor), y) for x, y in zip(found, want, strict=True)
    )


def test_without_gradients_nothing_is_recorded(device, called):
    q, k, v, _ = drawn(device)
    out = flash_attention(q, k, v, config=CONFIG)
    assert out.grad_fn is None
    q.requires_grad_()
    with torch.no_grad():
        assert flash_attention(q, k, v, config=CONFIG).grad_fn is None
    recorded = flash_attention(q, k, v, config=CONFIG)
    assert recorded.grad_fn is not None
    assert torch.equal(recorded, out)
    assert called == []
