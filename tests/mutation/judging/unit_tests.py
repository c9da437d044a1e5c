"""Runs unit tests of the kernels on a mutated copy of the package."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from types import ModuleType

from tests.mutation.catalogue.copies import PACKAGE
from tests.mutation.catalogue.mutant import Kill
from tests.mutation.harness.first_failure import first_failure, unit_test_file

__all__ = ["TESTED_ALONE", "failure_of", "files_for", "is_of_hopper"]

# Files that find faults of kernels that no step finds.
FILES = tuple(
    unit_test_file(f"test_{name}")
    for name in ("launch", "element_mask", "ranges", "attention", "arguments", "block_map")
)
# Slower files, which run on a mutant of a kernel only if they test that kernel.
OF_THE_CALL = tuple(
    unit_test_file(f"test_{name}")
    for name in (
        *(
            "visited_tiles",
            "offsets",
            "block_mask",
            "splits",
            "packed",
            "tokens",
            "operators",
            "fp8",
        ),
        *(
            "pooled",
            "merged_calls",
            "cached_calls",
            "call_cache",
            "tiles_in_a_row",
            "dispatch",
            "far_rows",
            "hopper_launches",
            "fp8",
        ),
    )
)
# Tests of redundant work of Hopper's kernels in the emulation.
ON_HOPPER = (unit_test_file("test_hopper_work"),)
_HOPPER = "fa_kernels/kernels/hopper/"

# Test files by the source file they test. These tests find a fault sooner than problems do.
_OF_PARTS = {
    "fa_kernels/operators.py": ("operators", "dispatch"),
    "fa_kernels/merging.py": ("merged_calls",),
    "fa_kernels/decoding.py": ("cached_calls",),
    "fa_kernels/launch/combine.py": ("merged_calls", "splits"),
    "fa_kernels/launch/fp8.py": ("fp8",),
    "fa_kernels/fp8.py": ("fp8",),
    "fa_kernels/kernels/portable/forward_fp8.py": ("fp8",),
    "fa_kernels/pooling.py": ("pooled",),
    "fa_kernels/varlen.py": ("packed", "offsets"),
    "fa_kernels/launch/call_cache.py": ("call_cache",),
    "fa_kernels/launch/named_arguments.py": ("launch", "far_rows"),
    "fa_kernels/launch/portable.py": ("launch", "hopper_launches"),
    "fa_kernels/launch/sizes.py": ("packed", "tiles_in_a_row"),
    "fa_kernels/schedule/block_sparse.py": ("block_map",),
    "fa_kernels/kernels/common/tile_ranges.py": ("ranges", "splits"),
    "fa_kernels/validation/arguments.py": ("arguments",),
    "fa_kernels/validation/block_mask.py": ("block_mask",),
    "fa_kernels/validation/cu_seqlens.py": ("offsets", "packed"),
    "fa_kernels/validation/opaque_handles.py": ("tokens",),
    "fa_kernels/kernels/portable/block_lists.py": ("block_mask",),
    "fa_kernels/kernels/portable/classify_blocks.py": ("block_map",),
    "fa_kernels/kernels/portable/kvcache.py": ("cached_calls", "visited_tiles"),
    "fa_kernels/kernels/portable/combine.py": ("splits",),
    "fa_kernels/kernels/portable/combine_bwd.py": ("merged_calls",),
    "fa_kernels/kernels/portable/lpt_order.py": ("block_map",),
    "fa_kernels/kernels/portable/pool.py": ("pooled",),
}
TESTED_ALONE = tuple(_OF_PARTS)
# Source files whose faults problems find sooner.
_OF_KERNELS = {
    "fa_kernels/attention.py": ("attention",),
    "fa_kernels/kernels/common/addressing.py": ("packed", "far_rows"),
    "fa_kernels/kernels/common/block_info.py": ("packed", "tiles_in_a_row"),
    "fa_kernels/kernels/common/mask.py": ("element_mask",),
    "fa_kernels/kernels/common/seqlen_info.py": ("packed", "tiles_in_a_row"),
    "fa_kernels/kernels/portable/forward.py": ("splits", "packed", "visited_tiles"),
    **{
        f"fa_kernels/kernels/portable/{name}.py": ("packed", "far_rows")
        for name in ("bwd_preprocess", "dq_postprocess")
    },
    **{
        f"fa_kernels/kernels/portable/{name}.py": ("packed", "visited_tiles")
        for name in ("dkdv", "dq")
    },
}
_ABOUT = {**_OF_PARTS, **_OF_KERNELS}


def is_of_hopper(edited: Collection[str]) -> bool:
    """Whether all mutated files are kernels of Hopper."""
    return bool(edited) and all(path.startswith(_HOPPER) for path in edited)


def files_for(edited: Collection[str]) -> tuple[list[str], list[str]]:
    """The files of unit tests for a mutant: those about its source files, and all others.

    Args:
        edited: The mutated files, such as "fa_kernels/pooling.py". If none is, all files count as
            others.
    """
    if is_of_hopper(edited):
        return [], list(ON_HOPPER)
    about = {unit_test_file(f"test_{name}") for path in edited for name in _ABOUT.get(path, ())}
    of_kernels = edited and all(path.startswith("fa_kernels/kernels/") for path in edited)
    more = [file for file in OF_THE_CALL if file in about or not of_kernels]
    files = (*FILES, *more)
    return [x for x in files if x in about], [x for x in files if x not in about]


def failure_of(package: ModuleType, files: Sequence[str]) -> Kill | None:
    """The first unit test that fails with a copy in place of ``fa_kernels``; None if all pass.

    Every later import of ``fa_kernels`` in this process returns the copy.

    Args:
        package: The copy.
        files: Files of unit tests, which run in this order.
    """
    copies = {
        name: module
        for name, module in sys.modules.items()
        if name.partition(".")[0] == package.__name__
    }
    for name in [name for name in sys.modules if name.partition(".")[0] == PACKAGE]:
        del sys.modules[name]
    for name, module in copies.items():
        sys.modules[PACKAGE + name.removeprefix(package.__name__)] = module
    return first_failure(files)
