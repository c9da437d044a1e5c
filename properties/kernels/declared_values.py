"""Declared values of a kernel: those that a call has, and problems that have each.

Draws are random, and shards leave combinations out. A run names the values that no judged call had.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from fa_verify.oracles.call import Call
from fa_verify.oracles.calls.cache import CacheProblem
from fa_verify.oracles.calls.quantised import QuantisedProblem
from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.masks.prefix_lm import PrefixLM
from fa_verify.oracles.problem import LAYOUTS, Problem
from fa_verify.properties.inputs.dlse_families import NO_DLSE
from fa_verify.properties.inputs.padding_values import PADDING_VALUES
from fa_verify.properties.kernels.fitting import fitted
from fa_verify.properties.kernels.subject import Subject
from fa_verify.properties.kernels.vocabulary import is_padded, masks_of, score_mods_of

__all__ = ["ANY_HEAD_DIM", "Value", "declared_values", "examples", "not_drawn", "values_of"]

# Stands for the head_dims of a kernel that declares none: the largest, and odd ones.
ANY_HEAD_DIM = (256, 17, 255)
# Longest sequences that one problem of a row, or a square one, takes seconds for.
_LONGEST = {"cpu": 4200, "cuda": 65_536}
_LONGEST_SQUARE = {"cpu": 512, "cuda": 4096}
_OF_ALL_TENSORS = tuple(x for x in PADDING_VALUES if "_" not in x)
# Declarations of formats and of the places of scales.
_OF_CODES = ("qk_formats", "v_formats", "qk_scales", "v_scales")
# Values that a list of missing ones names.
_NAMED = 4
_MASKS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True}, "window": {"window_left": 9, "window_right": 4}
}  # fmt: skip
_MODS: dict[str, dict[str, Any]] = {
    "softcap": {"softcap": 3.0}, "alibi": {"alibi": "normal"}, "bias": {"bias": "normal/hmn"},
    "sinks": {"sinks": "ordinary"},
}  # fmt: skip


class Value(NamedTuple):
    """A declaration and one of its values, which is empty for a declaration that is True."""

    word: str
    value: str | int = ""


def declared_values(subject: Subject) -> tuple[Value, ...]:
    """Return the values that calls of a kernel have to have, declared or by default."""
    dtypes = [x.get("dtypes", subject.dtypes) for x in subject.configs.values()]
    found: dict[str, Sequence[str | int]] = {
        "dtypes": tuple(dict.fromkeys(itertools.chain(*dtypes))),
        "configs": tuple(subject.configs) if len(subject.configs) > 1 else (),
    }
    if not subject.merges_alone:
        found |= _of_attention(subject)
    if subject.kvcache is not None:
        found["cache"] = subject.cache
        found["page_sizes"] = subject.page_sizes or () if "paged" in subject.cache else ()
    if subject.quantised is not None:
        found |= {word: getattr(subject, word) for word in _OF_CODES}
    # A function that no check calls: same_bits compares it with the kernel.
    promised = {*subject.same_bits}.union(
        *(x.get("same_bits", ()) for x in subject.configs.values())
    )
    if subject.packed is not None and "varlen" not in promised:
        found["packed"] = ("",)
    return tuple(Value(word, value) for word, values in found.items() for value in values)


def _of_attention(subject: Subject) -> dict[str, Sequence[str | int]]:
    """Return the values that attention has, to padded tensors or to a cache, by declaration."""
    dims = tuple(dict.fromkeys(subject.head_dims or ANY_HEAD_DIM))
    # Rotated, so that the first pairs differ.
    found: dict[str, Sequence[str | int]] = {"head_dims": dims}
    if subject.dv_ne_d:
        found = {"D": dims, "Dv": (*dims[1:], dims[0])}
    masks, mods = subject.masks, subject.score_mods
    if subject.always_causal or (subject.reads_caches_alone and not subject.masks_caches):
        masks = tuple(x for x in masks if x != "custom")
    if subject.reads_caches_alone:  # it has lengths, and takes no bias
        masks, mods = (tuple(x for x in of if x not in ("padding", "bias")) for of in (masks, mods))
    found |= {"masks": masks, "score_mods": mods}
    most = subject.max_seqlen
    has = {"gqa": subject.gqa, "zero_sizes": subject.zero_sizes}
    if subject.attends:  # codes are contiguous
        found["layouts"] = subject.layouts or LAYOUTS
    if not subject.reads_caches_alone:
        if "padding" in masks and not subject.varlen:
            found["dirty"] = subject.dirty or _OF_ALL_TENSORS
        found["max_seqlen"] = () if most is None else (most,)
        # Causal masks aligned to the top left are drawn for M = N alone.
        differ = subject.m_ne_n and not (
            subject.always_causal and subject.causal_alignment == "top-left"
        )
        differ &= most is None or most >= 2 * subject.seqlen_multiple
        has |= {
            "m_ne_n": differ,
            "m_gt_n": differ and subject.m_gt_n and not subject.one_query,
            "lse_grad": subject.lse_grad and subject.backward,
        }
    return found | {word: ("",) for word, holds in has.items() if holds}


def values_of(subject: Subject, call: Call) -> set[Value]:
    """Return the values of declarations that a call has; one without elements has few."""
    found = {Value("dtypes", call.dtype), Value("configs", call.config)}
    a = call.attention
    if a is None:
        return found
    if isinstance(call, CacheProblem):
        of_cache = {
            Value("cache", "paged" if call.page_size else "contiguous"),
            Value("page_sizes", call.page_size),
            *([Value("cache", "append")] if call.new else []),
        }
        if not subject.reads_caches_alone:
            return of_cache  # the other declarations are those of its padded tensors
        found |= of_cache
    elif isinstance(call, QuantisedProblem):
        words = ("qk", "v", "qk_scales", "v_scales")
        of_codes = {Value(w, getattr(call, x)) for w, x in zip(_OF_CODES, words, strict=True)}
        if not subject.quantised_alone:
            return of_codes
        found |= of_codes
    elif not isinstance(call, Problem):
        return set()  # a ring has one or two values of most declarations
    if 0 in (a.B, a.M, a.N):
        return {Value("zero_sizes")}
    mask = a.mask
    rows, keys = mask.lengths(a.B, a.M, a.N)
    most = subject.max_seqlen or 0
    longest = most // subject.seqlen_multiple * subject.seqlen_multiple
    return found | {
        value
        for value, holds in (
            (Value("head_dims", a.D), a.D == a.Dv),
            (Value("D", a.D), True),
            (Value("Dv", a.Dv), True),
            (Value("gqa"), a.G > 1),
            (Value("m_ne_n"), a.M != a.N),
            (Value("m_gt_n"), a.M > a.N),
            (Value("zero_sizes"), 0 in (*rows, *keys) and isinstance(call, CacheProblem)),
            (Value("max_seqlen", most), most > 0 and max(a.M, a.N) >= longest),
            (Value("dirty", a.dirty), is_padded(mask)),
            *((Value("masks", x), True) for x in masks_of(mask)),
            (Value("lse_grad"), a.dlse != NO_DLSE),
            *((Value("layouts", x), True) for x in a.layouts),
            *((Value("score_mods", x), True) for x in score_mods_of(a)),
        )
        if holds
    }


def not_drawn(subject: Subject, drawn: set[Value]) -> dict[str, str]:
    """Return the declared values that no judged call had, by declaration, as text."""
    left: dict[str, list[str]] = {}
    for word, value in declared_values(subject):
        if Value(word, value) not in drawn:
            left.setdefault(word, []).append(f"{value:,}" if isinstance(value, int) else value)
    return {
        word: ", ".join(values[:_NAMED])
        + (f" and {len(values) - _NAMED} others" if len(values) > _NAMED else "")
        for word, values in left.items()
    }


def examples(subject: Subject, device: str, had: Iterable[Value] = ()) -> Iterator[Problem]:
    """Yield few problems that have all declared values of a kernel of padded tensors.

    Each has the next value of every declaration, within what the others leave. A value that no
    supported problem has is left out, and one whose problem would take minutes.

    Args:
        subject: The subject.
        device: "cpu" or "cuda".
        had: Values that other problems have.
    """
    if not subject.attends:
        return
    left: dict[str, list[str | int]] = {}
    for item in declared_values(subject):
        if item.word not in ("cache", "page_sizes", "packed", *_OF_CODES) and item not in had:
            left.setdefault(item.word, []).append(item.value)
    # One long sequence, and no size of 0, for which a kernel computes nothing.
    alone = [word for word in ("max_seqlen", "zero_sizes") if left.pop(word, None)]
    for number in itertools.count():
        if not left:
            break
        word = next(iter(left))
        first = {word: left[word][0]}
        # The next value of every declaration; the first one alone where others exclude it.
        for chosen in ({name: values[0] for name, values in left.items()}, first):
            found = _example(subject, chosen, number, device)
            has = values_of(subject, found) if found else set()
            if found is not None and Value(word, first[word]) in has:
                yield found
                break
        has |= {Value(word, first[word])}
        left = {
            name: kept
            for name, values in left.items()
            if (kept := [x for x in values if Value(name, x) not in has])
        }
    for word in alone:
        found = _longest(subject, device) if word == "max_seqlen" else _empty(subject, device)
        if found is not None:
            yield found


def _example(
    subject: Subject, chosen: Mapping[str, str | int], number: int, device: str
) -> Problem | None:
    """Return the supported problem nearest to one with the chosen values; None if there is none."""
    dims = subject.head_dims or ANY_HEAD_DIM
    config = str(chosen.get("configs", next(iter(subject.configs))))
    dtypes = subject.configs[config].get("dtypes", subject.dtypes)
    wanted = chosen.get("dtypes")
    D = chosen.get("head_dims", chosen.get("D", min(dims)))
    step = subject.seqlen_multiple
    M, N = (-(-size // step) * step for size in (37, 37 + step * (1 + 7 // step)))
    M, N = (N, M) if "m_gt_n" in chosen else (M, N)
    fields: dict[str, Any] = {
        "M": M, "N": N, "D": D, "Dv": chosen.get("Dv", D),
        "dtype": wanted if wanted in dtypes else dtypes[0],
        "config": config, "dirty": chosen.get("dirty", "zero"), "seed": number,
        "layouts": (chosen.get("layouts", "bhsd"),) * 4,
        **_MODS.get(str(chosen.get("score_mods")), {}),
        "dlse": "normal" if "lse_grad" in chosen else NO_DLSE,
    }  # fmt: skip
    kind = str(chosen.get("masks"))
    of_mask = dict(_MASKS.get(kind, {}))
    if kind == "padding" or "dirty" in chosen:
        of_mask |= {"seqlens_q": (M, 19), "seqlens_k": (23, N)}
    mask = PrefixLM(prefix=5, **of_mask) if kind == "custom" else Mask(**of_mask)
    return fitted(subject, Problem(B=2, H=4, Hk=2, mask=mask, device=device, **fields), device)


def _longest(subject: Subject, device: str) -> Problem | None:
    """Return a problem of the declared max_seqlen; None if it would take minutes."""
    most = subject.max_seqlen or 0
    square = not subject.m_ne_n or subject.causal_alignment == "top-left"
    if most > (_LONGEST_SQUARE if square else _LONGEST)[device]:
        return None
    D = min(subject.head_dims or (16,))
    problem = Problem(M=most if square else 3, N=most, D=D, Dv=D, seed=1)
    return fitted(subject, problem, device)


def _empty(subject: Subject, device: str) -> Problem | None:
    """Return a problem without keys; without batch entries where a kernel needs keys."""
    D = min(subject.head_dims or (16,))
    for B, N in ((1, 0), (0, 7)):
        found = fitted(subject, Problem(B=B, M=5, N=N, D=D, Dv=D), device)
        if found is not None and Value("zero_sizes") in values_of(subject, found):
            return found
    return None
