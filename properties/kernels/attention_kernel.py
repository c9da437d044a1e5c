"""The decorator that declares what an attention kernel supports and how it rounds."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from fa_verify.properties.kernels.declared import (
    DECLARATIONS,
    check_declarations,
    unknown_word,
    without_none,
)

__all__ = ["attention_kernel"]

_Kernel = TypeVar("_Kernel", bound=Callable[..., Any])
# The default of every declaration: not declared, which differs from declaring None.
_UNSET: Any = type("_Unset", (), {"__repr__": lambda self: "<undeclared>"})()


def attention_kernel(
    *,
    dtypes: Sequence[str] = _UNSET,
    head_dims: Sequence[int] | None = _UNSET,
    seqlen_multiple: int = _UNSET,
    max_seqlen: int | None = _UNSET,
    gqa: bool = _UNSET,
    m_ne_n: bool = _UNSET,
    m_gt_n: bool = _UNSET,
    one_query: bool = _UNSET,
    dv_ne_d: bool = _UNSET,
    zero_sizes: bool = _UNSET,
    masks: Sequence[str] = _UNSET,
    always_causal: bool = _UNSET,
    fixed_scale: str | float | None = _UNSET,
    layouts: Sequence[str] | None = _UNSET,
    dirty: Sequence[str] | None = _UNSET,
    backward: bool = _UNSET,
    devices: Sequence[str] = _UNSET,
    cuda_graphs: bool = _UNSET,
    varlen: bool = _UNSET,
    returns_lse: bool | None = _UNSET,
    lse_grad: bool = _UNSET,
    lse_base: str = _UNSET,
    empty_lse: str | int = _UNSET,
    causal_alignment: str = _UNSET,
    score_mods: Sequence[str] = _UNSET,
    bitwise: Sequence[str] = _UNSET,
    same_bits: Sequence[str] = _UNSET,
    refuses: Sequence[str] = _UNSET,
    packed: Callable[..., Any] | None = _UNSET,
    pooled: Callable[..., Any] | None = _UNSET,
    kvcache: Callable[..., Any] | None = _UNSET,
    cache: Sequence[str] = _UNSET,
    page_sizes: Sequence[int] | None = _UNSET,
    cache_formats: Sequence[str] = _UNSET,
    cache_scales: Sequence[str] = _UNSET,
    scale_divides: bool = _UNSET,
    writing: Mapping[str, Any] = _UNSET,
    kvcache_splits: Callable[[Any], int] | None = _UNSET,
    states: Callable[..., Any] | bool | None = _UNSET,
    quantised: Callable[..., Any] | bool | None = _UNSET,
    qk_formats: Sequence[str] = _UNSET,
    v_formats: Sequence[str] = _UNSET,
    qk_scales: Sequence[str] = _UNSET,
    v_scales: Sequence[str] = _UNSET,
    scale_blocks: Sequence[int] = _UNSET,
    quantised_numerics: Mapping[str, Any] = _UNSET,
    tiles: Callable[[Any], tuple[int, int]] | None = _UNSET,
    paths: Callable[[Any], tuple[str, ...]] | None = _UNSET,
    configs: Mapping[str, Mapping[str, Any]] = _UNSET,
    dots: str = _UNSET,
    tf32_conversion: str = _UNSET,
    accumulator: float = _UNSET,
    block_n: int = _UNSET,
    prescales: str = _UNSET,
    p_dtype: str = _UNSET,
    p_normalised: bool = _UNSET,
    ds_scaled: bool = _UNSET,
    ds_roundings: int = _UNSET,
    ds_from: str = _UNSET,
    l_order: str = _UNSET,
    l_tile: int = _UNSET,
    l_from: str = _UNSET,
    group_sum: str = _UNSET,
    splits: int = _UNSET,
    atomic: Sequence[str] = _UNSET,
    partial_sums: str = _UNSET,
    rescale_threshold: float = _UNSET,
    flushes: bool = _UNSET,
    softcap_slope: str = _UNSET,
    backward_reads: Sequence[str] = _UNSET,
    dequantised: str = _UNSET,
    v_scale_on: str = _UNSET,
    **unknown: Any,
) -> Callable[[_Kernel], _Kernel]:
    """Declare what a kernel supports, its conventions and how it rounds.

    Example::

        @attention_kernel(dtypes=("fp16", "bf16"), head_dims=(64, 128), p_dtype="fp32")
        def attention(q, k, v, *, mask, sm_scale): ...

    The decorator sets attributes with the names of its arguments and returns the kernel. Attributes
    set by hand have the same effect. On a class it applies to the ``apply`` of an autograd
    function. Without declarations a kernel supports everything, uses this project's conventions, is
    held to the strictest bound and promises nothing bitwise.

    Returns:
        The decorator, which returns the kernel itself.

    Raises:
        ValueError: A declaration is unknown or has an invalid value.
        TypeError: A class defines a method with the name of a declaration, or attributes cannot be
            set on the kernel.
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
                raise TypeError(f"{name}.{word} is a method and cannot be declared; rename it")
            try:
                setattr(kernel, word, value)
            except AttributeError:
                raise TypeError(f"{name} accepts no attributes; wrap it in a function") from None
        return kernel

    return declare


def _arguments() -> str:
    """Return the section of the arguments, from the table of declarations."""
    rows = [
        textwrap.fill(
            f"{word}: {known.text[0].upper()}{known.text[1:]}.",
            width=100, initial_indent=" " * 8, subsequent_indent=" " * 12,
        )
        for word, known in DECLARATIONS.items()
    ]  # fmt: skip
    return "\n".join(["Args:", *rows, "", "    Returns:"])


attention_kernel.__doc__ = str(attention_kernel.__doc__).replace("Returns:", _arguments(), 1)
