"""The statement that a mutant changes: its tokens before and after, and its lines."""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from fa_verify.diagnosis.mutant import Mutant

__all__ = ["Change", "change_of"]

_LAYOUT = {
    tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.COMMENT,
    tokenize.ENDMARKER,
}  # fmt: skip


@dataclass(frozen=True)
class Change:
    """The change of a mutant of one edit.

    Args:
        file: Path from the root of the repository.
        lines: Lines of the changed statement, or of the header of a compound statement.
        before: The statement's tokens.
        after: The mutant's tokens.
        at: Index of the first token that differs.
        removed: The tokens that the mutant lacks.
        added: The tokens that replace them.
    """

    file: str
    lines: range
    before: tuple[str, ...]
    after: tuple[str, ...]
    at: int
    removed: tuple[str, ...]
    added: tuple[str, ...]


def change_of(sources: Mapping[str, str], mutant: Mutant) -> Change:
    """The change that a mutant of one edit makes to ``sources``."""
    (edit,) = mutant.edits
    text = sources[edit.file]
    kept = _shared(edit.old, edit.new)
    begin = text.index(edit.old)
    start, end, lines = _statement(text, text.count("\n", 0, begin + kept) + 1)
    changed = text[:begin] + edit.new + text[begin + len(edit.old) :]
    before = _tokens(text[start:end])
    after = _tokens(changed[start : end + len(edit.new) - len(edit.old)])
    at = _shared(before, after)
    tail = _shared(before[at:][::-1], after[at:][::-1])
    return Change(
        file=edit.file,
        lines=lines,
        before=before,
        after=after,
        at=at,
        removed=before[at : len(before) - tail],
        added=after[at : len(after) - tail],
    )


def _shared(a: Sequence[str], b: Sequence[str]) -> int:
    """The length of the longest common prefix of two sequences."""
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


def _statement(text: str, line: int) -> tuple[int, int, range]:
    """(start, end, lines) of the innermost statement on a line."""
    found: tuple[int, int] | None = None
    for first, last in _headers(text):
        if first <= line <= last and (found is None or last - first <= found[1] - found[0]):
            found = first, last
    first, last = found or (line, line)
    starts = _line_starts(text)
    return starts[first - 1], starts[last], range(first, last + 1)


@cache
def _line_starts(text: str) -> list[int]:
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    return starts


@cache
def _headers(text: str) -> list[tuple[int, int]]:
    """(first, last) line of every statement, without the body of a compound statement."""
    return list(_spans(ast.parse(text)))


def _spans(node: ast.AST) -> Iterator[tuple[int, int]]:
    for child in ast.walk(node):
        if isinstance(child, ast.stmt):
            body = getattr(child, "body", None)
            last = child.end_lineno or child.lineno
            if isinstance(body, list) and body:
                last = max(child.lineno, min(last, body[0].lineno - 1))
            yield child.lineno, last


def _tokens(text: str) -> tuple[str, ...]:
    """The complete tokens of a piece of a file, without layout and comments.

    A comma before a closing bracket counts as layout, because the formatter adds it when it breaks
    a line.
    """
    found: list[str] = []
    try:
        for token in tokenize.generate_tokens(io.StringIO(text.strip() + "\n").readline):
            if token.type in _LAYOUT:
                continue
            if token.string in (")", "]", "}") and found and found[-1] == ",":
                found.pop()
            found.append(token.string)
    except (tokenize.TokenError, IndentationError):
        pass
    return tuple(found)
