"""Shards: the pieces of a conformance test that pytest-xdist distributes over workers.

A shard fixes the dtype, the tile configuration and the padded head dims, so that a run on a GPU
compiles few kernels. All other parameters of a problem are drawn.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from fa_verify.properties.kernels.covering_problems import SharedKernel
from fa_verify.properties.kernels.subject import Subject

__all__ = ["Shard", "has_table", "larger_shards_of", "shards_of", "shared_kernels"]


@dataclass(frozen=True)
class Shard:
    """One shard.

    Args:
        dtype: Dtype of the inputs.
        config: Name of the tile configuration.
        head_dims: Values that D and Dv are drawn from.
        tile: Larger side of the forward's tile. Drawn sequence lengths cluster around it.
    """

    dtype: str
    config: str
    head_dims: tuple[int, ...]
    tile: int

    def __str__(self) -> str:
        return f"{self.dtype}-{self.config}-d{max(self.head_dims)}"


_SMALL = (16, 1, 2, 3, 5, 8, 13, 15)
_MEDIUM = (32, 17, 24, 31, 64, 33, 40, 57)
_LARGE = (64, 33, 128, 80, 96, 127)
_LARGEST = (256, 129, 192, 255)

_OF_CONFIGS = (
    Shard("fp16", "16x16", _SMALL, 16),
    Shard("fp16", "16x32", _MEDIUM, 32),
    Shard("fp16", "default", _LARGE, 128),
    Shard("fp16", "32x16", (16, 7, 32, 24), 32),
    Shard("fp16", "default", _LARGEST, 64),
    Shard("bf16", "16x16", _MEDIUM, 16),
    Shard("bf16", "32x16", _SMALL, 32),
    Shard("bf16", "default", _LARGE, 128),
    Shard("bf16", "32x64", (64, 48), 64),
    Shard("bf16", "64x32", (128, 72), 64),
    Shard("fp32", "16x16", (16, 3, 32, 24), 16),
    Shard("fp32", "16x32", (32, 17), 32),
    Shard("fp32", "default", (64, 33), 64),
    Shard("fp32", "16x16-tf32", (16, 5, 32, 21), 16),
    Shard("fp32", "tf32", (64, 40), 64),
    # Tests take every nth shard; this order gives each kind of test at least one of these.
    Shard("fp32", "16x32-one_pass", (32, 17), 32),
    # The Hopper kernel's backward uses one tile as wide as the wider of D and Dv.
    Shard("fp16", "default-one_pass", (128, 80, 65, 64, 40), 128),
    Shard("bf16", "32x16-one_pass", (32, 24, 17), 32),
    Shard("fp16", "16x16-one_pass", (16, 2, 13), 16),
    Shard("fp16", "16x16-split3", _MEDIUM, 16),
    Shard("fp32", "16x16-split3", (16, 3, 32, 24), 16),
    Shard("fp16", "16x16-packed", _MEDIUM, 16),
    Shard("fp16", "default-packed", _LARGE, 128),
    Shard("bf16", "32x16-one_pass-packed", _SMALL, 32),
    Shard("fp32", "16x16-split3-packed", (16, 5, 32, 21), 16),
    # The portable kernels, on GPUs whose default configuration selects specialised kernels.
    Shard("bf16", "portable", _LARGE, 128),
    Shard("bf16", "default-one_pass", (64, 128, 72), 128),
    Shard("bf16", "default-one_pass-packed", (128, 72, 64, 40), 128),
)
_FLOAT64_OF_CONFIGS = (
    Shard("fp64", "16x16", (16, 3, 8, 13), 16),
    Shard("fp64", "16x32", (16, 5, 32, 24), 32),
    Shard("fp64", "32x16", (32, 17), 32),
    Shard("fp64", "16x16-one_pass", (16, 5, 13), 16),
    Shard("fp64", "default", (64, 33), 16),
    Shard("fp64", "16x16-split3", (16, 3, 8, 13), 16),
    Shard("fp64", "16x16-packed", (16, 3, 8, 13), 16),
)
# Head dims beyond the ones above. D and Dv are padded to the same size: a kernel of 256 x 256 takes
# up to 20 s to compile in fp32.
_LARGER_OF_CONFIGS = tuple(
    Shard(dtype, config, dims, 64)
    for dtype, config, dims in (
        ("fp32", "default", (128, 65)), ("fp32", "default", (256, 129)),
        ("fp32", "tf32", (128, 65)), ("fp32", "tf32", (256, 129)),
        ("fp64", "default", (128, 65)), ("fp64", "default", (256, 129)),
        ("bf16", "default", (256, 129)),
    )
)  # fmt: skip
# Stands for the tile size of a subject that does not declare its tiles.
_TILE = 64


# Subjects that declare no head_dims, and the largest of each group of those that do.
_UNDECLARED = (_SMALL, _MEDIUM, _LARGE, _LARGEST)
_LIMITS = (16, 64, 128, 256)


def has_table(subject: Subject) -> bool:
    """Return whether a subject has all configurations of the table, as the project's kernels do."""
    return {shard.config for shard in _OF_CONFIGS} <= {*subject.configs}


def shards_of(subject: Subject, *, float64: bool = False) -> tuple[Shard, ...]:
    """Return the shards for a subject.

    For the project's own kernels, a fixed table that compiles few kernels. For other subjects, a
    shard per configuration, dtype and group of head dims, which hold every declared size.

    Args:
        subject: The subject under test.
        float64: Return the shards with dtype "fp64" if True, all others if False.
    """
    if has_table(subject):
        return _FLOAT64_OF_CONFIGS if float64 else _OF_CONFIGS
    return tuple(
        Shard(dtype, config, dims, _TILE)
        for dims in _groups(subject)
        for config, replaced in subject.configs.items()
        for dtype in replaced.get("dtypes", subject.dtypes)
        if (dtype == "fp64") == float64
    )


def shared_kernels(subject: Subject, device: str, *, one: bool = False) -> tuple[SharedKernel, ...]:
    """Return a kernel of each shard, which the tests of the shard compile too.

    There are none on a CPU, where no kernel is compiled, unless the subject has a table.

    Args:
        subject: The subject under test.
        device: "cpu" or "cuda".
        one: Whether one suffices, of the smallest head dims.
    """
    if device == "cpu" and not has_table(subject):
        return ()
    shards = shards_of(subject) or shards_of(subject, float64=True)
    if one:
        shards = (min(shards, key=lambda x: max(x.head_dims)),)
    found = (SharedKernel(x.dtype, x.config, x.head_dims[0], x.tile) for x in shards)
    return tuple(dict.fromkeys(found))


def _groups(subject: Subject) -> tuple[tuple[int, ...], ...]:
    """Return the head dims of a subject by size.

    A group of larger ones has the largest of the group before too, so that D and Dv differ.
    """
    if subject.head_dims is None:
        return _UNDECLARED
    groups: dict[int, list[int]] = {}
    for D in sorted({*subject.head_dims}):
        groups.setdefault(bisect_left(_LIMITS, D), []).append(D)
    of_size = [*groups.values()]
    before = [[], *([x[-1]] * subject.dv_ne_d for x in of_size)]
    return tuple((*dims, *more) for dims, more in zip(of_size, before, strict=False))


def larger_shards_of(subject: Subject) -> tuple[Shard, ...]:
    """Return shards with head dims that no other shard of their dtype has.

    Args:
        subject: The subject under test. Only the project's own kernels have such shards.
    """
    return _LARGER_OF_CONFIGS if has_table(subject) else ()
