"""The operators under ``torch.library.opcheck``: schemas, fakes, autograd, dynamic compilation."""

from __future__ import annotations

import pytest
import torch

from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.masks.prefix_lm import PrefixLM

pytest.importorskip("triton")

from fa_kernels import Config, Tile, operators
from tests.unit.fa_kernels.call.test_operators import drawn, request, stored, subsets


def opcheck(tensors, **arguments):
    """Runs opcheck on the forward with its derivative, and on the backward without one."""
    q, k, v, dout = tensors
    asked = request(tensors, **arguments)
    torch.library.opcheck(operators.forward, (q, k, v, *asked))
    wanted = [x.requires_grad for x in (q, k, v)]
    q, k, v = (x.detach() for x in (q, k, v))
    saved = (q, k, v, *operators.forward(q, k, v, *asked), dout, None)
    opcheck_backward(saved, wanted, asked, ("test_schema", "test_faketensor"))


ALL_CHECKS = (
    "test_schema",
    "test_autograd_registration",
    "test_faketensor",
    "test_aot_dispatch_dynamic",
)


def opcheck_backward(saved, wanted, asked, checks=ALL_CHECKS):
    torch.library.opcheck(operators.backward, (*saved, *wanted, *asked), test_utils=checks)


@pytest.mark.parametrize("of", ["out", "lse", "both"])
def test_the_backward_is_right_for_any_losses(of, device):
    q, k, v, dout = drawn(device)
    asked = request((q, k, v))
    out, lse = operators.forward(q, k, v, *asked)
    gradients = (None if of == "lse" else dout, None if of == "out" else lse.sin())
    opcheck_backward((q, k, v, out, lse, *gradients), (True, True, True), asked)


@stored
def test_the_operators_are_right_for_any_strides(layouts, device):
    q, k, v, dout = drawn(device, layouts=layouts)
    opcheck([*(x.requires_grad_() for x in (q, k, v)), dout])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_the_operators_are_right_for_any_dtype(dtype, device):
    q, k, v, dout = drawn(device, dtype)
    opcheck([*(x.requires_grad_() for x in (q, k, v)), dout])


@subsets
def test_the_operators_are_right_for_any_tensors_that_are_differentiated(wanted, device):
    *leaves, dout = drawn(device)
    opcheck([*(x.requires_grad_(y in wanted) for x, y in zip(leaves, "qkv", strict=True)), dout])


ASKED = {
    "causal": {"causal": True},
    "window": {"window_size": (2, 1), "sm_scale": 0.3},
    "ints": {"seqlens_q": (5, 2), "seqlens_k": (0, 7)},
    "mask": {"mask": Mask(causal=True, seqlens_k=(7, 3))},
    "predicate": {"mask": PrefixLM(prefix=3, window_left=4)},
    "config": {"config": Config(forward=Tile(32, 16))},
}


@pytest.mark.parametrize("arguments", ASKED.values(), ids=ASKED)
def test_the_operators_are_right_for_any_arguments(arguments, device):
    q, k, v, dout = drawn(device)
    opcheck([q.requires_grad_(), k, v, dout], **arguments)


@pytest.mark.parametrize("places", [{}, {"max_seqlen_q": 9}], ids=["rows", "longest"])
def test_the_operators_are_right_for_packed_sequences(places, device):
    tensors = [x[:1] for x in drawn(device)]
    q, k, v, dout = tensors
    rows, keys = q.shape[2], k.shape[2]
    offsets = [
        torch.tensor([0, 3, end - 1], dtype=torch.int32, device=device) for end in (rows, keys)
    ]
    given = (offsets[0], places.get("max_seqlen_q"), offsets[1], None)
    opcheck([q.requires_grad_(), k, v, dout], causal=True, offsets=given)


def test_the_operators_are_right_for_lengths_in_a_tensor(device):
    q, k, v, dout = drawn(device)
    lengths = torch.tensor([3, 7], dtype=torch.int32, device=device)
    opcheck([q.requires_grad_(), k, v, dout], seqlens_k=lengths)
