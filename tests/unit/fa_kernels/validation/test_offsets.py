"""Offsets of packed sequences: errors by name, and lengths clamped to the longest."""

from __future__ import annotations

import pytest
import torch

from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.masks.sink_window import SinkWindow

pytest.importorskip("triton")

from fa_kernels import flash_attention_varlen

KEYS = (21, 9, 16, 0, 35)
CU_Q, CU_K = (0, 17, 17, 51, 52, 57), (0, 21, 30, 46, 46, 81)
TOTAL_Q, TOTAL_K = 62, 83


def tensors(device: str) -> list[torch.Tensor]:
    """q, k, v: two heads of queries, one of keys."""
    shapes = ((TOTAL_Q, 2, 4), (TOTAL_K, 1, 4), (TOTAL_K, 1, 3))
    return [torch.ones(shape, dtype=torch.float16, device=device) for shape in shapes]


def call(device: str, *, cu_q=CU_Q, cu_k=CU_K, **options) -> torch.Tensor:
    return flash_attention_varlen(
        *tensors(device), cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, config="16x32", **options
    )


def int32(*values: int, **options: object):
    return lambda device: torch.tensor(
        values, **{"dtype": torch.int32, "device": device, **options}
    )


WRONG = {
    "no sequence": (TypeError, "cu_seqlens_q is 5; needs a sequence of ints or", {"cu_q": 5}),
    "text": (TypeError, "cu_seqlens_k is '01'; needs a sequence", {"cu_k": "01"}),
    "bytes": (TypeError, r"cu_seqlens_q is b'.*'; needs a sequence of ints", {"cu_q": b"\0\5"}),
    "empty": (ValueError, r"cu_seqlens_q is empty; needs B \+ 1 offsets", {"cu_q": ()}),
    "float": (TypeError, "cu_seqlens_q holds 1.0; needs ints", {"cu_q": (0, 1.0)}),
    "bool": (TypeError, "cu_seqlens_q holds True; needs ints", {"cu_q": (0, True)}),
    "past": (ValueError, r"cu_seqlens_k holds 84; needs offsets in \[0, 83\]", {"cu_k": (0, 84)}),
    "negative": (ValueError, r"cu_seqlens_q holds -1; needs offsets in", {"cu_q": (-1, 3)}),
    "falling": (ValueError, r"cu_seqlens_q is \(0, 9, 4\); needs offsets that ascend",
                {"cu_q": (0, 9, 4)}),
    "entries": (ValueError, "cu_seqlens_k has 2 offsets; needs as many as cu_seqlens_q, 6",
                {"cu_k": (0, 9)}),
    "dtype": (TypeError, "cu_seqlens_q has dtype torch.int64; needs torch.int32",
              {"cu_q": int32(0, 9, dtype=torch.int64)}),
    "axes": (ValueError, r"cu_seqlens_q has shape \(1, 2\); needs \(B \+ 1,\)",
             {"cu_q": lambda device: int32(0, 9)(device)[None]}),
    "no entry": (ValueError, r"cu_seqlens_q has shape \(0,\); needs", {"cu_q": int32()}),
    "device": (ValueError, "cu_seqlens_q is on meta; needs the device of q",
               {"cu_q": int32(0, 9, device="meta")}),
    "longest": (ValueError, "max_seqlen_q is 33; needs at least 34, the longest",
                {"max_seqlen_q": 33}),
    "longest bool": (TypeError, "max_seqlen_k is True; needs an int", {"max_seqlen_k": True}),
    "longest negative": (ValueError, "max_seqlen_k is -1; needs an int >= 0",
                         {"max_seqlen_k": -1}),
    "lengths": (ValueError, r"mask has seqlens_q \(1,\); needs those of cu_seqlens_q, \(17, 0",
                {"mask": Mask(seqlens_q=(1,))}),
    "lengths of a tensor": (ValueError, "mask has seqlens_k, and cu_seqlens_k is a tensor",
                            {"mask": Mask(seqlens_k=KEYS), "cu_k": int32(*CU_K)}),
    "predicate": (ValueError, "mask has a predicate and no seqlens_q; needs those of cu_seqlens_q",
                  {"mask": SinkWindow()}),
    "mask and window": (ValueError, "mask is given together with causal",
                        {"mask": Mask(), "causal": True}),
}  # fmt: skip


@pytest.mark.parametrize(("error", "says", "given"), WRONG.values(), ids=WRONG)
def test_wrong_arguments_are_refused_by_name(device, error, says, given):
    given = {name: x(device) if callable(x) else x for name, x in given.items()}
    with pytest.raises(error, match=says):
        call(device, **given)


def test_tensors_have_three_axes(device):
    q, k, v = tensors(device)
    offsets = {"cu_seqlens_q": CU_Q, "cu_seqlens_k": CU_K}
    with pytest.raises(ValueError, match=r"q has shape \(1, 62, 2, 4\); .* \(total_q, H, D\)"):
        flash_attention_varlen(q[None], k, v, **offsets)
    with pytest.raises(ValueError, match=r"k has shape \(83, 4\); .* \(total_k, Hk, D\)"):
        flash_attention_varlen(q, k[:, 0], v, **offsets)
    with pytest.raises(TypeError, match=r"v is list; needs a torch.Tensor"):
        flash_attention_varlen(q, k, [], **offsets)
    with pytest.raises(ValueError, match=r"v has shape .*; needs the heads and keys of k"):
        flash_attention_varlen(q, k, v[:-1], **offsets)


@pytest.mark.parametrize("longest", [0, 5])
def test_sequences_on_the_device_are_cut_to_the_longest(longest, device):
    offsets = {"cu_q": int32(*CU_Q)(device), "cu_k": int32(*CU_K)(device)}
    out = call(device, max_seqlen_q=longest, **offsets)
    # Lengths of one have an average of one; the fourth sequence has no keys.
    rows = [CU_Q[i] + row for i in (0, 2, 4) for row in range(min(longest, CU_Q[i + 1] - CU_Q[i]))]
    assert out[:, 0, 0].nonzero().flatten().tolist() == rows


def test_the_longest_may_be_more_than_there_is(device):
    assert torch.equal(call(device, max_seqlen_q=99, max_seqlen_k=34 + 1), call(device))


def test_the_least_that_is_needed_is_the_longest(device):
    assert torch.equal(call(device, max_seqlen_q=34, max_seqlen_k=35), call(device))
