"""Speed of ours beside SDPA flash, as ratios in one run: ``python -m benchmarks.speed``.

Measurements are interleaved, so that drift hits both alike; each is the median of several rounds of
``do_bench``, with the lowest and highest round beside it.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Mapping

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.spread import spread
from fa_kernels import flash_attention

__all__ = ["PROBLEMS", "interleaved", "measure", "ours", "sdpa_flash"]

# (B, N, H, D, causal)
PROBLEMS = (
    (1, 4096, 32, 128, False),
    (1, 4096, 32, 128, True),
    (1, 4321, 32, 128, False),
    (1, 4321, 32, 128, True),
)
ROUNDS = 7
ROUND_MS = 60

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, bool], torch.Tensor]


def interleaved(
    calls: Mapping[str, Callable[[], object]], rounds: int = ROUNDS
) -> dict[str, list[float]]:
    """Milliseconds of each call, one median a round, the calls taking turns."""
    from triton.testing import do_bench

    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            times[name].append(do_bench(call, warmup=10, rep=ROUND_MS, return_mode="median"))
    return times


def ours(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    """Our kernels in their default configuration."""
    return flash_attention(q, k, v, causal=causal)


def sdpa_flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    """PyTorch's FlashAttention-2."""
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)


def measure(
    attentions: Mapping[str, Attention],
    B: int,
    N: int,
    H: int,
    D: int,
    causal: bool,
    dtype: torch.dtype = torch.bfloat16,
    rounds: int = ROUNDS,
) -> dict[str, dict[str, list[float]]]:
    """{"forward" | "backward": {name: milliseconds a round}} on N(0,1) data, B x N x H x D."""
    torch.manual_seed(0)
    q, k, v, dout = (
        torch.randn(B, N, H, D, device="cuda", dtype=dtype).transpose(1, 2) for _ in range(4)
    )
    for x in (q, k, v):
        x.requires_grad_()
    forward = {name: lambda f=f: f(q, k, v, causal) for name, f in attentions.items()}
    outs = {name: f(q, k, v, causal) for name, f in attentions.items()}
    backward = {
        name: lambda out=out: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
        for name, out in outs.items()
    }
    return {
        "forward": interleaved(forward, rounds),
        "backward": interleaved(backward, rounds),
    }


def main() -> int:
    """Prints the table; 2 where there is no GPU."""
    if not torch.cuda.is_available():
        print("benchmarks need a CUDA GPU; none is visible")
        return 2
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bf16, ms: median [min, max]")
    print("| B x N x H x D | causal | pass | ours | SDPA flash | SDPA flash / ours | TF of ours |")
    print("|---|---|---|---|---|---|---|")
    for B, N, H, D, causal in PROBLEMS:
        results = measure({"ours": ours, "SDPA flash": sdpa_flash}, B, N, H, D, causal)
        for name, times in results.items():
            cells = [spread(t) for t in times.values()]
            mine, theirs = (statistics.median(t) for t in times.values())
            flop = (
                4 * B * H * N * N * D * (0.5 if causal else 1) * (1 if name == "forward" else 2.5)
            )
            yes = "yes" if causal else "no"
            print(
                f"| {B}x{N}x{H}x{D} | {yes} | {name} | {cells[0]} | {cells[1]} "
                f"| {theirs / mine:.3f} | {flop / mine * 1e-9:.0f} |",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
