"""Problems in which every three values of shape and mask occur together, by the declarations.

Draws leave conjunctions to chance: a fault that needs grouped heads, a window and a ragged second
tile is met by few of a thousand problems.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any, NamedTuple

from fa_verify.oracles.masks.document import Document
from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.masks.prefix_lm import PrefixLM
from fa_verify.oracles.masks.sink_window import SinkWindow
from fa_verify.oracles.problem import LAYOUTS, TENSORS, Problem
from fa_verify.properties.inputs.alibi_families import NO_ALIBI
from fa_verify.properties.inputs.bias_families import NO_BIAS
from fa_verify.properties.inputs.dlse_families import NO_DLSE
from fa_verify.properties.inputs.padding_values import PADDING_VALUES
from fa_verify.properties.inputs.sink_families import NO_SINKS
from fa_verify.properties.kernels.covering_calls import CoveringCalls
from fa_verify.properties.kernels.declared_values import ANY_HEAD_DIM
from fa_verify.properties.kernels.subject import Subject
from fa_verify.properties.kernels.ways import WAY, seed_of, ways_of
from fa_verify.properties.problems.covering import Constraint, Row, covering, random_of
from fa_verify.properties.problems.mask_classes import instance_near

__all__ = ["SharedKernel", "cost_of", "covering_problems"]

# Stand for the rows and keys of a tile of a kernel that declares none. A problem has the largest
# with which it has no more pairs of a row and a key, over heads, than this; the smallest otherwise.
_TILE_SIZES, _PAIRS = (64, 32, 16), 2**17
# Each value of a factor is printed as it stands here.
_B, _H, _G = ("B=1", "B=2-3", "B=9"), ("H=1", "H=2-8", "H>16"), ("G=1", "G=2-4", "G>4")
_TILES = ("1 tile", "2 tiles", "3+ tiles")
_ENDS = _PAST, _RAGGED, _WHOLE = "one past a tile", "ragged", "whole"
_LESS, _SAME, _MORE = "M<N", "M=N", "M>N"
_INSIDE, _OVER, _ANY = "inside a tile", "over tiles", "of any width"
# Kernels of packed sequences keep running offsets, which empty sequences leave as they are.
_SOME_0, _PACKED_0 = "some lengths 0", ("first length 0", "last length 0", "two lengths 0 in a row")
_SMALLEST: dict[str, int] = {
    **dict(zip(_B, (1, 2, 9), strict=True)), **dict(zip(_H, (1, 2, 17), strict=True)),
    **dict(zip(_TILES, (1, 2, 3), strict=True)),
}  # fmt: skip
# Most tiles along a side.
_MOST_TILES = 9
# Classes of head_dims: sizes up to each.
_CLASSES = (64, 128, 256)
# H and Hk, the fewest heads first.
_HEADS: dict[tuple[str, str], tuple[tuple[int, int], ...]] = {
    ("H=1", "G=1"): ((1, 1),),
    ("H=2-8", "G=1"): ((2, 2), (3, 3)),
    ("H=2-8", "G=2-4"): ((2, 1), (3, 1), (4, 2), (4, 1), (6, 2)),
    ("H=2-8", "G>4"): ((5, 1), (6, 1), (8, 1)),
    ("H>16", "G=1"): ((17, 17),),
    ("H>16", "G=2-4"): ((18, 9), (18, 6), (20, 5)),
    ("H>16", "G>4"): ((17, 1), (18, 2), (20, 4), (20, 2)),
}
_SHAPE = (
    "B", "H", "G", "tiles of M", "end of M", "tiles of N", "end of N", "M to N", "causal",
    "left window", "right window", "lengths", "D",
)  # fmt: skip
_MODS: dict[str, tuple[Any, Any]] = {
    "softcap": (None, 2.5), "alibi": (NO_ALIBI, "normal"), "bias": (NO_BIAS, "normal"),
    "sinks": (NO_SINKS, "ordinary"),
}  # fmt: skip
# A bias that entries, heads or rows share has the sum of their gradients. By what has one, the axes
# along which it varies.
_ONE_BIAS = {
    "each pair": "bhmn", "all entries": "hmn", "all heads": "bmn", "entries and heads": "mn",
    "entries and rows": "hn", "heads and rows": "bn", "all pairs": "",
}  # fmt: skip
# A row of which only words are read.
Words = Mapping[str, str]


class SharedKernel(NamedTuple):
    """A dtype, a configuration and a head_dim, for which other tests compile the kernel too.

    Args:
        dtype: Dtype of the inputs.
        config: Name of the tile configuration.
        head_dim: D and Dv.
        tile: Rows and keys of a tile.
    """

    dtype: str
    config: str
    head_dim: int
    tile: int


def cost_of(row: Row) -> int:
    """Return the least number of tile pairs of a row, which may lack factors."""
    least = {x: _SMALLEST.get(row.get(x, ""), 1) for x in ("B", "H", "tiles of M", "tiles of N")}
    if of_heads := _HEADS.get((row.get("H", ""), row.get("G", ""))):
        least["H"] = of_heads[0][0]
    # The interpreter takes longer for a large tile.
    large = max(1, row["kernel"].tile // 32) if "kernel" in row else 1
    return math.prod(least.values()) * large


def covering_problems(
    subject: Subject,
    device: str,
    *,
    most: int | None = None,
    pairs: bool = False,
    mask: type[Mask] | None = None,
    kernels: tuple[SharedKernel, ...] = (),
) -> CoveringCalls[Problem]:
    """Return problems in which every three values of shape and mask occur, and every two others.

    Inputs and dout are normal, so that nothing hides what a shape shows. Combinations that the
    declarations exclude do not count.

    Args:
        subject: The subject.
        device: "cpu" or "cuda".
        most: Limit on the tile pairs of a problem; None is no limit.
        pairs: Whether any two values of shape and mask suffice, and one of each other, without
            ways of calling.
        mask: A class of masks that every problem has.
        kernels: If there are any, every problem has one of these, and what selects further kernels
            does not vary.
    """
    factors = _factors(subject, mask, kernels)
    if not pairs:
        factors[WAY] = ways_of(subject, "attention")
    build = _Builder(subject, device, mask, smallest=most is not None)
    constraints = [
        *_constraints(subject),
        Constraint(tuple(factors), lambda row: subject.excludes(build(row)) is None),
    ]
    names = ("B", "H", "G", "tiles of M", "tiles of N", "kernel")
    within = None if most is None else Constraint(names, lambda row: cost_of(row) <= most)
    # Values in padding and ways do not meet layouts: their pairs would need most of the rows.
    others = [name for name in factors if name != "dirty"]
    apart = [
        [name for name in others if name != WAY], [*_SHAPE, "dirty"],
        [name for name in others if not name.startswith("layout")],
    ]  # fmt: skip
    strengths: list[tuple[Sequence[str], int]] = [(_SHAPE, 3), *((names, 2) for names in apart)]
    if pairs:
        strengths = [(_SHAPE, 2), ([*factors], 1)]
    array = covering(factors, strengths, constraints, within, subject.name)
    return CoveringCalls.of(array, build)


def _factors(
    subject: Subject, mask: type[Mask] | None, kernels: tuple[SharedKernel, ...]
) -> dict[str, tuple[Any, ...]]:
    """Return the values of each factor that the declarations leave more than one of."""
    step, most = subject.seqlen_multiple, subject.max_seqlen or math.inf
    tile = min((x.tile for x in kernels), default=min(_TILE_SIZES))
    tiles = tuple(x for i, x in enumerate(_TILES) if i * tile + 1 <= most)
    ends: tuple[str, ...] = _ENDS if step * 3 <= tile else (_PAST, _WHOLE)
    ends = ends if step < tile else (_WHOLE,)
    positions = () if mask is not None else subject.masks
    windows = "window" in positions
    causal: tuple[str, ...] = ("not causal", "causal") if "causal" in positions else ("not causal",)
    causal = ("causal",) if subject.always_causal else causal
    pads = "padding" in subject.masks
    found: dict[str, tuple[Any, ...]] = {
        "B": _B, "H": _H, "G": _G if subject.gqa else _G[:1],
        "tiles of M": () if subject.one_query else tiles,
        "end of M": () if subject.one_query else ends,
        "tiles of N": tiles, "end of N": ends,
        "M to N": () if subject.one_query else (_LESS, _SAME, _MORE),
        "causal": causal,
        "left window": ("none", _INSIDE, _OVER) if windows else ("none",),
        "right window": ("none", _ANY) if windows else ("none",),
        "lengths": ("none", *(_PACKED_0 if subject.varlen else (_SOME_0,)), "ragged")
        if pads else ("none",),
        "dirty": (subject.dirty or tuple(PADDING_VALUES)) if pads and not subject.varlen else (),
    }  # fmt: skip
    if kernels:
        found["kernel"] = kernels
    else:
        dims = _classes(subject.head_dims)
        found |= {"D": dims, "Dv": dims if subject.dv_ne_d else ()}
        dtypes = [x.get("dtypes", subject.dtypes) for x in subject.configs.values()]
        found["dtype"] = tuple(dict.fromkeys(y for x in dtypes for y in x))
        found["config"] = tuple(subject.configs)
        found |= {f"layout of {x}": subject.layouts or LAYOUTS for x in TENSORS}
        found |= {x: (f"no {x}", "used") for x in _MODS if x in subject.score_mods}
        if "bias" in found:
            found["one bias for"] = ("none", *_ONE_BIAS)
        if subject.lse_grad and subject.backward:
            found["gradient of lse"] = ("none", "used")
        if mask is None and "custom" in subject.masks and not subject.always_causal:
            found["mask"] = ("none", "of indices", "of a tensor", "composed")
    return {name: values for name, values in found.items() if values}


def _classes(head_dims: tuple[int, ...] | None) -> tuple[tuple[int, ...], ...]:
    """Return the head_dims by class."""
    known = sorted({*(head_dims or (*ANY_HEAD_DIM, 16, 24, 40, 64, 80, 128))})
    if len(known) <= len(_CLASSES):
        return tuple((x,) for x in known)
    bounds = zip((0, *_CLASSES), (*_CLASSES, math.inf), strict=False)
    groups = (tuple(x for x in known if low < x <= high) for low, high in bounds)
    return tuple(x for x in groups if x)


def _constraints(subject: Subject) -> list[Constraint]:
    """Return the constraints on rows, beside the declarations about whole problems."""

    def order(row: Words) -> bool:
        sizes = [
            (_TILES.index(row[f"tiles of {x}"]), _ENDS.index(row[f"end of {x}"])) for x in "MN"
        ]
        if sizes[0] == sizes[1]:
            return row["M to N"] == _SAME or row["end of M"] == _RAGGED
        return row["M to N"] == (_LESS if sizes[0] < sizes[1] else _MORE)

    def right(row: Words) -> bool:
        return row["causal"] == "not causal" or row["right window"] == "none"

    def over(row: Words) -> bool:
        return row["left window"] != _OVER or row["tiles of N"] != _TILES[0]

    def empty(row: Words) -> bool:
        return row["lengths"] in ("none", "ragged") or row["B"] != _B[0]

    def square(row: Words) -> bool:
        if subject.one_query:
            same = (row["tiles of N"], row["end of N"]) == (_TILES[0], _PAST)
        else:
            same = row["M to N"] == _SAME
        return same and row["lengths"] == "none"

    def aligned(row: Words) -> bool:
        positional = row["causal"] == "causal" or {row["left window"], row["right window"]} != {
            "none"
        }
        return not positional or square(row)

    dirty = (subject.dirty or tuple(PADDING_VALUES))[0]
    found = [
        Constraint(("H", "G"), lambda row: (row["H"], row["G"]) in _HEADS),
        Constraint(("tiles of M", "end of M", "tiles of N", "end of N", "M to N"), order),
        Constraint(("causal", "right window"), right),
        Constraint(("left window", "tiles of N"), over),
        Constraint(
            ("lengths", "dirty"), lambda row: row["lengths"] != "none" or row["dirty"] == dirty
        ),
        Constraint(
            ("bias", "one bias for"),
            lambda row: (row["bias"] == "used") == (row["one bias for"] != "none"),
        ),
    ]  # fmt: skip
    if not subject.m_ne_n:
        found.append(Constraint(("M to N",), lambda row: row["M to N"] == _SAME))
    if not subject.m_gt_n:
        found.append(Constraint(("M to N",), lambda row: row["M to N"] != _MORE))
    if subject.varlen:
        found.append(Constraint(("B", "lengths"), empty))
    if subject.causal_alignment == "top-left":
        of_sizes = ("tiles of N", "end of N") if subject.one_query else ("M to N",)
        of_windows = ("causal", "left window", "right window", *of_sizes, "lengths")
        found.append(Constraint(of_windows, aligned))
        of_class = ("mask", *of_sizes, "lengths")
        found.append(Constraint(of_class, lambda row: row["mask"] == "none" or square(row)))
    configs = subject.configs
    found.append(
        Constraint(
            ("dtype", "config"),
            lambda row: row["dtype"] in configs[row["config"]].get("dtypes", subject.dtypes),
        )
    )
    return found


class _Builder:
    """Makes the problem of a row. All that the row leaves open depends on it alone."""

    def __init__(
        self, subject: Subject, device: str, mask: type[Mask] | None, *, smallest: bool
    ) -> None:
        self.subject = subject
        self.device = device
        self.mask = mask
        # Whether a problem has the least sizes of its row.
        self.smallest = smallest

    def __call__(self, row: Row) -> Problem:
        rng = random_of(row)
        B = {"B=1": 1, "B=9": 9}.get(row["B"]) or rng.randint(2, 3 - self.smallest)
        if row["lengths"] == _PACKED_0[-1]:
            # Another sequence has keys.
            B = max(B, 3)
        of_heads = _HEADS[row["H"], row["G"]]
        H, Hk = of_heads[0] if self.smallest else rng.choice(of_heads)
        M, N = self._lengths(row, rng, B * H)
        D, Dv = self._head_dims(row, rng)
        dtype, config, *_ = row["kernel"] if "kernel" in row else (row["dtype"], row["config"])
        layouts = tuple(row.get(f"layout of {x}", "bhsd") for x in TENSORS)
        if "kernel" in row and self.subject.layouts:
            layouts = (self.subject.layouts[0],) * len(TENSORS)
        mods = {name: values[row.get(name) == "used"] for name, values in _MODS.items()}
        if mods["bias"] != NO_BIAS:
            mods["bias"] = f"normal/{_ONE_BIAS[row['one bias for']]}"
        ways = ways_of(self.subject, "attention")
        seed = seed_of(rng, ways, row[WAY]) if WAY in row else rng.randrange(2**31)
        scale = self.subject.sm_scale if self.subject.fixed_scale is not None else None
        return Problem(
            B=B, H=H, Hk=Hk, M=M, N=N, D=D, Dv=Dv, dtype=dtype, config=config, sm_scale=scale,
            mask=self._masked(row, rng, B, H, M, N), layouts=layouts, device=self.device,
            dirty=row.get("dirty", "zero"), seed=seed,
            dlse="normal" if row.get("gradient of lse") == "used" else NO_DLSE, **mods,
        )  # fmt: skip

    def _lengths(self, row: Row, rng: Random, heads: int) -> tuple[int, int]:
        """Return M and N."""
        step = self.subject.seqlen_multiple
        tile = -(-self._tile(row) // step) * step
        most = self.subject.max_seqlen or 2**31
        # As many tiles as the problem may cost, the same number for both lengths.
        room = math.isqrt(max(1, 4 * _PAIRS // heads)) // tile
        several = 3 if self.smallest else rng.randint(3, max(3, min(_MOST_TILES, room)))
        counts = {"1 tile": 1, "2 tiles": 2, "3+ tiles": several}

        def length(name: str) -> tuple[int, int]:
            """Return the smallest length with the tiles and end, and one past the largest."""
            start = (counts[row[f"tiles of {name}"]] - 1) * tile
            end = row[f"end of {name}"]
            if end == _RAGGED:
                return start + 2 * step, start + tile
            size = start + (step if end == _PAST else tile)
            return size, size + 1

        if self.subject.one_query:
            low, high = length("N")
            return 1, min(most, rng.randrange(low, high, step))
        of_m, of_n = length("M"), length("N")
        M, N = (rng.randrange(low, high, step) for low, high in (of_m, of_n))
        if of_m == of_n and of_m[1] - of_m[0] > step:
            relation = row["M to N"]
            while (relation == _SAME) != (M == N) or (relation == _LESS) != (M < N):
                M, N = (M, M) if relation == _SAME else (
                    rng.randrange(*of_m, step), rng.randrange(*of_n, step)
                )  # fmt: skip
        return min(M, most), min(N, most)

    def _tile(self, row: Row) -> int:
        """Return the rows and keys of a tile of the problem of a row."""
        if "kernel" in row:
            return int(row["kernel"].tile)
        most, cost = self.subject.max_seqlen or 2**31, cost_of(row)
        fitting = (x for x in _TILE_SIZES if cost * x**2 <= _PAIRS and 2 * x < most)
        return next(fitting, min(_TILE_SIZES))

    def _head_dims(self, row: Row, rng: Random) -> tuple[int, int]:
        if "kernel" in row:
            return row["kernel"].head_dim, row["kernel"].head_dim
        D = rng.choice(row["D"])
        return D, rng.choice(row["Dv"]) if "Dv" in row else D

    def _masked(self, row: Row, rng: Random, B: int, H: int, M: int, N: int) -> Mask:
        tile = self._tile(row)
        inside, over = (0, min(tile, N)), (min(tile, N - 1), N)
        widths = {"none": (0, 1), _INSIDE: inside, _OVER: over, _ANY: (0, N)}
        left, right = (
            None if row[side] == "none" else rng.randrange(*widths[row[side]])
            for side in ("left window", "right window")
        )
        mask, kind = Mask(), row.get("mask", "none")
        if self.mask is not None:
            mask = instance_near(rng, self.mask, B, H, M, N)
        elif kind == "of a tensor":
            mask = instance_near(rng, Document, B, H, M, N)
        elif kind != "none":
            mask = PrefixLM(prefix=rng.randint(1, N))
            mask = (
                mask & SinkWindow(width=rng.randint(1, N), sinks=2) if kind == "composed" else mask
            )
        if self.mask is None:
            mask = dataclasses.replace(
                mask, causal=row["causal"] == "causal", window_left=left, window_right=right
            )
        rows, keys = self._ragged(row, rng, B, M, N)
        return dataclasses.replace(mask, seqlens_q=rows, seqlens_k=keys)

    def _ragged(
        self, row: Row, rng: Random, B: int, M: int, N: int
    ) -> tuple[tuple[int, ...] | None, tuple[int, ...] | None]:
        """Return the lengths of queries and keys."""
        if row["lengths"] == "none":
            return None, None
        keys = [rng.randint(1, N) for _ in range(B)]
        rows = [rng.randint(1, M) for _ in range(B)]
        if row["lengths"] == _SOME_0:
            keys[rng.randrange(B)] = 0
            if B > 1 and rng.random() < 0.5:
                rows[rng.randrange(B)] = 0
        elif row["lengths"] in _PACKED_0:
            first, last, _ = _PACKED_0
            start = rng.randrange(B - 1)
            places = {first: (0,), last: (B - 1,)}.get(row["lengths"], (start, start + 1))
            without_rows = rng.random() < 0.5
            for b in places:
                keys[b] = 0
                rows[b] = 0 if without_rows else rows[b]
        elif B > 1:
            keys[rng.randrange(B)] = N
        with_rows = not self.subject.one_query and rng.random() < 0.5
        if not self.subject.m_gt_n:
            rows = [min(m, n) for m, n in zip(rows, keys, strict=True)]
            with_rows = True
        return tuple(rows) if with_rows and not self.subject.one_query else None, tuple(keys)
