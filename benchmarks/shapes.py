"""Shapes beyond those of ``benchmarks.speed``: ``python -m benchmarks.shapes [NAME ...]``.

The problems have other head dims, groups of heads, windows, varlen sequences and block maps. Our
kernels and every peer that takes a problem run forward and backward, in bf16, on N(0, 1) data. The
calls of a problem are timed in turns, so that drift affects all equally. The error of a forward is
the root mean square over 64 rows, in units of that of the exact output. NAME is a name of a
problem; the default is all of them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch.nn.attention import SDPBackend

from benchmarks.findings.environment import device_name, versions
from benchmarks.peers import PEERS, compiled_flex
from benchmarks.spread import spread
from benchmarks.table import markdown
from fa_kernels import flash_attention, flash_attention_varlen
from fa_verify.timing import interleaved, sdpa

__all__ = ["NAMES", "SHAPES", "Shape", "attentions", "errors", "inputs", "table", "visible_pairs"]


class Shape(NamedTuple):
    """A problem with as many keys as queries.

    Args:
        B: Batch size.
        N: Number of queries and keys of an entry.
        H: Number of query heads.
        Hk: Number of key heads.
        D: Head dim of queries and keys.
        Dv: Head dim of values.
        causal: Whether the mask is causal.
        window: Keys before its own that a row sees, of a causal mask; None is all.
        lengths: Lengths of sequences, which are packed in one row of N; empty without.
        visible: Part of the blocks that a random block map shows; None without a map.
    """

    B: int
    N: int
    H: int
    Hk: int
    D: int
    Dv: int
    causal: bool = True
    window: int | None = None
    lengths: tuple[int, ...] = ()
    visible: float | None = None


BLOCK = 128
_LENGTHS = tuple(range(256, 4097, 256))
SHAPES = {
    "D = 256": Shape(2, 4096, 8, 8, 256, 256, causal=False),
    "D = 256, causal": Shape(2, 4096, 8, 8, 256, 256),
    "D = 96, causal": Shape(2, 4096, 16, 16, 96, 96),
    "D = 192, Dv = 128, causal": Shape(2, 4096, 16, 16, 192, 128),
    "8 heads a group, causal": Shape(1, 8192, 32, 4, 128, 128),
    "window of 1,024": Shape(1, 16384, 16, 16, 128, 128, window=1023),
    "varlen, 256 to 4,096": Shape(1, sum(_LENGTHS), 16, 16, 128, 128, lengths=_LENGTHS),
    "a quarter of the blocks": Shape(1, 16384, 8, 8, 128, 128, causal=False, visible=0.25),
}
NAMES = ("ours", "ours, one pass", "cuDNN", "FlexAttention", "SDPA flash", "SDPA efficient")
_ROUNDS, _ROUND_MS = 5, 25
_ROWS = 64


def _offsets(shape: Shape, device: torch.device | str) -> torch.Tensor:
    return torch.tensor([*accumulate(shape.lengths, initial=0)], dtype=torch.int32, device=device)


def _blocks(shape: Shape, device: torch.device | str) -> torch.Tensor | None:
    """A random map (H, blocks, blocks), in which each block of rows sees its own keys."""
    if shape.visible is None:
        return None
    blocks = -(-shape.N // BLOCK)
    noise = torch.rand(shape.H, blocks, blocks, generator=torch.Generator().manual_seed(1))
    return ((noise < shape.visible) | torch.eye(blocks, dtype=torch.bool)).to(device)


def visible_pairs(shape: Shape, device: torch.device | str) -> Callable[..., torch.Tensor]:
    """Returns a function of (b, h, m, n) that says whether row m sees key n, for FlexAttention."""
    numbers = torch.arange(len(shape.lengths))
    sequence = numbers.repeat_interleave(torch.tensor(shape.lengths, dtype=torch.long)).to(device)
    blocks, window = _blocks(shape, device), shape.window

    def of_lengths(_b: Any, _h: Any, m: Any, n: Any) -> Any:
        return (m >= n) & (sequence[m] == sequence[n])

    def of_blocks(_b: Any, h: Any, m: Any, n: Any) -> Any:
        assert blocks is not None
        return blocks[h, m // BLOCK, n // BLOCK]

    def of_window(_b: Any, _h: Any, m: Any, n: Any) -> Any:
        return (m >= n) & (m - n <= window)

    def causal(_b: Any, _h: Any, m: Any, n: Any) -> Any:
        return m >= n

    def all_pairs(_b: Any, _h: Any, m: Any, n: Any) -> Any:
        return (m >= 0) & (n >= 0)

    if shape.lengths:
        return of_lengths
    if blocks is not None:
        return of_blocks
    if window is not None:
        return of_window
    return causal if shape.causal else all_pairs


def inputs(shape: Shape, device: str, dtype: torch.dtype) -> list[torch.Tensor]:
    """Returns q, k, v and dout: (B, heads, N, head dim), stored as (B, N, heads, head dim)."""
    generator = torch.Generator(device).manual_seed(0)
    sizes = (shape.H, shape.D), (shape.Hk, shape.D), (shape.Hk, shape.Dv), (shape.H, shape.Dv)
    return [
        torch.randn(
            shape.B, shape.N, heads, columns, device=device, dtype=dtype, generator=generator
        ).transpose(1, 2)
        for heads, columns in sizes
    ]


Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def attentions(shape: Shape, device: torch.device | str) -> dict[str, Attention]:
    """Returns the attentions by name; one that does not take the problem raises when it is called.

    Masks and offsets are made here, so that no call makes them.
    """
    offsets, blocks = _offsets(shape, device), _blocks(shape, device)
    found: dict[str, Attention] = {
        "ours": partial(_ours, shape, offsets, blocks, True),
        "ours, one pass": partial(_ours, shape, offsets, blocks, False),
        "cuDNN": partial(_sdpa, shape, SDPBackend.CUDNN_ATTENTION),
        "FlexAttention": _flex(shape, torch.device(device)),
        "SDPA flash": partial(_sdpa, shape, SDPBackend.FLASH_ATTENTION),
        "SDPA efficient": partial(_sdpa, shape, SDPBackend.EFFICIENT_ATTENTION),
    }
    if "flash-attn-4" in PEERS:
        found["flash-attn-4"] = partial(_flash_attn_4, shape, offsets)
    return found


def _packed(x: torch.Tensor) -> torch.Tensor:
    """(1, H, total, D) as (total, H, D)."""
    return x[0].transpose(0, 1)


def _ours(
    shape: Shape,
    offsets: torch.Tensor,
    blocks: torch.Tensor | None,
    deterministic: bool,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
) -> torch.Tensor:
    options: dict[str, Any] = {"causal": shape.causal, "deterministic": deterministic}
    if shape.lengths:
        longest = max(shape.lengths)
        out = flash_attention_varlen(
            *map(_packed, (q, k, v)), cu_seqlens_q=offsets, cu_seqlens_k=offsets,
            max_seqlen_q=longest, max_seqlen_k=longest, **options,
        )  # fmt: skip
        return cast(torch.Tensor, out).transpose(0, 1)[None]
    if shape.window is not None:
        options["window_size"] = (shape.window, 0)
    out = flash_attention(q, k, v, block_mask=blocks, block_size=BLOCK, **options)
    return cast(torch.Tensor, out)


def _sdpa(
    shape: Shape, backend: SDPBackend, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> torch.Tensor:
    if shape.window is not None or shape.visible is not None:
        raise NotImplementedError("takes no such mask")
    if shape.lengths:
        raise NotImplementedError("takes packed sequences as nested tensors alone")
    return sdpa(backend)(q, k, v, shape.causal)


def _flex(shape: Shape, device: torch.device) -> Attention:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    blocks = None
    if shape.causal or shape.visible is not None:
        heads = shape.H if shape.visible is not None else None
        blocks = create_block_mask(
            visible_pairs(shape, device), None, heads, shape.N, shape.N, device=device
        )
    flex = compiled_flex() if device.type == "cuda" else flex_attention
    return partial(flex, block_mask=blocks, enable_gqa=shape.Hk < shape.H)


def _flash_attn_4(
    shape: Shape, offsets: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> torch.Tensor:
    from flash_attn.cute import flash_attn_func, flash_attn_varlen_func

    if shape.visible is not None:
        raise NotImplementedError("takes block maps of its own")
    if shape.lengths:
        longest = max(shape.lengths)
        found = flash_attn_varlen_func(
            *map(_packed, (q, k, v)), cu_seqlens_q=offsets, cu_seqlens_k=offsets,
            max_seqlen_q=longest, max_seqlen_k=longest, causal=True,
        )  # fmt: skip
    else:
        window = (None, None) if shape.window is None else (shape.window, 0)
        found = flash_attn_func(
            *(x.transpose(1, 2) for x in (q, k, v)), causal=shape.causal, window_size=window
        )
    out: torch.Tensor = found[0] if isinstance(found, tuple) else found
    return out.transpose(0, 1)[None] if shape.lengths else out.transpose(1, 2)


def errors(
    shape: Shape,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    outs: Mapping[str, torch.Tensor],
) -> dict[str, float]:
    """Returns the root mean square error of outputs over some rows, in units of the exact output's.

    Raises:
        ArithmeticError: An output has no finite error.
    """
    rows = torch.linspace(0, shape.N - 1, min(_ROWS, shape.N), device=q.device).long()
    keys, pairs = torch.arange(shape.N, device=q.device), visible_pairs(shape, q.device)
    squares, of_exact = dict.fromkeys(outs, 0.0), 0.0
    for b in range(shape.B):
        for h in range(shape.H):
            of = h // (shape.H // shape.Hk)
            scores = q[b, h, rows].double() @ k[b, of].double().mT * shape.D**-0.5
            seen = pairs(b, h, rows[:, None], keys[None])
            exact = scores.masked_fill(~seen, -torch.inf).softmax(1) @ v[b, of].double()
            of_exact += float(exact.square().sum())
            for name, out in outs.items():
                squares[name] += float((out[b, h, rows].double() - exact).square().sum())
    found = {name: (x / of_exact) ** 0.5 for name, x in squares.items()}
    if not all(x < torch.inf for x in found.values()):
        raise ArithmeticError(f"the errors are {found}; needs finite outputs")
    return found


def _measured(shape: Shape) -> dict[str, Any]:
    """The ms of each round by pass and name, the errors, and the reasons of those that raise."""
    q, k, v, dout = inputs(shape, "cuda", torch.bfloat16)
    for x in (q, k, v):
        x.requires_grad_()
    outs: dict[str, torch.Tensor] = {}
    refused: dict[str, str] = {}
    calls = attentions(shape, "cuda")
    for name, call in calls.items():
        try:
            out = call(q, k, v)
            for _ in range(2):
                torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
            outs[name] = out
        except Exception as error:  # Compilers of others raise exceptions of their own.
            refused[name] = f"{type(error).__name__}: {error}".partition("\n")[0][:200]
    passes: dict[str, dict[str, Callable[[], object]]] = {
        "forward": {name: partial(calls[name], q, k, v) for name in outs},
        "backward": {
            name: partial(torch.autograd.grad, out, (q, k, v), dout, retain_graph=True)
            for name, out in outs.items()
        },
    }
    ms = {name: interleaved(timed, _ROUNDS, _ROUND_MS) for name, timed in passes.items()}
    with torch.no_grad():
        found = errors(shape, q, k, v, outs)
    return {"ms": ms, "errors": found, "refused": refused}


def table(record: Mapping[str, Any]) -> list[str]:
    """Formats a record of this command as a table of Markdown."""
    names = [*NAMES, *(["flash-attn-4"] if "flash-attn-4" in str(record) else [])]
    rows = []
    for problem, found in record["problems"].items():
        for of, times in found["ms"].items():
            medians = {name: statistics.median(x) for name, x in times.items()}
            peers = {name: x for name, x in medians.items() if not name.startswith("ours")}
            ours = min(x for name, x in medians.items() if name.startswith("ours"))
            best = min(peers, key=peers.__getitem__)
            cells = [
                (spread(times[name]) + (f"; {found['errors'][name]:.2e}" * (of == "forward")))
                if name in times else "-"
                for name in names
            ]  # fmt: skip
            flex = f"{medians['FlexAttention'] / ours:.2f}" if "FlexAttention" in medians else "-"
            rows.append((problem, of, *cells, flex, f"{peers[best] / ours:.2f} ({best})"))
    return markdown(
        ("problem", "pass", *names, "FlexAttention / ours", "fastest peer / ours"), rows
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table and writes the record; returns 2 without a GPU."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.shapes", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"out of {'; '.join(SHAPES)}")
    parser.add_argument("--out", type=Path, default=Path("build/shapes.json"), metavar="FILE")
    options = parser.parse_args(arguments)
    if unknown := set(options.names) - SHAPES.keys():
        parser.error(f"NAME is {sorted(unknown)}; needs some of {sorted(SHAPES)}")
    if not torch.cuda.is_available():
        print("benchmarks need a CUDA GPU; none is visible")
        return 2
    problems: dict[str, Any] = {}
    record = {"version": 1, "device": device_name(), "versions": versions(), "problems": problems}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    for name in options.names or SHAPES:
        problems[name] = _measured(SHAPES[name])
        options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        for peer, why in problems[name]["refused"].items():
            print(f"{name}: {peer}: {why}", flush=True)
        print("\n".join(table({**record, "problems": {name: problems[name]}})[2:]), flush=True)
    print("\n".join(table(record)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
