"""Arguments of kernels by their names, from the arguments of a call."""

from __future__ import annotations

import math
import struct
from functools import lru_cache

import torch
import triton

from fa_kernels.configs import Tile
from fa_kernels.kernels.common.score_mod import ALIBI, BIAS, SOFTCAP
from fa_kernels.validation.arguments import Arguments

__all__ = [
    "STRIDES",
    "alignment",
    "blank",
    "length_args",
    "padded",
    "predicate_args",
    "scale_bits",
    "score_args",
    "stride_args",
    "tile_args",
    "window_args",
]

# The kernels' names for the strides of each tensor.
STRIDES = {
    "q": ("stride_qb", "stride_qh", "stride_qm", "stride_qd"),
    "k": ("stride_kb", "stride_kh", "stride_kn", "stride_kd"),
    "v": ("stride_vb", "stride_vh", "stride_vn", "stride_vd"),
    "dout": ("stride_ob", "stride_oh", "stride_om", "stride_od"),
    "dlse": ("stride_lb", "stride_lh", "stride_lm"),
    "new_k": ("stride_xb", "stride_xh", "stride_xn", "stride_xd"),
    "new_v": ("stride_yb", "stride_yh", "stride_yn", "stride_yd"),
}
_OF_LISTS = ("stride_lb", "stride_lh", "stride_lt")
_OF_SLOPES = ("stride_sb", "stride_sh")
_OF_BIAS = ("stride_bb", "stride_bh", "stride_bm", "stride_bn")
# Offsets within a tile of 256 rows fit int32.
MAX_ALIGNED_STRIDE = 2**22


@lru_cache(maxsize=512)
def padded(head_dim: int) -> int:
    """Returns the columns of a tile for a head_dim."""
    return max(16, triton.next_power_of_2(head_dim))


def alignment(*tensors: torch.Tensor) -> int:
    """Returns ALIGNED of ``load_tile``: 1 if 16-byte loads are possible, else 0.

    Only dtypes of 16 and 8 bits take these paths. Their dots run on tensor cores, whose layouts do
    not depend on the loads, so all paths give the same bits.
    """
    for x in tensors:
        if x.data_ptr() % 16 or not _has_aligned_rows(x.shape[3], x.stride(), x.element_size()):
            return 0
    return 1


@lru_cache(maxsize=512)
def _has_aligned_rows(head_dim: int, strides: tuple[int, ...], size: int) -> bool:
    return (
        size <= 2
        and head_dim * size % 16 == 0
        and strides[3] == 1
        and not any(stride * size % 16 for stride in strides[:3])
        and strides[2] <= MAX_ALIGNED_STRIDE
    )


def tile_args(tile: Tile) -> dict:
    """Returns the sizes of a tile and its launch parameters."""
    return {
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }


def predicate_args(arguments: Arguments, kernel: str) -> dict:
    """Returns a kernel's block map, its strides and the predicate's arguments.

    Without a predicate they are placeholders. ``kernel`` is a field of ``BlockMaps``.
    """
    lists, order, strides, args = arguments.seqlens_q, arguments.seqlens_q, (0, 0, 0), (0,)
    if arguments.predicate is not None and arguments.maps is not None:
        lists, order = getattr(arguments.maps, kernel)
        strides, args = lists.stride()[:3], arguments.predicate.args
    return {
        "order_ptr": order, "lists_ptr": lists, **dict(zip(_OF_LISTS, strides, strict=True)),
        "mask_args": args,
    }  # fmt: skip


@lru_cache(maxsize=512)
def scale_bits(sm_scale: float) -> int:
    """Returns the bits of a float64 as an int64; see ``softmax.scale_from_bits``."""
    return struct.unpack("<q", struct.pack("<d", sm_scale))[0]


def stride_args(arguments: Arguments, **tensors: torch.Tensor) -> dict[str, int]:
    """Returns strides of (entry, head, row, column); in a varlen call, an entry is a row."""
    varlen = arguments.longest is not None
    named: dict[str, int] = {}
    for name, x in tensors.items():
        strides = x.stride()
        if varlen:
            strides = (strides[2], *strides[1:])
        named.update(zip(STRIDES[name], strides, strict=True))
    return named


def length_args(arguments: Arguments) -> dict:
    """Returns the arguments for the lengths of sequences."""
    return {"seqlens_q_ptr": arguments.seqlens_q, "seqlens_k_ptr": arguments.seqlens_k}


def window_args(arguments: Arguments) -> dict[str, int]:
    """Returns the arguments for the window and the softmax scale."""
    return {
        "window_left": arguments.window_left, "window_right": arguments.window_right,
        "sm_scale_bits": scale_bits(arguments.sm_scale),
    }  # fmt: skip


def blank(arguments: Arguments, **tensors: torch.Tensor | None) -> None:
    """Fills the outputs of a varlen call with 0, lse and m with -inf.

    The kernels do not write rows that belong to no sequence.
    """
    if arguments.longest is not None:
        for name, x in tensors.items():
            if x is not None:
                x.fill_(-math.inf if name in ("lse", "m") else 0.0)


def _score_mods(arguments: Arguments) -> int:
    """Returns SCORE_MODS: a sum of the constants in ``kernels.common.score_mod``."""
    given = (
        (arguments.softcap, SOFTCAP), (arguments.alibi_slopes, ALIBI), (arguments.bias, BIAS)
    )  # fmt: skip
    return sum(mod.value for x, mod in given if x is not None)


def score_args(arguments: Arguments) -> dict:
    """Returns the arguments of score modifications, with placeholders for the absent ones."""
    softcap = 0 if arguments.softcap is None else scale_bits(arguments.softcap)
    slopes, slope_strides = arguments.seqlens_q, (0, 0)
    if arguments.alibi_slopes is not None:
        slopes = arguments.alibi_slopes
        slope_strides = (0, *slopes.stride())[-2:]
    bias, bias_strides = arguments.seqlens_q, (0, 0, 0, 0)
    if arguments.bias is not None:
        bias = arguments.bias
        # A broadcast axis has stride 0.
        bias_strides = tuple(
            0 if size == 1 else step for size, step in zip(bias.shape, bias.stride(), strict=True)
        )
    return {
        "softcap_bits": softcap,
        "slopes_ptr": slopes, **dict(zip(_OF_SLOPES, slope_strides, strict=True)),
        "bias_ptr": bias, **dict(zip(_OF_BIAS, bias_strides, strict=True)),
        "SCORE_MODS": _score_mods(arguments),
    }  # fmt: skip
