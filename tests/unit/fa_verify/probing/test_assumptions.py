"""The declarations that ``fa-verify check`` assumes for a kernel that declares nothing."""

from __future__ import annotations

import pytest
import torch

from fa_verify.oracles.masks.mask import Mask
from fa_verify.probing.probe import probe
from fa_verify.probing.trying import declares
from fa_verify.properties.kernels.attention_kernel import attention_kernel
from fa_verify.properties.kernels.declared import (
    ASSUMED_CONVENTIONS,
    NARROWINGS,
    WORDS,
    narrowings,
)
from fa_verify.properties.kernels.subject import Subject
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


def causal(q, k, v, *, mask, sm_scale):
    seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
    return torch.softmax((q @ k.mT * sm_scale).masked_fill(~seen, -torch.inf), -1) @ v


def test_a_kernel_that_is_always_causal_is_assumed_to_be():
    found = assumed(causal)
    assert (found["always_causal"], found["masks"]) == (True, ("causal",))


def test_a_mask_that_an_always_causal_kernel_ignores_beside_another_is_still_drawn():
    def padded(q, k, v, *, mask, sm_scale):
        seen = Mask(causal=True, seqlens_q=mask.seqlens_q, seqlens_k=mask.seqlens_k)
        seen = seen.dense(*q.shape[:3], k.shape[2], device=q.device)
        return torch.softmax((q @ k.mT * sm_scale).masked_fill(~seen, -torch.inf), -1) @ v

    found = assumed(padded)
    assert found["always_causal"] is True
    assert "masks" not in found


@pytest.mark.parametrize("scale", [lambda s, D: 2 * s, lambda s, D: D**-0.5])
def test_a_wrong_scale_is_no_convention(scale):
    def wrong(q, k, v, *, mask, sm_scale):
        seen = mask.dense(*q.shape[:3], k.shape[2], device=q.device)
        scores = q @ k.mT * scale(sm_scale, q.shape[3])
        return torch.softmax(scores.masked_fill(~seen, -torch.inf), -1) @ v

    assert {*assumed(wrong)} <= {"gqa", "zero_sizes"}


def test_each_assumption_is_a_convention_or_says_what_it_leaves_out():
    assert {*NARROWINGS, *ASSUMED_CONVENTIONS} <= {*WORDS}
    assert not {*NARROWINGS} & {*ASSUMED_CONVENTIONS}
    plain = Subject("kernel", lambda **_: None)
    assert narrowings({word: getattr(plain, word) for word in NARROWINGS}) == ()
    assert plain.assuming({"lse_base": "2", "causal_alignment": "top-left"}).assumed == ()


@pytest.mark.parametrize(
    ("declared", "phrases"),
    [
        ({"always_causal": True, "masks": ("causal",)}, ("always causal",)),
        ({"always_causal": True, "masks": ("causal", "window", "padding")},
         ("always causal", "no custom masks")),
        ({"dtypes": ("fp16", "bf16", "fp32")}, ("no fp64",)),
        ({"dtypes": ("fp16",)}, ("fp16 alone",)),
        ({"head_dims": (64,), "gqa": False}, ("D of 64", "no grouped heads")),
        ({"m_ne_n": False, "m_gt_n": False}, ("M = N",)),
        ({"m_gt_n": False, "seqlen_multiple": 32}, ("M and N in multiples of 32", "M <= N")),
        ({"masks": ()}, ("no mask",)),
        ({"layouts": ("bhsd", "bshd")}, ("bhsd and bshd alone",)),
        ({"backward": False, "lse_base": "2"}, ("no gradients",)),
    ],
)  # fmt: skip
def test_assumptions_say_what_they_leave_out(declared, phrases):
    assert Subject("kernel", lambda **_: None).assuming(declared).assumed == phrases


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
