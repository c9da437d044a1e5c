"""The public call with a cache: arguments and errors, clamped values, dropped keys, layouts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from fa_kernels import Config, flash_attention, flash_attention_with_kvcache
from fa_kernels.configs import CONFIGS, resolve
from fa_kernels.launch import portable
from fa_kernels.validation.arguments import MAX_SEQLEN
from fa_verify.oracles.masks.block_sparse import BlockSparse
from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.masks.prefix_lm import PrefixLM
from fa_verify.oracles.stream import normal
from fa_verify.simulator.interpreter.dot_order import dots_in_order

B, H, HK, M, D, DV, S, L = 2, 4, 2, 3, 8, 5, 12, 2


def drawn(name, *shape, device="cpu", dtype=torch.float32):
    return normal(7, name, shape).to(device, dtype)


def call(device, page_size=0, dtype=torch.float32, new=L, **changed):
    """The arguments of a call, contiguous or in pages that lie in descending order."""
    pages, rows = (B * S // page_size, page_size) if page_size else (B, S)
    of = {"device": device, "dtype": dtype}
    given = {
        "q": drawn("q", B, H, M, D, **of),
        "k_cache": drawn("k", pages, rows, HK, D, **of),
        "v_cache": drawn("v", pages, rows, HK, DV, **of),
        "k": drawn("new k", B, HK, new, D, **of) if new else None,
        "v": drawn("new v", B, HK, new, DV, **of) if new else None,
        "cache_seqlens": torch.tensor([5, 9], dtype=torch.int32, device=device),
        "config": "16x16",
        "return_lse": True,
    }
    if page_size:
        table = torch.arange(pages, dtype=torch.int32, device=device).flip(0)
        given["page_table"] = table.view(B, -1)
    return {**given, **changed}


def ints(*values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype)


def same(found, again):
    return all(torch.equal(x, y) for x, y in zip(found, again, strict=True))


TABLE = torch.zeros(B, 3, dtype=torch.int32)
X = call("cpu")
# The changed arguments of a contiguous call, the error, and its message.
BAD = {
    "a q that is a number": ({"q": 1.0}, TypeError, "q is float; needs a torch.Tensor"),
    "a q without heads axis": (
        {"q": X["q"][0]}, ValueError, r"q has shape .*; needs four axes \(B, H, M, D\)"
    ),
    "a cache of one entry": (
        {"v_cache": X["v_cache"][0]}, ValueError,
        r"v_cache has shape \(12, 2, 5\); needs four axes \(B, S, Hk, D\) or \(pages, page_size",
    ),
    "new keys without heads axis": (
        {"k": X["k"][0]}, ValueError, r"k has shape .*; needs four axes \(B, Hk, L, D\)"
    ),
    "a sparse cache": (
        {"k_cache": X["k_cache"].to_sparse()}, NotImplementedError, "k_cache has layout torch.sp"
    ),
    "a cache in another dtype": (
        {"k_cache": X["k_cache"].half()}, ValueError,
        "k_cache has dtype torch.float16; needs that of q, torch.float32",
    ),
    "new values in another dtype": (
        {"v": X["v"].double()}, ValueError, "v has dtype torch.float64; needs that of q"
    ),
    "a dtype without kernels": (
        {name: x.int() for name, x in X.items() if name in ("q", "k_cache", "v_cache", "k", "v")},
        NotImplementedError, "q has dtype torch.int32; supported are",
    ),
    "a cache on another device": (
        {"v_cache": X["v_cache"].to("meta")}, ValueError, "v_cache is on meta; needs the device of"
    ),
    "caches of two lengths": (
        {"v_cache": X["v_cache"][:, 1:]}, ValueError,
        r"v_cache has shape \(2, 11, 2, 5\); needs the pages, rows and heads of k_cache, \(2, 12,",
    ),
    "keys of another head_dim": (
        {"k_cache": X["k_cache"][..., 1:]}, ValueError,
        "k_cache has head_dim 7; needs that of q, 8",
    ),
    "keys of another head_dim, and no new ones": (
        {"k_cache": X["k_cache"][..., 1:], "k": None, "v": None}, ValueError,
        "k_cache has head_dim 7; needs that of q, 8",
    ),
    "values without columns": (
        {"v_cache": X["v_cache"][..., :0], "v": X["v"][..., :0]}, ValueError,
        "v_cache has head_dim 0; needs at least 1",
    ),
    "values of too many columns": (
        {
            "v_cache": X["v_cache"][..., :1].expand(-1, -1, -1, 257),
            "v": X["v"][..., :1].expand(-1, -1, -1, 257),
        },
        NotImplementedError, "v_cache has head_dim 257; supported are 1 to 256",
    ),
    "a cache without heads": (
        {name: X[name][:, :, :0] for name in ("k_cache", "v_cache")}, ValueError,
        "k_cache has 0 heads; needs at least 1",
    ),
    "heads that no group divides": (
        {"q": X["q"][:, :3]}, ValueError, "q has 3 heads; needs a multiple of the 2 heads"
    ),
    "a cache of three entries": (
        {name: X[name][[0, 1, 1]] for name in ("k_cache", "v_cache")}, ValueError,
        "k_cache has batch size 3; needs that of q, 2",
    ),
    "keys alone": ({"v": None}, ValueError, "k is given without v; needs both or neither"),
    "values alone": ({"k": None}, ValueError, "v is given without k; needs both or neither"),
    "new keys of another head": (
        {"k": X["k"][:, :1]}, ValueError, r"k has shape \(2, 1, 2, 8\); needs \(2, 2, 2, 8\), by q"
    ),
    "new keys of another batch": (
        {"k": X["k"][:1], "v": X["v"][:1]}, ValueError,
        r"k has shape \(1, 2, 2, 8\); needs \(2, 2, 2, 8\), by q",
    ),
    "new values of another length": (
        {"v": X["v"][:, :, :1]}, ValueError,
        r"v has shape \(2, 2, 1, 5\); needs \(2, 2, 2, 5\), by q, k and v_cache",
    ),
    "no lengths beside new keys": (
        {"cache_seqlens": None}, ValueError, "cache_seqlens is None; needs the keys of each entry"
    ),
    "lengths that leave no place": (
        {"cache_seqlens": (5, 11)}, ValueError,
        r"cache_seqlens holds 11; needs lengths in \[0, 10\]",
    ),
    "a length that leaves no place": (
        {"cache_seqlens": 11}, ValueError, r"cache_seqlens holds 11; needs lengths in \[0, 10\]"
    ),
    "a negative length": ({"cache_seqlens": -1}, ValueError, "cache_seqlens holds -1; needs len"),
    "a length that is a bool": ({"cache_seqlens": True}, TypeError, "cache_seqlens is True; needs"),
    "lengths of 64 bits": (
        {"cache_seqlens": ints(5, 9, dtype=torch.int64)}, TypeError,
        "cache_seqlens has dtype torch.int64; needs torch.int32",
    ),
    "too few lengths": (
        {"cache_seqlens": ints(5)}, ValueError, r"cache_seqlens has shape \(1,\); needs \(2,\)"
    ),
    "more new keys than places": (
        {"k": drawn("k", B, HK, 13, D), "v": drawn("v", B, HK, 13, DV)}, ValueError,
        "k has 13 keys; an entry of the cache has places for 12",
    ),
    "a table that is a list": (
        {"page_table": [[0], [1]]}, TypeError, "page_table is list; needs an int32 torch.Tensor"
    ),
    "a table of 64 bits": (
        {"page_table": TABLE.long()}, TypeError, "page_table has dtype torch.int64; needs torch.in"
    ),
    "a table of one axis": (
        {"page_table": TABLE[:, 0]}, ValueError,
        r"page_table has shape \(2,\); needs \(B, places\) with B = 2",
    ),
    "a table of another batch": (
        {"page_table": TABLE[:1]}, ValueError, r"page_table has shape \(1, 3\); needs \(B, places\)"
    ),
    "a table without lengths": (
        {"page_table": TABLE, "cache_seqlens": None, "k": None, "v": None}, ValueError,
        "cache_seqlens is None; needs the keys of each entry",
    ),
    "a table on another device": (
        {"page_table": TABLE.to("meta")}, ValueError, "page_table is on meta; needs the device of q"
    ),
    "a table and entries": (
        {"page_table": TABLE, "cache_batch_idx": ints(0, 1)}, ValueError,
        "cache_batch_idx is given together with page_table; needs one of them",
    ),
    "entries as a column": (
        {"cache_batch_idx": TABLE[:, :1]}, ValueError,
        r"cache_batch_idx has shape \(2, 1\); needs \(B\) with B = 2",
    ),
    "splits that are a float": ({"num_splits": 2.0}, TypeError, "num_splits is 2.0; needs an int"),
    "splits that are a bool": ({"num_splits": True}, TypeError, "num_splits is True; needs an int"),
    "no splits": (
        {"num_splits": 0}, ValueError, r"num_splits is 0; needs an int in \[1, 256\]"
    ),
    "too many splits": (
        {"num_splits": 257}, ValueError, r"num_splits is 257; needs an int in \[1, 256\]"
    ),
    "sinks of another number": (
        {"sinks": torch.zeros(3)}, ValueError, r"sinks has shape \(3,\); needs \(4,\), a score"
    ),
    "sinks that require a gradient": (
        {"sinks": torch.zeros(4, requires_grad=True)}, NotImplementedError,
        "sinks requires a gradient; flash_attention_with_kvcache is not differentiable",
    ),
    "head_dims of 576 and 256": (
        {
            "q": X["q"][..., :1].expand(-1, -1, -1, 576), "k": None, "v": None,
            "k_cache": X["k_cache"][..., :1].expand(-1, -1, -1, 576),
            "v_cache": X["v_cache"][..., :1].expand(-1, -1, -1, 256),
        },
        NotImplementedError, "q has head_dim 576; supported are 1 to 256",
    ),
    "long pages": (
        {
            "page_table": TABLE,
            **{x: X[x][:, :1].expand(-1, 257, -1, -1) for x in ("k_cache", "v_cache")},
        },
        NotImplementedError, "k_cache has pages of 257 rows; supported are 1 to 256",
    ),
    "more places than a sequence has": (
        {
            "page_table": TABLE[:, :1].expand(-1, 2**27),
            **{x: X[x][:, :1].expand(-1, 256, -1, -1) for x in ("k_cache", "v_cache")},
        },
        NotImplementedError, "k_cache has places for 34359738368 keys of an entry; supported are",
    ),
    "a mask with lengths of queries": (
        {"mask": Mask(seqlens_q=(3, 3), seqlens_k=(7, 11))}, ValueError,
        "mask has seqlens_q; needs None, as all queries of flash_attention_with_kvcache are valid",
    ),
    "a mask without lengths": (
        {"mask": PrefixLM()}, ValueError, "mask has no ints as seqlens_k; needs the keys of each",
    ),
    "a mask with other lengths": (
        {"mask": PrefixLM(seqlens_k=(5, 9)), "cache_seqlens": (5, 9)}, ValueError,
        r"mask has seqlens_k=\(5, 9\); needs \(7, 11\), the keys of each entry",
    ),
    "a mask beside causal": (
        {"mask": PrefixLM(seqlens_k=(7, 11)), "causal": True}, ValueError,
        "mask is given together with causal; needs one or the other",
    ),
    "splits": ({"config": "16x16-split3"}, NotImplementedError, "config has splits=3; flash_att"),
    "a scale of 0": ({"sm_scale": 0}, ValueError, "sm_scale is 0; needs to be finite and > 0"),
    "queries that require a gradient": (
        {"q": X["q"].clone().requires_grad_()}, NotImplementedError,
        "q requires a gradient; flash_attention_with_kvcache is not differentiable",
    ),
    "new keys that require a gradient": (
        {"k": X["k"].clone().requires_grad_()}, NotImplementedError, "k requires a gradient; flash"
    ),
    "a cache that requires a gradient": (
        {"v_cache": X["v_cache"].clone().requires_grad_()}, NotImplementedError,
        "v_cache requires a gradient; flash",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_refused_by_name(name, device):
    changed, error, message = BAD[name]
    given = {
        name: x.to(device) if isinstance(x, torch.Tensor) and x.device.type == "cpu" else x
        for name, x in {**X, **changed}.items()
    }
    with pytest.raises(error, match=f"^{message}"):
        flash_attention_with_kvcache(**given)


def test_a_mask_with_a_tensor_of_lengths_of_queries_is_refused(device):
    mask = SimpleNamespace(
        causal=False, window_left=None, window_right=None, seqlens_k=(7, 11),
        seqlens_q=ints(3, 3).to(device),
    )  # fmt: skip
    with pytest.raises(ValueError, match="mask has seqlens_q; needs None"):
        flash_attention_with_kvcache(**call(device, mask=mask))


def test_a_refused_call_writes_nothing(device):
    given = call(device, cache_seqlens=(5, 11))
    before = given["k_cache"].clone()
    with pytest.raises(ValueError, match="cache_seqlens"):
        flash_attention_with_kvcache(**given)
    assert torch.equal(given["k_cache"], before)


def test_a_device_without_kernels_is_refused_by_name(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(NotImplementedError, match=r"^q is on cpu; needs a CUDA device"):
        flash_attention_with_kvcache(**X)


def test_a_call_below_torch_compile_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with pytest.raises(
        NotImplementedError, match=r"is traced by torch\.compile; needs a call from"
    ):
        flash_attention_with_kvcache(**X)


def test_tensors_that_require_a_gradient_pass_without_gradients(device):
    given = call(device)
    want = flash_attention_with_kvcache(**given)
    given = call(device, q=given["q"].requires_grad_())
    with torch.no_grad():
        found = flash_attention_with_kvcache(**given)
    assert same(found, want)
    assert not any(x.requires_grad for x in found)


# Page 3 is that of the third place of entry 0, whose keys end on the second.
@pytest.mark.parametrize("wild", [-1, 2**31 - 1, -(2**31), 0])
def test_places_past_the_last_used_page_change_nothing(wild, device):
    given, again = call(device, 4), call(device, 4)
    want = flash_attention_with_kvcache(**given)
    again["page_table"] = torch.nn.functional.pad(again["page_table"], (0, 2), value=wild)
    again["page_table"][0, 2] = wild
    again["k_cache"][3] = again["v_cache"][3] = torch.nan
    assert same(flash_attention_with_kvcache(**again), want)
    assert again["k_cache"].isnan().sum() == again["k_cache"][3].numel()
    assert again["v_cache"].isnan().sum() == again["v_cache"][3].numel()


def test_pages_in_use_are_clamped_to_the_cache(device):
    given = call(device, 4)
    given["page_table"] = ints([0, 5, 2], [5, 4, 3]).to(device)
    want = flash_attention_with_kvcache(**given)
    again = call(device, 4)
    again["page_table"] = ints([-5, 2**31 - 1, 2], [6, 4, 3]).to(device)
    assert same(flash_attention_with_kvcache(**again), want)
    assert same(*([x["k_cache"], x["v_cache"]] for x in (given, again)))


@pytest.mark.parametrize("page_size", [0, 4])
def test_new_keys_without_a_place_are_dropped(page_size, device):
    given = call(device, page_size)
    given["cache_seqlens"] = ints(S - 1, S + 2).to(device)
    fits = call(device, page_size)
    found = flash_attention_with_kvcache(**given)
    # Entry 0 has a place for one of two keys, entry 1 for none.
    for name, cache in (("k", "k_cache"), ("v", "v_cache")):
        entry, row = (0, S - 1)
        if page_size:
            entry, row = int(given["page_table"][0, -1]), page_size - 1
        want = fits[cache].clone()
        want[entry, row] = fits[name][0, :, 0]
        assert torch.equal(given[cache], want)
    again = {**given, "k": None, "v": None, "cache_seqlens": (S, S)}
    assert same(found, flash_attention_with_kvcache(**again))


def test_lengths_below_0_count_as_0(device):
    given, again = call(device), call(device, cache_seqlens=(0, 9))
    given["cache_seqlens"] = ints(-3, 9).to(device)
    assert same(*(flash_attention_with_kvcache(**x) for x in (given, again)))
    assert torch.equal(given["k_cache"], again["k_cache"])


@pytest.mark.parametrize("page_size", [0, 1, 4])
def test_lengths_past_the_places_count_as_the_places(page_size, device):
    # The splits are computed apart.
    given = long_call(device, page_size=page_size)
    found = (
        flash_attention_with_kvcache(**{**given, "cache_seqlens": ints(n, 37).to(device)})
        for n in (104, 200)
    )
    assert same(*found)


def test_lengths_of_any_form_give_the_same(device):
    forms = (9, (9, 9), [9, 9], ints(9, 9).to(device), ints(9, 0, 9, 0).to(device)[::2])
    first, *others = (
        flash_attention_with_kvcache(**call(device, cache_seqlens=form)) for form in forms
    )
    for other in others:
        assert same(other, first)
    alone = {"new": 0, "cache_seqlens": None}
    whole = {"new": 0, "cache_seqlens": S}
    assert same(*(flash_attention_with_kvcache(**call(device, **x)) for x in (alone, whole)))


def test_entries_of_a_contiguous_cache_are_selected_and_clamped(device):
    given = call(device, cache_batch_idx=ints(1, 0).to(device))
    found = flash_attention_with_kvcache(**given)
    again = call(device)
    for name in ("k_cache", "v_cache"):
        again[name] = again[name].flip(0)
    assert same(found, flash_attention_with_kvcache(**again))
    assert torch.equal(given["k_cache"], again["k_cache"].flip(0))
    wild = call(device, cache_batch_idx=ints(7, -7).to(device))
    assert same(found, flash_attention_with_kvcache(**wild))


def test_a_cache_of_any_strides_is_written_in_place(device):
    want = call(device, 4)
    found = flash_attention_with_kvcache(**want)
    given = call(device, 4)
    for name in ("k_cache", "v_cache"):
        x = given[name]
        wide = x.new_zeros(x.shape[3], x.shape[2], x.shape[0], x.shape[1] + 1)
        given[name] = wide.permute(2, 3, 1, 0)[:, 1:].copy_(x)
    given["q"], given["k"] = (x.mT.contiguous().mT for x in (given["q"], given["k"]))
    given["page_table"] = given["page_table"].T.contiguous().T
    assert same(flash_attention_with_kvcache(**given), found)
    for name in ("k_cache", "v_cache"):
        assert torch.equal(given[name], want[name])


@pytest.mark.parametrize("name", ["k_cache", "v_cache"])
def test_one_cache_of_apart_columns_is_read_column_by_column(name, device):
    # Rows of the other cache are on 16 bytes, and so are columns of this one.
    given = long_call(device, torch.float16)
    given["v_cache"] = drawn("v", 2, 104, 2, D, device=device, dtype=torch.float16)
    found = flash_attention_with_kvcache(**given)
    given[name] = given[name].transpose(1, 3).contiguous().transpose(1, 3)
    assert same(flash_attention_with_kvcache(**given), found)


def test_values_that_begin_where_keys_do_are_read_by_strides_of_their_own(device):
    k = drawn("k", 2, 104, 2, 16, device=device)
    given = long_call(device, q=drawn("q", 2, 6, 3, 16, device=device), k_cache=k)
    # The first row of each page, for all keys.
    v = k[:, :1].expand_as(k)
    shared, apart = (
        flash_attention_with_kvcache(**{**given, "v_cache": x}) for x in (v, v.clone())
    )
    assert same(shared, apart)


# The arithmetic is that of the forward without a cache in the same tiles.
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("causal", [False, True])
def test_a_cache_gives_the_bits_of_the_padded_call(causal, dtype, device):
    given = call(device, 4, dtype, new=0, causal=causal)
    lengths = [5, 9]
    found = flash_attention_with_kvcache(**given)
    k, v = (
        torch.stack([given[name][pages.long()].flatten(0, 1) for pages in given["page_table"]])
        for name in ("k_cache", "v_cache")
    )
    want = flash_attention(
        given["q"], k.transpose(1, 2), v.transpose(1, 2), causal=causal, seqlens_k=lengths,
        return_lse=True, config="16x16",
    )  # fmt: skip
    assert same(found, want)
    assert [x.dtype for x in found] == [x.dtype for x in want]


# Both head_dims choose the default tile: one of the head_dim of q alone has other key tiles.
@pytest.mark.parametrize(("columns", "values"), [(16, 144), (200, 16), (1, 1), (256, 256)])
def test_the_default_tile_gives_the_bits_of_the_padded_call(columns, values, device):
    q = drawn("q", 1, 1, 1, columns, device=device)
    k = drawn("k", 1, 40, 1, columns, device=device)
    v = drawn("v", 1, 40, 1, values, device=device)
    tile = resolve(None, q.dtype, 16 if columns == 1 else 256).cache
    with dots_in_order():
        found = flash_attention_with_kvcache(q, k, v, return_lse=True)
        want = flash_attention(
            q, k.transpose(1, 2), v.transpose(1, 2), config=Config(forward=tile), return_lse=True
        )
    assert same(found, want)


EMPTY = {
    "no new keys": {"k": X["k"][:, :, :0], "v": X["v"][:, :, :0]},
    "no queries": {"q": X["q"][:, :, :0]},
    "no places": {
        "k_cache": X["k_cache"][:, :0], "v_cache": X["v_cache"][:, :0], "k": X["k"][:, :, :0],
        "v": X["v"][:, :, :0], "cache_seqlens": (0, 0),
    },
    "no pages": {
        "k_cache": X["k_cache"][:0], "v_cache": X["v_cache"][:0], "k": None, "v": None,
        "page_table": TABLE,
    },
    "no entries": {
        name: x[:0] for name, x in X.items() if isinstance(x, torch.Tensor)
    },
}  # fmt: skip


@pytest.mark.parametrize("name", EMPTY)
def test_nothing_to_append_or_to_attend_to_is_no_error(name, device):
    given = {
        name: x.to(device) if isinstance(x, torch.Tensor) else x
        for name, x in {**call("cpu"), **EMPTY[name]}.items()
    }
    caches = [given[name].clone() for name in ("k_cache", "v_cache")]
    out, lse = flash_attention_with_kvcache(**given)
    assert (*out.shape[:3], DV) == (*lse.shape, DV) == (*given["q"].shape[:3], DV)
    if name == "no new keys":
        alone = {**given, "k": None, "v": None}
        assert same((out, lse), flash_attention_with_kvcache(**alone))
    if name != "no queries":
        assert same([given[name] for name in ("k_cache", "v_cache")], caches)
    if name in ("no places", "no pages"):
        assert not out.any()
        assert lse.eq(-torch.inf).all()
        assert same((out, lse), flash_attention_with_kvcache(**given, num_splits=2))


def test_out_alone_is_returned_unless_lse_is_asked_for(device):
    out, _ = flash_attention_with_kvcache(**call(device))
    assert torch.equal(flash_attention_with_kvcache(**call(device, return_lse=False)), out)


def test_a_call_inside_autocast_keeps_its_dtypes(device):
    want = flash_attention_with_kvcache(**call(device))
    with torch.autocast(device, torch.bfloat16):
        found = flash_attention_with_kvcache(**call(device))
    assert same(found, want)


def long_call(device, dtype=torch.float32, page_size=0, **changed):
    """The arguments of a call with several splits of 32 keys, a window and sinks."""
    of = {"device": device, "dtype": dtype}
    pages, rows = (2 * 104 // page_size, page_size) if page_size else (2, 104)
    given = {
        "q": drawn("q", 2, 6, 3, D, **of),
        "k_cache": 2 * drawn("k", pages, rows, 2, D, **of),
        "v_cache": drawn("v", pages, rows, 2, DV, **of),
        "cache_seqlens": (101, 37),
        "window_size": (70, 1),
        "sinks": drawn("sinks", 6, device=device),
        "config": "16x16",
        "return_lse": True,
    }
    if page_size:
        table = torch.arange(pages, dtype=torch.int32, device=device).flip(0)
        given["page_table"] = table.view(2, -1)
    return {**given, **changed}


@pytest.fixture
def launched(monkeypatch):
    """The names and programs of the kernels that are launched."""
    found = []

    def run(kernel, grid, named, kinds=None):
        found.append((kernel.fn.__name__, *grid))
        return launch(kernel, grid, named, kinds)

    launch = portable.run
    monkeypatch.setattr(portable, "run", run)
    return found


def test_splits_in_turn_and_apart_give_the_same_bits(device, monkeypatch, launched):
    # fp16 tiles of 8 columns, and fp32 tiles of 5: wide and narrow accesses.
    for changed in ({}, {"page_size": 4}, {"dtype": torch.float16}, {"sinks": None}):
        given = long_call(device, **changed)
        monkeypatch.setattr(portable, "PROGRAMS_IN_TURN", 10**6)
        apart = flash_attention_with_kvcache(**given)
        monkeypatch.setattr(portable, "PROGRAMS_IN_TURN", 0)
        in_turn = flash_attention_with_kvcache(**given)
        assert same(apart, in_turn)
        # 2 entries and 2 heads of a tile each; 4 splits of 32 keys for 104 places; 36 rows.
        assert launched == [("kvcache_kernel", 16), ("join_kernel", 9), ("kvcache_kernel", 4)]
        launched.clear()


def test_an_entry_has_as_many_places_as_a_sequence_can_have_keys(device):
    given = call(device, 4, new=0)
    places = given["page_table"][:, :1].expand(-1, MAX_SEQLEN // 4)
    short = {**given, "page_table": places[:, :3]}
    found = (flash_attention_with_kvcache(**x) for x in (short, {**given, "page_table": places}))
    assert same(*found)


def test_pages_that_the_window_hides_are_not_read(device):
    given = call(device, page_size=4, window_size=(2, None))
    # The first of 11 keys that the first of 3 rows sees is key 6, and page 1 begins with key 4.
    page = int(given["page_table"][1, 0])
    found = []
    for value in (0.0, torch.nan):
        k, v = given["k_cache"].clone(), given["v_cache"].clone()
        k[page], v[page] = value, value
        found.append(flash_attention_with_kvcache(**{**given, "k_cache": k, "v_cache": v}))
    assert same(*found)


@pytest.mark.parametrize("page_size", [0, 4])
def test_a_predicate_that_hides_nothing_changes_no_bit(page_size, device):
    given = long_call(device, page_size=page_size, window_size=(None, None))
    mask = PrefixLM(prefix=10**6, seqlens_k=given["cache_seqlens"])
    with dots_in_order():
        plain = flash_attention_with_kvcache(**given)
        assert same(plain, flash_attention_with_kvcache(**given, mask=mask))


def test_a_predicate_in_splits_in_turn_and_apart_gives_the_same_bits(device, monkeypatch, launched):
    given = long_call(device, window_size=(None, None))
    mask = BlockSparse(percent=50, seed=3, seqlens_k=given["cache_seqlens"])
    found = []
    for programs in (10**6, 0):
        monkeypatch.setattr(portable, "PROGRAMS_IN_TURN", programs)
        found.append(flash_attention_with_kvcache(**given, mask=mask))
    assert same(*found)
    # A tile has rows of one of 6 heads; 4 splits for each tile.
    assert [programs for _, programs in launched] == [48, 9, 12]


def test_long_caches_are_computed_in_turn_without_scratch(device, monkeypatch, launched):
    def empty(shape, **form):
        shapes.append(tuple(shape))
        return allocate(shape, **form)

    allocate, shapes = portable.allocation.empty, []
    monkeypatch.setattr(portable.allocation, "empty", empty)
    # 4 splits of 36 rows, with 5 sums, a maximum and a sum of weights each.
    monkeypatch.setattr(portable, "PROGRAMS_IN_TURN", 10**6)
    given = long_call(device)
    for scratch, kernels in ((4 * 36 * 7, 2), (4 * 36 * 7 - 1, 1)):
        monkeypatch.setattr(portable, "MAX_SCRATCH", scratch)
        flash_attention_with_kvcache(**given)
        assert len(launched) == kernels
        assert ((4, 2, 6, 3, 5) in shapes) == (kernels == 2)
        launched.clear()
        shapes.clear()


def test_few_programs_compute_splits_apart(device, monkeypatch, launched):
    given = long_call(device)
    for processors, kernels in ((4, 1), (5, 2)):
        monkeypatch.setattr(portable, "PROGRAMS_IN_TURN", 1)
        monkeypatch.setattr(portable, "processors", lambda _device, of=processors: of)
        flash_attention_with_kvcache(**given)
        assert len(launched) == kernels
        launched.clear()


@pytest.mark.parametrize(("num_splits", "programs"), [(1, 4), (2, 8), (3, 12), (7, 28), (256, 28)])
def test_an_explicit_number_of_splits_divides_the_places(
    num_splits, programs, device, monkeypatch, launched
):
    monkeypatch.setattr(portable, "PROGRAMS_IN_TURN", 10**6)
    given = long_call(device, num_splits=num_splits)
    found = flash_attention_with_kvcache(**given)
    assert launched[0] == ("kvcache_kernel", programs)
    assert len(launched) == (1 if num_splits == 1 else 2)
    assert same(found, flash_attention_with_kvcache(**given))
    # One split is the sums of all keys.
    whole = Config(cache=CONFIGS["16x16"].cache, split_keys=2**20)
    want = flash_attention_with_kvcache(**{**given, "num_splits": None, "config": whole})
    assert same(found, want) == (num_splits == 1)


def test_a_group_of_128_heads_gives_the_bits_of_its_heads(device):
    given = long_call(device, q=drawn("q", 2, 256, 2, D, device=device), sinks=None)
    with dots_in_order():
        out, lse = flash_attention_with_kvcache(**given)
        for h in (0, 1, 100, 127, 128, 255):
            alone = {
                **given, "q": given["q"][:, h : h + 1],
                **{x: given[x][:, :, h // 128 :][:, :, :1] for x in ("k_cache", "v_cache")},
            }  # fmt: skip
            found = flash_attention_with_kvcache(**alone)
            assert same(found, (out[:, h : h + 1], lse[:, h : h + 1]))


def test_sinks_of_any_stride_give_the_bits_of_the_padded_call(device):
    sinks = drawn("sinks", 12, device=device)[::2]
    given = long_call(device, sinks=sinks, config=Config(cache=CONFIGS["16x16"].cache))
    k, v = (given[name].transpose(1, 2) for name in ("k_cache", "v_cache"))
    with dots_in_order():
        found = flash_attention_with_kvcache(**given)
        want = flash_attention(
            given["q"], k, v, seqlens_k=(101, 37), window_size=(70, 1), sinks=sinks,
            return_lse=True, config="16x16",
        )  # fmt: skip
    assert same(found, want)


@pytest.mark.parametrize(
    ("columns", "values"), [(576, 512), (192, 128), (192, 96), (192, 48), (64, 32), (200, 256)]
)
def test_head_dims_of_latent_attention(columns, values, device, monkeypatch):
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    q = drawn("q", 1, 20, 1, columns, device=device, dtype=dtype)
    k = drawn("k", 3, 16, 1, columns, device=device, dtype=dtype)
    table = ints(2, 0, 1).to(device)[None]
    given = {
        "cache_seqlens": (40,), "page_table": table, "return_lse": True,
        "config": Config(split_keys=128),
    }  # fmt: skip
    v = k[..., :values] if values < columns else drawn("v", 3, 16, 1, values).to(device, dtype)
    out, lse = flash_attention_with_kvcache(q, k, v, **given)
    keys, weighed = (x[table[0].long()].flatten(0, 1)[:40, 0].double() for x in (k, v))
    scores = q[0, :, 0].double() @ keys.T * columns**-0.5
    want = scores.softmax(1) @ weighed
    error = 2**-6 if dtype == torch.bfloat16 else 1e-5
    assert (out[0, :, 0].double() - want).abs().max() < error
    assert (lse[0, :, 0].double() - scores.logsumexp(1)).abs().max() < error
    if values < columns:
        apart = flash_attention_with_kvcache(q, k, v.clone(), **given)
        assert same(apart, (out, lse))
