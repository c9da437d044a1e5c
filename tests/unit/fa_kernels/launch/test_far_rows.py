"""More than 2**31 rows of all heads: the last programs find the rows of the last head.

The interpreter runs the last programs of each kernel, in address space that only they touch.
"""

from __future__ import annotations

import builtins
import math
import mmap

import pytest
import torch

pytest.importorskip("triton")

from triton.runtime import interpreter

from fa_kernels import flash_attention
from fa_kernels.runtime import allocation

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="runs in the interpreter")

H, M, N = 4097, 2**19, 16
# More programs than any kernel needs for the last rows of one head.
LAST = 8
_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)


def reserved(shape, *, dtype, device=None) -> torch.Tensor:
    """Zeros in address space that is committed where it is touched."""
    size = math.prod(shape) * dtype.itemsize
    lazily = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
    try:
        return torch.frombuffer(mmap.mmap(-1, max(size, 1), flags=lazily), dtype=dtype)[
            : math.prod(shape)
        ].view(shape)
    except OSError as error:
        pytest.skip(f"{size / 2**30:.0f} GiB of address space cannot be reserved: {error}")


@pytest.fixture
def last_programs(monkeypatch):
    """Runs the last programs of large grids, and those of the last tiles of the last head."""
    assert H * M > 2**31

    def few(*bounds):
        if len(bounds) > 1 or bounds[0] < H:
            return builtins.range(*bounds)
        (programs,) = bounds
        # Query tiles of a head run in reverse: its last tile is its first program.
        first = programs - programs // H
        return sorted({*builtins.range(first, programs)[:LAST], *builtins.range(programs)[-LAST:]})

    monkeypatch.setattr(interpreter, "range", few, raising=False)
    monkeypatch.setattr(allocation, "empty", reserved)


def results(q, k, v, dout, **options):
    for x in (q, k, v):
        x.requires_grad_()
    out, lse = flash_attention(
        q, k, v, causal=True, sm_scale=1.0, return_lse=True, config="16x16", **options
    )
    return out, lse, *torch.autograd.grad(out, (q, k, v), dout)


@pytest.mark.parametrize("deterministic", [True, False])
def test_the_last_rows_of_the_last_head_are_found(deterministic, last_programs):
    generator = torch.Generator().manual_seed(0)
    few = [torch.randn(1, 1, N, 1, generator=generator).half() for _ in range(4)]
    far = []
    for x, length in zip(few, (M, N, N, M), strict=True):
        far.append(reserved((1, H, length, 1), dtype=x.dtype))
        far[-1][0, -1, -N:] = x[0, 0]
    found, wanted = (results(*inputs, deterministic=deterministic) for inputs in (far, few))
    for got, want in zip(found, wanted, strict=True):
        assert torch.equal(got[0, -1, -N:], want[0, 0])
