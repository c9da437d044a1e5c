"""The resources of compiled Triton kernels: registers, spills and shared memory."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fa_verify.properties.regression.difference import Difference

__all__ = ["Resources", "loaded_kernels", "moved_kernels", "name_of"]

# A larger rise costs occupancy sooner or later; smaller ones vary with the compiler's choices.
RISE = 0.10


@dataclass(frozen=True)
class Resources:
    """The resources of a compiled kernel.

    Args:
        registers: Registers per thread.
        spills: 32-bit words per thread that are spilled from registers.
        shared: Bytes of shared memory per program.
    """

    registers: int
    spills: int
    shared: int

    def __str__(self) -> str:
        return f"{self.registers} registers, {self.spills} spills, {self.shared} B shared"

    def most(self, other: Resources | None) -> Resources:
        """Return the maxima over variants whose names are equal (they differ in alignment)."""
        if other is None:
            return self
        mine, theirs = vars(self).values(), vars(other).values()
        return Resources(*map(max, zip(mine, theirs, strict=True)))


@functools.cache
def loaded_kernels() -> dict[str, Resources]:
    """Return the kernels that this process loads onto a GPU after the first call, by name.

    The dict is updated when kernels are loaded. For the names see ``name_of``. It stays empty under
    the interpreter, which compiles nothing.
    """
    from triton.compiler import CompiledKernel

    found: dict[str, Resources] = {}
    # Registers and spills are known once a kernel is loaded, and no hook of Triton receives them.
    load = CompiledKernel._init_handles

    @functools.wraps(load)
    def load_and_note(kernel: Any) -> None:
        is_new = kernel.module is None
        load(kernel)
        if is_new:
            name = name_of(kernel)
            taken = Resources(kernel.n_regs, kernel.n_spills, kernel.metadata.shared)
            found[name] = taken.most(found.get(name))

    CompiledKernel._init_handles = load_and_note
    return found


def name_of(kernel: Any) -> str:
    """Return the kernel's name with the types of its pointers and its constexprs.

    For example, "dq_kernel(bf16 fp32) BLOCK_M=64 BLOCK_N=64".
    """
    source = kernel.src
    signature = getattr(source, "signature", {})
    pointers = dict.fromkeys(re.findall(r"\*k?(\w+)", " ".join(map(str, signature.values()))))
    words = [f"{kernel.name}({' '.join(pointers)})"]
    names = getattr(getattr(source, "fn", None), "arg_names", ())
    for path, value in sorted(getattr(source, "constants", {}).items()):
        if len(path) == 1 and path[0] < len(names) and value is not None:
            words.append(f"{names[path[0]]}={getattr(value, '__name__', value)}")
    return " ".join(words)


def moved_kernels(
    then: Mapping[str, Resources], now: Mapping[str, Resources]
) -> Iterable[Difference]:
    """Yield the changes of resources. More spills, or 10 % more of the rest, is an alarm.

    Args:
        then: The kernels of the baseline.
        now: The kernels of this run.
    """
    for name in sorted({*then, *now}):
        before, after = then.get(name), now.get(name)
        if before == after:
            continue
        if after is None:
            yield Difference("kernels", f"{name}: no longer compiled ({before})")
        elif before is None:
            spills = after.spills > 0
            yield Difference("kernels", f"{name}: new ({after})", alarm=spills)
        else:
            moves = [
                f"{word} {old} -> {new}"
                for (word, old), new in zip(vars(before).items(), vars(after).values(), strict=True)
                if old != new
            ]
            rises = after.spills > before.spills or any(
                new > old * (1 + RISE)
                for old, new in (
                    (before.registers, after.registers),
                    (before.shared, after.shared),
                )
            )
            yield Difference("kernels", f"{name}: {', '.join(moves)}", alarm=rises)
