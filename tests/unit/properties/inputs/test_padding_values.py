import dataclasses
import math

import pytest
import torch
from hypothesis import given

from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.problem import DTYPES, TENSORS, Problem
from fa_verify.properties.inputs import tensors
from fa_verify.properties.inputs.families import PADDING_VALUES
from fa_verify.properties.problems.strategies import problems

KINDS = {
    "zero": lambda x: x == 0,
    "nan": lambda x: x.isnan(),
    "inf": lambda x: x.isinf(),
    "max": lambda x: x.abs() == torch.finfo(x.dtype).max,
    "noise": lambda x: x.isfinite() & (x != 0),
}
PADDED = Problem(
    B=3,
    H=4,
    Hk=2,
    M=9,
    N=13,
    D=5,
    Dv=6,
    mask=Mask(seqlens_q=(9, 4, 0), seqlens_k=(0, 13, 7)),
    layouts=("bshd", "padded", "offset", "expanded"),
)


def make(*args, **kwargs):
    """q, k, v, dout."""
    return tensors.make(*args, **kwargs).tensors


def same_bits(left, right):
    """Whether the bits are equal, including signs of zeros and payloads of NaNs."""
    word = {2: torch.int16, 4: torch.int32, 8: torch.int64}[left.itemsize]
    return torch.equal(left.view(word), right.view(word))


def padding(problem):
    """A bool (B, 1, rows, 1) for each tensor, True in padding, computed row by row."""
    rows, keys = problem.mask.lengths(problem.B, problem.M, problem.N)
    of_rows = [[m >= rows[b] for m in range(problem.M)] for b in range(problem.B)]
    of_keys = [[n >= keys[b] for n in range(problem.N)] for b in range(problem.B)]
    for flags in (of_rows, of_keys, of_keys, of_rows):
        size = len(flags[0]) if flags else 0
        yield torch.tensor(flags, dtype=torch.bool).view(problem.B, 1, size, 1)


@given(problems(padding=True))
def test_padding_values_change_padding_alone(problem):
    clean, dirty = make(problem, dirty="zero"), make(problem, dirty="nan")
    for a, b, pad in zip(clean, dirty, padding(problem), strict=True):
        assert same_bits(torch.where(pad, 0, a), torch.where(pad, 0, b))
        assert torch.where(pad, b, math.nan).isnan().all()
        assert not torch.where(pad, a, 0).any()


def test_an_overriding_family_of_padding_values_is_that_of_the_problem():
    dirty = make(dataclasses.replace(PADDED, dirty="noise"))
    override = make(PADDED, dirty="noise")
    assert all(same_bits(a, b) for a, b in zip(dirty, override, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dirty", KINDS)
def test_padding_holds_its_family(dirty, dtype):
    problem = dataclasses.replace(PADDED, dirty=dirty, dtype=dtype)
    for tensor, pad in zip(make(problem), padding(problem), strict=True):
        assert KINDS[dirty](tensor)[pad.expand(tensor.shape)].all()


@pytest.mark.parametrize("dirty", ["inf", "max"])
def test_large_padding_has_both_signs(dirty):
    for tensor, pad in zip(make(PADDED, dirty=dirty), padding(PADDED), strict=True):
        assert set(tensor[pad.expand(tensor.shape)].sign().tolist()) == {-1.0, 1.0}


@pytest.mark.parametrize("dirtied", TENSORS)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "zero"])
def test_values_of_one_tensor_are_in_its_padding_alone(kind, dirtied):
    clean, dirty = make(PADDED, dirty="zero"), make(PADDED, dirty=f"{kind}_{dirtied}")
    tensors = zip(TENSORS, clean, dirty, padding(PADDED), strict=True)
    for name, without, tensor, pad in tensors:
        if name == dirtied:
            assert KINDS[kind](tensor)[pad.expand(tensor.shape)].all()
            assert same_bits(torch.where(pad, 0, tensor), torch.where(pad, 0, without))
        else:
            assert same_bits(tensor, without)


def test_every_kind_of_padding_value_comes_in_all_tensors_and_in_each_alone():
    kinds = [kind for kind in KINDS if kind != "zero"]
    alone = {f"{kind}_{tensor}" for kind in kinds for tensor in TENSORS}
    assert set(PADDING_VALUES) == {*KINDS, *alone}


def test_clean_padding_comes_first():
    assert next(iter(PADDING_VALUES)) == "zero"
