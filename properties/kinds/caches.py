"""Attention over a cache, contiguous or in pages: how calls are run, shrunk and described."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st

from fa_verify.oracles.call import variants
from fa_verify.oracles.calls.cache import OF_INPUTS, PAGE_ORDERS, SCALES, CacheProblem
from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.problem import Problem
from fa_verify.oracles.reference.caches import appended, gathered
from fa_verify.oracles.reference.stored_caches import appended_codes, numbers_of
from fa_verify.properties.inputs.caches import (
    CacheInputs,
    is_in_order,
    make_cache,
    rows_of_entry,
    shared_inputs,
)
from fa_verify.properties.inputs.families import TORCH_DTYPES
from fa_verify.properties.inputs.tensors import Inputs
from fa_verify.properties.kernels.refusals import ExcludedCallError
from fa_verify.properties.kernels.subject import Subject
from fa_verify.properties.kernels.supported import ExcludedError
from fa_verify.properties.kernels.supported_caches import cached, configs_of
from fa_verify.properties.kinds import features as of_attention
from fa_verify.properties.kinds import reductions as simpler
from fa_verify.properties.kinds.feature import Feature
from fa_verify.properties.kinds.kind import Kind
from fa_verify.properties.running.guard_bands import GuardBands, fill_of
from fa_verify.properties.running.trial import (
    Judged,
    PlannedRun,
    SubjectError,
    Trial,
    plan_run,
    run_kvcache,
)

__all__ = ["CACHE", "CacheTrial", "Caches", "Result", "expected", "numbers", "run_cache"]

# out, and lse if the kernel returns it.
Result = tuple[torch.Tensor, torch.Tensor | None]
_PLAIN = ("shared", "spare", "new", "page_size")
_NO_CODES = {"stored": OF_INPUTS, "scales": SCALES[0], "divides": False}
# Features of the attention that come before those of the cache.
_FIRST = ("zero size", "empty rows", "grouped heads")
# Features of the attention that say nothing of a call with a cache: it has lengths and no gradient.
_NOT_OF_CACHES = (
    "hidden keys", "padded keys", "empty sequences", "dirty", "dout", "dlse", "M != N", "M > N",
    "M < N", "entries of different lengths", "D > Dv", "D < Dv", "q and k of other strides",
    "q and v of other strides", "k and v of other strides",
)  # fmt: skip
_NOT_OF_SIZES = ("N ", "M or N ", "seqlens_", "B * ", "M * ", "M is a ", "layout of ")
# Pairs of rows and keys of which a mask is made to see whether it hides keys.
_MOST_PAIRS = 2**25


class Caches(NamedTuple):
    """The tensors that a call may write to, as in ``CacheInputs``."""

    k_cache: torch.Tensor
    v_cache: torch.Tensor
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None


@dataclass(frozen=True)
class CacheTrial(Trial):
    """A run of a call with a cache.

    Args:
        problem: The call.
        inputs: The tensors of its attention.
        called: The tensors of the call, whose caches the kernel may have written to.
        caches: The caches of keys and of values, and the scales of codes, as the call has to leave
            them.
        got: Out and lse.
        planned: The results of the oracle and their bounds.
    """

    problem: CacheProblem
    inputs: Inputs
    called: CacheInputs
    caches: Caches
    got: Result
    planned: PlannedRun

    @property
    def outputs(self) -> Mapping[str, Judged]:
        """Out and lse, if the kernel returned them."""
        want, bound = self.planned.want, self.planned.judgement.bound
        return {
            name: Judged(got, getattr(want, name), getattr(bound, name))
            for name, got in zip(("out", "lse"), self.got, strict=True)
            if got is not None
        }


def run(subject: Subject, problem: CacheProblem) -> CacheTrial | None:
    """Run a call with a cache, and judge it by the attention to the keys that the cache holds.

    Rows without a key hold NaN, and what the kernel allocates holds ``fill_of`` the seed. A number
    in rows that are multiplied by 0 would not show.

    Returns:
        The trial; None if the attention is out of range.

    Raises:
        SubjectError: The kernel raises, changes another input, or an output has a wrong form.
        RefusedError: The kernel refuses the call, or its declarations exclude it.
    """
    if reason := excludes(subject, problem):
        raise ExcludedCallError(reason)
    inputs = shared_inputs(problem)
    x = make_cache(problem, inputs)
    caches = expected(subject, problem, x)
    got = run_cache(subject, problem, x, fill_of(problem.attention.seed))
    attention = problem.attention
    if not attention.mask.is_plain:
        # A predicate may depend on N: the places of an entry, with or without keys.
        attention = dataclasses.replace(attention, N=x.table.shape[1] * x.k_cache.shape[1])
    seqlens = torch.tensor(problem.seqlens)
    k, v = (
        gathered(cache, seqlens, x.table, attention.N)
        for cache in numbers(subject, problem, caches)
    )
    judged = subject
    if subject.kvcache_splits is not None:
        # The splits of its calls with a cache.
        judged = subject.assuming({"splits": subject.kvcache_splits(problem.attention)})
    planned = plan_run(
        judged, attention, inputs._replace(k=k, v=v), _smallest_factor(subject, problem, caches)
    )
    if planned is None:
        return None
    return CacheTrial(subject, problem, inputs, x, caches, got, planned)


def run_cache(
    subject: Subject, problem: CacheProblem, x: CacheInputs, fill: float = math.nan
) -> Result:
    """Run a kernel with guard bands around what it allocates, which holds ``fill``.

    Raises:
        SubjectError: As ``run``.
        RefusedError: The kernel refuses the call.
    """
    with GuardBands(fill) as guards:
        found = run_kvcache(subject, problem.attention, x)
    if overruns := guards.overruns():
        raise SubjectError(
            f"a tensor of shape {tuple(overruns[0].tensor.shape)} {overruns[0].place}"
        )
    return found


def expected(subject: Subject, problem: CacheProblem, x: CacheInputs) -> Caches:
    """Return the caches, and the scales of codes, as a call has to leave them."""
    given = x.k_cache, x.v_cache, x.k_scale, x.v_scale
    if x.k is None or x.v is None:
        return Caches(*(None if y is None else y.clone() for y in given))  # type: ignore[arg-type]
    if problem.format is None or x.k_scale is None or x.v_scale is None:
        return Caches(
            appended(x.k_cache, x.k, x.cache_seqlens, x.table),
            appended(x.v_cache, x.v, x.cache_seqlens, x.table),
        )
    (k_cache, k_scale), (v_cache, v_scale) = (
        appended_codes(
            cache, scale, new, x.cache_seqlens, x.table, problem.format, subject.writing,
            divides=problem.divides,
        )
        for cache, scale, new in ((x.k_cache, x.k_scale, x.k), (x.v_cache, x.v_scale, x.v))
    )  # fmt: skip
    return Caches(k_cache, v_cache, k_scale, v_scale)


def numbers(
    subject: Subject, problem: CacheProblem, caches: Caches
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the numbers that a kernel attends to: those of codes are float64, or as it rounds."""
    k_cache, v_cache, k_scale, v_scale = caches
    form = problem.format
    if form is None or k_scale is None or v_scale is None:
        return k_cache, v_cache
    rounds = subject.numerics_of(problem.attention).dequantised == "rounded"
    found = [
        numbers_of(
            codes, scale, form, divides=problem.divides,
            rounds_to=problem.dtype if rounds else None,
        )
        for codes, scale in ((k_cache, k_scale), (v_cache, v_scale))
    ]  # fmt: skip
    if rounds:
        dtype = TORCH_DTYPES[problem.dtype]
        found = [x.to(dtype) for x in found]
    return found[0], found[1]


def _smallest_factor(subject: Subject, problem: CacheProblem, caches: Caches) -> float:
    """Return the least factor on P before its cast: 1, or a scale of values if one is less."""
    if subject.numerics_of(problem.attention).v_scale_on != "p" or caches.v_scale is None:
        return 1.0
    scale = caches.v_scale.to(torch.float64)
    scale = (scale.reciprocal() if problem.divides else scale).flatten()
    used = scale[scale.isfinite() & (scale > 0)]
    return float(min([1.0, *used.tolist()]))


def draw(
    subject: Subject, *, dtype: str, device: str, **wanted: Any
) -> st.SearchStrategy[CacheProblem]:
    """Return calls of a dtype that a kernel takes; ``wanted`` are arguments of ``cached``.

    Raises:
        ExcludedError: The kernel takes no such call.
    """
    if subject.kvcache is None:
        raise ExcludedError(f"{subject.name} declares no kvcache")
    mask = wanted.get("mask")
    if mask is not None and not subject.masks_caches:
        raise ExcludedError(f"{subject.name} takes no mask in a call with a cache")
    configs = configs_of(subject, dtype)
    if not configs or device not in subject.devices:
        raise ExcludedError(
            f"{subject.name} declares dtypes={subject.dtypes} and devices={subject.devices}"
        )
    return cached(subject, dtype, device, configs[: None if mask is None else 1], **wanted)


def excludes(subject: Subject, problem: CacheProblem) -> str | None:
    """Return the declaration that excludes a call, as a sentence; None if none does."""
    attention = problem.attention
    if not attention.mask.is_plain and not subject.masks_caches:
        return f"{subject.name} takes no mask in a call with a cache"
    appends = problem.new > 0
    return subject.excludes_cache(
        attention, problem.page_size, appends=appends
    ) or subject.excludes_format(problem.stored, problem.scales, divides=problem.divides)


def complexity(problem: CacheProblem) -> tuple[float, ...]:
    """Return a sort key: that of the attention with the lengths, and the fields of the cache."""
    sizes, fields, *others = simpler.complexity(problem.attention)
    own = sum(getattr(problem, name) > 0 for name in _PLAIN)
    own += (problem.format is not None) + (problem.scales != SCALES[0])
    is_drawn = problem.order == "drawn"
    order = 0.5 * (not is_drawn) if is_in_order(problem) else 1 + is_drawn
    rows = problem.new + problem.shared + problem.spare + problem.page_size
    differ = len({*problem.seqlens}) > 1
    return sizes + sum(problem.seqlens), fields + own + order + differ, *others, rows


def reductions(problem: CacheProblem) -> Iterator[CacheProblem]:
    """Yield calls that are simpler in one field: a plainer cache, then a simpler attention."""
    a, lengths = problem.attention, problem.seqlens
    longest = max((*lengths, 1))
    changes: list[dict[str, Any]] = [
        _NO_CODES,
        {"scales": SCALES[0]},
        *({name: 0} for name in _PLAIN),
        *({"order": order} for order in PAGE_ORDERS),
        *({name: size} for name in _PLAIN for size in simpler.steps(getattr(problem, name))),
        *({"attention": _with_lengths(problem, x)} for x in simpler.reductions(a)),
        # All that a cache holds is the length of its longest entry.
        {"N": longest},
        *(
            _of_lengths(problem, (*lengths[:b], size, *lengths[b + 1 :]))
            for b, length in enumerate(lengths)
            for size in simpler.steps(length)
        ),
    ]
    before = complexity(problem)
    for other in variants(problem, iter(changes)):
        if complexity(other) < before:
            yield other


def _with_lengths(problem: CacheProblem, attention: Problem) -> Problem:
    """Return an attention whose mask has lengths: those of the call, where it has none."""
    if attention.mask.seqlens_k is not None and attention.mask.seqlens_q is None:
        return attention
    lengths = attention.mask.seqlens_k or tuple(
        min(length, attention.N) for length in problem.seqlens[: attention.B]
    )
    mask = dataclasses.replace(attention.mask, seqlens_q=None, seqlens_k=lengths)
    return dataclasses.replace(attention, mask=mask)


def _of_lengths(problem: CacheProblem, lengths: tuple[int, ...]) -> dict[str, Any]:
    """Return the changes that give the entries other lengths, and as many free rows as before."""
    a = problem.attention
    new = min((problem.new, *lengths))
    least = min(lengths, default=0) - new
    return {
        "mask": dataclasses.replace(a.mask, seqlens_k=lengths),
        "N": max(lengths, default=0) + a.N - max(problem.seqlens, default=0),
        "new": new,
        "shared": min(problem.shared, least // (problem.page_size or 1)),
    }


def _hides_keys(problem: CacheProblem) -> bool:
    """Return whether a row sees some of the keys that its entry holds, but not all."""
    a = problem.attention
    if not 0 < a.pairs <= _MOST_PAIRS:
        return False
    seen = a.mask.dense(a.B, a.H, a.M, a.N)
    held = torch.arange(a.N) < torch.tensor(problem.seqlens)[:, None]
    return bool((seen.any(3) & ~(seen | ~held[:, None, None]).all(3)).any())


def _places(problem: CacheProblem) -> tuple[int, ...]:
    """Return the pages that the keys of each entry lie in."""
    return tuple(-(-length // (problem.page_size or 1)) for length in problem.seqlens)


def _has_free_rows(problem: CacheProblem) -> bool:
    """Return whether a page, or an entry of a contiguous cache, has rows without a key."""
    if problem.page_size:
        return any(length % problem.page_size for length in problem.seqlens)
    return any(length < rows_of_entry(problem) for length in problem.seqlens)


def _crosses_pages(problem: CacheProblem) -> bool:
    """Return whether the new keys of an entry lie in several pages."""
    size = problem.page_size
    return size > 0 and any(
        held // size < (held + problem.new - 1) // size for held in problem.before if problem.new
    )


# Features of the cache. One that implies another, as shared pages do pages, comes first: the other
# is no need of its own where the first one is.
_OWN: Mapping[str, Callable[[CacheProblem], bool]] = {
    "scales of tokens": lambda x: x.scales == "token_head",
    "scales of pages": lambda x: x.scales == "page",
    "scales of heads": lambda x: x.scales == "head",
    "codes of 8 bits": lambda x: x.format is not None,
    "appended keys in several pages": _crosses_pages,
    "entries without a key before the append": lambda x: x.new > 0 and 0 in x.before,
    "appended keys": lambda x: x.new > 0,
    "entries of different lengths": lambda x: len({*x.seqlens}) > 1,
    "pages out of order": lambda x: x.page_size > 0 and not is_in_order(x),
    "entries out of order": lambda x: x.page_size == 0 and not is_in_order(x),
    "shared pages": lambda x: x.shared > 0,
    "pages whose size is no power of two": lambda x: x.page_size & (x.page_size - 1) > 0,
    "unused places of the page table": lambda x: (
        x.page_size > 0 and (x.spare > 0 or len({*_places(x)}) > 1)
    ),
    "unused entries": lambda x: x.spare > 0 and x.page_size == 0,
    "free rows": _has_free_rows,
    "keys that fill their last page": lambda x: (
        x.page_size > 0 and any(length and length % x.page_size == 0 for length in x.seqlens)
    ),
    "more keys than one page": lambda x: max(_places(x), default=0) > 1 and x.page_size > 0,
    "pages": lambda x: x.page_size > 0,
    # The others follow the parts of the mask.
    "a cached prefix": lambda x: (
        x.attention.mask.right is not None and max(x.seqlens, default=0) > x.attention.M
    ),
    "hidden keys": _hides_keys,
}
# Sizes of which features are thresholds. Others are those of the attention.
_SIZES: Mapping[str, Callable[[CacheProblem], int]] = {
    "N": lambda x: max(x.seqlens, default=0),
    "page_size": lambda x: x.page_size,
    "appended keys": lambda x: x.new,
}
# Multiples of sizes that kernels take for granted.
_MULTIPLES: Mapping[str, tuple[int, ...]] = {"N": (16, 32, 64, 128), "page_size": (16,)}


def features(problem: CacheProblem) -> list[Feature]:
    """Return the features of a call: those of the cache, and of its attention."""
    attention = [x for x in of_attention.features_of(problem.attention) if _is_of_caches(x)]
    own = [x for x in map(Feature, _OWN) if x.name not in ("a cached prefix", "hidden keys")]
    hidden = [Feature("hidden keys")]
    # A single row sees all keys but those that a window hides.
    first, last = ([], hidden) if problem.attention.M == 1 else (hidden, [])
    found = [
        *(x for x in attention if x.name in _FIRST),
        *own,
        *first,
        *(x for x in attention if x.name not in _FIRST),
        Feature("a cached prefix"),
        *last,
    ]
    for size, number in _SIZES.items():
        found += [Feature(f"{size} above", number(problem) - 1)]
        found += [Feature(f"{size} is no multiple of {x}") for x in _MULTIPLES.get(size, ())]
    return [x for x in found if holds(x, problem)]


def _is_of_caches(feature: Feature) -> bool:
    """Return whether a feature of the attention says something of a call with a cache."""
    name = feature.name
    return name not in _NOT_OF_CACHES and not name.startswith(_NOT_OF_SIZES)


def holds(feature: Feature, problem: CacheProblem) -> bool:
    """Return whether a call has a feature."""
    name, value = feature
    if name in _OWN:
        return _OWN[name](problem)
    size, _, rest = name.rpartition(" is no multiple of ")
    if size in _MULTIPLES:
        numbers = problem.seqlens if size == "N" else (problem.page_size,)
        return any(number % int(rest) for number in numbers)
    size = name.removesuffix(" above")
    if size in _SIZES:
        assert isinstance(value, int)
        return _SIZES[size](problem) > value >= 1
    return of_attention.holds(feature, problem.attention)


def without(
    feature: Feature, problem: CacheProblem, configs: Iterable[str] = ()
) -> Iterator[CacheProblem]:
    """Yield calls without a feature that a call has, nearest first."""
    name = feature.name
    if name in _OWN or name.partition(" is no multiple")[0].removesuffix(" above") in _SIZES:
        changes = _changes(feature, problem)
    elif name == "D != Dv":
        # The larger first: the smaller one may lack a threshold as well.
        dims = problem.attention.D, problem.attention.Dv
        changes = (dict.fromkeys(("D", "Dv"), size) for size in sorted(dims, reverse=True))
    else:
        changes = (
            {"attention": _with_lengths(problem, x)}
            for x in of_attention.without(feature, problem.attention, configs)
        )
    if name == "empty rows":
        full = tuple(length or 1 for length in problem.seqlens)
        mask = Mask(seqlens_k=full)
        changes = chain(changes, [{"mask": mask}, {"mask": mask, "N": max(full, default=1)}])
    elif name in ("window left", "right bound"):
        changes = chain(changes, _hiding_otherwise(name, problem))
    for other in variants(problem, iter(changes)):
        if not holds(feature, other):
            yield other


def _hiding_otherwise(name: str, problem: CacheProblem) -> Iterator[dict[str, Any]]:
    """Yield masks of two rows and keys at least that hide keys by other means than the named."""
    lengths = tuple(max(2, length) for length in problem.seqlens)
    mask = Mask(causal=True) if name == "window left" else Mask(window_left=0)
    of_call = _of_lengths(problem, lengths)
    yield {
        **of_call, "M": max(2, problem.attention.M),
        "mask": dataclasses.replace(mask, seqlens_k=lengths),
    }  # fmt: skip


def _changes(feature: Feature, problem: CacheProblem) -> Iterator[dict[str, Any]]:
    """Yield changes that may remove a feature of the cache, smallest change first."""
    name, value = feature
    a, lengths, size = problem.attention, problem.seqlens, problem.page_size
    longest = max(lengths, default=0)

    def lengthened(change: Callable[[int], int]) -> dict[str, Any]:
        return _of_lengths(problem, tuple(map(change, lengths)))

    def in_whole(rows: int) -> dict[str, Any]:
        """The lengths as multiples of a number of rows."""
        return lengthened(lambda length: -(-length // rows) * rows)

    if name.startswith("scales of "):
        yield {"scales": SCALES[0]}
    elif name == "codes of 8 bits":
        yield _NO_CODES
    elif name == "pages":
        yield {"page_size": 0, "shared": 0}
    elif name == "shared pages":
        yield {"shared": 0}
    elif name == "more keys than one page":
        yield {"page_size": longest, "shared": 0}
        yield lengthened(lambda length: min(length, size))
    elif name in ("pages out of order", "entries out of order"):
        yield {"order": "ascending"}
    elif name == "pages whose size is no power of two":
        power = 1 << size.bit_length()
        yield from ({"page_size": x, "shared": 0} for x in (power, power // 2))
    elif name == "appended keys":
        yield {"new": 0}
    elif name == "appended keys in several pages":
        yield {"page_size": longest, "shared": 0}
        yield {"new": 1}
        for more in range(1, size):
            yield _of_lengths(problem, tuple(length + more for length in lengths))
    elif name == "entries without a key before the append":
        yield lengthened(lambda length: max(length, problem.new + 1))
        yield from ({"new": x} for x in (min(lengths) - 1, 0) if x >= 0)
    elif name == "free rows" and size:
        yield in_whole(size)
        yield {"page_size": 1, "shared": 0}
    elif name == "free rows":
        yield {**lengthened(lambda length: longest), "N": longest, "spare": 0}
    elif name == "keys that fill their last page":
        yield lengthened(lambda length: length + (length % size == 0))
        yield lengthened(lambda length: length - (length % size == 0 < length))
        # As many pages, one row of which is free.
        fewer = lengthened(lambda length: -(-length // size) * (size + 1) - (length > 0))
        yield {**fewer, "page_size": size + 1, "shared": 0}
    elif name == "unused places of the page table":
        yield {**lengthened(lambda length: longest), "spare": 0}
    elif name == "unused entries":
        # They lengthen all entries, too.
        yield from ({"spare": 0, "N": a.N + 1}, {"spare": 0})
    elif name == "entries of different lengths":
        for same in (longest, min(lengths)):
            yield _of_lengths(problem, (same,) * len(lengths))
    elif name == "hidden keys":
        if a.mask.window_left is not None:
            yield {"mask": dataclasses.replace(a.mask, window_left=longest)}
        yield {"mask": Mask(seqlens_k=lengths)}
    elif name == "a cached prefix":
        # As many rows as keys: fewer keys may lack a threshold of N as well.
        yield {"M": longest}
    elif name.startswith("N is no multiple of "):
        yield in_whole(int(name.rpartition(" ")[2]))
    elif name.startswith("page_size is no multiple of "):
        multiple = int(name.rpartition(" ")[2])
        yield {"page_size": -(-size // multiple) * multiple, "shared": 0}
    else:
        assert isinstance(value, int)
        yield from _cut(name.removesuffix(" above"), value, problem)


def _cut(size: str, value: int, problem: CacheProblem) -> Iterator[dict[str, Any]]:
    """Yield changes that lower a size to a value."""
    a = problem.attention
    if size == "N":
        shorter = _of_lengths(problem, tuple(min(length, value) for length in problem.seqlens))
        yield shorter
        yield {**shorter, "N": a.N}
    else:
        field = "page_size" if size == "page_size" else "new"
        yield from ({field: value}, {field: value, "shared": 0})


CACHE = Kind(draw, excludes, run, reductions, complexity, features, holds, without)
