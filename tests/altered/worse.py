"""Degraded copies of the project's kernels, within every bound, which the gate must detect.

``--fa-kernel=tests.altered.worse:rounded_products`` has slightly larger errors; ``:delayed``
takes 10 % longer.
"""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import torch

from fa_verify.adapters import ours
from tests.mutation.catalogue.copies import PACKAGE, load, sources_of
from tests.mutation.catalogue.mutant import mutated
from tests.mutation.catalogue.subtle import SUBTLE

__all__ = ["delayed", "rounded_products"]

DELAY = 0.10
# Keeps the sources of the copy until the process ends.
_FOLDER = tempfile.TemporaryDirectory(prefix="worse-")


def _mutant(name: str):
    (mutant,) = [x for x in SUBTLE if x.name == name]
    sources = mutated(sources_of(PACKAGE), mutant)
    return ours.adapted(load(sources, Path(_FOLDER.name) / "rounded_products"))


rounded_products = _mutant("delta: products are rounded to the input dtype")


def delayed(q, k, v, *, mask, sm_scale, config="default"):
    """Run the project's kernels, and occupy the GPU for 10 % longer in each pass."""

    def forward():
        return ours.flash_attention(q, k, v, mask=mask, sm_scale=sm_scale, config=config)

    if not q.is_cuda:
        return forward()
    out, lse = forward()
    key = (*q.shape, *k.shape, q.dtype, mask, config)
    _sleep(_cycles(key, "forward", forward))
    if out.requires_grad:
        dout = torch.ones_like(out)
        backward = functools.partial(torch.autograd.grad, out, (q, k, v), dout, retain_graph=True)
        cycles = _cycles(key, "backward", backward)
        out.register_hook(lambda gradient: _sleep(cycles))
    return out, lse


for _name, _value in vars(ours.flash_attention).items():
    setattr(delayed, _name, _value)

_KNOWN: dict[tuple, int] = {}


def _cycles(key: tuple, name: str, call) -> int:
    """Return 10 % of a call's time in clock cycles, measured once per key and name."""
    if (key, name) not in _KNOWN:
        for _ in range(3):
            call()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        events[0].record()
        for _ in range(10):
            call()
        events[1].record()
        torch.cuda.synchronize()
        milliseconds = events[0].elapsed_time(events[1]) / 10
        _KNOWN[key, name] = int(DELAY * milliseconds * _cycles_per_millisecond())
    return _KNOWN[key, name]


@functools.cache
def _cycles_per_millisecond() -> float:
    cycles = 10_000_000
    _sleep(cycles)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    events[0].record()
    _sleep(cycles)
    events[1].record()
    torch.cuda.synchronize()
    return cycles / events[0].elapsed_time(events[1])


def _sleep(cycles: int) -> None:
    torch.cuda._sleep(cycles)
