"""Old names and their replacements: old files still load, old code gets an error.

``MASKS`` in the JSON of a mask are read as the new name. ``MASK_METHODS`` of a subclass of ``Mask``
and ``OPTIONS`` of the command line raise an error that gives the new name.
"""

from __future__ import annotations

__all__ = ["MASKS", "MASK_METHODS", "OPTIONS"]

MASKS = {"Taken": "Sliced"}
MASK_METHODS = {"allows": "mask_mod"}
OPTIONS = {"--finds": "--corpus"}
