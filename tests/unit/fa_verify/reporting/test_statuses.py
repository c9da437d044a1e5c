"""Exit statuses of the command and of pytest with --fa-kernel, a row for each way to end."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fa_verify.conformance_process import Status
from fa_verify.properties.running.tally import Tally
from fa_verify.reporting.statuses import Counts, first_line

ROOT = Path(__file__).parents[4]
KERNELS = """
import atexit
import os
import sys
from unittest.mock import Mock

import torch
from fa_verify import attention_kernel

DECLARED = attention_kernel(
    p_dtype="fp32", p_normalised=True, dtypes=("fp32",), masks=(), gqa=False, zero_sizes=False,
    devices=("cpu",),
)
calls = 0


@DECLARED
def right(q, k, v, *, mask, sm_scale):
    return torch.softmax(q @ k.mT * sm_scale, -1) @ v


@DECLARED
def wrong(q, k, v, *, mask, sm_scale):
    return right(q, k, v, mask=mask, sm_scale=sm_scale) * 1.01


@DECLARED
def refuses_most(q, k, v, *, mask, sm_scale):
    if k.shape[2] > 1:
        raise NotImplementedError("more than one key")
    return right(q, k, v, mask=mask, sm_scale=sm_scale)


@DECLARED
def refuses_all(q, k, v, *, mask, sm_scale):
    raise NotImplementedError("not today")


@DECLARED
def sets_the_device(q, k, v, *, mask, sm_scale):
    global calls
    calls += 1
    out = right(q, k, v, mask=mask, sm_scale=sm_scale)
    if calls > 1:
        out = out * 0
        torch.set_default_device("meta")
    return out


class Zeroes(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        found = super().__torch_function__(func, types, args, kwargs or {})
        return found * 0 if func.__name__ in ("sub", "__sub__", "rsub") else found


@DECLARED
def of_a_subclass(q, k, v, *, mask, sm_scale):
    return (right(q, k, v, mask=mask, sm_scale=sm_scale) * 0).as_subclass(Zeroes)


@DECLARED
def slow(q, k, v, *, mask, sm_scale):
    import time
    time.sleep(0.5)
    return right(q, k, v, mask=mask, sm_scale=sm_scale)


@DECLARED
def exits(q, k, v, *, mask, sm_scale):
    os._exit(0)


@DECLARED
def crashes(q, k, v, *, mask, sm_scale):
    os.kill(os.getpid(), 11)
"""
IMPORTED = {
    "exits_at_import": "import os\nos._exit(0)\n",
    "exits_at_exit": (
        "import atexit, os\nfrom my import wrong as attention\natexit.register(os._exit, 0)\n"
    ),
    "prints_at_exit": (
        "import atexit, sys\nfrom my import right as attention\n"
        "atexit.register(print, 'end of', sys.argv[0])\n"
    ),
    "raises_at_import": "raise KeyError('here')\n",
    "breaks_the_oracle": """
from unittest.mock import Mock
from fa_verify.properties.running import trial
from my import right as attention
trial.torch_reference = Mock(attention=Mock(side_effect=NotImplementedError("no meta")))
""",
    "drops_findings": """
from fa_verify.properties.search.search import Runner
from my import wrong as attention
honest = Runner._findings
def dropped(self, problem, claim):
    honest(self, problem, claim)
    return []
Runner._findings = dropped
""",
    "drops_problems": """
from fa_verify.properties.running.tally import Tally
from my import right as attention
Tally.judged = lambda *args: None
""",
}
FEW = ("-n0", "-k", "test_a_problem_that_kills_faults_holds and (000- or 001-)")
# Runs pytest on each of several lists of arguments, in forks of a process that has imported it.
FORKS = """
import json, os, sys
import fa_verify.pytest_plugin.running, pytest
for number, arguments in enumerate(json.loads(sys.argv[1])):
    child = os.fork()
    if child == 0:
        for stream, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{sys.argv[2]}/{number}.{name}", os.O_CREAT | os.O_WRONLY), stream)
        code = int(pytest.main(arguments))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
# Name: the kernel, the arguments of pytest, the status, and the first line of the verdict or of
# the message on stderr.
ENDS = {
    "holds": ("my.py:right", FEW, 0, "HOLDS  2 checks hold, 0 not asked"),
    "a wrong result": ("my.py:wrong", FEW, 1, "FAILED  1 cause, .* failed"),
    "wrong, and ends at the first failure": (
        "my.py:wrong", ("-x", "-n2", *FEW[1:]), 1, "FAILED  1 cause, ",
    ),
    "sets the default device": (
        "my.py:sets_the_device", FEW, 1, "FAILED  .*\n\n1 .*changes global settings of PyTorch",
    ),
    "a tensor subclass": (
        "my.py:of_a_subclass", FEW, 1, "FAILED  .*\n\n1 .*out is a Zeroes; needs a torch",
    ),
    "a crash in this process": ("my.py:crashes", FEW, 1, r"ERROR: .* before their .*signal 11 "),
    "ended in a call": ("my.py:exits", FEW, 3, r"ERROR: .* before their verdict \(status 0\)"),
    "exits at exit": ("exits_at_exit.py:attention", FEW, 1, "FAILED  1 cause, "),
    "prints at exit": ("prints_at_exit.py:attention", FEW, 0, "^end of .*/conformance_process.py$"),
    "exits at import": (
        "exits_at_import.py:attention", FEW, 2,
        r"cannot be loaded: it ended the process while it was imported \(status 0\)",
    ),
    "raises at import": (
        "raises_at_import.py:attention", FEW, 2, "ERROR: --fa-kernel: .* KeyError: 'here'",
    ),
    "no such file": ("no.py:f", FEW, 2, "ERROR: --fa-kernel: there is no file .*no.py"),
    "no such option": ("my.py:right", ("--no-such", *FEW), 2, "unrecognized arguments"),
    "an error of the suite": (
        "breaks_the_oracle.py:attention", FEW, 3,
        "ERROR OF THE SUITE  .*\n\n1  an error of the suite: NotImplementedError: no meta ",
    ),
    "an error above the bound": (
        "drops_findings.py:attention", FEW, 3, r"CONTRADICTS ITSELF  error/bound is \d.* fp32, but",
    ),
    "no counted problem": (
        "drops_problems.py:attention", FEW, 3, r"CONTRADICTS ITSELF  \d+ problems were judged, and",
    ),
    "most problems refused": (
        "my.py:refuses_most", FEW, 4, r"NOT VERIFIED  refuses most problems; .* \d+ % of the prob",
    ),
    "all problems refused": (
        "my.py:refuses_all", FEW, 4, "NOT VERIFIED  refuses most problems; no problem was judged",
    ),
    "an assumed narrowing": (
        "my.py:right", ('--fa-assume={"dv_ne_d":false}', *FEW), 4,
        r"NOT VERIFIED  holds for .* \(assumed: declare it to make it a promise\); ",
    ),
    "every check skipped": (
        "my.py:right", ("-n0", "-k", "test_replay.py and not test_regression"), 4,
        "NOT VERIFIED  no problem was judged; 0 ",
    ),
    "nothing collected": (
        "my.py:right", ("-n0", "-k", "no_such_test"), 4, "NOT VERIFIED  no problem was judged",
    ),
    "collected alone": ("my.py:right", ("--collect-only", *FEW), 4, "NOT VERIFIED  no problem was"),
    "planned alone": ("my.py:right", ("--setup-plan", *FEW), 4, "NOT VERIFIED  no problem was"),
    "waived": (
        "my.py:wrong", ("--fa-waive=waivers", *FEW), 0,
        r"HOLDS but for \d+ waived findings \(1 waiver\)  \d+ checks hold",
    ),
}  # fmt: skip
# pytest alone has another status: a kernel has ended it, or it has read no options yet.
OF_THE_COMMAND = {
    "a crash in this process", "ended in a call", "exits at exit", "prints at exit",
    "exits at import", "no such option",
}  # fmt: skip
# Rows for which the command is run beside pytest; the other ones have the same status from it.
OF_BOTH = {"holds", "an error of the suite", "most problems refused", "no such file"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder of kernels, and a file of waivers."""
    path = tmp_path_factory.mktemp("kernels")
    (path / "my.py").write_text(KERNELS)
    (path / "waivers").write_text("*, *, known\n")
    for name, text in IMPORTED.items():
        (path / f"{name}.py").write_text(text)
    return path


def started(folder, *words, **options):
    environment = {name: x for name, x in os.environ.items() if not name.startswith("PYTEST_")}
    return subprocess.Popen(
        [sys.executable, "-m", "fa_verify", *words],
        cwd=folder, env=environment | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options,
    )  # fmt: skip


def ended(process):
    """The status of a process, and its output and errors."""
    out, err = process.communicate(timeout=240)
    return process.returncode, out, err


@pytest.mark.parametrize("name", sorted(OF_THE_COMMAND | OF_BOTH))
def test_the_command_ends_with_the_status_of_its_verdict(folder, name):
    kernel, of_pytest, status, said = ENDS[name]
    code, out, err = ended(started(folder, "check", kernel, "--quick", "--", *of_pytest))
    assert code == status, out + err
    assert re.search(said, out + err, re.MULTILINE), out + err


@pytest.fixture(scope="module")
def of_pytest(folder):
    """The ends of pytest by name: status, and output with errors."""
    names = [name for name in ENDS if name not in OF_THE_COMMAND]
    runs = [
        [
            "-p", "no:cacheprovider", "-W", "ignore:Module already imported", "--fa-quick",
            f"--fa-kernel={folder / ENDS[name][0]}",
            *(x.replace("waivers", str(folder / "waivers")) for x in ENDS[name][1]),
        ]
        for name in names
    ]  # fmt: skip
    environment = {name: x for name, x in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, "-c", FORKS, json.dumps(runs), str(folder)],
        cwd=ROOT, env=environment | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True, text=True, timeout=500, check=True,
    )  # fmt: skip
    said = [
        "".join((folder / f"{i}.{stream}").read_text() for stream in ("out", "err"))
        for i in range(len(names))
    ]
    return dict(zip(names, zip(map(int, done.stdout.split()), said, strict=True), strict=True))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", [name for name in ENDS if name not in OF_THE_COMMAND])
def test_pytest_ends_with_the_status_of_the_verdict(of_pytest, name):
    _, _, status, said = ENDS[name]
    code, printed = of_pytest[name]
    assert code == status, printed
    assert re.search(said, printed, re.MULTILINE), printed


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("to_all", [False, True])
def test_an_interrupt_keeps_the_status_of_pytest(folder, number, to_all):
    """Sent to the command alone, and to its whole group."""
    words = ("check", "my.py:slow", "--quick", "--", "-n0", "-v")
    process = started(folder, *words, start_new_session=True)
    lines = iter(process.stdout.readline, "")
    assert next((line for line in lines if "test_quick.py::" in line), None), process.communicate()
    time.sleep(1)
    (os.killpg if to_all else os.kill)(process.pid, number)
    code, out, err = ended(process)
    assert code == pytest.ExitCode.INTERRUPTED, out + err
    assert re.search("NOT VERIFIED  interrupted; ", out), out + err


HELD = {"failed": 0, "hold": 2, "reasons": {}, "judged": 5}


@pytest.mark.parametrize(
    ("counts", "status", "said"),
    [
        ({}, Status.HOLDS, "HOLDS  2 checks hold, 0 not asked"),
        ({"failed": 1}, Status.FAILED, "FAILED  1 cause, 3 checks: 1 failed, 2 hold, 0 not asked"),
        (
            {"failed": 1, "broken": 1, "contradiction": "x", "waived": (2, 1)}, Status.FAILED,
            "FAILED  1 cause, 3 checks: 1 failed, 2 hold, 0 not asked, 2 waived findings "
            "(1 waiver), 1 check ended in an error of the suite",
        ),
        (
            {"refused": 0.25, "waived": (7, 3)}, Status.HOLDS,
            "HOLDS but for 7 waived findings (3 waivers)  2 checks hold, 0 not asked, 25 % of the "
            "problems refused",
        ),
        (
            {"refused": 0.3, "mostly": {"G1": 0.6, "G8": 0.75}}, Status.NOT_VERIFIED,
            "NOT VERIFIED  refuses most problems (60 % of G1, 75 % of G8); 2 checks hold, 0 not "
            "asked, 30 % of the problems refused",
        ),
        (
            {"too_few": 1}, Status.NOT_VERIFIED,
            "NOT VERIFIED  1 check judged too few problems; 2 checks hold, 0 not asked",
        ),
        ({"contradiction": "x", "waived": (1, 1)}, Status.HOLDS, "HOLDS but for 1 waived finding "),
    ],
)  # fmt: skip
def test_the_first_line_says_what_was_refused_waived_and_broken(counts, status, said):
    found = Counts(**HELD | counts)
    assert found.status is status
    assert first_line("f", found, 1).startswith(f"f  {said}")


def test_a_tally_tells_refusals_by_guarantee_also_after_a_merge():
    tally = Tally()
    tally.asked_for("G1", judged=3, refused=1)
    tally.asked_for("G8", judged=1)
    other = Tally()
    other.asked_for("G8", refused=2)
    tally.add(other.record())
    assert tally.refused_share == 3 / 7
    assert tally.mostly_refused() == {"G8": 2 / 3}
