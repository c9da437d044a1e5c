"""Hopper's kernels emulated on a CPU: results, independence of the order of events, faults.

The emulation delays asynchronous events, or reorders them, as far as the semantics allow.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import fa_kernels
from fa_kernels.launch import hopper
from fa_verify.adapters.ours import flash_attention
from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.outputs import OUTPUTS, Numerics
from fa_verify.oracles.problem import Problem
from fa_verify.properties.kernels.loading import load
from fa_verify.properties.kernels.subject import Subject
from fa_verify.properties.kernels.supported import problems_of
from fa_verify.properties.running.trial import PlannedRun, SubjectError, plan_run
from fa_verify.verification import verify
from tests.altered.emulated import spec_of_order
from tests.altered.emulation import emulate, texts_of
from tests.mutation.catalogue.hardware import HARDWARE
from tests.mutation.judging.hopper import PROBLEMS
from tests.unit.fa_kernels.call.packed_calls import assert_equal_bits, in_a_row, one_by_one
from tests.unit.properties.problems.sampling import drawn

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="runs in the interpreter")

GUARANTEES = ("G1", "G2", "G3", "G4", "G5")
SEEDS = 4
# Tiles are 64 or 128 wide, for either head_dim or both.
HEAD_DIMS = (64, 128, 72)
DRAWN = 15
# The value of --kernel for the emulation that calls run.
EMULATION: dict[str, str] = {}


@pytest.fixture
def emulated(monkeypatch):
    """Replaces the portable kernels by Hopper's, with edits if given, in emulation."""

    def replace(*edits: tuple[str, str, str], **options: Any) -> None:
        texts = texts_of(fa_kernels)
        for module, old, new in edits:
            assert texts[module].count(old) == 1, old
            texts[module] = texts[module].replace(old, new)
        emulate(fa_kernels, texts, **options, replace=monkeypatch.setattr)
        # Its source makes findings print a line that replays them in this emulation.
        monkeypatch.setitem(EMULATION, "spec", spec_of_order(**options))

    return replace


def checked(*asked: Problem, guarantees=GUARANTEES):
    subject = dataclasses.replace(Subject.of(flash_attention, "emulated"), source=EMULATION["spec"])
    return verify(subject, problems=asked, guarantees=guarantees)


def test_a_finding_of_the_emulation_replays_in_the_emulation(emulated):
    emulated(("pipeline", "    thread_barrier()\n    gl.atomic_add", "    gl.atomic_add"))
    report = checked(SHARED, guarantees=("G1",))
    assert "has no thread barrier between a store to global memory and the announcement" in str(
        report
    )
    spec = "tests.altered.emulated:order_0"
    assert f"replay: pytest --fa-kernel={spec} --fa-replay='{SHARED.to_json()}'" in str(report)
    replayed = load(spec)
    assert verify(replayed, problems=[SHARED], guarantees=("G1",))
    tiles = replayed.tiles(SHARED)
    assert tiles == hopper.forward_tile(SHARED.Dv) != portable_tiles(SHARED)


@pytest.mark.parametrize(
    ("options", "name"),
    [({"accumulator": "float64"}, "order_0_float64"), ({"seed": "2"}, "order_2")],
)
def test_a_finding_replays_with_its_accumulator_and_order(options, name, emulated):
    emulated(
        ("pipeline", "    thread_barrier()\n    gl.atomic_add", "    gl.atomic_add"), **options
    )
    dtype = "fp64" if "accumulator" in options else SHARED.dtype
    asked = dataclasses.replace(SHARED, dtype=dtype)
    report = checked(asked, guarantees=("G1",))
    spec = f"tests.altered.emulated:{name}"
    assert f"replay: pytest --fa-kernel={spec} --fa-replay='{asked.to_json()}'" in str(report)
    # Kernels that do not take the dtype would leave the problem to the portable ones.
    tiles = load(spec).tiles(asked)
    assert tiles == hopper.forward_tile(asked.Dv) != portable_tiles(asked)


def portable_tiles(asked: Problem) -> tuple[int, int]:
    return flash_attention.tiles(dataclasses.replace(asked, config="portable"))


@pytest.mark.parametrize("asked", PROBLEMS.values(), ids=PROBLEMS)
def test_the_sources_hold_what_all_configurations_hold(asked, emulated):
    emulated()
    report = checked(asked)
    assert report, str(report)


@pytest.mark.parametrize(
    "name", ["two head_dims, narrow keys", "two head_dims, wide values", "padded"]
)
@pytest.mark.parametrize("config", ["default", "default-one_pass"])
def test_hoppers_kernels_write_every_element_and_nothing_else(name, config, emulated):
    emulated()
    report = checked(dataclasses.replace(PROBLEMS[name], config=config), guarantees=("G6",))
    assert report, str(report)


@pytest.mark.parametrize("asked", PROBLEMS.values(), ids=PROBLEMS)
def test_hoppers_kernels_have_right_logic_in_float64(asked, emulated):
    emulated(accumulator="float64")
    report = checked(dataclasses.replace(asked, dtype="fp64"), guarantees=("G1", "G2"))
    assert report, str(report)


@pytest.mark.parametrize(("dtype", "config"), [("fp16", "default-one_pass"), ("bf16", "default")])
def test_drawn_problems_hold_on_hoppers_kernels(dtype, config, emulated):
    emulated()
    strategy = problems_of(
        Subject.of(flash_attention, "ours"), dtype=dtype, configs=(config,), device="cpu",
        head_dims=HEAD_DIMS, tile=128, max_seqlen=300, max_cost=30,
    )  # fmt: skip
    report = checked(*drawn(strategy, DRAWN), guarantees=("G1", "G6"))
    assert report, str(report)


def test_two_passes_equal_one_pass_bitwise_but_for_dq(emulated):
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
    # Rows of no sequence follow the last sequence.
    sizes = ((380, 4, D), (410, 2, D), (410, 2, D), (380, 4, D))
    inputs = [torch.randn(x, generator=generator).bfloat16() for x in sizes]
    for x, end in zip(inputs, (364, 402, 402, 364), strict=True):
        x[end:] = torch.nan
    options = {"causal": True, "deterministic": backward == "two_pass"}
    want = one_by_one(inputs, cu_q, cu_k, **options)
    if known != "lengths":
        cu_q, cu_k = (torch.tensor(x, dtype=torch.int32) for x in (cu_q, cu_k))
    if known == "longest":
        options |= {"max_seqlen_q": 290, "max_seqlen_k": 300}
    got = in_a_row(inputs, cu_q, cu_k, **options)
    assert_equal_bits(got, want)


def results(call: dict[str, object]) -> tuple[torch.Tensor, ...]:
    """out, lse, dk, dv, and dq of two passes: the outputs whose bits do not depend on the order."""
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


# (module, text, replacement) of each fault.
FAULTS = {
    "queries are not waited for": (
        "forward", "        mbarrier.wait(shared.q_full.index(consumer), rounds & 1)\n", "",
    ),
    "keys and values are not waited for in products": (
        "pipeline",
        "    wait_full(pipeline, i)\n    columns", "    columns",
    ),
    "keys and values are not waited for in sums": (
        "pipeline", "    wait_full(pipeline, i)\n    return", "    return",
    ),
    "queries are overwritten": (
        "forward",
        "            mbarrier.wait(shared.q_free.index(consumer), rounds & 1 ^ 1)\n"
        "            _publish", "            _publish",
    ),
    "the last work-tile index is overwritten": (
        "forward",
        "        mbarrier.wait(shared.q_free.index(consumer), rounds & 1 ^ 1)\n"
        "        _publish(total", "        _publish(total",
    ),
    "queries are left before they are multiplied": (
        "forward",
        "        state = _first_tile(q, shared,",
        "        mbarrier.arrive(shared.q_free.index(consumer), count=1)\n"
        "        state = _first_tile(q, shared,",
    ),
    "the work-tile index is not waited for": (
        "forward",
        "mbarrier.init(q_full.index(consumer), count=2)",
        "mbarrier.init(q_full.index(consumer), count=1)",
    ),
    "stages are counted anew with each work tile": (
        "forward",
        "        before += tile.tiles.hi - tile.tiles.lo\n        rounds += 1\n"
        "        following = total",
        "        rounds += 1\n        following = total",
    ),
    "keys are overwritten": (
        "forward", "            wait_free(shared.k_pipe, i)\n", "",
    ),
    "values are overwritten": (
        "forward", "            wait_free(shared.v_pipe, i)\n", "",
    ),
    "values are left before they are multiplied": (
        "forward",
        "        scores, acc = warpgroup_mma_wait(0, deps=(scores, acc))\n"
        "        release(values, i - 1)\n",
        "        release(values, i - 1)\n"
        "        scores, acc = warpgroup_mma_wait(0, deps=(scores, acc))\n",
    ),
    "wide values are left before they are multiplied": (
        "forward",
        "        acc = warpgroup_mma_wait(0, deps=(acc,))\n        release(values, i - 1)\n",
        "        release(values, i - 1)\n        acc = warpgroup_mma_wait(0, deps=(acc,))\n",
    ),
    "values are cleared before they are there": (
        "forward", "        wait_full(values, i)\n        offs_n", "        offs_n",
    ),
    "one consumer frees keys for another": (
        "forward",
        "mbarrier.init(k_free.index(stage), count=CONSUMERS)",
        "mbarrier.init(k_free.index(stage), count=CONSUMERS - 1)",
    ),
    "a consumer without rows leaves keys before they are there": (
        "forward", "        wait_full(shared.k_pipe, i)\n", "",
    ),
    "a stage never used is waited for": (
        "pipeline", "phase_of(pipeline, i) ^ 1)", "phase_of(pipeline, i))",
    ),
    "half a tile is expected": (
        "pipeline",
        "mbarrier.expect(full, desc.block_type.nbytes)",
        "mbarrier.expect(full, desc.block_type.nbytes // 2)",
    ),
    "what is cleared has no fence": (
        "pipeline",
        "    tile.store(gl.where(kept[:, None], tile.load(WIDE), 0.0))\n    fence_async_shared()\n",
        "    tile.store(gl.where(kept[:, None], tile.load(WIDE), 0.0))\n",
    ),
    "queries and dout of dq are not waited for": (
        "dq", "    mbarrier.wait(shared.rows_full.index(half), 0)\n", "",
    ),
    "keys of dq are overwritten": ("dq", "        wait_free(shared.k_pipe, i)\n", ""),
    "keys of dq are left before they are multiplied": (
        "dq",
        "        dq = warpgroup_mma_wait(1, deps=(dq,))\n        release(keys, i - 1)\n",
        "        release(keys, i - 1)\n        dq = warpgroup_mma_wait(1, deps=(dq,))\n",
    ),
    "keys of dq are cleared before they are there": (
        "dq", "        wait_full(keys, i)\n        offs_n", "        offs_n",
    ),
    "one consumer frees keys of dq for both": (
        "dq",
        "mbarrier.init(free.index(stage), count=2)",
        "mbarrier.init(free.index(stage), count=1)",
    ),
    "scores of dq are not waited for": (
        "dq",
        "        scores = warpgroup_mma_wait(1, deps=(scores,))\n        p",
        "        scores = warpgroup_mma_wait(2, deps=(scores,))\n        p",
    ),
    "sums of dk and dv are not signalled": ("backward", "        signal(dk_sums)\n", ""),
    "sums of dq are not signalled": ("dq", "        signal(sums)\n", ""),
    "sums of dk and dv are not waited for": (
        "backward", "        wait_for_signal(dk_sums)\n", "",
    ),
    "sums of dq are not waited for": ("dq", "        wait_for_signal(sums)\n", ""),
    "sums are signalled before they are written": (
        "backward",
        "        gl.store(partial_rows(dv_sums, SHAPE, SUMS), state.dv)\n"
        "        signal(dk_sums)\n",
        "        signal(dk_sums)\n"
        "        gl.store(partial_rows(dv_sums, SHAPE, SUMS), state.dv)\n",
    ),
    "sums are signalled before all warps have written them": (
        "pipeline", "    thread_barrier()\n    gl.atomic_add", "    gl.atomic_add",
    ),
    "the work-tile index is announced before it is written": (
        "forward",
        "    thread_barrier()\n    mbarrier.arrive(barrier, count=1)\n",
        "    mbarrier.arrive(barrier, count=1)\n",
    ),
    "a row of lse is announced before all lanes have written it": (
        "backward",
        "    thread_barrier()\n    mbarrier.arrive(barrier, count=1)\n",
        "    mbarrier.arrive(barrier, count=1)\n",
    ),
    "the signal is waited for, and not acquired": (
        "pipeline",
        'add(sums.signal_ptr, 0, sem="acquire")', 'add(sums.signal_ptr, 0, sem="relaxed")',
    ),
    "the signal is not released": (
        "pipeline",
        'add(sums.signal_ptr, 1, sem="release")', 'add(sums.signal_ptr, 1, sem="relaxed")',
    ),
    "partial sums of dv are read before the signal": (
        "backward",
        "        wait_for_signal(dk_sums)\n"
        "        dk = gl.load(partial_rows(dk_sums, SHAPE, SUMS))\n"
        "        dv = gl.load(partial_rows(dv_sums, SHAPE, SUMS))\n",
        "        dv = gl.load(partial_rows(dv_sums, SHAPE, SUMS))\n"
        "        wait_for_signal(dk_sums)\n"
        "        dk = gl.load(partial_rows(dk_sums, SHAPE, SUMS))\n",
    ),
    "one signal serves both consumers": (
        "pipeline", "signal_ptr = sums.signal_ptr + consumer\n", "signal_ptr = sums.signal_ptr\n",
    ),
    "two programs have a work tile": (
        "forward", "gl.atomic_add(counter_ptr, 1,", "gl.atomic_add(counter_ptr, 0,",
    ),
    "keys and values are not waited for": (
        "backward", "    mbarrier.wait(shared.kv_full.index(0), 0)\n", "",
    ),
    "dout is not waited for": (
        "backward", "    wait_full(shared.do_pipe, step.i)\n", "",
    ),
    "the next queries are not waited for": (
        "backward",
        "        wait_full(shared.q_pipe, step.i + 1)\n", "        BLOCK_M + 0\n",
    ),
    "rows of lse are not counted": (
        "backward",
        "mbarrier.init(q_full.index(stage), count=2)",
        "mbarrier.init(q_full.index(stage), count=1)",
    ),
    "stages are overwritten": ("backward", "    wait_free(q_pipe, i)\n", ""),
    "a stage is left before it is multiplied": (
        "backward",
        "    dv, dk = warpgroup_mma_wait(2 if ONE_PASS else 0, deps=(dv, dk))\n"
        "    release(shared.q_pipe, step.i)\n",
        "    release(shared.q_pipe, step.i)\n"
        "    dv, dk = warpgroup_mma_wait(2 if ONE_PASS else 0, deps=(dv, dk))\n",
    ),
    "dk is read while it is multiplied": (
        "backward",
        "warpgroup_mma_wait(2 if ONE_PASS else 0, deps=(dv, dk))",
        "warpgroup_mma_wait(3 if ONE_PASS else 1, deps=(dv, dk))",
    ),
    "dS has no fence": (
        "backward",
        "    fence_async_shared()\n    mbarrier.arrive(shared.ds_full.index(made), count=1)\n",
        "    mbarrier.arrive(shared.ds_full.index(made), count=1)\n",
    ),
    "dS of the other is not waited for": (
        "backward",
        "    mbarrier.wait(shared.ds_full.index(last_made), i // _BUFFERS & 1)\n", "",
    ),
    "the other's last dS is not waited for": (
        "backward",
        "    mbarrier.wait(shared.ds_full.index(total % _BUFFERS), total // _BUFFERS & 1)\n", "",
    ),
    "dS has two buffers": (
        "backward",
        "_BUFFERS: gl.constexpr = gl.constexpr(3)", "_BUFFERS: gl.constexpr = gl.constexpr(2)",
    ),
    "keys are multiplied before the other has cleared them": (
        "backward",
        "            zero_rows(matrix(shared.k_tiles, half), "
        "start_n + offs.wide < mask.seqlen_k, WIDE)\n"
        "        # Stands for the dS before the first: no consumer multiplies the other's keys "
        "before this.\n"
        "        mbarrier.arrive(shared.ds_full.index(0), count=1)\n",
        "            mbarrier.arrive(shared.ds_full.index(0), count=1)\n"
        "            zero_rows(matrix(shared.k_tiles, half), "
        "start_n + offs.wide < mask.seqlen_k, WIDE)\n"
        "        else:\n            mbarrier.arrive(shared.ds_full.index(0), count=1)\n",
    ),
    "dq is read while it is multiplied": (
        "backward",
        "        dq = warpgroup_mma_wait(1, deps=(dq,))\n        if step.i",
        "        dq = warpgroup_mma_wait(2, deps=(dq,))\n        if step.i",
    ),
}  # fmt: skip
_KEYS = Mask(seqlens_k=(150, 100))
# Programs share tiles.
SHARED = dataclasses.replace(PROBLEMS["full"], M=300, N=600, H=2, config="default")
SHOWN_BY = (
    dataclasses.replace(PROBLEMS["full"], N=700),
    dataclasses.replace(PROBLEMS["full"], M=300, N=1000, D=128, Dv=128, config="default"),
    dataclasses.replace(PROBLEMS["full"], B=2, M=400, N=150, mask=_KEYS, dirty="nan"),
    dataclasses.replace(PROBLEMS["full"], B=2, N=150, mask=_KEYS, dirty="nan", config="default"),
    SHARED,
    # Programs take turns.
    dataclasses.replace(PROBLEMS["full"], H=8, Hk=8, M=70, config="default"),
)


# Bounds and references, which no order of events changes.
_PLANNED: dict[tuple[Problem, Numerics], PlannedRun | None] = {}


def errs(asked: Problem) -> bool:
    """Whether the emulation ends with an error, or an output lies outside the bound."""
    subject = Subject.of(flash_attention, "emulated")
    key = asked, subject.numerics_of(asked)
    if key not in _PLANNED:
        _PLANNED[key] = plan_run(subject, asked)
    try:
        return not _PLANNED[key].run(subject).inside(*OUTPUTS)
    except SubjectError:
        return True


def is_noticed(*edits, emulated) -> bool:
    """Whether some order of events detects an edit."""
    for seed in range(SEEDS):
        emulated(*edits, seed=str(seed))
        if any(map(errs, SHOWN_BY)):
            return True
    return False


# A program waits for the sums of a later one.
LATE_FIRST = (
    "pipeline", "share_of(program, tiles,", "share_of(programs - 1 - program, tiles,",
)  # fmt: skip


@pytest.mark.parametrize("config", ["default", "default-one_pass"])
@pytest.mark.parametrize("places", [1, 2])
def test_programs_end_where_other_kernels_take_most_processors(places, config, emulated):
    emulated(places=places)
    asked = dataclasses.replace(SHARED, config=config)
    report = checked(asked, guarantees=("G1",))
    assert report, str(report)
    emulated(LATE_FIRST, places=places)
    assert "waits for memory that no partition writes" in str(checked(asked, guarantees=("G1",)))


def test_unmodified_kernels_raise_no_alarm(emulated):
    assert not is_noticed(emulated=emulated)
    # The last order is still in place.
    report = checked(*SHOWN_BY, guarantees=("G1",))
    assert report, str(report)


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_missing_waits_and_premature_releases_are_detected(fault, emulated):
    assert is_noticed(fault, emulated=emulated)


@pytest.mark.parametrize(
    "chosen",
    [x for x in HARDWARE if x.mutant.name.startswith("hopper")],
    ids=lambda x: x.mutant.name,
)
def test_mutants_that_a_gpu_kills_are_killed_in_emulation(chosen, emulated):
    emulated(*((Path(x.file).stem, x.old, x.new) for x in chosen.mutant.edits))
    for step in chosen.steps:
        # The emulation runs few programs at a time, so few heads suffice.
        heads = {name: min(getattr(step.problem, name), 8) for name in ("H", "Hk")}
        asked = dataclasses.replace(step.problem, device="cpu", **heads)
        if not checked(asked, guarantees=step.checks):
            return
    pytest.fail("nobody noticed")
