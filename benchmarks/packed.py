"""Sequences of different lengths, packed and padded: ``python -m benchmarks.packed``.

It times forward and backward in bf16, causal. The calls are timed in turns, so that drift affects
all equally. A ratio is the median time of the padded call, which gets the lengths too, over the
median time next to it. cu_seqlens of packed calls are ints, or a tensor with or without the longest
length.
"""

from __future__ import annotations

import statistics
import sys
from itertools import accumulate

import torch

from benchmarks.spread import spread
from fa_kernels import flash_attention, flash_attention_varlen
from fa_verify.timing import interleaved

__all__ = ["PROBLEMS", "measure"]

H, D = 16, 128
# The lengths of each batch.
PROBLEMS = {
    "16 of 2048": (2048,) * 16,
    "16, 256 to 4096 evenly": tuple(range(256, 4097, 256)),
    "64, one of 8192, else 128": (8192, *(128,) * 63),
    "256 of 64 to 127": tuple(64 + i % 64 for i in range(256)),
}


def measure(lengths: tuple[int, ...]) -> dict[str, list[float]]:
    """Returns the milliseconds of each round, for each way to call, on N(0,1) data."""
    torch.manual_seed(0)
    total, longest, B = sum(lengths), max(lengths), len(lengths)
    packed = [torch.randn(total, H, D, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    padded = [torch.randn(B, H, longest, D, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    offsets = tuple(accumulate(lengths, initial=0))
    on_device = torch.tensor(offsets, dtype=torch.int32, device="cuda")

    def in_a_row(offsets, **options):
        leaves = [x.requires_grad_() for x in packed[:3]]
        out = flash_attention_varlen(
            *leaves, cu_seqlens_q=offsets, cu_seqlens_k=offsets, causal=True, **options
        )
        return torch.autograd.grad(out, leaves, packed[3])

    def with_padding():
        leaves = [x.requires_grad_() for x in padded[:3]]
        out = flash_attention(*leaves, causal=True, seqlens_q=lengths, seqlens_k=lengths)
        return torch.autograd.grad(out, leaves, padded[3])

    return interleaved(
        {
            "padded": with_padding,
            "packed, ints": lambda: in_a_row(offsets),
            "on the device": lambda: in_a_row(
                on_device, max_seqlen_q=longest, max_seqlen_k=longest
            ),
            "without the longest": lambda: in_a_row(on_device),
        },
        rounds=3,
    )


def main() -> int:
    """Prints the table; returns 2 without a GPU."""
    if not torch.cuda.is_available():
        print("benchmarks need a CUDA GPU; none is visible")
        return 2
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {H} heads of {D}, ms, ratio")
    for i, (name, lengths) in enumerate(PROBLEMS.items()):
        times = measure(lengths)
        if i == 0:
            print("| lengths | " + " | ".join(times) + " |")
            print("|---" * (1 + len(times)) + "|")
        plain = statistics.median(times["padded"])
        cells = [f"{spread(t)}, {plain / statistics.median(t):.2f}" for t in times.values()]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
