"""The shards of the project's kernels cover every dtype at every class of head dims."""

from __future__ import annotations

import pytest

from fa_verify.properties.subjects.subject import Subject
from fa_verify.shards import Shard, shards_of

pytest.importorskip("triton")


def _classes(shards: list[Shard]) -> set[int]:
    """The powers of two that the head dims are padded to."""
    dims = {D for shard in shards for D in shard.weighted_head_dims}
    return {max(16, 1 << (D - 1).bit_length()) for D in dims}


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32", "tf32", "fp64"])
def test_every_dtype_has_head_dims_of_every_class(dtype: str) -> None:
    from fa_verify.subjects.ours import flash_attention

    subject = Subject.of(flash_attention, "flash_attention")
    shards = [
        shard
        for shard in (*shards_of(subject), *shards_of(subject, float64=True))
        if dtype == ("tf32" if "tf32" in shard.config else shard.dtype)
    ]
    assert _classes(shards) == {16, 32, 64, 128, 256}


def test_rare_head_dims_are_one_in_about_nine() -> None:
    shard = Shard("fp32", "default", (64, 33), 64, (128, 65))
    dims = shard.weighted_head_dims
    assert 1 / 12 < sum(D in shard.rare for D in dims) / len(dims) < 1 / 8
    assert dims[: len(shard.head_dims)] == shard.head_dims


def test_a_shard_without_rare_head_dims_draws_its_head_dims_alone() -> None:
    assert Shard("fp32", "default", (64, 33), 64).weighted_head_dims == (64, 33)
