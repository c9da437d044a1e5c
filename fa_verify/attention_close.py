"""``assert_attention_close``: judge the tensors of a test that calls its kernel by itself."""

from __future__ import annotations

from typing import Any

import torch

from fa_verify.oracles.masks.mask import Mask, shown
from fa_verify.oracles.outputs import Numerics, Outputs
from fa_verify.oracles.problem import Problem
from fa_verify.oracles.reference.torch_reference import RowMasks, chunk_height
from fa_verify.properties.checks.accuracy import accuracy
from fa_verify.properties.checks.backward import backward
from fa_verify.properties.comparison.compare import Finding
from fa_verify.properties.execution.trial import OutOfRangeError, plan_in_range
from fa_verify.properties.inputs.sampling import TORCH_DTYPES
from fa_verify.properties.inputs.tensors import Inputs
from fa_verify.properties.subjects.subject import Subject

__all__ = ["assert_attention_close"]

_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
_AXES = {
    "q": "(B, H, M, D)",
    "k": "(B, Hk, N, D)",
    "v": "(B, Hk, N, Dv)",
    "out": "(B, H, M, Dv)",
    "lse": "(B, H, M)",
    "dout": "(B, H, M, Dv)",
    "dq": "(B, H, M, D)",
    "dk": "(B, Hk, N, D)",
    "dv": "(B, Hk, N, Dv)",
}


def assert_attention_close(
    out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    lse: torch.Tensor | None = None,
    dout: torch.Tensor | None = None,
    dq: torch.Tensor | None = None,
    dk: torch.Tensor | None = None,
    dv: torch.Tensor | None = None,
    mask: Mask = Mask(),  # noqa: B008  # frozen
    sm_scale: float | None = None,
    numerics: Numerics = Numerics(),  # noqa: B008  # frozen
) -> None:
    """Assert that the results of an attention kernel lie within their derived bounds.

    It replaces ``torch.testing.assert_close`` against a reference: it computes the exact results in
    float64, and how far each element of a correct kernel may be from them. No tolerance is chosen.

    Example::

        out = my_attention(q, k, v, causal=True)
        assert_attention_close(out, q, k, v, mask=Mask(causal=True))

    All tensors are on one device, with any strides. They have the dtype of q, except for lse: it is
    float64 for float64 inputs and float32 otherwise. Rows and keys without a visible pair may hold
    anything in the inputs. In the results, they are exactly 0, and -inf in lse.

    Args:
        out: Result of the kernel, (B, H, M, Dv).
        q: Queries, (B, H, M, D), in float16, bfloat16, float32 or float64.
        k: Keys, (B, Hk, N, D); Hk divides H.
        v: Values, (B, Hk, N, Dv).
        lse: The natural logarithm of the softmax's denominator, (B, H, M), if the kernel returns
            it.
        dout: The gradient of out that the gradients below were computed from, (B, H, M, Dv).
        dq: Gradient of q; needs ``dout``.
        dk: Gradient of k, summed over the query heads of a group; needs ``dout``.
        dv: Gradient of v, summed in the same way; needs ``dout``.
        mask: The mask. Causal masks and windows are aligned to the bottom right.
        sm_scale: Factor on q.k; None is D**-0.5.
        numerics: The roundings of the kernel, where they differ from FlashAttention-2's. With
            ``backward_reads``, gradients are also judged given out and lse as they were returned.

    Raises:
        AssertionError: A result leaves its bound. The message shows its worst element, and where
            bad elements concentrate.
        TypeError: An argument has the wrong type.
        ValueError: A shape, dtype or device is wrong, a gradient is given without ``dout``, or
            ``dout`` without a gradient. An input is NaN or infinite where a visible pair reads it.
            The inputs are out of range: a correct kernel may overflow on them.
    """
    __tracebackhide__ = True
    _check(
        {"q": q, "k": k, "v": v, "out": out},
        {"lse": lse, "dout": dout, "dq": dq, "dk": dk, "dv": dv},
    )
    if not isinstance(mask, Mask):
        raise TypeError(f"mask is {type(mask).__name__}; needs a Mask, such as Mask(causal=True)")
    if not isinstance(numerics, Numerics):
        raise TypeError(f"numerics is {numerics!r}; needs a Numerics")
    problem = Problem(
        B=q.shape[0], H=q.shape[1], Hk=k.shape[1], M=q.shape[2], N=k.shape[2],
        D=q.shape[3], Dv=v.shape[3], dtype=_NAMES[q.dtype], device=q.device.type,
        mask=mask, sm_scale=sm_scale,
    )  # fmt: skip
    subject = Subject("attention", _called_before, numerics=numerics)
    with torch.inference_mode(False):
        # Without gradients, their bounds are not read.
        inputs = Inputs(q, k, v, torch.zeros_like(out) if dout is None else dout)
        inputs = Inputs(*(x.detach() for x in inputs.tensors))
        got = Outputs(*(None if x is None else x.detach() for x in (out, lse, dq, dk, dv)))
        findings = _judged(subject, problem, inputs, got)
    if findings:
        raise AssertionError("\n".join([*(x.told for x in findings), _facts(subject, problem)]))


def _judged(
    subject: Subject, problem: Problem, inputs: Inputs, got: Outputs[torch.Tensor | None]
) -> list[Finding]:
    """Return the findings of the checks that need one run alone."""
    try:
        trial = plan_in_range(subject, problem, inputs).trial(subject, got)
    except OutOfRangeError as reason:
        _check_finite(problem, inputs)
        raise ValueError(
            f"the inputs are out of range, so that a correct kernel may fail: {reason}"
        ) from None
    findings = accuracy(trial)
    if any(gradient is not None for gradient in got[2:]):
        findings += backward(trial)
    return findings


def _facts(subject: Subject, problem: Problem) -> str:
    """Format the sizes, the mask and the declarations of a call."""
    sizes = " ".join(f"{x}={getattr(problem, x)}" for x in ("B", "H", "Hk", "M", "N", "D", "Dv"))
    return (
        f"call: {sizes} {problem.dtype} on {problem.device}, mask={shown(problem.mask)}, "
        f"sm_scale={problem.scale:g}; numerics declare {subject.declared()}"
    )


def _called_before(*inputs: Any, **arguments: Any) -> Any:
    """The kernel, which the test has called."""
    raise RuntimeError("the results are given")


def _check(required: dict[str, Any], optional: dict[str, Any]) -> None:
    """Check the types of all tensors, their presence, shapes, dtypes and devices.

    Args:
        required: q, k, v and out, by name.
        optional: lse, dout and the gradients, by name; None if not given.
    """
    given = required | {name: x for name, x in optional.items() if x is not None}
    for name, x in given.items():
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} is {type(x).__name__}; needs a tensor {_AXES[name]}")
        if name in ("q", "k", "v") and x.ndim != 4:
            raise ValueError(f"{name} has shape {tuple(x.shape)}; needs four axes {_AXES[name]}")
    gradients = [name for name in ("dq", "dk", "dv") if name in given]
    if gradients and "dout" not in given:
        raise ValueError(f"{gradients[0]} is given without dout; needs the gradient of out")
    if "dout" in given and not gradients:
        raise ValueError("dout is given without dq, dk and dv; needs at least one of them")
    q, k, v = given["q"], given["k"], given["v"]
    if q.dtype not in _NAMES:
        raise ValueError(f"q has dtype {q.dtype}; needs one of {', '.join(map(str, _NAMES))}")
    (B, H, M, D), (Hk, N), Dv = q.shape, k.shape[1:3], v.shape[3]
    sizes = {"B": B, "H": H, "Hk": Hk, "M": M, "N": N, "D": D, "Dv": Dv}
    for name, x in given.items():
        shape = tuple(sizes[axis] for axis in _AXES[name].strip("()").split(", "))
        if tuple(x.shape) != shape:
            raise ValueError(f"{name} has shape {tuple(x.shape)}; needs {shape}, {_AXES[name]}")
        dtype, like = q.dtype, ", that of q"
        if name == "lse":
            dtype, like = torch.promote_types(q.dtype, torch.float32), ""
        if x.dtype != dtype:
            raise ValueError(f"{name} has dtype {x.dtype}; needs {dtype}{like}")
        if x.device != q.device:
            raise ValueError(f"{name} is on {x.device}; needs the device of q, {q.device}")
    for axis in ("H", "Hk", "D", "Dv"):
        if not sizes[axis]:
            raise ValueError(f"{axis} is 0; needs at least 1")
    if H % Hk:
        raise ValueError(
            f"q has {H} heads; needs a multiple of the {Hk} heads of k. Tensors are (B, H, S, D)"
        )


def _check_finite(problem: Problem, inputs: Inputs) -> None:
    """Raise ValueError for an input that is NaN or infinite where a visible pair reads it."""
    B, H, Hk, M, N = problem.B, problem.H, problem.Hk, problem.M, problem.N
    device = inputs.q.device
    masks, height = RowMasks(problem.mask, B, H, M, N, device), chunk_height(None, B, H, N)
    rows, keys = [], torch.zeros(B, Hk, N, dtype=torch.bool, device=device)
    for start in range(0, M, height):
        seen = masks.between(start, min(start + height, M))
        rows.append(seen.any(3).expand(B, H, -1))
        keys |= seen.any(2).expand(B, H, N).reshape(B, Hk, H // Hk, N).any(2)
    read_by = {"m": torch.cat(rows, 2).unsqueeze(3), "n": keys.unsqueeze(3)}
    for name, axis in (("q", "m"), ("k", "n"), ("v", "n"), ("dout", "m")):
        x = getattr(inputs, name)
        bad = (~x.isfinite() & read_by[axis]).nonzero()
        if len(bad):
            at = tuple(bad[0].tolist())
            where = " ".join(f"{a}={i}" for a, i in zip(("b", "h", axis, "d"), at, strict=True))
            seen_by = "row sees a key" if axis == "m" else "key is visible to a row"
            raise ValueError(
                f"{name} is {float(x[at])} at {where}; needs to be finite, since this {seen_by}"
            )
