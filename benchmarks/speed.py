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
import shlex
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from benchmarks.peers import PEERS
from benchmarks.table import FIELDS, memory_table, table
from fa_verify.timing import GATE_PROBLEMS, interleaved, measure

__all__ = ["PASSES", "PROBLEMS"]

# (B, N, H, D, causal).
PROBLEMS = (
    *GATE_PROBLEMS,
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
TABLE_ROUNDS = 5
TABLE_ROUND_MS = 25
TABLE_LIMIT_S = 1.0
MATMUL = 8192
RESULTS = Path(__file__).parents[1] / "results"


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
