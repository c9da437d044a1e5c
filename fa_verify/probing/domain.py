"""The inputs that a kernel takes, found by calls that it may refuse."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import torch

from fa_verify.oracles.masks.dilated import Dilated
from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.problem import DTYPES, LAYOUTS, TENSORS, Problem
from fa_verify.probing.answers import Answer, undecided
from fa_verify.probing.trying import Tried, attempt
from fa_verify.properties.problems.strategies import HEAD_DIMS
from fa_verify.properties.subjects.declarations import DEFAULT_SCALE, SCORE_MODS
from fa_verify.properties.subjects.subject import Subject

__all__ = ["domain_of", "smallest", "with_gradients", "with_right_results"]

_SIZES = (16, 32, 64, 128, 256)
_HEAD_DIMS = (*sorted(HEAD_DIMS), 256)
# Errors of out in shares of its largest value: more than float64's, and no more than float32's.
_OF_FLOAT64, _OF_FLOAT32 = 2.0**-40, 2.0**-12
_NOT_PROBED = {
    "max_seqlen": "long sequences take too much time",
    "dirty": "values in padding that reach the results are a finding",
    "bitwise": "equal bits in some calls promise nothing of others",
    "cuda_graphs": "a capture that fails leaves the process unusable",
}


def smallest(subject: Subject, device: str) -> Problem | Tried:
    """Return the first problem that the kernel takes, from small to large.

    The forward alone decides. fp32 and 16 rows, keys and columns come first. If the kernel takes
    none, return the last call, of the largest problem.
    """
    squares = [(size, size) for size in _SIZES]
    rows_and_keys = [*squares, *((1, size) for size in _SIZES)]
    for (M, N), D, dtype in itertools.product(rows_and_keys, (16, 64, 128), reversed(DTYPES)):
        problem = Problem(M=M, N=N, D=D, Dv=D, dtype=dtype, device=device)
        if dtype != "fp64":
            tried = attempt(subject, problem, backward=False)
            if not tried.error:
                return problem
    fp64 = Problem(M=16, N=16, dtype="fp64", device=device)
    return tried if attempt(subject, fp64, backward=False).error else fp64


def with_right_results(subject: Subject, base: Problem) -> Problem:
    """Return the first problem whose out is right, from ``base`` to longer ones; else ``base``.

    A kernel that counts the padding of its tiles is wrong on short sequences, where no experiment
    shows what else it does.
    """
    longer = [{}, *({"N": size} for size in _SIZES if size > base.N)]
    if base.M > 1:
        longer = [{"M": x["N"], **x} if x else x for x in longer]
    for sizes in longer:
        tried = attempt(subject, dataclasses.replace(base, **sizes), backward=False)
        wanted = (tried.reference(x, tried.problem.scale).out for x in (Mask(), Mask(causal=True)))
        if any(tried.resembles(want) for want in wanted):
            return tried.problem
    return base


def with_gradients(subject: Subject, base: Problem) -> Problem:
    """Return the first problem with gradients, from ``base`` to larger ones; ``base`` if none has.

    The backward of a kernel may need longer sequences or more columns than its forward.
    """
    sizes = [{}] if base.M == 1 else [{"M": size, "N": size} for size in _SIZES if size >= base.M]
    for D, size in itertools.product(sorted({base.D, 64, 128} - {*range(base.D)}), sizes):
        problem = dataclasses.replace(base, D=D, Dv=D, **size)
        if not attempt(subject, problem).error:
            return problem
    return base


def domain_of(subject: Subject, base: Problem) -> Iterator[Answer]:
    """Yield what a kernel takes, starting from a problem that it takes.

    Args:
        subject: The kernel without its declarations.
        base: The result of ``smallest``.
    """
    backward = _backward(subject, base)
    yield backward
    calls = _Calls(subject, bool(backward.value))
    yield from (calls.dtypes(base), calls.head_dims(base), calls.multiple(base))
    yield calls.alone(base)
    for word, changes in (
        ("gqa", ({"H": 2},)),
        ("m_ne_n", ({"N": 2 * base.N}, {"M": 2 * base.M})),
        ("dv_ne_d", ({"Dv": 2 * base.D}, {"D": 2 * base.D})),
        ("zero_sizes", ({"B": 0}, {"M": 0}, {"N": 0})),
    ):
        yield calls.flag(word, base, changes)
    yield from (*calls.masks(base), calls.layouts(base), calls.score_mods(base))
    yield from _ignored(subject, base)
    yield from (undecided(word, f"not probed: {why}") for word, why in _NOT_PROBED.items())


def _backward(subject: Subject, base: Problem) -> Answer:
    """Find out whether a kernel has gradients."""
    tried = attempt(subject, base)
    if tried.error:
        return Answer("backward", False, "shown", tried.error, tried.replay)
    return Answer("backward", True, "shown", "dq, dk and dv are returned", tried.replay)


@dataclasses.dataclass(frozen=True)
class _Calls:
    """Calls of one kernel, with its gradients if it has them."""

    subject: Subject
    backward: bool

    def _attempt(self, base: Problem, **changes: Any) -> Tried:
        problem = dataclasses.replace(base, **changes)
        return attempt(self.subject, problem, backward=self.backward)

    def _subset(self, word: str, tried: dict[Any, Tried], known: tuple[Any, ...]) -> Answer:
        """Return the members of a declaration whose calls were not refused."""
        taken = tuple(name for name in known if name not in tried or not tried[name].refused)
        refused = [one for one in tried.values() if one.refused]
        if not refused:
            of = ", ".join(map(str, tried))
            return Answer(word, taken, "tried", f"takes each of {of}{_notes(tried.values())}")
        others = f" ({len(refused)} of {len(tried)} refused)" if len(refused) > 1 else ""
        said = f"refuses {_shown(known, tried, taken)}: {refused[0].error}{others}"
        return Answer(word, taken, "shown", said + _notes(tried.values()), refused[0].replay)

    def dtypes(self, base: Problem) -> Answer:
        """Find the dtypes. A kernel that computes float64 inputs in float32 does not take them."""
        tried = {x: self._attempt(base, dtype=x) for x in DTYPES}
        found = self._subset("dtypes", tried, DTYPES)
        error = tried["fp64"].error_of_out()
        if error is None or not _OF_FLOAT64 < error < _OF_FLOAT32:
            return found
        taken = tuple(x for x in found.value if x != "fp64")
        seen = f"with fp64, out errs by {error:.1e} of its largest value, as float32 does"
        return Answer("dtypes", taken, "shown", seen, tried["fp64"].replay)

    def head_dims(self, base: Problem) -> Answer:
        tried = {D: self._attempt(base, D=D, Dv=D) for D in _HEAD_DIMS}
        found = self._subset("head_dims", tried, _HEAD_DIMS)
        return found if found.certainty == "shown" else dataclasses.replace(found, value=None)

    def multiple(self, base: Problem) -> Answer:
        """Find the smallest power of two of which odd multiples are taken as M and N."""
        word = "seqlen_multiple"
        if base.M == 1:
            return undecided(word, "M = 1 alone is taken")
        refused: Tried | None = None
        for size in (1, 2, 4, 8, 16, 32, 64, 128, 256):
            # Longer than the base: a kernel may refuse short sequences, whatever they are.
            longer = base.M + size, 2 * base.M + size
            sizes = longer if size < base.M else (size, 3 * size)
            tried = [self._attempt(base, M=n, N=n) for n in sizes]
            no = next((one for one in tried if one.refused), None)
            if no is None:
                notes = _notes(tried)
                if refused is None:
                    seen = f"takes M = N = {sizes[0]} and {sizes[1]}{notes}"
                    return Answer(word, 1, "tried", seen, tried[1].replay)
                seen = f"refuses M = N = {refused.problem.M}: {refused.error}{notes}"
                return Answer(word, size, "shown", seen, refused.replay)
            refused = no
        return undecided(word, f"refuses each multiple: {refused.error}", refused.replay)

    def alone(self, base: Problem) -> Answer:
        """Find out whether M = 1 is the only number of rows."""
        if base.M > 1:
            return Answer("only_one_row", False, "shown", f"takes M = {base.M}", base.to_json())
        tried = self._attempt(base, M=2)
        seen = f"takes M = 1; M = 2: {tried.error or 'returns'}"
        return Answer("only_one_row", tried.refused, "shown", seen, tried.replay)

    def flag(self, word: str, base: Problem, changes: tuple[dict[str, int], ...]) -> Answer:
        """Find out whether problems with such changes are all taken."""
        if base.M == 1:
            changes = tuple(x for x in changes if "M" not in x)
        tried = [self._attempt(base, **sizes) for sizes in changes]
        no = next((one for one in tried if one.refused), None)
        if no is not None:
            return Answer(word, False, "shown", no.error, no.replay)
        sizes = (" ".join(f"{name}={size}" for name, size in x.items()) for x in changes)
        seen = f"takes {' and '.join(sizes)}{_notes(tried)}"
        return Answer(word, True, "tried", seen, _worst(tried).replay)

    def masks(self, base: Problem) -> tuple[Answer, Answer]:
        """Return the kinds of masks that are taken, and those that change nothing.

        A mask that changes nothing is not taken. The checks draw it all the same, as the kernel
        does not refuse it.
        """
        lengths = {"seqlens_q": (max(1, base.M // 2),), "seqlens_k": (max(1, base.N // 2),)}
        masks = {
            "causal": Mask(causal=True), "window": Mask(window_left=2, window_right=1),
            "padding": Mask(**lengths), "custom": Dilated(width=2, step=2),
        }  # fmt: skip
        known = tuple(kind for kind in masks if kind in self.subject.masks)
        tried = {kind: self._attempt(base, mask=masks[kind]) for kind in known}
        ignored = tuple(kind for kind, one in tried.items() if self._ignores(one))
        taken = self._subset("masks", tried, known)
        value = tuple(kind for kind in taken.value if kind not in ignored)
        taken = dataclasses.replace(taken, value=value)
        if not ignored:
            seen = "each mask that is taken changes out"
            return taken, Answer("ignored_masks", (), "shown", seen)
        seen = "out has the bits that it has without the mask"
        return taken, Answer("ignored_masks", ignored, "shown", seen, tried[ignored[0]].replay)

    def _ignores(self, one: Tried) -> bool:
        """Return whether out has the bits that it has for the same tensors without a mask."""
        if one.got is None:
            return False
        problem = dataclasses.replace(one.problem, mask=Mask())
        full = attempt(self.subject, problem, one.inputs, backward=False).got
        return full is not None and torch.equal(one.got.out, full.out)

    def layouts(self, base: Problem) -> Answer:
        known = LAYOUTS if self.subject.layouts is None else self.subject.layouts
        tried = {x: self._attempt(base, B=2, layouts=(x,) * len(TENSORS)) for x in known}
        found = self._subset("layouts", tried, known)
        return (
            found
            if known != LAYOUTS or found.certainty == "shown"
            else dataclasses.replace(found, value=None)
        )

    def score_mods(self, base: Problem) -> Answer:
        """Find the score modifications that change the results as they should."""
        given: dict[str, dict[str, Any]] = {
            "softcap": {"softcap": 2.0}, "alibi": {"alibi": "halving"},
            "bias": {"bias": "normal/mn"}, "sinks": {"sinks": "ordinary"},
        }  # fmt: skip
        tried = {mod: self._attempt(base, **given[mod]) for mod in SCORE_MODS}
        taken = tuple(x for x, one in tried.items() if not one.error and not one.wrong())
        seen = [one for one in tried.values() if one.error]
        said = seen[0].error if seen else "each changes the results as in the reference"
        replay = (seen or [*tried.values()])[0].replay
        return Answer("score_mods", taken, "shown", said, replay)


def _ignored(subject: Subject, base: Problem) -> Iterator[Answer]:
    """Find out whether a kernel is always causal, and whether its scale is fixed."""
    sizes = {} if base.M == 1 else {"B": 1}
    tried = attempt(subject, dataclasses.replace(base, **sizes), backward=False)
    full = tried.reference(Mask(), base.scale).out
    causal = tried.reference(Mask(causal=True), base.scale).out
    word = "always_causal"
    if base.M == 1 or tried.resembles(full):
        seen = "without a mask, each row sees all keys"
        yield Answer(word, False, "shown", seen, tried.replay)
    elif tried.resembles(causal):
        seen = "without a mask, out is that of the causal mask"
        yield Answer(word, True, "shown", seen, tried.replay)
    else:
        yield undecided(word, "out resembles neither mask", tried.replay)
    other = dataclasses.replace(base, sm_scale=4 * base.scale)
    tried = attempt(subject, other, backward=False)
    if tried.error:
        yield Answer("fixed_scale", DEFAULT_SCALE, "shown", tried.error, tried.replay)
        return
    for mask in (Mask(), Mask(causal=True)):
        if tried.resembles(tried.reference(mask, other.scale).out):
            yield Answer("fixed_scale", None, "shown", "out follows sm_scale", tried.replay)
            return
        if tried.resembles(tried.reference(mask, base.scale).out):
            seen = f"with sm_scale = {other.scale:g}, out is that of {base.scale:g}"
            yield Answer("fixed_scale", DEFAULT_SCALE, "shown", seen, tried.replay)
            return
    yield undecided("fixed_scale", "out resembles neither scale", tried.replay)


def _shown(known: tuple[Any, ...], tried: dict[Any, Tried], taken: tuple[Any, ...]) -> str:
    """Name the first refused member."""
    return str(next(x for x in known if x in tried and x not in taken))


def _bad(one: Tried) -> str:
    """Describe a call that was not refused, and failed otherwise; empty if it is right."""
    if one.refused:
        return ""
    return one.error or (f"{one.wrong()} far from the reference" if one.wrong() else "")


def _worst(tried: list[Tried]) -> Tried:
    """Return the first call with a defect, or the first one."""
    return next((one for one in tried if _bad(one)), tried[0])


def _notes(tried: Any) -> str:
    """Describe the defects that calls show, which the checks report; empty if there are none."""
    bad = [(one, _bad(one)) for one in tried if _bad(one)]
    if not bad:
        return ""
    return f"; a defect, not a limit: {bad[0][1]} at {bad[0][0].replay}"
