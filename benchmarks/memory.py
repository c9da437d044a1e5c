"""Peak memory of forward and backward against N, compared with the N x N matrix of eager code.

``python -m benchmarks.memory``
"""

from __future__ import annotations

import sys

import torch

from fa_kernels import flash_attention

__all__ = ["peak"]

LENGTHS = (4096, 8192, 16384, 32768, 65536)
B, H, D = 1, 2, 64


def peak(N: int, dtype: torch.dtype = torch.bfloat16) -> tuple[int, int]:
    """Returns (peak bytes beyond the inputs, bytes of out, dq, dk, dv, lse, lse2, delta)."""
    q, k, v, dout = (torch.randn(B, H, N, D, device="cuda", dtype=dtype) for _ in range(4))
    for x in (q, k, v):
        x.requires_grad_()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = flash_attention(q, k, v, causal=True)
    gradients = torch.autograd.grad(out, (q, k, v), dout)
    torch.cuda.synchronize()
    needed = sum(x.nbytes for x in (out, *gradients)) + 3 * 4 * B * H * N
    return torch.cuda.max_memory_allocated() - before, needed


def main() -> int:
    """Prints the table; returns 2 without a GPU."""
    if not torch.cuda.is_available():
        print("benchmarks need a CUDA GPU; none is visible")
        return 2
    peak(256)  # compile first
    print(f"{torch.cuda.get_device_name()}, bf16, B={B} H={H} D={D}, causal, forward and backward")
    print(
        "| N | peak beyond the inputs, MiB | out, gradients, three numbers a row, MiB "
        "| N x N scores, MiB |"
    )
    print("|---|---|---|---|")
    for N in LENGTHS:
        measured, needed = peak(N)
        scores = 2 * B * H * N * N
        print(f"| {N} | {measured / 2**20:.1f} | {needed / 2**20:.1f} | {scores / 2**20:.0f} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
