"""Steps for mutants of Hopper's kernels, which run in the emulation."""

from __future__ import annotations

from typing import Any

from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.problem import Problem
from tests.mutation.judging.trials import Step

__all__ = ["ON_HOPPER", "PROBLEMS"]

_PADDED = Mask(causal=True, seqlens_q=(150, 64), seqlens_k=(150, 67))
# The first sequence has no keys.
_PADDED_KEYS = Mask(causal=True, seqlens_q=(70, 70), seqlens_k=(0, 290))
_FAR = Mask(window_left=60, window_right=90)
_WINDOW = Mask(window_left=70, window_right=3)
# Packed, with enough short sequences beside a long one that the kernels enumerate the tiles of all
# sequences in one grid axis. One has far more query tiles than key tiles, one the reverse.
_ROWS_IN_A_ROW = Mask(causal=True, seqlens_q=(3, 500, 0, 70, 1), seqlens_k=(10, 60, 20, 50, 5))
_KEYS_IN_A_ROW = Mask(causal=True, seqlens_q=(3, 60, 2, 40, 0), seqlens_k=(10, 500, 0, 67, 1))
_ONE: dict[str, Any] = {"M": 150, "N": 200, "D": 64, "Dv": 64, "dtype": "bf16"}


def _problem(**fields: Any) -> Problem:
    """A problem of one head, several tiles and a backward in one pass, unless given otherwise."""
    return Problem(**{**_ONE, "config": "default-one_pass", **fields})


PROBLEMS = {
    "full": _problem(),
    "causal": _problem(mask=Mask(causal=True), dtype="fp16"),
    # The two-pass problems come early: only they test the kernel of dq.
    "two passes": _problem(H=2, Hk=1, mask=_WINDOW, config="default"),
    "two passes, padded": _problem(
        B=2,
        M=64,
        N=300,
        mask=Mask(seqlens_q=(64, 40), seqlens_k=(290, 67)),
        dirty="nan",
        config="default",
    ),
    "two passes, many tiles, wide": _problem(
        M=70, N=700, D=128, Dv=128, mask=Mask(seqlens_k=(690,)), dirty="nan", config="default"
    ),
    "two passes, no key": _problem(mask=Mask(causal=True), N=40, config="default"),
    "two passes, wide": _problem(M=300, N=500, D=128, Dv=128, mask=_FAR, config="default"),
    "two passes, entries, group": _problem(B=2, H=4, Hk=2, M=70, N=140, config="default"),
    "two passes, two head_dims": _problem(D=128, Dv=64, config="default"),
    "two passes, wide values": _problem(D=48, Dv=104, N=400, mask=_FAR, config="default"),
    # Sequences with equal numbers of tiles; far more keys than rows, and the reverse.
    "packed": _problem(
        B=2,
        M=70,
        N=300,
        mask=Mask(causal=True, seqlens_q=(70, 64), seqlens_k=(300, 290)),
        dirty="nan",
        config="default-packed",
    ),
    "packed, one pass": _problem(
        B=2,
        M=300,
        N=140,
        mask=Mask(seqlens_q=(300, 250), seqlens_k=(130, 140)),
        dirty="inf",
        config="default-one_pass-packed",
    ),
    "packed rows in a row": _problem(
        B=5, H=2, M=500, N=60, mask=_ROWS_IN_A_ROW, dirty="nan", config="default-packed"
    ),
    "packed keys in a row": _problem(
        B=5,
        H=4,
        Hk=2,
        M=60,
        N=500,
        mask=_KEYS_IN_A_ROW,
        D=128,
        Dv=128,
        dirty="nan",
        config="default-one_pass-packed",
    ),
    # Sinks of several heads and entries, beside rows without a visible key; and packed.
    "sinks": _problem(
        B=2, H=4, Hk=2, N=150, mask=_PADDED, dirty="nan", sinks="some_absent", dlse="normal"
    ),
    "sinks, packed, wide": _problem(
        B=2,
        H=2,
        D=128,
        Dv=128,
        mask=Mask(causal=True, seqlens_q=(150, 60), seqlens_k=(100, 3)),
        sinks="dominant",
        config="default-packed",
    ),
    # Three edge tiles before the full ones, for one head and for groups of two.
    "causal, wide": _problem(M=330, N=330, D=128, Dv=128, mask=Mask(causal=True)),
    "group, wide": _problem(H=4, Hk=2, M=200, N=200, D=128, Dv=128, mask=Mask(causal=True)),
    # Tiles of three and of two blocks of rows.
    "narrow tiles": _problem(M=570, config="default"),
    "narrow tiles, causal": _problem(M=450, N=450, mask=Mask(causal=True), config="default"),
    "narrow tiles, wide": _problem(M=300, D=128, Dv=128, config="default"),
    "window": _problem(mask=_WINDOW, D=128, Dv=128, dirty="max"),
    "padded": _problem(B=2, N=150, mask=_PADDED, dirty="nan"),
    "padded, wide": _problem(B=2, N=150, mask=_PADDED, dirty="inf", D=128, Dv=128),
    "padded behind a tile": _problem(M=300, mask=Mask(seqlens_q=(200,)), dirty="nan"),
    # Padding in the last of several edge tiles.
    "padded behind edges": _problem(
        M=300, mask=Mask(causal=True, seqlens_q=(290,), seqlens_k=(200,)), dirty="nan"
    ),
    "group": _problem(H=4, Hk=2, mask=Mask(causal=True)),
    "turns": _problem(B=2, H=4, Hk=2, M=70, N=300, mask=_PADDED_KEYS, dirty="nan"),
    "turns far from the first key": _problem(H=8, Hk=2, M=70, N=500, mask=_FAR, config="default"),
    "entries": _problem(B=2, H=2, Hk=2, M=70, N=140, mask=_WINDOW),
    "two head_dims": _problem(D=128, Dv=64),
    "two head_dims, narrow keys": _problem(B=2, D=64, Dv=128),
    "two head_dims, wide values": _problem(D=48, Dv=104, mask=_WINDOW),
    "no key": _problem(mask=Mask(causal=True), N=40),
    "one tile": _problem(M=5, N=7),
    "many tiles": _problem(M=70, N=700),
    "many tiles, wide": _problem(M=70, N=700, D=128, Dv=128),
    "far from the first key": _problem(M=300, N=500, mask=_FAR),
    # Rows that see no key in the first tiles and few in the next.
    "far, and far below 1": _problem(M=300, N=500, mask=_FAR, inputs="lse_low_130"),
    # The last rows of a tile see no key in two consecutive key tiles.
    "far from two key tiles": _problem(M=192, N=379, mask=Mask(window_left=60), config="default"),
    # Maxima that rise in some rows of a tile only; maxima that rise in every key tile.
    "rising, wide": _problem(
        M=200, N=500, D=128, Dv=128, mask=Mask(causal=True), inputs="rising_max"
    ),
    "rising slowly, wide": _problem(
        M=64, N=1500, D=128, Dv=128, inputs="rising_max", config="default"
    ),
    # Two programs share a key tile, or a query tile.
    "shared tiles": _problem(M=570, N=700),
    "shared tiles, group, wide": _problem(H=2, M=300, N=600, D=128, Dv=128, config="default"),
    "shared tiles, padded": _problem(
        B=2, M=300, N=300, mask=Mask(seqlens_q=(300, 140), seqlens_k=(30, 290)), dirty="nan"
    ),
    "shared tiles, two passes, padded": _problem(
        B=2,
        M=300,
        N=300,
        mask=Mask(seqlens_q=(300, 140), seqlens_k=(30, 290)),
        dirty="inf",
        D=128,
        Dv=128,
        config="default",
    ),
    "rising": _problem(N=500, inputs="rising_max"),
    "far above 1": _problem(M=70, N=140, inputs="lse_high_6e4", dtype="fp16"),
    "far below 1": _problem(M=70, N=140, inputs="lse_low_130"),
}
ON_HOPPER = tuple(Step(x, ("G1", "G2", "G3", "G4", "G5")) for x in PROBLEMS.values())
