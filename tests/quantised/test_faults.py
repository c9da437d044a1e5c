"""Every fault of a cache of codes is found, and named, by the checks that it concerns."""

from __future__ import annotations

import dataclasses

import pytest

from fa_verify.oracles.calls.cache import CacheProblem
from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.problem import Problem
from fa_verify.properties.guarantees.claims import checks_of
from fa_verify.properties.kernels.covering_caches import covering_caches
from fa_verify.properties.kernels.subject import Subject
from fa_verify.properties.kinds.caches import CACHE
from tests.quantised import faults, kernel

CHECKS = checks_of("call", kind="cache")
STANDING = ("accuracy", "written")
NOWHERE = "no place, or from several"
# The last key of entry 0, number 21, lies in row 1 of page 2; that of entry 1 in row 0 of page 8.
READERS = {
    "ScaleOfHead0": ("v_scale", "page 2, row 1, head 0", "page 2, row 1, head 1"),
    "ScaleOfValuesDropped": ("v_scale", NOWHERE, "page 8, row 0, head 1"),
    "ScaleOfKeysDropped": ("k_scale", NOWHERE, "page 8, row 0, head 1"),
    "ScaleOfTheNeighbouringToken": ("v_scale", "page 2, row 0, head 0", "page 2, row 1, head 0"),
    "SwappedStridesOfScales": ("v_scale", "page 8, row 2, head 0", "page 8, row 0, head 1"),
    "ScalesOfPage0": ("v_scale", "page 0, row 0, head 0", "page 8, row 0, head 0"),
    "ScaleOfTheFirstRow": ("v_scale", "page 2, row 0, head 0", "page 2, row 1, head 0"),
    "CodesOfTheNextHead": (
        "v", "page 2, row 1, head 1, channel 0", "page 2, row 1, head 0, channel 0"
    ),
    "LastChannelTwice": (
        "v", "page 2, row 1, head 0, channel 5", "page 2, row 1, head 0, channel 6"
    ),
}  # fmt: skip
WRITERS = (
    "Truncates", "DoesNotSaturate", "ScalesNotWritten", "AnotherLargest", "NoLeastScale",
    "MultipliesByTheReciprocal", "ScaleOfAllHeads", "TiesAway",
)  # fmt: skip
# Pages out of order, two heads of keys, and an entry that ends in the middle of a page.
PROBLEM = CacheProblem(
    attention=Problem(
        B=2, H=4, Hk=2, M=3, N=22, D=7, Dv=7, dtype="fp16", seed=9,
        mask=Mask(causal=True, seqlens_k=(22, 9)),
    ),
    page_size=4, stored="e4m3fn", scales="token_head",
)  # fmt: skip


def subject_of(name: str) -> Subject:
    return Subject.of(getattr(faults, name), name)


@pytest.mark.parametrize("name", faults.ORIGINS)
def test_every_fault_dies_of_calls_that_cover_the_declarations(name):
    """Most die of their results alone. Writers that differ in ties need calls for these."""
    subject = subject_of(name)
    for problem in covering_caches(subject, "cpu", None).calls:
        if problem.format is None:
            continue
        trial = CACHE.run(subject, problem)
        names = (*STANDING, "codes written") if name in WRITERS else STANDING
        if trial is not None and any(CHECKS[x](trial) for x in names):
            return
    pytest.fail(f"{name} survives")


def test_there_are_two_dozen_faults():
    assert len(faults.ORIGINS) >= 24
    assert {*READERS, *WRITERS} <= {*faults.ORIGINS}


@pytest.mark.parametrize("name", READERS)
def test_a_wrong_place_is_named(name):
    trial = CACHE.run(subject_of(name), PROBLEM)
    (finding, *_) = CHECKS["places"](trial)
    tensor, wrong, right = READERS[name]
    what = "scale" if tensor.endswith("scale") else "code"
    assert finding.output == f"{tensor} of a head"
    assert finding.claim == f"takes its {what} from {wrong} in place of {right}"


@pytest.mark.parametrize("name", ["attention", "divided", "dequantising", "scaling_p"])
def test_right_kernels_pass_every_check_in_every_layout(name):
    subject = Subject.of(getattr(kernel, name), name)
    for stored in ("e4m3fn", "e5m2", "int8"):
        for scales in ("tensor", "head", "page", "token_head"):
            appends = scales != "page" and not (scales == "token_head" and subject.scale_divides)
            problem = dataclasses.replace(
                PROBLEM, stored=stored, scales=scales, divides=subject.scale_divides,
                new=2 * appends,
                attention=dataclasses.replace(PROBLEM.attention, dtype=subject.dtypes[0]),
            )  # fmt: skip
            trial = CACHE.run(subject, problem)
            for check in CHECKS:
                assert CHECKS[check](trial) == [], (stored, scales, check)


def test_a_wrong_declaration_of_the_writer_is_found():
    """Half a spacing by another rounding, and scales of another floor, are other codes."""
    problem = dataclasses.replace(PROBLEM, new=3)
    for writing in ({"by": "reciprocal"}, {"rounding": "truncate"}, {"least_scale": 1e-6}):
        declared = kernel.declared(kernel.CodesKernel(), writing=writing)
        trial = CACHE.run(Subject.of(declared, "attention"), problem)
        assert CHECKS["codes written"](trial), writing


def test_operands_that_are_rounded_leave_the_bound_of_exact_products():
    subject = Subject.of(kernel.dequantising, "attention")
    attention = dataclasses.replace(PROBLEM.attention, dtype="bf16")
    problem = dataclasses.replace(PROBLEM, attention=attention)
    assert CHECKS["accuracy"](CACHE.run(subject, problem)) == []
    exact = subject.assuming({"dequantised": "exact"})
    assert CHECKS["accuracy"](CACHE.run(exact, problem))
