"""Names that had another spelling before: old files are read, old code gets an error.

Read as the new name: ``MASKS`` in the JSON of a mask; ``KERNELS``, functions of fa_kernels, and
``CONSTANTS``, their constexpr parameters, in baselines of version 1. Refused by an error that gives
the new name: ``MASK_METHODS`` of a subclass of ``Mask``, ``OPTIONS`` of the command line.
"""

from __future__ import annotations

__all__ = ["CONSTANTS", "KERNELS", "MASKS", "MASK_METHODS", "OPTIONS"]

MASKS = {"Taken": "Sliced"}
MASK_METHODS = {"allows": "mask_mod"}
OPTIONS = {"--finds": "--corpus"}
KERNELS = {
    "delta_kernel": "bwd_preprocess_kernel",
    "dq_of_sums_kernel": "dq_postprocess_kernel",
    "merge_kernel": "combine_kernel",
}
CONSTANTS = {"MODS": "SCORE_MODS", "PACKED": "VARLEN", "SPLIT": "IS_SPLIT"}
