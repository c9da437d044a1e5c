"""flash_attention under autocast, activation checkpointing and inference mode."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from fa_verify.oracles.stream import normal

pytest.importorskip("triton")

from fa_kernels import flash_attention, operators
from fa_kernels.launch import portable

CONFIG = "16x16"
LOW = [torch.float16, torch.bfloat16]


def drawn(device, *dtypes):
    shapes = {"q": (2, 2, 17, 8), "k": (2, 1, 21, 8), "v": (2, 1, 21, 6)}
    dtypes = dtypes or (torch.float32,) * 3
    return [
        normal(0, name, shape).to(dtype).to(device).requires_grad_()
        for (name, shape), dtype in zip(shapes.items(), dtypes, strict=True)
    ]


@pytest.mark.parametrize("low", LOW)
@pytest.mark.parametrize("given", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_autocast_casts_as_it_does_for_torchs_sdpa(given, low, device):
    leaves = drawn(device, given, torch.float32, given)
    with torch.autocast(device, dtype=low):
        out, lse = flash_attention(*leaves, return_lse=True, config=CONFIG)
        theirs = torch.nn.functional.scaled_dot_product_attention(*leaves[:2], leaves[2])
    assert (out.dtype, lse.dtype, theirs.dtype) == (low, torch.float32, low)
    cast = [x.detach().to(low).requires_grad_() for x in leaves]
    want = flash_attention(*cast, return_lse=True, config=CONFIG)
    assert torch.equal(out, want[0])
    assert torch.equal(lse, want[1])
    got = torch.autograd.grad(out.float().sum(), leaves)
    for x, y, leaf in zip(
        got, torch.autograd.grad(want[0].float().sum(), cast), leaves, strict=True
    ):
        assert x.dtype == leaf.dtype
        assert torch.equal(x, y.to(leaf.dtype))


def test_autocast_leaves_float64_alone(device):
    leaves = drawn(device, *(torch.float64,) * 3)
    with torch.autocast(device, dtype=torch.bfloat16):
        out = flash_attention(*leaves, config=CONFIG)
    assert torch.equal(out, flash_attention(*leaves, config=CONFIG))
    with (
        torch.autocast(device, dtype=torch.bfloat16),
        pytest.raises(ValueError, match=r"^k has dtype torch\.bfloat16; needs that of q"),
    ):
        flash_attention(leaves[0], leaves[1].float(), leaves[2], config=CONFIG)


def test_autocast_does_not_make_a_dtype_supported(device):
    q, k, v = (x.detach().to(torch.float8_e4m3fn) for x in drawn(device))
    with (
        torch.autocast(device, dtype=torch.bfloat16),
        pytest.raises(NotImplementedError, match=r"^q has dtype torch\.float8"),
    ):
        flash_attention(q, k, v)


@pytest.mark.parametrize("inside", [True, False])
def test_without_autocast_a_mixture_is_refused(inside, device):
    q, k, v = drawn(device, torch.float32, torch.bfloat16, torch.float32)
    region = torch.autocast(device, dtype=torch.bfloat16, enabled=False)
    with (
        region if inside else nullcontext(),
        pytest.raises(ValueError, match=r"^k has dtype torch\.bfloat16; needs that of q"),
    ):
        flash_attention(q, k, v)


def test_autocast_of_another_device_casts_nothing(device):
    other = {"cpu": "cuda", "cuda": "cpu"}[device]
    leaves = drawn(device)
    if other == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU for the other device")
    with torch.autocast(other, dtype=torch.bfloat16):
        assert flash_attention(*leaves, config=CONFIG).dtype == torch.float32


def test_autocast_reaches_a_compiled_call(device):
    leaves = drawn(device)
    call = torch.compile(flash_attention, backend="aot_eager", fullgraph=True)
    with torch.autocast(device, dtype=torch.bfloat16):
        got, want = (x(*leaves, config=CONFIG) for x in (call, flash_attention))
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, want)


def block(q, k, v):
    out, lse = flash_attention(q * 2, k, v, causal=True, return_lse=True, config=CONFIG)
    return torch.cat([out.sin(), lse[..., None]], 3)


@pytest.fixture
def forwards(monkeypatch):
    """A list with an entry for each launch of the forward kernel."""
    kernel, launched = portable.forward_kernel, []

    class Counted:
        def __getitem__(self, grid):
            launched.append(grid)
            return kernel[grid]

    monkeypatch.setattr(portable, "forward_kernel", Counted())
    return launched


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_has_the_same_bits(use_reentrant, device, forwards):
    leaves = drawn(device)
    found = []
    for how in (block, lambda *x: checkpoint(block, *x, use_reentrant=use_reentrant)):
        forwards.clear()
        out = how(*leaves)
        out.square().sum().backward()
        found.append((out, *(x.grad for x in leaves)))
        for x in leaves:
            x.grad = None
    assert len(forwards) == 2
    assert all(map(torch.equal, *found))


def test_selective_checkpointing_can_save_the_operators_outputs(device, forwards):
    def policy(_ctx, op, *args, **kwargs):
        of_ours = op is operators.forward
        return CheckpointPolicy.MUST_SAVE if of_ours else CheckpointPolicy.PREFER_RECOMPUTE

    leaves = drawn(device)
    want = torch.autograd.grad(block(*leaves).square().sum(), leaves)
    forwards.clear()
    out = checkpoint(
        block,
        *leaves,
        use_reentrant=False,
        context_fn=lambda: create_selective_checkpoint_contexts(policy),
    )
    got = torch.autograd.grad(out.square().sum(), leaves)
    assert len(forwards) == 1
    assert all(map(torch.equal, got, want))


def test_a_compiled_checkpoint_has_the_same_bits(device):
    def both(*leaves):
        return checkpoint(block, *leaves, use_reentrant=False).square().sum()

    leaves = drawn(device)
    call = torch.compile(both, backend="aot_eager", fullgraph=True)
    got, want = (torch.autograd.grad(x(*leaves), leaves) for x in (call, both))
    assert all(map(torch.equal, got, want))


def test_inference_mode_has_the_same_bits(device):
    leaves = drawn(device)
    want = flash_attention(*leaves, config=CONFIG)
    with torch.inference_mode():
        out = flash_attention(*leaves, config=CONFIG)
    assert out.is_inference()
    assert torch.equal(out, want)
