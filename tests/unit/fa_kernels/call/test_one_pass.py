"""deterministic=False: its launches, its equality with two passes, and the sums of dq."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from fa_verify.oracles.bounds.error_model import judge
from fa_verify.oracles.masks.block_sparse import BlockSparse
from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.outputs import Numerics
from fa_verify.oracles.reference.torch_reference import attention
from fa_verify.properties.guarantees.compare import ratios

pytest.importorskip("triton")

from fa_kernels import Config, Tile, flash_attention
from fa_kernels.launch import portable
from fa_kernels.runtime import allocation
from fa_kernels.validation.arguments import check, prepared
from fa_verify.oracles.stream import normal

B, H, HK, M, N, D, DV = 2, 4, 2, 37, 45, 8, 6
CONFIG = "16x16"
MASKS = {
    "full": Mask(),
    "causal": Mask(causal=True),
    "ragged": Mask(window_left=9, seqlens_q=(37, 20), seqlens_k=(33, 45)),
    "nothing": Mask(seqlens_k=(0, 0)),
    "blocks": BlockSparse(side=12, percent=30, seed=3),
}
GIB_OF_FAR_ROWS = 20


def drawn(device: str, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """q, k, v, dout."""
    shapes = ((B, H, M, D), (B, HK, N, D), (B, HK, N, DV), (B, H, M, DV))
    return [
        normal(0, name, shape).to(dtype).to(device)
        for name, shape in zip(("q", "k", "v", "dout"), shapes, strict=True)
    ]


def gradients(inputs: list[torch.Tensor], backward: str, **arguments: object):
    """(dq, dk, dv)."""
    *leaves, dout = inputs
    leaves = [x.detach().requires_grad_() for x in leaves]
    out = flash_attention(
        *leaves, deterministic=backward == "two_pass", **{"config": CONFIG, **arguments}
    )
    return torch.autograd.grad(out, leaves, dout)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_one_pass_has_the_dk_and_dv_of_two_passes_and_dq_within_its_bound(device, mask, dtype):
    inputs = drawn(device, dtype)
    one, two = (gradients(inputs, way, mask=mask) for way in ("one_pass", "two_pass"))
    assert torch.equal(one[1], two[1])
    assert torch.equal(one[2], two[2])
    scale = D**-0.5
    name = {torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64"}[dtype]
    want = attention(*inputs, mask=mask, sm_scale=scale).dq
    bound = judge(*inputs, mask=mask, sm_scale=scale, in_dtype=name, numerics=Numerics()).bound.dq
    assert float(ratios(one[0], want, bound).amax()) <= 1


def test_sums_of_dq_start_at_0_in_every_call(device, monkeypatch):
    q, k, v, dout = drawn(device, torch.float64)
    call = {"mask": Mask(), "sm_scale": D**-0.5}
    want = attention(q, k, v, dout, **call).dq
    bound = judge(q, k, v, dout, **call, in_dtype="fp64", numerics=Numerics()).bound.dq
    empty = allocation.empty
    monkeypatch.setattr(
        allocation, "empty", lambda *shape, **kind: empty(*shape, **kind).fill_(math.nan)
    )
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = flash_attention(*leaves, deterministic=False, config=CONFIG)
    for _ in range(3):
        dq, *_ = torch.autograd.grad(out, leaves, dout, retain_graph=True)
        assert float(ratios(dq, want, bound).amax()) <= 1


SUBSETS = [s for size in (1, 2, 3) for s in itertools.combinations("qkv", size)]


@pytest.mark.parametrize("wanted", SUBSETS, ids="".join)
def test_one_pass_runs_only_if_dk_or_dv_is_needed(wanted, device, monkeypatch):
    """A gradient of q alone takes 3 products in its own kernel; dk and dv alone take 4."""
    ran = []
    for name in ("dq", "dkdv"):
        kernel = getattr(portable, f"{name}_kernel")
        monkeypatch.setattr(portable, f"{name}_kernel", Recorded(kernel, name, ran))
    *leaves, dout = drawn(device)
    leaves = [x.requires_grad_(name in wanted) for name, x in zip("qkv", leaves, strict=True)]
    flash_attention(*leaves, deterministic=False, config=CONFIG).backward(dout)
    both = "q" in wanted and len(wanted) > 1
    assert ran == ([("dkdv", both)] if "k" in wanted or "v" in wanted else [("dq", None)])
    inputs = [*(x.detach() for x in leaves), dout]
    want, call = gradients(inputs, "one_pass"), {"mask": Mask(), "sm_scale": D**-0.5}
    bound = judge(*inputs, **call, in_dtype="fp32", numerics=Numerics()).bound.dq
    for name, x, expected in zip("qkv", leaves, want, strict=True):
        if name not in wanted:
            assert x.grad is None
        elif name == "q":
            assert float(ratios(x.grad, attention(*inputs, **call).dq, bound).amax()) <= 1
        else:
            assert torch.equal(x.grad, expected)


class Recorded:
    """A kernel that records its launches and whether they compute dq too."""

    def __init__(self, kernel, name, ran):
        self.kernel, self.name, self.ran = kernel, name, ran

    def __getitem__(self, grid):
        def run(*args, **constants):
            self.ran.append((self.name, constants.get("ONE_PASS")))
            return self.kernel[grid](*args, **constants)

        return run


def test_one_pass_has_a_tile_of_its_own(device):
    config = Config(dkdv=Tile(16, 32), one_pass=Tile(64, 16))
    q, k, v, _ = drawn(device)
    options = {
        "mask": None, "causal": False, "window_size": (None, None), "seqlens_q": None,
        "seqlens_k": None, "sm_scale": None, "config": config,
    }  # fmt: skip
    two, one = (
        prepared(q, k, v, check(q, k, v, **options, deterministic=x)) for x in (True, False)
    )
    assert (two.config.dkdv, two.one_pass) == (Tile(16, 32), False)
    assert (one.config.dkdv, one.one_pass) == (Tile(64, 16), True)


# The second case runs Hopper's kernels on a Hopper GPU.
@pytest.mark.parametrize(("columns", "of_values"), [(256, 16), (128, 64)])
def test_rows_of_dq_past_2_to_the_31_elements_are_summed_where_they_lie(
    device, gpu_memory, columns, of_values
):
    if device == "cpu":
        pytest.skip("needs sums of 8 GiB")
    gpu_memory(GIB_OF_FAR_ROWS)
    # All rows are equal and each gets one addition, so the rows of dq are equal.
    rows = 2**31 // columns + 64
    q, k = (normal(0, name, (1, 1, 1, columns)).half().to(device) for name in "qk")
    v, dout = (normal(0, name, (1, 1, 1, of_values)).half().to(device) for name in ("v", "dout"))
    keys = [torch.cat([x, -x], 2).requires_grad_() for x in (k, v)]
    leaves = [q.expand(1, 1, rows, columns).requires_grad_(), *keys]
    out = flash_attention(*leaves, deterministic=False)
    dq, *_ = torch.autograd.grad(out, leaves, dout.expand(1, 1, rows, of_values))
    assert (dq[0, 0, 0] != 0).any()
    assert all((part == dq[:, :, :1]).all() for part in dq.split(2**20, 2))
