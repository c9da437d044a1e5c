"""Calls that a sanitizer watches: ``python -m tests.sanitizers.calls NAME [planted]``.

The process fails if the sanitizer, or the comparison of FpSan, finds a fault.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import torch

from tests.mutation.catalogue.copies import PACKAGE, load, sources_of
from tests.mutation.catalogue.mutant import Edit, Mutant, mutated
from tests.sanitizers.planted import PLANTED

__all__ = ["FAULTS", "main"]

_HOPPER = "fa_kernels/kernels/hopper"
# A fault of the kernels for each sanitizer of Triton.
FAULTS = {
    "consan": Edit(
        f"{_HOPPER}/forward.py",
        "        mbarrier.wait(shared.q_full.index(consumer), rounds & 1)\n",
        "",
    ),
    "gsan": Edit(f"{_HOPPER}/dq.py", "        wait_for_signal(sums)\n", ""),
    "fpsan": Edit(
        "fa_kernels/kernels/portable/forward.py",
        "acc = acc * alpha[:, None]",
        "acc = acc * 1.0",
    ),
}
# Heads, rows and options. 160 tiles are more than the multiprocessors of an H200, so programs share
# tiles.
_SMALL = {"heads": 2, "rows": 200}
_WHOLE = {"heads": 2, "rows": 256}
_CALLS: dict[str, tuple[dict[str, object], ...]] = {
    "portable": (
        {**_SMALL, "D": 64, "config": "portable"},
        {**_SMALL, "D": 32, "config": "16x16", "deterministic": False},
    ),
    # Instrumented, each kernel compiles for up to a minute.
    "hopper": ({**_SMALL, "D": 64}, {**_SMALL, "D": 64, "deterministic": False}),
    # Without padding: there, both consumers clear the same rows of a tile. Each writes the numbers
    # that the other writes, or that are there already, which ConSan takes for a race.
    "whole tiles": ({**_WHOLE, "D": 64}, {**_WHOLE, "D": 64, "deterministic": False}),
    "shared tiles": ({"heads": 32, "rows": 640, "D": 64},),
}
_OF = {
    # racecheck does not take waits on an mbarrier for an order: ConSan does.
    "racecheck": ("portable",),
    "synccheck": ("portable", "hopper"),
    "consan": ("whole tiles",),
    "gsan": ("shared tiles", "portable"),
}


def _package(name: str, planted: bool, folder: str) -> ModuleType:
    """The kernels, or a copy with the fault for a sanitizer."""
    sources = sources_of(PACKAGE)
    if planted:
        sources = mutated(sources, Mutant(name, (FAULTS[name],)))
    return load(sources, Path(folder) / f"watched_by_{name}")


def _call(
    package: ModuleType, heads: int, rows: int, D: int, **options: object
) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (
        torch.randn(1, heads, rows, D, generator=generator, device="cuda").half().requires_grad_()
        for _ in range(3)
    )
    out = package.flash_attention(q, k, v, causal=heads == 2, **options)
    # Another thread would not allocate in the pool that GSan watches.
    with torch.autograd.set_multithreading_enabled(False):
        found: tuple[torch.Tensor, ...] = torch.autograd.grad(out, (q, k, v), q.detach())
    torch.cuda.synchronize()
    return found


def _agree_in_all_tiles(package: ModuleType) -> None:
    """Compares out of several tile configurations, where FpSan makes sums exact in any order.

    FpSan computes in the integers modulo 2^32. Tiles choose the maximum of a row in another order,
    which multiplies all its sums by one factor, and an even sum has no inverse. So the elements of
    a row are known up to a factor: products of an element of one out with another element of the
    other out do not depend on it. Where a sum is below 0 as a number, out is set to 0.
    """
    from tests.sanitizers.payloads import payloads

    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (torch.randn(1, 2, 128, 16, generator=generator, device="cuda") for _ in range(3))
    found = [
        payloads(package.flash_attention(q, k, v, config=config))
        for config in ("16x16", "16x32", "32x16")
    ]
    for one, other in pairwise(found):
        left = one * other.roll(1, dims=-1)
        right = one.roll(1, dims=-1) * other
        rows = ((left - right) % 2**32 == 0).all(-1)
        kept = (one != 0).any(-1) & (other != 0).any(-1)
        agree, count = int(rows[kept].sum()), int(kept.sum())
        print(f"fpsan: {agree} of {count} rows agree, of {kept.numel()}")
        if not count or agree < count:
            raise SystemExit("fpsan: tile configurations differ in their algebra")


def _pool(name: str) -> contextlib.AbstractContextManager[object]:
    """Allocates in memory that GSan watches."""
    if name != "gsan":
        return contextlib.nullcontext()
    from triton.experimental.gsan import create_mem_pool

    return torch.cuda.use_mem_pool(create_mem_pool())


def main(name: str, planted: bool) -> None:
    """Runs the calls, or a planted fault, for the sanitizer of this name."""
    if planted and name in PLANTED:
        PLANTED[name]()
        return
    with tempfile.TemporaryDirectory() as folder, _pool(name):
        package = _package(name, planted, folder)
        if name == "fpsan":
            _agree_in_all_tiles(package)
            return
        for kind in _OF[name]:
            for call in _CALLS[kind]:
                _call(package, **call)  # type: ignore[arg-type]


if __name__ == "__main__":
    main(sys.argv[1], "planted" in sys.argv[2:])
