"""Old spellings and the new ones: old files still load, old code gets an error.

``SPELLINGS`` has the old names of the public API by their owner: methods of a subclass of ``Mask``,
attributes and arguments, options of the command line. Old files load with the new name: ``MASKS``
in the JSON of a mask; ``KERNELS``, functions of fa_kernels, and ``CONSTANTS``, their constexpr
parameters, in baselines of version 1. ``ARGUMENTS`` are former constants that a kernel takes at run
time now, by its new name.
"""

from __future__ import annotations

__all__ = ["ARGUMENTS", "CONSTANTS", "KERNELS", "MASKS", "SPELLINGS"]

SPELLINGS = {
    "Mask": {"allows": "mask_mod"},
    "Report": {"subject": "kernel"},
    "verify": {"subject": "kernel"},
    "options": {"--finds": "--corpus"},
}
MASKS = {"Taken": "Sliced"}
KERNELS = {
    "delta_kernel": "bwd_preprocess_kernel",
    "dq_of_sums_kernel": "dq_postprocess_kernel",
    "merge_kernel": "combine_kernel",
}
CONSTANTS = {"MODS": "SCORE_MODS", "PACKED": "VARLEN", "SPLIT": "IS_SPLIT"}
ARGUMENTS = {"bwd_preprocess_kernel": ("HAS_DLSE", "COLUMNS")}
