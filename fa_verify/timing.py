"""Interleaved timing of attentions on a GPU, for the gate and for the benchmarks."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

__all__ = [
    "GATE_CACHES",
    "GATE_PROBLEMS",
    "Attention",
    "interleaved",
    "measure",
    "sdpa",
    "sdpa_flash",
]

# f(q, k, v, causal) on tensors (B, H, N, D), which returns out.
Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, bool], torch.Tensor]
# (B, N, H, D, causal) of the passes that the gate times.
GATE_PROBLEMS = ((1, 4096, 32, 128, False), (1, 4096, 32, 128, True))
# (B, N, H, Hk, D) of the caches whose decoding the gate times, with one query an entry.
GATE_CACHES = ((64, 8192, 32, 8, 128),)
ROUNDS = 7
ROUND_MS = 60


def sdpa(backend: SDPBackend) -> Attention:
    """Return PyTorch's ``scaled_dot_product_attention`` on one backend."""

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
        with sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1]
            )

    return attention


sdpa_flash = sdpa(SDPBackend.FLASH_ATTENTION)  # FlashAttention-2


def _order(names: Sequence[str], turn: int) -> list[str]:
    """Return the order of calls in a round, balanced so that no call follows another one often.

    A call finds a cooler GPU after a slow call, and a hotter one after a busy call. In rounds that
    differ only by their beginning, each call would always follow the same one. Here each of n calls
    follows each other once in n rounds; if n is odd, twice in 2n rounds.

    Source: Williams 1949, "Experimental designs balanced for the estimation of residual effects".
    """
    places = [(i + 1) // 2 if i % 2 else -(i // 2) for i in range(len(names))]
    order = [names[(turn + place) % len(names)] for place in places]
    return order[::-1] if len(names) % 2 and turn % 2 else order


def interleaved(
    calls: Mapping[str, Callable[[], object]],
    rounds: int = ROUNDS,
    round_ms: int = ROUND_MS,
    limit_s: float = math.inf,
) -> dict[str, list[float]]:
    """Time calls that take turns.

    Args:
        calls: The calls by name.
        rounds: Number of rounds.
        round_ms: Duration of a call's repetitions in a round, in ms.
        limit_s: Time limit of a call in seconds. A call that exceeds it is left out of later
            rounds.

    Returns:
        Name of a call to its medians in ms, one per round.
    """
    from triton.testing import do_bench

    times: dict[str, list[float]] = {name: [] for name in calls}
    spent = dict.fromkeys(calls, 0.0)
    names = list(calls)
    for turn in range(rounds):
        for name in _order(names, turn):
            if spent[name] >= limit_s:
                continue
            begin = time.perf_counter()
            ms = do_bench(calls[name], warmup=10, rep=round_ms, return_mode="median")
            times[name].append(ms)
            spent[name] += time.perf_counter() - begin
    return times


def measure(
    attentions: Mapping[str, Attention],
    B: int,
    N: int,
    H: int,
    D: int,
    causal: bool,
    dtype: torch.dtype = torch.bfloat16,
    rounds: int = ROUNDS,
    round_ms: int = ROUND_MS,
    failed: dict[str, str] | None = None,
    passes: Sequence[str] = ("forward", "backward"),
    peaks: dict[str, int] | None = None,
    device: str = "cuda",
    limit_s: float = math.inf,
) -> dict[str, dict[str, list[float]]]:
    """Time passes of attentions on N(0, 1) data of shape (B, H, N, D), stored as (B, N, H, D).

    Args:
        attentions: The attentions by name.
        B: Batch size.
        N: Number of queries and keys.
        H: Number of heads.
        D: Head dim.
        causal: Whether the mask is causal.
        dtype: Dtype of the inputs.
        rounds: See ``interleaved``.
        round_ms: See ``interleaved``.
        failed: Receives the reason for an attention that raises, by name. If None, its exception
            is raised.
        passes: Passes to time, from "forward", "backward" and "both".
        peaks: Receives the peak memory of a forward and backward beyond the inputs, in bytes, by
            name.
        device: Device of the inputs.
        limit_s: See ``interleaved``.

    Returns:
        Name of a pass to the result of ``interleaved``, without attentions that raised.
    """
    torch.manual_seed(0)
    q, k, v, dout = (
        torch.randn(B, N, H, D, device=device, dtype=dtype).transpose(1, 2) for _ in range(4)
    )
    for x in (q, k, v):
        x.requires_grad_()

    def both(attention: Attention) -> object:
        return torch.autograd.grad(attention(q, k, v, causal), (q, k, v), dout)

    outs = {}
    for name, attention in attentions.items():
        try:
            both(attention)
            if peaks is not None:
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                both(attention)
                peaks[name] = torch.cuda.max_memory_allocated() - before
            out = attention(q, k, v, causal)
            # Run the backward twice, as the timing does: not every attention permits it.
            for _ in range(2):
                torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
            outs[name] = out
        except (RuntimeError, NotImplementedError) as error:
            if failed is None:
                raise
            memory = isinstance(error, torch.cuda.OutOfMemoryError)
            failed[name] = "out of memory" if memory else f"{type(error).__name__}: {error}"
    calls: dict[str, dict[str, Callable[[], object]]] = {
        "forward": {name: lambda f=attentions[name]: f(q, k, v, causal) for name in outs},
        "backward": {
            name: lambda out=out: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
            for name, out in outs.items()
        },
        "both": {name: lambda f=attentions[name]: both(f) for name in outs},
    }
    return {name: interleaved(calls[name], rounds, round_ms, limit_s) for name in passes}
