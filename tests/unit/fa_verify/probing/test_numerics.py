"""The probe recovers how black boxes round and add, from their results alone."""

from __future__ import annotations

import re

import pytest
import torch

from fa_verify.oracles.reference.softcap import capped
from fa_verify.probing import numerics
from fa_verify.probing.answers import Answer
from fa_verify.probing.experiments import Experiment, observe
from fa_verify.probing.probe import Probed, probe, refuted
from fa_verify.probing.trying import stripped
from fa_verify.properties.kernels.attention_kernel import attention_kernel
from fa_verify.properties.kernels.subject import Subject
from tests.unit.fa_verify.probing import recovery
from tests.unit.fa_verify.probing.black_boxes import BOXES, kernel, truth


@pytest.fixture(scope="module", params=BOXES)
def box(request) -> tuple[str, Probed]:
    """A black box by name, and the answers about it."""
    return request.param, probe(Subject.of(kernel(**BOXES[request.param]), "kernel"))


def test_a_black_box_is_recovered(box):
    """No answer is wrong, and none is missing that has a right answer."""
    name, probed = box
    found = {answer.word: answer.value for answer in probed.answers}
    want = truth(**BOXES[name])
    assert {word: found[word] for word in want} == want


def test_an_experiment_replays_from_its_line(box):
    name, probed = box
    subject = stripped(Subject.of(kernel(**BOXES[name]), "kernel"))
    for word in ("p_dtype_of_out", "v_operand", "group_sum"):
        which = Experiment.from_json(probed[word].replay)
        assert which.to_json() == probed[word].replay
        fits = observe(subject, which).fits()
        # A property that is decided has an answer that fits; P that is truncated fits without one.
        assert fits or probed[word].value is None


def test_the_evidence_of_an_experiment_tells_its_answer_from_another(box):
    """The two answers of a line predict different numbers."""
    shown = [x.evidence for x in box[1].answers if x.certainty == "shown"]
    wants = [re.findall(r"(\S+) if ", x.partition("; ")[2]) for x in shown]
    told = [(ours, other) for ours, other, *_ in (x for x in wants if len(x) > 1)]
    assert told
    assert all(ours != other for ours, other in told), told


def test_declarations_of_the_answers_are_valid(box):
    _, probed = box
    assert Subject.of(attention_kernel(**probed.declarations())(lambda **_: None), "kernel")


def test_tiles_of_128_keys_show_in_fp16():
    box = kernel(width=128, backwards=True)

    def only_fp16(q, k, v, *, mask, sm_scale):
        if q.dtype != torch.float16:
            raise NotImplementedError("fp16 alone")
        return box(q, k, v, mask=mask, sm_scale=sm_scale)

    found = probe(Subject.of(only_fp16, "only_fp16"))
    assert (found["block_n"].value, found["tile_order"].value) == (128, "descending")


def test_a_declared_rounding_that_the_kernel_has_not_is_refuted():
    declares = attention_kernel(p_dtype="fp32", group_sum="dtype", rescale_threshold=8.0)
    subject = Subject.of(declares(kernel(prescale="q")), "kernel")
    wrong = refuted(subject, probe(subject, topics=("numerics",)))
    # The sum of a group and the threshold are declared wider than they are, which is no lie.
    assert [x.split(", and the probe")[0] for x in wrong] == [
        "kernel has the default prescales='none'", "kernel declares p_dtype='fp32'",
    ]  # fmt: skip


@pytest.mark.parametrize(("declared", "says"), [("nearest", 1), ("truncate", 0), ("unknown", 0)])
def test_another_conversion_to_tf32_than_declared_is_refuted(declared, says):
    declares = attention_kernel(dots="tf32", tf32_conversion=declared)
    subject = Subject.of(declares(kernel(**BOXES["TF32"])), "kernel")
    probed = probe(subject, topics=("numerics",))
    wrong = refuted(subject, probed)
    assert (
        sum("tf32_conversion='nearest', and the probe finds 'truncate'" in x for x in wrong)
        == (len(wrong))
        == says
    )
    # The checks assume no declaration that narrows a bound.
    assert "tf32_conversion" not in probed.assumed()


def test_operands_that_are_converted_in_different_ways_decide_no_conversion():
    words = ("dots", "q_operand", "k_operand", "v_operand", "p_operand")
    found = {word: Answer(word, "tf32, nearest", "shown", "seen") for word in words}
    found["dots"] = Answer("dots", "tf32", "shown", "seen")
    assert numerics._tf32_conversion(found, False).value == "nearest"
    for other in ("tf32, truncated", "ieee", None):
        certainty = "undecided" if other is None else "shown"
        found["p_operand"] = Answer("p_operand", other, certainty, "seen")
        assert numerics._tf32_conversion(found, False).certainty == "undecided"


def test_a_kernel_without_declarations_has_none_refuted():
    subject = Subject.of(kernel(prescale="q"), "kernel")
    assert refuted(subject, probe(subject, topics=("numerics",))) == []


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{}", "needs its JSON"),
        ("[1]", "needs its JSON"),
        ("no", "needs its JSON"),
        ('{"experiment":"other","problem":{"version":1}}', "needs one of"),
        ('{"experiment":"weights","problem":{"version":9}}', "version 9"),
    ],
)
def test_a_line_that_is_no_experiment_is_refused(line, said):
    with pytest.raises(ValueError, match=said):
        Experiment.from_json(line)


class _ExactDelta(torch.autograd.Function):
    """Delta is exact, as if out were not rounded, and yet dq follows the out that was returned."""

    @staticmethod
    def forward(ctx, q, k, v, s):
        p = torch.softmax(q.float() @ k.float().mT * s, 3)
        out = (p @ v.float()).to(q.dtype)
        ctx.save_for_backward(q, k, v, p, out, out.clone())
        ctx.s = s
        return out

    @staticmethod
    def backward(ctx, dout):
        q, k, v, p, out, kept = ctx.saved_tensors
        dp = dout.float() @ v.float().mT
        ds = (p * (dp - (dp * p).sum(3, keepdim=True))).to(q.dtype).float() * ctx.s
        dq = ds @ k.float() + (out.float() - kept.float()).sum(3, keepdim=True)
        dk, dv = ds.mT @ q.float(), p.to(q.dtype).float().mT @ dout.float()
        return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype), None


def test_an_exact_delta_is_not_claimed_of_a_backward_that_reads_out():
    def attention(q, k, v, *, mask, sm_scale):
        return _ExactDelta.apply(q, k, v, sm_scale)

    probed = probe(Subject.of(attention, "kernel"), topics=("numerics",))
    assert probed["backward_reads"].value == ("out",)
    for word in ("delta_from", "ds_dtype", "ds_scaled", "ds_from", "dp_dtype"):
        assert probed[word].value is None
        assert "gradients follow a change of out" in probed[word].evidence


def test_automatic_differentiation_casts_dp_and_sums_it_to_delta():
    """The gradient of a cast of P is dP, cast."""

    def attention(q, k, v, *, mask, sm_scale):
        if q.dtype == torch.float64 or q.shape[1] != k.shape[1]:
            raise NotImplementedError("float64, or grouped heads")
        p = torch.softmax(q.float() @ k.float().mT * sm_scale, 3)
        return (p.to(q.dtype).float() @ v.float()).to(q.dtype)

    probed = probe(Subject.of(attention, "kernel"), topics=("numerics",))
    found = {word: probed[word].value for word in ("dp_dtype", "ds_dtype", "delta_from")}
    assert found == {"dp_dtype": "input", "ds_dtype": "fp32", "delta_from": "exact sums"}


@pytest.mark.parametrize("interpreted", [True, False])
def test_emulated_kernels_are_compared_in_the_interpreter_alone(interpreted, monkeypatch):
    """Beside a GPU they do not load."""
    monkeypatch.setattr(recovery.environment, "INTERPRETED", interpreted)
    specs = recovery.others().values()
    assert "fa_verify.adapters.sdpa:math" in specs
    assert ("tests.altered.emulated:order_0" in specs) == interpreted


@pytest.mark.parametrize("form", ["exact", "difference"])
def test_the_slope_of_a_softcap_is_told_from_a_difference_that_cancels(form):
    @attention_kernel(score_mods=("softcap",), softcap_slope="exact")
    def attention(q, k, v, *, mask, sm_scale, softcap=None):
        if q.dtype != torch.float32 or q.shape[1] != k.shape[1]:
            raise NotImplementedError("other dtypes, or grouped heads")
        s = q @ k.mT * sm_scale
        if softcap is not None:
            s = capped(s, softcap) if form == "exact" else softcap * torch.tanh(s / softcap)
        return torch.softmax(s, 3) @ v

    subject = Subject.of(attention, "kernel")
    probed = probe(subject, topics=("numerics",))
    assert probed["softcap_slope"].value == form
    wrong = [x for x in refuted(subject, probed) if "softcap_slope" in x]
    assert len(wrong) == (form == "difference")
    # The checks assume no declaration that narrows a bound.
    assert "softcap_slope" not in probed.assumed()
