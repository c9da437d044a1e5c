"""The error bound of merged attention states and of their gradients."""

from __future__ import annotations

import math

import torch

from fa_verify.oracles.bounds.constants import constants
from fa_verify.oracles.outputs import Numerics
from fa_verify.oracles.reference.merging import Merged, merged

__all__ = ["merge_bound"]

_NARROW = ("fp16", "bf16")


def merge_bound(
    outs: torch.Tensor,
    lses: torch.Tensor,
    dout: torch.Tensor,
    dlse: torch.Tensor,
    *,
    in_dtype: str,
    numerics: Numerics | None = None,
    out_errors: torch.Tensor | None = None,
    lse_errors: torch.Tensor | None = None,
) -> Merged:
    """Returns the bound of each element of ``merged``.

    The parts are given, so their own roundings are no error. m is the largest lse_p of a row, n the
    number of its parts that saw a key, w_p = exp(lse_p - L), and l = exp(L - m) >= 1::

        E_p    = gamma(3) (m - lse_p) + u_exp          a difference, a constant and a product
        up     = log sum w exp(E)                      the sum of the weights errs by up or down
        down   = -log sum w exp(-E)
        share  = w expm1(E + down + gamma(n + 3)) + (n + 1) FTZ      n - 1 additions, a division

        core   = exp(down) sum w [expm1(E) |out_p - out| + exp(E) gamma(n) |out_p|]
                 + FTZ sum |out_p| + n eta
        core  += (gamma(n + 3) + n FTZ) (|out| + core)
        B_out  = core + u_out (|out| + core) + eta_out

        B_lse  = s + u (|L| + s),  s = up + gamma(n) + n FTZ + u_log (1 + |ln l|)

        A_p    = gamma(Dv) |dout|.|out_p| + Dv eta     of d_p = dout.out_p
        B_D    = as core, of d_p with the errors A_p, in place of out_p
        B_s    = A_p + B_D + gamma(2) (|d_p| + |D| + |dlse| + A_p + B_D)   of s_p = d_p - D + dlse
        B_dout = share |dout|, rounded and cast
        B_dlse = (w + share) B_s + share |s_p|, rounded

    The division counts as 4 roundings. eta is the rounding of a subnormal product. Weights below
    FTZ may count as 0. A part that saw no key adds exactly nothing, so that its bound is 0, and so
    is that of a row in which no part saw a key.

    Parts that are computed, and not given, have errors. The error of lse_p adds to E_p, and out_p
    is off by its own. The result then bounds a merge of computed parts against the exact merge.

    Args:
        outs: (P, B, H, M, Dv), any float dtype and strides.
        lses: (P, B, H, M); neither NaN nor +inf.
        dout: (B, H, M, Dv), the gradient with respect to out.
        dlse: (B, H, M), the gradient with respect to lse.
        in_dtype: "fp16", "bf16", "fp32" or "fp64": the dtype of outs.
        numerics: The subject's declared numerics; None is the default.
        out_errors: As outs, >= 0: how far outs may be from those of the kernel; None is 0.
        lse_errors: As lses, >= 0.

    Returns:
        Bounds in float64; doubled for "fp64", because the reference has an error of the same size.

    Raises:
        ValueError: in_dtype is unknown.

    Source: Higham, Accuracy and Stability of Numerical Algorithms, chapters 3 and 4.
    """
    c = constants(in_dtype, numerics or Numerics())
    u_cast, eta_cast = (c.u_in, c.eta_in) if in_dtype in _NARROW else (0.0, 0.0)
    # Half of the smallest float64 number is no float64 number.
    eta = max(c.u * c.ftz, 2.0**-1074) + c.eta_op
    live = lses != -math.inf
    some = live.any(0)
    parts = live.sum(0).to(torch.float64)
    want = merged(outs, lses, dout, dlse)
    of_live = live[..., None]
    outs, dout = torch.where(of_live, outs.to(torch.float64), 0.0), dout.to(torch.float64)
    dout = torch.where(some[..., None], dout, 0.0)
    dlse = torch.where(some, dlse.to(torch.float64), 0.0)
    off_out = torch.zeros_like(outs) if out_errors is None else out_errors
    off_out = torch.where(of_live, off_out, 0.0)
    off_lse = torch.zeros_like(lses, dtype=torch.float64) if lse_errors is None else lse_errors
    off_lse = torch.where(live, off_lse, 0.0)
    lses = torch.where(live, lses.to(torch.float64), -math.inf)
    lse = torch.where(some, want.lse, 0.0)
    largest = torch.cat((lses, torch.full_like(lse, -math.inf)[None])).amax(0)
    largest = torch.where(some, largest, 0.0)

    # 1: shares of the parts, and the errors of their exponents
    w = torch.where(live, (lses - lse).exp(), 0.0)
    spread = torch.cat((off_lse, torch.zeros_like(lse)[None])).amax(0)
    below = torch.where(live, largest - lses, 0.0) + spread + off_lse
    error = torch.where(live, off_lse + c.gamma(3.0) * below + c.u_exp, 0.0)
    up = (w * error.expm1()).sum(0).log1p()
    down = -(w * (-error).expm1()).sum(0).log1p()
    of_sum = c.gamma(parts + 3) + parts * c.ftz
    share = w * (error + down + c.gamma(parts + 3)).expm1() + (parts + 1) * c.ftz
    share = torch.where(live, share, 0.0)
    # A weight and a value of each part.
    lifted = down.exp() * w * error.exp()
    moved = down.exp() * w * error.expm1()

    def averaged(x: torch.Tensor, off: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
        """Returns the error of sum w x over parts, (P,B,H,M,columns), off by ``off``."""
        n, kept = parts[..., None], of_live.to(torch.float64)
        each = moved[..., None] * (x - mean).abs() * kept
        each = each + lifted[..., None] * (off + c.gamma(n) * (x.abs() + off))
        core = each.sum(0) + c.ftz * (kept * (x.abs() + off)).sum(0) + n * eta
        return core + of_sum[..., None] * (mean.abs() + core)

    # 2: out and lse
    core = averaged(outs, off_out, want.out)
    b_out = core + u_cast * (want.out.abs() + core) + eta_cast + eta
    step = up + c.gamma(parts) + parts * c.ftz + c.u_log * (1 + (lse - largest).abs())
    b_lse = step + c.u * (lse.abs() + step)

    # 3: gradients
    columns = float(outs.shape[4])
    d = (dout * outs).sum(4, keepdim=True)
    mass = (dout.abs() * (outs.abs() + off_out)).sum(4, keepdim=True)
    a = c.gamma(columns) * mass + (dout.abs() * off_out).sum(4, keepdim=True) + columns * eta
    mean = (w[..., None] * d).sum(0)
    of_mean = averaged(d, a, mean)
    d, a, mean, of_mean = d[..., 0], a[..., 0], mean[..., 0], of_mean[..., 0]
    slope = d - mean + dlse
    b_slope = a + of_mean
    b_slope = b_slope + c.gamma(2.0) * (d.abs() + mean.abs() + dlse.abs() + b_slope)
    b_dlses = (w + share) * b_slope + share * slope.abs()
    b_dlses = b_dlses + c.u * (want.dlses.abs() + b_dlses) + eta
    b_douts = share[..., None] * dout.abs()
    b_douts = b_douts + c.u * (want.douts.abs() + b_douts) + eta
    b_douts = b_douts + u_cast * (want.douts.abs() + b_douts) + eta_cast
    found = (
        torch.where(some[..., None], b_out, 0.0),
        torch.where(some, b_lse, 0.0),
        torch.where(of_live, b_douts, 0.0),
        torch.where(live, b_dlses, 0.0),
    )
    return Merged(*(c.times * x for x in found))
