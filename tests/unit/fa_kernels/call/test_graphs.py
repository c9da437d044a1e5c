"""Captured calls read lengths, offsets and block masks in tensors as they are at a replay."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from fa_kernels import flash_attention, flash_attention_varlen
from fa_verify.properties.guarantees.streams import captured

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

# On Hopper's kernels, in both passes, and on the portable ones.
CASES = ((64, True), (64, False), (32, True))


def tensors(*shapes):
    generator = torch.Generator("cuda").manual_seed(1)
    return [torch.randn(x, generator=generator, device="cuda").to(torch.bfloat16) for x in shapes]


def results(call, q, k, v, **options):
    """out, lse and the gradients whose bits do not depend on the order of additions."""
    # Leaves of an earlier call would belong to the stream of that call.
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    out, lse = call(q, k, v, causal=True, return_lse=True, **options)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), q.detach()[..., : v.shape[-1]])
    return [out.detach(), lse, dk, dv, *([dq] if options["deterministic"] else [])]


def assert_replays(call, inputs, tensors, changes, **options):
    """Compare replays with calls, where ``changes`` holds other contents of the tensors."""
    replay, found = captured(lambda: results(call, *inputs, **tensors, **options))
    for contents in (*changes, changes[0]):
        for name, values in contents.items():
            tensors[name].copy_(torch.as_tensor(values, device="cuda"))
        replay()
        wanted = results(call, *inputs, **tensors, **options)
        assert all(map(torch.equal, found, wanted))
    return wanted


@pytest.mark.parametrize(("D", "deterministic"), CASES)
def test_lengths_in_tensors_may_change_between_replays(D, deterministic):
    inputs = tensors((3, 4, 300, D), (3, 2, 400, D), (3, 2, 400, D))
    lengths = {
        name: torch.zeros(3, dtype=torch.int32, device="cuda")
        for name in ("seqlens_q", "seqlens_k")
    }
    changes = [
        {"seqlens_q": (300, 0, 7), "seqlens_k": (400, 5, 129)},
        {"seqlens_q": (1, 300, 250), "seqlens_k": (128, 400, 0)},
    ]
    of_tensors = assert_replays(
        flash_attention, inputs, lengths, changes, deterministic=deterministic
    )
    of_ints = results(flash_attention, *inputs, **changes[0], deterministic=deterministic)
    assert all(map(torch.equal, of_tensors, of_ints))


@pytest.mark.parametrize(("D", "deterministic"), CASES)
def test_offsets_in_tensors_may_change_between_replays(D, deterministic):
    inputs = tensors((600, 4, D), (700, 2, D), (700, 2, D))
    offsets = {
        name: torch.zeros(4, dtype=torch.int32, device="cuda")
        for name in ("cu_seqlens_q", "cu_seqlens_k")
    }
    changes = [
        {"cu_seqlens_q": (0, 300, 300, 600), "cu_seqlens_k": (0, 290, 300, 700)},
        {"cu_seqlens_q": (5, 10, 410, 590), "cu_seqlens_k": (0, 400, 650, 650)},
    ]
    options = {"max_seqlen_q": 400, "max_seqlen_k": 400, "deterministic": deterministic}
    assert_replays(flash_attention_varlen, inputs, offsets, changes, **options)


def test_block_masks_may_change_between_replays():
    inputs = tensors((1, 4, 300, 64), (1, 2, 400, 64), (1, 2, 400, 64))
    blocks = {"block_mask": torch.zeros(4, 3, 4, dtype=torch.bool, device="cuda")}
    generator = torch.Generator("cuda").manual_seed(2)
    changes = [
        {"block_mask": torch.rand(4, 3, 4, generator=generator, device="cuda") < 0.5}
        for _ in range(2)
    ]
    assert_replays(flash_attention, inputs, blocks, changes, deterministic=True)
