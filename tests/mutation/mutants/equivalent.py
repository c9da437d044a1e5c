"""Mechanical mutants that no valid input can kill, or none without a GPU, and the reasons.

    python -m tests.mutation equivalents
    python -m tests.mutation equivalents --rekey OLD_TREE [--apply]

The first command prints every entry of equivalent.toml with the change that its key stands for. The
second maps the entries of a folder with older sources, such as a git worktree, to the current
sources. It prints entries whose change differs and entries that are not found; --apply writes the
file.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

from fa_verify.diagnosis.copies import PACKAGE, sources_of
from fa_verify.diagnosis.mutant import Mutant, StaleError
from tests.mutation.mutants import operators
from tests.mutation.mutants.rekey import Found, Version, rekeyed

__all__ = ["EQUIVALENT", "FILE", "Group", "check_listed", "main", "read", "version", "write"]

FILE = Path(__file__).with_suffix(".toml")
KINDS = ("equivalent", "hardware")
_HEAD = """\
# Mechanical mutants that survive: no input of the contract can show them, or only hardware can.
# `python -m tests.mutation equivalents` prints the change that each key stands for.
"""


@dataclass(frozen=True)
class Group:
    """Mutants that survive for one reason.

    Args:
        kind: "equivalent", or "hardware" for mutants that a GPU kills.
        because: The reason.
        mutants: Their keys.
    """

    kind: str
    because: str
    mutants: tuple[str, ...]


def read(file: Path = FILE) -> list[Group]:
    """The groups of a file, sorted by kind."""
    tables = tomllib.loads(file.read_text(encoding="utf-8"))
    if unknown := tables.keys() - set(KINDS):
        raise ValueError(f"{file.name} has {', '.join(sorted(unknown))}; needs {KINDS}")
    return [
        Group(kind, table["because"], tuple(table["mutants"]))
        for kind in KINDS
        for table in tables.get(kind, ())
    ]


def write(groups: Iterable[Group], file: Path = FILE) -> None:
    """Writes groups in the format that ``read`` parses."""
    parts = [_HEAD]
    for group in groups:
        keys = "".join(f"  {json.dumps(key)},\n" for key in group.mutants)
        because = json.dumps(group.because, ensure_ascii=False)
        parts.append(f"[[{group.kind}]]\nbecause = {because}\nmutants = [\n{keys}]\n")
    file.write_text("\n".join(parts), encoding="utf-8")


def _reasons(groups: Iterable[Group]) -> dict[str, str]:
    """Reasons by key."""
    return {
        key: f"on hardware alone: {group.because}" if group.kind == "hardware" else group.because
        for group in groups
        for key in group.mutants
    }


EQUIVALENT = _reasons(read())


def check_listed(made: Iterable[Mutant]) -> None:
    """Checks that every entry stands for a mutant.

    Raises:
        StaleError: Some keys have no mutant; the message names them.
    """
    if stale := sorted(EQUIVALENT.keys() - {mutant.key for mutant in made}):
        raise StaleError(
            f"listed in {FILE.name}, but no such mutant is made: {'; '.join(stale)}\n"
            "python -m tests.mutation equivalents --rekey OLD_TREE maps keys of older sources"
        )


def version(root: Path | None = None) -> Version:
    """The mechanical mutants of the kernels of a tree, made by the tree's own operators.

    Args:
        root: Another tree; None for this one.
    """
    if root is None:
        made_by, sources = operators, sources_of(PACKAGE)
    else:
        made_by = _operators_of(root)
        sources = {
            path.relative_to(root).as_posix(): path.read_text(encoding="utf-8")
            for path in sorted((root / PACKAGE).rglob("*.py"))
        }
    sites = (*made_by.SITES, *made_by.HOPPER_SITES)
    return Version(sources, made_by.mechanical(sources, sites))


def _operators_of(root: Path) -> ModuleType:
    """The module ``operators`` of another tree, which numbers mutants as that tree does."""
    spec = importlib.util.spec_from_file_location(
        "operators_of_another_tree", root / "tests" / "mutation" / "mutants" / "operators.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 if every entry stands for a mutant."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutation equivalents")
    parser.add_argument("--rekey", type=Path, metavar="OLD_TREE", help="a folder, its keys mapped")
    parser.add_argument("--apply", action="store_true", help=f"write {FILE.name}")
    options = parser.parse_args(arguments)
    if options.rekey is None:
        return _list()
    return _rekey(options.rekey.resolve(), apply=options.apply)


def _list() -> int:
    made = {x.key: x for x in version().mutants}
    for group in read():
        print(f"\n{group.kind}: {group.because}")
        for key in group.mutants:
            print(f"  {made[key].name if key in made else f'{key}: NO SUCH MUTANT'}")
    missing = [key for key in EQUIVALENT if key not in made]
    print(f"\n{len(EQUIVALENT)} entries, {len(missing)} without a mutant")
    return int(bool(missing))


def _rekey(root: Path, *, apply: bool) -> int:
    old_groups, old, new = read(next((root / "tests").rglob(FILE.name))), version(root), version()
    of_old = {x.key: x for x in old.mutants}
    wanted = [key for group in old_groups for key in group.mutants]
    found = {x.old.key: x for x in rekeyed(wanted, old, new)}
    for key in wanted:
        if key not in of_old:
            print(f"NOT MAPPED, as the old sources have no such mutant: {key}")
        else:
            _tell(found[key])
    lost = [key for key in wanted if key not in found or found[key].new is None]
    same = sum(x.score == 1 for x in found.values())
    similar = len(wanted) - len(lost) - same
    print(f"{len(wanted)} entries: {same} equal, {similar} similar, {len(lost)} not mapped")
    if apply:
        mapped = {key: x.new.key for key, x in found.items() if x.new is not None}
        write(_merged(old_groups, mapped, {x.key for x in new.mutants}), FILE)
        print(f"written to {FILE}")
    return int(bool(lost))


def _tell(found: Found) -> None:
    """Prints a change that is not found or that differs."""
    if found.new is None:
        print(f"NOT MAPPED: {found.old.name}")
        if found.nearest is not None:
            print(f"  nearest ({found.score:.2f}): {found.nearest.name}")
    elif found.score < 1:
        print(f"SIMILAR ({found.score:.2f}): {found.old.name}\n  now: {found.new.name}")


def _merged(old: Sequence[Group], mapped: dict[str, str], made: set[str]) -> list[Group]:
    """The old groups under new keys, merged with the entries of the current file."""
    before = {key for group in old for key in group.mutants}
    known = before | set(mapped.values())
    groups = [replace(g, mutants=tuple(mapped[k] for k in g.mutants if k in mapped)) for g in old]
    for group in read(FILE):
        more = tuple(key for key in group.mutants if key in made and key not in known)
        same = [
            n for n, x in enumerate(groups) if (x.kind, x.because) == (group.kind, group.because)
        ]
        if more and same:
            groups[same[0]] = replace(groups[same[0]], mutants=groups[same[0]].mutants + more)
        elif more:
            groups.append(replace(group, mutants=more))
    return [group for group in groups if group.mutants]
