"""Claims K10, K13 and K16: the kernels' products, memory and tile loops."""

from __future__ import annotations

import ast
import gc
import inspect
import math
from collections.abc import Callable, Iterator
from itertools import product
from types import ModuleType
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.reference.numpy_reference import seen_keys

Attention = Callable[..., torch.Tensor]
BLOCKS = (1, 2, 3, 4, 8)
LENGTHS = range(1, 10)


class Product(NamedTuple):
    """A ``tl.dot`` of a tile pair: the name of its result, and the head_dim among its sizes."""

    makes: str
    head_dim: str


def names_in(*nodes: ast.AST) -> set[str]:
    """The plain names in some expressions."""
    return {x.id for node in nodes for x in ast.walk(node) if isinstance(x, ast.Name)}


def calls(tree: ast.AST, function: str) -> list[tuple[str, list[ast.expr]]]:
    """(name of the result, arguments) of every call of a function.

    Raises:
        AssertionError: A result is not assigned to a name.
    """
    assigned = (x for x in ast.walk(tree) if isinstance(x, ast.Assign))
    found = [
        (ast.unparse(x.targets[0]), x.value.args)
        for x in assigned
        if isinstance(x.value, ast.Call) and ast.unparse(x.value.func) == function
    ]
    assert ast.unparse(tree).count(f"{function}(") == len(found)
    return found


def products(module: ModuleType) -> list[Product]:
    """The dots of a kernel's file, each of which runs once for every pair of tiles.

    A loaded operand has the head_dim of its offsets, ``offs_d`` or ``offs_dv``. P and dS are not
    loaded and have the two tile sizes.
    """
    tree = ast.parse(inspect.getsource(module))
    head_dims = {
        name: "Dv" if "offs_dv" in names_in(*parts) else "D"
        for name, parts in calls(tree, "load_tile")
    }
    found = []
    for name, operands in calls(tree, "tl.dot"):
        (head_dim,) = {head_dims[x] for x in names_in(*operands[:2]) & head_dims.keys()}
        found.append(Product(name, head_dim))
    return found


def flops(dots: list[Product], M: int, N: int, D: int, Dv: int) -> int:
    """Multiplications and additions of a head in which every pair is visible."""
    return sum(2 * M * N * {"D": D, "Dv": Dv}[dot.head_dim] for dot in dots)


def test_k10_the_two_kernel_backward_costs_14_n2d_and_the_single_kernel_10(kernels):
    """K10 is wrong: it claims 12 against 10. dq needs 3 products, dk/dv 4, a single kernel 5.

    A head costs 2MN(4D + 3Dv) against 2MN(3D + 2Dv), because two passes compute Q K' and dO V'
    twice.
    """
    dq, single = map(products, (kernels.kernels.portable.dq, kernels.kernels.portable.dkdv))
    assert sorted(dq) == [("dp", "Dv"), ("dq", "D"), ("scores", "D")]
    # The kernel of dk and dv has the product of dq only in one pass.
    dkdv = [dot for dot in single if dot.makes != "dq"]
    assert sorted(dkdv) == [("dk", "D"), ("dp", "Dv"), ("dv", "Dv"), ("scores", "D")]
    assert sorted(single) == sorted({*dq, *dkdv})
    M, N, D, Dv = 1000, 3000, 96, 40
    assert flops(dq + dkdv, M, N, D, Dv) == 2 * M * N * (4 * D + 3 * Dv)
    assert flops(single, M, N, D, Dv) == 2 * M * N * (3 * D + 2 * Dv)
    assert flops(dq + dkdv, N, N, D, D) == 14 * N**2 * D
    assert flops(single, N, N, D, D) == 10 * N**2 * D
    for name in ("addressing", "mask", "score_mod", "softmax"):
        assert "tl.dot" not in inspect.getsource(getattr(kernels.kernels.common, name))


class Allocations(TorchDispatchMode):
    """Counts the elements of every tensor that is allocated inside the block, without views."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not func.is_view:
            self.sizes.append(result.numel())
        return result


class Unlaunched:
    """A stub of a kernel that runs nothing."""

    def __getitem__(self, grid):
        return lambda *args, **constants: None


@pytest.mark.parametrize("N", [1, 255, 257, 4096, 65536])
def test_k13_memory_grows_with_n_out_lse_gradients_and_two_numbers_a_row(kernels, monkeypatch, N):
    """K13 holds for every allocation of a call; lse2 and delta have whole tiles of rows."""
    B, H, Hk, D, Dv = 2, 4, 2, 64, 32
    launch = kernels.launch.portable
    for name in ("forward", "bwd_preprocess", "dkdv", "dq"):
        monkeypatch.setattr(launch, f"{name}_kernel", Unlaunched())
    shapes = ((B, H, N, D), (B, Hk, N, D), (B, Hk, N, Dv), (B, H, N, Dv))
    q, k, v, dout = (torch.empty(x, dtype=torch.bfloat16, device="meta") for x in shapes)
    lengths = torch.empty(B, dtype=torch.int32, device="meta")
    config = kernels.configs.resolve("16x16", q.dtype, D)
    checked = kernels.validation.arguments.Arguments(
        lengths, lengths, 2 * N, 2 * N, D**-0.5, config
    )
    with Allocations() as forward:
        out, lse = launch.launch_forward(q, k, v, checked)
    with Allocations() as backward:
        launch.launch_backward(q, k, v, out, lse, dout, checked)
    assert forward.sizes == [B * H * N * Dv, B * H * N]
    scratch = B * H * math.ceil(N / launch.ROW_PADDING) * launch.ROW_PADDING
    gradients = [q.numel(), k.numel(), v.numel()]
    assert sorted(backward.sizes) == sorted([scratch, scratch, *gradients])


def saved_by(attention: Attention, *leaves: torch.Tensor) -> int:
    """The number of elements that autograd saves for the backward pass, without the inputs."""
    kept: dict[int, int] = {}

    def keep(x: torch.Tensor) -> torch.Tensor:
        kept[x.data_ptr()] = x.numel()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        attention(*leaves)
    return sum(size for place, size in kept.items() if place not in {x.data_ptr() for x in leaves})


@pytest.mark.parametrize("N", [32, 96])
def test_k13_only_out_and_lse_persist_where_eager_attention_keeps_n_squared(kernels, device, N):
    """K13 holds between the passes: N (Dv + 1) numbers are saved, against N^2."""
    D = 16
    leaves = [torch.ones(1, 1, N, D, device=device, requires_grad=True) for _ in range(3)]
    tiled = saved_by(lambda *x: kernels.flash_attention(*x, config="16x16"), *leaves)
    eager = saved_by(lambda q, k, v: torch.softmax(q @ k.mT / D**0.5, -1) @ v, *leaves)
    assert tiled == N * (D + 1)
    assert eager >= N**2


def peak(attention: Attention, N: int) -> tuple[int, int]:
    """(peak bytes of both passes beyond the inputs, bytes of an N x N matrix of their dtype)."""
    q, k, v, dout = (
        torch.randn(1, 1, N, 64, device="cuda", dtype=torch.bfloat16) for _ in range(4)
    )
    leaves = [x.requires_grad_() for x in (q, k, v)]
    torch.cuda.synchronize()
    peaks = []
    for _ in range(2):
        # Memory that is freed during a call lowers its peak: that of garbage, or of a full cache.
        gc.collect()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        torch.autograd.grad(attention(*leaves), leaves, dout)
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated() - before)
    return max(peaks), 2 * N**2


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, to measure its memory")
def test_k13_peak_memory_is_that_of_the_results_up_to_65536_where_eager_holds_n_squared(kernels):
    """K13, measured: out, three gradients and three float32 numbers per row, beside eager.

    Hopper's backward adds partial sums between programs, whose size does not depend on N.
    """
    from fa_kernels.launch import hopper

    peak(kernels.flash_attention, 256)  # compiles
    device, handed = torch.device("cuda"), 0
    if hopper.is_there(device):
        # dk and dv of a tile of 128 keys in float32, for each concurrent program.
        handed = hopper.processors(device) * 2 * 128 * 64 * 4
    for N in (4096, 16384, 65536):
        tiled, _ = peak(kernels.flash_attention, N)
        results = 4 * N * 64 * 2 + 3 * 4 * N
        # The allocator may round each of the eight requests up by 1 MiB.
        assert results <= tiled <= results + handed + 8 * 2**20
    for N in (4096, 16384):
        eager, matrix = peak(lambda q, k, v: torch.softmax(q @ k.mT / 8, -1) @ v, N)
        assert eager >= 2 * matrix


class Loop(NamedTuple):
    """The query tiles of a key tile: [lo, full_lo) and [full_hi, hi) with a mask, others without.

    ``visits`` counts the visits of each pair of a row and a key of this tile, including rows past
    M. ``hidden`` is true for pairs that the mask hides, including rows past M.
    """

    lo: int
    full_lo: int
    full_hi: int
    hi: int
    visits: np.ndarray
    hidden: np.ndarray


def loops(
    kernels: ModuleType, mask: Mask, M: int, N: int, BLOCK_M: int, BLOCK_N: int
) -> Iterator[Loop]:
    """The loop of dk/dv over queries for every key tile, by the ranges' Python source."""
    unbounded = M + N
    left = unbounded if mask.window_left is None else mask.window_left
    right = unbounded if mask.right is None else mask.right
    rows = -(-M // BLOCK_M) * BLOCK_M
    seen = np.zeros((rows, N), dtype=np.bool_)
    seen[:M] = seen_keys(mask, 1, M, N)[0]
    for start in range(0, N, BLOCK_N):
        found = kernels.kernels.common.tile_ranges.visible_tiles.fn(
            start, N, M, right, left, BLOCK_N, BLOCK_M
        )
        here = slice(start, min(start + BLOCK_N, N))
        visits = np.zeros((rows, here.stop - start), dtype=int)
        for tile in range(found[0], found[3]):
            visits[tile * BLOCK_M : (tile + 1) * BLOCK_M] += 1
        yield Loop(*found, visits, ~seen[:, here])


def every_case(kernels: ModuleType, mask: Mask) -> Iterator[tuple[int, int, Loop]]:
    """(M, BLOCK_M, loop) for every small M, N, BLOCK_M, BLOCK_N and key tile."""
    for M, N, BLOCK_M, BLOCK_N in product(LENGTHS, LENGTHS, BLOCKS, BLOCKS):
        for loop in loops(kernels, mask, M, N, BLOCK_M, BLOCK_N):
            yield M, BLOCK_M, loop


@pytest.mark.parametrize("mask", [Mask(causal=True), Mask(window_left=1, window_right=2)], ids=str)
def test_k16_two_kinds_of_query_tiles_are_enough_masked_and_full(kernels, mask):
    """K16 is wrong: two parts are enough. Every visible pair is visited once, and no tile without a
    mask has a hidden pair; exhaustive for M, N to 9 and tiles of 1 to 8.
    """
    for _, BLOCK_M, loop in every_case(kernels, mask):
        assert (loop.visits[~loop.hidden] == 1).all()
        assert not loop.hidden[loop.full_lo * BLOCK_M : loop.full_hi * BLOCK_M].any()


def test_k16_under_causal_masking_the_ragged_tail_needs_bounds_on_its_loads_alone(kernels):
    """K16: after the diagonal the mask hides only rows past M, which load as zeros (K7)."""
    ragged = 0
    for M, BLOCK_M, loop in every_case(kernels, Mask(causal=True)):
        hidden_rows = np.flatnonzero(loop.hidden.any(1))
        after_diagonal = hidden_rows[hidden_rows >= loop.full_lo * BLOCK_M]
        assert (after_diagonal >= M).all()
        ragged += after_diagonal.size > 0
    assert ragged > 0


def test_k16_the_three_parts_overlap_and_a_window_adds_a_fourth(kernels):
    """K16: a tile can be on the diagonal and ragged at once; a window has an edge on both sides."""
    both = sum(
        loop.lo < loop.full_lo == loop.hi and M % BLOCK_M > 0
        for M, BLOCK_M, loop in every_case(kernels, Mask(causal=True))
    )
    assert both > 0
    behind = [
        loop.hidden[loop.full_hi * BLOCK_M : min(M, loop.hi * BLOCK_M)].any()
        for M, BLOCK_M, loop in every_case(kernels, Mask(window_left=2, window_right=0))
        if loop.full_lo < loop.full_hi < loop.hi
    ]
    assert any(behind)
