"""Launches of kernels that are compiled already, without what Triton does anew for each.

It works out from all arguments which compiled code they ask for, which takes longer than to launch
that. What the code of the kernels here follows from is little: see ``jit.kernel``.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from operator import itemgetter
from typing import Any, NamedTuple

import torch
import triton

__all__ = ["cdiv", "run"]

# Triton's options that launches give.
_OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion")


class _Order(NamedTuple):
    """How named arguments are brought into the order of a kernel's parameters.

    Args:
        values: Picks all but the constants.
        constants: Picks the constexpr arguments, which are a kernel's last parameters.
        count: How many both pick.
    """

    values: Callable[[Mapping[str, Any]], tuple[Any, ...]]
    constants: Callable[[Mapping[str, Any]], tuple[Any, ...]]
    count: int


# By function.
_orders: dict[Hashable, _Order] = {}
# By kernel, device, kinds of arguments, constants and options.
_compiled: dict[Hashable, Any] = {}


def cdiv(a: int, b: int) -> int:
    """ceil(a / b) of integers, b > 0; Triton's own takes a tenth of a call."""
    return -(-a // b)


def run(
    kernel: Any,
    grid: tuple[int, ...],
    named: Mapping[str, Any],
    kinds: tuple[Hashable, ...] | None = None,
) -> None:
    """``kernel[grid](**named)``, on the current device.

    Args:
        kernel: It specialises neither on alignments nor on the values of integers, and its
            constexpr parameters come last.
        grid: Programs along up to three axes.
        named: All parameters (tensors, ints, descriptors, tuples; constants) and Triton's options,
            in any order. A mapping: each call with so many keywords copies them, a microsecond a
            call and 13 % of a forward's host time.
        kinds: What the types of all arguments but constants follow from; None: they are looked at
            one by one.
    """
    if not isinstance(kernel, triton.JITFunction) or named.get("PREDICATE") is not None:
        # In the interpreter nothing is compiled. Of another's function only Triton knows whether it
        # still is what it was.
        kernel[grid](**named)
        return
    # The key keeps the function, so that no other one can get its place in memory.
    order = _orders.get(kernel.fn)
    if order is None:
        order = _orders[kernel.fn] = _order(kernel)
    options = tuple(map(named.get, _OPTIONS))
    if len(named) != order.count + len(_OPTIONS) - options.count(None):
        # A name too many, or one that is missing: Triton says which.
        kernel[grid](**named)
        return
    values, constants = order.values(named), order.constants(named)
    if kinds is None:
        kinds = tuple(map(_kind, values))
    key = (kernel.fn, torch.cuda.current_device(), kinds, constants, options)
    code = _compiled.get(key)
    if code is None:
        _compiled[key] = kernel[grid](**named)
        return
    code[(*grid, 1, 1)](*values, *constants)


def _order(kernel: Any) -> _Order:
    """The order of a kernel's parameters."""
    names = kernel.arg_names
    constants = [x.name for x in kernel.params if x.is_constexpr]
    values = names[: len(names) - len(constants)]
    assert [*values, *constants] == names, f"{kernel.fn.__name__}: constexpr parameters come last"
    return _Order(_picked(values), _picked(constants), len(names))


def _picked(names: list[str]) -> Callable[[Mapping[str, Any]], tuple[Any, ...]]:
    """A function that picks some values of a mapping."""
    if len(names) > 1:
        return itemgetter(*names)
    return lambda named: tuple(named[name] for name in names)


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
