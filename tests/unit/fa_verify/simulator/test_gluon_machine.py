"""The emulated multiprocessor: refused programs, deadlock reports, and schedules by seed."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from fa_verify.simulator.gluon.machine import Barrier, DeadlockError, Machine, Product, RaceError


def barrier(name: str, count: int = 1) -> Barrier:
    made = Barrier(name)
    made.init(count)
    return made


def ran(*functions, seed: str = "0") -> Machine:
    """A machine after it ran the functions, which take it as an argument."""
    machine = Machine(seed)
    machine.run([lambda: machine.split([lambda f=f: f(machine) for f in functions])])
    return machine


def test_partitions_that_wait_for_nothing_to_come_are_named_with_what_they_wait_for():
    said = "partition 0 waits for phase 0 of keys; partition 2 waits for phase 1 of values"
    ended = barrier("values")
    ended.arrive()
    with pytest.raises(DeadlockError, match=f"^{said}$"):
        ran(
            lambda machine: machine.wait(barrier("keys"), 0),
            lambda machine: machine.pause(),
            lambda machine: machine.wait(ended, 1),
        )


def test_a_phase_ends_when_all_have_arrived_and_all_bytes_have_come():
    full = barrier("tile", count=2)
    assert full.has_ended(1)
    full.expect(64)
    full.come(64)
    assert not full.has_ended(0)
    full.arrive()
    assert full.has_ended(0)
    full.arrive(2)
    assert full.has_ended(1)
    assert not full.has_ended(0)


def test_more_arrivals_than_a_barrier_counts_are_refused():
    with pytest.raises(RaceError, match="tile: more than the 1 expected arrivals"):
        barrier("tile").arrive(2)


def test_a_phase_that_is_no_parity_is_refused():
    with pytest.raises(RaceError, match="phase 2 of tile is waited for; needs 0 or 1"):
        ran(lambda machine: machine.wait(barrier("tile"), 2))


def test_a_barrier_that_counts_nothing_yet_is_refused():
    with pytest.raises(RaceError, match="tile is used before it is initialised"):
        Barrier("tile").arrive()


def test_what_one_partition_raises_ends_the_program_and_its_threads():
    def fail(_machine):
        raise ZeroDivisionError("of one")

    before = threading.active_count()
    with pytest.raises(ZeroDivisionError, match="of one"):
        ran(lambda machine: machine.wait(barrier("never"), 0), fail)
    assert threading.active_count() == before


@pytest.mark.parametrize("seed", ["0", "1", "2"])
def test_a_tile_is_undefined_until_its_copy_completes(seed):
    tile, full, seen = np.zeros(4), barrier("tile"), []

    def consume(machine):
        full.expect(32)
        machine.copy(tile, np.arange(4.0), 32, full)
        seen.append(tile.copy())
        machine.wait(full, 0)
        seen.append(tile.copy())

    ran(consume, seed=seed)
    assert np.isnan(seen[0]).all() or (seen[0] == np.arange(4.0)).all()
    assert (seen[1] == np.arange(4.0)).all()


def test_a_copy_without_a_wait_is_refused():
    def leave(machine):
        for _ in range(100):
            machine.copy(np.zeros(4), np.zeros(4), 32, barrier("tile", 2))

    with pytest.raises(RaceError, match="copies into shared memory are pending"):
        ran(leave)


def test_a_tile_that_changes_while_a_product_reads_it_is_refused():
    tile = np.zeros(4)

    def overwrite(machine):
        machine.issue(Product([tile], np.sum))
        tile[0] = 1
        machine.finish_products(0)

    with pytest.raises(RaceError, match="a tile is written while a product reads it"):
        ran(overwrite)


def test_products_end_in_order_and_no_more_than_are_waited_for():
    products = [Product([np.full(2, float(i))], np.sum) for i in range(3)]

    def multiply(machine):
        for product in products:
            machine.issue(product)
        machine.finish_products(1)
        assert [x.is_done for x in products] == [True, True, False]

    ran(multiply)
    assert [x.result for x in products[:2]] == [0, 2]


def test_an_asynchronous_read_of_a_store_without_a_fence_is_refused():
    tiles = np.zeros((2, 4))

    def store(machine):
        machine.wrote(tiles[0])
        machine.check_fenced(tiles[1])
        with pytest.raises(RaceError, match="partition 0 has no fence between a store"):
            machine.check_fenced(tiles[0])
        machine.fence()
        machine.check_fenced(tiles[0])

    ran(store)


def test_the_seed_alone_decides_the_order():
    def trace(seed):
        seen = []

        def steps(name):
            def run(machine):
                for i in range(20):
                    machine.pause()
                    seen.append((name, i))

            return run

        ran(steps("a"), steps("b"), steps("c"), seed=seed)
        return seen

    traces = [trace(str(seed)) for seed in range(4)]
    assert traces[0] == trace("0")
    assert len({tuple(x) for x in traces}) == 4


def test_programs_begin_in_order_and_no_more_than_so_many_run_at_a_time():
    def most_at_once(seed):
        machine, begun, running, most = Machine(seed), [], set(), []

        def program(number):
            begun.append(number)
            running.add(number)
            most.append(len(running))
            for _ in range(20):
                machine.pause()
            running.remove(number)

        machine.run([lambda i=i: program(i) for i in range(7)], at_once=3)
        assert sorted(begun) == list(range(7))
        # Programs that are resident at once may take their first turns in any order.
        assert all(number - i < 3 for i, number in enumerate(begun))
        return max(most)

    assert max(most_at_once(str(seed)) for seed in range(12)) == 3


@pytest.mark.parametrize("seed", ["0", "1", "2", "3"])
def test_the_machine_reports_which_program_resumes(seed):
    told, machine = [], Machine(seed, lambda number: told.append(number))

    def program(number):
        for _ in range(5):
            assert told[-1] == number
            machine.pause()

    machine.run([lambda i=i: program(i) for i in range(4)], at_once=2)
    assert set(told) == set(range(4))


def test_programs_that_begin_last_may_end_first():
    def ends(seed):
        machine, ended = Machine(seed), []

        def program(number):
            for _ in range(5):
                machine.pause()
            ended.append(number)

        machine.run([lambda i=i: program(i) for i in range(6)], at_once=3)
        return ended

    assert any(ends(str(seed))[-1] == 0 for seed in range(8))


def spin(machine, memory):
    while True:
        machine.look(0, lambda: memory[0])
        if memory[0]:
            return


@pytest.mark.parametrize("seed", [str(seed) for seed in range(8)])
def test_a_load_in_a_loop_waits_for_a_change(seed):
    machine, memory = Machine(seed), [0]

    def write():
        for _ in range(20):
            machine.pause()
        memory[0] = 1

    # The later program often ends first.
    machine.run([write, lambda: spin(machine, memory)], at_once=2)


def test_programs_that_wait_for_unwritten_memory_are_named():
    said = "partition 0 of program 1 waits for memory that no partition writes"
    machine = Machine("0")
    with pytest.raises(DeadlockError, match=f"^{said}$"):
        machine.run([lambda: None, lambda: spin(machine, [0])], at_once=2)


def test_waiting_for_a_program_that_cannot_begin_is_a_deadlock():
    machine, memory = Machine("0"), [0]

    def write():
        memory[0] = 1

    with pytest.raises(DeadlockError, match="program 0 waits for memory"):
        machine.run([lambda: spin(machine, memory), write], at_once=1)


def test_a_program_that_splits_waits_for_the_others():
    def program(machine):
        seen = []
        machine.split([lambda: seen.append(0), lambda: (machine.pause(), seen.append(1))])
        assert sorted(seen) == [0, 1]

    machine = Machine("0")
    machine.run([lambda: program(machine)])


@pytest.mark.parametrize("space", ["shared", "global"])
@pytest.mark.parametrize("ordered", [True, False])
def test_a_store_is_announced_after_a_thread_barrier(space, ordered):
    tile = np.zeros(2)

    def program():
        if space == "shared":
            machine.wrote(tile)
        else:
            machine.wrote_globally()
        if ordered:
            machine.thread_barrier()
        machine.check_announced(space)

    machine = Machine("0")
    if ordered:
        machine.run([program])
    else:
        with pytest.raises(RaceError, match=f"no thread barrier between a store to {space} memory"):
            machine.run([program])
