"""Speed and error of e4m3 attention: ``python -m benchmarks.fp8 [--rounds N]``.

Codes of N(0,1) have a scale for each head, amax / 448; cuDNN's fp8 forward, by JAX, takes one for
the tensor. All ways take their turns in one run. A time is that of 20 calls on the clock, divided
by 20, as JAX has a stream of its own. An error is relative: the root of the mean square of out
less the attention of codes times scales in float64, over that of the latter. Needs a GPU.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend

from benchmarks.spread import spread
from benchmarks.table import markdown
from fa_kernels import flash_attention, flash_attention_fp8
from fa_verify.timing import sdpa

__all__ = ["PROBLEMS", "exact", "quantised"]

# (B, N, H, D, causal).
PROBLEMS = (
    (1, 4096, 32, 128, False),
    (1, 4096, 32, 128, True),
    (1, 16384, 16, 128, False),
    (1, 16384, 16, 128, True),
    (4, 8192, 16, 64, False),
)
_CALLS = 20
_LARGEST = 448.0
_ACCUMULATORS = ("fp32", "promoted", "tensor_core")
Way = Callable[[], torch.Tensor]


def quantised(x: torch.Tensor, axes: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns codes (B, H, N, D) and scales that share ``axes``, whose sizes are 1."""
    scale = x.float().abs().amax(axes, keepdim=True) / _LARGEST
    return (x.float() / scale).to(torch.float8_e4m3fn), scale


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    """Returns the attention of (B, H, N, D) in float64, by heads and rows."""
    B, H, N, D = q.shape
    out = torch.empty(B, H, N, v.shape[3], dtype=torch.float64, device=q.device)
    for b in range(B):
        for h in range(H):
            keys, values = k[b, h].double(), v[b, h].double()
            for first in range(0, N, 2048):
                scores = q[b, h, first : first + 2048].double() @ keys.mT * D**-0.5
                if causal:
                    rows = torch.arange(first, first + len(scores), device=q.device)
                    columns = torch.arange(N, device=q.device)
                    scores.masked_fill_(columns > rows[:, None], -torch.inf)
                out[b, h, first : first + 2048] = torch.softmax(scores, 1) @ values
    return out


def _cudnn_fp8(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> tuple[Any, Any]:
    """Returns a call of cuDNN's fp8 forward by JAX, and a function from its result to float64.

    Raises:
        ImportError: JAX is not there.
    """
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import jax
    import jax.numpy as jnp
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    codes, scales = zip(*(quantised(x, (0, 1, 2, 3)) for x in (q, k, v)), strict=True)
    names = ("descale_q", "descale_k", "descale_v")
    parameters = {name: jnp.ones((1, 1, 1, 1), jnp.float32) for name in cudnn.fp8_params_keys}
    parameters |= {
        name: jnp.full((1, 1, 1, 1), float(x), jnp.float32)
        for name, x in zip(names, scales, strict=True)
    }
    # Averages of N(0,1) are small; 64 times as large, they use the range of e4m3.
    parameters["scale_o"] = parameters["scale_o"] * 64
    mask = cudnn.MaskType.CAUSAL if causal else cudnn.MaskType.NO_MASK
    arrays = [jax.dlpack.from_dlpack(x.view(torch.uint8)).view(jnp.float8_e4m3fn) for x in codes]
    call = jax.jit(
        lambda *xs: cudnn.dot_product_attention(
            *xs, fp8_params=parameters, scale=q.shape[3] ** -0.5, mask_type=mask,
            qkv_layout="BNTH", use_fp8=True,
        )[0]
    )  # fmt: skip

    def numbers(out: Any) -> torch.Tensor:
        return torch.from_dlpack(out.astype(jnp.float32)).double() / 64

    numbers.inputs = [x.double() * float(s) for x, s in zip(codes, scales, strict=True)]  # type: ignore[attr-defined]
    return partial(call, *arrays), numbers


def _seconds(call: Callable[[], Any]) -> float:
    """Returns the time of a call on the clock, from the start of many to the end of the last."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(_CALLS):
        result = call()
    if hasattr(result, "block_until_ready"):
        result.block_until_ready()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / _CALLS


def _measured(problem: tuple[int, int, int, int, bool], rounds: int) -> list[tuple[object, ...]]:
    """Returns a row for each way: name, ms, ratio to ours in bf16, TF, error."""
    B, N, H, D, causal = problem
    torch.manual_seed(0)
    q, k, v = (torch.randn(B, H, N, D, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    (q8, q_scale), (k8, k_scale), (v8, v_scale) = (quantised(x, (2, 3)) for x in (q, k, v))
    numbers = [x.double() * s for x, s in ((q8, q_scale), (k8, k_scale), (v8, v_scale))]
    want = {"16 bits": exact(q, k, v, causal), "codes": exact(*numbers, causal)}
    scales = {"q_scale": q_scale[..., 0], "k_scale": k_scale[..., 0], "v_scale": v_scale[..., 0, 0]}
    tokens = scales | {"k_scale": scales["k_scale"].expand(B, H, N).contiguous()}
    ways: dict[str, tuple[Callable[[], Any], Callable[[Any], torch.Tensor], torch.Tensor]] = {}

    def add(name: str, call: Way, right: torch.Tensor) -> None:
        ways[name] = call, torch.Tensor.double, right

    add("ours, bf16", partial(flash_attention, q, k, v, causal=causal), want["16 bits"])
    portable = partial(flash_attention, q, k, v, causal=causal, config="portable")
    add("ours, bf16, portable", portable, want["16 bits"])
    cudnn = sdpa(SDPBackend.CUDNN_ATTENTION)
    add("cuDNN, bf16", partial(cudnn, q, k, v, causal), want["16 bits"])
    for accumulator in _ACCUMULATORS:
        call = partial(
            flash_attention_fp8, q8, k8, v8, **scales, causal=causal, accumulator=accumulator
        )
        add(f"ours, e4m3, {accumulator}", call, want["codes"])
    call = partial(flash_attention_fp8, q8, k8, v8, **tokens, causal=causal)
    add("ours, e4m3, promoted, scales of tokens", call, want["codes"])
    try:
        call, to_numbers = _cudnn_fp8(q, k, v, causal)
        right = exact(*to_numbers.inputs, causal)
        to_numbers(call())
        ways["cuDNN, e4m3, by JAX"] = call, to_numbers, right
    except Exception as error:  # a peer that is not there or refuses is reported
        print(f"cuDNN, e4m3, by JAX: {type(error).__name__}: {str(error)[:300]}", file=sys.stderr)
    times: dict[str, list[float]] = {name: [] for name in ways}
    for call, *_ in ways.values():  # compiles
        _seconds(call)
    for turn in range(rounds):
        for name in sorted(ways, key=lambda x: hash((turn, x))):
            times[name].append(1e3 * _seconds(ways[name][0]))
    base = statistics.median(times["ours, bf16"])
    flops = 4 * B * H * N * N * D / (2 if causal else 1)
    rows = []
    for name, (call, to_numbers, right) in ways.items():
        error = (to_numbers(call()) - right).norm() / right.norm()
        median = statistics.median(times[name])
        rows.append((
            name, spread(times[name]), f"{base / median:.2f}", f"{1e-9 * flops / median:.0f}",
            f"{float(error):.2e}",
        ))  # fmt: skip
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the tables; returns 2 without a GPU."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fp8", description=__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="(default: %(default)s)")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("benchmarks need a CUDA GPU; none is visible")
        return 2
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for problem in PROBLEMS:
        B, N, H, D, causal = problem
        print(f"\n{B}x{N}x{H}x{D}{', causal' if causal else ''}\n")
        head = ("way", "ms", "ours in bf16 / it", "TF", "relative error")
        print("\n".join(markdown(head, _measured(problem, options.rounds))), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
