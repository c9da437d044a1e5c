"""block_mask: the kernels' lists of blocks, equality with predicates, and errors."""

from __future__ import annotations

import dataclasses
import warnings

import pytest
import torch

from fa_verify import assert_attention_close
from fa_verify.oracles.masks.block_sparse import BlockSparse
from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.stream import normal

pytest.importorskip("triton")

from fa_kernels import Config, Tile, flash_attention
from fa_kernels.configs import CONFIGS
from fa_kernels.schedule.block_sparse import block_maps, maps_of_blocks
from fa_kernels.validation import arguments
from fa_kernels.validation.block_mask import check_tiles

B, H, HK, M, N, D = 2, 4, 2, 70, 100, 8
CONFIG = "16x32"
BLOCKS = BlockSparse(side=32, percent=50, seed=4)
OF_ALL_HEADS = dataclasses.replace(BLOCKS, per_head=False)
BESIDE = {
    "nothing": {},
    "causal": {"causal": True},
    "window": {"window_left": 33, "window_right": 20},
    "lengths": {"seqlens_q": (70, 40), "seqlens_k": (64, 99)},
    "no length": {"seqlens_q": (0, 70), "seqlens_k": (100, 0)},
    "all": {"causal": True, "window_left": 50, "seqlens_q": (64, 33), "seqlens_k": (97, 32)},
}
_LIST_CONFIGS = (
    CONFIGS["16x16"],
    CONFIGS["16x32"],
    Config(forward=Tile(32, 16), dkdv=Tile(16, 32), dq=Tile(32, 32)),
)


def drawn(device: str, **sizes: int) -> list[torch.Tensor]:
    """q, k, v, dout."""
    size = {"M": M, "N": N, **sizes}
    shapes = [(B, H, size["M"], D), *2 * [(B, HK, size["N"], D)], (B, H, size["M"], D)]
    names = ("q", "k", "v", "dout")
    return [normal(0, x, s).half().to(device) for x, s in zip(names, shapes, strict=True)]


def called(inputs: list[torch.Tensor], **arguments: object) -> list[torch.Tensor]:
    """out, lse, dq, dk, dv."""
    leaves = [x.detach().requires_grad_() for x in inputs[:3]]
    out, lse = flash_attention(*leaves, return_lse=True, **{"config": CONFIG, **arguments})
    return [out, lse, *torch.autograd.grad(out, leaves, inputs[3])]


def are_equal(got: list[torch.Tensor], want: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(got, want, strict=True))


def listed(lists: torch.Tensor) -> list[tuple[list[int], list[int]]]:
    """(partial tiles, full tiles) of each row of a map."""
    found = []
    for mixed, full, *tiles in lists.flatten(0, 2).tolist():
        found.append((tiles[:mixed], tiles[mixed : mixed + full]))
    return found


@pytest.mark.parametrize("config", _LIST_CONFIGS, ids=["16x16", "16x32", "apart"])
@pytest.mark.parametrize("mask", [BLOCKS, OF_ALL_HEADS], ids=["heads", "all_heads"])
@pytest.mark.parametrize("beside", BESIDE.values(), ids=BESIDE)
def test_a_block_mask_has_the_lists_of_the_equal_predicate(device, beside, mask, config):
    mask = dataclasses.replace(mask, **beside)
    far = M + N
    window = tuple(far if x is None else x for x in (mask.window_left, mask.right))
    lengths = torch.tensor(mask.lengths(B, M, N), dtype=torch.int32, device=device).unbind()
    want = block_maps(mask, B, H, HK, M, N, window, lengths, config)
    blocks = mask.blocks(H, M, N).to(device)
    got = maps_of_blocks(blocks, mask.side, H, HK, M, N, window, lengths, config, want._fields)
    for name in want._fields:
        of_blocks, of_predicate = (
            listed(getattr(got, name).lists),
            listed(getattr(want, name).lists),
        )
        # The predicate's maps may have empty rows of tiles past the end.
        rows = getattr(got, name).lists.shape[2]
        kept = [
            row
            for i, row in enumerate(of_predicate)
            if i % getattr(want, name).lists.shape[2] < rows
        ]
        assert of_blocks == kept, name


def assert_within_the_bound(inputs: list[torch.Tensor], mask: Mask, got: list[torch.Tensor]):
    """Compares out, lse, dq, dk and dv with the oracle's."""
    (q, k, v, dout), (out, lse, dq, dk, dv) = inputs, got
    assert_attention_close(out, q, k, v, lse=lse, dout=dout, dq=dq, dk=dk, dv=dv, mask=mask)


def test_more_tiles_than_one_step_takes_are_listed_in_order(device):
    """A step lists 64 tiles; each of 200 partial and full tiles is listed once."""
    rows, keys = 5, 200 * 16 + 3
    inputs, mask = drawn(device, M=rows, N=keys), BlockSparse(side=16, percent=60, seed=1)
    blocks = mask.blocks(H, rows, keys).to(device)
    got = called(inputs, block_mask=blocks, block_size=16, config="16x16")
    assert_within_the_bound(inputs, mask, got)


@pytest.mark.parametrize("backward", ["two_pass", "one_pass"])
@pytest.mark.parametrize("beside", BESIDE.values(), ids=BESIDE)
def test_a_block_mask_equals_its_predicate(device, beside, backward):
    """Equal bitwise in the interpreter; on a GPU another predicate compiles to other code."""
    inputs = drawn(device)
    blocks = BLOCKS.blocks(H, M, N).to(device)
    mask = dataclasses.replace(BLOCKS, **beside)
    want = called(inputs, mask=mask)
    got = called(
        inputs,
        mask=Mask(**beside),
        block_mask=blocks,
        block_size=32,
        deterministic=backward == "two_pass",
    )
    if device == "cpu":
        for place, (x, y) in enumerate(zip(got, want, strict=True)):
            # Atomics sum dq of one pass in another order.
            assert torch.equal(x, y) or (backward == "one_pass" and place == 2)
    assert_within_the_bound(inputs, mask, got)


@pytest.mark.parametrize(
    ("backward", "of", "kernels"),
    [
        ("two_pass", (0, 1, 2), ("dkdv", "dq")),
        ("two_pass", (0,), ("dq",)),
        ("two_pass", (2,), ("dkdv",)),
        ("one_pass", (0, 1), ("dkdv",)),
        ("one_pass", (0,), ("dq",)),
    ],
)
def test_lists_are_made_for_the_kernels_that_run(device, monkeypatch, backward, of, kernels):
    inputs, made = drawn(device), []

    def recorded(*arguments):
        made.append(maps_of_blocks(*arguments))
        return made[-1]

    monkeypatch.setattr(arguments, "maps_of_blocks", recorded)
    leaves = [x.requires_grad_(place in of) for place, x in enumerate(inputs[:3])]
    blocks = BLOCKS.blocks(H, M, N).to(device)
    out = flash_attention(
        *leaves,
        block_mask=blocks,
        block_size=32,
        config=CONFIG,
        deterministic=backward == "two_pass",
    )
    torch.autograd.grad(out, [leaves[place] for place in of], inputs[3])
    names = [[name for name, x in maps._asdict().items() if x is not None] for maps in made]
    assert names == [["forward"], list(kernels)]


@pytest.mark.parametrize("one", [False, True], ids=["heads", "all_heads"])
def test_a_map_may_have_any_strides(device, one):
    inputs = drawn(device)
    blocks = BLOCKS.blocks(H, M, N)[: 1 if one else H].to(device)
    want = called(inputs, block_mask=blocks, block_size=32)
    apart = torch.ones((*blocks.shape[:2], 2 * blocks.shape[2]), dtype=torch.bool, device=device)
    apart[:, :, ::2] = blocks
    for same in (apart[:, :, ::2], blocks.mT.contiguous().mT, blocks.flip(0).flip(0)):
        assert are_equal(called(inputs, block_mask=same, block_size=32), want)
    if one:
        assert are_equal(called(inputs, block_mask=blocks.expand(H, -1, -1), block_size=32), want)


@pytest.mark.parametrize(("rows", "keys"), [(M, N), (0, N), (M, 0), (0, 0)])
def test_where_no_block_is_visible_everything_is_zero(device, rows, keys):
    inputs = drawn(device, M=rows, N=keys)
    nothing = torch.zeros(1, -(-rows // 32), -(-keys // 32), dtype=torch.bool, device=device)
    out, lse, *gradients = called(inputs, block_mask=nothing, block_size=32)
    assert (lse == -torch.inf).all()
    assert not any(x.any() for x in (out, *gradients))


def test_a_map_that_was_changed_before_the_backward_is_refused(device):
    inputs = drawn(device)
    blocks = BLOCKS.blocks(H, M, N).to(device)
    leaves = [x.detach().requires_grad_() for x in inputs[:3]]
    out = flash_attention(*leaves, block_mask=blocks, block_size=32, config=CONFIG)
    blocks.logical_not_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(out, leaves, inputs[3])


def test_default_tiles_take_blocks_of_128(device):
    inputs, mask = drawn(device, M=150, N=300), BlockSparse(seed=2, per_head=False)
    blocks = mask.blocks(H, 150, 300).to(device)
    assert 0 < int(blocks.sum()) < blocks.numel()
    assert_within_the_bound(inputs, mask, called(inputs, block_mask=blocks, config="default"))


def test_a_block_mask_causes_no_synchronisation(device):
    if device == "cpu":
        pytest.skip("a CPU has nothing to wait for")
    inputs = drawn(device)
    blocks = BLOCKS.blocks(H, M, N).to(device)
    called(inputs, block_mask=blocks, block_size=32)
    try:
        with warnings.catch_warnings(action="ignore"):  # PyTorch calls the mode a prototype
            torch.cuda.set_sync_debug_mode("error")
        called(inputs, block_mask=blocks, block_size=32)
    finally:
        torch._C._cuda_set_sync_debug_mode(0)


@pytest.mark.parametrize("side", ["block_m", "block_n"])
@pytest.mark.parametrize("kernel", ["forward", "dkdv", "dq"])
def test_blocks_hold_whole_tiles_of_every_kernel(kernel, side):
    tiles = {name: Tile(16, 16) for name in ("forward", "dkdv", "dq")}
    tiles[kernel] = dataclasses.replace(tiles[kernel], **{side: 64})
    config = Config(**tiles)
    check_tiles(64, config)
    with pytest.raises(
        NotImplementedError, match="block_size is 32; supported are multiples of 64"
    ):
        check_tiles(32, config)


def some(*shape: int, dtype: torch.dtype = torch.bool, device: str | None = None):
    return lambda here: torch.ones(shape, dtype=dtype, device=device or here)


WRONG = {
    "no tensor": (TypeError, "block_mask is list; needs a bool", lambda here: [[True]], {}),
    "dtype": (TypeError, "block_mask has dtype torch.int32", some(1, 3, 4, dtype=torch.int32), {}),
    "device": (ValueError, "block_mask is on meta; needs", some(1, 3, 4, device="meta"), {}),
    "heads": (ValueError, r"has shape \(2, 3, 4\); needs \(4 or 1, 3, 4\)", some(2, 3, 4), {}),
    "rows": (ValueError, r"has shape \(4, 4, 4\); needs \(4 or 1, 3, 4\)", some(4, 4, 4), {}),
    "columns": (ValueError, r"has shape \(1, 3, 3\); needs \(4 or 1, 3, 4\)", some(1, 3, 3), {}),
    "axes": (ValueError, r"has shape \(3, 4\); needs \(4 or 1, 3, 4\)", some(3, 4), {}),
    "size 0": (ValueError, "block_size is 0; needs an int >= 1", some(1, 3, 4), {"block_size": 0}),
    "size 1": (
        NotImplementedError,
        "block_size is 1; supported are multiples of 32, the largest tile",
        some(1, 70, 100),
        {"block_size": 1},
    ),
    "size": (TypeError, "block_size is 32.0; needs an int", some(1, 3, 4), {"block_size": 32.0}),
    "bool": (TypeError, "block_size is True; needs an int", some(1, 70, 100), {"block_size": True}),
    "tiles": (
        NotImplementedError,
        "block_size is 48; supported are multiples of 32, the largest tile",
        some(1, 2, 3),
        {"block_size": 48},
    ),
    "predicate": (
        NotImplementedError,
        "block_mask is given together with a mask that has a predicate",
        some(1, 3, 4),
        {"mask": BLOCKS},
    ),
}


@pytest.mark.parametrize(("error", "says", "made", "options"), WRONG.values(), ids=WRONG)
def test_wrong_arguments_are_refused_by_name(device, error, says, made, options):
    q, k, v, _ = drawn(device)
    with pytest.raises(error, match=says):
        flash_attention(
            q, k, v, block_mask=made(device), **{"block_size": 32, "config": CONFIG, **options}
        )
