"""The decorator declares the same words as attributes, and refuses unknown words."""

from __future__ import annotations

import inspect
import re

import pytest
import torch

import fa_verify
from fa_verify import attention_kernel
from fa_verify.properties.kernels.declared import WORDS, declared_by
from fa_verify.properties.kernels.subject import Subject


def attention(q, k, v, *, mask, sm_scale):
    return q


def test_the_decorator_is_exported_by_fa_verify():
    assert "attention_kernel" in fa_verify.__all__


def test_every_declaration_is_a_keyword_of_the_decorator_and_documented():
    parameters = inspect.signature(attention_kernel).parameters.values()
    words = [x.name for x in parameters if x.kind is inspect.Parameter.KEYWORD_ONLY]
    assert sorted(words) == sorted(WORDS)
    arguments = attention_kernel.__doc__.partition("Args:")[2].partition("Returns:")[0]
    assert re.findall(r"^ {8}(\w+): ", arguments, re.M) == words


def test_the_decorator_declares_what_attributes_declare():
    declared = {"dtypes": ("bf16",), "head_dims": None, "p_dtype": "fp32", "backward": False}

    @attention_kernel(**declared)
    def decorated(q, k, v, *, mask, sm_scale):
        return q

    def by_hand(q, k, v, *, mask, sm_scale):
        return q

    vars(by_hand).update(declared)
    assert vars(decorated) == declared
    assert declared_by(decorated, "f") == declared_by(by_hand, "f")


def test_an_attribute_set_later_replaces_what_the_decorator_declared():
    @attention_kernel(dtypes=("bf16",), gqa=False)
    def kernel(q, k, v, *, mask, sm_scale):
        return q

    kernel.dtypes = ("fp16",)
    assert declared_by(kernel, "kernel") == {"dtypes": ("fp16",), "gqa": False}


def test_the_decorator_returns_the_kernel_itself():
    def kernel(q, k, v, *, mask, sm_scale):
        return q

    assert attention_kernel()(kernel) is kernel
    assert vars(kernel) == {}


def test_an_unknown_word_is_refused_with_the_close_match():
    says = f"attention declares 'head_dim' (did you mean 'head_dims'?); known are {sorted(WORDS)}"
    with pytest.raises(ValueError, match=f"^{re.escape(says)}$"):
        attention_kernel(head_dim=(64,))(attention)


@pytest.mark.parametrize(
    ("declared", "says"),
    [
        ({"dtypes": "fp16"}, "attention.dtypes is 'fp16'; needs a tuple of words out of"),
        ({"seqlen_multiple": None}, "attention.seqlen_multiple is None; needs an int from 1 to"),
    ],
)
def test_a_wrong_value_is_refused_where_it_is_declared(declared, says):
    with pytest.raises(ValueError, match=re.escape(says)):
        attention_kernel(**declared)(attention)
    assert vars(attention) == {}


def test_the_class_behind_apply_can_be_decorated():
    @attention_kernel(dtypes=("fp16",), seqlen_multiple=128)
    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v, causal, sm_scale):
            return q

        @staticmethod
        def backward(ctx, dout):
            return dout

    subject = Subject.of(Attention.apply, "attention")
    assert subject.dtypes == ("fp16",)
    assert subject.seqlen_multiple == 128
    with pytest.raises(
        TypeError, match=r"^Attention\.backward is a method and cannot be declared; rename it$"
    ):
        attention_kernel(backward=False)(Attention)


def test_a_kernel_without_attributes_is_refused_by_name():
    with pytest.raises(TypeError, match=r"^len accepts no attributes; wrap it in a function$"):
        attention_kernel(gqa=False)(len)
