"""Each bad call that a kernel declares to refuse, and does not refuse, is found."""

from __future__ import annotations

import pytest
import torch

from fa_verify.conformance.test_replay import asked_of
from fa_verify.oracles.calls.cache import CacheProblem
from fa_verify.oracles.guarantee import G14, INPUTS
from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.problem import Problem
from fa_verify.properties.guarantees.bad_calls import bad_calls, bad_calls_of_caches
from fa_verify.properties.inputs.bad_calls import (
    BAD_CALLS,
    OF_ALL,
    OF_CACHES,
    OF_PACKED,
    OF_PADDED,
)
from fa_verify.properties.kernels.subject import Subject
from fa_verify.properties.kinds.registry import kind_of
from fa_verify.verification import _asked
from tests.unit.properties.guarantees.calls import found_on

ATTENTION = Problem(B=2, H=2, Hk=2, M=5, N=7, bias="normal/mn", sinks="ordinary")
CACHED = Problem(B=2, H=2, Hk=1, M=2, N=9, mask=Mask(seqlens_k=(9, 5)))
# By form: calls, their check, and the bad calls that are asked.
FORMS = {
    "padded": ([ATTENTION], bad_calls, {**OF_ALL, **OF_PADDED}),
    "packed": ([Problem(B=2, M=5, N=7)], bad_calls, {**OF_ALL, **OF_PACKED}),
    "cache": (
        [CacheProblem(attention=CACHED, page_size=4, new=x, spare=x) for x in (0, 2)]
        + [CacheProblem(attention=CACHED, new=x) for x in (0, 2)],
        bad_calls_of_caches, {**OF_ALL, **OF_CACHES},
    ),
}  # fmt: skip
ERRORS = (ValueError, RuntimeError, AssertionError, NotImplementedError, TypeError, IndexError)


class OutOfBoundsError(IndexError):
    """The error of the interpreter, by its name."""


def faults(q, k, v, words):
    """Yield the names of what is wrong in a call."""
    mask, table = words.get("mask"), words.get("page_table")
    lengths, offsets = words.get("cache_seqlens"), words.get("cu_seqlens_k")
    rows, heads, entries = 2, 1, (len(q), len(k))
    if offsets is not None:
        rows, entries = 0, (len(words["cu_seqlens_q"]), len(offsets))
    if lengths is not None:
        rows, heads, entries = 1, 2, (len(q), len(lengths))
        capacity = k.shape[1] * (1 if table is None else table.shape[1])
        new = 0 if words.get("k") is None else words["k"].shape[2]
    padded = lengths is None and offsets is None
    for name, is_wrong in {
        "heads not divisible": lambda: q.shape[1] % k.shape[heads],
        "head dims differ": lambda: q.shape[-1] != k.shape[-1],
        "lengths differ": lambda: k.shape[rows] != v.shape[rows],
        "batch differs": lambda: entries[0] != entries[1],
        "dtypes differ": lambda: not q.dtype == k.dtype == v.dtype,
        "too many keys": lambda: padded and max(mask.seqlens_k or (0,)) > k.shape[2],
        "wrong bias shape": lambda: (
            words.get("bias") is not None and words["bias"].shape[3] != k.shape[2]
        ),
        "decreasing offsets": lambda: offsets is not None and (offsets.diff() < 0).any(),
        "offsets past the end": lambda: offsets is not None and offsets[-1] > len(k),
        "negative lengths": lambda: lengths is not None and (lengths < 0).any(),
        "cache too long": lambda: lengths is not None and (lengths + new > capacity).any(),
        "page out of range": lambda: table is not None and (table >= len(k)).any(),
    }.items():
        if is_wrong():
            yield name


def subject(form, ignored="", *, then=None, refuses=None):
    """Return a kernel of zeros that looks for faults but one; ``then`` precedes an exception."""
    asked = tuple(FORMS[form][2]) if refuses is None else refuses

    def kernel(q, k, v, /, **words):
        for number, name in enumerate(faults(q, k, v, words)):
            if name == ignored:
                continue
            if then is not None:
                then(q, k)
            raise ERRORS[(number + len(name)) % len(ERRORS)](name)
        shape = q.shape[0], q.shape[1], *q.shape[2:-1], v.shape[-1]
        return q.new_zeros(shape)

    kernel.backward, kernel.refuses, kernel.score_mods = False, asked, ("sinks",)
    if form == "padded":
        kernel.score_mods = ("bias", "sinks")
    if form == "packed":
        kernel.varlen = True
    if form == "cache":
        kernel.cache = ("contiguous", "paged", "append")
    return Subject.of(kernel, "kernel")


CASES = [(form, name) for form, (*_, names) in FORMS.items() for name in names]


@pytest.mark.parametrize(("form", "name"), [x for x in CASES if x[1] != "devices differ"])
def test_a_bad_call_that_returns_is_found(form, name):
    calls, check, _ = FORMS[form]
    found = [x for call in calls for x in found_on(subject(form, name), call, check)]
    assert found
    assert {(x.guarantee, x.claim) for x in found} == {
        (G14, f"returns from a call that it declares to refuse: {name}")
    }


@pytest.mark.parametrize("form", FORMS)
def test_a_kernel_that_looks_refuses_all_and_is_asked_all(form):
    calls, check, names = FORMS[form]
    asked = {}
    for call in calls:
        trial = kind_of(call).run(subject(form), call)
        assert check(trial) == []
        asked |= {name: why for name, why in trial.asked.items() if not why} | {
            name: why for name, why in trial.asked.items() if name not in asked
        }
    assert {*asked} == {f"G14 {name}" for name in names}
    assert {name: why for name, why in asked.items() if why} == {
        "G14 devices differ": "not applicable on cpu"
    }


def test_every_bad_call_has_a_form():
    assert {name for _, name in CASES} == {*BAD_CALLS}


@pytest.mark.parametrize("form", FORMS)
def test_a_refusal_that_changes_an_input_is_found(form):
    calls, check, _ = FORMS[form]
    found = found_on(subject(form, then=lambda q, k: k[..., 0].fill_(3)), calls[0], check)
    assert {x.guarantee for x in found} == {G14}
    assert all("changes inputs in a call" in x.claim for x in found)
    assert all("changed" in x.places for x in found)


def outside(q, k):
    raise OutOfBoundsError("reads 48 of 64 elements outside of the tensors")


def leaves(q, k):
    try:
        outside(q, k)
    except IndexError as error:
        raise RuntimeError("a launch failed") from error


def fails_on_the_gpu(q, k):
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


@pytest.mark.parametrize("then", [outside, leaves, fails_on_the_gpu])
def test_an_access_out_of_bounds_is_no_refusal(then):
    (call,), check, names = FORMS["padded"]
    found = found_on(subject("padded", then=then), call, check)
    assert len(found) == len(names) - 1
    assert all("leaves its tensors in a call" in x.claim for x in found)


def test_an_exit_is_no_refusal():
    def exits(q, k):
        raise SystemExit(0)

    (call,), check, _ = FORMS["padded"]
    found = found_on(subject("padded", then=exits), call, check)
    assert found
    assert all("exits in a call" in x.claim for x in found)


def test_a_changed_setting_is_a_finding_of_inputs():
    def changes(q, k):
        torch.set_default_dtype(torch.float64)

    (call,), check, _ = FORMS["padded"]
    (found,) = found_on(subject("padded", then=changes), call, check)
    assert found.guarantee == INPUTS
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize("form", FORMS)
def test_a_kernel_that_declares_no_refusal_is_not_asked(form):
    calls, check, names = FORMS[form]
    silent = subject(form, next(iter(names)), refuses=())
    trial = kind_of(calls[0]).run(silent, calls[0])
    assert check(trial) == []
    assert trial.asked == {"G14": "not applicable to kernel, which declares no refuses"}
    assert G14 not in {x.guarantee for x in _asked(silent, None)}
    assert G14 in {x.guarantee for x in _asked(subject(form), None)}


@pytest.mark.parametrize(("form", "name"), [("padded", "G14"), ("cache", "bad calls")])
def test_a_replay_asks_what_is_declared(form, name):
    call = FORMS[form][0][0]
    assert name in asked_of(subject(form), call, calls=False)
    assert name not in asked_of(subject(form, refuses=()), call, calls=False)
