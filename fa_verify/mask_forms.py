"""Compare the forms of a mask: definition, dense tensor, jit predicate and block maps.

No attention is computed, so hundreds of examples take a second. Their parameters and lengths are
small, and lie near the edges of the mask.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from functools import partial
from random import Random
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from fa_kernels.configs import Config, Tile
from fa_kernels.kernels.common.jit import kernel
from fa_kernels.kernels.common.mask import AttentionMask, element_mask
from fa_kernels.schedule.block_sparse import block_maps, predicate_of
from fa_verify.oracles.masks.mask import Mask, shown
from fa_verify.oracles.problem import Problem
from fa_verify.oracles.reference.torch_reference import RowMasks
from fa_verify.oracles.stream import integers
from fa_verify.properties.problems.mask_examples import mask_example, small_sizes
from fa_verify.properties.search.minimize import minimized

__all__ = [
    "FORMS",
    "Disagreement",
    "block_map_faults",
    "definition_faults",
    "first_disagreement",
    "kernel_faults",
    "relation_faults",
]

# Pairs whose definition is evaluated, one at a time: half of them beside an edge of the mask.
_SAMPLE = 100
# Side of the tiles of the jit predicate. The interpreter takes as long for large tiles as for
# small ones.
_SIDE = {"cpu": 128, "cuda": 32}
_CONFIGS = (
    Config(forward=Tile(16, 16), dkdv=Tile(16, 16), dq=Tile(16, 16)),
    Config(forward=Tile(32, 16), dkdv=Tile(16, 32), dq=Tile(16, 16)),
    Config(forward=Tile(16, 64), dkdv=Tile(64, 16), dq=Tile(32, 32)),
    Config(forward=Tile(32, 32), dkdv=Tile(32, 32), dq=Tile(16, 64)),
    Config(forward=Tile(32, 16), dkdv=Tile(64, 16), dq=Tile(32, 32)),
)
_SAYS = {False: "hidden", True: "visible"}


class Disagreement(NamedTuple):
    """Two forms of a mask that disagree.

    Args:
        problem: The problem: its mask and sizes.
        first: The first form and what it says.
        second: The second form and what it says.
        place: (b, h, m, n) of the first pair on which they disagree; empty if it is no pair.
        count: The number of pairs on which they disagree, and the number of all pairs.
    """

    problem: Problem
    first: tuple[str, str]
    second: tuple[str, str]
    place: tuple[int, ...] = ()
    count: tuple[int, int] = (0, 0)

    @property
    def guarantee(self) -> str:
        """The names of the two forms."""
        return f"{self.first[0]} and {self.second[0]}"

    def __str__(self) -> str:
        where = f"M={self.problem.M}, N={self.problem.N}"
        if self.place:
            b, h, m, n = self.place
            where = f"at (m, n) = ({m}, {n}), b={b}, h={h}, {where}"
        lines = [f"two forms of the mask {shown(self.problem.mask)} disagree, {where}"]
        lines += [f"  {name} says {what}" for name, what in (self.first, self.second)]
        differing, pairs = self.count
        if differing > 1:
            lines.append(f"  they differ at {differing} of {pairs} pairs")
        return "\n".join(lines)


def _dense(problem: Problem) -> torch.Tensor:
    """Return the dense mask, bool of shape (B, H, M, N), on the problem's device."""
    sizes = problem.B, problem.H, problem.M, problem.N
    return problem.mask.dense(*sizes, device=problem.device).expand(sizes)


def _differing(
    problem: Problem, first: str, got: torch.Tensor, second: str, want: torch.Tensor
) -> list[Disagreement]:
    """Describe the first difference of two bool tensors (B, H, M, N); empty if they are equal."""
    places = (got != want).nonzero().tolist()
    if not places:
        return []
    place = tuple(places[0])
    says = _SAYS[bool(got[place])], _SAYS[bool(want[place])]
    count = len(places), want.numel()
    return [Disagreement(problem, (first, says[0]), (second, says[1]), place, count)]


def definition_faults(problem: Problem) -> list[Disagreement]:
    """Compare the dense form, and the rows that the oracle reads, with ``Mask.is_visible``.

    Evaluates ``is_visible`` on a sample of 100 pairs, half of them beside an edge of the mask.
    """
    B, H, M, N = sizes = problem.B, problem.H, problem.M, problem.N
    dense = _dense(problem)
    if not dense.numel():
        return []
    # On a CPU, where a pair takes no launch.
    dense = dense.cpu()
    want = dense.clone()
    for b, h, m, n in _sample(problem, dense):
        want[b, h, m, n] = problem.mask.is_visible(b, h, m, n, M=M, N=N)
    rows = RowMasks(problem.mask, *sizes, torch.device(problem.device))
    chunks = [
        rows.between(start, min(start + 7, M)).expand(B, H, -1, N) for start in range(0, M, 7)
    ]
    read = torch.cat(chunks, 2).cpu()
    return [
        *_differing(problem, "the definition is_visible", want, "the dense tensor", dense),
        *_differing(problem, "the mask in the oracle, a few rows at a time,", read,
                    "the dense tensor", dense),
    ]  # fmt: skip


def _sample(problem: Problem, dense: torch.Tensor) -> list[list[int]]:
    """Draw places (b, h, m, n) of a dense mask, half of them beside an edge."""
    edge = torch.zeros(dense.shape, dtype=torch.bool, device=dense.device)
    down, across = dense[:, :, 1:] != dense[:, :, :-1], dense[..., 1:] != dense[..., :-1]
    for part, differs in (
        (edge[:, :, 1:], down),
        (edge[:, :, :-1], down),
        (edge[..., 1:], across),
        (edge[..., :-1], across),
    ):
        part |= differs
    places = []
    for of in (edge, torch.ones_like(dense)):
        found = of.nonzero()
        if len(found):
            drawn = integers(problem.seed, "mask forms", (_SAMPLE // 2,)).abs() >> 8
            places += found[drawn.remainder(len(found)).to(found.device)].tolist()
    return places


@kernel
def _seen_kernel(
    seen_ptr, q_ptr, k_ptr, H: tl.int32, M: tl.int32, N: tl.int32, left: tl.int32, right: tl.int32,
    args, BLOCK: tl.constexpr, PREDICATE: tl.constexpr, KEYS_FIRST: tl.constexpr,
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


def kernel_faults(problem: Problem, orders: Sequence[bool] = (False, True)) -> list[Disagreement]:
    """Compare the jit predicate, evaluated inside a kernel, with the dense form.

    Args:
        problem: The problem.
        orders: Whether the keys are the first axis of a tile, for each comparison.

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
    side = _SIDE[problem.device]
    faults = []
    for keys_first in orders:
        seen = torch.zeros((B, H, M, N), dtype=torch.int8, device=device)
        grid = B * H, triton.cdiv(M, side), triton.cdiv(N, side)
        _seen_kernel[grid](
            seen, *_lengths(problem), H, M, N, *_window(problem), args,
            BLOCK=side, PREDICATE=function, KEYS_FIRST=keys_first,
        )  # fmt: skip
        order = "keys by rows" if keys_first else "rows by keys"
        name = f"the jit predicate, {order},"
        faults += _differing(problem, name, seen.bool(), "the dense tensor", dense)
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


def block_map_faults(problem: Problem, configs: Sequence[Config] = _CONFIGS) -> list[Disagreement]:
    """Compare the tiles that a kernel would visit with the tiles derived from the dense form."""
    B, H, M, N = problem.B, problem.H, problem.M, problem.N
    dense = _dense(problem)
    if not dense.numel() or problem.mask.is_plain:
        return []
    rows, keys = _lengths(problem)
    # The lists are derived on a CPU: they ask for the elements of every tile.
    dense = dense.cpu()
    valid_rows = torch.arange(M) < rows.cpu()[:, None]
    valid_keys = torch.arange(N) < keys.cpu()[:, None]
    faults = []
    for config in configs:
        maps = block_maps(
            problem.mask, B, H, problem.Hk, M, N, _window(problem), (rows, keys), config
        )
        for name, tile in (("forward", config.forward), ("dkdv", config.dkdv), ("dq", config.dq)):
            turned = name == "dkdv"
            seen, valid = (dense.mT, valid_keys) if turned else (dense, valid_rows)
            side = (tile.block_n, tile.block_m) if turned else (tile.block_m, tile.block_n)
            form = f"the block map of {name}, tiles {tile.block_m}x{tile.block_n},"
            lists = getattr(maps, name).lists.tolist()
            for b, h in itertools.product(range(B), range(H)):
                want = _lists(seen[b, h], valid[b], side)
                got = [_read(row) for row in lists[b][h]]
                # Entries for tiles past the end must be empty; their number does not matter.
                want += [([], [])] * (len(got) - len(want))
                row = next((i for i in range(len(want)) if got[i : i + 1] != [want[i]]), None)
                if row is not None:
                    mine = got[row] if row < len(got) else ([], [])
                    says, pair = _wrong_tile(seen[b, h], valid[b], side, row, mine, want[row])
                    place = (b, h, *(pair[::-1] if turned else pair))
                    faults.append(
                        Disagreement(problem, (form, says[0]), ("the dense tensor", says[1]), place)
                    )
    return faults


def _wrong_tile(
    seen: torch.Tensor,
    valid: torch.Tensor,
    side: tuple[int, int],
    row: int,
    got: tuple[list[int], list[int]],
    want: tuple[list[int], list[int]],
) -> tuple[tuple[str, str], tuple[int, int]]:
    """Return what two lists say of the first tile in which they differ, and a pair that shows it.

    Args:
        seen: Whether a row sees a column, bool of shape (rows, columns).
        valid: Whether a row is valid, bool of shape (rows,).
        side: Rows and columns of a tile.
        row: The row of tiles.
        got: (partial tiles, full tiles) of the block map.
        want: (partial tiles, full tiles) that the dense mask gives.
    """
    mine, derived = (
        {
            tile: kind
            for kind, tiles in zip(("partial", "full"), lists, strict=True)
            for tile in tiles
        }
        for lists in (got, want)
    )
    differing = [i for i in sorted({*mine, *derived}) if mine.get(i) != derived.get(i)]
    if not differing:
        return (f"(partial tiles, full tiles) = {got}", f"they are {want}"), (row * side[0], 0)
    tile = differing[0]
    said, true = mine.get(tile, "hidden"), derived.get(tile, "hidden")
    start = row * side[0], tile * side[1]
    part = seen[start[0] : start[0] + side[0], start[1] : start[1] + side[1]]
    pair = start
    if said == "full":
        # Without a hidden pair of a valid row, the tile exceeds the columns.
        hidden = (~part & valid[start[0] : start[0] + side[0], None]).nonzero().tolist()
        pair = (start[0], seen.shape[1])
        if hidden:
            pair = start[0] + hidden[0][0], start[1] + hidden[0][1]
    elif said == "hidden":
        first = part.nonzero().tolist()[0]
        pair = start[0] + first[0], start[1] + first[1]
    inside = pair[0] < seen.shape[0] and pair[1] < seen.shape[1]
    kind = _SAYS[bool(seen[pair])] if inside else "past the end"
    return (f"its tile is {said}", f"its tile is {true}, and the pair is {kind}"), pair


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


def relation_faults(problem: Problem) -> list[Disagreement]:
    """Check a mask's JSON round trip, its combinations with a window, and slices of its batch."""
    mask, dense = problem.mask, _dense(problem)
    faults = []
    if Problem.from_json(problem.to_json()) != problem:
        said = f"a different problem: {problem.to_json()}"
        faults.append(Disagreement(problem, ("the problem", "itself"), ("its JSON", said)))
    window = Mask(window_left=5, window_right=2)
    lengths = {"seqlens_q": mask.seqlens_q, "seqlens_k": mask.seqlens_k}
    other = _dense(dataclasses.replace(problem, mask=dataclasses.replace(window, **lengths)))
    for name, combined, want in (
        ("mask & window", mask & window, dense & other),
        ("window | mask", window | mask, dense | other),
    ):
        changed = dataclasses.replace(problem, mask=combined)
        parts = f"the two dense tensors of {name}"
        faults += _differing(changed, f"the dense tensor of {name}", _dense(changed), parts, want)
        faults += _of_jit(changed)
    entries, heads = tuple(range(problem.B))[::-1], tuple(range(problem.H))[::-1]
    turned = dataclasses.replace(problem, mask=mask.sliced(entries, heads))
    want = dense.flip(0, 1)
    if mask.uniform:
        want = dense.flip(0)
        first = dense[:, :1].expand_as(dense)
        faults += _differing(problem, "the dense tensor", dense, "uniform=True", first)
    whole = "the dense tensor of the whole mask"
    faults += _differing(
        turned, "the mask of entries and heads in reverse order", _dense(turned), whole, want
    )
    return faults + _of_jit(turned)


def _of_jit(problem: Problem) -> list[Disagreement]:
    """Compare the jit predicate with the dense form, if the mask has one."""
    try:
        return kernel_faults(problem, orders=(False,))
    except NotImplementedError:
        return []


FORMS: dict[str, Callable[[Problem], list[Disagreement]]] = {
    "definition": definition_faults,
    "kernel": kernel_faults,
    "block_map": block_map_faults,
    "relation": relation_faults,
}
# Problems that are drawn to compare a form, and the batch entries of each. Every entry is an
# example, and all of them are evaluated at once: a GPU takes as long for one as for all.
_PROBLEMS = {"definition": 64, "kernel": 64, "block_map": 24, "relation": 24}
_ENTRIES = 4


def first_disagreement(
    form: str, mask: type[Mask], device: str, rng: Random
) -> Disagreement | None:
    """Draw masks of a class, compare one of their forms, and return the simplest disagreement.

    Args:
        form: A key of ``FORMS``.
        mask: The class of masks.
        device: "cpu" or "cuda".
        rng: The source of random numbers.

    Raises:
        NotImplementedError: The mask has no jit predicate, which the form needs.
    """
    for number in range(_PROBLEMS[form]):
        compare, sizes, entries = FORMS[form], small_sizes(mask), _ENTRIES
        if form == "kernel":
            compare = partial(kernel_faults, orders=(bool(number % 2),))
        if form == "block_map":
            config = rng.choice(_CONFIGS)
            compare = partial(block_map_faults, configs=(config,))
            sizes, entries = _around_tiles(config), 2
        problem = mask_example(rng, mask, sizes=sizes, entries=entries, device=device)
        if faults := compare(problem):
            return minimized(problem, faults, partial(_if_valid, compare))[0]
    return None


def _around_tiles(config: Config) -> tuple[int, ...]:
    """Return sizes at the edges of tiles."""
    tiles = config.forward, config.dkdv, config.dq
    largest = max(max(tile.block_m, tile.block_n) for tile in tiles)
    return (1, 15, 16, 17, 31, 32, 33, largest - 1, largest, largest + 1)


def _if_valid(
    compare: Callable[[Problem], list[Disagreement]], problem: Problem
) -> list[Disagreement]:
    """Return the disagreements of a simplified problem; none if its mask does not take it."""
    try:
        return compare(problem)
    except (ValueError, IndexError, NotImplementedError):
        return []
