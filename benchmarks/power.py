"""The detection limits of the checks: ``python -m benchmarks.power [--quick | --write]``.

``--lengths`` and ``--families`` measure a part: long problems on a GPU take minutes a family.

A correct kernel, ``benchmarks.emulated``, computes the outputs of a problem. A fault multiplies
part of an output by 1 + r before its last rounding. Each check is asked about the changed outputs.
The limit is the smallest r of a grid that the check finds in 99 % of the seeds. A problem has one
head. A check that finds anything in the unchanged outputs raises a false alarm: the command prints
its replay line and returns 1.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks import emulated
from benchmarks.findings.environment import device_name, versions
from benchmarks.saving import saved
from fa_verify.oracles.outputs import Outputs
from fa_verify.oracles.problem import Problem
from fa_verify.properties.guarantees import backward, limits
from fa_verify.properties.guarantees.claims import Check, accuracy, checks_of
from fa_verify.properties.guarantees.compare import Finding
from fa_verify.properties.kernels.subject import Subject
from fa_verify.properties.running.atomic_write import write_atomically
from fa_verify.properties.running.trial import AttentionTrial, run_trial

__all__ = [
    "CHECKS",
    "DTYPES",
    "FAMILIES",
    "FAULTS",
    "GRID",
    "Case",
    "Limits",
    "cases",
    "changed",
    "main",
    "measured",
    "subject_of",
]

ROOT = Path(__file__).parents[1]
# Relative sizes of faults: four to a power of ten.
GRID = tuple(10 ** (step / 4) for step in range(-28, 5))
HEAD_DIM = 64
TILE = 64  # rows of a tile
OUTPUTS = ("out", "dq", "dk", "dv")
# The outputs that faults change at a time. The backward reads out: a check of gradients given the
# forward needs a right one.
_GRADIENTS = OUTPUTS[1:]
_TOGETHER = {"backward": (_GRADIENTS,), "limit": (("out",), _GRADIENTS)}
CHECKS: Mapping[str, Check] = {
    "bound": accuracy, "backward": backward.backward, "limit": limits.limits,
    **checks_of("statistics"),
}  # fmt: skip
# Input family and sm_scale.
FAMILIES: Mapping[str, tuple[str, float | None]] = {
    "normal": ("normal", None),
    "peaked": ("normal", 1.0),
    "rising_max": ("rising_max", None),
    "needle": ("needle_visible", None),
    "lse_high": ("lse_high_6e4", None),
}
DTYPES = ("bf16", "fp16", "fp32", "tf32")
LENGTHS = {"cpu": (128, 1024, 4096), "cuda": (128, 1024, 4096, 16_384, 65_536)}
SEEDS = {"cpu": 5, "cuda": 100}
# Rows of a problem, or N where that is less: the oracle's float64 matrices have rows x N elements.
ROWS = 256


class Case(NamedTuple):
    """The problems that differ in their seeds only."""

    family: str
    dtype: str
    N: int

    def problem(self, seed: int, device: str, rows: int = ROWS) -> Problem:
        """Returns the problem of a seed."""
        inputs, sm_scale = FAMILIES[self.family]
        tf32 = self.dtype == "tf32"
        return Problem(
            M=min(self.N, rows), N=self.N, D=HEAD_DIM, Dv=HEAD_DIM, sm_scale=sm_scale,
            dtype="fp32" if tf32 else self.dtype, inputs=inputs, seed=seed, device=device,
        )  # fmt: skip


def _everything(x: torch.Tensor) -> torch.Tensor:
    return torch.ones_like(x, dtype=torch.bool)


def _rows(count: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Chooses from consecutive groups of ``count`` rows the one whose RMS is nearest to all's."""

    def group(x: torch.Tensor) -> torch.Tensor:
        squares = x.double().square().mean(3).flatten()
        sizes = torch.stack([part.mean() for part in squares.split(count)]).sqrt()
        chosen = _nearest(sizes, x)
        place = torch.arange(x.shape[2], device=x.device).view(-1, 1)
        return (place // count == chosen).expand_as(x)

    return group


def _element(x: torch.Tensor) -> torch.Tensor:
    """Chooses the element whose absolute value is nearest to the RMS of all."""
    chosen = _nearest(x.double().abs().flatten(), x)
    return (torch.arange(x.numel(), device=x.device) == chosen).view(x.shape)


def _nearest(sizes: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return (sizes - x.double().square().mean().sqrt()).abs().argmin()


# The part of an output of one head that a fault changes. Rows of dk and dv are keys.
FAULTS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "everything": _everything,
    "one tile": _rows(TILE),
    "one row": _rows(1),
    "one element": _element,
}


def changed(trial: AttentionTrial, fault: str, sizes: Mapping[str, float]) -> AttentionTrial:
    """Returns the trial with a fault in its outputs, before their last rounding.

    Args:
        trial: The run of a correct kernel.
        fault: One of ``FAULTS``.
        sizes: Relative size of the fault by the name of an output.
    """
    got = trial.got._asdict()
    for name, size in sizes.items():
        x = got[name]
        faulty = emulated.UNROUNDED[name].detach().double() * (1 + size)
        got[name] = torch.where(FAULTS[fault](x), faulty.to(x.dtype), x)
    found = dataclasses.replace(trial, got=Outputs(**got))
    if "variances" in vars(trial):  # computed once: they do not depend on the outputs
        vars(found)["variances"] = trial.variances
    return found


# The last trial, and results that do not depend on a fault of gradients.
_LAST: dict[str, Any] = {}


def _computed(function: Callable[[AttentionTrial], Any], trial: AttentionTrial) -> Any:
    """Returns ``function(trial)``, computed once for each trial."""
    if _LAST.get("trial") is not trial:
        _LAST.clear()
        _LAST["trial"] = trial
    name = function.__qualname__
    if name not in _LAST:
        _LAST[name] = function(trial)
    return _LAST[name]


class Limits:
    """The limits of one check and fault over the seeds of a case, by output.

    Args:
        seeds: The number of seeds, of which one in a hundred may miss the fault.
        outputs: The outputs that are changed at a time.
    """

    def __init__(self, check: str, fault: str, seeds: int, outputs: Sequence[str]) -> None:
        self.check, self.fault = check, fault
        self.kept = 1 + seeds // 100
        # The largest places in the grid that seeds needed, in falling order.
        self.largest: dict[str, list[int]] = {name: [] for name in outputs}

    def add(self, trial: AttentionTrial) -> None:
        """Asks the check about the faults of a trial, for all outputs at a time."""
        least = dict.fromkeys(self.largest, 0)
        most = dict.fromkeys(self.largest, len(GRID))
        # A seed that needs no more than the smallest kept place does not change the limit.
        full = {name: x[-1] for name, x in self.largest.items() if len(x) == self.kept}
        asked = {name: place for name, place in full.items() if place < len(GRID)}
        for name in full.keys() - asked:
            least[name] = len(GRID)
        while True:
            found = self._found(trial, asked)
            for name, place in asked.items():
                if name not in found:
                    least[name] = place + 1
                else:
                    most[name] = place
                    if full.get(name) == place:
                        least[name] = place
            open_ = [name for name in least if least[name] < most[name]]
            if not open_:
                break
            asked = {name: (least[name] + most[name]) // 2 for name in open_}
        for name, places in self.largest.items():
            places.append(most[name])
            places.sort(reverse=True)
            del places[self.kept :]

    def _found(self, trial: AttentionTrial, places: Mapping[str, int]) -> set[str]:
        sizes = {name: GRID[place] for name, place in places.items()}
        if not sizes:
            return set()
        faulty = changed(trial, self.fault, sizes)
        # Computed once for a trial: a fault of gradients does not change them.
        if self.check == "limit":
            spreads = _computed(limits.spreads_of, trial)
            of_changed = {name: x for name, x in spreads.items() if name in sizes}
            return {x.output for x in limits.outside(faulty, of_changed)}
        if self.check == "backward":
            gradients = _computed(backward.gradients_of, trial)
            return {x.output for x in backward.outside(faulty, gradients)}
        return {x.output for x in CHECKS[self.check](faulty)}

    def found(self) -> dict[str, float]:
        """The limit by output, without outputs whose largest faults are missed."""
        return {
            name: float(f"{GRID[places[-1]]:.3g}")
            for name, places in self.largest.items()
            if places and places[-1] < len(GRID)
        }


def subject_of(case: Case) -> Subject:
    """Returns the correct kernel."""
    name = "attention_tf32" if case.dtype == "tf32" else "attention"
    call = getattr(emulated, name)
    return dataclasses.replace(
        Subject.of(call, "emulated"), source=f"benchmarks/emulated.py:{name}"
    )


def measured(
    case: Case, seeds: int, device: str = "cpu", rows: int = ROWS, faults: Iterable[str] = FAULTS
) -> tuple[dict[str, Any] | None, list[Finding]]:
    """Returns the limits by fault, output and check, and the false alarms.

    The limits are None where the problems are out of range.
    """
    subject = subject_of(case)
    limits = [
        Limits(check, fault, seeds, outputs)
        for check in CHECKS
        for outputs in _TOGETHER.get(check, (OUTPUTS,))
        for fault in faults
    ]
    alarms: list[Finding] = []
    for seed in range(seeds):
        trial = run_trial(subject, case.problem(seed, device, rows))
        if trial is None:
            return None, alarms
        false = [x for check in CHECKS.values() for x in check(trial)]
        if false:
            alarms += [dataclasses.replace(x, kernel=subject.source) for x in false]
            continue
        for of in limits:
            of.add(trial)
    table: dict[str, Any] = {fault: {name: {} for name in OUTPUTS} for fault in faults}
    for of in limits:
        for name, size in of.found().items():
            table[of.fault][name][of.check] = size
    return table, alarms


def cases(lengths: Sequence[int], families: Iterable[str]) -> Iterator[Case]:
    """Yields every case, the shortest first."""
    for N in lengths:
        for family in families:
            for dtype in DTYPES:
                yield Case(family, dtype, N)


def _each(one: Callable[[Case], Any], asked: Sequence[Case], workers: int) -> Iterator[Any]:
    """Yields the result of each case, in order."""
    if workers == 1:
        yield from map(one, asked)
        return
    with ProcessPoolExecutor(
        workers,
        mp_context=multiprocessing.get_context("spawn"),  # CUDA does not survive a fork
        initializer=torch.set_num_threads,
        initargs=(1,),
    ) as pool:
        yield from pool.map(one, asked)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 1 after a false alarm."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.power")
    parser.add_argument("--quick", action="store_true", help="N = 128 and 1,024; N(0,1)")
    parser.add_argument("--lengths", type=int, nargs="+", help="N (default: all)")
    parser.add_argument("--families", nargs="+", choices=FAMILIES, help="default: all")
    parser.add_argument("--seeds", type=int, help="seeds of a case (default: 5, on a GPU 100)")
    parser.add_argument("--rows", type=int, default=ROWS, help="most rows (default: %(default)s)")
    parser.add_argument("--write", action="store_true", help="write to results/ instead of build/")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="add to the cases that this file holds"
    )
    parser.add_argument("--workers", type=int, help="processes (default: all CPUs, at most 8)")
    options = parser.parse_args(arguments)
    fewer = [name for name in ("quick", "lengths", "families") if getattr(options, name)]
    if fewer and options.write:
        parser.error(f"--write needs every length and family; --{fewer[0]} leaves some out")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    seeds = options.seeds or SEEDS[device]
    workers = options.workers or min(8, os.cpu_count() or 1)
    lengths = tuple(options.lengths or LENGTHS[device][: 2 if options.quick else None])
    families = tuple(options.families or (*FAMILIES,)[: 1 if options.quick else None])
    started = time.perf_counter()
    limits: dict[str, Any] = {}
    alarms: list[Finding] = []
    asked = tuple(cases(lengths, families))
    one = functools.partial(measured, seeds=seeds, device=device, rows=options.rows)
    for case, (table, false) in zip(asked, _each(one, asked, workers), strict=True):
        alarms += false
        limits.setdefault(case.family, {}).setdefault(case.dtype, {})[str(case.N)] = table
        print(_line(case, table), flush=True)
    for alarm in alarms:
        print(f"false alarm: {alarm}")
    alarmed = {alarm.problem for alarm in alarms}
    ran = sum(x is not None for of in limits.values() for y in of.values() for x in y.values())
    record = {
        "device": device_name(), "versions": versions(),
        "subject": "benchmarks.emulated",
        "seeds": seeds, "rows": options.rows, "head_dim": HEAD_DIM,
        "problems": ran * seeds, "false_alarms": len(alarmed),
        "limits": limits,
    }  # fmt: skip
    if options.out is None:
        path = saved(ROOT, "power.json", record, device=device, keep=options.write)
    else:
        path = _added(options.out, record)
    print(
        f"{ran * seeds} problems, {len(alarmed)} with a false alarm, "
        f"{time.perf_counter() - started:.0f} s; wrote {path}"
    )
    return int(bool(alarms))


def _added(path: Path, record: dict[str, Any]) -> Path:
    """Adds the cases of a record to a file of the same conditions.

    Raises:
        ValueError: The file was measured under other conditions.
    """
    if path.exists():
        before = json.loads(path.read_text(encoding="utf-8"))
        for name in ("device", "versions", "subject", "seeds", "rows", "head_dim"):
            if before[name] != record[name]:
                raise ValueError(
                    f"{path} has {name}={before[name]!r}, and this run {record[name]!r}; needs "
                    "another file"
                )
        for name in ("problems", "false_alarms"):
            record[name] += before[name]
        limits = before["limits"]
        for family, of_dtypes in record["limits"].items():
            for dtype, of_lengths in of_dtypes.items():
                limits.setdefault(family, {}).setdefault(dtype, {}).update(of_lengths)
        record["limits"] = limits
    write_atomically(path, json.dumps(record, indent=1) + "\n")
    return path


def _line(case: Case, table: Mapping[str, Any] | None) -> str:
    """Formats the limits of dq: the bound's, then the least of all checks."""
    if table is None:
        return f"{case.family} {case.dtype} N={case.N}: out of range"
    cells = []
    for fault, of in table.items():
        found = of["dq"]
        bound, best = found.get("bound", math.inf), min(found.values(), default=math.inf)
        cells.append(f"{fault} {bound:.2g} {best:.2g}")
    return f"{case.family} {case.dtype} N={case.N}, dq (bound, best): {'; '.join(cells)}"


if __name__ == "__main__":
    sys.exit(main())
