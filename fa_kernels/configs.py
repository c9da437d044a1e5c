"""Tile configurations: a small explicit table, no autotuning."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

import torch

__all__ = ["CONFIGS", "Config", "Tile", "holds_large_tiles", "resolve"]


@dataclass(frozen=True)
class Tile:
    """The sizes and launch parameters of a kernel's tiles.

    Args:
        block_m: Query rows of a tile, a power of two >= 16.
        block_n: Keys of a tile, a power of two >= 16.
        num_warps: Warps of a program, a power of two <= 16.
        num_stages: Depth of the software pipeline, >= 1.

    Raises:
        TypeError: A field is not an int.
        ValueError: A field is out of range.
    """

    block_m: int
    block_n: int
    num_warps: int = 4
    num_stages: int = 2

    def __post_init__(self) -> None:
        for name in ("block_m", "block_n", "num_warps", "num_stages"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name} is {value!r}; needs an int")
        for name in ("block_m", "block_n"):
            value = getattr(self, name)
            if not 16 <= value <= 256 or value & (value - 1):
                raise ValueError(f"{name} is {value}; needs a power of two in [16, 256]")
        if not 1 <= self.num_warps <= 16 or self.num_warps & (self.num_warps - 1):
            raise ValueError(f"num_warps is {self.num_warps}; needs a power of two in [1, 16]")
        if not 1 <= self.num_stages <= 8:
            raise ValueError(f"num_stages is {self.num_stages}; needs an int in [1, 8]")


MAX_SPLITS = 256


@dataclass(frozen=True, kw_only=True)
class Config:
    """Tiles of the matrix kernels, the arithmetic of fp32 dots, and the number of splits.

    A tile of None takes the default for the dtype and head_dim.

    Args:
        forward: Tile of the forward kernel.
        dkdv: Tile of the dk/dv kernel.
        dq: Tile of the dq kernel.
        one_pass: Tile of the dk/dv kernel when it also computes dq.
        cache: Tile of calls with a cache.
        split_keys: Keys of a split of calls with a cache, a multiple of the tile's block_n. Splits
            begin at multiples of it, so it selects the bits of a call. Without a tile it is a
            multiple of 128.
        dots: "ieee", or "tf32" to run the dots of fp32 inputs in TF32.
        splits: Number of programs of the forward that share the key tiles of a query tile, from 1
            to 256. Splits occupy a GPU better with few queries and long keys. Each split takes
            scratch for out, lse and l in the accumulator's dtype; a second kernel combines them.
            None runs one program without a second kernel.
        hopper: Whether a call runs on the kernels for Hopper if the GPU is one, ``hopper.takes``
            accepts the call, and no tile is given.

    Raises:
        TypeError: A field has the wrong type.
        ValueError: ``dots`` or ``splits`` is out of range.
    """

    forward: Tile | None = None
    dkdv: Tile | None = None
    dq: Tile | None = None
    one_pass: Tile | None = None
    cache: Tile | None = None
    split_keys: int = 2048
    dots: str = field(default="ieee")
    splits: int | None = None
    hopper: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.hopper, bool):
            raise TypeError(f"hopper is {self.hopper!r}; needs a bool")
        for name in ("forward", "dkdv", "dq", "one_pass", "cache"):
            if not isinstance(getattr(self, name), Tile | None):
                raise TypeError(f"{name} is {getattr(self, name)!r}; needs a Tile or None")
        if isinstance(self.split_keys, bool) or not isinstance(self.split_keys, int):
            raise TypeError(f"split_keys is {self.split_keys!r}; needs an int")
        if self.split_keys < 1 or self.split_keys % (self.cache.block_n if self.cache else 128):
            needs = f"block_n of cache, {self.cache.block_n}" if self.cache else "128"
            raise ValueError(f"split_keys is {self.split_keys}; needs a multiple of {needs}")
        if self.dots not in ("ieee", "tf32"):
            raise ValueError(f"dots is {self.dots!r}; needs 'ieee' or 'tf32'")
        if self.splits is None:
            return
        if isinstance(self.splits, bool) or not isinstance(self.splits, int):
            raise TypeError(f"splits is {self.splits!r}; needs an int or None")
        if not 1 <= self.splits <= MAX_SPLITS:
            raise ValueError(f"splits is {self.splits}; needs an int in [1, {MAX_SPLITS}]")


def _square(
    block_m: int, block_n: int, warps: int = 1, dots: str = "ieee", splits: int | None = None
) -> Config:
    """Returns a configuration with one tile for all kernels."""
    tile = Tile(block_m, block_n, warps, 1)
    return Config(
        forward=tile, dkdv=tile, dq=tile, one_pass=tile, cache=tile, split_keys=max(32, block_n),
        dots=dots, splits=splits,
    )  # fmt: skip


# Tiles of 16 x 16 have four warps, as the default has where it takes such tiles. Those of 16 x 32
# and 32 x 16 have one.
CONFIGS: dict[str, Config] = {
    "default": Config(),
    "portable": Config(hopper=False),
    "tf32": Config(dots="tf32"),
    "16x16": _square(16, 16, warps=4),
    "16x32": _square(16, 32),
    "32x16": _square(32, 16),
    "32x32": _square(32, 32, warps=2),
    "64x32": _square(64, 32, warps=4),
    "32x64": _square(32, 64, warps=4),
    "16x16-tf32": _square(16, 16, warps=4, dots="tf32"),
    "16x16-split1": _square(16, 16, warps=4, splits=1),
    "16x16-split3": _square(16, 16, warps=4, splits=3),
    "32x16-split7": _square(32, 16, splits=7),
    "16x16-split64": _square(16, 16, warps=4, splits=64),
    "split8": Config(splits=8),
}


@lru_cache(maxsize=64)
def holds_large_tiles(device: torch.device) -> bool:
    """Whether a program may have 227 KiB of shared memory; other NVIDIA GPUs give it 99 or more."""
    if device.type != "cuda" or torch.version.cuda is None:
        return False
    return torch.cuda.get_device_capability(device)[0] in (9, 10)


def _default_tiles(
    dtype: torch.dtype, head_dim: int, head_dim_v: int, dots: str, large: bool
) -> tuple[Tile, Tile, Tile, Tile]:
    """Returns (forward, dkdv, dq, one_pass) tiles for a dtype, head_dims and dots."""
    widest = max(head_dim, head_dim_v)
    if dtype in (torch.float16, torch.bfloat16):
        if widest <= 64:
            square = Tile(64, 64, 4, 3)
            return Tile(128, 64, 4, 3), square, square, Tile(64, 64, 4, 2)
        if widest <= 128:
            of_keys = Tile(64, 128, 8, 3)
            return Tile(128, 64, 8, 3), of_keys, Tile(128, 64, 8, 3), Tile(64, 128, 8, 2)
        if not large:
            of_keys = Tile(32, 64, 8, 1)
            return Tile(64, 32, 4, 2), of_keys, Tile(64, 32, 8, 1), of_keys
        of_keys, of_rows = Tile(64, 64, 8, 2), Tile(64, 32, 4, 3)
        if head_dim_v <= 128:
            return Tile(128, 64, 8, 3), of_keys, of_rows, Tile(32, 128, 8, 1)
        return Tile(128, 64, 8, 2), of_keys, of_rows, Tile(64, 64, 8, 1)
    if dtype == torch.float8_e4m3fn:
        # The backward has none.
        tile = Tile(64, 128, 4, 3) if widest <= 128 else Tile(128, 64, 8, 2)
        if not large:
            tile = Tile(64, 64, 4, 2)
        return tile, tile, tile, tile
    if dtype == torch.float32 and widest <= 128:
        square = Tile(32, 32, 4, 1)
        # Tensor cores are slower with two warps. With 128 columns and two warps or more keys, ptxas
        # keeps 12 KiB of a thread in local memory.
        warps = 2 if dots == "ieee" and widest <= 64 else 4
        return Tile(64, 16, warps, 1), square, square, square
    smallest = Tile(16, 16, 4, 1)
    return smallest, smallest, smallest, smallest


def _default_cache_tile(dtype: torch.dtype, widest: int) -> Tile:
    """Returns the tile of calls with a cache, for a dtype and the larger head_dim.

    One query fills a row for each head of its group, rarely more than 16. Tiles of 64 rows, the
    fewest of a Hopper tensor core's own instruction, are faster where a call has many queries, but
    decode slower. The number of queries selects no tile: tokens that are decoded one by one have
    the bits of the prefill.
    """
    if dtype in (torch.float16, torch.bfloat16):
        if widest <= 128:
            return Tile(16, 128, 4, 2)
        return Tile(16, 64, 4, 2) if widest <= 256 else Tile(16, 64, 8, 1)
    return Tile(16, 32 if dtype == torch.float32 and widest <= 128 else 16, 4, 1)


def resolve(
    config: Config | str | None,
    dtype: torch.dtype,
    head_dim: int,
    head_dim_v: int | None = None,
    *,
    large: bool = False,
) -> Config:
    """Returns a complete configuration, with defaults for the tiles that ``config`` lacks.

    Args:
        config: A ``Config``, a name in ``CONFIGS``, or None for "default".
        dtype: Dtype of the inputs.
        head_dim: Columns of queries and keys.
        head_dim_v: Columns of values; None is ``head_dim``.
        large: ``holds_large_tiles`` of the device.

    Raises:
        TypeError: ``config`` has another type.
        ValueError: ``CONFIGS`` has no such name.
    """
    if config is None:
        config = "default"
    if isinstance(config, str):
        if config not in CONFIGS:
            raise ValueError(f"config is {config!r}; needs one of {sorted(CONFIGS)}, or a Config")
        config = CONFIGS[config]
    if not isinstance(config, Config):
        raise TypeError(f"config is {config!r}; needs a Config, a name or None")
    own = (config.forward, config.dkdv, config.dq, config.one_pass, config.cache)
    head_dim_v = head_dim if head_dim_v is None else head_dim_v
    forward, dkdv, dq, one_pass = _default_tiles(dtype, head_dim, head_dim_v, config.dots, large)
    return Config(
        forward=config.forward or forward,
        dkdv=config.dkdv or dkdv,
        dq=config.dq or dq,
        one_pass=config.one_pass or one_pass,
        cache=config.cache or _default_cache_tile(dtype, max(head_dim, head_dim_v)),
        split_keys=config.split_keys,
        dots=config.dots,
        splits=config.splits,
        hopper=config.hopper and not any(own),
    )
