"""Old names and their replacements: old files still load, old code gets an error.

Old files load with the new name: ``MASKS`` in the JSON of a mask; ``KERNELS``, functions of
fa_kernels, and ``CONSTANTS``, their constexpr parameters, in baselines of version 1. ``ARGUMENTS``
are former constants that a kernel takes at run time now, by its new name. Old code gets an error
with the new name: ``MASK_METHODS`` of a subclass of ``Mask``, ``OPTIONS`` of the command line.
"""

from __future__ import annotations

__all__ = ["ARGUMENTS", "CONSTANTS", "KERNELS", "MASKS", "MASK_METHODS", "OPTIONS"]

MASKS = {"Taken": "Sliced"}
MASK_METHODS = {"allows": "mask_mod"}
OPTIONS = {"--finds": "--corpus"}
KERNELS = {
    "delta_kernel": "bwd_preprocess_kernel",
    "dq_of_sums_kernel": "dq_postprocess_kernel",
    "merge_kernel": "combine_kernel",
}
CONSTANTS = {"MODS": "SCORE_MODS", "PACKED": "VARLEN", "SPLIT": "IS_SPLIT"}
ARGUMENTS = {"bwd_preprocess_kernel": ("HAS_DLSE", "COLUMNS")}
