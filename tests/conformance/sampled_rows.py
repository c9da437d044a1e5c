"""Judge a sample of the rows of a problem that is too long for the oracle.

dout is 0 outside of the sample, so other rows add exactly 0 to dk and dv: a problem of the sampled
rows alone, against all keys, has the same results.
"""

from __future__ import annotations

import dataclasses
import random
import re
from dataclasses import dataclass
from itertools import pairwise

import torch

from fa_verify.oracles.bounds.error_model import judge
from fa_verify.oracles.bounds.variance import variances
from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.outputs import Outputs
from fa_verify.oracles.problem import Problem
from fa_verify.oracles.reference import torch_reference
from fa_verify.properties.guarantees.accuracy import accuracy
from fa_verify.properties.guarantees.compare import Finding
from fa_verify.properties.guarantees.statistics import rms
from fa_verify.properties.inputs.tensors import Inputs, make
from fa_verify.properties.kernels.subject import Subject
from fa_verify.properties.running.trial import AttentionTrial, run_subject

__all__ = ["findings_in_rows", "sampled"]


@dataclass(frozen=True)
class _OfRows:
    """The dense mask of some rows of a problem."""

    problem: Problem
    rows: torch.Tensor

    def dense(self, B, H, M, N, device=None):  # type: ignore[no-untyped-def]
        """Return bool (B, H or 1, M, N); M is the number of rows."""
        problem, mask = self.problem, self.problem.mask
        lengths = torch.tensor(mask.lengths(B, problem.M, N), device=device)
        of_rows, of_keys = lengths.view(2, B, 1, 1, 1).unbind()
        m, n = self.rows.view(-1, 1), torch.arange(N, device=device)
        b = torch.arange(B, device=device).view(-1, 1, 1, 1)
        h = torch.arange(1 if mask.uniform else H, device=device).view(-1, 1, 1)
        valid = (m < of_rows) & (n < of_keys)
        m, n = torch.minimum(m, of_rows - 1), torch.minimum(n, of_keys - 1)
        return valid & mask.window_and_mask_mod(b, h, m, n, M=problem.M, N=N)


def sampled(length: int, count: int) -> list[int]:
    """Return one row of each of ``count`` equal parts of a length, and the first and the last."""
    draw = random.Random(length)
    places = [length * i // count for i in range(count + 1)]
    rows = {draw.randrange(a, b) for a, b in pairwise(places) if a < b}
    return sorted(rows | {0, length - 1})


def findings_in_rows(
    subject: Subject,
    problem: Problem,
    rows: list[int],
    *,
    is_sparse: bool = False,
    with_rms: bool = True,
) -> list[Finding] | None:
    """Run a problem and judge some of its rows, and dk and dv of the same rows.

    Args:
        subject: The subject.
        problem: The problem, without dlse and score modifications.
        rows: The rows.
        is_sparse: Whether q is 0 outside of the rows, for a q that is too large to be drawn.
        with_rms: Whether to check the mean square of the errors too.

    Returns:
        The findings; None if the problem is out of range.
    """
    place = torch.tensor(rows, device=problem.device)
    few = dataclasses.replace(problem, M=len(rows), mask=Mask())
    whole = None if is_sparse else make(problem)
    part = make(few) if whole is None else _of_rows(whole, place)
    if whole is None:
        whole = part._replace(q=_scattered(part.q, place, problem.M))
    dout = _scattered(part.dout, place, problem.M)
    got = run_subject(subject, problem, whole._replace(dout=dout))
    found = Outputs(
        *(
            x if x is None or name in ("dk", "dv") else x[:, :, place]
            for name, x in zip(Outputs._fields, got, strict=True)
        )
    )
    mask, numerics = _OfRows(problem, place), subject.numerics_of(problem)
    scores = {"mask": mask, "sm_scale": problem.scale}
    judgement = judge(*part, **scores, in_dtype=problem.dtype, numerics=numerics)
    if judgement.out_of_range is not None:
        return None
    want = torch_reference.attention(*part, **scores)
    trial = AttentionTrial(subject, few, part, found, want, judgement)
    vars(trial)["variances"] = variances(*part, **scores, in_dtype=problem.dtype, numerics=numerics)
    findings = accuracy(trial) or (rms(trial) if with_rms else [])
    return [_of_whole(x, problem, rows) for x in findings]


def _of_rows(inputs: Inputs, place: torch.Tensor) -> Inputs:
    q, dout = (x[:, :, place] for x in (inputs.q, inputs.dout))
    return inputs._replace(q=q, dout=dout)


def _scattered(x: torch.Tensor, place: torch.Tensor, M: int) -> torch.Tensor:
    """Return zeros (B, H, M, D) with ``x`` in some rows."""
    whole = x.new_zeros((*x.shape[:2], M, x.shape[3]))
    whole[:, :, place] = x
    return whole


def _of_whole(finding: Finding, problem: Problem, rows: list[int]) -> Finding:
    """Return a finding that names the row of the whole problem."""
    where = re.sub(r"m=(\d+)", lambda found: f"m={rows[int(found[1])]}", finding.where)
    places = f"in {len(rows)} sampled rows"
    return dataclasses.replace(finding, problem=problem, where=where, places=places, heat=None)
