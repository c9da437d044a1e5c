"""The code of docs/adding.md does what the page says."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.problem import Problem
from fa_verify.properties.checks.claims import checks_of
from fa_verify.properties.execution.trial import run_trial
from fa_verify.properties.inputs import families, sampling
from fa_verify.properties.subjects.subject import Subject
from tests.unit.properties.subjects.broken_subjects import Eager

PAGE = Path(__file__).parents[3] / "docs" / "adding.md"


@pytest.fixture
def code_of(tmp_path, monkeypatch) -> Callable[[str], ModuleType]:
    """The code of a section, as a module of its own."""

    def imported(section: str) -> ModuleType:
        _, _, text = PAGE.read_text(encoding="utf-8").partition(f"\n## {section}\n")
        (code, *_) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
        file = tmp_path / "of_the_page.py"
        file.write_text(code, encoding="utf-8")
        spec = importlib.util.spec_from_file_location(file.stem, file)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, file.stem, module)
        spec.loader.exec_module(module)
        return module

    return imported


FIELDS = {"B": 2, "H": 4, "Hk": 2, "M": 7, "N": 9, "D": 4, "Dv": 4, "dtype": "fp32", "dirty": "nan"}
MASK = Mask(causal=True, seqlens_k=(9, 5))


class Doubled(Eager):
    """Gives twice the right out."""

    def __call__(self, *args, **options):
        out, lse = super().__call__(*args, **options)
        return 2 * out, lse


def test_the_mask_of_the_page_sees_what_it_says(code_of):
    mask = code_of("A mask").EveryNth(step=3)
    seen = [[mask.is_visible(0, 0, m, n, M=5, N=5) for n in range(5)] for m in range(5)]
    assert seen == [[n <= m and (m - n) % 3 == 0 for n in range(5)] for m in range(5)]
    assert mask.dense(1, 1, 5, 5)[0, 0].tolist() == seen


def test_the_family_of_the_page_makes_problems(code_of, monkeypatch):
    family = code_of("An input family").alternating_signs
    monkeypatch.setitem(families.INPUTS, "alternating_signs", family)
    problem = Problem(**FIELDS, mask=MASK, inputs="alternating_signs")
    plain = sampling.drawn_normal(problem, "k")
    assert torch.equal(family(problem).k[..., 1::2, :], -plain[..., 1::2, :])
    trial = run_trial(Subject.of(Eager(), "eager"), problem)
    assert trial is not None
    assert checks_of("call")["G1"](trial) == []


@pytest.mark.parametrize(("subject", "count"), [(Eager(), 0), (Doubled(), 1)])
def test_the_guarantee_of_the_page_holds_of_a_right_subject_alone(code_of, subject, count):
    # One key is visible: out is v, and twice that is out of its range.
    problem = Problem(**(FIELDS | {"N": 1}), mask=Mask())
    trial = run_trial(Subject.of(subject, "eager"), problem)
    assert trial is not None
    assert len(code_of("A guarantee").convex(trial)) == count
