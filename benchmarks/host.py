"""Host time of a call, compared with SDPA: ``python -m benchmarks.host``.

It prints the microseconds per call for a problem so small that the host is the bottleneck: lowest
and median of several rounds. The functions are timed in turns.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Mapping

import torch

from fa_kernels import Config, Tile, flash_attention, flash_attention_with_kvcache

__all__ = ["measure"]

B, H, N, D = 1, 4, 128, 64
_PAGE = 64
ROUNDS = 9
CALLS = 300


def measure(calls: Mapping[str, Callable[[], object]]) -> dict[str, list[float]]:
    """Returns the microseconds per call of each function, one number per round."""
    for call in calls.values():
        for _ in range(CALLS):
            call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(CALLS):
                call()
            times[name].append(1e6 * (time.perf_counter() - begin) / CALLS)
    return times


def _calls() -> dict[str, Callable[[], object]]:
    sdpa = torch.nn.functional.scaled_dot_product_attention
    plain = [torch.randn(B, H, N, D, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    leaves = [x.clone().requires_grad_() for x in plain]
    dout = torch.randn_like(plain[0])
    query = plain[0][:, :, :1]
    pages = plain[0].view(N // _PAGE, _PAGE, H, D)
    kept = {
        "cache_seqlens": torch.full((B,), N, dtype=torch.int32, device="cuda"),
        "page_table": torch.arange(N // _PAGE, dtype=torch.int32, device="cuda")[None],
    }
    config = Config(cache=Tile(16, _PAGE, 4, 3), split_keys=_PAGE)  # two splits
    outs = {
        "ours, two passes": flash_attention(*leaves),
        "ours, one pass": flash_attention(*leaves, deterministic=False),
        "SDPA": sdpa(*leaves),
    }
    return {
        "forward, ours": lambda: flash_attention(*plain),
        "forward, ours, portable": lambda: flash_attention(*plain, config="portable"),
        "forward, SDPA": lambda: sdpa(*plain),
        "decoding, one split": lambda: flash_attention_with_kvcache(query, pages, pages, **kept),
        "decoding, splits apart": lambda: flash_attention_with_kvcache(
            query, pages, pages, **kept, config=config
        ),
        "forward that autograd records, ours": lambda: flash_attention(*leaves),
        "forward that autograd records, SDPA": lambda: sdpa(*leaves),
        **{
            f"backward, {name}": lambda out=out: torch.autograd.grad(  # type: ignore[misc]
                out, leaves, dout, retain_graph=True
            )
            for name, out in outs.items()
        },
    }


def main(_arguments: list[str] | None = None) -> int:
    """Prints the table; returns 2 without a GPU."""
    if not torch.cuda.is_available():
        print("benchmarks need a CUDA GPU; none is visible")
        return 2
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {B}x{N}x{H}x{D}, bf16")
    print("| call | us, lowest | median |\n|---|---|---|")
    for name, times in measure(_calls()).items():
        print(f"| {name} | {min(times):.1f} | {statistics.median(times):.1f} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
