"""The search for a violation: violations, refusals and counts, and the end of a search."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import re
import signal
import time
from types import SimpleNamespace

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st

from fa_verify.conformance.conftest import check_that_problems_were_judged
from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.outputs import OUTPUTS
from fa_verify.oracles.problem import Problem
from fa_verify.properties.guarantees import claims
from fa_verify.properties.guarantees.compare import Finding, Violation
from fa_verify.properties.kernels.subject import Subject
from fa_verify.properties.running.tally import Tally
from fa_verify.properties.running.trial import SubjectError, run_trial
from fa_verify.properties.search import minimize, search
from fa_verify.properties.search.search import Runner, attack
from tests.unit.properties.kernels.broken_subjects import Eager

# Small problems, because minimisation is tested elsewhere.
DRAWN = st.builds(
    Problem,
    M=st.integers(1, 3),
    N=st.integers(1, 40),
    D=st.just(24),
    Dv=st.just(24),
    dtype=st.just("fp64"),
    mask=st.builds(Mask, causal=st.booleans()),
)
# Scores beyond the range of float32, which are no fault of a kernel.
WIDE = Problem(M=3, N=3, dtype="fp32", sm_scale=1e6)
FAR = Problem(M=5, N=7, dtype="fp16", inputs="lse_high_6e4")
GOOD = Problem(M=3, N=4, dtype="fp64")
# No example database in any profile: an earlier failure would end the search at once.
REPEATABLE = settings(derandomize=True, database=None)
OPEN = contextlib.nullcontext()


class Long(Eager):
    """A subject with a fault for more than 16 keys."""

    def __call__(self, q, k, v, *, mask, sm_scale):
        out, lse = super().__call__(q, k, v, mask=mask, sm_scale=sm_scale)
        return self.of_many_keys(out, lse) if k.shape[2] > 16 else (out, lse)


class Wrong(Long):
    def of_many_keys(self, out, lse):
        return out * 1.001, lse


class Raises(Long):
    def of_many_keys(self, out, lse):
        raise ValueError("17 keys\nare too many")


class Refuses(Long):
    def of_many_keys(self, out, lse):
        raise NotImplementedError("more than 16 keys\nand why")


def runner_of(call, **rest) -> Runner:
    return Runner(Subject.of(call, "subject"), Tally(), **rest)


def attacked(runner: Runner, claim=claims.accuracy) -> list:
    """The findings of an attack that succeeds."""
    with pytest.raises(Violation) as caught:
        attack(runner, claim, DRAWN, seed="0", settings=REPEATABLE)
    return caught.value.findings


def nothing(trial) -> list:
    """A claim that holds."""
    return []


def test_a_violation_carries_the_findings_of_the_simplest_problem():
    found = attacked(runner_of(Wrong()))
    assert [x.output for x in found] == ["out", "dq", "dk", "dv"][: len(found)]
    assert {(x.guarantee, x.problem) for x in found} == {
        ("G1 accuracy", Problem(N=17, dtype="fp64"))
    }


def test_the_message_of_a_violation_is_that_of_its_findings():
    with pytest.raises(Violation) as caught:
        attack(runner_of(Wrong()), nothing, st.just(Problem(N=17, dtype="fp64")), seed="0")
    assert str(caught.value) == "\n" + "\n".join(map(str, caught.value.findings))


def test_a_correct_subject_withstands():
    runner = runner_of(Eager())
    attack(runner, nothing, DRAWN, seed="0")
    assert runner.judged > 0
    assert not runner.refusals


def test_accuracy_is_checked_whatever_the_claim_says():
    (finding, *_) = runner_of(Wrong()).findings(Problem(N=17, dtype="fp64"), nothing)
    assert finding.guarantee == "G1 accuracy"


def test_accuracy_is_checked_however_little_the_bound_is_left():
    class Slightly(Eager):
        def spoil(self, out, lse, live, N, config):
            return out * (1 + 2.0**-44), lse

    runner = runner_of(Slightly())
    (finding, *_) = runner.findings(GOOD, nothing)
    assert finding.guarantee == "G1 accuracy"
    assert 1 < max(runner.peaks.values()) < 100


@pytest.mark.parametrize("source", ["", "my.py:attention"])
def test_findings_name_the_kernel_that_was_given(source):
    subject = dataclasses.replace(Subject.of(Wrong(), "subject"), source=source)
    found = Runner(subject, Tally()).findings(Problem(N=17, dtype="fp64"), nothing)
    assert {finding.kernel for finding in found} == {source}


def test_the_findings_of_the_claim_come_before_those_of_accuracy():
    problem = Problem(N=17, dtype="fp64")
    error = SubjectError("first")
    found = runner_of(Wrong()).findings(
        problem, lambda trial: [Finding.of_exception(error, trial.subject, problem)]
    )
    assert [x.raised for x in found] == ["first"]


def test_a_problem_that_passes_is_judged_and_written_down():
    runner = runner_of(Eager())
    assert runner.findings(GOOD, claims.accuracy) == []
    assert (runner.judged, runner.out_of_range, runner.refusals.total()) == (1, 0, 0)
    assert len(runner.tally.problems) == 1
    assert set(runner.peaks) == set(OUTPUTS)


def test_a_refusal_is_counted_by_the_first_line_of_its_reason():
    runner = runner_of(Refuses())
    for N in (17, 18, 4):
        assert runner.findings(Problem(N=N, dtype="fp64"), claims.accuracy) == []
    assert dict(runner.refusals) == {"more than 16 keys": 2}
    assert runner.judged == 1
    assert {key: len(found) for key, found in runner.tally.unsupported.items()} == {
        "more than 16 keys": 2
    }


def test_a_refusal_without_a_reason_is_counted_as_such():
    class Silent(Long):
        def of_many_keys(self, out, lse):
            raise NotImplementedError

    runner = runner_of(Silent())
    assert runner.findings(Problem(N=17, dtype="fp64"), claims.accuracy) == []
    assert list(runner.refusals) == ["NotImplementedError without a reason"]


def test_a_call_that_the_machine_cannot_run_is_no_refusal_of_the_kernel():
    class AsksForGpu(Long):
        def of_many_keys(self, out, lse):
            raise RuntimeError("Found no NVIDIA driver on your system")

    refusing, asking = runner_of(Refuses()), runner_of(AsksForGpu())
    for runner in (refusing, asking):
        assert runner.findings(Problem(N=17, dtype="fp64"), claims.accuracy) == []
    assert (refusing.limits, len(refusing.tally.mostly_refused())) == ("", 1)
    assert asking.limits.startswith("cannot run on a CPU: the kernel asks for a GPU")
    assert asking.tally.mostly_refused() == {}


def test_a_declaration_counts_as_a_refusal():
    subject = Eager()
    subject.max_seqlen = 16
    runner = runner_of(subject)
    assert runner.findings(Problem(N=17, dtype="fp64"), claims.accuracy) == []
    assert list(runner.refusals) == ["subject declares max_seqlen 16"]
    assert subject.calls == 0


def test_a_problem_out_of_range_is_counted_and_not_run():
    subject = Eager()
    runner = runner_of(subject)
    assert runner.findings(WIDE, claims.accuracy) == []
    assert (runner.judged, runner.out_of_range, subject.calls) == (0, 1, 0)
    assert len(runner.tally.out_of_range) == 1
    assert runner.tally.problems == {}


@pytest.mark.parametrize(
    ("words", "problem", "ending"),
    [
        ({"prescales": "q"}, FAR, pytest.skip.Exception),
        ({"configs": {"default": {"prescales": "q"}}}, FAR, pytest.skip.Exception),
        ({"prescales": "q"}, WIDE, pytest.fail.Exception),
        ({}, WIDE, pytest.fail.Exception),
    ],
)
def test_a_family_that_the_declared_numerics_put_out_of_range_is_not_asked(words, problem, ending):
    call = Eager()
    vars(call).update(words)
    runner = runner_of(call)
    for seed in range(20):
        assert not runner.findings(dataclasses.replace(problem, seed=seed), nothing)
    with pytest.raises(ending, match="out of range"):
        check_that_problems_were_judged(runner)


def test_a_claim_that_is_applicable_to_no_problem_is_skipped_with_the_reason():
    runner = runner_of(Eager())
    for seed in range(20):
        runner.findings(dataclasses.replace(GOOD, seed=seed), claims.independence)
    with pytest.raises(pytest.skip.Exception, match="G9: not applicable to one batch entry"):
        check_that_problems_were_judged(runner)
    runner.findings(dataclasses.replace(GOOD, B=2), claims.independence)
    check_that_problems_were_judged(runner)
    assert runner.not_applicable() == {}


def test_peaks_are_those_of_the_last_problem_alone():
    runner = runner_of(Eager())
    runner.findings(GOOD, claims.accuracy)
    runner.findings(WIDE, claims.accuracy)
    assert runner.peaks == {}


def test_peaks_leave_out_what_a_subject_does_not_give():
    class Forward(Eager):
        backward = False

    trial = run_trial(Subject.of(Forward(), "forward"), GOOD)
    assert set(trial.peaks[0]) == {"out", "lse"}


def test_a_subject_without_a_backward_is_given_inputs_that_ask_for_none():
    class Inference(Eager):
        backward = False

        def __call__(self, q, k, v, **arguments):
            if any(x.requires_grad for x in (q, k, v)):
                raise ValueError("there is no backward")
            return super().__call__(q, k, v, **arguments)

    assert runner_of(Inference()).findings(GOOD, claims.accuracy) == []


def test_peaks_of_a_wrong_output_pass_1():
    trial = run_trial(Subject.of(Wrong(), "wrong"), Problem(N=17, dtype="fp64"))
    assert trial.peaks[0]["out"] > 1
    assert trial.peaks[0]["lse"] <= 1


def test_an_exception_is_a_finding_of_the_simplest_problem_that_raises_it():
    runner = runner_of(Raises())
    (finding,) = attacked(runner)
    assert finding.guarantee == "exception"
    assert finding.problem == Problem(N=17, dtype="fp64")
    assert finding.raised.startswith("ValueError: 17 keys\nare too many\n(")
    assert "test_search.py, line" in finding.raised
    assert not runner.refusals


def test_an_exception_raised_in_a_library_names_the_line_that_called_it():
    class Parses(Long):
        def of_many_keys(self, out, lse):
            return json.loads("{")

    (finding,) = runner_of(Parses()).findings(Problem(N=17, dtype="fp64"), nothing)
    assert finding.raised.startswith("JSONDecodeError: ")
    assert "test_search.py, line" in finding.raised


def test_the_message_of_an_exception_can_be_replayed():
    (finding,) = runner_of(Raises()).findings(Problem(N=17, dtype="fp64"), nothing)
    (replayed,) = re.findall(r"pytest --fa-replay='(.*)'", str(finding))
    assert json.loads(replayed) == {"version": 1, "N": 17, "dtype": "fp64"}


def test_an_exception_in_the_second_run_of_a_check_is_a_finding():
    class Tires(Eager):
        def __call__(self, *tensors, **rest):
            if self.calls:
                raise ValueError("once is enough")
            return super().__call__(*tensors, **rest)

    (finding,) = runner_of(Tires()).findings(GOOD, claims.repeatable)
    assert finding.guarantee == "exception"
    assert finding.raised.startswith("ValueError: once is enough")


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, RecursionError])
def test_a_kernel_that_raises_more_than_an_exception_has_a_replay_line(error):
    class Ends(Long):
        def of_many_keys(self, out, lse):
            raise error("no more")

    (finding,) = runner_of(Ends()).findings(Problem(N=17, dtype="fp64"), nothing)
    assert finding.raised.startswith(f"{error.__name__}: no more\n(")
    assert "replay: pytest" in str(finding)


def test_an_interrupt_from_outside_ends_the_run():
    class Interrupted(Long):
        def of_many_keys(self, out, lse):
            signal.raise_signal(signal.SIGINT)
            return out, lse

    # A worker of pytest-xdist ignores the signal.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            runner_of(Interrupted()).findings(Problem(N=17, dtype="fp64"), nothing)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


class WrongAndTires(Eager):
    """Wrong in its first run, and raises in the next."""

    def spoil(self, out, lse, live, N, config):
        if self.calls > 1:
            raise ValueError("once is enough")
        return out * 1.001, lse


@pytest.mark.parametrize("claim", [claims.repeatable, claims.layout])
def test_an_exception_in_a_second_run_does_not_hide_a_wrong_first(claim):
    found = runner_of(WrongAndTires()).findings(GOOD, claim)
    assert (found[0].guarantee, found[-1].guarantee) == ("G1 accuracy", "exception")


def test_an_exception_in_the_backward_does_not_hide_a_wrong_forward():
    class Halts(Eager):
        def spoil(self, out, lse, live, N, config):
            out.register_hook(lambda gradient: 1 / 0)
            return out + 1e-3, lse

    found = runner_of(Halts()).findings(GOOD, nothing)
    assert [x.guarantee for x in found] == ["G1 accuracy", "exception"]
    assert found[1].raised.startswith("ZeroDivisionError: ")


class Tires(Eager):
    """Refuses all calls but the first."""

    def __call__(self, *tensors, **rest):
        if self.calls:
            raise NotImplementedError("once is enough")
        return super().__call__(*tensors, **rest)


def test_a_refusal_of_what_was_computed_is_a_finding():
    (finding,) = runner_of(Tires()).findings(GOOD, claims.repeatable)
    assert finding.guarantee == "exception"
    assert finding.raised.startswith("NotImplementedError in a second run: once is enough")


def test_a_refused_second_run_leaves_the_claim_unjudged():
    runner = runner_of(Tires())
    assert not runner.findings(GOOD, claims.layout)
    assert runner.judged == 0
    assert runner.refusals == {"in a second run: once is enough": 1}
    assert len(runner.tally.problems) == 1


def test_a_refused_second_run_does_not_hide_a_wrong_first():
    class TiresAndErrs(Tires):
        def spoil(self, out, lse, live, N, config):
            return out * 1.001, lse

    (finding, *_) = runner_of(TiresAndErrs()).findings(GOOD, claims.layout)
    assert finding.guarantee == "G1 accuracy"


class Writes(Eager):
    """Writes to an input, in the forward or, for dout, in the backward."""

    score_mods = ("bias",)

    def __call__(self, q, k, v, **rest):
        out, lse = super().__call__(q, k, v, **rest)
        given = {"q": q, "k": k, "v": v, "bias": rest.get("bias")}
        if self.fault == "dout":
            out.register_hook(negate_the_last_row)
        else:
            negate_the_last_row(given[self.fault])
        return out, lse


def negate_the_last_row(x):
    x.data[0, 0, -1].neg_()


@pytest.mark.parametrize("name", ["q", "k", "v", "dout", "bias"])
def test_a_changed_input_is_named(name):
    problem = dataclasses.replace(GOOD, bias="normal/mn")
    (finding,) = runner_of(Writes(name)).findings(problem, claims.independence)
    assert (finding.guarantee, finding.raised.split()[0]) == ("inputs", name)
    assert str(finding).startswith("inputs: subject changes its inputs in place; needs to")


def test_an_output_of_another_shape_is_a_finding():
    class Flat(Long):
        def of_many_keys(self, out, lse):
            return out.flatten(2), lse

    (finding,) = attacked(runner_of(Flat()))
    assert str(finding).startswith(
        "form: subject returns an output of a wrong type, shape or dtype\n"
    )
    assert finding.problem == Problem(N=17, dtype="fp64")
    assert "out has shape (1, 1, 16) and dtype torch.float64; needs (1, 1, 1, 16)" in str(finding)


def test_a_fault_of_the_suite_is_not_laid_on_the_subject():
    def broken(trial):
        raise KeyError("a bug of the check")

    with pytest.raises(KeyError, match="a bug of the check"):
        runner_of(Eager()).findings(GOOD, broken)


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        (Eager(), GOOD),
        (Eager(), WIDE),
        (Wrong(), Problem(N=17, dtype="fp64")),
        (Refuses(), Problem(N=17, dtype="fp64")),
        (Raises(), Problem(N=17, dtype="fp64")),
    ],
    ids=["passes", "out_of_range", "fails", "is_refused", "raises"],
)
def test_the_watchdog_is_open_while_a_problem_is_judged(call, problem):
    events = []

    @contextlib.contextmanager
    def watching(problem):
        events.append(("open", problem))
        try:
            yield
        finally:
            events.append(("close", problem))

    def claim(trial):
        events.append(("checked", trial.problem))
        return []

    runner_of(call, watching=watching).findings(problem, claim)
    words = [word for word, _ in events]
    assert words in (["open", "close"], ["open", "checked", "close"])
    assert {judged for _, judged in events} == {problem}


def test_the_watchdog_sees_what_a_subject_raises():
    seen = []

    @contextlib.contextmanager
    def watching(problem):
        try:
            yield
        except Exception as error:
            seen.append(str(error.__cause__))
            raise

    runner_of(Raises(), watching=watching).findings(Problem(N=17, dtype="fp64"), nothing)
    assert seen == ["17 keys\nare too many"]


def test_every_problem_of_an_attack_is_recorded():
    recorded, ran = [], []

    def claim(trial):
        ran.append(trial.problem)
        return claims.accuracy(trial)

    def watching(problem):
        recorded.append(problem)
        return contextlib.nullcontext()

    attacked(runner_of(Wrong(), watching=watching), claim)
    assert set(ran) <= set(recorded)
    assert Problem(N=17, dtype="fp64") in recorded


def test_no_problem_is_run_twice_by_the_draw(monkeypatch):
    monkeypatch.setattr(search, "minimized", lambda problem, findings, check: findings)
    ran = []

    def claim(trial):
        ran.append(trial.problem)
        return claims.accuracy(trial)

    attacked(runner_of(Wrong()), claim)
    assert len(ran) == len(set(ran))


def test_declarations_bound_the_simplest_problem():
    subject = Wrong()
    subject.head_dims = (24,)
    runner = runner_of(subject)
    (finding, *_) = attacked(runner)
    assert finding.problem == Problem(N=17, D=24, Dv=24, dtype="fp64")
    assert not runner.refusals


def test_shrinking_ends_at_its_time_limit_with_a_problem_that_fails(monkeypatch):
    monkeypatch.setattr(minimize, "_SECONDS", 0.0)
    seconds = itertools.count(step=10.0)
    monkeypatch.setattr(search, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
    ran = []

    def claim(trial):
        ran.append((trial.problem, claims.accuracy(trial)))
        return ran[-1][1]

    found = attacked(runner_of(Wrong()), claim)
    failed = [problem for problem, findings in ran if findings]
    after = len(ran) - [problem for problem, _ in ran].index(failed[0]) - 1
    # Each reading of the clock is ten seconds after the one before.
    assert after == 3
    assert found[0].problem in failed


def test_a_slow_subject_is_shrunk_in_little_more_than_the_limits(monkeypatch):
    monkeypatch.setattr(search, "SHRINK_SECONDS", 0.3)
    monkeypatch.setattr(minimize, "_SECONDS", 0.3)
    failed = []

    class Slow(Wrong):
        def of_many_keys(self, out, lse):
            failed.append(time.monotonic())
            time.sleep(0.05)
            return super().of_many_keys(out, lse)

    attacked(runner_of(Slow()))
    assert failed[-1] - failed[0] < 3


@pytest.mark.parametrize("steer", [True, False])
def test_a_draw_is_steered_by_the_peaks_of_every_output_if_at_all(steer, monkeypatch):
    labels = []
    monkeypatch.setattr(search.hypothesis, "target", lambda peak, label: labels.append(label))
    attack(runner_of(Eager()), nothing, st.just(GOOD), seed="0", steer=steer)
    assert set(labels) == ({f"{name} error/bound" for name in OUTPUTS} if steer else set())


@pytest.mark.parametrize("seeds", [("a", "a"), ("a", "b")], ids=["same_seed", "other_seed"])
def test_the_seed_chooses_what_is_drawn(seeds):
    drawn = []
    for seed in seeds:
        drawn.append([])
        runner = runner_of(Eager(), watching=lambda p: drawn[-1].append(p) or OPEN)
        attack(runner, nothing, DRAWN, seed=seed, settings=REPEATABLE)
    assert (drawn[0] == drawn[1]) == (seeds[0] == seeds[1])


SETTINGS = {
    "the default device from cpu to meta": lambda: torch.set_default_device("meta"),
    "the default dtype from torch.float32 to torch.float64": (
        lambda: torch.set_default_dtype(torch.float64)
    ),
    "the grad mode from True to False": lambda: torch.set_grad_enabled(False),
    "the deterministic mode from 1 to 0": lambda: torch.use_deterministic_algorithms(False),
    "fill_uninitialized_memory from True to False": (
        lambda: setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    ),
    "the precision of float32 products from highest to high": (
        lambda: torch.set_float32_matmul_precision("high")
    ),
    "the state of the default generator": lambda: torch.rand(1),
}


@pytest.mark.parametrize("refuses", [False, True])
@pytest.mark.parametrize("setting", SETTINGS)
def test_a_changed_global_setting_is_a_finding_and_restored(setting, refuses):
    def before():
        return (
            torch.get_default_device(), torch.get_default_dtype(), torch.is_grad_enabled(),
            torch.get_deterministic_debug_mode(), torch.get_float32_matmul_precision(),
            torch.utils.deterministic.fill_uninitialized_memory, torch.get_rng_state().tolist(),
        )  # fmt: skip

    def changing(q, k, v, *, mask, sm_scale):
        SETTINGS[setting]()
        if refuses:
            raise NotImplementedError("no")
        return (torch.zeros(*q.shape[:3], v.shape[3], device="cpu") + 0 * q).to(q.dtype)

    then = before()
    runner = runner_of(changing)
    (finding,) = runner.findings(Problem(), claims.accuracy)
    assert finding.guarantee == "inputs"
    assert finding.raised.splitlines()[0] == f"it changes {setting}"
    assert ("and raises NotImplementedError: no" in finding.raised) is refuses
    assert before() == then


def test_a_not_implemented_error_around_the_call_is_an_error_of_the_suite():
    def broken(trial):
        raise NotImplementedError("in a check")

    runner = runner_of(Eager())
    with pytest.raises(NotImplementedError, match="in a check"):
        runner.findings(Problem(), broken)
    assert runner.refusals == {}
    assert runner.tally.asked == {}
