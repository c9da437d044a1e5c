"""The public call flash_attention: sizes of 0, autograd, lengths, defaults, dtypes, memory."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import pytest
import torch

from fa_verify import assert_attention_close
from fa_verify.oracles.bounds.error_model import judge
from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.outputs import OUTPUTS, Numerics, Outputs
from fa_verify.oracles.reference.torch_reference import attention
from fa_verify.oracles.stream import normal

pytest.importorskip("triton")

from fa_kernels import CONFIGS, flash_attention
from fa_kernels.launch import portable
from fa_kernels.launch.sizes import ROW_PADDING
from fa_kernels.runtime import allocation

B, H, HK, M, N, D, DV = 2, 2, 1, 17, 21, 8, 6
CONFIG = "16x16"


class Inputs(NamedTuple):
    """q (B,H,M,D), k (B,Hk,N,D), v (B,Hk,N,Dv), dout (B,H,M,Dv)."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor


def drawn(device: str, dtype: torch.dtype = torch.float32, **sizes: int) -> Inputs:
    """Normal values, in the default sizes unless given."""
    size = {"B": B, "H": H, "Hk": HK, "M": M, "N": N, "D": D, "Dv": DV, **sizes}
    shapes = {"q": "B H M D", "k": "B Hk N D", "v": "B Hk N Dv", "dout": "B H M Dv"}
    return Inputs(
        *(
            normal(0, name, [size[axis] for axis in axes.split()]).to(dtype).to(device)
            for name, axes in shapes.items()
        )
    )


def called(inputs: Inputs, **arguments: object) -> Outputs[torch.Tensor]:
    """All five outputs of flash_attention."""
    leaves = [x.detach().requires_grad_() for x in inputs[:3]]
    out, lse = flash_attention(*leaves, return_lse=True, **{"config": CONFIG, **arguments})
    gradients = torch.autograd.grad(out, leaves, inputs.dout)
    return Outputs(out.detach(), lse, *gradients)


@lru_cache(maxsize=1)
def plain(device: str) -> Outputs[torch.Tensor]:
    """The outputs of the default inputs, without a mask."""
    return called(drawn(device))


def same_bits(got: Outputs[torch.Tensor], want: Outputs[torch.Tensor]) -> list[str]:
    """The outputs that are equal in every element."""
    return [name for name in OUTPUTS if torch.equal(getattr(got, name), getattr(want, name))]


@pytest.fixture
def allocated(monkeypatch) -> list[torch.Tensor]:
    """The allocations of fa_kernels in order, filled with NaN before the kernels run."""
    made = []
    empty = allocation.empty

    def record(*args: object, **kwargs: object) -> torch.Tensor:
        made.append(empty(*args, **kwargs).fill_(math.nan))
        return made[-1]

    monkeypatch.setattr(allocation, "empty", record)
    return made


NOTHING_VISIBLE = {
    "B_0": ({"B": 0}, {}),
    "M_0": ({"M": 0}, {}),
    "N_0": ({"N": 0}, {}),
    "M_0_N_0": ({"M": 0, "N": 0}, {}),
    "no_rows": ({}, {"seqlens_q": (0, 0)}),
    "no_keys": ({}, {"seqlens_k": (0, 0)}),
    "no_lengths": ({}, {"seqlens_q": (0, 0), "seqlens_k": (0, 0)}),
    "rows_where_no_keys": ({}, {"seqlens_q": (0, M), "seqlens_k": (N, 0)}),
    "B_0_with_lengths": ({"B": 0}, {"seqlens_q": (), "seqlens_k": ()}),
}


@pytest.mark.parametrize("case", NOTHING_VISIBLE.values(), ids=NOTHING_VISIBLE)
def test_where_nothing_is_visible_every_output_is_written_with_its_exact_value(
    case, device, allocated
):
    sizes, lengths = case
    inputs = drawn(device, **sizes)
    got = called(inputs, causal=True, **lengths)
    assert allocated
    assert (got.lse == -math.inf).all()
    for name, like in zip(("out", "dq", "dk", "dv"), (3, 0, 1, 2), strict=True):
        assert torch.equal(getattr(got, name), torch.zeros_like(inputs[like])), name


LOSSES = {"out": (True, False), "lse": (False, True), "both": (True, True)}


@pytest.mark.parametrize("losses", LOSSES.values(), ids=LOSSES)
def test_a_loss_may_be_on_out_or_lse_or_both(losses, device):
    inputs, mask = drawn(device, torch.float64), Mask(causal=True, seqlens_q=(M, 3))
    dlse = normal(0, "dlse", (B, H, M)).to(device)
    leaves = [x.detach().requires_grad_() for x in inputs[:3]]
    of = flash_attention(*leaves, mask=mask, sm_scale=0.3, return_lse=True, config=CONFIG)
    chosen = [(x, g) for x, g, is_in in zip(of, (inputs.dout, dlse), losses, strict=True) if is_in]
    outputs, gradients = zip(*chosen, strict=True)
    got = torch.autograd.grad(outputs, leaves, gradients, materialize_grads=True)
    dout = inputs.dout * losses[0]
    call = {"mask": mask, "sm_scale": 0.3}
    want = attention(*inputs[:3], dout, dlse * losses[1], **call)
    judged = judge(
        *inputs[:3], dout, dlse * losses[1], **call, in_dtype="fp64", numerics=Numerics()
    )
    for gradient, true, bound in zip(got, want[2:], judged.bound[2:], strict=True):
        assert ((gradient - true).abs() <= bound).all()
    assert not losses[1] or not torch.equal(want.dq, attention(*inputs, **call).dq)


@pytest.mark.parametrize("shape", ["scalar", "heads", "rows", "transposed"])
def test_a_gradient_of_lse_may_have_any_strides(shape, device):
    inputs = drawn(device)
    values = normal(0, "dlse", (B, H, M)).to(torch.float32).to(device)
    dlse = {
        "scalar": values[:1, :1, :1].expand(B, H, M),
        "heads": values[:, :1].expand(B, H, M),
        "rows": values[:, :, :1].expand(B, H, M),
        "transposed": values.mT.contiguous().mT,
    }[shape]
    found = []
    for gradient in (dlse, dlse.contiguous()):
        leaves = [x.detach().requires_grad_() for x in inputs[:3]]
        of = flash_attention(*leaves, return_lse=True, config=CONFIG)
        found.append(torch.autograd.grad(of, leaves, (inputs.dout, gradient)))
    assert all(map(torch.equal, *found))


def test_a_gradient_of_lse_is_ignored_for_rows_without_a_visible_key(device):
    inputs, found = drawn(device), []
    for value in (1.0, math.nan):
        dlse = torch.ones(B, H, M, device=device)
        dlse[:, :, 2:] = value
        leaves = [x.detach().requires_grad_() for x in inputs[:3]]
        of = flash_attention(*leaves, seqlens_q=(2, 2), return_lse=True, config=CONFIG)
        found.append(torch.autograd.grad(of, leaves, (inputs.dout, dlse)))
    assert all(map(torch.equal, *found))


def test_a_second_derivative_by_way_of_lse_is_refused(device):
    q, k, v, _ = drawn(device)
    _, lse = flash_attention(q.requires_grad_(), k, v, return_lse=True, config=CONFIG)
    (dq,) = torch.autograd.grad(lse.sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match=r"^flash_attention is differentiated twice;"):
        (q.sum() + dq.square().sum()).backward()


@pytest.mark.parametrize("power", [1, 2], ids=["constant_dout", "dout_of_out"])
def test_a_second_derivative_is_refused(power, device):
    q, k, v, _ = drawn(device)
    out = flash_attention(q.requires_grad_(), k, v, config=CONFIG)
    (dq,) = torch.autograd.grad((out**power).sum(), q, create_graph=True)
    # A gradient penalty beside another loss term must not be dropped silently.
    loss = q.sum() + dq.square().sum()
    with pytest.raises(NotImplementedError, match=r"^flash_attention is differentiated twice;"):
        loss.backward()


SUBSETS = [s for size in (1, 2) for s in itertools.combinations("qkv", size)]


@pytest.mark.parametrize("wanted", SUBSETS, ids="".join)
def test_any_of_q_k_v_can_be_differentiated_without_the_others(wanted, device):
    inputs, want = drawn(device), plain(device)
    leaves = {name: getattr(inputs, name).clone() for name in "qkv"}
    for name in wanted:
        leaves[name].requires_grad_()
    flash_attention(*leaves.values(), config=CONFIG).backward(inputs.dout)
    for name, x in leaves.items():
        if name in wanted:
            assert torch.equal(x.grad, getattr(want, f"d{name}"))
        else:
            assert x.grad is None


@pytest.mark.parametrize("wanted", [*SUBSETS, ("q", "k", "v")], ids="".join)
def test_the_backward_computes_only_needed_gradients(wanted, device, monkeypatch, allocated):
    ran = []
    for name in ("dq", "dkdv"):
        kernel = getattr(portable, f"{name}_kernel")
        monkeypatch.setattr(portable, f"{name}_kernel", Recorded(kernel, name, ran))
    inputs = drawn(device)
    leaves = [getattr(inputs, x).clone().requires_grad_(x in wanted) for x in "qkv"]
    out = flash_attention(*leaves, config=CONFIG)
    allocated.clear()
    out.backward(inputs.dout)
    of_keys = "k" in wanted or "v" in wanted
    assert ran == ["dkdv"] * of_keys + ["dq"] * ("q" in wanted)
    # Without the two numbers per row and tensors without elements.
    made = [x for x in allocated if x.numel()]
    assert len(made) == 2 + 2 * of_keys + ("q" in wanted)


class Recorded:
    """A kernel that records its launches."""

    def __init__(self, kernel, name, ran):
        self.kernel, self.name, self.ran = kernel, name, ran

    def __getitem__(self, grid):
        self.ran.append(self.name)
        return self.kernel[grid]


def test_without_a_graph_only_the_forward_runs(device, allocated):
    q, k, v, _ = drawn(device)
    out = flash_attention(q, k, v, config=CONFIG)
    assert not out.requires_grad
    assert len(allocated) == 2


def test_an_expanded_dout_equals_a_contiguous_one(device):
    inputs = drawn(device)
    want = called(inputs._replace(dout=torch.ones_like(inputs.dout)))
    leaves = [x.requires_grad_() for x in inputs[:3]]
    flash_attention(*leaves, config=CONFIG).sum().backward()
    got = want._replace(dq=leaves[0].grad, dk=leaves[1].grad, dv=leaves[2].grad)
    assert same_bits(got, want) == list(OUTPUTS)


def test_lengths_changed_before_the_backward_are_refused(device):
    q, k, v, dout = drawn(device)
    lengths = torch.tensor([3, 5], dtype=torch.int32, device=device)
    out = flash_attention(q.requires_grad_(), k, v, seqlens_k=lengths, config=CONFIG)
    lengths += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward(dout)


def strided(x: torch.Tensor) -> torch.Tensor:
    """The same values in the layout (B, M, H, D) of a projection's output."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def test_no_input_is_copied(device, monkeypatch):
    inputs = Inputs(*map(strided, drawn(device)))
    leaves = [x.requires_grad_() for x in inputs[:3]]
    copied = []

    def recorded(method: str) -> Callable[..., torch.Tensor]:
        original = getattr(torch.Tensor, method)

        def record(self: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
            if self.ndim > 1:
                copied.append((method, tuple(self.shape)))
            return original(self, *args, **kwargs)

        return record

    for method in ("contiguous", "clone", "reshape", "to", "copy_", "repeat"):
        monkeypatch.setattr(torch.Tensor, method, recorded(method))
    lengths = torch.tensor([[3, 0], [5, 0]], dtype=torch.int32, device=device)[:, 0]
    flash_attention(*leaves, seqlens_k=lengths, config=CONFIG).backward(inputs.dout)
    assert copied == []


LENGTHS = [((17, 5), (3, 21)), ((0, 16), (21, 0))]


@pytest.mark.parametrize(("rows", "keys"), LENGTHS)
def test_lengths_in_a_tensor_equal_lengths_in_a_sequence(rows, keys, device):
    inputs = drawn(device)
    want = called(inputs, causal=True, seqlens_q=rows, seqlens_k=keys)
    tensors = [torch.tensor(x, dtype=torch.int32, device=device) for x in (rows, keys)]
    got = called(inputs, causal=True, seqlens_q=tensors[0], seqlens_k=tensors[1])
    assert same_bits(got, want) == list(OUTPUTS)


CLAMPED = [
    ({"seqlens_q": (M + 1, 2**31 - 1)}, {"seqlens_q": (M, M)}),
    ({"seqlens_k": (N + 1, 2**31 - 1)}, {"seqlens_k": (N, N)}),
    ({"seqlens_q": (-1, -(2**31))}, {"seqlens_q": (0, 0)}),
    ({"seqlens_k": (-1, -(2**31))}, {"seqlens_k": (0, 0)}),
]


@pytest.mark.parametrize(("given", "meant"), CLAMPED)
def test_lengths_in_a_tensor_are_clamped_to_the_tensors(given, meant, device):
    inputs = drawn(device)
    tensors = {name: torch.tensor(x, dtype=torch.int32, device=device) for name, x in given.items()}
    got, want = (called(inputs, causal=True, **lengths) for lengths in (tensors, meant))
    assert same_bits(got, want) == list(OUTPUTS)


def test_lengths_in_a_strided_tensor_are_read_with_their_stride(device):
    inputs = drawn(device)
    want = called(inputs, seqlens_k=(3, 14))
    pairs = torch.tensor([[3, 1], [14, 1]], dtype=torch.int32, device=device)
    assert same_bits(called(inputs, seqlens_k=pairs[:, 0]), want) == list(OUTPUTS)


def test_lengths_first_seen_in_inference_mode_serve_training(device):
    inputs = drawn(device, M=13, N=11)
    lengths = {"seqlens_q": (12, 7), "seqlens_k": (2, 11)}
    with torch.inference_mode():
        flash_attention(*inputs[:3], config=CONFIG, **lengths)
    got = called(inputs, **lengths)
    tensors = {
        name: torch.tensor(x, dtype=torch.int32, device=device) for name, x in lengths.items()
    }
    assert same_bits(got, called(inputs, **tensors)) == list(OUTPUTS)


def test_the_default_scale_is_that_of_the_true_head_dim(device):
    inputs = drawn(device, D=24)
    assert same_bits(called(inputs), called(inputs, sm_scale=24**-0.5)) == list(OUTPUTS)


MASKS = [
    (Mask(causal=True), {"causal": True}),
    (Mask(window_left=3, window_right=1), {"window_size": (3, 1)}),
    (
        Mask(causal=True, window_left=4, seqlens_q=(17, 5), seqlens_k=(9, 21)),
        {"causal": True, "window_size": (4, None), "seqlens_q": (17, 5), "seqlens_k": (9, 21)},
    ),
]


@pytest.mark.parametrize(("mask", "arguments"), MASKS)
def test_a_mask_object_equals_its_keyword_arguments(mask, arguments, device):
    inputs = drawn(device)
    assert same_bits(called(inputs, mask=mask), called(inputs, **arguments)) == list(OUTPUTS)


@pytest.mark.parametrize("config", CONFIGS)
def test_every_named_config_is_within_the_bound(config, device):
    inputs = drawn(device, M=33, N=70, B=1, H=2, Hk=1)
    mask = Mask(causal=True, window_left=40)
    got = called(inputs, mask=mask, config=config)
    # Only configurations named for it use TF32.
    dots, splits = "tf32" if "tf32" in config else "ieee", CONFIGS[config].splits or 1
    assert_attention_close(
        **inputs._asdict(), **got._asdict(), mask=mask, numerics=Numerics(dots=dots, splits=splits)
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_outputs_have_the_dtype_of_q_and_lse_that_of_the_accumulator(dtype, device):
    got = called(drawn(device, dtype))
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert [x.dtype for x in got] == [dtype, wide, dtype, dtype, dtype]


def test_outputs_and_gradients_are_contiguous(device):
    got = called(Inputs(*map(strided, drawn(device))))
    assert [name for name, x in zip(OUTPUTS, got, strict=True) if not x.is_contiguous()] == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_memory_is_that_of_the_outputs_and_three_numbers_a_row(dtype, device, allocated):
    inputs = drawn(device, dtype)
    called(inputs, causal=True)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    q, k, v, dout = (x.shape for x in inputs)
    # lse has M rows; lse2 and delta have whole tiles of rows.
    scratch = torch.Size((*q[:2], -(-q[2] // ROW_PADDING) * ROW_PADDING))
    rows = [(q[:3], wide), (scratch, wide), (scratch, wide)]
    want = [(dout, dtype), *rows, (q, dtype), (k, dtype), (v, dtype)]
    # A tensor without elements replaces the gradient of a bias.
    found = [(x.shape, x.dtype) for x in allocated if x.numel()]
    assert sorted(found, key=str) == sorted(want, key=str)


def test_lse_is_not_returned_unless_asked_for(device):
    q, k, v, _ = drawn(device)
    out = flash_attention(q, k, v, config=CONFIG)
    assert isinstance(out, torch.Tensor)
