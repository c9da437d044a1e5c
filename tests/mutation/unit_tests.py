"""The unit tests of the kernels' parts, on a copy of the package: ranges, launches, arguments."""

from __future__ import annotations

import sys
from collections.abc import Collection
from types import ModuleType

from tests.mutation.first_failure import first_failure
from tests.mutation.mutant import Kill
from tests.mutation.package import PACKAGE

__all__ = ["TESTED_ALONE", "failure_of"]

# Those first that alone see a fault of a kernel.
FILES = tuple(
    f"tests/unit/test_{name}.py"
    for name in ("launch", "element_mask", "ranges", "attention", "arguments", "block_map")
)
# They take longer, and are asked about a kernel only where they are about it.
OF_THE_CALL = tuple(
    f"tests/unit/test_{name}.py"
    for name in (
        *("offsets", "block_mask", "splits", "packed", "tokens", "operators", "pooled"),
        *("remembered", "tiles_in_a_row", "dispatch"),
    )
)
# What they are about.
TESTED_ALONE = tuple(
    f"fa_kernels/{name}.py"
    for name in (
        *("arguments", "block_map", "block_mask", "launch", "offsets", "operators", "packed"),
        *("pooling", "ranges", "remembered", "sizes", "tokens"),
        *(
            "kernels/block_lists",
            "kernels/longest_first",
            "kernels/merge",
            "kernels/pool",
            "kernels/tile_kinds",
        ),
    )
)

# What they do for nothing where they are emulated.
ON_HOPPER = ("tests/unit/test_hopper_work.py",)

_TESTS_OF_KERNELS = {
    "fa_kernels/kernels/tile_kinds.py": ("block_map",),
    "fa_kernels/kernels/block_lists.py": ("block_mask",),
    "fa_kernels/kernels/longest_first.py": ("block_map",),
    "fa_kernels/kernels/forward.py": ("splits", "packed"),
    "fa_kernels/kernels/merge.py": ("splits",),
    "fa_kernels/kernels/pool.py": ("pooled",),
    "fa_kernels/pooling.py": ("pooled",),
    "fa_kernels/ranges.py": ("splits",),
    "fa_kernels/offsets.py": ("packed",),
    "fa_kernels/operators.py": ("dispatch",),
    "fa_kernels/packed.py": ("offsets",),
    "fa_kernels/sizes.py": ("packed", "tiles_in_a_row"),
    **{
        f"fa_kernels/kernels/{name}.py": ("packed",)
        for name in ("delta", "dkdv", "dq", "dq_of_sums")
    },
    "fa_kernels/kernels/tiles.py": ("packed", "tiles_in_a_row"),
}


def failure_of(package: ModuleType, edited: Collection[str]) -> Kill | None:
    """The first unit test that fails with a copy in the place of ``fa_kernels``; None if all pass.

    Every later import of ``fa_kernels`` in this process gives the copy.

    Args:
        package: The copy.
        edited: What differs in it, such as "fa_kernels/launch.py": tests about that come first.
    """
    about = {path.replace("fa_kernels/", "tests/unit/test_") for path in edited}
    for path in edited:
        about.update(f"tests/unit/test_{name}.py" for name in _TESTS_OF_KERNELS.get(path, ()))
    copies = {
        name: module
        for name, module in sys.modules.items()
        if name.partition(".")[0] == package.__name__
    }
    for name in [name for name in sys.modules if name.partition(".")[0] == PACKAGE]:
        del sys.modules[name]
    for name, module in copies.items():
        sys.modules[PACKAGE + name.removeprefix(package.__name__)] = module
    if all(path.startswith("fa_kernels/kernels/hopper_") for path in edited):
        return first_failure(ON_HOPPER)
    of_kernels = all(path.startswith("fa_kernels/kernels/") for path in edited)
    more = [file for file in OF_THE_CALL if file in about or not of_kernels]
    return first_failure(sorted((*FILES, *more), key=lambda file: file not in about))
