"""Triton predicates of the mask algebra: window, both, either, sliced entries and heads.

The module needs Triton. It is imported when a kernel requests a mask's Triton predicate.
"""

from __future__ import annotations

from functools import lru_cache
from types import FunctionType
from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

if TYPE_CHECKING:
    import torch

    from fa_verify.oracles.masks.mask import Mask

__all__ = ["both", "either", "native_of", "sliced"]


@triton.jit
def _all(b, h, m, n, args):
    return (m >= 0) & (n >= 0)


@triton.jit
def _in_window(b, h, m, n, args):
    """args: (offsets (B,), window_left, window_right)."""
    distance = n - (m + tl.load(args[0] + b))
    return (distance >= -args[1]) & (distance <= args[2])


# Placeholders: copies of the functions below have other functions under these names. Triton's
# interpreter does not support closures.
_first: Any = _all
_second: Any = _all


def _both(b, h, m, n, args):
    return _first(b, h, m, n, args[0]) & _second(b, h, m, n, args[1])


def _either(b, h, m, n, args):
    return _first(b, h, m, n, args[0]) | _second(b, h, m, n, args[1])


def _sliced(b, h, m, n, args):
    return _first(tl.load(args[0] + b), tl.load(args[1] + h), m, n, args[2])


def _bound(template: Any, first: Any, second: Any = _all) -> Any:
    """Returns a jit function: a copy of a template that calls other functions."""
    names = {**template.__globals__, "_first": first, "_second": second}
    return triton.jit(FunctionType(template.__code__, names, template.__name__))


# Cached, so that each pair of functions is compiled once.
@lru_cache(maxsize=256)
def both(first: Any, second: Any) -> Any:
    """Returns the conjunction of two jit functions; its args are the pair of their args."""
    return _bound(_both, first, second)


@lru_cache(maxsize=256)
def either(first: Any, second: Any) -> Any:
    """Returns the disjunction of two jit functions; its args are the pair of their args."""
    return _bound(_either, first, second)


@lru_cache(maxsize=256)
def sliced(function: Any) -> Any:
    """Returns a jit function on sliced entries and heads; args: (entries, heads, inner args)."""
    return _bound(_sliced, function)


def native_of(
    mask: Mask, B: int, H: int, M: int, N: int, device: torch.device | str
) -> tuple[Any, tuple[Any, ...]]:
    """Returns (jit function, args) of a mask without its lengths, to combine it with others."""
    found = mask.native(B, H, M, N, device)
    if mask.window_left is None and mask.right is None:
        return found or (_all, (0,))
    left, right = (M + N if x is None else min(x, M + N) for x in (mask.window_left, mask.right))
    window = (mask.offsets(B, M, N, device), left, right)
    if found is None:
        return _in_window, window
    return both(_in_window, found[0]), (window, found[1])
