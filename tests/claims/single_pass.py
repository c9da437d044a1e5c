"""Compares the speed of the backward in one pass, which computes each product once, and in two.

``python -m tests.claims.single_pass`` measures the portable kernels and, if they differ, the
default ones. It needs a GPU.
"""

from __future__ import annotations

import statistics
import sys
from functools import partial

import torch

from benchmarks.peers import PEERS
from benchmarks.speed import PROBLEMS
from benchmarks.spread import spread
from fa_kernels import Config, Tile, flash_attention
from fa_verify.timing import measure

__all__ = ["main"]

# (block_m, block_n, num_warps, num_stages) of one pass, which needs more registers.
_TILES = ((64, 128, 8, 2), (64, 128, 8, 3), (32, 128, 8, 2), (64, 64, 4, 2), (32, 64, 4, 2))


def main() -> int:
    """Prints a table of milliseconds of both backward passes; returns 2 without a GPU."""
    if not torch.cuda.is_available():
        print("the passes are measured on a CUDA GPU; none is visible")
        return 2
    print(
        "| B x N x H x D | causal | two passes | one pass, fastest tile | one / two "
        "| two passes, default | one | one / two |"
    )
    print("|---|---|---|---|---|---|---|---|")
    named = {name: PEERS[name] for name in ("ours, portable", "ours", "ours, one pass")}
    for B, N, H, D, causal in PROBLEMS:
        ways = named | {str(tile): partial(_single, tile) for tile in _TILES}
        times = measure(ways, B, N, H, D, causal)["backward"]
        two, default, default_one = (times.pop(name) for name in named)
        tile, one = min(times.items(), key=lambda item: statistics.median(item[1]))
        print(
            f"| {B}x{N}x{H}x{D} | {'yes' if causal else 'no'} | {spread(two)} "
            f"| {spread(one)} {tile} | {_ratio(one, two)} "
            f"| {spread(default)} | {spread(default_one)} | {_ratio(default_one, default)} |",
            flush=True,
        )
    return 0


def _ratio(one: list[float], two: list[float]) -> str:
    return f"{statistics.median(one) / statistics.median(two):.2f}"


def _single(
    tile: tuple[int, int, int, int],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
) -> torch.Tensor:
    config = Config(one_pass=Tile(*tile))
    return flash_attention(q, k, v, causal=causal, deterministic=False, config=config)


if __name__ == "__main__":
    sys.exit(main())
