"""Parts of a problem compute what the problem computes: the float64 oracle agrees on both."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch

from fa_verify.oracles.masks.document import Document
from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.masks.tree import Tree
from fa_verify.oracles.outputs import OUTPUTS, Outputs
from fa_verify.oracles.problem import Problem
from fa_verify.oracles.reference import torch_reference
from fa_verify.properties.guarantees.compare import ratios, same_bits
from fa_verify.properties.inputs.parts import (
    chunks,
    entries_apart,
    heads_apart,
    merged,
    other_forms,
)
from fa_verify.properties.inputs.tensors import make
from fa_verify.properties.kernels.subject import Subject
from fa_verify.properties.running.trial import plan_run
from tests.unit.properties.kernels.broken_subjects import Eager

SUBJECT = dataclasses.replace(Subject.of(Eager(), "eager"), lse_grad=True)
CAUSAL = Problem(
    B=3, H=4, Hk=2, M=9, N=14, D=4, Dv=3, dtype="fp64", dirty="nan", seed=5,
    mask=Mask(causal=True, seqlens_q=(9, 2, 7), seqlens_k=(14, 6, 11)),
)  # fmt: skip


def of(**changed) -> Problem:
    return dataclasses.replace(CAUSAL, **changed)


PROBLEMS = {
    "lengths": CAUSAL,
    "window": of(mask=dataclasses.replace(CAUSAL.mask, window_left=3)),
    "no mask": of(mask=Mask(), M=8, seed=7),
    "more rows than keys": of(mask=Mask(causal=True), M=14, N=9),
    "short entries": of(mask=Mask(causal=True, seqlens_q=(0, 3, 0), seqlens_k=(14, 2, 0))),
    "no keys": of(mask=Mask(causal=True), N=0),
    "right bound": of(mask=Mask(window_right=2)),
    "single key/value head": of(Hk=1),
    "one head": of(H=1, Hk=1, seed=6),
    "one entry": of(B=1, mask=Mask(causal=True)),
    "no entry": of(B=0, mask=Mask(causal=True)),
    "one row": of(M=1, mask=Mask()),
    "two rows": of(M=2, B=1, H=1, Hk=1, mask=Mask()),
    "40 rows": of(M=40, B=1, H=1, Hk=1, mask=Mask(), seed=3),
    "lse gradient": of(dlse="normal"),
    "ALiBi": of(alibi="normal"),
    "ALiBi without a mask": of(alibi="halving", mask=Mask()),
    "bias": of(bias="normal/bhmn"),
    "bias without a mask": of(bias="normal/m", mask=Mask()),
    "layouts": of(layouts=("transposed", "padded", "packed", "strided")),
    "expanded": of(layouts=("bshd", "expanded", "offset", "expanded"), inputs="normal"),
    "predicate": of(mask=Tree(), M=14),
    "predicate of entries": of(mask=Document(), M=14),
    "predicate and lengths": of(mask=Tree(seqlens_q=(9, 2, 7), seqlens_k=(14, 6, 11))),
}


# Problem to the text, batch entries, heads, rows and keys of each of its parts.
PARTS = {
    "lengths": [
        ("entry 2 alone (7 rows, 11 keys)", 1, 4, 7, 11),
        ("entry 2 as entry 1 of 4", 4, 4, 9, 14),
        ("entry 2 beside one of 28 keys", 2, 4, 9, 28),
        # The border 6 follows from the seed, and 8 is that of a tile.
        ("rows 0 to 5 alone with the keys that they see", 3, 4, 6, 11),
        ("rows 6 to 7 alone with the keys that they see", 3, 4, 2, 13),
        ("row 8 alone with the keys that they see", 3, 4, 1, 14),
        ("rows 6 to 7 alone with all keys", 3, 4, 2, 14),
        ("heads 0 to 1 alone", 3, 2, 9, 14),
        ("heads 2 to 3 alone", 3, 2, 9, 14),
        ("packed sequences", 3, 4, 9, 14),
        ("12 rows and 35 keys with padding", 3, 4, 12, 35),
    ],
    "two rows": [
        ("entry 0 alone (2 rows, 14 keys)", 1, 1, 2, 14),
        ("entry 0 as entry 1 of 4", 4, 1, 2, 14),
        ("entry 0 beside one of 28 keys", 2, 1, 2, 28),
        ("row 0 alone", 1, 1, 1, 14),
        ("row 1 alone", 1, 1, 1, 14),
        ("packed sequences", 1, 1, 2, 14),
        ("5 rows and 35 keys with padding", 1, 1, 5, 35),
    ],
    "40 rows": [
        ("entry 0 alone (40 rows, 14 keys)", 1, 1, 40, 14),
        ("entry 0 as entry 1 of 4", 4, 1, 40, 14),
        ("entry 0 beside one of 28 keys", 2, 1, 40, 28),
        ("rows 0 to 3 alone", 1, 1, 4, 14),
        ("rows 4 to 19 alone", 1, 1, 16, 14),
        ("rows 20 to 39 alone", 1, 1, 20, 14),
        ("row 39 alone", 1, 1, 1, 14),
        ("packed sequences", 1, 1, 40, 14),
        ("43 rows and 35 keys with padding", 1, 1, 43, 35),
    ],
    "predicate of entries": [
        ("entry 2 alone", 1, 4, 14, 14),
        ("heads 0 to 1 alone", 3, 2, 14, 14),
        ("heads 2 to 3 alone", 3, 2, 14, 14),
        ("packed sequences", 3, 4, 14, 14),
    ],
    "no entry": [],
}  # fmt: skip


def parts_of(problem: Problem, inputs):
    """Every part of a problem."""
    return itertools.chain(
        entries_apart(problem, inputs), chunks(problem, inputs, 4), heads_apart(problem, inputs),
        other_forms(problem, inputs, packs=True),
    )  # fmt: skip


@pytest.mark.parametrize("name", PARTS)
def test_the_parts_of_a_problem(name):
    parts = [(part.told, part.problem) for part in parts_of(PROBLEMS[name], make(PROBLEMS[name]))]
    assert [(told, x.B, x.H, x.M, x.N) for told, x in parts] == PARTS[name]


@pytest.mark.parametrize("name", PROBLEMS)
def test_a_part_computes_what_the_whole_computes(name):
    problem = PROBLEMS[name]
    planned = plan_run(SUBJECT, problem)
    for part in parts_of(problem, planned.inputs):
        got = torch_reference.attention(
            *part.inputs, mask=part.problem.mask, sm_scale=part.problem.scale
        )
        again, _, _ = merged(planned.want, part, got)
        for of_output in zip(OUTPUTS, again, planned.want, planned.judgement.bound, strict=True):
            output, *numbers = of_output
            assert (ratios(*numbers) <= 1).all(), f"{part.told}: {output}"


@pytest.mark.parametrize("name", PROBLEMS)
def test_a_part_fills_the_places_that_it_names(name):
    problem = PROBLEMS[name]
    want = plan_run(SUBJECT, problem).want
    filled = set()
    for part in parts_of(problem, make(problem)):
        sizes = part.problem
        marks = Outputs(*(torch.full(shape, math.inf) for shape in (
            (sizes.B, sizes.H, sizes.M, sizes.Dv), (sizes.B, sizes.H, sizes.M),
            (sizes.B, sizes.H, sizes.M, sizes.D), (sizes.B, sizes.Hk, sizes.N, sizes.D),
            (sizes.B, sizes.Hk, sizes.N, sizes.Dv),
        )))  # fmt: skip
        again, rows, keys = merged(want, part, marks)
        for output, x, old in zip(OUTPUTS, again, want, strict=True):
            places = keys if output in ("dk", "dv") else rows
            places = places if output == "lse" else places[..., None].expand_as(x)
            changed = places if output in part.outputs else torch.zeros_like(places)
            assert torch.equal(x == math.inf, changed), f"{part.told}: {output}"
            assert same_bits(x, old)[~changed].all()
        assert keys.shape == want.dk.shape[:3]
        filled |= {tuple(place) for place in rows.nonzero().tolist()}
    of_entries, _ = problem.mask.lengths(problem.B, problem.M, problem.N)
    if problem.mask.is_plain:
        everything = {(b, m) for b, rows in enumerate(of_entries) for m in range(rows)}
        assert {(b, m) for b, _, m in filled} == everything
