"""The probe finds which inputs a kernel takes, from its refusals."""

from __future__ import annotations

import itertools

import pytest
import torch

from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.problem import Problem
from fa_verify.probing.probe import probe, refuted
from fa_verify.probing.trying import attempt, stripped
from fa_verify.properties.subjects.attention_kernel import attention_kernel
from fa_verify.properties.subjects.subject import Subject

DECODING = "takes one row"


def exact(q, k, v, *, mask, sm_scale):
    """Attention in float64; rows without a visible key give 0."""
    groups = q.shape[1] // k.shape[1]
    wide = q.double(), *(x.double().repeat_interleave(groups, 1) for x in (k, v))
    seen = mask.dense(*q.shape[:3], k.shape[2], device=q.device)
    scores = (wide[0] @ wide[1].mT * sm_scale).masked_fill(~seen, -torch.inf)
    p = torch.softmax(scores, -1).nan_to_num(0.0)
    return (p @ wide[2]).to(q.dtype)


def refusing(word: str):
    """A kernel that raises ValueError for one kind of input."""

    def kernel(q, k, v, *, mask, sm_scale):
        (_, H, M, D), (Hk, N), Dv = q.shape, k.shape[1:3], v.shape[3]
        lengths = mask.seqlens_k is not None
        limits = {
            "dtypes": q.dtype == torch.float64,
            "head_dims": D % 16 != 0 or Dv % 16 != 0,
            "seqlen_multiple": M % 8 != 0 or N % 8 != 0,
            "gqa": H != Hk,
            "m_ne_n": M != N,
            "dv_ne_d": D != Dv,
            "zero_sizes": 0 in (M, N),
            "masks": lengths,
            "layouts": not all(x.is_contiguous() for x in (q, k, v)),
            "only_one_row": M != 1,
        }
        if limits[word]:
            raise ValueError(word)
        return exact(q, k, v, mask=mask, sm_scale=sm_scale)

    return kernel


def probed(kernel):
    return probe(Subject.of(kernel, "kernel"), topics=("domain",))


LIMITS = {
    "dtypes": ("fp16", "bf16", "fp32"),
    "head_dims": (16, 32, 48, 64, 80, 96, 128, 256),
    "seqlen_multiple": 8,
    "gqa": False,
    "m_ne_n": False,
    "dv_ne_d": False,
    "zero_sizes": False,
    "masks": ("causal", "window", "custom"),
    "only_one_row": True,
}


@pytest.mark.parametrize("word", LIMITS)
def test_a_limit_is_found_with_the_call_that_shows_it(word):
    answer = probed(refusing(word))[word]
    assert answer.value == LIMITS[word]
    assert answer.certainty == "shown"
    shown = Problem.from_json(answer.replay)
    assert "ValueError" in attempt(stripped(Subject.of(refusing(word), "kernel")), shown).error


def test_a_kernel_that_takes_everything_has_no_limit():
    found = probed(exact)
    assert {word: found[word].value for word in LIMITS} == {
        "dtypes": ("fp16", "bf16", "fp32", "fp64"), "head_dims": None, "seqlen_multiple": 1,
        "gqa": True, "m_ne_n": True, "dv_ne_d": True, "zero_sizes": True,
        "masks": ("causal", "window", "padding", "custom"), "only_one_row": False,
    }  # fmt: skip
    assert found["layouts"].value is None
    assert found["backward"].value is True
    assert found["score_mods"].value == ()


def test_a_least_length_is_not_taken_for_a_multiple():
    """A probe that assumed multiples of 32 hid a fault of the keys beyond the last multiple."""

    def long(q, k, v, **beside):
        if k.shape[2] < 32:
            raise NotImplementedError("32 keys or more")
        return exact(q, k, v, **beside)

    answer = probed(long)["seqlen_multiple"]
    assert (answer.value, answer.evidence) == (1, "takes M = N = 33 and 65")


def test_float64_that_is_computed_in_float32_is_not_taken():
    """Triton kernels keep their sums in float32, whatever the inputs."""

    def narrow(q, k, v, **beside):
        return exact(q, k, v, **beside).float().to(q.dtype)

    answer = probed(narrow)["dtypes"]
    assert answer.value == ("fp16", "bf16", "fp32")
    assert "as float32 does" in answer.evidence
    assert "fp64" in answer.replay
    # Another computation is a defect, which the checks report.
    assert "fp64" in probed(lambda *x, **beside: 1.5 * narrow(*x, **beside))["dtypes"].value


def test_contiguous_layouts_are_found():
    assert "bhsd" in probed(refusing("layouts"))["layouts"].value
    assert "transposed" not in probed(refusing("layouts"))["layouts"].value


def test_a_kernel_without_gradients_is_found():
    answer = probed(lambda q, k, v, **beside: exact(q, k, v, **beside).detach())["backward"]
    assert (answer.value, answer.certainty) == (False, "shown")


def test_gradients_that_need_longer_sequences_are_found():
    """The backward of Triton's tutorial needs multiples of 128, its forward does not."""

    class Long(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *given):
            ctx.save_for_backward(*given[:3])
            ctx.beside = given[3:]
            return exact(*given[:3], mask=given[3], sm_scale=given[4])

        @staticmethod
        def backward(ctx, dout):
            q, k, v = (x.detach().requires_grad_() for x in ctx.saved_tensors)
            assert q.shape[2] % 32 == 0
            with torch.enable_grad():
                out = exact(q, k, v, mask=ctx.beside[0], sm_scale=ctx.beside[1])
            return *torch.autograd.grad(out, (q, k, v), dout), None, None

    found = probed(lambda q, k, v, *, mask, sm_scale: Long.apply(q, k, v, mask, sm_scale))
    assert found["backward"].value is True
    assert found["seqlen_multiple"].value == 32


def test_a_kernel_that_is_wrong_on_short_sequences_is_probed_on_longer_ones():
    """Kernels that language models write count the padded keys of a tile of 64."""

    def counting(q, k, v, *, mask, sm_scale):
        right = exact(q, k, v, mask=mask, sm_scale=sm_scale)
        return right if q.shape[2] % 64 == 0 else right / 4

    found = probed(counting)
    assert Problem.from_json(found["only_one_row"].replay).M == 64
    assert found["always_causal"].value is False
    assert found["seqlen_multiple"].value == 1


def test_a_kernel_that_takes_no_problem_says_why():
    def kernel(q, k, v, *, mask, sm_scale):
        raise ValueError(f"D is {q.shape[3]}")

    (answer,) = probed(kernel).answers
    assert answer.evidence.startswith("the kernel takes no problem: ")
    assert "ValueError: D is 128" in answer.evidence


def test_wrong_results_are_no_limit():
    """A wrong head is a defect, which the checks report: the probe does not hide it."""

    def first_head(q, k, v, *, mask, sm_scale):
        wrong = k[:, :1].expand(-1, k.shape[1], -1, -1)
        return exact(q, wrong, v * (1 + (q.shape[1] > 1)), mask=mask, sm_scale=sm_scale)

    answer = probed(first_head)["gqa"]
    assert answer.value is True
    assert "a defect, not a limit: out" in answer.evidence


def test_a_kernel_that_ignores_its_arguments_is_found():
    def fixed(q, k, v, *, mask, sm_scale):
        causal = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
        scores = (q @ k.mT * q.shape[3] ** -0.5).masked_fill(~causal, -torch.inf)
        return torch.softmax(scores, -1) @ v

    found = probed(fixed)
    assert found["always_causal"].value is True
    assert found["fixed_scale"].value == "1/sqrt(D)"
    assert found["ignored_masks"].value == ("causal", "window", "padding", "custom")
    assert found["masks"].value == ()


def test_a_declaration_that_promises_too_much_is_refuted():
    declares = attention_kernel(masks=("causal", "padding"), gqa=False)
    subject = Subject.of(declares(refusing("masks")), "kernel")
    (sentence,) = refuted(subject, probe(subject))
    assert "declares masks=('causal', 'padding')" in sentence
    assert "ValueError: masks" in sentence


def test_a_kernel_for_packed_sequences_without_mask_and_scale_is_probed():
    @attention_kernel(
        varlen=True, always_causal=True, masks=("causal",), fixed_scale="1/sqrt(D)", gqa=False,
        zero_sizes=False,
    )  # fmt: skip
    def packed(q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k):
        parts = []
        for a, b in itertools.pairwise(cu_seqlens_q.tolist()):
            one, keys, values = (x[a:b].transpose(0, 1).unsqueeze(0) for x in (q, k, v))
            mask = Mask(causal=True)
            found = exact(one, keys, values, mask=mask, sm_scale=q.shape[2] ** -0.5)
            parts.append(found.squeeze(0).transpose(0, 1))
        return torch.cat(parts)

    subject = Subject.of(packed, "packed")
    probed = probe(subject, topics=("domain",))
    assert probed["dtypes"].value == ("fp16", "bf16", "fp32", "fp64")
    assert (probed["always_causal"].value, probed["fixed_scale"].value) == (True, "1/sqrt(D)")
    assert refuted(subject, probed) == []
