"""The adapters of docs/inference-kernels.md hold, and a fault in the kernel of each is found.

flash-attn needs a GPU. Its adapter runs on a PyTorch function with the signature of
``flash_attn.flash_attn_varlen_func``, so the adapter is tested here, and flash-attn is not.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from fa_verify import verify
from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.problem import Problem
from fa_verify.properties.kernels.loading import load
from fa_verify.properties.kernels.subject import Subject

pytest.importorskip("triton")
PAGE = Path(__file__).parents[3] / "docs" / "inference-kernels.md"
FLASH_ATTN, DECODE, PREFILL = re.findall(
    r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
)
GUARANTEES = ("G1", "G3", "G6", "G9")


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
    softmax_scale=None, causal=False,
):  # fmt: skip
    """The function of flash-attn 2 in PyTorch, with causal masks aligned at the bottom right."""
    dtype, parts = q.dtype, []
    for rows, keys in zip(
        q.float().split(cu_seqlens_q.diff().tolist()), range(len(cu_seqlens_k) - 1), strict=True
    ):
        start, stop = cu_seqlens_k[keys : keys + 2].tolist()
        groups = q.shape[1] // k.shape[1]
        of_k, of_v = (x[start:stop].float().repeat_interleave(groups, 1) for x in (k, v))
        (m, n), scale = (len(rows), stop - start), softmax_scale or q.shape[2] ** -0.5
        assert (m <= max_seqlen_q, n <= max_seqlen_k) == (True, True)
        seen = torch.ones(m, n, dtype=torch.bool).tril(n - m) if causal else torch.ones(m, n) > 0
        scores = torch.einsum("mhd,nhd->hmn", rows, of_k) * scale
        empty = ~seen.any(1, keepdim=True)
        p = torch.softmax(scores.masked_fill(~(seen | empty), -torch.inf), -1)
        out = torch.einsum("hmn,nhd->mhd", p, of_v)
        parts.append(out.masked_fill(empty[..., None], 0.0))
    return torch.cat(parts).to(dtype)


@pytest.fixture
def subject(tmp_path, monkeypatch):
    """A function that imports the code of the page as a file, and returns its subject."""
    flash_attn = ModuleType("flash_attn")
    flash_attn.flash_attn_varlen_func = flash_attn_varlen_func
    monkeypatch.setitem(sys.modules, "flash_attn", flash_attn)
    monkeypatch.setattr(sys, "path", sys.path.copy())

    def of(code: str) -> Subject:
        path = tmp_path / f"adapter_{len(list(tmp_path.iterdir()))}.py"
        path.write_text(code)
        return load(f"{path}:attention")

    return of


def on_a_cpu(subject: Subject) -> Subject:
    """The adapter of flash-attn as that of the PyTorch function: on a CPU, with small head dims."""
    numerics = dataclasses.replace(subject.numerics, p_dtype="fp32", p_normalised=True)
    numerics = dataclasses.replace(numerics, group_sum="dtype")
    return dataclasses.replace(subject, devices=("cpu",), head_dims=(16,), numerics=numerics)


def adapter(code: str) -> list[str]:
    """The lines of an adapter: its declarations and its function."""
    return code[code.index("@attention_kernel") :].splitlines()


@pytest.mark.parametrize("code", [FLASH_ATTN, DECODE, PREFILL], ids=["varlen", "decode", "prefill"])
def test_an_adapter_has_about_ten_lines(code):
    assert len(adapter(code)) <= 11


def test_the_adapter_of_flash_attn_holds(subject, device):
    if device != "cpu":
        pytest.skip("the PyTorch function stands for flash-attn on a CPU")
    report = verify(on_a_cpu(subject(FLASH_ATTN)), problems=4, guarantees=GUARANTEES)
    assert report, str(report)
    assert {"out fp16", "dq fp16", "dk bf16"} <= {*report.worst}
    wrong = FLASH_ATTN.replace("causal=mask.causal", "causal=True")
    assert verify(on_a_cpu(subject(wrong)), problems=4, guarantees=("G1",)).findings


@pytest.mark.parametrize(
    ("code", "right", "wrong"),
    [
        (DECODE, "valid = n[:, None] < length\n", "valid = n[:, None] <= length\n"),
        (DECODE, "tl.program_id(1) // G", "tl.program_id(1) % (heads // G)"),
        (PREFILL, "m[:, None] + N - M", "m[:, None]"),
        (PREFILL, "acc * alpha[:, None]", "acc"),
    ],
    ids=["a key too many", "heads", "alignment", "rescale"],
)
def test_a_fault_in_a_kernel_of_the_page_is_found(subject, device, code, right, wrong):
    assert code.count(right) == 1
    rising = Problem(
        M=1 if code == DECODE else 150, N=300, dtype="fp16", inputs="rising_max", device=device,
        mask=Mask(causal=code == PREFILL),
    )  # fmt: skip
    broken = subject(code.replace(right, wrong))
    drawn = verify(broken, problems=6, device=device, guarantees=("G1",))
    found = drawn.findings or verify(broken, problems=[rising], guarantees=("G1",)).findings
    assert found, str(drawn)


@pytest.mark.parametrize("code", [DECODE, PREFILL], ids=["decode", "prefill"])
def test_a_kernel_of_the_page_holds(subject, device, code):
    report = verify(subject(code), problems=4, device=device, guarantees=GUARANTEES)
    assert report, str(report)
    assert "dq, dk and dv" in report.summary
