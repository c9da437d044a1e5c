import math

import pytest
import torch

from oracles.problem import LAYOUTS
from properties.layouts import lay_out

SHAPE = (2, 3, 5, 7)
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
EMPTY = ((0, 3, 5, 7), (2, 3, 0, 7), (0, 1, 0, 1))


def made(layout, shape=SHAPE, dtype=torch.float32):
    """Values of a shape, equal over heads where the layout asks for it."""
    values = torch.arange(1, 1 + math.prod(shape), dtype=torch.float64).view(shape)
    if layout == "expanded":
        values = values[:, :1].expand(shape)
    return values.to(dtype)


def storage(tensor):
    return torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_dtype_and_shape_stay(layout, dtype):
    values = made(layout, dtype=dtype)
    assert torch.equal(lay_out(values, layout), values)
    assert lay_out(values, layout).dtype == dtype


@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_are_copied(layout):
    values = made(layout).clone()
    laid = lay_out(values, layout)
    values.zero_()
    assert (laid != 0).all()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", EMPTY)
def test_empty_tensors_keep_their_shape(layout, shape):
    assert lay_out(made(layout, shape), layout).shape == shape


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides_of_the_values_do_not_matter(layout):
    values = made(layout)
    turned = values.transpose(1, 3).contiguous().transpose(1, 3)
    assert lay_out(turned, layout).stride() == lay_out(values, layout).stride()


@pytest.mark.parametrize(
    ("layout", "stride"),
    [
        ("bhsd", (105, 35, 7, 1)),
        ("bshd", (105, 7, 21, 1)),
        ("padded", (405, 135, 15, 1)),
        ("offset", (105, 35, 7, 1)),
        ("expanded", (35, 0, 7, 1)),
    ],
)
def test_a_layout_is_its_strides(layout, stride):
    assert lay_out(made(layout), layout).stride() == stride


def test_offset_begins_one_element_into_its_storage():
    assert lay_out(made("offset"), "offset").storage_offset() == 1


@pytest.mark.parametrize("layout", ["padded", "offset"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_everything_around_the_elements_is_nan(layout, dtype):
    laid = lay_out(made(layout, dtype=dtype), layout)
    around = storage(laid)
    assert not laid.isnan().any()
    assert around.isnan().sum() == around.numel() - laid.numel()
    assert around[0].isnan()
    assert around[-1].isnan()


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_dense_layouts_have_nothing_around_them(layout):
    assert storage(lay_out(made(layout), layout)).numel() == math.prod(SHAPE)


def test_expanded_of_one_head_is_contiguous():
    values = made("expanded", (2, 1, 5, 7))
    assert lay_out(values, "expanded").is_contiguous()


def test_expanded_takes_equal_nans():
    values = torch.full(SHAPE, math.nan)
    assert lay_out(values, "expanded").isnan().all()


def test_expanded_refuses_heads_that_differ():
    with pytest.raises(ValueError, match=r"^values differ between heads"):
        lay_out(made("bhsd"), "expanded")


def test_unknown_layouts_are_refused():
    with pytest.raises(ValueError, match=r"^layout is 'sbhd'; needs one of"):
        lay_out(made("bhsd"), "sbhd")
