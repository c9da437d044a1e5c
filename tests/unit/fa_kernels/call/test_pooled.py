"""Pooled attention probabilities: definition, sizes, arguments, compilation."""

from __future__ import annotations

import builtins
import math
import os

import pytest
import torch

from fa_verify.oracles.bounds.pooled import pooled_bound
from fa_verify.oracles.masks.block_sparse import BlockSparse
from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.masks.prefix_lm import PrefixLM
from fa_verify.oracles.outputs import Numerics
from fa_verify.oracles.reference.pooled import POOLS, pooled_probabilities
from fa_verify.oracles.stream import normal
from fa_verify.properties.guarantees.compare import ratios

pytest.importorskip("triton")

from fa_kernels import flash_attention, operators, pooled_attention_probs
from fa_kernels.configs import resolve
from fa_kernels.launch import portable
from fa_kernels.runtime import allocation
from fa_kernels.validation.arguments import Arguments, check
from tests.unit.fa_kernels.call.test_operators import drawn as of_layouts
from tests.unit.fa_kernels.call.test_operators import stored
from tests.unit.fa_kernels.launch.test_launch import lazily

CONFIG = "16x16"
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
DTYPES["fp64"] = torch.float64
WINDOW = Mask(window_left=9, window_right=3, seqlens_q=(20, 12), seqlens_k=(37, 20))
MASKS = {"window": WINDOW, "prefix": PrefixLM(prefix=5)}
# One pair; primes; a tile; between tiles; several tiles; more than the sequences have.
SIZES = ((7, 3), (1, 1), (16, 16), (17, 9), (15, 33), (20, 1), (3, 2), (2**40, 10**6))


def drawn(device, dtype="fp64", M=20, N=37, D=8):
    """q, k and v of two batch entries, two heads and one of keys."""
    shapes = {"q": (2, 2, M, D), "k": (2, 1, N, D), "v": (2, 1, N, 6)}
    return [normal(0, x, shape).to(DTYPES[dtype]).to(device) for x, shape in shapes.items()]


def pooled_of(inputs, pool, size, **arguments):
    arguments = {"config": CONFIG, "sm_scale": 0.3, **arguments}
    _, lse = flash_attention(*inputs, return_lse=True, **arguments)
    return pooled_attention_probs(*inputs[:2], lse, pool=pool, pool_size=size, **arguments)


def worst_ratio(got, inputs, dtype, pool, size, mask):
    asked = {"mask": mask, "sm_scale": 0.3, "pool": pool, "size": size}
    want = pooled_probabilities(*inputs[:2], **asked)
    bound = pooled_bound(*inputs[:2], **asked, in_dtype=dtype, numerics=Numerics())
    return float(ratios(got, want, bound).amax())


@pytest.fixture
def poisoned(monkeypatch):
    """Fills the allocations of fa_kernels with NaN before the kernels run."""
    empty = allocation.empty

    def filled(*args, **kwargs):
        made = empty(*args, **kwargs)
        return made.fill_(math.nan) if made.is_floating_point() else made

    monkeypatch.setattr(allocation, "empty", filled)


def test_blocks_of_equal_scores_match_a_count_by_hand(device):
    # Row m sees m + 1 keys with equal scores.
    q, k, v = (torch.zeros(1, 1, 4, 8, dtype=torch.float64, device=device) for _ in range(3))
    third, quarter = 1 / 3, 1 / 4
    for pool, want in (
        ("mean", [[0.5, 0], [(third + quarter) / 2, (third + 2 * quarter) / 4]]),
        ("max", [[1, 0], [third, third]]),
    ):
        got = pooled_of((q, k, v), pool, (2, 2), causal=True)
        assert torch.allclose(got[0, 0], torch.tensor(want, dtype=got.dtype, device=device))


def test_padding_is_not_counted_and_hidden_pairs_are(device):
    q, k, v = (torch.zeros(1, 1, 4, 8, dtype=torch.float64, device=device) for _ in range(3))
    got = pooled_of((q, k, v), "mean", (2, 2), causal=True, seqlens_q=(3,), seqlens_k=(3,))
    # One row and one key of the last block are valid; one pair in four of the first is hidden.
    want = [[0.5, 0], [1 / 3, 1 / 3]]
    assert torch.allclose(got[0, 0], torch.tensor(want, dtype=got.dtype, device=device))
    got = pooled_of((q, k, v), "mean", (2, 2), seqlens_q=(2,), seqlens_k=(2,))
    assert got.tolist() == [[[[0.5, 0], [0, 0]]]]


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_blocks_of_any_size_are_within_the_bound(mask, size, pool, device, poisoned):
    inputs = drawn(device)
    got = pooled_of(inputs, pool, size, mask=mask)
    assert got.shape == (2, 2, -(-20 // size[0]), -(-37 // size[1]))
    assert worst_ratio(got, inputs, "fp64", pool, size, mask) <= 1


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize(
    ("dtype", "config"),
    [("fp16", "16x16"), ("bf16", "16x32"), ("fp32", "32x16"), ("fp16", "default")],
)
def test_every_dtype_and_any_tile_is_within_the_bound(dtype, config, pool, device, poisoned):
    inputs = drawn(device, dtype, D=16)
    got = pooled_of(inputs, pool, (5, 18), mask=WINDOW, config=config)
    assert got.dtype == torch.float32
    assert worst_ratio(got, inputs, dtype, pool, (5, 18), WINDOW) <= 1


@pytest.mark.parametrize("size", [(30, 30), (2**40, 2**33)], ids=str)
def test_a_block_is_never_larger_than_the_sequence_to_the_kernel(size, device, monkeypatch):
    given = []

    class Recorder:
        def __getitem__(self, grid):
            return lambda **arguments: given.append(arguments)

    monkeypatch.setattr(portable, "pool_kernel", Recorder())
    pooled_of(drawn(device, M=40, N=20), "max", size)
    assert [(x["pool_rows"], x["pool_keys"]) for x in given] == [(min(size[0], 40), 20)]


@pytest.mark.parametrize("config", ["16x16", "32x16"])
@pytest.mark.parametrize("size", [(40, 70), (13, 32), (36, 17)], ids=str)
@pytest.mark.parametrize(
    "mask", [Mask(window_left=3, causal=True), Mask(window_left=2, window_right=25)]
)
def test_only_tiles_within_the_window_matter(mask, size, config, device, poisoned):
    inputs = drawn(device, M=40, N=70)
    got = pooled_of(inputs, "mean", size, mask=mask, config=config)
    assert worst_ratio(got, inputs, "fp64", "mean", size, mask) <= 1


@pytest.mark.parametrize("size", [(7, 3), (1, 1), (5, 40)], ids=str)
def test_no_two_programs_write_to_one_block(size, device, monkeypatch):
    if device != "cpu":
        pytest.skip("the order of programs is a GPU's own")
    inputs = drawn(device)
    want = pooled_of(inputs, "max", size)
    launched = launch_pooled_backwards(monkeypatch)
    assert torch.equal(pooled_of(inputs, "max", size), want)
    assert launched


def launch_pooled_backwards(monkeypatch) -> list[int]:
    """Makes the interpreter run the last program first; a list of the launches' program counts."""
    from triton.runtime import interpreter

    counts = []

    def backwards(*bounds):
        steps = builtins.range(*bounds)
        if len(steps) > 1:
            counts.append(len(steps))
        return steps[::-1]

    monkeypatch.setattr(interpreter, "range", backwards, raising=False)
    return counts


def test_rows_and_blocks_past_2_to_the_31_lie_where_they_are(monkeypatch):
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("a GPU runs all of the programs, on memory that is there")
    from triton.runtime import interpreter

    heads, M, N, D = 2**11 + 1, 2**20, 1, 3

    def last(*bounds):
        """``range``, reduced to the last program for a grid."""
        steps = builtins.range(*bounds)
        return steps[-1:] if len(steps) > heads else steps

    random = torch.Generator().manual_seed(0)
    q, k = torch.randn(1, 1, 16, D, generator=random), torch.randn(1, 1, N, D, generator=random)

    def run(heads: int, M: int) -> torch.Tensor:
        """The last rows of the last head, whose LSE is 0."""
        lengths = (torch.full((1,), n, dtype=torch.int32) for n in (M, N))
        arguments = Arguments(*lengths, M + N, M + N, 0.25, resolve("16x16", q.dtype, 16))
        rows = q[:, :, -1:].expand(1, heads, M, D)
        lse = lazily((1, heads, M), dtype=torch.float32, device=q.device)
        lse[0, -1, -16:] = torch.arange(16)
        keys = k.expand(1, heads, N, D)
        return portable.launch_pooled(rows, keys, lse, arguments, "max", 1, 1)[0, -1, -16:].clone()

    want = run(1, 16)
    monkeypatch.setattr(interpreter, "range", last, raising=False)
    monkeypatch.setattr(allocation, "empty", lazily)
    assert heads * M > 2**31
    assert want.all()
    assert torch.equal(run(heads, M), want)


@pytest.mark.parametrize("dirt", [math.nan, math.inf, 3e38])
@pytest.mark.parametrize("pool", POOLS)
def test_padding_and_hidden_keys_change_no_bit(pool, dirt, device, poisoned):
    q, k, v = drawn(device, "fp32")
    mask = Mask(causal=True, seqlens_q=(20, 12), seqlens_k=(25, 20))
    want = pooled_of((q, k, v), pool, (6, 7), mask=mask)
    q[1, :, 12:], k[0, :, 25:], k[1, :, 20:] = dirt, dirt, dirt
    assert torch.equal(pooled_of((q, k, v), pool, (6, 7), mask=mask), want)
    # In entry 1 only the last row sees the last key.
    k[1, :, 19] = 3e38
    got = pooled_of((q, k, v), pool, (11, 7), mask=mask)[1, :, 0]
    k[1, :, 19] = 0.0
    assert torch.equal(got, pooled_of((q, k, v), pool, (11, 7), mask=mask)[1, :, 0])


@stored
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_strides_change_no_bit(layouts, dtype, device):
    got, want = (
        pooled_of(of_layouts(device, dtype, x, D=16)[:3], "mean", (2, 3))
        for x in (layouts, ("bhsd",) * 4)
    )
    assert torch.equal(got, want)


@pytest.mark.parametrize("per_head", [True, False])
def test_a_pooled_block_mask_equals_its_predicate(per_head, device):
    inputs = drawn(device)
    mask = BlockSparse(side=16, percent=50, seed=1, per_head=per_head, window_left=12)
    blocks = mask.blocks(2, 20, 37).to(device)
    # The map has unusual strides.
    blocks = blocks.mT.contiguous().mT
    given = {"block_mask": blocks, "block_size": 16, "window_size": (12, None)}
    for pool in POOLS:
        got, want = (pooled_of(inputs, pool, (6, 7), **x) for x in (given, {"mask": mask}))
        # On a GPU another predicate compiles to other code.
        assert torch.equal(got, want) or device == "cuda"
        assert worst_ratio(got, inputs, "fp64", pool, (6, 7), mask) <= 1


def test_a_predicate_is_evaluated_for_the_sizes_of_the_call(device):
    asked = []

    class Asked(PrefixLM):
        def native(self, *sizes):
            asked.append(sizes[:4])
            return super().native(*sizes)

    # Batch, heads, rows and keys have four different sizes.
    shapes = ((3, 2, 20, 8), (3, 1, 37, 8), (3, 1, 37, 6))
    inputs = [normal(0, x, shape).to(device) for x, shape in zip("qkv", shapes, strict=True)]
    pooled_of(inputs, "mean", (6, 7), mask=Asked(prefix=5))
    # The predicate is evaluated once for both kernels, or for each.
    assert set(asked) == {(3, 2, 20, 37)}


def test_the_whole_of_a_full_row_pools_to_one(device):
    inputs = drawn(device, "fp32")
    got = pooled_of(inputs, "mean", (1, 37)) * 37
    assert ((got - 1).abs() <= 2**-16).all()


def test_lse_may_have_any_strides(device):
    inputs = drawn(device, "bf16")
    call = {"causal": True, "config": CONFIG}
    _, lse = flash_attention(*inputs, return_lse=True, **call)
    apart = lse.mT.contiguous().mT
    assert not apart.is_contiguous()
    got, want = (
        pooled_attention_probs(*inputs[:2], x, pool="max", pool_size=(4, 4), **call)
        for x in (apart, lse)
    )
    assert torch.equal(got, want)


def test_lengths_in_a_tensor_are_clamped(device):
    inputs = drawn(device)
    given, meant = ((30, -7), (50, 7)), ((20, 0), (37, 7))
    tensors = [torch.tensor(x, dtype=torch.int32, device=device) for x in given]
    got, want = (
        pooled_of(inputs, "mean", (6, 5), seqlens_q=rows, seqlens_k=keys)
        for rows, keys in (tensors, meant)
    )
    assert torch.equal(got, want)


@pytest.mark.parametrize(("M", "N"), [(0, 37), (20, 0), (0, 0), (1, 1)])
def test_a_size_of_0_or_1_gives_all_the_blocks_that_there_are(M, N, device, poisoned):
    inputs = drawn(device, "fp32", M, N)
    got = pooled_of(inputs, "max", (7, 3))
    assert got.shape == (2, 2, -(-M // 7), -(-N // 3))
    assert ((got - 1).abs() <= 2**-20).all()


def test_a_scale_of_many_digits_keeps_them(device):
    inputs = drawn(device)
    scale = 0.30000000000000004
    got, other = (pooled_of(inputs, "max", (1, 1), sm_scale=x) for x in (scale, 0.3))
    assert not torch.equal(got, other)


def test_pooled_probabilities_are_constants(device):
    leaves = [x.requires_grad_() for x in drawn(device, "fp32")]
    out, lse = flash_attention(*leaves, return_lse=True, config=CONFIG)
    pooled = pooled_attention_probs(*leaves[:2], lse, pool="mean", pool_size=(4, 4), config=CONFIG)
    assert not pooled.requires_grad
    got = torch.autograd.grad((out * pooled.sum()).sum(), leaves)
    out = flash_attention(*leaves, config=CONFIG)
    assert all(map(torch.equal, got, torch.autograd.grad((out * pooled.sum()).sum(), leaves)))
    with pytest.raises(RuntimeError, match="does not require grad"):
        pooled.sum().backward()


def test_pooled_probabilities_under_autocast_equal_those_of_the_cast_tensors(device):
    inputs = drawn(device, "fp32")
    with torch.autocast(device_type=torch.device(device).type, dtype=torch.bfloat16):
        got = pooled_of(inputs, "mean", (4, 4))
    assert torch.equal(got, pooled_of([x.bfloat16() for x in inputs], "mean", (4, 4)))


@pytest.mark.parametrize(
    ("pool", "size", "error", "says"),
    [
        (None, (2, 2), TypeError, "pool is None; needs 'mean' or 'max'"),
        ("sum", (2, 2), ValueError, "pool is 'sum'; needs 'mean' or 'max'"),
        (True, (2, 2), TypeError, "pool is True; needs 'mean' or 'max'"),
        ("max", None, TypeError, "pool_size is None; needs a pair (rows, keys)"),
        ("max", 64, TypeError, "pool_size is 64; needs a pair (rows, keys)"),
        ("max", (4,), TypeError, "pool_size is (4,); needs a pair (rows, keys)"),
        ("max", (4, 2.0), TypeError, "pool_size holds 2.0; needs ints"),
        ("max", (True, 2), TypeError, "pool_size holds True; needs ints"),
        ("max", (4, 0), ValueError, "pool_size holds 0; needs ints >= 1"),
        ("mean", (-1, 4), ValueError, "pool_size holds -1; needs ints >= 1"),
    ],
)
def test_bad_arguments_are_refused_by_name(pool, size, error, says, device):
    with pytest.raises(error) as raised:
        pooled_of(drawn(device), pool, size)
    assert str(raised.value) == says


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        (lambda _: None, TypeError, "lse is NoneType; needs a torch.Tensor"),
        (lambda x: x[:1], ValueError, "lse has shape (1, 2, 20); needs (2, 2, 20)"),
        (lambda x: x.float(), ValueError, "lse has dtype torch.float32; needs torch.float64"),
        (lambda x: x.to("meta"), ValueError, "lse is on meta; needs the device of q, "),
    ],
)
def test_an_lse_of_another_call_is_refused_by_name(change, error, says, device):
    q, k, v = drawn(device)
    _, lse = flash_attention(q, k, v, return_lse=True, config=CONFIG)
    with pytest.raises(error) as raised:
        pooled_attention_probs(q, k, change(lse), pool="max", pool_size=(4, 4), config=CONFIG)
    assert str(raised.value).startswith(says)


def test_a_pool_size_may_be_a_list(device):
    inputs = drawn(device)
    sizes = ((3, 5), [3, 5])
    pairs, lists = (pooled_of(inputs, "max", size) for size in sizes)
    assert torch.equal(pairs, lists)


ASKED = {
    "causal": {"causal": True},
    "ints": {"seqlens_q": (5, 2), "seqlens_k": (0, 7)},
    "predicate": {"mask": PrefixLM(prefix=3, window_left=4)},
}


@pytest.mark.parametrize("arguments", ASKED.values(), ids=ASKED)
def test_the_operator_is_right(arguments, device):
    q, k, v = drawn(device, "fp32", M=5, N=7)
    given = {"mask": None, "causal": False, "window_size": (None, None), "sm_scale": None}
    given |= {"seqlens_q": None, "seqlens_k": None, "deterministic": True, "config": CONFIG}
    request = check(q, k, v, **{**given, **arguments})
    _, lse = operators.forward(q, k, v, *request)
    torch.library.opcheck(operators.pooled_scores, (q, k, lse, *request, "mean", 2, 3))
    with_gradients = (q.requires_grad_(), k.requires_grad_(), lse.requires_grad_())
    torch.library.opcheck(
        operators.pooled_scores, (*with_gradients, *request, "max", 2, 3),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )  # fmt: skip


def test_a_compiled_call_has_the_bits_of_an_eager_one(device):
    torch.compiler.reset()
    call = torch.compile(pooled_of, backend="aot_eager", fullgraph=True, dynamic=True)
    for M, N in ((20, 37), (21, 40)):
        leaves = [x.requires_grad_() for x in drawn(device, "fp32", M, N)]
        for pool in POOLS:
            got, want = (x(leaves, pool, (6, 5), causal=True) for x in (call, pooled_of))
            assert not got.requires_grad
            assert torch.equal(got, want)
