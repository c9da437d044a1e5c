"""The sanitizers' verdicts, and the faults that they have to find."""

from __future__ import annotations

import ast
import shutil

import pytest

pytest.importorskip("triton")

from tests.mutation.catalogue.copies import PACKAGE, sources_of
from tests.mutation.catalogue.mutant import Mutant, mutated
from tests.sanitizers import __main__ as sanitizers
from tests.sanitizers.calls import FAULTS
from tests.sanitizers.planted import PLANTED

NAMES = (*sanitizers.NVIDIA, *sanitizers.TRITON)


@pytest.fixture
def runs(monkeypatch):
    """Replaces runs by exit codes and outputs, of the planted fault and of the kernels."""

    def replace(planted, kernels=(0, "")):
        monkeypatch.setattr(sanitizers, "absence", lambda _name: "")
        monkeypatch.setattr(sanitizers, "_run", lambda _name, *given: planted if given else kernels)

    return replace


def test_every_sanitizer_has_a_fault_of_its_own():
    assert {*PLANTED} == {*sanitizers.NVIDIA}
    assert {*FAULTS} == {*sanitizers.TRITON}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_applies_to_the_sources(name):
    edit = FAULTS[name]
    ast.parse(mutated(sources_of(PACKAGE), Mutant(name, (edit,)))[edit.file])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("planted", "kernels", "says"),
    [
        ((7, "{}"), (0, ""), "finds the planted fault"),
        ((0, "{}"), (0, ""), "does not find the planted fault"),
        ((1, "ImportError"), (0, ""), "does not find the planted fault"),
        ((7, "{}"), (7, "wrong"), "fails on the kernels (exit code 7)\nwrong"),
    ],
)
def test_a_sanitizer_has_to_find_the_fault_and_nothing_else(
    name, planted, kernels, says, runs, capsys
):
    code, said = planted
    runs((code, said.format(sanitizers._REPORTS[name])), kernels)
    passes = says == "finds the planted fault"
    if name == "memcheck" and says.startswith("fails"):
        # pytest runs the kernels under it.
        says, passes = "finds the planted fault", True
    assert sanitizers.main([name]) == int(not passes)
    assert says in capsys.readouterr().out


def test_an_absent_sanitizer_is_named_with_the_reason(monkeypatch, capsys):
    monkeypatch.setattr(shutil, "which", lambda _name: None)
    assert sanitizers.main(["racecheck"]) == 1
    says = "racecheck: absent: compute-sanitizer is not on PATH; it comes with the CUDA toolkit"
    assert capsys.readouterr().out.strip() == says
