"""Maps the keys of mutants of one version of the sources to keys of the next version.

Functions are paired by name, or else by their tokens. A name that is replaced throughout a pair
counts as renamed. Mutants of a pair are aligned in the order of the text. Mutants of code that
moved to another function are searched for everywhere, and the rest by the similarity of tokens.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from functools import cached_property

from fa_verify.diagnosis.mutant import Mutant
from tests.mutation.mutants.changes import Change, change_of

__all__ = ["Found", "Version", "rekeyed"]

# Thresholds of similarity: below the first two, functions or mutants differ. A best match that
# leads the next best by less than the margin is unclear.
_SAME_FUNCTION = 0.4
_SAME_MUTANT = 0.65
_MARGIN = 0.01
# The score of an equal change that may be another one.
_UNCLEAR = 0.99
# Tokens on each side of a change that identify its place.
_AROUND = 6
_NAME = re.compile(r"[A-Za-z_]\w*")


@dataclass(frozen=True)
class Version:
    """The mechanical mutants of one version of the sources, in the order of the text."""

    sources: Mapping[str, str]
    mutants: Sequence[Mutant]

    @cached_property
    def sites(self) -> list[_Site]:
        counts = Counter(x.key.split()[0] for x in self.mutants)
        seen: Counter[str] = Counter()
        found = []
        for mutant in self.mutants:
            function, operator, _ = mutant.key.split()
            seen[function] += 1
            change = change_of(self.sources, mutant)
            place = seen[function] / counts[function]
            found.append(_Site(mutant, function, operator, place, change))
        return found


@dataclass(frozen=True)
class _Site:
    """A mutant, its function and relative place in it, and its change."""

    mutant: Mutant
    function: str
    operator: str
    place: float
    change: Change

    @property
    def text(self) -> tuple[object, ...]:
        """Equal for mutants that change equal statements in the same way."""
        return self.operator, self.change.before, self.change.after


@dataclass(frozen=True)
class Found:
    """The counterpart of a mutant of the old version.

    Args:
        old: The mutant.
        new: The counterpart in the new version; None if it is unclear.
        score: The similarity; 1 only for equal changes.
        nearest: The most similar mutant if the counterpart is unclear.
    """

    old: Mutant
    new: Mutant | None
    score: float = 1.0
    nearest: Mutant | None = None


def rekeyed(keys: Iterable[str], old: Version, new: Version) -> list[Found]:
    """The counterparts of mutants of the old version, in the order of its text.

    Args:
        keys: Keys of the mutants.
        old: The version with these mutants.
        new: The version to search.
    """
    wanted = set(keys)
    pairs = _paired(_functions(old.sites), _functions(new.sites))
    ours = [_renamed(x, pairs) for x in old.sites]
    places = {a: b.name for a, b in pairs.items()}
    mapped: dict[str, _Site] = {}
    _align(ours, new.sites, places, mapped)
    _move(ours, new.sites, mapped)
    mutants = {x.mutant.key: x for x in ours}
    here = Counter((places.get(x.function), x.text) for x in ours)
    there = Counter((x.function, x.text) for x in new.sites)
    found = {}
    for key, site in mapped.items():
        old_site = mutants[key]
        # If the number of equal changes differs, their counterparts are ambiguous.
        is_clear = (
            places.get(old_site.function) != site.function
            or here[site.function, site.text] == there[site.function, site.text]
        )
        found[key] = Found(old_site.mutant, site.mutant, 1.0 if is_clear else _UNCLEAR)
    left = [x for x in ours if x.mutant.key not in mapped]
    taken = {site.mutant.key for site in mapped.values()}
    free = [x for x in new.sites if x.mutant.key not in taken]
    # Other mutants of the same functions take part: a candidate may be nearer to one of them.
    beside = {x.function for x in left if x.mutant.key in wanted}
    left = [x for x in left if x.function in beside]
    for result in _similar(left, free, places):
        found[result.old.key] = result
    return [found[x.mutant.key] for x in ours if x.mutant.key in wanted]


@dataclass(frozen=True)
class _Pair:
    """The counterpart of a function, and the renames within it."""

    name: str
    names: Mapping[str, str]


def _functions(sites: Sequence[_Site]) -> dict[str, list[str]]:
    """The tokens of each function's mutated statements."""
    statements: dict[str, dict[range, tuple[str, ...]]] = defaultdict(dict)
    for x in sites:
        statements[x.function][x.change.lines] = x.change.before
    return {
        function: [token for lines in sorted(of, key=lambda x: x.start) for token in of[lines]]
        for function, of in statements.items()
    }


def _paired(old: Mapping[str, Sequence[str]], new: Mapping[str, Sequence[str]]) -> dict[str, _Pair]:
    """The counterparts of functions of the old version, where there is one."""
    pairs = {name: name for name in old if name in new}
    likeness = sorted(
        (
            (_likeness(old[a], new[b]) + 0.2 * (_last(a) == _last(b)), a, b)
            for a in old.keys() - pairs.keys()
            for b in new.keys() - pairs.keys()
        ),
        reverse=True,
    )
    for score, a, b in likeness:
        if score >= _SAME_FUNCTION and a not in pairs and b not in pairs.values():
            pairs[a] = b
    return {a: _Pair(b, _renames(old[a], new[b])) for a, b in pairs.items()}


def _last(function: str) -> str:
    """The bare name of a function."""
    return re.split(r"[:.]", function)[-1]


def _likeness(a: Sequence[str], b: Sequence[str]) -> float:
    """The share of tokens that two functions have in common, in any order."""
    common = sum((Counter(a) & Counter(b)).values())
    return 2 * common / (len(a) + len(b))


def _renames(old: Sequence[str], new: Sequence[str]) -> dict[str, str]:
    """Names that a function no longer has, mapped to their most frequent replacements."""
    votes: dict[str, Counter[str]] = defaultdict(Counter)
    there = set(new)
    for kind, a, b, c, d in SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if kind == "replace" and b - a == d - c:
            for before, after in zip(old[a:b], new[c:d], strict=True):
                if before not in there and _NAME.fullmatch(before) and _NAME.fullmatch(after):
                    votes[before][after] += 1
    best = {name: of.most_common(1)[0] for name, of in votes.items()}
    return {a: b for a, (b, count) in best.items() if count > votes[a].total() / 2}


def _renamed(site: _Site, pairs: Mapping[str, _Pair]) -> _Site:
    """A mutant of the old version, with the names of the new version."""
    if site.function not in pairs:
        return site
    names = pairs[site.function].names
    change = replace(
        site.change,
        **{
            field: tuple(names.get(x, x) for x in getattr(site.change, field))
            for field in ("before", "after", "removed", "added")
        },
    )
    return replace(site, change=change)


def _align(
    old: Sequence[_Site],
    new: Sequence[_Site],
    pairs: Mapping[str, str],
    mapped: dict[str, _Site],
) -> None:
    """Maps equal changes of paired functions, in the order of the text."""
    here, there = _by_function(old), _by_function(new)
    for a, b in pairs.items():
        matcher = SequenceMatcher(
            None, [x.text for x in here[a]], [x.text for x in there[b]], autojunk=False
        )
        for i, j, size in matcher.get_matching_blocks():
            for x, y in zip(here[a][i : i + size], there[b][j : j + size], strict=True):
                mapped[x.mutant.key] = y


def _by_function(sites: Sequence[_Site]) -> dict[str, list[_Site]]:
    found: dict[str, list[_Site]] = defaultdict(list)
    for x in sites:
        found[x.function].append(x)
    return found


def _move(old: Sequence[_Site], new: Sequence[_Site], mapped: dict[str, _Site]) -> None:
    """Maps equal changes of moved code if both versions have equally many."""
    taken = {site.mutant.key for site in mapped.values()}
    there: dict[object, list[_Site]] = defaultdict(list)
    for y in new:
        if y.mutant.key not in taken:
            there[y.text].append(y)
    here: dict[object, list[_Site]] = defaultdict(list)
    for x in old:
        if x.mutant.key not in mapped:
            here[x.text].append(x)
    for text, sites in here.items():
        if len(sites) == len(there[text]):
            mapped |= {x.mutant.key: y for x, y in zip(sites, there[text], strict=True)}


def _similar(old: Sequence[_Site], new: Sequence[_Site], pairs: Mapping[str, str]) -> list[Found]:
    """The nearest counterparts of mutants without an equal one, the most similar pairs first."""
    scores: dict[str, list[tuple[float, int]]] = {}
    for x in old:
        scores[x.mutant.key] = sorted(
            (
                (_score(x, y, pairs), number)
                for number, y in enumerate(new)
                if x.operator == y.operator
            ),
            reverse=True,
        )
    best = {key: of[0][0] for key, of in scores.items() if of}
    found: list[Found] = []
    taken: set[int] = set()
    for x in sorted(old, key=lambda x: best.get(x.mutant.key, 0.0), reverse=True):
        left = [(score, number) for score, number in scores[x.mutant.key] if number not in taken]
        (score, number), (second, _) = (*left, (0.0, -1), (0.0, -1))[:2]
        nearest = new[number].mutant if number >= 0 else None
        if score >= _SAME_MUTANT and score - second >= _MARGIN:
            taken.add(number)
            found.append(Found(x.mutant, nearest, min(score, _UNCLEAR)))
        else:
            found.append(Found(x.mutant, None, min(score, _UNCLEAR), nearest))
    return found


def _score(x: _Site, y: _Site, pairs: Mapping[str, str]) -> float:
    """The similarity of two changes, at most 1 plus a bonus for their places."""
    same = pairs.get(x.function) == y.function
    return (
        0.35 * _ratio(x.change.before, y.change.before)
        + 0.3 * _ratio(_around(x.change), _around(y.change))
        + 0.25 * _ratio((*x.change.removed, "->", *x.change.added),
                        (*y.change.removed, "->", *y.change.added))
        + (0.1 - 0.05 * abs(x.place - y.place) if same else 0.0)
    )  # fmt: skip


def _around(change: Change) -> tuple[str, ...]:
    """The tokens before and after a change."""
    end = change.at + len(change.removed)
    return (*change.before[max(0, change.at - _AROUND) : change.at], "|",
            *change.before[end : end + _AROUND])  # fmt: skip


def _ratio(a: Sequence[str], b: Sequence[str]) -> float:
    matcher = SequenceMatcher(None, a, b, autojunk=False)
    return matcher.ratio() if matcher.real_quick_ratio() > 0.3 else 0.0
