"""The error bounds of a softcap and of its slope, in float64."""

from __future__ import annotations

from typing import NamedTuple

import torch

from fa_verify.oracles.bounds.constants import Constants
from fa_verify.oracles.reference.softcap import capped, slope

__all__ = ["Cap", "cap_error"]

_FLAT = 400.0  # |x / c| beyond which the slope is 0 even in float64


class Cap(NamedTuple):
    """Capped scores, their slope, and the bounds of both errors, shaped as the scores."""

    s: torch.Tensor
    s_error: torch.Tensor
    slope: torch.Tensor
    slope_error: torch.Tensor


def cap_error(
    x: torch.Tensor, error: torch.Tensor, softcap: float, c: Constants, slope_from: str
) -> Cap:
    """Returns capped scores, their slope, and the errors of both.

    A kernel multiplies a dot by t / c (two roundings), computes tanh and its slope of the product,
    and multiplies tanh by c (two more). X is c times the error of x / c, f the slope, and f_max the
    largest slope that X allows::

        X = error + 3u |x|
        s: f_max X + (12u + u_exp)(|s| + f_max X) + 2c FTZ
        f: f_max (min(1, 2 X / c) + 14u + u_exp + 4u min(|x / c|, 400)) + 4 FTZ

    The relative error of tanh is at most 9u + u_exp. For |y| >= 1/2, tanh is (1 - e) / (1 + e) with
    e = exp(-2 |y|). The relative error 4u |y| + u_exp of e is multiplied by (1 - tanh**2) / 2,
    which gives at most 0.90u + 0.40 u_exp of tanh >= 0.46. The two sums, a reciprocal of 2 ulps and
    a product add 7u. For smaller |y|, numerator and denominator of a continued fraction are sums of
    positive terms, the first of which outweighs the rest: 2u each, and 5.5u in all for y**2,
    products and reciprocal. The slope is 4 e / (1 + e)**2, or 1 - tanh**2 for a tanh below 0.47.
    The FTZ terms cover flushes.

    A slope that is the difference 1 - T**2 everywhere has the errors of T in full, however small it
    is. With y = x / c, T is tanh(y), but for the error of e and for two sums, a reciprocal and a
    product::

        |T - tanh| <= 7u |tanh| + (4u |y| + u_exp) f / 2
        2 |tanh| |T - tanh| + u tanh**2 + u f <= 15u tanh**2 + (4u |y| + u_exp + u) f

    The term u tanh**2 is the rounding of the square, and u f that of the difference. The last
    bracket is within the relative error above, whose other 13u cover products of errors, and the
    product by c and the division by it in automatic differentiation. So does the error of a tanh
    below 0.47, 9.5u, in excess of 7u: 5u tanh**2 <= 1.4u f. A library's tanh, to 2 ulps, errs by
    at most 4u::

        f: 15u tanh**2 more, at the largest |x / c| that X allows

    Args:
        x: Scaled scores, any shape.
        error: Error of their dots, times the scale.
        softcap: c, > 0.
        c: The constants of the bound.
        slope_from: ``Numerics.softcap_slope``.
    """
    s = capped(x, softcap)
    of_x = error + 3 * c.u * x.abs()
    steepest = slope((x.abs() - of_x).clamp_(min=0.0), softcap)
    moved = steepest * of_x
    s_error = moved + (12 * c.u + c.u_exp) * (s.abs() + moved) + 2 * softcap * c.ftz
    of_slope = (of_x * (2 / softcap)).clamp_(max=1.0)
    of_slope += 14 * c.u + c.u_exp + 4 * c.u * (x.abs() / softcap).clamp_(max=_FLAT)
    slope_error = steepest * of_slope + 4 * c.ftz
    if slope_from == "difference":
        slope_error += 15 * c.u * ((x.abs() + of_x) / softcap).tanh_().square_()
    return Cap(s, s_error, slope(x, softcap), slope_error)
