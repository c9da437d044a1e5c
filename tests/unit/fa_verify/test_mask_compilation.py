"""A jit predicate that only the interpreter runs is found on a machine without a GPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest

pytest.importorskip("triton")

from fa_verify.mask_compilation import compilation_fault
from fa_verify.oracles.masks import codec
from fa_verify.properties.kernels.loading import load_mask
from fa_verify.properties.problems.mask_examples import pictures

ROOT = Path(__file__).parents[3]
MASKS = """
from dataclasses import dataclass
from typing import Annotated

import triton

from fa_verify.oracles.masks.mask import Between, Mask


@triton.jit
def compiles(b, h, m, n, args):
    return (n <= m) | (n < args[0])


@triton.jit
def changes(b, h, m, n, args):
    seen = n < args[0]
    if args[0] >= 0:
        seen = seen | (n <= m)
    return seen


@dataclass(frozen=True, kw_only=True)
class Plain(Mask, uniform=True):
    shared: Annotated[int, Between(0, 20)] = 0

    def mask_mod(self, b, h, m, n, *, M, N):
        return (n <= m) | (n < self.shared)


@dataclass(frozen=True, kw_only=True)
class Compiles(Plain, uniform=True):
    def native(self, B, H, M, N, device):
        return compiles, (self.shared,)


@dataclass(frozen=True, kw_only=True)
class Changes(Plain, uniform=True):
    def native(self, B, H, M, N, device):
        return changes, (self.shared,)
"""


@pytest.fixture(scope="module")
def spec(tmp_path_factory):
    path = tmp_path_factory.mktemp("masks") / "masks.py"
    path.write_text(MASKS)
    return lambda name: f"{path}:{name}"


@pytest.fixture(scope="module")
def masks(spec):
    """The classes by name. They are registered for this module alone."""
    before = {*codec.MASKS}
    yield {name: load_mask(spec(name)) for name in ("Plain", "Compiles", "Changes")}
    for name in codec.MASKS.keys() - before:
        del codec.MASKS[name]


def test_a_predicate_that_compiles_has_no_fault(spec, masks):
    assert compilation_fault(spec("Compiles"), masks["Compiles"], Random(0)) is None


def test_a_variable_that_changes_its_shape_is_found(spec, masks):
    found = compilation_fault(spec("Changes"), masks["Changes"], Random(0))
    said = str(found)
    assert said.startswith("the jit predicate of the mask Changes(")
    assert "does not compile for a Hopper GPU" in said.splitlines()[0]
    assert "initial value for `seen` is of type" in said
    assert "def changes(b, h, m, n, args):" in said


def test_a_mask_without_a_predicate_says_so(spec, masks):
    with pytest.raises(NotImplementedError, match="Plain has no native predicate"):
        compilation_fault(spec("Plain"), masks["Plain"], Random(0))


def test_what_is_no_error_of_the_compiler_is_one_of_the_suite(spec, masks):
    with pytest.raises(RuntimeError, match=r"failed:\n[\s\S]*Missing"):
        compilation_fault(spec("Missing"), masks["Compiles"], Random(0))


def test_pictures_show_the_dense_form(masks):
    lines = [*pictures(masks["Compiles"])]
    places = [place for place, line in enumerate(lines) if line.startswith("Compiles(")]
    assert len(places) == 2
    for start, end in zip(places, [*places[1:], len(lines)], strict=True):
        shared = int((re.search(r"shared=(\d+)", lines[start]) or ["", "0"])[1])
        M, N = map(int, re.search(r"(\d+) queries down, (\d+) keys", lines[start]).groups())
        assert lines[start + 1 : end] == [
            "  " + "".join("#" if n <= m or n < shared else "." for n in range(N)) for m in range(M)
        ]
        # Rows differ, so that the edge is seen.
        assert len({*lines[start + 1 : end]}) > 4


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="a GPU compiles the kernel")
def test_the_command_reports_it_and_draws_the_mask(spec, tmp_path):
    environment = {name: x for name, x in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, "-m", "fa_verify", "mask", spec("Changes"), "--", "-n0", "-k",
         "test_the_forms"],
        cwd=tmp_path, env=environment | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 failed, 4 passed" in done.stdout
    assert "[Changes-compiled]" in done.stdout
    assert " the mask: is this what you mean? " in done.stdout
    assert "queries down" in done.stdout
