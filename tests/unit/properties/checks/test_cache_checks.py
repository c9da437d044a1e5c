"""Every check of caches finds a subject that is wrong in its way, and passes the kernels."""

from __future__ import annotations

import dataclasses

import pytest
import torch

pytest.importorskip("triton")

from fa_kernels import flash_attention_with_kvcache
from fa_verify.oracles.cache_problem import CacheProblem
from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.problem import Problem
from fa_verify.properties.checks.caches import CACHES, found_in_cache
from fa_verify.properties.subjects.subject import Subject
from fa_verify.subjects.ours import flash_attention

MASK = Mask(causal=True, seqlens_k=(21, 9))
ATTENTION = Problem(B=2, H=2, N=24, M=3, D=8, Dv=5, dtype="fp32", mask=MASK, config="16x16", seed=3)
PROBLEM = CacheProblem(attention=ATTENTION, page_size=4, new=3, shared=1, spare=2)


def drops_the_append(q, k_cache, v_cache, *, k=None, v=None, **given):
    return flash_attention_with_kvcache(q, k_cache, v_cache, **given)


def reads_free_rows(q, k_cache, v_cache, **given):
    out, lse = flash_attention_with_kvcache(q, k_cache, v_cache, **given)
    return out + 0 * v_cache.sum(), lse


def perturbed(found, is_wrong: bool):
    out, lse = found
    return (out * (1 + 2.0**-20) if is_wrong else out), lse


def rounds_by_pages(q, k_cache, v_cache, **given):
    found = flash_attention_with_kvcache(q, k_cache, v_cache, **given)
    return perturbed(found, k_cache.shape[1] != 4)


def rounds_by_appends(q, k_cache, v_cache, *, k=None, **given):
    found = flash_attention_with_kvcache(q, k_cache, v_cache, k=k, **given)
    return perturbed(found, k is not None and q.shape[2] == k.shape[2])


def appends_badly(q, k_cache, v_cache, **given):
    found = rounds_by_appends(q, k_cache, v_cache, **given)
    k_cache[k_cache.isnan()] = 1.0
    return found


def hides_empty_rows(q, k_cache, v_cache, **given):
    out, lse = flash_attention_with_kvcache(q, k_cache, v_cache, **given)
    return out, lse.clamp(min=-1e30)


def is_far_by_64_bits(q, k_cache, v_cache, **given):
    found = flash_attention_with_kvcache(q, k_cache, v_cache, **given)
    return perturbed(found, max(k_cache.stride(0), v_cache.stride(0)) > 2**20)


WRONG = {
    "accuracy": drops_the_append, "pages": rounds_by_pages, "free rows": reads_free_rows,
    "append": appends_badly, "nothing cached": hides_empty_rows,
    "decoding": rounds_by_appends, "far pages": is_far_by_64_bits,
}  # fmt: skip


def claimed(check: str) -> str:
    """The first finding of each claim of a check."""
    findings = found_in_cache(subject_of(WRONG[check]), PROBLEM, CACHES[check])
    return "\n".join({x.claim: str(x) for x in findings[::-1]}.values())


def subject_of(function) -> Subject:
    return dataclasses.replace(Subject.of(flash_attention, "kernel"), kvcache=function)


@pytest.mark.parametrize("check", CACHES)
def test_a_check_finds_its_fault_and_passes_the_kernel(check):
    right = subject_of(flash_attention_with_kvcache)
    assert found_in_cache(right, PROBLEM, CACHES[check]) == []
    findings = found_in_cache(subject_of(WRONG[check]), PROBLEM, CACHES[check])
    assert findings
    assert str(findings[0])


def test_a_subject_that_writes_to_the_table_is_found():
    def wrong(q, k_cache, v_cache, *, page_table=None, **given):
        page_table.add_(0 * page_table).fill_(0)
        return flash_attention_with_kvcache(q, k_cache, v_cache, page_table=page_table, **given)

    findings = found_in_cache(subject_of(wrong), PROBLEM, CACHES["accuracy"])
    assert "page_table differs" in str(findings[0])


@pytest.mark.parametrize(
    ("given", "error", "says"),
    [
        ({"k": torch.ones(1, 1, 1, 4)}, ValueError, "k is given without v"),
        ({"cache_seqlens": 9}, ValueError, "cache_seqlens holds 9"),
        ({"page_table": torch.zeros(1, 1)}, TypeError, "page_table has dtype torch.float32"),
        ({"page_table": torch.zeros(1, 1, dtype=torch.int32)}, ValueError, "cache_seqlens is None"),
        ({"config": "16x16-split3"}, NotImplementedError, "config has splits=3"),
    ],
)
def test_bad_arguments_are_refused_by_name(given, error, says):
    x = torch.ones(1, 1, 1, 4)
    with pytest.raises(error, match=says):
        flash_attention_with_kvcache(x, x, x, **given)
