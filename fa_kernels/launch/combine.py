"""Launches the kernels that combine parts: splits of one call, or attention states of several."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fa_kernels.kernels.portable.combine import combine_kernel
from fa_kernels.kernels.portable.combine_bwd import combine_bwd_kernel
from fa_kernels.runtime import allocation
from fa_kernels.runtime.device import on_device
from fa_kernels.runtime.launch_cache import cdiv, run

__all__ = [
    "empty_combined",
    "empty_state_gradients",
    "launch_combine",
    "launch_combine_backward",
    "launch_combine_splits",
]

COMBINE_ROWS = 4
# The kernels' names for the strides of each tensor.
_OF_PARTS = ("stride_as", "stride_ab", "stride_ah", "stride_am", "stride_ad")
_OF_STATISTICS = ("stride_ms", "stride_mb", "stride_mh", "stride_mm")
_OF_DOUT = ("stride_ob", "stride_oh", "stride_om", "stride_od")
_OF_DLSE = ("stride_lb", "stride_lh", "stride_lm")


def _shared(acc: torch.Tensor, m: torch.Tensor) -> dict:
    """Returns the arguments that the kernels share, of acc (P,B,H,M,Dv) and m (P,B,H,M)."""
    parts, B, H, M, Dv = acc.shape
    return {
        **dict(zip(_OF_PARTS, acc.stride(), strict=True)),
        **dict(zip(_OF_STATISTICS, m.stride(), strict=True)),
        "num_splits": parts, "rows": B * H * M, "H": H, "M": M, "Dv": Dv,
        "BLOCK_R": COMBINE_ROWS, "BLOCK_DV": max(16, triton.next_power_of_2(Dv)),
        "ACC": tl.float64 if m.dtype == torch.float64 else tl.float32,
    }  # fmt: skip


def launch_combine_splits(
    acc: torch.Tensor, m: torch.Tensor, l_sum: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
) -> None:
    """Writes out and lse from the unnormalised sums of splits, on the current device.

    Args:
        acc: (P, B, H, M, Dv), sums of P v relative to m.
        m: (P, B, H, M), maxima in base 2.
        l_sum: (P, B, H, M), contiguous, sums of P relative to m.
        out: (B, H, M, Dv), contiguous.
        lse: (B, H, M), contiguous.
    """
    run(
        combine_kernel, (cdiv(lse.numel(), COMBINE_ROWS),),
        {
            "acc_ptr": acc, "m_ptr": m, "l_ptr": l_sum, "out_ptr": out, "lse_ptr": lse,
            **_shared(acc, m), "STATES": False,
        },
    )  # fmt: skip


def empty_combined(outs: torch.Tensor, lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocates the merged out (B,H,M,Dv) and lse (B,H,M), contiguous, in the parts' dtypes."""
    out, lse = (allocation.empty(x.shape[1:], dtype=x.dtype, device=x.device) for x in (outs, lses))
    return out, lse


def launch_combine(outs: torch.Tensor, lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns out and lse merged from outs (P,B,H,M,Dv) and lses (P,B,H,M) of any strides."""
    out, lse = empty_combined(outs, lses)
    if lse.numel():
        with on_device(outs):
            run(
                combine_kernel, (cdiv(lse.numel(), COMBINE_ROWS),),
                {
                    "acc_ptr": outs, "m_ptr": lses, "l_ptr": lses, "out_ptr": out, "lse_ptr": lse,
                    **_shared(outs, lses), "STATES": True,
                },
            )  # fmt: skip
    return out, lse


def empty_state_gradients(
    outs: torch.Tensor, lses: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocates the gradients of outs and lses, contiguous, in their dtypes."""
    douts, dlses = (allocation.empty(x.shape, dtype=x.dtype, device=x.device) for x in (outs, lses))
    return douts, dlses


def launch_combine_backward(
    outs: torch.Tensor,
    lses: torch.Tensor,
    dout: torch.Tensor | None,
    dlse: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the gradients of outs and lses, contiguous; a dout or dlse of None is zero."""
    dout, dlse = (
        allocation.empty((), dtype=of.dtype, device=of.device).zero_().expand(of.shape[1:])
        if gradient is None
        else gradient
        for gradient, of in ((dout, outs), (dlse, lses))
    )
    douts, dlses = empty_state_gradients(outs, lses)
    if lses.numel():
        with on_device(outs):
            # Both sums over d have to give the same bits, for a part alone to be the identity.
            # Fusion could contract them differently.
            run(
                combine_bwd_kernel, (cdiv(lses[0].numel(), COMBINE_ROWS),),
                {
                    "outs_ptr": outs, "lses_ptr": lses, "dout_ptr": dout, "dlse_ptr": dlse,
                    "douts_ptr": douts, "dlses_ptr": dlses, **_shared(outs, lses),
                    **dict(zip(_OF_DOUT, dout.stride(), strict=True)),
                    **dict(zip(_OF_DLSE, dlse.stride(), strict=True)),
                    "enable_fp_fusion": False,
                },
            )  # fmt: skip
    return douts, dlses
