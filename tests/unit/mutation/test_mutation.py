"""Making and judging mutants: operators, forks and their ends, reports, the kill order."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from fa_verify.forks import Ended, in_forks
from tests.mutation.catalogue.copies import PACKAGE, sources_of
from tests.mutation.catalogue.faults import FAULTS
from tests.mutation.catalogue.mutant import Edit, Kill, Mutant, Verdict, mutated
from tests.mutation.catalogue.operators import HOPPER_SITES, OPERATORS, SITES, draw, mechanical
from tests.mutation.catalogue.outcomes import HANGS, Outcome, outcome, read, write
from tests.mutation.judging import interpreting
from tests.mutation.judging.hangs import kills_within
from tests.mutation.judging.trials import QUICK, STEPS
from tests.mutation.judging.unit_tests import FILES, OF_THE_CALL
from tests.mutation.kill_order import UNIT_TESTS, History, kill_order, remember
from tests.mutation.report import failed, summary, tables

ROOT = Path(__file__).parents[3]
SOURCES = sources_of(PACKAGE)
FUNCTION = '''
def f(x, mask, M, N):
    """Nothing here is changed: a < b."""
    y = {}
    return y
'''


def made(expression: str) -> set[str]:
    """The mutants that the operators make of an expression in a function."""
    sources = dict.fromkeys(SITES, "") | {SITES[0]: FUNCTION.format(expression)}
    return {
        mutated(sources, mutant)[SITES[0]].split("y = ")[1].split("\n")[0]
        for mutant in mechanical(sources)
    }


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("x < N", {"x <= N", "x < M"}),
        ("x == 1", {"x != 1", "x == 2"}),
        ("x + N", {"x - N", "(x)", "(N)", "x + M"}),
        ("(x + 1) * N", {"(x + 1) / N", "(x + 1)", "(N)", "(x - 1) * N", "(x + 2) * N"}),
        ("x // N", {"x * N", "(x)", "x // M"}),
        ("tl.where(mask, x, 0.0)", {"(x)", "(0.0)", 'tl.where(mask, x, (-float("inf")))'}),
        ("min(x, 5)", {"(x)", "(5)", "min(x, 6)"}),
        ("tl.cdiv(x, 3)", {"(x // 3)", "tl.cdiv(x, 4)"}),
        ("tl.trans(x)", {"(x)"}),
        ("x.to(tl.int64)", {"(x)"}),
        ('-float("inf")', {"0.0", 'float("inf")', "-0.0"}),
        ("tl.load(x, mask=mask, other=0.0)", {"tl.load(x)", "tl.load(x, mask=mask)"}),
        ("tl.dot(x, mask)", {"tl.dot(mask, x)"}),
        ("tl.dot(x, mask, x)", {"tl.dot(mask, x, x)", "tl.dot(x, mask)"}),
        ("q.stride(0)", {"k.stride(0)", "q.stride(1)"}),
        ("x if mask else 2", {"x if True else 2", "x if False else 2", "x if mask else 3"}),
    ],
)
def test_an_operator_makes_what_it_says(expression, expected):
    assert expected <= made(expression)


def test_a_key_names_file_function_operator_and_number():
    keys = [x.key for x in mechanical({SITES[0]: FUNCTION.format("x < N")}, SITES[:1])]
    assert "portable/forward.py:f compare 1" in keys
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize(
    ("marked", "reason"),
    [
        ("y = x < N  # equivalent: x is odd", "x is odd"),
        ("# equivalent: x is odd\n    y = x < N", "x is odd"),
        ("# equivalent: x is odd\n    z = x\n    y = x < N", ""),
        ("# x is odd\n    y = x < N", ""),
    ],
)
def test_a_comment_at_the_line_tells_why_its_mutants_survive(marked, reason):
    sources = {SITES[0]: FUNCTION.replace("y = {}", marked)}
    (mutant,) = (x for x in mechanical(sources, SITES[:1]) if x.key.endswith("compare 1"))
    assert mutant.equivalent == reason
    survived = outcome("mechanical", mutant, Ended(0, Verdict(), "returned", 1.0))
    killed = outcome("mechanical", mutant, Ended(0, Verdict([Kill("G1", 0, "")]), "returned", 1.0))
    assert (survived.unexplained, killed.refuted) == (not reason, False)
    assert "100.0% of 1 noticed" in summary([survived, killed] if reason else [killed])


def test_the_kernels_explain_survivors_at_lines_with_mutants():
    """A marker that no mutated line carries explains nothing."""
    made = [*mechanical(SOURCES), *mechanical(SOURCES, HOPPER_SITES)]
    reasons = {x.equivalent for x in made if x.equivalent}
    marked = [line for text in SOURCES.values() for line in text.split("# equivalent: ")[1:]]
    assert reasons == {x.split("\n")[0] for x in marked} != set()


def test_every_operator_makes_mutants_of_the_kernels():
    assert {x.__name__ for x in OPERATORS} == {mutant.origin for mutant in mechanical(SOURCES)}


def test_mechanical_mutants_are_several_hundred_valid_changes_of_one_line_each():
    mutants = mechanical(SOURCES)
    assert len(mutants) > 500
    assert len({mutant.name for mutant in mutants}) == len(mutants)
    for mutant in mutants:
        changed = mutated(SOURCES, mutant)
        differing = [file for file in SOURCES if changed[file] != SOURCES[file]]
        assert differing == [mutant.edits[0].file]
        # Quicker than ast.parse, which makes an object of every node.
        compile(changed[differing[0]], differing[0], "exec")


@pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="the interpreter runs mutants"
)
def test_the_command_asks_mutants_of_the_harness(tmp_path):
    """Runs in a process of its own, because the harness must not be imported before its mutants."""
    chosen = ["harness", "--every", "0", "--only", "an infinite bound passes"]
    command = [sys.executable, "-m", "tests.mutation", *chosen, "--out", tmp_path]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, "1 mutants, 1 killed" in done.stdout) == (0, True), done


def sleep() -> None:
    time.sleep(1000)


def crash() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_forks_return_crash_and_time_out():
    ends = {x.number: x for x in in_forks([lambda: 42, sleep, crash], jobs=3, seconds=0.5)}
    assert (ends[0].value, ends[0].how) == (42, "returned")
    assert ends[1].how == "timed out"
    assert ends[1].seconds >= 0.5
    assert ends[2].how == "crashed"


def test_forks_run_so_many_at_a_time_and_each_once():
    works = [lambda: time.monotonic()] * 5
    assert sorted(x.number for x in in_forks(works, jobs=2, seconds=10)) == [0, 1, 2, 3, 4]


def test_a_fork_changes_nothing_here():
    here: list[int] = []
    list(in_forks([lambda: here.append(1)], jobs=1, seconds=10))
    assert here == []


def one(end: str, equivalent: str = "", checks: tuple[str, ...] = ()) -> Outcome:
    return Outcome("faults", f"a {end} mutant", "x.py", end, checks, 0, "", 1.0, equivalent)


MUTANT = Mutant("m", (Edit("x.py", "a", "b"),), key="x.py:f compare 1")


def test_a_mutant_that_ends_its_process_is_counted_apart():
    assert outcome("faults", MUTANT, Ended(0, None, "crashed", 2.0)).end == "crashed"


def spin() -> Iterator[Kill]:
    yield Kill("G1", 0, "before")
    while True:
        pass


def test_a_judge_that_uses_too_much_cpu_time_tells_that_the_mutant_hangs():
    before, hang = kills_within(0.2, spin(), "a loop")
    assert (before.check, hang.check) == ("G1", HANGS)
    assert "more than 0 s of CPU time: a loop" in hang.detail
    verdict = Verdict([hang])
    assert outcome("faults", MUTANT, Ended(0, verdict, "returned", 2.0)).end == "timed out"


def test_a_judge_that_waits_does_not_hang():
    def kills() -> Iterator[Kill]:
        time.sleep(0.5)
        yield Kill("G1", 0, "")

    assert [x.check for x in kills_within(0.2, kills(), "a wait")] == ["G1"]


@pytest.mark.parametrize(
    "ended",
    [Ended(0, None, "timed out", 2.0), Ended(0, Verdict(cut="3 of 9 judges ran"), "returned", 2.0)],
)
def test_a_mutant_without_a_verdict_is_neither_noticed_nor_a_survivor(ended):
    """Load on the machine can end a mutant before the judge that kills it."""
    found = outcome("mechanical", MUTANT, ended)
    assert (found.end, found.noticed, found.unexplained) == ("cut off", False, False)
    assert f"CUT OFF, {found.detail}: m" in summary([found])
    assert "0.0% of 1 noticed" in summary([found])


@pytest.mark.parametrize(("number", "seed"), [(500, 0), (500, 1), (37, 5)])
def test_a_draw_has_its_share_of_each_file(number, seed):
    mutants = mechanical(SOURCES)
    drawn = draw(mutants, number, seed)
    assert len({x.key for x in drawn}) == number
    assert drawn == sorted(drawn, key=mutants.index)
    for file in SITES:
        share = sum(x.edits[0].file == file for x in mutants) * number / len(mutants)
        assert abs(sum(x.edits[0].file == file for x in drawn) - share) < 1


def test_draws_of_other_seeds_differ_and_one_of_all_has_all():
    mutants = mechanical(SOURCES)
    assert draw(mutants, 300, 0) == draw(mutants, 300, 0) != draw(mutants, 300, 1)
    assert draw(mutants, len(mutants) + 1, 0) == mutants


def test_judges_that_killed_neighbours_run_first():
    other = replace(MUTANT, key="x.py:g compare 1")
    history = History({"m": "of the fault"})
    for mutant, judge in ((other, "a"), (other, "a"), (other, "c"), (MUTANT, "b")):
        history.add("mechanical", mutant, Ended(0, Verdict(judge=judge), "returned", 1.0))
    history.add("mechanical", MUTANT, Ended(0, Verdict(), "returned", 1.0))
    assert history.first("mechanical", MUTANT) == ["b", "a", "c"]
    assert history.first("mechanical", other)[:2] == ["a", "c"]
    assert history.first("faults", MUTANT) == ["of the fault"]


def test_a_survivor_without_a_reason_is_named():
    found = [one("killed", checks=("G1",)), one("survived"), one("survived", "why")]
    assert [x.unexplained for x in found] == [False, True, False]
    assert summary(found).count("NOT KILLED") == 1
    assert "3 mutants, 1 killed, 2 survived; median kill 1.00 s" in summary(found)


def test_named_survivors_and_a_small_share_fail_a_run():
    survivor, killed = (replace(one(x), source="mechanical") for x in ("survived", "killed"))
    assert not failed([one("killed"), one("survived", "why"), one("cut off")])
    assert failed([one("killed"), one("survived")])
    assert failed([one("killed", "why")])
    assert not failed([survivor] * 8 + [killed] * 92)
    assert failed([survivor] * 16 + [killed] * 84)
    assert not failed([replace(survivor, source="sampled")] * 50)


def test_a_killed_mutant_that_is_listed_as_equivalent_is_named():
    found = [one("killed", "why", ("G1",)), one("survived", "why"), one("raised", "why")]
    assert [x.refuted for x in found] == [True, False, True]
    assert "LISTED AS EQUIVALENT, BUT KILLED by G1: a killed mutant" in summary(found)
    assert "| a killed mutant | why | killed, G1 |" in tables(found, full=False)


def test_the_report_has_rates_and_reasons():
    found = [one("killed", checks=("G1", "T3")), one("survived"), one("survived", "why")]
    text = tables(found, full=True)
    assert "| faults | x.py | 3 | 1 | 0 | 0 | 0 | 0 | 1 | 1 | 50.0% | 50.0% | 1.00 |" in text
    assert "| a survived mutant | why |" in text
    assert "| a killed mutant | x | x |" in text


def test_outcomes_are_read_as_they_were_written(tmp_path):
    found = [one("killed", checks=("G1", "T3")), one("survived", "why")]
    write(found, tmp_path / "made" / "outcomes.jsonl")
    assert read(tmp_path / "made" / "outcomes.jsonl") == found


def test_the_killer_of_a_fault_is_recorded(tmp_path):
    file = tmp_path / "kill_order.json"
    by_step = replace(one("killed", checks=("G1",)), source="faults", name="by a step", step=3)
    by_tests = replace(by_step, name="by tests", checks=(UNIT_TESTS,), detail="tests/a.py::b: c")
    unknown = replace(by_tests, name="by a collection", detail="raised: tests/a.py")
    remember([by_step, by_tests, unknown, replace(by_step, end="survived", name="x")], STEPS, file)
    assert kill_order(file) == {
        "by a step": STEPS[3].problem.to_json(),
        "by tests": "tests/a.py",
        "by a collection": UNIT_TESTS,
    }


def test_a_launch_of_too_many_programs_raises(monkeypatch):
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    run = []
    monkeypatch.setattr(interpreter.GridExecutor, "__call__", lambda self: run.append(self.grid))
    interpreting.refuse_endless_launches()
    most = interpreting.MOST_PROGRAMS
    for grid in ((most, 1), (2, most // 2)):
        interpreter.GridExecutor(looked_at, [], grid)()
    with pytest.raises(interpreting.EndlessLaunchError, match="has more than 200000 programs"):
        interpreter.GridExecutor(looked_at, [], (2, most // 2 + 1))()
    # A test that runs a few of many programs replaces the interpreter's ``range``.
    monkeypatch.setattr(interpreter, "range", range, raising=False)
    interpreter.GridExecutor(looked_at, [], (2 * most,))()
    assert run == [(most, 1), (2, most // 2), (2 * most,)]


def looked_at():
    """Never run."""


@pytest.mark.parametrize("file", [*FILES, *OF_THE_CALL], ids=lambda file: Path(file).stem)
def test_unit_tests_of_mutants_do_not_run_the_original_kernels(file):
    """A subject that was imported before a mutant calls the original package."""
    assert "ours import flash_attention" not in (ROOT / file).read_text()


def test_kill_order_names_existing_faults_and_steps():
    known = {step.problem.to_json() for step in STEPS} | {*FILES, *OF_THE_CALL}
    firsts = kill_order()
    assert firsts.keys() <= {fault.name for fault in FAULTS}
    assert set(firsts.values()) <= known


@pytest.mark.parametrize("file", SITES)
def test_all_judges_judge_a_mutant_of_any_file(file):
    """A kernel shares its code with others: a fault of the softmax showed in calls with a cache."""
    pytest.importorskip("triton")
    import fa_kernels
    from tests.mutation.judging.caches import kills_by_caches
    from tests.mutation.judging.merging import kills_by_merging
    from tests.mutation.judging.verdict import judges_of

    mutant = Mutant("m", (Edit(file, "a", "b"),))
    usual, _ = judges_of(fa_kernels, mutant, STEPS, STEPS, len(QUICK))
    calls = {*kills_by_caches(None), *kills_by_merging(None)}
    assert {*calls, *(x.problem.to_json() for x in STEPS), UNIT_TESTS} <= usual.keys()
