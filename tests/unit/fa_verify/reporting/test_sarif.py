"""Findings as SARIF: the standard's requirements, and one result a guarantee and output."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from fa_verify.properties.kernels.subject import Subject
from fa_verify.reporting.sarif import document, place_of
from tests.unit.fa_verify.test_command import ACCURACY, ROOT, folder, run, write_kernels

__all__ = ["folder"]


def check_sarif(found: dict) -> None:
    """Assert the requirements of SARIF 2.1.0 and of code scanning on the parts that are written."""
    assert found["$schema"].endswith("sarif-2.1.0.json")
    assert found["version"] == "2.1.0"
    for ran in found["runs"]:
        driver = ran["tool"]["driver"]
        assert driver["name"]
        rules = [rule["id"] for rule in driver["rules"]]
        assert len(set(rules)) == len(rules)
        assert all(isinstance(x["executionSuccessful"], bool) for x in ran["invocations"])
        for result in ran["results"]:
            assert result["message"]["text"]
            assert result["level"] in ("none", "note", "warning", "error")
            assert rules[result["ruleIndex"]] == result["ruleId"]
            (place,) = (x["physicalLocation"] for x in result["locations"])
            assert place["region"]["startLine"] >= 1
            uri = place["artifactLocation"]["uri"]
            assert " " not in uri
            assert "\\" not in uri
            assert all(isinstance(x, str) for x in result["partialFingerprints"].values())


def failure(guarantee: str, output: str, message: str, size: str) -> dict[str, str]:
    return {"guarantee": guarantee, "output": output, "message": message, "size": size}


@pytest.fixture(scope="module")
def ran(tmp_path_factory) -> Path:
    """The folder of a run that failed, with its files."""
    folder = write_kernels(tmp_path_factory.mktemp("user"))
    done = run(
        folder, "check", "my.py:broken", "--sarif=found.sarif", "--junit=found.xml",
        *ACCURACY,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    return folder


def test_the_file_of_a_run_has_a_result_for_each_output(ran):
    found = json.loads((ran / "found.sarif").read_text())
    check_sarif(found)
    results = found["runs"][0]["results"]
    firsts = [x["message"]["text"].partition("\n")[0] for x in results]
    assert firsts.count("G1 accuracy: out of broken leaves the derived bound") == 1
    assert firsts.count("G1 accuracy: dv of broken leaves the derived bound") == 1
    assert "replay: fa-verify explain --kernel=my.py:broken '{" in results[0]["message"]["text"]
    place = results[0]["locations"][0]["physicalLocation"]
    assert place["artifactLocation"]["uri"] == "my.py"
    line = (ran / "my.py").read_text().splitlines()[place["region"]["startLine"] - 1]
    assert line.startswith("def broken(")


def test_the_tests_of_a_run_are_in_the_file_of_junit(ran):
    suite = ET.parse(ran / "found.xml").getroot()[0]
    assert suite.get("name") == "fa-verify"
    assert int(suite.get("failures")) > 0
    assert "G1 accuracy: out of broken" in suite.find("testcase/failure").text


def test_the_action_verifies_a_kernel_and_writes_its_files(folder, tmp_path):
    yaml = pytest.importorskip("yaml")
    action = yaml.safe_load((ROOT / "action.yml").read_text())
    install, verify = action["runs"]["steps"]
    assert "$GITHUB_ACTION_PATH" in install["run"]
    values = {
        **{name: str(x.get("default")) for name, x in action["inputs"].items()},
        "kernel": "my.py:broken",
        "options": "-- -n0 -k every_element_lies",
        "python": sys.executable,
        "output": str(tmp_path / "made"),
    }
    given = {
        name: re.sub(r"\$\{\{ inputs\.(\w+) \}\}", lambda found: values[found[1]], text)
        for name, text in verify["env"].items()
    }
    environment = {name: x for name, x in os.environ.items() if not name.startswith("PYTEST_")}
    environment |= {"PYTHONPATH": str(ROOT), "GITHUB_OUTPUT": str(tmp_path / "outputs"), **given}
    done = subprocess.run(
        ["bash", "-e", "-o", "pipefail", "-c", verify["run"]],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    assert {path.name for path in (tmp_path / "made").iterdir()} == {
        "fa-verify.sarif", "fa-verify.xml", "report.html", "report.json",
    }  # fmt: skip
    written = (tmp_path / "outputs").read_text().strip()
    assert written == f"sarif={tmp_path / 'made' / 'fa-verify.sarif'}"
    check_sarif(json.loads(Path(written.removeprefix("sarif=")).read_text()))


def test_the_simplest_failure_stands_for_its_group(tmp_path, monkeypatch):
    path = tmp_path / "a kernel.py"
    path.write_text("import x\n\nattention = x.f\n")
    monkeypatch.chdir(tmp_path)
    subject = Subject("attention", print, source="a kernel.py:attention")
    found = document(
        subject,
        [
            failure("G1 accuracy", "out", "long", '{"M":20}'),
            failure("G1 accuracy", "out", "short", "{}"),
            failure("failure", "", "died", ""),
        ],
        exit_status=1,
    )
    check_sarif(found)
    assert [x["message"]["text"] for x in found["runs"][0]["results"]] == [
        "short\n2 failures of this kind", "died",
    ]  # fmt: skip


def test_a_run_that_holds_or_ends_early_says_so():
    for status, successful in ((0, True), (1, True), (2, False), (3, False)):
        found = document(Subject("attention", print), [], status)
        check_sarif(found)
        assert found["runs"][0]["results"] == []
        assert found["runs"][0]["invocations"][0]["executionSuccessful"] is successful


def test_a_kernel_elsewhere_has_an_absolute_uri(tmp_path, monkeypatch):
    (tmp_path / "kernel.py").write_text("def other(): ...\n")
    monkeypatch.chdir("/")
    subject = Subject("attention", print, source="/no/such.py:attention")
    monkeypatch.chdir(tmp_path)
    assert place_of(subject) == ("file:///no/such.py", 1)
