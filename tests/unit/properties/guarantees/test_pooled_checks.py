"""Each check of pooled probabilities catches its fault and passes a correct subject."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch

from fa_verify.oracles.bounds.pooled import pooled_bound
from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.outputs import Numerics
from fa_verify.oracles.problem import Problem
from fa_verify.oracles.reference.pooled import pooled_probabilities
from fa_verify.properties.guarantees import pooled
from fa_verify.properties.guarantees.claims import checks_of
from fa_verify.properties.kernels.subject import Subject
from fa_verify.properties.running.trial import SubjectError, run_trial
from tests.unit.properties.kernels.broken_subjects import Eager

# Blocks of 7 rows by 3 keys; grouped heads; padding; rows and keys that see only a part.
PROBLEM = Problem(
    B=2, H=4, Hk=2, M=20, N=13, D=5, Dv=3, dtype="fp64", dirty="nan", seed=3,
    layouts=("padded", "bhsd", "bhsd", "bhsd"),
    mask=Mask(causal=True, seqlens_q=(17, 20), seqlens_k=(13, 9)),
)  # fmt: skip
# An error within a float64 bound, which only a promise of equal bits forbids.
SLIGHTLY = 1 + 2.0**-50


class Pools(Eager):
    """Eager attention that pools like the oracle, or with one fault."""

    bitwise = ("G4", "G5", "G8", "G9", "G10")

    def __init__(self, fault: str = "", **declared: object) -> None:
        super().__init__()
        self.wrong = fault
        self.runs = 0
        for name, value in declared.items():
            setattr(self, name, value)

    def pooled(self, q, k, v, *, mask, sm_scale, pool, pool_size):
        self.runs += 1
        asked = {"mask": mask, "sm_scale": sm_scale, "pool": pool, "size": pool_size}
        found = pooled_probabilities(q, k, **asked)
        if self.wrong == "one block off":
            found[1, 2, 1, 0] += 1e-11
        if self.wrong == "one maximum off" and pool == "max":
            found[1, 2, 1, 0] += 1e-11
        if self.wrong == "off by half as much again as allowed":
            found += 1.5 * pooled_bound(q, k, **asked, in_dtype="fp64", numerics=Numerics())
        if self.wrong == "counts padding":
            rows = torch.arange(q.shape[2], device=q.device).split(pool_size[0])
            found[:, :, -1] *= len(rows[-1]) / pool_size[0]
        if self.wrong == "NaN":
            found[0, 0, 0, 0] = torch.nan
        if self.wrong == "something where nothing is visible":
            found[:, :, 0, -1] = 1e-300
        if self.wrong == "reads padding" and q[0, 0, -1, 0].isnan():
            found = found * SLIGHTLY
        if self.wrong == "of a hidden key" and (k[1, :, :9] > 1e300).any():
            found[1] *= SLIGHTLY
        if self.wrong == "of strides" and not q.is_contiguous():
            found = found * SLIGHTLY
        if self.wrong == "of what lies around" and not q.is_contiguous():
            before = q.as_strided((), (), q.storage_offset() - 1)
            found = found if before.isnan() else found * SLIGHTLY
        if self.wrong == "of other heads":
            found = found * SLIGHTLY ** (q.shape[1] - 2)
        if self.wrong == "of the run":
            found = found * SLIGHTLY ** (self.runs - 1)
        if self.wrong == "not written":
            written = found.clone()
            found = torch.empty(found.shape, dtype=found.dtype)
            found[:, :, 1:] = written[:, :, 1:]
        if self.wrong == "written past its end":
            written = found
            found = torch.empty(found.shape, dtype=found.dtype).copy_(written)
            found.as_strided((found.numel() + 1,), (1,))[-1] = 0
        if self.wrong == "float32":
            found = found.float()
        if self.wrong == "transposed":
            found = found.mT
        if self.wrong == "a pair":
            found = (found, found)
        return found


def findings(check: str, fault: str = "", problem: Problem = PROBLEM, **declared: object):
    trial = run_trial(Subject.of(Pools(fault, **declared), "pools"), problem)
    assert trial is not None
    return checks_of("pooled")[check](trial)


@pytest.mark.parametrize("seed", [3, 11, 54, 78, 99])
@pytest.mark.parametrize("check", checks_of("pooled"))
def test_a_correct_subject_passes(check, seed):
    assert findings(check, problem=dataclasses.replace(PROBLEM, seed=seed)) == []


@pytest.mark.parametrize("sizes", [{"B": 0}, {"M": 0}, {"N": 0}], ids=str)
@pytest.mark.parametrize("check", checks_of("pooled"))
def test_a_correct_subject_passes_without_elements(check, sizes):
    problem = dataclasses.replace(PROBLEM, mask=Mask(causal=True), **sizes)
    assert findings(check, problem=problem) == []


FAULTS = [
    ("pooled G1", "one block off", "pooled mean", "b=1 h=2 m=7..13 n=0..2"),
    ("pooled T3", "one block off", "pooled mean", "b=1 h=2 m=7..13 n=0..2"),
    ("pooled G1", "one maximum off", "pooled max", "b=1 h=2 m=7..13 n=0..2"),
    ("pooled G1", "off by half as much again as allowed", "pooled mean", "m="),
    ("pooled G1", "counts padding", "pooled mean", "m=14..19"),
    ("pooled G1", "NaN", "pooled mean", "b=0 h=0 m=0..6 n=0..2"),
    ("pooled G1", "something where nothing is visible", "pooled mean", "m=0..6 n=12..12"),
    ("pooled G4", "reads padding", "pooled max", "m="),
    ("pooled G5", "of a hidden key", "pooled max", "b=1"),
    ("pooled G6", "not written", "pooled max", "m=0..6"),
    ("pooled G6", "NaN", "pooled max", "b=0 h=0 m=0..6 n=0..2"),
    ("pooled G6", "written past its end", "a tensor of pooled max", "byte 1 after its last"),
    ("pooled G7", "of what lies around", "pooled max", "m="),
    ("pooled G8", "of strides", "pooled max", "m="),
    ("pooled G9", "of other heads", "pooled max", "m="),
    ("pooled G10", "of the run", "pooled max", "m="),
]


@pytest.mark.parametrize(("check", "fault", "output", "where"), FAULTS)
def test_a_fault_is_found_named_and_can_be_replayed(check, fault, output, where):
    found = findings(check, fault)
    assert found
    assert found[0].output == output
    assert where in found[0].where
    assert found[0].guarantee.split()[0] == check.split()[1]
    assert f"pytest --fa-replay='{PROBLEM.to_json()}'" in str(found[0])


def test_nan_that_is_written_is_not_said_to_be_unwritten():
    written, unwritten = (findings("pooled G6", x)[0].claim for x in ("NaN", "not written"))
    assert "which the kernel writes" in written
    assert "is not written everywhere" in unwritten


def test_a_finding_says_how_large_the_blocks_are_and_how_many_are_bad():
    (found, *_) = findings("pooled G1", "something where nothing is visible")
    assert (found.bad, found.total) == (8, 2 * 4 * 3 * 5)
    assert found.places == "blocks of 7 x 3 pairs"
    assert (found.want, found.bound) == (0.0, 0.0)


@pytest.mark.parametrize("fields", [{"sm_scale": 400.0}, {"dtype": "fp32"}], ids=str)
def test_logic_is_asked_where_nothing_but_logic_shows(fields):
    problem = dataclasses.replace(PROBLEM, **fields)
    assert findings("pooled T3", "one maximum off", problem) == []


UNPROMISED = [row[:2] for row in FAULTS if row[0].split()[1] in ("G4", "G5", "G8", "G9", "G10")]


@pytest.mark.parametrize(("check", "fault"), UNPROMISED)
def test_results_without_a_promise_of_bits_are_compared_with_the_bound(check, fault, monkeypatch):
    assert findings(check, fault, bitwise=()) == []
    monkeypatch.setattr(f"{__name__}.SLIGHTLY", 1.001)
    found = findings(check, fault, bitwise=())
    assert found
    assert found[0].claim.endswith("and leaves the bound")


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("float32", "pooled has shape (2, 4, 3, 5) and dtype torch.float32"),
        ("transposed", "pooled has shape (2, 4, 5, 3)"),
        ("a pair", "returns tuple as pooled; needs a tensor"),
    ],
)
def test_another_form_is_an_error_of_the_subject(fault, says):
    with pytest.raises(SubjectError, match=re.escape(says)):
        findings("pooled G1", fault)


@pytest.mark.parametrize("check", checks_of("pooled"))
def test_a_subject_that_pools_nothing_is_asked_nothing(check):
    trial = run_trial(Subject.of(Eager(), "eager"), PROBLEM)
    assert checks_of("pooled")[check](trial) == []
    with pytest.raises(NotImplementedError, match="eager declares no pooled"):
        trial.subject.run_pooled(*trial.inputs[:3], PROBLEM, "mean", (2, 2))


def test_a_problem_outside_of_the_declarations_is_refused():
    subject = Subject.of(Pools(gqa=False), "pools")
    with pytest.raises(NotImplementedError, match="pools declares gqa False"):
        subject.run_pooled(*torch.zeros(3, 2, 4, 20, 5), PROBLEM, "mean", (2, 2))


def test_seeds_give_blocks_of_one_pair_of_primes_of_tiles_and_of_more_than_there_is():
    subject = Subject.of(Pools(tiles=lambda problem: (16, 32)), "pools")
    sizes = {pooled.pool_size(subject, Problem(M=40, N=70, seed=seed)) for seed in range(100)}
    rows, keys = (set(of) for of in zip(*sizes, strict=True))
    assert rows == {1, 2, 3, 7, 13, 16, 17, 20, 32, 45}
    assert keys == {1, 2, 3, 7, 13, 32, 33, 35, 64, 75}
    assert len(sizes) == 100
