"""Claims K7 and K8: dk and dv without a mask over queries, and values in the tail of queries."""

from __future__ import annotations

import math
import os
from types import ModuleType

import pytest
import torch

from fa_verify.oracles.stream import normal
from fa_verify.properties.guarantees.compare import same_bits
from fa_verify.properties.inputs.families import TORCH_DTYPES
from fa_verify.properties.inputs.layouts import lay_out
from tests.claims.launching import arguments, differentiate, tensors
from tests.mutation.catalogue.mutant import Edit

LN2 = math.log(2)
PREPROCESS, DKDV, DQ, MASK = (
    f"fa_kernels/kernels/{name}.py"
    for name in ("portable/bwd_preprocess", "portable/dkdv", "portable/dq", "common/mask")
)

# The published kernel of dk and dv reads zeros past seqlen_q in Q, dO, LSE and delta.
LOAD_LSE2 = "tl.load(tl.multiple_of(rows.lse2_pointer + start_m, 16) + offs_tile)"
LOAD_DELTA = "tl.load(tl.multiple_of(rows.delta_pointer + start_m, 16) + offs_tile)"
LIVE = 'live = tl.load(rows.lse2_pointer + offs_m) != float("inf")'
NO_MASK = (
    Edit(DKDV, "return tl.where(seen, x, 0.0)", "return x"),
    Edit(DKDV, LIVE, "live = offs_m < mask.seqlen_q"),
)


def loads(other: str) -> tuple[Edit, Edit]:
    """Edits that load LSE and delta with a mask for the rows of the sequence."""
    return tuple(
        Edit(
            DKDV, old, f"tl.load(rows.{name}_pointer + offs_m, mask=offs_m < mask.seqlen_q{other})"
        )
        for name, old in (("lse2", LOAD_LSE2), ("delta", LOAD_DELTA))
    )


# Q and dO are read for all rows of the sequence, whatever their LSE.
DQ_ROWS = Edit(
    DQ,
    'live = (lse2 != float("inf"))[:, None]',
    'live = ((lse2 != float("inf")) & (offs_m < seqlen.seqlen_q))[:, None]',
)
DKDV_ROWS = Edit(
    DKDV,
    LIVE,
    'live = (tl.load(rows.lse2_pointer + offs_m) != float("inf")) & (offs_m < mask.seqlen_q)',
)
# Scratch past the rows of lse2 and delta stays unwritten.
UNWRITTEN_SCRATCH = (
    DQ_ROWS,
    Edit(
        PREPROCESS,
        "tl.store(lse2_ptr + (row + offs_m), lse2)",
        "tl.store(lse2_ptr + (row + offs_m), lse2, mask=offs_m < M)",
    ),
    Edit(
        PREPROCESS,
        "tl.store(delta_ptr + (row + offs_m), delta)",
        "tl.store(delta_ptr + (row + offs_m), delta, mask=offs_m < M)",
    ),
)


@pytest.fixture
def poisoned(monkeypatch):
    """Fills a package's allocations with NaN."""

    def poison(package: ModuleType) -> ModuleType:
        def empty(shape, *, dtype, device):
            return torch.full(tuple(shape), math.nan, dtype=dtype, device=device)

        monkeypatch.setattr(package.runtime.allocation, "empty", empty)
        return package

    return poison


def ragged(device: str) -> list[torch.Tensor]:
    """Tensors of 21 rows for tiles of 16, with NaN in the storage between and around rows."""
    shapes = {"q": (21, 8), "k": (16, 8), "v": (16, 8), "dout": (21, 8)}
    inputs = (normal(1, name, shape)[None, None].float() for name, shape in shapes.items())
    return [lay_out(x.to(device), "padded") for x in inputs]


def test_k07_dk_and_dv_need_no_mask_over_queries_whose_loads_say_other_0(
    kernels, edited, device, poisoned
):
    """K7 holds bitwise: in the tail P = 1 meets dO = 0 and dS = 0.

    NaN follow the rows of Q and dO in memory, and the rows of LSE and delta in scratch.
    """
    copy = poisoned(edited("k07_other_0", *NO_MASK, *loads(", other=0.0"), *UNWRITTEN_SCRATCH))
    inputs = ragged(device)
    got, want = (differentiate(x, *inputs) for x in (copy, kernels))
    assert all(same_bits(x, y).all() for x, y in zip(got, want, strict=True))


def test_k07_rows_of_lse_and_delta_that_are_read_and_not_written_are_poison(
    edited, device, poisoned
):
    """K7's first condition: loads of scratch without a mask give NaN, since NaN * 0 is NaN."""
    copy = poisoned(edited("k07_unbounded", *NO_MASK, *UNWRITTEN_SCRATCH))
    got = differentiate(copy, *ragged(device))
    assert got.dk.isnan().all()
    assert got.dv.isnan().all()


@pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1",
    reason="undefined on a GPU, where it is often 0; the interpreter puts NaN there",
)
def test_k07_a_masked_load_that_does_not_say_other_is_poison(edited, device):
    """K7's second condition: without ``other``, a masked-off lane holds an arbitrary value."""
    got = differentiate(edited("k07_no_other", *NO_MASK, *loads("")), *ragged(device))
    assert got.dk.isnan().all()
    assert got.dv.isnan().all()


MASKED_SCORES = Edit(
    DKDV,
    """        p = tl.exp2(scores * mods.qk_scale - lse2[None, :])
        if edges:
            p = _without_hidden(p, offs_m, offs_n, mask, CONFIG.PREDICATE)
""",
    """        if edges:
            seen = element_mask(offs_m[None, :], offs_n[:, None], mask, CONFIG.PREDICATE)
            scores = tl.where(seen, scores, -float("inf"))
        p = tl.exp2(scores * mods.qk_scale - lse2[None, :])
""",
)
STORED_AS_IT_IS = Edit(
    PREPROCESS, 'tl.where(lse == -float("inf"), float("inf"), lse * LOG2E)', "lse * LOG2E"
)


def test_k07_an_lse_of_minus_infinity_needs_a_guard_of_its_own(kernels, edited, device):
    """K7's third condition: a row without a visible key has P = exp(-inf - -inf) = NaN.

    An LSE stored as +inf makes P 0. Under the causal mask with M > N, rows 0 to 4 see no key and
    share a tile with rows that see keys.
    """
    guarded = edited("k07_masked_scores", MASKED_SCORES)
    bare = edited("k07_bare_lse", MASKED_SCORES, STORED_AS_IT_IS, DQ_ROWS, DKDV_ROWS)
    inputs = ragged(device)
    want, with_guard, without = (
        differentiate(x, *inputs, causal=True) for x in (kernels, guarded, bare)
    )
    assert (want.lse == -math.inf).sum() == 5
    assert same_bits(with_guard.dv, want.dv).all()
    assert without.dv.isnan().all()


# K8's kernel has no mask over queries and reads Q in padding, where dO is 0.
UNMASKED_ROWS = (
    Edit(MASK, " & (offs_m < mask.seqlen_q)", ""),
    Edit(DKDV, LIVE, "live = offs_m >= 0"),
)
VALID = 8
# Scores in base 2 of the padding row with each key, on both sides of 16 and of 128.
SCORES2 = torch.tensor([-9, 0, 11, 15.9375, 16.0625, 88, 127.9375, 128.0625] * 2)


def with_dirt(device: str, dtype: str, dirt: float) -> tuple[torch.Tensor, ...]:
    """q, k, v, dout with 8 valid rows of 16; the next row has the scores ``dirt`` * SCORES2."""
    # Two columns hold a score, since 128 + 1/16 has too many digits for bf16.
    k = torch.stack([SCORES2.floor(), SCORES2 - SCORES2.floor()], 1)
    q, dout = normal(2, "q", (16, 2)) / 64, normal(2, "dout", (16, 4))
    q[VALID], dout[VALID:] = dirt, 0
    return tensors(device, TORCH_DTYPES[dtype], q, k, normal(2, "v", (16, 4)), dout)


def backward(
    package: ModuleType, inputs: tuple[torch.Tensor, ...], lse: torch.Tensor
) -> dict[str, torch.Tensor]:
    """(dk, dv) of the valid rows, from a stored LSE (16,) and an out of ones."""
    q, k, v, dout = inputs
    # The scale ln 2 makes q.k the score in base 2.
    checked = arguments(package, q, k, v, seqlens_q=(VALID,), sm_scale=LN2)
    stored = lse.to(q.device).view(1, 1, 16)
    launch = package.launch.portable.launch_backward
    gradients = launch(q, k, v, torch.ones_like(v), stored, dout, checked)
    return {name: x[0, 0].cpu() for name, x in zip(("dk", "dv"), gradients[1:], strict=True)}


def row_lse(inputs: tuple[torch.Tensor, ...], in_padding: float | None = None) -> torch.Tensor:
    """The LSE of every row; ``in_padding`` replaces it in padding."""
    q, k = (x[0, 0].double().cpu() for x in inputs[:2])
    lse = torch.logsumexp(q @ k.T * LN2, 1).float()
    if in_padding is not None:
        lse[VALID:] = in_padding
    return lse


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
def test_k08_finite_dirt_in_q_is_harmless_beside_the_lse_of_its_own_row(
    kernels, edited, device, dtype
):
    """K8 holds bitwise at any score with the row's own LSE: P <= 1, so P' dO = 0 and dS = 0."""
    copy = edited("k08_unmasked_rows", *UNMASKED_ROWS)
    inputs = with_dirt(device, dtype, 1.0)
    got = backward(copy, inputs, row_lse(inputs))
    want = backward(kernels, inputs, row_lse(inputs, -math.inf))
    assert all(same_bits(got[name], want[name]).all() for name in want)
    assert not any(x.isnan().any() for x in want.values())


@pytest.mark.parametrize(("dtype", "dv_from"), [("fp16", 16), ("bf16", 128), ("fp32", 128)])
def test_k08_beside_an_lse_loaded_as_0_it_is_nan_once_p_overflows(
    kernels, edited, device, dtype, dv_from
):
    """K8 is wrong with LSE = 0: dv is NaN for keys with a score past 16 in base 2 (11.09) in fp16.

    The cast of P overflows there. Past 128 (88.7) P is infinite in every dtype and dk is NaN too.
    Keys with smaller scores keep every bit.
    """
    copy = edited("k08_unmasked_rows", *UNMASKED_ROWS)
    inputs = with_dirt(device, dtype, 1.0)
    got = backward(copy, inputs, row_lse(inputs, 0.0))
    want = backward(kernels, inputs, row_lse(inputs, -math.inf))
    for name, first in (("dk", 128), ("dv", dv_from)):
        is_nan = got[name].isnan().any(1)
        assert torch.equal(is_nan, first <= SCORES2), name
        assert same_bits(got[name], want[name])[~is_nan].all(), name


@pytest.mark.parametrize("dirt", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("in_padding", [None, 0.0], ids=["own_lse", "lse_0"])
def test_k08_nan_and_infinity_in_q_reach_every_key(kernels, edited, device, dirt, in_padding):
    """K8 is wrong for NaN and Inf with any LSE: dk adds 0 * NaN."""
    copy = edited("k08_unmasked_rows", *UNMASKED_ROWS)
    inputs, finite = (with_dirt(device, "fp32", x) for x in (dirt, 1.0))
    assert backward(copy, inputs, row_lse(finite, in_padding))["dk"].isnan().all()
    got, want = (backward(kernels, x, row_lse(finite, -math.inf))["dk"] for x in (inputs, finite))
    assert same_bits(got, want).all()
    assert not want.isnan().any()
