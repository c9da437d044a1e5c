"""The command fa-verify probe: its output, its files and its exit statuses."""

from __future__ import annotations

import json

import pytest

from fa_verify.__main__ import main
from fa_verify.probing.answers import Answer, lines

KERNEL = """
import torch
from fa_verify import attention_kernel


@attention_kernel(
    p_normalised=True, group_sum="dtype", dtypes=("bf16", "fp32"), masks=("causal",)
)
def attention(q, k, v, *, mask, sm_scale):
    if q.dtype in (torch.float64, torch.float16) or mask.seqlens_k is not None:
        raise NotImplementedError("sequence lengths, or a dtype")
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, 1).float() for x in (k, v))
    seen = mask.dense(*q.shape[:3], k.shape[2], device=q.device)
    scores = (q.float() @ k.mT * sm_scale).masked_fill(~seen, float("-inf"))
    return (torch.softmax(scores, -1).to(q.dtype).float() @ v).to(q.dtype)


@attention_kernel(dtypes=("fp16", "fp32"))
def promising(q, k, v, *, mask, sm_scale):
    return attention(q, k, v, mask=mask, sm_scale=sm_scale)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("user")
    (folder / "my.py").write_text(KERNEL)
    return folder


def test_answers_are_printed_written_and_drawn(folder, capsys):
    arguments = [f"--json={folder}/found.json", f"--pictures={folder}/pictures"]
    assert main(["probe", f"{folder}/my.py:attention", *arguments]) == 0
    printed = capsys.readouterr().out
    assert "no declaration is refuted" in printed
    assert "out along the keys, bf16: " in printed
    record = json.loads((folder / "found.json").read_text())
    assert record["declarations"]["dtypes"] == ["bf16", "fp32"]
    assert record["declarations"]["p_normalised"] is True
    assert {x["certainty"] for x in record["answers"]} == {"shown", "tried", "undecided"}
    assert record["sums"][0]["sum"] == "out"
    assert (folder / "pictures" / "out-along-keys-bf16.svg").read_text().startswith("<svg")


def test_the_kernel_is_the_one_that_the_checks_see(folder, monkeypatch, capsys):
    """Triton's tutorial has one configuration under pytest."""
    (folder / "other.py").write_text(
        f"{KERNEL}\nimport os\nif 'PYTEST_VERSION' not in os.environ: del attention\n"
    )
    monkeypatch.delenv("PYTEST_VERSION")
    assert main(["probe", f"{folder}/other.py:attention"]) == 0
    assert "no declaration is refuted" in capsys.readouterr().out


def test_an_experiment_is_run_again_by_its_line(folder, capsys):
    line = (
        '{"experiment":"weights","problem":'
        '{"version":1,"B":2,"M":16,"N":16,"dtype":"bf16","sm_scale":0.3}}'
    )
    assert main(["probe", f"{folder}/my.py:attention", f"--replay={line}"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("got ")
    fits = [x for x in printed if x.startswith("fits")]
    assert [x.partition(" if ")[2] for x in fits] == [
        "P normalised, then cast, l of P before the cast"
    ]


def test_a_refuted_declaration_has_a_status(folder, capsys):
    assert main(["probe", f"{folder}/my.py:promising"]) == 1
    assert "refuted: promising declares dtypes=('fp16', 'fp32')" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["no.py:attention"], ["my.py:attention", "--replay={}"]])
def test_wrong_usage_has_a_status(folder, arguments, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    assert main(["probe", *arguments]) == 2
    assert "fa-verify probe: " in capsys.readouterr().err


def test_an_undecided_answer_has_no_value():
    with pytest.raises(ValueError, match="needs None"):
        Answer("dots", "tf32", "undecided", "seen")
    with pytest.raises(ValueError, match="needs one of"):
        Answer("dots", "tf32", "sure", "seen")
    assert lines([Answer("dots", None, "undecided", "seen", "{}")]) == [
        "dots  ?  (undecided) seen", "        {}",
    ]  # fmt: skip
