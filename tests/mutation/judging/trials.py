"""The steps that judge a mutant of the kernels: a fixed list of problems with their checks.

Steps run in the order of the list. The first, in float64, show faults of logic and kill most
mutants. Masks and padding, the arithmetic of each dtype and strides follow. Steps that take a
second or more come last, after the unit tests.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fa_verify.oracles.masks.block_sparse import BlockSparse
from fa_verify.oracles.masks.document import Document
from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.masks.prefix_lm import PrefixLM
from fa_verify.oracles.problem import Problem
from fa_verify.properties.guarantees.claims import BY_NAME, Check, checks_of
from fa_verify.properties.guarantees.same_bits import CHECKS as SAME_BITS

__all__ = ["CHECKS", "ORDINARY", "QUICK", "STEPS", "Step"]

# Checks, in the order in which they run on a trial.
_OF_ORDINARY = tuple(checks_of("statistics", "closed forms"))
CHECKS: dict[str, Check] = {
    "T3": BY_NAME["T3"], **BY_NAME, **SAME_BITS,
}  # fmt: skip
_ALWAYS = ("T3", "G1", "G2")


@dataclass(frozen=True)
class Step:
    """A problem and the names in ``CHECKS`` of its checks."""

    problem: Problem
    checks: tuple[str, ...]

    @property
    def in_order(self) -> bool:
        """Whether a check compares bits, so that the products of dots have to add in one order."""
        return not SAME_BITS.keys().isdisjoint(self.checks)


def _step(*checks: str, config: str = "16x16", dtype: str = "fp64", **fields: Any) -> Step:
    return Step(Problem(config=config, dtype=dtype, **fields), (*_ALWAYS, *checks))


_ALIGNED: dict[str, Any] = {"D": 16, "Dv": 32}
_MIXED = ("bshd", "padded", "transposed", "strided")
_ONE_NARROW = [
    tuple("transposed" if i == narrow else "bhsd" for i in range(4)) for narrow in range(4)
]
_WINDOW = Mask(window_left=20, window_right=3, seqlens_q=(30, 33), seqlens_k=(49, 20))
_WINDOW_OF_20 = Mask(window_left=9, window_right=3, seqlens_q=(20, 12), seqlens_k=(37, 20))
_SHORT = Mask(window_left=3, window_right=1, seqlens_q=(5, 3), seqlens_k=(6, 7))
_SHORT_OF_ONE = Mask(causal=True, seqlens_q=(35, 20), seqlens_k=(37, 19))
_RAGGED_ROWS = Mask(window_left=20, window_right=3, seqlens_q=(18, 7), seqlens_k=(20, 35))
_UNEVEN = Mask(causal=True, seqlens_q=(3, 50, 0, 17, 1), seqlens_k=(5, 40, 3, 16, 0))
_RAGGED = Mask(causal=True, seqlens_q=(33, 20), seqlens_k=(20, 37))

QUICK: tuple[Step, ...] = (
    # Two by three tiles that are not square, grouped heads, odd sizes.
    _step(H=2, M=35, N=37, D=5, Dv=3, mask=Mask(causal=True), config="32x16"),
    # Uneven key splits, some of which are empty for some rows.
    _step("G3", B=2, H=3, M=19, N=70, D=5, Dv=3, config="16x16-split3", dirty="nan",
          mask=Mask(window_left=40, window_right=1, seqlens_q=(19, 18), seqlens_k=(70, 5))),
    # Batch entries, groups and strides in one problem.
    _step(B=2, H=4, Hk=2, M=5, N=7, D=3, Dv=2, mask=_SHORT, dirty="nan", layouts=_MIXED),
    # The same problem with a gradient of lse, and a problem with only that gradient.
    _step("G3", B=2, H=4, Hk=2, M=5, N=7, D=3, Dv=2, mask=_SHORT, dirty="nan", layouts=_MIXED,
          dlse="normal"),
    _step(H=2, M=20, N=18, dout="zero", dlse="large"),
    # Masks with a predicate beside a window and lengths: partial, full and empty tiles, by batch
    # entry and by head; tiles whose kind differs between the kernels.
    _step(B=2, M=48, N=48, mask=Document(starts=((16,), ()), window_left=20, window_right=9)),
    _step(M=150, N=140, dtype="fp16", config="default", mask=PrefixLM(prefix=100), **_ALIGNED),
    _step(B=2, H=2, M=20, N=35, dirty="nan", layouts=_MIXED,
          mask=BlockSparse(side=12, percent=25, seed=19, seqlens_q=(20, 18), seqlens_k=(20, 35))),
    _step(M=70, N=40, config="16x32", mask=PrefixLM(prefix=16) | Mask(window_right=2)),
    # A backward in one pass, with rows without a visible key, padding keys whose P is infinite, and
    # a tile that a mask divides within its rows.
    _step(B=2, H=2, M=35, N=37, D=5, Dv=3, mask=_SHORT_OF_ONE, config="16x16-one_pass"),
    _step(H=2, M=17, N=35, dtype="fp16", inputs="lse_low_90", config="16x32-one_pass", **_ALIGNED),
    _step("G3", M=40, N=17, mask=Mask(causal=True), dlse="normal", config="32x16-one_pass"),
    # Block masks for each head and for all heads, beside lengths and a window; default tiles, which
    # are smaller than a block.
    *(_step(B=2, H=2, M=40, N=70, config="16x32", dirty="nan", layouts=_MIXED,
            mask=BlockSparse(side=32, percent=60, seed=seed, per_head=per_head, window_left=40,
                             window_right=12, seqlens_q=(40, 30), seqlens_k=(70, 50)))
      for seed, per_head in ((2, True), (3, False))),
    _step(M=150, N=300, dtype="fp16", config="default", mask=BlockSparse(seed=1), **_ALIGNED),
    # One early step with packed sequences and one with score modifications.
    _step("G3", "G4", B=4, H=2, M=37, N=21, D=5, Dv=3, dirty="nan", dlse="normal",
          config="16x16-packed",
          mask=Mask(causal=True, seqlens_q=(37, 0, 3, 20), seqlens_k=(20, 5, 0, 21))),
    _step("dbias", "G9", B=2, H=2, M=20, N=35, D=5, Dv=3, bias="needles/hmn", alibi="normal",
          softcap=3.0, config="16x16-one_pass", dlse="normal"),
    # Sinks: with groups, a softcap, rows without a key, padding and a gradient of lse; with key
    # splits; huge ones; with packed sequences.
    _step("G3", "G9", "dsinks", B=2, H=4, Hk=2, M=20, N=35, D=5, Dv=3, mask=_RAGGED_ROWS,
          dirty="nan", dlse="normal", sinks="dominant", softcap=2.0),
    _step("G3", "dsinks", B=2, H=3, M=19, N=70, D=5, Dv=3, config="16x16-split3", dirty="nan",
          sinks="some_absent",
          mask=Mask(window_left=40, window_right=1, seqlens_q=(19, 18), seqlens_k=(70, 5))),
    _step("dsinks", H=2, M=40, N=17, dtype="fp32", mask=Mask(causal=True), sinks="huge",
          dlse="normal"),
    # A split without a key beside splits whose scores are low.
    _step(M=2, N=20, dtype="fp32", inputs="lse_low_1e5", config="16x16-split3", sinks="absent"),
    _step("dsinks", B=3, H=2, M=19, N=21, D=5, Dv=3, config="16x16-packed", dlse="normal",
          sinks="ordinary", mask=Mask(causal=True, seqlens_q=(19, 0, 7), seqlens_k=(20, 5, 21))),
    # Key splits: more splits than tiles; block lists.
    _step(H=4, Hk=2, M=35, N=37, config="32x16-split7", mask=Mask(window_left=20, window_right=3)),
    _step(B=2, H=2, M=20, N=75, config="16x16-split3",
          mask=BlockSparse(side=12, percent=60, seed=19, seqlens_q=(20, 18), seqlens_k=(20, 75))),
    # An fp32 dot must not use TF32.
    _step(M=20, N=40, dtype="fp32"),
    # 16-bit tensors with a head_dim that is a multiple of 8 take the path of wide loads.
    _step(M=20, N=35, dtype="fp16", mask=Mask(window_left=18, window_right=3), **_ALIGNED),
    _step(M=18, N=20, dtype="bf16", D=24, Dv=40),
    # In each problem, one tensor's layout prevents wide loads.
    *(_step(M=18, N=20, dtype="fp16", layouts=layouts, **_ALIGNED) for layouts in _ONE_NARROW),
    # The largest score comes last.
    *(_step(M=20, N=50, dtype=dtype, inputs="rising_max", seed=seed)
      for dtype in ("fp64", "fp16") for seed in range(4)),
    # All values where weights are tiny.
    *(_step(M=20, N=70, dtype="fp32", inputs="values_of_light_keys", seed=seed, config=config)
      for seed, config in enumerate(("16x16", "16x16", "16x16-split3"))),
    # Gradients at and below the smallest normal number.
    *(_step(M=20, N=37, D=64, dtype="fp16", dout=dout) for dout in ("tiny", "subnormal")),
    _step(M=20, N=37, dtype="fp16", inputs="p_underflow", dout="constant"),
    _step(M=20, N=37, dtype="bf16", inputs="lse_low_130"),
    _step(M=20, N=37, dtype="fp16", inputs="lse_high_6e4"),
    _step(M=20, N=37, dtype="fp32", inputs="lse_high_1e5"),
    _step(M=20, N=37, dtype="fp32", inputs="lse_low_1e5"),
    # A row's first visited tile is hidden from it, and its scores are low.
    _step(M=35, N=60, mask=Mask(window_left=5, window_right=3), inputs="lse_low_6e3"),
    # Rows without a visible key, no keys, no rows.
    _step("G3", M=40, N=17, mask=Mask(causal=True)),
    _step("G3", M=17, N=0),
    _step("G3", M=0, N=17),
    # Every axis of every tensor in turn has a stride past 2**31; rows are contiguous for odd seeds.
    *(_step("G12", B=2, H=2, Hk=2, M=3, N=5, seed=seed) for seed in (0, 2, 4, 6)),
    # Padding keys in a tile that full query tiles see; arbitrary padding values.
    _step("G4", B=2, M=40, N=40, mask=Mask(seqlens_q=(40, 33), seqlens_k=(37, 0)), dirty="nan_q"),
    _step("G3", "G4", B=2, H=2, M=34, N=50, D=17, Dv=9, mask=_WINDOW, dirty="nan", layouts=_MIXED),
    _step("G3", "G4", B=2, H=2, M=34, N=50, dtype="fp16", mask=_WINDOW, dirty="nan", **_ALIGNED),
    _step("G5", B=2, M=37, N=40, dtype="bf16", mask=_RAGGED, dirty="max"),
    # Tiles that are not square, and the default tiles.
    _step(H=2, M=40, N=70, mask=Mask(window_left=9, window_right=2), config="32x16"),
    _step(H=2, M=40, N=70, mask=Mask(causal=True), config="16x32"),
    _step(M=130, N=70, dtype="fp16", mask=Mask(causal=True), config="default", **_ALIGNED),
    _step(M=20, N=40, dtype="fp32", config="16x16-tf32"),
    # Packed sequences with padding after the last, some without rows or keys. Features: several
    # tiles of scratch, grouped heads, one pass, key splits, block lists, wide loads.
    _step("G3", B=2, M=300, N=18, dtype="fp16", config="default-packed", mask=Mask(window_right=3)),
    _step("G3", "G4", B=3, H=4, Hk=2, M=20, N=35, D=5, Dv=3, dirty="nan",
          config="32x16-one_pass-packed",
          mask=Mask(window_left=9, seqlens_q=(17, 20, 4), seqlens_k=(30, 0, 35))),
    _step("G3", B=3, H=2, M=19, N=70, D=5, Dv=3, config="16x16-split3-packed", dirty="nan",
          mask=Mask(window_left=40, seqlens_q=(19, 0, 18), seqlens_k=(70, 3, 5))),
    _step(B=2, H=2, M=40, N=40, config="16x16-packed", dirty="nan",
          mask=Document(starts=((16,), ()), seqlens_q=(40, 33), seqlens_k=(37, 20))),
    # Short sequences beside a long one: the tiles of all sequences are enumerated in one grid axis.
    _step("G3", B=5, H=2, M=50, N=40, config="16x16-packed", dirty="nan", mask=_UNEVEN),
    _step("G3", B=5, H=4, Hk=2, M=50, N=40, config="32x16-one_pass-packed", dirty="nan",
          mask=_UNEVEN),
    _step(B=2, H=2, M=140, N=150, dtype="fp16", config="default-packed",
          mask=Mask(causal=True, seqlens_q=(130, 140), seqlens_k=(150, 70)), **_ALIGNED),
    # Pooled over few pairs and over several tiles, with every kind of mask.
    _step("pooled T3", "pooled G6", B=2, H=4, Hk=2, M=20, N=37, seed=51, mask=_WINDOW_OF_20,
          dirty="nan", config="16x32", layouts=_MIXED),
    _step("pooled T3", B=2, M=40, N=50, seed=96, mask=Document(starts=((16,), ()), window_left=20)),
    _step("pooled G1", H=2, M=40, N=50, seed=69, dtype="fp16", config="16x32", **_ALIGNED,
          mask=BlockSparse(side=32, percent=60, seed=2, window_left=40)),
    # A softcap that some scores reach and one far above all scores; in one pass; with key splits.
    _step("G3", B=2, H=2, M=35, N=37, D=5, Dv=3, mask=_SHORT_OF_ONE, dirty="nan", softcap=2.0),
    _step(H=2, Hk=2, M=18, N=35, D=5, Dv=3, softcap=1e6, config="16x16-one_pass"),
    _step(H=2, M=18, N=35, D=5, Dv=3, inputs="times40", softcap=5.0, config="16x16-split3"),
    *(_step(M=18, N=35, dtype=dtype, inputs="times40", softcap=20.0, **_ALIGNED)
      for dtype in ("fp32", "fp16")),
    # ALiBi slopes by head and by batch entry, beside lengths; in one pass; with key splits and a
    # softcap.
    _step("G3", B=2, H=4, Hk=2, M=35, N=37, D=5, Dv=3, mask=_SHORT_OF_ONE, dirty="nan",
          alibi="normal"),
    _step("G9", B=2, H=2, Hk=2, M=18, N=35, D=5, Dv=3, alibi="halving", config="16x16-one_pass"),
    _step(B=2, H=2, M=18, N=35, D=5, Dv=3, softcap=3.0, alibi="normal", config="16x16-split3"),
    # A bias over all axes and over some, whose gradient is summed over the others; beside a window,
    # lengths and a predicate.
    _step("G3", "dbias", B=2, H=4, Hk=2, M=35, N=37, D=5, Dv=3, mask=_SHORT_OF_ONE, dirty="nan",
          bias="normal/bhmn", config="32x16"),
    *(_step("dbias", B=2, H=2, Hk=2, M=18, N=35, D=5, Dv=3, bias=f"normal/{axes}", seed=seed,
            mask=_RAGGED_ROWS, dirty="nan", layouts=_MIXED)
      for seed, axes in enumerate(("hn", "m", "b", "mn"))),
    _step("dbias", B=2, M=48, N=48, mask=Document(starts=((16,), ()), window_left=20),
          bias="normal/bn", config="16x16-split3"),
    _step("dbias", H=2, M=40, N=300, mask=BlockSparse(side=32, percent=50, seed=2, per_head=True),
          bias="normal/m", config="16x32"),
    _step("dbias", M=18, N=35, dtype="fp16", bias="shifted/hn", **_ALIGNED),
    # The first key tile in sight of each query tile has a larger number than it.
    _step("dbias", M=18, N=67, D=3, Dv=3, mask=Mask(causal=True, window_left=9),
          bias="normal/hmn"),
    _step("dbias", H=2, M=20, N=35, dtype="fp32", bias="normal/hmn"),
    # Few rows with key splits: aligned, with large scores, without keys.
    _step(H=3, M=3, N=90, dtype="fp16", config="16x16-split3", **_ALIGNED),
    _step(M=1, N=70, dtype="fp32", inputs="lse_high_1e5", config="32x16-split7"),
    _step(M=2, N=70, dtype="fp32", inputs="lse_low_1e5", config="16x16-split3"),
    _step("G3", M=2, N=0, config="16x16-split3"),
    # Layouts with strides and with other tensors around them; grouped heads.
    _step(H=4, Hk=2, M=20, N=35, dtype="bf16", layouts=("bshd", "packed", "padded", "bshd"),
          **_ALIGNED),
)  # fmt: skip

STEPS: tuple[Step, ...] = (
    *QUICK,
    _step("G6", "G7", "G8", B=2, M=18, N=20, dtype="bf16", layouts=_MIXED, **_ALIGNED),
    _step("G6", "G7", "G8", "G9", B=2, H=2, M=18, N=20, D=24, dtype="fp32",
          layouts=("expanded", "offset", "packed", "expanded")),
    # Offsets of a tile in wide loads: more than 512 rows of the longest stride that allows them.
    *(_step("G12", B=2, M=600, N=600, dtype="fp16", config="64x32", seed=seed,
            mask=Mask(window_left=1, window_right=1), **_ALIGNED) for seed in (1, 3)),
    _step("G6", "G7", "G8", "G9", B=2, H=2, M=5, N=37, D=24, dtype="fp32", config="16x16-split3"),
    *(_step("G10", "G13", M=18, N=20, dtype="fp16", config=config, **_ALIGNED)
      for config in ("16x16", "16x16-one_pass")),
    # Schedules that read the rows, the keys or the programs of the whole call.
    *(_step("I1", "I2", "I4", "I5", "I6", B=2, H=4, Hk=2, M=M, N=70, mask=Mask(causal=True), seed=5,
            dtype="fp32") for M in (1, 20)),
    # Any set of gradients, that of a bias included.
    *(_step("sets", H=2, M=20, N=20, config=config, bias=bias, mask=mask, dlse="normal")
      for config in ("16x16", "16x16-one_pass")
      for bias, mask in (("none", Mask()), ("normal/hmn", BlockSparse(side=16, seed=2)))),
    _step("sets", H=2, M=20, N=20, sinks="ordinary", dlse="normal"),
    # Calls that differ in one argument each. They are many, so the problems are small.
    *(_step("sequence", B=B, H=2, M=M, N=M + 1, D=1, Dv=1, mask=mask, dtype=dtype)
      for B, M, mask, dtype in (
        (2, 5, Mask(), "fp16"), (1, 17, PrefixLM(prefix=5), "fp64"),
        (1, 5, BlockSparse(side=16, percent=60, seed=2), "fp64"),
      )),
    # Many heads in large groups, and head dims of dtypes that usually have smaller ones.
    _step(H=20, Hk=2, M=3, N=5, D=3, Dv=2),
    _step(B=5, H=10, Hk=10, M=3, N=5, D=3, Dv=2, alibi="normal",
          mask=Mask(seqlens_q=(3, 2, 3, 1, 2), seqlens_k=(5, 4, 3, 2, 1))),
    *(_step(M=20, N=21, D=65, Dv=8, dtype=dtype) for dtype in ("fp32", "fp64")),
    _step(M=20, N=21, D=65, Dv=8, dtype="fp32", inputs="lse_low_130", config="16x16-tf32"),
    _step("backward", M=40, N=40, D=16, Dv=144, dtype="bf16"),
    # More than 64 tiles in a list that a gradient of a bias reads.
    _step("dbias", M=7, N=1060, D=3, Dv=3, mask=PrefixLM(prefix=5), bias="normal/m"),
    # More than 8 splits, and more than 256 tiles in a row, in a list, and in a column.
    _step(N=1040, config="16x16-split64"),
    _step(N=4120, M=7, D=3, Dv=3, mask=PrefixLM(prefix=5)),
    _step(M=4120, N=7, D=3, Dv=3),
    # Ordinary data, for the statistical and closed-form checks.
    *(_step(*_OF_ORDINARY, H=2, M=128, N=96, D=32, Dv=32, dtype=dtype, config="64x32")
      for dtype in ("bf16", "fp16")),
)  # fmt: skip

# Ordinary 16-bit data, for faults below a worst-case bound: many rows, and a window of six hundred
# keys, so that one key contributes little.
ORDINARY: tuple[Step, ...] = (
    *(Step(Problem(dtype=dtype, **fields), ("G1", "limit", *_OF_ORDINARY, "G9"))
      for fields in (
        {"H": 2, "Hk": 2, "M": 192, "N": 160, "D": 32, "Dv": 32, "config": "64x32"},
        {"H": 6, "M": 32, "N": 700, "mask": Mask(window_left=600), "config": "32x64"},
        {"H": 4, "Hk": 4, "M": 640, "N": 64, "config": "64x32"},
        {"M": 60, "N": 70, "D": 24, "Dv": 24, "inputs": "times8", "config": "16x16"},
      )
      for dtype in ("bf16", "fp16")),
    # Many heads: sums over them show errors that all elements of a row share.
    Step(Problem(B=2, H=16, Hk=16, M=64, N=64, D=64, Dv=64, dtype="bf16", config="64x32"),
         ("G1", "rms", "bias", "identities")),
    # Dv is at least N, so that the check of the mask covers all pairs.
    Step(Problem(M=120, N=120, Dv=128, dtype="bf16", mask=Mask(causal=True), config="64x32"),
         ("G1", "mask")),
    # With so many keys of equal weight, one key changes lse by less than its bound.
    Step(Problem(M=16, N=8300, dtype="bf16", mask=Mask(window_left=8200), inputs="zero_k",
                 config="32x64"), ("G1", "counts")),
    Step(Problem(H=2, Hk=2, M=192, N=160, D=32, Dv=32, config="64x32"), ("G1", "limit")),
    # Many rows with many key tiles, of which one has little effect.
    Step(Problem(H=8, Hk=1, M=64, N=1030, D=64, Dv=64, dtype="bf16", config="32x64"),
         ("G1", "limit")),
    # Errors far below those of an unknown conversion to TF32.
    Step(Problem(M=96, N=96, D=32, Dv=32, dtype="fp32", config="16x16-tf32"), ("G1", "limit")),
)  # fmt: skip
