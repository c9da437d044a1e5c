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
    varlen: bool = _UNSET,
    layouts: Sequence[str] | None = _UNSET,
    dirty: Sequence[str] | None = _UNSET,
    backward: bool = _UNSET,
    devices: Sequence[str] = _UNSET,
    returns_lse: bool | None = _UNSET,
    lse_grad: bool = _UNSET,
    cuda_graphs: bool = _UNSET,
    lse_base: str = _UNSET,
    empty_lse: str | int = _UNSET,
    causal_alignment: str = _UNSET,
    score_mods: Sequence[str] = _UNSET,
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
    backward_reads: Sequence[str] = _UNSET,
    softcap_slope: str = _UNSET,
    dequantised: str = _UNSET,
    v_scale_on: str = _UNSET,
    bitwise: Sequence[str] = _UNSET,
    same_bits: Sequence[str] = _UNSET,
    refuses: Sequence[str] = _UNSET,
    pooled: Callable[..., Any] | None = _UNSET,
    states: Callable[..., Any] | bool | None = _UNSET,
    packed: Callable[..., Any] | None = _UNSET,
    kvcache: Callable[..., Any] | None = _UNSET,
    cache: Sequence[str] = _UNSET,
    page_sizes: Sequence[int] | None = _UNSET,
    cache_formats: Sequence[str] = _UNSET,
    cache_scales: Sequence[str] = _UNSET,
    scale_divides: bool = _UNSET,
    writing: Mapping[str, Any] = _UNSET,
    kvcache_splits: Callable[[Any], int] | None = _UNSET,
    tiles: Callable[[Any], tuple[int, int]] | None = _UNSET,
    paths: Callable[[Any], tuple[str, ...]] | None = _UNSET,
    configs: Mapping[str, Mapping[str, Any]] = _UNSET,
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

    Args:
        dtypes: Supported dtypes, from "fp16", "bf16", "fp32", "fp64".
        head_dims: Supported sizes of D and Dv; None is any.
        seqlen_multiple: M and N must be multiples of this.
        max_seqlen: The largest M and N; None is any.
        gqa: Whether H may exceed Hk.
        m_ne_n: Whether M may differ from N.
        m_gt_n: Whether M may exceed N. False requires M <= N, of each sequence too.
        one_query: Whether M is always 1, as in a decoding kernel. seqlen_multiple is then one of N,
            and only keys have lengths.
        dv_ne_d: Whether Dv may differ from D.
        zero_sizes: Whether B, M or N may be 0, and the keys of an entry of a cache.
        masks: Supported kinds of masks: "causal", "window", "padding" (sequence lengths), "custom"
            (classes that add a predicate, read with ``mask.dense``).
        always_causal: Whether every mask is causal. If ``masks`` has nothing but "causal", the
            kernel need not take ``mask=``.
        fixed_scale: The scale of a kernel that is called without ``sm_scale=``: "1/sqrt(D)" or a
            number; None for a kernel that takes any.
        varlen: Whether the kernel takes packed sequences: q (total_q, H, D), k (total_k, Hk, D), v
            (total_k, Hk, Dv), and the keywords ``cu_seqlens_q``, ``cu_seqlens_k`` (int32 tensors
            of B + 1 offsets), ``max_seqlen_q``, ``max_seqlen_k`` (ints). It returns out (total_q,
            H, Dv), and lse (H, total_q). No tensor holds padding.
        layouts: Supported layouts, from ``fa_verify.oracles.problem.LAYOUTS``; None is any.
        dirty: Values that padding may hold, from ``padding_values.PADDING_VALUES``; None is any.
        backward: Whether the kernel has gradients.
        devices: Devices that the kernel runs on, from "cpu", "cuda".
        returns_lse: Whether the kernel returns (out, lse); None accepts either.
        lse_grad: Whether lse is differentiable, so that losses on lse are checked too.
        cuda_graphs: Whether a call can be captured in a CUDA graph, after one that is not.
        lse_base: Base of the logarithm in lse, "e" or "2".
        empty_lse: lse of a row without a visible key: "-inf", "+inf" or 0.
        causal_alignment: "bottom-right"; or "top-left", where row m is at position m. For
            "top-left", causal masks and windows are drawn only where both alignments agree.
        score_mods: Score modifications that the kernel accepts: "softcap" (``softcap=``, a float),
            "alibi" (``alibi_slopes=``, (H,) or (B, H)), "bias" (``bias=``, (B or 1, H or 1,
            M or 1, N or 1)), "sinks" (``sinks=``, float32 (H,)). lse then includes the sink.
        dots: "ieee", or "tf32" if dot products of fp32 inputs use TF32.
        tf32_conversion: How TF32 dot products convert their operands: "truncate" (no conversion,
            as tensor cores ignore the low 13 bits), "nearest" (ties to even), "nearest_away"
            (``cvt.rna.tf32``), or "unknown".
        accumulator: The accumulation constant: 1 for IEEE fp32 and Hopper, 2 for A100-like, 4 for
            V100-like tensor cores.
        block_n: Width of the key tiles, 16 if unknown.
        prescales: Operands that are multiplied by the scale and rounded before the dot product:
            "none", "q", "k", "qk".
        p_dtype: Whether P is cast to the "input" dtype before its dot product or stays "fp32".
        p_normalised: Whether P is divided by its sum before the cast.
        ds_scaled: Whether dS is multiplied by sm_scale before its cast.
        ds_roundings: Number of times that dS and P are rounded to their dtype.
        ds_from: Whether dS is computed from the "unrounded" P or from P "rounded" to its dtype.
        l_order: Whether the softmax sum runs in "any" order or "tile" by tile.
        l_tile: Keys that a tile adds at once to the softmax sum, where it runs tile by tile; 0
            takes the width of ``tiles``, or ``block_n``.
        l_from: Whether the softmax sum adds the "unrounded" or the "rounded" P.
        group_sum: Whether dk and dv are summed over a group of heads in "fp32" or in their
            "dtype".
        splits: The largest number of programs that share the key tiles of a row.
        atomic: Outputs that are summed in memory by atomics, from "dq", "dk", "dv".
        partial_sums: Whether atomics add in "fp32", or round each tile's sum to the "input" dtype
            and add in it.
        rescale_threshold: How far a row's maximum may rise, in powers of 2 and up to 15, before
            its sums are rescaled.
        flushes: Whether elementwise float32 numbers below 2**-126 are flushed to 0.
        backward_reads: Results of the forward that the backward reads as they were returned:
            "out", and "lse" or "m_and_l" (the maximum and the sum of a row); () for automatic
            differentiation. Gradients are judged given these results too.
        softcap_slope: Whether the slope of a softcap is the "difference" 1 - tanh**2, or "exact",
            to a few roundings of itself, where tanh is nearly 1.
        dequantised: Whether products of codes and scales are "exact" but for float32 roundings, or
            operands of dots that are "rounded" to the dtype of q.
        v_scale_on: Whether scales of values multiply "v" or its sums, or "p" before its cast.
        bitwise: Guarantees promised bitwise, from "G4", "G5", "G8", "G9", "G10". The others are
            compared within the bound.
        same_bits: Choices that change no bit of a result: "batch", the number and the lengths of
            other entries; "chunks" of queries; "heads", slices of them; "varlen", padding and
            packing. "inference" says that gradients may be required or not.
        refuses: Bad calls for which the kernel raises an exception of any type, and changes none of
            its inputs, from ``bad_calls.BAD_CALLS``. The others are not asked.
        pooled: A function with the kernel's arguments, ``pool="mean"`` or "max", and
            ``pool_size=(rows, keys)``, that returns the probabilities pooled over blocks of pairs.
        states: A function of outs (P, B, H, M, Dv) and lses (P, B, H, M) that returns the merged
            (out, lse); True if the kernel itself is one, and computes no attention.
        packed: A function of packed sequences, which takes what ``varlen`` describes, beside a
            kernel that takes padded tensors; ``same_bits`` compares both.
        kvcache: A function that attends to a cache, beside a kernel of padded tensors. It takes q
            (B, H, M, D), k_cache (pages, page_size, Hk, D), v_cache (pages, page_size, Hk, Dv) and
            keywords, and returns out (B, H, M, Dv), or out and lse (B, H, M). Its keywords are
            those of ``fa_kernels.flash_attention_with_kvcache`` that declarations leave open.
        cache: Features of calls with a cache, from "contiguous" (``cache_batch_idx=``), "paged"
            (``page_table=``) and "append" (``k=``, ``v=``). Without ``kvcache``, the kernel itself
            is such a function, and takes no padded tensors.
        page_sizes: Supported numbers of rows of a page; None is any.
        cache_formats: Formats of the cached keys and values, from "input" (the dtype of q),
            "e4m3fn", "e5m2" and "int8". A cache of codes has the keywords ``k_scale`` and
            ``v_scale``.
        cache_scales: Places that share a scale, from "tensor" (1,), "head" (Hk,), "page" (pages,
            Hk) and "token_head" (pages, page_size, Hk), all float32.
        scale_divides: Whether a number is its code divided by the scale, and not times it.
        writing: How new keys and values become codes: a dict of the fields of
            ``fa_verify.oracles.formats.writing.Writing``.
        kvcache_splits: Function from a problem to the ``splits`` of ``kvcache``.
        tiles: Function from a problem to (block_m, block_n) of the forward, for reports and
            ``l_tile``.
        paths: Function from a problem to the names of the code paths that it takes, a tuple of
            short words, for the coverage of a whole run.
        configs: Name of a tile configuration to the declarations that it replaces: "dtypes",
            "same_bits" or those from ``dots`` to ``softcap_slope``. With several, the kernel takes
            ``config=``.

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
