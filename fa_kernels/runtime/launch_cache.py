"""Launches compiled kernels without Triton's own launcher.

Triton computes a specialisation key from all arguments of a launch, which takes longer than the
launch. The code of the kernels here depends on few of them; see ``jit.kernel``.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from operator import itemgetter
from typing import Any, NamedTuple

import torch
import triton

__all__ = ["cdiv", "run"]

# The options of Triton that launches set.
_OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion")


class _Order(NamedTuple):
    """Puts named arguments into the order of a kernel's parameters.

    Args:
        values: Picks the arguments that are not constexpr.
        untyped: Picks those of them without an annotation, which alone can change their type.
        constants: Picks the constexpr arguments, which are a kernel's last parameters.
        count: Number of values and constants.
    """

    values: Callable[[Mapping[str, Any]], tuple[Any, ...]]
    untyped: Callable[[Mapping[str, Any]], tuple[Any, ...]]
    constants: Callable[[Mapping[str, Any]], tuple[Any, ...]]
    count: int


# By function.
_orders: dict[Hashable, _Order] = {}
# By kernel, device, kinds of arguments, constants and options.
_compiled: dict[Hashable, Any] = {}


def cdiv(a: int, b: int) -> int:
    """Returns ceil(a / b) of integers, b > 0; ``triton.cdiv`` takes a tenth of a call."""
    return -(-a // b)


def run(
    kernel: Any,
    grid: tuple[int, ...],
    named: Mapping[str, Any],
    kinds: tuple[Hashable, ...] | None = None,
) -> tuple[Callable[..., None], tuple[Any, ...]] | None:
    """Launches ``kernel[grid](**named)`` on the current device.

    Args:
        kernel: A kernel that specialises neither on alignments nor on the values of integers. Its
            constexpr parameters come last.
        grid: Programs along up to three axes.
        named: All arguments (tensors, ints, descriptors, tuples, constants) and Triton's options,
            in any order. A mapping, because calls copy their keywords: the host time of a forward
            rises by 13 % if two calls pass some 45 of them on.
        kinds: A key that determines the types of the arguments without an annotation. None computes
            it from these arguments one by one.

    Returns:
        A function that launches the code on this device again, and the arguments in the order of
        the kernel's parameters. None if Triton launched the kernel.
    """
    if not isinstance(kernel, triton.JITFunction):
        # The interpreter compiles nothing.
        kernel[grid](**named)
        return None
    if named.get("PREDICATE") is not None:
        _hash_callees_first(kernel)
        _hash_callees_first(named["PREDICATE"])
        # A predicate is a user's function: Triton alone checks whether its source has changed.
        kernel[grid](**named)
        return None
    # The key keeps the function alive, so that its id is not reused for another one.
    order = _orders.get(kernel.fn)
    if order is None:
        order = _orders[kernel.fn] = _order(kernel)
    options = tuple(map(named.get, _OPTIONS))
    if len(named) != order.count + len(_OPTIONS) - options.count(None):
        # An argument is missing or unknown: let Triton raise the error.
        kernel[grid](**named)
        return None
    values, constants = order.values(named), order.constants(named)
    if kinds is None:
        kinds = tuple(map(_kind, order.untyped(named)))
    key = (kernel.fn, torch.cuda.current_device(), kinds, constants, options)
    code = _compiled.get(key)
    if code is None:
        _hash_callees_first(kernel)
        _compiled[key] = kernel[grid](**named)
        return None
    launch, given = code[(*grid, 1, 1)], (*values, *constants)
    launch(*given)
    return launch, given


def _hash_callees_first(function: Any, callers: tuple[Any, ...] = ()) -> None:
    """Computes Triton's key of the functions that a function calls, and then its own.

    Triton 3.6 puts the constants of a callee into the key of its caller only if it has computed the
    callee's key before. The keys of kernels then depend on the kernels that a process has launched
    earlier, so that other processes compile them again. Triton 3.9 has this order by itself.
    """
    if function.hash is None and function not in callers:
        for name in function.fn.__code__.co_names:
            callee = function.fn.__globals__.get(name)
            if hasattr(type(callee), "cache_key"):
                _hash_callees_first(callee, (*callers, function))
        _ = function.cache_key


def _order(kernel: Any) -> _Order:
    """Returns the order of a kernel's parameters."""
    names = kernel.arg_names
    constants = [x.name for x in kernel.params if x.is_constexpr]
    values = names[: len(names) - len(constants)]
    assert [*values, *constants] == names, f"{kernel.fn.__name__}: constexpr parameters come last"
    untyped = [x.name for x in kernel.params if not x.annotation]
    return _Order(_picked(values), _picked(untyped), _picked(constants), len(names))


def _picked(names: list[str]) -> Callable[[Mapping[str, Any]], tuple[Any, ...]]:
    """Returns a function that picks the values of ``names`` from a mapping, as a tuple."""
    if len(names) > 1:
        return itemgetter(*names)
    return lambda named: tuple(named[name] for name in names)


def _kind(x: Any) -> Hashable:
    """Returns a key that determines the type of a parameter."""
    if isinstance(x, torch.Tensor):
        return x.dtype
    if isinstance(x, int):
        # Without an annotation, Triton takes the first of int32, int64 and uint64 that fits.
        return x.bit_length() // 32
    if isinstance(x, tuple):
        return tuple(map(_kind, x))
    return x.base.dtype, tuple(x.block_shape), x.layout
