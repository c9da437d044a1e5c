"""Choose the problems of a new baseline: N(0, 1) data, with every dtype, mask and guarantee."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import cycle
from typing import Any

from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.problem import Problem
from fa_verify.properties.guarantees.claims import Check, claims_of
from fa_verify.properties.kernels.narrowing import narrowed
from fa_verify.properties.kernels.subject import Subject
from fa_verify.properties.regression.baseline import Entry
from fa_verify.shards import Shard, shards_of

__all__ = ["CHECKS", "arithmetic_of", "chosen"]

# Each problem is checked with one of these, in addition to the standing checks.
_CLAIMS = claims_of("call", "statistics", "closed forms")
CHECKS: dict[str, Check] = {name: claim.check for name, claim in _CLAIMS.items()}
# Minimum number of problems. The shards and masks are repeated with other values to reach it.
FEWEST = {"cpu": 60, "cuda": 340}
# Number of rows: this many tiles and a few rows, within the limits below. A mean over more rows is
# more precise, but the interpreter takes seconds where a GPU takes milliseconds.
TILES = {"cpu": 2, "cuda": 5}
LEAST_ROWS = {"cpu": 0, "cuda": 384}
MOST_ROWS = {"cpu": 140, "cuda": 700}
LARGE_TILE = {"cpu": 64, "cuda": 1024}
LARGEST_HEAD_DIM = {"cpu": 128, "cuda": 1024}
# Dot products over fewer elements have errors with heavy tails.
LEAST_HEAD_DIM = 8


def arithmetic_of(subject: Subject, problem: Problem) -> str:
    """Return the column of the summary for a problem: its dtype, or "tf32"."""
    dots = subject.numerics_of(problem).dots
    return "tf32" if problem.dtype == "fp32" and dots == "tf32" else problem.dtype


def chosen(subject: Subject, device: str) -> tuple[Entry, ...]:
    """Choose the problems of a baseline, deterministically.

    There are one or more problems for each shard (dtype, configuration, head dims) and kind of mask
    that the subject supports. Their inputs are N(0, 1) and span several ragged tiles, so that their
    root-mean-square error is meaningful. Each problem is assigned the applicable check with the
    fewest problems so far.

    Args:
        subject: The subject under test.
        device: "cpu" or "cuda".
    """
    counts: Counter[str] = Counter()
    entries = []
    for problem in _supported(subject, device):
        applying = [name for name, claim in _CLAIMS.items() if claim.applies(problem)]
        check = min(applying, key=counts.__getitem__)
        counts[check] += 1
        entries.append(Entry(problem, check, arithmetic_of(subject, problem)))
    return tuple(entries)


def _supported(subject: Subject, device: str) -> Iterator[Problem]:
    """Yield the supported problems, each with a different seed."""
    every = (*shards_of(subject), *shards_of(subject, float64=True))
    largest = LARGEST_HEAD_DIM[device]
    shards = [shard for shard in every if min(shard.head_dims) <= largest] or every
    fields: list[dict[str, Any]] = []
    for turn, shard in enumerate(cycle(shards)):
        if turn % len(shards) == 0 and (len(fields) >= FEWEST[device] or (turn and not fields)):
            break
        made = _of_shard(subject, shard, device, turn // len(shards))
        fields += [x for x in made if subject.excludes(narrowed(subject, Problem(**x))) is None]
    # One problem of each 16-bit dtype is small enough for G12.
    far = {shard.dtype: shard for shard in reversed(shards) if shard.dtype in ("fp16", "bf16")}
    for shard in far.values():
        ordinary = next(_of_shard(subject, shard, device, 0))
        N = _multiple(29 if subject.m_ne_n else 13, subject)
        fields.append({**ordinary, "M": _multiple(13, subject), "N": N})
    for seed, given in enumerate(fields):
        problem = narrowed(subject, Problem(**given, seed=seed))
        if subject.excludes(problem) is None:
            yield problem


def _of_shard(subject: Subject, shard: Shard, device: str, again: int) -> Iterator[dict[str, Any]]:
    """Yield the fields of a problem for each kind of mask."""
    dims = [d for d in shard.head_dims if d >= LEAST_HEAD_DIM] or list(shard.head_dims)
    # Few pairs of D and Dv, so that few kernels are compiled: the first two (one of them ragged),
    # the largest twice, the first twice.
    D, Dv = ((dims[0], dims[1 % len(dims)]), (max(dims),) * 2, (dims[0],) * 2)[again % 3]
    Dv = Dv if subject.dv_ne_d else D
    wide = max(TILES[device] * shard.tile, LEAST_ROWS[device])
    M = _multiple(min(wide, MOST_ROWS[device]) + 3, subject)
    N = _multiple(M + 7, subject) if subject.m_ne_n else M
    is_large = shard.tile >= LARGE_TILE[device]
    H, B = (1, 1) if is_large else (2, 2)
    heads = {"H": 2 * H if device == "cuda" else H, "Hk": H if device == "cuda" else 1}
    if not subject.gqa:
        heads["Hk"] = heads["H"]
    dirty = "nan" if subject.dirty is None or "nan" in subject.dirty else subject.dirty[0]
    common = {"dtype": shard.dtype, "config": shard.config, "device": device}
    for mask in _masks(M, N, shard.tile, B):
        padded = {} if mask.seqlens_k is None else {"B": B, "dirty": dirty}
        yield {**common, **heads, **padded, "M": M, "N": N, "D": D, "Dv": Dv, "mask": mask}


def _masks(M: int, N: int, tile: int, B: int) -> Iterator[Mask]:
    """Yield one mask of each kind. In the last, some rows see no key by position or by length."""
    yield Mask()
    yield Mask(causal=True)
    yield Mask(window_left=tile // 2 + 3, window_right=tile // 3)
    yield Mask(causal=True, window_left=tile + 1)
    yield Mask(seqlens_q=(M - M // 3, M)[:B], seqlens_k=(N - 5, N // 2)[:B])
    yield Mask(causal=True, seqlens_q=(M - 3, M // 2)[:B], seqlens_k=(N // 2, N)[:B])


def _multiple(size: int, subject: Subject) -> int:
    """Round a size up to the subject's ``seqlen_multiple``, limited by its ``max_seqlen``."""
    multiple = subject.seqlen_multiple
    most = subject.max_seqlen or size + multiple
    return min(-(-size // multiple) * multiple, most // multiple * multiple)
