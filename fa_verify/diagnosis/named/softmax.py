"""Faults of the softmax and of lse."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch.nn.functional import pad

from fa_verify.diagnosis.named.masks import inside, sees
from fa_verify.diagnosis.named.named import BACKWARD, FORWARD, Change, Named, untiled
from fa_verify.diagnosis.named.passes import Pass
from fa_verify.diagnosis.named.ranges import any_of, split_of, spread

__all__ = ["SOFTMAX"]


def _starts_at(value: float) -> Change:
    def change(p: Pass, block_m: int, block_n: int) -> None:
        p.start, p.single = value, True

    return change


def _unguarded(hides: bool) -> Change:
    """Return a change that lets rows without a key give NaN; ``hides``: but no NaN in dS."""

    def change(p: Pass, block_m: int, block_n: int) -> bool:
        p.guarded, p.hides_gradients = False, hides
        return not bool(p.seen.any(3).all())

    return change


def _unguarded_tile(gives_nan: bool) -> Change:
    """Return a change that loses rows which see no key in the first tile that they visit.

    They give NaN, or look like empty rows to a kernel that tests whether the sum is above 0.
    """

    def change(p: Pass, block_m: int, block_n: int) -> bool:
        tiles = any_of(p.seen, block_m, block_n)
        split = split_of(p, tiles)
        lost = torch.zeros_like(p.seen[..., :1])
        for number in range(p.case.splits):
            of_split = tiles & (split == number)
            first = spread(of_split & (of_split.cumsum(3) == 1), p.seen, block_m, block_n)
            lost |= first.any(3, keepdim=True) & ~(first & p.seen).any(3, keepdim=True)
        lost &= inside(p).any(3, keepdim=True)
        p.guarded = ~lost if gives_nan else True
        return sees(p, p.seen & ~lost)

    return change


def _rescales(*sums: str) -> Change:
    def change(p: Pass, block_m: int, block_n: int) -> None:
        p.tile, p.rescales = block_n, sums

    return change


def _drops(bits: int, *, earlier: bool) -> Change:
    """Return a change that drops weights so many bits below the running maximum.

    They are those of a light tile, or with ``earlier`` those of the tiles before a steep rise.
    """

    def change(p: Pass, block_m: int, block_n: int) -> None:
        s, _ = p.scores()
        N = s.shape[3]
        tiles = pad(s, (0, -N % block_n), value=-math.inf).unflatten(3, (-1, block_n)).amax(4)
        running = tiles.cummax(3).values
        least = bits * math.log(2)
        kept = running - tiles <= least
        if earlier:
            steep = running.diff(dim=3) > least
            last = torch.arange(1, tiles.shape[3], device=s.device)
            first = torch.where(steep, last, 0).amax(3, keepdim=True) if last.numel() else 0
            kept = torch.arange(tiles.shape[3], device=s.device) >= first
            kept = kept.expand(tiles.shape)
        of_keys = kept.repeat_interleave(block_n, 3)[..., :N]
        p.weight = lambda e: torch.where(of_keys, e, 0.0)

    return change


def _lse_read(factor: float) -> Change:
    def change(p: Pass, block_m: int, block_n: int) -> None:
        p.lse_factor = factor

    return change


def _lse(make: Callable[[Pass, torch.Tensor], torch.Tensor]) -> Change:
    """Return a change of the lse that the forward returns."""

    def change(p: Pass, block_m: int, block_n: int) -> None:
        p.lse_of = lambda lse: make(p, lse)

    return change


def _empty_lse(value: float) -> Change:
    return _lse(lambda p, lse: torch.where(lse == -math.inf, value, lse))


def _maximum(p: Pass, lse: torch.Tensor) -> torch.Tensor:
    """Return the largest score of each row."""
    return p.scores()[0].amax(3) if p.seen.shape[3] else lse


SOFTMAX: tuple[Named, ...] = (
    Named("maximum starts late", "the running maximum started at a finite value",
          tuple(_starts_at(x) for x in (0.0, -1e4, -5e4)), FORWARD,
          on_record="flashinfer#4267, #4401"),
    Named("unguarded rows", "rows that have seen no key subtracted -inf from -inf",
          (untiled(_unguarded(False)), untiled(_unguarded(True)), _unguarded_tile(True),
           _unguarded_tile(False)), ("forward", "the forward alone", "everywhere"), "mn",
          on_record="xformers@63d7f30b, #722; pytorch#130014, #109517, #110213; "
                    "flashinfer#4051; vllm#39148; rocMLIR#2371; xformers@63d7f30b; "
                    "vllm#28181, #39148"),
    Named("empty lse 0", "the lse of rows that see no key were 0", (_empty_lse(0.0),), FORWARD,
          on_record="flash-attention@26d7d92f, #978, #1936; pytorch#134650, #131867"),
    Named("empty lse inf", "the lse of rows that see no key were +inf",
          (_empty_lse(math.inf),), FORWARD,
          on_record="flash-attention@26d7d92f, #978, #1936; pytorch#134650, #131867"),
    Named("acc not rescaled", "the sum of P v were not rescaled when the maximum rises",
          (_rescales("l"),), FORWARD, "n", on_record="MSLK#242"),
    Named("l not rescaled", "the softmax sum were not rescaled when the maximum rises",
          (_rescales("acc"),), FORWARD, "n", on_record="MSLK#242"),
    Named("nothing rescaled", "no sum were rescaled when the maximum rises",
          (_rescales(),), FORWARD, "n"),
    Named("light tiles skipped", "tiles of small weights were skipped",
          (_drops(24, earlier=False), _drops(40, earlier=False)), FORWARD, "n"),
    Named("small sums dropped", "sums were dropped at a steep rise of the maximum",
          (_drops(24, earlier=True),), FORWARD, "n"),
    Named("lse base 2", "lse were a logarithm to base 2",
          (_lse(lambda p, lse: lse * math.log2(math.e)),), FORWARD,
          on_record="pytorch#181645, #156012; aotriton#108; tokenspeed#571; "
                    "flashinfer#2113, #2114, #4485"),
    Named("lse read in base 2", "the backward took the natural lse for one to base 2",
          (_lse_read(math.log(2)), _lse_read(math.log2(math.e))), BACKWARD,
          on_record="pytorch#181645, #156012; attention-gym#200"),
    Named("lse without maximum", "lse were the logarithm of the sum alone",
          (_lse(lambda p, lse: torch.where(lse > -math.inf, lse - _maximum(p, lse), lse)),),
          FORWARD),
    Named("lse is the maximum", "lse were the largest score",
          (_lse(_maximum),), FORWARD),
)  # fmt: skip
