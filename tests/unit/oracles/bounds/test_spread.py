"""The random and systematic errors of a kernel: two implementations, and emulated kernels."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fa_verify.oracles.bounds import spread
from fa_verify.oracles.bounds.given_forward import Returned
from fa_verify.oracles.bounds.in_numpy import spread as numpy_spread
from fa_verify.oracles.outputs import Numerics, Outputs
from tests.unit.oracles.bounds.test_given_forward import Drawn

DECLARATIONS = {
    "default": {},
    "wide tiles": {"block_n": 64},
    "accumulator": {"accumulator": 2.0},
    "fp32 p": {"p_dtype": "fp32"},
    "ds scaled": {"ds_scaled": True, "flushes": True},
    "rounded l": {"l_from": "rounded"},
    "p normalised": {"p_normalised": True},
    "rescales put off": {"rescale_threshold": 8.0},
    "tf32 truncated": {"dots": "tf32", "tf32_conversion": "truncate"},
    "tf32 to nearest": {"dots": "tf32", "tf32_conversion": "nearest", "l_from": "rounded"},
    "tf32 away from 0": {"dots": "tf32", "tf32_conversion": "nearest_away", "ds_scaled": True},
}


def both(drawn: Drawn, rows: int | None = None):
    q, k, v, dout = drawn.inputs
    dlse = drawn.mods["dlse"]
    truth = drawn.truth
    call = {name: drawn.call[name] for name in ("mask", "sm_scale", "in_dtype", "numerics")}
    weights = spread.Weights(truth.out, truth.dq, truth.dk, truth.dv)
    given = Returned(drawn.out, drawn.lse)
    got = spread.spreads(q, k, v, dout, dlse, given=given, weights=weights, rows=rows, **call)
    want = numpy_spread.spreads(
        *(x.numpy() for x in drawn.inputs), out=drawn.out.numpy(), lse=drawn.lse.numpy(),
        weights=Outputs(*(x.numpy() for x in truth)), dlse=None if dlse is None else dlse.numpy(),
        **call,
    )  # fmt: skip
    return got, want


def assert_agree(got: dict[str, spread.Spread], want: dict[str, dict[str, np.ndarray]]) -> None:
    assert got.keys() == want.keys()
    for name, of in got.items():
        assert bool((of.copies == 1).all())
        for field in set(spread.Spread._fields) - {"copies"}:
            a, b = getattr(of, field).double().numpy(), want[name][field]
            # Signed sums of shapes and differences of squares cancel.
            size = np.abs(b).max(initial=0.0)
            assert a.shape == b.shape, (name, field)
            np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-9 * size, err_msg=f"{name} {field}")


@pytest.mark.parametrize("case", range(4))
@pytest.mark.parametrize("declared", DECLARATIONS)
@pytest.mark.parametrize("in_dtype", ["bf16", "fp16", "fp32"])
def test_both_implementations_agree(in_dtype, declared, case):
    numerics = Numerics(**DECLARATIONS[declared], backward_reads=("out", "lse"))
    added = "dlse" if case % 2 else ""
    drawn = Drawn(f"{in_dtype}/{declared} spread/{case}", numerics, added, share=0.5)
    assert_agree(*both(drawn))


@pytest.mark.parametrize("pairs", [None, 1], ids=["rows", "rows and heads"])
def test_chunks_change_nothing(monkeypatch, pairs):
    drawn = Drawn("bf16/chunks of a spread/3", Numerics(backward_reads=("out", "lse")), share=0.5)
    whole, _ = both(drawn)
    if pairs:
        monkeypatch.setattr(spread, "_PAIRS", pairs)
    chunked, _ = both(drawn, rows=16)
    for name, of in whole.items():
        for field, x, y in zip(of._fields, of, chunked[name], strict=True):
            torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-12, msg=f"{name} {field}")
