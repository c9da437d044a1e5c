"""Draw masks from a user's class by the annotations of its fields or its ``draw`` method."""

from __future__ import annotations

import dataclasses
import random
import typing
from typing import Any

from hypothesis import strategies as st

from fa_verify.oracles.masks.mask import Between, Mask
from fa_verify.properties.problems.seqlens import Draw

__all__ = ["bounds_of", "check_mask_class", "draw_instance", "instance_near"]

_OF_ALL = frozenset(item.name for item in dataclasses.fields(Mask))


def check_mask_class(mask: type[Mask]) -> None:
    """Check that masks can be drawn from a class.

    Raises:
        ValueError: The class is not a frozen dataclass, or a field has no bounds. The message names
            the class and the field.
    """
    if not dataclasses.is_dataclass(mask) or "__hash__" not in vars(mask):
        raise ValueError(f"{mask.__name__} needs @dataclass(frozen=True, kw_only=True)")
    if not hasattr(mask, "draw"):
        for name, hint in _hints(mask).items():
            _choices(mask, name, hint)


def bounds_of(mask: type[Mask], name: str) -> range:
    """Return the range of an int field; empty if the field has no bounds."""
    bounds = getattr(_hints(mask)[name], "__metadata__", ())
    found = [range(x.low, x.high + 1) for x in bounds if isinstance(x, Between)]
    return found[0] if found else range(0)


def _hints(mask: type[Mask]) -> dict[str, object]:
    """Return the annotations of the fields that a class adds to ``Mask``."""
    hints = typing.get_type_hints(mask, include_extras=True)
    return {x.name: hints[x.name] for x in dataclasses.fields(mask) if x.name not in _OF_ALL}


def _choices(mask: type[Mask], name: str, hint: object) -> typing.Sequence[int | bool]:
    """Return the values of a field, starting with the one that it shrinks towards."""
    if hint is bool:
        return (False, True)
    for bound in getattr(hint, "__metadata__", ()):
        if isinstance(bound, Between) and bound.low <= bound.high:
            return range(bound.low, bound.high + 1)
    raise ValueError(
        f"{mask.__name__}.{name} is annotated with {hint}; needs bool or Annotated[int, "
        f"Between(low, high)], or {mask.__name__} needs a classmethod draw(rng, B, H, M, N)"
    )


def draw_instance(draw: Draw, mask: type[Mask], B: int, H: int, M: int, N: int) -> Mask:
    """Draw a mask of a class, without lengths: with its ``draw`` method, else field by field.

    Args:
        draw: Argument of a composite strategy.
        mask: The class. Its ``draw(rng, B, H, M, N)`` receives a ``random.Random``.
        B: Batch entries.
        H: Query heads.
        M: Query rows.
        N: Keys.

    Raises:
        TypeError: The class's ``draw`` does not return a Mask.
        ValueError: A field has no bounds.
    """
    if not hasattr(mask, "draw"):
        choices = {name: _choices(mask, name, hint) for name, hint in _hints(mask).items()}
        return mask(**{name: draw(st.sampled_from(values)) for name, values in choices.items()})
    return _by_its_method(mask, random.Random(draw(st.integers(0, 2**31 - 1))), B, H, M, N)


def instance_near(rng: random.Random, mask: type[Mask], B: int, H: int, M: int, N: int) -> Mask:
    """Draw a mask of a class, without lengths, whose ints most often lie near an edge.

    Edges are the bounds of a field, 0, M, N, and their difference. Arguments and exceptions are
    those of ``draw_instance``.
    """
    if hasattr(mask, "draw"):
        return _by_its_method(mask, rng, B, H, M, N)
    edges = {at + more for at in (0, M, N, abs(N - M)) for more in (-1, 0, 1)} | {2, 3}
    values: dict[str, Any] = {}
    for name, hint in _hints(mask).items():
        choices = _choices(mask, name, hint)
        ends = {*choices[:2], *choices[-1:]}
        near = sorted(ends | {x for x in edges if x in choices})
        values[name] = rng.choice(near if rng.random() < 0.75 else choices)
    return mask(**values)


def _by_its_method(mask: type[Mask], rng: random.Random, B: int, H: int, M: int, N: int) -> Mask:
    """Draw a mask with the method ``draw`` of its class."""
    drawn = mask.draw(rng, B, H, M, N)  # type: ignore[attr-defined]
    if not isinstance(drawn, Mask):
        raise TypeError(f"{mask.__name__}.draw returns {drawn!r}; needs a Mask")
    return drawn
