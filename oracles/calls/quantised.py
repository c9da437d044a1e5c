"""The problem of attention whose q, k and v are codes with scales, as a value."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, ClassVar

from fa_verify.oracles.calls.of_attention import OfAttention
from fa_verify.oracles.problem import Problem

__all__ = [
    "CODE_FAMILIES", "QK_FORMATS", "QK_SCALES", "QUANTISED_DTYPES", "V_FORMATS", "V_SCALES",
    "QuantisedProblem", "plainer",
]  # fmt: skip

QK_FORMATS = ("e4m3fn", "e5m2", "int8")
# "input" is the 16-bit dtype of out: a kernel may quantise q and k alone.
V_FORMATS = ("e4m3fn", "e5m2", "input")
# One scale for a tensor; for each entry and head; for each token and head; for blocks of tokens.
QK_SCALES = ("tensor", "head", "token", "block")
V_SCALES = ("tensor", "head", "channel")
# Distributions of codes: see ``properties.inputs.quantised``.
CODE_FAMILIES = ("normal", "peaked", "heads", "extreme", "zeros", "subnormal")
QUANTISED_DTYPES = ("fp16", "bf16")
# Fields of the attention that say nothing here: it has no gradient and no score modifications, and
# its values are codes.
_PLAIN = (
    "inputs", "dout", "dlse", "softcap", "alibi", "bias", "sinks", "seeds", "layouts"
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class QuantisedProblem(OfAttention):
    """Everything that determines the bits of a call with codes and scales. A scale multiplies.

    Args:
        attention: The attention to code x scale. Its dtype is that of out, "fp16" or "bf16".
        qk: The format of q and k, one of ``QK_FORMATS``.
        v: The format of v, one of ``V_FORMATS``.
        qk_scales: Where the scales of q and k have their place, one of ``QK_SCALES``.
        v_scales: Where the scales of v have theirs, one of ``V_SCALES``; with v in 16 bits, it has
            none.
        blocks: Rows and keys that share a scale, for "block".
        codes: One of ``CODE_FAMILIES``.

    Raises:
        ValueError: A field has an unknown value, or the attention is not plain.
    """

    kind: ClassVar[str] = "quantised"

    attention: Problem = field(default_factory=lambda: Problem(dtype="bf16"))
    qk: str = "e4m3fn"
    v: str = "e4m3fn"
    qk_scales: str = "tensor"
    v_scales: str = "tensor"
    blocks: tuple[int, int] = (128, 64)
    codes: str = "normal"

    def __post_init__(self) -> None:
        for name, known in (
            ("qk", QK_FORMATS), ("v", V_FORMATS), ("qk_scales", QK_SCALES),
            ("v_scales", V_SCALES), ("codes", CODE_FAMILIES),
        ):  # fmt: skip
            if getattr(self, name) not in known:
                raise ValueError(f"{name} is {getattr(self, name)!r}; needs one of {known}")
        if len(self.blocks) != 2 or not all(type(x) is int and x > 0 for x in self.blocks):
            raise ValueError(f"blocks are {self.blocks!r}; needs two sizes")
        if self.dtype not in QUANTISED_DTYPES:
            raise ValueError(f"dtype is {self.dtype!r}; needs one of {QUANTISED_DTYPES}, for out")
        if plainer(self.attention) != self.attention:
            raise ValueError(f"attention is {self.attention!r}; needs the defaults of {_PLAIN}")

    @property
    def family(self) -> str:
        """The family of the codes."""
        return self.codes

    @property
    def elements(self) -> dict[str, int]:
        """The number of elements of out and lse: there are no gradients."""
        of_attention = self.attention.elements
        return {"out": of_attention["out"], "lse": of_attention["lse"]}

    def record(self) -> dict[str, Any]:
        """Returns the record of the attention, and the other fields as "quantised"."""
        own = {
            item.name: getattr(self, item.name)
            for item in dataclasses.fields(self)[1:]
            if getattr(self, item.name) != item.default
        }
        return self.attention.record() | {"quantised": own}

    @classmethod
    def from_record(cls, record: dict[str, object]) -> QuantisedProblem:
        """Reads the output of ``to_json`` after JSON parsing.

        Raises:
            ValueError: A field is unknown or has an invalid value.
        """
        fields = dict(record)
        try:
            own = dict(fields.pop("quantised"))  # type: ignore[call-overload]
            if "blocks" in own:
                own["blocks"] = tuple(own["blocks"])
            return cls(attention=Problem.from_record(fields), **own)
        except TypeError as error:
            raise ValueError(f"problem is malformed: {error}") from None


def plainer(attention: Problem) -> Problem:
    """Returns an attention with the defaults of the fields that a call with codes lacks."""
    return dataclasses.replace(attention, **{name: getattr(_DEFAULT, name) for name in _PLAIN})


_DEFAULT = Problem()
