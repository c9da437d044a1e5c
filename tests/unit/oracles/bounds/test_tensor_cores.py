"""Tensor cores align products by the exponents of their operands, as the bound assumes."""

from __future__ import annotations

import pytest
import torch

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="the interpreter multiplies without tensor cores"
)


@triton.jit
def _product(a_ptr, b_ptr, c_ptr, M: tl.constexpr):
    rows, columns = tl.arange(0, M)[:, None], tl.arange(0, 16)[None, :]
    a = tl.load(a_ptr + rows * 16 + columns)
    b = tl.load(b_ptr + tl.arange(0, 16)[:, None] * 16 + columns)
    tl.store(c_ptr + rows * 16 + columns, tl.dot(a, b))


def dot(pairs: list[tuple[float, float]], M: int) -> float:
    """Returns the sum of the products of pairs of fp16 numbers, by one instruction."""
    a, b = torch.zeros(M, 16), torch.zeros(16, 16)
    for i, (x, y) in enumerate(pairs):
        a[0, i], b[i, 0] = x, y
    c = torch.empty(M, 16, device="cuda")
    _product[(1,)](a.half().cuda(), b.half().cuda(), c, M, num_warps=4)
    return c[0, 0].item()


# On Hopper, 16 rows take mma and 64 rows wgmma.
@pytest.mark.parametrize("M", [16, 64])
def test_a_subnormal_operand_counts_with_the_exponent_of_the_smallest_normal_number(M):
    small = (2.0**-20, 2.0**-20)
    lost = 16 * 2.0**-24 * 2.0**-14  # the model: 16 products, h = 1
    for large in ((1.0, 2.0**-24), (2.0**-24, 1.0), (1.0, 3 * 2.0**-24)):
        error = abs(dot([large, small], M) - (large[0] * large[1] + 2.0**-40))
        assert error <= lost
        assert error > 2.0**-24 * large[0] * large[1]  # u of the sum
    # The same product of normal operands, or of 0, costs nothing.
    assert dot([(2.0**-12, 2.0**-12), small], M) == 2.0**-24 + 2.0**-40
    assert dot([(2.0**15, 0.0), small], M) == 2.0**-40
