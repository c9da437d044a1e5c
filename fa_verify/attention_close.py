"""``assert_attention_close``: assert that the tensors of a test are those of a correct kernel."""

from __future__ import annotations

import math
from typing import Any

import torch

from fa_verify.judged_call import CallReport, JudgedCall, declarations_that_pass, judge_call
from fa_verify.oracles.masks.mask import Mask, shown
from fa_verify.oracles.outputs import Numerics, Outputs
from fa_verify.oracles.problem import Problem
from fa_verify.oracles.reference.torch_reference import RowMasks, chunk_height
from fa_verify.properties.guarantees.compare import Finding
from fa_verify.properties.inputs.sampling import TORCH_DTYPES
from fa_verify.properties.inputs.tensors import Inputs
from fa_verify.properties.kernels.subject import Subject
from fa_verify.properties.running.trial import OutOfRangeError
from fa_verify.replay_files import FOLDER, write

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
    "dlse": "(B, H, M)",
    "alibi_slopes": "(B, H)",
    "bias": "(B or 1, H or 1, M or 1, N or 1)",
    "dbias": "(B or 1, H or 1, M or 1, N or 1)",
    "sinks": "(H)",
    "dsinks": "(H)",
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
    dlse: torch.Tensor | None = None,
    softcap: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    dbias: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    dsinks: torch.Tensor | None = None,
    mask: Mask = Mask(),  # noqa: B008  # frozen
    sm_scale: float | None = None,
    numerics: Numerics = Numerics(),  # noqa: B008  # frozen
    replay_folder: str | None = FOLDER,
    report: bool = False,
) -> CallReport | None:
    """Assert that the results of an attention kernel are those of a correct kernel.

    It replaces ``torch.testing.assert_close`` against a reference: it computes the exact results in
    float64, and how far each element of a correct kernel may be from them. No tolerance is chosen.
    The bound judges every element. Limits of independent roundings, which are sharper, judge
    elements and sums over rows, tiles and outputs, where the numerics and the data allow it. So do
    the statistics of errors on data like N(0, 1).

    Example::

        out = my_attention(q, k, v, causal=True)
        assert_attention_close(out, q, k, v, mask=Mask(causal=True))

    All tensors are on one device, with any strides. They have the dtype of q, but k and v may be
    float32 or float64 beside a 16-bit q, as a dequantised cache is; no gradient is judged then. lse
    and dlse are float64 for float64 inputs and float32 otherwise. alibi_slopes, sinks and dsinks
    are float32, and bias and dbias may be. Rows and keys without a visible pair may hold anything
    in the inputs. In the results, they are exactly 0, and -inf in lse, or the sink.

    Args:
        out: Result of the kernel, (B, H, M, Dv).
        q: Queries, (B, H, M, D), in float16, bfloat16, float32 or float64.
        k: Keys, (B, Hk, N, D); Hk divides H. In a wider dtype than q, they are taken as they are,
            and not as rounded to the dtype of q.
        v: Values, (B, Hk, N, Dv), as k.
        lse: The natural logarithm of the softmax's denominator, (B, H, M), if the kernel returns
            it.
        dout: The gradient of out that the gradients below were computed from, (B, H, M, Dv).
        dq: Gradient of q; needs ``dout`` or ``dlse``, as the other gradients do.
        dk: Gradient of k, summed over the query heads of a group.
        dv: Gradient of v, summed in the same way.
        dlse: The gradient of lse, (B, H, M), of a loss that depends on lse.
        softcap: c, where a score x becomes c tanh(x / c) after the scale; None without a softcap.
        alibi_slopes: Slopes, (H,) or (B, H). A slope times the distance of query and key is
            subtracted from the score. Their positions are aligned at the bottom right.
        bias: Terms that are added to the scores, (B or 1, H or 1, M or 1, N or 1); None without.
        dbias: Gradient of the bias, in its shape and dtype.
        sinks: The score of one more key of each row, whose value is 0, (H,); -inf is none. lse
            includes it.
        dsinks: Gradient of the sinks, (H,).
        mask: The mask. Causal masks and windows are aligned to the bottom right.
        sm_scale: Factor on q.k; None is D**-0.5.
        numerics: The roundings of the kernel, where they differ from FlashAttention-2's. With
            ``backward_reads``, gradients are also judged given out and lse as they were returned.
            With ("out", "lse") and ``lse``, limits judge them too.
        replay_folder: Folder for a file with the arguments of a call that fails, if its tensors
            take no more than 1 MiB. ``fa-verify explain FILE`` judges them again. None writes none.
        report: Return the figures of a call that passes.

    Returns:
        None, or with ``report`` the largest error / bound of each output, and the share of its
        elements that each check judged.

    Raises:
        AssertionError: A result leaves its bound or a limit. The message shows its worst element,
            where bad elements concentrate, what judged which share of the elements, and the
            declarations with which the call passes, if there are any.
        TypeError: An argument has the wrong type.
        ValueError: A shape, dtype or device is wrong, a gradient is given without ``dout`` and
            ``dlse``, these without a gradient, ``dbias`` without ``bias``, or ``dsinks`` without
            ``sinks``. An input is NaN or
            infinite where a visible pair reads it. The inputs are out of range: a correct kernel
            may overflow on them.
    """
    __tracebackhide__ = True
    optional = {
        "lse": lse, "dout": dout, "dq": dq, "dk": dk, "dv": dv, "dlse": dlse,
        "alibi_slopes": alibi_slopes, "bias": bias, "dbias": dbias,
        "sinks": sinks, "dsinks": dsinks,
    }  # fmt: skip
    required = {"q": q, "k": k, "v": v, "out": out}
    _check(required, optional)
    if not isinstance(mask, Mask):
        raise TypeError(f"mask is {type(mask).__name__}; needs a Mask, such as Mask(causal=True)")
    if not isinstance(numerics, Numerics):
        raise TypeError(f"numerics is {numerics!r}; needs a Numerics")
    problem = Problem(
        B=q.shape[0], H=q.shape[1], Hk=k.shape[1], M=q.shape[2], N=k.shape[2],
        D=q.shape[3], Dv=v.shape[3], dtype=_NAMES[q.dtype], device=q.device.type,
        mask=mask, sm_scale=sm_scale, softcap=softcap,
    )  # fmt: skip
    subject = Subject("attention", _called_before, numerics=numerics)
    with torch.inference_mode(False):
        # Without gradients, their bounds are not read.
        inputs = Inputs(q, k, v, torch.zeros_like(out) if dout is None else dout)
        inputs = Inputs(*(x.detach() for x in inputs.tensors))
        inputs = inputs._replace(
            dlse=_detached(dlse), alibi_slopes=_detached(alibi_slopes), bias=_detached(bias),
            sinks=_detached(sinks),
        )  # fmt: skip
        got = Outputs(*map(_detached, (out, lse, dq, dk, dv)))
        call = JudgedCall(subject, problem, inputs, got, _detached(dbias), _detached(dsinks))
        findings, figures = _judged(call)
        if not findings:
            return figures if report else None
        passing = declarations_that_pass(call, findings)
    lines = [*(x.told for x in findings), str(figures), *passing, _facts(subject, problem, inputs)]
    if replay_folder is not None:
        scalars = {"sm_scale": sm_scale, "softcap": softcap, "numerics": numerics}
        lines += _replay_line(replay_folder, {**required, **optional, **scalars}, mask)
    raise AssertionError("\n".join(lines))


def _detached(x: torch.Tensor | None) -> torch.Tensor | None:
    return None if x is None else x.detach()


def _judged(call: JudgedCall) -> tuple[list[Finding], CallReport]:
    """Return ``judge_call``.

    Raises:
        ValueError: The inputs are out of range.
    """
    try:
        return judge_call(call)
    except OutOfRangeError as reason:
        _check_finite(call.problem, call.inputs)
        raise ValueError(
            f"the inputs are out of range, so that a correct kernel may fail: {reason}"
        ) from None


def _replay_line(folder: str, arguments: dict[str, Any], mask: Mask) -> list[str]:
    """Write a replay file; return the line that names it, or why there is none."""
    try:
        path = write(folder, arguments, mask)
    except (OSError, TypeError) as error:  # nothing may hide the failure
        return [f"no replay file: {error}"]
    return [] if path is None else [f"replay: fa-verify explain {path}"]


def _facts(subject: Subject, problem: Problem, inputs: Inputs) -> str:
    """Format the sizes, the mask, the score modifications and the declarations of a call."""
    sizes = " ".join(f"{x}={getattr(problem, x)}" for x in ("B", "H", "Hk", "M", "N", "D", "Dv"))
    added = [] if problem.softcap is None else [f", softcap={problem.softcap:g}"]
    for name in ("alibi_slopes", "bias", "sinks"):
        x = getattr(inputs, name)
        added += [] if x is None else [f", {name} of shape {tuple(x.shape)}"]
    return (
        f"call: {sizes} {problem.dtype} on {problem.device}, mask={shown(problem.mask)}, "
        f"sm_scale={problem.scale:g}{''.join(added)}; numerics declare {subject.declared()}"
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
    gradients = [name for name in ("dq", "dk", "dv", "dbias", "dsinks") if name in given]
    losses = [name for name in ("dout", "dlse") if name in given]
    if gradients and not losses:
        raise ValueError(f"{gradients[0]} is given without dout; needs the gradient of out")
    if losses and not gradients:
        raise ValueError(f"{losses[0]} is given without dq, dk and dv; needs at least one of them")
    if "dbias" in given and "bias" not in given:
        raise ValueError("dbias is given without bias; needs the bias that was added")
    if "dsinks" in given and "sinks" not in given:
        raise ValueError("dsinks is given without sinks; needs the sinks of the call")
    q, k, v = given["q"], given["k"], given["v"]
    if q.dtype not in _NAMES:
        raise ValueError(f"q has dtype {q.dtype}; needs one of {', '.join(map(str, _NAMES))}")
    (B, H, M, D), (Hk, N), Dv = q.shape, k.shape[1:3], v.shape[3]
    sizes = {"B": B, "H": H, "Hk": Hk, "M": M, "N": N, "D": D, "Dv": Dv}
    for name, x in given.items():
        axes = _AXES[name].strip("()").split(", ")
        if name == "alibi_slopes":
            axes = axes[2 - x.ndim :]
        shape = tuple(sizes[axis.split()[0]] for axis in axes)
        if name == "bias" and x.ndim == len(shape):
            shape = tuple(1 if n == 1 else size for n, size in zip(x.shape, shape, strict=True))
        if name == "dbias":
            shape = tuple(given["bias"].shape)
        if tuple(x.shape) != shape:
            raise ValueError(f"{name} has shape {tuple(x.shape)}; needs {shape}, {_AXES[name]}")
        dtype, like = q.dtype, ", that of q"
        if name in ("lse", "dlse"):
            dtype, like = torch.promote_types(q.dtype, torch.float32), ""
        if name in ("alibi_slopes", "sinks", "dsinks"):
            dtype, like = torch.float32, ""
        if name == "bias" and x.dtype == torch.float32:
            dtype = x.dtype
        if name == "dbias":
            dtype, like = given["bias"].dtype, ", that of bias"
        if x.dtype != dtype and not (name in ("k", "v") and _is_wide(x, q)):
            raise ValueError(f"{name} has dtype {x.dtype}; needs {dtype}{like}")
        if x.device != q.device:
            raise ValueError(f"{name} is on {x.device}; needs the device of q, {q.device}")
    if gradients and not q.dtype == k.dtype == v.dtype:
        raise ValueError(
            f"{gradients[0]} is given for k of {k.dtype} and v of {v.dtype}; needs them in the "
            f"dtype of q, {q.dtype}: gradients of dequantised tensors are not judged"
        )
    for axis in ("H", "Hk", "D", "Dv"):
        if not sizes[axis]:
            raise ValueError(f"{axis} is 0; needs at least 1")
    if H % Hk:
        raise ValueError(
            f"q has {H} heads; needs a multiple of the {Hk} heads of k. Tensors are (B, H, S, D)"
        )


def _is_wide(x: torch.Tensor, q: torch.Tensor) -> bool:
    """Return whether x is float32 or float64 beside a 16-bit q."""
    return q.element_size() == 2 and x.dtype in (torch.float32, torch.float64)


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
    for name, axis in (("q", "m"), ("k", "n"), ("v", "n"), ("dout", "m"), ("dlse", "m")):
        x = getattr(inputs, name)
        if x is None:
            continue
        read = read_by[axis].squeeze(3) if name == "dlse" else read_by[axis]
        bad = (~x.isfinite() & read).nonzero()
        if len(bad):
            at = tuple(bad[0].tolist())
            where = " ".join(f"{a}={i}" for a, i in zip(("b", "h", axis, "d"), at, strict=False))
            seen_by = "row sees a key" if axis == "m" else "key is visible to a row"
            raise ValueError(
                f"{name} is {float(x[at])} at {where}; needs to be finite, since this {seen_by}"
            )
    _check_added(problem, inputs, masks, height)


def _check_added(problem: Problem, inputs: Inputs, masks: RowMasks, height: int) -> None:
    """Raise ValueError for a slope, a sink, or a bias of a visible pair that is no such number."""
    slopes, bias, sinks = inputs.alibi_slopes, inputs.bias, inputs.sinks
    if sinks is not None:
        bad = sinks.isnan() | (sinks == math.inf)
        if bool(bad.any()):
            raise ValueError(f"sinks holds {float(sinks[bad][0])}; needs finite or -inf")
    if slopes is not None and not bool(slopes.isfinite().all()):
        raise ValueError(f"alibi_slopes holds {float(slopes[~slopes.isfinite()][0])}; needs finite")
    if bias is None:
        return
    sizes = problem.B, problem.H, problem.M, problem.N
    for start in range(0, problem.M, height):
        rows = slice(start, min(start + height, problem.M))
        read = masks.between(rows.start, rows.stop).expand(*sizes[:2], -1, -1)
        bad = (~bias.expand(sizes)[:, :, rows].isfinite() & read).nonzero()
        if len(bad):
            b, h, m, n = bad[0].tolist()
            m += start
            value = float(bias.expand(sizes)[b, h, m, n])
            raise ValueError(
                f"bias is {value} at b={b} h={h} m={m} n={n}; needs to be finite, since this pair "
                "is visible. Hide pairs by the mask"
            )
