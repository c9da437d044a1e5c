"""The softmax in base 2: its scale, the running state of a row, and its normalisation."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

__all__ = [
    "LN2_BITS",
    "LOG2E",
    "SoftmaxState",
    "empty_state",
    "joined",
    "normalised",
    "scale_from_bits",
    "with_sink",
]

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
# The bits of log(2) in float64; see ``scale_from_bits``.
LN2_BITS: tl.constexpr = tl.constexpr(0x3FE62E42FEFA39EF)


class SoftmaxState(NamedTuple):
    """The running state of rows: unnormalised acc (rows, columns), l and m (rows,), m in base 2."""

    acc: Any
    l: Any  # noqa: E741  # the papers' symbol
    m: Any


@triton.jit
def scale_from_bits(sm_scale_bits):
    """Returns the softmax scale as float64.

    Triton passes a Python float as float32. The host passes the bits of a float64 as an int64
    instead, because float64 inputs need its full precision.
    """
    return tl.cast(sm_scale_bits, tl.float64, bitcast=True)


@triton.jit
def empty_state(ROWS: tl.constexpr, COLUMNS: tl.constexpr, ACC: tl.constexpr):
    """Returns the ``SoftmaxState`` of rows that have seen no key."""
    m_i = tl.full([ROWS], -float("inf"), ACC)
    l_i = tl.zeros([ROWS], ACC)
    acc = tl.zeros([ROWS, COLUMNS], ACC)
    return SoftmaxState(acc, l_i, m_i)


@triton.jit
def joined(state, other):
    """Returns the ``SoftmaxState`` of rows that have seen the keys of two states.

    An empty state changes no bit of the other one. The sums are explicit fused operations, which
    no compiler contracts in another way, so that every kernel joins to the same bits.
    """
    m_new = tl.maximum(state.m, other.m)
    # Rows that have seen no key subtract 0, since -inf - -inf is NaN.
    m_pivot = tl.where(m_new == -float("inf"), 0.0, m_new)
    alpha = tl.exp2(state.m - m_pivot)
    weight = tl.exp2(other.m - m_pivot)
    l_i = tl.fma(other.l, weight, state.l * alpha)
    acc = tl.fma(other.acc, weight[:, None], state.acc * alpha[:, None])
    return SoftmaxState(acc, l_i, m_new)


@triton.jit
def with_sink(state, sink):
    """Returns the ``SoftmaxState`` after one more key of score ``sink``, in natural units, value 0.

    ``sink`` is one score, or one for each row. A sink of -inf changes no bit.
    """
    sink2 = sink * LOG2E
    m_new = tl.maximum(state.m, sink2)
    # A row that has seen no key subtracts 0 if the sink is -inf, since -inf - -inf is NaN.
    m_pivot = tl.where(m_new == -float("inf"), 0.0, m_new)
    alpha = tl.exp2(state.m - m_pivot)
    # A compiler may fuse the product of sink2 into the difference, which is then its rounding
    # instead of 0: too much to be an exponent where the sink is huge.
    weight = tl.exp2(tl.where(sink2 == m_pivot, 0.0, sink2 - m_pivot))
    l_i = state.l * alpha + weight
    return SoftmaxState(state.acc * alpha[:, None], l_i, m_new)


@triton.jit
def normalised(acc, l_i, m_i, live):
    """Returns (out, lse) from the state in base 2; rows that are not ``live`` get 0 and -inf."""
    # equivalent: Both selects below leave out the rows where l is 0.
    l_safe = tl.where(live, l_i, 1.0)
    out = tl.where(live[:, None], acc / l_safe[:, None], 0.0)
    # An explicit fused operation: a compiler contracts the product in some kernels and not in
    # others, whose lse would have other bits.
    ln2 = scale_from_bits(LN2_BITS).to(m_i.dtype)
    lse = tl.where(live, tl.fma(m_i, ln2, tl.log(l_safe)), -float("inf"))
    return out, lse
