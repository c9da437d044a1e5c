"""Strategies for the problems that a subject's declarations support."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from hypothesis import strategies as st

from fa_verify.oracles.problem import LAYOUTS, Problem
from fa_verify.properties.inputs.bias_families import grouped_biases
from fa_verify.properties.inputs.families import (
    ALIBI,
    BIASES,
    NO_ALIBI,
    NO_BIAS,
    NO_SINKS,
    PADDING_VALUES,
    SINKS,
)
from fa_verify.properties.inputs.layouts import WITH_WHOLE_ROWS
from fa_verify.properties.kernels.subject import Subject
from fa_verify.properties.problems.kernel_classes import combinations, padded_groups
from fa_verify.properties.problems.strategies import HEAD_DIMS, SOFTCAPS, problems

__all__ = ["ExcludedError", "problems_of", "problems_of_few_kernels"]


# How many times as many keys a problem of one query may have.
_KEYS_OF_ONE_QUERY = 4
# With layouts of both kinds, some problems have whole rows in all tensors, and run on the kernel
# for these.
_WITHOUT_WHOLE_ROWS = tuple(name for name in LAYOUTS if name not in WITH_WHOLE_ROWS)
# Sizes of D and Dv for a kernel that declares none.
_ANY_HEAD_DIM = (*HEAD_DIMS, 129, 192, 255, 256)
# Ratio of problems without to problems with a score modification.
_PLAIN = 5


class ExcludedError(ValueError):
    """A subject's declarations exclude all requested problems; the message names a declaration."""


def problems_of(
    subject: Subject,
    *,
    dtype: str,
    device: str,
    max_seqlen: int,
    tile: int = 16,
    max_cost: int = 48,
    head_dims: tuple[int, ...] | None = None,
    layouts: tuple[str, ...] = LAYOUTS,
    dirty: str | None = None,
    padding: bool = False,
    hidden: bool = False,
    empty_rows: bool = False,
    score_mods: tuple[str, ...] = (),
    **wanted: Any,
) -> st.SearchStrategy[Problem]:
    """Return ``strategies.problems`` restricted to the declarations of a subject.

    Args:
        subject: The subject.
        dtype: Dtype of the inputs.
        device: "cpu" or "cuda".
        max_seqlen: Largest M and N. Limited by the subject's max_seqlen, and raised to two times
            its seqlen_multiple.
        tile: See ``problems``.
        max_cost: See ``problems``. Raised to the cost of two times seqlen_multiple.
        head_dims: Sizes of D and Dv; None is all that are declared, and sizes up to 256 without a
            declaration. Undeclared sizes are dropped; if none remains, the declared sizes are used.
        layouts: Storage layouts. Undeclared layouts are dropped; if none remains, the declared
            layouts are used.
        dirty: The family of padding values; None draws from the declared families.
        padding: See ``problems``.
        hidden: See ``problems``.
        empty_rows: See ``problems``.
        score_mods: Score modifications of every problem, from ``declarations.SCORE_MODS``; other
            declared ones are drawn for some problems. If it is empty, no problem has one, because
            each combination compiles another kernel.
        wanted: Further arguments of ``problems``.

    Raises:
        ExcludedError: The declarations exclude all problems of this kind.
    """
    configs = tuple(
        name
        for name, replaced in subject.configs.items()
        if dtype in replaced.get("dtypes", subject.dtypes)
    )
    if not configs:
        raise _excluded(subject, "dtypes")
    if device not in subject.devices:
        raise _excluded(subject, "devices")
    if dirty is not None and subject.dirty is not None and dirty not in subject.dirty:
        raise _excluded(subject, "dirty")
    allowed = subject.layouts or LAYOUTS
    # At least two multiples, so that a problem can span several tiles.
    multiple = subject.seqlen_multiple
    # One query costs little.
    most = max(max_seqlen * (_KEYS_OF_ONE_QUERY if subject.one_query else 1), 2 * multiple)
    drawn: dict[str, Any] = {
        "dtype": dtype,
        "device": device,
        "configs": configs,
        "head_dims": _head_dims(subject, head_dims),
        "layouts": _some(layouts, allowed) or allowed,
        "dirty": dirty,
        "dirties": subject.dirty or tuple(PADDING_VALUES),
        "gqa": subject.gqa,
        "lse_grad": subject.lse_grad and subject.backward,
        **_score_mods(subject, score_mods),
        "dv_ne_d": subject.dv_ne_d,
        "zero_sizes": subject.zero_sizes,
        "seqlen_multiple": multiple,
        "max_seqlen": min(most, subject.max_seqlen or most),
        "tile": tile,
        "max_cost": max(max_cost, (_up(2 * multiple, tile) // tile) ** 2),
        "always_causal": subject.always_causal,
        "m_gt_n": subject.m_gt_n,
        "one_query": subject.one_query,
        "zero_total": subject.zero_sizes or not subject.varlen,
        **wanted,
    }
    if subject.fixed_scale is not None:
        drawn["scales"] = (subject.sm_scale,)
    if drawn.get("mask") is not None:
        if "custom" not in subject.masks:
            raise _excluded(subject, "masks")
        if subject.always_causal:
            raise _excluded(subject, "always_causal")
        # A hidden key cannot be forced for a mask with a predicate.
        hidden = False
    positions = tuple(kind for kind in subject.masks if kind in ("causal", "window"))
    if drawn.get("mask") is not None:
        positions = ()
    lengths = ("padding",) if "padding" in subject.masks else ()
    if padding and not lengths:
        raise _excluded(subject, "masks")
    if padding and subject.varlen:  # no tensor of the call holds padding
        raise _excluded(subject, "varlen")
    if empty_rows and not subject.m_gt_n:
        raise _excluded(subject, "m_gt_n")
    apart_from_row = "window" in positions and subject.causal_alignment == "bottom-right"
    if hidden and subject.one_query and (empty_rows or not apart_from_row):
        raise _excluded(subject, "one_query")
    if hidden and not positions:
        raise _excluded(subject, "masks")
    bottom_right = subject.causal_alignment == "bottom-right"
    if empty_rows and not lengths:
        # Empty rows then require M > N with a right bound, or N = 0.
        if not subject.m_ne_n:
            raise _excluded(subject, "m_ne_n")
        by_position = positions and bottom_right and not subject.one_query
        if not subject.zero_sizes and not by_position:
            raise _excluded(subject, "zero_sizes")
    if subject.always_causal and not bottom_right and (padding or empty_rows):
        raise _excluded(subject, "causal_alignment")
    least = _up(1 + padding + hidden + empty_rows, multiple)
    if empty_rows and positions and subject.m_ne_n and bottom_right:
        least = _up(least + 1, multiple)  # M > N
    if subject.max_seqlen is not None and subject.max_seqlen < least:
        raise _excluded(subject, "max_seqlen")
    full = () if subject.always_causal else ("full",)
    forced: dict[str, Any] = {"padding": padding, "hidden": hidden, "empty_rows": empty_rows}
    if bottom_right or not positions:
        masks = (*full, *positions, *lengths)
        return problems(**drawn, **forced, masks=masks, m_ne_n=subject.m_ne_n)
    # The alignments agree if M = N and there is no padding. Positional masks are drawn with these
    # restrictions, all other problems without positional masks.
    apart = []
    if not padding and not empty_rows:
        square = {**drawn, "m_gt_n": True}
        apart.append(problems(**square, **forced, masks=positions, m_ne_n=False))
    if not hidden and not subject.always_causal:
        masks = ("full", *lengths)
        apart.append(problems(**drawn, **forced, masks=masks, m_ne_n=subject.m_ne_n))
    if not apart:
        raise _excluded(subject, "causal_alignment")
    return st.one_of(apart)


def problems_of_few_kernels(
    subject: Subject,
    *,
    count: int | None,
    seed: str,
    choices: Mapping[str, Sequence[Any]],
    head_dims: tuple[int, ...] | None = None,
    score_mods: tuple[str, ...] = (),
    **wanted: Any,
) -> st.SearchStrategy[Problem]:
    """Return ``problems_of`` for a few combinations of the fields that select a kernel.

    They are the columns that head_dims are padded to, the alignment of rows in 16 bits, score
    modifications and the dtype of a bias. Where more combinations are asked for than there are
    classes of head_dims, one of each class has no score modification but ``score_mods``.

    Args:
        subject: The subject.
        count: The number of combinations. None: those that have ``score_mods``, of one combination
            for each two score modifications and one for all of them, and one of each class. Tests
            of other score modifications then share kernels, if their seeds are equal.
        seed: Chooses them.
        choices: Further axes: arguments of ``problems``, with the values to choose from.
        head_dims: See ``problems_of``.
        score_mods: See ``problems_of``.
        wanted: Further arguments of ``problems_of``.

    Raises:
        ExcludedError: As ``problems_of``.
    """
    dims = _head_dims(subject, head_dims)
    is_narrow = wanted["dtype"] in ("fp16", "bf16")
    groups = padded_groups(dims, by_bytes=is_narrow)
    axes: dict[str, Sequence[Any]] = {"head_dims": groups}
    if subject.dv_ne_d:
        axes["head_dims_v"] = groups
    if is_narrow and "layouts" not in wanted:
        axes["layouts"] = (_WITHOUT_WHOLE_ROWS, WITH_WHOLE_ROWS)
    free = [
        word
        for word, (argument, *_) in _MODS.items()
        if score_mods and word in subject.score_mods and argument not in wanted
    ]
    without = {_MODS[word][0]: (_MODS[word][1],) for word in free if word not in score_mods}
    for word in free:
        argument, none, values = _MODS[word]
        absent = [] if count is None or word in score_mods else [(none,)]
        axes[argument] = [*absent, *_OF_DTYPES.get(word, [values])]
    axes |= choices
    plain = [
        {
            name: group if name.startswith("head_dims") else values[0]
            for name, values in axes.items()
        }
        | without
        for group in _one_of_each_class(groups)
    ]
    if count is None:
        together = [*itertools.combinations(free, 2), tuple(free)]
        chosen = [
            row | {_MODS[word][0]: (_MODS[word][1],) for word in free if word not in words}
            for words, row in zip(together, combinations(axes, len(together), seed), strict=True)
            if {*score_mods} < {*words}
        ]
    else:
        # With fewer combinations, a test has one class of head_dims.
        plain = plain if count > len(plain) else []
        chosen = list(combinations(axes, count - len(plain), seed))
    return st.one_of(
        [
            problems_of(subject, score_mods=score_mods, **{"head_dims": dims, **wanted, **fields})
            for fields in (*plain, *chosen)
        ]
    )


def _one_of_each_class(groups: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Return a group of head_dims, of whole tiles if there is one, for each class of coverage."""
    classes: dict[int, list[tuple[int, ...]]] = {}
    for group in groups:
        classes.setdefault(max(64, 1 << (group[0] - 1).bit_length()), []).append(group)
    return [max(of, key=lambda x: (x[0] % 16 == 0, x[0])) for of in classes.values()]


# The argument of ``problems`` for each score modification, its value for none, and its values.
_MODS: dict[str, tuple[str, Any, tuple[Any, ...]]] = {
    "softcap": ("softcaps", None, SOFTCAPS),
    "alibi": ("alibis", NO_ALIBI, tuple(ALIBI)),
    "bias": ("biases", NO_BIAS, BIASES),
    "sinks": ("sinks", NO_SINKS, tuple(SINKS)),
}
_OF_DTYPES = {"bias": grouped_biases()}


def _score_mods(subject: Subject, forced: tuple[str, ...]) -> dict[str, tuple[Any, ...]]:
    """Return the arguments of ``problems`` for score modifications."""
    if not {*forced} <= {*subject.score_mods}:
        raise _excluded(subject, "score_mods")
    drawn: dict[str, tuple[Any, ...]] = {}
    for word, (argument, none, values) in _MODS.items():
        plain = () if word in forced else (none,) * _PLAIN * len(values)
        drawn[argument] = (*plain, *values) if forced and word in subject.score_mods else (none,)
    return drawn


def _up(size: int, multiple: int) -> int:
    """Return the smallest multiple that is >= size."""
    return -(-size // multiple) * multiple


def _head_dims(subject: Subject, wanted: tuple[int, ...] | None) -> tuple[int, ...]:
    """Return the wanted head_dims that are declared; all of them if none is, or none is wanted."""
    declared = subject.head_dims or _ANY_HEAD_DIM
    return _some(wanted or declared, subject.head_dims) or declared


def _some(wanted: tuple[Any, ...], declared: tuple[Any, ...] | None) -> tuple[Any, ...]:
    """Return the wanted items that are declared, in their order."""
    return tuple(item for item in wanted if declared is None or item in declared)


def _excluded(subject: Subject, word: str) -> ExcludedError:
    return ExcludedError(f"{subject.name} declares {word}={getattr(subject, word)!r}")
