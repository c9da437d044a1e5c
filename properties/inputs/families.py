"""The tables of families of values, by the names that problems use.

A problem names a family for its inputs q, k, v, for dout, for the gradient of lse (or "none"), and
for the values in its padding. It may name three more for ALiBi slopes, the bias and sinks.
Strategies shrink towards the first family of each table.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from fa_verify.oracles.problem import Problem
from fa_verify.properties.inputs.alibi_families import ALIBI_FAMILIES, NO_ALIBI
from fa_verify.properties.inputs.bias_families import BIASES, NO_BIAS
from fa_verify.properties.inputs.dlse_families import DLSE_FAMILIES, NO_DLSE
from fa_verify.properties.inputs.dout_families import DOUT_FAMILIES
from fa_verify.properties.inputs.input_families import VALUE_FAMILIES
from fa_verify.properties.inputs.padding_values import PADDING_VALUES
from fa_verify.properties.inputs.sampling import TORCH_DTYPES, Values, drawn_shape, length_tensors
from fa_verify.properties.inputs.score_families import SCORE_FAMILIES, last_visible
from fa_verify.properties.inputs.sink_families import NO_SINKS, SINK_FAMILIES

__all__ = [
    "ALIBI",
    "BIASES",
    "DLSE",
    "DOUT",
    "INPUTS",
    "NO_ALIBI",
    "NO_BIAS",
    "NO_DLSE",
    "NO_SINKS",
    "PADDING_VALUES",
    "SINKS",
    "TORCH_DTYPES",
    "Values",
    "drawn_shape",
    "last_visible",
    "length_tensors",
]

INPUTS: dict[str, Callable[[Problem], Values]] = {
    family.__name__: family for family in (*VALUE_FAMILIES, *SCORE_FAMILIES)
}
DOUT: dict[str, Callable[[Problem], torch.Tensor]] = {
    family.__name__: family for family in DOUT_FAMILIES
}
DLSE: dict[str, Callable[[Problem], torch.Tensor]] = {
    family.__name__: family for family in DLSE_FAMILIES
}
ALIBI: dict[str, Callable[[Problem], torch.Tensor]] = {
    family.__name__: family for family in ALIBI_FAMILIES
}
SINKS: dict[str, Callable[[Problem], torch.Tensor]] = {
    family.__name__: family for family in SINK_FAMILIES
}
