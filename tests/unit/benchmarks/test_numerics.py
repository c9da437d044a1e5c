"""Each kernel has answers and errors, and one that crashes or hangs loses a step alone."""

from __future__ import annotations

import copy
import json
import re
import time

import pytest
import torch

from benchmarks import numerics, numerics_of_kernel, numerics_table
from benchmarks.numerics_table import TABLES, report
from docs import tables
from fa_verify.adapters.registry import NAMED

KERNELS = """
import os
import time

import torch

from fa_verify import attention_kernel

if os.environ.get("SLEEPS"):
    time.sleep(600)


@attention_kernel(dtypes=("bf16",), masks=("causal",), gqa=False, p_normalised=True)
def plain(q, k, v, *, mask, sm_scale):
    scores = q.float() @ k.float().mT * sm_scale
    seen = mask.dense(*q.shape[:3], k.shape[2], device=q.device)
    p = torch.softmax(scores.masked_fill(~seen, float("-inf")), -1).to(q.dtype)
    return (p.float() @ v.float()).to(q.dtype)


@attention_kernel(dtypes=("bf16", "fp16"), masks=("causal",), gqa=False, backward=False)
def crashing(q, k, v, *, mask, sm_scale):
    if q.dtype == torch.bfloat16 and k.shape[2] == 256:
        os.abort()
    return plain(q, k, v, mask=mask, sm_scale=sm_scale)


def raising(q, k, v, *, mask, sm_scale):
    raise RuntimeError("not today")
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("user") / "my.py"
    path.write_text(KERNELS)
    return path


@pytest.fixture(scope="module")
def record(file):
    """The results of a run over real kernels."""
    out = file.with_name("numerics.json")
    names = [f"{file}:{name}" for name in ("plain", "crashing", "raising")]
    asked = ["--seconds=280", "--workers=2", f"--out={out}", "--kernels", *names, "absent"]
    assert numerics.main(asked) == 0
    return json.loads(out.read_text())


def of(record, name):
    return next(x for full, x in record["kernels"].items() if full.rpartition(":")[2] == name)


def test_a_kernel_has_answers_evidence_and_errors(record):
    plain = of(record, "plain")
    assert plain["state"] == "done"
    (bf16,) = plain["dtypes"].values()
    assert bf16["missing"] == {}
    answers = bf16["answers"]
    assert answers["p_normalised"]["value"] is True
    assert answers["p_dtype_of_out"]["value"] == "input"
    assert answers["accumulation"]["value"] == "to nearest"
    assert json.loads(answers["p_normalised"]["replay"])["experiment"] == "weights"
    assert {f"order_of_{x}" for x in ("out", "dq", "dk", "dv")} <= answers.keys()
    assert bf16["accuracy"].keys() == numerics_of_kernel.FAMILIES.keys()
    rms = bf16["accuracy"]["ordinary"]["rms"]
    assert rms.keys() == {"out", "dq", "dk", "dv"}
    for errors in rms.values():
        kernel, rounded, casts = (errors[x] for x in ("kernel", "rounded", "casts"))
        assert len(kernel) == len(rounded) == len(casts) == numerics_of_kernel.SEEDS
        # One rounding errs by at most 2**-9 of an element, and casts add to it.
        assert all(2.0**-11 < x < 2.0**-9 for x in rounded)
        assert all(y < x < 2 * y for x, y in zip(kernel, rounded, strict=True))
    assert rms["out"]["kernel"] == pytest.approx(rms["out"]["casts"], rel=0.03)


def test_a_kernel_that_crashes_loses_the_answers_of_its_step_alone(record):
    crashing = of(record, "crashing")
    assert crashing["state"] == "done"
    bf16, fp16 = (crashing["dtypes"][x] for x in ("bf16", "fp16"))
    assert bf16["missing"].keys() == {"numerics", "orders"}
    assert all(x.startswith("ended: signal 6") for x in bf16["missing"].values())
    # The answers before the crash are kept.
    assert bf16["answers"]["p_normalised"]["value"] is True
    assert "accumulation" not in bf16["answers"]
    assert bf16["accuracy"]["ordinary"]["rms"]
    assert fp16["missing"] == {}
    assert fp16["answers"]["accumulation"]["value"] == "to nearest"


def test_a_kernel_that_raises_or_is_unknown_says_so(record):
    raising = "it raises on each problem: RuntimeError: not today"
    assert of(record, "raising")["state"].startswith(raising)
    assert of(record, "absent")["state"].startswith("not run: got 'absent'")


def test_no_cell_is_blank_and_missing_answers_say_why(record):
    for name, table in TABLES.items():
        rows = [x for x in table(record) if x.startswith("|")]
        assert not any("|  |" in x for x in rows), name
    sums = {row.split(" | ")[0][2:]: row for row in TABLES["sums"](record)[2:]}
    assert "bf16: ended; fp16: to nearest" in sums["my:crashing"]
    assert sums["my:raising"].count("not run") == len(numerics_table.SUMS)
    state = TABLES["run"](record)
    assert any("ended: signal 6" in row for row in state)
    assert any(row.endswith("| everything |") for row in state if "my:raising" in row)
    assert report(record)


def test_differences_from_the_reference_are_named(record):
    """A kernel whose P stays in float32, beside one that casts it, as the reference."""
    cast = of(record, "plain")
    whole = copy.deepcopy(cast)
    answers = whole["dtypes"]["bf16"]["answers"]
    answers["p_dtype_of_out"]["value"] = "fp32"
    answers["accumulation"] = {"value": None, "certainty": "undecided", "evidence": "nothing"}
    errors = whole["dtypes"]["bf16"]["accuracy"]["ordinary"]["rms"]["out"]
    errors["kernel"] = [x / 2 for x in errors["kernel"]]
    kernels = {"other": whole, numerics_table.REFERENCES[0]: cast}
    (row,) = TABLES["differences"]({"kernels": kernels})[2:]
    name, apart, beside, open_ = (x.strip() for x in row.strip("|").split("|"))
    assert (name, apart) == ("other", "P: fp32, not cast")
    assert beside.startswith("out 0.50, dq 1.00")
    assert re.fullmatch(r"additions|\d+ of 22 columns", open_)
    assert TABLES["forward"]({"kernels": kernels})[2].startswith("| sdpa-flash |")


def test_the_page_shows_a_gpu_before_a_cpu(tmp_path, monkeypatch):
    for place in ("cpu", "nvidia-h100", tables.RESULTS.name):
        (tmp_path / "results" / place).mkdir(parents=True)
        (tmp_path / "results" / place / "numerics.json").write_text(json.dumps(place))
        monkeypatch.setattr(tables, "ROOT", tmp_path)
        assert tables._numerics() == place


def test_without_time_each_answer_is_missing_for_want_of_time(file):
    began = time.monotonic()
    found = numerics.measured(f"{file}:plain", numerics.Clock(0.0, 1, 1))
    assert time.monotonic() - began < 30
    assert found["state"] == "no time"
    assert found["dtypes"] == {}
    rows = TABLES["forward"]({"kernels": {"my.py:plain": found}})
    assert rows[2].count("no time") == len(numerics_table.FORWARD)


def test_a_step_that_time_ends_or_that_never_began_is_missing():
    """The answers before the end are kept."""
    answer = {"word": "p_normalised", "value": True, "certainty": "shown", "evidence": "seen"}
    lines = [
        {"dtypes": ["bf16"], "declared": "nothing"},
        {"step": "accuracy bf16"},
        {"step": "numerics bf16"},
        {"dtype": "bf16", "answer": answer},
    ]
    found = numerics._record(lines, {}, "no time")
    assert found["dtypes"]["bf16"]["missing"] == {"numerics": "no time", "orders": "no time"}
    (row,) = TABLES["forward"]({"kernels": {"kernel": found}})[2:]
    assert row.count("no time") == len(numerics_table.FORWARD) - 1
    assert "| yes |" in row
    finished = numerics._record([*lines, {"step": "orders bf16"}, {"end": True}], {}, "done")
    assert finished["dtypes"]["bf16"]["missing"] == {}


def test_a_process_that_hangs_is_killed(file, tmp_path, monkeypatch):
    monkeypatch.setenv("SLEEPS", "1")
    began = time.monotonic()
    status, _ = numerics._process(f"{file}:plain", tmp_path / "lines.jsonl", 3.0, 1.0)
    assert status is None
    assert time.monotonic() - began < 60


def test_time_is_divided_among_the_kernels_that_are_left():
    clock = numerics.Clock(100.0, 4, 2)
    assert clock.share() == pytest.approx(50.0, abs=1)
    assert clock.share() == pytest.approx(100 / 1.5, abs=1)
    assert clock.share() == pytest.approx(100.0, abs=1)


def test_this_machine_runs_the_kernels_that_need_nothing_else():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    here = numerics.names_here(device)
    assert "sdpa-math" in here
    assert len({*here}) == len(here)
    for name in here:
        head = name.partition("/")[0]
        assert ":" in name or head in numerics_of_kernel.ALIASES or NAMED[head].missing() is None


@pytest.mark.parametrize(
    ("said", "short"),
    [
        ("4 blocks of 64 keys, in order; each of 64 keys one by one, in order", "64 > 1"),
        ("4 blocks of 64 rows, backwards; each of 4 blocks of 16 rows, in order; "
         "each of 8 rows at once", "64 backwards > 16 > 8 at once"),
        ("256 keys one by one, out of order", "1 out of order"),
        ("no equal blocks: 64 + 32 keys, in order", "64 + 32"),
    ],
)  # fmt: skip
def test_an_order_is_shown_by_the_widths_of_its_blocks(said, short):
    certainty = "undecided" if said.startswith("no") else "shown"
    answer = {"word": "order_of_out", "value": None, "certainty": certainty, "evidence": said}
    assert numerics_table._steps(answer) == short


def test_fp16_shows_no_block_of_all_its_terms():
    assert numerics_table._same_blocks("128 > 1", "1")
    assert not numerics_table._same_blocks("64 > 1", "1")
    assert not numerics_table._same_blocks("128 > 16", "1")
