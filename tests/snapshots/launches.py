"""Problems whose launches are compiled: every constexpr of the kernels, in most tiles."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from itertools import product

from tests.snapshots.cases import Case

__all__ = ["launches"]

_DEFAULT = Case(config="default", D=64, Dv=64, mask="causal")
_SMALL = Case(config="16x32", mask="causal", B=2)


def _of_tiles() -> Iterator[Case]:
    """Cases over configurations, dtypes and head_dims, for two passes and for one."""
    for dtype in ("fp16", "bf16", "fp32", "fp64"):
        yield dataclasses.replace(_DEFAULT, dtype=dtype)
    for D, dtype in ((128, "fp16"), (192, "bf16"), (20, "fp16"), (72, "bf16"), (128, "fp32")):
        yield dataclasses.replace(_DEFAULT, D=D, Dv=D, dtype=dtype)
    yield dataclasses.replace(_DEFAULT, D=24, Dv=100)
    yield dataclasses.replace(_DEFAULT, config="tf32", dtype="fp32")
    for config in ("16x16", "16x32", "32x16", "32x32", "64x32", "32x64"):
        yield dataclasses.replace(_SMALL, config=config)
    yield dataclasses.replace(_SMALL, config="16x16-tf32", dtype="fp32")
    yield dataclasses.replace(_SMALL, dtype="fp64", D=33, Dv=16)
    yield dataclasses.replace(_SMALL, dtype="fp32")
    # Rows that wide loads read with a mask, and layouts that rule out wide loads.
    yield dataclasses.replace(_SMALL, D=24, Dv=24)
    yield dataclasses.replace(_SMALL, layout="columns")
    yield dataclasses.replace(_DEFAULT, layout="offset")
    yield dataclasses.replace(_SMALL, mask="dilated")
    yield dataclasses.replace(_DEFAULT, mask="dilated")
    yield dataclasses.replace(_SMALL, dlse="beside")


def _of_forms() -> Iterator[Case]:
    """Cases that are compiled for a single number of passes."""
    for config, dtype in (("16x16-split3", "bf16"), ("32x16-split7", "fp32"), ("split8", "fp16")):
        like = _DEFAULT if config == "split8" else _SMALL
        yield dataclasses.replace(like, config=config, dtype=dtype, needs="q")
    yield dataclasses.replace(_SMALL, config="16x16-split3", mask="dilated", needs="q")
    for mask in ("blocks of heads", "causal blocks", "documents", "both"):
        yield dataclasses.replace(_SMALL, mask=mask, needs="q")
    for softcap, alibi, bias in product((None, 1.5), ("", "H"), (None, "BHMN")):
        mods = {"softcap": softcap, "alibi": alibi, "bias": bias}
        if any(mods.values()):
            yield dataclasses.replace(_SMALL, **mods)
    for config, dtype in (("16x16", "bf16"), ("16x16-split3", "fp64"), ("32x16", "fp32")):
        yield dataclasses.replace(_SMALL, config=config, dtype=dtype, sinks=True)
    mods = {"softcap": 1.5, "alibi": "BH", "bias": "MN+"}
    yield dataclasses.replace(_SMALL, **mods, config="32x16", dtype="bf16", one_pass=True)
    yield dataclasses.replace(_DEFAULT, softcap=1.5, dtype="bf16")
    yield dataclasses.replace(_DEFAULT, bias="HMN", mask="dilated", one_pass=True)
    yield dataclasses.replace(_SMALL, **mods, dtype="fp32", mask="blocks of heads")
    # The gradient of a bias is summed over every subset of its axes.
    for axes in product("B ", "H ", "M ", "N "):
        bias = "".join(axes).replace(" ", "")
        if bias != "BHMN":
            yield dataclasses.replace(_SMALL, bias=bias)
    for mask, one_pass in product(("causal", "dilated"), (False, True)):
        yield dataclasses.replace(_SMALL, call="varlen", mask=mask, one_pass=one_pass)
    yield dataclasses.replace(_DEFAULT, call="varlen", dtype="bf16", one_pass=True)
    yield dataclasses.replace(_SMALL, call="varlen", config="16x16-split3", needs="q")
    yield dataclasses.replace(_SMALL, call="varlen", softcap=1.5, alibi="H", dtype="fp32")
    for pool, (D, dtype) in product(("mean", "max"), ((16, "fp16"), (24, "bf16"), (16, "fp32"))):
        yield dataclasses.replace(
            _SMALL, call=f"pooled {pool}", pool=(8, 8), D=D, dtype=dtype, needs=""
        )
    for mask in ("dilated", "blocks of heads"):
        yield dataclasses.replace(_SMALL, call="pooled mean", pool=(8, 8), mask=mask, needs="")
    yield dataclasses.replace(_SMALL, call="pooled max", pool=(8, 8), dtype="fp64", needs="")
    for dtype, Dv in (("fp16", 128), ("bf16", 64), ("bf16", 24), ("fp32", 512), ("fp64", 16)):
        yield dataclasses.replace(_SMALL, call="merge", dtype=dtype, Dv=Dv, needs="", dlse="beside")
    for dtype, D, Dv in (("bf16", 128, 128), ("fp16", 64, 96), ("fp32", 24, 40), ("fp64", 16, 256)):
        yield dataclasses.replace(_DEFAULT, call="kvcache", dtype=dtype, D=D, Dv=Dv, needs="")
    mods = {"softcap": 1.5, "alibi": "BH"}
    yield dataclasses.replace(_SMALL, call="kvcache", dtype="bf16", **mods, needs="")


def _of_hopper() -> Iterator[Case]:
    for D, call, one_pass in product((64, 128), ("padded", "varlen"), (False, True)):
        yield dataclasses.replace(
            _DEFAULT, hopper=True, call=call, D=D, Dv=D, dtype="bf16", one_pass=one_pass, B=2
        )
    for D, Dv in ((40, 104), (128, 64)):
        yield dataclasses.replace(_DEFAULT, hopper=True, D=D, Dv=Dv)
    for D, call in ((64, "padded"), (128, "varlen")):
        yield dataclasses.replace(_DEFAULT, hopper=True, call=call, D=D, Dv=D, sinks=True, needs="")


def launches() -> Iterator[Case]:
    """Every case."""
    for case, one_pass in product(_of_tiles(), (False, True)):
        yield dataclasses.replace(case, one_pass=one_pass)
    yield from _of_forms()
    yield from _of_hopper()
