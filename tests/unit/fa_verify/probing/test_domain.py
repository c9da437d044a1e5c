"""The probe finds which inputs a kernel takes, from its refusals."""

from __future__ import annotations

import itertools

import pytest
import torch

from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.problem import Problem
from fa_verify.probing.answers import Answer
from fa_verify.probing.probe import Probed, probe, refuted
from fa_verify.probing.trying import attempt, stripped
from fa_verify.properties.kernels.attention_kernel import attention_kernel
from fa_verify.properties.kernels.subject import Subject

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
            "one_query": M != 1,
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
    "one_query": True,
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
        "masks": ("causal", "window", "padding", "custom"), "one_query": False,
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
    assert Problem.from_json(found["one_query"].replay).M == 64
    assert found["always_causal"].value is False
    assert found["seqlen_multiple"].value == 1


def test_a_kernel_that_always_raises_says_what_and_where():
    why = "Block pointers have been removed. " + 10 * "Load and store with pointers instead. "

    def kernel(q, k, v, *, mask, sm_scale):
        raise RuntimeError(why)

    (answer,) = probed(kernel).answers
    assert (answer.word, answer.value, answer.certainty) == ("raises", "RuntimeError", "shown")
    assert answer.evidence.startswith(f"on all 92 problems: RuntimeError: {why.strip()} (")
    assert "test_domain.py, line " in answer.evidence
    shown = Problem.from_json(answer.replay)
    assert attempt(stripped(Subject.of(kernel, "kernel")), shown).message.startswith("RuntimeError")


def test_the_exception_of_a_kernel_is_not_the_limit_of_its_signature():
    """The signature of Triton's tutorial implies M = N, so problems of M = 1 say nothing."""

    def kernel(q, k, v, causal, sm_scale):
        raise RuntimeError("Block pointers have been removed")

    (answer,) = probed(kernel).answers
    assert "RuntimeError: Block pointers have been removed" in answer.evidence
    assert "m_ne_n" not in answer.evidence


def test_an_error_is_named_before_refusals():
    def kernel(q, k, v, *, mask, sm_scale):
        if q.shape[3] < 128:
            raise NotImplementedError("head_dim is 128")
        raise ValueError(f"D is {q.shape[3]}")

    (answer,) = probed(kernel).answers
    assert answer.value == "ValueError"
    first, second = answer.evidence.split("; ")
    assert "ValueError: D is 128" in first
    assert "NotImplementedError: head_dim is 128" in second


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
    assert found["ignored_masks"].value == ("window", "padding", "custom")
    assert found["masks"].value == ("causal",)


def always_causal(aligned: str):
    """A kernel that is causal without a mask, and heeds none."""

    def kernel(q, k, v, *, mask, sm_scale):
        rows, keys = (torch.arange(x.shape[2]) for x in (q, k))
        first = k.shape[2] - q.shape[2] if aligned == "bottom-right" else 0
        seen = (keys <= rows[:, None] + first).view(1, 1, q.shape[2], k.shape[2])
        groups = q.shape[1] // k.shape[1]
        wide = q.double(), *(x.double().repeat_interleave(groups, 1) for x in (k, v))
        scores = (wide[0] @ wide[1].mT * sm_scale).masked_fill(~seen, -torch.inf)
        return (torch.softmax(scores, -1).nan_to_num(0.0) @ wide[2]).to(q.dtype)

    return kernel


@pytest.mark.parametrize("aligned", ["bottom-right", "top-left"])
def test_an_always_causal_kernel_is_probed_with_causal_masks(aligned):
    subject = Subject.of(always_causal(aligned), "kernel")
    found = probe(subject, topics=("domain", "conventions"))
    assert found["always_causal"].value is True
    assert found["causal_alignment"].value == aligned
    assert found["masks"].value == ("causal",)
    assert [x.evidence for x in found.answers if "a defect" in x.evidence] == []
    assert [x.word for x in found.answers if x.word == "defect"] == []


def test_a_window_that_a_kernel_always_has_is_no_defect():
    def windowed(q, k, v, *, mask, sm_scale):
        return exact(q, k, v, mask=Mask(causal=True, window_left=3), sm_scale=sm_scale)

    found = probe(Subject.of(windowed, "kernel"), topics=("domain", "numerics"))
    answer = found["always_causal"]
    assert (answer.value, answer.certainty) == (None, "undecided")
    assert "its own key and the 3 keys before it" in answer.evidence
    assert [x.evidence for x in found.answers if "a defect" in x.evidence] == []
    # Every experiment needs a row that sees all keys.
    assert "accumulation" not in [x.word for x in found.answers]


def test_a_kernel_of_m_up_to_n_takes_m_other_than_n():
    def prefill(q, k, v, **beside):
        if q.shape[2] > k.shape[2]:
            raise ValueError("more rows than keys")
        return exact(q, k, v, **beside)

    found = probed(prefill)
    assert (found["m_ne_n"].value, found["m_gt_n"].value) == (True, False)
    assert found["zero_sizes"].value is True


def test_a_kernel_of_m_equal_n_is_asked_for_no_keys_beside_rows():
    found = probed(refusing("m_ne_n"))
    assert (found["m_ne_n"].value, found["m_gt_n"].value) == (False, False)
    assert (found["zero_sizes"].value, found["zero_sizes"].certainty) == (True, "tried")


def test_value_dims_are_sought_among_the_head_dims():
    def one_size(q, k, v, **beside):
        if {q.shape[3], v.shape[3]} != {64}:
            raise ValueError("head_dim is 64")
        return exact(q, k, v, **beside)

    found = probed(one_size)
    assert found["head_dims"].value == (64,)
    assert (found["dv_ne_d"].value, found["dv_ne_d"].certainty) == (None, "undecided")

    def two_sizes(q, k, v, **beside):
        if not {q.shape[3], v.shape[3]} <= {16, 24}:
            raise ValueError("head_dim is 16 or 24")
        return exact(q, k, v, **beside)

    assert probed(two_sizes)["dv_ne_d"].value is True


def test_an_output_of_a_wrong_form_is_one_defect_and_no_limit():
    def transposed(q, k, v, **beside):
        return exact(q, k, v, **beside), torch.zeros(q.shape[0], q.shape[2], q.shape[1])

    found = probe(Subject.of(transposed, "kernel"), topics=("domain", "conventions", "numerics"))
    assert "lse has shape (1, 16, 1)" in found["defect"].evidence
    assert (found["one_query"].value, found["backward"].value) == (False, None)
    assert [x.evidence for x in found.answers if "a defect" in x.evidence] == []
    assert found.assumed() == {}


def test_results_that_are_always_wrong_are_one_defect():
    def doubled(q, k, v, *, mask, sm_scale):
        return exact(q, k, v, mask=mask, sm_scale=2 * sm_scale)

    found = probed(doubled)
    assert found["defect"].evidence.startswith("out")
    assert [x.evidence for x in found.answers if "a defect" in x.evidence] == []


def test_results_beyond_the_declarations_are_no_defect():
    @attention_kernel(gqa=False, dtypes=("fp32",), masks=())
    def first_head(q, k, v, *, mask, sm_scale):
        wrong = k[:, :1].expand(-1, k.shape[1], -1, -1)
        out = exact(q, wrong, v * (1 + (q.shape[1] > 1)), mask=Mask(), sm_scale=sm_scale)
        return out.float()

    found = probed(first_head)
    assert (found["gqa"].value, found["dtypes"].value) == (False, ("fp32",))
    assert "out and dq and dk and dv far from the reference" in found["gqa"].evidence
    assert "declares gqa False" in found["gqa"].evidence
    assert [x.evidence for x in found.answers if "a defect" in x.evidence] == []


def test_a_kernel_that_needs_a_declared_score_modification_is_probed_with_it():
    @attention_kernel(score_mods=("softcap",))
    def capped(q, k, v, *, mask, sm_scale, softcap=None):
        if softcap is None:
            raise NotImplementedError("a softcap is needed")
        seen = mask.dense(*q.shape[:3], k.shape[2], device=q.device)
        groups = q.shape[1] // k.shape[1]
        q, k, v = q.double(), *(x.double().repeat_interleave(groups, 1) for x in (k, v))
        scores = softcap * torch.tanh(q @ k.mT * sm_scale / softcap)
        p = torch.softmax(scores.masked_fill(~seen, -torch.inf), -1).nan_to_num(0.0)
        return p @ v

    subject = Subject.of(capped, "capped")
    found = probe(subject, topics=("domain", "conventions", "numerics"))
    assert found["score_mods"].value == ("softcap",)
    assert "takes no problem without softcap: NotImplementedError" in found["score_mods"].evidence
    assert found["fixed_scale"].certainty == "shown"


def test_the_dots_of_fp32_inputs_refute_no_declaration_of_another_dtype():
    @attention_kernel(dtypes=("fp16",))
    def kernel(q, k, v, **beside):
        return exact(q.bfloat16(), k, v, **beside)

    dots = Answer("dots", "tf32", "shown", "q_operand: tf32, truncated")
    answers = Probed("kernel", "cpu", (dots,))
    assert refuted(Subject.of(kernel, "kernel"), answers) == []
    of_fp32 = attention_kernel(dtypes=("fp32",))(lambda q, k, v, **beside: q)
    assert refuted(Subject.of(of_fp32, "kernel"), answers) != []


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
