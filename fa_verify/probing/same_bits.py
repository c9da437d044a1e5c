"""Try whether the bits of a kernel depend on the batch, on chunks, on slices or on padding."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import torch

from fa_verify.oracles.calls.cache import CacheProblem
from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.outputs import Outputs
from fa_verify.oracles.problem import Problem
from fa_verify.probing.answers import Answer, undecided
from fa_verify.probing.trying import Tried, attempt
from fa_verify.properties.guarantees.caches import OTHER_CALLS
from fa_verify.properties.guarantees.same_bits import difference, parts_of, subject_of
from fa_verify.properties.inputs.parts import Part, merged
from fa_verify.properties.kernels.narrowing import narrowed
from fa_verify.properties.kernels.subject import Subject
from fa_verify.properties.kernels.vocabulary import SAME_BITS
from fa_verify.properties.running.trial import SubjectError
from fa_verify.simulator.interpreter.dot_order import dots_in_order

__all__ = ["same_bits_of"]

# Batch entries, rows and keys, from cheap to dear: one row, few rows against long keys, many
# entries, several tiles both ways. On a GPU they pass the thresholds of schedulers.
_SIZES = (
    (3, 1, 60), (3, 5, 40), (2, 1, 500), (2, 33, 33), (9, 1, 200), (2, 130, 130), (2, 40, 600),
    (2, 300, 1000), (16, 2, 2000),
)  # fmt: skip
_SIZES_OF_A_GPU = (
    *_SIZES, (2, 1000, 1000), (64, 1, 4000), (2, 1500, 3000), (64, 1, 65_536), (4, 100, 32_000),
    (2, 8000, 8000),
)  # fmt: skip
# Rows of a kernel that takes as many keys as rows.
_MOST_ROWS = 130
_DIMS, _HEADS = {"cpu": (16, 64), "cuda": (64,)}, 4


def same_bits_of(subject: Subject, device: str, seconds: float = 10.0) -> Iterator[Answer]:
    """Yield whether each word of ``same_bits`` holds, or the first size at which it fails.

    The forward alone is tried. The products of an interpreted kernel add in one order, as on
    tensor cores.

    Args:
        subject: The kernel, with declarations or assumptions of what it takes.
        device: "cpu" or "cuda".
        seconds: No size begins later. An interpreted kernel takes a second for a hundred tiles.
    """
    of_caches = subject.reads_caches_alone
    words = tuple(OTHER_CALLS) if of_caches else tuple(SAME_BITS)
    problems = (_cache_problems if of_caches else _problems)(subject, device)
    began = time.monotonic()
    held: dict[str, int] = dict.fromkeys(words, 0)
    failed: dict[str, Answer] = {}
    largest: dict[str, Problem | CacheProblem] = {}
    # Larger sizes need more memory than a GPU may have.
    with dots_in_order(), suppress(torch.OutOfMemoryError):
        for problem in problems:
            if time.monotonic() - began > seconds or len(failed) == len(words):
                break
            compared = _comparisons(subject, problem)
            for word in words:
                if word in failed or compared is None:
                    continue
                for told, different in compared(word):
                    held[word] += 1
                    largest[word] = problem
                    if different:
                        failed[word] = _failed(word, problem, f"{told}: {different}")
                        break
    for word, count in held.items():
        yield failed.get(word) or _held(word, count, largest.get(word))
    kept = tuple(word for word in words if held[word] and word not in failed)
    if any(held.values()):
        yield Answer("same_bits", kept, "tried", "what a declaration could promise")


def _problems(subject: Subject, device: str) -> Iterator[Problem]:
    """Yield the problems of each size that the subject takes, with its masks and dtypes."""
    dims = subject.head_dims
    dim = next((x for x in _DIMS[device] if dims is None or x in dims), (dims or (0,))[0])
    taken = [x for x in ("bf16", "fp16", "fp32", "fp64") if x in subject.dtypes]
    narrow, wide = taken[0], "fp32" if "fp32" in taken else taken[0]
    layouts = (subject.layouts or ("bhsd",))[:1] * 4
    multiple = subject.seqlen_multiple
    for B, rows, keys in _SIZES_OF_A_GPU if device == "cuda" else _SIZES:
        M, N = (-(-x // multiple) * multiple for x in (rows, keys))
        of_entries = [max(1, N - (N // 3) * (b % 3)) for b in range(B)]
        lengths: tuple[int, ...] | None = tuple(-(-x // multiple) * multiple for x in of_entries)
        if not subject.m_ne_n and not subject.one_query:
            M, lengths = max(M, min(N, _MOST_ROWS)), None
            M = N = -(-M // multiple) * multiple
        for dtype, mask in (
            (wide, Mask(causal=True)),
            (narrow, Mask()),
            (narrow, Mask(causal=True, seqlens_k=lengths)),
        ):
            problem = narrowed(subject, Problem(
                B=B, H=_HEADS, Hk=_HEADS // 2 if subject.gqa else _HEADS, M=M, N=N, D=dim, Dv=dim,
                dtype=dtype, mask=mask, layouts=layouts, dirty=(subject.dirty or ("zero",))[0],
                config=next(iter(subject.configs)), seed=B + M + N, device=device,
            ))  # fmt: skip
            if subject.excludes(problem) is None:
                yield problem


def _cache_problems(subject: Subject, device: str) -> Iterator[CacheProblem]:
    """Yield the problems of each size with a cache, in pages where the subject takes them."""
    pages = (subject.page_sizes or (16,))[0] if "paged" in subject.cache else 0
    # A cache has lengths, whatever masks of padded tensors the subject takes.
    of_padding = dataclasses.replace(subject, masks=(*subject.masks, "padding"))
    for problem in _problems(of_padding, device):
        _, lengths = problem.mask.lengths(problem.B, problem.M, problem.N)
        mask = Mask(causal=problem.mask.causal, seqlens_k=lengths)
        yield CacheProblem(attention=dataclasses.replace(problem, mask=mask), page_size=pages)


def _comparisons(
    subject: Subject, problem: Problem | CacheProblem
) -> Callable[[str], Iterator[tuple[str, str]]] | None:
    """Return a function of a word to its comparisons; None if the subject takes no such problem."""
    if isinstance(problem, CacheProblem):
        return functools.partial(_compared_calls, subject, problem)
    whole = attempt(subject, problem, backward=False, guarded=False)
    return None if whole.got is None else functools.partial(_compared, subject, whole)


def _compared_calls(
    subject: Subject, problem: CacheProblem, word: str
) -> Iterator[tuple[str, str]]:
    """Yield other calls that a word is about, and how their bits differ, if they do."""
    if word == "chunks" and not problem.attention.mask.causal:
        return
    with suppress(SubjectError, NotImplementedError):
        for told, first, again, _ in OTHER_CALLS[word](subject, problem):
            both = (Outputs(out, lse, None, None, None) for out, lse in (first, again))
            yield told.removeprefix("where "), difference(*both, only=("out", "lse"))


def _compared(subject: Subject, whole: Tried, word: str) -> Iterator[tuple[str, str]]:
    """Yield each part of a problem that a word is about, and how its bits differ, if they do."""
    assert whole.got is not None
    if word == "inference":
        if (
            subject.backward
            and (trained := attempt(subject, whole.problem, guarded=False)).got is not None
        ):
            yield "with gradients", difference(whole.got, trained.got, ("out", "lse"))
        return
    for part in parts_of(word, subject, whole.problem, whole.inputs):
        got = _run(subject, part).got
        if got is not None:
            yield part.told, difference(whole.got, merged(whole.got, part, got)[0], part.outputs)


def _run(subject: Subject, part: Part) -> Tried:
    computing = subject_of(subject, part)
    return attempt(computing, part.problem, part.inputs, backward=False, guarded=False)


def _size(problem: Problem | CacheProblem) -> str:
    """Format the sizes of a problem, such as "B=3, 1 row, 60 keys, bf16, causal"."""
    if isinstance(problem, CacheProblem):
        pages = f", pages of {problem.page_size} rows" if problem.page_size else ""
        return f"{_size(problem.attention)}{pages}"
    rows = "1 row" if problem.M == 1 else f"{problem.M} rows"
    causal = ", causal" if problem.mask.causal else ""
    lengths = ", lengths" if problem.mask.seqlens_k is not None else ""
    return f"B={problem.B}, {rows}, {problem.N} keys, {problem.dtype}{causal}{lengths}"


def _failed(word: str, problem: Problem | CacheProblem, seen: str) -> Answer:
    said = f"{SAME_BITS[word]} fails first at {_size(problem)}: {seen}"
    return Answer(f"same_bits_{word}", False, "shown", said, problem.to_json())


def _held(word: str, count: int, largest: Problem | CacheProblem | None) -> Answer:
    if largest is None:
        return undecided(f"same_bits_{word}", "the kernel takes no parts of this kind")
    said = f"{SAME_BITS[word]} holds in {count} comparisons, to {_size(largest)}"
    return Answer(f"same_bits_{word}", True, "tried", said, largest.to_json())
