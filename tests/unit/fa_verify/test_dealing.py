"""The order in which tests are dealt to workers."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace

import pytest

from fa_verify.pytest_plugin.dealing import AHEAD, Dealing
from fa_verify.pytest_plugin.running import pytest_xdist_make_scheduler
from fa_verify.pytest_plugin.turns import LONGEST, SAMPLE, full_name, turn
from fa_verify.session import CONFORMANCE
from tests.unit.fa_verify.fuzz.test_fuzzing import Worker

ALONE = [f"test_alone.py::test[{i}]" for i in range(20)]
TOGETHER = [f"test_together.py::test[{i}]" for i in range(7)]


def configured(folder, **options):
    options = {"tx": ["popen", "popen"], "dist": "load", "maxschedchunk": None} | options
    return SimpleNamespace(
        getvalue=options.get,
        getoption=options.get,
        option=SimpleNamespace(**options),
        rootpath=folder,
    )


@pytest.fixture
def deal(tmp_path):
    """A dealing to two workers, which have collected."""
    (tmp_path / "test_alone.py").write_text("")
    (tmp_path / "test_together.py").write_text('@pytest.fixture(scope="module")')

    def of(tests):
        dealing = pytest_xdist_make_scheduler(
            configured(tmp_path), SimpleNamespace(loadsched=print)
        )
        workers = [Worker("gw0"), Worker("gw1")]
        for worker in workers:
            dealing.add_node(worker)
            dealing.add_node_collection(worker, tests)
        dealing.schedule()
        return dealing, workers

    return of


def finish(dealing, workers):
    """Run all tests by turns; return them in this order."""
    ran = []
    while dealing.has_pending:
        for worker in workers:
            if dealing.node2pending[worker]:
                ran.append(dealing.node2pending[worker][0])
                dealing.mark_test_complete(worker, ran[-1], duration=1.0)
    return ran


def test_the_first_tests_are_dealt_by_turns(deal):
    _, (first, second) = deal(ALONE)
    assert (first.dealt, second.dealt) == ([0, 2], [1, 3])


def test_the_tests_that_take_longest_are_dealt_first(deal):
    compiling, starting = LONGEST[0], f"{LONGEST[-1]}test_runs.py"
    _, (first, second) = deal([*ALONE, f"{starting}::test[0]", f"{compiling}::test[0]"])
    assert (first.dealt[0], second.dealt[0]) == (21, 20)


def test_the_forms_of_masks_are_dealt_before_all_others(deal):
    forms = "test_masks.py::test_the_forms_of_a_mask_agree[Tree-kernel]"
    _, (first, second) = deal([*ALONE, f"{LONGEST[0]}::test[0]", forms])
    assert (first.dealt[0], second.dealt[0]) == (21, 20)


def test_neighbours_among_conformance_tests_are_dealt_apart(deal):
    tests = [f"tests/conformance/test_{x}.py::test[{i}]" for x in "ab" for i in range(30)]
    orders = []
    for _ in range(2):
        dealing, workers = deal([*ALONE, *tests])
        ran = finish(dealing, workers)
        orders.append(ran)
    assert orders[0] == orders[1]
    spread = [i - len(ALONE) for i in orders[0] if i >= len(ALONE)]
    neighbours = sum(abs(a - b) == 1 for a, b in itertools.pairwise(spread))
    assert sorted(spread) == [*range(len(tests))]
    assert neighbours < len(tests) / 5
    # Others keep their order, after them.
    assert orders[0][-len(ALONE) :] == [*range(len(ALONE))]


def test_the_command_deals_in_the_order_of_a_checkout():
    """Its ids have no folder: their root is that of the conformance tests."""
    ids = [f"test_{x}.py::test[{i}]" for x in ("claims", "long", "state") for i in range(40)]
    names = [full_name(x, CONFORMANCE) for x in ids]
    assert names == [f"conformance/{x}" for x in ids]
    assert full_name("tests/conformance/test_a.py", Path("/")) == "tests/conformance/test_a.py"
    dealt = sorted(names, key=turn)
    assert dealt != sorted(names)
    sample = [*itertools.takewhile(lambda x: turn(x)[3] < 0, dealt)]
    assert len(ids) / SAMPLE / 3 < len(sample) < len(ids) / SAMPLE * 3
    long = [i for i, x in enumerate(dealt) if "state" in x and x not in sample]
    assert long == [*range(len(sample), len(sample) + len(long))]


def test_regressions_and_combinations_come_first_and_a_quick_run_keeps_its_order():
    first = [
        "conformance/test_replay.py::test_regression[mine]",
        "conformance/test_combinations.py::test_every_combination[0]",
    ]
    others = [f"conformance/test_{i}.py::test" for i in range(40)]
    assert sorted([*others, *reversed(first)], key=turn)[:2] == first
    quick = [f"conformance/test_quick.py::test[{i:03}-fp16]" for i in range(40)]
    assert sorted(quick, key=turn) == quick


def test_two_workers_have_no_tests_of_one_shard_while_there_are_others(deal):
    caches = [f"tests/conformance/test_caches.py::test[{x}]" for x in ("pages-fp16", "append-fp16")]
    shards = [
        f"tests/conformance/test_{file}.py::test[{mask}fp16-16x16-split3-d{D}{family}]"
        for D in (16, 64)
        for file, mask, family in (("a", "Tree-", ""), ("b", "", "-normal"))
    ]
    dealing, workers = deal([*ALONE[:3], *shards, *caches])
    kernels = [*range(3), *"kkllcc"]
    together = []
    while dealing.has_pending:
        for worker in workers:
            given = [{kernels[i] for i in dealing.node2pending[x]} for x in workers]
            if dealing.pending:
                together += given[0] & given[1]
            if dealing.node2pending[worker]:
                dealing.mark_test_complete(worker, dealing.node2pending[worker][0], duration=1.0)
    assert not together


def test_the_last_tests_of_a_shard_are_dealt_to_all_workers(deal):
    tests = [f"tests/conformance/test_a.py::test[fp16-16x16-d16-{i}]" for i in range(4)]
    _, (first, second) = deal(tests)
    assert sorted(first.dealt + second.dealt) == [*range(4)]
    assert len(first.dealt) == len(second.dealt) == 2


@pytest.mark.parametrize("path", LONGEST)
def test_the_tests_that_take_longest_exist(path):
    file, _, test = path.partition("::")
    found = Path(__file__).parents[2] / file
    assert found.exists()
    if test:
        assert f"def {test.partition('[')[0]}" in found.read_text(encoding="utf-8")


@pytest.mark.parametrize("duration", [0.001, 1.0])
def test_a_worker_has_two_tests_before_it(deal, duration):
    dealing, (first, _) = deal(ALONE)
    for index in (0, 2):
        dealing.mark_test_complete(first, index, duration=duration)
        assert len(dealing.node2pending[first]) == AHEAD


def test_tests_that_share_fixtures_go_to_one_worker(deal):
    _, (first, second) = deal([*TOGETHER, *ALONE])
    assert first.dealt == [*range(7)]
    assert second.dealt == [7, 8]


def test_a_file_that_cannot_be_read_shares_nothing(deal):
    _, (first, second) = deal(["gone.py::test[0]", "gone.py::test[1]", *ALONE])
    assert (first.dealt, second.dealt) == ([0, 2], [1, 3])


def test_every_test_is_run_once_and_workers_go_home(deal):
    tests = [*ALONE, *TOGETHER, *ALONE[:1]]
    dealing, workers = deal(tests)
    ran = finish(dealing, workers)
    assert sorted(ran) == [*range(len(tests))]
    assert sorted(workers[0].dealt + workers[1].dealt) == sorted(ran)
    assert all(worker.shutting_down for worker in workers)


def test_a_worker_without_a_test_goes_home(deal):
    dealing, (first, second) = deal(ALONE[:1])
    assert (first.dealt, second.dealt) == ([0], [])
    assert second.shutting_down
    assert dealing.tests_finished


def test_the_tests_of_a_worker_that_dies_are_dealt_to_another(deal):
    dealing, (first, second) = deal(ALONE)
    assert dealing.remove_node(first) == ALONE[0]
    for index in (1, 3):
        dealing.mark_test_complete(second, index)
    third = Worker("gw2")
    dealing.add_node(third)
    dealing.add_node_collection(third, ALONE)
    dealing.schedule()
    assert third.dealt
    finish(dealing, [second, third])
    assert {*second.dealt, *third.dealt} >= {*range(1, 20)}


def test_workers_that_collected_other_tests_get_none(tmp_path):
    config = configured(tmp_path)
    config.hook = SimpleNamespace(pytest_collectreport=lambda report: None)
    dealing = Dealing(config, SimpleNamespace(loadsched=print))
    for name, tests in (("gw0", ALONE), ("gw1", TOGETHER)):
        worker = Worker(name)
        dealing.add_node(worker)
        dealing.add_node_collection(worker, tests)
    dealing.schedule()
    assert not dealing.has_pending


@pytest.mark.parametrize("options", [{"dist": "loadfile"}, {"maxschedchunk": 5}])
def test_options_of_xdist_are_left_to_it(tmp_path, options):
    assert pytest_xdist_make_scheduler(configured(tmp_path, **options), None) is None


def test_two_workers_have_no_tests_that_reserve_memory_while_there_are_others(deal):
    reserving = [
        "tests/conformance/test_range.py::test_elements_2_to_the_31_apart[fp16-16x16-d16]",
        "tests/conformance/test_caches.py::test_a_cache[far pages-bf16]",
        "tests/conformance/test_long.py::test_a_million_rows_and_keys_are_right",
    ]
    dealing, workers = deal([*reserving, *ALONE])
    while dealing.pending:
        given = [min(dealing.node2pending[x]) for x in workers if dealing.node2pending[x]]
        assert sum(i < len(reserving) for i in given) < 2
        for worker in workers:
            if dealing.node2pending[worker]:
                dealing.mark_test_complete(worker, dealing.node2pending[worker][0], duration=1.0)
