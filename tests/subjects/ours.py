"""The default subject: ``fa_kernels.flash_attention``, with what it declares."""

from __future__ import annotations

from fa_kernels import CONFIGS
from fa_kernels import flash_attention as call
from fa_kernels.configs import resolve
from oracles.problem import Problem
from properties.families import TORCH_DTYPES

__all__ = ["flash_attention"]


def flash_attention(q, k, v, *, mask, sm_scale, config="default"):
    """``fa_kernels.flash_attention`` in the subject's signature, returning (out, lse)."""
    return call(q, k, v, mask=mask, sm_scale=sm_scale, return_lse=True, config=config)


def _tiles(problem: Problem) -> tuple[int, int]:
    """(block_m, block_n) of the forward kernel."""
    block_d = 1 << (max(problem.D, problem.Dv, 16) - 1).bit_length()
    tile = resolve(problem.config, TORCH_DTYPES[problem.dtype], block_d).forward
    return tile.block_m, tile.block_n


flash_attention.returns_lse = True
flash_attention.l_order = "tile"
flash_attention.bitwise = ("G4", "G5", "G8", "G9", "G10")
flash_attention.configs = {
    name: {"dots": "tf32", "dtypes": ("fp32",)} if config.dots == "tf32" else {}
    for name, config in CONFIGS.items()
}
flash_attention.tiles = _tiles
