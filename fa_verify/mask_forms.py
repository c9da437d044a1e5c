"""Compare the forms of a mask: definition, dense tensor, jit predicate and block maps."""

from __future__ import annotations

import dataclasses
import itertools

import torch
import triton
import triton.language as tl

from fa_kernels.configs import Config, Tile
from fa_kernels.kernels.common.mask import AttentionMask, element_mask
from fa_kernels.schedule.block_sparse import block_maps, predicate_of
from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.problem import Problem
from fa_verify.oracles.reference.torch_reference import RowMasks
from fa_verify.oracles.stream import integers

__all__ = ["block_map_faults", "definition_faults", "kernel_faults", "relation_faults"]

_SAMPLE = 400
_TILE = 16
_CONFIGS = (
    Config(forward=Tile(16, 16), dkdv=Tile(16, 16), dq=Tile(16, 16)),
    Config(forward=Tile(32, 16), dkdv=Tile(16, 32), dq=Tile(16, 16)),
    Config(forward=Tile(16, 64), dkdv=Tile(64, 16), dq=Tile(32, 32)),
    Config(forward=Tile(32, 32), dkdv=Tile(32, 32), dq=Tile(16, 64)),
    Config(forward=Tile(32, 16), dkdv=Tile(64, 16), dq=Tile(32, 32)),
)


def _dense(problem: Problem) -> torch.Tensor:
    """Return the dense mask, bool of shape (B, H, M, N), on the problem's device."""
    sizes = problem.B, problem.H, problem.M, problem.N
    return problem.mask.dense(*sizes, device=problem.device).expand(sizes)


def _differing(what: str, got: torch.Tensor, want: torch.Tensor) -> list[str]:
    """Describe the first difference of two bool tensors (B, H, M, N); empty if they are equal."""
    places = (got != want).nonzero().tolist()
    if not places:
        return []
    at = " ".join(f"{axis}={i}" for axis, i in zip("bhmn", places[0], strict=True))
    says = "visible" if bool(got[tuple(places[0])]) else "hidden"
    return [f"{what} says {says} at {at}, and differs at {len(places)} of {want.numel()} places"]


def definition_faults(problem: Problem) -> list[str]:
    """Compare the dense form, and the rows that the oracle reads, with ``Mask.is_visible``.

    Checks a sample of 400 elements of the dense form.
    """
    B, H, M, N = sizes = problem.B, problem.H, problem.M, problem.N
    dense = _dense(problem)
    if not dense.numel():
        return []
    drawn = integers(problem.seed, "mask forms", (_SAMPLE, 4)).abs()
    want = dense.clone()
    for b, h, m, n in (drawn >> 8).remainder(torch.tensor(sizes)).tolist():
        want[b, h, m, n] = problem.mask.is_visible(b, h, m, n, M=M, N=N)
    rows = RowMasks(problem.mask, *sizes, torch.device(problem.device))
    chunks = [
        rows.between(start, min(start + 7, M)).expand(B, H, -1, N) for start in range(0, M, 7)
    ]
    return _differing("the dense form", dense, want) + _differing(
        "the oracle's reading", torch.cat(chunks, 2), dense
    )


@triton.jit
def _seen_kernel(
    seen_ptr, q_ptr, k_ptr, H, M, N, left, right, args,
    BLOCK: tl.constexpr, PREDICATE: tl.constexpr, KEYS_FIRST: tl.constexpr,
):  # fmt: skip
    bh, m_block, n_block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    b, h = bh // H, bh % H
    mask = AttentionMask(tl.load(q_ptr + b), tl.load(k_ptr + b), left, right, b, h, args)
    m = m_block * BLOCK + tl.arange(0, BLOCK)
    n = n_block * BLOCK + tl.arange(0, BLOCK)
    if (m_block * BLOCK < mask.seqlen_q) & (n_block * BLOCK < mask.seqlen_k):
        if KEYS_FIRST:
            seen = element_mask(m[None, :], n[:, None], mask, PREDICATE)
            at, inside = m[None, :] * N + n[:, None], (m[None, :] < M) & (n[:, None] < N)
        else:
            seen = element_mask(m[:, None], n[None, :], mask, PREDICATE)
            at, inside = m[:, None] * N + n[None, :], (m[:, None] < M) & (n[None, :] < N)
        tl.store(seen_ptr + bh * M * N + at, seen.to(tl.int8), mask=inside)


def kernel_faults(problem: Problem) -> list[str]:
    """Compare the jit predicate, evaluated inside a kernel, with the dense form.

    Raises:
        NotImplementedError: The mask has no jit predicate.
    """
    B, H, M, N = problem.B, problem.H, problem.M, problem.N
    dense = _dense(problem)
    if not dense.numel():
        return []
    device = torch.device(problem.device)
    predicate = predicate_of(problem.mask, B, H, M, N, device)
    function, args = (None, (0,)) if predicate is None else predicate
    faults = []
    for keys_first in (False, True):
        seen = torch.zeros((B, H, M, N), dtype=torch.int8, device=device)
        grid = B * H, triton.cdiv(M, _TILE), triton.cdiv(N, _TILE)
        _seen_kernel[grid](
            seen, *_lengths(problem), H, M, N, *_window(problem), args,
            BLOCK=_TILE, PREDICATE=function, KEYS_FIRST=keys_first,
        )  # fmt: skip
        order = "keys by rows" if keys_first else "rows by keys"
        faults += _differing(f"the jit predicate, {order},", seen.bool(), dense)
    return faults


def _lengths(problem: Problem) -> tuple[torch.Tensor, torch.Tensor]:
    rows, keys = problem.mask.lengths(problem.B, problem.M, problem.N)
    both = torch.tensor([rows, keys], dtype=torch.int32, device=problem.device)
    return both[0], both[1]


def _window(problem: Problem) -> tuple[int, int]:
    far = problem.M + problem.N
    mask = problem.mask
    left, right = (far if x is None else min(x, far) for x in (mask.window_left, mask.right))
    return left, right


def block_map_faults(problem: Problem) -> list[str]:
    """Compare the tiles that a kernel would visit with the tiles derived from the dense form."""
    B, H, M, N = problem.B, problem.H, problem.M, problem.N
    dense = _dense(problem)
    if not dense.numel() or problem.mask.is_plain:
        return []
    rows, keys = _lengths(problem)
    valid_rows = torch.arange(M, device=dense.device) < rows[:, None]
    valid_keys = torch.arange(N, device=dense.device) < keys[:, None]
    faults = []
    for config in _CONFIGS:
        maps = block_maps(
            problem.mask, B, H, problem.Hk, M, N, _window(problem), (rows, keys), config
        )
        for name, tile in (("forward", config.forward), ("dkdv", config.dkdv), ("dq", config.dq)):
            turned = name == "dkdv"
            seen, valid = (dense.mT, valid_keys) if turned else (dense, valid_rows)
            side = (tile.block_n, tile.block_m) if turned else (tile.block_m, tile.block_n)
            for b, h in itertools.product(range(B), range(H)):
                want = _lists(seen[b, h], valid[b], side)
                got = [_read(row) for row in getattr(maps, name).lists[b, h].tolist()]
                # Entries for tiles past the end must be empty; their number does not matter.
                if got[: len(want)] != want or any(x != ([], []) for x in got[len(want) :]):
                    faults.append(
                        f"the block map of {name}, tiles {tile.block_m}x{tile.block_n}, b={b} "
                        f"h={h}: (partial tiles, full tiles) are {got}, need to be {want}"
                    )
    return faults


def _read(row: list[int]) -> tuple[list[int], list[int]]:
    """Return (partial tiles, full tiles) of one row of a block map."""
    mixed, full = row[:2]
    return row[2 : 2 + mixed], row[2 + mixed : 2 + mixed + full]


def _lists(
    seen: torch.Tensor, valid: torch.Tensor, side: tuple[int, int]
) -> list[tuple[list[int], list[int]]]:
    """Derive (partial tiles, full tiles) per row of tiles from a dense mask of shape (M, N).

    A tile is full if it lies inside the tensor and every valid row sees all of its elements.

    Args:
        seen: Whether a row sees a column, bool of shape (rows, columns).
        valid: Whether a row is valid, bool of shape (rows,).
        side: Rows and columns of a tile.
    """
    lists = []
    for start in range(0, seen.shape[0], side[0]):
        here = seen[start : start + side[0]]
        of_valid = here[valid[start : start + side[0]]]
        mixed: list[int] = []
        full: list[int] = []
        for tile, first in enumerate(range(0, seen.shape[1], side[1])):
            part = here[:, first : first + side[1]]
            if part.any():
                whole = part.shape[1] == side[1] and bool(
                    of_valid[:, first : first + side[1]].all()
                )
                (full if whole else mixed).append(tile)
        lists.append((mixed, full))
    return lists


def relation_faults(problem: Problem) -> list[str]:
    """Check a mask's JSON round trip, its combinations with a window, and slices of its batch."""
    mask, dense = problem.mask, _dense(problem)
    faults = []
    if Problem.from_json(problem.to_json()) != problem:
        faults.append(f"from_json(to_json()) returns a different problem: {problem.to_json()}")
    window = Mask(window_left=5, window_right=2)
    lengths = {"seqlens_q": mask.seqlens_q, "seqlens_k": mask.seqlens_k}
    other = _dense(dataclasses.replace(problem, mask=dataclasses.replace(window, **lengths)))
    for name, combined, want in (
        ("mask & window", mask & window, dense & other),
        ("window | mask", window | mask, dense | other),
    ):
        changed = dataclasses.replace(problem, mask=combined)
        faults += _differing(name, _dense(changed), want)
        faults += [f"{name}: {fault}" for fault in kernel_faults(changed)]
    entries, heads = tuple(range(problem.B))[::-1], tuple(range(problem.H))[::-1]
    turned = dataclasses.replace(problem, mask=mask.sliced(entries, heads))
    want = dense.flip(0, 1)
    if mask.uniform:
        want = dense.flip(0)
        if bool((dense != dense[:, :1]).any()):
            faults.append("the mask declares uniform=True, and its dense form depends on the head")
    faults += _differing("entries and heads in reverse order", _dense(turned), want)
    return faults + [f"reversed: {fault}" for fault in kernel_faults(turned)]
