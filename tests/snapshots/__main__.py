"""Writes a snapshot, or compares the current sources with one.

``python -m tests.snapshots outputs|compiled|claims|mutants --write FILE | --compare FILE``.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.snapshots.comparing import difference, read, write
from tests.snapshots.compiled import compiled
from tests.snapshots.listings import claims, mutants, renamed


def main(arguments: list[str] | None = None) -> int:
    """Returns 0 if a snapshot was written or equals the file's."""
    options = _options(arguments)
    now = _chosen(_taken(options), options)
    if options.write:
        write(now, options.write)
        print(f"{len(now)} entries written to {options.write}")
        return 0
    then = read(options.compare)
    if options.renamed:
        then = renamed(then, options.renamed.read_text(encoding="utf-8"))
    lines = difference(_chosen(then, options), now, options.parts)
    print("\n".join(lines) or f"{len(now)} entries, all as in {options.compare}")
    return int(bool(lines))


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.snapshots", description=__doc__)
    parser.add_argument("kind", choices=("outputs", "compiled", "claims", "mutants"))
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--write", metavar="FILE", type=Path, help="record a snapshot")
    what.add_argument("--compare", metavar="FILE", type=Path, help="compare with a recorded one")
    parser.add_argument(
        "--only", metavar="TEXT", default="", help="entries alone whose names hold this text"
    )
    parser.add_argument(
        "--parts", metavar="PART", nargs="*", help="of entries: out, dq, ...; ir, flow, ptx"
    )
    parser.add_argument(
        "--renamed", metavar="FILE", type=Path, help='lines "old -> new" of the names in FILE'
    )
    return parser.parse_args(arguments)


def _chosen(snapshot: Mapping[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    return {name: x for name, x in snapshot.items() if options.only in name or name == "triton"}


def _taken(options: argparse.Namespace) -> dict[str, Any]:
    """The snapshot of the current sources."""
    match options.kind:
        case "outputs":
            _choose_device()
            # Imported here, after the device is chosen: it imports the kernels.
            from tests.snapshots.outputs import outputs

            return outputs(options.only)
        case "compiled":
            return compiled(options.only)
        case "claims":
            return claims()
    return mutants()


def _choose_device() -> None:
    """Selects the GPU if there is one, else the interpreter, as ``conftest`` does."""
    # Set before torch is imported, so that NumPy's sums do not depend on the number of CPUs.
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    import torch

    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"
        from fa_verify.simulator.interpreter import repair

        repair.repair()


if __name__ == "__main__":
    sys.exit(main())
