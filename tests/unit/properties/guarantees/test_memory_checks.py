"""G6, G7 and G12: far placement without overlap, replaced memory, and reports."""

from __future__ import annotations

import dataclasses
import math
import mmap
from collections.abc import Callable

import pytest
import torch

from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.problem import LAYOUTS, Problem
from fa_verify.properties.guarantees import claims, memory
from fa_verify.properties.inputs.tensors import make
from fa_verify.properties.kernels.subject import Subject
from fa_verify.properties.running import large_memory
from fa_verify.properties.running.trial import run_trial
from tests.unit.properties.kernels.broken_subjects import Eager

FAR = 2**31
PROBLEM = Problem(B=2, H=4, Hk=2, M=20, N=13, D=5, Dv=3, dtype="fp64", mask=Mask(seqlens_k=(13, 9)))
SHAPES = {
    "all_sizes_differ": [(2, 6, 7, 5), (2, 3, 4, 5), (2, 3, 4, 8), (2, 6, 7, 8)],
    "one_element_each": [(1, 1, 1, 1)] * 4,
    "one_axis_each": [(1, 1, 17, 1), (1, 1, 9, 1), (1, 1, 9, 16), (1, 1, 17, 16)],
    "one_tensor_has_an_axis": [(1, 1, 1, 1), (1, 1, 1, 1), (1, 1, 1, 2), (1, 1, 1, 2)],
    "no_keys": [(2, 2, 3, 4), (2, 1, 0, 4), (2, 1, 0, 5), (2, 2, 3, 5)],
    "no_batch": [(0, 2, 3, 4)] * 4,
    "halves_and_thirds": [(1, 1, 3, 1), (1, 1, 5, 1), (1, 1, 7, 1), (1, 1, 13, 1)],
    "far_steps_near_each_other": [(1, 2, 512, 8), (1, 2, 511, 8), (1, 2, 511, 16)],
    "many_keys": [(2, 2, 1, 24), (2, 2, 20_000, 24), (2, 2, 20_000, 32), (2, 2, 1, 32)],
    "many_keys_of_one_head": [(1, 1, 5, 2), (1, 1, 9_999, 2), (1, 1, 9_999, 3), (1, 1, 5, 3)],
    "long_rows": [(1, 2, 48, 128), (1, 2, 48, 128), (1, 2, 48, 127), (1, 2, 48, 127)],
}
every_shape = pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
SEEDS = range(4)


def addresses(shape: tuple[int, ...], place: memory._Place) -> torch.Tensor:
    """Addresses of a tensor's elements, int64 in its shape."""
    lie = torch.full(shape, place.start)
    for axis, (size, stride) in enumerate(zip(shape, place.strides, strict=True)):
        lie = lie + (torch.arange(size) * stride).view(-1, *[1] * (len(shape) - 1 - axis))
    return lie


def far_places(shapes, seed: int):
    """The places of a problem with this seed, as far_offsets requests them."""
    return memory._far_places(shapes, seed // 2, whole_rows=seed % 2 == 1)


def all_addresses(shapes, seed: int) -> list[torch.Tensor]:
    places, _ = far_places(shapes, seed)
    return [addresses(shape, place) for shape, place in zip(shapes, places, strict=True)]


@every_shape
@pytest.mark.parametrize("seed", SEEDS)
def test_no_two_elements_of_far_tensors_share_an_address(shapes, seed):
    lie = torch.cat([x.flatten() for x in all_addresses(shapes, seed)])
    assert lie.unique().numel() == sum(math.prod(shape) for shape in shapes)


@every_shape
@pytest.mark.parametrize("seed", SEEDS)
def test_far_tensors_lie_inside_the_room_that_is_asked_for(shapes, seed):
    _, elements = far_places(shapes, seed)
    for x in all_addresses(shapes, seed):
        if x.numel():
            assert x.min() >= 0
            assert x.max() < elements


@every_shape
@pytest.mark.parametrize("seed", SEEDS)
def test_a_tensor_that_has_an_axis_reaches_past_2_to_the_31(shapes, seed):
    for shape, x in zip(shapes, all_addresses(shapes, seed), strict=True):
        if math.prod(shape) > 1:
            assert x.max() - x.min() >= FAR + FAR // 8


@every_shape
@pytest.mark.parametrize("seed", SEEDS)
def test_far_tensors_take_little_more_than_they_span(shapes, seed):
    _, elements = far_places(shapes, seed)
    assert elements <= 1.3 * (FAR + FAR // 8)


def test_every_axis_is_the_far_one_for_some_seed():
    shapes = SHAPES["all_sizes_differ"]
    for number in range(4):
        far = set()
        for seed in range(8):
            place = far_places(shapes, seed)[0][number]
            far.add(max(range(4), key=lambda axis: place.strides[axis]))
        assert far == {0, 1, 2, 3}


@pytest.mark.parametrize("seed", range(4))
def test_rows_stay_in_one_piece_that_wide_loads_can_take(seed):
    for place in memory._far_places(SHAPES["all_sizes_differ"], seed, whole_rows=True)[0]:
        assert place.strides[3] == 1
        assert all(stride % 64 == 0 for stride in place.strides if stride > FAR // 1024)


@every_shape
def test_far_places_start_where_wide_loads_can(shapes):
    for place in memory._far_places(shapes, 0, whole_rows=True)[0]:
        assert place.start % 64 == 0
        assert all(stride % 64 == 0 for stride in place.strides if stride > FAR // 1024)


class LosesAlone(Eager):
    """A subject that halves the gradient of one input, where it alone requires one."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def __call__(self, q, k, v, **arguments):
        given = {"q": q, "k": k, "v": v}
        if [name for name, x in given.items() if x.requires_grad] == [self.name]:
            given[self.name] = given[self.name] * 0.5 + given[self.name].detach() * 0.5
        return super().__call__(**given, **arguments)


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_a_gradient_that_is_wrong_alone_is_found(name):
    trial = run_trial(Subject.of(LosesAlone(name), "alone"), PROBLEM)
    assert claims.full_overwrite(trial) == []
    (finding,) = claims.gradient_sets(trial)
    assert (finding.guarantee, finding.output) == ("G6 full overwrite", f"d{name}")
    assert f"a backward of d{name} alone" in finding.claim


@pytest.mark.parametrize("bias", ["none", "normal/hmn"])
def test_any_set_of_gradients_of_a_correct_subject_passes(bias):
    subject = Eager()
    subject.score_mods = ("bias",)
    problem = dataclasses.replace(PROBLEM, bias=bias)
    assert claims.gradient_sets(run_trial(Subject.of(subject, "eager"), problem)) == []


class Int32(torch.autograd.Function):
    """The identity with 32-bit offsets for its input or its gradient."""

    @staticmethod
    def forward(ctx, x, in_backward):
        ctx.in_backward = in_backward
        return x.clone() if in_backward else gathered_by_int32(x)

    @staticmethod
    def backward(ctx, gradient):
        return gathered_by_int32(gradient) if ctx.in_backward else gradient, None


def gathered_by_int32(x: torch.Tensor) -> torch.Tensor:
    """The elements of x, each axis' part of their offset wrapped to 32 bits."""
    offsets = torch.full((), x.storage_offset())
    for axis, (size, stride) in enumerate(zip(x.shape, x.stride(), strict=True)):
        wrapped = (torch.arange(size) * stride).to(torch.int32).to(torch.int64)
        offsets = offsets + wrapped.view(-1, *[1] * (3 - axis))
    flat = x.as_strided((x.untyped_storage().nbytes() // x.element_size(),), (1,), 0)
    return flat[offsets]


class WrapsOne(Eager):
    """A subject that reads one of its tensors with 32-bit offsets."""

    bitwise = ("G4", "G5", "G8", "G10")

    def __init__(self, tensor: str) -> None:
        super().__init__()
        self.tensor = tensor

    def misread(self, q, k, v, sm_scale):
        read = {"q": q, "k": k, "v": v}
        if self.tensor in read:
            read[self.tensor] = Int32.apply(read[self.tensor], False)
        return *read.values(), sm_scale

    def spoil(self, out, lse, live, N, config):
        return Int32.apply(out, True) if self.tensor == "dout" else out, lse


@pytest.mark.parametrize(
    ("tensor", "seed"),
    [("q", 0), ("q", 2), ("q", 4), ("q", 6), ("k", 0), ("v", 1), ("dout", 2), ("none", 3)],
)
def test_offsets_of_32_bits_in_one_tensor_are_caught_along_every_axis(tensor, seed):
    problem = dataclasses.replace(PROBLEM, seed=seed)
    trial = run_trial(Subject.of(WrapsOne(tensor), "wraps"), problem)
    found = {finding.guarantee for finding in claims.far_offsets(trial)}
    assert found == (set() if tensor == "none" else {"G12 range"})


def test_too_little_address_space_is_a_memory_error(monkeypatch):
    def refuse(*_args: object, **_kwargs: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    trial = run_trial(Subject.of(Eager(), "eager"), PROBLEM)
    monkeypatch.setattr(mmap, "mmap", refuse)
    with pytest.raises(MemoryError, match=r"past 2\*\*31 need 34 GiB of memory on cpu"):
        claims.far_offsets(trial)


def test_too_little_gpu_memory_is_a_memory_error(monkeypatch):
    monkeypatch.setattr(large_memory, "_PATIENCE", 0.0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2**33, 2**33))
    with pytest.raises(MemoryError, match=r"past 2\*\*31 need 8 GiB of memory on cuda"):
        memory.arena_of(2**32, "cuda", torch.float16)


def rerun_inputs(check, problem: Problem, monkeypatch, subject=None):
    """The inputs of a trial, and the inputs of a check's second run."""
    trial = run_trial(Subject.of(subject or Eager(), "eager"), problem)
    seen = []

    def record(_subject, _problem, inputs):
        seen.append(inputs.tensors)
        return trial.got

    monkeypatch.setattr(memory, "run_subject", record)
    assert check(trial) == []
    return trial.inputs.tensors, seen[0]


def stored(x: torch.Tensor) -> torch.Tensor:
    """All of the storage of x."""
    return x.as_strided((x.untyped_storage().nbytes() // x.element_size(),), (1,), 0)


def is_own(x: torch.Tensor) -> torch.Tensor:
    """A mask of the elements of the storage that belong to x."""
    own = torch.zeros_like(stored(x), dtype=torch.bool)
    own.as_strided(x.shape, x.stride(), x.storage_offset()).fill_(True)
    return own


@pytest.mark.parametrize("layout", LAYOUTS)
def test_reads_in_bounds_changes_what_surrounds_the_elements_and_nothing_else(layout, monkeypatch):
    problem = dataclasses.replace(PROBLEM, layouts=(layout,) * 4, dirty="noise")
    first, second = rerun_inputs(claims.reads_in_bounds, problem, monkeypatch)
    for before, after in zip(first, second, strict=True):
        assert torch.equal(before, after)
        assert before.stride() == after.stride()
        own = is_own(after)
        assert not own.all()
        assert stored(before)[~own].isnan().all()
        assert (stored(after)[~own] == torch.finfo(after.dtype).max).all()


def test_far_offsets_changes_no_element(monkeypatch):
    first, second = rerun_inputs(claims.far_offsets, PROBLEM, monkeypatch)
    for before, after in zip(first, second, strict=True):
        assert torch.equal(before, after)
        assert max(after.stride()) >= FAR // 20


class Writes(torch.autograd.Function):
    """A copy of its input with scratch, one of which it overruns."""

    @staticmethod
    def forward(ctx, x, what, offset):
        out, scratch = torch.empty_like(x), torch.zeros(7, dtype=torch.float32)
        out.copy_(x)
        spoilt = out if what == "out" else scratch
        spoilt.as_strided((), (), spoilt.storage_offset() + offset).fill_(1.0)
        return out

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None, None


class Overruns(Eager):
    """A subject that writes past an output, or past its scratch."""

    def __init__(self, what: str, offset: int) -> None:
        super().__init__()
        self.written = what, offset

    def spoil(self, out, lse, live, N, config):
        # Memory has room for the write only within guard bands.
        room = torch.empty(1).untyped_storage().nbytes() > 4
        return Writes.apply(out, *self.written) if room else out, lse


@pytest.mark.parametrize(
    ("what", "offset", "output", "where"),
    [
        ("out", 480, "out", "writes byte 1 after its last element"),
        ("out", -1, "out", "writes byte 1 before its first element"),
        ("scratch", 8, "scratch of shape (7,)", "writes byte 5 after its last element"),
    ],
)
def test_an_overrun_names_the_tensor_and_the_place(what, offset, output, where):
    trial = run_trial(Subject.of(Overruns(what, offset), "overruns"), PROBLEM)
    (finding,) = claims.full_overwrite(trial)
    assert finding.guarantee == "G6 full overwrite"
    assert finding.claim == "is written outside its elements"
    assert (finding.output, finding.where) == (output, where)
    assert f"{output} of overruns is written outside its elements" in str(finding)


def test_an_element_that_nobody_writes_is_found_where_it_is():
    trial = run_trial(Subject.of(Eager("last row not written"), "eager"), PROBLEM)
    found = claims.full_overwrite(trial)
    assert [(x.output, x.bad) for x in found] == [("out", 2 * 4 * 4 * 3)]
    assert found[0].where == "b=0 h=0 m=16 d=0"
    assert math.isnan(found[0].got)


class Reads(Eager):
    """The first row of out is computed from an allocation."""

    def __init__(self, of_memory: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.of_memory = of_memory

    def spoil(self, out, lse, live, N, config):
        memory = torch.empty(out.shape, dtype=out.dtype)
        first = torch.arange(out.shape[2])[:, None] == 0
        return torch.where(first, self.of_memory(memory), out), lse


@pytest.mark.parametrize(
    ("of_memory", "claim"),
    [
        (lambda memory: memory, "is not written everywhere"),
        (lambda memory: memory * 0 + math.nan, "is NaN, which the kernel writes"),
        (lambda memory: memory * 2, "is computed from memory that is not written"),
    ],
    ids=["unwritten", "NaN is written", "read"],
)
def test_the_reason_of_nan_is_found_by_a_second_value_in_the_allocations(of_memory, claim):
    trial = run_trial(Subject.of(Reads(of_memory), "reads"), PROBLEM)
    found = [x for x in claims.full_overwrite(trial) if x.output == "out"]
    assert [(x.claim.partition(":")[0], x.bad) for x in found] == [(claim, 2 * 4 * 3)]


def test_a_kernel_that_writes_nan_everywhere_is_not_said_to_leave_memory_unwritten():
    class NanEverywhere(Eager):
        def spoil(self, out, lse, live, N, config):
            return out * math.nan, lse * math.nan

    trial = run_trial(Subject.of(NanEverywhere(), "nan"), PROBLEM)
    found = claims.full_overwrite(trial)
    assert {x.output for x in found} >= {"out", "lse"}
    assert all("which the kernel writes" in x.claim for x in found)


def test_the_trial_is_not_run_on_other_inputs_to_see_what_it_writes(monkeypatch):
    first, second = rerun_inputs(claims.full_overwrite, PROBLEM, monkeypatch)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(first, make(PROBLEM).tensors, strict=True))


@pytest.mark.parametrize("seed", range(8))
def test_rows_stay_whole_for_a_subject_that_declares_no_gaps_in_them(seed, monkeypatch):
    class Whole(Eager):
        layouts = ("bhsd", "padded")

    problem = dataclasses.replace(PROBLEM, seed=seed)
    _, moved = rerun_inputs(claims.far_offsets, problem, monkeypatch, Whole())
    assert [x.stride(3) for x in moved] == [1, 1, 1, 1]
