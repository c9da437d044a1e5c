"""The kernels for Hopper from their own sources, on a CPU: results, order of events, faults of it.

What a GPU does at some moment happens here as late, or in whatever order, it may.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

import fa_kernels
from fa_kernels.launch import hopper
from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.problem import Problem
from fa_verify.properties.subjects.subject import Subject
from fa_verify.properties.subjects.supported import problems_of
from fa_verify.subjects.emulation import emulate, texts_of
from fa_verify.subjects.ours import flash_attention
from fa_verify.verification import verify
from tests.mutation.hardware import HARDWARE
from tests.mutation.hopper import PROBLEMS
from tests.unit.fa_kernels.call.packed_calls import assert_equal_bits, in_a_row, one_by_one
from tests.unit.properties.problems.sampling import drawn

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="runs in the interpreter")

GUARANTEES = ("G1", "G2", "G3", "G4", "G5")
SEEDS = 4
# Tiles are 64 or 128 wide, and of either head_dim or of both.
HEAD_DIMS = (64, 128, 72)
DRAWN = 15


@pytest.fixture
def emulated(monkeypatch):
    """Lets Hopper's kernels, or what edits make of them, take the place of the portable ones."""

    def replace(*edits: tuple[str, str, str], **options: str) -> None:
        texts = texts_of(fa_kernels)
        for module, old, new in edits:
            assert texts[module].count(old) == 1, old
            texts[module] = texts[module].replace(old, new)
        emulate(fa_kernels, texts, **options, replace=monkeypatch.setattr)

    return replace


def checked(*asked: Problem, guarantees=GUARANTEES):
    return verify(flash_attention, problems=asked, guarantees=guarantees)


@pytest.mark.parametrize("asked", PROBLEMS.values(), ids=PROBLEMS)
def test_the_sources_hold_what_all_configurations_hold(asked, emulated):
    emulated()
    report = checked(asked)
    assert report, str(report)


@pytest.mark.parametrize(
    "name", ["two head_dims, narrow keys", "two head_dims, wide values", "padded"]
)
@pytest.mark.parametrize("config", ["default", "default-one_pass"])
def test_everything_is_written_and_nothing_else(name, config, emulated):
    emulated()
    report = checked(dataclasses.replace(PROBLEMS[name], config=config), guarantees=("G6",))
    assert report, str(report)


@pytest.mark.parametrize("asked", PROBLEMS.values(), ids=PROBLEMS)
def test_their_logic_is_right_in_float64(asked, emulated):
    emulated(accumulator="float64")
    report = checked(dataclasses.replace(asked, dtype="fp64"), guarantees=("G1", "G2"))
    assert report, str(report)


@pytest.mark.parametrize(("dtype", "config"), [("fp16", "default-one_pass"), ("bf16", "default")])
def test_drawn_problems_hold(dtype, config, emulated):
    emulated()
    strategy = problems_of(
        Subject.of(flash_attention, "ours"), dtype=dtype, configs=(config,), device="cpu",
        head_dims=HEAD_DIMS, tile=128, max_seqlen=300, max_cost=30,
    )  # fmt: skip
    report = checked(*drawn(strategy, DRAWN), guarantees=("G1", "G6"))
    assert report, str(report)


def test_two_passes_have_the_dk_and_dv_of_one(emulated):
    emulated()
    call = {"mask": Mask(window_left=70, window_right=3), "sm_scale": 0.1}
    one, two = (results(call | {"config": f"default{x}"}) for x in ("-one_pass", ""))
    assert all(map(torch.equal, one, two[:4]))


@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("backward", ["two_pass", "one_pass"])
@pytest.mark.parametrize("known", ["lengths", "longest", "nothing"])
def test_packed_sequences_have_the_bits_that_they_have_alone(D, backward, known, emulated):
    emulated()
    cu_q, cu_k = (0, 3, 293, 293, 363, 364), (0, 10, 310, 330, 397, 402)
    generator = torch.Generator().manual_seed(0)
    # Behind the last sequence there are rows of none.
    sizes = ((380, 4, D), (410, 2, D), (410, 2, D), (380, 4, D))
    inputs = [torch.randn(x, generator=generator).bfloat16() for x in sizes]
    for x, end in zip(inputs, (364, 402, 402, 364), strict=True):
        x[end:] = torch.nan
    options = {"causal": True, "backward": backward}
    want = one_by_one(inputs, cu_q, cu_k, **options)
    if known != "lengths":
        cu_q, cu_k = (torch.tensor(x, dtype=torch.int32) for x in (cu_q, cu_k))
    if known == "longest":
        options |= {"max_seqlen_q": 290, "max_seqlen_k": 300}
    got = in_a_row(inputs, cu_q, cu_k, **options)
    assert_equal_bits(got, want)


def results(call: dict[str, object]) -> tuple[torch.Tensor, ...]:
    """out, lse, dk, dv, and dq of two passes: those that are the same to the bit in any order."""
    generator = torch.Generator().manual_seed(0)
    call = {"sm_scale": 0.125, "mask": Mask(), **call}
    of_q, of_k = call.pop("shapes", ((2, 2, 150, 64), (2, 1, 200, 64)))
    q, k, v = (
        torch.randn(x, generator=generator).bfloat16().requires_grad_() for x in (of_q, of_k, of_k)
    )
    out, lse = flash_attention(q, k, v, **call)
    out.backward(q.detach())
    made = out, lse, k.grad, v.grad
    return made if call.get("config") == "default-one_pass" else (*made, q.grad)


@pytest.mark.parametrize("D", [64, 128])
def test_narrow_tiles_have_the_bits_of_wide_ones(D, emulated, monkeypatch):
    emulated()
    generator = torch.Generator().manual_seed(0)
    inputs = [
        torch.randn(1, 1, length, D, generator=generator).bfloat16() for length in (570, 200, 200)
    ]
    call = {"mask": Mask(), "sm_scale": 0.125}
    found = flash_attention(*inputs, **call)
    of = hopper.query_tiles
    asked = []

    def wide(*sizes):
        asked.append(sizes)
        return of(*sizes[:4], False)

    monkeypatch.setattr(hopper, "query_tiles", wide)
    wanted = flash_attention(*inputs, **call)
    assert of(*asked[0]) != wide(*asked[0])
    assert all(map(torch.equal, found, wanted))


@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("config", ["default", "default-one_pass"])
def test_tiles_that_are_shared_have_the_bits_of_those_that_are_not(
    D, config, emulated, monkeypatch
):
    emulated()
    call = {"config": config, "shapes": ((1, 2, 570, D), (1, 1, 700, D))}
    found = results(call)
    of, asked = hopper.tile_shares, []

    def alone(*sizes):
        asked.append(sizes)
        return 1, 1

    monkeypatch.setattr(hopper, "tile_shares", alone)
    wanted = results(call)
    assert all(of(*sizes)[1] > 1 for sizes in asked)
    assert len(asked) == (2 if config == "default" else 1)
    assert all(map(torch.equal, found, wanted))


@pytest.mark.parametrize("config", ["default", "default-one_pass"])
def test_no_order_of_events_changes_a_bit(config, emulated):
    call = {"mask": Mask(causal=True), "config": config}
    emulated()
    want = results(call)
    for seed in range(1, SEEDS):
        emulated(seed=str(seed))
        assert all(map(torch.equal, results(call), want))


# What is wrong: module, text, and what stands in its place.
FAULTS = {
    "queries are not waited for": (
        "hopper_forward", "        mbarrier.wait(q_full.index(consumer), rounds & 1)\n", "",
    ),
    "keys are not waited for": (
        "hopper_tiles",
        "    mbarrier.wait(full.index(i % STAGES), i // STAGES & 1)\n    columns", "    columns",
    ),
    "values are not waited for": (
        "hopper_tiles",
        "    mbarrier.wait(full.index(i % STAGES), i // STAGES & 1)\n    return", "    return",
    ),
    "queries are overwritten": (
        "hopper_forward",
        "            mbarrier.wait(q_free.index(consumer), rounds & 1 ^ 1)\n            _hand_over",
        "            _hand_over",
    ),
    "the last turn is overwritten": (
        "hopper_forward",
        "        mbarrier.wait(q_free.index(consumer), rounds & 1 ^ 1)\n        _hand_over(total",
        "        _hand_over(total",
    ),
    "queries are left before they are multiplied": (
        "hopper_forward",
        "        scores = start_scores(q, k_tiles, k_full, before, nothing)\n",
        "        mbarrier.arrive(q_free, count=1)\n"
        "        scores = start_scores(q, k_tiles, k_full, before, nothing)\n",
    ),
    "whose turn it is is not waited for": (
        "hopper_forward",
        "mbarrier.init(q_full.index(consumer), count=2)",
        "mbarrier.init(q_full.index(consumer), count=1)",
    ),
    "stages are counted anew with each turn": (
        "hopper_forward",
        "        before += tiles[3] - tiles[0]\n        rounds += 1\n        turn = following",
        "        rounds += 1\n        turn = following",
    ),
    "keys are overwritten": (
        "hopper_forward", "            mbarrier.wait(k_free.index(stage), phase)\n", "",
    ),
    "values are overwritten": (
        "hopper_forward", "            mbarrier.wait(v_free.index(stage), phase)\n", "",
    ),
    "values are left before they are multiplied": (
        "hopper_forward",
        "                scores, acc = warpgroup_mma_wait(0, deps=(scores, acc))\n"
        "                mbarrier.arrive(v_free.index(behind), count=1)\n",
        "                mbarrier.arrive(v_free.index(behind), count=1)\n"
        "                scores, acc = warpgroup_mma_wait(0, deps=(scores, acc))\n",
    ),
    "wide values are left before they are multiplied": (
        "hopper_forward",
        "                acc = warpgroup_mma_wait(0, deps=(acc,))\n"
        "                mbarrier.arrive(v_free.index(behind), count=1)\n",
        "                mbarrier.arrive(v_free.index(behind), count=1)\n"
        "                acc = warpgroup_mma_wait(0, deps=(acc,))\n",
    ),
    "values are cleared before they are there": (
        "hopper_forward",
        "            mbarrier.wait(v_full.index(i % STAGES), i // STAGES & 1)\n", "",
    ),
    "one consumer frees keys for another": (
        "hopper_forward",
        "mbarrier.init(k_free.index(stage), count=CONSUMERS)",
        "mbarrier.init(k_free.index(stage), count=CONSUMERS - 1)",
    ),
    "who passes keys by leaves them before they are there": (
        "hopper_forward",
        "        mbarrier.wait(k_full.index(stage), i // STAGES & 1)\n", "",
    ),
    "a stage never used is waited for": (
        "hopper_forward",
        "phase = i // STAGES & 1 ^ 1", "phase = i // STAGES & 1",
    ),
    "half a tile is expected": (
        "hopper_forward",
        "mbarrier.expect(k_full.index(stage), k_desc.block_type.nbytes)",
        "mbarrier.expect(k_full.index(stage), k_desc.block_type.nbytes // 2)",
    ),
    "what is cleared has no fence": (
        "hopper_tiles",
        "    tile.store(gl.where(kept[:, None], tile.load(WIDE), 0.0))\n    fence_async_shared()\n",
        "    tile.store(gl.where(kept[:, None], tile.load(WIDE), 0.0))\n",
    ),
    "queries and dout of dq are not waited for": (
        "hopper_dq", "        mbarrier.wait(rows_full.index(half), 0)\n", "",
    ),
    "keys of dq are overwritten": (
        "hopper_dq", "        mbarrier.wait(free.index(stage), i // STAGES & 1 ^ 1)\n", "",
    ),
    "keys of dq are left before they are multiplied": (
        "hopper_dq",
        "            dq = warpgroup_mma_wait(1, deps=(dq,))\n"
        "            mbarrier.arrive(free.index((i - 1) % STAGES), count=1)\n",
        "            mbarrier.arrive(free.index((i - 1) % STAGES), count=1)\n"
        "            dq = warpgroup_mma_wait(1, deps=(dq,))\n",
    ),
    "keys of dq are cleared before they are there": (
        "hopper_dq",
        "        mbarrier.wait(k_full.index(i % STAGES), i // STAGES & 1)\n        keys",
        "        keys",
    ),
    "one consumer frees keys of dq for both": (
        "hopper_dq",
        "mbarrier.init(free.index(stage), count=2)",
        "mbarrier.init(free.index(stage), count=1)",
    ),
    "scores of dq are not waited for": (
        "hopper_dq",
        "            scores = warpgroup_mma_wait(1, deps=(scores,))\n            p",
        "            scores = warpgroup_mma_wait(2, deps=(scores,))\n            p",
    ),
    "sums of dk and dv are not handed on": (
        "hopper_backward", "        announce_sums(flag)\n", "",
    ),
    "sums of dq are not handed on": ("hopper_dq", "        announce_sums(flag)\n", ""),
    "sums of dk and dv are not waited for": (
        "hopper_backward", "        wait_for_sums(flag)\n", "",
    ),
    "sums of dq are not waited for": ("hopper_dq", "        wait_for_sums(flag)\n", ""),
    "sums are handed on before they are written": (
        "hopper_backward",
        "        gl.store(handed_rows(handed_ptr, of_values, SHAPE, SUMS), dv)\n"
        "        announce_sums(flag)\n",
        "        announce_sums(flag)\n"
        "        gl.store(handed_rows(handed_ptr, of_values, SHAPE, SUMS), dv)\n",
    ),
    "sums are waited for, and not acquired": (
        "hopper_tiles", 'add(flag, 0, sem="acquire")', 'add(flag, 0, sem="relaxed")',
    ),
    "sums are announced, and not released": (
        "hopper_tiles", 'add(flag, 1, sem="release")', 'add(flag, 1, sem="relaxed")',
    ),
    "two programs have a turn": (
        "hopper_forward", "gl.atomic_add(counter_ptr, 1,", "gl.atomic_add(counter_ptr, 0,",
    ),
    "keys and values are not waited for": (
        "hopper_backward", "        mbarrier.wait(kv_full.index(0), 0)\n", "",
    ),
    "dout is not waited for": (
        "hopper_backward",
        "                mbarrier.wait(do_full.index(stage), i // STAGES & 1)\n", "",
    ),
    "the next queries are not waited for": (
        "hopper_backward",
        "                    mbarrier.wait(q_full.index(following), (i + 1) // STAGES & 1)\n",
        "                    offs_m += 0\n",
    ),
    "rows of lse are not counted": (
        "hopper_backward",
        "mbarrier.init(q_full.index(stage), count=2)",
        "mbarrier.init(q_full.index(stage), count=1)",
    ),
    "stages are overwritten": (
        "hopper_backward",
        "                mbarrier.wait(free.index(stage), i // STAGES & 1 ^ 1)\n", "",
    ),
    "a stage is left before it is multiplied": (
        "hopper_backward",
        "                dv, dk = warpgroup_mma_wait(2 if ONE_PASS else 0, deps=(dv, dk))\n"
        "                mbarrier.arrive(free.index(stage), count=1)\n",
        "                mbarrier.arrive(free.index(stage), count=1)\n"
        "                dv, dk = warpgroup_mma_wait(2 if ONE_PASS else 0, deps=(dv, dk))\n",
    ),
    "dk is read while it is multiplied": (
        "hopper_backward",
        "warpgroup_mma_wait(2 if ONE_PASS else 0, deps=(dv, dk))",
        "warpgroup_mma_wait(3 if ONE_PASS else 1, deps=(dv, dk))",
    ),
    "dS has no fence": (
        "hopper_backward",
        "                    fence_async_shared()\n"
        "                    mbarrier.arrive(ds_full.index(made), count=1)\n",
        "                    mbarrier.arrive(ds_full.index(made), count=1)\n",
    ),
    "dS of the other is not waited for": (
        "hopper_backward",
        "                    mbarrier.wait(ds_full.index(last_made), i // _BUFFERS & 1)\n", "",
    ),
    "the other's last dS is not waited for": (
        "hopper_backward",
        "            mbarrier.wait(ds_full.index(total % _BUFFERS), total // _BUFFERS & 1)\n", "",
    ),
    "dS has two buffers": (
        "hopper_backward",
        "_BUFFERS: gl.constexpr = gl.constexpr(3)", "_BUFFERS: gl.constexpr = gl.constexpr(2)",
    ),
    "keys are multiplied before the other has cleared them": (
        "hopper_backward",
        "                zero_rows(matrix(k_tiles, half), start_n + offs_wide < view[1], WIDE)\n"
        "            # As of the dS before the first: nobody multiplies the other's keys earlier.\n"
        "            mbarrier.arrive(ds_full.index(0), count=1)\n",
        "                mbarrier.arrive(ds_full.index(0), count=1)\n"
        "                zero_rows(matrix(k_tiles, half), start_n + offs_wide < view[1], WIDE)\n"
        "            else:\n                mbarrier.arrive(ds_full.index(0), count=1)\n",
    ),
    "dq is read while it is multiplied": (
        "hopper_backward",
        "dq = warpgroup_mma_wait(1, deps=(dq,))", "dq = warpgroup_mma_wait(2, deps=(dq,))",
    ),
}  # fmt: skip
_KEYS = Mask(seqlens_k=(150, 100))
SHOWN_BY = (
    dataclasses.replace(PROBLEMS["full"], N=700),
    dataclasses.replace(PROBLEMS["full"], M=300, N=1000, D=128, Dv=128, config="default"),
    dataclasses.replace(PROBLEMS["full"], B=2, M=400, N=150, mask=_KEYS, dirty="nan"),
    dataclasses.replace(PROBLEMS["full"], B=2, N=150, mask=_KEYS, dirty="nan", config="default"),
    # Programs share tiles.
    dataclasses.replace(PROBLEMS["full"], M=300, N=600, H=2, config="default"),
    # Programs take turns.
    dataclasses.replace(PROBLEMS["full"], H=8, Hk=8, M=70, config="default"),
)


def is_noticed(*edits, emulated) -> bool:
    """Whether some order of events shows what was edited."""
    for seed in range(SEEDS):
        emulated(*edits, seed=str(seed))
        for asked in SHOWN_BY:
            if not checked(asked, guarantees=("G1",)):
                return True
    return False


def test_nothing_is_noticed_where_nothing_is_wrong(emulated):
    assert not is_noticed(emulated=emulated)


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_what_is_not_waited_for_is_noticed(fault, emulated):
    assert is_noticed(fault, emulated=emulated)


@pytest.mark.parametrize(
    "chosen",
    [x for x in HARDWARE if x.mutant.name.startswith("hopper")],
    ids=lambda x: x.mutant.name,
)
def test_mutants_of_the_hardware_are_killed_here_too(chosen, emulated):
    emulated(*((Path(x.file).stem, x.old, x.new) for x in chosen.mutant.edits))
    for step in chosen.steps:
        # Of many heads few are enough, where few programs run at a time.
        heads = {name: min(getattr(step.problem, name), 8) for name in ("H", "Hk")}
        asked = dataclasses.replace(step.problem, device="cpu", **heads)
        if not checked(asked, guarantees=step.checks):
            return
    pytest.fail("nobody noticed")
