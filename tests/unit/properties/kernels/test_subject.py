"""A subject: supported problems, conversion of conventions, and the text of declarations."""

from __future__ import annotations

import dataclasses
import math
import re

import pytest
import torch

from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.outputs import OUTPUTS, Numerics
from fa_verify.oracles.problem import Problem
from fa_verify.properties.inputs.tensors import Inputs
from fa_verify.properties.kernels.declared import NARROWINGS
from fa_verify.properties.kernels.subject import Subject
from fa_verify.properties.kernels.vocabulary import BITWISE
from fa_verify.properties.running.trial import SubjectError, run_subject

CAUSAL = Mask(causal=True)
WINDOW = Mask(window_left=3)
PADDED = Mask(seqlens_k=(5,))
# (declarations, a supported problem, an unsupported problem, the reason for excluding it).
DOMAINS = [
    ({"dtypes": ("fp16",)}, Problem(dtype="fp16"), Problem(dtype="bf16"), "dtypes ('fp16',)"),
    (
        {"configs": {"default": {}, "tf32": {"dtypes": ("fp32",)}}},
        Problem(config="tf32", dtype="fp32"),
        Problem(config="tf32", dtype="fp16"),
        "dtypes ('fp32',)",
    ),
    (
        {"configs": {"narrow": {}, "wide": {}}},
        Problem(config="wide"),
        Problem(),
        "configs ['narrow', 'wide']",
    ),
    ({"head_dims": (64, 128)}, Problem(D=64, Dv=128), Problem(D=64), "head_dims (64, 128)"),
    ({"head_dims": (64, 128)}, Problem(D=64, Dv=64), Problem(Dv=64), "head_dims (64, 128)"),
    ({"seqlen_multiple": 8}, Problem(M=8, N=16), Problem(M=8, N=9), "seqlen_multiple 8"),
    ({"seqlen_multiple": 8}, Problem(M=0, N=0), Problem(M=4, N=8), "seqlen_multiple 8"),
    ({"max_seqlen": 8}, Problem(M=8, N=8), Problem(M=9, N=8), "max_seqlen 8"),
    ({"max_seqlen": 8}, Problem(M=8, N=8), Problem(M=8, N=9), "max_seqlen 8"),
    ({"gqa": False}, Problem(H=4, Hk=4), Problem(H=4, Hk=2), "gqa False"),
    ({"m_ne_n": False}, Problem(M=8, N=8), Problem(M=8, N=9), "m_ne_n False"),
    ({"dv_ne_d": False}, Problem(D=8, Dv=8), Problem(D=8, Dv=16), "dv_ne_d False"),
    ({"zero_sizes": False}, Problem(), Problem(N=0), "zero_sizes False"),
    ({"zero_sizes": False}, Problem(), Problem(B=0, H=2), "zero_sizes False"),
    ({"masks": ("causal",)}, Problem(mask=CAUSAL), Problem(mask=WINDOW), "masks ('causal',)"),
    (
        {"masks": ("causal",)},
        Problem(mask=CAUSAL),
        Problem(mask=Mask(causal=True, window_left=3)),
        "masks ('causal',)",
    ),
    ({"masks": ("causal",)}, Problem(), Problem(mask=Mask(window_right=0)), "masks ('causal',)"),
    ({"masks": ("window",)}, Problem(mask=WINDOW), Problem(mask=CAUSAL), "masks ('window',)"),
    (
        {"masks": ("window",)},
        Problem(mask=Mask(window_right=0)),
        Problem(mask=Mask(causal=True, window_left=3)),
        "masks ('window',)",
    ),
    ({"masks": ()}, Problem(N=9), Problem(N=9, mask=PADDED), "masks ()"),
    ({"masks": ("padding",)}, Problem(N=9, mask=PADDED), Problem(mask=CAUSAL), "masks ("),
    (
        {"masks": ("causal", "window")},
        Problem(mask=CAUSAL),
        Problem(mask=Mask(causal=True, seqlens_q=(0,))),
        "masks ('causal', 'window')",
    ),
    (
        {"layouts": ("bhsd", "bshd")},
        Problem(layouts=("bhsd", "bshd", "bhsd", "bshd")),
        Problem(layouts=("bhsd", "bhsd", "bhsd", "offset")),
        "layouts ('bhsd', 'bshd')",
    ),
    (
        {"dirty": ("zero", "noise")},
        Problem(M=9, dirty="nan"),
        Problem(N=9, mask=PADDED, dirty="nan"),
        "dirty ('zero', 'noise')",
    ),
    ({"devices": ("cpu",)}, Problem(), Problem(device="cuda"), "devices ('cpu',)"),
    (
        {"always_causal": True},
        Problem(mask=Mask(causal=True, window_left=3)),
        Problem(mask=Mask(window_left=3, window_right=0)),
        "always_causal True",
    ),
    ({"fixed_scale": "1/sqrt(D)"}, Problem(sm_scale=0.25), Problem(sm_scale=0.5), "fixed_scale '1"),
    ({"fixed_scale": 1}, Problem(sm_scale=1.0), Problem(), "fixed_scale 1"),
    ({"one_query": True}, Problem(N=9), Problem(M=2), "one_query True"),
    ({"one_query": True}, Problem(N=9), Problem(mask=Mask(seqlens_q=(0,))), "one_query True"),
    ({"one_query": True, "seqlen_multiple": 8}, Problem(N=8), Problem(N=9), "seqlen_multiple 8"),
    ({"m_gt_n": False}, Problem(M=4, N=4), Problem(M=4, N=3), "m_gt_n False"),
    (
        {"m_gt_n": False},
        Problem(B=2, M=4, N=4, mask=Mask(seqlens_q=(3, 0), seqlens_k=(3, 0))),
        Problem(B=2, M=4, N=4, mask=Mask(seqlens_q=(3, 0), seqlens_k=(2, 4))),
        "m_gt_n False",
    ),
    (
        {"varlen": True, "zero_sizes": False},
        Problem(B=2, mask=Mask(seqlens_q=(0, 1))),
        Problem(B=2, mask=Mask(seqlens_k=(0, 0))),
        "zero_sizes False",
    ),
    (
        {"causal_alignment": "top-left"},
        Problem(M=4, N=9),
        Problem(M=4, N=9, mask=CAUSAL),
        "causal_alignment 'top-left'",
    ),
    (
        {"causal_alignment": "top-left"},
        Problem(M=4, N=9, mask=Mask(causal=True, seqlens_k=(4,))),
        Problem(M=9, N=9, mask=Mask(window_left=3, seqlens_k=(4,))),
        "causal_alignment 'top-left'",
    ),
]


def subject(returned=None, **declared) -> Subject:
    """A subject that returns ``returned``, or q as out, with these declarations."""

    def attention(q, k, v, *, mask, sm_scale, config="default"):
        return q if returned is None else returned

    vars(attention).update(declared)
    return Subject.of(attention, "attention")


def run(returned, problem: Problem = Problem(), **declared):  # noqa: B008  # it is frozen
    """The converted (out, lse)."""
    q = torch.zeros((problem.B, problem.H, problem.M, problem.D))
    return subject(returned, **declared).run(q, q, q, problem)


@pytest.mark.parametrize(("declared", "inside", "outside", "says"), DOMAINS)
def test_a_problem_is_excluded_by_name_of_the_declaration(declared, inside, outside, says):
    assert subject(**declared).excludes(inside) is None
    assert subject(**declared).excludes(outside).startswith(f"attention declares {says}")


@pytest.mark.parametrize("problem", [p for row in DOMAINS for p in row[1:3]], ids=str)
def test_nothing_declared_excludes_nothing(problem):
    assert subject().excludes(dataclasses.replace(problem, config="default")) is None


def test_everything_that_limits_the_domain_is_tried():
    limits = {word for row in DOMAINS for word in row[0]}
    conventions = {"returns_lse", "lse_grad", "score_mods", "lse_base", "empty_lse", "backward"}
    judged = {
        "cuda_graphs",
        "name",
        "source",
        "takes",
        "call",
        "bitwise",
        "same_bits",
        "refuses",
        "packed",
        "numerics",
        "paths",
        "tiles",
        "pooled",
        "states",
        "kvcache",
        "cache",
        "page_sizes",
        "kvcache_splits",
        # Formats of a cache: ``excludes_format``.
        "cache_formats",
        "cache_scales",
        "scale_divides",
        "writing",
        "quantised",
        "qk_formats",
        "v_formats",
        "qk_scales",
        "v_scales",
        "scale_blocks",
        "quantised_numerics",
        "assumed",
    }
    # A verdict names each declaration that leaves problems out and was assumed.
    assert limits - conventions - {*NARROWINGS} == {"causal_alignment", "configs", "varlen"}
    assert {item.name for item in dataclasses.fields(Subject)} == limits | conventions | judged


def test_an_excluded_problem_is_refused_before_the_call():
    called = []
    attention = Subject(name="attention", call=lambda *_, **__: called.append(1), gqa=False)
    with pytest.raises(NotImplementedError, match=r"^attention declares gqa False$"):
        attention.run(*torch.zeros(3, 1, 4, 1, 16), Problem(H=4, Hk=2))
    assert called == []


@pytest.mark.parametrize("configs", [{"only": {}}, {"only": {}, "other": {}}])
def test_a_configuration_is_passed_where_there_is_a_choice(configs):
    given = {}

    def attention(q, k, v, **rest):
        given.update(rest)
        return q

    attention.configs = configs
    problem = Problem(config="only", sm_scale=0.5, mask=CAUSAL)
    Subject.of(attention, "attention").run(*torch.zeros(3, 1, 1, 1, 16), problem)
    config = {"config": "only"} if len(configs) > 1 else {}
    assert given == {"mask": CAUSAL, "sm_scale": 0.5, **config}


def test_score_modifications_of_a_problem_are_passed_to_the_subject():
    given = []

    def attention(q, k, v, *, mask, sm_scale, **mods):
        given.append(mods)
        return q

    attention.score_mods = ("softcap", "alibi", "bias")
    added = {"alibi_slopes": torch.zeros(1), "bias": torch.zeros(1, 1, 1, 1)}
    for problem, tensors in (
        (Problem(), dict.fromkeys(added)),
        (Problem(softcap=7.0, alibi="normal", bias="normal/"), added),
    ):
        inputs = torch.zeros(3, 1, 1, 1, 16)
        Subject.of(attention, "attention").run(*inputs, problem, **tensors)
    assert given == [{}, {"softcap": 7.0, **added}]


# Rows 0 and 1 of four see no key.
TWO_EMPTY = Problem(M=4, N=2, mask=CAUSAL)
OUT = torch.zeros(1, 1, 4, 16)


def lse_of(*rows: float) -> torch.Tensor:
    return torch.tensor(rows).view(1, 1, -1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_logarithm_to_base_2_becomes_a_natural_one_rounded_once(dtype):
    given = torch.linspace(-997.3, 997.3, 1001, dtype=dtype)
    given[0] = -math.inf
    problem = Problem(M=1001)
    _, lse = run((torch.zeros(1, 1, 1001, 16), given.view(1, 1, -1)), problem, lse_base="2")
    want = torch.tensor([x * math.log(2) for x in given.tolist()], dtype=dtype)
    assert lse.dtype == dtype
    assert lse.flatten().tolist() == want.tolist()


@pytest.mark.parametrize("base", ["e", "2"])
@pytest.mark.parametrize(("declared", "value"), [("+inf", math.inf), (0, 0.0), (0, -0.0)])
def test_a_declared_value_of_empty_rows_becomes_minus_infinity(declared, value, base):
    given = lse_of(value, value, value, 1.0)
    _, lse = run((OUT, given), TWO_EMPTY, empty_lse=declared, lse_base=base)
    last = 1.0 if base == "e" else math.log(2)
    assert lse.tolist() == lse_of(-math.inf, -math.inf, value, last).tolist()


@pytest.mark.parametrize(
    ("declared", "value"),
    [
        ("-inf", 0.0),
        ("-inf", math.inf),
        (0, math.inf),
        (0, 1e-30),
        (0, -math.inf),
        ("+inf", 0.0),
        ("+inf", -math.inf),
    ],
)
def test_another_value_of_an_empty_row_stays_to_be_found(declared, value):
    given = lse_of(value, math.nan, 2.0, 1.0)
    _, lse = run((OUT, given), TWO_EMPTY, empty_lse=declared)
    assert str(lse) == str(given)


def test_rows_of_padding_are_empty():
    problem = Problem(B=2, M=2, N=2, mask=Mask(seqlens_q=(1, 2), seqlens_k=(2, 0)))
    _, lse = run((torch.zeros(2, 1, 2, 16), torch.zeros(2, 1, 2)), problem, empty_lse=0)
    assert lse.tolist() == [[[0.0, -math.inf]], [[-math.inf, -math.inf]]]


def test_an_lse_of_another_shape_is_refused_by_its_shape():
    problem = Problem(B=2, M=3, N=3)
    made = subject((torch.zeros(2, 1, 3, 16), torch.zeros(2, 3, 1)), empty_lse=0, backward=False)
    with pytest.raises(SubjectError, match=r"lse has shape \(2, 3, 1\) .* needs \(2, 1, 3\)"):
        run_subject(made, problem, Inputs(*torch.zeros(4, 2, 1, 3, 16)))


@pytest.mark.parametrize("declared", [{}, {"returns_lse": True}, {"returns_lse": None}])
@pytest.mark.parametrize("pair", [tuple, list])
def test_a_pair_is_out_and_lse(declared, pair):
    given = torch.ones(1, 1, 4)
    out, lse = run(pair((OUT, given)), TWO_EMPTY, **declared)
    assert out is OUT
    assert lse is given


@pytest.mark.parametrize("declared", [{}, {"returns_lse": False}, {"returns_lse": None}])
@pytest.mark.parametrize("returned", [OUT, (OUT, None)], ids=["out", "out, None"])
def test_out_alone_has_no_lse(declared, returned):
    assert run(returned, TWO_EMPTY, **declared) == (OUT, None)


@pytest.mark.parametrize(
    ("declared", "returned", "says"),
    [
        ({"returns_lse": True}, OUT, "declares returns_lse=True and returns no lse"),
        ({"returns_lse": True}, (OUT, None), "declares returns_lse=True and returns no lse"),
        ({"returns_lse": False}, (OUT, OUT), "declares returns_lse=False and returns one"),
        ({}, (OUT, OUT, OUT), "returns 3 values; needs to return out, or (out, lse)"),
        ({}, (OUT,), "returns 1 values; needs to return out, or (out, lse)"),
        ({}, "out", "returns str as out; needs a tensor"),
        ({}, (None, OUT), "returns NoneType as out; needs a tensor"),
        ({}, (OUT, 0.0), "returns float as lse; needs a tensor"),
        ({}, (OUT, OUT.numpy()), "returns ndarray as lse; needs a tensor"),
    ],
)
def test_a_result_of_another_form_is_refused(declared, returned, says):
    with pytest.raises(AssertionError, match=f"^attention {re.escape(says)}$"):
        run(returned, TWO_EMPTY, **declared)


def test_no_declarations_list_nothing():
    assert subject().declared() == "nothing"


@pytest.mark.parametrize(
    ("word", "value", "says"),
    [
        ("dtypes", ["bf16", "fp16"], "dtypes=('fp16', 'bf16')"),
        ("head_dims", [64], "head_dims=(64,)"),
        ("seqlen_multiple", 8, "seqlen_multiple=8"),
        ("max_seqlen", 64, "max_seqlen=64"),
        ("gqa", False, "gqa=False"),
        ("m_ne_n", False, "m_ne_n=False"),
        ("dv_ne_d", False, "dv_ne_d=False"),
        ("masks", (), "masks=()"),
        ("layouts", ("bhsd",), "layouts=('bhsd',)"),
        ("dirty", ("zero",), "dirty=('zero',)"),
        ("backward", False, "backward=False"),
        ("devices", ("cpu",), "devices=('cpu',)"),
        ("returns_lse", True, "returns_lse=True"),
        ("returns_lse", False, "returns_lse=False"),
        ("lse_grad", True, "lse_grad=True"),
        ("lse_base", "2", "lse_base='2'"),
        ("empty_lse", 0, "empty_lse=0"),
        ("causal_alignment", "top-left", "causal_alignment='top-left'"),
        ("bitwise", ("G8", "G4"), "bitwise=('G4', 'G8')"),
        ("accumulator", 2.0, "accumulator=2.0"),
        ("ds_scaled", True, "ds_scaled=True"),
        (
            "configs",
            {"plain": {}, "tf32": {"dtypes": ("fp32",), "dots": "tf32"}},
            "configs=plain, tf32 (dtypes=('fp32',), dots='tf32')",
        ),
        ("configs", {"default": {"block_n": 64}}, "configs=default (block_n=64)"),
    ],
)
def test_declarations_are_listed(word, value, says):
    assert subject(**{word: value}).declared() == says


@pytest.mark.parametrize("word", [item.name for item in dataclasses.fields(Numerics)])
def test_every_numeric_declaration_is_listed(word):
    default = getattr(Numerics(), word)
    other = {"any": "tile", "none": "q", "input": "fp32", "ieee": "tf32", "unrounded": "rounded"}
    other |= {"unknown": "truncate", "difference": "exact", "exact": "rounded", "v": "p"}
    other |= {
        "fp32": "input" if word == "partial_sums" else "dtype",
        0: 8,
        1: 2,
        16: 64,
        (): ("out",) if "reads" in word else ("dq",),
    }
    value = not default if isinstance(default, bool) else other[default]
    assert subject(**{word: value}).declared() == f"{word}={value!r}"


def test_declarations_equal_to_the_default_are_not_listed():
    plain = Subject(name="attention", call=print)
    words = ("dtypes", "gqa", "masks", "lse_base", "empty_lse", "seqlen_multiple", "configs")
    assert subject(**{word: getattr(plain, word) for word in words}).declared() == "nothing"
    numerics = dataclasses.asdict(Numerics())
    assert subject(**numerics, head_dims=None, returns_lse=None).declared() == "nothing"


def test_a_configuration_replaces_numerics_and_keeps_the_others():
    made = subject(block_n=64, configs={"default": {}, "tf32": {"dots": "tf32"}})
    assert made.numerics_of(Problem()) == Numerics(block_n=64)
    assert made.numerics_of(Problem(config="tf32")) == Numerics(block_n=64, dots="tf32")


@pytest.mark.parametrize(
    ("declared", "l_tile"),
    [({}, 0), ({"l_order": "tile"}, 32), ({"l_order": "tile", "l_tile": 8}, 8)],
)
def test_a_sum_by_tile_has_the_width_of_the_declared_tiles(declared, l_tile):
    made = subject(tiles=lambda problem: (64, 32), **declared)
    assert made.numerics_of(Problem()).l_tile == l_tile


def test_nothing_is_promised_unless_it_is_declared():
    assert not any(subject().promises(f"G{number}", "default") for number in range(1, 14))
    promising = subject(bitwise=BITWISE)
    assert {promising.promises(guarantee, "default") for guarantee in BITWISE} == {OUTPUTS}


def test_what_is_summed_by_atomics_is_promised_of_no_configuration_that_says_so():
    made = subject(bitwise=BITWISE, configs={"default": {}, "atomic": {"atomic": ("dq",)}})
    assert made.promises("G10", "default") == OUTPUTS
    assert made.promises("G10", "atomic") == ("out", "lse", "dk", "dv")
    made = subject(
        bitwise=("G8",), atomic=("dq",), configs={"default": {}, "other": {"atomic": ()}}
    )
    assert made.promises("G8", "default") == ("out", "lse", "dk", "dv")
    assert made.promises("G8", "other") == OUTPUTS
    assert made.promises("G10", "default") == ()


@pytest.mark.parametrize(
    ("guarantee", "with_"), [("G3", "G10"), ("G7", "G10"), ("G13", "G10"), ("G12", "G8")]
)
def test_a_comparison_of_runs_is_as_sharp_as_the_promise_it_rests_on(guarantee, with_):
    assert subject(bitwise=(with_,)).promises(guarantee, "default")
    assert not subject(bitwise=tuple({*BITWISE} - {with_})).promises(guarantee, "default")


def test_tiles_are_16_by_16_where_they_are_not_declared():
    assert subject().tile_of(Problem()) == (16, 16)
    assert subject(tiles=lambda problem: (problem.M, 32)).tile_of(Problem(M=64)) == (64, 32)
