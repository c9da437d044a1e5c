"""Attention problems of snapshots, and their masks.

Keys of cases do not use names of the project, so that a renaming does not change them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from fa_verify.oracles.masks.block_sparse import BlockSparse
from fa_verify.oracles.masks.dilated import Dilated
from fa_verify.oracles.masks.document import Document
from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.masks.neighbourhood import Neighbourhood
from fa_verify.oracles.masks.prefix_lm import PrefixLM
from fa_verify.oracles.masks.sink_window import SinkWindow
from fa_verify.oracles.masks.tree import Tree

__all__ = ["MASKS", "Case"]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A problem, and the form of its call.

    Args:
        call: "padded", "varlen", "pooled mean", "pooled max", "merge" or "kvcache".
        config: Tile configuration.
        dtype: Dtype of q, k, v.
        mask: A key of MASKS.
        one_pass: Whether dq is summed by atomics.
        B, H, Hk, M, N, D, Dv: Sizes; for varlen, B sequences of at most M rows and N keys.
        layout: "rows" is contiguous, "heads inside" (B, M, H, D), "offset" one element past an
            aligned address, "columns" transposed, "wide" rows with 8 elements between them.
        lengths: "ints", "tensors", or for varlen "longest": tensors and the longest lengths.
        softcap: The softcap, or None.
        alibi: Axes of the slopes, "H" or "BH"; empty for no ALiBi.
        bias: Axes of the bias, out of "BHMN", and "+" for float32; None for no bias.
        sinks: Whether every head has a sink.
        dlse: "none", "beside" dout, or "alone".
        needs: Requested gradients.
        pool: Rows and keys of a pool block.
        hopper: Whether Hopper's kernels run it, emulated without a GPU.
    """

    call: str = "padded"
    config: str = "16x32"
    dtype: str = "fp16"
    mask: str = "full"
    one_pass: bool = False
    B: int = 1
    H: int = 2
    Hk: int = 1
    M: int = 37
    N: int = 50
    D: int = 16
    Dv: int = 16
    layout: str = "rows"
    lengths: str = "ints"
    softcap: float | None = None
    alibi: str = ""
    bias: str | None = None
    dlse: str = "none"
    needs: str = "qkv"
    pool: tuple[int, int] | None = None
    hopper: bool = False
    sinks: bool = False

    @property
    def key(self) -> str:
        """Call, configuration, dtype, mask, sizes, and fields that differ from their defaults."""
        words = [self.call, self.config, self.dtype, self.mask]
        for field in dataclasses.fields(self)[4:]:
            value = getattr(self, field.name)
            if value != field.default or field.name in ("M", "N"):
                words.append(field.name if value is True else f"{field.name}={value}")
        return " ".join(words)

    @property
    def is_of_blocks(self) -> bool:
        """Whether the call passes the mask as a block mask."""
        return self.mask in ("blocks of heads", "causal blocks")

    def of(self) -> Mask:
        """The mask."""
        return MASKS[self.mask](self)

    def of_lengths(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Lengths of rows and of keys, cycling through full, short and empty sequences."""
        of = [(size, size // 2 + 3, 1, max(0, size - 5), 0) for size in (self.M, self.N)]
        rows, keys = (
            tuple(min(size, x[b % 5]) for b in range(self.B))
            for x, size in zip(of, (self.M, self.N), strict=True)
        )
        return rows, keys[::-1]


def _lengths(case: Case) -> dict[str, tuple[int, ...]]:
    rows, keys = case.of_lengths()
    return {"seqlens_q": rows, "seqlens_k": keys}


def _blocks(case: Case, side: int, percent: int = 50, **fields: object) -> Mask:
    return BlockSparse(percent=percent, seed=1, side=side, **fields)


MASKS: dict[str, Callable[[Case], Mask]] = {
    "full": lambda x: Mask(),
    "causal": lambda x: Mask(causal=True),
    "window": lambda x: Mask(window_left=x.M // 4, window_right=x.M // 9),
    "left": lambda x: Mask(window_left=x.M // 3),
    "right": lambda x: Mask(window_right=x.M // 5),
    "causal left": lambda x: Mask(causal=True, window_left=x.M // 2),
    "lengths": lambda x: Mask(**_lengths(x)),
    "causal lengths": lambda x: Mask(causal=True, **_lengths(x)),
    "window lengths": lambda x: Mask(window_left=7, window_right=3, **_lengths(x)),
    "dilated": lambda x: Dilated(width=7, step=3),
    "documents": lambda x: Document(starts=((x.N // 3, x.N // 2), (5,)), causal=True),
    "neighbours": lambda x: Neighbourhood(width=7, kernel=3),
    "prefix": lambda x: PrefixLM(prefix=9, **_lengths(x)),
    "sinks": lambda x: SinkWindow(sinks=2, width=11),
    "tree": lambda x: Tree(parents=(-1, 0, 0, 1, 1, 2, 5)),
    "predicate blocks": lambda x: _blocks(x, 16, per_head=False),
    "blocks of heads": lambda x: _blocks(x, 32 if x.config[0].isdigit() else 128, **_lengths(x)),
    "causal blocks": lambda x: _blocks(x, 64, 80, per_head=False, causal=True),
    "both": lambda x: Dilated(width=9, step=2) & SinkWindow(sinks=3, width=20),
    "either": lambda x: Dilated(width=5, step=4) | PrefixLM(prefix=6),
}
