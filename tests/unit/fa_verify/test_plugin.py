"""The plugin where the package is installed: inert without its options, and set up with them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fa_verify.conformance_process import Status
from tests.unit.repository.test_installation import KERNEL, wheel

__all__ = ["wheel"]

# A user's folder. Its configuration has a short timeout, and warnings that are errors; its
# conftest.py loads a profile and imports torch before a kernel does.
INI = """
[pytest]
timeout = 60
filterwarnings = error
testpaths = checks
"""
CONFTEST = """
import hypothesis, torch

pytest_plugins = ["theirs"]
hypothesis.settings.register_profile("theirs", max_examples=7)
hypothesis.settings.load_profile("theirs")
"""
# A plugin of the user, because hooks of a conftest.py are called for the tests below it only.
PLUGIN = """
import warnings


def warn(module):
    warnings.warn_explicit("of it", UserWarning, "file.py", 1, module)


def pytest_runtest_setup():
    warn("theirs")
    try:
        warn("fa_verify.properties")
    except UserWarning:
        return
    raise AssertionError("a warning of the suite is no error")
"""
BROKEN = """
import warnings


@attention_kernel(
    p_dtype="fp32", p_normalised=True, dtypes=("fp32",), masks=(), gqa=False, devices=("cpu",)
)
def broken(q, k, v, *, mask, sm_scale):
    return attention(q, k, v, mask=mask, sm_scale=sm_scale) * 1.01


warnings.warn("of a module", DeprecationWarning)
"""
# Prints what a plugin could have changed.
STATE = """
import json, os, sys, warnings
import pytest

@pytest.fixture(scope="session")
def kernel():
    return None

def test_state(pytestconfig, recwarn):
    import hypothesis

    heavy = [x for x in ("torch", "triton", "numpy", "fa_verify.session") if x in sys.modules]
    print("STATE", json.dumps({
        "heavy": heavy,
        "environment": {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")},
        "profile": hypothesis.settings.get_current_profile_name(),
        "examples": hypothesis.settings().max_examples,
        "timeout": pytestconfig.getoption("timeout", None),
        "workers": getattr(pytestconfig.option, "numprocesses", None),
        "warnings": pytestconfig.getini("filterwarnings"),
        "plugins": sorted(
            name
            for name, plugin in pytestconfig.pluginmanager.list_name_plugin()
            if plugin is not None and "fa_verify" in name
        ),
    }))
"""
NAME = "fa_verify.pytest_plugin.plugin"
BOUND = "-kevery_element_lies"


@pytest.fixture(scope="module")
def site(wheel, tmp_path_factory) -> Path:
    """The wheel, installed into a folder."""
    place = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "-q"]
    subprocess.run([*command, "--target", place, wheel], check=True, capture_output=True)
    return place


@pytest.fixture
def folder(tmp_path) -> Path:
    """A folder of a user, with a kernel."""
    (tmp_path / "my.py").write_text(f"{KERNEL}{BROKEN}")
    return tmp_path


def run(site: Path, folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Pytest, in a folder and an environment where the wheel is installed."""
    environment = {name: x for name, x in os.environ.items() if not name.startswith("PYTEST_")}
    for name in ("TRITON_INTERPRET", "TRITON_DEFAULT_FP_FUSION", "FA_VERIFY_GPUS"):
        environment.pop(name, None)
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options],
        cwd=folder, env=environment | {"PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip


def state(site: Path, folder: Path, *options: str) -> dict[str, object]:
    """The state that the test prints."""
    done = run(site, folder, "-s", *options)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(re.search(r"STATE (.*)", done.stdout).group(1))


def test_without_its_options_the_plugin_is_inert(site, folder):
    (folder / "test_it.py").write_text(STATE)
    seen = state(site, folder)
    assert seen.pop("plugins") == [NAME]
    without = state(site, folder, f"-pno:{NAME}")
    assert without.pop("plugins") == []
    # Other plugins of an environment may import some of them.
    assert seen == without


def test_a_conftest_and_the_entry_point_register_the_plugin_once(site, folder):
    (folder / "test_it.py").write_text(STATE)
    (folder / "conftest.py").write_text(f"pytest_plugins = ['{NAME}']\n")
    assert state(site, folder)["plugins"] == [NAME]
    assert state(site, folder, f"-p{NAME}")["plugins"] == [NAME]


def test_its_runs_are_set_up_as_those_of_a_checkout(site, folder):
    """The timeout, warnings and profile of the user's configuration have no part in them."""
    (folder / "pytest.ini").write_text(INI)
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "theirs.py").write_text(PLUGIN)
    done = run(
        site, folder, "--pyargs", "fa_verify.conformance", "--fa-kernel=my.py:broken", "-n1", "-v",
        BOUND,
    )  # fmt: skip
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout + done.stderr
    assert re.search(r"profile gate, (6|60) examples a test and shard, 1 workers", done.stdout)
    assert "timeout: 900.0s" in done.stdout
    assert "G1 accuracy: out of broken leaves the derived bound" in done.stdout
    line = re.search(r"replay: pytest (.*)", done.stdout).group(1)
    assert line == """--fa-kernel=my.py:broken --fa-replay='{"version":1}'"""


def test_a_line_of_a_failure_replays_it_and_a_kernel_alone_selects_all_tests(site, folder):
    (folder / "test_own.py").write_text("def test_own(): pass\n")
    done = run(site, folder, "--fa-kernel=my.py:broken", '--fa-replay={"version":1}')
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout + done.stderr
    assert "G1 accuracy: out of broken leaves the derived bound" in done.stdout
    assert "1 failed" in done.stdout
    done = run(site, folder, "--fa-kernel=my.py:attention", "--co", "-q")
    assert done.returncode == Status.NOT_VERIFIED, done.stdout + done.stderr
    assert "test_claims.py::test_claim[G1-every_element_lies" in done.stdout
    assert "test_own" not in done.stdout


def test_wrong_usage_is_refused_in_a_line(site, folder):
    (folder / "test_own.py").write_text("def test_own(): pass\n")
    for options, status, said in (
        (
            ["--pyargs", "fa_verify.conformance"],
            4,
            "fa_verify.conformance needs --fa-kernel",
        ),
        (
            ["test_own.py", "--fa-kernel=my.py:attention"],
            2,
            "--fa-kernel runs the tests of",
        ),
        (["--fa-kernel=my.py:missing"], 2, "--fa-kernel: my.py has no 'missing'"),
    ):
        done = run(site, folder, *options)
        assert done.returncode == status, done.stdout + done.stderr
        assert f"ERROR: {said}" in done.stderr
        assert "Traceback" not in done.stdout + done.stderr
