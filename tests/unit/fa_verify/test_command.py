"""The command fa-verify: its options, its exit statuses, and what it says of a machine."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from fa_verify import __main__ as command
from fa_verify.adapters.registry import NAMED

ROOT = Path(__file__).parents[3]
REPLAY = '{"version":1,"M":2}'
KERNELS = """
import os
import signal

import torch
from fa_verify import attention_kernel

DECLARED = attention_kernel(
    p_dtype="fp32", p_normalised=True, dtypes=("fp32",), masks=(), gqa=False, zero_sizes=False,
    devices=("cpu",),
)


@DECLARED
def attention(q, k, v, *, mask, sm_scale):
    return torch.softmax(q @ k.mT * sm_scale, -1) @ v


@DECLARED
def broken(q, k, v, *, mask, sm_scale):
    return attention(q, k, v, mask=mask, sm_scale=sm_scale) * 1.01


def undeclared(q, k, v, *, mask, sm_scale):
    if mask != type(mask)() or q.dtype != torch.float32 or 0 in (q.shape[2], k.shape[2]):
        raise NotImplementedError("masks, dtypes and sizes of 0")
    return torch.softmax(q @ k.mT * sm_scale, -1) @ v


def always_causal(q, k, v, *, mask, sm_scale):
    M, N = q.shape[2], k.shape[2]
    if (q.dtype, q.shape[1], v.shape[3]) != (torch.float32, k.shape[1], q.shape[3]) or 0 in (M, N):
        raise NotImplementedError("dtypes, groups and sizes of 0")
    if M > N:
        raise NotImplementedError("rows without a key")
    rows, keys = (torch.arange(size, device=q.device) for size in (M, N))
    seen = keys <= rows[:, None] + N - M
    scores = (q @ k.mT * sm_scale).masked_fill(~seen, -torch.inf)
    return torch.softmax(scores, -1).masked_fill(~seen, 0) @ v


def old(q, k, v, *, mask, sm_scale):
    raise RuntimeError("Block pointers have been removed")


def undeclared_and_wrong(q, k, v, *, mask, sm_scale):
    return undeclared(q, k, v, mask=mask, sm_scale=sm_scale) * 1.01


def nan(q, k, v, *, mask, sm_scale):
    seen = mask.dense(*q.shape[:3], k.shape[2], device=q.device)
    return torch.softmax((q @ k.mT * sm_scale).masked_fill(~seen, -torch.inf), -1) @ v


def hanging(q, k, v, *, mask, sm_scale):
    while k.shape[2] > 20:
        pass
    return attention(q, k, v, mask=mask, sm_scale=sm_scale)


@DECLARED
def on_a_gpu(q, k, v, *, mask, sm_scale):
    if k.shape[2] > 20:
        torch.cuda.current_device()
    return attention(q, k, v, mask=mask, sm_scale=sm_scale)


def crashing(q, k, v, *, mask, sm_scale):
    if k.shape[2] > 20:
        os.kill(os.getpid(), signal.SIGSEGV)
    return attention(q, k, v, mask=mask, sm_scale=sm_scale)


@attention_kernel(
    p_dtype="fp32", p_normalised=True, dtypes=("fp32",), masks=(), gqa=False, layouts=("bhsd",),
    devices=("cpu",),
)
def dense(q, k, v, *, mask, sm_scale):
    return torch.softmax(q @ k.mT * sm_scale, -1) @ v


@DECLARED
def without_a_gradient(q, k, v, *, mask, sm_scale):
    return attention(q, k, v, mask=mask, sm_scale=sm_scale).detach()
"""
# Few problems of one test.
ACCURACY = (
    "--", "-n0", "--hypothesis-profile=dev",
    "-k", "every_element_lies_within_the_derived_bound",
)  # fmt: skip


def write_kernels(folder: Path) -> Path:
    """Write a user's kernels, and a configuration of pytest that would stop every run."""
    (folder / "my.py").write_text(KERNELS)
    (folder / "pytest.ini").write_text("[pytest]\naddopts = --no-such-option\n")
    (folder / "conftest.py").write_text("raise RuntimeError('loaded')\n")
    return folder


@pytest.fixture
def folder(tmp_path) -> Path:
    """A user's folder."""
    return write_kernels(tmp_path)


def run(folder: Path, *words: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own; ``path`` is a folder of modules before ours."""
    environment = {name: x for name, x in os.environ.items() if not name.startswith("PYTEST_")}
    return subprocess.run(
        [sys.executable, "-m", "fa_verify", *words],
        cwd=folder,
        env=environment | {
            "PYTHONPATH": os.pathsep.join(map(str, filter(None, (path, ROOT)))),
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip


def test_a_correct_kernel_holds(folder):
    done = run(folder, "check", "my.py:attention", *ACCURACY)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "kernel attention, declares dtypes=('fp32',)" in done.stdout
    assert "worst error/bound" in done.stdout
    assert not re.search("rootdir|problems by path|worst out:|warnings summary", done.stdout)
    assert len(done.stdout.splitlines()) <= 40
    assert sorted(path.name for path in folder.iterdir() if path.suffix) == [
        "conftest.py", "my.py", "pytest.ini",
    ]  # fmt: skip


def test_all_of_pytest_is_printed_with_v(folder):
    done = run(folder, "check", "my.py:broken", *ACCURACY, "-v")
    assert done.returncode == 1, done.stdout + done.stderr
    for part in ("rootdir: ", "= FAILURES =", "profile dev, 2", "worst out: ", "G1 accuracy: out"):
        assert part in done.stdout


def test_explain_fits_a_screen_and_shows_neither_source_nor_probing(folder, monkeypatch):
    """The kernel declares nothing, and 14 checks fail."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    problem = '{"version":1,"M":3,"N":90,"mask":{"type":"Mask","causal":true,"seqlens_k":[2]}}'
    done = run(folder, "explain", "--kernel=my.py:nan", problem)
    assert done.returncode == 1, done.stdout + done.stderr
    assert len(done.stdout.splitlines()) <= 40
    first = "my.py:nan  FAILED  "
    assert first in done.stdout
    assert "findings on this problem\n\nG1 accuracy: out of nan leaves the derived bound" in (
        done.stdout
    )
    assert not re.search("probing|assert|def |traceback|test_replay|cause", done.stdout)
    in_full = run(folder, "explain", "--kernel=my.py:nan", problem, "--", "-v").stdout
    # Pytest's own summary at the end has them once more where the variable CI is set.
    verdict = in_full.partition(" verdict =")[2].partition("= attention verification =")[0]
    findings = int(done.stdout.partition(first)[2].split()[0])
    assert len(re.findall(r"^  worst at|^  all elements", verdict, re.MULTILINE)) == findings > 9


def test_a_replay_line_carries_what_was_assumed(folder):
    done = run(folder, "check", "my.py:undeclared_and_wrong", *ACCURACY)
    assert done.returncode == 1, done.stdout + done.stderr
    (line, *_) = re.findall("fa-verify (explain .*)", done.stdout)
    words = shlex.split(line)
    (assumed,) = (json.loads(x.partition("=")[2]) for x in words if x.startswith("--assume="))
    assert assumed["dtypes"] == ["fp32"]
    again = run(folder, *words)
    assert again.returncode == 1, again.stdout + again.stderr
    assert "probing" not in again.stdout
    assert "declares dtypes=('fp32',)" in again.stdout


@pytest.mark.parametrize(
    ("problem", "said"),
    [
        ('{"version":1,"B":1000000000000}', "B is 1000000000000; needs at most 16777216"),
        ('{"version":1,"M":10000000000}', "q has 160,000,000,000 elements; needs at most"),
        ('{"version":1,"M":4000000000}', "in float64; this machine has"),
        ('{"version":1,"mask":' + "[" * 100_000, "problem is nested too deeply"),
    ],
    ids=["B", "elements", "memory", "nested"],
)
def test_a_damaged_problem_ends_in_a_sentence(folder, problem, said):
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if "this machine has" in said and memory > 500e9:
        pytest.skip("needs a machine with less memory than the largest problem in float64")
    done = run(folder, "explain", "--kernel=my.py:attention", problem)
    assert done.returncode == 2, done.stdout + done.stderr
    assert said in done.stderr
    assert "INTERNALERROR" not in done.stdout + done.stderr


def test_a_problem_holds_that_one_check_cannot_be_asked_of(folder):
    done = run(folder, "explain", "--kernel=my.py:dense", REPLAY)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "my.py:dense  HOLDS  1 check holds, " in done.stdout
    why = "dense declares layouts=('bhsd',), which have no gaps"
    assert f"\n   not asked: G12: {why}\n" in done.stdout


def test_a_kernel_that_declares_nothing_is_probed_first(folder):
    done = run(folder, "check", "my.py:undeclared", *ACCURACY)
    said = r"undeclared declares nothing: probing it\nthe checks assume after \d+ s of probing:\n"
    assert re.search(said, done.stdout), done.stdout + done.stderr
    assert "refuses fp16: NotImplementedError: masks, dtypes and sizes of 0" in done.stdout
    assert "declares dtypes=('fp32',)" in done.stdout
    assert "masks=()" in done.stdout


def test_a_kernel_holds_for_what_is_assumed_of_it_and_is_not_verified(folder, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    done = run(folder, "check", "my.py:always_causal", *ACCURACY)
    assert done.returncode == 4, done.stdout + done.stderr
    said = "my.py:always_causal  NOT VERIFIED  holds for always causal, fp32 alone, no grouped"
    assert said in done.stdout
    assert "(assumed: declare them to make them promises)" in done.stdout
    assert "HOLDS  " not in done.stdout
    # One problem is judged as it is.
    line = '{"version":1,"M":2,"N":2,"mask":{"type":"Mask","causal":true}}'
    assumed = '--assume={"always_causal":true,"masks":["causal"]}'
    done = run(folder, "explain", "--kernel=my.py:always_causal", assumed, line)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "my.py:always_causal  HOLDS  1 check holds" in done.stdout


def test_an_exception_on_every_problem_is_printed_before_the_checks(folder):
    done = run(folder, "check", "my.py:old", "--quick", "--", "-n0", "--collect-only", "-q")
    said = done.stdout.partition("nothing is assumed after")[2].splitlines()
    assert said[1].startswith("raises  'RuntimeError'  (shown) on all 92 problems: RuntimeError: ")
    assert "Block pointers have been removed" in said[1]
    assert json.loads(said[2])["version"] == 1


@pytest.mark.parametrize(
    ("name", "seconds", "how"),
    [("hanging", 4, "hang: over "), ("crashing", 60, "signal 11")],
)
def test_a_kernel_that_ends_the_probe_is_left_to_the_checks(folder, name, seconds, how):
    collected = ("--quick", "--", "-n0", f"--fa-problem-timeout={seconds}", "--collect-only")
    done = run(folder, "check", f"my.py:{name}", *collected)
    said = f"my.py:{name} ended the probe, so nothing is assumed: {how}"
    assert said in done.stdout, done.stdout + done.stderr
    assert '"N":' in done.stdout.partition(said)[2].splitlines()[0]
    assert "test_quick.py::" in done.stdout


# Every process gets a version of Triton whose interpreter cannot be repaired.
WITH_OTHER_TRITON = """
import os
os.environ["CUDA_VISIBLE_DEVICES"] = ""
from fa_verify.simulator.interpreter import repair
def fails():
    raise RuntimeError("Triton 0.0 has no interpreter")
repair.repair = fails
"""


@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
def test_a_pytorch_function_is_verified_beside_any_version_of_triton(folder):
    (folder / "sitecustomize.py").write_text(WITH_OTHER_TRITON)
    done = run(folder, "check", "my.py:attention", *ACCURACY, path=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    (folder / "needs_triton.py").write_text("import triton\n\nattention = triton.jit(print)\n")
    done = run(folder, "check", "needs_triton.py:attention", *ACCURACY, path=folder)
    assert done.returncode == 2
    assert "Triton 0.0 has no interpreter" in done.stderr


def test_a_quick_run_judges_the_chosen_problems_and_finds_a_fault(folder):
    first = ("--", "-n0", "-k", "test_a_problem_that_kills_faults_holds and (0- or 1- or 2-)")
    done = run(folder, "check", "my.py:attention", "--quick", *first)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\b\d+ passed", done.stdout)
    done = run(folder, "check", "my.py:broken", "--quick", *first)
    assert done.returncode == 1, done.stdout + done.stderr
    # On the plainest problem, not on the one that was chosen.
    assert """explain --kernel=my.py:broken '{"version":1}'""" in done.stdout


@pytest.mark.parametrize("merges", [False, True])
def test_a_quick_run_judges_merges_of_a_subject_that_merges(folder, merges):
    (folder / "merging.py").write_text("def merge(outs, lses):\n    pass\nmerge.states = True\n")
    name = "merging.py:merge" if merges else "my.py:attention"
    done = run(folder, "check", name, "--quick", "--", "-n0", "--collect-only")
    assert ("test_merging.py::" in done.stdout) is merges, done.stdout + done.stderr


CACHES = """
import torch
from fa_verify import attention_kernel

DECODES = attention_kernel(
    cache=("paged",), page_sizes=(16,), one_query=True, masks=(), fixed_scale="1/sqrt(D)",
    dtypes=("fp32",), p_dtype="fp32", p_normalised=True, devices=("cpu",),
)


@DECODES
def decode(q, k_cache, v_cache, *, cache_seqlens, page_table):
    outs = []
    for rows, table, length in zip(q, page_table, cache_seqlens.tolist()):
        pages = table[: -(-length // 16)]
        k, v = (
            x[pages].flatten(0, 1)[:length].transpose(0, 1).repeat_interleave(
                q.shape[1] // x.shape[2], 0
            )
            for x in (k_cache, v_cache)
        )
        outs.append(torch.softmax(rows @ k.mT * q.shape[3] ** -0.5, -1) @ v)
    return torch.stack(outs) if outs else q.new_empty(*q.shape[:3], v_cache.shape[3])


@DECODES
def broken(q, k_cache, v_cache, *, cache_seqlens, page_table):
    most = cache_seqlens.clamp(max=16)
    return decode(q, k_cache, v_cache, cache_seqlens=most, page_table=page_table)
"""
OF_CACHES = ("--", "-n0", "-k", "test_attention_over_a_cache or every_element_lies")


def test_a_kernel_of_pages_is_judged_and_its_failure_replays(folder):
    (folder / "pages.py").write_text(CACHES)
    done = run(folder, "check", "pages.py:decode", *OF_CACHES)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "cache=('paged',)" in done.stdout
    assert re.search(r"I1 holds in \d+ comparisons.*, pages of 16 rows", done.stdout)
    done = run(folder, "check", "pages.py:broken", *OF_CACHES)
    assert done.returncode == 1, done.stdout + done.stderr
    line = re.findall(r"fa-verify (explain --kernel=pages.py:broken '.*')", done.stdout)[0]
    assert json.loads(shlex.split(line)[-1])["cache"] == {"page_size": 16}
    again = run(folder, *shlex.split(line))
    assert again.returncode == 1, again.stdout + again.stderr
    assert "G1 accuracy: out of broken leaves the derived bound" in again.stdout
    assert "pages.py:broken  FAILED  " in again.stdout
    healthy = run(folder, *shlex.split(line.replace("broken", "decode")))
    assert healthy.returncode == 0, healthy.stdout + healthy.stderr


def test_a_quick_run_judges_calls_with_a_cache(folder):
    (folder / "pages.py").write_text(CACHES)
    done = run(folder, "check", "pages.py:decode", "--quick", "--", "-n0")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "HOLDS" in done.stdout
    done = run(folder, "check", "pages.py:broken", "--quick", "--", "-n0")
    assert done.returncode == 1, done.stdout + done.stderr


def test_findings_have_a_status_and_a_line_that_explain_takes(folder):
    done = run(folder, "check", "my.py:broken", "--json=found.jsonl", *ACCURACY)
    assert done.returncode == 1, done.stdout + done.stderr
    line = re.findall(r"fa-verify (explain --kernel=my.py:broken '.*')", done.stdout)[0]
    records = [json.loads(x) for x in (folder / "found.jsonl").read_text().splitlines()]
    assert records[0]["kind"] == "subject"
    assert any(record.get("findings") for record in records)
    (cause,) = [record for record in records if record["kind"] == "cause"]
    assert cause["explain"] == f"fa-verify {line}"
    assert cause["explains"] == [x["test"] for x in records if x.get("outcome") == "failed"]
    again = run(folder, *shlex.split(line))
    assert again.returncode == 1, again.stdout + again.stderr
    assert "G1 accuracy: out of broken leaves the derived bound" in again.stdout
    assert "my.py:broken  FAILED  " in again.stdout


def test_gradients_are_not_verified_with_forward_only(folder):
    words = "check", "my.py:without_a_gradient"
    done = run(folder, *words, *ACCURACY)
    assert done.returncode == 1
    assert "a kernel without one declares backward=False" in done.stdout
    done = run(folder, *words, "--forward-only", *ACCURACY)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "backward=False" in done.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("check", "no.py:attention"), "ERROR: --fa-kernel: "),
        (("explain", "--kernel=my.py:attention", "{"), "ERROR: --fa-replay: problem is not JSON"),
    ],
)
def test_wrong_usage_has_a_status(folder, words, said):
    done = run(folder, *words)
    assert done.returncode == 2, done.stdout + done.stderr
    assert said in done.stderr


def test_a_run_that_skips_every_check_has_a_status(folder):
    done = run(folder, "check", "my.py:attention", "--", "-n0", "-k", "test_merging.py")
    assert done.returncode == 4, done.stdout + done.stderr
    assert "my.py:attention  NOT VERIFIED  no problem was judged; 0 checks hold" in done.stdout


def test_a_kernel_that_asks_for_a_gpu_is_not_verified_on_a_cpu(folder, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    words = ("--quick", "--", "-n0", "-k", "test_quick and (000 or 001 or 002 or 003 or 004)")
    done = run(folder, "check", "my.py:on_a_gpu", *words)
    assert "my.py:on_a_gpu  NOT VERIFIED  " in done.stdout, done.stdout + done.stderr
    assert "   not asked: cannot run on a CPU: the kernel asks for a GPU, and there" in done.stdout


def test_the_list_names_every_kernel(folder):
    done = run(folder, "list")
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()] == [*NAMED]


def test_doctor_says_what_can_run_and_why_not(folder):
    done = run(folder, "doctor")
    assert done.returncode == 0, done.stderr
    assert re.search(r"^  torch +\d\S* +computes the exact results", done.stdout, re.MULTILINE)
    assert "a PyTorch function on the CPU: can run" in done.stdout
    for what in ("a kernel on a GPU", "a Triton kernel in the interpreter"):
        assert re.search(rf"^{what}: (can run|cannot run: .*)$", done.stdout, re.MULTILINE)
    assert "fa-verify check, explain and mask: can run" in done.stdout


def test_missing_packages_are_named(monkeypatch, capsys):
    honest = command._version
    monkeypatch.setattr(
        command, "_version", lambda name: None if name == "hypothesis" else honest(name)
    )
    assert command.main(["check", "my.py:attention"]) == 2
    needs = "needs hypothesis: pip install hypothesis"
    assert capsys.readouterr().err == f"fa-verify check {needs}\n"
    monkeypatch.setattr(command, "_without_interpreter", lambda: "Triton is not installed")
    lines = list(command._doctor())
    assert f"fa-verify check, explain and mask: cannot run: {needs}" in lines
    assert "a Triton kernel in the interpreter: cannot run: Triton is not installed" in lines
    assert any(line.startswith("  hypothesis      not installed") for line in lines)


WORKERS = ("-n", "auto", "-p", "no:benchmark")
CORPUS = "--fa-corpus=fa-verify-problems"


@pytest.mark.parametrize(
    ("words", "of_pytest"),
    [
        ("check sdpa-math", ["--fa-kernel=sdpa-math", CORPUS, *WORKERS]),
        (
            "check a.py:f --quick --forward-only --json=x --report=y --corpus=z -- -x -n 3",
            ["--fa-kernel=a.py:f", "--fa-report=y", "--fa-forward-only", "--fa-findings=x",
             "--fa-quick", "--fa-corpus=z", *WORKERS, "-x", "-n", "3"],
        ),
        (
            "check a.py:f --minutes 10",
            ["--fa-kernel=a.py:f", "--fa-minutes=10", CORPUS, *WORKERS],
        ),
        ("mask a.py:F", ["--fa-mask=a.py:F", *WORKERS]),
        ("mask a.py:F --kernel b.py:f", ["--fa-kernel=b.py:f", "--fa-mask=a.py:F", *WORKERS]),
    ],
)  # fmt: skip
def test_options_become_those_of_pytest(words, of_pytest):
    assert command.parsed(words.split()).of_pytest == of_pytest


@pytest.mark.parametrize(
    "words",
    [
        [f"fa-verify explain --kernel='my file.py:f' --mask=b.py:F '{REPLAY}'"],
        [f"pytest --fa-kernel='my file.py:f' --fa-mask=b.py:F --fa-replay='{REPLAY}'"],
        [f"pytest --kernel='my file.py:f' --mask=b.py:F --replay='{REPLAY}'"],
        ["pytest", "--kernel=my file.py:f", "--mask=b.py:F", f"--replay={REPLAY}"],
        [REPLAY, "--kernel=my file.py:f", "--mask=b.py:F"],
        [
            f"  replay: verify(f, problems=[Problem.from_json({REPLAY!r})])",
            "--kernel=my file.py:f",
            "--mask=b.py:F",
        ],
    ],
    ids=["command", "plugin", "line", "words", "JSON", "verify"],
)
def test_explain_takes_a_replay_line_or_its_json(words):
    found = command.parsed(["explain", *words]).of_pytest
    assert found == ["--fa-kernel=my file.py:f", "--fa-mask=b.py:F", f"--fa-replay={REPLAY}"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["verify"], "invalid choice: 'verify'"),
        (["check"], "the following arguments are required: KERNEL"),
        (["check", "a.py:f", "--quick", "--minutes=1"], "not allowed with argument --quick"),
        (["explain"], "REPLAY is ''; needs a replay line"),
        (["explain", "pytest"], "REPLAY is 'pytest'; needs a replay line"),
        (["explain", REPLAY, REPLAY], "needs a replay line, as a failure prints it, its JSON"),
        (["explain", REPLAY], "the JSON alone needs --kernel=FILE:NAME"),
        (
            ["explain", f"verify(f, problems=[Problem.from_json({REPLAY!r})])"],
            "the replay line is a call of verify; needs --kernel=FILE:NAME",
        ),
        (["doctor", "--", "-x"], "doctor starts no pytest, and got -x"),
    ],
)
def test_a_wrong_command_line_is_refused(words, said, capsys):
    with pytest.raises(SystemExit) as ended:
        command.parsed(words)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
