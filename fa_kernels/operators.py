"""Forward, backward, pooling and merging as custom operators of PyTorch.

The compiler and dispatch modes see one operator per call. If no compiler, mode, tracer or tensor
subclass is active, the implementation is called directly: the dispatcher takes as long as the rest
of a call on the host.

The namespace is the name of the package, so that each copy of the package has its own operators.
"""

from __future__ import annotations

from typing import Any

import torch

from fa_kernels.launch.call_cache import prepared
from fa_kernels.launch.combine import (
    empty_combined,
    empty_state_gradients,
    launch_combine,
    launch_combine_backward,
)
from fa_kernels.launch.portable import (
    backward_kernels,
    empty_gradients,
    empty_outputs,
    empty_pooled,
    launch_backward,
    launch_forward,
    launch_pooled,
)
from fa_kernels.pooling import prepared_pooling
from fa_kernels.runtime import allocation
from fa_kernels.runtime.private import (
    below_autograd,
    dispatch_modes,
    forward_ad_level,
    function_modes,
    is_batched_gradient,
    is_profiled,
    is_transformed,
    tracing_state,
)
from fa_kernels.validation.arguments import Request

__all__ = [
    "backward",
    "combine",
    "combine_backward",
    "forward",
    "pooled_scores",
    "run_combine",
    "run_forward",
]

_NAMESPACE = __name__.partition(".")[0]
_REQUEST = (
    "Tensor? seqlens_q, Tensor? seqlens_k, Tensor? block_mask, SymInt[]? lengths_q, "
    "SymInt[]? lengths_k, SymInt? window_left, SymInt? window_right, float? sm_scale, str config, "
    "str mask, int block_size, bool one_pass, SymInt? longest_q, SymInt? longest_k, "
    "float? softcap, Tensor? alibi_slopes, Tensor? bias, Tensor? sinks"
)
# The fields of a request that hold tensors.
_TENSORS = ("seqlens_q", "seqlens_k", "block_mask", "alibi_slopes", "bias", "sinks")
_MERGE = "combine_attention_states"
_PLAIN = {torch.Tensor, torch.nn.Parameter, type(None)}
_OPERATORS = {
    "forward": f"(Tensor q, Tensor k, Tensor v, {_REQUEST}) -> (Tensor out, Tensor lse)",
    "backward": (
        "(Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? dout, Tensor? dlse, "
        f"bool needs_dq, bool needs_dk, bool needs_dv, {_REQUEST}, bool needs_dbias=False, "
        "bool needs_dsinks=False) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias, Tensor dsinks)"
    ),
    "pooled_scores": (
        f"(Tensor q, Tensor k, Tensor lse, {_REQUEST}, str pool, SymInt pool_rows, "
        "SymInt pool_keys) -> Tensor pooled"
    ),
    "combine": "(Tensor outs, Tensor lses) -> (Tensor out, Tensor lse)",
    "combine_backward": (
        "(Tensor outs, Tensor lses, Tensor? dout, Tensor? dlse) -> (Tensor douts, Tensor dlses)"
    ),
}
# Operators survive a reload of this module, because torch may call a redefined operator in place of
# another one. They look the reloaded functions up by name.
_library: Any = globals().get("_library")
_is_new = _library is None
if _is_new:
    _library = torch.library.Library(_NAMESPACE, "DEF")
    for _name, _schema in _OPERATORS.items():
        _library.define(_name + _schema)
forward = getattr(torch.ops, _NAMESPACE).forward.default
backward = getattr(torch.ops, _NAMESPACE).backward.default
pooled_scores = getattr(torch.ops, _NAMESPACE).pooled_scores.default
combine = getattr(torch.ops, _NAMESPACE).combine.default
combine_backward = getattr(torch.ops, _NAMESPACE).combine_backward.default


def _forward(q, k, v, *request):
    return _launched(q, k, v, Request(*request))


def _dispatched(q, k, v, request):
    return _below_autograd(forward, q, k, v, *request)


def _launched(q, k, v, request):
    return launch_forward(q, k, v, prepared(q, k, v, request, ("forward",)))


def _forward_like(q, k, v, *_request):
    return empty_outputs(q, v)


def _backward(q, k, v, out, lse, dout, dlse, needs_dq, needs_dk, needs_dv, *rest):
    request, *of_request = _divided(rest)
    needed = (needs_dq, needs_dk, needs_dv)
    found = _gradients(q, k, v, out, lse, dout, dlse, needed, *of_request, request)
    return _given(found, (*needed, *of_request), q)


def _gradients(q, k, v, out, lse, dout, dlse, needed, needs_dbias, needs_dsinks, request):
    """Returns the gradients of q, k, v, bias and sinks; None for those that are not needed."""
    if dout is None:
        # The loss depends on lse alone, or on neither output.
        dout = allocation.empty((), dtype=out.dtype, device=out.device).zero_().expand(out.shape)
    kernels = backward_kernels(needed, request.one_pass) + ("dq",) * needs_dbias
    arguments = prepared(q, k, v, request, kernels)
    dbias = _unwritten(request.bias) if needs_dbias else None
    dsinks = _unwritten(request.sinks) if needs_dsinks else None
    found = launch_backward(
        q, k, v, out, lse, dout, arguments, dlse=dlse, needed=needed, dbias=dbias, dsinks=dsinks
    )
    return *found, dbias, dsinks


def _backward_like(q, k, v, _out, _lse, _dout, _dlse, needs_dq, needs_dk, needs_dv, *rest):
    request, *of_request = _divided(rest)
    needed = (needs_dq, needs_dk, needs_dv)
    found = [
        _unwritten(x) if is_needed else None
        for x, is_needed in zip((request.bias, request.sinks), of_request, strict=True)
    ]
    return _given((*empty_gradients(q, k, v, needed), *found), (*needed, *of_request), q)


def _divided(rest):
    """Returns the request, ``needs_dbias`` and ``needs_dsinks`` of an operator's last arguments.

    The dispatcher leaves out trailing arguments that equal their defaults.
    """
    fields = len(Request._fields)
    return Request(*rest[:fields]), *(*rest[fields:], False, False)[:2]


def _unwritten(bias):
    """Allocates the gradient of a bias or of sinks, contiguous for any strides of these."""
    return allocation.empty(bias.shape, dtype=bias.dtype, device=bias.device)


def _given(found, needed, q):
    """Replaces gradients that are not needed by empty tensors: an operator cannot return None."""
    return tuple(
        x if is_needed else allocation.empty((0,), dtype=q.dtype, device=q.device)
        for x, is_needed in zip(found, needed, strict=True)
    )


def _pooled_scores(q, k, lse, *asked):
    *request, pool, rows, keys = asked
    arguments = prepared_pooling(q, k, Request(*request))
    return launch_pooled(q, k, lse, arguments, pool, rows, keys)


def _pooled_scores_like(q, k, _lse, *asked):
    return empty_pooled(q, k, *asked[-2:])


def _constant(*arguments):
    """Runs ``pooled_scores`` under autograd; its output is not differentiable."""
    return _below_autograd(pooled_scores, *arguments)


def _combine(outs, lses):
    return launch_combine(outs, lses)


def _combine_like(outs, lses):
    return empty_combined(outs, lses)


def _combine_dispatched(outs, lses):
    return _below_autograd(combine, outs, lses)


def _combine_backward(outs, lses, dout, dlse):
    return launch_combine_backward(outs, lses, dout, dlse)


def _combine_backward_like(outs, lses, _dout, _dlse):
    return empty_state_gradients(outs, lses)


def _is_watched(*tensors):
    """Whether a compiler, mode, tracer, profiler or tensor subclass has to see the operators."""
    return (
        torch.compiler.is_compiling()
        or dispatch_modes() > 0
        or function_modes() > 0
        or is_transformed()
        or tracing_state() is not None
        or is_profiled()
        or not _PLAIN.issuperset(map(type, tensors))
    )


def _of_request(x):
    return x.seqlens_q, x.seqlens_k, x.block_mask, x.alibi_slopes, x.bias, x.sinks


def _is_batched(x):
    """Whether a gradient is batched by ``is_grads_batched``, which pushes no dispatch mode."""
    return x is not None and is_batched_gradient(x)


def run_forward(q, k, v, request):
    """Returns (out, lse) of a checked request, both differentiable."""
    if _is_watched(q, k, v, *_of_request(request)):
        return forward(q, k, v, *request)
    if _is_recorded(q, k, v, request.bias, request.sinks):
        return _ForwardFunction.apply(q, k, v, request.bias, request.sinks, request, _launched)
    return _launched(q, k, v, request)


def run_combine(outs, lses):
    """Returns the merged (out, lse) of checked parts, both differentiable."""
    if _is_watched(outs, lses):
        return combine(outs, lses)
    if _is_recorded(outs, lses):
        return _CombineFunction.apply(outs, lses, _combine)
    return _combine(outs, lses)


def _is_recorded(*tensors):
    """Whether autograd records the call: for gradients, or to refuse forward-mode tangents."""
    return forward_ad_level() >= 0 or (
        torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
    )


def _below_autograd(operator, *arguments):
    """Calls an operator below autograd, which has recorded the call already."""
    with below_autograd():
        return operator(*arguments)


class _ForwardFunction(torch.autograd.Function):
    """The forward's node; saves q, k, v, out, lse and the tensors of the request."""

    @staticmethod
    def forward(ctx, q, k, v, _bias, _sinks, request, run):
        out, lse = run(q, k, v, request)
        # Saved tensors let autograd detect in-place changes, of the request's tensors too.
        ctx.save_for_backward(q, k, v, out, lse, *_of_request(request))
        ctx.request = request._replace(**dict.fromkeys(_TENSORS))
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx, dout, dlse):
        # Read once: activation checkpointing allows a single access.
        tensors = ctx.saved_tensors
        saved, of_request = tensors[:5], tensors[5:]
        request = ctx.request._replace(**dict(zip(_TENSORS, of_request, strict=True)))
        asked = ctx.needs_input_grad[:5]
        needed, of_request = asked[:3], asked[3:]
        # With gradients enabled, the operator records a node that refuses second derivatives.
        if (
            torch.is_grad_enabled()
            or _is_watched(*tensors, dout, dlse)
            or _is_batched(dout)
            or _is_batched(dlse)
        ):
            found = backward(*saved, dout, dlse, *needed, *request, *of_request)
            found = [x if is_asked else None for x, is_asked in zip(found, asked, strict=True)]
        else:
            found = _gradients(*saved, dout, dlse, needed, *of_request, request)
        return *found, None, None

    @staticmethod
    def jvp(_ctx, *_tangents):
        raise NotImplementedError(
            "flash_attention is differentiated in forward mode; supported is reverse mode"
        )


class _BackwardFunction(torch.autograd.Function):
    """The backward's node, which refuses second derivatives.

    ``once_differentiable`` would silently drop them where dout is a constant.
    """

    @staticmethod
    def forward(_ctx, *arguments):
        return _below_autograd(backward, *arguments)

    @staticmethod
    def backward(_ctx, *_gradients):
        raise NotImplementedError(
            "flash_attention is differentiated twice; supported are first derivatives"
        )


class _CombineFunction(torch.autograd.Function):
    """The merge's node; saves outs and lses."""

    @staticmethod
    def forward(ctx, outs, lses, run):
        ctx.save_for_backward(outs, lses)
        ctx.set_materialize_grads(False)
        return run(outs, lses)

    @staticmethod
    def backward(ctx, dout, dlse):
        saved = ctx.saved_tensors
        # With gradients enabled, the operator records a node that refuses second derivatives.
        watched = (
            torch.is_grad_enabled()
            or _is_watched(*saved, dout, dlse)
            or _is_batched(dout)
            or _is_batched(dlse)
        )
        found = (combine_backward if watched else _combine_backward)(*saved, dout, dlse)
        asked = ctx.needs_input_grad[:2]
        return *(x if is_asked else None for x, is_asked in zip(found, asked, strict=True)), None

    @staticmethod
    def jvp(_ctx, *_tangents):
        raise NotImplementedError(
            "combine_attention_states is differentiated in forward mode; supported is reverse mode"
        )


class _CombineBackwardFunction(torch.autograd.Function):
    """The node of a merge's backward, which refuses second derivatives."""

    @staticmethod
    def forward(_ctx, *arguments):
        return _below_autograd(combine_backward, *arguments)

    @staticmethod
    def backward(_ctx, *_gradients):
        raise NotImplementedError(
            "combine_attention_states is differentiated twice; supported are first derivatives"
        )


def _recorded(name, function="flash_attention"):
    """Returns an operator's autograd kernel, which calls the function of this name.

    ``function`` is the public function that an error names.

    ``torch.library.register_autograd`` would take as long as the rest of a call, and would drop
    forward-mode tangents instead of refusing them.
    """

    def run(*arguments):
        if is_transformed():
            raise NotImplementedError(
                f"{function} is differentiated by torch.func; supported is torch.autograd"
            )
        return globals()[name](*arguments)

    return run


def _recorded_forward(q, k, v, *request):
    request = Request(*request)
    return _ForwardFunction.apply(q, k, v, request.bias, request.sinks, request, _dispatched)


def _recorded_backward(*arguments):
    return _BackwardFunction.apply(*arguments)


def _recorded_combine(outs, lses):
    return _CombineFunction.apply(outs, lses, _combine_dispatched)


def _recorded_combine_backward(*arguments):
    return _CombineBackwardFunction.apply(*arguments)


def _by_name(name):
    return lambda *arguments: globals()[name](*arguments)


if _is_new:
    for _operator, _name, _differentiable in (
        (forward, "_forward", _recorded("_recorded_forward")),
        (backward, "_backward", _recorded("_recorded_backward")),
        (pooled_scores, "_pooled_scores", _by_name("_constant")),
        (combine, "_combine", _recorded("_recorded_combine", _MERGE)),
        (combine_backward, "_combine_backward", _recorded("_recorded_combine_backward", _MERGE)),
    ):
        _library.impl(_operator, _by_name(_name), "CompositeExplicitAutograd")
        _library.impl(_operator, _differentiable, "Autograd")
        torch.library.register_fake(_operator, _by_name(f"{_name}_like"), lib=_library)
