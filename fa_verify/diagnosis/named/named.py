"""A named fault, and its variants by pass, form and size of tiles."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from fa_verify.diagnosis.named.passes import PASSES, Case, Computed, Pass, computed
from fa_verify.oracles.outputs import OUTPUTS, Outputs

__all__ = [
    "BACKWARD",
    "FORWARD",
    "After",
    "Change",
    "InapplicableError",
    "Made",
    "Named",
    "Variant",
    "untiled",
]

# A change of a pass, given rows and keys of a tile; False if it changes nothing on this problem.
Change = Callable[[Pass, int, int], bool | None]
# A pass with a change, and whether it changed; None if the change has no meaning for a problem.
Made = tuple[Pass, bool] | None
# A change of the outputs, given rows and keys of a tile.
After = Callable[[Case, Outputs[torch.Tensor], int, int], Outputs[torch.Tensor] | None]

PLACES = {
    "everywhere": (PASSES, True),
    "forward": (("forward",), True),
    "the forward alone": (("forward",), False),
    "backward": (("dq", "dkdv"), True),
    "dq": (("dq",), True),
    "dk and dv": (("dkdv",), True),
}
_ANY = tuple(PLACES)
_OF_PASS = {"dq": ("dq",), "dkdv": ("dk", "dv")}
FORWARD = ("forward", "the forward alone")
BACKWARD = ("backward", "dq", "dk and dv")


@dataclass(frozen=True)
class Named:
    """A fault with a name.

    Args:
        name: The name, which JSON and tables hold.
        says: The end of "behaves as if".
        changes: The forms in which kernels have it.
        places: The passes in which it may stand, keys of ``PLACES``.
        tiles: The axes, out of "mn", whose tile width the result depends on.
        on_record: Projects that shipped the fault, with issues or commits; may be empty.
        after: The change is one of outputs.
    """

    name: str
    says: str
    changes: tuple[Change, ...] = ()
    places: tuple[str, ...] = _ANY
    tiles: str = ""
    on_record: str = ""
    after: After | None = None

    def axes(self, form: int) -> str:
        """Return the axes whose tile width a form depends on."""
        return "" if self.changes and self.changes[form] in _UNTILED else self.tiles


def untiled(change: Change) -> Change:
    """Return a change that depends on no tile, of a fault that has other forms."""

    def same(p: Pass, block_m: int, block_n: int) -> bool | None:
        return change(p, block_m, block_n)

    _UNTILED.add(same)
    return same


_UNTILED: set[Change] = set()


@dataclass(frozen=True)
class Variant:
    """A named fault in one form, at one place and for one size of tiles.

    Args:
        named: The fault.
        place: The pass that has it; empty for a change of outputs.
        form: Index of the change.
        block_m: Rows of a tile.
        block_n: Keys of a tile.
    """

    named: Named
    place: str
    form: int
    block_m: int
    block_n: int

    def __call__(self, case: Case) -> Computed | None:
        """Return what a kernel with the fault computes; None if the fault changes nothing."""
        named = self.named
        if named.after is not None:
            values = named.after(case, case.right.values, self.block_m, self.block_n)
            return None if values is None else Computed(values, case.right.terms)
        passes = self.passes(case, {})
        return None if passes is None else computed(case, passes, reads=self.reads)

    @property
    def reads(self) -> bool:
        """Whether the backward reads the results of the faulty forward."""
        return PLACES[self.place][1]

    @property
    def reaches(self) -> frozenset[str]:
        """The outputs that the passes with the fault compute or read."""
        names, reads = PLACES[self.place]
        if "forward" in names:
            return frozenset(OUTPUTS if reads else ("out", "lse"))
        return frozenset(x for name in names for x in _OF_PASS[name])

    def passes(self, case: Case, made: dict[str, Made]) -> dict[str, Pass] | None:
        """Return the passes with the fault, by name; None if the fault changes nothing.

        Args:
            case: The problem.
            made: Passes that a variant with another place has made, to which this one adds.
        """
        if 0 in (case.problem.B, case.problem.M, case.problem.N):
            return None
        passes, changed = {}, False
        for name in PLACES[self.place][0]:
            if name not in made:
                made[name] = self._made(case, name)
            one = made[name]
            if one is None:
                return None
            passes[name] = one[0]
            changed |= one[1]
        return passes if changed else None

    def _made(self, case: Case, name: str) -> Made:
        one = case.plain(name)
        try:
            changed = self.named.changes[self.form](one, self.block_m, self.block_n)
        except InapplicableError:
            return None
        return one, changed is not False

    @property
    def tile(self) -> str:
        """The size of tiles that the result depends on, such as "tiles of 64 keys", or ""."""
        sizes = {"m": f"{self.block_m} rows", "n": f"{self.block_n} keys"}
        of = [sizes[axis] for axis in self.named.axes(self.form)]
        return f"tiles of {' and '.join(of)}" if of else ""


class InapplicableError(Exception):
    """The fault has no meaning for a problem."""
