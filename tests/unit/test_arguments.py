"""What flash_attention refuses: by which error, in which words, and before anything happens."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

from oracles.mask import Mask

pytest.importorskip("triton")

from fa_kernels import CONFIGS, Config, Tile, allocation, flash_attention  # noqa: E402
from fa_kernels.arguments import MAX_HEAD_DIM, MAX_SEQLEN, Arguments, check  # noqa: E402
from fa_kernels.configs import resolve  # noqa: E402

B, H, HK, M, N, D, DV = 2, 4, 2, 5, 7, 8, 6
NO_LENGTHS = {"seqlens_q": None, "seqlens_k": None}


class Refusal(NamedTuple):
    """Arguments, a function of the tensor or a value each, and the error with its three parts."""

    change: dict[str, object]
    error: type[Exception]
    argument: str
    got: str
    needs: str


def tensor(error: type[Exception], argument: str, got: str, needs: str, **change: Callable):
    """A refusal of q, k or v; ``change`` makes them from good ones."""
    return Refusal(change, error, argument, got, needs)


def option(name: str, value: object, error: type[Exception], got: str, needs: str, **others):
    """A refusal of a keyword argument."""
    return Refusal({name: value, **others}, error, name, got, needs)


def headless(x: torch.Tensor) -> torch.Tensor:
    return x[:, :0]


def with_columns(count: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: x.new_zeros(*x.shape[:3], count)


def longer_than_supported(x: torch.Tensor) -> torch.Tensor:
    """One row, seen MAX_SEQLEN + 1 times."""
    return x[:, :, :1].expand(-1, -1, MAX_SEQLEN + 1, -1)


def cast(dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: x.to(dtype)


def on_meta(x: torch.Tensor) -> torch.Tensor:
    return x.to("meta")


def int32(*values: int) -> Callable[[str], torch.Tensor]:
    """Lengths on the device under test."""
    return lambda device: torch.tensor(values, dtype=torch.int32, device=device)


FLOAT8 = torch.float8_e4m3fn

TENSORS = {
    "q is no tensor": tensor(TypeError, "q", "list", "torch.Tensor", q=lambda x: x.tolist()),
    "v is no tensor": tensor(TypeError, "v", "NoneType", "torch.Tensor", v=lambda x: None),
    "q is sparse": tensor(
        NotImplementedError, "q", "torch.sparse_coo", "strided", q=torch.Tensor.to_sparse
    ),
    "q has three axes": tensor(ValueError, "q", "(4, 5, 8)", "(B, H, M, D)", q=lambda x: x[0]),
    "k has three axes": tensor(ValueError, "k", "(2, 7, 8)", "(B, Hk, N, D)", k=lambda x: x[0]),
    "v has five axes": tensor(
        ValueError, "v", "(1, 2, 2, 7, 6)", "(B, Hk, N, D)", v=lambda x: x[None]
    ),
    "k is half": tensor(
        ValueError, "k", "torch.float16", "that of q, torch.float32", k=cast(torch.float16)
    ),
    "v is double": tensor(
        ValueError, "v", "torch.float64", "that of q, torch.float32", v=cast(torch.float64)
    ),
    "q is float8": tensor(NotImplementedError, "q", str(FLOAT8), "torch.bfloat16", q=cast(FLOAT8)),
    "all are float8": tensor(
        NotImplementedError, "q", str(FLOAT8), "supported", **dict.fromkeys("qkv", cast(FLOAT8))
    ),
    "k is int": tensor(
        NotImplementedError, "k", "torch.int32", "torch.float16", k=cast(torch.int32)
    ),
    "v is complex": tensor(
        NotImplementedError, "v", "torch.complex64", "torch.float32", v=cast(torch.complex64)
    ),
    "k is on another device": tensor(ValueError, "k", "meta", "the device of q", k=on_meta),
    "v is on another device": tensor(ValueError, "v", "meta", "the device of q", v=on_meta),
    "all are on meta": tensor(
        NotImplementedError, "q", "meta", "CUDA device", **dict.fromkeys("qkv", on_meta)
    ),
    "k has another batch": tensor(ValueError, "k", "1", "that of q, 2", k=lambda x: x[:1]),
    "v has another batch": tensor(ValueError, "v", "1", "that of q, 2", v=lambda x: x[:1]),
    "v has other heads": tensor(
        ValueError, "v", "(2, 1, 7, 6)", "heads and keys of k, (2, 2, 7, 8)", v=lambda x: x[:, :1]
    ),
    "v has other keys": tensor(
        ValueError, "v", "(2, 2, 6, 6)", "heads and keys of k, (2, 2, 7, 8)", v=lambda x: x[:, :, 1:]
    ),
    "H is no multiple": tensor(
        ValueError, "q", "3 heads", "a multiple of the 2 heads of k", q=lambda x: x[:, :3]
    ),
    "H is less than Hk": tensor(
        ValueError, "q", "1 heads", "a multiple of the 2 heads of k", q=lambda x: x[:, :1]
    ),
    "q has no heads": tensor(ValueError, "q", "0 heads", "at least one", q=headless),
    "k and v have no heads": tensor(
        ValueError, "k", "has 0", "at least one", k=headless, v=headless
    ),
    "k has another head_dim": tensor(
        ValueError, "k", "head_dim 7", "that of q, 8", k=lambda x: x[..., 1:]
    ),
    "head_dim is 0": tensor(
        ValueError, "q", "head_dim 0", "at least 1", q=with_columns(0), k=with_columns(0)
    ),
    "head_dim_v is 0": tensor(ValueError, "v", "head_dim 0", "at least 1", v=with_columns(0)),
    "head_dim is 257": tensor(
        NotImplementedError,
        "q",
        "head_dim 257",
        "1 to 256",
        q=with_columns(MAX_HEAD_DIM + 1),
        k=with_columns(MAX_HEAD_DIM + 1),
    ),
    "head_dim_v is 257": tensor(
        NotImplementedError, "v", "head_dim 257", "1 to 256", v=with_columns(MAX_HEAD_DIM + 1)
    ),
    "q is too long": tensor(
        NotImplementedError,
        "q",
        f"sequence length {MAX_SEQLEN + 1}",
        f"up to {MAX_SEQLEN}",
        q=longer_than_supported,
    ),
    "k and v are too long": tensor(
        NotImplementedError,
        "k",
        f"sequence length {MAX_SEQLEN + 1}",
        f"up to {MAX_SEQLEN}",
        k=longer_than_supported,
        v=longer_than_supported,
    ),
}

WINDOWS = {
    "left is negative": option(
        "window", (-1, None), ValueError, "window_left is -1", "an int >= 0, or None"
    ),
    "right is negative": option(
        "window", (None, -2), ValueError, "window_right is -2", "an int >= 0, or None"
    ),
    "left is a float": option("window", (1.0, None), TypeError, "window_left is 1.0", "int or None"),
    "right is a bool": option(
        "window", (0, True), TypeError, "window_right is True", "int or None"
    ),
    "is an int": option("window", 3, TypeError, "3", "a pair (window_left, window_right)"),
    "is None": option("window", None, TypeError, "None", "a pair (window_left, window_right)"),
    "has three bounds": option("window", (1, 2, 3), TypeError, "(1, 2, 3)", "a pair"),
    "contradicts causal": option(
        "causal", True, ValueError, "contradicts window_right=2", "leave one", window=(None, 2)
    ),
    "causal is an int": option("causal", 1, TypeError, "1", "a bool"),
    "causal is None": option("causal", None, TypeError, "None", "a bool"),
}

TOGETHER = {
    f"with {name}": option("mask", Mask(), ValueError, f"with {name}", "one or other", **{name: value})
    for name, value in (
        ("causal", True),
        ("window", (3, None)),
        ("seqlens_q", (5, 5)),
        ("seqlens_k", (7, 7)),
    )
}

MASKS = {
    **TOGETHER,
    "is a bool tensor": option(
        "mask", torch.ones(M, N, dtype=torch.bool), TypeError, "Tensor", "attributes causal"
    ),
    "is a string": option("mask", "causal", TypeError, "str", "attributes causal"),
    "lacks an attribute": option(
        "mask",
        SimpleNamespace(causal=False, window_left=None, window_right=None, seqlens_q=None),
        TypeError,
        "SimpleNamespace",
        "seqlens_k",
    ),
    "has a negative bound": option(
        "mask",
        SimpleNamespace(causal=False, window_left=-1, window_right=None, **NO_LENGTHS),
        ValueError,
        "window_left is -1",
        "an int >= 0",
    ),
    "contradicts itself": option(
        "mask",
        SimpleNamespace(causal=True, window_left=None, window_right=1, **NO_LENGTHS),
        ValueError,
        "causal=True contradicts window_right=1",
        "leave one",
    ),
    "has lengths that do not fit": option(
        "mask", Mask(seqlens_k=(7, 8)), ValueError, "seqlens_k holds 8", "[0, 7]"
    ),
}
# The last four say what of the mask is wrong, in the words for the argument of that name.
MASKS = {
    name: refusal if "mask" in refusal.got or name in TOGETHER else refusal
    for name, refusal in MASKS.items()
}
