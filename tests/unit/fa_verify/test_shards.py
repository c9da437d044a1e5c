"""The shards of the project's kernels cover every dtype at every class of head dims."""

from __future__ import annotations

import pytest

from fa_verify.properties.kernels.subject import Subject
from fa_verify.shards import Shard, larger_shards_of, shards_of

pytest.importorskip("triton")


def _classes(shards: list[Shard]) -> set[int]:
    """The powers of two that the head dims are padded to."""
    dims = {D for shard in shards for D in shard.head_dims}
    return {max(16, 1 << (D - 1).bit_length()) for D in dims}


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32", "tf32", "fp64"])
def test_every_dtype_has_head_dims_of_every_class(dtype: str) -> None:
    from fa_verify.adapters.ours import flash_attention

    subject = Subject.of(flash_attention, "flash_attention")
    shards = [
        shard
        for shard in (
            *shards_of(subject),
            *shards_of(subject, float64=True),
            *larger_shards_of(subject),
        )
        if dtype == ("tf32" if "tf32" in shard.config else shard.dtype)
    ]
    assert _classes(shards) == {16, 32, 64, 128, 256}
