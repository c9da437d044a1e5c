"""The probe recovers how black boxes round and add, from their results alone."""

from __future__ import annotations

import pytest

from fa_verify.probing.experiments import Experiment, observe
from fa_verify.probing.probe import Probed, probe, refuted
from fa_verify.probing.trying import stripped
from fa_verify.properties.subjects.attention_kernel import attention_kernel
from fa_verify.properties.subjects.subject import Subject
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


def test_declarations_of_the_answers_are_valid(box):
    _, probed = box
    assert Subject.of(attention_kernel(**probed.declarations())(lambda **_: None), "kernel")


def test_a_declared_rounding_that_the_kernel_has_not_is_refuted():
    declares = attention_kernel(p_dtype="fp32", group_sum="dtype", rescale_threshold=8.0)
    subject = Subject.of(declares(kernel(prescale="q")), "kernel")
    wrong = refuted(subject, probe(subject, topics=("numerics",)))
    # The sum of a group and the threshold are declared wider than they are, which is no lie.
    assert [x.split(", and the probe")[0] for x in wrong] == [
        "kernel has the default prescales='none'", "kernel declares p_dtype='fp32'",
    ]  # fmt: skip


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
