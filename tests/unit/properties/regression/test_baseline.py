"""The file of a baseline: it is read as written, and damaged files are refused by name."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.problem import Problem
from fa_verify.properties.regression.baseline import Baseline, Entry, Environment
from fa_verify.properties.regression.compiled_kernels import Resources

HERE = Environment("NVIDIA H200", "2.11.0", "3.6.0")
ENTRIES = (
    Entry(Problem(M=3), "G1", "fp32", {"out": (0.5, 0.125), "lse": (0.25, 0.0625)}),
    Entry(Problem(M=4, dtype="bf16", mask=Mask(causal=True)), "rms", "bf16", {"dq": (1e-30, 0.0)}),
)
BASELINE = Baseline(
    "flash_attention",
    HERE,
    ENTRIES,
    {"forward_kernel(bf16) BLOCK_M=64": Resources(128, 0, 65536)},
    {"1x4096x32x128 bf16 causal forward": (1.25, 1.5)},
)


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "baselines" / "h200.json"
    BASELINE.write(path)
    return path


def test_a_baseline_is_read_as_it_was_written(path):
    assert Baseline.read(path) == BASELINE


OLD_NAME = "delta_kernel(bf16 fp32 i32) BLOCK_M=32 HAS_DLSE=False PACKED=True"


@pytest.mark.parametrize(
    ("subject", "name"),
    [
        ("flash_attention", "bwd_preprocess_kernel(bf16 fp32 i32) BLOCK_M=32 VARLEN=True"),
        ("other", OLD_NAME),
    ],
)
def test_version_1_has_the_kernels_of_flash_attention_by_their_former_names(
    subject, name, tmp_path
):
    taken = Resources(128, 0, 65536)
    path = tmp_path / "old.json"
    Baseline(subject, HERE, (), {OLD_NAME: taken}).write(path)
    path.write_text(path.read_text().replace('"version": 2', '"version": 1'))
    assert Baseline.read(path).kernels == {name: taken}


def test_kernels_of_version_1_that_are_one_today_have_the_most_that_any_took(tmp_path):
    path = tmp_path / "old.json"
    other = OLD_NAME.replace("HAS_DLSE=False", "HAS_DLSE=True")
    Baseline(
        "flash_attention", HERE, (), {OLD_NAME: Resources(32, 2, 512), other: Resources(48, 0, 512)}
    ).write(path)
    path.write_text(path.read_text().replace('"version": 2', '"version": 1'))
    assert [*Baseline.read(path).kernels.values()] == [Resources(48, 2, 512)]


def test_the_committed_baseline_names_kernels_and_constants_that_exist():
    pytest.importorskip("triton")
    from fa_kernels.kernels.hopper import backward, dq, forward
    from fa_kernels.kernels.portable import combine
    from fa_kernels.launch import portable

    kernels = {
        name: kernel
        for module in (portable, combine, backward, dq, forward)
        for name, kernel in vars(module).items()
        if name.endswith("_kernel")
    }
    read = Baseline.read(Path(__file__).parents[4] / "baselines" / "h200.json")
    assert len(read.kernels) == 287
    for name in read.kernels:
        function, _, constants = name.partition("(")
        names = [word.partition("=")[0] for word in constants.split(")")[1].split()]
        order = [x for x in kernels[function].arg_names if x in names]
        assert names == order, name


def test_a_problem_a_kernel_and_a_timed_pass_have_a_line_each(path):
    text = path.read_text()
    assert json.loads(text)["device"] == "NVIDIA H200"
    for word in ('"M":3', '"M":4', "forward_kernel", "causal forward"):
        (line,) = [line for line in text.splitlines() if word in line]
        assert json.loads(
            "{" + line.strip().rstrip(",") + "}" if line[2] == '"' else line.strip(" ,")
        )


def test_numbers_keep_five_digits(tmp_path):
    entry = Entry(Problem(), "G1", "fp32", {"out": (0.123456789, 1.23456789e-7)})
    path = tmp_path / "b.json"
    Baseline("f", HERE, (entry,)).write(path)
    assert "[0.12346,1.2346e-07]" in path.read_text()


def test_a_file_that_cannot_be_written_leaves_what_was_there(path, monkeypatch):
    before = path.read_text()

    def fails(source, target):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fails)
    with pytest.raises(OSError, match="disk full"):
        Baseline("other", HERE, ENTRIES).write(path)
    assert path.read_text() == before
    assert [x.name for x in path.parent.iterdir()] == [path.name]


def test_differences_of_environments_name_both():
    other = Environment("NVIDIA H200", "2.12.0", "3.7.0")
    assert HERE.differences(other) == ["torch 2.11.0, here 2.12.0", "Triton 3.6.0, here 3.7.0"]
    assert HERE.differences(HERE) == []
    elsewhere = Environment("NVIDIA H100", "2.11.0", "3.6.0")
    assert HERE.differences(elsewhere) == ["device NVIDIA H200, here NVIDIA H100"]


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"none\.json cannot be read: No such file"):
        Baseline.read(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("{", "", "Extra data"),
        ('"version": 2,\n"subject"', '"version": 9,\n"subject"', "version is 9; this suite reads"),
        ('"device": "NVIDIA H200"', '"device": 3', "device is '3'; needs a JSON string"),
        ('"torch": "2.11.0",\n', "", "torch is missing"),
        ('"M":3', '"M":"three"', r"problems\[0\]: problem is malformed: M is 'three'"),
        ('"M":3', '"mask":{"type":"os.system"}', r"problems\[0\]: mask type 'os.system' is not"),
        ('"check":"rms"', '"check":null', r"problems\[1\]\.check is 'None'; needs a JSON string"),
        ('"out":[0.5,', '"output":[0.5,', r"problems\[0\]\.errors has \['output'\]; needs some of"),
        ("0.125]", "0.125,1]", r"problems\[0\]\.errors is .*; needs two numbers for each"),
        (
            "[0.5,0.125]",
            "[NaN,0.125]",
            r"problems\[0\]\.errors\.out is .*; needs 0 or more numbers",
        ),
        ("[0.5,0.125]", "[-1,0.125]", r"problems\[0\]\.errors\.out is .*; needs 0 or more numbers"),
        ("[0.5,0.125]", '"0.5"', r"problems\[0\]\.errors\.out is '0.5'; needs a JSON array"),
        ('"spills":0', '"spills":"few"', r"kernels\[.*\]\.spills is 'few'; needs a JSON integer"),
        ("[1.25,1.5]", "[1.25]", r"speed\[.*\] is .*; needs 2 or more numbers >= 0"),
        ('"problems": [', '"problems": 7, "was": [', "problems is '7'; needs a JSON array"),
    ],
)
def test_a_damaged_file_is_refused_by_name_and_place(path, old, new, says):
    text = path.read_text()
    assert text.count(old) >= 1
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(ValueError, match=f"^{re.escape(str(path))} is damaged: .*{says}"):
        Baseline.read(path)


@pytest.mark.parametrize("text", ["", "7", "[]", "null", "[" * 100_000, "\x00"])
def test_what_is_no_baseline_at_all_is_refused(tmp_path, text):
    path = tmp_path / "b.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"b\.json is damaged"):
        Baseline.read(path)
