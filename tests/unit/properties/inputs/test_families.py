import dataclasses
import hashlib
import itertools
import math

import pytest
import torch
from hypothesis import given

from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.problem import DTYPES, LAYOUTS, Problem
from fa_verify.properties.inputs import tensors
from fa_verify.properties.inputs.bias_families import BIAS_DTYPES, BIASES, grouped_biases
from fa_verify.properties.inputs.families import DOUT, INPUTS, PADDING_VALUES, TORCH_DTYPES
from fa_verify.properties.problems.strategies import problems

DEVICES = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
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
LONG = Problem(B=2, H=4, Hk=2, M=61, N=67, D=64, Dv=48, mask=Mask(causal=True))
GOLDEN = {
    ("inputs", "normal"): "4193df77",
    ("inputs", "outliers"): "609cc071",
    ("inputs", "times8"): "41afcad1",
    ("inputs", "times40"): "49ce5fd3",
    ("inputs", "lse_low_90"): "38b9bb28",
    ("inputs", "lse_low_130"): "b9c698bd",
    ("inputs", "lse_low_6e3"): "f661d361",
    ("inputs", "lse_high_6e4"): "308804a2",
    ("inputs", "needle_visible"): "fc4048d3",
    ("inputs", "needle_hidden"): "10cba729",
    ("inputs", "constant"): "ad25e570",
    ("inputs", "zero_k"): "a9123a42",
    ("inputs", "tiny"): "0403eaeb",
    ("inputs", "subnormal"): "91e61e73",
    ("inputs", "tiny_k"): "4c5c1a1c",
    ("inputs", "tiny_q"): "378b05de",
    ("dout", "normal"): "4193df77",
    ("dout", "zero"): "9a56a381",
    ("dout", "constant"): "4da5eb84",
    ("dout", "tiny"): "46d3660d",
    ("dout", "subnormal"): "d5298e1b",
    ("dout", "one_hot"): "ea751774",
    ("dirty", "zero"): "4193df77",
    ("dirty", "nan"): "9870a912",
    ("dirty", "inf"): "4c889a49",
    ("dirty", "max"): "19580da8",
    ("dirty", "noise"): "7c7f767d",
    ("inputs", "massive_channel"): "88df3a15",
    ("inputs", "large_mean_v"): "a103a7d1",
    ("inputs", "positive_v"): "8acf5c1d",
    ("inputs", "near_max"): "eb4ac871",
    ("inputs", "one_hot_v"): "d8d7653b",
    ("inputs", "zero_k_one_hot_v"): "fcf7819d",
    ("inputs", "zero_k_unit_v"): "5feed079",
    ("inputs", "lse_low_1e5"): "d595f24d",
    ("inputs", "lse_high_1e5"): "877d6df0",
    ("inputs", "near_ties"): "49f48e5c",
    ("inputs", "rising_max"): "01bb1754",
    ("inputs", "two_level"): "c7cf4cbe",
    ("inputs", "p_underflow"): "782b9367",
    ("inputs", "values_of_light_keys"): "fdb9014c",
    ("inputs", "duplicated_keys"): "5d632f29",
    ("inputs", "cosine"): "1cbb1936",
    ("inputs", "swept_scores"): "574aa6f4",
    ("dout", "masked"): "3e90cfdc",
    ("dout", "one_row_of_a_tile"): "75c3d473",
    ("dirty", "nan_q"): "5d896bc3",
    ("dirty", "nan_k"): "07c8342d",
    ("dirty", "nan_v"): "cbe0bfae",
    ("dirty", "nan_dout"): "e86fbc84",
    ("dirty", "inf_q"): "8fd6ff42",
    ("dirty", "inf_k"): "47e0dda5",
    ("dirty", "inf_v"): "64b62580",
    ("dirty", "inf_dout"): "eba5d374",
    ("dirty", "max_q"): "fbf1b798",
    ("dirty", "max_k"): "fd8f608d",
    ("dirty", "max_v"): "cf45ab4b",
    ("dirty", "max_dout"): "c30fd480",
    ("dirty", "noise_q"): "2f5c4d9a",
    ("dirty", "noise_k"): "1b365837",
    ("dirty", "noise_v"): "3d90da4b",
    ("dirty", "noise_dout"): "4297b4f9",
}


def make(*args, **kwargs):
    """q, k, v, dout."""
    return tensors.make(*args, **kwargs).tensors


def digest(problem):
    """A hash of the bits of all four tensors, with all NaN equal."""
    total = hashlib.sha256()
    for tensor in make(problem):
        is_nan = tensor.isnan()
        for part in (is_nan, bits(torch.where(is_nan, 0, tensor))):
            total.update(part.cpu().numpy().tobytes())
    return total.hexdigest()[:8]


def golden_problem(field, name, device="cpu"):
    """A causal fp16 problem with padding, of one family."""
    mask = Mask(causal=True, seqlens_q=(11, 7), seqlens_k=(13, 10))
    family = {field: name, "device": device}
    return Problem(B=2, H=4, Hk=2, M=11, N=13, D=6, Dv=9, dtype="fp16", mask=mask, **family)


def bits(tensor):
    """The elements as integers of their size."""
    return tensor.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize])


def same_bits(left, right):
    """Whether the bits are equal, including signs of zeros and payloads of NaNs."""
    return torch.equal(bits(left), bits(right))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("field", "name"), list(GOLDEN))
def test_tensors_have_the_golden_hash_on_every_device(field, name, device):
    assert digest(golden_problem(field, name, device)) == GOLDEN[field, name]


def test_every_family_has_a_golden_hash():
    families = {"inputs": INPUTS, "dout": DOUT, "dirty": PADDING_VALUES}
    assert set(GOLDEN) == {(field, name) for field in families for name in families[field]}


@given(problems(dirty="zero"))
def test_every_element_is_finite(problem):
    assert all(tensor.isfinite().all() for tensor in make(problem))


@given(problems())
def test_tensors_have_the_shapes_and_dtype_of_the_problem(problem):
    q, k, v, dout = make(problem)
    B, H, Hk, M, N = problem.B, problem.H, problem.Hk, problem.M, problem.N
    assert q.shape == (B, H, M, problem.D)
    assert k.shape == (B, Hk, N, problem.D)
    assert v.shape == (B, Hk, N, problem.Dv)
    assert dout.shape == (B, H, M, problem.Dv)
    assert {x.dtype for x in (q, k, v, dout)} == {TORCH_DTYPES[problem.dtype]}


@given(problems())
def test_making_a_problem_twice_gives_the_same_bits(problem):
    first = make(problem)
    torch.manual_seed(1)
    assert all(same_bits(a, b) for a, b in zip(first, make(problem), strict=True))


@pytest.mark.parametrize("tensor", range(4))
@pytest.mark.parametrize("layout", [x for x in LAYOUTS if x != "expanded"])
def test_a_layout_changes_no_value(tensor, layout):
    layouts = tuple(layout if place == tensor else "bhsd" for place in range(4))
    plain = make(dataclasses.replace(LONG, layouts=("bhsd",) * 4))
    laid = make(dataclasses.replace(LONG, layouts=layouts))
    assert all(same_bits(a, b) for a, b in zip(plain, laid, strict=True))


@pytest.mark.parametrize("tensor", range(4))
@pytest.mark.parametrize("inputs", INPUTS)
def test_expanded_gives_all_heads_the_same_memory(tensor, inputs):
    layouts = tuple("expanded" if place == tensor else "bhsd" for place in range(4))
    laid = make(dataclasses.replace(LONG, inputs=inputs, layouts=layouts))
    assert laid[tensor].stride(1) == 0
    assert all(x.stride(1) != 0 for place, x in enumerate(laid) if place != tensor)


def test_overriding_layouts_change_no_bit():
    plain = make(PADDED)
    laid = make(PADDED, layouts=("strided", "transposed", "packed", "bhsd"))
    assert all(same_bits(a, b) for a, b in zip(plain, laid, strict=True))


def test_overriding_layouts_are_the_ones_made():
    layouts = ("strided", "transposed", "packed", "expanded")
    want = make(dataclasses.replace(PADDED, layouts=layouts))
    assert [x.stride() for x in make(PADDED, layouts=layouts)] == [x.stride() for x in want]


def test_heads_that_differ_are_refused_an_overriding_expanded_layout():
    with pytest.raises(ValueError, match=r"^values differ between heads"):
        make(LONG, layouts=("expanded", "bhsd", "bhsd", "bhsd"))


@pytest.mark.parametrize("around", [math.nan, 3.0])
def test_the_value_around_the_elements_can_be_chosen(around):
    for laid in make(dataclasses.replace(LONG, inputs="one_hot_v"), around=around):
        storage = torch.empty(0, dtype=laid.dtype).set_(laid.untyped_storage())
        assert same_bits(storage[:8], torch.full((8,), around))


def test_the_seed_changes_every_tensor():
    other = make(dataclasses.replace(LONG, seed=1))
    assert not any((a == b).all() for a, b in zip(make(LONG), other, strict=True))


def test_the_four_tensors_are_drawn_apart():
    square = Problem(M=8, N=8)
    made = make(square)
    for place, tensor in enumerate(made):
        assert not any(torch.equal(tensor, other) for other in made[place + 1 :])


@pytest.mark.parametrize("field", ["inputs", "dout", "dirty"])
def test_unknown_families_are_refused(field):
    with pytest.raises(ValueError, match=rf"^{field} is 'odd'; needs one of"):
        make(dataclasses.replace(PADDED, **{field: "odd"}))


def test_an_unknown_override_is_refused():
    with pytest.raises(ValueError, match=r"^dirty is 'odd'; needs one of"):
        make(PADDED, dirty="odd")


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_beyond_the_dtype_become_its_largest(dtype):
    smallest = 5e-324
    q = make(Problem(M=3, N=3, inputs="lse_high_6e4", dtype=dtype, sm_scale=smallest))[0]
    assert (q[..., 0] == torch.finfo(q.dtype).max).all()


@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sm_scale", [5e-324, 1e308])
def test_extreme_scales_give_finite_values(inputs, dtype, sm_scale):
    problem = dataclasses.replace(LONG, inputs=inputs, dtype=dtype, sm_scale=sm_scale)
    assert all(tensor.isfinite().all() for tensor in make(problem))


@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize(
    "sizes", [{"D": 1, "Dv": 1}, {"M": 2}, {"M": 0}, {"N": 0}, {"N": 1}, {"B": 0}, {"D": 2}]
)
def test_families_take_any_size(inputs, sizes):
    problem = dataclasses.replace(LONG, inputs=inputs, dtype="fp16", **sizes)
    assert all(tensor.isfinite().all() for tensor in make(problem))


@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize("sm_scale", [0.02, 2.0])
def test_no_value_is_cut_off_in_fp16_at_ordinary_scales(inputs, sm_scale):
    problem = dataclasses.replace(LONG, inputs=inputs, dtype="fp16", sm_scale=sm_scale)
    assert all(x.abs().max() < torch.finfo(x.dtype).max for x in make(problem))


@pytest.mark.parametrize(("shapes", "count"), [(2, 10), (9, 2)])
def test_biases_of_a_group_have_one_dtype_and_few_shapes(shapes, count):
    groups = grouped_biases(shapes=shapes)
    assert len(groups) == count
    assert sorted(itertools.chain(*groups)) == sorted(BIASES)
    for group in groups:
        families, axes = ({bias.split("/")[i] for bias in group} for i in (0, 1))
        assert len({BIAS_DTYPES.get(family) for family in families}) == 1
        assert len(axes) <= shapes
