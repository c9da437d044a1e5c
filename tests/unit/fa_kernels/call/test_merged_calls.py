"""The public merge: arguments and errors, sequences of parts, autograd, operators."""

from __future__ import annotations

import builtins
import itertools
import os

import pytest
import torch

from fa_verify.oracles.calls.merge import MergeProblem
from fa_verify.oracles.reference.merging import merged
from fa_verify.properties.inputs.states import make_states

pytest.importorskip("triton")

from fa_kernels import combine_attention_states, operators
from fa_kernels.launch.combine import launch_combine, launch_combine_backward
from fa_kernels.merging import MAX_MERGED_DIM
from fa_kernels.runtime import allocation
from tests.unit.fa_kernels.launch.test_launch import lazily


def states(device, parts=(3, 0, 5), dtype="fp32", **fields):
    fields = {"B": 2, "H": 2, "M": 3, "Dv": 5, "hidden": 3, **fields}
    return make_states(MergeProblem(parts=parts, dtype=dtype, device=device, **fields))


def ones(*shape, dtype=torch.float32):
    return torch.ones(shape, dtype=dtype)


OUTS, LSES = ones(3, 2, 4, 5, 8), ones(3, 2, 4, 5)
# The changed arguments, the error, and its message.
BAD = {
    "outs that are a number": ({"outs": 1.0}, TypeError, "outs is float; needs a torch.Tensor"),
    "outs that are a text": ({"outs": "ab"}, TypeError, "outs is str; needs a torch.Tensor"),
    "no outs": ({"outs": []}, ValueError, "outs is an empty sequence; needs .* at least one"),
    "no lses": ({"lses": ()}, ValueError, "lses is an empty sequence"),
    "a part that is no tensor": (
        {"lses": [LSES[0], 1.0, LSES[2]]}, TypeError, r"lses\[1\] is float; needs a torch.Tensor"
    ),
    "parts of two shapes": (
        {"outs": [OUTS[0], OUTS[1, :1], OUTS[2]]}, ValueError,
        r"outs\[1\] has shape \(1, 4, 5, 8\); needs that of part 0, \(2, 4, 5, 8\)",
    ),
    "parts of two dtypes": (
        {"outs": [OUTS[0], OUTS[1], OUTS[2].half()]}, ValueError,
        r"outs\[2\] has dtype torch.float16",
    ),
    "outs without an axis of parts": (
        {"outs": OUTS[0]}, ValueError, r"outs has shape .*; needs the axes \(P, B, H, M, Dv\)"
    ),
    "lses with columns": (
        {"lses": OUTS}, ValueError, r"lses has shape .*; needs the axes \(P, B, H, M\)"
    ),
    "a number of parts that differs": (
        {"lses": LSES[:2]}, ValueError,
        r"lses has shape \(2, 2, 4, 5\); needs that of outs, \(3, 2, 4, 5\)",
    ),
    "outs of ints": ({"outs": OUTS.int()}, NotImplementedError, "outs has dtype torch.int32"),
    "lses in half precision": (
        {"lses": LSES.half()}, ValueError, "lses has dtype torch.float16; needs torch.float32"
    ),
    "lses of float64 outs in float32": (
        {"outs": OUTS.double()}, ValueError, "lses has dtype torch.float32; needs torch.float64"
    ),
    "no columns": ({"outs": OUTS[..., :0]}, ValueError, "outs has head_dim 0; needs at least 1"),
    "too many columns": (
        {"outs": OUTS[..., :1].expand(-1, -1, -1, -1, MAX_MERGED_DIM + 1)}, NotImplementedError,
        "outs has head_dim 513; supported are 1 to 512",
    ),
    "sparse outs": (
        {"outs": OUTS.to_sparse()}, NotImplementedError, "outs has layout torch.sparse"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_refused_by_name(name, device):
    changed, error, message = BAD[name]
    given = {"outs": OUTS, "lses": LSES, **changed}
    given = {k: x.to(device) if isinstance(x, torch.Tensor) else x for k, x in given.items()}
    with pytest.raises(error, match=f"^{message}"):
        combine_attention_states(**given)


def test_a_device_without_kernels_is_refused_by_name(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(NotImplementedError, match=r"^outs is on cpu; needs a CUDA device"):
        combine_attention_states(OUTS, LSES)


def test_a_sequence_of_parts_gives_what_a_tensor_gives(device):
    outs, lses, dout, dlse = states(device)
    of_tensor = [x.clone().requires_grad_() for x in (outs, lses)]
    of_parts = [[y.clone().requires_grad_() for y in x] for x in (outs, lses)]
    whole = combine_attention_states(*of_tensor)
    parts = combine_attention_states(tuple(of_parts[0]), of_parts[1])
    losses = [dout.nan_to_num(), dlse.nan_to_num()]
    for x, y in zip(whole, parts, strict=True):
        assert torch.equal(x, y)
    want = torch.autograd.grad(whole, of_tensor, losses)
    got = torch.autograd.grad(parts, [*itertools.chain(*of_parts)], losses)
    assert torch.equal(torch.stack(got[:3]), want[0])
    assert torch.equal(torch.stack(got[3:]), want[1])


def test_dtypes_and_strides_of_the_results(device):
    for dtype in ("fp16", "bf16", "fp32", "fp64"):
        outs, lses, *_ = states(device, dtype=dtype, layout="parts inside")
        out, lse = combine_attention_states(outs, lses)
        assert (out.dtype, lse.dtype) == (outs.dtype, lses.dtype)
        assert out.is_contiguous()
        assert lse.is_contiguous()


@pytest.mark.parametrize("of", ["out", "lse"])
@pytest.mark.parametrize("wanted", ["outs", "lses"])
def test_losses_of_one_result_and_gradients_of_one_argument(of, wanted, device):
    given = states(device, dtype="fp64")
    outs, lses, dout, dlse = given
    leaf = {"outs": outs, "lses": lses}[wanted].clone().requires_grad_()
    results = combine_attention_states(**{"outs": outs, "lses": lses, wanted: leaf})
    at = ("out", "lse").index(of)
    (got,) = torch.autograd.grad(results[at], leaf, (dout, dlse)[at].nan_to_num())
    zeros = dout.nan_to_num() if of == "out" else torch.zeros_like(dout)
    of_lse = dlse.nan_to_num() if of == "lse" else torch.zeros_like(dlse)
    want = getattr(merged(outs, lses, zeros, of_lse), f"d{wanted}")
    assert (got - want).abs().max() <= 1e-13 * want.abs().max() + 1e-300


def test_no_gradient_is_recorded_where_none_is_asked_for(device):
    outs, lses, *_ = states(device)
    assert not combine_attention_states(outs, lses)[0].requires_grad
    with torch.no_grad():
        assert not combine_attention_states(outs.requires_grad_(), lses)[0].requires_grad


def test_inputs_changed_in_place_before_the_backward_are_an_error(device):
    outs, lses, *_ = states(device)
    out, _ = combine_attention_states(outs.requires_grad_(), lses)
    lses.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_second_derivatives_are_refused_by_name(device):
    outs, lses, *_ = states(device)
    out, lse = combine_attention_states(outs.requires_grad_(), lses.requires_grad_())
    loss = out.pow(2).sum() + lse.exp().sum()
    gradient = torch.autograd.grad(loss, lses, create_graph=True)[0]
    with pytest.raises(
        NotImplementedError, match="combine_attention_states is differentiated twice"
    ):
        gradient.sum().backward()


def test_forward_mode_and_torch_func_are_refused_by_name(device):
    outs, lses, *_ = states(device)
    with pytest.raises(NotImplementedError, match="combine_attention_states is differentiated by"):
        torch.func.grad(lambda x: combine_attention_states(x, lses)[0].sum())(outs)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(lses, torch.ones_like(lses))
        with pytest.raises(
            NotImplementedError, match="combine_attention_states is differentiated in"
        ):
            combine_attention_states(outs, dual)


@pytest.mark.parametrize("dtype", ["fp16", "fp64"])
@pytest.mark.parametrize("layout", ["parts", "heads inside", "shared"])
def test_the_operators_pass_opcheck(layout, dtype, device):
    outs, lses, dout, dlse = states(device, dtype=dtype, layout=layout, hidden=0, parts=(3, 2))
    leaves = [x.detach().requires_grad_() for x in (outs, lses)]
    torch.library.opcheck(operators.combine, leaves)
    checks = ("test_schema", "test_faketensor")
    for given in ((dout, dlse), (None, dlse), (dout, None)):
        torch.library.opcheck(operators.combine_backward, (outs, lses, *given), test_utils=checks)


def test_a_merge_inside_autocast_keeps_its_dtypes(device):
    outs, lses, *_ = states(device)
    with torch.autocast(device, torch.bfloat16):
        out, lse = combine_attention_states(outs, lses)
    assert (out.dtype, lse.dtype) == (torch.float32, torch.float32)


# More rows than 2**31 in all parts together, and in each part.
@pytest.mark.parametrize("heads", [2**10 + 1, 2**11 + 1])
def test_rows_past_2_to_the_31_are_merged_in_place(monkeypatch, heads):
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("a GPU runs all of the programs, on memory that is there")
    from triton.runtime import interpreter

    parts, M = 3, 2**20

    def last(*bounds):
        """``range``, reduced to the last program of the grid."""
        steps = builtins.range(*bounds)
        return steps[-1:] if len(steps) > heads else steps

    outs, lses, dout, dlse = states("cpu", parts=(1, 2, 3), B=1, H=1, M=1, Dv=2, hidden=0)

    def run(heads: int, M: int) -> list[torch.Tensor]:
        """The last rows of the last head."""
        of = (heads, M)
        given = (
            outs.expand(parts, 1, *of, 2), lses.expand(parts, 1, *of), dout.expand(1, *of, 2),
            dlse.expand(1, *of),
        )  # fmt: skip
        results = *launch_combine(*given[:2]), *launch_combine_backward(*given)
        ends = [x[0, -1, -4:] for x in results[:2]] + [x[:, 0, -1, -4:] for x in results[2:]]
        return [x.clone() for x in ends]

    want = run(1, 4)
    monkeypatch.setattr(interpreter, "range", last, raising=False)
    monkeypatch.setattr(allocation, "empty", lazily)
    assert parts * heads * M > 2**31
    for got, expected in zip(run(heads, M), want, strict=True):
        assert torch.equal(got, expected)
        assert got.any()


def test_lses_on_another_device_are_refused_by_name(device):
    with pytest.raises(ValueError, match=r"^lses is on meta; needs the device of outs, "):
        combine_attention_states(OUTS.to(device), LSES.to("meta"))
