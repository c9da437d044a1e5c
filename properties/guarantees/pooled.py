"""The guarantees of pooled probabilities, each a function from a trial to its findings.

The checks apply to subjects with a ``pooled`` callable and return no findings for others. The block
size follows from the problem's seed, so that the problem alone replays a failure.
"""

from __future__ import annotations

import dataclasses
import math

import torch

from fa_verify.oracles.bounds.pooled import pooled_bound
from fa_verify.oracles.guarantee import G1, G4, G5, G6, G7, G8, G9, G10, T3
from fa_verify.oracles.problem import Problem
from fa_verify.oracles.reference.pooled import POOLS, pooled_probabilities
from fa_verify.properties.guarantees.accuracy import LOGIC_SCORE, LOGIC_SHARE, LOGIC_UNDERFLOW
from fa_verify.properties.guarantees.compare import Finding, ratios, same_bits
from fa_verify.properties.guarantees.memory import reasons_of_nan
from fa_verify.properties.inputs.tensors import Inputs, make
from fa_verify.properties.kernels.subject import Subject
from fa_verify.properties.running.guard_bands import OTHER_FILL, GuardBands
from fa_verify.properties.running.trial import AttentionTrial, run_pooled

__all__ = [
    "accuracy",
    "dirty_padding",
    "full_overwrite",
    "hidden_positions",
    "independence",
    "layout",
    "logic",
    "pool_size",
    "reads_in_bounds",
    "repeatable",
]

_CONTIGUOUS = ("bhsd", "bhsd", "bhsd", "bhsd")


def pool_size(subject: Subject, problem: Problem) -> tuple[int, int]:
    """Return the rows and keys of a block: from 1 to more than M and N, chosen by the seed."""
    seed = problem.all_seeds[0]
    sizes = []
    for length, tile in zip((problem.M, problem.N), subject.tile_of(problem), strict=True):
        some = (3, 1, tile, 7, length + 5, 2, 2 * tile, 13, max(1, length // 2), tile + 1)
        sizes.append(some[seed % len(some)])
        seed //= len(some)
    return sizes[0], sizes[1]


def _pool(problem: Problem) -> str:
    """Return the kind of pooling for checks of a second run, chosen by the seed."""
    return POOLS[problem.all_seeds[0] % len(POOLS)]


def _run(trial: AttentionTrial, pool: str, inputs: Inputs | None = None) -> torch.Tensor:
    """Return the subject's pooled probabilities for the trial's inputs or for others."""
    size = pool_size(trial.subject, trial.problem)
    given = trial.inputs if inputs is None else inputs
    # On a CPU a write out of bounds would corrupt the heap.
    with GuardBands():
        return run_pooled(trial.subject, trial.problem, given, pool, size)


def _want(trial: AttentionTrial, pool: str) -> torch.Tensor:
    """Return the oracle's pooled probabilities."""
    problem = trial.problem
    return pooled_probabilities(
        trial.inputs.q, trial.inputs.k, mask=problem.mask, sm_scale=problem.scale,
        pool=pool, size=pool_size(trial.subject, problem),
    )  # fmt: skip


def _bound(trial: AttentionTrial, pool: str) -> torch.Tensor:
    """Return the error bound of the pooled probabilities."""
    problem = trial.problem
    return pooled_bound(
        trial.inputs.q, trial.inputs.k, mask=problem.mask, sm_scale=problem.scale,
        in_dtype=problem.dtype, numerics=trial.subject.numerics_of(problem),
        pool=pool, size=pool_size(trial.subject, problem),
    )  # fmt: skip


def accuracy(trial: AttentionTrial) -> list[Finding]:
    """G1: every pooled probability lies within the derived bound around the float64 oracle.

    Without a visible pair the bound is 0, so the result must be exact.
    """
    return _near(trial, G1, "leaves the derived bound", None)


def logic(trial: AttentionTrial) -> list[Finding]:
    """T3: in float64, every pooled probability is within 1e-12 of its value, if |s| <= 100."""
    if trial.problem.dtype != "fp64" or trial.judgement.max_score > LOGIC_SCORE:
        return []
    return _near(trial, T3, "differs by more than rounding", LOGIC_SHARE)


def _near(trial: AttentionTrial, guarantee: str, claim: str, share: float | None) -> list[Finding]:
    """Return findings where the error exceeds the bound or, with ``share``, that part of the value.

    Raises:
        RuntimeError: A bound is not finite although the problem is in range, an error of the suite.
    """
    if trial.subject.pooled is None:
        return []
    findings = []
    for pool in POOLS:
        want = _want(trial, pool)
        limit = _bound(trial, pool) if share is None else share * want + LOGIC_UNDERFLOW
        if not bool(limit.isfinite().all()):
            problem = trial.problem.to_json()
            raise RuntimeError(f"the bound is not finite, so nothing was judged: {problem}")
        got = _run(trial, pool)
        ratio = ratios(got, want, limit)
        findings += _found(trial, pool, ratio > 1, ratio, (got, want, limit), guarantee, claim)
    return findings


def dirty_padding(trial: AttentionTrial) -> list[Finding]:
    """G4: values in padding do not affect the result."""
    return _again(
        trial, make(trial.problem, dirty="zero"), G4,
        "depends on values in padding",
    )  # fmt: skip


def layout(trial: AttentionTrial) -> list[Finding]:
    """G8: inputs with any strides give the same as contiguous copies."""
    declared = trial.subject.layouts
    if declared is not None and "bhsd" not in declared:
        return []
    contiguous = make(trial.problem, layouts=_CONTIGUOUS)
    return _again(trial, contiguous, G8, "depends on the strides of its inputs")


def reads_in_bounds(trial: AttentionTrial) -> list[Finding]:
    """G7: memory around and between the rows does not affect the result."""
    largest = torch.finfo(trial.inputs.q.dtype).max
    return _again(
        trial, make(trial.problem, around=largest), G7,
        "depends on memory outside of its inputs' elements",
    )  # fmt: skip


def repeatable(trial: AttentionTrial) -> list[Finding]:
    """G10: repeated runs on the same inputs give bitwise equal results."""
    return _again(trial, trial.inputs, G10, "differs from run to run")


def hidden_positions(trial: AttentionTrial) -> list[Finding]:
    """G5: the values of a key do not affect blocks whose rows do not see it.

    One key of each batch entry is replaced by the largest finite value: the valid key that is
    hidden from the most non-empty rows.
    """
    problem = trial.problem
    if 0 in (problem.B, problem.M, problem.N):
        return []
    sizes = (problem.B, problem.H, problem.M, problem.N)
    seen = problem.mask.dense(*sizes, device=problem.device).expand(*sizes)
    hidden = (seen.any(3, keepdim=True) & ~seen).sum((1, 2)) * seen.any(2).any(1)
    at_key = torch.arange(problem.N, device=problem.device) == hidden.argmax(1).view(-1, 1)
    k = trial.inputs.k
    extreme = torch.where(at_key[:, None, :, None], torch.finfo(k.dtype).max, k)
    blind = ~(seen & at_key[:, None, None, :]).any(3)
    # Blocks in which no row sees the key.
    rows = pool_size(trial.subject, problem)[0]
    starts = range(0, problem.M, rows)
    of_blocks = torch.stack([blind[:, :, m : m + rows].all(2) for m in starts], 2).unsqueeze(3)
    return _again(
        trial, trial.inputs._replace(k=extreme), G5,
        "depends on a key that no row of the block sees", of_blocks,
    )  # fmt: skip


def independence(trial: AttentionTrial) -> list[Finding]:
    """G9: one batch entry and one key/value head with its group give the same result alone.

    The seed chooses the slice.
    """
    problem = trial.problem
    if trial.subject.pooled is None or problem.B == 0 or problem.B * problem.Hk == 1:
        return []
    pool = _pool(problem)
    b, group = problem.seed % problem.B, problem.seed // problem.B % problem.Hk
    heads = slice(group * problem.G, (group + 1) * problem.G)
    of_rows, of_keys = (slice(b, b + 1), heads), (slice(b, b + 1), slice(group, group + 1))
    mask = problem.mask.sliced((b,), tuple(range(problem.H))[heads])
    alone = dataclasses.replace(problem, B=1, H=problem.G, Hk=1, mask=mask)
    q, k, v, dout = trial.inputs.tensors
    inputs = Inputs(q[of_rows], k[of_keys], v[of_keys], dout[of_rows])
    with GuardBands():
        part = run_pooled(trial.subject, alone, inputs, pool, pool_size(trial.subject, problem))
    first = _run(trial, pool)
    again = first.clone()
    again[of_rows] = part
    claim = f"computed for b={b}, key/value head {group} alone differs from the whole result"
    return _agree(trial, pool, first, again, G9, claim)


def full_overwrite(trial: AttentionTrial) -> list[Finding]:
    """G6: every pooled probability is written, and nothing outside of the result."""
    if trial.subject.pooled is None:
        return []
    pool, size = _pool(trial.problem), pool_size(trial.subject, trial.problem)
    with GuardBands() as guards:
        got = run_pooled(trial.subject, trial.problem, trial.inputs, pool, size)
    findings: list[Finding] = []
    guarantee = G6
    if (nan := got.isnan()).any():
        with GuardBands(fill=OTHER_FILL):
            other = run_pooled(trial.subject, trial.problem, trial.inputs, pool, size)
        zeros = torch.zeros_like(got)
        for bad, claim in reasons_of_nan(nan, other):
            findings += _found(trial, pool, bad, zeros, (got, zeros, zeros), guarantee, claim)
    for found in guards.overruns():
        shape = tuple(found.tensor.shape)
        findings.append(
            Finding(
                guarantee=guarantee, claim="is written outside its elements",
                subject=trial.subject.name, output=f"a tensor of pooled {pool}",
                where=found.place, got=math.nan, want=math.nan, bound=0.0,
                bad=1, total=found.tensor.numel(), places=f"shape {shape}", problem=trial.problem,
            )
        )  # fmt: skip
    return findings


def _again(
    trial: AttentionTrial,
    inputs: Inputs,
    guarantee: str,
    claim: str,
    compared: torch.Tensor | None = None,
) -> list[Finding]:
    """Return findings where equivalent inputs give a different result."""
    if trial.subject.pooled is None:
        return []
    pool = _pool(trial.problem)
    first, again = _run(trial, pool), _run(trial, pool, inputs)
    return _agree(trial, pool, first, again, guarantee, claim, compared)


def _agree(
    trial: AttentionTrial,
    pool: str,
    first: torch.Tensor,
    again: torch.Tensor,
    guarantee: str,
    claim: str,
    compared: torch.Tensor | None = None,
) -> list[Finding]:
    """Return findings where two runs differ, bitwise if promised, else in exceeding the bound.

    A block that is wrong in both runs is reported by the accuracy check.

    Args:
        trial: The trial.
        pool: Kind of pooling.
        first: Result for the trial's own inputs.
        again: Result of the second run.
        guarantee: The guarantee, such as G8. Its first word is looked up in the subject's
            bitwise promises.
        claim: Description of the fault, such as "differs from run to run".
        compared: Bool that is expanded to the blocks: where they must agree; None is everywhere.
    """
    limit = torch.zeros_like(first, dtype=torch.float64)
    want, bad = first.to(torch.float64), ~same_bits(first, again)
    if not trial.subject.promises(guarantee.split()[0], trial.problem.config):
        claim = f"{claim}, and leaves the bound"
        limit, want = _bound(trial, pool), _want(trial, pool)
        was_outside, is_outside = (ratios(x, want, limit) > 1 for x in (first, again))
        bad, again = was_outside ^ is_outside, torch.where(was_outside, first, again)
    if compared is not None:
        bad = bad & compared
    badness = (again.to(torch.float64) - want).abs().nan_to_num(nan=torch.inf)
    return _found(trial, pool, bad, badness, (again, want, limit), guarantee, claim)


def _found(
    trial: AttentionTrial,
    pool: str,
    bad: torch.Tensor,
    badness: torch.Tensor,
    values: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    guarantee: str,
    claim: str,
) -> list[Finding]:
    """Return a finding at the worst bad block, if any. ``values`` are ``got, want, bound``."""
    if not bad.any():
        return []
    problem, size = trial.problem, pool_size(trial.subject, trial.problem)
    flat = torch.where(bad, badness.to(torch.float64), -torch.inf).flatten()
    index = tuple(int(i) for i in torch.unravel_index(flat.argmax(), bad.shape))
    b, h, i, j = index
    pairs = [
        f"{axis}={place * each}..{min((place + 1) * each, length) - 1}"
        for axis, place, each, length in zip(
            "mn", (i, j), size, (problem.M, problem.N), strict=True
        )
    ]
    got, want, bound = (float(x[index]) for x in values)
    return [
        Finding(
            guarantee=guarantee, claim=claim, subject=trial.subject.name, output=f"pooled {pool}",
            where=f"b={b} h={h} {' '.join(pairs)}", got=got, want=want, bound=bound,
            bad=int(bad.sum()), total=bad.numel(), places=f"blocks of {size[0]} x {size[1]} pairs",
            problem=problem,
        )
    ]  # fmt: skip
