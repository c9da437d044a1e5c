"""A problem as a value: it determines all bits of the inputs, and has one JSON codec."""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass, field
from typing import Any, ClassVar

from fa_verify.oracles.call import Call, record_from_json
from fa_verify.oracles.masks.codec import mask_from_record, mask_to_record
from fa_verify.oracles.masks.mask import Mask

__all__ = ["DTYPES", "LAYOUTS", "TENSORS", "VERSION", "Problem"]

VERSION = 1
DTYPES = ("fp16", "bf16", "fp32", "fp64")
LAYOUTS = (
    "bhsd",
    "bshd",
    "padded",
    "offset",
    "expanded",
    "packed",
    "transposed",
    "strided",
)
TENSORS = ("q", "k", "v", "dout")
# Beyond these, a file is damaged: no machine holds such a tensor, or such a tuple of lengths.
MOST_ELEMENTS, MOST_ENTRIES = 2**36, 2**24
_SIZES = ("B", "H", "Hk", "M", "N", "D", "Dv")


@dataclass(frozen=True, kw_only=True)
class Problem(Call):
    """An attention problem, forward and backward, which determines the bits of its inputs.

    Args:
        B: Batch entries.
        H: Query heads, a multiple of Hk.
        Hk: Key/value heads.
        M: Query rows (seqlen_q).
        N: Keys (seqlen_k).
        D: head_dim of q and k.
        Dv: head_dim of v and out.
        dtype: "fp16", "bf16", "fp32" or "fp64".
        mask: The mask, which says which keys each query sees.
        sm_scale: Factor on q.k; None is D**-0.5.
        layouts: Storage of q, k, v, dout, one of ``LAYOUTS`` each.
        inputs: Input family of q, k, v (``fa_verify.properties.inputs.families``).
        dout: Family of the output's gradient.
        dlse: Family of the gradient of lse; "none" if the loss does not depend on lse.
        dirty: Family of the values in padding rows and keys.
        config: Name of the kernel's tile configuration.
        seed: Seed of the value streams.
        seeds: The seeds of a batched problem, which holds several problems along the batch axis,
            with equally many batch entries each; ``seed`` is then 0. Empty for a single problem.
        device: Device of the inputs, "cpu" or "cuda"; their bits are the same on both.
        softcap: c, where a scaled score x becomes c tanh(x / c); None without a softcap.
        alibi: Family of ALiBi's slopes; "none" without ALiBi.
        bias: Family of the bias, a slash, and the axes along which it varies, as in "normal/mn";
            "none" without a bias.
        sinks: Family of the sinks, one for each head; "none" without sinks.

    Raises:
        TypeError: A field has the wrong type.
        ValueError: A field is out of range.
    """

    kind: ClassVar[str] = "attention"

    B: int = 1
    H: int = 1
    Hk: int = 1
    M: int = 1
    N: int = 1
    D: int = 16
    Dv: int = 16
    dtype: str = "fp32"
    mask: Mask = field(default_factory=Mask)
    sm_scale: float | None = None
    layouts: tuple[str, str, str, str] = ("bhsd", "bhsd", "bhsd", "bhsd")
    inputs: str = "normal"
    dout: str = "normal"
    dlse: str = "none"
    dirty: str = "zero"
    config: str = "default"
    seed: int = 0
    seeds: tuple[int, ...] = ()
    device: str = "cpu"
    softcap: float | None = None
    alibi: str = "none"
    bias: str = "none"
    sinks: str = "none"

    def __post_init__(self) -> None:
        object.__setattr__(self, "seeds", tuple(self.seeds))
        ints = [(name, getattr(self, name)) for name in (*_SIZES, "seed")]
        for name, value in (*ints, *((f"seeds[{i}]", x) for i, x in enumerate(self.seeds))):
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name} is {value!r}; needs an int")
            least = 1 if name in ("H", "Hk", "D", "Dv") else 0
            if not least <= value < 2**63:
                raise ValueError(f"{name} is {value}; needs to be in [{least}, 2**63)")
        if self.B > MOST_ENTRIES:
            raise ValueError(f"B is {self.B}; needs at most {MOST_ENTRIES}")
        for name, heads, length, width in (
            ("q", self.H, self.M, self.D), ("k", self.Hk, self.N, self.D),
            ("v", self.Hk, self.N, self.Dv), ("dout", self.H, self.M, self.Dv),
        ):  # fmt: skip
            if (elements := self.B * heads * length * width) > MOST_ELEMENTS:
                raise ValueError(
                    f"{name} has {elements:,} elements; needs at most {MOST_ELEMENTS:,}"
                )
        if self.H % self.Hk:
            raise ValueError(f"H is {self.H}; needs a multiple of Hk = {self.Hk}")
        for name in ("inputs", "dout", "dlse", "dirty", "config", "alibi", "bias", "sinks"):
            if not isinstance(getattr(self, name), str):
                raise TypeError(f"{name} is {getattr(self, name)!r}; needs a str")
        for name, known in (("dtype", DTYPES), ("device", ("cpu", "cuda"))):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} is {getattr(self, name)!r}; needs one of {known}")
        object.__setattr__(self, "layouts", tuple(self.layouts))
        if len(self.layouts) != len(TENSORS) or any(x not in LAYOUTS for x in self.layouts):
            raise ValueError(f"layouts is {self.layouts!r}; needs four of {LAYOUTS}")
        if self.seeds and (self.seed or self.B % len(self.seeds) or self.B == 0):
            raise ValueError(
                f"{len(self.seeds)} seeds, seed is {self.seed} and B is {self.B}; a batched "
                "problem needs seed = 0, and equally many batch entries for each of its seeds"
            )
        for name in ("sm_scale", "softcap"):
            value = getattr(self, name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, float | int):
                raise TypeError(f"{name} is {value!r}; needs None or a float")
            if not 0 < value <= sys.float_info.max:
                raise ValueError(f"{name} is {value}; needs to be finite and > 0")
        if not isinstance(self.mask, Mask):
            raise TypeError(f"mask is {self.mask!r}; needs a Mask")
        self.mask.lengths(self.B, self.M, self.N)

    @property
    def scale(self) -> float:
        """The softmax scale: ``sm_scale`` or its default."""
        return float(self.D) ** -0.5 if self.sm_scale is None else float(self.sm_scale)

    @property
    def G(self) -> int:
        """Query heads per key/value head."""
        return self.H // self.Hk

    @property
    def elements(self) -> dict[str, int]:
        """The number of elements of each output."""
        rows, keys = self.B * self.H * self.M, self.B * self.Hk * self.N
        return {
            "out": rows * self.Dv, "lse": rows, "dq": rows * self.D, "dk": keys * self.D,
            "dv": keys * self.Dv,
        }  # fmt: skip

    @property
    def attention(self) -> Problem:
        """The problem itself."""
        return self

    @property
    def family(self) -> str:
        """The family of q, k and v."""
        return self.inputs

    @property
    def pairs(self) -> int:
        """Pairs of a query row and a key, over batch entries and heads."""
        return self.B * self.H * self.M * self.N

    @property
    def longest(self) -> int:
        """The larger of M and N."""
        return max(self.M, self.N)

    @property
    def columns(self) -> int:
        """The larger of D and Dv."""
        return max(self.D, self.Dv)

    @property
    def all_seeds(self) -> tuple[int, ...]:
        """The seeds of a batched problem, or the one seed."""
        return self.seeds or (self.seed,)

    def part(self, start: int, stop: int) -> Problem:
        """Returns problems ``start`` to ``stop`` of a batched problem, one as a single problem."""
        seeds = self.all_seeds[start:stop]
        entries = self.B // len(self.all_seeds)
        mask = self.mask.sliced(tuple(range(start * entries, stop * entries)))
        one = len(seeds) == 1
        return dataclasses.replace(
            self,
            B=entries * len(seeds),
            mask=mask,
            seed=seeds[0] if one else 0,
            seeds=() if one else seeds,
        )

    def record(self) -> dict[str, Any]:
        """Returns the problem as plain values, without the fields at their defaults."""
        record: dict[str, Any] = {"version": VERSION}
        for item in dataclasses.fields(self):
            value = getattr(self, item.name)
            if item.name == "mask":
                if value != Mask():
                    record["mask"] = mask_to_record(value)
            elif value != item.default:
                record[item.name] = value
        return record

    @classmethod
    def from_json(cls, text: str) -> Problem:
        """Reads the output of ``to_json``; nothing in it is evaluated or imported.

        Raises:
            ValueError: The text is not JSON, has another version or an unknown field or mask, or a
                value is out of range.
        """
        return cls.from_record(record_from_json(text))

    @classmethod
    def from_record(cls, record: object) -> Problem:
        """Reads the output of ``to_json`` after JSON parsing; raises as ``from_json``."""
        if not isinstance(record, dict):
            raise ValueError(f"problem is {record!r}; needs a JSON object")
        fields = dict(record)
        version = fields.pop("version", None)
        if version != VERSION:
            raise ValueError(f"problem has version {version!r}; this suite reads version {VERSION}")
        known = {item.name for item in dataclasses.fields(cls)}
        unknown = sorted(set(fields) - known)
        if unknown:
            raise ValueError(f"problem has unknown fields {unknown}; known are {sorted(known)}")
        try:
            if "mask" in fields:
                fields["mask"] = mask_from_record(fields["mask"])
            for name in ("layouts", "seeds"):
                if name in fields:
                    fields[name] = tuple(fields[name])
            return cls(**fields)
        except TypeError as error:
            raise ValueError(f"problem is malformed: {error}") from None
