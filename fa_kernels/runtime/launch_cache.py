"""Launches of kernels that are compiled already, without what Triton does anew for each.

It works out from all arguments which compiled code they ask for, which takes longer than to launch
that. What the code of the kernels here follows from is little: see ``kernels.kernel``.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
import triton

__all__ = ["cdiv", "run"]

# By kernel, device, kinds of arguments and constants: the code, and the constants that it counts
# among its arguments, in their order.
_compiled: dict[Hashable, tuple[Any, list[Any]]] = {}


def cdiv(a: int, b: int) -> int:
    """ceil(a / b) of integers, b > 0; Triton's own takes a tenth of a call."""
    return -(-a // b)


def run(
    kernel: Any,
    grid: tuple[int, ...],
    *args: Any,
    kinds: tuple[Hashable, ...] | None = None,
    **constants: Any,
) -> None:
    """``kernel[grid](*args, **constants)``, on the current device.

    Args:
        kernel: It specialises neither on alignments nor on the values of integers.
        grid: Programs along up to three axes.
        args: All its parameters but the last ones: tensors, ints, descriptors, tuples of them.
        kinds: What the types of all ``args`` follow from; None: they are looked at one by one.
        constants: Those, constexpr, and Triton's options.
    """
    if not isinstance(kernel, triton.JITFunction) or constants.get("PREDICATE") is not None:
        # In the interpreter nothing is compiled. Of another's function only Triton knows whether it
        # still is what it was.
        kernel[grid](*args, **constants)
        return
    if kinds is None:
        kinds = tuple(map(_kind, args))
    # It keeps the function, so that no other one can get its place in memory.
    key = (kernel.fn, torch.cuda.current_device(), kinds, *constants.items())
    found = _compiled.get(key)
    if found is None:
        code = kernel[grid](*args, **constants)
        _compiled[key] = code, [constants[name] for name in kernel.arg_names[len(args) :]]
        return
    code, rest = found
    code[(*grid, 1, 1)](*args, *rest)


def _kind(x: Any) -> Hashable:
    """What the type of a parameter follows from."""
    if isinstance(x, torch.Tensor):
        return x.dtype
    if isinstance(x, int):
        # Of 32, 64 or 64 unsigned bits, where no annotation says it.
        return x.bit_length() // 32
    if isinstance(x, tuple):
        return tuple(map(_kind, x))
    return x.base.dtype, tuple(x.block_shape), x.layout
