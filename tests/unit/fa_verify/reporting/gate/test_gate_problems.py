"""The problems of a baseline: their coverage, and an alarm for a fault that checks miss."""

from __future__ import annotations

import dataclasses

import pytest

from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.problem import Problem
from fa_verify.properties.guarantees.statistics import bias, is_valid, rms
from fa_verify.properties.kernels.loading import load
from fa_verify.properties.kernels.subject import Subject
from fa_verify.properties.regression.baseline import Baseline, Entry, Environment
from fa_verify.properties.regression.compiled_kernels import Resources
from fa_verify.properties.regression.measurement import measured
from fa_verify.properties.running.trial import run_trial
from fa_verify.reporting.gate.comparison import combined, differences
from fa_verify.reporting.gate.problems import CHECKS, FEWEST, chosen
from fa_verify.session import OURS
from tests.unit.properties.kernels.broken_subjects import Eager

MASKS = {"full", "causal", "window", "causal+window", "padding", "causal+padding"}


@pytest.fixture(scope="module")
def ours() -> Subject:
    pytest.importorskip("triton")
    return load(OURS)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_guarantee_dtype_mask_and_kind_of_configuration_is_covered(ours, device):
    entries = chosen(ours, device)
    assert {entry.check for entry in entries} == set(CHECKS)
    assert {entry.arithmetic for entry in entries} == {"fp16", "bf16", "fp32", "tf32", "fp64"}
    assert {entry.mask for entry in entries} == MASKS
    assert {"default", "16x16", "tf32"} <= {entry.problem.config for entry in entries}
    assert {entry.problem.device for entry in entries} == {device}


def test_the_choice_is_the_same_every_time_and_no_two_have_the_same_values(ours):
    entries = chosen(ours, "cpu")
    assert entries == chosen(ours, "cpu")
    assert len({entry.problem.seed for entry in entries}) == len(entries) >= FEWEST["cpu"]


def test_ordinary_data_is_covered_by_the_rms_check(ours):
    of_16_bits = [x.problem for x in chosen(ours, "cuda") if x.arithmetic in ("fp16", "bf16")]
    assert len(of_16_bits) > FEWEST["cuda"] / 3
    assert all(map(is_valid, of_16_bits))


@pytest.mark.parametrize(
    "declared",
    [
        {"masks": ("causal",), "causal_alignment": "top-left"},
        {"masks": ()},
        {"seqlen_multiple": 64, "m_ne_n": False},
        {"max_seqlen": 20},
        {"gqa": False, "dv_ne_d": False},
        {"dirty": ("zero",), "dtypes": ("fp64",)},
        {"head_dims": (256,)},
    ],
    ids=str,
)
def test_gate_problems_are_supported_and_numerous(declared):
    subject = dataclasses.replace(Subject.of(Eager(), "eager"), **declared)
    entries = chosen(subject, "cpu")
    assert len(entries) >= FEWEST["cpu"]
    assert [subject.excludes(entry.problem) for entry in entries] == [None] * len(entries)


def test_a_subject_that_supports_none_of_them_has_none():
    subject = dataclasses.replace(Subject.of(Eager(), "eager"), devices=("cuda",))
    assert chosen(subject, "cpu") == ()


def test_entries_of_a_file_stay_and_new_ones_follow():
    kept = (Entry(Problem(M=7), "G3", "fp32"), Entry(Problem(M=8), "G4", "fp32"))
    made = (Entry(Problem(M=9), "G1", "fp32"), Entry(Problem(M=7), "G1", "fp32"))
    assert combined(kept, made) == (*kept, made[0])


def test_kernels_and_speed_are_compared_too():
    here, entry = Environment("GPU", "1", "2"), Entry(Problem(), "G1", "fp32", {"out": (0.5, 0.1)})
    then = Baseline("f", here, (entry,), {"k": Resources(100, 0, 10)}, {"pass": (1.4, 1.41)})
    same = differences(then, {0: entry}, {}, then.kernels, then.speed)
    assert same == []
    worse = differences(then, {0: entry}, {}, {"k": Resources(100, 4, 10)}, {"pass": (1.2, 1.21)})
    assert [(change.part, change.alarm) for change in worse] == [("kernels", True), ("speed", True)]


def entries_of(subject: Subject, device: str) -> tuple[Entry, ...]:
    """Ordinary problems, small enough for the interpreter, measured on the kernels' device."""
    found = []
    for seed in range(16):
        mask = Mask(causal=seed % 2 == 1)
        problem = Problem(
            M=48, N=50, dtype="bf16", mask=mask, config="32x32", seed=seed, device=device
        )
        trial = run_trial(subject, problem)
        assert rms(trial) + bias(trial) == []
        found.append(Entry(problem, "G1", "bf16", measured(trial)))
    return tuple(found)


def test_the_gate_finds_a_delta_of_rounded_products(ours, device, tmp_path):
    coarser = load("tests.altered.worse:rounded_products")
    path = tmp_path / "base.json"
    Baseline("ours", Environment("here", "1", "2"), entries_of(ours, device)).write(path)
    then = Baseline.read(path)
    unchanged, changed = (dict(enumerate(entries_of(x, device))) for x in (ours, coarser))
    assert differences(then, unchanged, {}, {}, {}) == []
    alarms = [change.text for change in differences(then, changed, {}, {}, {}) if change.alarm]
    groups = {text.partition(":")[0] for text in alarms}
    assert "dq bf16" in groups
    # Other outputs do not depend on delta.
    assert {group.split()[0] for group in groups} <= {"dq", "dk"}
