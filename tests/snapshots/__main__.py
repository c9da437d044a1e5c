"""``python -m tests.snapshots outputs|compiled|claims|mutants --write FILE | --compare FILE``."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from tests.snapshots.comparing import difference, read, write


def main(arguments: list[str] | None = None) -> int:
    """Returns 0 if a snapshot was written, or is what the file holds."""
    options = _options(arguments)
    now = {name: x for name, x in _taken(options).items() if options.only in name}
    if options.write:
        write(now, options.write)
        print(f"{len(now)} entries written to {options.write}")
        return 0
    then = {name: x for name, x in read(options.compare).items() if options.only in name}
    lines = difference(then, now)
    print("\n".join(lines) or f"{len(now)} entries, all as in {options.compare}")
    return int(bool(lines))


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.snapshots", description=__doc__)
    parser.add_argument("kind", choices=("outputs", "compiled", "claims", "mutants"))
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--write", metavar="FILE", type=Path, help="record a snapshot")
    what.add_argument("--compare", metavar="FILE", type=Path, help="compare with a recorded one")
    parser.add_argument(
        "--only", metavar="TEXT", default="", help="entries alone whose names have this text"
    )
    return parser.parse_args(arguments)


def _taken(options: argparse.Namespace) -> dict[str, Any]:
    """The snapshot of the sources as they are; each imports what its process may hold."""
    if options.kind == "outputs":
        _choose_device()
        from tests.snapshots.outputs import outputs

        return outputs(options.only)
    raise NotImplementedError(options.kind)


def _choose_device() -> None:
    """Kernels run on the GPU if there is one, else in the interpreter, as in ``conftest``."""
    # Before torch is imported. Sums of NumPy's products do not follow the number of CPUs then.
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    import torch

    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"
        from properties import interpreter

        interpreter.repair()


if __name__ == "__main__":
    sys.exit(main())
