"""assert_attention_close() holds results to limits where the data allows it."""

from __future__ import annotations

import math

import pytest
import torch

from benchmarks.closeness import scaled
from fa_verify import Mask, Numerics, assert_attention_close
from fa_verify.oracles.bounds import spread
from fa_verify.oracles.stream import normal
from fa_verify.properties.guarantees import independence, limits
from fa_verify.properties.kernels.subject import Subject
from tests.unit.properties.kernels.flash_attention_2 import FlashAttention2

LIMITS = "limits of independent roundings"
CAUSAL = Mask(causal=True)


def drawn(M: int, N: int, D: int = 64, heads: int = 1, dtype: torch.dtype = torch.bfloat16):
    """q, k, v and dout of N(0, 1) by name, in float64 with the numbers of a dtype."""
    rows = {"q": M, "k": N, "v": N, "dout": M}
    return {x: normal(0, x, (1, heads, n, D)).to(dtype).double() for x, n in rows.items()}


def call(x: dict, mask: Mask = CAUSAL, dtype: torch.dtype = torch.bfloat16) -> dict:
    """The arguments of a call with the results of a correct kernel, which reads out and lse."""
    x = {name: y.to(dtype) for name, y in x.items()}
    kernel = FlashAttention2()
    leaves = [x[name].detach().requires_grad_() for name in "qkv"]
    out, lse = kernel(*leaves, mask=mask, sm_scale=x["q"].shape[3] ** -0.5)
    gradients = torch.autograd.grad(out, leaves, x["dout"])
    results = {"out": out.detach(), "lse": lse.detach()}
    results |= {f"d{name}": y for name, y in zip("qkv", gradients, strict=True)}
    numerics = Subject.of(kernel, "kernel").numerics
    return {**x, **results, "mask": mask, "numerics": numerics, "replay_folder": None}


def message(arguments: dict) -> str:
    """The failure message of a call."""
    with pytest.raises(AssertionError) as failed:
        assert_attention_close(**arguments)
    return str(failed.value)


def times(arguments: dict, names: tuple[str, ...], rows: slice, factor: float) -> dict:
    """The arguments with a factor on some rows of results, before their last rounding."""
    return arguments | {name: scaled(arguments[name], rows, factor) for name in names}


@pytest.fixture(scope="module")
def long() -> dict:
    return call(drawn(192, 1024))


@pytest.mark.parametrize(
    ("rows", "factor"), [(slice(100, 101), 1.01), (slice(64, 128), 1.002)], ids=["row", "tile"]
)
def test_a_small_factor_of_a_row_or_tile_is_found(long, rows, factor):
    figures = assert_attention_close(**long, report=True)
    assert set(figures.judged[LIMITS].values()) == {1.0}
    for names in (("out",), ("dq", "dk", "dv")):
        found = message(times(long, names, rows, factor))
        for name in names:
            assert f" {name} of attention " in found
        assert "G1 accuracy" not in found
        assert f"{LIMITS}: all of out, lse" in found


def test_the_report_says_what_judged_which_share(long):
    assert assert_attention_close(**long) is None
    figures = assert_attention_close(**long, report=True)
    assert 0 < max(figures.largest.values()) <= 1
    assert str(figures) == (
        "judged by the bound: all of out, lse, dq, dk, dv; the backward given the forward: all of "
        f"dq, dk, dv; {LIMITS}: all of out, lse, dq, dk, dv; statistics of errors: all of out, dq, "
        "dk, dv"
    )
    without = long | {"lse": None, "softcap": 50.0}
    for name in ("dout", "dq", "dk", "dv"):
        without[name] = None
    out, _ = FlashAttention2()(*(long[x] for x in "qkv"), mask=CAUSAL, sm_scale=0.125)
    without |= {"out": out, "softcap": 1e6}
    figures = assert_attention_close(**without, report=True)
    assert figures.judged[LIMITS] == {"out": 0}
    assert figures.left_out[LIMITS] == "a softcap modifies the scores"


def test_gradients_are_left_to_the_bound_where_the_backward_reads_something_else(long):
    unread = long | {"numerics": Numerics()}
    figures = assert_attention_close(**unread, report=True)
    assert figures.judged[LIMITS] == {"out": 1, "lse": 1, "dq": 0, "dk": 0, "dv": 0}
    said = 'gradients: backward_reads=("out", "lse") is not declared'
    assert figures.left_out[LIMITS] == said
    assert said in message(times(unread, ("out",), slice(100, 101), 1.01))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_nearly_equal_weights_widen_the_limits(dtype, monkeypatch):
    x = drawn(128, 300, 32, heads=2)
    x["q"] *= 3e-4
    arguments = call(x, dtype=dtype)
    figures = assert_attention_close(**arguments, report=True)
    assert figures.judged[LIMITS]["out"] == 1
    if dtype == torch.bfloat16:
        monkeypatch.setattr(spread, "FLAT", -1.0)
        monkeypatch.setattr(independence, "_DEVIATIONS", math.inf)
        assert "limit of sums: out of attention is too" in message(arguments)


def test_a_key_that_takes_most_of_the_weight_of_all_rows_leaves_no_head_out():
    x = drawn(128, 128, 32, heads=4)
    x["q"][..., 0] = 4.0
    x["k"][:, :, 0, 0] = 3.0 * 32**0.5
    figures = assert_attention_close(**call(x), report=True)
    assert set(figures.judged[LIMITS].values()) == {1.0}


def test_equal_keys_widen_the_limits(monkeypatch):
    x = drawn(128, 2000, 32)
    # Two keys in turn.
    x["k"] = x["k"][:, :, :2].repeat(1, 1, 1000, 1)
    arguments = call(x, Mask())
    figures = assert_attention_close(**arguments, report=True)
    assert figures.judged[LIMITS]["out"] == 1
    monkeypatch.setattr(independence, "_counts", lambda x, apart: torch.ones_like(x).double())
    monkeypatch.setattr(independence, "_DEVIATIONS", math.inf)
    assert "limit of sums: dv of attention is too" in message(arguments)


def test_heads_whose_weights_have_few_values_are_left_to_the_bound(monkeypatch):
    x = drawn(64, 1000, 32, heads=2)
    # Scores of head 0 have two values, although its rows and keys differ.
    x["q"][:, 0, :, 2:] = 0
    x["q"][:, 0, :, 0] = 5
    x["k"][:, 0, :, 0] = torch.arange(1000) % 2
    x["k"][:, 0, :, 1] = 0
    arguments = call(x, Mask())
    figures = assert_attention_close(**arguments, report=True)
    assert set(figures.judged[LIMITS].values()) == {0.5}
    assert "in other heads, weights are nearly equal" in figures.left_out[LIMITS]
    assert "50 % of out, 50 % of lse" in str(figures)
    monkeypatch.setattr(independence, "_DEVIATIONS", math.inf)
    assert "limit of sums: dv of attention is too" in message(arguments)


def test_equal_columns_widen_the_limits_of_sums(monkeypatch):
    x = drawn(256, 256, 128)
    x["dout"] = torch.ones_like(x["dout"])
    arguments = call(x, Mask())
    assert_attention_close(**arguments)
    monkeypatch.setattr(independence, "_columns", lambda x: torch.ones_like(x[:, :, :1]).double())
    assert "limit of sums: dv of attention is too" in message(arguments)


def test_columns_that_round_alike_in_all_rows_widen_the_limits_of_sums(monkeypatch):
    x = drawn(512, 256, 32)
    # The mean of v lies near the middle of two neighbours in bfloat16.
    x["v"] = 1.0 + 2.0**-7 * (torch.arange(256) % 100 < 54).double()[:, None].expand_as(x["v"])
    arguments = call(x, Mask())
    assert_attention_close(**arguments)
    monkeypatch.setattr(limits, "_STEADY", 0.0)
    assert "limit of sums: out of attention is too" in message(arguments)


def dequantised(scale_k: float, scale_v: float, times_k: float | None = None):
    """A call of a kernel that reads float8 keys and values and multiplies dots by their scales."""
    shape = (2, 4, 40, 64)
    q = normal(0, "q", shape).bfloat16()
    k8, v8 = (
        (normal(0, name, shape) / scale).to(torch.float8_e4m3fn)
        for name, scale in (("k", scale_k), ("v", scale_v))
    )
    s = q.float() @ k8.float().mT * (0.125 * (scale_k if times_k is None else times_k))
    p = torch.softmax(s, -1).bfloat16().float()
    out = (p @ v8.float() * scale_v).bfloat16()
    wide = {"k": k8.float() * scale_k, "v": v8.float() * scale_v}
    numerics = Numerics(p_normalised=True)
    return {"out": out, "q": q, **wide, "numerics": numerics, "replay_folder": None}


@pytest.mark.parametrize("scales", [(0.5, 0.25), (0.037, 0.081)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_dequantised_keys_and_values_are_taken_as_they_are(scales, dtype):
    arguments = dequantised(*scales)
    arguments |= {name: arguments[name].to(dtype) for name in ("k", "v")}
    figures = assert_attention_close(**arguments, report=True)
    assert figures.left_out[LIMITS] == f"k and v are {dtype} and {dtype} beside torch.bfloat16"
    ignored = dequantised(*scales, times_k=1.0)
    assert "G1 accuracy: out of attention leaves the derived bound" in message(ignored)


def test_keys_that_a_kernel_rounds_to_the_dtype_of_q_are_found():
    arguments = dequantised(0.037, 0.081)
    rounded = arguments | {name: arguments[name].bfloat16() for name in ("k", "v")}
    assert "out of attention has larger errors than its roundings explain" in message(rounded)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"k": torch.float16}, "k has dtype torch.float16; needs torch.bfloat16, that of q"),
        ({"dq": torch.bfloat16}, "dq is given for k of torch.float32 and v of torch.float32; nee"),
    ],
    ids=["narrow", "gradients"],
)  # fmt: skip
def test_other_dtypes_of_keys_are_refused(changed, said):
    arguments = dequantised(0.5, 0.5)
    ((name, dtype),) = changed.items()
    arguments[name] = arguments["q" if name == "dq" else name].to(dtype)
    if name == "dq":
        arguments["dout"] = arguments["out"]
    with pytest.raises(ValueError, match=said):
        assert_attention_close(**arguments)


def test_a_failure_names_the_declaration_with_which_the_call_passes():
    small = call(drawn(96, 128, 32))
    declared = small["numerics"].__class__(p_dtype="fp32", backward_reads=("out", "lse"))
    found = message(small | {"numerics": declared})
    assert "\npasses with p_dtype='input' in numerics: declare what the kernel does\n" in found
    # No declaration allows for a fault.
    assert "passes with" not in message(times(small, ("out",), slice(60, 61), 1.02))
    assert "passes with" not in message(times(small, ("dv",), slice(None), 1.5))


def test_a_replay_file_gives_the_same_judgement(tmp_path):
    from fa_verify.replay_files import read

    small = call(drawn(96, 128, 32))
    wide = dequantised(0.037, 0.081, times_k=0.03)
    for arguments in (times(small, ("dq",), slice(50, 51), 1.02), wide):
        found = message(arguments | {"replay_folder": str(tmp_path)})
        (path,) = tmp_path.glob("*.npz")
        again = message({**read(path), "replay_folder": None})
        assert found.splitlines()[:-1] == again.splitlines()
        path.unlink()
