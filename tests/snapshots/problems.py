"""Problems whose outputs are recorded: a fixed list without randomness."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from itertools import cycle, product

from tests.snapshots.cases import MASKS, Case

__all__ = ["cases"]

_CONFIGS = (
    "default", "portable", "tf32", "16x16", "16x32", "32x16", "32x32", "64x32", "32x64",
    "16x16-tf32", "16x16-split1", "16x16-split3", "32x16-split7", "split8",
)  # fmt: skip
_DTYPES = ("fp16", "bf16", "fp32", "fp64")
_PLAIN = ("full", "causal", "window", "lengths", "causal lengths", "left", "right")
# Axes of the bias.
_BIASES = ("", "H", "M", "N", "BM", "HN", "BN", "MN", "BHM")


def _of_configs() -> Iterator[Case]:
    masks = cycle(_PLAIN)
    for config, dtype, one_pass in product(_CONFIGS, _DTYPES, (False, True)):
        if "tf32" in config and dtype != "fp32":
            continue
        D, Dv = (16, 16) if config[0].isdigit() else (40, 24)
        sizes = {"B": 2, "M": 45, "N": 52} if dtype == "fp64" else {"B": 2, "M": 70, "N": 90}
        yield Case(
            config=config, dtype=dtype, mask=next(masks), one_pass=one_pass, D=D, Dv=Dv, **sizes
        )


def _of_masks() -> Iterator[Case]:
    for mask, (config, dtype, one_pass) in product(
        MASKS, (("16x32", "fp16", False), ("32x16", "bf16", True), ("16x16-split3", "fp32", False))
    ):
        yield Case(config=config, dtype=dtype, mask=mask, one_pass=one_pass, B=2, H=4, Hk=2)
    for mask in ("causal lengths", "window lengths", "blocks of heads"):
        for one_pass in (False, True):
            yield Case(mask=mask, one_pass=one_pass, B=3, lengths="tensors")
    yield Case(config="default", mask="blocks of heads", M=150, N=140, D=64, Dv=64)


def _of_scores() -> Iterator[Case]:
    forms = (("16x32", "fp16", False), ("32x16", "bf16", True), ("16x16-split3", "fp32", False))
    for softcap, alibi, bias in product((None, 1.5), ("", "H"), (None, "BHMN")):
        if (softcap, alibi, bias) == (None, "", None):
            continue
        mods = {"softcap": softcap, "alibi": alibi, "bias": bias}
        for (config, dtype, one_pass), mask in zip(
            forms, ("causal", "full", "lengths"), strict=True
        ):
            yield Case(config=config, dtype=dtype, one_pass=one_pass, mask=mask, B=2, **mods)
        yield Case(dtype="fp64", mask="window", M=20, N=33, **mods)
        yield Case(dtype="bf16", mask="dilated", one_pass=bias is None, **mods)
    yield Case(alibi="BH", mask="causal", B=2)
    for config, dtype in (("16x32", "fp16"), ("16x16-split3", "bf16"), ("32x16", "fp64")):
        yield Case(config=config, dtype=dtype, mask="causal lengths", B=2, sinks=True)
    yield Case(call="varlen", mask="left", B=5, softcap=1.5, dlse="beside", sinks=True)
    for bias, dtype in product(
        ("", "H", "M", "N", "BM", "HN", "BN", "MN", "BHM"), ("fp16", "bf16")
    ):
        plus = "+" if dtype == "bf16" else ""
        yield Case(bias=bias + plus, dtype=dtype, mask="causal lengths", B=2, H=4, Hk=2)
    yield Case(bias="HMN", dtype="fp32", mask="blocks of heads", config="32x32", B=2)
    yield Case(bias="MN", dtype="fp64", mask="window", M=20, N=33, B=2)


def _of_sizes() -> Iterator[Case]:
    dims = ((1, 1), (5, 3), (16, 40), (40, 16), (64, 64), (72, 24), (128, 128), (192, 24))
    for (D, Dv), (dtype, one_pass) in product(
        dims, (("fp16", False), ("bf16", True), ("fp32", False))
    ):
        yield Case(D=D, Dv=Dv, dtype=dtype, one_pass=one_pass, mask="causal", config="16x32")
    for D, dtype in product((64, 96, 128, 256), ("bf16", "fp32")):
        yield Case(config="default", D=D, Dv=D, dtype=dtype, mask="causal", H=1, M=70, N=66)
    for layout, (D, dtype), one_pass in product(
        ("heads inside", "offset", "columns", "wide"),
        ((16, "fp16"), (24, "bf16"), (24, "fp32")),
        (False, True),
    ):
        yield Case(layout=layout, D=D, Dv=D, dtype=dtype, one_pass=one_pass, mask="causal", B=2)
    for dlse, dtype, one_pass in product(("beside", "alone"), ("fp16", "fp32"), (False, True)):
        yield Case(dlse=dlse, dtype=dtype, one_pass=one_pass, mask="causal lengths", B=2)
    for needs, one_pass in product(("q", "kv", "v"), (False, True)):
        yield Case(needs=needs, one_pass=one_pass, mask="causal", dtype="bf16")
    for empty, one_pass in product(({"B": 0}, {"M": 0}, {"N": 0}, {"M": 0, "N": 0}), (False, True)):
        yield Case(**empty, one_pass=one_pass, config="16x16-split3" if one_pass else "16x32")
    yield Case(M=1, N=90, mask="causal", config="32x16-split7", H=8, Hk=2)
    yield Case(M=90, N=10, mask="causal", dtype="bf16", one_pass=True)


def _of_calls() -> Iterator[Case]:
    for config, one_pass, mask in product(
        ("16x32", "32x16", "16x16-split3", "default"),
        (False, True),
        ("full", "causal", "window", "dilated"),
    ):
        lengths = {"full": "tensors", "causal": "ints", "window": "longest"}.get(mask, "ints")
        D = 64 if config == "default" else 24
        dtype = "bf16" if one_pass else "fp16"
        yield Case(
            call="varlen", config=config, one_pass=one_pass, mask=mask, lengths=lengths,
            dtype=dtype, B=5, H=2, D=D, Dv=D,
        )  # fmt: skip
    for dtype, lengths in product(("fp32", "fp64"), ("ints", "tensors")):
        yield Case(call="varlen", dtype=dtype, lengths=lengths, mask="causal", B=5, dlse="beside")
    yield Case(call="varlen", mask="causal", B=5, softcap=1.5, alibi="BH")
    yield Case(call="varlen", mask="left", B=5, one_pass=True, alibi="H", dtype="fp32")
    for mask, (pool, dtype) in product(
        ("full", "causal lengths", "window", "dilated", "blocks of heads"),
        (((8, 8), "fp16"), ((1, 5), "fp32"), ((40, 7), "bf16"), ((100, 100), "fp64")),
    ):
        call = "pooled max" if dtype in ("fp16", "fp64") else "pooled mean"
        yield Case(call=call, mask=mask, pool=pool, dtype=dtype, B=2)
    yield Case(call="pooled mean", mask="causal", pool=(8, 8), config="16x16-tf32", dtype="fp32")


def _of_hopper() -> Iterator[Case]:
    sizes = (
        {"M": 70, "N": 140, "D": 64, "Dv": 64},
        {"M": 150, "N": 200, "D": 128, "Dv": 128, "H": 1},
        {"M": 70, "N": 90, "D": 40, "Dv": 104, "H": 1},
    )
    for (size, mask), one_pass in product(
        ((sizes[0], "causal"), (sizes[0], "full"), (sizes[0], "lengths"), (sizes[1], "full"),
         (sizes[1], "window"), (sizes[2], "causal lengths")),
        (False, True),
    ):  # fmt: skip
        of_lengths = {"B": 3} if "lengths" in mask else {}
        dtype = "fp16" if one_pass else "bf16"
        yield Case(
            hopper=True, config="default", dtype=dtype, mask=mask, one_pass=one_pass,
            **size, **of_lengths,
        )  # fmt: skip
    for D, one_pass in product((64, 128), (False, True)):
        yield Case(
            hopper=True, call="varlen", config="default", dtype="bf16", mask="causal",
            one_pass=one_pass, lengths="tensors" if one_pass else "ints",
            B=5, M=100, N=150, D=D, Dv=D, H=2,
        )  # fmt: skip
    # Tiles with fewer rows, and tiles that two programs share.
    yield Case(hopper=True, config="default", dtype="bf16", H=1, M=570, N=300, D=64, Dv=64)


def cases(scale: int = 1) -> Iterator[Case]:
    """Every case, with lengths scaled by ``scale`` up to 509."""

    def longer(length: int) -> int:
        return length if length < 2 else max(length, min(scale * length, 509))

    for of in (_of_configs, _of_masks, _of_scores, _of_sizes, _of_calls, _of_hopper):
        for case in of():
            yield dataclasses.replace(case, M=longer(case.M), N=longer(case.N))
