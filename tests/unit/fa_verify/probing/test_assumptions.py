"""The declarations that ``fa-verify check`` assumes for a kernel that declares nothing."""

from __future__ import annotations

import pytest
import torch

from fa_verify.probing.probe import probe
from fa_verify.probing.trying import declares
from fa_verify.properties.subjects.attention_kernel import attention_kernel
from fa_verify.properties.subjects.subject import Subject
from tests.unit.fa_verify.probing.black_boxes import kernel

CHEAP = ("domain", "conventions", "numerics")


def assumed(call):
    return probe(Subject.of(call, "kernel"), topics=CHEAP).assumed()


def test_limits_conventions_and_wider_roundings_are_assumed():
    found = assumed(kernel(prescale="qk", lse="2", empty_lse=0.0, threshold=8.0, top_left=True))
    assert found == {
        "dtypes": ("fp16", "bf16", "fp32"), "zero_sizes": False, "lse_base": "2", "empty_lse": 0,
        "causal_alignment": "top-left", "prescales": "qk", "rescale_threshold": 8,
    }  # fmt: skip


def test_a_stricter_bound_and_a_lossy_sum_are_not_assumed():
    found = probe(Subject.of(kernel(p="fp32", group_cast=True), "kernel"), topics=CHEAP)
    assert (found["p_dtype"].value, found["group_sum"].value) == ("fp32", "dtype")
    assert [*found.assumed()] == ["dtypes", "zero_sizes"]


def test_an_ignored_mask_is_still_drawn():
    def blind(q, k, v, *, mask, sm_scale):
        return torch.softmax(q @ k.mT * sm_scale, -1) @ v

    found = probe(Subject.of(blind, "kernel"), topics=CHEAP)
    assert found["masks"].value == ()
    assert "masks" not in found.assumed()


def test_a_kernel_that_declares_anything_is_known_as_such():
    assert not declares(Subject.of(kernel(), "kernel"))
    assert declares(Subject.of(attention_kernel(gqa=True)(kernel()), "kernel"))


def test_a_subject_takes_assumptions_by_word():
    words = {"dtypes": ["fp16"], "splits": 3}
    subject = Subject.of(kernel(), "kernel").assuming(words)
    assert subject.dtypes == ("fp16",)
    assert subject.numerics.splits == 3
    assert words == {"dtypes": ["fp16"], "splits": 3}
    with pytest.raises(ValueError, match="did you mean 'splits'"):
        subject.assuming({"split": 3})
    with pytest.raises(ValueError, match="needs one of"):
        subject.assuming({"dots": "tf16"})
    with pytest.raises(ValueError, match="needs a dict"):
        subject.assuming([1])
