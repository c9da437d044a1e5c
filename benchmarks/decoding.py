"""One query an entry against a cache, beside SDPA and a copy: ``python -m benchmarks.decoding``.

It times ``flash_attention_with_kvcache``. The calls of a problem are timed in turns, so that drift
affects all equally. The copy moves as many bytes as the call has to: half of the bytes of the
cache, q and out are read, and half written. A percentage is the median time of the copy over the
median time of a call.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.spread import spread
from benchmarks.table import markdown
from fa_kernels import flash_attention_with_kvcache
from fa_verify.pytest_plugin.findings.environment import device_name, versions
from fa_verify.timing import interleaved

__all__ = ["NAMES", "PROBLEMS", "calls", "table"]

# (B, N, H, Hk, D, Dv); with 576 and 512, values are the first columns of the keys.
PROBLEMS = (
    (1, 8_192, 32, 8, 128, 128),
    (1, 131_072, 32, 8, 128, 128),
    (8, 32_768, 32, 8, 128, 128),
    (64, 1_024, 32, 8, 128, 128),
    (64, 8_192, 32, 8, 128, 128),
    (16, 8_192, 32, 32, 128, 128),
    (16, 8_192, 32, 8, 64, 64),
    (64, 4_096, 16, 1, 576, 512),
)
NAMES = ("contiguous", "pages of 16", "pages of 128", "SDPA", "copy")
_ROUNDS, _ROUND_MS = 5, 20


def calls(
    B: int, N: int, H: int, Hk: int, D: int, Dv: int, *, device: str, dtype: torch.dtype
) -> dict[str, Callable[[], object]]:
    """Returns the calls by name, on N(0,1) data. SDPA is left out where values are keys."""
    torch.manual_seed(0)

    def drawn(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, device=device, dtype=dtype)

    q = drawn(B, H, 1, D)
    k = drawn(B, N, Hk, D)
    shares = Dv == 512
    v = k[..., :Dv] if shares else drawn(B, N, Hk, Dv)
    lengths = torch.full((B,), N, dtype=torch.int32, device=device)

    def paged(rows: int) -> Callable[[], object]:
        pages = B * N // rows
        table = torch.randperm(pages, device=device).int().view(B, -1)
        k_pages = k.view(pages, rows, Hk, D)
        v_pages = k_pages[..., :Dv] if shares else v.view(pages, rows, Hk, Dv)
        return lambda: flash_attention_with_kvcache(
            q, k_pages, v_pages, cache_seqlens=lengths, page_table=table
        )

    moved = k.nbytes + (0 if shares else v.nbytes) + q.nbytes + B * H * Dv * q.element_size()
    source = torch.empty(moved // 2, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    found: dict[str, Callable[[], object]] = {
        "contiguous": lambda: flash_attention_with_kvcache(q, k, v, cache_seqlens=lengths),
        "pages of 16": paged(16),
        "pages of 128": paged(128),
        "SDPA": lambda: torch.nn.functional.scaled_dot_product_attention(
            q, k.transpose(1, 2), v.transpose(1, 2), enable_gqa=H != Hk
        ),
        "copy": lambda: target.copy_(source),
    }
    if shares:
        del found["SDPA"]
    return found


def table(record: Mapping[str, Any]) -> list[str]:
    """Formats a record of this command as a table of Markdown."""
    rows = []
    for row in record["rows"]:
        times = row["ms"]
        copy = statistics.median(times["copy"])
        cells = [
            f"{spread(times[x])}, {copy / statistics.median(times[x]):.0%}" if x in times else "-"
            for x in NAMES[:-1]
        ]
        B, N, H, Hk, D, Dv = row["problem"]
        rows.append((f"{B}x{N}x{H} ({Hk})x{D}/{Dv}", *cells, spread(times["copy"])))
    return markdown(("B x N x H (Hk) x D/Dv, ms", *NAMES), rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table and writes the times; returns 2 without a GPU."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.decoding")
    parser.add_argument("--out", type=Path, default=Path("build/decoding.json"), metavar="FILE")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("benchmarks need a CUDA GPU; none is visible")
        return 2
    rows: list[dict[str, Any]] = []
    record = {"version": 1, "device": device_name(), "versions": versions(), "rows": rows}
    for problem in PROBLEMS:
        timed = interleaved(
            calls(*problem, device="cuda", dtype=torch.bfloat16), _ROUNDS, _ROUND_MS
        )
        rows.append({"problem": problem, "ms": timed})
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        print(table({**record, "rows": rows[-1:]})[-1], flush=True)
    print("\n".join(table(record)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
