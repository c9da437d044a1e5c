"""The versions of the tensors that a mask holds: they change when a tensor is changed in place.

Results that are cached by a mask are cached by the versions too, so that no call gets those of an
earlier content.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

__all__ = ["check_held", "versions_of"]


def check_held(value: Any) -> None:
    """Checks that changes of what a mask holds can be noticed.

    Raises:
        TypeError: It holds an inference tensor, which has no version, or an object that is not
            hashable, such as a list or a NumPy array.
    """
    for x in _held(value):
        if isinstance(x, torch.Tensor):
            if x.is_inference():
                raise TypeError(
                    "mask holds an inference tensor, whose changes cannot be noticed; needs a "
                    "tensor that was made outside of torch.inference_mode"
                )
        elif type(x).__hash__ is None:
            raise TypeError(
                f"mask holds a {type(x).__name__}, whose changes cannot be noticed; needs tensors, "
                "and objects that are hashable"
            )


def versions_of(value: Any) -> tuple[int, ...]:
    """Returns the versions of the tensors that a mask holds, also in tuples and other masks."""
    return tuple(
        x._version for x in _held(value) if isinstance(x, torch.Tensor) and not x.is_inference()
    )


def _held(value: Any) -> Iterator[Any]:
    """Yields the tensors and the other values in the attributes of an object, in order."""
    names = dict.fromkeys(vars(value)) if hasattr(value, "__dict__") else {}
    if dataclasses.is_dataclass(value):  # some may be in slots
        names |= dict.fromkeys(x.name for x in dataclasses.fields(value))
    for name in names:
        yield from _inside(getattr(value, name, None))


def _inside(value: Any) -> Iterator[Any]:
    if isinstance(value, tuple):
        for x in value:
            yield from _inside(x)
    elif hasattr(value, "native"):
        yield from _held(value)
    else:
        yield value
