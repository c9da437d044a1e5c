"""A planted fault of a cache or of a merge has one cause, with the features that it needs alone."""

from __future__ import annotations

import math

import pytest
import torch

from fa_verify.oracles.calls.cache import CacheProblem
from fa_verify.oracles.calls.merge import MergeProblem
from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.problem import Problem
from fa_verify.properties.guarantees.caches import page_sizes
from fa_verify.properties.guarantees.claims import standing_of
from fa_verify.properties.kernels.subject import Subject
from fa_verify.properties.running.tally import Tally
from fa_verify.properties.search import failure, minimize
from fa_verify.properties.search.causes import Known, RootCause, described
from fa_verify.properties.search.failure import Failure
from fa_verify.properties.search.search import Runner
from fa_verify.reporting.verdict import if_intended, title
from tests.unit.properties.guarantees.test_merging_checks import torch_merge


@pytest.fixture(autouse=True)
def unhurried(monkeypatch):
    """Searches end by themselves on a busy machine, and small tensors need one thread."""
    monkeypatch.setattr(failure, "SECONDS", 600.0)
    monkeypatch.setattr(minimize, "_SECONDS", 600.0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def causes_of(subject: Subject, call) -> list[RootCause]:
    """The causes of a call that fails."""
    runner, store = Runner(subject, Tally()), Known()
    (check,) = (x.check for x in standing_of(call.kind) if x.bounded)
    found = runner.findings(call, check)
    assert found, "the planted fault does not show"
    Failure(runner, check, found, store).causes()
    return store.known()


def needs(cause: RootCause) -> dict[str, object]:
    return {x.name: x.value for x in cause.features}


def decode(
    q, k_cache, v_cache, *, k=None, v=None, cache_seqlens, page_table=None, cache_batch_idx=None,
    causal, window_size=(None, None), sm_scale, weights=lambda p: p,
    prefix=True, place=lambda key, size: divmod(key, size), reads_all=False,
):  # fmt: skip
    """Attention over a cache in PyTorch, in float32."""
    table = cache_batch_idx[:, None] if page_table is None else page_table
    (B, H, M, _), size = q.shape, k_cache.shape[1]
    outs, lses = q.new_zeros(B, H, M, v_cache.shape[3]), q.new_zeros(B, H, M)
    for b in range(B):
        held, new = int(cache_seqlens[b]), 0 if k is None else k.shape[2]
        for i in range(new):
            page, row = place(held + i, size)
            k_cache[table[b, page], row] = k[b, :, i]
            v_cache[table[b, page], row] = v[b, :, i]
        N = held + new
        n = torch.arange(table.shape[1] * size if reads_all else N)
        page, row = (torch.tensor([place(int(x), size)[i] for x in n], dtype=int) for i in (0, 1))
        keys, values = (
            x[table[b, page].long(), row].transpose(0, 1).repeat_interleave(H // x.shape[2], 0)
            for x in (k_cache, v_cache)
        )
        last = torch.arange(M)[:, None] + (N - M if prefix else 0)
        seen = (n < N) & ((n <= last) | torch.tensor(not causal))
        if window_size[0] is not None:
            seen &= n >= torch.arange(M)[:, None] + N - M - window_size[0]
        scores = (q[b] @ keys.mT * sm_scale).masked_fill(~seen, -math.inf)
        lse = scores.logsumexp(-1) if len(n) else q.new_full((H, M), -math.inf)
        p = (scores - torch.where(lse == -math.inf, 0.0, lse)[..., None]).exp()
        outs[b], lses[b] = weights(p) @ values, lse
    return outs, lses


def cache_subject(kernel, **declared) -> Subject:
    def kvcache(q, k_cache, v_cache, *, cache_seqlens, page_table, cache_batch_idx, sm_scale,
                causal, window_size=(None, None), k=None, v=None):  # fmt: skip
        return kernel(
            q, k_cache, v_cache, k=k, v=v, cache_seqlens=cache_seqlens, page_table=page_table,
            cache_batch_idx=cache_batch_idx, sm_scale=sm_scale, causal=causal,
            window_size=window_size,
        )  # fmt: skip

    declared = {
        "dtypes": ("fp32",), "p_dtype": "fp32", "p_normalised": True, "masks": ("causal", "window"),
        "cache": ("contiguous", "paged", "append"), "backward": False, **declared,
    }  # fmt: skip
    for name, value in declared.items():
        setattr(kvcache, name, value)
    return Subject.of(kvcache, "decode")


def cache_call(lengths=(37, 5), *, page_size=4, new=0, shared=0, spare=2, mask=None, **fields):
    mask = mask or {}
    attention = {
        "B": len(lengths), "H": 4, "Hk": 2, "M": 3, "N": max(lengths), "D": 24, "Dv": 20,
        "dtype": "fp32", "seed": 3, **fields, "mask": Mask(seqlens_k=lengths, **mask),
    }  # fmt: skip
    return CacheProblem(
        attention=Problem(**attention), page_size=page_size, new=new, shared=shared, spare=spare
    )


def with_arguments(change):
    """A kernel that changes its arguments."""
    return lambda q, k_cache, v_cache, **given: decode(q, k_cache, v_cache, **change(given))


def of_results(change):
    """A kernel that changes its out and lse."""
    return lambda *args, **given: change(*decode(*args, **given))


def loses_rows_of_groups(q, k_cache, v_cache, **given):
    out, lse = decode(q, k_cache, v_cache, **given)
    out.unflatten(1, (k_cache.shape[2], -1))[:, :, 8:] = 0.0
    return out, lse


def loses_columns(out, lse):
    return torch.cat([out[..., :40], 0 * out[..., 40:]], -1), lse


def loses_entries(out, lse):
    return torch.cat([out[:2], 0 * out[2:]]), lse


def appends_to_one_page(q, k_cache, v_cache, *, k=None, v=None, cache_seqlens, **given):
    """Appended keys stay in the page of the first."""
    size, table = k_cache.shape[1], given["page_table"]
    if k is None or table is None:
        return decode(q, k_cache, v_cache, k=k, v=v, cache_seqlens=cache_seqlens, **given)
    for b, held in enumerate(cache_seqlens.tolist()):
        for i in range(k.shape[2]):
            page, row = table[b, held // size].long(), (held + i) % size
            k_cache[page, row], v_cache[page, row] = k[b, :, i], v[b, :, i]
    return decode(q, k_cache, v_cache, cache_seqlens=cache_seqlens + k.shape[2], **given)


def reads_the_first_page(q, k_cache, v_cache, *, page_table=None, **given):
    if page_table is not None:
        page_table = page_table[:, :1].expand(page_table.shape)
    return decode(q, k_cache, v_cache, page_table=page_table, **given)


def loses_the_last_key_of_a_page(q, k_cache, v_cache, *, cache_seqlens, **given):
    full = (cache_seqlens > 0) & (cache_seqlens % k_cache.shape[1] == 0)
    lost = full.int() * (given["page_table"] is not None)
    return decode(q, k_cache, v_cache, cache_seqlens=cache_seqlens - lost, **given)


def reads_unused_places(q, k_cache, v_cache, *, page_table=None, **given):
    """Keys of places past the last page of an entry are multiplied by 0."""
    out, lse = decode(q, k_cache, v_cache, page_table=page_table, **given)
    if page_table is not None and bool((page_table < 0).any()):
        out = out * math.nan
    return out, lse


def takes_pages_as_they_lie(q, k_cache, v_cache, *, page_table=None, **given):
    if page_table is not None:
        page_table = page_table[:, :1] + torch.arange(page_table.shape[1]).to(page_table)
        page_table = page_table.clamp(max=len(k_cache) - 1)
    return decode(q, k_cache, v_cache, page_table=page_table, **given)


def takes_powers_of_two(q, k_cache, v_cache, *, page_table=None, **given):
    """Rows are found by shifts of the page size."""
    shift = k_cache.shape[1].bit_length() - 1
    return decode(
        q, k_cache, v_cache, page_table=page_table, **given,
        place=lambda key, size: (key >> shift, key % size) if page_table is not None
        else divmod(key, size),
    )  # fmt: skip


def weighs_late_keys(p):
    return torch.cat([p[..., :17], p[..., 17:] * 0.9], -1)


# Kernels of caches, a call that fails with much beside what it needs, and the needs.
CACHES = {
    "rows of a group past the 8th are lost": (
        loses_rows_of_groups, cache_call(H=32), {"G above": 8},
    ),
    "keys past the 17th weigh less": (
        with_arguments(lambda x: {**x, "weights": weighs_late_keys}), cache_call(),
        {"N above": 17},
    ),
    "the first page is read alone": (
        reads_the_first_page, cache_call(new=3),
        {"more keys than one page": None},
    ),
    "the last key of a full page is lost": (
        loses_the_last_key_of_a_page, cache_call((32, 5)),
        {"keys that fill their last page": None},
    ),
    "pages are taken as they lie": (
        takes_pages_as_they_lie, cache_call((14, 5, 3)), {"pages out of order": None},
    ),
    "cache_batch_idx is not read": (
        with_arguments(
            lambda x: {**x, "cache_batch_idx": torch.arange(len(x["cache_seqlens"]))}
            if x["page_table"] is None else x
        ),
        cache_call(page_size=0), {"entries out of order": None},
    ),
    "the length of entry 0 is that of all": (
        with_arguments(lambda x: {**x, "cache_seqlens": x["cache_seqlens"][:1].expand(
            x["cache_seqlens"].shape)}),
        cache_call((5, 37), page_size=0), {"entries of different lengths": None},
    ),
    "the page sizes are powers of two": (
        takes_powers_of_two, cache_call(page_size=7),
        {"pages whose size is no power of two": None, "N above": 2},
    ),
    "appended keys stay in one page": (
        appends_to_one_page, cache_call(new=3),
        {"appended keys in several pages": None},
    ),
    "free rows are multiplied by 0": (
        with_arguments(lambda x: {**x, "reads_all": True}),
        cache_call((37, 37), page_size=0), {"free rows": None},
    ),
    "the diagonal begins at the top left": (
        with_arguments(lambda x: {**x, "prefix": False}),
        cache_call(mask={"causal": True}, page_size=0),
        {"right bound": None},
    ),
    "the window is not read": (
        with_arguments(lambda x: {**x, "window_size": (None, None)}),
        cache_call(mask={"window_left": 3}), {"hidden keys": None, "window left": None},
    ),
    "columns past the 40th are lost": (
        of_results(loses_columns), cache_call(D=100, Dv=100), {"Dv above": 40},
    ),
    "entries past the 2nd are lost": (
        of_results(loses_entries), cache_call((5, 9, 12, 7)), {"B above": 2},
    ),
    "the base of lse is 2": (
        of_results(lambda out, lse: (out, lse / math.log(2))), cache_call(), {}, 'lse_base="2"',
    ),
    "the lse of an empty row is 0": (
        of_results(lambda out, lse: (out, torch.where(lse > -math.inf, lse, 0.0))),
        cache_call((5, 0)), {"empty rows": None}, "empty_lse=0",
    ),
    "places of the table without a page are read": (
        reads_unused_places, cache_call((12, 12)), {"unused places of the page table": None},
    ),
    "the exponent of an empty row is NaN": (
        of_results(lambda out, lse: (torch.where(lse[..., None] > -math.inf, out, math.nan), lse)),
        cache_call((5, 0)), {"empty rows": None},
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", CACHES)
def test_a_fault_of_a_cache_is_one_cause_with_all_that_it_needs(fault):
    kernel, call, wanted, *declared = CACHES[fault]
    (cause,) = causes_of(cache_subject(kernel), call)
    assert needs(cause) == wanted
    assert not declared or declared == [if_intended(cause)]


def test_a_call_with_other_pages_is_explained_by_its_own_problem():
    """The problem of the check is right, and the one with pages of one row fails."""
    runner = Runner(cache_subject(loses_the_last_key_of_a_page), Tally())
    found = runner.findings(cache_call((5, 3)), page_sizes)
    assert found[0].problem.page_size == 1
    store = Known()
    Failure(runner, page_sizes, found, store).causes()
    (cause,) = store.known()
    assert needs(cause) == {"keys that fill their last page": None}


def lost(weights):
    """A merge whose parts weigh otherwise."""
    return lambda outs, lses: torch_merge(outs, lses, weights=weights)


def of_merge(change):
    return lambda outs, lses: change(*torch_merge(outs, lses))


def merges_unguarded(outs, lses):
    """The largest lse is subtracted, whatever it is."""
    top = lses.amax(0) if len(lses) else lses.new_full(lses.shape[1:], -math.inf)
    live = lses > -math.inf
    e = (lses - top).exp()
    total = e.sum(0)
    out = (e[..., None] * torch.where(live[..., None], outs, 0.0)).sum(0) / total[..., None]
    return out, top + total.log()


def multiplies_by_0(outs, lses):
    """The out of a part without keys is multiplied by its weight."""
    out, lse = torch_merge(outs, lses)
    seen = lse > -math.inf
    garbage = torch.where(
        seen[..., None], outs * (lses - torch.where(seen, lse, 0.0)).exp()[..., None], 0.0
    )
    return out + 0.0 * garbage.sum(0), lse


def skips_parts(outs, lses):
    """A part is skipped where one of its rows saw nothing."""
    live = (lses > -math.inf).flatten(1).all(1)
    return torch_merge(outs[live], lses[live])


def reads_by_order(outs, lses):
    """The parts are taken as contiguous."""
    flat = outs.as_strided(outs.shape, torch.empty(outs.shape).stride())
    return torch_merge(flat, lses)


def loses(start, axis):
    def change(out, lse):
        kept = torch.arange(out.shape[axis]) < start
        shape = [-1 if i == axis else 1 for i in range(4)]
        return torch.where(kept.view(shape), out, 0.0), lse

    return change


def merge_subject(kernel, **declared) -> Subject:
    def states(outs, lses):
        return kernel(outs, lses)

    for name, value in {"states": True, "dtypes": ("fp32",), "backward": False, **declared}.items():
        setattr(states, name, value)
    return Subject.of(states, "merge")


def merge_call(**fields):
    plain = {
        "parts": (17, 5, 0, 100, 3), "B": 2, "H": 3, "M": 5, "Dv": 40, "dtype": "fp32", "seed": 7,
        "hidden": 3, "layout": "parts inside", "dout_layout": "gaps",
    }  # fmt: skip
    return MergeProblem(**{**plain, **fields})


MERGES = {
    "the third part weighs less": (
        lost(lambda e: torch.cat([e[:2], 0.999 * e[2:]])), merge_call(), {"parts above": 2}, "",
    ),
    "no guard of rows without keys": (
        merges_unguarded, merge_call(hidden=16), {"empty rows": None}, "",
    ),
    "the out of an empty part is multiplied": (
        multiplies_by_0, merge_call(), {"parts without keys": None, "parts above": 1}, "",
    ),
    "a part with an empty row is skipped": (
        skips_parts, merge_call(), {"parts without keys in some rows alone": None}, "",
    ),
    "strides of parts are not read": (
        reads_by_order, merge_call(hidden=0),
        {"parts that are not contiguous": None, "parts above": 1, "M above": 1}, "",
    ),
    "columns past the 17th are lost": (of_merge(loses(17, 3)), merge_call(), {"Dv above": 17}, ""),
    "rows past the 3rd are lost": (of_merge(loses(3, 2)), merge_call(hidden=0), {"M above": 3}, ""),
    "heads past the 2nd are lost": (of_merge(loses(2, 1)), merge_call(), {"H above": 2}, ""),
    "exponents are not shifted": (
        lambda outs, lses: torch_merge(outs, lses.clamp(min=-80.0)),
        merge_call(lse="low", hidden=0, parts=(17, 5, 2)), {"lse family": ("low",)}, "",
    ),
    "the base is 2": (
        lambda outs, lses: torch_merge(outs, lses, base_2=True), merge_call(), {"parts above": 1},
        'lse_base="2"',
    ),
    "an empty lse is 0": (
        lambda outs, lses: torch_merge(outs, lses, empty=0.0), merge_call(),
        {"parts without keys": None}, 'empty_lse=0',
    ),
    "an empty lse is +inf": (
        lambda outs, lses: torch_merge(outs, lses, empty=math.inf), merge_call(),
        {"parts without keys": None}, 'empty_lse="+inf"',
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", MERGES)
def test_a_fault_of_a_merge_is_one_cause_with_all_that_it_needs(fault):
    kernel, call, wanted, declared = MERGES[fault]
    (cause,) = causes_of(merge_subject(kernel), call)
    assert needs(cause) == wanted
    assert if_intended(cause) == declared


# The title and the smallest call of some faults.
SHOWN = {
    "rows of a group past the 8th are lost": (
        "Problems with G > 8 give wrong out", "H=9 M=1 N=1 fp32 seqlens_k=(1,)",
    ),
    "the first page is read alone": (
        "Problems with more keys than one page give wrong out, lse",
        "M=1 N=2 fp32 seqlens_k=(2,) page_size=1",
    ),
    "pages are taken as they lie": (
        "Problems with pages out of order give wrong out, lse",
        "M=1 N=2 fp32 seqlens_k=(2,) page_size=1 order=descending",
    ),
    "the diagonal begins at the top left": (
        "Masks bounded to the right give wrong out, lse",
        "M=1 N=2 fp32 causal and seqlens_k=(2,)",
    ),
    "columns past the 40th are lost": (
        "Problems with Dv > 40 give wrong out", "M=1 N=1 Dv=41 fp32 seqlens_k=(1,)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", SHOWN)
def test_the_smallest_call_is_small_and_the_title_reads_well(fault):
    kernel, call, *_ = CACHES[fault]
    (cause,) = causes_of(cache_subject(kernel), call)
    assert (title(cause), described(cause.problem)) == SHOWN[fault]
