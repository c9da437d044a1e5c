"""Tokens: strings that stand for masks and configurations in the arguments of operators.

A token is the object's repr and a number. It is valid in this process alone. In another process,
for instance in a saved graph, it is unknown or stands for another object with the same repr.
"""

from __future__ import annotations

import dataclasses
import operator
from collections import OrderedDict
from threading import Lock
from typing import Any

import torch

from fa_kernels.runtime.private import traced_as_constant
from fa_kernels.runtime.versions import versions_of

__all__ = ["token_of", "value_of"]

# Objects that are kept, least recently used out first. The backward pass uses a call's object too.
MOST = 4096

_lock = Lock()
# An object with the versions of its tensors to its token, and back.
_tokens: OrderedDict[tuple[Any, tuple[int, ...]], str] = OrderedDict()
_values: dict[str, tuple[Any, tuple[int, ...]]] = {}
_made = 0


def token_of(value: Any) -> str:
    """Returns the token of a hashable object; equal objects share a token.

    ``torch.compile`` treats the token as a constant. It guards the fields of the object, which must
    be a frozen dataclass, and compiles another graph when one of them differs.

    Raises:
        NotImplementedError: Under ``torch.compile``, the object is no frozen dataclass.
    """
    if torch.compiler.is_compiling():
        return _token_of_parts(_parts(value))
    return _token(value)


def value_of(token: str) -> Any:
    """Returns the object of a token.

    Raises:
        RuntimeError: The token comes from another process, ``MOST`` other objects have been used
            since, or a tensor of the object has been changed in place since.
    """
    try:
        key = _values[token]
        _tokens.move_to_end(key)
    except KeyError:
        raise RuntimeError(
            f"flash_attention got {token!r}, which is from another process or older than the last "
            f"{MOST}; needs a mask or a config of this process"
        ) from None
    value, versions = key
    if versions_of(value) != versions:
        raise RuntimeError(
            "a tensor that the mask holds has been changed in place since the forward pass; needs "
            "the same content in the backward pass"
        )
    return value


def _token(value: Any) -> str:
    key = value, versions_of(value)
    try:
        token = _tokens[key]
        _tokens.move_to_end(key)
    except KeyError:
        token = _added(key)
    return token


def _added(key: tuple[Any, tuple[int, ...]]) -> str:
    global _made
    with _lock:
        _made += 1
        token = f"{key[0]!r} #{_made}"
        _tokens[key] = token
        _values[token] = key
        if len(_tokens) > MOST:
            del _values[_tokens.popitem(last=False)[1]]
    return token


def _parts(value: Any) -> Any:
    """Converts an object to constants that the compiler guards: a dataclass to [class, *fields].

    The compiler would guard the object itself by identity or not at all. It would also pass an
    incomplete object on if compiled code creates it.
    """
    if isinstance(value, tuple):
        return tuple([_parts(x) for x in value])
    if value is None or isinstance(value, bool | float | str):
        return value
    if isinstance(value, int):
        # Turns a symbolic int of the compiler into a constant.
        return operator.index(value)
    return [type(value), *[_parts(getattr(value, name)) for name in _field_names(type(value))]]


def _field_names(of: type) -> tuple[str, ...]:
    if not dataclasses.is_dataclass(of) or not of.__dataclass_params__.frozen:
        raise NotImplementedError(
            f"mask holds a {of.__name__}; under torch.compile needs frozen dataclasses of ints, "
            "strings and tuples"
        )
    return tuple(field.name for field in dataclasses.fields(of) if field.init)


def _token_of_parts(parts: Any) -> str:
    return _token(_whole(parts))


def _whole(parts: Any) -> Any:
    """Inverts ``_parts``."""
    if isinstance(parts, tuple):
        return tuple(_whole(x) for x in parts)
    if not isinstance(parts, list):
        return parts
    of, *values = parts
    return of(**dict(zip(_field_names(of), map(_whole, values), strict=True)))


for _function in (_field_names, _token_of_parts):
    traced_as_constant(_function)
