"""The cost of verification: ``python -m benchmarks.verification [--device cpu]``.

It prints the seconds of the oracle, and of oracle and bound, against N, next to the seconds of the
kernels they judge. It also prints the problems per second of ``fa_verify.verification.verify``, and
the seconds that it takes to find and minimise a failure of each of three broken kernels.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from benchmarks.spread import spread

__all__ = ["BROKEN", "costs", "seconds_to_the_kill"]

LENGTHS = {"cuda": (256, 512, 1024, 2048, 4096, 8192), "cpu": (64, 128, 256)}
# Problems for each guarantee and dtype.
PROBLEMS = {"cuda": 150, "cpu": 50}
ROUNDS = 3
MAX_SEQLEN = 256
# Broken kernels: our kernels, called with another mask.
BROKEN = {
    "sees one key too many": lambda mask: replace(
        mask, window_right=None if mask.window_right is None else mask.window_right + 1
    ),
    "sees one key too few": lambda mask: replace(
        mask, window_left=None if mask.window_left is None else max(mask.window_left - 1, 0)
    ),
    "sees the keys of padding": lambda mask: replace(mask, seqlens_k=None),
}


def _seconds(call: Callable[[], object], device: str) -> list[float]:
    import torch

    found = []
    for _ in range(ROUNDS + 1):
        started = time.perf_counter()
        call()
        if device == "cuda":
            torch.cuda.synchronize()
        found.append(time.perf_counter() - started)
    return found[1:]


def costs(N: int, device: str) -> dict[str, list[float]]:
    """Returns the seconds of each round, forward and backward in fp16, 1 x N x 2 x 64, causal."""
    import torch

    from fa_kernels import flash_attention
    from fa_verify.oracles.bounds.error_model import judge
    from fa_verify.oracles.masks.mask import Mask
    from fa_verify.oracles.outputs import Numerics
    from fa_verify.oracles.reference.torch_reference import attention
    from fa_verify.oracles.stream import normal

    inputs = [
        normal(0, name, (1, 2, N, 64)).to(torch.float16).to(device)
        for name in ("q", "k", "v", "dout")
    ]
    call = {"mask": Mask(causal=True), "sm_scale": 0.125}

    def kernels() -> object:
        leaves = [x.detach().requires_grad_() for x in inputs[:3]]
        return torch.autograd.grad(flash_attention(*leaves, **call), leaves, inputs[3])

    return {
        "kernels": _seconds(kernels, device),
        "oracle": _seconds(lambda: attention(*inputs, **call), device),
        "oracle and bound": _seconds(
            lambda: judge(*inputs, **call, in_dtype="fp16", numerics=Numerics()), device
        ),
    }


def seconds_to_the_kill(name: str, device: str, seed: int) -> float:
    """Returns the seconds until ``verify`` finds a failure of a broken kernel.

    Raises:
        AssertionError: ``verify`` finds none.
    """
    from fa_kernels import flash_attention
    from fa_verify.verification import verify

    def broken(q, k, v, *, mask, sm_scale):
        return flash_attention(q, k, v, mask=BROKEN[name](mask), sm_scale=sm_scale)

    started = time.perf_counter()
    report = verify(
        broken, problems=PROBLEMS[device], guarantees=("G1", "G2"), device=device, seed=seed
    )
    assert report.findings, f"verify found no failure although the kernel {name}:\n{report}"
    return time.perf_counter() - started


def main(arguments: Sequence[str]) -> int:
    """Prints the tables; returns 2 without the device."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.verification", description=__doc__)
    parser.add_argument("--device", choices=LENGTHS, default="cuda")
    device = parser.parse_args(arguments).device
    # Set before torch and Triton are imported, because they read the environment.
    if device == "cpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")
        from fa_verify.simulator.interpreter import repair

        repair.repair()
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        print("benchmarks need a CUDA GPU; none is visible (--device cpu runs the interpreter)")
        return 2
    from fa_kernels import flash_attention
    from fa_verify.verification import verify

    print(torch.cuda.get_device_name() if device == "cuda" else "CPU, interpreter")
    print("\n| N | kernels, s | oracle, s | oracle and bound, s | those / kernels |")
    print("|---|---|---|---|---|")
    for N in LENGTHS[device]:
        found = costs(N, device)
        ratio = statistics.median(found["oracle and bound"]) / statistics.median(found["kernels"])
        print(f"| {N} | {' | '.join(map(spread, found.values()))} | {ratio:.1f} |", flush=True)

    def subject(q, k, v, *, mask, sm_scale):
        return flash_attention(q, k, v, mask=mask, sm_scale=sm_scale)

    started = time.perf_counter()
    report = verify(
        subject, problems=PROBLEMS[device], guarantees=("G1", "G2"), device=device,
        max_seqlen=MAX_SEQLEN,
    )  # fmt: skip
    seconds = time.perf_counter() - started
    if not report:
        print(report)
        return 1
    print(
        f"\n{report.judged} distinct problems of up to {MAX_SEQLEN} rows and keys in {seconds:.1f} "
        f"s, {report.judged / seconds:.1f} a second in one process, compilation included"
    )
    print(
        "\n| a kernel that | s until it is found, on the simplest problem, three seeds |\n|---|---|"
    )
    for name in BROKEN:
        times = [seconds_to_the_kill(name, device, seed) for seed in range(ROUNDS)]
        print(f"| {name} | {spread(times)} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
