"""Attention in float64, pass by pass, with the values of each pass open to a fault.

A correct computation is ``computed(case, {})``. A fault changes the ``Pass`` of the forward, of
dq, or of dk and dv before it runs. A wrong mask, scale or head mapping may hold in one pass alone.
The backward reads out and lse of the forward, as FlashAttention's does.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch

from fa_verify.oracles.outputs import Outputs
from fa_verify.oracles.problem import Problem
from fa_verify.oracles.reference.softcap import capped, slope
from fa_verify.properties.inputs.tensors import Inputs

__all__ = [
    "PASSES",
    "Case",
    "Computed",
    "Forward",
    "Pass",
    "computed",
    "forward_of",
    "gradients_of",
]

PASSES = ("forward", "dq", "dkdv")
# The largest float32, in which kernels of other inputs than float64 compute.
_LARGEST = torch.finfo(torch.float32).max


class Computed(NamedTuple):
    """Float64 outputs and the sum of |terms| of each element."""

    values: Outputs[torch.Tensor]
    terms: Outputs[torch.Tensor]


@dataclass
class Pass:
    """One pass. Shapes: B batch entries, H query heads, M rows, N keys, padding keys included.

    Args:
        case: The problem with its tensors.
        name: One of ``PASSES``.
        q: (B, H, M, D). Rows without a visible key are 0.
        k: (B, Hk, N, D). Keys that no row sees are 0.
        v: (B, Hk, N, Dv).
        dout: (B, H, M, Dv).
        dlse: (B, H, M), zeros if the loss does not depend on lse.
        head: (H,), the key/value head of each query head.
        seen: Bool (B, H, M, N), the visible pairs.
        scale: Factor on q.k in scores.
        softcap: c, or None.
        slopes: (B, H, 1, 1), or None without ALiBi.
        distance: (B, 1, M, N), |p - n| of ALiBi.
        bias: (B, H, M, N), or None.
        sink: (B, H, M, 1), the score of the sink, -inf in padding; None without sinks.
        hidden: The score of hidden pairs, or (B, H, M, N).
        count: How often a pair is added, broadcast to (B, H, M, N); None is once.
        start: The least value of the running maximum.
        tile: Width of the key tiles between which a fault of rescaling shows.
        rescales: The sums, out of "acc" and "l", that are rescaled at a rise of the maximum.
        single: Whether weights below 2**-149 count as 0, as in float32.
        guarded: Whether a row without a visible key is treated apart; (B, H, M, 1) if by row.
        capped_slope: Whether dS is multiplied by the derivative of the softcap.
        capped: The softcap's argument: "scores", or "dots", which are scaled after it; with
            "alibi" and "bias" if they are added before.
        out_of: Changes the out that the forward returns; None leaves it.
        lse_of: Changes the lse that the forward returns; None leaves it.
        rounds: Changes operands of the dots of scores ("s") and dP ("dp").
        lse_factor: Factor on the lse that the backward reads.
        lse_of_padding: The lse that it reads for rows past the end; None if they are left out.
        delta: "row" for the sum over a row; "tile" over the visible keys of a tile, "tile
            unmasked" over all of them; "none".
        dlse_factor: Factor on the gradient of lse.
        factor: Factors on out, dq, dk and dv, by name; those on dk and dv may be (H, 1, 1).
        only: The pairs that add to dq, by the name "dq".
        hides_gradients: Whether dS of hidden pairs is 0, where their score is finite.
        weight: Changes P before its products; None leaves it.
    """

    case: Case
    name: str
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor
    dlse: torch.Tensor
    head: torch.Tensor
    seen: torch.Tensor
    scale: float
    softcap: float | None
    slopes: torch.Tensor | None
    distance: torch.Tensor
    bias: torch.Tensor | None
    sink: torch.Tensor | None = None
    hidden: float | torch.Tensor = -math.inf
    count: torch.Tensor | None = None
    start: float = -math.inf
    tile: int = 0
    rescales: tuple[str, ...] = ("acc", "l")
    single: bool = False
    guarded: bool | torch.Tensor = True
    capped_slope: bool = True
    capped: tuple[str, ...] = ("scores",)
    out_of: Callable[[torch.Tensor], torch.Tensor] | None = None
    lse_of: Callable[[torch.Tensor], torch.Tensor] | None = None
    rounds: dict[str, Callable[[torch.Tensor], torch.Tensor]] = field(default_factory=dict)
    lse_factor: float = 1.0
    lse_of_padding: float | None = None
    delta: str = "row"
    dlse_factor: float = 1.0
    factor: dict[str, float | torch.Tensor] = field(default_factory=dict)
    only: dict[str, torch.Tensor] = field(default_factory=dict)
    hides_gradients: bool = False
    weight: Callable[[torch.Tensor], torch.Tensor] | None = None

    def scores(self) -> tuple[torch.Tensor, torch.Tensor | float]:
        """Return scores (B, H, M, N) with hidden ones replaced, and the softcap's derivative."""
        q, k = self.rounded("s", self.q, self.k)
        s = q @ k[:, self.head].mT
        s = s if "dots" in self.capped else s * self.scale
        by_dot: torch.Tensor | float = 1.0
        added = {"bias": self.bias}
        if self.slopes is not None:
            added["alibi"] = -self.slopes * self.distance
        for name, x in added.items():
            if x is not None and name in self.capped:
                s = s + x
        if self.softcap is not None:
            # 1 - tanh**2 would cancel: a slope that cancels in a kernel is no fault of another.
            by_dot = slope(s, self.softcap) if self.capped_slope else 1.0
            s = capped(s, self.softcap)
        s = s * self.scale if "dots" in self.capped else s
        for name, x in added.items():
            if x is not None and name not in self.capped:
                s = s + x
        return torch.where(self.seen, s, self.hidden), by_dot

    def rounded(self, dot: str, *operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the operands of a dot, rounded if the pass rounds them."""
        return tuple(map(self.rounds[dot], operands)) if dot in self.rounds else operands


@dataclass(frozen=True)
class Case:
    """A problem with its tensors.

    Args:
        problem: The problem.
        inputs: Its tensors.
        splits: The most programs of the forward that share the key tiles of a row.
    """

    problem: Problem
    inputs: Inputs
    splits: int = 1

    def visible(self, **changes: object) -> torch.Tensor:
        """Return the visible pairs, (B, H, M, N) bool, of the mask with some fields changed."""
        x = self.problem
        mask = dataclasses.replace(x.mask, **changes) if changes else x.mask  # type: ignore[arg-type]
        seen = mask.dense(x.B, x.H, x.M, x.N, device=x.device)
        return seen.expand(x.B, x.H, x.M, x.N)

    def lengths(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the valid rows and the valid keys, (B, 1, 1, 1) each."""
        x = self.problem
        both = torch.tensor(x.mask.lengths(x.B, x.M, x.N), device=x.device)
        rows, keys = both.view(2, x.B, 1, 1, 1).unbind()
        return rows, keys

    def plain(self, name: str) -> Pass:
        """Return the values of a correct pass, which the caller may change."""
        return dataclasses.replace(self._plain, name=name, factor={}, rounds={}, only={})

    @cached_property
    def right(self) -> Computed:
        """The correct outputs."""
        return computed(self, {})

    @cached_property
    def forward(self) -> Forward:
        """The results of the correct forward."""
        return _forward(self._plain)

    @cached_property
    def _plain(self) -> Pass:
        x, given = self.problem, self.inputs
        seen = self.visible()
        live = seen.any(3, keepdim=True)
        head = torch.arange(x.H, device=x.device) // x.G
        used = seen.any(2).view(x.B, x.Hk, x.G, x.N, 1).any(2)
        q, dout = (torch.where(live, t.double(), 0.0) for t in (given.q, given.dout))
        k, v = (torch.where(used, t.double(), 0.0) for t in (given.k, given.v))
        dlse = torch.zeros_like(q[..., 0])
        if given.dlse is not None:
            dlse = torch.where(live[..., 0], given.dlse.double(), 0.0)
        slopes = bias = None
        if given.alibi_slopes is not None:
            slopes = given.alibi_slopes.double().expand(x.B, x.H)[:, :, None, None]
        if given.bias is not None:
            bias = torch.where(seen, given.bias.double().expand(x.B, x.H, x.M, x.N), 0.0)
        rows, keys = self.lengths()
        m = torch.arange(x.M, device=x.device).view(-1, 1)
        n = torch.arange(x.N, device=x.device)
        distance = (m + (keys - rows) - n).abs().double()
        sink = None
        if given.sinks is not None:
            sink = torch.where(m < rows, given.sinks.double().view(-1, 1, 1), -math.inf)
        return Pass(
            self, "forward", q, k, v, dout, dlse, head, seen, x.scale, x.softcap, slopes, distance,
            bias, sink,
        )  # fmt: skip


class Forward(NamedTuple):
    """The results of a forward, and the sums of |terms| of out and lse.

    ``lse`` is ``pivot + log(total)``, or -inf for a row that has seen nothing.
    """

    out: torch.Tensor
    lse: torch.Tensor
    pivot: torch.Tensor
    total: torch.Tensor
    out_terms: torch.Tensor
    lse_terms: torch.Tensor


def forward_of(case: Case, passes: Mapping[str, Pass]) -> Forward:
    """Return the results of the forward of a computation, given the arguments of ``computed``."""
    return _forward(passes["forward"]) if "forward" in passes else case.forward


def gradients_of(
    case: Case, name: str, changed: Pass | None, read: Forward
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return the gradients of a pass with their sums of |terms|, by name.

    Args:
        case: The problem.
        name: "dq" or "dkdv".
        changed: The pass; None is the correct one.
        read: The forward whose out and lse it reads.
    """
    wanted = ("dq",) if name == "dq" else ("dk", "dv")
    if changed is None and read is case.forward:
        return _of(case.right, *wanted)
    return _backward(changed or case.plain(name), read, wanted)


def computed(case: Case, passes: Mapping[str, Pass], *, reads: bool = True) -> Computed:
    """Return the outputs and sums of |terms| of a computation.

    Args:
        case: The problem.
        passes: The passes that differ from the correct ones, by their names in ``PASSES``.
        reads: Whether the backward reads out and lse of this forward; else it reads correct ones.
    """
    first = forward_of(case, passes)
    read = first if reads else case.forward
    if passes:
        rows, keys = (gradients_of(case, x, passes.get(x), read) for x in ("dq", "dkdv"))
    else:
        rows = _backward(case.plain("dq"), read, ("dq",))
        keys = _backward(case.plain("dkdv"), read, ("dk", "dv"))
    values = Outputs(first.out, first.lse, rows["dq"][0], keys["dk"][0], keys["dv"][0])
    terms = Outputs(first.out_terms, first.lse_terms, rows["dq"][1], keys["dk"][1], keys["dv"][1])
    return Computed(values, terms)


_Pairs = dict[str, tuple[torch.Tensor, torch.Tensor]]


def _of(found: Computed, *names: str) -> _Pairs:
    return {name: (getattr(found.values, name), getattr(found.terms, name)) for name in names}


def _forward(p: Pass) -> Forward:
    s, _ = p.scores()
    if s.shape[3] == 0:
        shape = (*p.q.shape[:3], p.v.shape[3])
        zero, none = s.new_zeros(shape), s.new_full(shape[:3], -math.inf)
        if p.sink is not None:
            none = p.sink.squeeze(3).expand(none.shape)
        ones = torch.ones_like(none)
        return Forward(zero, none, ones.unsqueeze(3), ones.unsqueeze(3), zero, ones)
    m = s.amax(3, keepdim=True).clamp(min=p.start)
    if p.sink is not None:
        m = torch.maximum(m, p.sink)
    live = m > -math.inf
    pivot = torch.where(live | ~torch.as_tensor(p.guarded), m, 0.0)
    e = torch.exp(s - pivot)
    if p.single:
        e = torch.where(e < 2.0**-149, 0.0, e)
    if p.count is not None:
        e = e * p.count
    if p.weight is not None:
        e = p.weight(e)
    of_acc = of_l = e
    if p.rescales != ("acc", "l"):
        of_running = torch.exp(s - torch.where(live, _running(s, p.tile), 0.0))
        of_running = torch.where(s > -math.inf, of_running, 0.0)
        of_acc = e if "acc" in p.rescales else of_running
        of_l = e if "l" in p.rescales else of_running
    total = of_l.sum(3, keepdim=True)
    if p.sink is not None:
        total = total + torch.exp(p.sink - pivot)
    some = (total > 0) | total.isnan()
    safe = torch.where(some, total, 1.0)
    v = p.v[:, p.head]
    out = of_acc @ v / safe * p.factor.get("out", 1.0)
    lse = torch.where(some, pivot + safe.log(), -math.inf).squeeze(3)
    terms = of_acc @ v.abs() / safe, (1 + pivot.abs() + safe.log().abs()).squeeze(3)
    if p.out_of is not None:
        out = p.out_of(out)
    if p.lse_of is not None:
        lse = p.lse_of(lse)
        pivot, safe = lse.unsqueeze(3), torch.ones_like(safe)
    return Forward(out, lse, pivot, safe, *terms)


def _running(s: torch.Tensor, tile: int) -> torch.Tensor:
    """Return the running maximum at the tile of each key, (B, H, M, N)."""
    N = s.shape[3]
    padded = torch.nn.functional.pad(s, (0, -N % tile), value=-math.inf)
    of_tiles = padded.unflatten(3, (-1, tile)).amax(4).cummax(3).values
    return of_tiles.repeat_interleave(tile, 3)[..., :N]


def _backward(p: Pass, read: Forward, wanted: tuple[str, ...]) -> _Pairs:
    """Return the wanted gradients with their sums of |terms|."""
    s, by_dot = p.scores()
    N, scale = p.case.problem.N, p.case.problem.scale
    lse, pivot, total = read.lse, read.pivot, read.total
    if p.lse_factor != 1.0:
        lse = lse * p.lse_factor
        pivot, total = lse.unsqueeze(3), torch.ones_like(total)
    if p.lse_of_padding is not None:
        rows = p.case.lengths()[0].squeeze(3)
        past = torch.arange(s.shape[2], device=s.device) >= rows
        lse = torch.where(past, p.lse_of_padding, lse)
        pivot = torch.where(past.unsqueeze(3), p.lse_of_padding, pivot)
    # A row without a visible key has an lse of -inf and no weights. exp(s - lse) would carry
    # the rounding of a large lse.
    P = torch.where(lse.unsqueeze(3) == -math.inf, 0.0, torch.exp(s - pivot) / total)
    if p.case.problem.dtype != "fp64":
        P = torch.where(P > _LARGEST, math.inf, P)
    if p.count is not None:
        P = P * p.count
    k, v = p.k[:, p.head], p.v[:, p.head]
    dout, of_dP = p.rounded("dp", p.dout, v)
    dP = dout @ of_dP.mT
    dP_terms = dout.abs() @ of_dP.abs().mT
    delta = (read.out * p.dout).sum(3, keepdim=True)
    delta_terms = (read.out.abs() * p.dout.abs()).sum(3, keepdim=True)
    if p.delta.startswith("tile"):
        of_all = P
        if p.delta == "tile unmasked":
            everything = dataclasses.replace(p, seen=torch.ones_like(p.seen))
            of_all = torch.where(lse.unsqueeze(3) == -math.inf, 0.0,
                                 torch.exp(everything.scores()[0] - pivot) / total)  # fmt: skip
        delta = _of_tiles(of_all * dP, p.tile)
        delta_terms = _of_tiles(of_all * dP_terms, p.tile)
    elif p.delta == "none":
        delta = torch.zeros_like(delta)
    dlse = p.dlse.unsqueeze(3) * p.dlse_factor
    dS = P * (dP - delta + dlse) * by_dot
    dS_terms = P * (dP_terms + delta_terms + dlse.abs())
    if p.hides_gradients:
        dS, dS_terms = (torch.where(p.seen, x, 0.0) for x in (dS, dS_terms))
    found = {}
    if "dq" in wanted:
        if "dq" in p.only:
            dS, dS_terms = (torch.where(p.only["dq"], x, 0.0) for x in (dS, dS_terms))
        found["dq"] = dS @ k * scale, dS_terms @ k.abs() * scale
    if "dk" in wanted:
        found["dk"] = dS.mT @ p.q * scale, dS_terms.mT @ p.q.abs() * scale
        found["dv"] = P.mT @ p.dout, P.mT @ p.dout.abs()
    for name, (value, terms) in found.items():
        factor = p.factor.get(name, 1.0)
        pair = value * factor, terms * abs(factor)
        if name != "dq":
            pair = _by_group(pair[0], p)[:, :, :N], _by_group(pair[1], p)[:, :, :N]
        found[name] = pair
    return found


def _of_tiles(x: torch.Tensor, tile: int) -> torch.Tensor:
    """Return the sum over each key's tile, (B, H, M, N)."""
    N = x.shape[3]
    padded = torch.nn.functional.pad(x, (0, -N % tile))
    return padded.unflatten(3, (-1, tile)).sum(4).repeat_interleave(tile, 3)[..., :N]


def _by_group(x: torch.Tensor, p: Pass) -> torch.Tensor:
    """Add up the query heads of each key/value head."""
    B, _, N, D = x.shape
    sums = x.new_zeros((B, p.case.problem.Hk, N, D))
    return sums.index_add_(1, p.head, x)
