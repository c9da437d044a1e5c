"""Speed of our kernels and their peers, as ratios in one run.

``python -m benchmarks.speed [NAME ...] [--dtype fp16] [--passes forward backward both]``

Measurements are interleaved, so that drift affects all equally. Each is the median of several
rounds of ``do_bench``, with the lowest and highest round, and the peak memory of a forward and
backward. A function whose rounds have taken a second is not timed again. The results are written to
results/DEVICE/ as speed.md, speed.csv and speed.png, with the dtype in the names unless it is bf16.
NAME is a name in ``benchmarks.peers``; the default is all of them.
"""

from __future__ import annotations

import argparse
import csv
import math
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch

from benchmarks.peers import PEERS, Attention
from benchmarks.table import FIELDS, memory_table, table

__all__ = ["PASSES", "PROBLEMS", "interleaved", "measure"]

# (B, N, H, D, causal); the gate times the first two.
PROBLEMS = (
    (1, 4096, 32, 128, False),
    (1, 4096, 32, 128, True),
    (1, 4321, 32, 128, False),
    (1, 4321, 32, 128, True),
    (4, 8192, 4, 64, False),
    (4, 8192, 4, 64, True),
    (4, 16384, 1, 64, False),
    (4, 16384, 1, 64, True),
    (2, 16384, 8, 128, False),
    (2, 16384, 8, 128, True),
    (1, 32768, 4, 128, True),
    (1, 65536, 2, 128, True),
    (4, 65536, 1, 64, False),
)
# Floating-point operations of each pass, relative to a forward.
PASSES = {"forward": 1.0, "backward": 2.5, "both": 3.5}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
ROUNDS = 7
ROUND_MS = 60
TABLE_ROUNDS = 5
TABLE_ROUND_MS = 25
TABLE_LIMIT_S = 1.0
MATMUL = 8192
RESULTS = Path(__file__).parents[1] / "results"


def _order(names: Sequence[str], turn: int) -> list[str]:
    """Returns the order of a round, balanced so that no name always follows the same other name.

    The previous function affects the temperature of the GPU, and so the speed of the next one. In
    rotated rounds, each function would always follow the same one. Here, over n rounds for n names,
    each follows every other once (over 2n rounds twice, if n is odd).

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
    """Returns the milliseconds of each call, one median per round; the calls are timed in turns.

    A call whose rounds have taken ``limit_s`` seconds is not timed again.
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
    """Returns {pass: {name: milliseconds per round}} on N(0,1) data, B x N x H x D.

    A function that raises is omitted, and its reason is added to ``failed``; if that is None, the
    error propagates. ``peaks`` receives the peak bytes of a forward and backward beyond the inputs.
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
            # Runs the backward twice, as the timing does: some functions do not support this.
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


def _matmul(dtype: torch.dtype) -> float:
    """Returns the TF of a matrix product in this run."""
    x = torch.randn(MATMUL, MATMUL, device="cuda", dtype=dtype)
    times = interleaved({"matmul": lambda: x @ x}, rounds=3, round_ms=TABLE_ROUND_MS)
    return 2e-9 * MATMUL**3 / statistics.median(times["matmul"])


def _rows(
    names: Sequence[str], dtype: str, passes: Sequence[str], matmul: float
) -> Iterator[dict[str, object]]:
    """Yields a row for each problem, pass and function, as it is measured."""
    for B, N, H, D, causal in PROBLEMS:
        failed: dict[str, str] = {}
        peaks: dict[str, int] = {}
        results = measure(
            {name: PEERS[name] for name in names}, B, N, H, D, causal, DTYPES[dtype],
            TABLE_ROUNDS, TABLE_ROUND_MS, failed, passes, peaks, limit_s=TABLE_LIMIT_S,
        )  # fmt: skip
        for of, times in results.items():
            flop = 4 * B * H * N * N * D * (0.5 if causal else 1) * PASSES[of]
            for name in names:
                row: dict[str, object] = dict.fromkeys(FIELDS, "")
                row |= {"problem": f"{B}x{N}x{H}x{D}", "causal": causal, "pass": of, "name": name}
                if name in times:
                    ms = statistics.median(times[name])
                    rate = 1e-9 * flop / ms
                    row |= {
                        "median_ms": round(ms, 4), "lowest_ms": round(min(times[name]), 4),
                        "highest_ms": round(max(times[name]), 4), "TF": round(rate),
                        "of_matmul": round(rate / matmul, 3),
                        "peak_MiB": round(peaks[name] / 2**20, 1),
                    }  # fmt: skip
                else:
                    row["median_ms"] = failed[name].partition("\n")[0][:80]
                yield row


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.speed", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"out of {', '.join(PEERS)}")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--passes", nargs="+", choices=PASSES, default=list(PASSES))
    options = parser.parse_args(arguments)
    if unknown := set(options.names) - PEERS.keys():
        parser.error(f"name is {sorted(unknown)}; needs some of {sorted(PEERS)}")
    return options


def main(arguments: Sequence[str]) -> int:
    """Prints and writes the tables; returns 2 without a GPU."""
    if not torch.cuda.is_available():
        print("benchmarks need a CUDA GPU; none is visible")
        return 2
    options = _options(arguments)
    names = ["ours", *(name for name in options.names or PEERS if name != "ours")]
    import triton

    device = torch.cuda.get_device_name()
    matmul = _matmul(DTYPES[options.dtype])
    head = (
        f"{device}, torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}, "
        f"triton {triton.__version__}, {options.dtype}, ms: median [lowest, highest] of "
        f"{TABLE_ROUNDS} rounds (TF); a matmul of {MATMUL} cubed made {matmul:.0f} TF in this run"
    )
    print(head, flush=True)
    folder = RESULTS / device.lower().replace(" ", "-")
    folder.mkdir(parents=True, exist_ok=True)
    stem = folder / ("speed" if options.dtype == "bf16" else f"speed-{options.dtype}")
    command = " ".join(["python -m benchmarks.speed", *map(shlex.quote, arguments)])
    rows: list[dict[str, object]] = []
    # Rows are written as they come, so that an interrupted run keeps them.
    with stem.with_suffix(".csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, FIELDS)
        writer.writeheader()
        for row in _rows(names, options.dtype, options.passes, matmul):
            rows.append(row)
            writer.writerow(row)
            file.flush()
            print(*row.values(), flush=True)
            if len(rows) % (len(names) * len(options.passes)) == 0:
                tables = [*table(rows, names), "", *memory_table(rows, names)]
                text = "\n".join([f"`{command}`: {head}.", "", *tables])
                stem.with_suffix(".md").write_text(text + "\n", encoding="utf-8")
    from benchmarks.plot import draw

    draw(rows, stem.with_suffix(".png"))
    print(f"written to {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
