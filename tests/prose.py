"""Lints the prose of docstrings, comments and Markdown pages.

``python -m tests.prose`` lints the paths of ``prose.toml`` and fails on an exception that excuses
nothing. ``python -m tests.prose PATH...`` lints other files and folders.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

CONFIGURATION = Path("tests/prose.toml")
LONGEST = 30  # words; aim at 25
PEOPLE = "authors?|callers?|developers?|maintainers?|nobody|people|readers?|users?|who|you|we"
# Patterns, searched without regard to case, and advice. Inline code reads ``_`` there.
RULES = {
    "free-relative": (
        r"(?:^|; |: )(?:what|who|whom|whose|whoever|whatever|whichever|which)\b(?!.*\?)",
        "put a noun in place of the clause: name the thing or the actor",
    ),
    "inverted-genitive": (
        r"^of (?!course\b|(?:the|these|those|its|all|\d+|two|three|four) [^,]+, )",
        "begin with the subject",
    ),
    "knowing-machine": (
        rf"(?:^|\b(?!(?:{PEOPLE})\b)\w+\W+)(?:hears?|heard|knows?|knew"
        r"|wants?(?! [-\d])|told(?! apart| from| by))\b",
        "say what it receives, reads, holds or supports",
    ),
    "as-of": (
        r"\bas of\b(?! (?:now\b|today\b|v?\d|[a-z]+ v?\d))",
        "say 'as in', 'see', or repeat the description",
    ),
    "ellipsis": (
        r"^(?:likewise|those|theirs|ditto)\b[^,]{,20}$|\blikewise\W*$|\b(?:of|than) theirs\b",
        "repeat the noun",
    ),
}
# The same for the first sentence of a docstring.
SUMMARY_RULES = {
    "summary": (
        r"^(?:how|why)\b(?!.*\?)|^(?:where|when)\b(?!.*[,?])",
        "name what is returned, held or tested",
    ),
}
# Words of this project alone, and the field's.
PRIVATE_WORDS = {
    r"asked first": "kill order",
    r"companions?": "statistics, or the check's name",
    r"dirt": "padding values",
    r"flight recorder": "watchdog",
    r"referees?": "harness",
    r"remember(?:s|ed|ing)?": "cache, memoise or record",
}
SENTENCE = re.compile(r"\S.*?(?:(?<!e\.g)(?<!i\.e)[.!?][)\"'*_`]*(?=\s)|$)", re.DOTALL)
# Comments that tools read, and beginnings of lines that hold no prose.
DIRECTIVES = re.compile(r"#\s*(?:type:|noqa|fmt:|ruff:|mypy:|pragma|!)")
NOT_PROSE = (">>>", "#", "<", ":::", "!!!", "---", "===")
# Entries of a list, or of ``Args:`` and its like, begin a paragraph.
BULLET = re.compile(r"\s*(?:[-*+]|\d+\.) ")
ENTRY = re.compile(r"\s*\*{0,2}[\w.]+(?:, \*{0,2}[\w.]+)*(?: \([^)]*\))?: |\s*[A-Z][a-z]+:$")


class Sentence(NamedTuple):
    """A sentence on one line, where it begins, and whether a docstring begins with it."""

    line: int
    text: str
    summary: bool = False


def paragraphs(line: int, text: str, *, docstring: bool) -> Iterator[tuple[int, str]]:
    """(first line, text) of paragraphs, entries and cells; not of code, formulas and headings."""
    start, parts = line, []
    fence, literal, table = "", -1, False
    for number, whole in enumerate(f"{text}\n".expandtabs().split("\n"), line):
        part, indent = whole.strip(), len(whole) - len(whole.lstrip())
        opening = BULLET.match(whole) or (ENTRY.match(whole) if docstring else None)
        mark = re.match(r"`{3,}|~{3,}|\$\$$", part)
        skipped = bool(mark or fence or not part or part.startswith(NOT_PROSE))
        if literal >= 0 and part:
            skipped = skipped or indent > literal
            literal = literal if indent > literal else -1
        if parts and (skipped or opening or table or part.startswith("|")):
            yield start, "\n".join(parts)
            parts = []
        if mark:
            fence = "" if part == fence else fence or mark[0]
        table = bool(part) and (table or part.startswith("==="))
        if skipped:
            continue
        if part.startswith("|"):
            yield from ((number, cell.strip()) for cell in part.strip("|").split("|"))
            continue
        start = start if parts else number
        parts.append(whole[opening.end() :] if opening else part)
        if docstring and part.endswith("::"):
            literal = indent


def sentences(line: int, text: str, *, docstring: bool = False) -> Iterator[Sentence]:
    """The sentences of a text that begins on ``line``."""
    for start, paragraph in paragraphs(line, text, docstring=docstring):
        plain = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", paragraph)
        for found in SENTENCE.finditer(plain):
            place = start + plain.count("\n", 0, found.start())
            yield Sentence(place, " ".join(found[0].split()))


def comments(source: str) -> Iterator[tuple[int, str]]:
    """(first line, text) of every comment; lines of comments in a column are one text."""
    line, column, text = -1, -1, ""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT or DIRECTIVES.match(token.string):
            continue
        (row, place), part = token.start, re.sub(r"^#+:? ?", "", token.string)
        alone = not token.line[:place].strip()
        if alone and place == column and row == line + text.count("\n") + 1:
            text += f"\n{part}"
            continue
        if text:
            yield line, text
        line, column, text = row, place if alone else -1, part
    if text:
        yield line, text


def prose(path: str, source: str) -> Iterator[Sentence]:
    """The sentences of a Markdown page, or of a module's docstrings and comments."""
    if path.endswith(".md"):
        yield from sentences(1, source)
        return
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(source, path)):
        if isinstance(node, documented) and (text := ast.get_docstring(node)):
            found = sentences(node.body[0].lineno, text, docstring=True)
            yield from (x._replace(summary=i == 0) for i, x in enumerate(found))
    for line, text in comments(source):
        yield from sentences(line, text)


def findings(sentence: Sentence) -> Iterator[tuple[str, str]]:
    """(rule, advice) for every rule that a sentence breaks."""
    plain = re.sub(r"(`+).+?\1", "_", sentence.text)
    rules = RULES | (SUMMARY_RULES if sentence.summary else {})
    for rule, (pattern, advice) in rules.items():
        if re.search(pattern, plain, re.IGNORECASE):
            yield rule, advice
    for word, term in PRIVATE_WORDS.items():
        if found := re.search(rf"\b{word}\b", plain, re.IGNORECASE):
            yield "private-word", f"in place of {found[0]!r} say {term}"
    # Symbols of a formula are none.
    words = len(re.findall(r"(?<!\S)\W*[A-Za-z]{2}|(?<!\w)_(?!\w)", plain))
    if words > LONGEST:
        yield "long", f"split its {words} words; at most {LONGEST}"


def main(arguments: list[str]) -> bool:
    """Prints ``file:line: rule: sentence`` for each finding and returns whether there is any."""
    configuration = tomllib.loads(CONFIGURATION.read_text()) if CONFIGURATION.exists() else {}
    exceptions = [
        (x["path"], x["rule"], x["sentence"])
        for x in configuration.get("exceptions", ())
        if x["reason"]
    ]
    listing = ["git", "ls-files", "-co", "--exclude-standard", "--error-unmatch"]
    listing += arguments or configuration["paths"]
    names = set(subprocess.check_output(listing, text=True).splitlines())
    paths = sorted(x for x in names if x.endswith((".py", ".md")) and Path(x).is_file())
    found = {
        (path, rule, sentence.text): f"{path}:{sentence.line}: {rule}: {sentence.text} ({advice})"
        for path in paths
        for sentence in sorted(prose(path, Path(path).read_text(encoding="utf-8")))
        for rule, advice in findings(sentence)
    }
    lines = [line for key, line in found.items() if key not in exceptions]
    lines += [
        f"{CONFIGURATION}: stale exception: {': '.join(x)}"
        for x in exceptions
        if x not in found and (x[0] in paths or not arguments)
    ]
    if exceptions != sorted(exceptions):
        lines.append(f"{CONFIGURATION}: exceptions are not in order of path, rule and sentence")
    print(*lines, sep="\n", end="\n" if lines else "")
    return bool(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
