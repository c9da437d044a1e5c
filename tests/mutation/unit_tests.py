"""The unit tests of the kernels' parts, on a copy of the package: ranges, launches, arguments."""

from __future__ import annotations

import contextlib
import io
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.mutation.package import PACKAGE

__all__ = ["FILES", "first_failure"]

_ROOT = Path(__file__).parents[2]
FILES = tuple(
    f"tests/unit/test_{name}.py"
    for name in ("ranges", "element_mask", "launch", "arguments", "attention")
)


def first_failure(package: ModuleType) -> str | None:
    """The first unit test that fails with a copy in the place of ``fa_kernels``; None if all pass.

    Every later import of ``fa_kernels`` in this process gives the copy.
    """
    copies = {
        name: module
        for name, module in sys.modules.items()
        if name.partition(".")[0] == package.__name__
    }
    for name in [name for name in sys.modules if name.partition(".")[0] == PACKAGE]:
        del sys.modules[name]
    for name, module in copies.items():
        sys.modules[PACKAGE + name.removeprefix(package.__name__)] = module
    said = io.StringIO()
    arguments = ["-x", "-q", "-p", "no:xdist", "-p", "no:cacheprovider"]
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = pytest.main([*arguments, *(str(_ROOT / file) for file in FILES)])
    if code == pytest.ExitCode.OK:
        return None
    failed = re.search(r"^(?:FAILED|ERROR) (.*)$", said.getvalue(), re.MULTILINE)
    return failed[1] if failed else f"pytest ended with {code}: {said.getvalue()[-300:]}"
