"""A backward pass that computes every product once: dk/dv's kernel, which adds dq up by atomics.

``python -m tests.claims.single_pass`` measures it beside the two passes; needs a GPU.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from functools import partial
from pathlib import Path
from types import ModuleType

import torch

from benchmarks.spread import spread
from tests.mutation.mutant import Edit, Mutant, mutated
from tests.mutation.package import PACKAGE, load, sources_of

__all__ = ["SINGLE_PASS"]

_DKDV = "fa_kernels/kernels/dkdv.py"
_LAUNCH = "fa_kernels/launch.py"
_DK = "dk = tl.dot(ds.to(q_t.dtype), tl.trans(q_t), dk, input_precision=DOTS, out_dtype=ACC)\n"
_DQ = """        dq = tl.dot(tl.trans(ds.to(q_t.dtype)), k, input_precision=DOTS, out_dtype=ACC)
        places = dq_pointer + offs_m[:, None] * BLOCK_D + offs_d[None, :]
        tl.atomic_add(places, dq, sem="relaxed")
"""
_SECOND_PASS = """        tile = arguments.config.dq
        programs = triton.cdiv(M, tile.block_m) * B * H
        if programs and of_rows:
            dq_kernel[(programs,)](
                *inputs, dq, *lengths, *shared, *_predicate(arguments, "dq"),
                ALIGNED=_is_aligned(q, k, v, dout, dq), **constants, **_tile(tile),
            )  # fmt: skip
"""
# float32 sums in whole tiles of rows and columns, so that nothing needs a mask.
_SUMS = "    sums = torch.zeros((*lse2.shape, _padded(D)), dtype=lse.dtype, device=q.device)\n"
_SHARED = "    constants = _constants(q.dtype, D, Dv, arguments)\n    shared = (\n"
SINGLE_PASS = (
    Edit(_DKDV, "    tiles,\n    qk_scale,\n", "    tiles,\n    qk_scale,\n    dq_pointer,\n"),
    Edit(_DKDV, _DK, _DK + _DQ),
    Edit(_DKDV, "    dk_ptr,\n    dv_ptr,\n", "    dk_ptr,\n    dv_ptr,\n    dq_ptr,\n"),
    Edit(
        _DKDV,
        "                qk_scale, BLOCK_M,",
        "                qk_scale, dq_ptr + row * BLOCK_D, BLOCK_M,",
    ),
    Edit(_LAUNCH, _SHARED, _SUMS + _SHARED),
    Edit(_LAUNCH, "*inputs, dk, dv, *lengths,", "*inputs, dk, dv, sums, *lengths,"),
    Edit(_LAUNCH, _SECOND_PASS, "        dq.copy_(sums[:, :, :M, :D] * arguments.sm_scale)\n"),
)
# (block_m, block_n, num_warps, num_stages) of the single pass: a product more takes registers.
_TILES = ((64, 128, 8, 2), (64, 128, 8, 3), (32, 128, 8, 2), (64, 64, 4, 2), (32, 64, 4, 2))


def main() -> int:
    """Prints a table: milliseconds of the backward pass, either way; 2 where there is no GPU."""
    if not torch.cuda.is_available():
        print("the passes are measured on a CUDA GPU; none is visible")
        return 2
    from benchmarks.speed import PROBLEMS, measure, ours

    with tempfile.TemporaryDirectory() as folder:
        copy = load(mutated(sources_of(PACKAGE), Mutant("single", SINGLE_PASS)), Path(folder))
        print("| B x N x H x D | causal | two passes | one pass, fastest tile | one / two |")
        print("|---|---|---|---|---|")
        for B, N, H, D, causal in PROBLEMS:
            ways = {"two": ours} | {str(tile): partial(_single, copy, tile) for tile in _TILES}
            times = measure(ways, B, N, H, D, causal)["backward"]
            two = times.pop("two")
            tile, one = min(times.items(), key=lambda item: statistics.median(item[1]))
            ratio = statistics.median(one) / statistics.median(two)
            print(
                f"| {B}x{N}x{H}x{D} | {'yes' if causal else 'no'} | {spread(two)} "
                f"| {spread(one)} {tile} | {ratio:.2f} |",
                flush=True,
            )
    return 0


def _single(
    copy: ModuleType,
    tile: tuple[int, int, int, int],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
) -> torch.Tensor:
    config = copy.Config(dkdv=copy.Tile(*tile))
    return copy.flash_attention(q, k, v, causal=causal, config=config)


if __name__ == "__main__":
    sys.exit(main())
