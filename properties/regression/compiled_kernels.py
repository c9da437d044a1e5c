"""What compiled Triton kernels take of a GPU: registers, spills, shared memory."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fa_verify.properties.regression.difference import Difference

__all__ = ["Resources", "loaded_kernels", "moved_kernels", "name_of"]

# A rise beyond it costs occupancy sooner or later; below it a compiler's choice often varies.
RISE = 0.10


@dataclass(frozen=True)
class Resources:
    """What a kernel takes.

    Args:
        registers: Of a thread.
        spills: Words of 32 bits of a thread that did not fit into registers.
        shared: Bytes of shared memory of a program.
    """

    registers: int
    spills: int
    shared: int

    def __str__(self) -> str:
        return f"{self.registers} registers, {self.spills} spills, {self.shared} B shared"

    def most(self, other: Resources | None) -> Resources:
        """The larger of each: of variants that differ in what no name shows, as alignment."""
        if other is None:
            return self
        mine, theirs = vars(self).values(), vars(other).values()
        return Resources(*map(max, zip(mine, theirs, strict=True)))


@functools.cache
def loaded_kernels() -> dict[str, Resources]:
    """The kernels that this process loads onto a GPU from the first call on, by name; grows.

    A name is that of the function, the types that its pointers have, and its constexpr arguments.
    Under the interpreter nothing is compiled, so it stays empty.
    """
    from triton.compiler import CompiledKernel

    found: dict[str, Resources] = {}
    # Registers and spills are known once a kernel is loaded, and no hook of Triton's is told them.
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
    """Function, pointers and constexprs: "dq_kernel(bf16 fp32) BLOCK_M=64 BLOCK_N=64"."""
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
    """What kernels take more or less of; that spills, or a tenth more of the rest, is an alarm.

    Args:
        then: Of the baseline.
        now: Of this run.
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
