"""Batched problems concatenate their problems: same bits, same counts, same findings."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from fa_verify.oracles.masks.document import Document
from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.masks.prefix_lm import PrefixLM
from fa_verify.oracles.problem import LAYOUTS, Problem
from fa_verify.properties.guarantees import claims
from fa_verify.properties.guarantees.compare import Violation
from fa_verify.properties.inputs.families import DLSE, DOUT, INPUTS, PADDING_VALUES
from fa_verify.properties.inputs.tensors import make
from fa_verify.properties.kernels.subject import Subject
from fa_verify.properties.problems.batched import LARGEST, batched_problems
from fa_verify.properties.problems.strategies import problems
from fa_verify.properties.running.tally import Tally
from fa_verify.properties.search.search import Runner, attack, draws
from tests.unit.properties.kernels.broken_subjects import Eager
from tests.unit.properties.problems.sampling import drawn

SEEDS = (7, 2**31 - 1, 40)
# Problems of two batch entries each.
BATCHED = Problem(
    B=6, H=3, M=5, N=7, D=5, Dv=3, dtype="fp64", seeds=SEEDS,
    mask=Mask(causal=True, seqlens_q=(5, 0, 3, 1, 5, 4), seqlens_k=(7, 3, 6, 7, 0, 1)),
)  # fmt: skip
# Problems of one entry each and of odd sizes, so that parts start at odd and at even elements.
ODD = dataclasses.replace(BATCHED, B=3, mask=Mask(seqlens_q=(3, 4, 1), seqlens_k=(2, 5, 6)))


def same_values(whole, parts):
    rows = [torch.cat(tensors) for tensors in zip(*(x.tensors for x in parts), strict=True)]
    pairs = zip(whole.tensors, rows, strict=True)
    return all(torch.equal(a.nan_to_num(7.5), b.nan_to_num(7.5)) for a, b in pairs)


def parts_of(batched):
    return [batched.part(i, i + 1) for i in range(len(batched.all_seeds))]


@pytest.mark.parametrize("family", INPUTS)
def test_inputs_are_those_of_the_problems(family):
    for dtype in ("fp16", "fp64"):
        batched = dataclasses.replace(BATCHED, inputs=family, dtype=dtype)
        assert same_values(make(batched), map(make, parts_of(batched)))


@pytest.mark.parametrize("family", DOUT)
def test_dout_is_that_of_the_problems(family):
    batched = dataclasses.replace(BATCHED, dout=family)
    assert same_values(make(batched), map(make, parts_of(batched)))


@pytest.mark.parametrize("family", DLSE)
def test_dlse_is_that_of_the_problems(family):
    batched = dataclasses.replace(BATCHED, dlse=family, dirty="inf")
    parts = parts_of(batched)
    assert torch.equal(make(batched).dlse, torch.cat([make(part).dlse for part in parts]))


@pytest.mark.parametrize("family", PADDING_VALUES)
def test_padding_values_are_those_of_the_problems(family):
    for batched in (BATCHED, ODD):
        dirtied = dataclasses.replace(batched, dirty=family)
        assert same_values(make(dirtied), map(make, parts_of(dirtied)))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_hold_the_values_of_the_problems(layout):
    batched = dataclasses.replace(BATCHED, layouts=(layout,) * 4, inputs="outliers")
    assert same_values(make(batched), map(make, parts_of(batched)))


def test_parts_have_their_own_seed_lengths_and_entries():
    second = BATCHED.part(1, 2)
    assert (second.B, second.seed, second.seeds) == (2, 2**31 - 1, ())
    assert second.mask == Mask(causal=True, seqlens_q=(3, 1), seqlens_k=(6, 7))
    last = BATCHED.part(1, 3)
    assert (last.B, last.seed, last.seeds) == (4, 0, SEEDS[1:])
    assert last.mask.seqlens_k == (6, 7, 0, 1)


def test_json_gives_the_batched_problem_back():
    assert Problem.from_json(BATCHED.to_json()) == BATCHED
    assert "seeds" not in Problem(seed=3).to_json()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"seed": 1}, "3 seeds, seed is 1 and B is 6"),
        ({"B": 4, "mask": Mask()}, "3 seeds, seed is 0 and B is 4"),
        ({"B": 0, "mask": Mask()}, "3 seeds, seed is 0 and B is 0"),
        ({"seeds": (1, -1)}, r"seeds\[1\] is -1"),
    ],
)
def test_a_batched_problem_that_makes_no_sense_is_refused(change, says):
    with pytest.raises(ValueError, match=says):
        dataclasses.replace(BATCHED, **change)
    with pytest.raises(TypeError, match=r"seeds\[0\] is '1'"):
        Problem(seeds=("1",))


def drawn_batched(max_cost=200, **wanted):
    return drawn(
        batched_problems(problems(max_seqlen=40, **wanted), tile=16, max_cost=max_cost), 60
    )


def cost(problem):
    return problem.B * problem.H * -(-problem.M // 16) * -(-problem.N // 16)


def test_batched_problems_are_as_large_as_they_may_be_and_their_problems_differ():
    found = drawn_batched(1000)
    assert all(cost(batched) <= 1000 for batched in found)
    assert max(len(batched.seeds) for batched in found) == LARGEST
    assert sum(len(batched.seeds) > 2 for batched in found) > len(found) / 2
    for batched in found:
        parts = parts_of(batched)
        assert len(set(parts)) == len(parts)
        assert all((p.M, p.N, p.B * len(parts)) == (batched.M, batched.N, batched.B) for p in parts)


def test_lengths_of_batched_problems_differ_where_there_are_some():
    padded = [x for x in drawn_batched(masks=("padding",)) if len(x.seeds) > 8 and x.N > 8]
    given = [x for x in padded if x.mask.seqlens_k]
    assert all(len(set(x.mask.seqlens_k)) > 2 for x in given)
    assert any(max(x.mask.seqlens_k[x.B // len(x.seeds) :]) > x.M for x in given)
    plain = drawn_batched(masks=("full", "causal"))
    assert all((x.mask.seqlens_q, x.mask.seqlens_k) == (None, None) for x in plain)


def test_problems_that_cannot_be_batched_stay_alone():
    assert {x.seeds for x in drawn_batched(mask=Document, masks=("full",))} == {()}
    assert any(x.seeds for x in drawn_batched(mask=PrefixLM, masks=("full",)))
    assert not any(x.seeds for x in drawn_batched() if 0 in (x.B, x.M, x.N))


def runner_of(subject):
    return Runner(Subject.of(subject, "subject"), Tally())


def test_every_problem_of_a_batched_problem_is_counted_with_its_own_worst():
    together, apart = runner_of(Eager()), runner_of(Eager())
    assert together.findings(BATCHED, claims.accuracy) == []
    for part in parts_of(BATCHED):
        assert apart.findings(part, claims.accuracy) == []
    assert together.judged == len(SEEDS) == len(together.tally.problems)
    assert together.tally.problems == apart.tally.problems
    assert together.tally.worst.keys() == apart.tally.worst.keys()
    assert together.subject.call.calls == 1


def test_problems_out_of_range_are_left_out_and_the_others_judged():
    # Scores reach about 1e5 for long keys: some of these problems are in range, some are not.
    batched = Problem(B=8, D=2, dtype="fp64", sm_scale=4e5, seeds=tuple(range(8)))
    apart = runner_of(Eager())
    assert not any(apart.findings(part, claims.accuracy) for part in parts_of(batched))
    assert apart.judged > 0 < apart.out_of_range
    together = runner_of(Eager())
    assert together.findings(batched, claims.accuracy) == []
    assert together.tally.problems == apart.tally.problems
    assert together.tally.out_of_range == apart.tally.out_of_range
    assert (together.judged, together.out_of_range) == (apart.judged, apart.out_of_range)
    assert together.peaks == {
        name: pytest.approx(ratio) for name, (ratio, _) in worst_of(apart.tally).items()
    }


def worst_of(tally):
    return {key.split()[0]: value for key, value in tally.worst.items()}


class WrongOnPositiveKeys(Eager):
    """A subject that errs in batch entries whose first key has a positive first element."""

    def __call__(self, q, k, v, **arguments):
        out, lse = super().__call__(q, k, v, **arguments)
        return out + 1e-3 * (k[:, :1, :1, :1].detach() > 0), lse


class WrongBeyond(Eager):
    """A subject that errs for more than two batch entries."""

    def __call__(self, q, k, v, **arguments):
        out, lse = super().__call__(q, k, v, **arguments)
        return (out + 1e-3 if len(q) > 2 else out), lse


class RaisesOnPositiveKeys(Eager):
    """A subject that raises if a first key has a positive first element."""

    def __call__(self, q, k, v, **arguments):
        if (k[:, 0, 0, 0] > 0).any():
            raise RuntimeError("positive")
        return super().__call__(q, k, v, **arguments)


@pytest.mark.parametrize("subject", [WrongOnPositiveKeys, RaisesOnPositiveKeys])
def test_a_failing_problem_is_found_alone(subject):
    batched = Problem(B=8, M=3, N=4, dtype="fp64", seeds=tuple(range(8)))
    wrong = [i for i, part in enumerate(parts_of(batched)) if float(make(part).k[0, 0, 0, 0]) > 0]
    assert 0 < len(wrong) < 8
    [finding, *_] = runner_of(subject()).findings(batched, claims.accuracy)
    assert finding.problem in [batched.part(i, i + 1) for i in wrong]


class RefusesAlone(WrongBeyond):
    """A subject that errs for more than two batch entries and refuses a single one."""

    def __call__(self, q, k, v, **arguments):
        if len(q) == 1:
            raise NotImplementedError("one batch entry")
        return super().__call__(q, k, v, **arguments)


class RaisesAlone(WrongBeyond):
    """A subject that errs for more than two batch entries and raises for a single one."""

    def __call__(self, q, k, v, **arguments):
        if len(q) == 1:
            raise RuntimeError("one batch entry")
        return super().__call__(q, k, v, **arguments)


@pytest.mark.parametrize("subject", [RefusesAlone, RaisesAlone])
def test_a_batched_problem_fails_though_its_problems_are_not_computed_alone(subject):
    batched = Problem(B=8, M=3, N=4, dtype="fp64", seeds=tuple(range(8)))
    [finding, *_] = runner_of(subject()).findings(batched, claims.accuracy)
    assert (finding.problem, finding.guarantee) == (batched, "G1 accuracy")


def test_a_failure_of_several_entries_is_found_and_minimised():
    batched = Problem(B=8, M=3, N=4, dtype="fp64", seeds=tuple(range(8)))
    [finding, *_] = runner_of(WrongBeyond()).findings(batched, claims.accuracy)
    assert finding.problem == batched
    assert "seeds" in finding.replay
    with pytest.raises(Violation) as violation:
        attack(
            runner_of(WrongBeyond()),
            claims.accuracy,
            batched_problems(problems(dtype="fp64", max_batch=1), tile=16, max_cost=200),
            seed="stacks",
            settings=draws(30),
        )
    smallest = violation.value.findings[0].problem
    assert (smallest.B, smallest.seeds) == (3, ())
