"""Faults of loads and stores."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch

from fa_verify.diagnosis.named.masks import axes, sees, used, window
from fa_verify.diagnosis.named.named import FORWARD, After, Change, Named
from fa_verify.diagnosis.named.passes import Case, Pass, forward_of
from fa_verify.oracles.outputs import Outputs
from fa_verify.properties.inputs.tensors import Inputs

__all__ = ["MEMORY"]


def _reads(names: str) -> Change:
    """Return a change that multiplies what padding holds by weights of 0."""

    def change(p: Pass, block_m: int, block_n: int) -> bool:
        for name in names.split():
            setattr(p, name, getattr(p.case.inputs, name).double())
        return any(
            not bool(getattr(p.case.inputs, name).isfinite().all()) for name in names.split()
        )

    return change


def _unwritten(
    where: Callable[[Case, int, int], dict[str, torch.Tensor]],
) -> After:
    """Return a change that leaves elements unwritten, which hold NaN."""

    def after(
        case: Case, outputs: Outputs[torch.Tensor], block_m: int, block_n: int
    ) -> Outputs[torch.Tensor] | None:
        changed = {}
        for name, places in where(case, block_m, block_n).items():
            value = getattr(outputs, name)
            if bool(places.any()) and value.numel():
                full = places.view(*places.shape, *(1,) * (value.ndim - places.ndim))
                changed[name] = torch.where(full, torch.nan, value)
        return outputs._replace(**changed) if changed else None

    return after


def _rows(case: Case, where: torch.Tensor, names: str = "out lse") -> dict[str, torch.Tensor]:
    x = case.problem
    return dict.fromkeys(names.split(), where.expand(x.B, x.H, x.M))


def _tail_rows(case: Case, block_m: int, block_n: int) -> dict[str, torch.Tensor]:
    x = case.problem
    rows = case.lengths()[0].squeeze(3)
    m = torch.arange(x.M, device=x.device)
    return _rows(case, (m >= rows // block_m * block_m) & (m < rows))


def _no_keys(case: Case, block_m: int, block_n: int) -> dict[str, torch.Tensor]:
    x = case.problem
    return _rows(case, torch.tensor(x.N == 0, device=x.device))


def _no_rows(case: Case, block_m: int, block_n: int) -> dict[str, torch.Tensor]:
    x = case.problem
    where = torch.full((x.B, x.Hk, x.N), x.M == 0, device=x.device)
    return {"dk": where, "dv": where}


def _heads_past_8(case: Case, block_m: int, block_n: int) -> dict[str, torch.Tensor]:
    x = case.problem
    h = torch.arange(x.H, device=x.device).view(-1, 1)
    return _rows(case, (h >= x.H // 8 * 8) & (x.H > 8))


def _tail_lost(lse: float) -> Change:
    """Return a change that leaves the rows of the ragged last query tile as they were allocated."""

    def change(p: Pass, block_m: int, block_n: int) -> bool:
        m, _, rows, _ = axes(p)
        kept = (m < rows // block_m * block_m) | (m >= rows)
        if p.sink is not None:
            p.sink = torch.where(kept, p.sink, -math.inf)
        p.lse_of = lambda x: torch.where(kept.squeeze(3), x, lse)
        return sees(p, p.seen & kept)

    return change


def _overflows(names: str) -> Change:
    """Return a change that writes the rows past M of a tile over the next head's first rows.

    Their q was loaded as 0.
    """

    def change(p: Pass, block_m: int, block_n: int) -> bool:
        x = p.case.problem
        more = -x.M % block_m
        m, n, _, keys = axes(p)
        if not more or more > x.M or x.B * x.H < 2 or not x.mask.is_plain or p.sink is not None:
            return False
        if x.mask.seqlens_q is not None:
            return False
        past = replace(p, q=torch.zeros_like(p.q), bias=None)
        # Row m of this pass is row m + M of the head, whose position is m + M + keys - M.
        past.seen = window(p, x.mask.window_left, x.mask.right, keys) & (n < keys)
        past.distance = (m + keys - n).abs().double()
        result = forward_of(p.case, {"forward": past})

        def stored(right: torch.Tensor, extra: torch.Tensor) -> torch.Tensor:
            flat = right.flatten(0, 1).clone()
            flat[1:, :more] = extra.flatten(0, 1)[:-1, :more]
            return flat.view_as(right)

        if "out" in names:
            p.out_of = lambda out: stored(out, result.out)
        if "lse" in names:
            p.lse_of = lambda lse: stored(lse, result.lse)
        return True

    return change


def _strided(names: str, strides: Callable[[Inputs, torch.Tensor], tuple[int, ...]]) -> Change:
    """Return a change that reads tensors with other strides, as far as they stay in memory."""

    def change(p: Pass, block_m: int, block_n: int) -> bool:
        changed = False
        for name in names.split():
            given = getattr(p.case.inputs, name)
            new = strides(p.case.inputs, given)
            last = sum((size - 1) * step for size, step in zip(given.shape, new, strict=True))
            held = given.untyped_storage().nbytes() // given.element_size()
            if new == given.stride() or given.storage_offset() + last >= held:
                continue
            read = given.as_strided(given.shape, new, given.storage_offset()).double()
            live = p.seen.any(3, keepdim=True) if name in ("q", "dout") else used(p, p.seen)
            setattr(p, name, torch.where(live, read, 0.0))
            changed = True
        return changed

    return change


def _contiguous(_: Inputs, x: torch.Tensor) -> tuple[int, ...]:
    _, heads, rows, columns = x.shape
    return heads * rows * columns, rows * columns, columns, 1


def _exchanged(_: Inputs, x: torch.Tensor) -> tuple[int, ...]:
    entry, head, row, column = x.stride()
    return entry, row, head, column


def _sinks_contiguous(p: Pass, block_m: int, block_n: int) -> bool:
    given = p.case.inputs.sinks
    if p.sink is None or given is None or given.is_contiguous():
        return False
    read = given.as_strided(given.shape, (1,), given.storage_offset()).double()
    p.sink = torch.where(p.sink > -math.inf, read.view(-1, 1, 1), -math.inf)
    return True


def _those_of(other: str) -> Callable[[Inputs, torch.Tensor], tuple[int, ...]]:
    return lambda inputs, _: getattr(inputs, other).stride()


MEMORY: tuple[Named, ...] = (
    Named("padding times 0", "what padding holds were multiplied by weights of 0",
          tuple(map(_reads, ("v", "k v", "k", "q dout", "dout", "q"))),
          on_record="vllm#936; flash-attention#1745, #1395; vllm#30887; SageAttention#377"),
    Named("tail rows unwritten", "rows of the ragged last query tile were not written",
          after=_unwritten(_tail_rows), tiles="m"),
    Named("tail rows of out unwritten", "rows of the ragged last query tile were not written in "
          "out alone", after=_unwritten(lambda case, m, n: {"out": _tail_rows(case, m, n)["out"]}),
          tiles="m"),
    Named("tail rows left out", "rows of the ragged last query tile were left as allocated, with "
          "an lse of -inf or 0", (_tail_lost(-math.inf), _tail_lost(0.0)), (*FORWARD, "dq"), "m"),
    Named("rows past the end overwrite", "rows past the end of a head were written over the first "
          "rows of the next one", (_overflows("out"), _overflows("out lse")), FORWARD, "m"),
    Named("read as contiguous", "a tensor were read as if it were contiguous",
          (*(_strided(names, _contiguous)
             for names in ("q k v dout", "q", "k", "v", "k v", "dout")), _sinks_contiguous)),
    Named("heads and rows exchanged", "a tensor were read with the strides of its heads and rows "
          "exchanged", tuple(_strided(names, _exchanged)
                             for names in ("q k v dout", "q", "k", "v", "k v", "dout"))),
    Named("strides of another tensor", "a tensor were read with another one's strides",
          tuple(_strided(name, _those_of(other)) for name, other in (
              ("k", "v"), ("v", "k"), ("q", "k"), ("k", "q"), ("dout", "q"), ("q", "dout")))),
    Named("nothing without keys", "nothing were written where there are no keys",
          after=_unwritten(_no_keys),
          on_record="flashinfer#4452, #4451, #353, #363, #440; "
                    "flash-attention@a3a257c7, #2562, #2421; aiter#1442"),
    Named("nothing without rows", "dk and dv were not written where there are no rows",
          after=_unwritten(_no_rows),
          on_record="flashinfer#4452, #4451, #353, #363, #440; "
                    "flash-attention#2568, @db2f8069"),
    Named("heads past a multiple of 8", "heads past a multiple of eight were not written",
          after=_unwritten(_heads_past_8)),
)  # fmt: skip
