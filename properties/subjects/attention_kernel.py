"""The decorator that declares what an attention kernel supports and how it rounds."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from fa_verify.properties.subjects.declarations import (
    check_declarations,
    unknown_word,
    without_none,
)

__all__ = ["attention_kernel"]

_Kernel = TypeVar("_Kernel", bound=Callable[..., Any])
# The default of every word: nothing is declared, which is not the same as declaring None.
_UNSET: Any = type("_Unset", (), {"__repr__": lambda self: "<undeclared>"})()


def attention_kernel(
    *,
    dtypes: Sequence[str] = _UNSET,
    head_dims: Sequence[int] | None = _UNSET,
    seqlen_multiple: int = _UNSET,
    max_seqlen: int | None = _UNSET,
    gqa: bool = _UNSET,
    m_ne_n: bool = _UNSET,
    dv_ne_d: bool = _UNSET,
    zero_sizes: bool = _UNSET,
    masks: Sequence[str] = _UNSET,
    layouts: Sequence[str] | None = _UNSET,
    dirty: Sequence[str] | None = _UNSET,
    backward: bool = _UNSET,
    devices: Sequence[str] = _UNSET,
    returns_lse: bool | None = _UNSET,
    lse_grad: bool = _UNSET,
    lse_base: str = _UNSET,
    empty_lse: str | int = _UNSET,
    causal_alignment: str = _UNSET,
    score_mods: Sequence[str] = _UNSET,
    dots: str = _UNSET,
    accumulator: float = _UNSET,
    block_n: int = _UNSET,
    prescales: str = _UNSET,
    p_dtype: str = _UNSET,
    p_normalised: bool = _UNSET,
    ds_scaled: bool = _UNSET,
    ds_roundings: int = _UNSET,
    ds_from: str = _UNSET,
    l_order: str = _UNSET,
    l_from: str = _UNSET,
    group_sum: str = _UNSET,
    splits: int = _UNSET,
    atomic: Sequence[str] = _UNSET,
    rescale_threshold: float = _UNSET,
    flushes: bool = _UNSET,
    bitwise: Sequence[str] = _UNSET,
    pooled: Callable[..., Any] | None = _UNSET,
    tiles: Callable[[Any], tuple[int, int]] | None = _UNSET,
    configs: Mapping[str, Mapping[str, Any]] = _UNSET,
    **unknown: Any,
) -> Callable[[_Kernel], _Kernel]:
    """Declares what a kernel supports, which conventions it has, how it rounds.

    Example::

        @attention_kernel(dtypes=("fp16", "bf16"), head_dims=(64, 128), p_dtype="fp32")
        def attention(q, k, v, *, mask, sm_scale): ...

    The decorator sets attributes of the same names and returns the kernel; attributes set by hand
    declare the same. On a class it declares for the ``apply`` of an autograd function. An
    undeclared word leaves the domain open, the conventions ours, the bound the strictest, and
    promises nothing to the bit.

    Args:
        dtypes: Supported dtypes out of "fp16", "bf16", "fp32", "fp64".
        head_dims: Supported sizes of D and Dv; None is any.
        seqlen_multiple: M and N have to be multiples of this.
        max_seqlen: The largest M and N; None is any.
        gqa: Whether H may exceed Hk.
        m_ne_n: Whether M may differ from N.
        dv_ne_d: Whether Dv may differ from D.
        zero_sizes: Whether B, M or N may be 0.
        masks: Supported kinds of masks beside none at all: "causal", "window", "padding" (lengths),
            "custom" (classes that add a predicate, read by ``mask.dense``).
        layouts: Supported layouts out of ``fa_verify.oracles.problem.LAYOUTS``; None is any.
        dirty: What padding may hold, out of ``padding_values.PADDING_VALUES``; None is anything.
        backward: Whether it has gradients.
        devices: Where it runs: "cpu", "cuda".
        returns_lse: Whether it returns (out, lse); None finds out.
        lse_grad: Whether lse is differentiable, so that losses on lse are checked too.
        lse_base: Base of the logarithm in lse, "e" or "2".
        empty_lse: Its lse of a row without a visible key: "-inf", "+inf" or 0.
        causal_alignment: "bottom-right", or "top-left", where row m stands at position m. Causal
            masks and windows are drawn for the latter only where both agree.
        score_mods: Changes of scores that the call takes: "softcap" (``softcap=``, a float),
            "alibi" (``alibi_slopes=``, (H,) or (B, H)), "bias" (``bias=``, (B or 1, H or 1,
            M or 1, N or 1)).
        dots: "ieee", or "tf32" for fp32 inputs whose dots run in TF32.
        accumulator: The accumulation constant: 1 for IEEE fp32 and Hopper, 2 for A100-like, 4 for
            V100-like tensor cores.
        block_n: Width of the key tiles, 16 where unknown.
        prescales: Operands multiplied by the scale and rounded before the dot: "none", "q", "k",
            "qk".
        p_dtype: P is cast to the "input" dtype before its dot, or stays "fp32".
        p_normalised: Whether P is divided by its sum before the cast.
        ds_scaled: Whether dS is multiplied by sm_scale before its cast.
        ds_roundings: How often dS and P are rounded to their dtype.
        ds_from: dS is made of the "unrounded" P or of P "rounded" to its dtype.
        l_order: The sum of the softmax runs in "any" order, or "tile" by tile.
        l_from: The sum of the softmax adds the "unrounded" or the "rounded" P.
        group_sum: dk and dv are summed over a group of heads in "fp32" or in their "dtype".
        splits: The largest number of programs that share the key tiles of a row.
        atomic: Outputs summed in memory by atomics, ("dq",) or none.
        rescale_threshold: By how much a row's maximum may rise, in powers of 2 and up to 15, before
            its sums are rescaled.
        flushes: Whether elementwise float32 numbers below 2**-126 count as 0.
        bitwise: Guarantees promised to the bit, out of "G4", "G5", "G8", "G9", "G10"; the others
            are held to the bound.
        pooled: A function that is called as the kernel is, with ``pool="mean"`` or "max" and
            ``pool_size=(rows, keys)``, and returns the probabilities pooled over blocks of pairs.
        tiles: (problem) -> (block_m, block_n) of the forward, for reports.
        configs: Names of tile configurations, each with the words that it replaces: "dtypes" or
            those from ``dots`` to ``flushes``. With several, the kernel takes ``config=``.

    Returns:
        The decorator, which returns the kernel itself.

    Raises:
        ValueError: A word is unknown, or has a value that it cannot have.
        TypeError: A class defines a method of the word's name, or a kernel takes no attributes.
    """
    declared = {word: value for word, value in locals().items() if value is not _UNSET}
    del declared["unknown"]

    def declare(kernel: _Kernel) -> _Kernel:
        name = getattr(kernel, "__name__", type(kernel).__name__)
        for word in unknown:
            raise unknown_word(name, word)
        check_declarations(name, without_none(declared))
        for word, value in declared.items():
            if inspect.isclass(kernel) and inspect.isroutine(getattr(kernel, word, None)):
                raise TypeError(f"{name}.{word} is a method; it cannot be declared")
            try:
                setattr(kernel, word, value)
            except AttributeError:
                raise TypeError(f"{name} takes no attributes; wrap it in a function") from None
        return kernel

    return declare
