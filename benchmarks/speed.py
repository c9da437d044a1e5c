"""Speed of ours beside its peers, as ratios in one run: ``python -m benchmarks.speed [NAME ...]``.

Measurements are interleaved, so that drift hits all alike; each is the median of several rounds of
``do_bench``, with the lowest and highest round beside it. Written to results/DEVICE/speed.md and
speed.csv. Names are those of ``benchmarks.peers``; without, all of them.
"""

from __future__ import annotations

import csv
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch

from benchmarks.peers import PEERS, Attention

__all__ = ["PROBLEMS", "interleaved", "measure", "table"]

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
)
ROUNDS = 7
ROUND_MS = 60
TABLE_ROUND_MS = 25
MATMUL = 8192
RESULTS = Path(__file__).parents[1] / "results"
_FIELDS = (
    "problem",
    "causal",
    "pass",
    "name",
    "median_ms",
    "lowest_ms",
    "highest_ms",
    "TF",
    "of_matmul",
)


def interleaved(
    calls: Mapping[str, Callable[[], object]], rounds: int = ROUNDS, round_ms: int = ROUND_MS
) -> dict[str, list[float]]:
    """Milliseconds of each call, one median a round, the calls taking turns."""
    from triton.testing import do_bench

    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            times[name].append(do_bench(call, warmup=10, rep=round_ms, return_mode="median"))
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
) -> dict[str, dict[str, list[float]]]:
    """{"forward" | "backward": {name: milliseconds a round}} on N(0,1) data, B x N x H x D.

    What raises is left out, and put into ``failed`` with its reason; without that it raises.
    """
    torch.manual_seed(0)
    q, k, v, dout = (
        torch.randn(B, N, H, D, device="cuda", dtype=dtype).transpose(1, 2) for _ in range(4)
    )
    for x in (q, k, v):
        x.requires_grad_()
    outs = {}
    for name, attention in attentions.items():
        try:
            outs[name] = attention(q, k, v, causal)
            torch.autograd.grad(outs[name], (q, k, v), dout, retain_graph=True)
        except (RuntimeError, NotImplementedError) as error:
            if failed is None:
                raise
            outs.pop(name, None)
            memory = isinstance(error, torch.cuda.OutOfMemoryError)
            failed[name] = "out of memory" if memory else f"{type(error).__name__}: {error}"
    forward = {name: lambda f=attentions[name]: f(q, k, v, causal) for name in outs}
    backward = {
        name: lambda out=out: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
        for name, out in outs.items()
    }
    return {
        "forward": interleaved(forward, rounds, round_ms),
        "backward": interleaved(backward, rounds, round_ms),
    }


def _matmul() -> float:
    """TF of a bf16 matrix product in this run."""
    x = torch.randn(MATMUL, MATMUL, device="cuda", dtype=torch.bfloat16)
    times = interleaved({"matmul": lambda: x @ x}, rounds=3, round_ms=TABLE_ROUND_MS)
    return 2e-9 * MATMUL**3 / statistics.median(times["matmul"])


def _rows(names: Sequence[str], matmul: float) -> Iterator[dict[str, object]]:
    """One of each problem, pass and attention, as it is measured."""
    for B, N, H, D, causal in PROBLEMS:
        failed: dict[str, str] = {}
        attentions = {name: PEERS[name] for name in names}
        results = measure(
            attentions, B, N, H, D, causal, rounds=5, round_ms=TABLE_ROUND_MS, failed=failed
        )
        for of, times in results.items():
            flop = 4 * B * H * N * N * D * (0.5 if causal else 1) * (1 if of == "forward" else 2.5)
            for name in names:
                row: dict[str, object] = dict.fromkeys(_FIELDS, "")
                row |= {"problem": f"{B}x{N}x{H}x{D}", "causal": causal, "pass": of, "name": name}
                if name in times:
                    ms = statistics.median(times[name]), min(times[name]), max(times[name])
                    rate = 1e-9 * flop / ms[0]
                    row |= zip(_FIELDS[4:7], (round(x, 4) for x in ms), strict=True)
                    row |= {"TF": round(rate), "of_matmul": round(rate / matmul, 3)}
                else:
                    row["median_ms"] = failed[name].partition("\n")[0][:80]
                yield row


def table(rows: Sequence[Mapping[str, object]], names: Sequence[str]) -> list[str]:
    """Markdown: a line a problem and pass, ms (TF) of each, and the ratios that count."""
    lines = [
        f"| B x N x H x D | causal | pass | {' | '.join(names)} | best of FlexAttention and SDPA "
        "flash / ours | cuDNN / ours | of a matmul |",
        "|---" * (len(names) + 6) + "|",
    ]
    for start in range(0, len(rows), len(names)):
        here = {str(row["name"]): row for row in rows[start : start + len(names)]}
        times = {name: row["median_ms"] for name, row in here.items() if row["TF"] != ""}
        cells = [
            "{median_ms:.3f} [{lowest_ms:.3f}, {highest_ms:.3f}] ({TF})".format(**row)
            if name in times
            else str(row["median_ms"])
            for name, row in here.items()
        ]
        first = rows[start]
        others = [times[name] for name in ("FlexAttention", "SDPA flash") if name in times]
        mine = times.get("ours")
        ratios = [
            f"{x / mine:.2f}" if x is not None and mine is not None else ""
            for x in (min(others, default=None), times.get("cuDNN"))
        ]
        lines.append(
            f"| {first['problem']} | {'yes' if first['causal'] else 'no'} | {first['pass']} | "
            f"{' | '.join([*cells, *ratios])} | {here['ours']['of_matmul']} |"
        )
    return lines


def main(names: Sequence[str]) -> int:
    """Prints and writes the tables; 2 where there is no GPU."""
    if not torch.cuda.is_available():
        print("benchmarks need a CUDA GPU; none is visible")
        return 2
    unknown = set(names) - PEERS.keys()
    if unknown:
        print(f"name is {sorted(unknown)}; needs some of {sorted(PEERS)}")
        return 2
    names = ["ours", *(name for name in names or PEERS if name != "ours")]
    import triton

    device = torch.cuda.get_device_name()
    matmul = _matmul()
    head = (
        f"{device}, torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}, "
        f"triton {triton.__version__}, bf16, ms: median [lowest, highest] of 5 rounds (TF); "
        f"a matmul of {MATMUL} cubed made {matmul:.0f} TF in this run"
    )
    print(head, flush=True)
    rows: list[dict[str, object]] = []
    for row in _rows(names, matmul):
        rows.append(row)
        print(*row.values(), flush=True)
    lines = [f"`python -m benchmarks.speed`: {head}.", "", *table(rows, names)]
    folder = RESULTS / device.lower().replace(" ", "-")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "speed.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    with (folder / "speed.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, _FIELDS)
        writer.writeheader()
        writer.writerows(rows)
    print(f"written to {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
