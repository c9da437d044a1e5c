"""Mutants that only hardware shows, each with the problems that show it.

The interpreter adds in one order, has no alignment and grids without end, and its integers and
memory are those of NumPy: there these mutants give the same results, or cannot run.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from typing import Any

from oracles.problem import Problem
from tests.mutation.faults import FAULTS
from tests.mutation.mutant import Edit, Mutant
from tests.mutation.package import PACKAGE, sources_of
from tests.mutation.trials import Step
from tests.mutation.verdict import asked, judged_kernels

__all__ = ["HARDWARE", "OnHardware"]

_LAUNCH = "fa_kernels/launch.py"
_WIDE: dict[str, Any] = {"D": 64, "Dv": 64, "dtype": "bf16", "device": "cuda"}


@dataclass(frozen=True)
class OnHardware:
    """A mutant and what decides about it."""

    mutant: Mutant
    steps: tuple[Step, ...]


def _step(*checks: str, **fields: Any) -> Step:
    return Step(Problem(**{"device": "cuda", **fields}), ("G1", "G2", *checks))


def _named(*parts: str) -> list[Mutant]:
    """Faults on record whose names end so."""
    return [fault for fault in FAULTS if fault.name.endswith(parts)]


_PLAIN_DELTA = Mutant(
    "delta: rows are summed by tl.sum, in an order that follows the layout of the loads",
    (
        Edit(
            "fa_kernels/kernels/delta.py",
            "delta = _row_sums(out.to(ACC) * dout.to(ACC))",
            "delta = tl.sum(out.to(ACC) * dout.to(ACC), 1)",
        ),
    ),
)
_UNALIGNED = Mutant(
    "launch: tensors that start anywhere are loaded 16 bytes at a time",
    (Edit(_LAUNCH, "        and x.data_ptr() % 16 == 0\n", ""),),
)
_UNPADDED = Mutant(
    "launch: head_dims below 16 are not padded to 16",
    (
        Edit(
            _LAUNCH,
            "return max(16, triton.next_power_of_2(head_dim))",
            "return triton.next_power_of_2(head_dim)",
        ),
    ),
)
_LAYOUTS = ("bhsd", "bhsd", "bhsd", "transposed")

HARDWARE: tuple[OnHardware, ...] = (
    *(
        OnHardware(fault, (_step(M=64, N=64, D=32, Dv=32, dtype="fp32"),))
        for fault in _named("is in TF32")
    ),
    *(
        OnHardware(fault, (_step(B=2, H=32_769, Hk=32_769, M=3, N=5, dtype="fp16"),))
        for fault in _named("axis 1 of the grid")
    ),
    OnHardware(
        _PLAIN_DELTA,
        tuple(_step("G8", M=96, N=64, layouts=_LAYOUTS, seed=seed, **_WIDE) for seed in range(4)),
    ),
    OnHardware(_UNPADDED, (_step(M=20, N=20, D=5, Dv=3, dtype="fp16"),)),
    OnHardware(
        _UNALIGNED,
        (_step("G8", M=96, N=64, layouts=("offset", "offset", "offset", "offset"), **_WIDE),),
    ),
)  # fmt: skip


def main(name: str) -> None:
    """Judges one of the list, in this process, and prints its verdict as JSON."""
    (chosen,) = (x for x in HARDWARE if x.mutant.name == name)
    questions = asked(chosen.steps)
    sources = sources_of(PACKAGE)
    verdict = judged_kernels(sources, chosen.mutant, chosen.steps, questions, unit_tests=False)
    print(json.dumps(asdict(verdict)))


if __name__ == "__main__":
    main(sys.argv[1])
