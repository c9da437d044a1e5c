"""The sequences of calls of G13 change every argument of ``fa_kernels.flash_attention``."""

from __future__ import annotations

import contextlib
import inspect

import pytest
import torch

pytest.importorskip("triton")

import fa_kernels
from fa_verify.adapters.ours import flash_attention
from fa_verify.conformance.test_state import calls_of
from fa_verify.properties.inputs.tensors import make
from fa_verify.properties.kernels.subject import Subject
from fa_verify.properties.running.trial import run_subject
from fa_verify.shards import shards_of

SUBJECT = Subject.of(flash_attention, "flash_attention")
SIGNATURE = inspect.signature(fa_kernels.flash_attention)
TENSORS = {"q", "k", "v"}
# ``return_lse`` selects from the results after the kernels.
LEFT_OUT = {"return_lse"}


def test_every_argument_of_the_signature_changes_after_a_call_with_the_others(monkeypatch):
    calls = []

    def record(*tensors, **options):
        calls.append(SIGNATURE.bind(*tensors, **options).arguments)
        raise NotImplementedError

    monkeypatch.setattr(fa_kernels, "flash_attention", record)
    changed = set()
    for shard in shards_of(SUBJECT)[1::5]:
        calls.clear()
        for problem in calls_of(SUBJECT, shard, "cpu"):
            with contextlib.suppress(NotImplementedError):
                run_subject(SUBJECT, problem, make(problem))
        for call in calls[1:]:
            different = {x for x in SIGNATURE.parameters if told(call, x) != told(calls[0], x)}
            # The size of a block determines the shape of its mask.
            if len(different - TENSORS) <= 1 or different == {"block_mask", "block_size"}:
                changed |= different
    assert changed == {*SIGNATURE.parameters} - LEFT_OUT


def told(call, name):
    """Return what tells two values of an argument apart, for tensors their strides and contents."""
    value = call.get(name)
    is_tensor = isinstance(value, torch.Tensor)
    return (value.dtype, value.stride(), value.tolist()) if is_tensor else value
