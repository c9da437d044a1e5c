"""Every check of caches finds a subject that is wrong in its way, and passes a correct one."""

from __future__ import annotations

import math

import pytest
import torch

from fa_verify.oracles.cache_problem import CacheProblem
from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.problem import Problem
from fa_verify.properties.checks.caches import CACHES, found_in_cache
from fa_verify.properties.subjects.subject import Subject

MASK = Mask(causal=True, seqlens_k=(21, 9))
ATTENTION = Problem(B=2, H=2, N=24, M=3, D=8, Dv=5, dtype="fp32", mask=MASK, seed=3)
PROBLEM = CacheProblem(attention=ATTENTION, page_size=4, new=3, shared=1, spare=2)


def attend(
    q, k_cache, v_cache, *, k=None, v=None, cache_seqlens, page_table=None, cache_batch_idx=None,
    causal, window_size, sm_scale, return_lse,
):  # fmt: skip
    """Attention over a cache in PyTorch, row by row and key by key, in float32."""
    page_size = k_cache.shape[1]
    table = cache_batch_idx[:, None] if page_table is None else page_table
    B, H, M, _ = q.shape
    group = H // k_cache.shape[2]
    out, lse = torch.empty(B, H, M, v_cache.shape[3]), torch.empty(B, H, M)
    for b in range(B):
        rows = [int(page) * page_size + n for page in table[b] for n in range(page_size)]
        held = int(cache_seqlens[b])
        for cache, new in ((k_cache, k), (v_cache, v)):
            for i in range(0 if new is None else new.shape[2]):
                page, row = divmod(rows[held + i], page_size)
                cache[page, row] = new[b, :, i]
        held += 0 if k is None else k.shape[2]
        places = [divmod(row, page_size) for row in rows[:held]]
        for h in range(H):
            keys = [k_cache[page, row, h // group] for page, row in places]
            values = [v_cache[page, row, h // group] for page, row in places]
            for m in range(M):
                last = m + held - M if causal else held
                scores = [sm_scale * (q[b, h, m] * x).sum() for x in keys[: max(0, last + 1)]]
                out[b, h, m], lse[b, h, m] = softmax(scores, values)
    return out, lse


def softmax(scores, values):
    """The weighted sum of values and the log of the sum, from first to last."""
    if not scores:
        return 0.0, -math.inf
    top = max(scores)
    weights = [(x - top).exp() for x in scores]
    total = sum(weights)
    return sum(w * x for w, x in zip(weights, values, strict=False)) / total, top + total.log()


def drops_the_append(q, k_cache, v_cache, *, k=None, v=None, **given):
    return attend(q, k_cache, v_cache, **given)


def reads_free_rows(q, k_cache, v_cache, **given):
    out, lse = attend(q, k_cache, v_cache, **given)
    return out + 0 * v_cache.sum(), lse


def perturbed(found, is_wrong: bool):
    out, lse = found
    return (out * (1 + 2.0**-20) if is_wrong else out), lse


def rounds_by_pages(q, k_cache, v_cache, **given):
    found = attend(q, k_cache, v_cache, **given)
    return perturbed(found, k_cache.shape[1] != 4)


def rounds_by_appends(q, k_cache, v_cache, *, k=None, **given):
    found = attend(q, k_cache, v_cache, k=k, **given)
    return perturbed(found, k is not None and q.shape[2] == k.shape[2])


def appends_badly(q, k_cache, v_cache, **given):
    found = rounds_by_appends(q, k_cache, v_cache, **given)
    k_cache[k_cache.isnan()] = 1.0
    return found


def hides_empty_rows(q, k_cache, v_cache, **given):
    out, lse = attend(q, k_cache, v_cache, **given)
    return out, lse.clamp(min=-1e30)


def rounds_by_entries(q, k_cache, v_cache, **given):
    found = attend(q, k_cache, v_cache, **given)
    return perturbed(found, len(q) != 2)


def is_far_by_64_bits(q, k_cache, v_cache, **given):
    found = attend(q, k_cache, v_cache, **given)
    return perturbed(found, max(k_cache.stride(0), v_cache.stride(0)) > 2**20)


WRONG = {
    "accuracy": drops_the_append, "pages": rounds_by_pages, "free rows": reads_free_rows,
    "append": appends_badly, "nothing cached": hides_empty_rows,
    "decoding": rounds_by_appends, "neighbours": rounds_by_entries,
    "far pages": is_far_by_64_bits,
}  # fmt: skip


def claimed(check: str) -> str:
    """The first finding of each claim of a check."""
    findings = found_in_cache(subject_of(WRONG[check]), PROBLEM, CACHES[check])
    return "\n".join({x.claim: str(x) for x in findings[::-1]}.values())


def subject_of(function) -> Subject:
    def attention(q, k, v, **given):
        raise NotImplementedError

    attention.kvcache = function
    return Subject.of(attention, "attention")


@pytest.mark.parametrize("check", CACHES)
def test_a_check_finds_its_fault_and_passes_a_correct_subject(check):
    assert found_in_cache(subject_of(attend), PROBLEM, CACHES[check]) == []
    findings = found_in_cache(subject_of(WRONG[check]), PROBLEM, CACHES[check])
    assert findings
    assert str(findings[0])


def test_a_subject_that_writes_to_the_table_is_found():
    def wrong(q, k_cache, v_cache, *, page_table=None, **given):
        page_table.add_(0 * page_table).fill_(0)
        return attend(q, k_cache, v_cache, page_table=page_table, **given)

    findings = found_in_cache(subject_of(wrong), PROBLEM, CACHES["accuracy"])
    assert "page_table differs" in str(findings[0])
