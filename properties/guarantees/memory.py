"""G6, G7 and G12: writes, sets of gradients, reads, and offsets of more than 2**31 elements."""

from __future__ import annotations

import dataclasses
import itertools
import math
import mmap
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from fa_verify.oracles.guarantee import G6, G7, G10, G12
from fa_verify.oracles.outputs import OUTPUTS, Outputs
from fa_verify.oracles.problem import TENSORS
from fa_verify.properties.guarantees.agreement import agree, found_where
from fa_verify.properties.guarantees.compare import Finding, same_bits
from fa_verify.properties.inputs.tensors import make
from fa_verify.properties.kernels.refusals import ExcludedCallError
from fa_verify.properties.running.guard_bands import OTHER_FILL, GuardBands, Overrun, fill_of
from fa_verify.properties.running.large_memory import large_memory, spare_memory
from fa_verify.properties.running.trial import (
    AttentionTrial,
    SubjectError,
    run_gradients,
    run_subject,
)

__all__ = [
    "FAR",
    "arena_of",
    "far_offsets",
    "full_overwrite",
    "gradient_sets",
    "reads_in_bounds",
    "reasons_of_nan",
]

# The smallest offset in elements that int32 cannot hold, and the distance from a tensor's first to
# its last element. The distance is larger, so that the offset of a tile that begins before the last
# row exceeds int32 too.
FAR = 2**31
_REACH = FAR + FAR // 8
# The most that the rooms of all tensors, once for each step along a distant axis, may take beyond
# that distance. A sequence of 20,000 keys would otherwise need three times the memory.
_MOST_BEYOND = _REACH // 8
# Alignment of tensors and distant rows, in elements.
_UNIT = 64
_MAP_NORESERVE = 0x4000  # Linux; mmap.MAP_NORESERVE exists from Python 3.13 on


def full_overwrite(trial: AttentionTrial) -> list[Finding]:
    """G6: every element of every output is written, and nothing outside of the outputs.

    Runs the problem again with every allocation filled with NaN, or with a plausible number for odd
    seeds, and surrounded by guard bands. Where NaN gives NaN, a run with another value in the
    allocations says why. Does not cover allocations inside a library's own operators.
    """
    fill = fill_of(trial.problem.seed)
    if not math.isnan(fill):
        with GuardBands(fill=fill) as guards:
            again = run_subject(trial.subject, trial.problem, trial.inputs)
        claim = f"is another one if allocations hold {fill} than if they hold NaN"
        return [
            *agree(
                trial,
                again,
                G6,
                claim,
                promised=trial.subject.promises(G10.key, trial.problem.config),
            ),
            *(_overrun(trial, again, found) for found in guards.overruns()),
        ]
    with GuardBands() as guards:
        again = run_subject(trial.subject, trial.problem, trial.inputs)
    nans = {
        name: value.isnan() & ~want.isnan()
        for name, value, want in zip(OUTPUTS, again, trial.want, strict=True)
        if value is not None
    }
    findings: list[Finding] = []
    if any(bool(x.any()) for x in nans.values()):
        with GuardBands(fill=OTHER_FILL):
            other = run_subject(trial.subject, trial.problem, trial.inputs)
        for name, nan in nans.items():
            value, want = getattr(again, name), getattr(trial.want, name)
            for bad, claim in reasons_of_nan(nan, getattr(other, name)):
                findings += found_where(trial, name, bad, value, want, G6, claim)
    return findings + [_overrun(trial, again, found) for found in guards.overruns()]


def reasons_of_nan(nan: torch.Tensor, other: torch.Tensor) -> Iterator[tuple[torch.Tensor, str]]:
    """Yield why elements of a result are NaN if allocations hold NaN, as masks and claims.

    Args:
        nan: Bool, the elements.
        other: The same result, with ``OTHER_FILL`` in the allocations.
    """
    unwritten, written = nan & (other == OTHER_FILL), nan & other.isnan()
    yield unwritten, "is not written everywhere: elements still hold the NaN of their allocation"
    yield written, "is NaN, which the kernel writes: other values in its allocations change nothing"
    yield (
        nan & ~unwritten & ~written,
        "is computed from memory that is not written: it is NaN if allocations hold NaN, and "
        "another value if they do not",
    )


def gradient_sets(trial: AttentionTrial) -> list[Finding]:
    """G6: any set of the gradients is what all of them together are, and is written in bounds.

    The gradients of a bias and of sinks are among them. Gradients that are promised in every run
    are compared to the bit.
    """
    problem, inputs, subject = trial.problem, trial.inputs, trial.subject
    if not subject.backward:
        return []
    others = [f"d{name}" for name in ("bias", "sinks") if getattr(inputs, name) is not None]
    names = ["dq", "dk", "dv", *others]
    promised = bool(subject.promises(G10, problem.config))
    together = run_gradients(subject, problem, inputs, names)
    sets = [x for size in range(1, len(names)) for x in itertools.combinations(names, size)]
    for wanted in sets:
        with GuardBands() as guards:
            found = run_gradients(subject, problem, inputs, wanted)
        got = Outputs(None, None, *(found.get(name) for name in names[:3]))
        claim = f"differs between a backward of {', '.join(wanted)} alone and one of all gradients"
        findings = agree(trial, got, G10, claim)
        for name in set(others) & {*wanted} if promised else ():
            one, all_of_them = found[name], together[name]
            if name == "dsinks":
                one, all_of_them = (x.view(1, -1, 1) for x in (one, all_of_them))
            bad = ~same_bits(one, all_of_them)
            findings += found_where(trial, name, bad, one, all_of_them, G10, claim)
        findings += [_overrun(trial, got, run) for run in guards.overruns()]
        if findings:
            return [dataclasses.replace(x, guarantee=G6) for x in findings]
    return []


def _overrun(
    trial: AttentionTrial, outputs: Outputs[torch.Tensor | None], found: Overrun
) -> Finding:
    """Return a finding for a write to a guard band."""
    storage = found.tensor.untyped_storage().data_ptr()
    names = [
        name
        for name, x in zip(OUTPUTS, outputs, strict=True)
        if x is not None and x.untyped_storage().data_ptr() == storage
    ]
    shape = tuple(found.tensor.shape)
    return Finding(
        guarantee=G6,
        claim="is written outside its elements",
        subject=trial.subject.name,
        output=names[0] if names else f"scratch of shape {shape}",
        where=found.place,
        got=math.nan,
        want=math.nan,
        bound=0.0,
        bad=1,
        total=found.tensor.numel(),
        places=f"shape {shape}, {found.tensor.dtype}",
        problem=trial.problem,
    )


def reads_in_bounds(trial: AttentionTrial) -> list[Finding]:
    """G7: memory outside of the tensors' elements does not affect the results.

    Runs the problem again with the same strides, but with the largest finite values instead of NaN
    around and between the rows.
    """
    problem = trial.problem
    largest = torch.finfo(trial.inputs.q.dtype).max
    again = run_subject(trial.subject, problem, make(problem, around=largest))
    return agree(trial, again, G7, "depends on memory outside of its inputs' elements")


def far_offsets(trial: AttentionTrial) -> list[Finding]:
    """G12: elements that lie 2**31 elements or more apart are addressed correctly.

    Each tensor has one axis, chosen by the seed, along which its elements lie that far apart, in
    memory that no other tensor of the problem uses. An offset that wraps around reads NaN (on a
    CPU 0, since that memory is never touched). Rows stay contiguous, so that a kernel may use wide
    loads, for odd seeds and for subjects that do not declare the layout "strided".

    Raises:
        ExcludedCallError: The subject declares layouts without gaps.
        MemoryError: The device has too little memory. The check needs somewhat more than 2**32
            elements; on a CPU this is address space only.
    """
    problem = trial.problem
    shapes = [tuple(x.shape) for x in trial.inputs.tensors]
    layouts = trial.subject.layouts
    if layouts is not None and not {"padded", "strided"} & {*layouts}:
        raise ExcludedCallError(
            f"{trial.subject.name} declares layouts={layouts}, which have no gaps"
        )
    whole = problem.seed % 2 == 1 or (layouts is not None and "strided" not in layouts)
    places, elements = _far_places(shapes, problem.seed // 2, whole_rows=whole)
    elements, dtype = FAR + elements, trial.inputs.q.dtype
    arena = arena_of(elements, problem.device, dtype)
    moved = [
        arena[FAR + place.start :].as_strided(x.shape, place.strides).copy_(x)
        for x, place in zip(trial.inputs.tensors, places, strict=True)
    ]
    far = dict(zip(TENSORS, moved, strict=True))
    try:
        return _of_far(trial, far)
    finally:
        del far, arena, moved
        if problem.device == "cuda":
            torch.cuda.empty_cache()


def _of_far(trial: AttentionTrial, far: dict[str, torch.Tensor]) -> list[Finding]:
    """Return the findings of distant tensors, those of a single one if it suffices."""
    findings = _with_far(trial, far)
    if not findings:
        return []
    alone = (_with_far(trial, {name: x}) for name, x in far.items())
    return next(filter(None, alone), findings)


def _with_far(trial: AttentionTrial, far: dict[str, torch.Tensor]) -> list[Finding]:
    """Return the findings of a run with some tensors that are far apart in memory."""
    named = ", ".join(f"{name} of strides {x.stride()}" for name, x in far.items())
    claim = f"is wrong where offsets pass 2**31 elements, in {named}"
    try:
        again = run_subject(trial.subject, trial.problem, trial.inputs._replace(**far))
    except SubjectError as error:
        found = Finding.of_exception(error, trial.subject, trial.problem)
        raised = f"{found.raised}\nwhere offsets pass 2**31 elements, in {named}"
        return [dataclasses.replace(found, raised=raised)]
    return agree(trial, again, G12, claim)


class _Place(NamedTuple):
    """The position of a tensor, in elements."""

    start: int
    strides: tuple[int, ...]


def _far_places(
    shapes: Sequence[tuple[int, ...]], first: int, *, whole_rows: bool
) -> tuple[list[_Place], int]:
    """Return disjoint places for tensors, each with a distant axis, and the number of elements.

    Along its distant axis a tensor spans 2**31 elements or more. It is an axis longer than 1; the
    choice starts at the axis number ``first`` and advances with each tensor. With ``whole_rows``
    the columns are not chosen if there is another axis. All distant strides are multiples of the
    room that the tensors take together without their distant axes, and each tensor has its own part
    of that room. A tensor whose axis is too long for these strides has its shortest one distant.
    """
    axes = [_axes(shape, whole_rows=whole_rows) for shape in shapes]
    far = [of_one[(first + n) % len(of_one)] if of_one else None for n, of_one in enumerate(axes)]
    rooms = _rooms(shapes, far)
    for _ in shapes:  # another axis makes the rooms larger
        for number, shape in enumerate(shapes):
            axis = far[number]
            if axis is not None and (shape[axis] - 1) * sum(rooms) > _MOST_BEYOND:
                far[number] = min(axes[number], key=shape.__getitem__)
        rooms = _rooms(shapes, far)
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


def _axes(shape: tuple[int, ...], *, whole_rows: bool) -> list[int]:
    """Return the axes of a tensor that can be its distant one."""
    axes = [axis for axis in range(len(shape)) if shape[axis] > 1 and 0 not in shape]
    if whole_rows and len(axes) > 1 and axes[-1] == len(shape) - 1:
        axes.pop()
    return axes


def _rooms(shapes: Sequence[tuple[int, ...]], far: Sequence[int | None]) -> list[int]:
    """Return the elements of each tensor without its distant axis, in whole units."""
    near = [
        math.prod(max(1, n) for axis, n in enumerate(shape) if axis != of_one)
        for shape, of_one in zip(shapes, far, strict=True)
    ]
    return [-(-n // _UNIT) * _UNIT for n in near]


def arena_of(elements: int, device: str, dtype: torch.dtype) -> torch.Tensor:
    """Allocate memory filled with NaN on a GPU; on a CPU zeros, committed only where touched.

    On a GPU, wait until other processes leave so much.
    """
    size = elements * dtype.itemsize
    short = f"offsets past 2**31 need {size / 2**30:.0f} GiB of memory on {device}"
    if device == "cuda":
        with large_memory(device, size + spare_memory()) as has_room:
            if not has_room:
                raise MemoryError(short)
            return torch.full((elements,), math.nan, dtype=dtype, device=device)
    # Reserve address space without committing memory, as far as the system permits.
    lazily = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    try:
        return torch.frombuffer(mmap.mmap(-1, size, flags=lazily), dtype=dtype)
    except OSError as error:
        raise MemoryError(f"{short}: {error}") from error
