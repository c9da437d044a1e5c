"""C1 to C5 and I1 to I3: the guarantees of attention over caches, each a function to its findings.

Calls that have to agree are compared to the bit where the subject promises it, and within twice
the bound otherwise. A promise of G10 (``bitwise``) covers where keys lie and what free rows hold.
"batch", "chunks" and "varlen" (``same_bits``) promise neighbours, decoding, and page sizes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from contextlib import suppress

import torch
from torch.nn.functional import pad

from fa_verify.oracles.cache_problem import CacheProblem
from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.reference.caches import appended, gathered
from fa_verify.properties.checks.memory import FAR, arena_of
from fa_verify.properties.checks.merging import MergeFinding, found_elements
from fa_verify.properties.comparison.compare import ratios, same_bits
from fa_verify.properties.execution.guard_bands import GuardBands
from fa_verify.properties.execution.trial import SubjectError, plan_run, run_kvcache
from fa_verify.properties.inputs.caches import CacheInputs, make_cache, shared_inputs
from fa_verify.properties.subjects.subject import SAME_BITS, Subject

__all__ = ["CACHES", "OTHER_CALLS", "CacheCheck", "found_in_cache"]

CacheCheck = Callable[[Subject, CacheProblem], list[MergeFinding]]
_Result = tuple[torch.Tensor, torch.Tensor | None]
_Caches = tuple[torch.Tensor, torch.Tensor]
# How other calls compute what a first one does, and the results of both.
_Calls = Iterator[tuple[str, _Result, _Result]]
# Entries of the table that lead nowhere, beside -1.
_WILD = (2**31 - 1, -(2**31), 0)
# Entries that keep all processors of a device busy without splits of the keys.
_BUSY = {"cpu": 9, "cuda": 1100}
# Places in the table that an entry of many keys gets at least, and the keys at most, by device: the
# interpreter is slow.
_PLACES, _LONGEST = 65, {"cpu": 2100, "cuda": 8300}
# Rows, windows and further keys, so that rows of one tile begin to see keys in two tiles of keys.
_ROWS, _WINDOWS, _MANY = 17, 21, 33


def _run(
    subject: Subject, problem: CacheProblem, x: CacheInputs, fill: float = math.nan
) -> _Result:
    """Run the subject with guard bands around what it allocates, which holds ``fill``."""
    with GuardBands(fill) as guards:
        found = run_kvcache(subject, problem.attention, x)
    if overruns := guards.overruns():
        raise SubjectError(
            f"a tensor of shape {tuple(overruns[0].tensor.shape)} {overruns[0].place}"
        )
    return found


def _judged(subject: Subject, problem: CacheProblem) -> Subject:
    """Return the subject with the splits of its calls with a cache."""
    if subject.kvcache_splits is None:
        return subject
    return subject.assuming({"splits": subject.kvcache_splits(problem.attention)})


def _differs(
    subject: Subject,
    problem: CacheProblem,
    promise: str,
    guarantee: str,
    claim: str,
    first: _Result,
    again: _Result,
) -> list[MergeFinding]:
    """Return findings where two runs differ: in a bit if that is promised, or by 2 bounds.

    An empty ``promise`` is one that every subject makes.
    """
    is_promised = not promise or bool(subject.promises(promise, problem.attention.config))
    findings = []
    for name, x, y in zip(("out", "lse"), first, again, strict=True):
        if x is None or y is None:
            continue
        bad, bound = ~same_bits(x, y), torch.zeros_like(x)
        if not is_promised and bool(bad.any()):
            judged = _judged(subject, problem)
            planned = plan_run(judged, problem.attention, shared_inputs(problem))
            if planned is None:
                continue
            bound = 2 * getattr(planned.judgement.bound, name)
            bad = ratios(y, x.to(torch.float64), bound) > 1
        values = y, x, bound
        findings += found_elements(subject, problem, guarantee, claim, name, values, bad)
    return findings


def _agree(
    subject: Subject, problem: CacheProblem, word: str, guarantee: str
) -> list[MergeFinding]:
    """Return the findings of ``_differs`` for the calls that a word of ``same_bits`` compares.

    Raises:
        NotImplementedError: There are none, as the subject refuses them.
    """
    findings, count = [], 0
    for told, first, again in OTHER_CALLS[word](subject, problem):
        count += 1
        claim = f"differs {told}"
        findings += _differs(subject, problem, SAME_BITS[word], guarantee, claim, first, again)
    if not count:
        raise NotImplementedError(f"{subject.name} takes no call that {guarantee} compares")
    return findings


def _expected(x: CacheInputs) -> _Caches:
    """Return the caches as the call has to leave them."""
    if x.k is None or x.v is None:
        return x.k_cache.clone(), x.v_cache.clone()
    return (
        appended(x.k_cache, x.k, x.cache_seqlens, x.table),
        appended(x.v_cache, x.v, x.cache_seqlens, x.table),
    )


def _written(
    subject: Subject, problem: CacheProblem, x: CacheInputs, want: _Caches
) -> list[MergeFinding]:
    """C3: return findings where the caches are not what the append makes of them."""
    findings = []
    for name, got, value in zip(("k_cache", "v_cache"), (x.k_cache, x.v_cache), want, strict=True):
        bad = ~((got == value) | (got.isnan() & value.isnan()))
        findings += found_elements(
            subject, problem, "C3 append", "is not what an append of its rows leaves", name,
            (got, value, torch.zeros_like(got)), bad,
        )  # fmt: skip
    return findings


def accuracy(
    subject: Subject, problem: CacheProblem, claim: str = "leaves the derived bound"
) -> list[MergeFinding]:
    """G1: out and lse lie within the bound of the attention to the keys that the cache holds.

    Raises:
        NotImplementedError: The problem is out of the range of the bound.
    """
    inputs = shared_inputs(problem)
    x = make_cache(problem, inputs)
    want = _expected(x)
    out, lse = _run(subject, problem, x)
    seqlens = torch.tensor(problem.seqlens)
    k, v = (gathered(cache, seqlens, x.table, problem.attention.N) for cache in want)
    planned = plan_run(_judged(subject, problem), problem.attention, inputs._replace(k=k, v=v))
    if planned is None:
        raise NotImplementedError("the problem is out of the range of the bound")
    findings = _written(subject, problem, x, want)
    for name, got in (("out", out), ("lse", lse)):
        if got is None:
            continue
        exact, bound = getattr(planned.want, name), getattr(planned.judgement.bound, name)
        findings += found_elements(
            subject, problem, "G1 accuracy", claim, name,
            (got, exact, bound), ratios(got, exact, bound) > 1,
        )  # fmt: skip
    return findings


def hidden_tiles(subject: Subject, problem: CacheProblem) -> list[MergeFinding]:
    """G1: rows of low scores have their weights, if a window hides the first tiles of their block.

    Raises:
        NotImplementedError: The subject takes no window, or the problem is out of the range of the
            bound.
    """
    if "window" not in subject.masks:
        raise NotImplementedError(f"{subject.name} declares masks {subject.masks}")
    a = problem.attention
    seqlens = tuple(length + _MANY for length in problem.seqlens)
    mask = Mask(causal=True, window_left=a.seed % _WINDOWS, seqlens_k=seqlens)
    attention = dataclasses.replace(
        a, M=1 if subject.one_query else _ROWS, N=a.N + _MANY, mask=mask, inputs="lse_low_130",
        softcap=None,
    )  # fmt: skip
    claim = "leaves the bound where a window hides the first keys of a tile from low scores"
    return accuracy(subject, dataclasses.replace(problem, attention=attention), claim)


def many_keys(subject: Subject, problem: CacheProblem) -> list[MergeFinding]:
    """G1: an entry of many keys, on more than 64 pages, lies within the bound beside the others.

    Pages of more than 32 rows on a CPU, or 127 on a GPU, are fewer.

    Raises:
        NotImplementedError: The subject takes no such lengths, the mask has a predicate, or the
            problem is out of the range of the bound.
    """
    _check_plain(problem)
    a = problem.attention
    more = min((problem.page_size or 16) * (_PLACES + a.seed % _PLACES), _LONGEST[a.device])
    seqlens = tuple(length + more * (b == a.seed % a.B) for b, length in enumerate(problem.seqlens))
    attention = dataclasses.replace(
        a, N=a.N + more, mask=dataclasses.replace(a.mask, seqlens_k=seqlens)
    )
    claim = "leaves the bound where an entry has many keys"
    return accuracy(subject, dataclasses.replace(problem, attention=attention), claim)


def pages(subject: Subject, problem: CacheProblem) -> list[MergeFinding]:
    """C1: the order of pages, and whether entries share some, change no bit."""
    inputs = shared_inputs(problem)
    first = _run(subject, problem, make_cache(problem, inputs))
    findings = []
    for is_shared in (True, False):
        again = _run(subject, problem, make_cache(problem, inputs, order=1, is_shared=is_shared))
        claim = f"differs where pages are {'in another order' if is_shared else 'not shared'}"
        findings += _differs(subject, problem, "G10", "C1 pages", claim, first, again)
    return findings


def _other_sizes(subject: Subject, problem: CacheProblem) -> _Calls:
    """Yield calls with other pages, and with one row of the cache an entry."""
    inputs = shared_inputs(problem)
    first = _run(subject, problem, make_cache(problem, inputs))
    sizes = (0, *(subject.page_sizes or (1, 5, 16, 128)))
    for size in sizes:
        if size != problem.page_size:
            x = make_cache(problem, inputs, page_size=size, order=1 + size, is_shared=False)
            with suppress(NotImplementedError):
                told = f"with pages of {size} rows" if size else "in one row an entry"
                yield told, first, _run(subject, problem, x)


def page_sizes(subject: Subject, problem: CacheProblem) -> list[MergeFinding]:
    """C1: the size of pages, and a contiguous cache, change no bit."""
    return _agree(subject, problem, "varlen", "C1 pages")


def free_rows(subject: Subject, problem: CacheProblem) -> list[MergeFinding]:
    """C2: free pages and rows, and unused places of the table, are neither read nor written."""
    inputs = shared_inputs(problem)
    first = _run(subject, problem, make_cache(problem, inputs, fill=0.0, wild=0))
    findings = []
    for fill, wild in zip((math.nan, math.inf, 1.0), _WILD, strict=True):
        x = make_cache(problem, inputs, fill=fill, wild=wild)
        want = _expected(x)
        again = _run(subject, problem, x)
        claim = (
            f"depends on rows that hold {fill} and no key, or on places of the table with {wild}"
        )
        findings += _differs(subject, problem, "G10", "C2 free rows", claim, first, again)
        findings += _written(subject, problem, x, want)
    return findings


def append(subject: Subject, problem: CacheProblem) -> list[MergeFinding]:
    """C3: keys appended in one call, in several, or before give the same bits and caches."""
    inputs = shared_inputs(problem)
    x = make_cache(problem, inputs)
    want = _expected(x)
    first = _run(subject, problem, x)
    findings = _written(subject, problem, x, want)
    there = make_cache(problem, inputs, new=0)
    claim = "differs where the new keys are in the cache before the call"
    again = _run(subject, problem, there)
    findings += _differs(subject, problem, "G10", "C3 append", claim, first, again)
    if x.k is None or x.v is None or problem.new < 2:
        return findings
    in_two = make_cache(problem, inputs)
    cut = 1 + problem.attention.seed % (problem.new - 1)
    for start, stop in ((0, cut), (cut, problem.new)):
        last = _run(
            subject, problem,
            in_two._replace(
                k=x.k[:, :, start:stop], v=x.v[:, :, start:stop],
                cache_seqlens=x.cache_seqlens + start,
            ),
        )  # fmt: skip
    claim = f"differs where the first {cut} new keys are appended by a call of their own"
    findings += _differs(subject, problem, "G10", "C3 append", claim, first, last)
    return findings + _written(subject, problem, in_two, want)


def nothing(subject: Subject, problem: CacheProblem) -> list[MergeFinding]:
    """C5: no key in the cache, no place in the table, no entry: out is 0 and lse -inf.

    The calls have no sinks. New memory holds NaN, and then 1: a kernel that reads sums it never
    wrote can take NaN for those of an empty row, since NaN > 0 is False.

    Raises:
        NotImplementedError: The subject refuses the calls, or the mask has a predicate.
    """
    _check_plain(problem)
    inputs = shared_inputs(problem)
    x = make_cache(problem, inputs, new=0)
    none = x._replace(cache_seqlens=torch.zeros_like(x.cache_seqlens), sinks=None)
    cases = {"no key in the cache": none}
    if x.page_table is not None:
        cases["no place in the table"] = none._replace(page_table=x.page_table[:, :0])
        cases["no page"] = cases["no place in the table"]._replace(
            k_cache=x.k_cache[:0], v_cache=x.v_cache[:0]
        )
    if x.alibi_slopes is None or x.alibi_slopes.ndim == 1:
        cases["no entry"] = none._replace(
            q=x.q[:0], cache_seqlens=x.cache_seqlens[:0],
            page_table=None if x.page_table is None else x.page_table[:0],
            cache_batch_idx=None if x.cache_batch_idx is None else x.cache_batch_idx[:0],
        )  # fmt: skip
    findings, refusals = [], []
    for name, case in cases.items():
        claim = f"is not that of {name}"
        try:
            for fill, memory in ((math.nan, ""), (1.0, ", where new memory holds 1")):
                out, lse = _run(subject, problem, case, fill)
                want = (
                    torch.zeros_like(out), None if lse is None else torch.full_like(lse, -math.inf)
                )  # fmt: skip
                found = _differs(
                    subject, problem, "", "C5 nothing cached", claim + memory, want, (out, lse)
                )
                findings += found
                if found:
                    break
        except NotImplementedError as reason:
            refusals.append(str(reason))
    if len(refusals) == len(cases):
        raise NotImplementedError(refusals[0])
    return findings


def _neighbours(subject: Subject, problem: CacheProblem) -> _Calls:
    """Yield the calls of each entry alone, among copies, and beside one of all keys."""
    # The longest neighbour reads every row.
    x = make_cache(problem, shared_inputs(problem), new=0, fill=1.0)
    first = _run(subject, problem, x)
    rows, length = x.k_cache.shape[1], x.k_cache.shape[1]
    longest = x.table[:1]
    if x.page_table is not None:
        longest = torch.arange(len(x.k_cache), dtype=torch.int32, device=x.q.device)[None]
        length = rows * len(x.k_cache)
    many = _BUSY[problem.attention.device]
    for told, copies, beside in (
        ("where an entry is alone", 1, False),
        (f"where an entry is one of {many} alike", many, False),
        (f"where an entry is beside one of {length} keys", 1, True),
    ):
        found = []
        for b in range(len(x.q)):
            table = x.table[b : b + 1].repeat(copies, 1)
            q = x.q[b : b + 1].repeat(copies + beside, 1, 1, 1)
            seqlens = x.cache_seqlens[b : b + 1].repeat(copies)
            slopes = x.alibi_slopes
            if slopes is not None and slopes.ndim == 2:
                slopes = slopes[b : b + 1].repeat(copies + beside, 1)
            if beside:
                places = max(table.shape[1], longest.shape[1])
                table = torch.cat([pad(t, (0, places - t.shape[1])) for t in (table, longest)])
                seqlens = torch.cat([seqlens, seqlens.new_tensor([length])])
            table = table.contiguous()
            is_paged = x.page_table is not None
            call = x._replace(
                q=q, cache_seqlens=seqlens, alibi_slopes=slopes,
                page_table=table if is_paged else None,
                cache_batch_idx=None if is_paged else table[:, 0].contiguous(),
            )  # fmt: skip
            try:
                out, lse = _run(subject, problem, call)
            except NotImplementedError:
                break
            at = copies // 2
            found.append((out[at : at + 1], None if lse is None else lse[at : at + 1]))
        else:
            if found:
                yield told, first, _joined(found, 0)


def _joined(results: list[_Result], axis: int) -> _Result:
    """Return results side by side."""
    lses = [lse for _, lse in results if lse is not None]
    outs = torch.cat([out for out, _ in results], axis)
    return outs, torch.cat(lses, axis) if len(lses) == len(results) else None


def _check_plain(problem: CacheProblem) -> None:
    """Check that the mask describes calls of any entries.

    Raises:
        NotImplementedError: It has a predicate, which can depend on the entry.
    """
    if not problem.attention.mask.is_plain:
        raise NotImplementedError("the mask has a predicate, of these entries alone")


def neighbours(subject: Subject, problem: CacheProblem) -> list[MergeFinding]:
    """I1: an entry has the same bits alone, among others, and beside a longer one.

    Raises:
        NotImplementedError: The subject refuses the calls, or the mask has a predicate.
    """
    _check_plain(problem)
    return _agree(subject, problem, "batch", "I1 neighbours")


def _decoded(subject: Subject, problem: CacheProblem, first: _Result, ends: list[int]) -> _Result:
    """Return the results of the last rows in chunks, behind the other rows of ``first``.

    Each chunk is appended, or hidden until then if the subject appends nothing.

    Args:
        subject: The subject.
        problem: The problem, which has a causal mask.
        first: The results of one call.
        ends: The ends of the chunks, as many rows as are decoded at last.
    """
    inputs, M, count = shared_inputs(problem), problem.attention.M, ends[-1]
    last = make_cache(problem, inputs, new=count)
    appends = "append" in subject.cache
    x = make_cache(problem, inputs, new=count if appends else 0)
    assert last.k is not None
    assert last.v is not None
    out, lse = first
    done = M - count
    parts = [(out[:, :, :done], None if lse is None else lse[:, :, :done])]
    start = 0
    for end in ends:
        rows = slice(start, end)
        of_rows = x._replace(
            q=x.q[:, :, done + start : done + end],
            k=last.k[:, :, rows] if appends else None,
            v=last.v[:, :, rows] if appends else None,
            cache_seqlens=last.cache_seqlens + (start if appends else end),
        )  # fmt: skip
        parts.append(_run(subject, problem, of_rows))
        start = end
    return _joined(parts, 2)


def _causal(problem: CacheProblem) -> CacheProblem:
    """Return a problem with a causal mask, and without pages that new keys could reach."""
    a = problem.attention
    mask = Mask(causal=True, window_left=a.mask.window_left, seqlens_k=a.mask.seqlens_k)
    attention = dataclasses.replace(a, mask=mask)
    return dataclasses.replace(problem, attention=attention, shared=0)


def _chunks(subject: Subject, problem: CacheProblem) -> _Calls:
    """Yield calls of the rows of a causal problem in two chunks, and token by token.

    The last rows are decoded, as many as the shortest entry has keys.
    """
    count = min(problem.attention.M, *problem.seqlens)
    cut = problem.attention.seed % max(1, count)
    if not count or (problem.attention.M == 1 and "append" not in subject.cache):
        return
    first = _run(subject, problem, make_cache(problem, shared_inputs(problem), new=0))
    for told, ends in (
        ("token by token", list(range(1, count + 1))),
        (f"in chunks cut at row {cut}", [*([cut] if cut else []), count]),
    ):
        with suppress(NotImplementedError):
            again = _decoded(subject, problem, first, ends)
            yield f"where the last {count} rows are decoded {told}", first, again


def decoding(subject: Subject, problem: CacheProblem) -> list[MergeFinding]:
    """I2, I3: decoding token by token, or in chunks, gives the bits of one causal call.

    A causal mask takes the place of a predicate.

    Raises:
        NotImplementedError: There is one row and no append, or the subject refuses the calls.
    """
    return _agree(subject, _causal(problem), "chunks", "I3 decoding")


def far_pages(subject: Subject, problem: CacheProblem) -> list[MergeFinding]:
    """C4: pages that lie 2**31 elements or more apart are read and written where they are.

    Raises:
        NotImplementedError: There is one page, or the device has too little memory.
    """
    inputs, a = shared_inputs(problem), problem.attention
    x = make_cache(problem, inputs, order=None, is_shared=False)
    want = _expected(x)
    first = _run(subject, problem, make_cache(problem, inputs))
    name = ("k_cache", "v_cache")[a.seed % 2]
    cache = getattr(x, name)
    if len(cache) < 2 or not cache.numel():
        raise NotImplementedError("the cache has one page")
    page = cache[0].numel()
    step = -(-FAR // (len(cache) - 1) // page) * page + page
    # An offset that wraps to a 32-bit int leads to elsewhere in the arena, before or behind.
    elements = FAR + page + max(FAR, step * (len(cache) - 1))
    try:
        arena = arena_of(elements, a.device, cache.dtype)
    except MemoryError as error:
        raise NotImplementedError(str(error)) from error
    moved = arena[FAR:].as_strided(cache.shape, (step, *cache[0].contiguous().stride()))
    moved.copy_(cache)
    made = x._replace(**{name: moved})
    again = run_kvcache(subject, a, made)
    findings = _written(subject, problem, made, want)
    del arena, moved, made
    if a.device == "cuda":
        torch.cuda.empty_cache()
    claim = f"is wrong where the pages of {name} span 2**31 elements"
    return findings + _differs(subject, problem, "G10", "C4 far pages", claim, first, again)


# The checks by name.
CACHES: dict[str, CacheCheck] = {
    "accuracy": accuracy,
    "hidden tiles": hidden_tiles,
    "many keys": many_keys,
    "pages": pages,
    "page sizes": page_sizes,
    "free rows": free_rows,
    "append": append,
    "nothing cached": nothing,
    "neighbours": neighbours,
    "decoding": decoding,
    "far pages": far_pages,
}

# Calls that give the same bits, by the word of ``same_bits`` that promises them.
OTHER_CALLS: dict[str, Callable[[Subject, CacheProblem], _Calls]] = {
    "batch": _neighbours,
    "chunks": _chunks,
    "varlen": _other_sizes,
}


def found_in_cache(
    subject: Subject, problem: CacheProblem, check: CacheCheck
) -> list[MergeFinding]:
    """Return the findings of a check; an exception of the subject is one.

    Raises:
        NotImplementedError: The subject refuses every call.
    """
    try:
        return check(subject, problem)
    except SubjectError as error:
        return [
            MergeFinding(
                error.guarantee, error.claim, subject.name, problem, told=str(error),
                kernel=subject.source,
            )
        ]  # fmt: skip
