"""Inputs of other projects' attention tests: plain random values, lengths from a short list.

Shapes are shrunk to about a tenth so that Triton's interpreter can run them. They keep the relation
of M to N, grouped heads, masks, dtypes and which lengths are multiples of a tile. Dropout, bias,
ALiBi and paged caches are left out. A causal mask aligned to the top left appears only with M = N,
where it equals the alignment of a ``Problem``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from fa_verify.oracles import stream
from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.problem import TENSORS, Problem
from fa_verify.properties.inputs.tensors import Inputs, make

__all__ = ["PLAIN", "plain"]

_CAUSAL = Mask(causal=True)

_flash = partial(Problem, B=2, H=3, Hk=3, D=32, Dv=32, dtype="bf16")
_FLASH_OUTPUT = (
    _flash(M=37, N=67, dtype="fp16"),
    _flash(M=43, N=72, mask=_CAUSAL),
    _flash(M=36, N=85, mask=Mask(window_left=20, window_right=31), Hk=1),
    _flash(M=32, N=64, mask=_CAUSAL, D=64, Dv=64, Hk=1),
    _flash(M=64, N=32, D=40, Dv=40, dtype="fp16"),
    _flash(M=80, N=80, mask=_CAUSAL, dtype="fp16", B=1),
    _flash(M=79, N=80, mask=Mask(causal=True, window_left=25), D=59, Dv=59, B=1),
    _flash(
        M=37,
        N=67,
        mask=Mask(causal=True, seqlens_q=(37, 21), seqlens_k=(55, 67)),
        Hk=1,
        dirty="noise",
    ),
)
_FLASH_CAUSAL = (
    _flash(M=1, N=61, mask=_CAUSAL),
    _flash(M=3, N=97, mask=_CAUSAL, dtype="fp16"),
    _flash(M=31, N=96, mask=_CAUSAL, D=40, Dv=40),
    _flash(M=31, N=97, mask=_CAUSAL, D=64, Dv=64),
    _flash(M=37, N=67, mask=Mask(causal=True, window_left=30), dtype="fp16"),
    _flash(M=67, N=37, mask=_CAUSAL),
    _flash(M=97, N=3, mask=_CAUSAL, dtype="fp16", B=1),
    _flash(M=79, N=80, mask=_CAUSAL, D=59, Dv=59, B=1),
)
_FLASH_TRITON = (
    _flash(M=37, N=67, dtype="fp16"),
    _flash(M=36, N=85),
    _flash(M=32, N=64, D=64, Dv=64),
    _flash(M=64, N=32, dtype="fp16"),
    _flash(M=64, N=64, mask=_CAUSAL, D=64, Dv=64, dtype="fp16", B=1),
    _flash(M=96, N=96, mask=_CAUSAL, B=1),
)
_FLASH_3 = (
    _flash(M=1, N=1),
    _flash(M=16, N=32, mask=_CAUSAL, D=64, Dv=64),
    _flash(M=32, N=48, dtype="fp16", Hk=1),
    _flash(M=64, N=64, mask=Mask(window_left=17, window_right=40), B=1),
    _flash(M=97, N=3, dtype="fp16", B=1),
    _flash(M=37, N=67, mask=_CAUSAL, D=64, Dv=64, Hk=1),
    _flash(M=79, N=80, mask=_CAUSAL, B=1),
    _flash(M=37, N=67, mask=Mask(seqlens_q=(37, 20), seqlens_k=(0, 67)), dirty="noise"),
)

_sdpa = partial(Problem, H=4, Hk=4)  # scaled by D**-0.5 or 1 / D
_SDPA_FLASH = (
    _sdpa(M=4, N=4, D=16, Dv=16, dtype="fp16", mask=_CAUSAL),
    _sdpa(M=36, N=31, D=51, Dv=51, dtype="bf16"),
    _sdpa(M=4, N=97, D=64, Dv=64, dtype="fp16", sm_scale=1 / 64, Hk=2),
    _sdpa(M=36, N=4, D=51, Dv=51, dtype="fp16", B=2, Hk=2),
    _sdpa(M=64, N=64, D=64, Dv=64, dtype="bf16", mask=_CAUSAL),
    _sdpa(M=64, N=31, D=16, Dv=16, dtype="bf16", sm_scale=1 / 16, H=5, Hk=1),
)
_SDPA_EFFICIENT = (
    _sdpa(M=8, N=8, D=16, Dv=16, dtype="fp16", mask=_CAUSAL),
    _sdpa(M=51, N=8, D=16, Dv=16, dtype="fp32"),
    _sdpa(M=51, N=51, D=48, Dv=48, dtype="bf16", mask=_CAUSAL),
    _sdpa(M=8, N=64, D=64, Dv=64, dtype="fp16", sm_scale=1 / 64, B=2),
    _sdpa(M=64, N=51, D=48, Dv=48, dtype="fp32", sm_scale=1 / 48),
    _sdpa(M=64, N=64, D=64, Dv=64, dtype="bf16"),
)

_flex = partial(Problem, B=2, H=2, Hk=2, D=64, Dv=64)  # all lengths multiples of the tiles
_FLEX = (
    _flex(M=64, N=64, dtype="fp32"),
    _flex(M=64, N=64, dtype="bf16", mask=_CAUSAL),
    _flex(M=64, N=64, dtype="fp16", mask=_CAUSAL),
    _flex(M=32, N=64, dtype="fp16"),
    _flex(M=16, N=64, dtype="fp16", H=4, Hk=1),
    _flex(M=64, N=64, dtype="bf16", mask=Mask(causal=True, window_left=16)),
    _flex(M=64, N=64, dtype="fp32", mask=_CAUSAL, Dv=32),
)

_tutorial = partial(Problem, H=2, Hk=2, dtype="fp16", sm_scale=0.5)  # multiples of the tiles too
_TUTORIAL = (
    _tutorial(M=64, N=64, D=32, Dv=32, mask=_CAUSAL),
    _tutorial(M=64, N=64, D=64, Dv=64),
    _tutorial(M=96, N=96, D=32, Dv=32, B=2),
    _tutorial(M=96, N=96, D=64, Dv=64, mask=_CAUSAL),
)

_xformers = partial(Problem, D=32, Dv=32)
_XFORMERS = (
    _xformers(M=32, N=64, dtype="fp16", B=2),
    _xformers(M=90, N=32, dtype="bf16"),
    _xformers(M=2, N=64, dtype="fp32", dout="constant"),
    _xformers(M=64, N=3, dtype="fp16", dout="constant"),
    _xformers(M=68, N=72, dtype="bf16", mask=_CAUSAL, Dv=64),
    _xformers(M=72, N=72, dtype="fp32", mask=_CAUSAL, H=3, Hk=3),
    _xformers(M=34, N=90, dtype="fp16", mask=Mask(causal=True, window_left=20), D=64),
    _xformers(
        M=34,
        N=64,
        dtype="bf16",
        mask=Mask(seqlens_q=(34, 11), seqlens_k=(64, 23)),
        B=2,
        dirty="noise",
    ),
)

_cudnn = partial(Problem, B=2, H=6, Hk=6, D=32, Dv=32, sm_scale=0.125)
_CUDNN = (
    _cudnn(M=24, N=32, dtype="fp16"),
    _cudnn(M=32, N=16, dtype="bf16", Hk=3),
    _cudnn(M=24, N=24, dtype="bf16", mask=_CAUSAL, D=56, Dv=64, Hk=1),
    _cudnn(M=32, N=64, dtype="fp16", mask=Mask(causal=True, window_left=16), D=64, Dv=64, Hk=2),
    _cudnn(M=64, N=64, dtype="bf16", mask=Mask(window_right=16), B=1, Hk=2),
    _cudnn(
        M=24,
        N=32,
        dtype="fp16",
        mask=Mask(seqlens_q=(7, 24), seqlens_k=(32, 19)),
        Hk=2,
        dirty="noise",
    ),
)
_CUDNN_V2 = (
    _cudnn(M=1, N=83, dtype="bf16", D=64, Dv=64),
    _cudnn(M=61, N=61, dtype="fp16", mask=_CAUSAL, B=1, H=3, Hk=1),
    _cudnn(
        M=29, N=94, dtype="bf16", mask=Mask(causal=True, window_left=22), H=4, Hk=2, D=48, Dv=24
    ),
    _cudnn(M=53, N=77, dtype="bf16", mask=Mask(window_left=12, window_right=9), H=2, Hk=2),
    _cudnn(M=77, N=53, dtype="fp16", B=1, H=2, Hk=1, D=37, Dv=37),
    _cudnn(
        M=45,
        N=58,
        dtype="bf16",
        mask=Mask(causal=True, seqlens_q=(45, 13), seqlens_k=(58, 31)),
        Hk=2,
        dirty="noise",
    ),
)

PLAIN: dict[str, tuple[Problem, ...]] = {
    "flash_attention_output": _FLASH_OUTPUT,
    "flash_attention_causal": _FLASH_CAUSAL,
    "flash_attention_triton": _FLASH_TRITON,
    "flash_attention_3": _FLASH_3,
    "pytorch_sdpa_flash": _SDPA_FLASH,
    "pytorch_sdpa_efficient": _SDPA_EFFICIENT,
    "flex_attention": _FLEX,
    "triton_tutorial": _TUTORIAL,
    "xformers": _XFORMERS,
    "cudnn_frontend": _CUDNN,
    "cudnn_frontend_v2": _CUDNN_V2,
}


@dataclass(frozen=True, kw_only=True)
class _Values:
    """A suite's values, made of x from N(0, 1) in the dtype.

    q, k and v are factor * x + shift, and dout is ``dout`` * x.
    """

    factor: float = 1.0
    shift: float = 0.0
    dout: float = 1.0
    uniform: bool = False  # on [0, 1) instead, dout included


_VALUES = {
    "pytorch_sdpa_flash": _Values(uniform=True),
    "pytorch_sdpa_efficient": _Values(uniform=True),
    "triton_tutorial": _Values(factor=0.5),
    "xformers": _Values(factor=3.0),
    "cudnn_frontend": _Values(shift=-0.5, dout=0.1),
    "cudnn_frontend_v2": _Values(shift=-0.5, dout=0.1),
}


def plain(rule: str, problem: Problem) -> Inputs:
    """The tensors of a problem, with the values that a rule's suite draws.

    flash-attention and FlexAttention draw N(0, 1). PyTorch's SDPA tests draw the uniform
    distribution on [0, 1), dout included. The Triton tutorial draws N(0, 1) / 2 for q, k, v;
    xformers draws 3 N(0, 1); cuDNN draws N(0, 1) - 1/2, and N(0, 1) / 10 for dout. Padding holds
    values of the same distribution.

    Args:
        rule: A key of PLAIN.
        problem: A problem with inputs "normal" and no layout "expanded".

    Returns:
        q, k, v, dout.

    Raises:
        ValueError: There is no such rule, or the problem's inputs are of another family.

    Source: the tests that ``benchmarks.peer_rules.rules`` names.
    """
    if rule not in PLAIN:
        raise ValueError(f"rule is {rule!r}; needs one of {tuple(PLAIN)}")
    if problem.inputs != "normal":
        raise ValueError(f"inputs is {problem.inputs!r}; needs 'normal'")
    values = _VALUES.get(rule, _Values())
    made = make(problem)
    for name, x in zip(TENSORS, made.tensors, strict=True):
        if values.uniform:
            x.copy_(stream.uniform(problem.seed, f"plain/{name}", x.shape, problem.device))
        elif name != "dout":
            x.mul_(values.factor).add_(values.shift)
        else:
            x.mul_(values.dout)
    return made
