"""One query against long keys, with and without splits: ``python -m benchmarks.few_queries``.

It times the forward. The configurations are timed in turns, so that drift affects all equally. A
ratio is the median time of the default configuration, which has no splits, over the median time
next to it.
"""

from __future__ import annotations

import statistics
import sys

import torch

from benchmarks.spread import spread
from fa_kernels import Config, Tile, flash_attention
from fa_verify.timing import interleaved

__all__ = ["CONFIGS", "PROBLEMS", "measure"]

# (B, N, H, Hk, D)
PROBLEMS = (
    (1, 8_192, 32, 8, 128),
    (1, 65_536, 32, 8, 128),
    (1, 262_144, 8, 8, 64),
    (16, 8_192, 32, 8, 128),
)
# A tile of few rows, since dots compute all rows of a tile.
NARROW = Tile(16, 128, 4, 3)
CONFIGS = {
    "no parts": Config(),
    "no parts, 16x128": Config(forward=NARROW),
    **{f"{n} parts, 16x128": Config(forward=NARROW, splits=n) for n in (1, 4, 16, 64)},
}


def measure(B: int, N: int, H: int, Hk: int, D: int, M: int = 1) -> dict[str, list[float]]:
    """Returns the milliseconds of each round for each of ``CONFIGS``, on N(0,1) data in bf16."""
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(B, rows, heads, D, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
        for rows, heads in ((M, H), (N, Hk), (N, Hk))
    )
    return interleaved(
        {
            name: lambda config=config: flash_attention(q, k, v, config=config)
            for name, config in CONFIGS.items()
        }
    )


def main() -> int:
    """Prints the table; returns 2 without a GPU."""
    if not torch.cuda.is_available():
        print("benchmarks need a CUDA GPU; none is visible")
        return 2
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bf16, M = 1, ms and ratio")
    print("| B x N x H (Hk) x D | " + " | ".join(CONFIGS) + " |")
    print("|---" * (1 + len(CONFIGS)) + "|")
    for problem in PROBLEMS:
        times = measure(*problem)
        plain = statistics.median(times["no parts"])
        cells = [f"{spread(t)}, {plain / statistics.median(t):.2f}" for t in times.values()]
        B, N, H, Hk, D = problem
        print(f"| {B}x{N}x{H} ({Hk})x{D} | {' | '.join(cells)} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
