"""The declarations of a kernel: each a field, with its values, its meaning and its effect."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fa_verify.oracles.calls.cache import OF_INPUTS, SCALES
from fa_verify.oracles.calls.quantised import QK_FORMATS, QK_SCALES, V_FORMATS, V_SCALES
from fa_verify.oracles.declaration import (
    declared,
    function,
    one_of,
    sizes,
    some_of,
    whole_number,
)
from fa_verify.oracles.formats.writing import Writing
from fa_verify.oracles.outputs import LONGEST_TILE
from fa_verify.oracles.problem import DTYPES, LAYOUTS, Problem
from fa_verify.oracles.quantised_numerics import QuantisedNumerics, quantised_numerics
from fa_verify.properties.inputs.bad_calls import BAD_CALLS
from fa_verify.properties.inputs.dlse_families import NO_DLSE
from fa_verify.properties.kernels import phrases
from fa_verify.properties.kernels.vocabulary import (
    BITWISE,
    CACHE_FORMATS,
    CACHES,
    DEFAULT_SCALE,
    DEVICES,
    LARGEST,
    MASKS,
    PADDINGS,
    SAME_BITS,
    SCORE_MODS,
    any_longer,
    has_multiples,
    has_padding_of,
    has_sizes,
    is_aligned,
    lengths_of,
    masks_of,
    score_mods_of,
)

__all__ = ["Declarations", "not_supported"]

_NOT_SUPPORTED = re.compile("f(p|loat)8|int8|dropout|hip|rocm|amd", re.IGNORECASE)


def not_supported(*words: object) -> str:
    """Return a sentence for words that ask for a feature that is not supported; else nothing."""
    asks = any(_NOT_SUPPORTED.search(str(word)) for word in words)
    if not asks:
        return ""
    return "; dropout and AMD GPUs are not supported, and codes of 8 bits by `quantised` alone"


def _scale(where: str, given: object) -> object:
    """Check ``fixed_scale``."""
    number = isinstance(given, int | float) and not isinstance(given, bool)
    if given != DEFAULT_SCALE and not (number and 0 < given < math.inf):  # type: ignore[operator]
        raise ValueError(f"{where} is {given!r}; needs {DEFAULT_SCALE!r} or a finite number > 0")
    return given


def _two_sizes(where: str, given: object) -> tuple[int, ...]:
    """Return ``scale_blocks`` as a tuple of two sizes."""
    found: tuple[int, ...] = sizes(LONGEST_TILE)(where, given)
    if len(found) != 2:
        raise ValueError(f"{where} is {given!r}; needs two sizes, of rows and of keys")
    return found


def _configs(where: str, given: object) -> object:
    """Check that ``configs`` is a dict of names to dicts, whose words are checked elsewhere."""
    if not isinstance(given, Mapping) or not given:
        raise ValueError(f"{where} is {given!r}; needs a dict of names to declarations")
    for config, replaced in given.items():
        if not isinstance(config, str):
            raise ValueError(f"{where} has {config!r}; needs names, which are str")
        if not isinstance(replaced, Mapping):
            raise ValueError(f"{where}[{config!r}] is {replaced!r}; needs a dict of declarations")
    return given


def _writing(where: str, given: object) -> Writing:
    """Convert a dict of the fields of ``Writing``."""
    if isinstance(given, Writing):
        return given
    if not isinstance(given, Mapping):
        raise ValueError(f"{where} is {given!r}; needs a dict of the fields of Writing")
    try:
        return Writing(**given)
    except TypeError:
        known = tuple(item.name for item in dataclasses.fields(Writing))
        raise ValueError(f"{where} is {given!r}; needs fields out of {known}") from None
    except ValueError as error:  # the message begins with the name of the field
        raise ValueError(f"{where}.{error}") from None


_WRITING = Writing()


@dataclass(frozen=True, kw_only=True)
class Declarations:
    """The domain, the conventions and the promises of a kernel; ``Numerics`` says how it rounds."""

    dtypes: tuple[str, ...] = declared(
        DTYPES,
        'out of "fp16", "bf16", "fp32", "fp64"',
        some_of(DTYPES, hint=not_supported, least=1),
        "domain",
        narrows=phrases.without(DTYPES),
        admits=lambda of, problem: problem.dtype in of.dtypes_of(problem.config),
    )
    head_dims: tuple[int, ...] | None = declared(
        None,
        "sizes of D and Dv; None is any, and draws sizes up to 256",
        sizes(LARGEST),
        "domain",
        none_is_nothing=True,
        narrows=phrases.sizes_of("D"),
        admits=lambda of, problem: (
            of.head_dims is None or {problem.D, problem.Dv} <= {*of.head_dims}
        ),
    )
    seqlen_multiple: int = declared(
        1,
        "M and N are multiples of this",
        whole_number(1, LARGEST),
        "domain",
        narrows=lambda n: f"M and N in multiples of {n}" if n > 1 else "",
        admits=has_multiples,
    )
    max_seqlen: int | None = declared(
        None,
        "the largest M and N",
        whole_number(1, 2**31 - 1),
        "domain",
        none_is_nothing=True,
        narrows=lambda n: f"M and N up to {n:,}" if n else "",
        admits=lambda of, problem: (
            of.max_seqlen is None or max(problem.M, problem.N) <= of.max_seqlen
        ),
    )
    gqa: bool = declared(
        True,
        "whether H may exceed Hk (grouped heads)",
        one_of(True, False),
        "domain",
        narrows=phrases.no("no grouped heads"),
        admits=lambda of, problem: of.gqa or problem.G == 1,
    )
    m_ne_n: bool = declared(
        True,
        "whether M may differ from N",
        one_of(True, False),
        "domain",
        narrows=phrases.no("M = N"),
        admits=lambda of, problem: of.m_ne_n or problem.M == problem.N,
    )
    m_gt_n: bool = declared(
        True,
        "whether M may exceed N; False requires M <= N, of each sequence too",
        one_of(True, False),
        "domain",
        narrows=phrases.no("M <= N"),
        admits=lambda of, problem: of.m_gt_n or not any_longer(problem),
    )
    one_query: bool = declared(
        False,
        "M is always 1, as in a decoding kernel; `seqlen_multiple` is then one of N, and only "
        "keys have lengths",
        one_of(False, True),
        "domain",
        narrows=phrases.only("M = 1"),
        admits=lambda of, problem: not of.one_query or {problem.M, *lengths_of(problem)[0]} == {1},
    )
    dv_ne_d: bool = declared(
        True,
        "whether Dv may differ from D",
        one_of(True, False),
        "domain",
        narrows=phrases.no("Dv = D"),
        admits=lambda of, problem: of.dv_ne_d or problem.D == problem.Dv,
    )
    zero_sizes: bool = declared(
        True,
        "whether B, M or N may be 0, and the keys of an entry of a cache",
        one_of(True, False),
        "domain",
        narrows=phrases.no("no size of 0"),
        admits=has_sizes,
    )
    masks: tuple[str, ...] = declared(
        MASKS,
        'out of "causal", "window", "padding", "custom" (`dense` of any class)',
        some_of(MASKS),
        "domain",
        narrows=phrases.masks,
        admits=lambda of, problem: masks_of(problem.mask) <= {*of.masks},
    )
    always_causal: bool = declared(
        False,
        "every mask is causal",
        one_of(False, True),
        "domain",
        narrows=phrases.only("always causal"),
        admits=lambda of, problem: not of.always_causal or problem.mask.causal,
    )
    fixed_scale: str | float | None = declared(
        None,
        'the scale of a kernel that takes no `sm_scale`: "1/sqrt(D)" or a number',
        _scale,
        "domain",
        none_is_nothing=True,
        narrows=lambda scale: "" if scale is None else f"sm_scale = {scale}",
        admits=lambda of, problem: of.has_scale(problem),
    )
    layouts: tuple[str, ...] | None = declared(
        None,
        "storage layouts of q, k, v and dout",
        some_of(LAYOUTS, least=1),
        "domain",
        none_is_nothing=True,
        narrows=lambda given: "" if given is None else phrases.without(LAYOUTS)(given),
        admits=lambda of, problem: of.layouts is None or {*problem.layouts} <= {*of.layouts},
    )
    dirty: tuple[str, ...] | None = declared(
        None,
        "values that padding may hold: zeros, noise, NaN, Inf, the largest values",
        some_of(PADDINGS, least=1),
        "domain",
        none_is_nothing=True,
        narrows=lambda given: "" if given is None else phrases.without(PADDINGS)(given),
        admits=has_padding_of,
    )
    backward: bool = declared(
        True,
        "whether the kernel has gradients",
        one_of(True, False),
        "domain",
        narrows=phrases.no("no gradients"),
    )
    devices: tuple[str, ...] = declared(
        DEVICES,
        '"cpu", "cuda"',
        some_of(DEVICES, hint=not_supported, least=1),
        "domain",
        narrows=phrases.without(DEVICES),
        admits=lambda of, problem: problem.device in of.devices,
    )
    cuda_graphs: bool = declared(
        True,
        "whether a call can be captured in a CUDA graph, after one that is not",
        one_of(True, False),
        "domain",
        narrows=phrases.no("no CUDA graphs"),
    )
    varlen: bool = declared(
        False,
        "the kernel takes packed sequences, and `cu_seqlens_q`, `cu_seqlens_k`, `max_seqlen_q`, "
        "`max_seqlen_k`: [Inference kernels](inference-kernels.md)",
        one_of(False, True),
        "conventions",
    )
    returns_lse: bool | None = declared(
        None,
        "whether the callable returns (out, lse); None finds out",
        one_of(True, False),
        "conventions",
        none_is_nothing=True,
    )
    lse_grad: bool = declared(
        False,
        "lse is differentiable: losses on lse, or on out and lse, are drawn too",
        one_of(True, False),
        "conventions",
        admits=lambda of, problem: of.lse_grad or problem.dlse == NO_DLSE,
    )
    lse_base: str = declared(
        "e",
        'base of the logarithm in lse, "e" or "2"',
        one_of("e", "2"),
        "conventions",
        is_assumed=True,
    )
    empty_lse: str | int = declared(
        "-inf",
        'lse of a row without a visible key: "-inf", "+inf" or 0',
        one_of("-inf", "+inf", 0),
        "conventions",
        is_assumed=True,
    )
    causal_alignment: str = declared(
        "bottom-right",
        '"bottom-right" or "top-left"; problems are drawn on which both agree',
        one_of("bottom-right", "top-left"),
        "conventions",
        is_assumed=True,
        admits=is_aligned,
    )
    score_mods: tuple[str, ...] = declared(
        (),
        'arguments beside the mask: "softcap" (`softcap=`), "alibi" (`alibi_slopes=`), "bias" '
        '(`bias=`), "sinks" (`sinks=`; lse includes them). One that a problem lacks is not passed',
        some_of(SCORE_MODS),
        "conventions",
        admits=lambda of, problem: {*score_mods_of(problem)} <= {*of.score_mods},
    )
    bitwise: tuple[str, ...] = declared(
        (),
        "guarantees that hold to the bit, out of G4, G5, G8, G9, G10; the others are held to the "
        "bound",
        some_of(BITWISE),
        "promises",
    )
    same_bits: tuple[str, ...] = declared(
        (),
        'choices that change no bit of a result, out of "batch", "chunks", "heads", "varlen" and '
        '"inference". [Batch invariance](batch-invariance.md) explains them',
        some_of(tuple(SAME_BITS)),
        "promises",
    )
    refuses: tuple[str, ...] = declared(
        (),
        "bad calls for which the kernel raises an exception, of any type, and leaves its inputs "
        "as they are: [Bad calls](#bad-calls)",
        some_of(BAD_CALLS),
        "promises",
    )
    packed: Callable[..., Any] | None = declared(
        None,
        "a function of packed sequences, with the arguments that `varlen` describes, beside a "
        "kernel of padded tensors; `same_bits` compares both",
        function("a function of packed sequences"),
        "promises",
        none_is_nothing=True,
        is_function=True,
    )
    pooled: Callable[..., torch.Tensor] | None = declared(
        None,
        'a function with the same arguments, and `pool="mean"` or `"max"` and `pool_size=(rows, '
        "keys)`, that returns probabilities pooled over blocks",
        function("a function that returns the pooled probabilities"),
        "promises",
        none_is_nothing=True,
        is_function=True,
    )
    kvcache: Callable[..., Any] | None = declared(
        None,
        "a function of queries and a cache, beside a kernel of padded tensors, that returns out, "
        "or out and lse",
        function("a function of (q, k_cache, v_cache)"),
        "promises",
        none_is_nothing=True,
        is_function=True,
    )
    cache: tuple[str, ...] = declared(
        CACHES,
        'the calls that a cache kernel takes, out of "contiguous", "paged" and "append": '
        "[Decoding](decoding.md#other-kernels). Without `kvcache`, the kernel itself takes a "
        "cache, and no padded tensors",
        some_of(CACHES, least=1),
        "promises",
        narrows=phrases.without(CACHES),
    )
    page_sizes: tuple[int, ...] | None = declared(
        None,
        "numbers of rows that a page may have; None is any",
        sizes(LONGEST_TILE),
        "promises",
        none_is_nothing=True,
        narrows=phrases.sizes_of("pages"),
    )
    cache_formats: tuple[str, ...] = declared(
        (OF_INPUTS,),
        'formats of the cached keys and values, out of "input" (the dtype of q), "e4m3fn", "e5m2" '
        'and "int8": [Formats](formats.md)',
        some_of(CACHE_FORMATS, least=1),
        "promises",
    )
    cache_scales: tuple[str, ...] = declared(
        SCALES[:1],
        'the places that share a scale, out of "tensor", "head", "page" and "token_head"',
        some_of(SCALES, least=1),
        "promises",
    )
    scale_divides: bool = declared(
        False,
        "whether a number is its code divided by its scale, and not times it",
        one_of(False, True),
        "promises",
    )
    writing: Writing = declared(
        _WRITING,
        "how an append makes codes and scales: a dict of `rounding`, `overflow`, `by` and "
        "`least_scale`",
        _writing,
        "promises",
    )
    kvcache_splits: Callable[[Problem], int] | None = declared(
        None,
        "a function from a problem to the `splits` of `kvcache`; without it they are the kernel's",
        function("a function of a problem"),
        "promises",
        none_is_nothing=True,
        is_function=True,
    )
    states: Callable[..., Any] | None = declared(
        None,
        "a function of `outs` (P, B, H, M, Dv) and `lses` (P, B, H, M) that returns the merged "
        "out and lse; True for a kernel that is one, and computes no attention: "
        "[Merging](merging.md#other-merge-functions)",
        function("a function of (outs, lses), or True for a kernel that is one", True),
        "promises",
        none_is_nothing=True,
        is_function=True,
    )
    quantised: Callable[..., Any] | None = declared(
        None,
        "a function of `(q, k, v, q_scale, k_scale, v_scale)`, the first three in codes of 8 bits,"
        " that returns out, or out and lse; True for a kernel that is one, and takes nothing else: "
        "[Quantised attention](quantised.md)",
        function("a function of (q, k, v, q_scale, k_scale, v_scale), or True", True),
        "quantised",
        none_is_nothing=True,
        is_function=True,
    )
    qk_formats: tuple[str, ...] = declared(
        QK_FORMATS[:1],
        'formats of q and k, out of "e4m3fn", "e5m2" and "int8"',
        some_of(QK_FORMATS, least=1),
        "quantised",
    )
    v_formats: tuple[str, ...] = declared(
        V_FORMATS[:1],
        'formats of v, out of "e4m3fn", "e5m2" and "input", the dtype of out',
        some_of(V_FORMATS, least=1),
        "quantised",
    )
    qk_scales: tuple[str, ...] = declared(
        QK_SCALES[:1],
        'places of the scales of q and k: one for a "tensor", an entry and "head", a "token" and '
        'head, or a "block" of tokens and head',
        some_of(QK_SCALES, least=1),
        "quantised",
    )
    v_scales: tuple[str, ...] = declared(
        V_SCALES[:1],
        'places of the scales of v: "tensor", "head", or "channel" and head',
        some_of(V_SCALES, least=1),
        "quantised",
    )
    scale_blocks: tuple[int, ...] = declared(
        (128, 64),
        'the rows, and the keys, that share a scale of a "block"',
        _two_sizes,
        "quantised",
    )
    quantised_numerics: QuantisedNumerics = declared(
        QuantisedNumerics(),
        "a dict of the words below: how `quantised` rounds, beside `block_n`, `rescale_threshold` "
        "and `l_from`",
        quantised_numerics,
        "quantised",
    )
    tiles: Callable[[Problem], tuple[int, int]] | None = declared(
        None,
        "a function from a problem to (block_m, block_n) of the forward, for reports and `l_tile`",
        function("a function of a problem"),
        "promises",
        none_is_nothing=True,
        is_function=True,
    )
    paths: Callable[[Problem], tuple[str, ...]] | None = declared(
        None,
        "a function from a problem to the names of the code paths that it takes, a tuple of short"
        " words, for the coverage that a whole run prints",
        function("a function of a problem"),
        "promises",
        none_is_nothing=True,
        is_function=True,
    )
    configs: Mapping[str, Mapping[str, Any]] = declared(
        {"default": {}},
        "names of tile configurations, each with the declarations that it replaces; the callable "
        "then takes `config=`",
        _configs,
        "promises",
        admits=lambda of, problem: problem.config in of.configs,
    )

    def dtypes_of(self, config: str) -> tuple[str, ...]:
        """Return the dtypes of a configuration."""
        found: tuple[str, ...] = self.configs.get(config, {}).get("dtypes", self.dtypes)
        return found

    def has_scale(self, problem: Problem) -> bool:
        """Return whether a problem has the scale that is declared as fixed, if any is."""
        if self.fixed_scale is None:
            return True
        return problem.scale == dataclasses.replace(problem, sm_scale=self.sm_scale).scale

    @property
    def sm_scale(self) -> float | None:
        """The declared ``fixed_scale`` as ``Problem.sm_scale``; None for the default scale."""
        fixed = self.fixed_scale
        return None if fixed is None or fixed == DEFAULT_SCALE else float(fixed)
