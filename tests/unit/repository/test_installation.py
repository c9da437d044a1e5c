"""A wheel, an editable installation and a checkout import each module once, by one name."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from docs.transcript import built_wheel

ROOT = Path(__file__).parents[3]
# Imports each module by its name. Prints the files that were imported by two names, the names of
# folders that can be imported, and the place of the suite.
IMPORTS = """
import importlib, os, pkgutil, sys
import fa_verify
from fa_verify.pytest_plugin import environment
for _, name, _ in pkgutil.walk_packages(fa_verify.__path__, "fa_verify."):
    if not name.startswith(("fa_verify.adapters.", "fa_verify.conformance.test_")):
        if not name.endswith("__main__"):
            importlib.import_module(name)
names = {}
for name, module in sys.modules.items():
    file = getattr(module, "__file__", None)
    if file and name.split(".")[0] in ("fa_verify", "fa_kernels", "oracles", "properties", "tests"):
        names.setdefault(os.path.realpath(file), []).append(name)
print([x for x in names.values() if len(x) > 1])
print([x for x in ("oracles", "properties", "tests") if x in sys.modules])
print(fa_verify.__file__)
"""

KERNEL = """
import torch
from fa_verify import attention_kernel


@attention_kernel(p_dtype="fp32", p_normalised=True, dtypes=("fp32",), masks=(), gqa=False)
def attention(q, k, v, *, mask, sm_scale):
    return torch.softmax(q @ k.mT * sm_scale, -1) @ v
"""


def started_in(folder: Path, code: str, *path: Path) -> subprocess.CompletedProcess[str]:
    """A process that ran code in ``folder``, with these paths in the place of PYTHONPATH."""
    environment = {name: x for name, x in os.environ.items() if not name.startswith("PYTEST_")}
    environment["PYTHONPATH"] = os.pathsep.join(map(str, path))
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


def said_in(folder: Path, *path: Path) -> list[str]:
    """The output of the imports in a process started in ``folder``."""
    done = started_in(folder, IMPORTS, *path)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """A wheel of the checkout, built without the network."""
    pytest.importorskip("setuptools", minversion="77")
    return built_wheel(tmp_path_factory.mktemp("wheel"), alone=True)


def test_a_wheel_has_two_names_of_its_own(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = {name.split("/")[0] for name in archive.namelist()}
        held = set(archive.namelist())
    assert {name for name in names if not name.endswith(".dist-info")} == {
        "fa_kernels",
        "fa_verify",
    }
    assert {"fa_verify/py.typed", "fa_kernels/py.typed"} <= held
    assert "fa_verify/oracles/bounds/error_model.py" in held
    assert "fa_verify/conformance/test_accuracy.py" in held


def test_a_wheel_holds_no_edits_of_the_kernels(wheel):
    """Mutants name the file that they edit."""
    with zipfile.ZipFile(wheel) as archive:
        suite = [x for x in archive.namelist() if re.fullmatch(r"fa_verify/.*\.(py|json)", x)]
        wrong = [x for x in suite if "fa_kernels/" in archive.read(x).decode()]
    assert "fa_verify/simulator/gluon/machine.py" in suite
    assert wrong == []


def test_modules_of_a_wheel_are_imported_once(wheel, tmp_path):
    place = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(place)
    twice, taken, where = said_in(tmp_path, place)
    assert (twice, taken) == ("[]", "[]")
    assert Path(where).is_relative_to(place)


def test_the_command_of_a_wheel_verifies_a_kernel(wheel, tmp_path):
    place, folder = tmp_path / "site", tmp_path / "user"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(place)
    (metadata,) = place.glob("*.dist-info")
    assert "fa-verify = fa_verify.__main__:main" in (metadata / "entry_points.txt").read_text()
    folder.mkdir()
    (folder / "my.py").write_text(KERNEL)
    environment = {name: x for name, x in os.environ.items() if not name.startswith("PYTEST_")}
    words = ["check", "my.py:attention", "--quick", "--", "-n0", "-k", "000- or 001-", "-v"]
    # As the script that pip writes.
    script = "import sys; from fa_verify.__main__ import main; sys.exit(main(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", script, *words], cwd=folder,
        env=environment | {"PYTHONPATH": str(place)}, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"rootdir: {place / 'fa_verify' / 'conformance'}" in done.stdout
    assert " passed" in done.stdout


def test_modules_of_a_checkout_are_imported_once():
    twice, taken, where = said_in(ROOT)
    assert (twice, taken) == ("[]", "[]")
    assert Path(where).is_relative_to(ROOT)


def test_modules_of_an_installation_are_imported_once(tmp_path):
    if started_in(tmp_path, "import fa_verify").returncode:
        pytest.skip("fa_verify is not installed in this environment")
    twice, taken, _ = said_in(tmp_path)
    assert (twice, taken) == ("[]", "[]")
