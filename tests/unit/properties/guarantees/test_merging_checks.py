"""The checks of merged states find broken merges and wrong declarations, and pass correct ones."""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path

import pytest
import torch

from fa_verify.oracles.bounds.in_numpy.merging import gradient_errors as by_pairs
from fa_verify.oracles.bounds.ring import gradient_errors
from fa_verify.oracles.calls.codec import call_from_json
from fa_verify.oracles.calls.merge import MergeProblem
from fa_verify.oracles.calls.ring import RingProblem
from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.problem import Problem
from fa_verify.oracles.reference.torch_reference import attention
from fa_verify.oracles.stream import normal, uniform
from fa_verify.properties.guarantees.claims import checks_of
from fa_verify.properties.inputs.states import make_states, stored_states
from fa_verify.properties.inputs.tensors import make
from fa_verify.properties.kernels.loading import load
from fa_verify.properties.kernels.subject import Subject
from fa_verify.properties.kinds.rings import part_problems
from tests.unit.properties.guarantees.calls import found_on

MERGES = checks_of(kind="merge")
PROBLEMS = tuple(
    MergeProblem(parts=(3, 0, 5, 17), B=2, H=2, M=4, Dv=5, hidden=4, dtype=dtype, lse=lse,
                 seed=seed, layout=layout)
    for seed, (dtype, lse, layout) in enumerate((
        ("fp64", "normal", "parts"), ("fp32", "rising", "parts inside"), ("bf16", "low", "gaps"),
        ("fp16", "lowest", "heads inside"),
    ))
)  # fmt: skip


def torch_merge(outs, lses, *, base_2=False, empty=-math.inf, weights=None, changed=lambda x: x):
    """A merge in PyTorch, in float32 or float64, differentiable, in a convention."""
    acc = torch.float64 if outs.dtype == torch.float64 else torch.float32
    live = lses != empty
    some = live.any(0)
    of_live = torch.where(live, lses, 0.0)
    floor = torch.full_like(some, -math.inf, dtype=acc)[None]
    top = torch.cat((torch.where(live, lses, -math.inf), floor)).amax(0).detach()
    top = torch.where(some, top, 0.0)
    power = torch.exp2 if base_2 else torch.exp
    e = torch.where(live, power(of_live - top), 0.0)
    e = e if weights is None else weights(e)
    total = torch.where(some, e.sum(0), 1.0)
    out = (e[..., None] * torch.where(live[..., None], outs.to(acc), 0.0)).sum(0) / total[..., None]
    log = total.log2() if base_2 else total.log()
    return out.to(outs.dtype), changed(torch.where(some, top + log, empty))


def subject(merge, **declared):
    def states(outs, lses):
        return merge(outs, lses)

    states.states = True
    states.bitwise = ("G10",)
    for name, value in declared.items():
        setattr(states, name, value)
    return Subject.of(states, "merge")


def findings(of, problems=PROBLEMS):
    return {
        name: found
        for name, check in MERGES.items()
        if (found := [x for p in problems for x in _found(of, p, check)])
    }


def _found(of, problem, check):
    try:
        return found_on(of, problem, check)
    except NotImplementedError:
        return []


# The arguments of ``torch_merge``, and the declarations that describe them.
CONVENTIONS = {
    "natural": ({}, {}),
    "base 2": ({"base_2": True}, {"lse_base": "2"}),
    "+inf for what saw nothing": ({"empty": math.inf}, {"empty_lse": "+inf"}),
    "0 for what saw nothing": ({"empty": 0.0}, {"empty_lse": 0}),
    "base 2 and +inf": (
        {"base_2": True, "empty": math.inf},
        {"lse_base": "2", "empty_lse": "+inf"},
    ),
}


def in_convention(name):
    arguments, _ = CONVENTIONS[name]
    return lambda outs, lses: torch_merge(outs, lses, **arguments)


@pytest.mark.parametrize("name", CONVENTIONS)
def test_a_correct_merge_passes_in_its_declared_convention(name):
    # In base 2, the gradient of lse is that of another number.
    of = subject(
        in_convention(name), **CONVENTIONS[name][1], backward="base_2" not in CONVENTIONS[name][0]
    )
    assert findings(of) == {}


@pytest.mark.parametrize("name", [x for x in CONVENTIONS if x != "natural"])
def test_a_merge_that_does_not_do_what_it_declares_is_found(name):
    assert findings(subject(in_convention("natural"), **CONVENTIONS[name][1], backward=False))
    assert findings(subject(in_convention(name), backward=False))


BROKEN = {
    "accuracy": lambda outs, lses: torch_merge(outs, lses, changed=lambda lse: lse + 1e-3),
    "grouping": lambda outs, lses: torch_merge(
        outs, lses, weights=lambda e: e * (1.0 + (torch.arange(len(e)) == 0)).view(-1, 1, 1, 1)
    ),
    "silent parts": lambda outs, lses: torch_merge(
        outs, lses, weights=lambda e: e
        * (1 + 0.1 * len(e) * (torch.arange(len(e)) == 0)).view(-1, 1, 1, 1)
    ),
    "one part": lambda outs, lses: (
        torch_merge(outs, lses)[0] * (1 + 2.0**-8 * (len(outs) == 1)), torch_merge(outs, lses)[1]
    ),
    "storage": lambda outs, lses: torch_merge(
        outs, lses, weights=lambda e: e * (1.0 + 0.5 * (not outs.is_contiguous()))
        if outs.is_contiguous() else e.flip(0)
    ),
    "not hidden": lambda outs, lses: torch_merge(
        outs, torch.where(lses.isnan() | (lses == math.inf), -math.inf, lses)
    ),
    "far apart": lambda outs, lses: torch_merge(
        outs, lses.flip(0) if max(map(abs, (*outs.stride(), *lses.stride()))) > 2**26 else lses
    ),
    "conventions": lambda outs, lses: torch_merge(outs, lses, changed=lambda lse: lse.clamp(-1e30)),
}  # fmt: skip


def _leaks(outs, lses):
    out, lse = torch_merge(outs, lses)
    beside = outs.nan_to_num().sum(0)
    return out + (beside - beside.detach()), lse


def _of_small_batches(outs, lses):
    out, lse = torch_merge(outs, lses)
    return out * (1.0 + 0.5 * (outs.shape[1] == 1)), lse


def _spreads(outs, lses):
    out, lse = torch_merge(outs, lses)
    return out, lse + (lse.isnan().any() * 1.0).to(lse.dtype)


def _multiplies(outs, lses):
    shares = torch.softmax(lses, 0)
    return (shares[..., None] * outs).sum(0).to(outs.dtype), torch.logsumexp(lses, 0)


# Check, a part of its claim, and a merge that it finds.
CLAIMS = {
    "not 0": ("silent parts", "is not 0 for a part that saw nothing", _leaks),
    "a slice": ("storage", "differs for b=", _of_small_batches),
    "another row": ("not hidden", "of another row", _spreads),
    "groups": ("grouping", "are merged in groups of", BROKEN["grouping"]),
    "in turn": ("grouping", "are merged one after the other", BROKEN["grouping"]),
    "beside": ("one part", "beside one that saw nothing, whose out holds nan", _multiplies),
}


def claimed(name):
    """The finding of an entry of CLAIMS or, by its check, of BROKEN."""
    check, says, merge = CLAIMS.get(name, (name, "", BROKEN.get(name)))
    of = subject(merge, backward=name == "not 0")
    seeds = [dataclasses.replace(x, seed=seed, hidden=0) for x in PROBLEMS[:2] for seed in (0, 1)]
    found = (x for p in seeds for x in _found(of, p, MERGES[check]) if says in x.claim)
    return next(found)


@pytest.mark.parametrize("name", CLAIMS)
def test_each_claim_is_made_of_a_broken_merge(name):
    assert CLAIMS[name][1] in str(claimed(name))


@pytest.mark.parametrize("name", BROKEN)
def test_each_check_finds_a_broken_merge(name):
    of = subject(BROKEN[name], backward=False)
    hidden = {"one part": 0, "conventions": 16}
    problems = [
        dataclasses.replace(x, seed=seed, hidden=hidden.get(name, x.hidden))
        for x in PROBLEMS
        for seed in (0, 1)
    ]
    found = findings(of, problems)
    assert name in found
    assert not any("exception" in x.claim for x in found[name])
    message = str(found[name][0])
    assert message.startswith("S2 conventions: " if name == "conventions" else "S1 merging: ")
    json = message.splitlines()[-1].removeprefix("  replay: pytest --fa-replay=").strip("'")
    assert call_from_json(json) == found[name][0].problem


def test_an_exception_a_wrong_shape_and_a_changed_input_are_findings():
    def raises(outs, lses):
        raise ValueError("no merge today")

    def short(outs, lses):
        out, lse = torch_merge(outs, lses)
        return out[..., :1], lse

    def writes(outs, lses):
        lses.detach().add_(1.0)
        return torch_merge(outs, lses)

    for merge, says in (
        (raises, "no merge today"),
        (short, "needs (2, 2, 4, 5)"),
        (writes, "lses"),
    ):
        (found,) = found_on(subject(merge, backward=False), PROBLEMS[0], MERGES["accuracy"])
        assert says in str(found)
        assert "  " not in str(found).splitlines()[0]


def test_a_refused_merge_is_refused():
    def refuses(outs, lses):
        raise NotImplementedError("two parts only")

    with pytest.raises(NotImplementedError, match="two parts only"):
        found_on(subject(refuses), PROBLEMS[0], MERGES["accuracy"])


@pytest.mark.parametrize("layout", ["parts", "heads inside", "parts inside", "columns", "gaps"])
def test_storage_keeps_values_and_differs_in_strides(layout):
    x = normal(0, "x", (3, 2, 2, 4, 5))
    for of in (x, x[..., 0]):
        laid = stored_states(of, layout)
        assert torch.equal(laid, of)
        assert laid.is_contiguous() == (layout == "parts" or (layout == "columns" and of.ndim == 4))


def test_states_are_those_that_the_fields_describe():
    made = make_states(
        MergeProblem(parts=(3, 0, 5), B=2, H=2, M=40, Dv=3, hidden=8, layout="shared")
    )
    assert made.outs.stride(0) == 0
    made = make_states(MergeProblem(parts=(3, 0, 5), B=2, H=2, M=40, Dv=3, hidden=8))
    empty = made.lses == -math.inf
    assert empty[1].all()
    assert 0.3 < float(empty[[0, 2]].double().mean()) < 0.7
    assert made.outs.isnan().all(4).equal(empty)
    assert made.dlse.isnan().equal(empty.all(0))


def whole_attention(q, k, v, *, mask, sm_scale):
    """Attention in PyTorch that returns lse, differentiable."""
    seen = mask.dense(q.shape[0], q.shape[1], q.shape[2], k.shape[2]).expand(
        q.shape[0], q.shape[1], q.shape[2], k.shape[2]
    )
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    some = seen.any(3)
    scores = torch.where(seen, (q @ k.mT) * sm_scale, -math.inf)
    lse = torch.where(some[..., None], scores, 0.0).logsumexp(3)
    p = torch.where(seen, (scores - lse[..., None]).exp(), 0.0)
    return p @ v, torch.where(some, lse, -math.inf)


def ring_subject(merge):
    def attends(q, k, v, *, mask, sm_scale):
        return whole_attention(q, k, v, mask=mask, sm_scale=sm_scale)

    attends.returns_lse, attends.lse_grad, attends.states = True, True, merge
    return Subject.of(attends, "ring")


def ring(subject, lengths=(5, 3, 4)):
    """The findings of a ring over parts of the keys."""
    call = RingProblem(attention=RING, lengths=lengths)
    return found_on(subject, call, checks_of(kind="ring")["ring"])


RING = Problem(B=2, H=4, Hk=2, M=9, N=12, D=5, Dv=3, dtype="fp64", mask=Mask(causal=True), seed=3)


def test_a_correct_ring_passes_and_a_broken_one_is_found():
    assert ring(ring_subject(torch_merge)) == []

    def detached(outs, lses):
        return torch_merge(outs, 0.5 * lses + 0.5 * lses.detach())

    def late(outs, lses):
        return torch_merge(outs, lses + 1e-6)

    assert {x.output for x in ring(ring_subject(late))} == {"lse"}
    assert {x.output for x in ring(ring_subject(detached))} >= {"dq", "dk"}


def test_the_parts_of_a_causal_mask_see_what_the_whole_shows():
    whole = RING.mask.dense(2, 4, 9, 12)
    for part, keys in part_problems(RING, (5, 3, 4)):
        of_part = part.mask.dense(2, 4, 9, part.N).expand(1, 1, 9, part.N)
        assert of_part.equal(whole[:1, :1, :, keys])


def test_lengths_that_do_not_add_up_are_refused():
    with pytest.raises(ValueError, match="needs N = 12 keys in sum"):
        RingProblem(attention=RING, lengths=(5, 3))


@pytest.mark.parametrize("seed", range(3))
def test_gradients_move_no_further_than_their_errors_say(seed):
    problem = dataclasses.replace(RING, seed=seed)
    q, k, v, dout = make(problem).tensors
    dlse = normal(seed, "dlse", dout.shape[:3])
    offs = 0.1 * uniform(seed, "a", dout.shape), 0.1 * uniform(seed, "b", dlse.shape)
    call = {"mask": problem.mask, "sm_scale": problem.scale}
    seen = problem.mask.dense(2, 4, 9, 12).expand(2, 4, 9, 12)
    beside = {"seen": seen, "sm_scale": problem.scale, "off_dout": offs[0], "off_dlse": offs[1]}
    limits = gradient_errors(q, k, v, **beside)
    reached = []
    for trial in range(40):
        signs = [normal(trial, name, x.shape).sign() for name, x in zip("cd", offs, strict=True)]
        moved = attention(q, k, v, dout + signs[0] * offs[0], dlse + signs[1] * offs[1], **call)
        want = attention(q, k, v, dout, dlse, **call)
        for name in ("dq", "dk", "dv"):
            apart, limit = (getattr(moved, name) - getattr(want, name)).abs(), getattr(limits, name)
            assert (apart <= limit + 1e-12).all()
            reached.append(float((apart / (limit + 1e-12)).max()))
    assert max(reached) > 0.5
    arrays = (x.numpy() for x in (q, k, v))
    again = by_pairs(*arrays, **{name: x.numpy() if isinstance(x, torch.Tensor) else x
                                 for name, x in beside.items()})  # fmt: skip
    for x, y in zip(limits, again, strict=True):
        assert ((x - torch.from_numpy(y)).abs() <= 1e-12 * (1 + x.abs())).all()


@pytest.mark.parametrize(
    ("field", "value"),
    [("parts", (-1,)), ("H", 0), ("Dv", 0), ("dtype", "fp8"), ("layout", "rows"), ("hidden", 17)],
)
def test_a_field_out_of_range_is_refused_by_name(field, value):
    with pytest.raises(ValueError, match=rf"^{field} is .*; needs "):
        MergeProblem(**{field: value})


def test_the_adapter_of_the_page_passes_and_a_wrong_base_is_found():
    page = (Path(__file__).parents[4] / "docs" / "merging.md").read_text(encoding="utf-8")
    code = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)[-1]
    names: dict[str, object] = {}
    exec(code, names)
    of = Subject.of(names["merge"], "merge")
    assert of.merges_alone
    assert "states=True" in of.declared()
    problems = [
        MergeProblem(parts=(3, 5), B=2, H=2, M=4, Dv=5, hidden=4, seed=seed, lse=lse)
        for seed, lse in enumerate(("normal", "wide", "low", "rising"))
    ]
    found = [_found(of, x, MERGES["accuracy"]) for x in problems]
    assert found == [[]] * 4
    wrong = of.assuming({"lse_base": "e"})
    assert all(_found(wrong, x, MERGES["accuracy"]) for x in problems[:2])


def of_two(merge):
    """A merge that takes two states at a time."""

    def two(outs, lses):
        if len(outs) != 2:
            raise NotImplementedError("two states at a time")
        return merge(outs, lses)

    return two


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda x: x.dtype)
def test_a_merge_of_two_states_is_asked_for_groups_and_single_parts(problem):
    right, wrong = (
        subject(of_two(merge), backward=False)
        for merge in (
            torch_merge,
            lambda outs, lses: torch_merge(outs, lses, weights=lambda e: 2 * e),
        )
    )
    for name in ("grouping", "one part"):
        assert _found(right, problem, MERGES[name]) == []
        assert _found(wrong, problem, MERGES[name])


def test_a_part_that_saw_nothing_is_multiplied_by_its_weight():
    found = _found(subject(of_two(_multiplies), backward=False), PROBLEMS[1], MERGES["one part"])
    assert {x.output for x in found} == {"out"}
    assert "beside one that saw nothing, whose out holds nan" in found[0].claim


def test_a_result_that_is_nan_in_every_run_is_left_to_accuracy():
    def spoils(outs, lses):
        out, lse = torch_merge(outs, lses)
        return torch.where((lse == -math.inf)[..., None], math.nan, out), lse

    of = subject(spoils, backward=False, bitwise=())
    empty = dataclasses.replace(PROBLEMS[1], parts=(0, 0))
    assert _found(of, empty, MERGES["accuracy"])
    for name in ("storage", "silent parts"):
        assert _found(of, empty, MERGES[name]) == []


@pytest.mark.parametrize(("signature", "is_right"), [("outs, lses", True), ("outs", False)])
def test_a_merge_is_loaded_by_its_signature(signature, is_right, tmp_path):
    file = tmp_path / "merging.py"
    file.write_text(f"def merge({signature}):\n    pass\n\n\nmerge.states = True\n")
    if is_right:
        assert load(f"{file}:merge").merges_alone
        return
    with pytest.raises(ValueError, match=r"merge takes \(outs\); needs \(outs, lses\)"):
        load(f"{file}:merge")


@pytest.mark.parametrize("value", [False, 1, "merge"])
def test_states_that_are_no_function_are_refused(value):
    with pytest.raises(ValueError, match=r"states is .*; needs a function of \(outs, lses\), or"):
        subject(torch_merge, states=value)
