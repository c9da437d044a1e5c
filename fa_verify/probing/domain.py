"""The inputs that a kernel takes, found by calls that it may refuse."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from fa_verify.oracles.masks.dilated import Dilated
from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.problem import DTYPES, LAYOUTS, TENSORS, Problem
from fa_verify.probing.answers import Answer, alike, undecided
from fa_verify.probing.conventions import TopLeft, alignments
from fa_verify.probing.trying import Tried, attempt
from fa_verify.properties.inputs.alibi_families import NO_ALIBI
from fa_verify.properties.inputs.bias_families import NO_BIAS
from fa_verify.properties.inputs.sink_families import NO_SINKS
from fa_verify.properties.kernels.narrowing import narrowed
from fa_verify.properties.kernels.subject import Subject
from fa_verify.properties.kernels.vocabulary import DEFAULT_SCALE, SCORE_MODS, score_mods_of
from fa_verify.properties.problems.strategies import HEAD_DIMS

__all__ = [
    "DEFECT",
    "domain_of",
    "smallest",
    "with_gradients",
    "with_right_results",
    "without_mask",
]

# The word of what is wrong on the smallest problem.
DEFECT = "defect"
_SIZES = (16, 32, 64, 128, 256)
_HEAD_DIMS = (*sorted(HEAD_DIMS), 256)
# Errors of out in shares of its largest value: more than float64's, and no more than float32's.
_OF_FLOAT64, _OF_FLOAT32 = 2.0**-40, 2.0**-12
# Changes that give a problem one score modification, or none.
_GIVEN: dict[str, dict[str, Any]] = {
    "softcap": {"softcap": 2.0}, "alibi": {"alibi": "halving"},
    "bias": {"bias": "normal/mn"}, "sinks": {"sinks": "ordinary"},
}  # fmt: skip
_NO_MODS: dict[str, Any] = {
    "softcap": None, "alibi": NO_ALIBI, "bias": NO_BIAS, "sinks": NO_SINKS
}  # fmt: skip
_NOT_PROBED = {
    "max_seqlen": "long sequences take too much time",
    "dirty": "values in padding that reach the results are a finding",
    "bitwise": "equal bits in some calls promise nothing of others",
    "cuda_graphs": "a capture that fails leaves the process unusable",
}


def smallest(subject: Subject, own: Subject, device: str) -> Problem | list[Tried]:
    """Return the first problem that the kernel takes, from small to large.

    The forward alone decides. fp32 and 16 rows, keys and columns come first, of the problems that
    the kernel's own declarations exclude last. Results of a wrong form count only where no others
    are found, and M = 1 only where the kernel refuses more rows.

    Args:
        subject: The kernel without its declarations.
        own: The kernel with them.
        device: "cpu" or "cuda".

    Returns:
        The problem; the calls of all problems if the kernel raises an exception in each.
    """
    failed: list[Tried] = []
    mods = ({}, *(_GIVEN[mod] for mod in own.score_mods))
    squares, rows = [(x, x) for x in _SIZES], [(1, x) for x in _SIZES]
    for sizes, mod in itertools.product((squares, rows), mods):
        for problem in _ordered(own, sizes, device):
            given = dataclasses.replace(problem, **mod)
            if subject.excludes(given):
                continue
            tried = attempt(subject, given, backward=False)
            if not tried.error:
                return given
            failed.append(tried)
        if wrong := [one for one in failed if not one.refused]:
            return wrong[0].problem
    return failed


def _ordered(own: Subject, sizes: Sequence[tuple[int, int]], device: str) -> list[Problem]:
    """Return problems of such (M, N) from small to large, those that are not declared last."""
    shapes = [*itertools.product(sizes, (16, 64, 128), ("fp32", "bf16", "fp16"))]
    shapes.append((sizes[0], 16, "fp64"))
    problems = [
        Problem(M=M, N=N, D=D, Dv=D, dtype=dtype, device=device) for (M, N), D, dtype in shapes
    ]
    return sorted(problems, key=lambda x: own.excludes(narrowed(own, x)) is not None)


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


def without_mask(subject: Subject, base: Problem) -> tuple[Answer, Problem]:
    """Find out which keys a kernel shows to each row without a mask.

    Args:
        subject: The kernel without its declarations.
        base: A problem that the kernel takes, without a mask.

    Returns:
        Whether the kernel is always causal, and the base with the mask that the kernel always has:
        later calls ask for that mask.
    """
    word = "always_causal"
    tried = attempt(subject, base, backward=False)
    masks = [Mask()]
    if base.M > 1:
        masks += [Mask(causal=True), *(Mask(causal=True, window_left=w) for w in range(base.N - 1))]
    fits = (x for x in masks if tried.resembles(tried.reference(x, base.scale).out))
    mask = next(fits, None)
    if mask is None:
        why = tried.error or "out resembles neither mask"
        return undecided(word, why, tried.replay), base
    if mask.window_left is not None:
        keys = "key" if mask.window_left == 1 else f"{mask.window_left} keys"
        seen = f"each row sees its own key and the {keys} before it"
        why = f"without a mask, {seen}, which no declaration says"
        return undecided(word, why, tried.replay), _masked(base, mask)
    if mask.causal:
        seen = "without a mask, out is that of the causal mask"
        return Answer(word, True, "shown", seen, tried.replay), _masked(base, mask)
    seen = "without a mask, each row sees all keys"
    return Answer(word, False, "shown", seen, tried.replay), base


def _masked(base: Problem, mask: Mask) -> Problem:
    return dataclasses.replace(base, mask=mask)


def domain_of(subject: Subject, own: Subject, base: Problem) -> Iterator[Answer]:
    """Yield what a kernel takes, starting from a problem that it takes.

    Args:
        subject: The kernel without its declarations.
        own: The kernel with them: a wrong result beyond them is a limit.
        base: The problem that ``without_mask`` returns.
    """
    backward = _backward(subject, base)
    yield backward
    calls = _Calls.of(subject, own, base, bool(backward.value))
    yield from calls.defect(base)
    yield calls.dtypes(base)
    head_dims = calls.head_dims(base)
    yield from (head_dims, calls.multiple(base), calls.alone(base))
    yield calls.flag("gqa", base, ({"H": 2},))
    fewer, more = calls.lengths(base)
    yield from (fewer, more, calls.value_dims(base, head_dims.value))
    # Sizes of 0 leave M <= N, and M = N, to a kernel that takes no others.
    no_keys = {"N": 0} if base.M == 1 or more.value else {"M": 0, "N": 0}
    no_rows = [{"M": 0}] if fewer.value else []
    yield calls.flag("zero_sizes", base, ({"B": 0}, *no_rows, no_keys))
    yield from (*calls.masks(base), calls.layouts(base), calls.score_mods(base))
    yield calls.scale(base)
    yield from (undecided(word, f"not probed: {why}") for word, why in _NOT_PROBED.items())


def _backward(subject: Subject, base: Problem) -> Answer:
    """Find out whether a kernel has gradients."""
    word = "backward"
    tried = attempt(subject, base)
    if not tried.error:
        return Answer(word, True, "shown", "dq, dk and dv are returned", tried.replay)
    if tried.refused and not attempt(subject, base, backward=False).error:
        return Answer(word, False, "shown", tried.error, tried.replay)
    return undecided(word, tried.error, tried.replay)


@dataclasses.dataclass(frozen=True)
class _Calls:
    """Calls of one kernel, with its gradients if it has them.

    Args:
        subject: The kernel without its declarations.
        own: The kernel with them.
        backward: Whether to compute gradients.
        top_left: Whether the kernel is always causal, with a top-left diagonal.
        wrong: Whether the smallest problem has wrong results, as larger ones then have too.
        told: The errors of defects that an answer has named.
    """

    subject: Subject
    own: Subject
    backward: bool
    top_left: bool = False
    wrong: bool = False
    told: set[str] = dataclasses.field(default_factory=set)

    @classmethod
    def of(cls, subject: Subject, own: Subject, base: Problem, backward: bool) -> _Calls:
        """Find the diagonal of an always causal kernel, and whether its results are right."""
        calls = cls(subject, subject if own.excludes(base) else own, backward)
        if base.mask.causal and base.M > 1:
            fits, _ = alignments(subject, base, {"N": 2 * base.N})
            calls = dataclasses.replace(calls, top_left=fits == {"top-left"})
        one = calls._attempt(base)
        return dataclasses.replace(calls, wrong=not one.error and bool(one.wrong()))

    def _attempt(self, base: Problem, **changes: Any) -> Tried:
        problem = dataclasses.replace(base, **changes)
        one = attempt(self.subject, problem, backward=self.backward)
        if self.top_left and problem.mask == Mask(causal=True):
            one = dataclasses.replace(one, seen=TopLeft())
        excluded = self.own.excludes(problem)
        if excluded and (bad := _bad(one)):
            return dataclasses.replace(one, got=None, message=f"{excluded}: {bad}", refused=True)
        return one

    def defect(self, base: Problem) -> Iterator[Answer]:
        """Yield what is wrong on the smallest problem, if anything is."""
        one = attempt(self.subject, base, backward=self.backward)
        if bad := _bad(one):
            self.told.add(alike(bad))
            yield Answer(DEFECT, True, "shown", bad, one.replay)

    def _notes(self, tried: Iterable[Tried]) -> str:
        """Describe a defect that calls show, which the checks report; empty if there is none new.

        A kernel whose results are always wrong has one defect, not one in each answer.
        """
        for one in tried:
            bad = _bad(one)
            if not bad or (self.wrong and not one.error) or alike(bad) in self.told:
                continue
            if one.error:
                self.told.add(alike(bad))
            return f"; a defect, not a limit: {bad} at {one.replay}"
        return ""

    def _subset(self, word: str, tried: dict[Any, Tried], known: tuple[Any, ...]) -> Answer:
        """Return the members of a declaration whose calls were not refused."""
        taken = tuple(name for name in known if name not in tried or not tried[name].refused)
        refused = [one for one in tried.values() if one.refused]
        if not refused:
            of = ", ".join(map(str, tried))
            said = f"takes each of {of}" if tried else "heeds no other"
            return Answer(word, taken, "tried", f"{said}{self._notes(tried.values())}")
        others = f" ({len(refused)} of {len(tried)} refused)" if len(refused) > 1 else ""
        said = f"refuses {_shown(known, tried, taken)}: {refused[0].error}{others}"
        return Answer(word, taken, "shown", said + self._notes(tried.values()), refused[0].replay)

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
                notes = self._notes(tried)
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
            return Answer("one_query", False, "shown", f"takes M = {base.M}", base.to_json())
        tried = self._attempt(base, M=2)
        seen = f"takes M = 1; M = 2: {tried.error or 'returns'}"
        return Answer("one_query", tried.refused, "shown", seen, tried.replay)

    def lengths(self, base: Problem) -> tuple[Answer, Answer]:
        """Find out whether M may differ from N, and whether it may be larger."""
        fewer = self.flag("m_ne_n", base, ({"N": 2 * base.N},))
        if base.M == 1:
            return fewer, undecided("m_gt_n", "M = 1 alone is taken")
        more = self.flag("m_gt_n", base, ({"M": 2 * base.M},))
        if fewer.value is False and more.value:
            # No declaration takes M > N and refuses M < N.
            return fewer, dataclasses.replace(more, value=False)
        return fewer, more

    def value_dims(self, base: Problem, dims: tuple[int, ...] | None) -> Answer:
        """Find out whether Dv may differ from D, with sizes that are taken as both."""
        others = [x for x in dims or (2 * base.D,) if x != base.D]
        if not others:
            return undecided("dv_ne_d", f"D = Dv = {base.D} alone is taken")
        other = min(others, key=lambda x: (x < base.D, abs(x - base.D)))
        return self.flag("dv_ne_d", base, ({"Dv": other}, {"D": other}))

    def flag(self, word: str, base: Problem, changes: tuple[dict[str, int], ...]) -> Answer:
        """Find out whether problems with such changes are all taken."""
        if base.M == 1:
            changes = tuple(x for x in changes if "M" not in x)
        tried = [self._attempt(base, **sizes) for sizes in changes]
        no = next((one for one in tried if one.refused), None)
        if no is not None:
            return Answer(word, False, "shown", no.error, no.replay)
        sizes = (" ".join(f"{name}={size}" for name, size in x.items()) for x in changes)
        seen = f"takes {' and '.join(sizes)}{self._notes(tried)}"
        return Answer(word, True, "tried", seen, _worst(tried).replay)

    def masks(self, base: Problem) -> tuple[Answer, Answer]:
        """Return the kinds of masks that are taken, and those that change nothing.

        A mask that changes nothing is not taken. The checks draw it all the same, as the kernel
        does not refuse it.
        """
        always = base.mask.causal
        lengths = {"seqlens_q": (max(1, base.M // 2),), "seqlens_k": (max(1, base.N // 2),)}
        masks = {
            "causal": Mask(causal=True),
            "window": Mask(causal=always, window_left=2, window_right=None if always else 1),
            "padding": dataclasses.replace(base.mask, **lengths),
            "custom": Dilated(causal=always, width=2, step=2),
        }  # fmt: skip
        known = tuple(kind for kind in masks if kind in self.subject.masks)
        tried = {
            kind: self._attempt(base, mask=masks[kind])
            for kind in known
            if not (always and kind == "causal")
        }
        ignored = tuple(kind for kind, one in tried.items() if self._ignores(one, base.mask))
        # Another answer is about those that are ignored.
        heeded = {kind: one for kind, one in tried.items() if kind not in ignored}
        taken = self._subset("masks", heeded, tuple(kind for kind in known if kind not in ignored))
        if not ignored:
            seen = "each mask that is taken changes out"
            return taken, Answer("ignored_masks", (), "shown", seen)
        seen = "out has the bits that it has without the mask"
        return taken, Answer("ignored_masks", ignored, "shown", seen, tried[ignored[0]].replay)

    def _ignores(self, one: Tried, mask: Mask) -> bool:
        """Return whether out has the bits that it has for the same tensors and the base's mask."""
        if one.got is None:
            return False
        problem = dataclasses.replace(one.problem, mask=mask)
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
        always = score_mods_of(base)
        tried = {mod: self._attempt(base, **_GIVEN[mod]) for mod in SCORE_MODS}
        taken = tuple(x for x, one in tried.items() if not one.error and not one.wrong())
        if always:
            plain = attempt(self.subject, dataclasses.replace(base, **_NO_MODS), backward=False)
            said = f"takes no problem without {' and '.join(always)}: {plain.error}"
            return Answer("score_mods", taken, "shown", said, plain.replay)
        seen = [one for one in tried.values() if one.error]
        said = seen[0].error if seen else "each changes the results as in the reference"
        replay = (seen or [*tried.values()])[0].replay
        return Answer("score_mods", taken, "shown", said, replay)

    def scale(self, base: Problem) -> Answer:
        """Find out whether the scale is fixed."""
        word = "fixed_scale"
        other = dataclasses.replace(base, sm_scale=4 * base.scale)
        tried = attempt(self.subject, other, backward=False)
        if tried.error:
            if attempt(self.subject, base, backward=False).error:
                return undecided(word, tried.error, tried.replay)
            return Answer(word, DEFAULT_SCALE, "shown", tried.error, tried.replay)
        if tried.resembles(tried.reference(base.mask, other.scale).out):
            return Answer(word, None, "shown", "out follows sm_scale", tried.replay)
        if tried.resembles(tried.reference(base.mask, base.scale).out):
            seen = f"with sm_scale = {other.scale:g}, out is that of {base.scale:g}"
            return Answer(word, DEFAULT_SCALE, "shown", seen, tried.replay)
        return undecided(word, "out resembles neither scale", tried.replay)


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
