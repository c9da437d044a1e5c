"""G6, G7 and G12: what is written, what is read, and how far apart it may lie."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from typing import NamedTuple

import torch

from fa_verify.oracles.outputs import OUTPUTS, Outputs
from fa_verify.oracles.problem import TENSORS
from fa_verify.properties.comparison.agreement import agree, found_where
from fa_verify.properties.comparison.compare import Finding
from fa_verify.properties.execution.guard_bands import GuardBands, Overrun
from fa_verify.properties.execution.trial import Trial, run_subject
from fa_verify.properties.inputs.tensors import make

__all__ = ["far_offsets", "full_overwrite", "reads_in_bounds"]

# Offsets that int32 cannot hold, in elements; and how far apart elements lie, so that the offset of
# a tile that begins before the last row passes it too.
_FAR = 2**31
_REACH = _FAR + _FAR // 8
# What tensors and far rows start at multiples of, in elements, so that they are aligned.
_UNIT = 64
_MAP_NORESERVE = 0x4000  # of Linux; the module names it from Python 3.13 on


def full_overwrite(trial: Trial) -> list[Finding]:
    """G6: every element of every output is written, and nothing outside them.

    The problem runs again with every allocation started as NaN and surrounded by guard bands. What
    a library allocates inside an operator of its own is not seen.
    """
    with GuardBands() as guards:
        again = run_subject(trial.subject, trial.problem, trial.inputs)
    findings: list[Finding] = []
    for name, value, want in zip(OUTPUTS, again, trial.want, strict=True):
        if value is None:
            continue
        unwritten = value.isnan() & ~want.isnan()
        claim = "is not written everywhere: what was allocated as NaN is still there"
        findings += found_where(trial, name, unwritten, value, want, "G6 full overwrite", claim)
    return findings + [_overrun(trial, again, found) for found in guards.overruns()]


def _overrun(trial: Trial, outputs: Outputs[torch.Tensor | None], found: Overrun) -> Finding:
    """A finding on memory that belongs to nobody."""
    storage = found.tensor.untyped_storage().data_ptr()
    names = [
        name
        for name, x in zip(OUTPUTS, outputs, strict=True)
        if x is not None and x.untyped_storage().data_ptr() == storage
    ]
    shape = tuple(found.tensor.shape)
    side = "before its first element" if found.before else "after its last element"
    return Finding(
        guarantee="G6 full overwrite",
        claim="is written outside its elements",
        subject=trial.subject.name,
        output=names[0] if names else f"scratch of shape {shape}",
        where=f"{abs(found.offset)} bytes {side}",
        got=math.nan,
        want=math.nan,
        bound=0.0,
        bad=1,
        total=found.tensor.numel(),
        places=f"shape {shape}, {found.tensor.dtype}",
        problem=trial.problem,
    )


def reads_in_bounds(trial: Trial) -> list[Finding]:
    """G7: nothing outside the tensors' own elements influences a result.

    The problem runs with the same strides, but the largest finite values instead of NaN around and
    between the rows.
    """
    problem = trial.problem
    largest = torch.finfo(trial.inputs.q.dtype).max
    again = run_subject(trial.subject, problem, make(problem, around=largest))
    return agree(
        trial, again, "G7 reads in bounds", "depends on what lies outside its inputs' elements"
    )


def far_offsets(trial: Trial) -> list[Finding]:
    """G12: elements 2**31 and more apart are read where they are.

    Each tensor has one axis, chosen by the seed, along which its elements lie that far apart, in
    memory that no other tensor of the problem uses. An offset that wraps lands in memory that holds
    NaN (on a CPU 0: there the memory is never touched). Rows stay in one piece, which a kernel may
    load as wide as it can, for odd seeds, and for a subject that declares to need that.

    Raises:
        MemoryError: The device has too little memory: 2**32 elements and some are needed, on a CPU
            as address space only.
    """
    problem = trial.problem
    shapes = [tuple(x.shape) for x in trial.inputs.tensors]
    layouts = trial.subject.layouts
    whole = problem.seed % 2 == 1 or (layouts is not None and "strided" not in layouts)
    places, elements = _far_places(shapes, problem.seed // 2, whole_rows=whole)
    arena = _arena(_FAR + elements, problem.device, trial.inputs.q.dtype)
    moved = [
        arena[_FAR + place.start :].as_strided(x.shape, place.strides).copy_(x)
        for x, place in zip(trial.inputs.tensors, places, strict=True)
    ]
    inputs = trial.inputs._replace(**dict(zip(TENSORS, moved, strict=True)))
    again = run_subject(trial.subject, problem, inputs)
    del inputs
    del arena, moved
    if problem.device == "cuda":
        torch.cuda.empty_cache()
    return agree(trial, again, "G12 range", "is wrong where offsets pass 2**31 elements")


class _Place(NamedTuple):
    """Where a tensor lies, in elements."""

    start: int
    strides: tuple[int, ...]


def _far_places(
    shapes: Sequence[tuple[int, ...]], first: int, *, whole_rows: bool
) -> tuple[list[_Place], int]:
    """A place for each tensor, apart from all others, and how many elements they span.

    A tensor that has an axis longer than 1 lies far along one: 2**31 elements or more from its
    first to its last. Counting starts at the axis number ``first``, and passes over the columns
    where rows stay whole and there is another axis. All far strides are multiples of the room that
    the tensors take together without their far axes, and each has a part of that room to itself.
    """
    far, rooms = [], []
    for number, shape in enumerate(shapes):
        axes = [axis for axis in range(len(shape)) if shape[axis] > 1 and 0 not in shape]
        if whole_rows and len(axes) > 1 and axes[-1] == len(shape) - 1:
            axes.pop()
        far.append(axes[(first + number) % len(axes)] if axes else None)
        near = math.prod(max(1, n) for axis, n in enumerate(shape) if axis != far[-1])
        rooms.append(-(-near // _UNIT) * _UNIT)
    places, elements = [], 0
    for number, shape in enumerate(shapes):
        strides, extent = [0] * len(shape), 1
        start = end = sum(rooms[:number])
        for axis in reversed(range(len(shape))):
            if axis == far[number]:
                steps = (shape[axis] - 1) * sum(rooms)
                strides[axis] = -(-_REACH // steps) * sum(rooms)
                end += (shape[axis] - 1) * strides[axis]
            else:
                strides[axis] = extent
                extent *= max(1, shape[axis])
        places.append(_Place(start, tuple(strides)))
        elements = max(elements, end + rooms[number])
    return places, elements


def _arena(elements: int, device: str, dtype: torch.dtype) -> torch.Tensor:
    """Memory that holds nothing yet: NaN on a GPU; on a CPU zeros, and only where it is touched."""
    size = elements * dtype.itemsize
    short = f"offsets past 2**31 need {size / 2**30:.0f} GiB of memory on {device}"
    if device == "cuda":
        free, _ = torch.cuda.mem_get_info()
        if free < size + 2**30:
            raise MemoryError(short)
        return torch.full((elements,), math.nan, dtype=dtype, device=device)
    # Address space without memory behind it, as far as the system lets a process reserve it.
    lazily = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    try:
        return torch.frombuffer(mmap.mmap(-1, size, flags=lazily), dtype=dtype)
    except OSError as error:
        raise MemoryError(f"{short}: {error}") from error
