"""Masks of a user's class: which parameters they have, and how they are drawn."""

from __future__ import annotations

import dataclasses
import random
import typing

from hypothesis import strategies as st

from fa_verify.oracles.masks.mask import Between, Mask
from fa_verify.properties.problems.seqlens import Draw

__all__ = ["bounds_of", "check_mask_class", "draw_instance"]

_OF_ALL = frozenset(item.name for item in dataclasses.fields(Mask))


def check_mask_class(mask: type[Mask]) -> None:
    """Sees that masks of a class can be drawn.

    Raises:
        ValueError: It is no frozen dataclass, or a field has no bounds; the message names it.
    """
    if not dataclasses.is_dataclass(mask) or "__hash__" not in vars(mask):
        raise ValueError(f"{mask.__name__} needs @dataclass(frozen=True, kw_only=True)")
    if not hasattr(mask, "draw"):
        for name, hint in _hints(mask).items():
            _choices(mask, name, hint)


def bounds_of(mask: type[Mask], name: str) -> range:
    """The ints that a field may have, nothing where it has no bounds."""
    bounds = getattr(_hints(mask)[name], "__metadata__", ())
    found = [range(x.low, x.high + 1) for x in bounds if isinstance(x, Between)]
    return found[0] if found else range(0)


def _hints(mask: type[Mask]) -> dict[str, object]:
    """The annotations of the fields that a class adds."""
    hints = typing.get_type_hints(mask, include_extras=True)
    return {x.name: hints[x.name] for x in dataclasses.fields(mask) if x.name not in _OF_ALL}


def _choices(mask: type[Mask], name: str, hint: object) -> typing.Sequence[int | bool]:
    """The values of a field, from the one it shrinks towards."""
    if hint is bool:
        return (False, True)
    for bound in getattr(hint, "__metadata__", ()):
        if isinstance(bound, Between) and bound.low <= bound.high:
            return range(bound.low, bound.high + 1)
    raise ValueError(
        f"{mask.__name__}.{name} is annotated with {hint}; needs bool or Annotated[int, "
        f"Between(low, high)], or {mask.__name__} a classmethod draw(rng, B, H, M, N)"
    )


def draw_instance(draw: Draw, mask: type[Mask], B: int, H: int, M: int, N: int) -> Mask:
    """A mask of a class without lengths: by its ``draw``, or field by field within the bounds.

    Args:
        draw: Of a composite strategy.
        mask: The class; its ``draw(rng, B, H, M, N)`` gets a ``random.Random``.
        B: Batch entries.
        H: Query heads.
        M: Query rows.
        N: Keys.

    Raises:
        TypeError: ``draw`` returns something else.
        ValueError: A field has no bounds.
    """
    if not hasattr(mask, "draw"):
        choices = {name: _choices(mask, name, hint) for name, hint in _hints(mask).items()}
        return mask(**{name: draw(st.sampled_from(values)) for name, values in choices.items()})
    drawn = mask.draw(random.Random(draw(st.integers(0, 2**31 - 1))), B, H, M, N)
    if not isinstance(drawn, Mask):
        raise TypeError(f"{mask.__name__}.draw returns {drawn!r}; needs a Mask")
    return drawn
