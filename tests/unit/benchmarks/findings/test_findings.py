"""Records of runs, the verdict of each guarantee, and FINDINGS.md."""

from __future__ import annotations

import ast
import copy
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.findings import __main__ as command
from benchmarks.findings.collecting import collected, recorded
from benchmarks.findings.document import document, verdict
from benchmarks.findings.environment import slug, versions
from benchmarks.findings.results import FILE, OTHERS, read, read_all, write
from benchmarks.findings.unpromised import unpromised
from fa_verify.oracles.problem import Problem
from fa_verify.properties.kernels.subject import Subject
from fa_verify.reporting.recording import ROOT, plain

# The name of a test, and the guarantee that it asks for.
ACCURACY = ("test_every_element", "G1")
HIDDEN = ("test_hidden_positions", "G5")
REGRESSION = ("test_regression", None)
# Tests that ask for every guarantee.
EVERY = {
    "test_a_mask_on_a_cache_keeps_guarantees", "test_a_problem_that_kills_faults_holds",
    "test_bits_do_not_depend_on_what_a_scheduler_may_read",
    "test_pooled_probabilities_keep_every_guarantee", "test_problem", "test_regression",
    "test_replay",
}  # fmt: skip


def test_every_conformance_test_asks_for_a_guarantee():
    for path in (ROOT / "tests" / "conformance").glob("test_*.py"):
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.FunctionDef) or not node.name.startswith("test_"):
                continue
            marked = any("mark.asks(" in ast.unparse(x) for x in node.decorator_list)
            rows = "claim" in {argument.arg for argument in node.args.args}
            assert marked + (rows and "mark.asks(" in text) + (node.name in EVERY) == 1, node.name


def of_test(
    test: tuple[str, str | None], outcome: str, *findings: tuple[str, str, str], said: str = ""
) -> dict:
    """A record of a test; findings are (guarantee, message, problem)."""
    name, asks = test
    return {
        "kind": "test",
        "test": f"tests/conformance/test_x.py::{name}[fp16]",
        "asks": asks,
        "outcome": outcome,
        "seconds": 0.5,
        "said": said,
        "findings": [
            dict(zip(("guarantee", "message", "problem"), x, strict=True)) for x in findings
        ],
    }


SUBJECT = {
    "kind": "subject", "name": "it", "declares": {"masks": ["causal"]},
    "declared": "masks=('causal',)", "profile": "dev",
}  # fmt: skip
END = {
    "kind": "end", "exit": 1, "judged": 7, "out_of_range": 1, "refusals": {"not today": 2},
    "worst": {"out fp16": 0.5, "out bf16": 0.75, "dq fp16": 0.125},
}  # fmt: skip


def guarantees_of(*tests: dict) -> dict:
    return collected([SUBJECT, *tests, END])["guarantees"]


def test_a_passed_test_counts_for_the_guarantee_that_it_asks_for():
    found = guarantees_of(of_test(ACCURACY, "passed"), of_test(HIDDEN, "passed"))
    assert {key: x["passed"] for key, x in found.items()} == {"G1": 1, "G5": 1}


def test_a_failure_counts_for_the_guarantee_that_was_found_broken():
    found = guarantees_of(of_test(HIDDEN, "failed", ("G1 accuracy", "m", "{}")))
    assert (found["G1"]["failed"], found["G5"]["failed"]) == (1, 0)
    assert verdict(found["G1"], {}) == "**fails**"
    assert verdict(found["G5"], {}) == "*undecided*"


def test_a_failure_without_findings_counts_for_what_was_asked():
    found = guarantees_of(of_test(HIDDEN, "failed", said="only 1 problems were judged"))
    assert found["G5"]["failed"] == 1
    assert found["G5"]["findings"][0]["message"] == "only 1 problems were judged"


def test_a_crash_leaves_undecided_what_was_asked():
    found = guarantees_of(of_test(HIDDEN, "crashed", said="died of signal 11"))
    assert found["exception"]["findings"][0]["message"] == "died of signal 11"
    assert verdict(found["G5"], {}) == "*undecided*"


def test_one_test_with_several_findings_of_a_guarantee_fails_once():
    both = (("G5 hidden positions", "a", "{}"), ("G5 hidden positions", "b", "{}"))
    found = guarantees_of(of_test(HIDDEN, "failed", *both))
    assert found["G5"]["failed"] == 1
    assert len(found["G5"]["findings"]) == 2


def test_of_findings_that_say_the_same_the_smallest_problem_stays():
    said = "G1 accuracy: out of it leaves the bound\n  worst at m={}\n  replay: {}"
    found = guarantees_of(
        *(
            of_test(ACCURACY, "failed", ("G1 accuracy", said.format(i, problem), problem))
            for i, problem in enumerate(['{"M":222}', '{"M":2}', '{"M":22}'])
        )
    )
    assert [x["problem"] for x in found["G1"]["findings"]] == ['{"M":2}']
    assert found["G1"]["failed"] == 3


def test_different_exceptions_are_different_findings():
    raised = "exception: it raises an exception\n  {}: no\n  replay: x"
    found = guarantees_of(
        *(
            of_test(ACCURACY, "failed", ("exception", raised.format(error), "{}"))
            for error in ("KeyError", "TypeError", "KeyError")
        )
    )
    assert len(found["exception"]["findings"]) == 2


def test_a_regression_that_passes_says_nothing_of_one_guarantee():
    assert guarantees_of(of_test(REGRESSION, "passed")) == {}


@pytest.mark.parametrize(
    ("tests", "word"),
    [
        (["passed", "passed"], "holds"),
        (["passed", "failed"], "**fails**"),
        (["passed", "skipped: it declares masks=()"], "holds"),
        (["skipped: it declares masks=()"], "unsupported"),
        (["skipped: not today"], "unsupported"),
        (["skipped: needs tensors of 4 GiB each"], "not tested"),
    ],
)
def test_the_verdict_is_of_all_tests(tests, word):
    records = [of_test(ACCURACY, x.partition(": ")[0], said=x.partition(": ")[2]) for x in tests]
    assert verdict(guarantees_of(*records)["G1"], END["refusals"]) == word


def test_a_guarantee_without_outcomes_is_reported_as_not_asked():
    assert verdict(None, {}) == "not tested"


def test_a_record_that_was_cut_off_is_read_up_to_there(tmp_path):
    path = tmp_path / "records"
    whole = "".join(json.dumps(x) + "\n" for x in (SUBJECT, of_test(ACCURACY, "passed")))
    path.write_text(whole + '{"kind": "te')
    assert collected(recorded(path))["tests"] == 1
    assert recorded(tmp_path / "none") == []


def subject(*tests: dict, ended: str = "finished", **changed: object) -> dict:
    """The entry of a subject in a file of results."""
    return {
        **collected([SUBJECT, *tests, END]),
        "about": "a kernel",
        "versions": {"torch": "2.11"},
        "ended": ended,
        "said": "",
        "never_promised": {},
        **changed,
    }


def result(**subjects: dict) -> dict:
    return {"version": 1, "device": "A GPU", "missing": {"flex": "no GPU"}, "subjects": subjects}


def test_the_document_has_guarantees_by_kernels():
    first = subject(of_test(ACCURACY, "passed"), of_test(HIDDEN, "failed", ("G5 x", "why", "{}")))
    second = subject(of_test(ACCURACY, "failed", ("G1 x", "why", "{}")))
    lines = document([result(first=first, second=second)]).splitlines()
    assert "| guarantee | first | second |" in lines
    assert "| G1 accuracy | holds | **fails** |" in lines
    assert "| G5 hidden positions | **fails** | not tested |" in lines


def test_the_document_quotes_the_finding_with_its_replay_line():
    message = "G5 hidden positions: out of it\n  worst\n  replay: pytest --fa-replay='{}'"
    it = subject(of_test(HIDDEN, "failed", ("G5 hidden positions", message, "{}")))
    said = document([result(it=it)])
    assert "".join(f"    {line}\n" for line in message.splitlines()) in said


def test_the_document_says_what_is_declared_refused_and_never_promised():
    said = document([result(it=subject(of_test(HIDDEN, "skipped", said="it declares masks=()")))])
    assert "\n- declares masks=('causal',)\n" in said
    assert "\n- refuses: not today (2 problems)\n" in said
    assert "\n- worst error/bound: out 0.750 (bf16), dq 0.125 (fp16)\n" in said
    assert "\n- never promised: not tested with sliding windows, sequence lengths" in said
    assert "\n- G5 hidden positions is unsupported: it declares masks=()\n" in said
    assert "\n- flex was not run: no GPU\n" in said


def test_the_document_says_which_run_did_not_finish_and_what_it_said():
    it = subject(of_test(ACCURACY, "passed"), ended="died of signal 11", said="Segmentation fault")
    said = document([result(it=it)])
    assert "| G1 accuracy | holds\\* |" in said
    assert "| G3 empty rows | not reached\\* |" in said
    assert "| bias of errors |" not in said
    assert "in an incomplete run: it did not finish" in said
    assert "**The run did not finish: died of signal 11.**" in said
    assert "\n    Segmentation fault\n" in said


def test_the_document_says_what_fails_and_was_never_promised():
    failed = of_test(HIDDEN, "failed", ("G5 hidden positions", "message", "{}"))
    why = "nothing is said of hidden keys"
    it, other = subject(failed, never_promised={"G5": why}), subject(failed)
    said = document([result(it=it, other=other)])
    assert "| G5 hidden positions | **fails** † | **fails** |" in said
    assert f"**G5 hidden positions fails** in 1 of 1 tests, which it never promised: {why}." in said
    assert "**G5 hidden positions fails** in 1 of 1 tests.\n" in said


@pytest.mark.parametrize(
    ("declares", "words"),
    [
        ({"dirty": ["zero", "noise", "max"]}, "NaN and Inf in padding may reach valid results"),
        ({"empty_lse": 0}, "the log-sum-exp of a row that sees no key is 0, not -inf"),
        ({"causal_alignment": "top-left"}, "causal masks start at the top left"),
        ({"returns_lse": False}, "not tested with a log-sum-exp"),
        ({"gqa": False, "m_ne_n": False}, "not tested with grouped heads, M other than N"),
        ({"masks": ["causal", "window"]}, "not tested with sequence lengths (so G4"),
        ({"layouts": ["bhsd"]}, "not tested with layouts other than bhsd"),
        ({"flushes": True}, "subnormal numbers may be flushed to 0"),
        ({"backward_reads": []}, "gradients are not judged given the forward"),
        (
            {"bitwise": ["G4", "G5", "G8"]},
            "not promised bitwise: G9, G10; compared within the bound",
        ),
    ],
)
def test_missing_promises_are_listed_in_words(declares, words):
    assert any(words in clause for clause in unpromised(declares))


def test_declarations_that_are_damaged_are_taken_for_none():
    assert unpromised({"masks": 3, "layouts": 3, "dirty": 3, "bitwise": 3})


def test_nothing_is_taken_away_by_promising_everything():
    every = {"bitwise": ["G4", "G5", "G8", "G9", "G10"], "backward_reads": ["out", "lse"]}
    assert unpromised({**every, "returns_lse": True}) == []


def test_results_are_read_as_they_were_written(tmp_path):
    it = subject(of_test(ACCURACY, "passed"))
    path = write(tmp_path, "NVIDIA H200", {"it": it}, {"flex": "no GPU"})
    assert path == tmp_path / "nvidia-h200" / FILE
    assert read(path)["subjects"]["it"] == json.loads(json.dumps(it))
    assert read(path)["missing"] == {"flex": "no GPU"}


def test_other_kernels_results_stay(tmp_path):
    one, other = subject(of_test(ACCURACY, "passed")), subject(of_test(HIDDEN, "passed"))
    write(tmp_path, "A GPU", {"one": one, "other": one}, {})
    path = write(tmp_path, "A GPU", {"other": other}, {"one": "no GPU"})
    assert read(path)["subjects"] == {"one": one, "other": other}
    assert read(path)["missing"] == {}


def test_kernels_stand_in_the_order_of_their_names_list(tmp_path):
    it = subject(of_test(ACCURACY, "passed"))
    write(tmp_path, "A GPU", {"other": it, "flex": it, "ours": it}, {})
    path = write(tmp_path, "A GPU", {"sdpa-math": it}, {})
    assert [*read(path)["subjects"]] == ["ours", "sdpa-math", "flex", "other"]


def damaged(path: Path, *keys: object, value: object) -> None:
    """Replaces or removes a value in a file of results."""
    content = json.loads(path.read_text())
    inner = content
    for key in keys[:-1]:
        inner = inner[key]
    if value is None:
        del inner[keys[-1]]
    else:
        inner[keys[-1]] = value
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("keys", "value", "says"),
    [
        (["version"], 99, "has version 99; this suite reads version 1"),
        (["device"], None, "is damaged: it has no 'device'"),
        (["subjects"], [], r"is damaged: .subjects is \[\]; needs dict"),
        (["subjects", "it", "tests"], "3", "is damaged: .subjects.it.tests is '3'; needs int"),
        (["subjects", "it", "refusals", "x"], "3", "refusals.x is '3'; needs int"),
        (["subjects", "it", "guarantees", "G1", "failed"], None, "G1 has no 'failed'"),
        (
            ["subjects", "it", "guarantees", "G1", "findings"],
            [3],
            r"findings\[0\] is 3; needs dict",
        ),
    ],
)
def test_a_damaged_file_is_named_with_what_is_wrong(tmp_path, keys, value, says):
    path = write(tmp_path, "A GPU", {"it": subject(of_test(ACCURACY, "passed"))}, {})
    damaged(path, *keys, value=value)
    with pytest.raises(ValueError, match=f"^{path} .*{says}"):
        read(path)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '"x"', "\udcff"])
def test_a_file_that_holds_no_results_is_named(tmp_path, text):
    path = tmp_path / FILE
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ValueError, match=f"^{path} "):
        read(path)


def test_a_file_that_cannot_be_read_is_not_overwritten(tmp_path, capsys):
    path = tmp_path / slug(command.device_name()) / FILE
    path.parent.mkdir()
    path.write_text("precious")
    assert command.main(["sdpa-math", "--results", str(tmp_path)]) == 1
    assert path.read_text() == "precious"
    assert str(path) in capsys.readouterr().err


def test_the_document_is_made_of_the_files_that_can_be_read(tmp_path, capsys):
    results, made = tmp_path / "results", tmp_path / "FINDINGS.md"
    write(results, "A GPU", {"it": subject(of_test(ACCURACY, "passed"))}, {})
    (results / "broken").mkdir()
    (results / "broken" / FILE).write_text("{")
    arguments = ["--document-only", "--results", str(results), "--document", str(made)]
    assert command.main(arguments) == 1
    assert "## A GPU" in made.read_text()
    assert "- results/broken/findings.json cannot be read: " in made.read_text()
    assert "results/broken/findings.json cannot be read" in capsys.readouterr().err


def test_the_document_in_the_repository_is_what_the_results_say():
    made, bad = read_all(ROOT / "results")
    assert bad == []
    assert (ROOT / "FINDINGS.md").read_text(encoding="utf-8") == document(
        made, others=(ROOT / "results" / OTHERS).read_text(encoding="utf-8")
    )


def test_the_section_on_other_repositories_stands_last(tmp_path):
    results, made = tmp_path / "results", tmp_path / "FINDINGS.md"
    write(results, "A GPU", {"it": subject(of_test(ACCURACY, "passed"))}, {})
    (results / OTHERS).write_text("## Others\n")
    arguments = ["--document-only", "--results", str(results), "--document", str(made)]
    assert command.main(arguments) == 0
    assert made.read_text().endswith("\n\n## Others\n")


def test_the_document_is_a_function_of_the_results_alone():
    given = [result(it=subject(of_test(HIDDEN, "failed", ("G5 x", "why", "{}"))))]
    before = copy.deepcopy(given)
    assert document(given) == document(given)
    assert given == before


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("NVIDIA H200", "nvidia-h200"),
        ("Intel(R) Xeon(R) CPU @ 2.60GHz", "intel-xeon-cpu-2.60ghz"),
        ("../etc", "etc"),
        ("", "device"),
    ],
)
def test_a_device_has_a_folder(name, folder):
    assert slug(name).strip(".-") == folder


def test_versions_are_of_what_is_installed():
    found = versions(["pytest", "no-such-package"])
    assert found["pytest"] == pytest.__version__
    assert found["no-such-package"] == "none"


def test_messages_hold_no_folders_of_this_machine(monkeypatch):
    monkeypatch.setattr(sys, "path", ["", ".", *sys.path, "/away/wheels"])
    assert plain("(/away/wheels/package/ops.py, line 3)") == "(package/ops.py, line 3)"
    assert plain("ratio ./. or 1/2") == "ratio ./. or 1/2"
    path = "fa_verify/adapters/sdpa.py"
    assert plain(f"({ROOT}/{path}, line 3)") == f"({path}, line 3)"


def test_long_messages_are_cut():
    assert plain("\n".join(map(str, range(100)))).splitlines()[-1] == "... (88 more lines)"


def test_declarations_are_plain_values():
    def attention(q, k, v, *, mask, sm_scale):
        return q

    attention.masks = ("causal",)
    attention.configs = {"a": {"dots": "tf32"}}
    attention.tiles = lambda problem: (16, 16)
    declared = Subject.of(attention, "f").declarations()
    assert json.loads(json.dumps(declared)) == {
        "masks": ["causal"],
        "configs": {"a": {"dots": "tf32"}},
    }


def test_an_unknown_kernel_is_refused_before_anything_runs(capsys):
    with pytest.raises(SystemExit):
        command.main(["spda-math"])
    assert "(did you mean 'sdpa-math'?)" in capsys.readouterr().err


def test_options_after_two_dashes_go_to_pytest_and_are_recorded(tmp_path, monkeypatch):
    asked = {}

    def run(kernel, **options):
        asked.update(options)
        return subject(of_test(ACCURACY, "passed"))

    monkeypatch.setattr(command, "conformance_of", run)
    folder, made = str(tmp_path / "r"), tmp_path / "F.md"
    options = ["--profile", "gate", "--results", folder, "--document", str(made)]
    assert command.main(["sdpa-math", *options, "--", "-k", "x or y"]) == 0
    assert (asked["profile"], asked["options"]) == ("gate", ["-k", "x or y"])
    assert "; profile gate with -k 'x or y', " in made.read_text()


def test_a_kernel_that_is_not_here_is_named_and_fails_the_command(tmp_path, monkeypatch, capsys):
    gone = SimpleNamespace(missing=lambda: "needs a CUDA GPU; none is visible")
    monkeypatch.setitem(command.NAMED, "flex", gone)
    made = tmp_path / "F.md"
    arguments = ["flex", "--results", str(tmp_path / "r"), "--document", str(made)]
    assert command.main(arguments) == 1
    assert "flex: unavailable, needs a CUDA GPU" in capsys.readouterr().out


def test_a_problem_is_kept_as_it_can_be_replayed():
    problem = Problem(M=3).to_json()
    found = guarantees_of(of_test(ACCURACY, "failed", ("G1 accuracy", "m", problem)))
    assert Problem.from_json(found["G1"]["findings"][0]["problem"]) == Problem(M=3)
