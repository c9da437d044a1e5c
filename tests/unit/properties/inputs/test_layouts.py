import math

import pytest
import torch

from fa_verify.oracles.problem import LAYOUTS
from fa_verify.properties.inputs.layouts import lay_out, strides_of

SHAPE = (2, 3, 5, 7)
WIDE = (2, 3, 5, 64)  # rows that are larger than the margin
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
EMPTY = ((0, 3, 5, 7), (2, 3, 0, 7), (0, 1, 0, 1))
MARGIN = 128  # bytes
ALIGNMENT = 16  # bytes


def made(layout, shape=SHAPE, dtype=torch.float32):
    """Values of a shape, equal over heads if the layout requires it."""
    values = torch.arange(1, 1 + math.prod(shape), dtype=torch.float64).view(shape)
    if layout == "expanded":
        values = values[:, :1].expand(shape)
    return values.to(dtype)


def storage(tensor):
    return torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())


def places(tensor):
    """The indices of the tensor's elements in its storage, each once."""
    index = torch.arange(storage(tensor).numel())
    return index.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).unique()


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
        ("packed", (315, 7, 63, 1)),
        ("transposed", (105, 35, 1, 5)),
        ("strided", (420, 140, 28, 2)),
    ],
)
def test_a_layout_is_its_strides(layout, stride):
    assert lay_out(made(layout), layout).stride() == stride


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_no_two_elements_share_memory_but_those_of_equal_heads(layout, dtype):
    laid = lay_out(made(layout, dtype=dtype), layout)
    heads = 3 if layout == "expanded" else 1
    assert places(laid).numel() * heads == laid.numel()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("around", [math.nan, -math.inf, -8.0])
def test_the_storage_holds_the_chosen_value_wherever_no_element_is(layout, dtype, around):
    laid = lay_out(made(layout, dtype=dtype), layout, around)
    other = storage(laid).index_fill(0, places(laid), around)
    assert torch.equal(other, torch.full_like(other, around)) or other.isnan().all()
    assert (storage(laid)[places(laid)] > 0).all()


def test_around_the_elements_is_nan_unless_chosen():
    assert storage(lay_out(made("bhsd"), "bhsd"))[0].isnan()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_128_bytes_lie_before_the_first_and_after_the_last_element(layout, dtype):
    laid = lay_out(made(layout, dtype=dtype), layout)
    own = places(laid)
    assert own[0] * dtype.itemsize >= MARGIN
    assert (storage(laid).numel() - 1 - own[-1]) * dtype.itemsize >= MARGIN


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_first_element_is_aligned_or_one_element_off(layout, dtype):
    laid = lay_out(made(layout, dtype=dtype), layout)
    off = dtype.itemsize if layout == "offset" else 0
    assert laid.data_ptr() % ALIGNMENT == off


def test_whole_rows_lie_around_every_head_of_a_padded_tensor():
    laid = lay_out(made("padded", WIDE), "padded", around=0.0)
    rows = laid.as_strided((2, 3, 9, 72), laid.stride(), laid.storage_offset() - 2 * 72)
    assert not rows[:, :, [0, 1, -2, -1]].any()
    assert not rows[..., 64:].any()


def test_packed_is_the_middle_of_three():
    laid = lay_out(made("packed", WIDE), "packed", around=0.0)
    third = 3 * 64
    stride = (5 * 3 * third, 3 * third, third, 64, 1)
    packed = laid.as_strided((2, 5, 3, 3, 64), stride, laid.storage_offset() - third)
    assert torch.equal(packed[:, :, 1].transpose(1, 2), laid)
    assert not packed[:, :, 0::2].any()


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


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides_are_those_of_the_tensor_that_is_laid_out(layout):
    values = torch.zeros(2, 3, 4, 5)
    assert strides_of(layout, *values.shape) == lay_out(values, layout).stride()
