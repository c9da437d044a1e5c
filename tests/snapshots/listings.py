"""Lists the names of tests and of the mutants that apply, without their folders."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["claims", "claims_of", "mutants", "renamed"]

_ROOT = Path(__file__).parents[2]
# A parameter that is a file. Such tests are counted, because files are added and moved.
_FILE = re.compile(r"(?:[\w.-]+/)+[\w.-]+\.py\b")


def claims() -> dict[str, int]:
    """Counts of the tests that pytest collects, by function and parameters."""
    environment = os.environ | {"PYTEST_ADDOPTS": ""}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"],
        cwd=_ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    return claims_of(done.stdout)


def claims_of(listed: str) -> dict[str, int]:
    """Counts of the tests in pytest's list, by function and parameters."""
    names = (line.partition("::")[2] for line in listed.splitlines())
    return dict(Counter(_FILE.sub("*.py", name) for name in names if name))


def mutants() -> dict[str, Any]:
    """The mutants that apply to the current sources.

    Written mutants are listed by name. Mechanical mutants are counted by function and operator,
    because their names contain text of the source.
    """
    from tests.mutation.catalogue.copies import sources_of
    from tests.mutation.catalogue.faults import FAULTS
    from tests.mutation.catalogue.hardware import HARDWARE
    from tests.mutation.catalogue.independent import INDEPENDENT
    from tests.mutation.catalogue.mutant import StaleError, mutated
    from tests.mutation.catalogue.operators import HOPPER_SITES, mechanical
    from tests.mutation.catalogue.subtle import SUBTLE
    from tests.mutation.harness.mutants import HARNESS

    sources = sources_of("fa_kernels", "oracles", "properties", "fa_verify")
    found: dict[str, Any] = {}
    lists = {
        "faults": FAULTS, "independent": INDEPENDENT, "subtle": SUBTLE, "harness": HARNESS,
        "hardware": [x.mutant for x in HARDWARE],
    }  # fmt: skip
    for kind, of in lists.items():
        for mutant in of:
            try:
                mutated(sources, mutant)
            except StaleError:
                continue
            found[f"{kind}: {mutant.name}"] = "applies"
    for kind, made in {
        "mechanical": mechanical(sources), "hopper": mechanical(sources, HOPPER_SITES)
    }.items():  # fmt: skip
        for mutant in made:
            function = mutant.name.partition(" ")[0]
            of_function = found.setdefault(f"{kind}: {function}", Counter())
            of_function[mutant.origin] += 1
    return found


def renamed(snapshot: Mapping[str, Any], names: str) -> dict[str, Any]:
    """A snapshot with new names, from lines "old -> new".

    A line renames the entry "old" and all entries that continue it with "[parameter]" or ":
    mutant". Counts of entries that get the same name are added.

    Raises:
        ValueError: A line has another form or matches no entry.
    """
    pairs = {}
    for line in filter(None, map(str.strip, names.splitlines())):
        old, arrow, new = line.partition(" -> ")
        if not arrow or not any(_rest(name, old) is not None for name in snapshot):
            raise ValueError(f"{line!r} names no entry; needs old -> new, of an entry of the file")
        pairs[old] = new
    found: dict[str, Any] = {}
    for name, value in snapshot.items():
        new_name = name
        for old, new in pairs.items():
            rest = _rest(name, old)
            if rest is not None:
                new_name = new + rest
        if new_name in found and isinstance(value, int):
            value += found[new_name]
        found[new_name] = value
    return found


def _rest(name: str, old: str) -> str | None:
    """The part of ``name`` after ``old``; None if a line for ``old`` does not rename it."""
    rest = name.removeprefix(old)
    return rest if name.startswith(old) and (not rest or rest[0] in "[:") else None
