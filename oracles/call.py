# ruff: noqa: D102 -- the class lists what the properties are
"""A call of a kernel as a value, of any kind."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

if TYPE_CHECKING:
    from fa_verify.oracles.problem import Problem

__all__ = ["Call", "changed", "record_from_json", "variants"]


class Call:
    """A call that determines all bits of its inputs, such as a ``Problem``.

    Subclasses are frozen dataclasses. ``kind`` names the functions that draw, run and shrink the
    call: a key of ``properties.kinds.registry.KINDS``.

    Attributes:
        dtype: "fp16", "bf16", "fp32" or "fp64": the dtype of the inputs.
        device: "cpu" or "cuda".
        seed: Seed of all values.
        family: The family of the values of the inputs.
        config: Name of the kernel's tile configuration; "default" for kinds without one.
        attention: The attention to padded tensors that the call computes; None if it is none.
        elements: The number of elements of each output that is held to a bound.
        pairs: Pairs of a query row and a key over all heads, to which the time of a run grows.
        longest: The largest number of query rows or keys.
        columns: The largest head_dim.
        seeds: The seeds of a batch of calls that run as one; empty for a single call.
    """

    kind: ClassVar[str]

    if TYPE_CHECKING:  # fields of some subclasses, and properties of others

        @property
        def dtype(self) -> str: ...
        @property
        def device(self) -> str: ...
        @property
        def seed(self) -> int: ...
        @property
        def family(self) -> str: ...
        @property
        def config(self) -> str: ...
        @property
        def attention(self) -> Problem | None: ...
        @property
        def elements(self) -> Mapping[str, int]: ...
        @property
        def pairs(self) -> int: ...
        @property
        def longest(self) -> int: ...
        @property
        def columns(self) -> int: ...
        @property
        def seeds(self) -> tuple[int, ...]: ...

    else:
        seeds = ()

    def record(self) -> dict[str, Any]:
        """Returns the call as plain values, without the fields at their defaults."""
        raise NotImplementedError

    def to_json(self) -> str:
        """Returns ``record`` as one line of JSON."""
        return json.dumps(self.record(), separators=(",", ":"))

    def part(self, start: int, stop: int) -> Call:
        """Returns calls ``start`` to ``stop`` of a batch of calls, one as a single call."""
        raise NotImplementedError


_Call = TypeVar("_Call", bound=Call)


def changed(call: _Call, **fields: Any) -> _Call:
    """Returns a call with other fields: its own, or those of its attention.

    Raises:
        ValueError: A value is out of range, or the call has no such field.
    """
    names = {item.name for item in dataclasses.fields(call)}  # type: ignore[arg-type]
    own = {name: value for name, value in fields.items() if name in names}
    others = {name: value for name, value in fields.items() if name not in names}
    if others:
        if call.attention is None or "attention" not in names:
            raise ValueError(f"a {call.kind} has no {' and '.join(others)}")
        own["attention"] = dataclasses.replace(call.attention, **others)
    return dataclasses.replace(call, **own)  # type: ignore[type-var]


def variants(call: _Call, changes: Iterable[Mapping[str, Any]]) -> Iterator[_Call]:
    """Yields the valid calls that result from changes of fields, without the call itself."""
    for change in changes:
        try:
            other = changed(call, **change)
        except ValueError:
            continue
        if other != call:
            yield other


def record_from_json(text: str) -> Any:
    """Reads one line of JSON; nothing in it is evaluated or imported.

    Raises:
        ValueError: The text is not JSON.
    """
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"problem is not JSON ({error}): {text[:80]!r}") from None
    except RecursionError:
        raise ValueError(f"problem is nested too deeply: {text[:80]!r}") from None
