"""One query against long keys, in parts and whole: ``python -m benchmarks.few_queries``.

Forward alone. The configurations take turns, so that drift hits all alike; each ratio is that of
the default configuration's median, which has no parts, to the median beside it.
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
# Fewer rows than a tile has go through its dots for nothing: a low tile.
NARROW = Tile(16, 128, 4, 3)
CONFIGS = {
    "no parts": Config(),
    "no parts, 16x128": Config(forward=NARROW),
    **{f"{n} parts, 16x128": Config(forward=NARROW, splits=n) for n in (1, 4, 16, 64)},
}


def measure(B: int, N: int, H: int, Hk: int, D: int, M: int = 1) -> dict[str, list[float]]:
    """Milliseconds a round of each of ``CONFIGS``, on N(0,1) data in bf16."""
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
    """Prints the table; 2 where there is no GPU."""
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
