"""Faults of loads and stores."""

from __future__ import annotations

from collections.abc import Callable

import torch

from fa_verify.diagnosis.named.named import After, Change, Named
from fa_verify.diagnosis.named.passes import Case, Pass
from fa_verify.oracles.outputs import Outputs

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


MEMORY: tuple[Named, ...] = (
    Named("padding times 0", "what padding holds were multiplied by weights of 0",
          tuple(map(_reads, ("v", "k v", "k", "q dout", "dout", "q"))),
          recorded=("the load of v has no mask", "the load of k has none")),
    Named("tail rows unwritten", "rows of the ragged last query tile were not written",
          after=_unwritten(_tail_rows), tiles="m"),
    Named("tail rows of out unwritten", "rows of the ragged last query tile were not written in "
          "out alone", after=_unwritten(lambda case, m, n: {"out": _tail_rows(case, m, n)["out"]}),
          tiles="m"),
    Named("nothing without keys", "nothing were written where there are no keys",
          after=_unwritten(_no_keys), recorded=("no forward where there are no keys",)),
    Named("nothing without rows", "dk and dv were not written where there are no rows",
          after=_unwritten(_no_rows), recorded=("no dk and dv where there are no rows",)),
    Named("heads past a multiple of 8", "heads past a multiple of eight were not written",
          after=_unwritten(_heads_past_8), recorded=("heads beyond a multiple of eight",)),
)  # fmt: skip
