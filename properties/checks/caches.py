"""C1 to C5, I1 and I3: the guarantees of attention over caches, each a function to its findings."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator

import torch

from fa_verify.oracles.cache_problem import CacheProblem
from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.reference.caches import appended, gathered
from fa_verify.properties.checks.memory import FAR, SPARE, arena_of
from fa_verify.properties.checks.merging import MergeFinding, found_elements
from fa_verify.properties.comparison.compare import ratios, same_bits
from fa_verify.properties.execution.guard_bands import GuardBands
from fa_verify.properties.execution.large_memory import large_memory
from fa_verify.properties.execution.trial import SubjectError, plan_run, run_kvcache
from fa_verify.properties.inputs.caches import CacheInputs, make_cache, shared_inputs
from fa_verify.properties.subjects.subject import Subject

__all__ = ["CACHES", "CacheCheck", "found_in_cache"]

CacheCheck = Callable[[Subject, CacheProblem], list[MergeFinding]]
_Result = tuple[torch.Tensor, torch.Tensor]
# Entries of the table that lead nowhere, beside -1.
_WILD = (2**31 - 1, -(2**31), 0)
# Entries that keep all processors of a device busy without splits of the keys.
_BUSY = {"cpu": 9, "cuda": 1100}


def _run(subject: Subject, problem: CacheProblem, x: CacheInputs) -> _Result:
    """Run the subject with guard bands around what it allocates."""
    with GuardBands() as guards:
        found = run_kvcache(subject, problem.attention, x)
    if overruns := guards.overruns():
        raise SubjectError(
            f"a tensor of shape {tuple(overruns[0].tensor.shape)} {overruns[0].place}"
        )
    return found


def _differs(
    subject: Subject,
    problem: CacheProblem,
    guarantee: str,
    claim: str,
    first: _Result,
    again: _Result,
) -> list[MergeFinding]:
    """Return findings where out or lse of two runs differ in a bit."""
    findings = []
    for name, x, y in zip(("out", "lse"), first, again, strict=True):
        values = y, x, torch.zeros_like(x)
        findings += found_elements(
            subject, problem, guarantee, claim, name, values, ~same_bits(x, y)
        )
    return findings


def _expected(x: CacheInputs) -> _Result:
    """Return the caches as the call has to leave them."""
    if x.k is None or x.v is None:
        return x.k_cache.clone(), x.v_cache.clone()
    return (
        appended(x.k_cache, x.k, x.cache_seqlens, x.table),
        appended(x.v_cache, x.v, x.cache_seqlens, x.table),
    )


def _written(
    subject: Subject, problem: CacheProblem, x: CacheInputs, want: _Result
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


def accuracy(subject: Subject, problem: CacheProblem) -> list[MergeFinding]:
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
    judged = subject
    if subject.kvcache_splits:
        judged = subject.assuming({"splits": subject.kvcache_splits(problem.attention)})
    planned = plan_run(judged, problem.attention, inputs._replace(k=k, v=v))
    if planned is None:
        raise NotImplementedError("the problem is out of the range of the bound")
    findings = _written(subject, problem, x, want)
    for name, got in (("out", out), ("lse", lse)):
        exact, bound = getattr(planned.want, name), getattr(planned.judgement.bound, name)
        findings += found_elements(
            subject, problem, "G1 accuracy", "leaves the derived bound", name,
            (got, exact, bound), ratios(got, exact, bound) > 1,
        )  # fmt: skip
    return findings


def pages(subject: Subject, problem: CacheProblem) -> list[MergeFinding]:
    """C1: the order and size of pages, shared or not, and a contiguous cache change no bit."""
    inputs = shared_inputs(problem)
    first = _run(subject, problem, make_cache(problem, inputs))
    findings = []
    for size in dict.fromkeys((problem.page_size, 0, 1, 5, 16, 128)):
        for is_shared in (True, False) if size == problem.page_size else (False,):
            x = make_cache(problem, inputs, page_size=size, order=1 + size, is_shared=is_shared)
            again = _run(subject, problem, x)
            claim = f"differs with pages of {size} rows" if size else "differs in one row an entry"
            findings += _differs(subject, problem, "C1 pages", claim, first, again)
    return findings


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
        findings += _differs(subject, problem, "C2 free rows", claim, first, again)
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
    findings += _differs(subject, problem, "C3 append", claim, first, _run(subject, problem, there))
    if x.k is None or x.v is None or problem.new < 2:
        return findings
    again = make_cache(problem, inputs)
    cut = 1 + problem.attention.seed % (problem.new - 1)
    for start, stop in ((0, cut), (cut, problem.new)):
        last = _run(
            subject, problem,
            again._replace(
                k=x.k[:, :, start:stop], v=x.v[:, :, start:stop],
                cache_seqlens=x.cache_seqlens + start,
            ),
        )  # fmt: skip
    claim = f"differs where the first {cut} new keys are appended by a call of their own"
    findings += _differs(subject, problem, "C3 append", claim, first, last)
    return findings + _written(subject, problem, again, want)


def nothing(subject: Subject, problem: CacheProblem) -> list[MergeFinding]:
    """C5: no key in the cache, no place in the table, no entry: out is 0 and lse -inf."""
    inputs = shared_inputs(problem)
    x = make_cache(problem, inputs, new=0)
    none = x._replace(cache_seqlens=torch.zeros_like(x.cache_seqlens))
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
    findings = []
    for name, case in cases.items():
        got = _run(subject, problem, case)
        want = torch.zeros_like(got[0]), torch.full_like(got[1], -math.inf)
        claim = f"is not that of {name}"
        findings += _differs(subject, problem, "C5 nothing cached", claim, want, got)
    return findings


def _chunks(count: int, seed: int) -> Iterator[tuple[str, list[int]]]:
    """Yields ways to cut rows into chunks, by name, as the ends of the chunks."""
    yield "token by token", list(range(1, count + 1))
    cut = seed % count
    yield f"in chunks cut at row {cut}", [*([cut] if cut else []), count]


def decoding(subject: Subject, problem: CacheProblem) -> list[MergeFinding]:
    """I3: decoding token by token, or in chunks, with appends gives the bits of one causal call.

    The last rows are decoded, as many as the shortest entry has keys.
    """
    a = problem.attention
    mask = Mask(causal=True, window_left=a.mask.window_left, seqlens_k=a.mask.seqlens_k)
    problem = dataclasses.replace(problem, attention=dataclasses.replace(a, mask=mask), shared=0)
    inputs = shared_inputs(problem)
    out, lse = _run(subject, problem, make_cache(problem, inputs, new=0))
    count = min(a.M, *problem.seqlens)
    if not count:
        return []
    last = make_cache(problem, inputs, new=count)
    assert last.k is not None
    assert last.v is not None
    findings = []
    for name, ends in _chunks(count, a.seed):
        x = make_cache(problem, inputs, new=count)
        parts, start = [], 0
        for end in ends:
            rows = slice(start, end)
            of_rows = x._replace(
                q=x.q[:, :, a.M - count :][:, :, rows], k=last.k[:, :, rows], v=last.v[:, :, rows],
                cache_seqlens=x.cache_seqlens + start,
            )  # fmt: skip
            parts.append(_run(subject, problem, of_rows))
            start = end
        again = torch.cat([y for y, _ in parts], 2), torch.cat([y for _, y in parts], 2)
        whole = out[:, :, a.M - count :], lse[:, :, a.M - count :]
        claim = f"differs where the last {count} rows are decoded {name}"
        findings += _differs(subject, problem, "I3 decoding", claim, whole, again)
    return findings


def _entries(x: CacheInputs, numbers: torch.Tensor) -> CacheInputs:
    """Returns the call of some entries, which appends nothing, in the same cache."""
    slopes = x.alibi_slopes
    return x._replace(
        q=x.q[numbers], cache_seqlens=x.cache_seqlens[numbers],
        page_table=None if x.page_table is None else x.page_table[numbers],
        cache_batch_idx=None if x.cache_batch_idx is None else x.cache_batch_idx[numbers],
        alibi_slopes=slopes if slopes is None or slopes.ndim == 1 else slopes[numbers],
    )  # fmt: skip


def neighbours(subject: Subject, problem: CacheProblem) -> list[MergeFinding]:
    """I1: an entry has the same bits alone and among as many entries as keep a device busy."""
    x = make_cache(problem, shared_inputs(problem), new=0)
    first = _run(subject, problem, x)
    B, device = problem.attention.B, problem.attention.device
    alone = [
        _run(subject, problem, _entries(x, torch.tensor([b], device=device))) for b in range(B)
    ]
    many = torch.arange(max(B, _BUSY[device]), device=device) % B
    out, lse = _run(subject, problem, _entries(x, many))
    apart = torch.cat([x for x, _ in alone]), torch.cat([x for _, x in alone])
    cases = {
        "differs from that of the entry alone": apart,
        f"differs among {len(many)} entries": (out[:B], lse[:B]),
    }
    findings = []
    for claim, again in cases.items():
        findings += _differs(subject, problem, "I1 neighbours", claim, first, again)
    return findings


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
        with large_memory(a.device, elements * cache.element_size() + SPARE):
            arena = arena_of(elements, a.device, cache.dtype)
            moved = arena[FAR:].as_strided(cache.shape, (step, *cache[0].contiguous().stride()))
            moved.copy_(cache)
            made = x._replace(**{name: moved})
            again = run_kvcache(subject, a, made)
            findings = _written(subject, problem, made, want)
            del arena, moved, made
            if a.device == "cuda":
                torch.cuda.empty_cache()
    except MemoryError as error:
        raise NotImplementedError(str(error)) from error
    claim = f"is wrong where the pages of {name} span 2**31 elements"
    return findings + _differs(subject, problem, "C4 far pages", claim, first, again)


# The checks by name.
CACHES: dict[str, CacheCheck] = {
    "accuracy": accuracy,
    "pages": pages,
    "free rows": free_rows,
    "append": append,
    "nothing cached": nothing,
    "decoding": decoding,
    "neighbours": neighbours,
    "far pages": far_pages,
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
        return [MergeFinding(error.guarantee, error.claim, subject.name, problem, told=str(error))]
