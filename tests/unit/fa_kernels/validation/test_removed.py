"""Options of earlier versions are refused by an error that names their replacement."""

from __future__ import annotations

import inspect
import re

import pytest
import torch

pytest.importorskip("triton")

from fa_kernels import flash_attention, flash_attention_varlen

REMOVED = {
    "backward": ("one_pass", "deterministic="),
    "window": ((3, None), "window_size="),
}


POOLED = {
    "pool": ("mean", "pooled_attention_probs("),
    "pool_size": ((4, 4), "pooled_attention_probs("),
}


@pytest.mark.parametrize(
    ("call", "name"),
    [
        *((flash_attention, name) for name in (*REMOVED, *POOLED)),
        *((flash_attention_varlen, name) for name in REMOVED),
    ],
)
def test_a_removed_option_is_answered_by_its_replacement(call, name, device):
    value, replacement = {**REMOVED, **POOLED}[name]
    x = torch.zeros(1, 2, 3, 16, device=device)
    with pytest.raises(
        TypeError, match=re.escape(f"{name}= is no longer an option; needs {replacement}")
    ):
        call(x, x, x, **{name: value})


@pytest.mark.parametrize("call", [flash_attention, flash_attention_varlen])
def test_the_signature_names_every_option_and_no_removed_one(call):
    parameters = inspect.signature(call, follow_wrapped=False).parameters
    assert {"deterministic", "window_size", "causal", "sm_scale"} <= parameters.keys()
    assert not parameters.keys() & {*REMOVED, *POOLED, "args", "options"}


def test_an_unknown_option_is_refused_by_name(device):
    x = torch.zeros(1, 2, 3, 16, device=device)
    with pytest.raises(TypeError, match="unexpected keyword argument 'dropout'"):
        flash_attention(x, x, x, dropout=0.1)
