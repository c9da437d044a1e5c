"""Caches of tensors that outlive the calls that made them.

Kernels of later calls read a cached tensor, on any stream and in CUDA graphs. Therefore:

- The stream that writes a tensor is synchronised before the tensor is cached. Other streams do not
  wait for that stream.
- The devices are synchronised before a cache is emptied. PyTorch may give the memory of a tensor
  to another one while a kernel on a third stream is yet to read it.
- A tensor that a captured call reads is kept until the process ends. Nothing tells when a graph is
  replayed for the last time.
- A captured call makes no cached tensor. A capture runs no kernel, so the tensor would be
  undefined until the first replay.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from functools import wraps
from typing import Any, TypeVar, cast

import torch

from fa_kernels.runtime.versions import versions_of

__all__ = ["cached_on_device", "forget", "is_capturing", "keep_for_graphs"]

_Made = TypeVar("_Made", bound=Callable[..., Any])
_MISSING = object()
# Values that captured calls have read, by id.
_of_graphs: dict[int, Any] = {}
# The GPUs that hold cached tensors.
_devices: set[torch.device] = set()


def is_capturing() -> bool:
    """Whether a CUDA graph captures the current stream."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def keep_for_graphs(value: Any) -> None:
    """Keeps a value, which a captured call reads, until the process ends."""
    _of_graphs[id(value)] = value


def forget(cache: dict[Hashable, Any]) -> None:
    """Empties a cache, after the kernels that read its tensors; not during a capture."""
    if is_capturing():
        # Nothing may synchronise now.
        return
    for device in _devices:
        torch.cuda.synchronize(device)
    cache.clear()


def cached_on_device(most: int) -> Callable[[_Made], _Made]:
    """Decorates a function of hashable arguments that returns tensors or tuples of them.

    Arguments that are masks, with a method ``native``, count by the versions of their tensors too.

    Args:
        most: Results to keep; a full cache is emptied.

    Raises:
        RuntimeError: A captured call needs a result that is not cached.
    """

    def decorate(make: _Made) -> _Made:
        cache: dict[Hashable, Any] = {}

        @wraps(make)
        def cached(*arguments: Hashable) -> Any:
            versions = tuple(versions_of(x) for x in arguments if hasattr(x, "native"))
            key = arguments, versions
            value = cache.get(key, _MISSING)
            if value is not _MISSING:
                if is_capturing():
                    keep_for_graphs(value)
                return value
            if is_capturing():
                raise RuntimeError(
                    "flash_attention is captured in a CUDA graph with lengths or a mask that are "
                    "not on the device; needs a call with the same arguments before the capture"
                )
            value = make(*arguments)
            for device in {x.device for x in _tensors(value) if x.is_cuda}:
                torch.cuda.current_stream(device).synchronize()
                _devices.add(device)
            if len(cache) >= most:
                forget(cache)
            cache[key] = value
            return value

        return cast(_Made, cached)

    return decorate


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in a value, which may be nested tuples."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple):
        for x in value:
            yield from _tensors(x)
