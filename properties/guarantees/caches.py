"""C1 to C5, G5, I1 and I3: the guarantees of caches, each a function to its findings.

Calls that have to agree are compared to the bit where the kernel promises it, and within the bound
otherwise. A promise of G10 (``bitwise``) covers where keys lie and what free rows hold. "batch",
"chunks" and "varlen" (``same_bits``) promise neighbours, decoding, and page sizes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from contextlib import suppress

import torch
from torch.nn.functional import pad

from fa_verify.oracles.calls.cache import CacheProblem
from fa_verify.oracles.formats.element import format_of
from fa_verify.oracles.formats.in_torch import decoded
from fa_verify.oracles.guarantee import C1, C2, C3, C4, C5, G1, G5, G10, I1, I3, Guarantee
from fa_verify.oracles.masks.mask import Mask
from fa_verify.properties.guarantees.agreement import exact, found_where, outside, same_or_inside
from fa_verify.properties.guarantees.compare import Finding, same_bits
from fa_verify.properties.guarantees.masking import extreme, partly_hidden, seen_by_rows
from fa_verify.properties.guarantees.memory import FAR, arena_of
from fa_verify.properties.inputs.caches import CacheInputs, make_cache, shared_inputs
from fa_verify.properties.kernels.refusals import RefusedError
from fa_verify.properties.kernels.subject import Subject
from fa_verify.properties.kernels.vocabulary import SAME_BITS
from fa_verify.properties.kinds.caches import Caches, CacheTrial, Result, expected, run, run_cache
from fa_verify.properties.running.trial import run_kvcache

__all__ = [
    "OTHER_CALLS", "accuracy", "append", "decoding", "far_pages", "free_rows", "hidden_keys",
    "left_by_append", "neighbours", "nothing", "page_sizes", "pages", "written",
]  # fmt: skip

# How other calls compute what a first one does, the results of both, and the problem of the other
# call if it has one.
_Calls = Iterator[tuple[str, Result, Result, CacheProblem | None]]
# Entries of the table that lead nowhere, beside -1.
_WILD = (2**31 - 1, -(2**31), 0)
# Why calls of other entries cannot be made.
_OF_ENTRIES = "to a mask with a predicate, of these entries alone"
# Entries that keep all processors of a device busy without splits of the keys.
_BUSY = {"cpu": 9, "cuda": 1100}


def _agree(
    trial: CacheTrial,
    again: Result,
    promise: str,
    guarantee: Guarantee,
    claim: str,
    rows: torch.Tensor | None = None,
) -> list[Finding]:
    """Return findings where a second run differs, in a bit if the kernel promises ``promise``.

    ``rows`` is bool (B, H, M), where the runs must agree; None is everywhere.
    """
    outputs = {name: x for name, x in zip(("out", "lse"), again, strict=True) if x is not None}
    promised = trial.subject.promises(promise, trial.problem.config)
    where = {} if rows is None else {"out": rows.unsqueeze(3), "lse": rows}
    return same_or_inside(trial, outputs, guarantee, claim, where=where, promised=promised)


def _other_calls(trial: CacheTrial, word: str, guarantee: Guarantee) -> list[Finding]:
    """Return the findings of ``_agree`` for the calls that a word of ``same_bits`` compares."""
    findings, count = [], 0
    cached = _cached(trial)
    if cached is None:
        trial.not_applicable(guarantee.key, "to a call without appends, which is out of range")
        return []
    trial = cached
    for told, first, again, called in OTHER_CALLS[word](trial.subject, trial.problem):
        count += 1
        # The first call may be another one than the trial's, such as one without an append.
        beside = dataclasses.replace(trial, got=first, asked=trial.asked)
        found = _agree(beside, again, SAME_BITS[word], guarantee, f"differs {told}")
        findings += [dataclasses.replace(x, called=called) for x in found]
    if count:
        trial.applies(guarantee.key)
    else:
        why = f"to {trial.subject.name}, which takes no call that {guarantee} compares"
        trial.not_applicable(guarantee.key, why)
    return findings


def left_by_append(trial: CacheTrial, x: CacheInputs, want: Caches) -> list[Finding]:
    """C3: return findings where caches and scales are not what the append makes of them.

    Any code of NaN is as good as another. Codes are shown by their numbers.
    """
    findings = []
    for name, value in want._asdict().items():
        got = getattr(x, name)
        if value is None or (name.endswith("scale") and not x.writes_scales):
            continue
        form = format_of(value.dtype)
        if form is None:
            bad = ~same_bits(got, value)
        else:
            bad = got.view(torch.uint8) != value.view(torch.uint8)
            got, value = decoded(got, form), decoded(value, form)
            bad &= ~(got.isnan() & value.isnan())
        claim = "is not what an append of its rows leaves"
        findings += found_where(trial, name, bad, got, value, C3, claim)
    return findings


def _cached(trial: CacheTrial) -> CacheTrial | None:
    """Return a trial whose keys are all in the cache before the call; None if it is out of range.

    An append to a cache of codes makes codes and scales of its own. Calls that find all keys in
    the cache are compared with each other instead.
    """
    if trial.problem.format is None or not trial.problem.new:
        return trial
    held = run(trial.subject, dataclasses.replace(trial.problem, new=0))
    return None if held is None else dataclasses.replace(held, asked=trial.asked)


def accuracy(trial: CacheTrial) -> list[Finding]:
    """G1: out and lse lie within the bound of the attention to the keys that the cache holds."""
    return outside(trial, trial.outputs, G1, "leaves the derived bound")


def written(trial: CacheTrial) -> list[Finding]:
    """C3: the call leaves the caches as its append makes them."""
    return left_by_append(trial, trial.called, trial.caches)


def pages(trial: CacheTrial) -> list[Finding]:
    """C1: the order of pages, and whether entries share some, change no bit."""
    findings = []
    for is_shared in (True, False):
        x = make_cache(trial.problem, trial.inputs, order=1, is_shared=is_shared)
        again = run_cache(trial.subject, trial.problem, x)
        claim = f"differs where pages are {'in another order' if is_shared else 'not shared'}"
        findings += _agree(trial, again, G10, C1, claim)
    return findings


def _other_sizes(subject: Subject, problem: CacheProblem) -> _Calls:
    """Yield calls with other pages, and with one row of the cache an entry."""
    inputs = shared_inputs(problem)
    first = run_cache(subject, problem, make_cache(problem, inputs))
    sizes = (0, *(subject.page_sizes or (1, 5, 16, 128)))
    for size in sizes:
        if size != problem.page_size:
            x = make_cache(problem, inputs, page_size=size, order=1 + size, is_shared=False)
            with suppress(RefusedError):
                told = f"with pages of {size} rows" if size else "in one row an entry"
                called = dataclasses.replace(problem, page_size=size, shared=0)
                yield told, first, run_cache(subject, problem, x), called


def page_sizes(trial: CacheTrial) -> list[Finding]:
    """C1: the size of pages, and a contiguous cache, change no bit."""
    if not trial.problem.attention.mask.is_plain:
        # It may depend on the places of an entry.
        trial.not_applicable(C1.key, _OF_ENTRIES)
        return []
    if trial.problem.scales == "page":
        trial.not_applicable(C1.key, "to scales of pages, of which others would have others")
        return []
    return _other_calls(trial, "varlen", C1)


def free_rows(trial: CacheTrial) -> list[Finding]:
    """C2: free pages and rows, and unused places of the table, are neither read nor written."""
    problem, inputs = trial.problem, trial.inputs
    plain = make_cache(problem, inputs, fill=0.0, wild=0)
    first = dataclasses.replace(trial, got=run_cache(trial.subject, problem, plain))
    findings = []
    for fill, wild in zip((math.nan, math.inf, 1.0), _WILD, strict=True):
        x = make_cache(problem, inputs, fill=fill, wild=wild)
        want = expected(trial.subject, problem, x)
        again = run_cache(trial.subject, problem, x)
        claim = (
            f"depends on rows that hold {fill} and no key, or on places of the table with {wild}"
        )
        findings += _agree(first, again, G10, C2, claim)
        findings += left_by_append(trial, x, want)
    return findings


def hidden_keys(trial: CacheTrial) -> list[Finding]:
    """G5: keys in the cache that a row does not see change none of its bits.

    First all keys change that no row sees. An engine frees a page whose keys a window hides, and
    others fill it: such pages hold NaN. Elsewhere a key is finite, and the largest number takes its
    place, because kernels may multiply the values of a tile by weights of 0. Then one key changes
    that some rows see.
    """
    problem, a = trial.problem, trial.problem.attention
    if not a.mask.is_plain:
        # It may depend on the places of an entry.
        trial.not_applicable(G5.key, _OF_ENTRIES)
        return []
    if 0 in (a.B, a.M, a.N):
        trial.not_applicable(G5.key, "without a query and a key")
        return []
    seen = seen_by_rows(a)
    number = torch.arange(a.N, device=a.device)
    held = number < torch.tensor(problem.seqlens, device=a.device)[:, None]
    before = number < torch.tensor(problem.before, device=a.device)[:, None]
    hidden = _in_all_sharing(problem, held & ~seen.any(2).any(1))
    picked = partly_hidden(a, "key", seen.transpose(2, 3))
    key = _in_all_sharing(problem, held & (number == picked[:, None]))
    blind = ~(seen & key[:, None, None]).any(3)
    findings = []
    for replaced, rows, claim in (
        (hidden, torch.ones_like(blind), "depends on keys that no row sees"),
        (key, blind, "depends on a key that the row does not see"),
    ):
        if not (replaced.any() and rows.any()):
            continue
        expired = _whole_pages(problem, replaced & hidden & before)
        k, v = (
            torch.where(expired[:, None, :, None], math.nan, extreme(x, replaced))
            for x in (trial.inputs.k, trial.inputs.v)
        )
        x = make_cache(problem, trial.inputs._replace(k=k, v=v))
        again = run_cache(trial.subject, problem, x)
        told = f"{claim}, in pages of nan" if expired.any() else claim
        findings += _agree(trial, again, G5.key, G5, told, rows)
        trial.applies(G5.key)
    if G5.key not in trial.asked:
        trial.not_applicable(G5.key, "where every row sees every key")
    return findings


def _in_all_sharing(problem: CacheProblem, keys: torch.Tensor) -> torch.Tensor:
    """Return keys (B, N) without those in shared pages that other entries do not have in common."""
    rows = problem.shared * problem.page_size
    return torch.cat([keys[:, :rows].all(0).expand(len(keys), -1), keys[:, rows:]], 1)


def _whole_pages(problem: CacheProblem, keys: torch.Tensor) -> torch.Tensor:
    """Return those of keys (B, N) whose page has no other key; a contiguous cache has no page."""
    size, (B, N) = problem.page_size, keys.shape
    if not size:
        return torch.zeros_like(keys)
    of_pages = pad(keys, (0, -N % size)).view(B, -1, size).all(2)
    return of_pages.repeat_interleave(size, 1)[:, :N]


def append(trial: CacheTrial) -> list[Finding]:
    """C3: keys appended in one call, in several, or before give the same bits and caches."""
    problem, inputs = trial.problem, trial.inputs
    findings = written(trial)
    there = _appended_before(trial)
    claim = "differs where the new keys are in the cache before the call"
    again = run_cache(trial.subject, problem, there)
    findings += _agree(trial, again, G10, C3, claim)
    in_two = make_cache(problem, inputs)
    if in_two.k is None or in_two.v is None or problem.new < 2:
        return findings
    want, k, v = expected(trial.subject, problem, in_two), in_two.k, in_two.v
    cut = 1 + problem.seed % (problem.new - 1)
    for start, stop in ((0, cut), (cut, problem.new)):
        last = run_cache(
            trial.subject, problem,
            in_two._replace(
                k=k[:, :, start:stop], v=v[:, :, start:stop],
                cache_seqlens=in_two.cache_seqlens + start,
            ),
        )  # fmt: skip
    claim = f"differs where the first {cut} new keys are appended by a call of their own"
    findings += _agree(trial, last, G10, C3, claim)
    return findings + left_by_append(trial, in_two, want)


def _appended_before(trial: CacheTrial) -> CacheInputs:
    """Return the call of a trial with the new keys in the cache, as its append has to leave it."""
    x = make_cache(trial.problem, trial.inputs)
    caches = expected(trial.subject, trial.problem, x)._asdict()
    seqlens = x.cache_seqlens + trial.problem.new
    return x._replace(k=None, v=None, cache_seqlens=seqlens, **caches)


def nothing(trial: CacheTrial) -> list[Finding]:
    """C5: no key in the cache, no place in the table, no entry: out is 0 and lse -inf.

    The calls have no sinks. New memory holds NaN, and then 1: a kernel that reads sums it never
    wrote can take NaN for those of an empty row, since NaN > 0 is False.
    """
    problem = trial.problem
    if not problem.attention.mask.is_plain:
        trial.not_applicable(C5.key, _OF_ENTRIES)
        return []
    x = make_cache(problem, trial.inputs, new=0)
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
    findings: list[Finding] = []
    refusals = []
    for name, case in cases.items():
        claim = f"is not that of {name}"
        try:
            for fill, memory in ((math.nan, ""), (1.0, ", where new memory holds 1")):
                out, lse = run_cache(trial.subject, problem, case, fill)
                everywhere = torch.ones((), dtype=torch.bool, device=out.device)
                found = exact(
                    trial, "out", out, torch.zeros_like(out), everywhere, C5, claim + memory
                )
                if lse is not None:
                    want = torch.full_like(lse, -math.inf)
                    found += exact(trial, "lse", lse, want, everywhere, C5, claim + memory)
                findings += found
                if found:
                    break
        except RefusedError as reason:
            refusals.append(str(reason))
    if len(refusals) < len(cases):
        trial.applies(C5.key)
    else:
        trial.not_applicable(C5.key, f"to {trial.subject.name}: {refusals[0]}")
    return findings


def _neighbours(subject: Subject, problem: CacheProblem) -> _Calls:
    """Yield the calls of each entry alone, among copies, and beside one of all keys."""
    # The longest neighbour reads every row.
    x = make_cache(problem, shared_inputs(problem), new=0, fill=1.0)
    first = run_cache(subject, problem, x)
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
                out, lse = run_cache(subject, problem, call)
            except RefusedError:
                break
            at = copies // 2
            found.append((out[at : at + 1], None if lse is None else lse[at : at + 1]))
        else:
            if found:
                yield told, first, _joined(found, 0), None


def _joined(results: list[Result], axis: int) -> Result:
    """Return results side by side."""
    lses = [lse for _, lse in results if lse is not None]
    outs = torch.cat([out for out, _ in results], axis)
    return outs, torch.cat(lses, axis) if len(lses) == len(results) else None


def neighbours(trial: CacheTrial) -> list[Finding]:
    """I1: an entry has the same bits alone, among others, and beside a longer one."""
    if not trial.problem.attention.mask.is_plain:
        trial.not_applicable(I1.key, _OF_ENTRIES)
        return []
    return _other_calls(trial, "batch", I1)


def _decoded(subject: Subject, problem: CacheProblem, first: Result, ends: list[int]) -> Result:
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
    appends = "append" in subject.cache and problem.format is None
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
        parts.append(run_cache(subject, problem, of_rows))
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
    first = run_cache(subject, problem, make_cache(problem, shared_inputs(problem), new=0))
    for told, ends in (
        ("token by token", list(range(1, count + 1))),
        (f"in chunks cut at row {cut}", [*([cut] if cut else []), count]),
    ):
        with suppress(RefusedError):
            again = _decoded(subject, problem, first, ends)
            yield f"where the last {count} rows are decoded {told}", first, again, None


def decoding(trial: CacheTrial) -> list[Finding]:
    """I3: decoding token by token, or in chunks, gives the bits of one causal call.

    A causal mask takes the place of a predicate.
    """
    causal = _causal(trial.problem)
    if causal != trial.problem:
        try:
            found = run(trial.subject, causal)
        except RefusedError as refusal:
            trial.not_applicable(I3.key, f"to {trial.subject.name}: {refusal}")
            return []
        if found is None:
            trial.not_applicable(I3.key, "to a causal call that is out of the range of the bound")
            return []
        trial = dataclasses.replace(found, asked=trial.asked)
    return _other_calls(trial, "chunks", I3)


def far_pages(trial: CacheTrial) -> list[Finding]:
    """C4: pages that lie 2**31 elements or more apart are read and written where they are."""
    problem, device = trial.problem, trial.problem.device
    x = make_cache(problem, trial.inputs, order=None, is_shared=False)
    want = expected(trial.subject, problem, x)
    name = ("k_cache", "v_cache")[problem.seed % 2]
    cache = getattr(x, name)
    if len(cache) < 2 or not cache.numel():
        trial.not_applicable(C4.key, "to a cache of one page")
        return []
    page = cache[0].numel()
    step = -(-FAR // (len(cache) - 1) // page) * page + page
    # An offset that wraps to a 32-bit int leads to elsewhere in the arena, before or behind.
    elements = FAR + page + max(FAR, step * (len(cache) - 1))
    try:
        arena = arena_of(elements, device, cache.dtype)
    except MemoryError as error:
        trial.not_applicable(C4.key, f"here: {error}")
        return []
    trial.applies(C4.key)
    moved = arena[FAR:].as_strided(cache.shape, (step, *cache[0].contiguous().stride()))
    moved.copy_(cache)
    made = x._replace(**{name: moved})
    again = run_kvcache(trial.subject, problem.attention, made)
    findings = left_by_append(trial, made, want)
    del arena, moved, made
    if device == "cuda":
        torch.cuda.empty_cache()
    claim = f"is wrong where the pages of {name} span 2**31 elements"
    return findings + _agree(trial, again, G10, C4, claim)


# Calls that give the same bits, by the word of ``same_bits`` that promises them.
OTHER_CALLS: dict[str, Callable[[Subject, CacheProblem], _Calls]] = {
    "batch": _neighbours,
    "chunks": _chunks,
    "varlen": _other_sizes,
}
