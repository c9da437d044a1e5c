"""make lint and the pre-commit hooks run the same commands."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_hooks_run_what_make_lint_runs():
    _, _, rules = (ROOT / "Makefile").read_text().partition("\nlint:")
    by_make = re.findall(r"^\t\$\(python\) (.*)$", rules.partition("\n\n")[0], re.MULTILINE)
    hooks = (ROOT / ".pre-commit-config.yaml").read_text()
    by_hooks = re.findall(r"^ *entry: python (.*)$", hooks, re.MULTILINE)
    assert by_make
    assert by_hooks == by_make
