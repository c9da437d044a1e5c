"""Pooled probabilities: both references and both bounds agree, and match 50-digit arithmetic."""

from __future__ import annotations

import itertools
import math
import random

import mpmath
import numpy as np
import pytest
import torch

from fa_verify.oracles import stream
from fa_verify.oracles.bounds import pooled as pooled_error
from fa_verify.oracles.bounds.in_numpy import pooled as numpy_pooled
from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.outputs import Numerics
from fa_verify.oracles.reference import pooled
from fa_verify.oracles.reference.pooled import POOLS
from fa_verify.properties.guarantees.compare import ratios
from tests.unit.oracles.bounds.emulated_kernel import CASTS, LOG2E, Emulated
from tests.unit.oracles.bounds.test_bounds_agree import DECLARATIONS, a_problem, as_arrays

EPS = torch.finfo(torch.float64).eps
SIZES = ((1, 1), (2, 3), (7, 5), (16, 32), (11, 1), (100, 100))


def a_pooled_problem(seed: str):
    """q, k, and the arguments of both implementations."""
    (q, k, *_), call, block_n = a_problem(seed)
    draw = random.Random(f"{seed} pooled")
    return (q, k), call | {"pool": draw.choice(POOLS), "size": draw.choice(SIZES)}, block_n


@pytest.mark.parametrize("case", range(8))
@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_both_references_agree(dtype, case):
    inputs, call, _ = a_pooled_problem(f"{dtype}/{case}")
    got = pooled.pooled_probabilities(*inputs, **call)
    want = torch.from_numpy(numpy_pooled.pooled_probabilities(*as_arrays(inputs), **call))
    # Each reference may err by half of the bound for a float64 kernel.
    allowed = pooled_error.pooled_bound(*inputs, **call, in_dtype="fp64", numerics=Numerics())
    assert got.shape == want.shape
    assert ((got == want) | ((got - want).abs() <= allowed)).all()


@pytest.mark.parametrize("case", range(3))
@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32", "fp64"])
@pytest.mark.parametrize("declared", ["default", "tf32", "prescaled qk", "split", "many"])
def test_both_bounds_agree(declared, dtype, case):
    inputs, call, block_n = a_pooled_problem(f"{dtype}/{declared}/{case}")
    numerics = Numerics(**{"block_n": block_n, **DECLARATIONS[declared]})
    asked = call | {"in_dtype": dtype, "numerics": numerics}
    got = pooled_error.pooled_bound(*inputs, **asked)
    want = torch.from_numpy(numpy_pooled.pooled_bound(*as_arrays(inputs), **asked))
    # The bound of a maximum is a small difference of two numbers near P.
    near = pooled.pooled_probabilities(*inputs, **call)
    room = 1e-9 * want + (16 * EPS * near if call["pool"] == "max" else 0)
    assert ((got - want).abs() <= room).all()


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("chunk", [1, 3, 16])
def test_chunking_changes_nothing_but_roundings(chunk, pool):
    (q, k, *_), call, _ = a_problem("fp32/chunked/3")
    call |= {"pool": pool, "size": (7, 5)}
    whole, parts = (pooled.pooled_probabilities(q, k, **call, chunk=x) for x in (None, chunk))
    assert ((whole - parts).abs() <= 64 * EPS * whole).all()
    call |= {"in_dtype": "fp32", "numerics": Numerics()}
    whole, parts = (pooled_error.pooled_bound(q, k, **call, chunk=x) for x in (None, chunk))
    assert whole.any()
    assert ((whole - parts).abs() <= 1e-6 * whole).all()


@pytest.mark.parametrize("pool", POOLS)
def test_the_reference_is_what_fifty_digits_say(pool):
    q, k = (stream.normal(5, x, (1, 1, size, 3)) for x, size in (("q", 5), ("k", 6)))
    mask = Mask(causal=True, seqlens_q=(5,), seqlens_k=(4,))
    call = {"mask": mask, "sm_scale": 0.7, "pool": pool, "size": (2, 3)}
    got = pooled.pooled_probabilities(q, k, **call)
    bound = pooled_error.pooled_bound(q, k, **call, in_dtype="fp64", numerics=Numerics())
    seen = mask.dense(1, 1, 5, 6)[0, 0]
    with mpmath.workdps(50):
        probs = {}
        for m in range(5):
            keys = [n for n in range(6) if seen[m, n]]
            weights = [mpmath.exp(0.7 * exact_dot(q[0, 0, m], k[0, 0, n])) for n in keys]
            for n, weight in zip(keys, weights, strict=True):
                probs[m, n] = weight / mpmath.fsum(weights)
        for i, j in itertools.product(range(3), range(2)):
            pairs = [
                probs.get((m, n), mpmath.mpf(0))
                for m in range(2 * i, min(2 * i + 2, 5))
                for n in range(3 * j, min(3 * j + 3, 4))
            ]
            want = max(pairs) if pool == "max" else mpmath.fsum(pairs) / len(pairs)
            assert abs(got[0, 0, i, j].item() - want) <= bound[0, 0, i, j].item() / 2


def exact_dot(a: torch.Tensor, b: torch.Tensor):
    return mpmath.fsum(mpmath.mpf(float(x)) * float(y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("dirt", [math.nan, math.inf])
@pytest.mark.parametrize("pool", POOLS)
def test_padding_values_change_no_bit(pool, dirt):
    mask = Mask(window_left=4, seqlens_q=(9, 0), seqlens_k=(6, 11))
    q, k = (stream.normal(1, x, (2, 1, 11, 4)) for x in "qk")
    call = {"mask": mask, "sm_scale": 0.5, "pool": pool, "size": (4, 3)}
    judged = call | {"in_dtype": "fp16", "numerics": Numerics()}
    clean = pooled.pooled_probabilities(q, k, **call), pooled_error.pooled_bound(q, k, **judged)
    q[0, :, 9:], q[1], k[0, :, 6:] = dirt, dirt, dirt
    dirty = pooled.pooled_probabilities(q, k, **call), pooled_error.pooled_bound(q, k, **judged)
    assert all(map(torch.equal, clean, dirty))


@pytest.mark.parametrize("pool", POOLS)
def test_the_bound_is_zero_exactly_where_nothing_is_visible(pool):
    mask = Mask(window_left=2, window_right=0, seqlens_q=(9, 7), seqlens_k=(6, 11))
    q, k = (stream.normal(1, x, (2, 1, 11, 4)) for x in "qk")
    size = (2, 3)
    call = {"mask": mask, "sm_scale": 0.5, "pool": pool, "size": size}
    bound = pooled_error.pooled_bound(q, k, **call, in_dtype="fp16", numerics=Numerics())
    seen = mask.dense(2, 1, 11, 11).to(torch.float64)
    some = torch.nn.functional.max_pool2d(seen, size, ceil_mode=True) > 0
    assert some.any()
    assert not some.all()
    assert torch.equal(bound > 0, some)


@pytest.mark.parametrize(("pool", "flushes"), [("max", 1), ("mean", 2)])
def test_a_probability_and_a_mean_below_the_smallest_normal_number_may_be_flushed(pool, flushes):
    q, k = torch.ones(1, 1, 1, 1), torch.tensor([0.0, -200, -200, -200]).view(1, 1, 4, 1)
    call = {"mask": Mask(), "sm_scale": 1.0, "pool": pool, "size": (1, 2)}
    bound = pooled_error.pooled_bound(q, k, **call, in_dtype="fp16", numerics=Numerics())
    assert bound[0, 0, 0, 1].item() == pytest.approx(flushes * 2.0**-126, rel=2**-20, abs=0)


@pytest.mark.parametrize("size", [0, 1, 2])
def test_pooling_without_elements_is_empty(size):
    B, M, N = (0 if size == i else 3 for i in range(3))
    q, k = torch.zeros(B, 2, M, 4), torch.zeros(B, 1, N, 4)
    call = {"mask": Mask(), "sm_scale": 1.0, "pool": "max", "size": (2, 2)}
    judged = call | {"in_dtype": "fp32", "numerics": Numerics()}
    for got in (
        pooled.pooled_probabilities(q, k, **call),
        pooled_error.pooled_bound(q, k, **judged),
    ):
        assert got.shape == (B, 2, -(-M // 2), -(-N // 2))
        assert not got.any()


def test_an_unknown_pooling_is_refused():
    q = torch.zeros(1, 1, 2, 2)
    call = {"mask": Mask(), "sm_scale": 1.0, "pool": "sum", "size": (1, 1)}
    with pytest.raises(ValueError, match=r"^pool is 'sum'; needs one of \('mean', 'max'\)$"):
        pooled.pooled_probabilities(q, q, **call)
    with pytest.raises(ValueError, match=r"^pool is 'sum'; needs one of \('mean', 'max'\)$"):
        pooled_error.pooled_bound(q, q, **call, in_dtype="fp32", numerics=Numerics())


def emulated(inputs, call, dtype: str, numerics: Numerics, fault: str = "") -> torch.Tensor:
    """The result of a kernel that pools in float32 (float64 for float64) sequentially."""
    kernel = Emulated(dtype=dtype, numerics=numerics)
    q, k = (x.numpy().astype(kernel.work) for x in inputs)
    (B, H, M, _), (Hk, N) = q.shape, k.shape[1:3]
    mask, (rows, keys) = call["mask"], call["size"]
    seen = mask.dense(B, H, M, N).expand(B, H, M, N).numpy()
    lengths = mask.lengths(B, M, N)
    found = np.zeros((B, H, -(-M // rows), -(-N // keys)), kernel.work)
    for b, h in itertools.product(range(B), range(H)):
        live = seen[b, h].any(axis=1)
        q_md = np.where(live[:, None], q[b, h], 0).astype(kernel.work)
        used = seen[b, h].any(axis=0)
        k_nd = np.where(used[:, None], k[b, h // (H // Hk)], 0).astype(kernel.work)
        s2 = kernel.scores(q_md, k_nd, call["sm_scale"])[0]
        with np.errstate(invalid="ignore"):  # -inf minus -inf in rows without a visible key
            _, lse = kernel.forward(s2, np.zeros((N, 1), kernel.work), seen[b, h])
        lse2 = np.where(live, lse, 0).astype(kernel.work) * kernel.work(LOG2E)
        p = kernel.exp2(np.where(seen[b, h], s2 - lse2[:, None], kernel.work(-np.inf)))
        if fault == "P is rounded to the input dtype":
            p = CASTS[dtype](p)
        for i, j in itertools.product(range(found.shape[2]), range(found.shape[3])):
            m = slice(i * rows, max(i * rows, min((i + 1) * rows, lengths[0][b])))
            n = slice(j * keys, max(j * keys, min((j + 1) * keys, lengths[1][b])))
            block = p[m, n]
            if fault == "visible pairs are counted":
                count = max(1, int(seen[b, h][m, n].sum()))
            else:
                count = max(1, block.size)
            if not block.size:
                continue
            if call["pool"] == "max":
                found[b, h, i, j] = block.max()
            else:
                # Sequential along both axes: the sums with the most roundings.
                columns = np.add.accumulate(block, axis=0)[-1]
                found[b, h, i, j] = np.add.accumulate(columns)[-1] / kernel.work(count)
    return torch.from_numpy(found.astype(np.float64))


def worst_emulated(dtype: str, cases: range, fault: str = "", **declared) -> float:
    numerics, worst = Numerics(**declared), 0.0
    for case in cases:
        inputs, call, _ = a_pooled_problem(f"{dtype}/emulated/{case}")
        got = emulated(inputs, call, dtype, numerics, fault)
        want = pooled.pooled_probabilities(*inputs, **call)
        bound = pooled_error.pooled_bound(*inputs, **call, in_dtype=dtype, numerics=numerics)
        ratio = ratios(got, want, bound)
        worst = max(worst, float(ratio.amax()) if ratio.numel() else 0.0)
    return worst


@pytest.mark.parametrize(
    ("dtype", "declared"),
    [
        *((dtype, {}) for dtype in ("fp16", "bf16", "fp32", "fp64")),
        ("fp32", {"dots": "tf32"}),
        ("bf16", {"prescales": "q"}),
    ],
    ids=str,
)
def test_an_emulated_kernel_is_within_the_bound_and_not_far_within(dtype, declared):
    worst = worst_emulated(dtype, range(24), **declared)
    assert 0.02 <= worst <= 1


@pytest.mark.parametrize("fault", ["P is rounded to the input dtype", "visible pairs are counted"])
def test_a_small_fault_leaves_the_bound(fault):
    assert worst_emulated("bf16", range(24), fault) > 1
