"""The default subject: ``fa_kernels.flash_attention``, with what it declares."""

from __future__ import annotations

import importlib
from types import ModuleType

import fa_kernels
from oracles.problem import Problem
from properties.families import TORCH_DTYPES

__all__ = ["adapted", "flash_attention"]


def adapted(package: ModuleType):
    """``flash_attention`` of the package, or of a copy of it, as a subject with declarations."""
    resolve = importlib.import_module(f"{package.__name__}.configs").resolve

    def flash_attention(q, k, v, *, mask, sm_scale, config="default"):
        """Returns (out, lse)."""
        return package.flash_attention(
            q, k, v, mask=mask, sm_scale=sm_scale, return_lse=True, config=config
        )

    def declared(config) -> dict[str, object]:
        """What a configuration replaces."""
        dots = {"dots": "tf32", "dtypes": ("fp32",)} if config.dots == "tf32" else {}
        return dots | ({} if config.splits in (None, 1) else {"splits": config.splits})

    def tiles(problem: Problem) -> tuple[int, int]:
        """(block_m, block_n) of the forward kernel."""
        block_d = 1 << (max(problem.D, problem.Dv, 16) - 1).bit_length()
        tile = resolve(problem.config, TORCH_DTYPES[problem.dtype], block_d).forward
        return tile.block_m, tile.block_n

    flash_attention.returns_lse = True
    flash_attention.lse_grad = True
    flash_attention.l_order = "tile"
    flash_attention.bitwise = ("G4", "G5", "G8", "G9", "G10")
    flash_attention.configs = {name: declared(x) for name, x in package.CONFIGS.items()}
    flash_attention.tiles = tiles
    return flash_attention


flash_attention = adapted(fa_kernels)
