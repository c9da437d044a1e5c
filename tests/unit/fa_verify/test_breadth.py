"""The number and size of problems follow the time that a kernel takes, or the option."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fa_verify import breadth
from fa_verify.breadth import BREADTHS, breadth_of, choose_breadth
from fa_verify.conformance.test_combinations import CASES, PARTS
from fa_verify.properties.kernels.subject import Subject

ROOT = Path(__file__).parents[3]


def plain(q, k, v, *, mask, sm_scale):
    seen = mask.dense(*q.shape[:3], k.shape[2])
    return torch.softmax((q @ k.mT * sm_scale).masked_fill(~seen, -torch.inf), -1) @ v


def slow(q, k, v, *, mask, sm_scale):
    end = time.process_time() + 1.5
    while time.process_time() < end:
        pass
    return plain(q, k, v, mask=mask, sm_scale=sm_scale)


def ends(q, k, v, *, mask, sm_scale):
    os.abort()


def raises(q, k, v, *, mask, sm_scale):
    raise ValueError("no result")


class Config:
    """The part of a configuration of pytest that ``choose_breadth`` reads."""

    def __init__(self, monkeypatch, kernel, given=None, **options):
        self.option = SimpleNamespace(fa_breadth=given, fa_kernel="a.py:kernel", **options)
        subject = Subject.of(kernel, kernel.__name__)
        monkeypatch.setattr(breadth, "subject_of", lambda config: subject)
        monkeypatch.setattr(breadth, "device_of", lambda config: "cpu")

    def getoption(self, name, default=None):
        return getattr(self.option, name.lstrip("-").replace("-", "_"), default)


def chosen(kernel):
    """Return the breadth that a kernel is given."""
    with pytest.MonkeyPatch.context() as patch:
        config = Config(patch, kernel)
        choose_breadth(config)
    assert breadth_of(config) is BREADTHS[config.option.fa_breadth]
    return config.option.fa_breadth


@pytest.mark.parametrize(
    ("kernel", "name"), [(plain, "wide"), (slow, "narrow"), (ends, "narrow"), (raises, "narrow")]
)
def test_a_kernel_has_the_breadth_of_its_speed(kernel, name):
    """In a process like that of a run: in one that has used a GPU, a fork cannot differentiate."""
    code = f"from {__name__} import {kernel.__name__}, chosen; print(chosen({kernel.__name__}))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120,
        check=False,
    )  # fmt: skip
    assert done.stdout.split()[-1:] == [name], done.stderr


def test_the_option_is_not_changed(monkeypatch):
    config = Config(monkeypatch, plain, "narrow")
    choose_breadth(config)
    assert breadth_of(config).tile_pairs == 24


def test_a_worker_has_the_breadth_of_the_process_that_started_it(monkeypatch):
    config = Config(monkeypatch, ends)
    config.workerinput = {"breadth": "medium"}
    choose_breadth(config)
    assert config.option.fa_breadth == "medium"


@pytest.mark.parametrize("option", ["fa_quick", "fa_replay", "collectonly"])
def test_a_run_that_draws_no_problem_times_nothing(monkeypatch, option):
    config = Config(monkeypatch, ends, **{option: True})
    choose_breadth(config)
    assert config.option.fa_breadth is None


def test_an_unknown_breadth_is_refused(monkeypatch):
    with pytest.raises(pytest.UsageError, match="'broad'; needs one of wide, medium, narrow"):
        choose_breadth(Config(monkeypatch, plain, "broad"))


def test_every_kind_of_an_array_has_its_tests():
    assert Counter(case.values[0].kind for case in CASES) == PARTS
