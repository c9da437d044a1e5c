"""Runs the unit tests on one mutant of the harness, up to the first failure."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

from tests.mutation.catalogue.copies import sources_of
from tests.mutation.catalogue.mutant import Kill, Mutant, Verdict, mutated
from tests.mutation.harness.first_failure import first_failure, unit_test_file
from tests.mutation.judging.hangs import kills_within

__all__ = ["judged_harness", "warm_up"]

_ROOT = Path(__file__).resolve().parents[3]
# Dependencies that the tests import; Triton if it is installed. The first ``detach`` takes a second
# because torch imports modules lazily.
_NEEDED = ("torch", "torch._dynamo", "numpy", "mpmath", "hypothesis", "hypothesis.strategies")
_ENVIRONMENT = {"TRITON_INTERPRET": "1", "TRITON_DEFAULT_FP_FUSION": "1"}
# Seconds of CPU time of all tests of a mutant, above which it hangs.
HANG = 240.0
_OWN = ("fa_verify.pytest_plugin", "fa_kernels", "fa_verify.oracles", "fa_verify.properties")


def warm_up() -> None:
    """Imports the dependencies once, before the first fork, so that forks inherit them.

    Raises:
        RuntimeError: Modules of the harness have been imported. Forks would inherit and test these
            in place of the mutant.
    """
    imported = sorted(set(_OWN) & set(sys.modules))
    if imported:
        raise RuntimeError(
            f"{', '.join(imported)} imported before the mutants; needs to come after"
        )
    os.environ.update(_ENVIRONMENT)
    for name in _NEEDED:
        importlib.import_module(name)
    if importlib.util.find_spec("triton") is not None:
        importlib.import_module("triton.language")
        importlib.import_module("triton.runtime.interpreter")
    sys.modules["torch"].set_num_threads(1)


def judged_harness(mutant: Mutant) -> Verdict:
    """Imports a mutant of the harness and runs the unit tests it names.

    Call it in a fork of a process that ``warm_up`` prepared: the mutant stays imported.

    Args:
        mutant: ``caught_by`` names files of tests/unit, which run in that order up to the first
            failure.

    Returns:
        The verdict: a kill by a test, or "raised" if the mutant could not be imported or its tests
        could not be collected. ``step`` is the index of the file.

    Raises:
        ValueError: The mutant names no file of tests/unit, or one that does not exist.
    """
    files = [unit_test_file(name) for name in mutant.caught_by]
    if not files:
        raise ValueError(f"mutant {mutant.name!r} is caught by nothing")
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        sources = sources_of("oracles", "properties", "fa_verify")
        changed = {
            path: text for path, text in mutated(sources, mutant).items() if text != sources[path]
        }
        sys.meta_path.insert(0, _Replaced(changed, Path(folder)))
        kills = kills_within(HANG, _kills(files), "the unit tests")
    return Verdict(kills, time.monotonic() - started)


def _kills(files: Sequence[str]) -> Iterator[Kill]:
    kill = first_failure(files)
    if kill is not None:
        yield kill


class _Replaced(MetaPathFinder):
    """Finds modules of the repository in other files, on disk so that their source can be read."""

    def __init__(self, sources: dict[str, str], folder: Path) -> None:
        self.files: dict[str, Path] = {}
        for path, text in sources.items():
            name = path.removesuffix(".py").replace("/", ".")
            name = name if name.startswith("fa_verify.") else f"fa_verify.{name}"
            self.files[name] = folder / f"{name}.py"
            self.files[name].write_text(text, encoding="utf-8")

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in self.files:
            return None
        return importlib.util.spec_from_file_location(name, self.files[name])
