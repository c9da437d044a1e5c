"""G14: invalid arguments raise an error that names the argument."""

from __future__ import annotations

import math

import pytest
import torch

from fa_verify.oracles.guarantee import G14
from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.problem import Problem
from fa_verify.session import is_ours


def arguments(device: str, **changed: object) -> dict[str, object]:
    """Return valid arguments of a subject, with some of them replaced."""

    def tensor(*shape: int) -> torch.Tensor:
        return torch.ones(shape, dtype=torch.float32, device=device)

    valid = {
        "q": tensor(2, 4, 5, 16),
        "k": tensor(2, 2, 7, 16),
        "v": tensor(2, 2, 7, 8),
        "mask": Mask(),
        "sm_scale": 0.25,
    }
    return valid | {
        name: tensor(*value) if isinstance(value, tuple) else value
        for name, value in changed.items()
    }


BAD = {
    "q of three axes": ("q", {"q": (4, 5, 16)}),
    "k of another batch size": ("k", {"k": (1, 2, 7, 16)}),
    "k of another head_dim": ("k", {"k": (2, 2, 7, 32)}),
    "v of another length": ("v", {"v": (2, 2, 6, 8)}),
    "heads that are no multiple": ("q", {"k": (2, 3, 7, 16), "v": (2, 3, 7, 8)}),
    "k of another dtype": ("k", {"k": torch.ones(2, 2, 7, 16, dtype=torch.float16)}),
    "v that is no tensor": ("v", {"v": [1.0]}),
    "too many lengths": ("seqlens_k", {"mask": Mask(seqlens_k=(1, 2, 3))}),
    "a length past the end": ("seqlens_q", {"mask": Mask(seqlens_q=(6, 1))}),
    "a mask that is a tensor": ("mask", {"mask": torch.ones(5, 7, dtype=torch.bool)}),
    "a scale of 0": ("sm_scale", {"sm_scale": 0.0}),
    "a negative scale": ("sm_scale", {"sm_scale": -1.0}),
    "a scale that is NaN": ("sm_scale", {"sm_scale": math.nan}),
    "an infinite scale": ("sm_scale", {"sm_scale": math.inf}),
}


@pytest.fixture(autouse=True)
def of_our_own_call(pytestconfig):
    if not is_ours(pytestconfig):
        pytest.skip("G14 is about the project's own call; this kernel is called by an adapter")


def call(subject, device, changed):
    given = arguments(device, **changed)
    given = {
        name: value.to(device) if isinstance(value, torch.Tensor) else value
        for name, value in given.items()
    }
    return subject.call(
        given["q"], given["k"], given["v"], mask=given["mask"], sm_scale=given["sm_scale"]
    )


@pytest.mark.asks(G14)
def test_the_valid_arguments_are_accepted(subject, device):
    call(subject, device, {})


@pytest.mark.asks(G14)
@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_refused_by_name(subject, device, name):
    argument, changed = BAD[name]
    with pytest.raises((ValueError, TypeError), match=argument):
        call(subject, device, changed)


@pytest.mark.asks(G14)
def test_an_unknown_configuration_is_refused_by_name(subject, device):
    with pytest.raises(NotImplementedError, match=r"declares configs .*'16x16'"):
        subject.run(*(arguments(device)[name] for name in "qkv"), Problem(config="huge"))
