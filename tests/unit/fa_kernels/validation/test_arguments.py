"""flash_attention refuses invalid arguments by name, before it allocates or changes anything."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch

from fa_verify.oracles.masks.mask import Mask

pytest.importorskip("triton")

from fa_kernels import CONFIGS, Config, Tile, flash_attention
from fa_kernels.configs import resolve
from fa_kernels.runtime import allocation
from fa_kernels.validation.arguments import MAX_SEQLEN, Arguments, check, prepared

B, H, HK, M, N, D, DV = 2, 4, 2, 5, 7, 12, 6
FP8 = torch.float8_e4m3fn
LATER = NotImplementedError


class Refusal(NamedTuple):
    """An error, parts of its message (argument, got, needs), and the invalid arguments.

    Values of q, k and v are functions of valid tensors; other functions take the device.
    """

    error: type[Exception]
    pieces: tuple[str, str, str]
    change: dict[str, object]


def refusal(error: type[Exception], *pieces: str, **change: object) -> Refusal:
    argument, got, needs = pieces
    return Refusal(error, (argument, got, needs), change)


def mask_of(**fields: object) -> SimpleNamespace:
    """An object with the attributes of a mask and no checks of its own."""
    nothing = {"window_left": None, "window_right": None, "seqlens_q": None, "seqlens_k": None}
    return SimpleNamespace(**{"causal": False, **nothing, **fields})


def to(what: object) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: x.to(what)


def columns(count: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: x.new_zeros(*x.shape[:3], count)


def too_long(x: torch.Tensor) -> torch.Tensor:
    """One row, repeated without memory."""
    return x[:, :, :1].expand(-1, -1, MAX_SEQLEN + 1, -1)


def headless(x: torch.Tensor) -> torch.Tensor:
    return x[:, :0]


def int32(*values: int) -> Callable[[str], torch.Tensor]:
    return lambda device: torch.tensor(values, dtype=torch.int32, device=device)


def zeros(*shape: int, **how: object) -> Callable[[str], torch.Tensor]:
    return lambda device: torch.zeros(shape, **{"device": device, **how})


AXES_Q, AXES_K = "four axes (B, H, M, D)", "four axes (B, Hk, N, D)"
LONG = f"sequence length {MAX_SEQLEN + 1}"
TENSORS = {
    "q_list": refusal(TypeError, "q", "list", "torch.Tensor", q=torch.Tensor.tolist),
    "v_none": refusal(TypeError, "v", "NoneType", "torch.Tensor", v=lambda x: None),
    "q_sparse": refusal(LATER, "q", "sparse_coo", "strided", q=torch.Tensor.to_sparse),
    "q_rank_3": refusal(ValueError, "q", "(4, 5, 12)", AXES_Q, q=lambda x: x[0]),
    "k_rank_3": refusal(ValueError, "k", "(2, 7, 12)", AXES_K, k=lambda x: x[0]),
    "v_rank_5": refusal(ValueError, "v", "(1, 2, 2, 7, 6)", AXES_K, v=lambda x: x[None]),
    "k_fp16": refusal(ValueError, "k", "float16", "q, torch.float32", k=to(torch.float16)),
    "v_fp64": refusal(ValueError, "v", "float64", "q, torch.float32", v=to(torch.float64)),
    "q_fp8": refusal(LATER, "q", "float8_e4m3fn", "torch.bfloat16", q=to(FP8)),
    "fp8": refusal(LATER, "q", "float8_e4m3fn", "supported", q=to(FP8), k=to(FP8), v=to(FP8)),
    "k_int": refusal(LATER, "k", "torch.int32", "torch.float16", k=to(torch.int32)),
    "v_bool": refusal(LATER, "v", "torch.bool", "torch.float32", v=to(torch.bool)),
    "k_device": refusal(ValueError, "k", "meta", "the device of q", k=to("meta")),
    "v_device": refusal(ValueError, "v", "meta", "the device of q", v=to("meta")),
    "meta": refusal(LATER, "q", "meta", "CUDA", q=to("meta"), k=to("meta"), v=to("meta")),
    "k_batch": refusal(ValueError, "k", "size 1", "that of q, 2", k=lambda x: x[:1]),
    "v_batch": refusal(ValueError, "v", "size 0", "that of q, 2", v=lambda x: x[:0]),
    "v_heads": refusal(ValueError, "v", "(2, 1, 7, 6)", "k, (2, 2, 7, 12)", v=lambda x: x[:, :1]),
    "v_keys": refusal(ValueError, "v", "(2, 2, 6, 6)", "k, (2, 2, 7, 12)", v=lambda x: x[:, :, 1:]),
    "H_3_of_2": refusal(ValueError, "q", "3 heads", "multiple of the 2", q=lambda x: x[:, :3]),
    "H_below_Hk": refusal(ValueError, "q", "1 heads", "multiple of the 2", q=lambda x: x[:, :1]),
    "H_0": refusal(ValueError, "q", "0 heads", "at least one", q=headless),
    "Hk_0": refusal(ValueError, "k", "has 0", "at least one", k=headless, v=headless),
    "D_differs": refusal(ValueError, "k", "head_dim 7", "that of q, 12", k=columns(7)),
    "D_0": refusal(ValueError, "q", "head_dim 0", "at least 1", q=columns(0), k=columns(0)),
    "Dv_0": refusal(ValueError, "v", "head_dim 0", "at least 1", v=columns(0)),
    "D_257": refusal(LATER, "q", "head_dim 257", "1 to 256", q=columns(257), k=columns(257)),
    "Dv_257": refusal(LATER, "v", "head_dim 257", "1 to 256", v=columns(257)),
    "M_too_long": refusal(LATER, "q", LONG, f"up to {MAX_SEQLEN}", q=too_long),
    "N_too_long": refusal(LATER, "k", LONG, f"up to {MAX_SEQLEN}", k=too_long, v=too_long),
}

LEFT, RIGHT, PAIR = "window_left", "window_right", "a pair (window_left, window_right)"
WINDOWS = {
    "left_negative": refusal(
        ValueError, LEFT, "-2", "int >= 0, or None or -1", window_size=(-2, None)
    ),
    "right_negative": refusal(
        ValueError, RIGHT, "-7", "int >= 0, or None or -1", window_size=(None, -7)
    ),
    "left_true": refusal(TypeError, LEFT, "True", "int or None", window_size=(True, None)),
    "left_float_unbounded": refusal(
        TypeError, LEFT, "-1.0", "int or None", window_size=(-1.0, None)
    ),
    "left_float": refusal(TypeError, LEFT, "1.0", "int or None", window_size=(1.0, None)),
    "right_bool": refusal(TypeError, RIGHT, "True", "int or None", window_size=(0, True)),
    "int": refusal(TypeError, "window_size", "3", PAIR, window_size=3),
    "none": refusal(TypeError, "window_size", "None", PAIR, window_size=None),
    "string": refusal(TypeError, "window_size", "'12'", PAIR, window_size="12"),
    "three": refusal(TypeError, "window_size", "(1, 2, 3)", PAIR, window_size=(1, 2, 3)),
    "causal_and_right": refusal(
        ValueError, "causal=True", "window_right=2", "leave one", causal=True, window_size=(None, 2)
    ),
    "causal_int": refusal(TypeError, "causal", "1", "a bool", causal=1),
    "causal_none": refusal(TypeError, "causal", "None", "a bool", causal=None),
}

ONE, ATTRIBUTES = "needs one or the other", "seqlens_q, seqlens_k"
MASKS = {
    "and_causal": refusal(ValueError, "mask", "causal", ONE, mask=Mask(), causal=True),
    "and_window": refusal(
        ValueError, "mask", "window_size", ONE, mask=Mask(), window_size=(3, None)
    ),
    "and_array": refusal(
        ValueError, "mask", "window_size", ONE, mask=Mask(), window_size=np.array([3, 3])
    ),
    "and_seqlens_q": refusal(ValueError, "mask", "seqlens_q", ONE, mask=Mask(), seqlens_q=(5, 5)),
    "and_seqlens_k": refusal(ValueError, "mask", "seqlens_k", ONE, mask=Mask(), seqlens_k=int32()),
    "bool_tensor": refusal(
        TypeError, "mask", "Tensor", ATTRIBUTES, mask=torch.ones(M, N, dtype=torch.bool)
    ),
    "string": refusal(TypeError, "mask", "str", ATTRIBUTES, mask="causal"),
    "not_a_mask": refusal(TypeError, "mask", "SimpleNamespace", ATTRIBUTES, mask=SimpleNamespace()),
    "negative": refusal(ValueError, LEFT, "-1", "int >= 0", mask=mask_of(window_left=-1)),
    "contradiction": refusal(
        ValueError,
        "causal=True",
        "window_right=1",
        "leave",
        mask=mask_of(causal=True, window_right=1),
    ),
    "lengths": refusal(ValueError, "seqlens_k", "8", "in [0, 7]", mask=Mask(seqlens_k=(7, 8))),
}

INTS, SEQUENCE = "needs ints", "a sequence of ints or an int32 tensor"
LENGTHS = {
    "past_M": refusal(ValueError, "seqlens_q", "6", "in [0, 5]", seqlens_q=(6, 0)),
    "past_N": refusal(ValueError, "seqlens_k", "8", "in [0, 7]", seqlens_k=[0, 8]),
    "negative": refusal(ValueError, "seqlens_k", "-1", "in [0, 7]", seqlens_k=(7, -1)),
    "too_few": refusal(ValueError, "seqlens_q", "1 lengths", "batch entry, 2", seqlens_q=(5,)),
    "too_many": refusal(
        ValueError, "seqlens_k", "3 lengths", "batch entry, 2", seqlens_k=(1, 2, 3)
    ),
    "floats": refusal(TypeError, "seqlens_q", "2.0", INTS, seqlens_q=(1, 2.0)),
    "bools": refusal(TypeError, "seqlens_k", "True", INTS, seqlens_k=(True, False)),
    "int": refusal(TypeError, "seqlens_q", "5", SEQUENCE, seqlens_q=5),
    "string": refusal(TypeError, "seqlens_k", "'12'", SEQUENCE, seqlens_k="12"),
    "bytes": refusal(TypeError, "seqlens_k", "b'12'", SEQUENCE, seqlens_k=b"12"),
    "int64": refusal(TypeError, "seqlens_q", "int64", "int32", seqlens_q=torch.tensor([1, 2])),
    "bool_tensor": refusal(
        TypeError, "seqlens_k", "torch.bool", "int32", seqlens_k=torch.tensor([True, False])
    ),
    "tensor_size": refusal(ValueError, "seqlens_q", "(3,)", "(2,)", seqlens_q=int32(1, 2, 3)),
    "tensor_rank": refusal(
        ValueError, "seqlens_k", "()", "(2,)", seqlens_k=lambda device: int32(1)(device)[0]
    ),
    "tensor_device": refusal(
        ValueError, "seqlens_k", "meta", "the device of q", seqlens_k=lambda _: int32(1, 2)("meta")
    ),
}

POSITIVE = "finite and > 0"
OPTIONS = {
    "alibi_list": refusal(TypeError, "alibi_slopes", "list", "float32", alibi_slopes=[0.5]),
    "alibi_dtype": refusal(
        TypeError,
        "alibi_slopes",
        "float64",
        "torch.float32",
        alibi_slopes=zeros(4, dtype=torch.float64),
    ),
    "alibi_shape": refusal(
        ValueError, "alibi_slopes", "(3,)", "(4,) or (2, 4)", alibi_slopes=zeros(3)
    ),
    "alibi_device": refusal(
        ValueError, "alibi_slopes", "meta", "the device of q", alibi_slopes=zeros(4, device="meta")
    ),
    "alibi_gradient": refusal(
        LATER,
        "alibi_slopes",
        "a gradient",
        "detached",
        alibi_slopes=zeros(4, requires_grad=True),
    ),
    "bias_list": refusal(TypeError, "bias", "list", "torch.Tensor", bias=[0.5]),
    "bias_sparse": refusal(
        LATER, "bias", "sparse_coo", "strided", bias=lambda device: torch.zeros(1).to_sparse()
    ),
    "bias_dtype": refusal(
        TypeError, "bias", "float64", "torch.float32", bias=zeros(1, 1, 1, 1, dtype=torch.float64)
    ),
    "bias_rank": refusal(ValueError, "bias", "(5, 7)", "(2 or 1, 4 or 1,", bias=zeros(5, 7)),
    "bias_heads": refusal(
        ValueError,
        "bias",
        "(2, 2, 5, 7)",
        "(2 or 1, 4 or 1, 5 or 1, 7 or 1)",
        bias=zeros(2, 2, 5, 7),
    ),
    "bias_keys": refusal(ValueError, "bias", "(1, 1, 1, 5)", "7 or 1)", bias=zeros(1, 1, 1, 5)),
    "bias_device": refusal(
        ValueError, "bias", "meta", "the device of q", bias=zeros(1, 1, 1, 1, device="meta")
    ),
    "sinks_list": refusal(TypeError, "sinks", "list", "float32", sinks=[0.5]),
    "sinks_sparse": refusal(
        LATER, "sinks", "sparse_coo", "strided", sinks=lambda device: torch.zeros(4).to_sparse()
    ),
    "sinks_dtype": refusal(
        TypeError, "sinks", "bfloat16", "torch.float32", sinks=zeros(4, dtype=torch.bfloat16)
    ),
    "sinks_of_key_heads": refusal(ValueError, "sinks", "(2,)", "(4,)", sinks=zeros(2)),
    "sinks_of_entries": refusal(ValueError, "sinks", "(2, 4)", "(4,)", sinks=zeros(2, 4)),
    "sinks_device": refusal(
        ValueError, "sinks", "meta", "the device of q", sinks=zeros(4, device="meta")
    ),
    "softcap_nan": refusal(ValueError, "softcap", "nan", POSITIVE, softcap=math.nan),
    "softcap_0": refusal(ValueError, "softcap", "0.0", POSITIVE, softcap=0.0),
    "softcap_inf": refusal(ValueError, "softcap", "inf", POSITIVE, softcap=math.inf),
    "softcap_overflows": refusal(LATER, "softcap", "2e+38", "float32", softcap=2e38),
    "softcap_underflows": refusal(LATER, "softcap", "1e-38", "float32", softcap=1e-38),
    "softcap_beside_scale": refusal(
        LATER, "softcap", "1e+30", "sm_scale / softcap", softcap=1e30, sm_scale=1e-9
    ),
    "softcap_string": refusal(TypeError, "softcap", "'1'", "a float or None", softcap="1"),
    "softcap_bool": refusal(TypeError, "softcap", "True", "a float or None", softcap=True),
    "scale_nan": refusal(ValueError, "sm_scale", "nan", POSITIVE, sm_scale=math.nan),
    "scale_inf": refusal(ValueError, "sm_scale", "inf", POSITIVE, sm_scale=math.inf),
    "scale_0": refusal(ValueError, "sm_scale", "0.0", POSITIVE, sm_scale=0.0),
    "scale_negative": refusal(ValueError, "sm_scale", "-0.5", POSITIVE, sm_scale=-0.5),
    "scale_past_float": refusal(ValueError, "sm_scale", "10000", POSITIVE, sm_scale=10**400),
    "scale_overflows": refusal(LATER, "sm_scale", "2e+38", "float32", sm_scale=2e38),
    "scale_underflows": refusal(LATER, "sm_scale", "1e-38", "float32", sm_scale=1e-38),
    "scale_string": refusal(TypeError, "sm_scale", "'1'", "a float or None", sm_scale="1"),
    "scale_bool": refusal(TypeError, "sm_scale", "True", "a float or None", sm_scale=True),
    "scale_tensor": refusal(
        TypeError, "sm_scale", "tensor(1.)", "a float or None", sm_scale=torch.tensor(1.0)
    ),
    "deterministic_int": refusal(TypeError, "deterministic", "1", "a bool", deterministic=1),
    "deterministic_none": refusal(TypeError, "deterministic", "None", "a bool", deterministic=None),
    "config_name": refusal(ValueError, "config", "'fast'", "'16x16'", config="fast"),
    "config_type": refusal(TypeError, "config", "16", "a Config, a name or None", config=16),
    "config_tile": refusal(TypeError, "config", "Tile(", "a Config", config=Tile(16, 16)),
    "config_list": refusal(TypeError, "config", "['16x16']", "a Config", config=["16x16"]),
}

EVERY_REFUSAL = [
    pytest.param(case, id=f"{group}-{name}")
    for group, cases in (
        ("tensors", TENSORS),
        ("window", WINDOWS),
        ("mask", MASKS),
        ("lengths", LENGTHS),
        ("options", OPTIONS),
    )
    for name, case in cases.items()
]


def good(device: str) -> dict[str, torch.Tensor]:
    """Valid q, k, v."""
    shapes = {"q": (B, H, M, D), "k": (B, HK, N, D), "v": (B, HK, N, DV)}
    return {
        name: torch.arange(math.prod(shape), dtype=torch.float32, device=device).view(shape)
        for name, shape in shapes.items()
    }


def changed(case: Refusal, device: str) -> dict[str, object]:
    """The arguments of the refused call."""
    arguments: dict[str, object] = good(device)
    for name, value in case.change.items():
        made = value(arguments.get(name, device)) if callable(value) else value
        arguments[name] = made
    return arguments


def checked(device: str, **change: object) -> Arguments:
    """The launchers' arguments for a valid call."""
    given = {
        "mask": None,
        "causal": False,
        "window_size": (None, None),
        "seqlens_q": None,
        "seqlens_k": None,
        "sm_scale": None,
        "deterministic": True,
        "config": None,
    }
    tensors = good(device).values()
    return prepared(*tensors, check(*tensors, **{**given, **change}))


@pytest.mark.parametrize("case", EVERY_REFUSAL)
def test_an_error_names_the_argument_what_it_got_and_what_it_needs(case, device):
    with pytest.raises(case.error) as caught:
        flash_attention(**changed(case, device))
    assert type(caught.value) is case.error
    message = str(caught.value)
    for piece in case.pieces:
        assert piece in message


@pytest.mark.parametrize("case", EVERY_REFUSAL)
def test_a_refused_call_allocates_nothing_and_changes_nothing(case, device, monkeypatch):
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("allocated before the arguments were checked")

    monkeypatch.setattr(allocation, "empty", refuse)
    arguments = changed(case, device)
    tensors = [x for x in arguments.values() if isinstance(x, torch.Tensor)]
    versions = [x._version for x in tensors]
    with pytest.raises(case.error):
        flash_attention(**arguments)
    assert [x._version for x in tensors] == versions
    for name, x in good(device).items():
        if name not in case.change:
            assert torch.equal(arguments[name], x)


def test_a_device_without_triton_is_refused_by_name(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(NotImplementedError, match=r"^q is on cpu; needs a CUDA device"):
        flash_attention(**good("cpu"))


@pytest.mark.parametrize(
    ("window_size", "want"),
    [
        ((None, None), (M + N, M + N)),
        ((-1, -1), (M + N, M + N)),
        ((-1, 3), (M + N, 3)),
        ([2, -1], (2, M + N)),
        ([3, 0], (3, 0)),
        ((0, M + N), (0, M + N)),
        ((M + N + 1, 2**40), (M + N, M + N)),
    ],
)
def test_windows_reach_the_kernels_within_the_sum_of_the_lengths(window_size, want, device):
    arguments = checked(device, window_size=window_size)
    assert (arguments.window_left, arguments.window_right) == want


@pytest.mark.parametrize("right", [None, -1, 0])
def test_causal_is_a_right_bound_of_zero(right, device):
    arguments = checked(device, causal=True, window_size=(2, right))
    assert (arguments.window_left, arguments.window_right) == (2, 0)


@pytest.mark.parametrize("lengths", [(5, 0), [5, 0], range(5, -1, -5)])
def test_lengths_reach_the_kernels_as_int32_on_the_device(lengths, device):
    got = checked(device, seqlens_q=lengths).seqlens_q
    assert got.tolist() == [5, 0]
    assert (got.dtype, got.device.type) == (torch.int32, device)


def test_lengths_default_to_full(device):
    arguments = checked(device)
    assert arguments.seqlens_q.tolist() == [M, M]
    assert arguments.seqlens_k.tolist() == [N, N]


def test_lengths_on_the_device_are_not_copied(device):
    lengths = int32(1, 2)(device)
    assert checked(device, seqlens_k=lengths).seqlens_k is lengths


@pytest.mark.parametrize(("given", "want"), [(None, D**-0.5), (2, 2.0), (0.1, 0.1)])
def test_the_scale_keeps_its_digits_and_defaults_to_that_of_head_dim(given, want, device):
    assert checked(device, sm_scale=given).sm_scale == want


@pytest.mark.parametrize("given", [2.0**-126, 2.0**126])
def test_every_scale_that_float32_holds_is_taken(given, device):
    assert checked(device, sm_scale=given).sm_scale == given


@pytest.mark.parametrize("field", ["block_m", "block_n", "num_warps", "num_stages"])
@pytest.mark.parametrize("value", [32.0, True, None, "32"])
def test_tiles_refuse_values_that_are_not_int(field, value):
    with pytest.raises(TypeError, match=f"^{field} is {value!r}; needs an int$"):
        Tile(**{"block_m": 32, "block_n": 32, field: value})


@pytest.mark.parametrize(
    ("field", "value", "needs"),
    [
        ("block_m", 8, r"a power of two in \[16, 256\]"),
        ("block_m", 0, r"a power of two in \[16, 256\]"),
        ("block_n", 48, r"a power of two in \[16, 256\]"),
        ("block_n", 512, r"a power of two in \[16, 256\]"),
        ("num_warps", 0, r"a power of two in \[1, 16\]"),
        ("num_warps", 3, r"a power of two in \[1, 16\]"),
        ("num_warps", 32, r"a power of two in \[1, 16\]"),
        ("num_stages", 0, r"an int in \[1, 8\]"),
        ("num_stages", 9, r"an int in \[1, 8\]"),
    ],
)
def test_tiles_refuse_sizes_out_of_range(field, value, needs):
    with pytest.raises(ValueError, match=f"^{field} is {value}; needs {needs}$"):
        Tile(**{"block_m": 32, "block_n": 32, field: value})


@pytest.mark.parametrize("field", ["forward", "dkdv", "dq", "one_pass"])
def test_configs_refuse_values_that_are_not_tiles(field):
    with pytest.raises(TypeError, match=rf"^{field} is \(16, 16\); needs a Tile or None$"):
        Config(**{field: (16, 16)})


@pytest.mark.parametrize("dots", ["bf16", None, 1])
def test_configs_refuse_unknown_dots(dots):
    with pytest.raises(ValueError, match=f"^dots is {dots!r}; needs 'ieee' or 'tf32'$"):
        Config(dots=dots)


@pytest.mark.parametrize("block_d", [16, 64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_config_is_completed_and_keeps_given_fields(dtype, block_d):
    said = Tile(32, 16)
    config = resolve(Config(dq=said, dots="tf32", splits=5), dtype, block_d)
    assert all(isinstance(x, Tile) for x in (config.forward, config.dkdv, config.one_pass))
    assert (config.dq, config.dots, config.splits) == (said, "tf32", 5)
    assert resolve(Config(one_pass=said), dtype, block_d).one_pass == said


def test_wide_heads_have_larger_tiles_where_shared_memory_holds_them():
    small, large = (resolve(None, torch.bfloat16, 256, 128, large=x) for x in (False, True))
    assert large.forward.block_m > small.forward.block_m
    assert large.one_pass != resolve(None, torch.bfloat16, 256, large=True).one_pass
    assert large.cache == small.cache
    narrow = (resolve(None, torch.bfloat16, 128, large=x) for x in (False, True))
    assert next(narrow) == next(narrow)


@pytest.mark.parametrize("given", [None, "default", CONFIGS["default"], Config()])
def test_no_config_is_the_default_one(given):
    assert resolve(given, torch.float32, 64) == resolve("default", torch.float32, 64)
