"""The command of docs/verify-a-mask.md verifies the mask of that page, and finds a slip in it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fa_verify.conformance_process import Status

pytest.importorskip("triton")

ROOT = Path(__file__).parents[3]


def verified(
    folder: Path, source: str, *options: str, select: str = "forms"
) -> subprocess.CompletedProcess[str]:
    """Compares the forms of the mask in a file, by the command of the page."""
    (folder / "prefix.py").write_text(source)
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "-k", select,
         f"--mask={folder / 'prefix.py'}:Prefix", *options],
        cwd=ROOT, capture_output=True, text=True, timeout=250, check=False,
        env={k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")},
    )  # fmt: skip


@pytest.fixture(scope="module")
def example() -> str:
    page = (ROOT / "docs" / "verify-a-mask.md").read_text(encoding="utf-8")
    return page.partition("```python\n")[2].partition("```")[0]


def test_the_documented_mask_is_verified(tmp_path, example, device):
    done = verified(tmp_path, example)
    # The tests of forms judge no problem, so they alone verify no kernel.
    assert done.returncode == Status.NOT_VERIFIED, done.stdout + done.stderr
    # Without a GPU, the compiled predicate is a form of its own.
    assert f"{4 + (device == 'cpu')} passed" in done.stdout


def test_a_slip_in_the_jit_predicate_is_found(tmp_path, example, device):
    assert example.count("(n <= m) | (n < args[0])") == 1
    done = verified(
        tmp_path, example.replace("(n <= m) | (n < args[0])", "(n < m) | (n < args[0])"), "-vv"
    )
    assert done.returncode == 1
    on = "" if device == "cpu" else ',"device":"cuda"'
    problem = f'{{"version":1,"mask":{{"type":"Prefix"}}{on}}}'
    says = (
        "two forms of the mask Prefix() disagree, at (m, n) = (0, 0), b=0, h=0, M=1, N=1\n"
        "  the jit predicate, keys by rows, says hidden\n"
        "  the dense tensor says visible\n"
        f"  replay: pytest --fa-mask={tmp_path / 'prefix.py'}:Prefix --fa-replay='{problem}'"
    )
    assert says in done.stdout
    page = (ROOT / "docs" / "verify-a-mask.md").read_text(encoding="utf-8")
    on_the_page = says.replace(str(tmp_path), "path/to").replace(on, "")
    assert on_the_page in page


def test_the_forms_are_compared_beside_the_kernel_of_another(tmp_path, example, device):
    done = verified(
        tmp_path, example.replace("(n <= m) | (n < args[0])", "(n < m) | (n < args[0])"),
        "--kernel=sdpa-math",
    )  # fmt: skip
    assert done.returncode == 1
    assert "two forms of the mask Prefix() disagree, at (m, n) = (0, 0)" in done.stdout
    assert f"2 failed, {1 + (device == 'cpu')} passed, 1 skipped" in done.stdout


def test_a_replay_names_the_forms_and_no_kernel(tmp_path, example):
    done = verified(
        tmp_path, example.replace("(n <= m) | (n < args[0])", "(n < m) | (n < args[0])"),
        """--replay={"version":1,"M":4,"N":4,"mask":{"type":"Prefix"}}""", select="replay",
    )  # fmt: skip
    assert done.returncode == 1
    assert "two forms of the mask Prefix() disagree, at (m, n) = (0, 0)" in done.stdout
    assert "out does not agree" not in done.stdout
    assert "violated" not in done.stdout
