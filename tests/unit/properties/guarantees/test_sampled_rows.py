"""A sample of rows is judged as the whole problem is."""

from __future__ import annotations

import pytest

from fa_verify.conformance.sampled_rows import findings_in_rows, sampled
from fa_verify.oracles.masks.block_sparse import BlockSparse
from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.masks.prefix_lm import PrefixLM
from fa_verify.oracles.problem import Problem
from fa_verify.properties.kernels.subject import Subject
from tests.unit.properties.kernels.broken_subjects import Eager

SIZES = {"B": 2, "H": 4, "Hk": 2, "M": 70, "N": 60, "D": 8, "Dv": 8}
MASKS = (
    Mask(),
    Mask(causal=True),
    Mask(window_left=9, seqlens_q=(70, 0), seqlens_k=(33, 60)),
    PrefixLM(prefix=7),
    BlockSparse(side=16, percent=40, seed=2, per_head=True),
)


def found(fault: str = "", dtype: str = "fp64", **fields):
    options = {name: fields.pop(name) for name in ("is_sparse", "with_rms") if name in fields}
    problem = Problem(**{**SIZES, "dtype": dtype, "seed": 1, **fields})
    rows = sampled(problem.M, problem.M // 7)
    return findings_in_rows(Subject.of(Rounded(fault), "eager"), problem, rows, **options)


class Rounded(Eager):
    """Attention in float64, whose results are rounded to the dtype of the inputs."""

    def __call__(self, q, k, v, **arguments):
        out, lse = super().__call__(q.double(), k.double(), v.double(), **arguments)
        if self.fault == "drops a row tile" and out.requires_grad:
            out.register_hook(self._without_rows)
        if self.fault == "errs by 0.3 percent":
            out = out * 1.003
        lse = lse if q.dtype.itemsize == 8 else lse.float()
        return out.to(q.dtype), lse

    def _without_rows(self, gradient):
        gradient = gradient.clone()
        gradient[:, :, 32:48] = 0
        return gradient


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("is_sparse", [False, True])
def test_a_correct_subject_passes(mask, is_sparse):
    assert found(mask=mask, is_sparse=is_sparse) == []


@pytest.mark.parametrize("mask", MASKS[1:], ids=str)
def test_a_key_too_many_is_found_in_a_row_of_the_whole_problem(mask):
    finding, rows = found("sees one key more", mask=mask)[0], sampled(70, 10)
    assert finding.problem.M == 70
    assert int(finding.where.partition("m=")[2].split()[0]) in rows
    assert finding.places == f"in {len(rows)} sampled rows"


def test_a_row_tile_without_gradients_is_found():
    assert {x.output for x in found("drops a row tile")} == {"dq", "dk", "dv"}


def test_the_mean_square_of_errors_is_checked_too():
    sizes = {"M": 1400, "D": 64, "Dv": 64, "dtype": "bf16"}
    assert found(**sizes) == []
    assert found("errs by 0.3 percent", with_rms=False, **sizes) == []
    assert found("errs by 0.3 percent", **sizes)[0].guarantee == "RMS"


def test_a_sample_has_a_row_of_each_part_and_both_ends():
    rows = sampled(1000, 10)
    assert rows[0] == 0
    assert rows[-1] == 999
    assert {x // 100 for x in rows} == set(range(10))
    assert len(rows) <= 12
