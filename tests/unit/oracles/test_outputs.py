"""Declarations of a subject's numerics are validated."""

from __future__ import annotations

import dataclasses
import math

import pytest

from fa_verify.oracles.outputs import Numerics

COUNTS = ("accumulator", "block_n", "ds_roundings", "splits")
WORDS = [x.name for x in dataclasses.fields(Numerics) if isinstance(x.default, str)]


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize("value", [0, 0.5, -1, math.nan], ids=str)
def test_a_count_below_1_is_refused(name, value):
    with pytest.raises(ValueError, match=f"^{name} is {value}; needs an? (int|number) from 1 to "):
        Numerics(**{name: value})


@pytest.mark.parametrize("name", WORDS)
def test_an_unknown_word_is_refused(name):
    with pytest.raises(ValueError, match=f"^{name} is 'fp8'; needs one of "):
        Numerics(**{name: "fp8"})
