"""Masks as plain JSON values and back: the classes that are known by name, and no others."""

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

# Masks that come with the suite, imported when they are asked for.
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
# Those that have been asked for, and those of users.
MASKS: dict[str, type[Mask]] = {"Mask": Mask}


class UnknownMaskError(ValueError):
    """A record names a class of masks that this run does not know."""


def register(mask: type[Mask]) -> None:
    """Makes a class known under its name, so that problems with it can be replayed.

    Raises:
        ValueError: Another class has that name.
    """
    name = mask.__name__
    if name in SHIPPED or MASKS.get(name, mask) is not mask:
        raise ValueError(f"a mask named {name} is known already; needs another name")
    MASKS[name] = mask


def mask_class(name: object) -> type[Mask]:
    """The class of a name, or of the old spelling of one.

    Raises:
        UnknownMaskError: No such class is known.
    """
    if isinstance(name, str) and name not in MASKS:
        name = OLD_NAMES.get(name, name)
    if isinstance(name, str) and name not in MASKS and name in SHIPPED:
        MASKS[name] = getattr(importlib.import_module(SHIPPED[name]), name)
    if not isinstance(name, str) or name not in MASKS:
        known = sorted({*MASKS, *SHIPPED})
        raise UnknownMaskError(
            f"mask type {name!r} is not replayable; known are {known}, and what --mask is given"
        )
    return MASKS[name]


def mask_to_record(mask: Mask) -> dict[str, Any]:
    """A mask as what JSON can hold; fields at their default are left out."""
    record: dict[str, Any] = {"type": type(mask).__name__}
    for item in dataclasses.fields(mask):
        value = getattr(mask, item.name)
        if isinstance(value, Mask):
            record[item.name] = mask_to_record(value)
        elif value != item.default:
            record[item.name] = value
    return record


def mask_from_record(record: object) -> Mask:
    """The mask that a record describes; nothing in it is evaluated, or imported by its name.

    Raises:
        ValueError: No record; UnknownMaskError, one, where its class is not known.
        TypeError, ValueError: Of the class, where a field is unknown or wrong.
    """
    if not isinstance(record, dict):
        raise ValueError(f"mask is {record!r}; needs a JSON object")
    fields = dict(record)
    found = mask_class(fields.pop("type", None))
    for name, value in fields.items():
        fields[name] = mask_from_record(value) if isinstance(value, dict) else _frozen(value)
    return found(**fields)


def _frozen(value: Any) -> Any:
    """Lists, which JSON makes of tuples, as tuples."""
    return tuple(map(_frozen, value)) if isinstance(value, list) else value
