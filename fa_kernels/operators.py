"""Forward and backward as operators of PyTorch, which its compiler and its modes see as one each.

The namespace is the name of the package, so that copies of it have operators of their own.
"""

from __future__ import annotations

from typing import Any

import torch

from fa_kernels import allocation
from fa_kernels.arguments import Request, prepared
from fa_kernels.launch import (
    backward_kernels,
    empty_gradients,
    empty_outputs,
    launch_backward,
    launch_forward,
)

__all__ = ["backward", "forward"]

_NAMESPACE = __name__.partition(".")[0]
_REQUEST = (
    "Tensor? seqlens_q, Tensor? seqlens_k, Tensor? block_mask, SymInt[]? lengths_q, "
    "SymInt[]? lengths_k, SymInt? window_left, SymInt? window_right, float? sm_scale, str config, "
    "str mask, int block_size, bool one_pass, SymInt? longest_q, SymInt? longest_k"
)
_OPERATORS = {
    "forward": f"(Tensor q, Tensor k, Tensor v, {_REQUEST}) -> (Tensor out, Tensor lse)",
    "backward": (
        "(Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? dout, Tensor? dlse, "
        f"bool needs_dq, bool needs_dk, bool needs_dv, {_REQUEST}) "
        "-> (Tensor dq, Tensor dk, Tensor dv)"
    ),
}
# A module that is loaded again keeps its operators: torch may call those that it has defined again
# by the place of others. They find the new functions by name.
_library: Any = globals().get("_library")
_is_new = _library is None
if _is_new:
    _library = torch.library.Library(_NAMESPACE, "DEF")
    for _name, _schema in _OPERATORS.items():
        _library.define(_name + _schema)
forward = getattr(torch.ops, _NAMESPACE).forward.default
backward = getattr(torch.ops, _NAMESPACE).backward.default


def _forward(q, k, v, *request):
    return launch_forward(q, k, v, prepared(q, k, v, Request(*request), ("forward",)))


def _forward_like(q, k, v, *_request):
    return empty_outputs(q, v)


def _backward(q, k, v, out, lse, dout, dlse, needs_dq, needs_dk, needs_dv, *request):
    if dout is None:
        # A loss on lse alone, or none at all.
        dout = allocation.empty((), dtype=out.dtype, device=out.device).zero_().expand(out.shape)
    needed = (needs_dq, needs_dk, needs_dv)
    asked = Request(*request)
    kernels = backward_kernels(needed, asked.one_pass)
    arguments = prepared(q, k, v, asked, kernels)
    found = launch_backward(q, k, v, out, lse, dout, arguments, dlse=dlse, needed=needed)
    return _given(found, needed, q)


def _backward_like(q, k, v, _out, _lse, _dout, _dlse, needs_dq, needs_dk, needs_dv, *_request):
    needed = (needs_dq, needs_dk, needs_dv)
    return _given(empty_gradients(q, k, v, needed), needed, q)


def _given(found, needed, q):
    """Gradients as an operator returns them: without elements in the place of None."""
    return tuple(
        x if is_needed else allocation.empty((0,), dtype=q.dtype, device=q.device)
        for x, is_needed in zip(found, needed, strict=True)
    )


class _ForwardFunction(torch.autograd.Function):
    """Saves q, k, v, out, lse, the lengths and the map of blocks."""

    @staticmethod
    def forward(ctx, q, k, v, seqlens_q, seqlens_k, block_mask, *request):
        with torch._C._AutoDispatchBelowAutograd():
            out, lse = forward(q, k, v, seqlens_q, seqlens_k, block_mask, *request)
        # Lengths and map too, so that autograd notices when they are changed in between.
        ctx.save_for_backward(q, k, v, out, lse, seqlens_q, seqlens_k, block_mask)
        ctx.request = request
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx, dout, dlse):
        *saved, seqlens_q, seqlens_k, block_mask = ctx.saved_tensors
        needed = ctx.needs_input_grad[:3]
        asked = (seqlens_q, seqlens_k, block_mask, *ctx.request)
        found = backward(*saved, dout, dlse, *needed, *asked)
        gradients = [x if is_needed else None for x, is_needed in zip(found, needed, strict=True)]
        return *gradients, *[None] * len(Request._fields)

    @staticmethod
    def jvp(_ctx, *_tangents):
        raise NotImplementedError(
            "flash_attention is differentiated in forward mode; supported is reverse mode"
        )


class _BackwardFunction(torch.autograd.Function):
    """A node of its own, so that a second derivative is refused, not dropped.

    ``once_differentiable`` would drop it where dout is a constant.
    """

    @staticmethod
    def forward(_ctx, *arguments):
        with torch._C._AutoDispatchBelowAutograd():
            return backward(*arguments)

    @staticmethod
    def backward(_ctx, *_gradients):
        raise NotImplementedError(
            "flash_attention is differentiated twice; supported are first derivatives"
        )


def _recorded(name):
    """An operator's kernel for autograd, by the name of its function.

    ``torch.library.register_autograd`` makes the like, which takes as long as the rest of a call,
    and drops the tangents of forward-mode derivatives in place of refusing them.
    """

    def run(*arguments):
        if torch._C._are_functorch_transforms_active():
            raise NotImplementedError(
                "flash_attention is differentiated by torch.func; supported is torch.autograd"
            )
        return globals()[name].apply(*arguments)

    return run


def _by_name(name):
    return lambda *arguments: globals()[name](*arguments)


if _is_new:
    for _name in _OPERATORS:
        _operator = getattr(getattr(torch.ops, _NAMESPACE), _name).default
        _library.impl(_operator, _by_name(f"_{_name}"), "CompositeExplicitAutograd")
        _library.impl(_operator, _recorded(f"_{_name.title()}Function"), "Autograd")
        torch.library.register_fake(_operator, _by_name(f"_{_name}_like"), lib=_library)
