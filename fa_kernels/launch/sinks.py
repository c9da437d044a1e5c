"""The arguments and the gradient of sinks."""

from __future__ import annotations

import math

import torch

from fa_kernels.validation.arguments import Arguments

__all__ = ["sink_args", "write_dsinks"]

_LOG2E = math.log2(math.e)


def sink_args(arguments: Arguments) -> dict:
    """Returns the forward's arguments of sinks, with placeholders if there are none."""
    sinks = arguments.sinks
    if sinks is None:
        return {"sinks_ptr": arguments.seqlens_q, "stride_sink": 0, "HAS_SINKS": False}
    return {"sinks_ptr": sinks, "stride_sink": sinks.stride(0), "HAS_SINKS": True}


def write_dsinks(
    dsinks: torch.Tensor, sinks: torch.Tensor, lse2: torch.Tensor, delta: torch.Tensor
) -> None:
    """Writes the gradient of the sinks, (H,): the sum of dS = -P delta over the rows of a head.

    A sink is a key of value 0, so its dP is 0. The sum has one fixed order.

    Args:
        dsinks: Float32 (H,).
        sinks: Float32 (H,).
        lse2: (B, H, M_padded), lse in base 2; +inf in rows without a visible key or sink.
        delta: (B, H, M_padded), 0 in these rows.
    """
    sink2 = sinks.detach().to(lse2.dtype) * _LOG2E
    weighted = torch.exp2(sink2.view(-1, 1) - lse2) * delta
    dsinks.copy_(weighted.sum((0, 2)).neg_())
