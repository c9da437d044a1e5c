"""Ways to call our kernels, timed against each other: ``python -m benchmarks.cases [NAME ...]``.

The ways of a problem are timed in turns, so that drift affects all equally. A cell has the median
time in ms with the lowest and highest round, and the median of the reference over that median. Data
are N(0,1) in bf16. Needs a GPU.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from benchmarks.spread import spread
from benchmarks.table import markdown
from fa_kernels import (
    Config,
    Tile,
    flash_attention,
    flash_attention_varlen,
    flash_attention_with_kvcache,
)
from fa_verify.timing import interleaved

__all__ = ["CASES", "Case", "decoding", "density", "few_queries", "packed", "table"]

Ways = dict[str, Callable[[], object]]
# A tile of few rows, since dots compute all rows of a tile.
_NARROW = Tile(16, 128, 4, 3)
_BF16 = torch.bfloat16


class Case(NamedTuple):
    """A table of this module.

    Args:
        ways: Returns the calls of a problem by name.
        reference: The way whose median time is divided by that of each way.
        problems: The arguments of ``ways`` by the label of a row.
    """

    ways: Callable[..., Ways]
    reference: str
    problems: Mapping[str, tuple[Any, ...]]


def decoding(
    B: int, N: int, H: int, Hk: int, D: int, Dv: int, device: str = "cuda", dtype=_BF16
) -> Ways:
    """One query an entry against a cache, beside SDPA and a copy.

    The copy moves as many bytes as the call has to: half of the bytes of the cache, q and out are
    read, and half written. Where Dv is 512, values are the first columns of the keys, and SDPA is
    left out.
    """
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(*sizes, device=device, dtype=dtype)
        for sizes in ((B, H, 1, D), (B, N, Hk, D), (B, N, Hk, Dv))
    )
    shares = Dv == 512
    v = k[..., :Dv] if shares else v
    lengths = torch.full((B,), N, dtype=torch.int32, device=device)

    def paged(rows: int) -> Callable[[], object]:
        table = torch.randperm(B * N // rows, device=device).int().view(B, -1)
        k_pages = k.view(-1, rows, Hk, D)
        v_pages = k_pages[..., :Dv] if shares else v.view(-1, rows, Hk, Dv)
        return lambda: flash_attention_with_kvcache(
            q, k_pages, v_pages, cache_seqlens=lengths, page_table=table
        )

    moved = k.nbytes + (0 if shares else v.nbytes) + q.nbytes + B * H * Dv * q.element_size()
    source = torch.empty(moved // 2, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    ways: Ways = {
        "contiguous": lambda: flash_attention_with_kvcache(q, k, v, cache_seqlens=lengths),
        "pages of 16": paged(16),
        "pages of 128": paged(128),
        "SDPA": lambda: torch.nn.functional.scaled_dot_product_attention(
            q, k.transpose(1, 2), v.transpose(1, 2), enable_gqa=H != Hk
        ),
        "copy": lambda: target.copy_(source),
    }
    if shares:
        del ways["SDPA"]
    return ways


def density(B: int, N: int, H: int, D: int, backward: bool, device: str = "cuda") -> Ways:
    """Random maps of blocks of 128, by the share of visible blocks."""
    torch.manual_seed(0)
    q, k, v, dout = (
        torch.randn(B, N, H, D, device=device, dtype=_BF16).transpose(1, 2) for _ in range(4)
    )
    leaves = [x.requires_grad_() for x in (q, k, v)]
    noise = torch.rand(H, -(-N // 128), -(-N // 128), device=device)
    ways: Ways = {}
    for share in (1.0, 0.75, 0.5, 0.25, 0.1):
        call = partial(flash_attention, *leaves, block_mask=noise <= share)
        if backward:
            call = partial(torch.autograd.grad, call(), leaves, dout, retain_graph=True)
        ways[str(share)] = call
    return ways


def few_queries(B: int, N: int, H: int, Hk: int, D: int, device: str = "cuda") -> Ways:
    """One query against long keys, with and without splits."""
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(B, rows, heads, D, device=device, dtype=_BF16).transpose(1, 2)
        for rows, heads in ((1, H), (N, Hk), (N, Hk))
    )
    configs = {
        "no parts": Config(),
        "no parts, 16x128": Config(forward=_NARROW),
        **{f"{n} parts, 16x128": Config(forward=_NARROW, splits=n) for n in (1, 4, 16, 64)},
    }
    return {
        name: partial(flash_attention, q, k, v, config=config) for name, config in configs.items()
    }


def packed(lengths: tuple[int, ...], H: int = 16, D: int = 128, device: str = "cuda") -> Ways:
    """Sequences of different lengths, packed and padded: forward and backward, causal.

    The padded call gets the lengths too. cu_seqlens of packed calls are ints, or a tensor with or
    without the longest length.
    """
    torch.manual_seed(0)
    total, longest, B = sum(lengths), max(lengths), len(lengths)
    in_a_row = [torch.randn(total, H, D, device=device, dtype=_BF16) for _ in range(4)]
    apart = [torch.randn(B, H, longest, D, device=device, dtype=_BF16) for _ in range(4)]
    offsets = tuple(accumulate(lengths, initial=0))
    on_device = torch.tensor(offsets, dtype=torch.int32, device=device)

    def both(call: Callable[..., torch.Tensor], tensors: Sequence[torch.Tensor], **options: Any):
        leaves = [x.requires_grad_() for x in tensors[:3]]
        out = call(*leaves, causal=True, **options)
        return torch.autograd.grad(out, leaves, tensors[3])

    def varlen(offsets: object, **options: Any) -> Callable[[], object]:
        options |= {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets}
        return lambda: both(flash_attention_varlen, in_a_row, **options)

    return {
        "padded": lambda: both(flash_attention, apart, seqlens_q=lengths, seqlens_k=lengths),
        "packed, ints": varlen(offsets),
        "on the device": varlen(on_device, max_seqlen_q=longest, max_seqlen_k=longest),
        "without the longest": varlen(on_device),
    }


def _labelled(*problems: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    return {"x".join(map(str, problem)): problem for problem in problems}


CASES = {
    # B, N, H, Hk, D, Dv
    "decoding": Case(decoding, "copy", _labelled(
        (1, 8_192, 32, 8, 128, 128), (1, 131_072, 32, 8, 128, 128), (8, 32_768, 32, 8, 128, 128),
        (64, 1_024, 32, 8, 128, 128), (64, 8_192, 32, 8, 128, 128), (16, 8_192, 32, 32, 128, 128),
        (16, 8_192, 32, 8, 64, 64), (64, 4_096, 16, 1, 576, 512),
    )),
    # B, N, H, D
    "density": Case(density, "1.0", {
        f"{label}, {'backward' if backward else 'forward'}": (*problem, backward)
        for label, problem in _labelled((1, 16384, 8, 128), (2, 16384, 16, 128)).items()
        for backward in (False, True)
    }),
    # B, N, H, Hk, D
    "few_queries": Case(few_queries, "no parts", _labelled(
        (1, 8_192, 32, 8, 128), (1, 65_536, 32, 8, 128), (1, 262_144, 8, 8, 64),
        (16, 8_192, 32, 8, 128),
    )),
    "packed": Case(packed, "padded", {
        "16 of 2048": ((2048,) * 16,),
        "16, 256 to 4096 evenly": (tuple(range(256, 4097, 256)),),
        "64, one of 8192, else 128": ((8192, *(128,) * 63),),
        "256 of 64 to 127": (tuple(64 + i % 64 for i in range(256)),),
    }),
}  # fmt: skip


def table(reference: str, times: Mapping[str, Mapping[str, Sequence[float]]]) -> list[str]:
    """Formats the milliseconds of each round, by row and way, as a table of Markdown."""
    names = list(dict.fromkeys(name for of in times.values() for name in of))
    rows = []
    for label, of in times.items():
        median = statistics.median(of[reference])
        cells = [
            f"{spread(of[x])}, {median / statistics.median(of[x]):.2f}" if x in of else "-"
            for x in names
        ]
        rows.append((label, *cells))
    return markdown(("problem", *names), rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the tables; returns 2 without a GPU."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cases", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"out of {', '.join(CASES)}")
    options = parser.parse_args(arguments)
    if unknown := set(options.names) - CASES.keys():
        parser.error(f"name is {sorted(unknown)}; needs some of {sorted(CASES)}")
    if not torch.cuda.is_available():
        print("benchmarks need a CUDA GPU; none is visible")
        return 2
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bf16, ms and ratio")
    for name in options.names or CASES:
        case = CASES[name]
        times: dict[str, dict[str, list[float]]] = {}
        print(f"\n{name}, over the time of {case.reference}", flush=True)
        for label, problem in case.problems.items():
            times[label] = interleaved(case.ways(*problem))
            print(table(case.reference, {label: times[label]})[-1], flush=True)
        print("\n".join(table(case.reference, times)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
