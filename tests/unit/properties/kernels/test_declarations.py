"""Declarations: all are documented, and a wrong one is refused by name, value and choice."""

from __future__ import annotations

import functools
import re

import pytest

from fa_verify.oracles.formats.writing import Writing
from fa_verify.oracles.quantised_numerics import QuantisedNumerics
from fa_verify.properties.kernels.declared import WORDS, declared_by
from fa_verify.properties.kernels.subject import Subject

# Documented declarations with valid values.
VALID = {
    "dtypes": [("fp16", "bf16"), ["fp64"], {"fp32"}],
    "cache_formats": [("input", "int8"), ["e4m3fn"], {"e5m2"}],
    "cache_scales": [("tensor", "head"), ["page"], {"token_head"}],
    "scale_divides": [True, False],
    "writing": [Writing(rounding="half_added", by="reciprocal", least_scale=1e-6)],
    "dequantised": ["exact", "rounded"],
    "v_scale_on": ["v", "p"],
    "head_dims": [(64, 128), [16], range(8, 257, 8), {64}, None],
    "seqlen_multiple": [1, 128],
    "max_seqlen": [1, 4096, None],
    "gqa": [True, False],
    "m_ne_n": [True, False],
    "m_gt_n": [True, False],
    "one_query": [True, False],
    "always_causal": [True, False],
    "fixed_scale": ["1/sqrt(D)", 1, 0.5, None],
    "varlen": [True, False],
    "dv_ne_d": [True, False],
    "zero_sizes": [True, False],
    "masks": [(), ("causal",), ("window", "padding")],
    "layouts": [("bhsd",), ["bshd", "packed"], None],
    "dirty": [("zero",), ["noise", "nan_q"], None],
    "backward": [True, False],
    "devices": [("cpu",), ("cpu", "cuda")],
    "returns_lse": [True, False, None],
    "lse_grad": [True, False],
    "cuda_graphs": [True, False],
    "lse_base": ["e", "2"],
    "empty_lse": ["-inf", "+inf", 0],
    "causal_alignment": ["bottom-right", "top-left"],
    "prescales": ["none", "q", "k", "qk"],
    "p_dtype": ["input", "fp32"],
    "ds_scaled": [True, False],
    "ds_roundings": [1, 2],
    "ds_from": ["unrounded", "rounded"],
    "splits": [1, 16],
    "flushes": [False, True],
    "rescale_threshold": [0, 8.0, 15],
    "p_normalised": [True, False],
    "dots": ["ieee", "tf32"],
    "tf32_conversion": ["unknown", "truncate", "nearest", "nearest_away"],
    "accumulator": [1, 2.0, 4],
    "block_n": [16, 128],
    "l_order": ["any", "tile"],
    "l_tile": [0, 64],
    "l_from": ["unrounded", "rounded"],
    "group_sum": ["fp32", "dtype"],
    "bitwise": [(), ("G4", "G5", "G8", "G9", "G10")],
    "refuses": [(), ("head dims differ",), ["wrong bias shape", "too many keys"]],
    "same_bits": [(), ("batch",), ["chunks", "heads", "varlen", "inference"]],
    "atomic": [(), ("dq",), ["dq"], ("dk", "dv"), ("dv", "dq", "dk")],
    "partial_sums": ["fp32", "input"],
    "softcap_slope": ["difference", "exact"],
    "backward_reads": [(), ("out",), ["out", "lse"], {"m_and_l", "out"}],
    "configs": [
        {"default": {}},
        {"a": {"dots": "tf32", "dtypes": ("fp32",)}, "b": {}},
        {"a": {"same_bits": ("batch",)}},
    ],
    "tiles": [lambda problem: (16, 16), None],
    "paths": [lambda problem: ("forward",), None],
    "pooled": [lambda q, k, v, **asked: q, None],
    "kvcache": [lambda q, k_cache, v_cache, **given: (q, q), None],
    "cache": [("paged",), ["append", "contiguous"]],
    "page_sizes": [None, (16,), [1, 256]],
    "kvcache_splits": [lambda problem: 2, None],
    "quantised": [lambda q, k, v, q_scale, k_scale, v_scale, **given: q, None],
    "qk_formats": [("e4m3fn",), ["e5m2", "int8"]],
    "v_formats": [("e4m3fn", "input"), ["e5m2"]],
    "qk_scales": [("tensor",), ["token", "block", "head"]],
    "v_scales": [("head",), ["channel", "tensor"]],
    "scale_blocks": [(128, 64), [16, 32]],
    "quantised_numerics": [QuantisedNumerics(p_offset=8, pv_bits=14)],
    "states": [lambda outs, lses: (outs[0], lses[0]), None],
    "packed": [lambda q, k, v, **offsets: q, None],
    "score_mods": [(), ("softcap",), ("bias", "alibi", "softcap")],
}
# An invalid value of each declaration, and the message after the name of the word.
WRONG = [
    ("dtypes", "fp16", "is 'fp16'; needs a tuple of words out of ('fp16', 'bf16', 'fp32', 'fp64')"),
    ("dtypes", ("fp12",), "has ['fp12']; known are ('fp16', 'bf16', 'fp32', 'fp64')"),
    ("dtypes", (), "is empty; needs some of ('fp16', 'bf16', 'fp32', 'fp64')"),
    ("head_dims", 64, "is 64; needs a sequence of sizes"),
    ("head_dims", (), "is (); needs a sequence of sizes"),
    ("head_dims", (64, "128"), "has '128'; needs an int from 1 to"),
    ("head_dims", (64, 0), "has 0; needs an int from 1 to"),
    ("seqlen_multiple", 0, "is 0; needs an int from 1 to"),
    ("seqlen_multiple", None, "is None; needs an int from 1 to"),
    ("max_seqlen", 4096.0, "is 4096.0; needs an int from 1 to"),
    ("max_seqlen", True, "is True; needs an int from 1 to"),
    ("gqa", "no", "is 'no'; needs one of (True, False)"),
    ("m_ne_n", 0, "is 0; needs one of (True, False)"),
    ("dv_ne_d", None, "is None; needs one of (True, False)"),
    ("m_gt_n", 0, "is 0; needs one of (True, False)"),
    ("one_query", 1, "is 1; needs one of (False, True)"),
    ("always_causal", 1, "is 1; needs one of (False, True)"),
    ("varlen", "yes", "is 'yes'; needs one of (False, True)"),
    ("fixed_scale", "1/D", "is '1/D'; needs '1/sqrt(D)' or a finite number > 0"),
    ("fixed_scale", True, "is True; needs '1/sqrt(D)' or a finite number > 0"),
    ("fixed_scale", 0.0, "is 0.0; needs '1/sqrt(D)' or a finite number > 0"),
    ("fixed_scale", float("inf"), "is inf; needs '1/sqrt(D)' or a finite number > 0"),
    ("zero_sizes", 0, "is 0; needs one of (True, False)"),
    ("masks", ("prefix",), "has ['prefix']; known are ('causal', 'window', 'padding', 'custom')"),
    (
        "masks",
        None,
        "is None; needs a tuple of words out of ('causal', 'window', 'padding', 'custom')",
    ),
    ("layouts", ("sbhd",), "has ['sbhd']; known are ('bhsd', 'bshd', "),
    ("dirty", ("rubbish",), "has ['rubbish']; known are ('zero', 'nan', "),
    ("dirty", (), "is empty; needs some of ('zero', 'nan', "),
    ("layouts", (), "is empty; needs some of ('bhsd', 'bshd', "),
    ("backward", 1, "is 1; needs one of (True, False)"),
    ("devices", ("tpu",), "has ['tpu']; known are ('cpu', 'cuda')"),
    ("devices", [], "is empty; needs some of ('cpu', 'cuda')"),
    ("returns_lse", "yes", "is 'yes'; needs one of (True, False)"),
    ("lse_grad", 1, "is 1; needs one of (True, False)"),
    ("cuda_graphs", 0, "is 0; needs one of (True, False)"),
    ("lse_base", 2, "is 2; needs one of ('e', '2')"),
    ("empty_lse", False, "is False; needs one of ('-inf', '+inf', 0)"),
    ("empty_lse", float("inf"), "is inf; needs one of ('-inf', '+inf', 0)"),
    ("causal_alignment", "left", "is 'left'; needs one of ('bottom-right', 'top-left')"),
    ("prescales", "v", "is 'v'; needs one of ('none', 'q', 'k', 'qk')"),
    ("p_dtype", "fp16", "is 'fp16'; needs one of ('input', 'fp32')"),
    ("ds_scaled", "yes", "is 'yes'; needs one of (False, True)"),
    ("ds_roundings", 1.5, "is 1.5; needs an int from 1 to"),
    ("splits", 0, "is 0; needs an int from 1 to"),
    ("flushes", 1, "is 1; needs one of (False, True)"),
    ("rescale_threshold", -1, "is -1; needs a number from 0 to 15, since P is cast relative"),
    ("rescale_threshold", 16.0, "is 16.0; needs a number from 0 to 15"),
    ("rescale_threshold", float("nan"), "is nan; needs a number from 0 to 15"),
    ("rescale_threshold", "8", "is '8'; needs a number"),
    ("rescale_threshold", True, "is True; needs a number"),
    ("ds_from", "out", "is 'out'; needs one of ('unrounded', 'rounded')"),
    ("p_normalised", 1, "is 1; needs one of (False, True)"),
    ("dots", "tf32x3", "is 'tf32x3'; needs one of ('ieee', 'tf32')"),
    (
        "tf32_conversion",
        "rna",
        "is 'rna'; needs one of ('unknown', 'truncate', 'nearest', 'nearest_away')",
    ),
    ("accumulator", 0.5, "is 0.5; needs a number from 1 to 64"),
    ("accumulator", float("inf"), "is inf; needs a number from 1 to 64"),
    ("accumulator", float("nan"), "is nan; needs a number from 1 to 64"),
    ("accumulator", "fp32", "is 'fp32'; needs a number from 1 to 64"),
    ("block_n", "16", "is '16'; needs an int from 1 to"),
    ("l_order", "tiles", "is 'tiles'; needs one of ('any', 'tile')"),
    ("l_tile", -1, "is -1; needs an int from 0 to"),
    ("l_tile", 64.0, "is 64.0; needs an int from 0 to"),
    ("l_tile", True, "is True; needs an int from 0 to"),
    ("l_from", ["rounded"], "is ['rounded']; needs one of ('unrounded', 'rounded')"),
    ("group_sum", "fp16", "is 'fp16'; needs one of ('fp32', 'dtype')"),
    ("bitwise", ("G1",), "has ['G1']; known are ('G4', 'G5', 'G8', 'G9', 'G10')"),
    ("bitwise", "G4", "is 'G4'; needs a tuple of words out of ('G4', 'G5', 'G8', 'G9', 'G10')"),
    ("refuses", ("heads differ",), "has ['heads differ']; known are ('heads not divisible', "),
    ("refuses", "batch differs", "is 'batch differs'; needs a tuple of words out of ('heads not "),
    ("refuses", ("decreasing offsets",), "has 'decreasing offsets'; needs varlen=True or packed"),
    ("refuses", ("cache too long",), "has 'cache too long'; needs kvcache or cache"),
    (
        "same_bits",
        ("chunk",),
        "has ['chunk']; known are ('batch', 'chunks', 'heads', 'varlen', 'inference')",
    ),
    ("same_bits", "batch", "is 'batch'; needs a tuple of words out of ('batch', 'chunks', "),
    ("partial_sums", "dtype", "is 'dtype'; needs one of ('fp32', 'input')"),
    ("atomic", ("out",), "has ['out']; known are ('dq', 'dk', 'dv')"),
    ("softcap_slope", True, "is True; needs one of ('difference', 'exact')"),
    ("backward_reads", ("l",), "has ['l']; known are ('out', 'lse', 'm_and_l')"),
    ("backward_reads", ("lse", "m_and_l"), "is ('lse', 'm_and_l'); needs some of one of "),
    ("score_mods", ("tanh",), "has ['tanh']; known are ('softcap', 'alibi', 'bias', 'sinks')"),
    ("configs", (), "is (); needs a dict of names to declarations"),
    ("configs", {}, "is {}; needs a dict of names to declarations"),
    ("configs", {16: {}}, "has 16; needs names, which are str"),
    ("configs", {"a": None}, "['a'] is None; needs a dict of declarations"),
    (
        "configs",
        {"a": {"gqa": False}},
        "['a'] has ['gqa']; known are ('dtypes', 'same_bits', 'dots', ",
    ),
    ("configs", {"a": {"dtypes": ()}}, "['a'].dtypes is empty; needs some of ('fp16', "),
    ("configs", {"a": {"dots": "fp8"}}, "['a'].dots is 'fp8'; needs one of ('ieee', 'tf32')"),
    ("configs", {"a": {"same_bits": ("G9",)}}, "['a'].same_bits has ['G9']; known are ('batch', "),
    ("configs", {"a": {"block_n": 0}}, "['a'].block_n is 0; needs an int from 1 to"),
    ("tiles", (16, 16), "is (16, 16); needs a function of a problem"),
    ("paths", "forward", "is 'forward'; needs a function of a problem"),
    ("kvcache", True, "is True; needs a function of (q, k_cache, v_cache)"),
    ("cache", (), "is empty; needs some of ('contiguous', 'paged', 'append')"),
    ("cache", ("append",), "is ('append',); needs 'contiguous' or 'paged'"),
    ("page_sizes", (0,), "has 0; needs an int from 1 to"),
    ("cache_formats", ("fp4",), "has ['fp4']; known are ('input', 'e4m3fn', 'e5m2', 'int8')"),
    ("cache_scales", (), "is empty; needs some of ('tensor', 'head', 'page', 'token_head')"),
    ("scale_divides", "k", "is 'k'; needs one of (False, True)"),
    ("writing", "nearest", "is 'nearest'; needs a dict of the fields of Writing"),
    ("writing", {"to": 1}, "is {'to': 1}; needs fields out of ('rounding', 'overflow', 'by', "),
    ("writing", {"by": "shifts"}, ".by is 'shifts'; needs one of ('division', 'reciprocal')"),
    ("writing", {"least_scale": -1}, ".least_scale is -1; needs a finite number >= 0"),
    ("dequantised", "bf16", "is 'bf16'; needs one of ('exact', 'rounded')"),
    ("v_scale_on", "k", "is 'k'; needs one of ('v', 'p')"),
    ("kvcache_splits", 2, "is 2; needs a function of a problem"),
    ("quantised", "fp8", "is 'fp8'; needs a function of (q, k, v, q_scale, k_scale, v_scale)"),
    ("qk_formats", ("e4m3",), "has ['e4m3']; known are ('e4m3fn', 'e5m2', 'int8')"),
    ("v_formats", ("int8",), "has ['int8']; known are ('e4m3fn', 'e5m2', 'input')"),
    ("qk_scales", (), "is empty; needs some of ('tensor', 'head', 'token', 'block')"),
    ("v_scales", ("token",), "has ['token']; known are ('tensor', 'head', 'channel')"),
    ("scale_blocks", (128,), "is (128,); needs two sizes, of rows and of keys"),
    ("quantised_numerics", {"bits": 14}, "has ['bits']; known are ['p_format', "),
    ("quantised_numerics", 14, "is 14; needs a dict of some of ['p_format', "),
    ("states", "merge", "is 'merge'; needs a function of (outs, lses), or True"),
    ("packed", True, "is True; needs a function of packed sequences"),
    ("pooled", True, "is True; needs a function that returns the pooled probabilities"),
]


def function_with(**attributes: object):
    def attention(q, k, v, *, mask, sm_scale):
        return q

    vars(attention).update(attributes)
    return attention


def test_every_declaration_is_documented():
    assert sorted(WORDS) == sorted(VALID)


@pytest.mark.parametrize(("word", "value"), [(k, v) for k, values in VALID.items() for v in values])
def test_a_valid_declaration_reaches_the_subject(word, value):
    subject = Subject.of(function_with(**{word: value}), "attention")
    owner = subject if hasattr(subject, word) else subject.numerics
    stored = getattr(owner, word)
    if isinstance(value, list | tuple | set | range):
        assert isinstance(stored, tuple)
        assert set(stored) == set(value)
    else:
        assert stored == value


def test_every_declaration_has_a_wrong_value():
    assert {word for word, _, _ in WRONG} == set(WORDS)


@pytest.mark.parametrize(("word", "value", "says"), WRONG)
def test_a_wrong_value_is_refused_with_the_value_and_the_choices(word, value, says):
    gap = "" if says.startswith(("[", ".")) else " "
    with pytest.raises(ValueError, match="^" + re.escape(f"attention.{word}{gap}{says}")):
        Subject.of(function_with(**{word: value}), "attention")


def test_a_wrong_value_of_an_instance_is_refused():
    class Attention:
        lse_base = 10

        def __call__(self, q, k, v, *, mask, sm_scale):
            return q

    with pytest.raises(ValueError, match=r"^it.lse_base is 10; needs one of \('e', '2'\)$"):
        Subject.of(Attention(), "it")


@pytest.mark.parametrize(
    ("word", "refuses", "of"),
    [
        ("packed", "decreasing offsets", {"packed": print}),
        ("varlen", "offsets past the end", {"varlen": True}),
        ("kvcache", "negative lengths", {"kvcache": print}),
        ("cache", "page out of range", {"cache": ("paged",)}),
    ],
)
def test_bad_calls_of_other_forms_need_a_function_of_them(word, refuses, of):
    assert Subject.of(function_with(refuses=(refuses,), **of), "f").refuses == (refuses,)
    with pytest.raises(ValueError, match=rf"^f.refuses has '{refuses}'; needs .*{word}"):
        Subject.of(function_with(refuses=(refuses,)), "f")


def test_packed_sequences_have_no_lengths_to_exceed():
    with pytest.raises(ValueError, match=r"^f.refuses has 'too many keys'; needs padded tensors$"):
        Subject.of(function_with(refuses=("too many keys",), varlen=True), "f")


def test_lengths_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match=r"^f.max_seqlen is 64; needs at least 128, its seqlen"):
        Subject.of(function_with(max_seqlen=64, seqlen_multiple=128), "f")


class OfMethods:
    def attention(self, q, k, v, *, mask, sm_scale):
        return q

    attention.head_dim = (64,)


@pytest.mark.parametrize(
    "call",
    [
        function_with(head_dim=(64,)),
        OfMethods().attention,
        functools.wraps(function_with(head_dim=(64,)))(function_with()),
    ],
    ids=["function", "method", "wrapper"],
)
def test_a_misspelt_declaration_is_refused_with_the_right_spelling(call):
    says = f"attention declares 'head_dim' (did you mean 'head_dims'?); known are {sorted(WORDS)}"
    with pytest.raises(ValueError, match=f"^{re.escape(says)}$"):
        declared_by(call, "attention")


def test_a_misspelt_declaration_of_a_partial_function_is_refused():
    call = functools.partial(function_with())
    call.dtype = ("fp16",)
    with pytest.raises(ValueError, match=r"did you mean 'dtypes'\?"):
        declared_by(call, "attention")


def test_an_unknown_declaration_is_refused_with_the_choices():
    says = f"attention declares 'waiver'; known are {sorted(WORDS)}"
    with pytest.raises(ValueError, match=f"^{re.escape(says)}$"):
        declared_by(function_with(waiver="G4"), "attention")


def test_attributes_that_a_decorator_leaves_are_no_declarations():
    compiled = functools.wraps(function_with(gqa=False))(function_with())
    compiled.get_compiler_config = None  # as torch.compile does
    assert declared_by(compiled, "attention") == {"gqa": False}


def test_private_attributes_are_no_declarations():
    assert declared_by(function_with(_cache={}), "attention") == {}


def test_attributes_and_methods_of_an_instance_are_its_own():
    class Attention:
        head_dims = (64,)

        def __init__(self):
            self.dtype = "fp16"

        def __call__(self, q, k, v, *, mask, sm_scale):
            return q

        def backward(self, dout):
            return dout

        def tiles(self, problem):
            return 128, 64

    subject = Subject.of(Attention(), "attention")
    assert subject.head_dims == (64,)
    assert subject.backward is True
    assert subject.tiles(None) == (128, 64)


def test_no_declarations_are_no_limits():
    assert declared_by(function_with(), "attention") == {}


def test_declarations_of_a_caller_are_not_changed():
    declared = ["bf16", "fp16"]
    Subject.of(function_with(dtypes=declared), "attention")
    assert declared == ["bf16", "fp16"]


@pytest.mark.parametrize(
    "declared",
    [{"dtypes": ("fp8",)}, {"dtypes": ("float8_e4m3fn",)}, {"devices": ("hip",)}, {"dropout": 0.1}],
    ids=str,
)
def test_features_that_are_not_supported_are_named(declared):
    def kernel(q, k, v, *, mask, sm_scale):
        return q

    vars(kernel).update(declared)
    says = "; dropout and AMD GPUs are not supported, and codes of 8 bits by `quantised` alone$"
    with pytest.raises(ValueError, match=says):
        Subject.of(kernel, "kernel")


def test_other_words_that_are_unknown_get_no_such_sentence():
    def kernel(q, k, v, *, mask, sm_scale):
        return q

    kernel.dtypes = ("fp17",)
    with pytest.raises(ValueError, match=r"has \['fp17'\]; known are \(.*'fp64'\)$"):
        Subject.of(kernel, "kernel")
