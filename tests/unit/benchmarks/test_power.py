"""Detection limits: they reproduce known ones, and a false alarm fails the command."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch

from benchmarks import power
from fa_verify.properties.guarantees.accuracy import accuracy
from fa_verify.properties.guarantees.compare import Finding
from fa_verify.properties.running.trial import AttentionTrial, run_trial

CASE = power.Case("normal", "fp32", 128)


def trial_of(case: power.Case = CASE, seed: int = 1) -> AttentionTrial:
    trial = run_trial(power.subject_of(case), case.problem(seed, "cpu", rows=96))
    assert trial is not None
    return trial


# In 16 bits the rounding of out is a large part of its bound.
@pytest.mark.parametrize("dtype", ["fp32", "tf32"])
def test_the_limit_of_the_bound_follows_from_the_bound(dtype: str) -> None:
    case = CASE._replace(dtype=dtype)
    limits, alarms = power.measured(case, 1, rows=96, faults=["everything", "one row"])
    assert alarms == []
    assert limits is not None
    trial = trial_of(case, seed=0)
    for fault in limits:
        for name in power.OUTPUTS:
            where = power.FAULTS[fault](getattr(trial.got, name))
            want, bound = (getattr(x, name)[where] for x in (trial.want, trial.judgement.bound))
            known = float((bound / want.abs()).min())
            assert known / 1.5 <= limits[fault][name]["bound"] <= 2 * known


@pytest.mark.parametrize(
    ("fault", "elements"), [("everything", 96 * 64), ("one tile", 64 * 64), ("one row", 64),
                            ("one element", 1)]
)  # fmt: skip
def test_a_fault_changes_its_part_alone(fault: str, elements: int) -> None:
    trial = trial_of()
    found = power.changed(trial, fault, {"dq": 0.5})
    assert trial.got.dq is not None
    assert found.got.dq is not None
    differs = found.got.dq != trial.got.dq
    assert int(differs.sum()) == elements
    torch.testing.assert_close(found.got.dq[differs], 1.5 * trial.got.dq[differs])
    assert all(found.got[i] is trial.got[i] for i in (0, 1, 3, 4))
    rms = trial.got.dq.square().mean().sqrt()
    assert 0.8 < float(trial.got.dq[differs].square().mean().sqrt() / rms) < 1.25


@pytest.mark.parametrize(("seeds", "missed"), [(5, 0), (100, 1)])
def test_a_limit_is_found_in_99_of_100_seeds(
    seeds: int, missed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(0)
    places = torch.randint(len(power.GRID) + 1, (seeds, 4), generator=generator)
    sharp = dict(zip(power.OUTPUTS, places.mT.tolist(), strict=True))
    grid = (*power.GRID, float("inf"))

    def changed(seed, fault, sizes):
        return {name: x >= grid[sharp[name][seed]] for name, x in sizes.items()}

    monkeypatch.setattr(power, "changed", changed)
    monkeypatch.setattr(
        power, "CHECKS",
        {"stub": lambda found: [SimpleNamespace(output=name) for name in found if found[name]]},
    )  # fmt: skip
    limits = power.Limits("stub", "everything", seeds, power.OUTPUTS)
    for seed in range(seeds):
        limits.add(seed)
    want = {name: sorted(x)[seeds - 1 - missed] for name, x in sharp.items()}
    kept = {name: float(f"{grid[i]:.3g}") for name, i in want.items() if i < len(power.GRID)}
    assert limits.found() == kept


def test_a_false_alarm_fails_the_command_and_prints_its_replay_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path
) -> None:
    def too_sharp(trial: AttentionTrial) -> list[Finding]:
        return accuracy(power.changed(trial, "everything", {"dq": 1.0}))

    monkeypatch.setattr(power, "ROOT", tmp_path)
    monkeypatch.setattr(power, "DTYPES", ("bf16",))
    monkeypatch.setattr(power, "LENGTHS", {"cpu": (64,)})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert power.main(["--quick", "--seeds=1", "--workers=1"]) == 0
    assert json.loads((tmp_path / "build/power.json").read_text())["false_alarms"] == 0
    monkeypatch.setattr(power, "CHECKS", {"bound": too_sharp})
    assert power.main(["--quick", "--seeds=2", "--workers=1"]) == 1
    record = json.loads((tmp_path / "build/power.json").read_text())
    assert (record["problems"], record["false_alarms"]) == (2, 2)
    said = capsys.readouterr().out
    assert "false alarm: G1 accuracy: dq of emulated leaves the derived bound" in said
    assert "replay: pytest --fa-kernel=benchmarks/emulated.py:attention --fa-replay='" in said


@pytest.mark.parametrize("fewer", [["--quick"], ["--lengths", "64"], ["--families", "normal"]])
def test_results_are_not_replaced_by_a_part_of_them(fewer, capsys):
    with pytest.raises(SystemExit):
        power.main(["--write", *fewer])
    assert f"--write needs every length and family; {fewer[0]} leaves some out" in (
        capsys.readouterr().err
    )


def test_lengths_and_families_select_cases(monkeypatch, tmp_path):
    monkeypatch.setattr(power, "ROOT", tmp_path)
    monkeypatch.setattr(power, "DTYPES", ("bf16",))
    monkeypatch.setattr(power, "measured", lambda case, **options: (None, []))
    arguments = ["--lengths", "64", "96", "--families", "needle", "--seeds=1", "--workers=1"]
    assert power.main(arguments) == 0
    limits = json.loads((tmp_path / "build/power.json").read_text())["limits"]
    assert limits == {"needle": {"bf16": {"64": None, "96": None}}}


def test_parts_add_up_in_one_file_of_the_same_conditions(monkeypatch, tmp_path):
    monkeypatch.setattr(power, "DTYPES", ("bf16",))
    monkeypatch.setattr(power, "measured", lambda case, **options: ({}, []))
    path = tmp_path / "power-long.json"
    of_length = ["--families", "normal", "--workers=1", f"--out={path}", "--lengths"]
    for length in ("64", "96"):
        assert power.main([*of_length, length, "--seeds=3"]) == 0
    record = json.loads(path.read_text())
    assert record["limits"] == {"normal": {"bf16": {"64": {}, "96": {}}}}
    assert record["problems"] == 6
    with pytest.raises(ValueError, match="has seeds=3, and this run 2; needs another file"):
        power.main([*of_length, "128", "--seeds=2"])
    assert json.loads(path.read_text()) == record
