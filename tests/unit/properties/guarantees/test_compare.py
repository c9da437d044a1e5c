"""Errors, their ratios to bounds, and the text of findings."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.problem import Problem
from fa_verify.properties.guarantees.compare import Finding, largest_ratios, ratios, same_bits
from fa_verify.properties.kernels.subject import Subject
from fa_verify.properties.running.ratios import are_finite
from tests.unit.properties.kernels.broken_subjects import Eager

SUBJECT = Subject.of(Eager(), "eager")


def numbers(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize(
    ("got", "want", "bound", "ratio"),
    [
        (3.0, 1.0, 4.0, 0.5),
        (-1.0, 1.0, 4.0, 0.5),
        (1.0, 1.0, 0.0, 0.0),
        (1.0, 2.0, 0.0, math.inf),
        (-math.inf, -math.inf, 0.0, 0.0),
        (math.inf, -math.inf, 1.0, math.inf),
        (0.0, -math.inf, 1.0, math.inf),
        (math.nan, 1.0, math.inf, math.inf),
        (1.0, 1.5, math.nan, math.inf),
    ],
)
def test_a_ratio_is_that_of_error_and_bound_in_either_direction(got, want, bound, ratio):
    assert ratios(numbers(got), numbers(want), numbers(bound)).tolist() == [ratio]


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        (1.0, 1.0, True),
        (1.0, 1.0 + 2.0**-52, False),
        (0.0, -0.0, True),
        (math.nan, -math.nan, True),
        (math.nan, 1.0, False),
        (1.0, math.nan, False),
        (math.inf, -math.inf, False),
    ],
)
def test_bits_are_the_same_but_for_signs_of_zeros_and_kinds_of_nan(a, b, same):
    assert same_bits(numbers(a), numbers(b)).tolist() == [same]


def test_the_largest_ratio_is_that_of_each_output():
    half = torch.tensor([1.25, 1.0], dtype=torch.float16)
    outputs = [
        (half, numbers(1.0, 1.0), numbers(0.5, 0.5)),
        (numbers(), numbers(), numbers()),
        (numbers(1.0, math.nan, 3.0), numbers(1.0, 1.0, 1.0), numbers(1.0, 1.0, 1.0)),
        (numbers(1.0, 5.0, 2.0), numbers(1.0, 1.0, 1.0), numbers(1.0, 1.0, 1.0)),
    ]
    assert largest_ratios(outputs) == [[0.5], [0.0], [math.inf], [4.0]]
    assert largest_ratios([]) == []


def test_the_largest_ratios_of_parts_of_the_first_axis():
    got = torch.arange(12, dtype=torch.float64).view(4, 3, 1)
    of_rows = (got, torch.zeros_like(got), torch.ones_like(got))
    of_heads = tuple(x[:, :0] for x in of_rows)
    strided = tuple(x.mT.flip(0) for x in of_rows)
    assert largest_ratios([of_rows, of_heads, strided], 2) == [[5.0, 11.0], [0.0] * 2, [11.0, 5.0]]


@pytest.mark.parametrize(
    ("bounds", "finite"),
    [
        ([numbers(0.0, 1.0), numbers()], True),
        ([numbers()], True),
        ([numbers(1.0), numbers(2.0, math.nan)], False),
        ([numbers(1.0, math.inf), numbers(0.0)], False),
    ],
)
def test_bounds_are_finite_if_each_element_is(bounds, finite):
    assert are_finite(*bounds) == finite


def finding(problem: Problem, output: str, at: tuple[int, ...], **rest: object) -> Finding:
    """A finding on one element."""
    rows, columns = (problem.M, problem.Dv) if output == "out" else (problem.N, problem.D)
    bad = torch.zeros(problem.B, problem.H, rows, columns, dtype=torch.bool)
    bad[at] = True
    values = torch.where(bad, 3.0, 1.0)
    return Finding.at(
        bad, values, guarantee="G1 accuracy", claim="is off", subject=SUBJECT, problem=problem,
        output=output, got=values, want=torch.ones_like(values), **rest,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("rows", "where"),
    [
        ([3], "bad only at m=3"),
        ([3, 4, 5], "bad only at m=3..5"),
        ([3, 5], "bad only at m=3,5"),
        ([1, *range(3, 11)], "bad only at m=1,3,4,5,6,7,8,9,..."),
        ([*range(12)], "bad along all axes"),
    ],
)
def test_a_finding_names_the_rows_where_its_bad_elements_are(rows, where):
    problem = Problem(M=20, Dv=3)
    made = finding(problem, "out", (0, 0, torch.tensor(rows), slice(None)))
    assert str(made).splitlines()[2].endswith(f"; {where}")


def test_a_finding_counts_what_was_compared():
    problem = Problem(M=5, Dv=3)
    rows = torch.tensor([True, False, True, False, True]).view(1, 1, 5, 1)
    assert finding(problem, "out", (0, 0, 2, 1)).total == 15
    assert finding(problem, "out", (0, 0, 2, 1), compared=rows).total == 9


@pytest.mark.parametrize("raised", ["", "ValueError: no"])
@pytest.mark.parametrize(
    ("kernel", "words"),
    [
        ("", "pytest --fa-replay="),
        ("my file.py:f", "pytest --fa-kernel='my file.py:f' --fa-replay="),
    ],
)
def test_every_finding_ends_with_the_line_that_replays_it(raised, kernel, words):
    problem = Problem(N=7, seed=3)
    made = finding(problem, "dk", (0, 0, 2, 1))
    said = str(Finding(**{**vars(made), "raised": raised, "kernel": kernel}))
    assert said.endswith(f"\n  replay: {words}'{problem.to_json()}'")


def test_the_replay_line_has_the_file_of_the_mask():
    made = dataclasses.replace(finding(Problem(), "out", (0, 0, 0, 1)), mask="my mask.py:Prefix")
    assert made.replay.startswith("pytest --fa-mask='my mask.py:Prefix' --fa-replay=")


@pytest.mark.parametrize(
    ("bad", "total", "share"),
    [
        (16, 16, "are bad (100 %)"),
        (1, 3, "is bad (33 %)"),
        (2, 60, "are bad (3.3 %)"),
        (1, 3000, "is bad (0.033 %)"),
    ],
)
def test_the_share_of_bad_elements_is_a_plain_number(bad, total, share):
    made = dataclasses.replace(finding(Problem(), "out", (0, 0, 0, 1)), bad=bad, total=total)
    assert f"  {bad} of {total:,} elements {share}; " in str(made)


def test_a_value_without_tolerance_must_be_exact():
    made = finding(Problem(), "out", (0, 0, 0, 1))
    assert "got 3.0, want 1.0, error 2, must be exact\n" in str(made)
    bounded = dataclasses.replace(made, bound=0.5)
    assert "got 3.0, want 1.0, error 2, bound 0.5, ratio 4\n" in str(bounded)


def test_a_finding_about_no_value_shows_none():
    made = dataclasses.replace(
        finding(Problem(), "out", (0, 0, 0, 1)), got=math.nan, want=math.nan,
        where="writes byte 1 after its last element", places="shape (3,)",
    )  # fmt: skip
    _, said, replay = str(made).splitlines()
    assert said == "  writes byte 1 after its last element; shape (3,)"
    assert replay.startswith("  replay: ")


def test_a_finding_about_a_mean_has_no_worst_element():
    made = dataclasses.replace(
        finding(Problem(), "out", (0, 0, 0, 1)), bad=0, where="mean over 96 sums", places="rare"
    )
    _, value, places, _ = str(made).splitlines()
    assert value.startswith("  mean over 96 sums: got 3.0, ")
    assert places == "  rare"


@pytest.mark.parametrize(("b", "crossed"), [(0, False), (1, True)])
def test_the_edge_of_the_mask_is_that_of_the_batch_entry(b, crossed):
    problem = Problem(B=2, M=32, N=32, mask=Mask(seqlens_k=(32, 20)))
    said = finding(problem, "dk", (b, 0, 17, 1)).places
    assert "n tile 1 of 2 (width 16)" in said
    assert ("crossed by the mask's edge" in said) == crossed


@pytest.mark.parametrize(("m", "ragged"), [(15, False), (16, True)])
def test_the_last_tile_is_ragged_where_it_is_not_whole(m, ragged):
    said = finding(Problem(M=20), "out", (0, 0, m, 1)).places
    assert ("the ragged tail" in said) == ragged


@pytest.mark.parametrize(
    ("problem", "output", "at", "kind"),
    [
        (Problem(M=16, N=16, mask=Mask(causal=True)), "out", 3, "single"),
        (Problem(M=32, N=17), "out", 20, "inner"),
        (Problem(M=33, N=16), "out", 31, "inner"),
        (Problem(M=33, N=16), "out", 32, "ragged tail"),
        (Problem(M=32, N=32, mask=Mask(causal=True)), "out", 3, "mask edge"),
        (Problem(M=32, N=40, mask=Mask(causal=True)), "dk", 33, "ragged tail"),
        (Problem(M=32, N=32, mask=Mask(seqlens_k=(20,))), "dk", 20, "padding"),
        (Problem(M=32, N=32, mask=Mask(seqlens_k=(20,))), "dk", 19, "mask edge"),
        (Problem(M=4, N=4, mask=Mask(seqlens_q=(2,))), "out", 3, "padding"),
    ],
    ids=lambda x: "" if isinstance(x, Problem) else str(x),
)
def test_a_finding_names_the_kind_of_tile(problem, output, at, kind):
    assert finding(problem, output, (0, 0, at, 1)).tile == kind
