"""G8, G9, G10 and G13: the second runs of each check, and the faults that they find."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given

from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.masks.prefix_lm import PrefixLM
from fa_verify.oracles.problem import Problem
from fa_verify.properties.guarantees import claims, invariance
from fa_verify.properties.guarantees.invariance import neighbours, one_change_each
from fa_verify.properties.kernels.refusals import RefusedError
from fa_verify.properties.kernels.subject import Subject
from fa_verify.properties.problems.strategies import problems
from fa_verify.properties.running.trial import SubjectError, run_subject, run_trial
from tests.unit.properties.kernels.broken_subjects import Eager

PROBLEM = Problem(
    B=2,
    H=4,
    Hk=2,
    M=6,
    N=5,
    D=8,
    Dv=3,
    dtype="fp64",
    mask=Mask(causal=True, seqlens_q=(5, 6), seqlens_k=(5, 2)),
    layouts=("bshd", "padded", "transposed", "packed"),
)
# The problems are small because each runs several times.
SMALL = {"dtype": "fp64", "max_seqlen": 20, "max_cost": 8, "head_dims": (16, 3, 5)}
CHECKS = (claims.layout, claims.independence)


def tried(subject, problem: Problem = PROBLEM):
    trial = run_trial(Subject.of(subject, "subject"), problem)
    assert trial is not None
    return trial


def changed_fields(problem: Problem, other: Problem) -> list[str]:
    return [
        item.name
        for item in dataclasses.fields(problem)
        if getattr(problem, item.name) != getattr(other, item.name)
    ]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@given(problem=problems(**SMALL))
def test_a_correct_subject_passes(check, problem):
    trial = run_trial(Subject.of(Eager(), "eager"), problem)
    assert trial is None or check(trial) == []


@given(problems())
def test_neighbours_differ_in_one_thing_each(problem):
    changed = [changed_fields(problem, other) for other in neighbours(problem)]
    assert sorted(map(tuple, changed)) == sorted(
        (name,) for name in ("seed", "M", "N", "H", "D", "sm_scale", "mask", "dtype")
    )


@given(problems())
def test_the_neighbouring_mask_shows_other_pairs_where_there_are_any_to_differ(problem):
    (other,) = (x for x in neighbours(problem) if x.mask != problem.mask)
    assert other.mask.right != problem.mask.right
    assert 0 in (other.mask.right, problem.mask.right)
    assert other.mask.seqlens_k == problem.mask.seqlens_k


@pytest.mark.parametrize("D", [1, 2, 7, 8, 15, 16, 17, 32, 33, 40, 64, 100, 128, 255, 256])
def test_the_neighbouring_head_dim_is_padded_and_aligned_alike(D):
    (other,) = (x for x in neighbours(Problem(D=D)) if x.D != D)
    assert abs(other.D - D) == (1 if D % 8 else 8)
    assert (other.D % 8 == 0) == (D % 8 == 0)
    assert (max(other.D, 16) - 1).bit_length() == (max(D, 16) - 1).bit_length()


@pytest.mark.parametrize("scale", [5e-324, 1e-300, 1.0, 1.7e308])
def test_every_scale_has_a_neighbour(scale):
    problem = Problem(sm_scale=scale)
    (other,) = (x for x in neighbours(problem) if x.sm_scale != scale)
    assert max(scale, other.scale) == 2 * min(scale, other.scale)


class Stale(Eager):
    """A subject that errs after a call that differed in a single argument."""

    bitwise = ("G4", "G5", "G8", "G10")

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        self.before: dict[str, object] = {}

    def __call__(self, q, k, v, *, mask, sm_scale):
        now = {
            "seed": float(q.abs().sum()),
            "M": q.shape[2],
            "N": k.shape[2],
            "H": q.shape[1],
            "D": q.shape[3],
            "sm_scale": sm_scale,
            "mask": mask,
            "dtype": q.dtype,
        }
        spoilt = self.before.get(self.what, now[self.what]) != now[self.what]
        self.before = now
        out, lse = super().__call__(q, k, v, mask=mask, sm_scale=sm_scale)
        return (2 * out, lse) if spoilt else (out, lse)


@pytest.mark.parametrize("what", ["seed", "M", "N", "H", "D", "sm_scale", "mask", "dtype"])
def test_a_subject_that_confuses_calls_is_caught_whatever_tells_them_apart(what):
    found = claims.state(tried(Stale(what)))
    assert [finding.output for finding in found] == ["out", "dq", "dk", "dv"]


def test_a_finding_on_state_says_what_the_call_in_between_was():
    (finding, *_) = claims.state(tried(Stale("N")))
    assert finding.guarantee == "G13 state"
    assert finding.claim == "differs after a call with N=6"
    assert finding.problem == PROBLEM


def test_a_neighbour_that_the_subject_refuses_is_passed_over():
    class OneLength(Stale):
        m_ne_n = False

    square = dataclasses.replace(PROBLEM, M=5, mask=Mask())
    assert claims.state(tried(OneLength("sm_scale"), square)) != []


class First(Eager):
    """A subject that keeps an argument of its first call for all later calls of these shapes."""

    dtypes = ("fp64", "fp32")
    score_mods = ("softcap", "alibi", "bias")

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        self.kept: dict[tuple[object, ...], object] = {}

    def __call__(self, q, k, v, **arguments):
        key = (q.dtype, q.shape, k.shape, v.shape)
        if self.what != "mask" or arguments["mask"].seqlens_q is None:
            kept = self.kept.setdefault(key, arguments.get(self.what))
            arguments[self.what] = kept
        return super().__call__(q, k, v, **arguments)


@pytest.mark.parametrize("what", ["softcap", "alibi_slopes", "bias", "sm_scale", "mask"])
def test_a_call_that_takes_an_argument_of_the_call_before_is_caught(what):
    found = claims.sequence(tried(First(what), Problem(M=5, N=6, dtype="fp64")))
    assert found[0].guarantee == "G13 state"
    assert "in a call with" in found[0].claim
    assert found[0].problem == Problem(M=5, N=6, dtype="fp64")


def test_a_sequence_changes_every_field_of_a_problem_and_of_its_mask():
    problem = Problem(B=2, H=4, Hk=2, M=9, N=13, mask=PrefixLM(prefix=3))
    others = list(one_change_each(problem, ["other"]))
    changed = [changed_fields(problem, other) for other in others]
    contents = {"inputs", "dout", "dirty", "device", "seeds"}
    fields = {item.name for item in dataclasses.fields(Problem)}
    assert {name for (name,) in changed} == fields - contents
    masks = [changed_fields(problem.mask, x.mask) for x in others if x.mask != problem.mask]
    # Lengths also change their order.
    names = [item.name for item in dataclasses.fields(PrefixLM)]
    assert sorted(masks) == sorted([name] for name in (*names, "seqlens_q", "seqlens_k"))
    orders = [x.mask.seqlens_k for x in others if x.mask.seqlens_k is not None]
    assert sorted(orders[0]) == sorted(orders[1])
    assert orders[0] != orders[1]


def test_a_new_field_of_a_problem_needs_a_change():
    fields = [("temperature", float, 1.0)]
    wider = dataclasses.make_dataclass("Wider", fields, bases=(Problem,), frozen=True, kw_only=True)
    with pytest.raises(KeyError, match="temperature"):
        list(one_change_each(wider(), []))


def recorded(check, trial, monkeypatch):
    """(problem, inputs) of every further run of a check."""
    seen = []

    def record(subject, problem, inputs):
        seen.append((problem, inputs))
        return run_subject(subject, problem, inputs)

    monkeypatch.setattr(invariance, "run_subject", record)
    assert check(trial) == []
    return seen


def slice_alone(seed: int, monkeypatch):
    """((b, group), its problem, its inputs, the trial) of the slice computed alone."""
    trial = tried(Eager(), dataclasses.replace(PROBLEM, seed=seed))
    ((problem, inputs),) = recorded(claims.independence, trial, monkeypatch)
    (found,) = (
        (b, group)
        for b in range(PROBLEM.B)
        for group in range(PROBLEM.Hk)
        if torch.equal(inputs.k, trial.inputs.k[b : b + 1, group : group + 1])
    )
    return found, problem, inputs, trial


def test_every_batch_entry_and_group_of_heads_is_computed_alone_by_some_seed(monkeypatch):
    found = {slice_alone(seed, monkeypatch)[0] for seed in range(4)}
    assert found == {(b, group) for b in range(2) for group in range(2)}


@pytest.mark.parametrize("seed", range(4))
def test_a_slice_alone_is_views_of_the_same_tensors(seed, monkeypatch):
    (b, group), problem, inputs, trial = slice_alone(seed, monkeypatch)
    assert (problem.B, problem.H, problem.Hk) == (1, 2, 1)
    for part, whole in zip(inputs.tensors, trial.inputs.tensors, strict=True):
        heads = whole.shape[1] // PROBLEM.Hk
        want = whole[b : b + 1, group * heads : (group + 1) * heads]
        assert torch.equal(part, want)
        assert part.stride() == want.stride()
        assert part.data_ptr() == want.data_ptr()


@pytest.mark.parametrize("seed", range(4))
def test_a_slice_alone_has_the_lengths_of_its_batch_entry(seed, monkeypatch):
    (b, _), problem, _, _ = slice_alone(seed, monkeypatch)
    mask = PROBLEM.mask
    assert problem.mask == dataclasses.replace(
        mask, seqlens_q=mask.seqlens_q[b : b + 1], seqlens_k=mask.seqlens_k[b : b + 1]
    )


class Crosstalk(Eager):
    """A subject that leaks a little of one slice into another, in the output or a gradient."""

    bitwise = ("G4", "G5", "G8", "G9", "G10")

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what

    def misread(self, q, k, v, sm_scale):
        if self.what == "dk":
            k = _LeakyGradient.apply(k)
        if self.what == "dq":
            q = _LeakyGradient.apply(q)
        return q, k, v, sm_scale

    def spoil(self, out, lse, live, N, config):
        if self.what == "lse":
            lse = lse + 0.001 * lse.nan_to_num(neginf=0.0).sum()
        return out, lse


class _LeakyGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient + gradient.sum((0, 1))


@pytest.mark.parametrize("what", ["lse", "dq", "dk"])
@pytest.mark.parametrize("seed", range(4))
def test_a_leak_between_slices_is_found_in_the_output_it_reaches(what, seed):
    problem = dataclasses.replace(PROBLEM, seed=seed, mask=Mask())
    found = claims.independence(tried(Crosstalk(what), problem))
    assert what in [finding.output for finding in found]
    assert {finding.guarantee for finding in found} == {"G9 independence"}


@pytest.mark.parametrize("sizes", [{"B": 0}, {"B": 1, "H": 2, "Hk": 1}], ids=["none", "one"])
def test_independence_has_nothing_to_check_on_fewer_than_two_slices(sizes, monkeypatch):
    problem = dataclasses.replace(PROBLEM, mask=Mask(), **sizes)
    assert recorded(claims.independence, tried(Eager(), problem), monkeypatch) == []


def test_layout_runs_on_contiguous_copies_of_the_same_elements(monkeypatch):
    trial = tried(Eager())
    (_, inputs), *_ = recorded(claims.layout, trial, monkeypatch)
    for before, after in zip(trial.inputs.tensors, inputs.tensors, strict=True):
        assert torch.equal(before, after)
        assert after.is_contiguous()


class Expanded(Eager):
    """A subject that errs if the gradient of its output has stride 0 in every axis."""

    def spoil(self, out, lse, live, N, config):
        return _WrongIfExpanded.apply(out), lse


class _WrongIfExpanded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient if set(gradient.stride()) == {0} else gradient


@pytest.mark.parametrize("bitwise", [("G8", "G10"), ()], ids=["promised", "held_to_the_bound"])
def test_a_fault_on_the_gradient_of_a_sum_is_caught(bitwise):
    subject = Expanded()
    subject.bitwise = bitwise
    found = claims.layout(tried(subject))
    assert {x.output for x in found} == {"dq", "dk", "dv"}
    assert all(x.claim.startswith("differs between a dout of out.sum().backward()") for x in found)


@pytest.mark.parametrize("dout", ["zero", "tiny"])
def test_the_gradient_of_a_sum_is_held_to_a_bound_of_its_own(dout):
    subject = Eager()
    subject.bitwise = ()
    assert (
        claims.layout(tried(subject, dataclasses.replace(PROBLEM, dtype="fp32", dout=dout))) == []
    )


def test_the_gradient_of_a_sum_is_that_of_ones_where_bits_are_promised():
    subject = Eager()
    subject.bitwise = ("G8",)
    contiguous = dataclasses.replace(PROBLEM, layouts=("bhsd",) * 4)
    assert claims.layout(tried(subject, contiguous)) == []


def test_a_subject_without_gradients_has_none_of_a_sum(monkeypatch):
    class Forward(Eager):
        backward = False

    assert len(recorded(claims.layout, tried(Forward()), monkeypatch)) == 1


def test_a_refusal_of_what_was_computed_is_no_refusal(monkeypatch):
    def refuse(subject, problem, inputs):
        raise RefusedError("once is enough")

    trial = tried(Eager())
    monkeypatch.setattr(invariance, "run_subject", refuse)
    with pytest.raises(
        SubjectError, match=r"^NotImplementedError in a second run: once is enough$"
    ):
        claims.repeatable(trial)


def test_repeatable_runs_on_the_same_problem_and_inputs(monkeypatch):
    trial = tried(Eager())
    runs = recorded(claims.repeatable, trial, monkeypatch)
    assert len(runs) == 3
    assert all(problem is trial.problem and inputs is trial.inputs for problem, inputs in runs)
