"""The command line: selection of kernels, options that are refused, and runs that fail.

Triton is hidden in all runs except a replay of the project's own kernels.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

from fa_verify.adapters.registry import NAMED
from fa_verify.oracles.problem import Problem
from fa_verify.pytest_plugin.fuzz.plugin import choose_workers
from fa_verify.session import CONFORMANCE, OURS, device_of, is_ours, is_whole, subject_of

ROOT = Path(__file__).parents[3]
# Runs pytest on each of several lists of arguments and prints the exit codes.
WITHOUT_TRITON = """
import json, sys
sys.modules["triton"] = None
import pytest
for arguments in json.loads(sys.argv[1]):
    code = int(pytest.main(["-p", "no:cacheprovider", *arguments]))
    for stream in (sys.stdout, sys.stderr):
        print(f"\\n<exit code {code}>", file=stream, flush=True)
sys.exit(code)
"""
# A user's file. It computes in float64 and imports nothing of this project.
KERNELS = """
import math
import torch


def attention(q, k, v, *, mask, sm_scale):
    (B, H, M, _), (Hk, N) = q.shape, k.shape[1:3]
    seen = mask.dense(B, H, M, N).expand(B, H, M, N)
    live = seen.any(3, keepdim=True)
    used = seen.any(2).view(B, Hk, H // Hk, N).any(2).unsqueeze(3)
    wide_q = torch.where(live, q.double(), 0.0)
    wide_k, wide_v = (
        torch.where(used, x.double(), 0.0).repeat_interleave(H // Hk, 1) for x in (k, v)
    )
    scores = torch.where(seen, wide_q @ wide_k.mT * sm_scale, -math.inf)
    top = scores.detach().amax(3, keepdim=True) if N else scores.new_zeros(B, H, M, 1)
    e = torch.exp(scores - torch.where(live, top, 0.0))
    total = torch.where(live, e.sum(3, keepdim=True), 1.0)
    out = torch.where(live, torch.where(seen, e / total, 0.0) @ wide_v, 0.0)
    lse = torch.where(live, top + total.log(), -math.inf).squeeze(3)
    wide = q.dtype == torch.float64
    return out.to(q.dtype), lse.to(torch.float64 if wide else torch.float32)


attention.dtypes = ("bf16", "fp32")
attention.block_n = 64


def refusing(q, k, v, *, mask, sm_scale):
    raise NotImplementedError("not today")


calls = []


def tiring(q, k, v, *, mask, sm_scale):
    calls.append(1)
    if len(calls) > 1:
        raise NotImplementedError("once is enough")
    return attention(q, k, v, mask=mask, sm_scale=sm_scale)


def wrong(q, k, v, *, mask, sm_scale):
    out, lse = attention(q, k, v, mask=mask, sm_scale=sm_scale)
    return out * 1.01, lse


def misspelt(q, k, v, *, mask, sm_scale):
    return q


misspelt.head_dim = (64,)
"""


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    """The path of the user's file."""
    path = tmp_path_factory.mktemp("kernels") / "kernels.py"
    path.write_text(KERNELS)
    return path


def run(*command: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Runs Python in a process without this run's workers and options."""
    inherited = {key: x for key, x in os.environ.items() if not key.startswith("PYTEST_")}
    return subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env=inherited | {"OMP_NUM_THREADS": "1"} | environ,
        capture_output=True,
        text=True,
        timeout=240,
    )


class Ended(NamedTuple):
    """One of several runs of pytest in a process."""

    stdout: str
    stderr: str
    returncode: int


def run_without_triton(*runs: list[str]) -> list[Ended]:
    """Runs pytest with each of these lists of arguments, without Triton and without a GPU."""
    done = run("-c", WITHOUT_TRITON, json.dumps(runs), CUDA_VISIBLE_DEVICES="")
    out, err = (re.split(r"\n<exit code (\d+)>\n", x) for x in (done.stdout, done.stderr))
    # Nothing follows the last exit code.
    assert len(out) == len(err) == 2 * len(runs) + 1
    assert out[-1] == err[-1] == ""
    return [Ended(out[i], err[i], int(out[i + 1])) for i in range(0, 2 * len(runs), 2)]


def refused(kernels: Path) -> dict[str, str]:
    """By option that is refused, what is said of it."""
    here = str(kernels.parent)
    return {
        "--fa-replay={M: 1}": "--fa-replay: problem is not JSON",
        '--fa-replay={"version":99}': "--fa-replay: problem has version 99; this suite reads ",
        '--fa-replay={"version":1,"mask":{"type":"os.system"}}': (
            "--fa-replay: mask type 'os.system' is not replayable"
        ),
        "--fa-minutes=soon": "--fa-minutes is 'soon'; needs a number of minutes > 0, at most 10080",
        "--fa-minutes=0": "--fa-minutes is '0'; needs a number of minutes > 0",
        "--fa-minutes=nan": "--fa-minutes is 'nan'; needs a number of minutes > 0",
        "--finds=elsewhere": "--finds is now called --corpus",
        f"--fa-corpus={kernels}": f"--fa-corpus is '{kernels}', a file; needs a folder",
        "--fa-example-db=redis://localhost": (
            "--fa-example-db has no effect with the profile gate, which draws the same problems in "
            "every run"
        ),
        "--hypothesis-profile=quick": (
            "--hypothesis-profile is 'quick'; needs one of gate, dev, fuzz"
        ),
        "--fa-kernel=": (
            "--fa-kernel: got ''; needs path/to/file.py:name, package.module:name, or one of ours, "
        ),
        "--fa-kernel=spda-math": "--fa-kernel: got 'spda-math' (did you mean 'sdpa-math'?); needs ",
        "--fa-kernel=sdpa-cudnn": "--fa-kernel: sdpa-cudnn cannot run here: needs a CUDA GPU; ",
        "--fa-kernel=ours": "the project's own kernels need Triton, which cannot be imported",
        f"--fa-kernel={here}/none.py:f": f"--fa-kernel: there is no file {here}/none.py",
        f"--fa-kernel={kernels}:attentoin": (
            f"--fa-kernel: {kernels} has no 'attentoin'; it has attention, "
        ),
        f"--fa-kernel={kernels}:misspelt": (
            "--fa-kernel: misspelt declares 'head_dim' (did you mean 'head_dims'?)"
        ),
        "tests": "the project's own kernels need Triton, which cannot be imported",
        "tests/conformance/test_accuracy.py::test_x": "the project's own kernels need Triton",
    }


LISTED = ["--fa-list-kernels", "--fa-kernel=spda-math"]
BOUND = "every_element_lies_within_the_derived_bound"
# By kernel of the user's file, with which options it is run.
OF_KERNELS = {
    # The last of them is none of the conformance tests.
    "attention": [
        "--hypothesis-profile=dev",
        "-v",
        "-kempty_rows_give_zero or hidden_positions_add or test_mask.py",
    ],
    "refusing": [f"--fa-replay={Problem().to_json()}"],
    "tiring": ["-v", "--hypothesis-profile=gate", f"-k{BOUND} and fp16-default-d16"],
    "wrong": ["-v", "--hypothesis-profile=dev", f"-k{BOUND} and fp32-default-d16"],
}


@pytest.fixture(scope="module")
def told(kernels):
    """By kernel, or option that comes first, what a run without Triton says; all in a process."""
    lists = {
        **{option: [option] for option in refused(kernels)},
        "--fa-list-kernels": LISTED,
        **{name: [f"--kernel={kernels}:{name}", *options] for name, options in OF_KERNELS.items()},
    }
    return dict(zip(lists, run_without_triton(*lists.values()), strict=True))


def test_bad_options_are_refused_in_a_line_before_anything_runs(told, kernels):
    for option, says in refused(kernels).items():
        done = told[option]
        # pytest's own, where no kernel is judged.
        judges = option.startswith(("--fa-kernel", "--fa-replay"))
        assert done.returncode == (2 if judges else pytest.ExitCode.USAGE_ERROR)
        assert re.fullmatch(f"ERROR: {re.escape(says)}.*", done.stderr.strip())
        assert "Traceback" not in done.stdout


def test_the_kernels_there_are_are_listed_in_place_of_a_run(told):
    done = told["--fa-list-kernels"]
    assert done.returncode == pytest.ExitCode.OK
    lines = done.stdout.strip().splitlines()
    assert [line.split()[0] for line in lines if line] == [*NAMED]
    assert lines[0].endswith("unavailable: triton is not installed")
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["-n0"], "--fa-minutes needs pytest-xdist workers; pass -n auto or -n 1"),
        (["-pno:xdist"], "--fa-minutes needs pytest-xdist workers; pass -n auto or -n 1"),
        (
            ["--dist=loadfile", "-n1"],
            "--fa-minutes schedules the tests and needs --dist=load; --dist is 'loadfile'",
        ),
        (["--fa-replay={}"], "--fa-minutes and --fa-replay exclude each other: pass one of them"),
        (
            ["--hypothesis-profile=dev"],
            "--fa-minutes needs the profile fuzz; --hypothesis-profile is 'dev'",
        ),
    ],
    ids=str,
)
def test_options_that_exclude_minutes_are_refused(options, says):
    given = {
        "--fa-minutes": "1",
        "--fa-replay": None,
        "--hypothesis-profile": None,
    }
    option = SimpleNamespace(numprocesses=None, dist="no")
    for text in options:
        name, _, value = text.partition("=")
        given |= {name: value}
        if name == "-pno:xdist":
            del option.numprocesses
        elif name.startswith("-n"):
            option.numprocesses = int(name[2:])
        elif name == "--dist":
            option.dist = value
    config = SimpleNamespace(getoption=given.get, option=option, args_source=None, args=[])
    with pytest.raises(pytest.UsageError, match=f"^{re.escape(says)}$"):
        choose_workers(config)


def test_minutes_imply_their_profile_tests_and_workers():
    option = SimpleNamespace(numprocesses=None, dist="no")
    given = {"--fa-minutes": "0.5"}
    config = SimpleNamespace(getoption=given.get, option=option, args_source=None, args=["tests"])
    choose_workers(config)
    assert vars(option) == {"numprocesses": "auto", "dist": "no", "hypothesis_profile": "fuzz"}
    assert config.args == [str(CONFORMANCE)]


def test_a_worker_chooses_no_workers():
    option = SimpleNamespace(numprocesses=None)
    given = {"--fa-minutes": "0.5"}
    config = SimpleNamespace(
        getoption=given.get, option=option, args_source=None, args=[], workerinput={}
    )
    choose_workers(config)
    assert vars(option) == {"numprocesses": None, "hypothesis_profile": "fuzz"}


@pytest.mark.parametrize(
    ("args", "given", "is_all"),
    [
        (["tests/conformance"], {}, True),
        (["tests/unit", "tests"], {}, True),
        (["tests/conformance/test_long.py"], {}, False),
        (["tests/unit"], {}, False),
        (["tests/conformance"], {"keyword": "long"}, False),
        (["tests/conformance"], {"lf": True}, False),
    ],
)
def test_the_coverage_is_that_of_all_conformance_tests(args, given, is_all, monkeypatch):
    monkeypatch.chdir(ROOT)
    option = SimpleNamespace(
        **{"keyword": "", "markexpr": "", "deselect": None, "lf": False} | given
    )
    config = SimpleNamespace(args=args, option=option)
    assert is_whole(config) == is_all


def test_a_problem_is_replayed_alone(device):
    problem = Problem(M=3, N=5, dtype="fp16", config="16x16", seed=4, device=device)
    done = run("-m", "pytest", "-p", "no:cacheprovider", f"--replay={problem.to_json()}")
    assert done.returncode == 0, done.stdout
    assert f"replaying {problem.to_json()}" in done.stdout
    assert "1 distinct problems judged on all outputs" in done.stdout
    assert "1 passed" in done.stdout


def test_a_plain_pytorch_kernel_is_verified_without_triton(told):
    done = told["attention"]
    assert done.returncode == 0, done.stdout
    assert "Triton none" in done.stdout
    header = "kernel attention, declares dtypes=('bf16', 'fp32'), block_n=64"
    summary = "\nattention declares dtypes=('bf16', 'fp32'), block_n=64"
    assert header in done.stdout
    assert summary in done.stdout
    assert re.search(r"\n\d+ distinct problems judged on all outputs", done.stdout)
    collected = re.findall(r"^(\S+)::.* PASSED", done.stdout, re.MULTILINE)
    assert set(collected) == {"tests/conformance/test_claims.py"}


def test_a_kernel_that_refuses_everything_is_not_verified(told):
    done = told["refusing"]
    assert done.returncode == 4
    assert "NOT VERIFIED  refuses most problems; no problem was judged; " in done.stdout
    assert "the kernel refused all problems, so nothing was verified" in done.stdout
    assert "1 unsupported (100 %)\n  unsupported, 1: not today" in done.stdout


def test_a_kernel_that_refuses_too_much_is_not_verified_and_the_counts_are_shown(told):
    done = told["tiring"]
    assert done.returncode == 4
    assert "; 1 check judged too few problems; " in done.stdout
    drawn = int(re.search(r"(\d+) examples a test and shard", done.stdout).group(1))
    refused = drawn - 1
    assert (
        f"\n1  only 1 problems were judged, needs {drawn // 2}: {refused} were refused by tiring, "
        "0 were out of range."
    ) in done.stdout
    assert f" {refused} refused: once is enough\n" in done.stdout
    assert f"; {refused} unsupported ({100 * refused / drawn:.0f} %)" in done.stdout
    assert f"\n  unsupported, {refused}: once is enough" in done.stdout


def test_a_wrong_kernel_fails_with_a_line_that_replays_it(told):
    done = told["wrong"]
    assert done.returncode == pytest.ExitCode.TESTS_FAILED
    assert "G1 accuracy: out of wrong leaves the derived bound" in done.stdout
    replay = re.search(r"replay: pytest .*--fa-replay='(.*)'", done.stdout).group(1)
    assert Problem.from_json(replay).dtype == "fp32"


def configured(kernel: str | None) -> SimpleNamespace:
    """A stub of a pytest.Config with --fa-kernel."""
    return SimpleNamespace(stash=pytest.Stash(), getoption={"--fa-kernel": kernel}.get)


@pytest.mark.parametrize("kernel", [None, "ours", OURS])
def test_the_subject_is_our_own_unless_another_is_named(kernel):
    assert is_ours(configured(kernel))
    assert not is_ours(configured("fa_verify.oracles.reference.torch_reference:attention"))
    assert not is_ours(configured(""))


def test_a_subject_with_a_name_is_called_by_it():
    subject = subject_of(configured("sdpa-math"))
    assert (subject.name, subject.source) == ("sdpa-math", "sdpa-math")
    assert subject.numerics.p_dtype == "fp32"


def test_the_subject_is_loaded_once(kernels):
    config = configured(f"{kernels}:attention")
    assert subject_of(config) is subject_of(config)
    assert subject_of(config).dtypes == ("bf16", "fp32")


@pytest.mark.parametrize(
    ("declared", "there_is_a_gpu", "device"),
    [
        (("cpu", "cuda"), True, "cuda"),
        (("cpu", "cuda"), False, "cpu"),
        (("cpu",), True, "cpu"),
        (("cuda",), True, "cuda"),
    ],
)
def test_a_kernel_runs_on_a_gpu_if_it_can(tmp_path, monkeypatch, declared, there_is_a_gpu, device):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there_is_a_gpu)
    path = tmp_path / "kernels.py"
    path.write_text(f"{KERNELS}\nattention.devices = {declared}")
    config = configured(f"{path}:attention")
    subject_of(config)
    assert device_of(config) == device


def test_a_kernel_for_gpus_alone_is_refused_where_there_is_none(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    path = tmp_path / "kernels.py"
    path.write_text(f"{KERNELS}\nattention.devices = ('cuda',)")
    says = r"^--fa-kernel: attention declares devices \('cuda',\); needs a GPU, and none "
    with pytest.raises(pytest.UsageError, match=says):
        subject_of(configured(f"{path}:attention"))


def test_our_own_kernels_without_triton_are_refused_by_name(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(pytest.UsageError, match="need Triton, which cannot be imported; --fa-"):
        subject_of(configured(None))
