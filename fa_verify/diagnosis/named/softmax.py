"""Faults of the softmax and of lse."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch.nn.functional import pad

from fa_verify.diagnosis.named.named import BACKWARD, FORWARD, After, Change, Named
from fa_verify.diagnosis.named.passes import Case, Pass
from fa_verify.oracles.outputs import Outputs

__all__ = ["SOFTMAX"]


def _starts_at(value: float) -> Change:
    def change(p: Pass, block_m: int, block_n: int) -> None:
        p.start, p.single = value, True

    return change


def _unguarded(p: Pass, block_m: int, block_n: int) -> bool:
    p.guarded = False
    return not bool(p.seen.any(3).all())


def _rescales(*sums: str) -> Change:
    def change(p: Pass, block_m: int, block_n: int) -> None:
        p.tile, p.rescales = block_n, sums

    return change


def _drops_light_tiles(bits: int) -> Change:
    def change(p: Pass, block_m: int, block_n: int) -> None:
        def weight(e: torch.Tensor) -> torch.Tensor:
            N = e.shape[3]
            tiles = pad(e, (0, -N % block_n)).unflatten(3, (-1, block_n))
            heavy = tiles.amax(4, keepdim=True) >= 2.0**-bits
            return (tiles * heavy).flatten(3)[..., :N]

        p.weight = weight

    return change


def _lse_read(factor: float) -> Change:
    def change(p: Pass, block_m: int, block_n: int) -> None:
        p.lse_factor = factor

    return change


def _of_lse(make: Callable[[Case, torch.Tensor], torch.Tensor | None]) -> After:
    def after(
        case: Case, outputs: Outputs[torch.Tensor], block_m: int, block_n: int
    ) -> Outputs[torch.Tensor] | None:
        lse = make(case, outputs.lse)
        return None if lse is None else outputs._replace(lse=lse)

    return after


def _empty_lse(value: float) -> After:
    def make(case: Case, lse: torch.Tensor) -> torch.Tensor | None:
        empty = lse == -math.inf
        return torch.where(empty, value, lse) if bool(empty.any()) else None

    return _of_lse(make)


def _maximum(case: Case) -> torch.Tensor:
    s, _ = case.plain().scores()
    return s.amax(3) if s.shape[3] else s.new_full(s.shape[:3], -math.inf)


SOFTMAX: tuple[Named, ...] = (
    Named("maximum starts late", "the running maximum started at a finite value",
          tuple(_starts_at(x) for x in (0.0, -1e4, -5e4)), ("forward", "the forward alone"),
          recorded=("the running maximum starts",)),
    Named("unguarded rows", "rows that see no key subtracted -inf from -inf", (_unguarded,),
          FORWARD, recorded=("a row that has seen nothing", "-inf - -inf")),
    Named("empty lse 0", "the lse of rows that see no key were 0", after=_empty_lse(0.0),
          recorded=("the lse of an empty row is 0.0",)),
    Named("empty lse inf", "the lse of rows that see no key were +inf",
          after=_empty_lse(math.inf), recorded=("the lse of an empty row is float",)),
    Named("acc not rescaled", "the sum of P v were not rescaled when the maximum rises",
          (_rescales("l"),), FORWARD, "n", ("acc is not rescaled",)),
    Named("l not rescaled", "the softmax sum were not rescaled when the maximum rises",
          (_rescales("acc"),), FORWARD, "n", ("l is not rescaled",)),
    Named("nothing rescaled", "no sum were rescaled when the maximum rises",
          (_rescales(),), FORWARD, "n"),
    Named("light tiles skipped", "tiles of small weights were skipped",
          (_drops_light_tiles(24), _drops_light_tiles(40)), FORWARD, "n",
          ("bits below the maximum are skipped",)),
    Named("lse base 2", "lse were a logarithm to base 2",
          after=_of_lse(lambda case, lse: lse * math.log2(math.e)),
          recorded=("lse is a logarithm to base 2",)),
    Named("lse read in base 2", "the backward took the natural lse for one to base 2",
          (_lse_read(math.log(2)), _lse_read(math.log2(math.e))), BACKWARD,
          recorded=("lse is handed on as if",)),
    Named("lse without maximum", "lse were the logarithm of the sum alone",
          after=_of_lse(lambda case, lse: lse - torch.where(lse > -math.inf, _maximum(case), 0.0))),
    Named("lse is the maximum", "lse were the largest score",
          after=_of_lse(lambda case, lse: _maximum(case))),
)  # fmt: skip
