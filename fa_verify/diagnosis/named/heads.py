"""Faults of heads, batch entries and lengths."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch.nn.functional import pad

from fa_verify.diagnosis.named.masks import axes, inside, sees, window
from fa_verify.diagnosis.named.named import Change, Named
from fa_verify.diagnosis.named.passes import Pass

__all__ = ["HEADS"]


def _heads(make: Callable[[Pass, torch.Tensor], torch.Tensor]) -> Change:
    """Return a change of the key/value head of each query head."""

    def change(p: Pass, block_m: int, block_n: int) -> bool:
        x = p.case.problem
        head = make(p, torch.arange(x.H, device=x.device)).clamp(max=x.Hk - 1)
        changed = not torch.equal(head, p.head)
        p.head = head
        return changed

    return change


def _of_group(wanted: str, kept: Callable[[torch.Tensor, int], torch.Tensor]) -> Change:
    """Return a change that leaves heads of a group out of dk, dv or both."""

    def change(p: Pass, block_m: int, block_n: int) -> bool:
        x = p.case.problem
        h = torch.arange(x.H, device=x.device)
        factor = kept(h % x.G, x.G).double().view(-1, 1, 1)
        p.factor.update(dict.fromkeys(wanted.split(), factor))
        return x.G > 1 and bool((factor != 1).any())

    return change


def _slopes_repeat(p: Pass, block_m: int, block_n: int) -> bool:
    if p.slopes is None or p.case.problem.H <= 8:
        return False
    p.slopes = p.slopes[:, torch.arange(p.case.problem.H, device=p.slopes.device) % 8]
    return True


def _head_of_16(p: Pass, block_m: int, block_n: int) -> bool:
    x = p.case.problem
    if x.H <= 16:
        return False
    h = torch.arange(x.H, device=x.device) % 16
    p.q = p.q[:, h]
    p.head = p.head % 16
    return True


def _keys_of(entry: Callable[[int], int]) -> Change:
    """Return a change that gives batch entries the lengths of another one."""

    def change(p: Pass, block_m: int, block_n: int) -> bool:
        x = p.case.problem
        if not x.mask.is_plain or x.B < 2:
            return False
        mask = replace(x.mask)
        for name in ("seqlens_q", "seqlens_k"):
            lengths = getattr(mask, name)
            if lengths is not None:
                changed = tuple(lengths[entry(b)] for b in range(x.B))
                mask = replace(mask, **{name: changed})
        return sees(p, mask.dense(x.B, x.H, x.M, x.N, device=x.device).expand(p.seen.shape))

    return change


def _keys_as_rows(p: Pass, block_m: int, block_n: int) -> bool:
    """As many keys are taken to be there as there are rows."""
    x = p.case.problem
    if not x.mask.is_plain:
        return False
    m, n, rows, _ = axes(p)
    seen = inside(p) & (n < rows) & window(p, x.mask.window_left, x.mask.right, 0)
    p.distance = (m - n).abs().double().expand(p.distance.shape)
    return sees(p, seen)


def _keys_begin_with_queries(p: Pass, block_m: int, block_n: int) -> bool:
    """Packed sequences: keys and values are read from where the queries of a sequence begin."""
    x = p.case.problem
    rows, keys = x.mask.lengths(x.B, x.M, x.N)
    if x.B < 2 or rows == keys:
        return False
    for name in ("k", "v"):
        own = getattr(p.case.inputs, name).double()
        packed = torch.cat([own[b, :, : keys[b]] for b in range(x.B)], 1)
        packed = pad(packed, (0, 0, 0, x.N + sum(rows)))
        made = torch.zeros_like(own)
        for b in range(x.B):
            start = sum(rows[:b])
            made[b, :, : keys[b]] = packed[:, start : start + keys[b]]
        setattr(p, name, made)
    return True


HEADS: tuple[Named, ...] = (
    Named("one head of a group", "one head of a group alone added to dk and dv",
          tuple(_of_group(wanted, kept) for wanted in ("dk dv", "dk", "dv")
                for kept in (lambda g, G: g == G - 1, lambda g, G: g == 0)), ("dk and dv",),
          on_record="levanter#449; fla#889"),
    Named("fifth head of a group", "heads of a group beyond the fourth were left out of dk and dv",
          (_of_group("dk dv", lambda g, G: g != 4), _of_group("dk dv", lambda g, G: g < 4)),
          ("dk and dv",)),
    Named("mean of a group", "dk and dv were means over the heads of a group",
          (_of_group("dk dv", lambda g, G: torch.full_like(g, 1, dtype=torch.float64) / G),),
          ("dk and dv",)),
    Named("interleaved heads", "query head h read key/value head h % Hk",
          (_heads(lambda p, h: h % p.case.problem.Hk),)),
    Named("one key/value head", "all query heads read the first key/value head",
          (_heads(lambda p, h: 0 * h),)),
    Named("ungrouped heads", "query head h read key/value head h, or the last",
          (_heads(lambda p, h: h),)),
    Named("slopes repeat", "ALiBi's slopes repeated after the eighth head", (_slopes_repeat,)),
    Named("heads of 4 bits", "the index of a head had four bits", (_head_of_16,)),
    Named("lengths of the fourth", "batch entries beyond the fourth had the fourth's lengths",
          (_keys_of(lambda b: min(b, 3)),)),
    Named("lengths of the first", "all batch entries had the first one's lengths",
          (_keys_of(lambda b: 0),)),
    Named("keys counted as rows", "there were as many keys as rows",
          (_keys_as_rows,)),
    Named("keys begin with queries", "the keys of a packed sequence began where its queries do",
          (_keys_begin_with_queries,)),
)  # fmt: skip
