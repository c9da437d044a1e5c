"""Converts masks to JSON values and back, for classes that are registered by name."""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.renamed import MASKS as OLD_NAMES

__all__ = [
    "MASKS",
    "SHIPPED",
    "UnknownMaskError",
    "mask_class",
    "mask_from_record",
    "mask_to_record",
    "register",
]

# The shipped masks, imported on first use.
SHIPPED = {
    "Both": "fa_verify.oracles.masks.mask",
    "Either": "fa_verify.oracles.masks.mask",
    "Sliced": "fa_verify.oracles.masks.mask",
    "PrefixLM": "fa_verify.oracles.masks.prefix_lm",
    "Document": "fa_verify.oracles.masks.document",
    "Dilated": "fa_verify.oracles.masks.dilated",
    "Tree": "fa_verify.oracles.masks.tree",
    "SinkWindow": "fa_verify.oracles.masks.sink_window",
    "BlockSparse": "fa_verify.oracles.masks.block_sparse",
    "Neighbourhood": "fa_verify.oracles.masks.neighbourhood",
}
# The masks that are imported: shipped ones in use, and registered ones.
MASKS: dict[str, type[Mask]] = {"Mask": Mask}


class UnknownMaskError(ValueError):
    """A record names a mask class that is not registered."""


def register(mask: type[Mask]) -> None:
    """Registers a class under its name, so that problems with it can be replayed.

    Raises:
        ValueError: Another class has this name.
    """
    name = mask.__name__
    if name in SHIPPED or MASKS.get(name, mask) is not mask:
        raise ValueError(f"a mask named {name} is known already; needs another name")
    MASKS[name] = mask


def mask_class(name: object) -> type[Mask]:
    """Returns the class of a name; old names are accepted.

    Raises:
        UnknownMaskError: No class has this name.
    """
    if isinstance(name, str) and name not in MASKS:
        name = OLD_NAMES.get(name, name)
    if isinstance(name, str) and name not in MASKS and name in SHIPPED:
        MASKS[name] = getattr(importlib.import_module(SHIPPED[name]), name)
    if not isinstance(name, str) or name not in MASKS:
        known = sorted({*MASKS, *SHIPPED})
        raise UnknownMaskError(
            f"mask type {name!r} is not replayable; known are {known}, and masks given by --fa-mask"
        )
    return MASKS[name]


def mask_to_record(mask: Mask) -> dict[str, Any]:
    """Converts a mask to JSON values, without the fields at their defaults."""
    record: dict[str, Any] = {"type": type(mask).__name__}
    for item in dataclasses.fields(mask):
        value = getattr(mask, item.name)
        if isinstance(value, Mask):
            record[item.name] = mask_to_record(value)
        elif value != item.default:
            record[item.name] = value
    return record


def mask_from_record(record: object) -> Mask:
    """Converts a record to a mask; nothing in it is evaluated, or imported by a name in it.

    Raises:
        ValueError: It is not a JSON object, or (``UnknownMaskError``) its class is not registered.
        TypeError, ValueError: The class rejects a field.
    """
    if not isinstance(record, dict):
        raise ValueError(f"mask is {record!r}; needs a JSON object")
    fields = dict(record)
    found = mask_class(fields.pop("type", None))
    for name, value in fields.items():
        fields[name] = mask_from_record(value) if isinstance(value, dict) else _frozen(value)
    return found(**fields)


def _frozen(value: Any) -> Any:
    """Converts lists, which JSON has in place of tuples, to tuples."""
    return tuple(map(_frozen, value)) if isinstance(value, list) else value
