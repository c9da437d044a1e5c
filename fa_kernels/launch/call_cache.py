"""Memoised validation.

If q, k and v are the only tensors, the result of validation depends on shapes, dtypes, devices and
plain values alone. Computing it takes longer than launching a kernel.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable
from typing import Any

import torch

from fa_kernels.configs import Config
from fa_kernels.launch import hopper
from fa_kernels.runtime.device_cache import forget, is_capturing, keep_for_graphs
from fa_kernels.validation import arguments
from fa_kernels.validation.arguments import Arguments, Request

__all__ = ["check", "prepared"]

# Entries of each cache; a full cache is cleared.
MOST = 1024
# Types whose values are interchangeable if they are equal and have the same type.
_PLAIN = {bool, int, float, str, type(None), Config}
_TENSORS = {torch.Tensor, torch.nn.Parameter}
_requests: dict[Hashable, Request] = {}
_arguments: dict[Hashable, Arguments] = {}


def _keep(kept: dict[Hashable, Any], key: Hashable, value: Any) -> None:
    if len(kept) >= MOST:
        forget(kept)
    kept[key] = value


def _checked(q: Any, k: Any, v: Any, *, config: Any, **options: Any) -> Request:
    """``arguments.check``, and "hopper" as a config: "default", refused without its kernels."""
    if not isinstance(config, str) or config != "hopper":
        return arguments.check(q, k, v, config=config, **options)
    request = arguments.check(q, k, v, config="default", **options)
    if not torch.compiler.is_compiling():
        hopper.require(q.device)
    return request


def check(q: Any, k: Any, v: Any, *, window_size: Any, **options: Any) -> Request:
    """Memoises ``arguments.check``."""
    window = window_size if type(window_size) is tuple else (window_size,)
    values = (*window, *options.values())
    types = tuple(map(type, values))
    if (
        torch.compiler.is_compiling()
        or not _PLAIN.issuperset(types)
        or not _TENSORS.issuperset(map(type, (q, k, v)))
    ):
        return _checked(q, k, v, window_size=window_size, **options)
    shapes = (q.shape, k.shape, v.shape, q.layout, k.layout, v.layout)
    key = (shapes, q.dtype, k.dtype, v.dtype, q.device, k.device, v.device, values, types)
    request = _requests.get(key)
    if request is None:
        request = _checked(q, k, v, window_size=window_size, **options)
        _keep(_requests, key, request)
    else:
        # Depends on the environment of the process, not on the call.
        arguments.check_device(q.device)
    return request


def prepared(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    request: Request,
    kernels: Collection[str],
) -> Arguments:
    """Memoises ``arguments.prepared``."""
    if not _PLAIN.issuperset(map(type, request)) or request.mask:
        return arguments.prepared(q, k, v, request, kernels)
    # The shapes of q and v determine the shape of k.
    key = (q.shape, v.shape, q.dtype, q.device, request, kernels)
    found = _arguments.get(key)
    if found is None:
        found = arguments.prepared(q, k, v, request, kernels)
        _keep(_arguments, key, found)
    elif is_capturing():
        keep_for_graphs(found)
    return found
