"""``flash_attention_fp8`` lies within the bound of the replay."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from fa_verify import verify
from fa_verify.adapters.ours_fp8 import attention


def test_our_forward_of_codes_holds(device):
    report = verify(attention, problems=20, device=device)
    assert report, str(report)
    assert report.judged >= 40
