"""The adapters of flash-attn 2 and 4 and of FlashInfer hand over what their functions take.

The packages need a GPU. Functions with their signatures, which call the kernels of this project,
stand in for them: the adapters are tested here, and the packages are not.
"""

from __future__ import annotations

import math
import sys
from types import ModuleType

import pytest
import torch

import fa_kernels
from fa_verify.adapters.registry import NAMED
from fa_verify.oracles.calls.cache import CacheProblem
from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.problem import Problem
from fa_verify.properties.guarantees import caches
from fa_verify.properties.kernels.loading import load
from tests.unit.properties.guarantees.calls import found_on

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ATTENTION = Problem(
    B=2, H=4, Hk=2, N=40, M=3, D=64, Dv=64, dtype="fp16", device=DEVICE,
    mask=Mask(causal=True, window_left=20, seqlens_k=(37, 21)),
)  # fmt: skip


def _computed(q, k_cache, v_cache, **given):
    """The kernels' result for queries (B, M, H, D), and that as flash-attn has it."""
    window = given.pop("window_size")
    out, lse = fa_kernels.flash_attention_with_kvcache(
        q.transpose(1, 2), k_cache, v_cache, return_lse=True, config="16x32",
        window_size=tuple(None if x == -1 else x for x in window), **given,
    )  # fmt: skip
    return out.transpose(1, 2), lse


def with_kvcache(
    q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None,
    cache_batch_idx=None, cache_leftpad=None, block_table=None, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0, rotary_interleaved=True, alibi_slopes=None, num_splits=0,
    return_softmax_lse=False,
):  # fmt: skip
    """flash_attn.flash_attn_with_kvcache."""
    assert None not in window_size
    assert return_softmax_lse
    return _computed(
        q, k_cache, v_cache, k=None if k is None else k.transpose(1, 2),
        v=None if v is None else v.transpose(1, 2), cache_seqlens=cache_seqlens,
        page_table=block_table, cache_batch_idx=cache_batch_idx, sm_scale=softmax_scale,
        causal=causal, window_size=window_size, softcap=softcap or None, alibi_slopes=alibi_slopes,
    )  # fmt: skip


def varlen_func(
    q, k, v, *, seqused_k=None, page_table=None, softmax_scale=None, causal=False,
    window_size=(None, None), learnable_sink=None, return_lse=False,
):  # fmt: skip
    """flash_attn.cute.flash_attn_varlen_func, of pages."""
    assert return_lse
    assert seqused_k.is_contiguous()
    return _computed(
        q, k, v, cache_seqlens=seqused_k, page_table=page_table, sm_scale=softmax_scale,
        causal=causal, window_size=window_size, sinks=learnable_sink,
    )  # fmt: skip


class Wrapper:
    """FlashInfer's wrapper for prefill, and with one query for decoding."""

    def __init__(self, workspace, kv_layout):
        assert workspace.dtype == torch.uint8
        assert kv_layout == "NHD"

    def plan(
        self, qo_indptr, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim,
        page_size, *, causal, q_data_type, kv_data_type, sm_scale, window_left, logits_soft_cap,
    ):  # fmt: skip
        assert all(x.dtype == torch.int32 for x in (qo_indptr, indptr, indices, last_page_len))
        assert q_data_type == kv_data_type == torch.float16
        counts = indptr.diff()
        assert bool(((last_page_len > 0) & (last_page_len <= page_size)).all())
        self.M = int(qo_indptr[1])
        self.sizes = num_qo_heads, num_kv_heads, head_dim, page_size
        table = torch.zeros(len(counts), int(counts.max()), dtype=torch.int32, device=DEVICE)
        for row, pages in zip(table, indices.split(counts.tolist()), strict=True):
            row[: len(pages)] = pages
        self.given = {
            "cache_seqlens": (counts - 1) * page_size + last_page_len, "page_table": table,
            "sm_scale": sm_scale, "causal": causal, "window_size": (window_left, -1),
            "softcap": logits_soft_cap,
        }  # fmt: skip

    def run(self, q, paged_kv_cache, *, return_lse):
        assert return_lse
        k_cache, v_cache = paged_kv_cache
        assert self.sizes == (q.shape[1], k_cache.shape[2], q.shape[2], k_cache.shape[1])
        out, lse = _computed(q.unflatten(0, (-1, self.M)), k_cache, v_cache, **self.given)
        return out.flatten(0, 1), lse.transpose(1, 2).flatten(0, 1) / math.log(2)


class DecodeWrapper(Wrapper):
    """FlashInfer's wrapper for decoding."""

    def plan(self, indptr, *given, **named):
        offsets = torch.arange(len(indptr), dtype=torch.int32, device=DEVICE)
        super().plan(offsets, indptr, *given, causal=True, **named)


STAND_INS = {
    "flash-attn-2": {"flash_attn": {"flash_attn_with_kvcache": with_kvcache}},
    "flash-attn-4": {"flash_attn": {}, "flash_attn.cute": {"flash_attn_varlen_func": varlen_func}},
    "flashinfer-decode": {
        "flashinfer": {
            "BatchDecodeWithPagedKVCacheWrapper": DecodeWrapper,
            "BatchPrefillWithPagedKVCacheWrapper": Wrapper,
        }
    },
}
STAND_INS["flashinfer-prefill"] = STAND_INS["flashinfer-decode"]


@pytest.fixture
def adapter(request, monkeypatch):
    """A subject whose package is replaced, and that takes pages of 16 rows on any device."""
    for module, names in STAND_INS[request.param].items():
        made = ModuleType(module)
        made.__path__ = []
        others = dict.fromkeys(("flash_attn_func", "flash_attn_varlen_func"), print)
        vars(made).update({**others, **names})
        monkeypatch.setitem(sys.modules, module, made)
    spec = NAMED[request.param].spec
    monkeypatch.delitem(sys.modules, spec.partition(":")[0], raising=False)
    subject = load(spec)
    assert subject.devices == ("cuda",)
    return subject.assuming({"devices": ("cpu", "cuda"), "page_sizes": (16,), "empty_lse": "-inf"})


@pytest.mark.parametrize("adapter", STAND_INS, indirect=True)
def test_an_adapter_hands_over_what_the_function_takes(adapter):
    M = 1 if adapter.one_query else 3
    kinds = {"paged": (16, 0), "contiguous": (0, 0), "append": (16, 2)}
    judged = 0
    for kind in adapter.cache:
        page_size, new = kinds[kind]
        for mods in ({}, *({"softcap": 1.5} for mod in adapter.score_mods if mod == "softcap")):
            fields = {**vars(ATTENTION), "M": M, **mods}
            problem = CacheProblem(
                attention=Problem(**fields), page_size=page_size, new=new, spare=1
            )
            assert found_on(adapter, problem, caches.accuracy) == []
            judged += 1
    assert judged >= len(adapter.cache)


@pytest.mark.parametrize("name", STAND_INS)
def test_an_adapter_names_the_package_that_is_missing(name, monkeypatch):
    package = NAMED[name].packages[0]
    for module in (package, package.partition(".")[0]):
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(sys.modules, NAMED[name].spec.partition(":")[0], raising=False)
    assert NAMED[name].missing() == f"{package} is not installed"
    with pytest.raises(ValueError, match=f"cannot be imported: .*{package.partition('.')[0]}"):
        load(NAMED[name].spec)
