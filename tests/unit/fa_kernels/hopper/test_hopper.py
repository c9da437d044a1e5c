"""The choice of Hopper's kernels, which must change nothing but speed."""

from __future__ import annotations

import heapq
import math
import sys
from itertools import accumulate

import pytest
import torch

pytest.importorskip("triton")

from fa_kernels import Config, flash_attention, flash_attention_varlen
from fa_kernels.configs import Tile, resolve
from fa_kernels.kernels.common.tile_ranges import share_of, tile_of_head
from fa_kernels.launch import hopper, portable
from fa_kernels.runtime import allocation
from fa_verify.adapters.ours import flash_attention as ours
from fa_verify.oracles.bounds.error_model import judge
from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.masks.prefix_lm import PrefixLM
from fa_verify.oracles.outputs import Numerics
from fa_verify.oracles.problem import Problem
from fa_verify.oracles.reference.torch_reference import attention
from fa_verify.properties.guarantees.compare import ratios
from fa_verify.verification import verify
from tests.unit.fa_kernels.call.packed_calls import WILD, assert_equal_bits, in_a_row, one_by_one

CUDA = torch.device("cuda")
HERE = torch.cuda.is_available() and hopper.is_there(CUDA)
on_hopper = pytest.mark.skipif(not HERE, reason="needs a Hopper GPU, and compiled kernels")
SHAPE = (2, 4, 300, 128)


def tensors(shape=SHAPE, dtype=torch.bfloat16, heads=None):
    """Normal q, k, v; ``heads`` is the number of heads of k and v."""
    generator = torch.Generator("cuda").manual_seed(1)
    of_keys = (shape[0], heads or shape[1], *shape[2:])
    return [
        torch.randn(of, generator=generator, device="cuda").to(dtype)
        for of in (shape, of_keys, of_keys)
    ]


@pytest.fixture
def launches(monkeypatch):
    """Names of the passes that run on Hopper's kernels, in order."""
    seen: list[str] = []

    def counted(name, original):
        def launched(*args):
            # The launcher of the forward says whether it takes a call.
            taken = original(*args)
            if taken is not False:
                seen.append(name)
            return taken

        return launched

    for name in ("forward", "backward", "dq"):
        original = getattr(hopper, f"launch_hopper_{name}")
        monkeypatch.setattr(portable.hopper, f"launch_hopper_{name}", counted(name, original))
    return seen


def gradients(inputs, dout, **arguments):
    """dq, dk, dv."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    return torch.autograd.grad(flash_attention(*leaves, **arguments), leaves, dout)


def test_a_cpu_does_not_run_hoppers_kernels():
    assert not hopper.is_there(torch.device("cpu"))


@pytest.mark.skipif(HERE, reason="a Hopper GPU has them")
def test_hopper_as_a_config_says_why_its_kernels_are_absent(device):
    q = torch.zeros(1, 1, 16, 64, device=device).half()
    says = "config is 'hopper', but the kernels for Hopper are absent: "
    reason = f"q is on {device}; they need" if device == "cpu" else "compute capability"
    for _ in range(2):
        with pytest.raises(RuntimeError, match=says) as info:
            flash_attention(q, q, q, config="hopper")
        assert reason in str(info.value)
    assert torch.equal(flash_attention(q, q, q), q)


@on_hopper
def test_hopper_as_a_config_is_the_default_where_its_kernels_are(launches):
    q, k, v = tensors()
    wanted = flash_attention(q, k, v)
    assert torch.equal(flash_attention(q, k, v, config="hopper"), wanted)
    assert launches == ["forward", "forward"]


def test_a_part_of_gluon_that_triton_lacks_is_named(monkeypatch):
    monkeypatch.setattr(hopper, "forward_kernel", object.__new__(hopper.triton.JITFunction))
    for name in [x for x in sys.modules if x.startswith("fa_kernels.kernels.hopper.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "triton.experimental.gluon", None)
    kernels, reason = hopper._imported.__wrapped__()
    assert kernels is None
    assert reason.startswith(
        f"Triton {hopper.triton.__version__} lacks a part of Gluon that they need: "
    )
    assert "triton.experimental.gluon" in reason


@pytest.mark.parametrize(
    ("dtype", "D", "Dv", "taken"),
    [
        (torch.float16, 128, 128, True),
        (torch.bfloat16, 64, 128, True),
        (torch.bfloat16, 40, 40, True),
        (torch.float32, 128, 128, False),
        (torch.float64, 64, 64, False),
        (torch.float16, 32, 32, False),
        (torch.float16, 128, 32, False),
        (torch.float16, 136, 128, False),
        (torch.float16, 100, 128, False),
        (torch.float16, 128, 127, False),
    ],
)
def test_hopper_takes_shapes_whose_rows_tma_can_copy(dtype, D, Dv, taken):
    assert hopper.takes_shapes(dtype, D, Dv) is taken


_WHOLE = (2, 4, 300, 64)


@pytest.mark.parametrize(
    ("shape", "strides", "counted"),
    [
        (_WHOLE, (76800, 19200, 64, 1), True),
        # (B, N, H, D), and a part of packed q, k, v.
        (_WHOLE, (76800, 64, 256, 1), True),
        (_WHOLE, (230400, 64, 768, 1), True),
        # Expanded axes have a stride of 0.
        (_WHOLE, (0, 19200, 64, 1), True),
        (_WHOLE, (76800, 0, 64, 1), True),
        (_WHOLE, (0, 0, 0, 1), True),
        # Transposed; a single element; rows that start at unaligned addresses.
        (_WHOLE, (76800, 19200, 1, 300), False),
        (_WHOLE, (0, 0, 0, 0), False),
        (_WHOLE, (80400, 20100, 67, 1), False),
        (_WHOLE, (76800, 19201, 64, 1), False),
        (_WHOLE, (76801, 19200, 64, 1), False),
        # The stride of an axis of size 1 does not matter.
        ((1, 4, 300, 64), (3, 19200, 64, 1), True),
        ((2, 1, 300, 64), (19200, 5, 64, 1), True),
        ((2, 4, 1, 64), (256, 64, 7, 1), True),
    ],
)
def test_strides_that_tma_supports_need_no_copy(shape, strides, counted):
    found = hopper._counted(shape, strides, 2)
    assert (found is not None) is counted
    if found is not None:
        sizes, steps = found
        assert sizes == list(shape)
        assert all(step * 2 % 16 == 0 for step in steps[:3])
        assert steps[3] == 1
        for axis in range(3):
            assert sizes[axis] == 1 or steps[axis] == strides[axis]


@pytest.mark.parametrize("consumers", [2, 3])
@pytest.mark.parametrize("places", [4, 132])
def test_query_tiles_have_all_rows_once_and_take_no_more_rounds(consumers, places):
    for M in range(1, 2000, 37):
        blocks = -(-M // 64)
        for heads in (1, 2, 3, 16, 133):
            fewest, few_narrow = hopper.query_tiles(M, heads, consumers, places, False)
            assert fewest == -(-blocks // consumers)
            tiles, narrow = hopper.query_tiles(M, heads, consumers, places, True)
            assert -(-tiles * heads // places) == -(-fewest * heads // places)
            for each, less in ((fewest, few_narrow), (tiles, narrow)):
                assert 0 <= less <= each
                # The last tile has a row.
                assert 0 <= each * consumers - less - blocks < consumers - 1 + (less < each)


@pytest.mark.parametrize(
    ("of", "alike", "tiles"),
    [
        # 16 heads of 43 tiles take 6 rounds of 132 programs, and so do 49 tiles, 19 of them narrow.
        ((8192, 16, 3), True, (49, 19)),
        ((8192, 16, 3), False, (43, 1)),
        ((4321, 32, 2), True, (37, 6)),
        ((4096, 32, 2), False, (32, 0)),
        # One tile for each multiprocessor.
        ((512, 1, 3), True, (4, 4)),
    ],
)
def test_tiles_that_take_as_long_fill_the_last_round(of, alike, tiles):
    assert hopper.query_tiles(*of, 132, alike) == tiles


def longest_by_mean(M, heads, consumers, places, together):
    """The makespan of causal tiles that are taken one after another, by the mean of places.

    The cost of a tile is its key tiles and 1.5 more.
    """
    tiles, _ = hopper.query_tiles(M, heads, consumers, places, False)
    free, total = [0.0] * places, 0.0
    for program in range(tiles * heads):
        block, _ = tile_of_head.fn(program, tiles, heads, together)
        cost = 1.5 + math.ceil(min((tiles - block) * consumers * 64, M) / 128)
        heapq.heapreplace(free, free[0] + cost)
        total += cost
    return max(free) / (total / places)


@pytest.mark.parametrize(
    ("of", "limit"),
    [
        ((8192, 16, 3), 1.035),
        ((4096, 32, 2), 1.025),
        ((2048, 64, 3), 1.045),
        # In fewer than three rounds, more heads together end later.
        ((16384, 4, 3), 1.05),
        ((16384, 16, 2), 1.01),
    ],
)
def test_programs_of_a_causal_call_end_together(of, limit):
    programs = hopper.query_tiles(*of, 132, False)[0] * of[1]
    chosen = hopper.programs_together(programs, 132, False)
    found = {x: longest_by_mean(*of, 132, x) for x in (1, 256, 512)}
    assert found[chosen] == min(found[256], found[512])
    assert found[chosen] < limit
    assert found[1] > found[chosen]


def rounds(tiles, places):
    """The makespan of tiles of unit time on ``places`` multiprocessors, with shared tiles."""
    each, shares = hopper.tile_shares(tiles, places)
    free = [0.0] * places
    for program in range(tiles + each * (shares - 1)):
        _, begin, end = share_of.fn(program, tiles, each, shares)
        heapq.heapreplace(free, free[0] + (end - begin) / shares)
    return max(free)


@pytest.mark.parametrize("places", [4, 78, 114, 132])
def test_tiles_that_are_shared_take_little_more_than_their_share_of_places(places):
    for tiles in [*range(1, 3 * places, 7), 8 * places - 1, 8 * places + 1]:
        each, shares = hopper.tile_shares(tiles, places)
        # In any order of programs, at least one running program waits for none.
        assert each * (shares - 1) < min(places, tiles + 1)
        least = tiles / places
        took = rounds(tiles, places)
        assert took <= math.ceil(least)
        if least > 1 and places > 12:
            assert took < least + 0.25
    assert hopper.tile_shares(places - 1, places)[1] == 1
    assert hopper.tile_shares(2 * places, places)[1] == 1


@pytest.mark.parametrize("value", [None, 1, "yes"])
def test_a_config_refuses_values_that_are_not_bool(value):
    with pytest.raises(TypeError, match=f"hopper is {value!r}; needs a bool"):
        Config(hopper=value)


@pytest.mark.parametrize("kernel", ["forward", "dkdv", "dq", "one_pass"])
def test_a_configuration_with_a_tile_of_its_own_is_portable(kernel):
    assert resolve("default", torch.float16, 128).hopper
    assert resolve(Config(splits=2), torch.float16, 128).hopper
    assert not resolve("portable", torch.float16, 128).hopper
    assert not resolve(Config(**{kernel: Tile(64, 64)}), torch.float16, 128).hopper


@on_hopper
def test_only_supported_forwards_run_on_hoppers_kernels(launches):
    q, k, v = tensors()
    slopes = torch.ones(4, device="cuda")
    flash_attention(q, k, v)
    flash_attention(q, k, v, causal=True, seqlens_k=[300, 5])
    assert launches == ["forward"] * 2
    rows_first = [x[0].transpose(0, 1) for x in (q, k, v)]
    offsets = {"cu_seqlens_q": (0, 70, 300), "cu_seqlens_k": (0, 290, 300)}
    flash_attention_varlen(*rows_first, **offsets, sinks=slopes)
    assert launches == ["forward"] * 3
    flash_attention_varlen(*rows_first, **offsets, softcap=2.0)
    for nothing in ((0,), (0, 0, 0)):
        flash_attention_varlen(*rows_first, cu_seqlens_q=nothing, cu_seqlens_k=nothing)
    for beside in (
        {"config": "portable"}, {"config": "64x32"}, {"config": Config(splits=2)},
        {"softcap": 2.0}, {"alibi_slopes": slopes},
        {"bias": torch.zeros(1, 1, 300, 300, device="cuda", dtype=q.dtype)},
        {"mask": PrefixLM(prefix=20)},
    ):  # fmt: skip
        flash_attention(q, k, v, **beside)
    flash_attention(*(x.float() for x in (q, k, v)))
    flash_attention(q, k[:, :, :0], v[:, :, :0])
    assert launches == ["forward"] * 3


@on_hopper
@pytest.mark.parametrize("backward", ["two_pass", "one_pass"])
def test_only_supported_backwards_run_on_hoppers_kernels(backward, launches):
    q, k, v = tensors()
    passes = ["backward"] if backward == "one_pass" else ["backward", "dq"]
    gradients((q, k, v), q, deterministic=backward == "two_pass")
    assert launches == ["forward", *passes]
    gradients((q, k, v), q, deterministic=backward == "two_pass", config=Config(splits=2))
    assert launches == ["forward", *passes, *passes]
    for beside in (
        {"config": "portable"}, {"config": Config(dq=Tile(64, 64))}, {"softcap": 2.0},
        {"mask": PrefixLM(prefix=20)},
    ):  # fmt: skip
        gradients((q, k, v), q, deterministic=backward == "two_pass", **beside)
    leaf = q.clone().requires_grad_()
    flash_attention(leaf, k, v).backward(q)
    assert launches == ["forward", *passes, *passes, "forward", "dq"]


@on_hopper
@pytest.mark.parametrize("D", [64, 128])
def test_dk_and_dv_of_one_pass_are_those_of_two_and_dq_is_within_its_bound_every_time(D):
    inputs, mask = tensors((2, 8, 1000, D), heads=2, dtype=torch.float16), Mask(causal=True)
    dout = inputs[0]
    call = {"mask": mask, "sm_scale": D**-0.5}
    want = attention(*inputs, dout, **call).dq
    bound = judge(*inputs, dout, **call, in_dtype="fp16", numerics=Numerics()).bound.dq
    wanted = gradients(inputs, dout, mask=mask)
    for _ in range(50):
        for backward in ("one_pass", "two_pass"):
            dq, dk, dv = gradients(inputs, dout, mask=mask, deterministic=backward == "two_pass")
            assert torch.equal(dk, wanted[1])
            assert torch.equal(dv, wanted[2])
            assert float(ratios(dq, want, bound).amax()) <= 1


@on_hopper
@pytest.mark.parametrize(("D", "Dv"), [(64, 128), (64, 72), (40, 128), (48, 104), (128, 64)])
@pytest.mark.parametrize("config", ["default", "default-one_pass"])
def test_two_head_dims_are_right_and_nothing_else_is_written(config, D, Dv):
    asked = Problem(B=2, H=2, M=150, N=200, D=D, Dv=Dv, dtype="bf16", config=config, device="cuda")
    report = verify(ours, problems=[asked], guarantees=("G1", "G6"))
    assert report, str(report)


@on_hopper
def test_expanded_tensors_are_not_copied(launches, monkeypatch):
    q, k, v = tensors((2, 4, 200, 64))
    expanded = [k[:, :1].expand_as(k), v[:1].expand_as(v)]
    wanted = flash_attention(q, *(x.contiguous() for x in expanded), causal=True)
    sizes = []
    original = allocation.empty
    monkeypatch.setattr(
        allocation, "empty", lambda shape, **of: (sizes.append(shape), original(shape, **of))[1]
    )
    assert torch.equal(flash_attention(q, *expanded, causal=True), wanted)
    assert sizes == [(2, 4, 200, 64), (2, 4, 200)]
    assert launches == ["forward"] * 2


@on_hopper
@pytest.mark.parametrize("D", [40, 64, 96, 128])
def test_strides_that_cannot_be_counted_change_no_bit(D, launches):
    q, k, v = tensors((2, 4, 200, D), heads=2)
    wanted = flash_attention(q, k, v, causal=True, return_lse=True)
    odd = [
        torch.empty(*x.shape[:3], D + 3, device="cuda", dtype=x.dtype)[..., :D].copy_(x)
        for x in (q, k, v)
    ]
    shifted = [
        torch.empty(x.numel() + 1, device="cuda", dtype=x.dtype)[1:].view(x.shape).copy_(x)
        for x in (q, k, v)
    ]
    turned = [x.mT.contiguous().mT for x in (q, k, v)]
    for given in (odd, shifted, turned):
        found = flash_attention(*given, causal=True, return_lse=True)
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert launches == ["forward"] * 4


@on_hopper
@pytest.mark.parametrize("D", [64, 128])
def test_programs_that_take_turns_have_the_bits_of_those_that_do_not(D, monkeypatch):
    q, k, v = tensors((3, 80, 300, D), heads=40)
    call = {"causal": True, "seqlens_q": [300, 5, 200], "seqlens_k": [280, 300, 0]}
    found = [flash_attention(q, k, v, return_lse=True, **call) for _ in range(20)]
    assert q.shape[0] * q.shape[1] > hopper.processors(q.device)
    monkeypatch.setattr(hopper, "processors", lambda _device: 2**31)
    wanted = flash_attention(q, k, v, return_lse=True, **call)
    for each in found:
        assert all(torch.equal(a, b) for a, b in zip(each, wanted, strict=True))


@on_hopper
def test_padding_never_enters_a_sum(launches):
    q, k, v = tensors()
    lengths = {"seqlens_q": [300, 131], "seqlens_k": [129, 7]}
    wanted = flash_attention(q, k, v, return_lse=True, **lengths)
    for x, of in ((q, "seqlens_q"), (k, "seqlens_k"), (v, "seqlens_k")):
        for b, length in enumerate(lengths[of]):
            x[b, :, length:] = float("nan")
    found = flash_attention(q, k, v, return_lse=True, **lengths)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert launches == ["forward"] * 2


def packed(rows, keys, D):
    """q, k, v, dout of 4 heads and 2 kv heads."""
    q, k, v = (x[0] for x in tensors((1, max(rows, keys), 6, D)))
    return q[:rows, :4], k[:keys, :2], v[:keys, 4:], q.flip(0)[:rows, 2:]


@on_hopper
@pytest.mark.parametrize("D", [40, 64, 128])
@pytest.mark.parametrize("backward", ["two_pass", "one_pass"])
@pytest.mark.parametrize("known", ["lengths", "longest", "nothing"])
def test_packed_sequences_have_the_bits_that_they_have_alone(D, backward, known, launches):
    lengths_q, lengths_k = (3, 700, 0, 129, 1, *[5] * 40), (10, 650, 20, 128, 0, *[7] * 40)
    cu_q, cu_k = (tuple(accumulate(x, initial=2)) for x in (lengths_q, lengths_k))
    inputs = [x.clone() for x in packed(cu_q[-1] + 20, cu_k[-1] + 20, D)]
    for x, end in zip(inputs, (cu_q[-1], cu_k[-1], cu_k[-1], cu_q[-1]), strict=True):
        x[:2] = x[end:] = torch.nan
    options = {"causal": True, "deterministic": backward == "two_pass"}
    want = one_by_one(inputs, cu_q, cu_k, **options)
    if known != "lengths":
        cu_q, cu_k = (torch.tensor(x, dtype=torch.int32, device="cuda") for x in (cu_q, cu_k))
    if known == "longest":
        options |= {"max_seqlen_q": 700, "max_seqlen_k": 700}
    launches.clear()
    for _ in range(5):
        got = in_a_row(inputs, cu_q, cu_k, **options)
        if backward == "one_pass":
            # Atomics sum in a random order; the conformance tests compare dq with its bound.
            assert got[2].isfinite().all()
            got[2] = want[2]
        assert_equal_bits(got, want)
    passes = ["backward"] if backward == "one_pass" else ["backward", "dq"]
    assert launches == ["forward", *passes] * 5


@on_hopper
@pytest.mark.parametrize("backward", ["two_pass", "one_pass"])
@pytest.mark.parametrize(("cu_q", "cu_k"), WILD.values(), ids=WILD)
def test_wild_offsets_reach_nothing_outside(cu_q, cu_k, backward):
    inputs = packed(62, 83, 64)
    around = [torch.full((x.shape[0] + 600, *x.shape[1:]), torch.nan).to(x) for x in inputs]
    for wide, x in zip(around, inputs, strict=True):
        wide[300:-300] = x
    tensors = [torch.tensor(x, dtype=torch.int32, device="cuda") for x in (cu_q, cu_k)]
    for longest in ({}, {"max_seqlen_q": 64, "max_seqlen_k": 48}):
        options = {"causal": True, "deterministic": backward == "two_pass", **longest}
        got = in_a_row([x[300:-300] for x in around], *tensors, **options)
        assert not any(x.isnan().any() for x in got)


@on_hopper
@pytest.mark.parametrize("D", [40, 128])
def test_strides_that_cannot_be_counted_change_no_bit_of_a_gradient(D, launches):
    inputs = tensors((2, 4, 200, D), heads=2)
    dout = tensors((2, 4, 200, D))[0]
    wanted = gradients(inputs, dout, causal=True)
    turned = [x.mT.contiguous().mT for x in (*inputs, dout)]
    found = gradients(turned[:3], turned[3], causal=True)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    of_a_sum = torch.ones((), device="cuda", dtype=dout.dtype).expand(dout.shape)
    wanted = gradients(inputs, of_a_sum.contiguous(), causal=True)
    found = gradients(inputs, of_a_sum, causal=True)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert launches == ["forward", "backward", "dq"] * 4


@on_hopper
def test_the_same_call_gives_the_same_bits_a_hundred_times():
    q, k, v = tensors((2, 8, 1000, 64), dtype=torch.float16)
    wanted = flash_attention(q, k, v, causal=True, return_lse=True)
    for _ in range(100):
        found = flash_attention(q, k, v, causal=True, return_lse=True)
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@on_hopper
@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("lengths", [{}, {"seqlens_q": [700, 131], "seqlens_k": [129, 0]}])
def test_tiles_that_are_shared_have_the_bits_of_those_that_are_not(D, lengths, monkeypatch):
    inputs = tensors((2, 4, 700, D), heads=2)
    dout = tensors((2, 4, 700, D))[0]
    monkeypatch.setattr(hopper, "tile_shares", lambda *_: (1, 1))
    wanted = gradients(inputs, dout, **lengths)
    # All programs run at once, so that a program that waits for a share cannot starve.
    for each, shares in ((1, 2), (8, 2), (3, 4), (2, 7)):
        monkeypatch.setattr(hopper, "tile_shares", lambda *_, found=(each, shares): found)
        for _ in range(10):
            found = gradients(inputs, dout, **lengths)
            assert all(map(torch.equal, found, wanted))
            assert all(
                map(
                    torch.equal,
                    gradients(inputs, dout, deterministic=False, **lengths)[1:],
                    wanted[1:],
                )
            )
