"""Comparisons in which NaN never passes, and the failure messages that they produce."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from fa_verify.oracles.call import Call
from fa_verify.oracles.problem import Problem
from fa_verify.properties.guarantees.heat_map import HeatMap
from fa_verify.properties.kernels.subject import Subject
from fa_verify.properties.running.ratios import largest_ratios, ratios
from fa_verify.properties.running.replay_line import replay_line
from fa_verify.properties.running.trial import SubjectError

__all__ = ["TILES", "Finding", "Violation", "largest_ratios", "ratios", "same_bits"]

# Kinds of tiles that a kernel treats differently.
TILES = ("padding", "single", "ragged tail", "mask edge", "inner")

_AXES = {
    "out": "bhmd", "lse": "bhm", "dq": "bhmd", "dk": "bhnd", "dv": "bhnd", "dbias": "bhmn",
    # As (1, H, 1): it is a sum over batch entries and rows.
    "dsinks": "bhm",
    # Parts of a merge, and pages of a cache.
    "douts": "pbhmd", "dlses": "pbhm", "k_cache": "pnhd", "v_cache": "pnhd",
    # Scales of a cache of codes.
    "k_scale": "pnh", "v_scale": "pnh",
    # Numbers of places that an element of a query head is read from.
    **dict.fromkeys(("k of a head", "v of a head"), "bhnd"),
    **dict.fromkeys(("k_scale of a head", "v_scale of a head"), "bhnd"),
}  # fmt: skip


def same_bits(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return where a and b are bitwise equal, with +0 equal to -0 and any NaN to any NaN."""
    return (a == b) | (a.isnan() & b.isnan())


@dataclass(frozen=True)
class Finding:
    """A violated guarantee, at its worst element. ``str(finding)`` is the failure message.

    Args:
        guarantee: The guarantee, such as "G1 accuracy".
        claim: Description of the fault, such as "leaves the derived bound".
        subject: Name of the subject.
        output: Name of the output.
        where: The worst element, such as "b=0 h=1 m=33 d=5"; or the judged mean, such as "mean over
            96 rows".
        got: Value of the worst element.
        want: Expected value. It and ``got`` are NaN if the finding is not about a value.
        bound: Largest allowed error; 0 if the value must be exact.
        bad: Number of elements that violate the guarantee; 0 if none does alone.
        total: Number of elements compared.
        places: The tile of the worst element and the indices at which bad elements concentrate.
        problem: The call.
        raised: The exception that the subject raised; empty if it raised none.
        kernel: Value of --fa-kernel, for the replay line.
        mask: Value of --fa-mask, for the replay line.
        call: Name of the subject if ``verify`` was called with it, for the replay line.
        unit: The plural of what ``bad`` and ``total`` count.
        tile: Kind of tile of the worst element, one of ``TILES``; empty if the finding is not
            about an element.
        heat: Heat map of the errors for a report; None if the finding is not about a tensor.
        called: The call that is wrong, where it is another one than ``problem``.
    """

    guarantee: str
    claim: str
    subject: str
    output: str
    where: str
    got: float
    want: float
    bound: float
    bad: int
    total: int
    places: str
    problem: Call
    raised: str = ""
    kernel: str = ""
    mask: str = ""
    call: str = ""
    unit: str = "elements"
    tile: str = ""
    heat: HeatMap | None = field(default=None, compare=False, repr=False)
    called: Call | None = None

    def __post_init__(self) -> None:
        # Plain text, which workers can send.
        object.__setattr__(self, "guarantee", str(self.guarantee))

    @property
    def replay(self) -> str:
        """The command, or the call of ``verify``, that checks every guarantee on the problem."""
        if self.call:
            read = "Problem.from_json" if isinstance(self.problem, Problem) else "call_from_json"
            problem = f"{read}({self.problem.to_json()!r})"
            return f"verify({self.call}, problems=[{problem}])"
        return replay_line(self.problem.to_json(), self.kernel, self.mask)

    def __str__(self) -> str:
        return f"{self.told}\n  replay: {self.replay}"

    @property
    def told(self) -> str:
        """The failure message without its replay line."""
        of = f"{self.output} of " if self.output else ""
        lines = [f"{self.guarantee}: {of}{self.subject} {self.claim}"]
        if self.raised:
            lines += self.raised.split("\n")
        elif math.isnan(self.got) and math.isnan(self.want):
            lines.append(f"{self.where}; {self.places}")
        else:
            lines += [self._values(), self._count()]
        return "\n  ".join(lines)

    def _values(self) -> str:
        """Format the value, the expected value and the allowed error."""
        error = abs(self.got - self.want)
        allowed = "must be exact"
        if self.bound:
            ratio = math.inf if math.isnan(error) else error / self.bound
            allowed = f"bound {self.bound:.4g}, ratio {ratio:.4g}"
        place = f"worst at {self.where}" if "=" in self.where else self.where
        return f"{place}: got {self.got!r}, want {self.want!r}, error {error:.4g}, {allowed}"

    def _count(self) -> str:
        """Format the number of bad elements and where they lie."""
        if not self.bad:
            return self.places
        percent = 100 * self.bad / self.total
        share = f"{percent:.0f}" if percent >= 10 else f"{percent:.2g}"
        are = "is" if self.bad == 1 else "are"
        return f"{self.bad:,} of {self.total:,} {self.unit} {are} bad ({share} %); {self.places}"

    @classmethod
    def of_exception(cls, error: SubjectError, subject: Subject, problem: Call) -> Finding:
        """Return a finding for a fault that shows before outputs are compared."""
        return cls(
            guarantee=error.guarantee,
            claim=error.claim,
            subject=subject.name,
            output="",
            where="",
            got=math.nan,
            want=math.nan,
            bound=0.0,
            bad=0,
            total=1,
            places="",
            problem=problem,
            raised=str(error),
        )

    @classmethod
    def at(
        cls,
        bad: torch.Tensor,
        badness: torch.Tensor,
        *,
        guarantee: str,
        claim: str,
        subject: Subject,
        problem: Call,
        output: str,
        got: torch.Tensor,
        want: torch.Tensor,
        bound: torch.Tensor | None = None,
        compared: torch.Tensor | None = None,
    ) -> Finding:
        """Return a finding at the worst bad element, with a description of where bad ones lie.

        Args:
            bad: Bool, of the output's shape, True where the guarantee is violated; not all False.
            badness: Severity, same shape; the worst element is the bad one with the largest value.
            guarantee: See ``Finding``.
            claim: See ``Finding``.
            subject: The subject.
            problem: The problem.
            output: Name of the output.
            got: Values of the subject, same shape.
            want: Expected values, same shape.
            bound: Largest allowed error, same shape; None is 0.
            compared: Bool, elements that were compared; None is all.
        """
        flat = torch.where(bad, badness.to(torch.float64), -torch.inf).flatten()
        index = tuple(int(i) for i in torch.unravel_index(flat.argmax(), bad.shape))
        names = _AXES[output]
        # Merges and the pages of a cache have no tiles.
        tile = None
        if problem.attention is not None and names.startswith("bh"):
            tile = _TileOfElement.of(index, subject, problem.attention, output)
        return cls(
            guarantee=guarantee,
            claim=claim,
            subject=subject.name,
            output=output,
            where=" ".join(f"{name}={i}" for name, i in zip(names, index, strict=True)),
            got=float(got[index]),
            want=float(want[index]),
            bound=0.0 if bound is None else float(bound[index]),
            bad=int(bad.sum()),
            total=bad.numel() if compared is None else int(compared.expand_as(bad).sum()),
            places=_places(bad, tile, output),
            problem=problem,
            tile="" if tile is None else tile.kind,
            heat=None
            if tile is None
            else HeatMap.of(badness, index, tile.axis, tile.width, is_ratio=bound is not None),
        )


class Violation(AssertionError):  # noqa: N818  # a failed check, not an error of the program
    """Raised with the findings of one check.

    Args:
        findings: The findings, at least one.
        claim: The check, a function from a trial to its findings; None if no trial shows them.
        again: Draws the same problems again, for another runner; None if none were drawn.

    Attributes:
        causes: The numbers of the causes that explain the findings.
        beyond: Number of problems that were judged beyond these causes.
        searched: Seconds that the search for the causes took.
    """

    def __init__(
        self,
        findings: list[Finding],
        claim: Callable[[Any], list[Finding]] | None = None,
        again: Callable[[Any], None] | None = None,
    ) -> None:
        super().__init__("\n" + "\n".join(str(finding) for finding in findings))
        self.findings = findings
        self.claim = claim
        self.again = again
        self.causes: list[int] = []
        self.beyond = 0
        self.searched = 0.0


@dataclass(frozen=True)
class _TileOfElement:
    """A tile of rows (axis "m") or keys ("n"), its index, and its special properties."""

    axis: str
    width: int
    number: int
    count: int
    ragged: bool
    crossed: bool
    padding: bool
    single: bool

    @classmethod
    def of(
        cls, index: tuple[int, ...], subject: Subject, problem: Problem, output: str
    ) -> _TileOfElement:
        """Return the tile that contains an element."""
        axis = _AXES[output][2]
        block_m, block_n = subject.tile_of(problem)
        width, length = (block_m, problem.M) if axis == "m" else (block_n, problem.N)
        number, count = index[2] // width, -(-length // width)
        rows, keys = problem.mask.lengths(problem.B, problem.M, problem.N)
        start, stop = number * width, min((number + 1) * width, length)
        return cls(
            axis=axis,
            width=width,
            number=number,
            count=count,
            ragged=number == count - 1 and length % width > 0,
            crossed=_crosses_edge(problem, index[0], axis, start, stop),
            padding=index[2] >= (rows if axis == "m" else keys)[min(index[0], problem.B - 1)],
            single=problem.M <= block_m and problem.N <= block_n,
        )

    @property
    def kind(self) -> str:
        """The first of ``TILES`` that applies."""
        special = (self.padding, self.single, self.ragged, self.crossed, True)
        return TILES[special.index(True)]


def _places(bad: torch.Tensor, tile: _TileOfElement | None, output: str) -> str:
    """Describe the tile of the worst element and the indices at which bad elements concentrate."""
    spread = [_concentration(bad, position, name) for position, name in enumerate(_AXES[output])]
    narrow = ", ".join(text for text in spread if text)
    where = f"bad only at {narrow}" if narrow else "bad along all axes"
    if tile is None:
        return where
    kind = [f"{tile.axis} tile {tile.number} of {tile.count} (width {tile.width})"]
    if tile.ragged:
        kind.append("the ragged tail")
    if tile.crossed:
        kind.append("crossed by the mask's edge")
    return f"{', '.join(kind)}; {where}"


def _crosses_edge(problem: Problem, b: int, axis: str, start: int, stop: int) -> bool:
    """Return whether some but not all pairs of the rows (keys) [start, stop) are visible."""
    seen = problem.mask.dense(problem.B, problem.H, problem.M, problem.N)
    seen = seen[min(b, seen.shape[0] - 1), 0]
    part = seen[start:stop] if axis == "m" else seen[:, start:stop]
    return bool(part.any()) and not bool(part.all())


def _concentration(bad: torch.Tensor, position: int, name: str) -> str:
    """Format the indices with bad elements along an axis; empty if they are over half of it."""
    others = [axis for axis in range(bad.ndim) if axis != position]
    hit = bad.sum(others).nonzero().flatten().tolist()
    size = bad.shape[position]
    if size == 1 or 2 * len(hit) > size:
        return ""
    if hit[-1] - hit[0] + 1 == len(hit) and len(hit) > 1:
        return f"{name}={hit[0]}..{hit[-1]}"
    shown = ",".join(map(str, hit[:8])) + (",..." if len(hit) > 8 else "")
    return f"{name}={shown}"
