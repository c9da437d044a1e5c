"""Forward and backward as operators of PyTorch, which its compiler and its modes see as one each.

The namespace is the name of the package, so that copies of it have operators of their own.
"""

from __future__ import annotations

from typing import Any

import torch

from fa_kernels import allocation
from fa_kernels.arguments import Request, prepared
from fa_kernels.launch import empty_gradients, empty_outputs, launch_backward, launch_forward

__all__ = ["backward", "forward"]

_NAMESPACE = __name__.partition(".")[0]
_REQUEST = (
    "Tensor? seqlens_q, Tensor? seqlens_k, Tensor? block_mask, SymInt[]? lengths_q, "
    "SymInt[]? lengths_k, SymInt? window_left, SymInt? window_right, float? sm_scale, str config, "
    "str mask, int block_size, bool one_pass, float? softcap, "
    "Tensor? alibi_slopes, Tensor? bias"
)
# Places of the tensors in a request.
_TENSORS = tuple(
    Request._fields.index(name)
    for name in ("seqlens_q", "seqlens_k", "block_mask", "alibi_slopes", "bias")
)
_BIAS = Request._fields.index("bias")
# A module that is loaded again registers again: the first operators go with their library.
_library: Any = None
_library = torch.library.Library(_NAMESPACE, "DEF")
_library.define(f"forward(Tensor q, Tensor k, Tensor v, {_REQUEST}) -> (Tensor out, Tensor lse)")
_library.define(
    "backward(Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? dout, Tensor? dlse, "
    f"bool needs_dq, bool needs_dk, bool needs_dv, {_REQUEST}, bool needs_dbias=False) -> "
    "(Tensor dq, Tensor dk, Tensor dv, Tensor dbias)"
)
forward = getattr(torch.ops, _NAMESPACE).forward.default
backward = getattr(torch.ops, _NAMESPACE).backward.default


def _forward(q, k, v, *request):
    return launch_forward(q, k, v, prepared(q, k, v, Request(*request)))


def _forward_like(q, k, v, *_request):
    return empty_outputs(q, v)


def _backward(q, k, v, out, lse, dout, dlse, needs_dq, needs_dk, needs_dv, *rest):
    request, needs_dbias = _divided(rest)
    if dout is None:
        # A loss on lse alone, or none at all.
        dout = allocation.empty((), dtype=out.dtype, device=out.device).zero_().expand(out.shape)
    needed = (needs_dq, needs_dk, needs_dv)
    arguments = prepared(q, k, v, request)
    dbias = _unwritten(request.bias) if needs_dbias else None
    found = launch_backward(
        q, k, v, out, lse, dout, arguments, dlse=dlse, needed=needed, dbias=dbias
    )
    return _given((*found, dbias), (*needed, needs_dbias), q)


def _backward_like(q, k, v, _out, _lse, _dout, _dlse, needs_dq, needs_dk, needs_dv, *rest):
    request, needs_dbias = _divided(rest)
    needed = (needs_dq, needs_dk, needs_dv)
    dbias = _unwritten(request.bias) if needs_dbias else None
    return _given((*empty_gradients(q, k, v, needed), dbias), (*needed, needs_dbias), q)


def _divided(rest):
    """The request, and whether the bias's gradient is needed, which may be left out."""
    fields = len(Request._fields)
    return Request(*rest[:fields]), rest[fields:] == (True,)


def _unwritten(bias):
    """Contiguous, whatever strides the bias has."""
    return allocation.empty(bias.shape, dtype=bias.dtype, device=bias.device)


def _given(found, needed, q):
    """Gradients as an operator returns them: without elements in the place of None."""
    return tuple(
        x if is_needed else allocation.empty((0,), dtype=q.dtype, device=q.device)
        for x, is_needed in zip(found, needed, strict=True)
    )


class _Forward(torch.autograd.Function):
    """Saves q, k, v, out, lse, and the tensors of the request."""

    @staticmethod
    def forward(ctx, q, k, v, *request):
        with torch._C._AutoDispatchBelowAutograd():
            out, lse = forward(q, k, v, *request)
        # Those of the request too, so that autograd notices when they are changed in between.
        ctx.save_for_backward(q, k, v, out, lse, *(request[place] for place in _TENSORS))
        ctx.request = [None if i in _TENSORS else x for i, x in enumerate(request)]
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx, dout, dlse):
        q, k, v, out, lse, *tensors = ctx.saved_tensors
        needed, asked = ctx.needs_input_grad[:3], list(ctx.request)
        for place, x in zip(_TENSORS, tensors, strict=True):
            asked[place] = x
        needs_dbias = ctx.needs_input_grad[3 + _BIAS]
        *found, dbias = backward(q, k, v, out, lse, dout, dlse, *needed, *asked, needs_dbias)
        gradients = [x if is_needed else None for x, is_needed in zip(found, needed, strict=True)]
        of_request = [None] * len(Request._fields)
        of_request[_BIAS] = dbias if needs_dbias else None
        return *gradients, *of_request

    @staticmethod
    def jvp(_ctx, *_tangents):
        raise NotImplementedError(
            "flash_attention is differentiated in forward mode; supported is reverse mode"
        )


class _Backward(torch.autograd.Function):
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


def _recorded(function):
    """An operator's kernel for autograd.

    ``torch.library.register_autograd`` makes the like, which takes as long as the rest of a call,
    and drops the tangents of forward-mode derivatives in place of refusing them.
    """

    def run(*arguments):
        if torch._C._are_functorch_transforms_active():
            raise NotImplementedError(
                "flash_attention is differentiated by torch.func; supported is torch.autograd"
            )
        return function.apply(*arguments)

    return run


for _operator, _run, _like, _function in (
    (forward, _forward, _forward_like, _Forward),
    (backward, _backward, _backward_like, _Backward),
):
    _library.impl(_operator, _run, "CompositeExplicitAutograd")
    _library.impl(_operator, _recorded(_function), "Autograd")
    torch.library.register_fake(_operator, _like, lib=_library)
