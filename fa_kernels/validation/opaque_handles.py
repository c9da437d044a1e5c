"""Objects as strings, which operators can take: masks with a predicate, and configurations.

A token is the object's repr with a number. It means the object in this process: in another one,
where a saved graph may take it, it is unknown, or an object of the same repr.
"""

from __future__ import annotations

import dataclasses
import operator
from collections import OrderedDict
from threading import Lock
from typing import Any

import torch

from fa_kernels.runtime.private import traced_as_constant

__all__ = ["token_of", "value_of"]

# Objects that are kept, those used last. A call's is used by its backward pass too.
MOST = 4096

_lock = Lock()
_tokens: OrderedDict[Any, str] = OrderedDict()
_values: dict[str, Any] = {}
_made = 0


def token_of(value: Any) -> str:
    """The token of a hashable object; equal ones have one.

    ``torch.compile`` takes it for a constant: a graph is made for the fields of a frozen dataclass,
    and another one where one of them differs.

    Raises:
        NotImplementedError: In ``torch.compile``, of anything else.
    """
    if torch.compiler.is_compiling():
        return _token_of_parts(_parts(value))
    return _token(value)


def value_of(token: str) -> Any:
    """The object of a token.

    Raises:
        RuntimeError: It is of another process, or ``MOST`` others have been used since.
    """
    try:
        value = _values[token]
        _tokens.move_to_end(value)
    except KeyError:
        raise RuntimeError(
            f"flash_attention got {token!r}, which is of another process or older than the last "
            f"{MOST}; needs a mask or a config of this process"
        ) from None
    return value


def _token(value: Any) -> str:
    try:
        token = _tokens[value]
        _tokens.move_to_end(value)
    except KeyError:
        token = _added(value)
    return token


def _added(value: Any) -> str:
    global _made
    with _lock:
        _made += 1
        token = f"{value!r} #{_made}"
        _tokens[value] = token
        _values[token] = value
        if len(_tokens) > MOST:
            del _values[_tokens.popitem(last=False)[1]]
    return token


def _parts(value: Any) -> Any:
    """An object as constants, each of which the compiler guards: a dataclass as [class, *fields].

    Objects it would guard by identity or not at all, and show half made where they are made in what
    is compiled.
    """
    if isinstance(value, tuple):
        return tuple([_parts(x) for x in value])
    if value is None or isinstance(value, bool | float | str):
        return value
    if isinstance(value, int):
        # A variable of the compiler becomes a constant.
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
    """What ``_parts`` took apart."""
    if isinstance(parts, tuple):
        return tuple(_whole(x) for x in parts)
    if not isinstance(parts, list):
        return parts
    of, *values = parts
    return of(**dict(zip(_field_names(of), map(_whole, values), strict=True)))


for _function in (_field_names, _token_of_parts):
    traced_as_constant(_function)
