"""flash_attention_varlen: equality with separate calls, rows of no sequence, offsets, errors."""

from __future__ import annotations

import dataclasses
import warnings

import pytest
import torch

from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.masks.neighbourhood import Neighbourhood
from fa_verify.oracles.masks.sink_window import SinkWindow
from fa_verify.oracles.stream import normal

pytest.importorskip("triton")

from fa_kernels import flash_attention, flash_attention_varlen
from tests.unit.fa_kernels.call import packed_calls
from tests.unit.fa_kernels.call.packed_calls import WILD, assert_equal_bits

H, HK, D, DV = 2, 1, 24, 16
ROWS, KEYS = (17, 0, 34, 1, 5), (21, 9, 16, 0, 35)
CU_Q, CU_K = (0, 17, 17, 51, 52, 57), (0, 21, 30, 46, 46, 81)
TOTAL_Q, TOTAL_K = 62, 83
MASKS = {
    "none": Mask(),
    "causal": Mask(causal=True),
    "window": Mask(window_left=7, window_right=3),
    "sinks": SinkWindow(causal=True, window_left=9),
    "of lengths": Neighbourhood(),
}


def drawn(device: str, dtype: torch.dtype = torch.float16) -> list[torch.Tensor]:
    """q, k, v, dout; NaN in the rows that follow the last sequence."""
    sizes = ((TOTAL_Q, H, D), (TOTAL_K, HK, D), (TOTAL_K, HK, DV), (TOTAL_Q, H, DV))
    made = [normal(0, x, size) for x, size in zip("qkvd", sizes, strict=True)]
    for x, used in zip(made, (CU_Q, CU_K, CU_K, CU_Q), strict=True):
        x[used[-1] :] = torch.nan
    return [x.to(dtype).to(device) for x in made]


def in_a_row(inputs, *, cu_q=CU_Q, cu_k=CU_K, **options) -> list[torch.Tensor]:
    return packed_calls.in_a_row(inputs, cu_q, cu_k, **{"config": "16x32", **options})


def one_by_one(inputs, masks=None, **options) -> list[torch.Tensor]:
    return packed_calls.one_by_one(inputs, CU_Q, CU_K, masks, **{"config": "16x32", **options})


def with_lengths(mask: Mask) -> Mask:
    return dataclasses.replace(mask, seqlens_q=ROWS, seqlens_k=KEYS)


@pytest.mark.parametrize("config", ["16x32", "32x16-split7"])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_each_sequence_has_the_bits_that_it_has_alone(device, mask, config):
    """A sequence's mask is that of a batch of one, so that its predicate is compiled once."""
    inputs = drawn(device)
    got = in_a_row(inputs, mask=with_lengths(mask), config=config)
    assert_equal_bits(got, one_by_one(inputs, with_lengths(mask), config=config))


@pytest.mark.parametrize("mod", ["softcap", "alibi_slopes", "sinks"])
def test_varlen_modifies_the_scores_of_each_sequence(device, mod):
    if device != "cpu":
        pytest.skip("kernels that are compiled apart may differ in the last bits of tanh")
    inputs = drawn(device)
    given = 2.0 if mod == "softcap" else torch.tensor([0.5, -0.125])
    options = {"causal": True, mod: given}
    got = in_a_row(inputs, **options)
    assert_equal_bits(got, one_by_one(inputs, **options))
    assert not torch.equal(got[0], in_a_row(inputs, causal=True)[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_varlen_equals_separate_calls_bitwise_in_every_dtype(device, dtype):
    inputs = drawn(device, dtype)
    options = {"causal": True, "config": "16x16"}
    assert_equal_bits(in_a_row(inputs, **options), one_by_one(inputs, **options))


def test_varlen_in_one_pass_equals_separate_calls_bitwise_but_for_dq(device):
    inputs = drawn(device)
    got, want = (x(inputs, causal=True, deterministic=False) for x in (in_a_row, one_by_one))
    if device == "cuda":
        # Atomics sum in a random order; the conformance tests compare dq with its bound.
        got[2] = want[2] = got[2] * 0
    assert_equal_bits(got, want)


@pytest.mark.parametrize("most", [None, 34, 40, 10**6], ids=str)
def test_offsets_on_the_device_equal_offsets_as_ints(device, most):
    inputs = drawn(device)
    want = in_a_row(inputs, causal=True)
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32, device=device) for x in (CU_Q, CU_K))
    options = {"max_seqlen_q": most, "max_seqlen_k": most and most + 1, "causal": True}
    assert_equal_bits(in_a_row(inputs, cu_q=cu_q, cu_k=cu_k, **options), want)


@pytest.mark.parametrize("backward", ["two_pass", "one_pass"])
@pytest.mark.parametrize("config", ["16x32", "16x16-split3"])
def test_rows_of_no_sequence_are_zero_whatever_they_hold(device, backward, config):
    inputs = drawn(device)
    for x in inputs:
        x[:5] = torch.inf
    cu_q, cu_k = (5, 17, 50), (5, 21, 50)
    for x in (*inputs[0:1], *inputs[3:]):
        x[50:] = torch.nan
    got = in_a_row(
        inputs, cu_q=cu_q, cu_k=cu_k, deterministic=backward == "two_pass", config=config
    )
    for name, x in zip(("out", "lse", "dq", "dk", "dv"), got, strict=True):
        outside = torch.cat([x[:5], x[50:]])
        assert (outside == (-torch.inf if name == "lse" else 0)).all(), name
        assert x[5:50].isfinite().all(), name


@pytest.mark.parametrize("config", ["16x32", "16x16-split3"])
def test_without_sequences_or_rows_everything_is_zero(device, config):
    inputs = drawn(device)
    for cu_q, cu_k in (((0,), (0,)), ((0, 0, 0), (0, 7, 9)), ((0, 20), (4, 4)), ((62,), (3,))):
        out, lse, *gradients = in_a_row(inputs, cu_q=cu_q, cu_k=cu_k, config=config)
        assert (lse == -torch.inf).all()
        assert not any(x.any() for x in (out, *gradients))
    nothing = [x[:0] for x in inputs]
    got = in_a_row(nothing, cu_q=(0, 0), cu_k=(0, 0), config=config)
    assert [x.shape[0] for x in got] == [0] * 5


def test_packed_tensors_may_have_any_strides(device):
    inputs = drawn(device)
    want = in_a_row(inputs, causal=True)
    apart = [torch.full((x.shape[0], 3, *x.shape[1:]), torch.nan).to(x) for x in inputs]
    for wide, x in zip(apart, inputs, strict=True):
        wide[:, 1] = x
    assert_equal_bits(in_a_row([x[:, 1] for x in apart], causal=True), want)
    heads_first = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in inputs]
    assert_equal_bits(in_a_row(heads_first, causal=True), want)


def test_a_loss_on_lse_reaches_its_own_sequence(device):
    q, k, v, _ = drawn(device, torch.float32)
    q, k, v = (x.nan_to_num(0).requires_grad_() for x in (q, k, v))
    options = {"cu_seqlens_q": CU_Q, "cu_seqlens_k": CU_K, "config": "16x16"}
    _, lse = flash_attention_varlen(q, k, v, return_lse=True, **options)
    assert lse.shape == (H, TOTAL_Q)
    dlse = normal(0, "dlse", lse.shape).to(lse)
    dq, dk = torch.autograd.grad(lse, (q, k), dlse)
    for b in (0, 2, 4):
        rows, keys = slice(CU_Q[b], CU_Q[b + 1]), slice(CU_K[b], CU_K[b + 1])
        alone = [x[at].detach().transpose(0, 1)[None].requires_grad_()
                 for x, at in ((q, rows), (k, keys), (v, keys))]  # fmt: skip
        _, of_one = flash_attention(*alone, return_lse=True, config="16x16")
        want = torch.autograd.grad(of_one, alone[:2], dlse[None, :, rows])
        assert torch.equal(dq[rows], want[0][0].transpose(0, 1))
        assert torch.equal(dk[keys], want[1][0].transpose(0, 1))


@pytest.mark.parametrize(("cu_q", "cu_k"), WILD.values(), ids=WILD)
def test_wild_offsets_on_the_device_reach_nothing_outside(device, cu_q, cu_k):
    """Offsets are clamped to the tensor, and lengths to the rest of it or to the longest."""
    inputs = [x.nan_to_num(1) for x in drawn(device)]
    around = [torch.full((x.shape[0] + 600, *x.shape[1:]), torch.nan).to(x) for x in inputs]
    for wide, x in zip(around, inputs, strict=True):
        wide[300:-300] = x
    tensors = [torch.tensor(x, dtype=torch.int32, device=device) for x in (cu_q, cu_k)]
    options = {"max_seqlen_q": 64, "max_seqlen_k": 48, "causal": True}
    got = in_a_row(
        [x[300:-300] for x in around], cu_q=tensors[0], cu_k=tensors[1], **options
    )  # fmt: skip
    assert not any(x.isnan().any() for x in got)


def test_a_short_sequence_behind_a_long_one_has_scratch_of_its_own_alone(device):
    generator = torch.Generator().manual_seed(3)
    q, k = (torch.randn(x, 1, 16, generator=generator).half().to(device) for x in (601, 2))
    # Sums of integers are exact in any order.
    v = torch.randint(-4, 5, (2, 1, 16), generator=generator).half().to(device)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = flash_attention_varlen(
        *leaves, cu_seqlens_q=(0, 600, 601), cu_seqlens_k=(0, 1, 2), deterministic=False
    )
    # Each row sees one key, so its p is 1 for any q.
    assert torch.equal(out, torch.cat([v[:1].expand(600, 1, 16), v[1:]]))
    dq, dk, dv = torch.autograd.grad(out, leaves, torch.ones_like(out))
    assert not dq.any()
    assert not dk.any()
    assert torch.equal(dv[:, 0, 0].cpu(), torch.tensor([600.0, 1.0]).half())


def test_sequences_past_the_longest_are_cut(device):
    inputs = drawn(device)
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32, device=device) for x in (CU_Q, CU_K))
    cut = in_a_row(inputs, cu_q=cu_q, cu_k=cu_k, max_seqlen_q=20, max_seqlen_k=81)
    whole = in_a_row(inputs)
    rows = torch.ones(TOTAL_Q, dtype=torch.bool, device=device)
    rows[CU_Q[2] + 20 : CU_Q[3]] = False
    assert torch.equal(cut[0][rows], whole[0][rows])
    assert not cut[0][~rows].any()


def test_offsets_that_were_changed_before_the_backward_are_refused(device):
    q, k, v, dout = drawn(device)
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32, device=device) for x in (CU_Q, CU_K))
    out = flash_attention_varlen(
        q.requires_grad_(), k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, config="16x32"
    )
    cu_k.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(out, q, dout)


def test_offsets_on_the_device_cause_no_synchronisation(device):
    if device == "cpu":
        pytest.skip("a CPU has nothing to wait for")
    inputs = drawn(device)
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32, device=device) for x in (CU_Q, CU_K))
    options = {"cu_q": cu_q, "cu_k": cu_k, "causal": True}
    in_a_row(inputs, **options)
    try:
        with warnings.catch_warnings(action="ignore"):  # PyTorch calls the mode a prototype
            torch.cuda.set_sync_debug_mode("error")
        in_a_row(inputs, **options)
    finally:
        torch._C._cuda_set_sync_debug_mode(0)
