"""Launches: grids, strides past 2**31, sizes of 0, and programs past 65,535."""

from __future__ import annotations

import builtins
import dataclasses
import inspect
import math
import mmap
import os
from typing import NamedTuple

import pytest
import torch

pytest.importorskip("triton")

from fa_kernels.configs import CONFIGS, Config, Tile, resolve
from fa_kernels.launch import combine as launch_of_combine
from fa_kernels.launch import portable
from fa_kernels.launch.named_arguments import alignment
from fa_kernels.launch.sizes import ROW_PADDING
from fa_kernels.runtime import allocation
from fa_kernels.validation.arguments import Arguments

KERNELS = ("forward", "bwd_preprocess", "dkdv", "dq")
FAR = 2**31
NORESERVE = 0x4000  # on Linux; mmap.MAP_NORESERVE since Python 3.13
APART = Config(forward=Tile(32, 16), dkdv=Tile(16, 64), dq=Tile(64, 128))


class Launch(NamedTuple):
    """One launch: the kernel, the grid, and the arguments by name."""

    kernel: str
    grid: tuple[int, ...]
    arguments: dict[str, object]


class Recorder:
    """A stub of a kernel that records its launches and runs nothing."""

    def __init__(self, name: str, kernel, launches: list[Launch]) -> None:
        self.name = name
        self.names = list(inspect.signature(kernel.fn).parameters)
        self.launches = launches

    def __getitem__(self, grid):
        def run(*args: object, **constants: object) -> None:
            given = dict(zip(self.names, args, strict=False))
            assert not given.keys() & constants.keys()
            self.launches.append(Launch(self.name, grid, {**given, **constants}))

        return run


@pytest.fixture
def launches(monkeypatch) -> list[Launch]:
    """The list of later launches; no kernel runs."""
    made: list[Launch] = []
    for name, module in (*((name, portable) for name in KERNELS), ("combine", launch_of_combine)):
        attribute = f"{name}_kernel"
        kernel = getattr(module, attribute)
        monkeypatch.setattr(module, attribute, Recorder(name, kernel, made))
    return made


class Sizes(NamedTuple):
    B: int = 2
    H: int = 6
    Hk: int = 3
    M: int = 100
    N: int = 70
    D: int = 16
    Dv: int = 24


def without_memory(sizes: Sizes, dtype: torch.dtype = torch.bfloat16):
    """q, k, v, dout with shapes and strides but without memory."""
    B, H, Hk, M, N, D, Dv = sizes
    shapes = ((B, H, M, D), (B, Hk, N, D), (B, Hk, N, Dv), (B, H, M, Dv))
    return [torch.empty(shape, dtype=dtype, device="meta") for shape in shapes]


def launch_all(q, k, v, dout, config: Config | str = "16x16", window_right: int | None = None):
    """Launches forward and backward; (out, lse, dq, dk, dv)."""
    lengths = (
        torch.full((q.shape[0],), x.shape[2], dtype=torch.int32, device=q.device) for x in (q, k)
    )
    unbounded = q.shape[2] + k.shape[2]
    block_d = 1 << (max(q.shape[3], v.shape[3], 16) - 1).bit_length()
    right = unbounded if window_right is None else window_right
    arguments = Arguments(*lengths, unbounded, right, 0.25, resolve(config, q.dtype, block_d))
    out, lse = portable.launch_forward(q, k, v, arguments)
    return out, lse, *portable.launch_backward(q, k, v, out, lse, dout, arguments)


GRIDS = {
    "more_heads_than_65535": (Sizes(H=40_000, Hk=20_000, M=3, N=5), "16x16"),
    "more_batch_entries_than_65535": (Sizes(B=70_000, M=3, N=5), "16x16"),
    "long_sequences": (Sizes(M=2**20 + 1, N=2**21 + 1), "64x32"),
    "tiles_apart": (Sizes(), APART),
    "one_of_each": (Sizes(1, 1, 1, 1, 1), "default"),
    "whole_tiles": (Sizes(M=64, N=128), APART),
}


@pytest.mark.parametrize(("sizes", "config"), GRIDS.values(), ids=GRIDS)
def test_a_grid_has_one_axis_of_a_program_for_each_tile_and_head(sizes, config, launches):
    B, H, Hk, M, N = sizes[:5]
    launch_all(*without_memory(sizes), config)
    chosen = resolve(config, torch.bfloat16, 32)
    delta = ROW_PADDING * math.ceil(M / ROW_PADDING) // portable.PREPROCESS_ROWS
    assert {x.kernel: x.grid for x in launches} == {
        "forward": (math.ceil(M / chosen.forward.block_m) * B * H,),
        "bwd_preprocess": (delta * B * H,),
        "dkdv": (math.ceil(N / chosen.dkdv.block_n) * B * Hk,),
        "dq": (math.ceil(M / chosen.dq.block_m) * B * H,),
    }
    # The limit of the first axis of a GPU's grid; the others end at 65,535.
    assert all(x.grid[0] < 2**31 for x in launches)


def test_the_kernels_are_launched_once_each_in_the_order_of_what_they_need(launches):
    launch_all(*without_memory(Sizes()))
    assert [x.kernel for x in launches] == list(KERNELS)


@pytest.mark.parametrize("config", [*CONFIGS, APART], ids=str)
def test_a_kernel_is_given_the_tile_that_its_grid_counts(config, launches):
    launch_all(*without_memory(Sizes()), config)
    chosen = resolve(config, torch.bfloat16, 32)
    for x in launches:
        if x.kernel not in ("bwd_preprocess", "combine"):
            tile = getattr(chosen, x.kernel)
            given = [x.arguments[name] for name in ("BLOCK_M", "BLOCK_N", "num_warps")]
            assert given == [tile.block_m, tile.block_n, tile.num_warps]


def strides_of(launched: Launch, letter: str) -> tuple[object, ...]:
    """The strides in a kernel's arguments for one tensor."""
    axes = "bhnd" if letter in "kv" else "bhmd"
    return tuple(launched.arguments[f"stride_{letter}{axis}"] for axis in axes)


@pytest.mark.parametrize("axis", range(4))
def test_strides_past_2_to_the_31_reach_the_kernels_as_they_are(axis, launches):
    far = []
    for number, x in enumerate(without_memory(Sizes(), torch.float32)):
        strides = [1, 1, 1, 1]
        strides[axis] = 3 * FAR + 16 * number
        far.append(x.as_strided(x.shape, strides))
    launch_all(*far)
    of_kernel = {x.kernel: x for x in launches}
    for letter, x in zip("qkvo", far, strict=True):
        takes = KERNELS[2:] if letter == "o" else ("forward", *KERNELS[2:])
        for kernel in takes:
            assert strides_of(of_kernel[kernel], letter) == x.stride(), (kernel, letter)
    assert strides_of(of_kernel["bwd_preprocess"], "o") == far[3].stride()


@pytest.mark.parametrize("splits", [None, 1, 5])
def test_splits_are_programs_of_the_forward_whose_sums_are_combined(splits, launches):
    sizes = Sizes()
    B, H, _, M, _, _, Dv = sizes
    launch_all(*without_memory(sizes), dataclasses.replace(CONFIGS["16x16"], splits=splits))
    forward, *others = launches[: 1 if splits is None else 2]
    assert forward.grid == (math.ceil(M / 16) * B * H * (splits or 1),)
    assert (forward.arguments["num_splits"], forward.arguments["IS_SPLIT"]) == (
        splits or 1,
        bool(splits),
    )
    written = [forward.arguments[f"{name}_ptr"] for name in ("out", "lse", "l")]
    for combine in others:
        assert combine.kernel == "combine"
        assert combine.grid == (math.ceil(B * H * M / launch_of_combine.COMBINE_ROWS),)
        read = [combine.arguments[f"{name}_ptr"] for name in ("acc", "m", "l")]
        assert all(x is y for x, y in zip(read, written, strict=True))
        rows = [combine.arguments[name] for name in ("num_splits", "rows", "Dv")]
        assert rows == [splits, B * H * M, Dv]
        shapes = [tuple(x.shape) for x in written]
        assert shapes == [(splits, B, H, M, Dv), (splits, B, H, M), (splits, B, H, M)]
        assert [x.dtype for x in written] == [torch.float32] * 3
    assert [x.kernel for x in launches[1 + len(others) :]] == list(KERNELS[1:])


def test_splits_without_rows_launch_no_forward(launches):
    launch_all(*without_memory(Sizes(M=0)), "16x16-split3")
    assert [x.kernel for x in launches] == ["dkdv"]


@pytest.mark.parametrize("name", KERNELS)
def test_strides_are_64_bits_wide_in_every_kernel(name):
    kernel = getattr(portable, f"{name}_kernel")
    types = {
        parameter: str(described.annotation)
        for parameter, described in inspect.signature(kernel.fn).parameters.items()
        if parameter.startswith("stride_")
    }
    assert types
    assert set(types.values()) == {"int64"}


def test_rows_too_far_apart_for_32_bits_do_not_take_the_aligned_path(launches):
    sizes = Sizes(D=32, Dv=32)
    near, far = without_memory(sizes), without_memory(sizes)
    far[1] = far[1].as_strided(far[1].shape, (8, 8, FAR, 1))
    for tensors in (near, far):
        launch_all(*tensors)
    aligned = [bool(x.arguments["ALIGNED"]) for x in launches]
    # The preprocessing reads neither q, k nor v.
    assert aligned == [True] * 4 + [False, True, False, False]


NOTHING = {
    "B": (Sizes(B=0), ()),
    "M": (Sizes(M=0), ("dkdv",)),
    "N": (Sizes(N=0), ("forward", "bwd_preprocess", "dq")),
    "M_and_N": (Sizes(M=0, N=0), ()),
}


@pytest.mark.parametrize(("sizes", "launched"), NOTHING.values(), ids=NOTHING)
def test_a_size_of_0_launches_only_kernels_with_outputs(sizes, launched, launches):
    launch_all(*without_memory(sizes))
    assert tuple(x.kernel for x in launches) == launched


@pytest.mark.parametrize(("sizes", "launched"), NOTHING.values(), ids=NOTHING)
def test_a_size_of_0_gives_outputs_of_the_shapes_and_dtypes_of_any_other(sizes, launched, launches):
    B, H, Hk, M, N, D, Dv = sizes
    got = launch_all(*without_memory(sizes))
    assert [tuple(x.shape) for x in got] == [
        (B, H, M, Dv), (B, H, M), (B, H, M, D), (B, Hk, N, D), (B, Hk, N, Dv)
    ]  # fmt: skip
    wide, narrow = torch.float32, torch.bfloat16
    assert [x.dtype for x in got] == [narrow, wide, narrow, narrow, narrow]


MANY, LAST = 2**15, 16  # numbers of programs: the last LAST programs run for dk and dv


def test_the_last_of_more_than_65535_heads_are_computed_where_they_lie(monkeypatch):
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("a GPU runs all of the programs; tests/conformance/test_range.py does")
    from triton.runtime import interpreter

    B, H, Hk = 2, 40_000, 20_000

    def last(*bounds):
        """``range``, reduced to the last heads' programs for a grid: a whole grid takes minutes."""
        steps = builtins.range(*bounds)
        return steps[-(len(steps) * LAST // (B * Hk)) :] if len(steps) > MANY else steps

    monkeypatch.setattr(interpreter, "range", last, raising=False)
    empty = allocation.empty
    monkeypatch.setattr(allocation, "empty", lambda *a, **kw: empty(*a, **kw).fill_(math.nan))
    # Two keys of equal score: p is 1/2 for each, up to rounding, which comparisons allow for.
    number = torch.arange(1.0, B * H + 1).view(B, H, 1, 1)
    q, dout = torch.zeros(B, H, 1, 1), number
    k = torch.tensor([0.0, 1.0]).view(2, 1).expand(B, Hk, 2, 1)
    v = k * number[:, :Hk]
    out, lse, dq, dk, dv = launch_all(q, k, v, dout)
    for got in (out, lse, dq, dk, dv):
        assert got.flatten()[: -2 * LAST].isnan().all()
    of_group, of_v = dout[-1, -2:], v[-1, -1, 1]
    assert (2 * out[-1, -2:]).round().flatten().tolist() == [of_v] * 2
    assert lse[-1, -2:].exp().round().flatten().tolist() == [2] * 2
    assert (16 * dq[-1, -2:] / of_group).round().flatten().tolist() == [of_v] * 2
    assert (2 * dv[-1, -1] - of_group.sum()).round().flatten().tolist() == [0] * 2
    assert dk[-1, -1].flatten().tolist() == [0] * 2


def strided(strides: tuple[int, ...], offset: int = 0, D: int = 16, dtype=torch.float16):
    """(2, 2, 2, D) with these strides, ``offset`` elements past a multiple of 64 bytes."""
    base = torch.empty(2**12, dtype=dtype)
    start = -base.data_ptr() // base.element_size() % 32 + offset
    return base[start:].as_strided((2, 2, 2, D), strides)


NARROW = {
    "batch entries apart by no multiple of 8": strided((324, 160, 32, 1)),
    "heads apart by no multiple of 8": strided((320, 164, 32, 1)),
    "rows apart by no multiple of 8": strided((320, 160, 36, 1)),
    "columns apart": strided((640, 320, 64, 2)),
    "a head_dim that is no multiple of 8": strided((320, 160, 32, 1), D=20),
    "32 bits": strided((320, 160, 32, 1), dtype=torch.float32),
    "64 bits": strided((320, 160, 32, 1), dtype=torch.float64),
    **{f"a start {n} elements late": strided((320, 160, 32, 1), offset=n) for n in range(1, 8)},
}


@pytest.mark.parametrize("offset", [0, 8, 16])
def test_rows_that_start_at_multiples_of_16_bytes_are_loaded_wide(offset):
    assert alignment(strided((320, 160, 32, 1), offset=offset)) == 1


@pytest.mark.parametrize(("D", "wide"), [(16, 1), (24, 1), (20, 0), (8, 1)])
def test_padded_head_dims_are_loaded_wide_with_a_mask(D, wide):
    rows = strided((320, 160, 32, 1), D=D)
    assert alignment(rows) == wide
    assert alignment(strided((320, 160, 32, 1)), rows) == wide


@pytest.mark.parametrize(("stride", "wide"), [(2**22, True), (2**22 + 8, False)])
def test_rows_so_far_apart_that_a_tile_passes_32_bits_are_not_loaded_wide(stride, wide):
    rows = torch.empty(8, dtype=torch.float16, device="meta")
    apart = rows.as_strided((1, 1, 2, 16), (8, 8, stride, 1))
    assert bool(alignment(apart)) is wide


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("dots", ["ieee", "tf32"])
def test_dots_of_fp32_alone_are_what_the_configuration_says(dots, dtype, launches):
    launch_all(*without_memory(Sizes(), dtype), Config(dots=dots))
    expected = dots if dtype == torch.float32 else "ieee"
    told = [x.arguments["DOTS"] for x in launches if "DOTS" in x.arguments]
    assert told == [expected] * 3


@pytest.mark.parametrize("which", NARROW)
def test_rows_are_loaded_wide_only_where_that_is_possible(which):
    wide = strided((320, 160, 32, 1))
    assert alignment(wide) == 1
    assert not alignment(NARROW[which])
    assert not alignment(wide, NARROW[which], wide)


@pytest.mark.parametrize("block_m", [16, 32, 64, 128, 256])
def test_scratch_holds_whole_tiles_of_rows_of_every_size(block_m):
    """256 is the largest size; the next power of two is refused."""
    assert ROW_PADDING % Tile(block_m, 16).block_m == 0
    with pytest.raises(ValueError, match="block_m is 512"):
        Tile(512, 16)


def lazily(shape, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor in memory that the system reserves when it is touched."""
    elements = math.prod(shape)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE
    memory = mmap.mmap(-1, elements * dtype.itemsize, flags=flags)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


@pytest.mark.parametrize(("dtype", "D"), [(torch.float16, 16), (torch.float32, 3)])
def test_rows_past_2_to_the_31_are_written_in_place(monkeypatch, dtype, D):
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("a GPU runs all of the programs, on memory that is there")
    from triton.runtime import interpreter

    heads, M, N = 2**11 + 1, 2**20, 16

    def last(*bounds):
        """``range``, reduced to the first and the last program of the last head for a grid."""
        steps = builtins.range(*bounds)
        chosen = {steps[len(steps) - len(steps) // heads], steps[-1]} if len(steps) >= heads else ()
        return sorted(chosen) or steps

    random = torch.Generator().manual_seed(0)
    q, dout = (torch.randn(1, 1, 1, D, dtype=dtype, generator=random) for _ in range(2))
    k, v = (torch.randn(1, 1, N, D, dtype=dtype, generator=random) for _ in range(2))

    def run(heads: int, M: int) -> list[torch.Tensor]:
        """The last tile of the last head; under the causal mask only the last N rows see keys."""
        rows = (x.expand(1, heads, M, D) for x in (q, dout))
        keys = (x.expand(1, heads, N, D) for x in (k, v))
        outputs = launch_all(next(rows), *keys, next(rows), window_right=0)
        return [x[0, -1, -N:].clone() for x in outputs]

    want = run(1, N)
    monkeypatch.setattr(interpreter, "range", last, raising=False)
    monkeypatch.setattr(allocation, "empty", lazily)
    assert heads * M > 2**31
    for got, expected in zip(run(heads, M), want, strict=True):
        assert torch.equal(got, expected)
        assert got.any()


# More rows than 2**31 in all splits together, and in each split.
@pytest.mark.parametrize("heads", [2**10 + 1, 2**11 + 1])
def test_splits_of_rows_past_2_to_the_31_are_written_in_place(monkeypatch, heads):
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("a GPU runs all of the programs, on memory that is there")
    from triton.runtime import interpreter

    M, N, D, parts, tile = 2**20, 48, 3, 3, 16

    def last(*bounds):
        """``range``, reduced to the programs of the last rows for the grids of both kernels."""
        steps = builtins.range(*bounds)
        if len(steps) == parts * heads * M // tile:
            return [part * heads * M // tile + (heads - 1) * M // tile for part in range(parts)]
        return steps[-tile // launch_of_combine.COMBINE_ROWS :] if len(steps) > heads else steps

    random = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, n, D, generator=random) for n in (1, N, N))

    def run(heads: int, M: int) -> list[torch.Tensor]:
        """The last rows of the last head."""
        rows = q.expand(1, heads, M, D)
        keys = (x.expand(1, heads, N, D) for x in (k, v))
        lengths = (torch.full((1,), n, dtype=torch.int32) for n in (M, N))
        config = resolve("16x16-split3", q.dtype, 16)
        arguments = Arguments(*lengths, M + N, M + N, 0.25, config)
        return [x[0, -1, -tile:].clone() for x in portable.launch_forward(rows, *keys, arguments)]

    want = run(1, tile)
    monkeypatch.setattr(interpreter, "range", last, raising=False)
    monkeypatch.setattr(allocation, "empty", lazily)
    assert parts * heads * M > 2**31
    for got, expected in zip(run(heads, M), want, strict=True):
        assert torch.equal(got, expected)
        assert got.any()
