"""The PyTorch operators of flash_attention: fakes, derivatives, copies of the package."""

from __future__ import annotations

import importlib
import itertools

import pytest
import torch
from torch.autograd import forward_ad

from fa_verify.oracles.masks.prefix_lm import PrefixLM
from fa_verify.oracles.problem import LAYOUTS
from fa_verify.oracles.stream import normal
from fa_verify.properties.inputs.layouts import lay_out

pytest.importorskip("triton")

from fa_kernels import flash_attention, operators
from fa_kernels.validation.arguments import Request, check
from fa_kernels.validation.opaque_handles import token_of
from tests.mutation.catalogue.copies import PACKAGE, load, sources_of

SIZES = {"B": 2, "H": 2, "Hk": 1, "M": 5, "N": 7, "D": 8, "Dv": 6}
SHAPES = {"q": "B H M D", "k": "B Hk N D", "v": "B Hk N Dv", "dout": "B H M Dv"}
CONFIG = "16x16"
SUBSETS = [x for size in (1, 2, 3) for x in itertools.combinations("qkv", size)]
subsets = pytest.mark.parametrize("wanted", SUBSETS, ids="".join)
# The same layout for all tensors, and a different layout for each.
STORED = {**{x: (x,) * 4 for x in LAYOUTS}, "mixed": ("bshd", "padded", "transposed", "strided")}
stored = pytest.mark.parametrize("layouts", STORED.values(), ids=STORED)


def drawn(device, dtype=torch.float32, layouts=STORED["bhsd"], **sizes):
    """q, k, v, dout; all heads of q are equal, so that it can be expanded."""
    made = []
    for (name, axes), layout in zip(SHAPES.items(), layouts, strict=True):
        shape = [{**SIZES, **sizes}[axis] for axis in axes.split()]
        values = normal(0, name, (shape[0], 1, *shape[2:])).expand(shape)
        made.append(lay_out(values.to(dtype), layout).to(device))
    return made


NOT_GIVEN = {
    "mask": None,
    "causal": False,
    "window_size": (None, None),
    "seqlens_q": None,
    "seqlens_k": None,
    "sm_scale": None,
    "deterministic": True,
}


def request(tensors, **arguments):
    return check(*tensors[:3], **{**NOT_GIVEN, "config": CONFIG, **arguments})


def form(x):
    return x.dtype, x.device, x.shape, x.stride()


def all_forms(tensors, wanted, asked):
    """Shape, strides, dtype and device of every tensor that the operators return."""
    q, k, v, dout = tensors
    out, lse = operators.forward(q, k, v, *asked)
    saved = (q, k, v, out, lse, dout, None)
    gradients = operators.backward(*saved, *(x in wanted for x in "qkv"), *asked)
    return [form(x) for x in (out, lse, *gradients)]


def assert_fakes_have_the_forms_of_real_ones(tensors, wanted=("q", "k", "v")):
    asked = request(tensors)
    real = all_forms(tensors, wanted, asked)
    with torch._subclasses.FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x) for x in tensors]
        assert all_forms(fakes, wanted, asked) == real


@stored
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_fakes_have_the_forms_of_real_tensors_for_any_strides(layouts, dtype, device):
    assert_fakes_have_the_forms_of_real_ones(drawn(device, dtype, layouts))


@pytest.mark.parametrize("sizes", [{"B": 0}, {"M": 0}, {"N": 0}, {"M": 0, "N": 0}], ids=str)
@pytest.mark.parametrize("layout", ["bhsd", "bshd", "transposed"])
def test_fakes_have_the_forms_of_real_tensors_without_elements(layout, sizes, device):
    assert_fakes_have_the_forms_of_real_ones(drawn(device, layouts=(layout,) * 4, **sizes))


@subsets
def test_fakes_have_the_forms_of_real_gradients_that_are_needed(wanted, device):
    assert_fakes_have_the_forms_of_real_ones(drawn(device), wanted)


@subsets
def test_unneeded_gradients_have_no_elements(wanted, device):
    tensors = drawn(device, torch.float64)
    forms = all_forms(tensors, wanted, request(tensors))[2:]
    assert {x[:2] for x in forms} == {(torch.float64, tensors[0].device)}
    *forms, of_bias, of_sinks = forms
    assert of_bias[2] == of_sinks[2] == (0,)
    for (_, _, shape, _), x, name in zip(forms, tensors[:3], "qkv", strict=True):
        assert shape == (x.shape if name in wanted else (0,))


def test_fakes_stay_on_their_device():
    with torch._subclasses.FakeTensorMode():
        tensors = [torch.empty(2, 1, 5, 8, device="cuda") for _ in range(4)]
        forms = all_forms(tensors, ("q",), request(tensors))
    assert {where.type for _, where, _, _ in forms} == {"cuda"}


def test_a_call_of_fakes_runs_nothing(device, monkeypatch):
    monkeypatch.delattr("fa_kernels.launch.portable.forward_kernel")
    with torch._subclasses.FakeTensorMode() as mode:
        q, k, v, dout = (mode.from_tensor(x) for x in drawn(device))
        assert flash_attention(q, k, v, config=CONFIG).shape == dout.shape


def leaves_of(tensors):
    return [x.detach().requires_grad_() for x in tensors[:3]]


def test_two_backwards_over_one_graph_have_the_same_bits(device):
    tensors = drawn(device, layouts=STORED["mixed"])
    leaves = leaves_of(tensors)
    of = flash_attention(*leaves, causal=True, return_lse=True, config=CONFIG)
    gradients = (tensors[3], of[1].detach().sin())
    first, second = (
        torch.autograd.grad(of, leaves, gradients, retain_graph=True) for _ in range(2)
    )
    assert all(map(torch.equal, first, second))
    summed = torch.autograd.grad(of, leaves, gradients)
    assert all(map(torch.equal, first, summed))
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(of, leaves, gradients)


@subsets
def test_a_second_derivative_is_refused_whatever_is_differentiated(wanted, device):
    *leaves, dout = drawn(device)
    leaves = [x.requires_grad_(y in wanted) for x, y in zip(leaves, "qkv", strict=True)]
    given = [x for x in leaves if x.requires_grad]
    out = flash_attention(*leaves, config=CONFIG)
    first = torch.autograd.grad(out, given, dout, create_graph=True)
    with pytest.raises(NotImplementedError, match=r"^flash_attention is differentiated twice;"):
        torch.autograd.grad(sum(x.sum() for x in first), given)


def test_a_derivative_by_dout_is_refused(device):
    q, k, v, dout = drawn(device)
    out = flash_attention(q.requires_grad_(), k, v, config=CONFIG)
    (dq,) = torch.autograd.grad(out, q, dout.requires_grad_(), create_graph=True)
    with pytest.raises(NotImplementedError, match=r"^flash_attention is differentiated twice;"):
        torch.autograd.grad(dq.sum(), dout)


TRANSFORMS = {
    "grad": lambda f, q: torch.func.grad(lambda x: f(x).sum())(q),
    "vjp": lambda f, q: torch.func.vjp(f, q),
    "jvp": lambda f, q: torch.func.jvp(f, (q,), (q,)),
    "jacrev": lambda f, q: torch.func.jacrev(f)(q),
    "hessian": lambda f, q: torch.func.hessian(lambda x: f(x).sum())(q),
    "vmap_of_grad": lambda f, q: torch.func.vmap(torch.func.grad(lambda x: f(x).sum()))(q[None]),
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_derivatives_by_torch_func_are_refused(transform, device):
    q, k, v, _ = drawn(device)
    with pytest.raises(NotImplementedError, match=r"^flash_attention is differentiated by torch\."):
        transform(lambda x: flash_attention(x, k, v, config=CONFIG), q)


@pytest.mark.parametrize("records", [True, False])
@pytest.mark.parametrize("needs", [True, False])
def test_derivatives_in_forward_mode_are_refused(records, needs, device):
    q, k, v, _ = drawn(device)
    with forward_ad.dual_level(), torch.set_grad_enabled(records):
        dual = forward_ad.make_dual(q.requires_grad_(needs), torch.ones_like(q))
        with pytest.raises(NotImplementedError, match=r"is differentiated in forward mode; supp"):
            flash_attention(dual, k, v, config=CONFIG)


def test_vmap_calls_once_for_each_slice(device):
    *tensors, _ = drawn(device)
    batch = [torch.stack([x, 2 * x]) for x in tensors]
    got = torch.func.vmap(lambda *x: flash_attention(*x, config=CONFIG))(*batch)
    for slices in zip(got, *batch, strict=True):
        assert torch.equal(slices[0], flash_attention(*slices[1:], config=CONFIG))


def test_a_batch_of_gradients_is_one_backward_each(device):
    tensors = drawn(device)
    leaves = leaves_of(tensors)
    out = flash_attention(*leaves, config=CONFIG)
    douts = torch.stack([tensors[3], tensors[3].flip(2)])
    got = torch.autograd.grad(out, leaves, douts, is_grads_batched=True, retain_graph=True)
    for number, dout in enumerate(douts):
        want = torch.autograd.grad(out, leaves, dout, retain_graph=True)
        assert all(torch.equal(x[number], y) for x, y in zip(got, want, strict=True))


def test_a_tensor_changed_in_place_before_the_backward_is_noticed(device):
    for number in range(3):
        tensors = drawn(device)
        leaves = leaves_of(tensors)
        inner = [x * 1 for x in leaves]
        out = flash_attention(*inner, config=CONFIG)
        inner[number].mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.backward(tensors[3])


def test_a_copy_of_the_package_has_operators_of_its_own(device, tmp_path, monkeypatch):
    copy = load(sources_of(PACKAGE), tmp_path / "fa_copied")
    theirs = importlib.import_module("fa_copied.operators")
    assert theirs.forward.name() == "fa_copied::forward"
    assert operators.forward.name() == f"{operators.__name__.partition('.')[0]}::forward"
    q, k, v, dout = drawn(device)
    want = flash_attention(q, k, v, config=CONFIG)
    # The copy does not depend on the original.
    monkeypatch.delattr("fa_kernels.launch.portable.forward_kernel")
    monkeypatch.delattr("fa_kernels.launch.portable.dq_kernel")
    out = copy.flash_attention(q.requires_grad_(), k, v, config=CONFIG)
    assert torch.equal(out, want)
    out.backward(dout)


def test_operators_that_are_loaded_again_run_what_was_loaded(device, monkeypatch):
    q, k, v, dout = drawn(device)
    asked = request((q, k, v))
    want = flash_attention(q, k, v, config=CONFIG)
    calls = []
    for _ in range(3):
        out = flash_attention(q.requires_grad_(), k, v, config=CONFIG)
        assert torch.equal(out, want)
        for name in ("_forward", "_backward"):
            run = getattr(operators, name)
            monkeypatch.setattr(
                operators, name, lambda *x, run=run, name=name: calls.append(name) or run(*x)
            )
        with torch.no_grad():
            found = operators.forward(q, k, v, *asked)
            operators.backward(q, k, v, *found, dout, None, True, True, True, *asked)
        monkeypatch.undo()
        importlib.reload(operators)
    assert calls == ["_forward", "_backward"] * 3


def test_the_operators_of_a_graph_name_their_mask(device):
    q, k, v, _ = drawn(device)
    mask = PrefixLM(prefix=3)
    graph = torch.fx.experimental.proxy_tensor.make_fx(
        lambda *x: flash_attention(*x, mask=mask, config=CONFIG)
    )(q, k, v)
    (node,) = (x for x in graph.graph.nodes if x.target is operators.forward)
    request = Request(*node.args[3:])
    assert (request.config, request.mask) == (CONFIG, token_of(mask))
    assert "prefix=3" in request.mask
