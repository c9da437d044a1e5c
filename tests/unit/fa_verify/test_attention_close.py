"""assert_attention_close() judges tensors that a test has computed."""

from __future__ import annotations

import dataclasses
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fa_verify import Mask, Numerics, assert_attention_close
from fa_verify.oracles.masks.block_sparse import BlockSparse
from fa_verify.oracles.outputs import OUTPUTS
from fa_verify.oracles.problem import Problem
from fa_verify.oracles.stream import normal
from tests.unit.properties.kernels.broken_subjects import Eager

ROOT = Path(__file__).parents[3]
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
FULL, CAUSAL = Mask(), Mask(causal=True)
MASKS = {
    "full": FULL,
    "causal": CAUSAL,
    "window": Mask(window_left=5, window_right=2),
    "padding": Mask(causal=True, seqlens_q=(20, 7), seqlens_k=(26, 0)),
    "blocks": BlockSparse(side=8, percent=50, seed=1),
}
PROBLEM = Problem(B=2, H=4, Hk=2, M=20, N=26, D=16, Dv=8)
# Neither out nor lse is read by the backward of automatic differentiation.
EAGER = Numerics(p_dtype="fp32", p_normalised=True)


def drawn(problem: Problem = PROBLEM, dtype: torch.dtype = torch.float16, device: str = "cpu"):
    """q, k, v and dout by name."""
    shapes = {
        "q": (problem.B, problem.H, problem.M, problem.D),
        "k": (problem.B, problem.Hk, problem.N, problem.D),
        "v": (problem.B, problem.Hk, problem.N, problem.Dv),
        "dout": (problem.B, problem.H, problem.M, problem.Dv),
    }
    return {name: normal(0, name, x).to(dtype).to(device) for name, x in shapes.items()}


def results(q, k, v, dout, *, mask=FULL, sm_scale=0.25):
    """out, lse and gradients by name, computed in float64 and rounded to the dtypes of a kernel."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out, lse = Eager()(*(x.double() for x in leaves), mask=mask, sm_scale=sm_scale)
    out = out.to(q.dtype)
    gradients = torch.autograd.grad(out, leaves, dout)
    found = (out.detach(), lse.to(torch.promote_types(q.dtype, torch.float32)), *gradients)
    return dict(zip(OUTPUTS, found, strict=True))


def call(mask: Mask = CAUSAL, dtype: torch.dtype = torch.float16):
    """All arguments of a correct call by name."""
    inputs = drawn(dtype=dtype)
    return {**inputs, **results(**inputs, mask=mask), "mask": mask}


def message(arguments: dict) -> str:
    """The failure message of a call."""
    with pytest.raises(AssertionError) as failed:
        assert_attention_close(**arguments)
    return str(failed.value)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A folder of its own, where replay files are written."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_a_correct_attention_passes(mask, dtype):
    arguments = call(mask, dtype)
    for numerics in (Numerics(), EAGER):
        assert_attention_close(**arguments, numerics=numerics)


def test_a_correct_attention_in_float64_passes():
    assert_attention_close(**call(dtype=torch.float64))


def test_the_forward_alone_is_judged():
    arguments = {name: x for name, x in call().items() if not name.startswith("d")}
    assert_attention_close(**arguments)
    del arguments["lse"]
    assert_attention_close(**arguments)
    found = message({**arguments, "out": arguments["out"] * 1.01})
    assert found.startswith("G1 accuracy: out of attention leaves the derived bound\n  worst at b=")


@pytest.mark.parametrize("name", ["dq", "dk", "dv"])
def test_one_gradient_alone_is_judged(name):
    arguments = call()
    for other in {"dq", "dk", "dv"} - {name}:
        del arguments[other]
    assert_attention_close(**arguments)
    found = message({**arguments, name: arguments[name] * 1.02})
    assert f"G1 accuracy: {name} of attention" in found
    assert found.count("G1") == 1


def test_the_scale_is_that_of_the_head_dimension_by_default():
    assert PROBLEM.scale == 0.25
    inputs = drawn()
    assert_attention_close(**inputs, **results(**inputs, sm_scale=0.5), sm_scale=0.5)
    assert "out of attention leaves" in message({**inputs, **results(**inputs, sm_scale=0.5)})


@pytest.mark.parametrize(
    ("judged", "computed"),
    [
        (Mask(causal=True), Mask(window_right=1)),
        (Mask(window_left=5), Mask(window_left=4)),
        (Mask(seqlens_k=(26, 20)), Mask(seqlens_k=(26, 19))),
    ],
    ids=["causal", "window", "padding"],
)
def test_a_mask_that_is_off_by_one_is_found(judged, computed):
    found = message({**call(computed), "mask": judged})
    for name in OUTPUTS:
        assert f"G1 accuracy: {name} of attention leaves the derived bound" in found


def test_a_wrong_dk_of_the_last_head_of_a_group_is_found_there():
    arguments = call()
    inputs = {name: arguments[name].double() for name in ("q", "k", "v", "dout")}
    inputs["dout"][:, 3] = 0
    dk = results(**inputs, mask=arguments["mask"])["dk"].half()
    found = message({**arguments, "dk": dk})
    assert found.count("G1") == 1
    assert "dk of attention" in found
    assert "bad only at h=1" in found


def test_an_lse_in_base_2_is_found():
    arguments = call()
    found = message({**arguments, "lse": arguments["lse"] / math.log(2)})
    assert found.startswith("G1 accuracy: lse of attention leaves the derived bound")
    assert found.count("G1") == 1


@pytest.mark.parametrize("name", OUTPUTS)
def test_a_nan_is_found(name):
    arguments = call()
    arguments[name][1, 1, 3] = math.nan
    assert f"{name} of attention leaves" in message(arguments)


def test_results_of_rows_that_see_no_key_must_be_exact():
    mask = Mask(seqlens_k=(26, 0))
    arguments = call(mask)
    arguments["out"][1, 0, 0, 0] = 2.0**-24
    found = message(arguments)
    assert "worst at b=1 h=0 m=0 d=0: got 5.960464477539063e-08, want 0.0" in found
    assert "must be exact" in found
    arguments = call(mask)
    arguments["lse"][1] = 0
    assert "lse of attention leaves" in message(arguments)


def read_backward(q, k, v, dout, *, out, lse):
    """dq, dk and dv of a backward that reads out and lse, without a mask, in float64."""
    dtype = q.dtype
    q, k, v, dout, out, lse = (x.double() for x in (q, k, v, dout, out, lse))
    k, v = (x.repeat_interleave(2, 1) for x in (k, v))
    p = torch.exp(0.25 * q @ k.mT - lse.unsqueeze(3))
    ds = p * (dout @ v.mT - (dout * out).sum(3, keepdim=True))
    by_group = (x.unflatten(1, (2, 2)).sum(2) for x in (0.25 * ds.mT @ q, p.mT @ dout))
    gradients = (0.25 * ds @ k, *by_group)
    return {f"d{name}": x.to(dtype) for name, x in zip("qkv", gradients, strict=True)}


def test_gradients_that_do_not_follow_from_the_forward_are_found():
    """Automatic differentiation reads no out that was rounded to fp16."""
    inputs, arguments = drawn(), call(FULL)
    assert_attention_close(**arguments, numerics=EAGER)
    reads = dataclasses.replace(EAGER, backward_reads=("out", "lse"))
    found = message({**arguments, "numerics": reads})
    said = "leaves the bound of a backward that reads out and lse as returned"
    assert found.startswith(f"backward given the forward: dq of attention {said}")
    assert "G1" not in found
    follows = read_backward(**inputs, out=arguments["out"], lse=arguments["lse"])
    assert_attention_close(**{**arguments, **follows}, numerics=reads)


def test_declared_numerics_widen_the_bound():
    arguments = call(dtype=torch.float32)
    error = arguments["out"].abs() * 2.0**-14
    arguments["out"] += error
    assert "out of attention leaves" in message(arguments)
    assert_attention_close(**arguments, numerics=Numerics(dots="tf32"))


def test_the_message_ends_with_the_facts_of_the_call():
    arguments = {**call(), "numerics": EAGER}
    arguments["lse"] += 1
    assert message(arguments).splitlines()[2:] == [
        "  160 of 160 elements are bad (100 %); m tile 0 of 2 (width 16), crossed by the mask's "
        "edge; bad along all axes",
        "judged by the bound: all of out, lse, dq, dk, dv; the backward given the forward: nothing "
        "(backward_reads is not declared); limits of independent roundings: all of out, lse "
        '(gradients: backward_reads=("out", "lse") is not declared); statistics of errors: nothing '
        "(rows are short, or the data is not like N(0, 1))",
        "call: B=2 H=4 Hk=2 M=20 N=26 D=16 Dv=8 fp16 on cpu, mask=Mask(causal=True), "
        "sm_scale=0.25; numerics declare p_dtype='fp32', p_normalised=True",
        f"replay: fa-verify explain {next(Path('fa-verify-replays').glob('*.npz'))}",
    ]


def test_strides_do_not_matter():
    arguments = call()
    for name, x in arguments.items():
        if isinstance(x, torch.Tensor):
            turned = x.transpose(1, 2).contiguous().transpose(1, 2)
            assert not turned.is_contiguous()
            arguments[name] = turned
    arguments["q"] = arguments["q"][:1].expand(2, -1, -1, -1)
    inputs = {name: arguments[name] for name in ("q", "k", "v", "dout")}
    arguments |= results(**inputs, mask=arguments["mask"])
    assert_attention_close(**arguments)


def test_tensors_that_require_gradients_pass_without_a_warning():
    arguments = call()
    leaves = {name: arguments[name].requires_grad_() for name in ("q", "k", "v", "out")}
    assert_attention_close(**{**arguments, **leaves})
    assert "out of attention" in message({**arguments, **leaves, "out": leaves["out"] * 2})


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_results_are_judged_in_inference_mode(mode):
    inputs = drawn()
    found = results(**inputs)
    with mode():
        inputs, found = ({n: x.clone() for n, x in y.items()} for y in (inputs, found))
        assert_attention_close(**inputs, **found)
        assert "dv of attention" in message({**inputs, **found, "dv": found["dv"] * 2})


@pytest.mark.parametrize("sizes", [{"B": 0}, {"M": 0}, {"N": 0}], ids=str)
def test_sizes_of_0_pass(sizes):
    inputs = drawn(dataclasses.replace(PROBLEM, **sizes))
    zeros = {
        "out": torch.zeros_like(inputs["dout"]),
        "lse": torch.full(inputs["q"].shape[:3], -math.inf),
        **{f"d{name}": torch.zeros_like(inputs[name]) for name in "qkv"},
    }
    assert_attention_close(**inputs, **zeros)


def test_a_long_sequence_is_judged_in_chunks(monkeypatch):
    from fa_verify.oracles.reference import torch_reference

    monkeypatch.setattr(torch_reference, "_SCORES", 2 * 4 * 26 * 3)
    assert_attention_close(**call())
    arguments = call(MASKS["window"])
    arguments["k"][1, 0, 1, 3] = math.nan  # visible in the first chunk alone
    with pytest.raises(ValueError, match=r"^k is nan at b=1 h=0 n=1 d=3; needs to be finite"):
        assert_attention_close(**arguments)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("q", math.nan, "q is nan at b=0 h=3 m=2 d=1; needs to be finite, since this row sees"),
        ("k", math.inf, "k is inf at b=0 h=1 n=2 d=1; needs to be finite, since this key is vis"),
        ("v", -math.inf, "v is -inf at b=0 h=1 n=2 d=1; needs to be finite, since this key is"),
        ("dout", math.nan, "dout is nan at b=0 h=3 m=2 d=1; needs to be finite, since this row"),
    ],
)
def test_an_input_that_is_not_finite_is_refused_where_it_is_read(name, value, said):
    arguments = call(Mask(seqlens_q=(20, 0), seqlens_k=(26, 9)))
    arguments[name][1, 0] = value  # the second sequence is empty
    assert_attention_close(**arguments)
    arguments[name][0, -1, 2, 1] = value
    with pytest.raises(ValueError, match=f"^{said}"):
        assert_attention_close(**arguments)


def test_inputs_out_of_range_are_refused():
    arguments = call()
    arguments["q"] *= 64
    arguments["dout"] *= 2.0**14
    said = (
        r"^the inputs are out of range, so that a correct kernel may fail: \|d[kv]\| \+ bound "
        r"reaches .*; needs to be at most 65504$"
    )
    with pytest.raises(ValueError, match=said):
        assert_attention_close(**arguments)


@pytest.mark.parametrize(
    ("changed", "error", "said"),
    [
        ({"out": None}, TypeError, r"out is NoneType; needs a tensor \(B, H, M, Dv\)"),
        ({"lse": [1.0]}, TypeError, r"lse is list; needs a tensor \(B, H, M\)"),
        ({"q": torch.zeros(4, 20, 16).half()}, ValueError,
         r"q has shape \(4, 20, 16\); needs four axes \(B, H, M, D\)"),
        ({"q": torch.zeros(2, 4, 20, 16).to(torch.float8_e5m2)}, ValueError,
         r"q has dtype torch.float8_e5m2; needs one of torch.float16, .*"),
        ({"k": torch.zeros(2, 2, 26, 8).half()}, ValueError,
         r"k has shape \(2, 2, 26, 8\); needs \(2, 2, 26, 16\), \(B, Hk, N, D\)"),
        ({"v": torch.zeros(2, 1, 26, 8).half()}, ValueError,
         r"v has shape \(2, 1, 26, 8\); needs \(2, 2, 26, 8\), \(B, Hk, N, Dv\)"),
        ({"v": torch.zeros(2, 2, 26, 8)}, ValueError,
         "dq is given for k of torch.float16 and v of torch.float32; needs them in the dtype.*"),
        ({"v": torch.zeros(2, 2, 26, 8).bfloat16()}, ValueError,
         "v has dtype torch.bfloat16; needs torch.float16, that of q"),
        ({"out": torch.zeros(2, 20, 4, 8).half()}, ValueError,
         r"out has shape \(2, 20, 4, 8\); needs \(2, 4, 20, 8\), \(B, H, M, Dv\)"),
        ({"out": torch.zeros(2, 4, 20, 8).double()}, ValueError,
         "out has dtype torch.float64; needs torch.float16, that of q"),
        ({"lse": torch.zeros(2, 4, 20).half()}, ValueError,
         "lse has dtype torch.float16; needs torch.float32"),
        ({"dk": torch.zeros(2, 4, 26, 16).half()}, ValueError,
         r"dk has shape \(2, 4, 26, 16\); needs \(2, 2, 26, 16\), \(B, Hk, N, D\)"),
        ({"out": torch.zeros(2, 4, 20, 8, device="meta").half()}, ValueError,
         "out is on meta; needs the device of q, cpu"),
        ({"dout": None}, ValueError, "dq is given without dout; needs the gradient of out"),
        ({"dq": None, "dk": None, "dv": None}, ValueError,
         "dout is given without dq, dk and dv; needs at least one of them"),
        ({"dout": None, "dlse": None}, ValueError, "dq is given without dout; needs .*"),
        ({"dlse": torch.zeros(2, 4, 20).half()}, ValueError,
         "dlse has dtype torch.float16; needs torch.float32"),
        ({"dlse": torch.zeros(2, 4, 26)}, ValueError,
         r"dlse has shape \(2, 4, 26\); needs \(2, 4, 20\), \(B, H, M\)"),
        ({"alibi_slopes": torch.zeros(3)}, ValueError,
         r"alibi_slopes has shape \(3,\); needs \(4,\), \(B, H\)"),
        ({"alibi_slopes": torch.zeros(2, 4).half()}, ValueError,
         "alibi_slopes has dtype torch.float16; needs torch.float32"),
        ({"alibi_slopes": torch.full((4,), math.nan)}, ValueError,
         "alibi_slopes holds nan; needs finite"),
        ({"bias": torch.zeros(2, 4, 20).half()}, ValueError,
         r"bias has shape \(2, 4, 20\); needs \(2, 4, 20, 26\), \(B or 1, .*"),
        ({"bias": torch.zeros(2, 1, 1, 20).half()}, ValueError,
         r"bias has shape \(2, 1, 1, 20\); needs \(2, 1, 1, 26\), \(B or 1, .*"),
        ({"bias": torch.zeros(1, 1, 1, 1).bfloat16()}, ValueError,
         "bias has dtype torch.bfloat16; needs torch.float16, that of q"),
        ({"bias": torch.full((1, 1, 1, 26), -math.inf)}, ValueError,
         "bias is -inf at b=0 h=0 m=0 n=0; needs to be finite, since this pair is visible. Hide.*"),
        ({"dbias": torch.zeros(1, 1, 1, 26)}, ValueError,
         "dbias is given without bias; needs the bias that was added"),
        ({"bias": torch.zeros(1, 1, 1, 26), "dbias": torch.zeros(1, 1, 1, 26).half()}, ValueError,
         "dbias has dtype torch.float16; needs torch.float32, that of bias"),
        ({"bias": torch.zeros(1, 1, 1, 26), "dbias": torch.zeros(1, 1, 20, 26)}, ValueError,
         r"dbias has shape \(1, 1, 20, 26\); needs \(1, 1, 1, 26\), .*"),
        ({"softcap": 0.0}, ValueError, "softcap is 0.0; needs to be finite and > 0"),
        ({"mask": torch.ones(20, 26).bool()}, TypeError,
         r"mask is Tensor; needs a Mask, such as Mask\(causal=True\)"),
        ({"mask": Mask(seqlens_k=(26, 27))}, ValueError, "seqlens_k is .*; needs lengths <= 26"),
        ({"sm_scale": 0.0}, ValueError, "sm_scale is 0.0; needs to be finite and > 0"),
        ({"numerics": "tf32"}, TypeError, "numerics is 'tf32'; needs a Numerics"),
    ],
    ids=lambda x: ",".join(x) if isinstance(x, dict) else "",
)  # fmt: skip
def test_an_invalid_argument_is_refused(changed, error, said):
    with pytest.raises(error, match=f"(?s)^{said}$"):
        assert_attention_close(**{**call(), **changed})


@pytest.mark.parametrize("axis", [1, 3])
def test_an_axis_that_must_not_be_empty_is_refused(axis):
    shape = [1, 1, 1, 1]
    shape[axis] = 0
    q = torch.zeros(shape)
    with pytest.raises(ValueError, match=f"^{' HkD'[axis]} is 0; needs at least 1$|^H is 0"):
        assert_attention_close(q, q, q, q)


def test_heads_in_the_place_of_rows_are_refused_with_the_layout():
    q, k = torch.zeros(1, 20, 4, 16), torch.zeros(1, 26, 4, 16)
    with pytest.raises(ValueError, match=r"multiple of the 26 heads of k. Tensors are \(B, H, S,"):
        assert_attention_close(q, q, k, k)


def test_the_example_of_the_page_passes_and_its_fault_is_found_as_shown():
    page = (ROOT / "docs" / "verify-a-kernel.md").read_text(encoding="utf-8")
    example, shown = re.findall(r"```(?:python|text)\n(.*?)```", page, re.DOTALL)[:2]
    assert example.count("is_causal=True") == 1
    found = ""
    for code in (example, example.replace("is_causal=True", "is_causal=False")):
        assert found == ""
        namespace: dict = {}
        exec(compile(code, "<page>", "exec"), namespace)
        torch.manual_seed(0)
        try:
            namespace["test_attention"]()
        except AssertionError as error:
            found = str(error)
    numbers = re.compile(r"\d\.\d+(?:e[+-]\d+)?|(?<=attention-)[0-9a-f]+")
    first, last = (numbers.sub("0.0", text) for text in shown.split("...\n"))
    found = numbers.sub("0.0", f"{found}\n")
    assert found.startswith(first)
    assert found.endswith(last)


FRESH = """
import sys
sys.modules["triton"] = None  # as if it were not installed
import torch
from fa_verify import Mask, Numerics, assert_attention_close

q = torch.eye(4).view(1, 1, 4, 4)
try:
    assert_attention_close(q, q, q, q, mask=Mask(causal=True), numerics=Numerics(dots="tf32"))
except AssertionError as error:
    print(str(error).splitlines()[0])
print([x for x in ("hypothesis", "pytest", "fa_kernels") if x in sys.modules])
"""


def test_neither_triton_nor_hypothesis_is_needed():
    done = subprocess.run(
        [sys.executable, "-c", FRESH], capture_output=True, text=True, timeout=120,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "G1 accuracy: out of attention leaves the derived bound",
        "[]",
    ]
