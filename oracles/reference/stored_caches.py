"""Caches of codes in PyTorch: appends, and the numbers that codes and scales stand for."""

from __future__ import annotations

import torch

from fa_verify.oracles.formats.element import ElementFormat
from fa_verify.oracles.formats.in_torch import decoded, scales_written, written
from fa_verify.oracles.formats.writing import Writing
from fa_verify.oracles.reference.caches import appended

__all__ = ["appended_codes", "numbers_of", "scales_of_places"]

_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


def scales_of_places(scale: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Returns the scale of each row and head of a cache, (pages, page_size, Hk).

    Args:
        scale: (1,), (Hk,), (pages, Hk) or (pages, page_size, Hk).
        shape: The cache's, (pages, page_size, Hk, columns).
    """
    if scale.ndim == 2:
        scale = scale.unsqueeze(1)
    return scale.expand(shape[:3])


def numbers_of(
    codes: torch.Tensor,
    scale: torch.Tensor,
    form: ElementFormat,
    *,
    divides: bool,
    rounds_to: str | None = None,
) -> torch.Tensor:
    """Returns the numbers that a cache of codes stands for, float64.

    Args:
        codes: (pages, page_size, Hk, columns).
        scale: As in ``scales_of_places``, float32.
        form: The format of the codes.
        divides: Whether the scale divides, instead of multiplying.
        rounds_to: "fp16", "bf16" or "fp32": the float32 product is rounded to it, as by a kernel
            that makes operands of dots of the codes. None does not round.
    """
    of_places = scales_of_places(scale, codes.shape).to(torch.float64).unsqueeze(3)
    plain = decoded(codes, form)
    exact = plain / of_places if divides else plain * of_places
    if rounds_to is None:
        return exact
    return exact.to(torch.float32).to(_DTYPES[rounds_to]).to(torch.float64)


def appended_codes(
    codes: torch.Tensor,
    scale: torch.Tensor,
    new: torch.Tensor,
    before: torch.Tensor,
    table: torch.Tensor,
    form: ElementFormat,
    rule: Writing,
    *,
    divides: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns contiguous copies of a cache of codes and of its scales, with new rows.

    Args:
        codes: (pages, page_size, Hk, columns).
        scale: As in ``scales_of_places``, but not of pages.
        new: (B, Hk, L, columns), in the dtype of q.
        before: Int (B,), the rows that each entry holds.
        table: Int (B, places), the pages of each entry.
        form: The format of the codes.
        rule: How numbers become codes.
        divides: As in ``numbers_of``.
    """
    number = new.to(torch.float64)
    kept = scale.clone(memory_format=torch.contiguous_format)
    if scale.ndim == 3:
        of_new = scales_written(number, form, rule)
        kept = appended(scale.unsqueeze(3), of_new.unsqueeze(3), before, table).squeeze(3)
    else:
        # One of all heads, or one of each.
        of_new = scale.view(1, -1, 1).expand(number.shape[:3])
    made = written(number, of_new.unsqueeze(3), form, rule, divides=divides)
    whole = appended(codes.view(torch.uint8), made.view(torch.uint8), before, table)
    return whole.view(codes.dtype), kept
