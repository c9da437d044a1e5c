"""Masks that hold tensors: no call gets the tables of another mask, or of an earlier content."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from fa_kernels import flash_attention
from fa_verify.oracles.masks.mask import Mask


@triton.jit
def looked_up(b, h, m, n, args):
    return tl.load(args[0] + m * args[1] + n) != 0


@dataclass(frozen=True, kw_only=True, eq=False)
class LookedUp(Mask, uniform=True):
    """Visible where a table is true."""

    table: Any = None

    def mask_mod(self, b, h, m, n, *, M, N):
        return self.table[m, n]

    def native(self, B, H, M, N, device):
        return looked_up, (self.table, N)


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# A wrong table changes some elements by 0.1 and more; the products may be of TF32.
TOLERANCE = 1e-2


def table_of(M, N, seed):
    """A random table, bool (M, N), whose rows all see the first key."""
    table = torch.rand(M, N, generator=torch.Generator().manual_seed(seed)) > 0.5
    table[:, 0] = True
    return table.to(DEVICE)


def tensors(M, N):
    draw = torch.Generator().manual_seed(M)
    return [torch.randn(1, 1, size, 16, generator=draw).to(DEVICE) for size in (M, N, N)]


def is_right(mask, M, N):
    """Whether a call agrees with PyTorch's, on the present content of the table."""
    q, k, v = tensors(M, N)
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask.table)
    return torch.allclose(flash_attention(q, k, v, mask=mask, config="16x16"), want, atol=TOLERANCE)


def test_each_of_two_masks_gets_its_own_table():
    assert all(is_right(LookedUp(table=table_of(24, 40, seed)), 24, 40) for seed in range(3))


def test_a_mask_of_another_shape_reads_its_own_table():
    assert is_right(LookedUp(table=table_of(8, 8, 0)), 8, 8)
    assert is_right(LookedUp(table=table_of(40, 40, 1)), 40, 40)


@pytest.mark.parametrize("is_nested", [False, True])
def test_a_table_that_is_changed_in_place_is_read_anew(is_nested):
    mask = LookedUp(table=table_of(24, 40, 0))
    q, k, v = tensors(24, 40)
    # The combination is one object, which holds the same table.
    called = mask & Mask(window_left=100) if is_nested else mask
    for seed in range(2):
        mask.table.copy_(table_of(24, 40, seed))
        want = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask.table)
        out = flash_attention(q, k, v, mask=called, config="16x16")
        assert torch.allclose(out, want, atol=TOLERANCE)


def test_a_backward_pass_refuses_a_table_that_was_changed_since_the_forward():
    mask = LookedUp(table=table_of(24, 40, 0))
    q, k, v = (x.requires_grad_() for x in tensors(24, 40))
    flash_attention(q, k, v, mask=mask, config="16x16").sum().backward()
    out = flash_attention(q, k, v, mask=mask, config="16x16").sum()
    mask.table.logical_not_()
    with pytest.raises(RuntimeError, match="has been changed in place since the forward pass"):
        out.backward()


def test_a_mask_whose_changes_would_not_be_noticed_is_refused():
    q, k, v = tensors(24, 40)
    with torch.inference_mode():
        table = table_of(24, 40, 0)
    for held, said in (
        (table, "an inference tensor"),
        (table_of(24, 40, 0).cpu().numpy(), "a ndarray"),
    ):
        with pytest.raises(TypeError, match=f"mask holds {said}, whose changes cannot be noticed"):
            flash_attention(q, k, v, mask=LookedUp(table=held), config="16x16")
