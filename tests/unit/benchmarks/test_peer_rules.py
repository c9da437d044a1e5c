"""Other projects' rules pass, fail and have limits as in the tests that they reimplement."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.peer_rules import (
    CUDNN,
    CUDNN_V2,
    EAGER,
    RULES,
    TUTORIAL,
    UPCAST,
    XFORMERS,
    Case,
)
from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.outputs import Outputs
from fa_verify.oracles.problem import Problem
from fa_verify.oracles.reference import torch_reference
from fa_verify.properties.guarantees.compare import largest_ratios
from fa_verify.properties.inputs.families import TORCH_DTYPES
from fa_verify.properties.inputs.tensors import make

JUDGES = {rule.__name__: rule for rule in RULES}
COMPARED = ("out", "dq", "dk", "dv")
COMPARES_LSE = {"flex_attention", "xformers", "cudnn_frontend", "cudnn_frontend_v2"}
# Rules whose references are NaN in an empty row, and the outputs that are NaN there.
NAN_ROWS = {
    "flash_attention_triton": {"out", "dv"},
    "triton_tutorial": {"out", "dv"},
    "xformers": {"out", "dq", "dk", "dv"},
    "cudnn_frontend": {"out", "lse", "dv"},
}
# Dtypes of out, lse and gradients in eager references.
EAGER_DTYPES = {
    UPCAST: ("fp16", "fp32", "fp16"),
    EAGER: ("fp16", "fp16", "fp16"),
    TUTORIAL: ("fp16", "fp32", "fp16"),
    XFORMERS: ("fp32", "fp32", "fp16"),
    CUDNN: ("fp32", "fp32", "fp32"),
    CUDNN_V2: ("fp32", "fp32", "fp32"),
}
DTYPES = dict.fromkeys(JUDGES, ("fp16", "bf16")) | {
    "pytorch_sdpa_efficient": ("fp16", "bf16", "fp32"),
    "flex_attention": ("fp16", "bf16", "fp32"),
    "triton_tutorial": ("fp16",),
    "xformers": ("fp16", "bf16", "fp32"),
}
PROBLEMS = (
    Problem(B=2, H=3, Hk=3, M=37, N=67, D=32, Dv=32),
    Problem(H=4, Hk=2, M=79, N=79, D=40, Dv=40, mask=Mask(causal=True)),
    Problem(H=2, Hk=2, M=64, N=64, D=64, Dv=64, mask=Mask(causal=True)),
)
PLAIN_CASES = [(name, index) for name in JUDGES for index in range(3)]
each_rule = pytest.mark.parametrize("name", JUDGES)
each_output = pytest.mark.parametrize("output", COMPARED)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Limits PyTorch to one thread, since small tensors gain nothing from more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@cache
def plain_case(name: str, index: int = 1) -> Case:
    """PyTorch's composite backend in a dtype of the rule's suite, with the oracle's LSE."""
    return case_of(replace(PROBLEMS[index], dtype=DTYPES[name][index % len(DTYPES[name])]))


def case_of(problem: Problem, inputs=None) -> Case:
    inputs = make(problem) if inputs is None else inputs
    want = torch_reference.attention(*inputs, mask=problem.mask, sm_scale=problem.scale)
    given = {"inputs": inputs, "mask": problem.mask, "sm_scale": problem.scale, "want": want}
    got = Case(got=want, **given).math(inputs.q.dtype)
    return Case(got=got._replace(lse=want.lse.to(torch.float32)), **given)


def spoiled(case: Case, **outputs: torch.Tensor) -> Case:
    return replace(case, got=case.got._replace(**outputs))


@each_rule
def test_a_source_names_repository_path_commit_and_test(name):
    source = " ".join(JUDGES[name].__doc__.partition("Source: ")[2].split())
    assert re.match(r"[\w-]+/[\w-]+( \(a fork of [\w/-]+\))?, [\w/.-]+\.py,", source)
    commits = re.findall(r", ([0-9a-f]{4,}), \w+", source)
    assert {len(commit) for commit in commits} == {40}


@pytest.mark.parametrize(("name", "index"), PLAIN_CASES)
def test_pytorchs_composite_backend_passes_every_rule(name, index):
    verdict = JUDGES[name](plain_case(name, index))
    assert verdict == dict.fromkeys(verdict, True)
    assert {*COMPARED} <= {*verdict}


@pytest.mark.parametrize("index", range(3))
def test_pytorchs_flash_kernel_passes_its_own_rule(index):
    case = plain_case("pytorch_sdpa_flash", index)
    leaves = [x.clone().requires_grad_() for x in case.inputs[:3]]
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        out = scaled_dot_product_attention(
            *leaves,
            is_causal=case.mask.causal,
            scale=case.sm_scale,
            enable_gqa=leaves[0].shape[1] != leaves[1].shape[1],
        )
    gradients = torch.autograd.grad(out, leaves, case.inputs.dout)
    got = Outputs(out.detach(), case.want.lse, *gradients)
    assert all(JUDGES["pytorch_sdpa_flash"](replace(case, got=got)).values())


@each_rule
def test_an_output_that_is_a_tenth_too_large_fails(name):
    case = plain_case(name)
    assert not JUDGES[name](spoiled(case, out=case.got.out * 1.1))["out"]


@each_rule
@pytest.mark.parametrize("gradient", ["dq", "dk", "dv"])
def test_a_gradient_of_zeros_fails(name, gradient):
    case = plain_case(name)
    zeros = torch.zeros_like(getattr(case.got, gradient))
    assert not JUDGES[name](spoiled(case, **{gradient: zeros}))[gradient]


@each_rule
def test_the_lse_is_compared_where_the_suite_compares_it(name):
    case = plain_case(name)
    verdict = JUDGES[name](spoiled(case, lse=case.got.lse + 1))
    assert verdict.get("lse") == (False if name in COMPARES_LSE else None)


@each_rule
@each_output
def test_one_nan_fails_the_output_that_holds_it(name, output):
    case = plain_case(name)
    values = getattr(case.got, output).clone()
    values[0, 0, 0, 0] = math.nan
    verdict = JUDGES[name](spoiled(case, **{output: values}))
    assert [key for key, passes in verdict.items() if not passes] == [output]


@each_rule
def test_nan_passes_only_where_the_suite_lets_nan_equal_nan(name):
    problem = Problem(M=5, N=6, dtype="fp16")
    inputs = make(problem)
    inputs.v.fill_(math.nan)
    verdict = JUDGES[name](case_of(problem, inputs))
    lenient = {"pytorch_sdpa_flash", "pytorch_sdpa_efficient", "cudnn_frontend_v2"}
    assert {verdict[output] for output in ("out", "dq", "dk")} == {name in lenient}


def limit(case: Case, name: str, output: str) -> tuple[torch.Tensor, torch.Tensor]:
    """A rule's reference and the largest error that it allows if all elements err equally."""
    dtype, first = case.inputs.q.dtype, output == "out"

    def of(outputs: Outputs[torch.Tensor]) -> torch.Tensor:
        return getattr(outputs, output)

    if name.startswith("flash_attention"):
        truth, low = of(case.eager(UPCAST)), of(case.eager(EAGER))
        factor = 2 if first or name != "flash_attention_output" else 3
        atol = {"flash_attention_causal": 1e-5}.get(name, 0.0)
        if name == "flash_attention_3":
            atol = 2 * (truth + 0.3 - 0.3 - truth).abs().max()
        return truth, factor * (low - truth).abs().max() + atol
    if name.startswith("pytorch_sdpa"):
        flash = name == "pytorch_sdpa_flash"
        truth, low = of(case.math(torch.float32) if flash else case.want), of(case.math(dtype))
        of_flash = {"out": 4, "dq": 180, "dk": 16, "dv": 4}
        factor = (of_flash if flash else {"out": 3, "dq": 150, "dk": 25, "dv": 8.5})[output]
        return truth, (factor * (low - truth).abs().max()).clamp(min=1e-5)
    if name == "flex_attention":
        truth, factor = of(case.want), 10 if dtype == torch.float32 else 1.1
        return truth, factor * (of(case.flex) - truth).abs().mean()
    if name == "triton_tutorial":
        return of(case.eager(TUTORIAL)), torch.tensor(1e-2)
    if name == "xformers":
        truth = of(case.eager(XFORMERS))
        place = (torch.float32, torch.float16, torch.bfloat16).index(dtype)
        atol = ((3e-4, 4e-3, 2e-2) if first else (9e-4, 0.2, 0.9))[place]
        rtol = ((2e-5, 4e-4, 5e-3) if first else (1e-4, 2e-2, 0.1))[place]
        return truth, atol + rtol * truth.double().abs()
    truth = of(case.eager(CUDNN if name == "cudnn_frontend" else CUDNN_V2)).double()
    atol = 7e-2 if dtype == torch.bfloat16 and not first and output != "dq" else 2e-2
    allowed = atol + 2e-2 * truth.abs()
    if name == "cudnn_frontend":  # its tolerance is relative to the output, not the reference
        allowed = allowed / (1 - 2e-2) * torch.where(truth < 0, -1.0, 1.0)
    return truth, allowed


@pytest.mark.parametrize("index", [0, 1, 2, None])
@each_rule
@each_output
def test_the_limit_lies_where_the_suite_puts_it(name, output, index):
    one_key = Problem(M=3, N=1, dtype="fp16")  # the eager runs are exact
    case = case_of(one_key) if index is None else plain_case(name, index)
    truth, allowed = (x.double() for x in limit(case, name, output))
    assert JUDGES[name](spoiled(case, **{output: truth + 0.99 * allowed}))[output]
    beyond = 1.01 * allowed.expand_as(truth)
    if name != "flex_attention":  # it takes the mean; the others take the maximum
        beyond = torch.where(truth.abs() == truth.abs().max(), beyond, 0.0)
    assert not beyond.any() or not JUDGES[name](spoiled(case, **{output: truth + beyond}))[output]


@each_rule
def test_empty_rows_are_zero_or_nan_as_in_the_suite(name):
    case = case_of(Problem(M=20, N=9, dtype="fp16", mask=Mask(causal=True)))
    verdict = JUDGES[name](case)
    assert {key for key, passes in verdict.items() if not passes} == NAN_ROWS.get(name, set())


@pytest.mark.parametrize("form", EAGER_DTYPES)
def test_an_eager_reference_rounds_to_the_dtypes_of_the_suite(form):
    made = case_of(Problem(M=3, N=4, dtype="fp16")).eager(form)
    dtypes = (TORCH_DTYPES[dtype] for dtype in EAGER_DTYPES[form])
    assert (made.out.dtype, made.lse.dtype, made.dq.dtype) == tuple(dtypes)


@pytest.mark.parametrize("form", [*EAGER_DTYPES, "math", "flex"])
def test_a_reference_in_float64_is_the_truth(form):
    mask = Mask(causal=True, window_left=9, seqlens_q=(20, 11), seqlens_k=(30, 17))
    case = case_of(Problem(B=2, H=4, Hk=2, M=20, N=30, D=24, dtype="fp64", mask=mask))
    if form == "math":
        made = case.math(torch.float64)._replace(lse=case.want.lse)
    elif form == "flex":
        made = case.flex
    else:
        made = case.eager(replace(form, inputs=None, products=None, softmax=None, out=None))
    compared = [
        (x, want, 1e-12 * want.abs().clamp(min=1)) for x, want in zip(made, case.want, strict=True)
    ]
    assert max(max(parts) for parts in largest_ratios(compared)) <= 1


@each_rule
def test_padding_is_compared_as_in_the_suite(name):
    mask = Mask(seqlens_q=(20, 11), seqlens_k=(30, 17))
    case = case_of(Problem(B=2, M=20, N=30, dtype="fp16", mask=mask))
    rows, keys = case.padding
    got = case.got
    left = Outputs(
        got.out.masked_fill(rows, 5.0),
        got.lse,
        got.dq.masked_fill(rows, 5.0),
        got.dk.masked_fill(keys, 5.0),
        got.dv.masked_fill(keys, 5.0),
    )
    verdict = JUDGES[name](replace(case, got=left))
    unseen = name.startswith("flash_attention") or name in ("xformers", "cudnn_frontend")
    assert verdict["out"] == (unseen or name == "cudnn_frontend_v2")
    assert {verdict[output] for output in ("dq", "dk", "dv")} == {unseen}


@each_rule
def test_padding_values_do_not_reach_the_references(name):
    mask = Mask(causal=True, seqlens_q=(20, 11), seqlens_k=(30, 17))
    problem = Problem(B=2, H=2, M=20, N=30, dtype="fp16", mask=mask, dirty="nan")
    assert all(JUDGES[name](case_of(problem)).values())


@each_rule
def test_grouped_heads_are_summed_in_the_references(name):
    problem = Problem(H=6, Hk=2, M=20, N=30, D=24, dtype="fp16")
    assert all(JUDGES[name](case_of(problem)).values())


@each_rule
@pytest.mark.parametrize("sizes", [{"M": 0}, {"N": 0}, {"B": 0}])
def test_nothing_to_compare_passes(name, sizes):
    problem = replace(Problem(M=4, N=5, dtype="fp16"), **sizes)
    if 0 in (problem.B, problem.M) or name not in NAN_ROWS:
        assert all(JUDGES[name](case_of(problem)).values())


@each_rule
def test_an_output_that_the_kernel_lacks_is_not_judged(name):
    case = plain_case(name)
    lacking = Outputs(case.got.out, None, None, None, None)
    assert JUDGES[name](replace(case, got=lacking)) == {"out": True}
