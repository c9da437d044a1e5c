"""The command of docs/verify-a-mask.md verifies the mask of that page, and finds a slip in it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).parents[3]


def verified(folder: Path, source: str) -> subprocess.CompletedProcess[str]:
    """Compares the forms of the mask in a file, by the command of the page."""
    (folder / "prefix.py").write_text(source)
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "-k", "forms",
         f"--mask={folder / 'prefix.py'}:Prefix"],
        cwd=ROOT, capture_output=True, text=True, timeout=250, check=False,
        env={k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")},
    )  # fmt: skip


@pytest.fixture(scope="module")
def example() -> str:
    page = (ROOT / "docs" / "verify-a-mask.md").read_text(encoding="utf-8")
    return page.partition("```python\n")[2].partition("```")[0]


def test_the_documented_mask_is_verified(tmp_path, example):
    done = verified(tmp_path, example)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 passed" in done.stdout


def test_a_slip_in_the_jit_predicate_is_found(tmp_path, example, device):
    assert example.count("(n <= m) | (n < args[0])") == 1
    done = verified(
        tmp_path, example.replace("(n <= m) | (n < args[0])", "(n < m) | (n < args[0])")
    )
    assert done.returncode == 1
    assert "the jit predicate, rows by keys, says hidden at b=0 h=0 m=0 n=0" in done.stdout
    on = "" if device == "cpu" else ',"device":"cuda"'
    problem = f'{{"version":1,"mask":{{"type":"Prefix"}}{on}}}'
    mask = f"--mask={tmp_path / 'prefix.py'}:Prefix"
    assert f"replay: pytest {mask} --replay='{problem}'" in done.stdout
