"""Merges and caches are waived, counted, minimised, fuzzed and reported as attention is."""

from __future__ import annotations

import json
import re
import shlex

import pytest

from fa_verify.oracles.calls.codec import call_from_json
from fa_verify.oracles.problem import Problem
from fa_verify.properties.guarantees.claims import sequence
from fa_verify.properties.guarantees.compare import Violation
from fa_verify.properties.kernels.subject import Subject
from fa_verify.properties.kernels.supported import problems_of
from fa_verify.properties.running.tally import Tally
from fa_verify.properties.search.search import Runner, attack, draws
from tests.unit.fa_verify.test_command import run

MERGES = """
import torch
from fa_verify import attention_kernel


def merged(outs, lses, share=1.0):
    if not len(outs):
        return outs.new_zeros(outs.shape[1:]), lses.new_full(lses.shape[1:], -torch.inf)
    live = lses != -torch.inf
    m = torch.where(live.any(0), lses.amax(0), 0.0).detach()
    w = torch.where(live, (lses - m).exp(), 0.0)
    if len(outs) > 2:
        w = torch.cat([w[:2], w[2:] * share])
    some = live.any(0)
    safe = torch.where(some, w.sum(0), 1.0)
    out = (w[..., None] * torch.where(live[..., None], outs, 0.0)).sum(0) / safe[..., None]
    return out.to(outs.dtype), torch.where(some, m + safe.log(), -torch.inf)


@attention_kernel(states=True, dtypes=("fp32",), devices=("cpu",))
def merge(outs, lses):
    return merged(outs, lses)


@attention_kernel(states=True, dtypes=("fp32",), devices=("cpu",), backward=False)
def broken(outs, lses):
    return merged(outs, lses, 0.999)


@attention_kernel(states=True, dtypes=("fp32",), devices=("cpu",), backward=False)
def hanging(outs, lses):
    while len(outs) > 2:
        pass
    return merged(outs, lses)
"""
CACHES = """
import torch
from fa_verify import attention_kernel

DECODES = attention_kernel(
    cache=("contiguous",), one_query=True, masks=(), dtypes=("fp32",), p_dtype="fp32",
    p_normalised=True, devices=("cpu",), backward=False,
)


def attend(q, k_cache, v_cache, cache_seqlens, cache_batch_idx, sm_scale, past=1.0):
    outs = []
    for b, length in enumerate(cache_seqlens.tolist()):
        k, v = (
            x[cache_batch_idx[b], :length].transpose(0, 1).repeat_interleave(
                q.shape[1] // x.shape[2], 0
            )
            for x in (k_cache, v_cache)
        )
        p = torch.softmax(q[b] @ k.mT * sm_scale, -1)
        outs.append(torch.cat([p[..., :17], p[..., 17:] * past], -1) @ v)
    return torch.stack(outs) if outs else q.new_empty(*q.shape[:3], v_cache.shape[3])


@DECODES
def decode(q, k_cache, v_cache, *, cache_seqlens, cache_batch_idx, sm_scale):
    return attend(q, k_cache, v_cache, cache_seqlens, cache_batch_idx, sm_scale)


@DECODES
def broken(q, k_cache, v_cache, *, cache_seqlens, cache_batch_idx, sm_scale):
    return attend(q, k_cache, v_cache, cache_seqlens, cache_batch_idx, sm_scale, past=0.9)


@DECODES
def crashing(q, k_cache, v_cache, *, cache_seqlens, cache_batch_idx, sm_scale):
    if int(cache_seqlens.max()) > 17:
        import os
        os.abort()
    return attend(q, k_cache, v_cache, cache_seqlens, cache_batch_idx, sm_scale)
"""
# The checks of merges that run first, in one process.
FEW = ("--", "-n0", "-k", "fp32 and (accuracy or grouping) and not cache and not claim")


@pytest.fixture
def folder(tmp_path):
    """A user's folder with kernels that merge, and kernels of caches."""
    (tmp_path / "merges.py").write_text(MERGES)
    (tmp_path / "caches.py").write_text(CACHES)
    return tmp_path


def replayed(text: str) -> list[str]:
    """The words of the first replay line."""
    return shlex.split(re.findall(r"fa-verify (explain .*'\{.*\}')", text)[0])


def test_a_merge_has_findings_evidence_and_one_cause_in_every_report(folder):
    done = run(
        folder, "check", "merges.py:broken", "--json=found.jsonl", "--sarif=found.sarif", *FEW
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "FAILED  1 cause" in done.stdout
    assert re.search(r"^1  Problems with parts > 2 give wrong out, lse ", done.stdout, re.MULTILINE)
    assert "passes with parts=(1,1)" in done.stdout
    smallest = call_from_json(replayed(done.stdout)[-1])
    assert smallest.parts == (1, 1, 1)
    assert re.search(r"^\d+ distinct problems judged on all outputs", done.stdout, re.MULTILINE)
    line = f"verify(broken, problems=[call_from_json({smallest.to_json()!r})])"
    again = run(folder, "explain", "--kernel=merges.py:broken", line)
    assert again.returncode == 1
    assert "S1 merging: out of broken leaves the derived bound" in again.stdout
    records = [json.loads(line) for line in (folder / "found.jsonl").read_text().splitlines()]
    (end,) = [x for x in records if x["kind"] == "end"]
    assert end["judged"] > 0
    assert any(x["kind"] == "test" and x["findings"] for x in records)
    results = json.loads((folder / "found.sarif").read_text())["runs"][0]["results"]
    assert {x["ruleId"] for x in results} == {"S1-merging"}


def test_a_waiver_of_merged_states_matches(folder):
    (folder / "known").write_text("S1, *, the third part is lost\n")
    done = run(folder, "check", "merges.py:broken", "--waive=known", *FEW)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^\d+ x S1, \*: the third part is lost$", done.stdout, re.MULTILINE)


def test_a_merge_is_fuzzed_and_its_smallest_problem_kept(folder):
    done = run(folder, "check", "merges.py:broken", "--minutes=0.2", "--", "-n1")
    assert done.returncode == 1, done.stdout + done.stderr
    assert not re.search(r": 0 problems", done.stdout.rpartition("fuzzing")[2])
    kept = [json.loads(x.read_text()) for x in (folder / "fa-verify-problems").glob("*.json")]
    assert {x["guarantee"] for x in kept} <= {"S1 merging", "S2 conventions"}
    assert [1, 1, 1] in [x["problem"]["merge"].get("parts") for x in kept]
    # A later run replays them first.
    again = run(folder, "check", "merges.py:broken", "--", "-n0", "-k", "test_regression")
    assert again.returncode == 1, again.stdout + again.stderr


def test_a_right_merge_holds_where_it_is_fuzzed(folder):
    done = run(folder, "check", "merges.py:merge", "--minutes=0.1", "--", "-n1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^merges.py:merge  HOLDS  [1-9]", done.stdout, re.MULTILINE)


def test_one_fault_of_a_cache_is_one_cause_at_its_threshold(folder):
    checks = "fp32 and cache and (accuracy or many_keys or many)"
    done = run(folder, "check", "caches.py:broken", "--", "-n0", "-k", checks)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "FAILED  1 cause" in done.stdout
    assert "1  Problems with N > 17 give wrong out" in done.stdout
    smallest = call_from_json(replayed(done.stdout)[-1])
    assert (smallest.attention.N, smallest.seqlens) == (18, (18,))
    again = run(folder, *replayed(done.stdout))
    assert again.returncode == 1
    assert "G1 accuracy: out of broken leaves the derived bound" in again.stdout
    # The source of the suite is of no use to its user.
    assert "def test_replay" not in again.stdout
    assert "__tracebackhide__" not in again.stdout


DEATHS = {
    "caches.py:crashing": ("Problems with N > 17 end the process, which died of signal 6", "N=17"),
    "merges.py:hanging": ("Problems with parts > 2 do not return within ", "parts=(1,1)"),
}


@pytest.mark.parametrize("name", DEATHS)
def test_a_crash_or_hang_has_a_cause_and_a_line_that_replays_its_smallest_call(folder, name):
    checks = "fp32 and accuracy and not claim"
    words = ["--fa-problem-timeout=4"] if "hanging" in name else []
    done = run(folder, "check", name, "--", *words, "-n1", "-x", "-k", checks)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "between problems" not in done.stdout
    title, passing = DEATHS[name]
    assert re.search(rf"^1  {title}.*    explains 1 of 1 failure$", done.stdout, re.MULTILINE)
    assert f"passes with {passing}" in done.stdout.replace("seqlens_k=(17,)", "N=17")
    words = replayed(done.stdout)
    assert f"--kernel={name}" in words
    call = call_from_json(words[-1])
    if name.startswith("merges"):
        assert call.parts == (1, 1, 1)
    else:
        assert call.seqlens == (18,)


def test_a_wrong_call_that_a_check_makes_is_shown_with_its_own_sizes():
    def attend(q, k, v, *, mask, sm_scale):
        p = (q @ k.mT * sm_scale).softmax(3)
        if k.shape[2] > 17:
            p = p * 0.9
        return p @ v

    attend.dtypes = ("fp32",)
    attend.masks, attend.zero_sizes, attend.backward, attend.gqa = (), False, False, False
    attend.p_dtype, attend.p_normalised = "fp32", True
    subject = Subject.of(attend, "attend")
    # Calls of other lengths in between pass the threshold before drawn problems do.
    strategy = problems_of(subject, dtype="fp32", device="cpu", max_seqlen=16)
    with pytest.raises(Violation) as failed:
        attack(Runner(subject, Tally()), sequence, strategy, seed="0", settings=draws(20))
    finding = failed.value.findings[0]
    assert (finding.guarantee, finding.called) == ("G1 accuracy", None)
    assert isinstance(finding.problem, Problem)
    assert finding.problem.N == 18
