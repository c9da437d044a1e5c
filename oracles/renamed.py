"""Names that had another spelling before: old files are read, old code gets an error.

Read as the new name: ``MASKS`` in the JSON of a mask. Refused by an error that gives the new name:
``MASK_METHODS`` of a subclass of ``Mask``, ``OPTIONS`` of the command line.
"""

from __future__ import annotations

__all__ = ["MASKS", "MASK_METHODS", "OPTIONS"]

MASKS = {"Taken": "Sliced"}
MASK_METHODS = {"allows": "mask_mod"}
OPTIONS = {"--finds": "--corpus"}
