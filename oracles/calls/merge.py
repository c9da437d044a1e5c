"""The problem of a merge of attention states, as a value."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, ClassVar

from fa_verify.oracles.call import Call
from fa_verify.oracles.problem import DTYPES, VERSION

__all__ = ["LSE_FAMILIES", "OUT_FAMILIES", "STATE_LAYOUTS", "MergeProblem"]

# How the lses of parts differ, and what their outs hold: see ``properties.inputs.states``.
LSE_FAMILIES = ("normal", "wide", "equal", "needle", "rising", "high", "low", "lowest")
OUT_FAMILIES = ("normal", "opposite", "largest", "tiny")
# Storage of the parts: see ``properties.inputs.states``.
STATE_LAYOUTS = ("parts", "heads inside", "parts inside", "columns", "gaps", "shared")


@dataclass(frozen=True, kw_only=True)
class MergeProblem(Call):
    """Everything that determines the bits of the inputs of a merge.

    Args:
        parts: The number of keys of each part; a part of 0 keys saw nothing.
        B: Batch entries.
        H: Heads.
        M: Queries.
        Dv: head_dim of the values.
        dtype: "fp16", "bf16", "fp32" or "fp64": the dtype of the parts' out.
        hidden: Of 16 pairs of a row and a part, how many see no key, by chance.
        lse: One of ``LSE_FAMILIES``.
        out: One of ``OUT_FAMILIES``.
        layout: One of ``STATE_LAYOUTS``, the storage of outs and lses.
        dout_layout: The storage of the gradients.
        seed: Seed of all values.
        device: "cpu" or "cuda".

    Raises:
        ValueError: A field has an unknown value, or a size is negative.
    """

    kind: ClassVar[str] = "merge"
    config: ClassVar[str] = "default"
    attention: ClassVar[None] = None

    parts: tuple[int, ...] = (1, 1)
    B: int = 1
    H: int = 1
    M: int = 1
    Dv: int = 1
    dtype: str = "fp16"
    hidden: int = 0
    lse: str = "normal"
    out: str = "normal"
    layout: str = "parts"
    dout_layout: str = "parts"
    seed: int = 0
    device: str = "cpu"

    def __post_init__(self) -> None:
        for name, known in (
            ("dtype", DTYPES), ("lse", LSE_FAMILIES), ("out", OUT_FAMILIES),
            ("layout", STATE_LAYOUTS), ("dout_layout", STATE_LAYOUTS), ("hidden", range(17)),
        ):  # fmt: skip
            if getattr(self, name) not in known:
                raise ValueError(f"{name} is {getattr(self, name)!r}; needs one of {tuple(known)}")
        for name, sizes, least in (
            ("parts", self.parts, 0), ("B", (self.B,), 0), ("H", (self.H,), 1),
            ("M", (self.M,), 0), ("Dv", (self.Dv,), 1),
        ):  # fmt: skip
            if any(size < least for size in sizes):
                raise ValueError(f"{name} is {getattr(self, name)!r}; needs ints >= {least}")

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """The shape of outs, (P, B, H, M, Dv)."""
        return len(self.parts), self.B, self.H, self.M, self.Dv

    @property
    def family(self) -> str:
        """The family of the lses."""
        return self.lse

    @property
    def elements(self) -> dict[str, int]:
        """The number of elements of each output."""
        out, lse = self.B * self.H * self.M * self.Dv, self.B * self.H * self.M
        P = len(self.parts)
        return {"out": out, "lse": lse, "douts": P * out, "dlses": P * lse}

    @property
    def pairs(self) -> int:
        """Rows of all parts."""
        return math.prod(self.shape[:4])

    @property
    def longest(self) -> int:
        """The number of query rows: no key is read."""
        return self.M

    @property
    def columns(self) -> int:
        """Dv."""
        return self.Dv

    def record(self) -> dict[str, Any]:
        """Returns the merge as plain values, without the fields at their defaults."""
        merge = {
            item.name: getattr(self, item.name)
            for item in dataclasses.fields(self)
            if getattr(self, item.name) != item.default
        }
        return {"version": VERSION, "merge": merge}

    @classmethod
    def from_record(cls, record: dict[str, object]) -> MergeProblem:
        """Reads the output of ``to_json`` after JSON parsing.

        Raises:
            ValueError: A field is unknown or has an invalid value, or the version is another one.
        """
        try:
            if {**record, "merge": {}} != {"version": VERSION, "merge": {}}:
                raise ValueError(f"problem is {record!r}; needs version {VERSION} and merge alone")
            fields = dict(record["merge"])  # type: ignore[call-overload]
            return cls(**{**fields, "parts": tuple(fields.get("parts", (1, 1)))})
        except TypeError as error:
            raise ValueError(f"problem is malformed: {error}") from None
