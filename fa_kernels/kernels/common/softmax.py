"""The softmax in base 2: its scale, the running state of a row, and the end of it."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

__all__ = ["LN2", "LOG2E", "SoftmaxState", "normalised", "scale_from_bits"]

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)


class SoftmaxState(NamedTuple):
    """The running sums of rows: acc (rows, columns), undivided, l and m (rows,), m in base 2."""

    acc: Any
    l: Any  # noqa: E741  # the letter of every paper
    m: Any


@triton.jit
def scale_from_bits(sm_scale_bits):
    """The softmax scale as float64.

    A Python float arrives as float32; its bits in an int64 keep every digit, which float64 inputs
    need.
    """
    return tl.cast(sm_scale_bits, tl.float64, bitcast=True)


@triton.jit
def normalised(acc, l_i, m_i, live):
    """(out, lse) of a softmax's sums in base 2; rows that are not ``live`` give 0 and -inf."""
    l_safe = tl.where(live, l_i, 1.0)
    out = tl.where(live[:, None], acc / l_safe[:, None], 0.0)
    lse = tl.where(live, m_i * LN2 + tl.log(l_safe), -float("inf"))
    return out, lse
