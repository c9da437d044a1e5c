"""Normalises compiled code: removes names, locations and numbering."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable

__all__ = ["flow_of", "plain_ir", "plain_ptx", "sha"]

_LOC = re.compile(r" loc\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)")
_LOC_LINE = re.compile(r"^#loc\d* = .*\n?", re.MULTILINE)
_ALIAS = re.compile(r"^#(\w+) = (.*)\n?", re.MULTILINE)
_VALUE = re.compile(r"%[\w$.-]+")
_SYMBOL = re.compile(r'@(?:"[^"]*"|[\w$.-]+)')
# Names of the arguments of a region or of an operation with regions.
_COMES_IN = re.compile(r"(?<=[(, ])(%[\w$.-]+)(?= = |: )")
_RESULTS = re.compile(r"^((?:%[\w$.-]+(?::\d+)?(?:, )?)+) = ")
# Operations without effects, whose order among each other does not matter.
_PURE = re.compile(
    r'^"?(?:arith|math)\.|^"?tt\.(?:addptr|bitcast|broadcast|clampf|dot|expand_dims|fp_to_fp|'
    r"get_num_programs|get_program_id|int_to_ptr|join|load|make_range|mulhiui|ptr_to_int|reduce|"
    r'reshape|scan|splat|split|trans|unsplat)\b|^"?ttg\.convert_layout\b'
)


def sha(text: str) -> str:
    """The digest of a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:20]


def _numbered(prefix: str) -> Callable[[re.Match[str]], str]:
    """Replaces names by numbers in the order of their first appearance."""
    found: dict[str, str] = {}
    return lambda match: found.setdefault(match[0], f"{prefix}{len(found)}")


def _without_places(text: str) -> str:
    return _SYMBOL.sub(_numbered("@"), _LOC.sub("", _LOC_LINE.sub("", text)))


def plain_ir(text: str) -> str:
    """Triton's intermediate code without source locations, its names replaced by numbers."""
    return _VALUE.sub(_numbered("%"), _without_places(text))


def plain_ptx(text: str) -> str:
    """PTX without comments, its function names replaced by numbers."""
    lines = (re.sub(r"\s*//.*", "", line).strip() for line in text.splitlines())
    kept = "\n".join(line for line in lines if line and not re.match(r"\.(file|loc)\b", line))
    for number, name in enumerate(re.findall(r"\.(?:entry|func) (?:\(.*?\) )?([\w$]+)", kept)):
        kept = re.sub(rf"\b{re.escape(name)}(?=\b|_param)", f"function{number}", kept)
    return kept


def flow_of(text: str) -> str:
    """The data flow of Triton's intermediate code, regardless of the order of pure operations.

    Each operation with an effect has a line, and its operands are digests of their computation.
    Loads count as pure: their order among each other and relative to stores is not compared.
    """
    text = _without_places(text)
    aliases = {name: sha(value) for name, value in _ALIAS.findall(text)}
    text = re.sub(r"#([A-Za-z_]\w*)", lambda x: aliases.get(x[1], x[0]), _ALIAS.sub("", text))
    regions = [_Region("", {}, ())]
    for line in map(str.strip, text.splitlines()):
        if line.startswith("}"):
            _close(regions, line)
        elif line.endswith("{"):
            _open(regions, line)
        elif line.startswith("^"):
            regions[-1].take_in(line)
        elif line:
            regions[-1].take(line)
    return "\n".join(regions[0].lines)


class _Region:
    """A region of an operation: its lines so far, and digests of its values by name."""

    def __init__(self, header: str, values: dict[str, str], results: tuple[str, ...]) -> None:
        self.header, self.results = header, results
        self.values = dict(values)
        self.lines: list[str] = []

    def put(self, line: str) -> str:
        """A line with names replaced by the digests of their values."""
        return _VALUE.sub(lambda match: self.values.get(match[0], match[0]), line)

    def take_in(self, line: str) -> None:
        """Takes a region's header; its arguments get digests of the header and their position."""
        names = _COMES_IN.findall(line)
        for name in names:
            self.values.pop(name, None)
        whole = _VALUE.sub(_numbered("in"), re.sub(r"^\^\w+", "", self.put(line)))
        self.lines.append(whole)
        of = sha(self.header + whole)
        self.values |= {name: f"{of}.{place}" for place, name in enumerate(names)}

    def take(self, line: str) -> None:
        """Takes an operation without regions."""
        results, line = _divided(line)
        self.end(self.put(line), results)

    def end(self, line: str, results: tuple[str, ...]) -> None:
        """Takes a complete operation, with its regions."""
        of = sha(line)
        if not (results and _PURE.match(line)):
            # Two equal operations with effects have different results.
            self.lines.append(line)
            of = sha("\n".join(self.lines))
        self.values |= {name: f"{of}:{place}" for place, name in enumerate(results)}


def _divided(line: str) -> tuple[tuple[str, ...], str]:
    """(names of the results, operation) of a line."""
    match = _RESULTS.match(line)
    if match is None:
        return (), line
    return tuple(_VALUE.findall(match[1])), line[match.end() :]


def _open(regions: list[_Region], line: str) -> None:
    results, operation = _divided(line)
    inner = _Region(regions[-1].header, regions[-1].values, results)
    inner.take_in(operation)
    inner.header = sha(inner.lines[0])
    regions.append(inner)


def _close(regions: list[_Region], line: str) -> None:
    inner = regions.pop()
    if line.endswith("{"):
        # Another region of the same operation begins: ``} else {``.
        another = _Region(inner.header, regions[-1].values, inner.results)
        another.lines = [*inner.lines, line]
        regions.append(another)
    else:
        outer = regions[-1]
        outer.end("\n".join([*inner.lines, outer.put(line)]), inner.results)
