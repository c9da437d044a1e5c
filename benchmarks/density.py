"""Time of block-sparse attention against the fraction of visible blocks.

``python -m benchmarks.density`` prints, for each density, milliseconds and the ratio to the same
fraction of the time of a full mask. The densities are timed in turns. Needs a GPU.
"""

from __future__ import annotations

import statistics
import sys

import torch

from benchmarks.spread import spread
from fa_kernels import flash_attention
from fa_verify.timing import interleaved

__all__ = ["main", "measure"]

# B, N, H, D
PROBLEMS = ((1, 16384, 8, 128), (2, 16384, 16, 128))
DENSITIES = (1.0, 0.75, 0.5, 0.25, 0.1)
BLOCK = 128
ROUNDS = 5


def main() -> int:
    """Prints the table; returns 2 without a GPU."""
    if not torch.cuda.is_available():
        print("density is measured on a CUDA GPU; none is visible")
        return 2
    print(f"bf16, blocks of {BLOCK}, on {torch.cuda.get_device_name()}")
    print("| B x N x H x D | pass | visible | ms | by its part of the full map |")
    print("|---|---|---|---|---|")
    for problem in PROBLEMS:
        measure(*problem)
    return 0


def measure(B: int, N: int, H: int, D: int) -> None:
    """Prints the table rows of one problem."""
    torch.manual_seed(0)
    q, k, v, dout = (
        torch.randn(B, N, H, D, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
        for _ in range(4)
    )
    for x in (q, k, v):
        x.requires_grad_()
    blocks = -(-N // BLOCK)
    noise = torch.rand(H, blocks, blocks, device="cuda")
    maps = {density: noise <= density for density in DENSITIES}
    forward = {
        str(density): lambda x=x: flash_attention(q, k, v, block_mask=x)
        for density, x in maps.items()
    }
    outs = {density: flash_attention(q, k, v, block_mask=x) for density, x in maps.items()}
    backward = {
        str(density): lambda out=out: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
        for density, out in outs.items()
    }
    for name, calls in (("forward", forward), ("backward", backward)):
        times = interleaved(calls, ROUNDS)
        full = statistics.median(times[str(DENSITIES[0])])
        for density, x in maps.items():
            visible = float(x.float().mean())
            ratio = statistics.median(times[str(density)]) / (full * visible)
            print(
                f"| {B}x{N}x{H}x{D} | {name} | {visible:.3f} | {spread(times[str(density)])} "
                f"| {ratio:.3f} |",
                flush=True,
            )


if __name__ == "__main__":
    sys.exit(main())
