"""``assert_attention_close`` on right kernels: ``python -m benchmarks.closeness [--write]``.

The first table has the seconds of a call on N(0, 1) data, and those of the bounds alone. It names
the faults that the call misses, out of a row times 1.01 and a tile of 64 rows times 1.002, of out,
dq, dk and dv.

The second table counts the calls on data of the shape of a real model's. ``DATA`` lists its kinds.
The kernels are correct, so each alarm is a false one. The command prints its message and returns 1.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks import emulated
from benchmarks.findings.environment import device_name, versions
from benchmarks.saving import saved
from fa_verify import Mask, assert_attention_close
from fa_verify.adapters import sdpa
from fa_verify.judged_call import CallReport
from fa_verify.oracles.bounds.replay import power_of_two
from fa_verify.oracles.outputs import Outputs
from fa_verify.oracles.problem import Problem
from fa_verify.oracles.stream import normal, uniform
from fa_verify.properties.guarantees import accuracy, backward
from fa_verify.properties.inputs.sampling import TORCH_DTYPES
from fa_verify.properties.inputs.tensors import Inputs
from fa_verify.properties.kernels.subject import Subject
from fa_verify.properties.running.trial import plan_in_range

__all__ = [
    "BACKENDS", "DATA", "FAULTS", "Call", "alarms", "called", "drawn", "main", "measured", "scaled",
]  # fmt: skip

ROOT = Path(__file__).parents[1]
TILE = 64
READS = ("out", "lse")
# The kernels by device, with the results of the forward that their backward reads if lse is known.
# SDPA's flash kernel for CPUs has an exponential of 20 bits, and leaves the bound of lse.
BACKENDS: Mapping[str, Mapping[str, tuple[Callable[..., torch.Tensor], tuple[str, ...]]]] = {
    "cpu": {"emulated": (emulated.attention, READS), "math": (sdpa.math, ())},
    "cuda": {
        "flash": (sdpa.flash, READS), "cudnn": (sdpa.cudnn, ()),
        "efficient": (sdpa.efficient, ()), "math": (sdpa.math, ()),
    },
}  # fmt: skip
# B, H, M = N and head_dim of the first table.
SIZES = {
    "cpu": ((1, 2, 1024, 64),),
    "cuda": ((2, 16, 1024, 128), (2, 16, 4096, 128), (1, 16, 16_384, 128)),
}
# The same of the second one. cuDNN's gradients need N that is no multiple of 64.
SHAPES = {
    "cpu": ((1, 2, 129, 32), (2, 3, 200, 64), (1, 2, 333, 40)),
    "cuda": ((2, 4, 500, 64), (1, 8, 1000, 128), (2, 2, 1500, 64)),
}
CALLS = {"cpu": 300, "cuda": 1000}
FAULTS = {"row": (1, 1.01), "tile": (TILE, 1.002)}


class Call(NamedTuple):
    """A call of a backend."""

    results: dict[str, torch.Tensor]  # out, and lse and gradients if there are any
    inputs: dict[str, Any]  # the other arguments of ``assert_attention_close``


def _tokens(x: torch.Tensor, seed: int, kinds: int) -> torch.Tensor:
    """Repeats the first rows of each head at random places."""
    n = x.shape[2]
    which = (uniform(seed, "tokens", (n,), x.device) * min(kinds, n)).long()
    return x[:, :, which]


def _heavy(x: torch.Tensor, seed: int) -> torch.Tensor:
    """Divides N(0, 1) by the root of a mean of three squares: Student's t."""
    squares = sum(normal(seed, f"t{i}", x.shape, x.device).square() for i in range(3))
    return x / (squares / 3).sqrt()


def _channels(x: torch.Tensor, seed: int, size: float) -> torch.Tensor:
    """Adds a large mean to one channel in sixteen."""
    columns = uniform(seed, "channel", (x.shape[3],), x.device) < 1 / 16
    return torch.where(columns, x + size, x)


def _sink(x: dict[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    """Gives the first key most of the weight of all rows, as models do."""
    x["q"][..., 0] = 4.0
    x["k"][:, :, 0, 0] = 3.0 * x["q"].shape[3] ** 0.5
    return x


def _padded_rows(x: dict[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    """Sets the last rows of q to 0, and gives them no loss."""
    rows = x["q"].shape[2] * 3 // 4
    x["q"][:, :, rows:] = 0
    x["dout"][:, :, rows:] = 0
    return x


def _is_row(x: torch.Tensor, row: int) -> torch.Tensor:
    return (torch.arange(x.shape[2], device=x.device) == row)[:, None]


def _with(**changes: Callable[[torch.Tensor, int], torch.Tensor]) -> Callable[..., Any]:
    def change(x: dict[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
        return {name: changes[name](y, seed) if name in changes else y for name, y in x.items()}

    return change


DATA: Mapping[str, Callable[[dict[str, torch.Tensor], int], dict[str, torch.Tensor]]] = {
    "normal": _with(),
    "heavy tails": _with(q=_heavy, k=_heavy, v=_heavy, dout=_heavy),
    "outlier channels": _with(
        q=lambda x, seed: _channels(x, seed, 5.0), k=lambda x, seed: _channels(x, seed, 20.0),
        v=lambda x, seed: _channels(x, seed + 1, 50.0),
    ),
    "repeated tokens": _with(
        q=lambda x, seed: _tokens(x, seed, 20), k=lambda x, seed: _tokens(x, seed, 20),
        v=lambda x, seed: _tokens(x, seed, 20),
    ),
    "repeated keys": _with(k=lambda x, seed: _tokens(x, seed, 5)),
    "attention sink": _sink,
    "rows of zeros": _padded_rows,
    "nearly equal weights": _with(q=lambda x, _: x * 1e-3),
    "peaked": _with(q=lambda x, _: x * 6),
    "loss is a sum": _with(dout=lambda x, _: torch.ones_like(x)),
    "loss of one row": _with(dout=lambda x, _: x * _is_row(x, 5)),
    "one head for all": _with(
        **{name: lambda x, _: x[:1, :1].expand_as(x) for name in ("q", "k", "v", "dout")}
    ),
    "positive values": _with(v=lambda x, _: x.abs()),
}  # fmt: skip


def drawn(
    data: str, shape: Sequence[int], dtype: str, seed: int, device: str
) -> dict[str, torch.Tensor]:
    """Returns q, k, v and dout."""
    B, H, S, D = shape
    x = {name: normal(seed, name, (B, H, S, D), device) for name in ("q", "k", "v", "dout")}
    return {name: y.to(TORCH_DTYPES[dtype]) for name, y in DATA[data](x, seed).items()}


def called(
    backend: str, x: Mapping[str, torch.Tensor], mask: Mask, device: str, *, gradients: bool
) -> Call:
    """Calls a backend.

    Raises:
        NotImplementedError: The backend refuses the call.
    """
    function, reads = BACKENDS[device][backend]
    subject = Subject.of(function, backend)
    if mask.causal and "causal" not in subject.masks:
        raise NotImplementedError("no causal mask")
    numerics = subject.numerics
    leaves = [x[name].detach().requires_grad_(gradients) for name in "qkv"]
    out = function(*leaves, mask=mask, sm_scale=x["q"].shape[3] ** -0.5)
    out, lse = out if isinstance(out, tuple) else (out, None)
    results = {"out": out.detach()}
    inputs: dict[str, Any] = {name: x[name] for name in "qkv"}
    if gradients:
        if reads:
            # SDPA returns no lse. The graph keeps it for the backward.
            lse = out.grad_fn._saved_logsumexp if lse is None else lse
            results["lse"] = lse.detach().reshape(*out.shape[:2], -1)[:, :, : out.shape[2]]
            numerics = dataclasses.replace(numerics, backward_reads=reads)
        of = torch.autograd.grad(out, leaves, x["dout"])
        results |= {f"d{name}": y for name, y in zip("qkv", of, strict=True)}
        inputs["dout"] = x["dout"]
    return Call(results, inputs | {"mask": mask, "numerics": numerics, "replay_folder": None})


def _judged(call: Call, results: Mapping[str, torch.Tensor]) -> tuple[str, CallReport | None]:
    """Returns the message of a failure, or the figures."""
    try:
        return "", assert_attention_close(**results, **call.inputs, report=True)
    except AssertionError as error:
        return str(error), None


def scaled(x: torch.Tensor, rows: slice, factor: float) -> torch.Tensor:
    """Returns a result with a factor on some rows, before its last rounding.

    The values before it are not known: each was anywhere within half a spacing. A factor of 1.002
    on numbers of 8 bits themselves would be lost in their next rounding.
    """
    spacing = power_of_two(x.double()).mul_(torch.finfo(x.dtype).eps)
    before = x.double() + (uniform(0, "rounding", x.shape, x.device) - 0.5) * spacing
    changed = x.clone()
    changed[:, :, rows] = (before[:, :, rows] * factor).to(x.dtype)
    return changed


def _changed(x: torch.Tensor, fault: str) -> torch.Tensor:
    """Returns a result with a fault in the middle of its last head."""
    count, factor = FAULTS[fault]
    start = x.shape[2] // 2 // TILE * TILE
    changed = x.clone()
    changed[-1:, -1:] = scaled(x[-1:, -1:], slice(start, start + count), factor)
    return changed


def _found(call: Call, fault: str) -> dict[str, bool]:
    """Returns the outputs of which a fault is found."""
    names = [name for name in call.results if name != "lse"]
    # A backward reads out: its own faults are judged given a right one.
    found = {}
    for together in (("out",), tuple(names[1:])):
        faulty = {name: _changed(call.results[name], fault) for name in together}
        if not faulty:
            continue
        of = {"out": faulty["out"]} if together == ("out",) else call.results | faulty
        inputs = call.inputs
        if together == ("out",):
            inputs = {name: y for name, y in inputs.items() if name != "dout"}
        message, _ = _judged(Call(of, inputs), of)
        found |= {name: f" {name} of attention" in message for name in together}
    return found


def _seconds(function: Callable[[], Any], device: str) -> float:
    started = time.perf_counter()
    function()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def _bound_alone(call: Call) -> Callable[[], Any]:
    """Returns the checks that need no independence of roundings."""
    x, results = call.inputs, call.results
    q = x["q"]
    problem = Problem(
        B=q.shape[0], H=q.shape[1], M=q.shape[2], N=q.shape[2], D=q.shape[3], Dv=q.shape[3],
        dtype={y: name for name, y in TORCH_DTYPES.items()}[q.dtype], mask=x["mask"],
        device=q.device.type,
    )  # fmt: skip
    subject = Subject("attention", print, numerics=x["numerics"])
    inputs = Inputs(q, x["k"], x["v"], x.get("dout", torch.zeros_like(q)))
    got = Outputs(*(results.get(name) for name in ("out", "lse", "dq", "dk", "dv")))

    def judge() -> None:
        trial = plan_in_range(subject, problem, inputs).trial(subject, got)
        accuracy.accuracy(trial)
        if "dout" in x:
            backward.backward(trial)

    return judge


def measured(device: str, sizes: Sequence[Sequence[int]]) -> Iterator[dict[str, Any]]:
    """Yields a row of the first table for each size and part of a call."""
    for shape, gradients in itertools.product(sizes, (False, True)):
        x = drawn("normal", shape, "bf16", 0, device)
        kernel = next(iter(BACKENDS[device]))
        call = called(kernel, x, Mask(causal=device == "cuda"), device, gradients=gradients)
        message, figures = _judged(call, call.results)  # warm
        bound = _seconds(_bound_alone(call), device)
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        whole = _seconds(lambda call=call: _judged(call, call.results), device)
        yield {
            "shape": "x".join(map(str, shape)), "results": [*call.results], "bound_s": bound,
            "whole_s": whole, "alarm": message,
            "gib": torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else None,
            "judged": None if figures is None else {k: dict(v) for k, v in figures.judged.items()},
            "found": {fault: _found(call, fault) for fault in FAULTS} if gradients else {},
        }  # fmt: skip


def alarms(device: str, calls: int, seed: int = 0) -> tuple[Counter[Any], Counter[Any], list[str]]:
    """Returns the calls and those that limits judged, by backend and data, and the messages."""
    made: Counter[Any] = Counter()
    judged: Counter[Any] = Counter()
    messages = []
    kinds = itertools.product(
        ("bf16", "fp16", "fp32"), SHAPES[device], BACKENDS[device], (True, False), DATA
    )
    # A stride that shares no factor with the number of kinds visits all of them.
    kinds = [*kinds]
    for number in range(calls):
        dtype, shape, backend, causal, data = kinds[(number * 101 + seed) % len(kinds)]
        x = drawn(data, shape, dtype, seed + number, device)
        try:
            call = called(backend, x, Mask(causal=causal), device, gradients=True)
            message, figures = _judged(call, call.results)
        except (NotImplementedError, ValueError):  # refused, or out of range
            made[backend, "refused"] += 1
            continue
        made[backend, data] += 1
        if figures is not None:
            shares = figures.judged["limits of independent roundings"]
            judged[backend, data] += sum(shares.values()) / len(shares)
        if message:
            messages.append(f"{backend} {data} {dtype} {shape} seed {seed + number}\n{message}")
    return made, judged, messages


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 1 after a false alarm or a fault that is missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.closeness")
    parser.add_argument("--calls", type=int, help="calls of the second table")
    parser.add_argument("--seed", type=int, default=0, help="another seed draws other data")
    parser.add_argument("--write", action="store_true", help="write to results/ instead of build/")
    options = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    started = time.perf_counter()
    rows, failed = [], False
    print("| B x H x S x D | results | bound alone, s | call, s | factor | GiB | found |")
    print("|---|---|---|---|---|---|---|")
    for row in measured(device, SIZES[device]):
        rows.append(row)
        missed = [f"{f} of {n}" for f, of in row["found"].items() for n, y in of.items() if not y]
        failed |= bool(missed or row["alarm"])
        found = f"all but {', '.join(missed)}" if missed else "all" if row["found"] else "-"
        gib = "-" if row["gib"] is None else f"{row['gib']:.0f}"
        print(
            f"| {row['shape']} | {' '.join(row['results'])} | {row['bound_s']:.2f} "
            f"| {row['whole_s']:.2f} | {row['whole_s'] / row['bound_s']:.2f} | {gib} | {found} |",
            *filter(None, [row["alarm"]]), sep="\n", flush=True,
        )  # fmt: skip
    made, judged, messages = alarms(device, options.calls or CALLS[device], options.seed)
    backends = [*BACKENDS[device]]
    print(f"\n| data | {' | '.join(backends)} |\n|---|{'---|' * len(backends)}")
    for data in (*DATA, "refused"):
        cells = [
            f"{made[x, data]} ({judged[x, data] / max(1, made[x, data]):.0%} by limits)"
            if data in DATA else str(made[x, data])
            for x in backends
        ]  # fmt: skip
        print(f"| {data} | {' | '.join(cells)} |")
    print(f"{sum(made.values())} calls, {len(messages)} alarms", *messages[:5], sep="\n")
    record = {
        "device": device_name(), "versions": versions(), "seed": options.seed, "rows": rows,
        "calls": {" / ".join(k): n for k, n in made.items()}, "alarms": messages,
        "seconds": time.perf_counter() - started,
    }  # fmt: skip
    path = saved(ROOT, "closeness.json", record, device=device, keep=options.write)
    print(f"wrote {path} after {record['seconds']:.0f} s")
    return int(failed or bool(messages))


if __name__ == "__main__":
    sys.exit(main())
