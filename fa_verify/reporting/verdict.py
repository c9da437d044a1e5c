"""The verdict as lines of text: the counts of checks, and the causes with what they explain."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fa_verify.oracles.guarantee import FORM, G5, G8, G10, G12, G13, G16, guarantee_of
from fa_verify.oracles.problem import DTYPES, Problem
from fa_verify.properties.kinds.feature import Feature, is_of_size, is_soft, phrase, sharpest
from fa_verify.properties.search.causes import RootCause, described, difference
from fa_verify.reporting.statuses import Counts, alike, first_line, plural

__all__ = [
    "Explained",
    "behaves_as",
    "explained",
    "fitted",
    "if_intended",
    "title",
    "verdict",
]


@dataclass(frozen=True)
class Explained:
    """A cause with the failures that it explains.

    Args:
        cause: The cause; None for failures with which no problem is known.
        tests: The ids of the failed tests.
        message: The failure message, for failures without a cause.
    """

    cause: RootCause | None
    tests: tuple[str, ...]
    message: str = ""

    def record(self, number: int) -> dict[str, Any]:
        """Return plain values for JSON."""
        found: dict[str, Any] = {"number": number, "explains": list(self.tests)}
        if self.cause is None:
            return {**found, "title": self.message.partition("\n")[0], "message": self.message}
        cause = self.cause
        return {
            **found,
            **{key: value for key, value in cause.record().items() if key != "number"},
            "title": title(cause),
            "evidence": evidence(cause),
            "depends_on": cause.depends_on,
            "smallest": described(cause.problem),
            "explain": cause.replay,
            "behaves_as": [*behaves_as(cause)],
            "if_intended": if_intended(cause),
            "difference": cause.passing and difference(cause.problem, cause.passing),
        }


# The subject of the title of a cause, by its first feature.
_ABOUT = {
    "zero size": "Sizes of 0",
    "empty sequences": "Sequences of length 0",
    "empty rows": "Rows that see no key",
    "grouped heads": "Grouped heads",
    "hidden keys": "Masks that hide keys",
    "padded keys": "Padded keys",
    "padded rows": "Padded rows",
    "predicate": "Masks with a predicate",
    "window left": "Windows to the left",
    "window left of 0": "Windows to the left of 0 keys",
    "right bound": "Masks bounded to the right",
    "window right": "Windows to the right",
    "causal": "Causal masks",
    "diagonal": "Causal masks and windows",
    "not causal": "Problems without a causal mask",
    "entries of different lengths": "Entries of different lengths",
    "M != N": "Problems of M other than N",
    "M > N": "Problems of M > N",
    "M < N": "Problems of M < N",
    "D != Dv": "Problems of Dv other than D",
    "D > Dv": "Problems of Dv < D",
    "D < Dv": "Problems of Dv > D",
}
# The subject of the title of a cause that another call than the problem's shows, by the check.
_OF_CHECKS = {
    G5.key: "Values in hidden keys and rows",
    G8.key: "Inputs with other strides",
    G12.key: "Offsets past 2**31 elements",
}
# Declarations that exclude the problems with a feature.
_EXCLUDING = {
    "zero size": "zero_sizes=False",
    "grouped heads": "gqa=False",
    **dict.fromkeys(("M != N", "M > N", "M < N"), "m_ne_n=False"),
    **dict.fromkeys(("D != Dv", "D > Dv", "D < Dv"), "dv_ne_d=False"),
    "padded keys": 'masks without "padding"',
    "padded rows": 'masks without "padding"',
    "predicate": 'masks without "custom"',
    "window left": 'masks without "window"',
    "dirty": "dirty=..., the values that padding may hold",
    "dlse": "lse_grad=False",
}


def title(cause: RootCause) -> str:
    """Return a cause in one line."""
    outputs = ", ".join(cause.outputs) or "a result"
    if cause.runs is not None:
        failing, runs = cause.runs
        once = "failed once, and " * (not failing)
        return (
            f"One problem {once}fails {failing} of {runs} times with the same inputs: "
            f"wrong {outputs}"
        )
    key, features = guarantee_of(cause.guarantee), _main(cause)
    wrong = f"give wrong {outputs}" if cause.kind in _VALUES else f"fail: {_what(cause)}"
    if cause.after is not None:
        return f"Some problems {wrong}, only after other calls"
    if cause.check == key or key in (G10.key, G13.key, G16.key):
        # The check says what it changed.
        return _with(
            f"{_upper(cause.finding['output'] or 'it')} {cause.finding['claim']}", features
        )
    first = features[0] if features else None
    about = "Every problem" if first is None else _ABOUT.get(first.name) or _problems_with(first)
    if first is not None and first.name == "empty rows" and not _is_in_empty_row(cause):
        about = _problems_with(first)
    one = first is None and cause.every
    if first is None and not cause.every:
        about = "Some problems"
    named = features[1:]
    if cause.check or key in _OF_CHECKS:
        about = _OF_CHECKS.get(cause.check or key, f"Calls of the check {cause.check}")
        one, named = False, features
    does = {
        "NaN": "gives NaN" if one else "give NaN",
        "Inf": "gives Inf" if one else "give Inf",
        "error": f"{'gives' if one else 'give'} wrong {outputs}",
        "slight": f"{'leaves' if one else 'leave'} the bound of {outputs}",
    }.get(cause.kind)
    if does is None and cause.kind.startswith("raises "):
        does = cause.kind if one else f"raise {cause.kind.removeprefix('raises ')}"
    if does is None:
        does = f"{'fails' if one else 'fail'}: {_what(cause)}"
    return _with(f"{about} {does}", named)


def _is_in_empty_row(cause: RootCause) -> bool:
    """Return whether the first wrong element is of a row that sees no key, as far as is known."""
    problem = cause.problem
    place = dict(re.findall(r"(\w+)=(\d+)", cause.finding.get("where") or ""))
    if not isinstance(problem, Problem) or not {"b", "h", "m"} <= {*place}:
        return True
    seen = problem.mask.dense(problem.B, problem.H, problem.M, problem.N)
    b, h, m = (int(place[x]) for x in ("b", "h", "m"))
    return not bool(seen.expand(problem.B, problem.H, -1, -1)[b, h, m].any())


def _what(cause: RootCause) -> str:
    """Return the fault of a cause that is none of values: of a form, the one that it needs."""
    form = cause.kind.startswith(FORM) and cause.kind.partition(": ")[2]
    return form or cause.finding.get("claim") or cause.told.partition("\n")[0]


def _with(words: str, features: Sequence[Feature]) -> str:
    beyond = [phrase(x) for x in features]
    return f"{words}, with {' and '.join(beyond)}" if beyond else words


def _upper(words: str) -> str:
    return words[:1].upper() + words[1:]


def _main(cause: RootCause) -> list[Feature]:
    """Return the features to name: the hard ones; else all."""
    named = [x for x in cause.hard if x.name != "dtype" or not cause.all_dtypes]
    return sorted(sharpest(named), key=lambda x: x.name == "dtype")


def _problems_with(feature: Feature) -> str:
    if feature.name == "dtype":
        return phrase(feature).capitalize()
    return f"Problems with {phrase(feature)}"


def explained(
    causes: Iterable[RootCause], tests: Mapping[int, Sequence[str]], others: Mapping[str, str]
) -> list[Explained]:
    """Return the causes of a run, those that explain most failures first.

    Args:
        causes: The causes.
        tests: The failed tests of each cause, by its number.
        others: The messages of failures without a cause, by test.
    """
    found = [Explained(x, tuple(tests.get(x.number, ()))) for x in causes]
    groups: dict[str, list[str]] = {}
    for test, message in others.items():
        groups.setdefault(alike(message), []).append(test)
    # Smaller problems than the failing ones may show causes of their own.
    found = [x for x in found if x.tests] or found
    found.sort(key=lambda x: -len(x.tests))
    rest = [Explained(None, tuple(names), others[names[0]]) for names in groups.values()]
    return found + sorted(rest, key=lambda x: -len(x.tests))


def verdict(
    name: str, counts: Counts, causes: Sequence[Explained], *, full: bool = False
) -> Iterator[str]:
    """Yield the lines of the verdict, without a trailing empty line.

    Args:
        name: Name of the subject, or its source.
        counts: The counts of the run.
        causes: The causes, see ``explained``.
        full: Whether to yield all lines of all causes; else they fit a screen.
    """
    yield first_line(name, counts, len(causes))
    failures = counts.failed + counts.broken + counts.too_few
    blocks = [[*_of_cause(number, one, failures)] for number, one in enumerate(causes, 1)]
    if full:
        yield from (line for block in blocks for line in ("", *block))
        return
    replays = ["" if x.cause is None else f"    {x.cause.replay}" for x in causes]
    short = [f"{block[0]}{replay}" for block, replay in zip(blocks, replays, strict=True)]
    rest = "{} other causes"
    yield from fitted(blocks, short, rest)


# Lines of a screen for causes or findings, and those of them that stand in one line each.
_LINES, _SHORT = 24, 7
# Kinds of causes of wrong values.
_VALUES = ("NaN", "Inf", "error", "slight")
# Calls before a failing one that are described, and features not tried that are named.
_CALLS, _FEATURES = 3, 2
# Lines of the message of a failure without a cause, and characters of its first.
_MESSAGE, _WIDTH = 12, 200


def fitted(
    blocks: Sequence[Sequence[str]], short: Sequence[str], rest: str, lines: int = _LINES
) -> Iterator[str]:
    """Yield as many blocks as fit, the next ones in a line each, and the number of the others.

    The first block is yielded whatever its length. An empty line comes before each block.

    Args:
        blocks: The lines of each block.
        short: A line for each block.
        rest: The line for the others, with a place for their number.
        lines: The most lines to yield.
    """
    shown = used = 0
    for block in blocks:
        others = len(blocks) - shown - 1
        below = min(others, _SHORT) + 1 + (others > _SHORT) if others else 0
        if shown and used + 1 + len(block) + below > lines:
            break
        yield from ("", *block)
        shown, used = shown + 1, used + 1 + len(block)
    if shown == len(blocks):
        return
    yield ""
    end = shown + _SHORT
    yield from short[shown:end]
    if end < len(blocks):
        yield rest.format(len(blocks) - end)


def _of_cause(number: int, one: Explained, failed: int) -> Iterator[str]:
    count = f"explains {len(one.tests):,} of {plural(failed, 'failure')}"
    if one.cause is None:
        first, *rest = one.message.strip().splitlines() or ["?"]
        cut = first if len(first) <= _WIDTH else f"{first[:_WIDTH]} ..."
        yield f"{number:<3}{cut}    {count}"
        yield f"   in {one.tests[0]}"
        replay = [line for line in rest[_MESSAGE:] if "replay: " in line][:1]
        yield from (f"   {line}" for line in rest[:_MESSAGE])
        yield from (f"   {line}" for line in replay)
        return
    cause = one.cause
    yield f"{number:<3}{title(cause)}    {count}"
    yield f"   {evidence(cause)}"
    if cause.kind.startswith("raises "):
        yield from (f"   {line.strip()}" for line in cause.told.splitlines()[1:])
    yield f"   smallest: {described(cause.problem)}    {cause.replay}"
    if cause.passing is not None:
        yield f"   passes with {difference(cause.problem, cause.passing)}"
    yield from (f"   {line}" for line in behaves_as(cause))
    if words := if_intended(cause):
        yield f"   if intended, declare {words}"


def evidence(cause: RootCause) -> str:
    """Return the wrong outputs, the dtypes, the needed features and the size of the error."""
    found = [", ".join(cause.outputs)] if cause.outputs else []
    if cause.depends_on:
        found.append(f"seen in {', '.join(cause.dtypes)}")
    else:
        tried = "every dtype" if not _untried_dtypes(cause) else ", ".join(cause.dtypes)
        found.append(tried if cause.all_dtypes else ", ".join(cause.dtypes))
    needs = [phrase(x) for x in sharpest(cause.features) if x.name != "dtype"]
    if cause.after is not None:
        calls = [described(x) for x in cause.after]
        few = f"{' then '.join(calls)}" if len(calls) <= _CALLS else f"{len(calls)} calls"
        found.append(f"only after {few}" if calls else "only after the calls of this run before it")
    elif needs:
        found.append(f"needs {', '.join(needs)}")
    elif not cause.depends_on and not cause.features and cause.every:
        found.append("every problem that was tried")
    elif not cause.depends_on and not cause.features and not cause.check:
        found.append("other problems pass, and no feature tells them apart")
    if cause.origin:
        found.append(f"NaN from {cause.origin}")
    if cause.untried:
        features = [x for x in cause.untried if x not in DTYPES]
        some = [plural(len(features), "feature")] if len(features) > _FEATURES else features
        found.append(f"not tried: {', '.join((*_untried_dtypes(cause), *some))}")
    return "; ".join(filter(None, (*found, _size(cause))))


def _untried_dtypes(cause: RootCause) -> list[str]:
    return [x for x in cause.untried if x in DTYPES]


def _size(cause: RootCause) -> str:
    """Format the error on the smallest problem, in bounds and of the value."""
    if cause.kind not in ("error", "slight"):
        return ""
    got, want, bound = (float(cause.finding[x]) for x in ("got", "want", "bound"))
    error = abs(got - want)
    if not error < float("inf"):
        return ""
    # The figure of a statistic is no element of the output.
    is_element = "=" in cause.finding["where"]
    limit = "bound" if is_element else "limit"
    size = [f"error {error / bound:.3g} x {limit}"] if bound > 0 else [f"error {error:.3g}"]
    if want and cause.finding["output"] and is_element:
        share = float(f"{100 * error / abs(want):.2g}")
        size.append(f"{share:,g} % of {cause.finding['output']}")
    return ", ".join(size)


# Places on record that a line of the verdict shows.
_SHOWN = 3


def behaves_as(cause: RootCause) -> Iterator[str]:
    """Yield the named faults whose results the subject gives, with the evidence, as lines."""
    diagnosis = cause.diagnosis or {}
    found = diagnosis.get("explanations", ())
    # One explanation may hold for the outputs of one pass, and another for those of another.
    for outputs in dict.fromkeys(tuple(x["outputs"]) for x in found):
        of = [x for x in found if tuple(x["outputs"]) == outputs]
        for number, x in enumerate(of):
            where = "" if x["place"] in ("everywhere", "") or " were " in x["place"] else x["place"]
            details = [f"in {where}"] * bool(where) + [x["tile"]] * bool(x["tile"])
            known = x["on_record"].split("; ")[:_SHOWN]
            details += [f"on record: {'; '.join(known)}"] * bool(x["on_record"])
            more = f" ({', '.join(details)})" if details else ""
            yield f"{'or as if' if number else 'behaves as if'} {x['says']}{more}"
        others = diagnosis["tried"] - len(of)
        alone = f"{' and '.join(outputs)} in " if outputs else ""
        apart = "" if len(of) == 1 else "; no supported problem tells them apart"
        apart += "; other outputs are wrong in another way" if outputs else ""
        yield (
            f"   {of[0]['elements']:,} of {of[0]['elements']:,} wrong elements of {alone}"
            f"{plural(of[0]['problems'], 'problem')} agree, the results of "
            f"{plural(max(0, others), 'other fault')} do not{apart}"
        )


def if_intended(cause: RootCause) -> str:
    """Return the declarations with which the failing problems pass or are not asked.

    A declaration that excludes the problems is offered for what it alone excludes. A kernel that
    computes them up to some size is not one without support for them.
    """
    if cause.depends_on:
        return ""
    if cause.declarations:
        apart = ", which nothing that was tried tells apart" * (len(cause.declarations) > 1)
        return " or ".join(cause.declarations) + apart
    hard = [x for x in cause.features if not is_soft(x)]
    sized = any(is_of_size(x) and (x.value or 2) != 1 for x in cause.features)
    if cause.kind == "slight" or len(hard) != 1 or cause.check or sized:
        return ""
    return _EXCLUDING.get(hard[0].name, "")
