"""Plants faults in small subjects, and takes the failure messages for docs/failure-messages.md.

``python -m docs.tables --write`` writes the page.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch

from fa_verify.attention_close import assert_attention_close
from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.problem import Problem
from fa_verify.oracles.reference import torch_reference
from fa_verify.properties.checks import claims, identities
from fa_verify.properties.comparison.compare import Finding
from fa_verify.properties.execution.tally import Tally
from fa_verify.properties.execution.trial import AttentionTrial, run_trial
from fa_verify.properties.execution.watchdog import Watchdog
from fa_verify.properties.inputs.tensors import make
from fa_verify.properties.regression.baseline import Baseline, Entry, Environment
from fa_verify.properties.regression.compiled_kernels import Resources
from fa_verify.properties.search.corpus import CorpusEntry
from fa_verify.properties.search.search import Runner
from fa_verify.properties.subjects.subject import Subject
from fa_verify.pytest_plugin.crash_reports import CrashReports, problem_timeout
from fa_verify.pytest_plugin.example_database import example_database
from fa_verify.pytest_plugin.fuzz.plugin import minutes_of
from fa_verify.pytest_plugin.gate.comparison import differences
from fa_verify.pytest_plugin.gate.plugin import Gate
from fa_verify.pytest_plugin.regression_files import RegressionFiles
from fa_verify.repaired_fork import in_repaired_fork
from fa_verify.session import mask_of, subject_of
from fa_verify.verification import verify
from tests.unit.properties.checks import (
    test_bad_calls,
    test_cache_checks,
    test_closed_form,
    test_memory_checks,
    test_merging_checks,
    test_pooled_checks,
    test_same_bits,
    test_streams,
    test_ways,
)
from tests.unit.properties.checks.calls import found_on
from tests.unit.properties.subjects.broken_subjects import Eager

__all__ = ["SECTIONS", "Kind", "lines"]

_CHECKS = claims.checks_of("call", "statistics", "closed forms", "added", "pooled", "calls")
_FP64 = Problem(dtype="fp64")
_MANY = Problem(
    B=2, H=4, Hk=2, M=20, N=13, D=5, Dv=3, dtype="fp64", dirty="nan",
    mask=Mask(causal=True, seqlens_q=(17, 20), seqlens_k=(13, 9)),
)  # fmt: skip
_ROWS = Problem(H=4, Hk=2, M=96, N=128, D=32, Dv=24, dtype="bf16", seed=1)


class Kind(NamedTuple):
    """A kind of failure message.

    Args:
        title: The heading.
        meaning: The meaning of the message, and the place to look at first.
        message: Plants the fault and returns the message.
    """

    title: str
    meaning: str
    message: Callable[[], str]


class Attention(Eager):
    """A correct subject, or one with a fault that ``Eager`` does not have."""

    score_mods = ("softcap", "alibi", "bias")

    def __init__(self, fault: str = "") -> None:
        super().__init__(fault)
        self.softcaps: dict[tuple[torch.Size, ...], float | None] = {}

    def __call__(self, q, k, v, **arguments):  # type: ignore[no-untyped-def]
        if self.fault == "refuses the second run" and self.calls:
            raise NotImplementedError("a buffer of this size is in use")
        if self.fault == "needs two heads" and q.shape[1] != 2:
            raise NotImplementedError(f"H is {q.shape[1]}; needs 2")
        if self.fault == "refuses":
            raise NotImplementedError("N is 1; needs a multiple of 128")
        if self.fault == "half of dq alone" and not (k.requires_grad or v.requires_grad):
            q = (q + q.detach()) / 2
        if self.fault == "softcap of the first call":
            shapes = q.shape, k.shape, v.shape
            arguments["softcap"] = self.softcaps.setdefault(shapes, arguments.get("softcap"))
        out, lse = super().__call__(q.double(), k.double(), v.double(), **arguments)
        if self.fault == "truncates":
            out = out + (_in_digits(8, torch.trunc, out) - out).detach()
        if self.fault == "rounds to 6 digits":
            out = out + (_in_digits(6, torch.round, out) - out).detach()
        if self.fault == "two values":
            return out, lse, None
        if self.fault == "no gradient":
            out = out.detach()
        if self.fault == "scales q":
            q.data.mul_(2)
        is_wide = q.dtype == torch.float64 or self.fault == "returns float64"
        out = out if is_wide else out.to(q.dtype)
        return out, lse if q.dtype == torch.float64 else lse.float()

    def spoil(self, out, lse, live, N, config):  # type: ignore[no-untyped-def]
        if self.fault == "writes to padding":
            out = torch.where(live, out, 0.001)
        if self.fault == "misreads an expanded dout":
            out = _Expanded.apply(out)
        return super().spoil(out, lse, live, N, config)


class _Expanded(torch.autograd.Function):
    """The identity, whose backward doubles a gradient with strides of 0."""

    @staticmethod
    def forward(ctx, x):  # type: ignore[no-untyped-def]
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        return gradient * (2 if 0 in gradient.stride() else 1)


def _in_digits(
    count: int, cut: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor
) -> torch.Tensor:
    """``x`` rounded or truncated to so many binary digits; bf16 has 8."""
    mantissa, exponent = torch.frexp(x)
    return torch.ldexp(cut(torch.ldexp(mantissa, torch.tensor(count))), exponent - count)


def _trial(
    fault: str, problem: Problem, subject: type = Attention, **declared: object
) -> AttentionTrial:
    of = subject(fault)
    for word, value in declared.items():
        setattr(of, word, value)
    trial = run_trial(Subject.of(of, "attention"), problem)
    assert trial is not None
    return trial


def _first(findings: list[Finding], claim: str) -> str:
    """The message of the first finding whose claim contains some words."""
    return str(next(x for x in findings if claim in x.claim))


def _found(
    check: str,
    fault: str,
    problem: Problem,
    claim: str = "",
    subject: type = Attention,
    **declared: object,
) -> Callable[[], str]:
    return lambda: _first(_CHECKS[check](_trial(fault, problem, subject, **declared)), claim)


# Titles and hints, in the order of ``test_ways.FAULTS``.
_OF_WAYS = (
    ("the same memory", "Look for copies that are kept by the address of a tensor."),
    ("after an exception", "Look for what is set before the arguments are checked."),
    ("without gradients", "Look at what depends on torch.is_grad_enabled()."),
    ("two backwards", "Look for a backward that writes to what the forward saved."),
    ("some gradients", "Look at what depends on which input requires a gradient."),
    ("another call in between", "Look for results that are kept outside of the context."),
    ("another thread", "Look for what a call keeps outside of itself while it runs."),
    (
        "a checkpoint",
        "In `torch.utils.checkpoint` with `use_reentrant=False` a backward reads "
        "`ctx.saved_tensors` once. A call may also fail in another way.",
    ),
)


def _way(fault: str, check: str = "G16", seed: int = 0) -> Callable[[], str]:
    """The message of a fault of the ways of calling; every seed from this one on is tried."""

    def message() -> str:
        found = (test_ways.found(fault, x, _CHECKS[check]) for x in itertools.count(seed))
        return _in_a_file(str(next(filter(None, found))[0]))

    return message


def _bad_call(then: Callable[[Any, Any], None] | None) -> Callable[[], str]:
    """The message of a bad call that is not refused, or that ``then`` precedes."""

    def message() -> str:
        ignored = "" if then else "head dims differ"
        subject = test_bad_calls.subject("padded", ignored, then=then)
        (call,), check, _ = test_bad_calls.FORMS["padded"]
        return str(found_on(subject, call, check)[0])

    return message


def _in_a_file(said: str) -> str:
    """Return a message with the place of a user's kernel in that of a test's."""
    return re.sub(r"\(\S+, line \d+\)", "(attention.py, line 12)", said)


def _closed_form(check: str, fault: str) -> Callable[[], str]:
    problem = dataclasses.replace(test_closed_form.PROBLEM, dtype="fp64")
    if check == "ones":  # holds in 16 bits alone
        problem = test_closed_form.PROBLEM
    return _found(check, fault, problem, subject=test_closed_form.Eager)


def _nan(of_memory: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[], str]:
    """The message about out whose first row is computed from an allocation."""

    def message() -> str:
        subject = Subject.of(test_memory_checks.Reads(of_memory), "attention")
        trial = run_trial(subject, test_memory_checks.PROBLEM)
        assert trial is not None
        return str(next(x for x in claims.full_overwrite(trial) if x.output == "out"))

    return message


def _scratch() -> str:
    subject = Subject.of(test_memory_checks.Overruns("scratch", 8), "attention")
    trial = run_trial(subject, test_memory_checks.PROBLEM)
    assert trial is not None
    return str(claims.full_overwrite(trial)[0])


def _pooled(check: str, fault: str) -> Callable[[], str]:
    return _found(check, fault, test_pooled_checks.PROBLEM, subject=test_pooled_checks.Pools)


def _merging(name: str) -> Callable[[], str]:
    """The message of a check of merged states, by the name of a broken merge."""
    return lambda: str(test_merging_checks.claimed(name))


def _conventions() -> str:
    """The message of a merge whose lse is finite where no part saw a key."""
    merge = test_merging_checks.BROKEN["conventions"]
    subject = test_merging_checks.subject(merge, backward=False)
    problem = dataclasses.replace(test_merging_checks.PROBLEMS[0], hidden=16)
    check = claims.checks_of(kind="merge")["conventions"]
    return str(found_on(subject, problem, check)[0])


def _other_bits(word: str, fault: str, problem: Problem) -> Callable[[], str]:
    """The message of a check of the same bits, by the fault of a schedule.

    The numbers of the bits that differ depend on the processor.
    """
    numbers = (
        r"(?<=first at )[^,]+|\d+(?= ulp)|(?<=ulp, in )\d+|(?<=worst at )[^:]+|"
        r"(?<=got ).+(?=, must)|\d+(?= of \d+ elements are)|\d+(?= %)"
    )
    return lambda: re.sub(
        numbers, "...", test_same_bits.found(test_same_bits.subject(fault), problem)[word]
    )


def _streams(check: str, fault: str, problem: Problem = test_streams.PROBLEM) -> Callable[[], str]:
    """The message of a check of streams and graphs, with stand-ins for both."""
    return lambda: str(test_streams.found(check, fault, problem)[0])


def _not_captured() -> str:
    with test_streams.standing_in():
        runner = _runner(test_streams.Standing("has no graphs"))
        said = _first(
            runner.findings(test_streams.PROBLEM, claims.checks_of("streams")["replayed"]), ""
        )
    return _in_a_file(said)


def _judged(fault: str, check: str = "G1", problem: Problem = _FP64) -> Callable[[], str]:
    """The message of a subject that raises or returns a wrong form."""
    return lambda: _first(_runner(Attention(fault)).findings(problem, _CHECKS[check]), "")


def _runner(call: Callable[..., Any]) -> Runner:
    return Runner(Subject.of(call, "attention"), Tally())


def _raises() -> str:
    code = "def attention(q, k, v, *, mask, sm_scale):\n    raise ValueError('N must be even')\n"
    return _first(_runner(_defined(code)).findings(_FP64, _CHECKS["G1"]), "")


def _defined(code: str, name: str = "attention") -> Any:
    """A function of a file ``attention.py``."""
    names: dict[str, Any] = {}
    exec(compile(code, "attention.py", "exec"), names)
    return names[name]


def _wrong_backward() -> str:
    trial = _trial("", Problem(M=3, N=2, dtype="fp64"), backward_reads=("out", "lse"))
    assert trial.got.dq is not None
    trial.got.dq.mul_(1.1)
    return _first(claims.backward(trial), "")


def _rows_of_both_signs(x: torch.Tensor) -> None:
    x[:, :, ::2] *= 1 + 4.2e-6
    x[:, :, 1::2] *= 1 - 4.2e-6


def _outside_limits(word: str, output: str, change: Callable[[torch.Tensor], object]) -> str:
    """The message about elements or sums after a change of an output."""
    problem = dataclasses.replace(_ROWS, dtype="fp32")
    trial = _trial("", problem, backward_reads=("out", "lse"))
    change(getattr(trial.got, output))
    return str(next(x for x in claims.limits(trial) if word in x.guarantee))


def _wrong_sums(output: str, spreads: float, columns: slice) -> str:
    """The message of identities after a shift of sums by so many of their spreads."""
    trial = _trial("", _ROWS)
    gradient = getattr(trial.got, output)
    spread = getattr(trial.variances, f"sum_{output}").sqrt()
    gradient[:, :, 5, columns] += (spreads * spread[:, :, columns]).to(gradient.dtype)
    return str(identities.identities(trial)[0])


# Crashes and hangs.


# The test that a message about a crash names.
_TEST = mock.patch.dict(os.environ, PYTEST_CURRENT_TEST="test_accuracy.py::test_it (call)")


def _crash(seconds: float, fault: Callable[[], object], **options: Any) -> str:
    """The message that a watchdog prints while ``fault`` runs."""
    with tempfile.TemporaryFile() as stderr, tempfile.TemporaryDirectory() as folder:
        before = os.dup(2)
        os.dup2(stderr.fileno(), 2)
        try:
            watchdog = Watchdog(Path(folder) / "record.json", seconds, **options)
        finally:
            os.dup2(before, 2)
            os.close(before)
        with contextlib.suppress(RuntimeError), _TEST, watchdog.watching(_FP64):
            fault()
        watchdog.close()
        stderr.seek(0)
        said = stderr.read().decode().strip()
    first, _, _ = said.partition("\n  at " + __file__)
    return first if first == said else f"{first}\n  ..."


def _hang() -> str:
    ended: list[int] = []
    attention = _defined("import time\ndef attention(x):\n    while not x: time.sleep(0.05)\n")
    said = _crash(0.2, lambda: attention(ended), end=ended.append)
    return re.sub(r"over 1 s (.*) in \d+ s, and", r"over 300 s \1 in 300 s, and", said)


def _lost_gpu() -> str:
    def fault() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    return _crash(60, fault, sticky=lambda error: True, end=lambda code: None)


# A kernel that ends its process, with the log that a worker keeps.
_DIES = """
import faulthandler, sys
faulthandler.enable(open(sys.argv[1], "w"), all_threads=False)
kernel = "import os\\ndef attention():\\n    os.kill(os.getpid(), 11)\\nattention()"
exec(compile(kernel, "attention.py", "exec"))
"""


def _died(problem: Problem | None, times: int = 1) -> str:
    """The message of xdist's controller about workers that died; why it stops, after the second."""
    with tempfile.TemporaryDirectory() as folder:
        path, log = Path(folder) / "gw0.json", Path(folder) / "gw0.log"
        process = subprocess.Popen(
            [sys.executable, "-S", "-c", _DIES, str(log)],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        assert process.wait() == -signal.SIGSEGV
        gateway = SimpleNamespace(id="gw0", _io=SimpleNamespace(popen=process))
        report: Any = SimpleNamespace(
            node=SimpleNamespace(gateway=gateway), location=("", 0, ""), longrepr=""
        )
        watchdog = Watchdog(path)
        reports: Any = SimpleNamespace(
            _file=lambda worker: path, _log=lambda worker: log, _restarts=None, _frame="", _stop="",
            _smallest=lambda record, ending: (),
        )  # fmt: skip
        running = contextlib.nullcontext() if problem is None else watchdog.watching(problem)
        with _TEST, running:
            for _ in range(times):
                report.longrepr = ""
                CrashReports.pytest_handlecrashitem(
                    reports, "test_accuracy.py::test_it", report, sched=None
                )
        watchdog.close()
    if times > 1:
        return str(reports._stop)
    said = re.sub(r"after \d+\.\d s", "after 1.3 s", str(report.longrepr).strip())
    first, _, _ = said.partition("\n  at attention.py:4")
    return f"{first}\n  ..."


# Options and files.


def _config(**options: object) -> Any:
    """As much of pytest's configuration as the plugins read."""
    named = {f"--fa-{name.replace('_', '-')}": value for name, value in options.items()}
    return SimpleNamespace(getoption=lambda name, default=None: named.get(name, default), stash={})


@contextlib.contextmanager
def _folder(files: Mapping[str, str]) -> Iterator[None]:
    """Changes to a new folder with some files, and forgets what they import."""
    modules, path = set(sys.modules), list(sys.path)
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for name, text in files.items():
            Path(name).write_text(text, encoding="utf-8")
        try:
            yield
        finally:
            sys.path[:] = path
            for name in set(sys.modules) - modules:
                if name.startswith("kernel_under_test_"):
                    del sys.modules[name]


class _Locked:
    """Cannot be pickled."""

    def __repr__(self) -> str:
        return "Report()"

    def __reduce__(self) -> str:
        raise TypeError("cannot pickle a lock")


def _unrepaired(call: Callable[[], object]) -> Callable[[], str]:
    """The exception of a call in a process that has loaded, and not repaired, the interpreter."""

    def message() -> str:
        needed = mock.patch("fa_verify.verification.is_needed", return_value=True)
        with needed, mock.patch("fa_verify.repaired_fork.repair"):
            return _error(call)()

    return message


def _error(
    call: Callable[[], object],
    prefix: str | None = None,
    files: Mapping[str, str] | None = None,
) -> Callable[[], str]:
    """The line in which pytest prints a refusal, or an exception after its type or a prefix."""

    def message() -> str:
        with _folder(files or {}):
            try:
                call()
            except pytest.UsageError as error:
                return f"ERROR: {error}".replace(f"{os.getcwd()}{os.sep}", "")
            except (ValueError, TypeError, RuntimeError) as error:
                return (f"{type(error).__name__}: " if prefix is None else prefix) + str(error)
        raise AssertionError("no error was raised")

    return message


def _kernel(given: str, source: str = "") -> Callable[[], str]:
    return _error(lambda: subject_of(_config(kernel=given)), files={"attention.py": source})


def _declared(**words: object) -> Callable[[], str]:
    def call() -> None:
        attention = _defined("def attention(q, k, v, *, mask, sm_scale):\n    pass\n")
        vars(attention).update(words)
        Subject.of(attention, "attention")

    return _error(call)


_SIGNATURE = "def attention(q, k, v, *, mask, sm_scale):\n    raise NotImplementedError\n"


def _arguments() -> None:
    from fa_kernels import flash_attention

    q, k = torch.zeros(1, 2, 8, 16), torch.zeros(1, 2, 8, 32)
    flash_attention(q, k, k)


class _Doubtful(Mask):
    """A mask whose predicate differs between one pair and many."""

    def mask_mod(self, b, h, m, n, *, M, N):  # type: ignore[no-untyped-def]
        return n <= (m if isinstance(m, torch.Tensor) and m.numel() > 1 else m - 1)


def _mask_forms() -> str:
    from fa_verify.mask_forms import definition_faults

    return str(definition_faults(Problem(M=4, N=4, mask=_Doubtful()))[0])


# The gate.


def _gate(part: str) -> Callable[[], str]:
    """The alarm of one part of the gate."""

    def message() -> str:
        problems = [Problem(dtype="fp16", seed=seed) for seed in range(8)]
        problems += [dataclasses.replace(_FP64, seed=9)]
        entries = tuple(Entry(x, "G1", x.dtype, {"out": (0.5, 0.1)}) for x in problems)
        then = Baseline(
            "attention", Environment("CPU", "2.13.0", "3.9.0"), entries,
            {"dq_kernel(bf16 fp32) BLOCK_M=64": Resources(128, 0, 49_152)},
            {"forward causal": (1.0, 1.01, 0.99, 1.0, 1.0)},
        )  # fmt: skip
        now = {i: Entry(x, "G1", "fp16", {"out": (1.25, 0.12)}) for i, x in enumerate(problems[:8])}
        found = differences(
            then, now, {8: "it did not run or did not finish"},
            {"dq_kernel(bf16 fp32) BLOCK_M=64": Resources(168, 16, 49_152)},
            {"forward causal": (0.9, 0.91, 0.9, 0.89, 0.9)},
        )  # fmt: skip
        return "\n".join(str(x) for x in found if x.part == part)

    return message


def _report(
    *said: str, fault: str = "", guarantees: tuple[str, ...], **declared: object
) -> Callable[[], str]:
    """The lines of a report of ``verify`` that contain one of some words."""

    def message() -> str:
        call = Attention(fault)
        vars(call).update(dtypes=("fp64",), **declared)
        subject = Subject.of(call, "attention")
        text = str(verify(subject, problems=2, guarantees=guarantees))
        return "\n".join(x for x in text.splitlines() if any(word in x for word in said))

    return message


def _of_tensors(**factors: float) -> Callable[[], str]:
    """The message of ``assert_attention_close`` with some tensors multiplied by factors."""

    def message() -> str:
        inputs = make(Problem(M=3, N=2, dtype="fp16"))
        out = torch_reference.attention(*inputs, mask=Mask(), sm_scale=0.25).out.half()
        given = {"out": out, **dict(zip("qkv", inputs, strict=False))}
        for name, factor in factors.items():
            given[name] = given[name] * factor
        try:
            assert_attention_close(**given, replay_folder=None)
        except (AssertionError, ValueError) as error:
            return f"{type(error).__name__}: {error}"
        raise RuntimeError("no error was found")

    return message


def _not_applicable() -> str:
    """The reasons of reports on problems, or on a subject, to which guarantees say nothing."""
    plain, two = Problem(), Problem(H=2, Hk=2)
    said = []
    for fault, problem, names in (
        ("", plain, ("G3", "G4", "G5", "G9", "T3")),
        ("", Problem(dtype="fp64", N=0), ("G5",)),
        ("", Problem(dtype="fp64", sm_scale=1e3), ("T3",)),
        ("needs two heads", two, ("G9", "G13")),
    ):
        call = Attention(fault)
        vars(call).update(dtypes=("fp32", "fp64"))
        report = verify(Subject.of(call, "attention"), problems=[problem], guarantees=names)
        said += [x for x in str(report).splitlines() if "not checked" in x]
    return "\n".join(said)


SECTIONS: Mapping[str, tuple[Kind, ...]] = {
    "Accuracy": (
        Kind(
            "G1: outside the bound",
            "The error exceeds the derived bound. Look at the tile and the indices of the bad "
            "elements first: they say which part of the kernel computed them. A ratio just above 1 "
            "asks for a declaration: another rounding, or another accumulator.",
            _found("G1", "out scaled", Problem(M=20, N=13, dtype="fp64", mask=Mask(causal=True))),
        ),
        Kind(
            "G1: the gradient of a bias",
            "`dbias` is wrong, while the other outputs are checked apart. Look at the axes along "
            "which the kernel sums the gradient.",
            _found(
                "dbias",
                "dbias of the first entry alone",
                Problem(B=2, M=3, N=2, dtype="fp64", bias="normal/mn"),
            ),
        ),
        Kind(
            "Backward: gradients that do not follow from the forward",
            "The gradients do not follow from the results that the forward returned, although they "
            "may lie within the bound of the whole. Look at the backward kernel. If it reads other "
            "results, declare `backward_reads`.",
            _wrong_backward,
        ),
        Kind(
            "G2: NaN or infinity",
            "Finite inputs in range gave NaN or infinity. Look for an exponential without its "
            "maximum, 0 / 0, and an infinity minus an infinity.",
            _found("G2", "NaN in lse", _MANY),
        ),
        Kind(
            "G11: a tile configuration",
            "Accuracy fails in one configuration, which the replay line names. Compare the tile "
            "sizes with those of a configuration that passes.",
            _found(
                "G1",
                "another tile past 16 keys",
                Problem(N=17, dtype="fp64", config="wide"),
                configs={"default": {}, "wide": {}},
            ),
        ),
        Kind(
            "T3: wrong in float64",
            "In float64 rounding is negligible, so this is a fault of logic: a wrong index, mask, "
            "factor or constant.",
            _found("T3", "one element off", _MANY),
        ),
    ),
    "Rows, padding and hidden pairs": (
        Kind(
            "G3: a row without a visible key",
            "Such a row gives out = 0, lse = -inf and dq = 0. Look at the division by the softmax "
            "sum, which is 0 there.",
            _found("G3", "lse of empty rows is 0", _MANY, "is not exact"),
        ),
        Kind(
            "G3: its gradient",
            "A row without a visible key contributes to a gradient. Look for a product of 0 and "
            "NaN: select the row out, do not multiply it by 0.",
            _found(
                "G3",
                "dout of empty rows",
                Problem(M=6, N=3, dtype="fp64", mask=Mask(causal=True)),
                "depends on",
            ),
        ),
        Kind(
            "G4: padding is not zero",
            "The kernel writes something other than zeros to padding, or does not write it.",
            _found("G4", "writes to padding", _MANY, "is not exact"),
        ),
        Kind(
            "G4: padding is read",
            "A value beyond the length of a sequence reaches a result. Look at the loads of the "
            "last tile: the mask of a load needs the length, not the size of the tensor.",
            _found("G4", "reads padding", _MANY, "depends on"),
        ),
        Kind(
            "G5: a hidden key",
            "A key that the mask hides from a row changes the row. The check gives the key the "
            "largest finite values. Look at the mask of the tiles that its edge crosses. Where a "
            "result is NaN, look for 0 times a score that overflowed: `p * (dp - delta)` needs the "
            "mask too.",
            _found("G5", "sees one key more", _MANY, "depends on a key"),
        ),
        Kind(
            "G5: a hidden row",
            "A row that does not see a key changes the gradients of the key. The check gives the "
            "row the largest finite values in dout, and in q for every other seed. The backward "
            "kernel has to mask dS too, not P alone.",
            _found("G5", "sees one key more", _MANY, "depends on a row"),
        ),
    ),
    "Memory": (
        Kind(
            "G6: unwritten elements",
            "The kernel returns memory that it did not write. Look at the grid and at the masks of "
            "stores.",
            _found("G6", "last row not written", _MANY, "is not written"),
        ),
        Kind(
            "G6: NaN that the kernel writes",
            "The kernel computes NaN where the right result is none, and a second run with another "
            "value in its allocations shows that memory is not the cause. Look for inf - inf, 0 "
            "times inf and 0 / 0.",
            _nan(lambda memory: memory * math.nan),
        ),
        Kind(
            "G6: a read of unwritten memory",
            "A result depends on memory that the kernel allocated and did not write. Look at "
            "scratch that is summed without a first store, and at accumulators that start without "
            "zeros.",
            _nan(lambda memory: memory * 2),
        ),
        Kind(
            "G6: another number in allocations",
            "Memory that the kernel does not write is read, and NaN in it has no effect by luck: a "
            "comparison with NaN is false, and a maximum can pass over it.",
            _way("nan is empty", "G6", 1),
        ),
        Kind(
            "G6: a set of gradients",
            "A gradient depends on which others are needed. Look at the launches of the backward "
            "that are left out where an input requires no gradient.",
            _found("sets", "half of dq alone", _MANY),
        ),
        Kind(
            "G6: a write out of bounds",
            "The kernel writes next to an allocation, whose guard band changed. Look at the mask "
            "of the last tile's store.",
            _found("G6", "writes past the end", _MANY, "is written outside"),
        ),
        Kind(
            "G6: a write out of bounds of scratch",
            "The allocation is no output. Its shape and dtype say which one it is.",
            _scratch,
        ),
        Kind(
            "G7: a read out of bounds",
            "Memory between or around the rows of an input reaches a result. Look for a load "
            "without a mask, and for a mask that lets one element too many pass.",
            _found("G7", "reads past the end", _MANY),
        ),
        Kind(
            "G8: strides",
            "A tensor with other strides gives another result. The replay line has the layouts. "
            "Look for a stride of one tensor that is used for another.",
            _found(
                "G8",
                "ignores strides",
                dataclasses.replace(_FP64, N=2, layouts=("bhsd", "bhsd", "padded", "bhsd")),
                "depends on the strides",
            ),
        ),
        Kind(
            "G8: the gradient of a sum",
            "`out.sum().backward()` passes a `dout` whose strides are 0, and the kernel misreads "
            "it. Copy such a tensor, or use its strides.",
            _found(
                "G8",
                "misreads an expanded dout",
                dataclasses.replace(_FP64, seed=0),
                "out.sum().backward()",
            ),
        ),
        Kind(
            "G8: the gradient of a mean",
            "A mean or a sum of out over some axes gives a `dout` with stride 0 along these.",
            _way("shared rows", "G8", 3),
        ),
        Kind(
            "G12: offsets",
            "An offset of 2**31 elements or more wraps around. Compute offsets with 64 bits.",
            _found("G12", "offsets of 32 bits", dataclasses.replace(_MANY, seed=1)),
        ),
    ),
    "Runs": (
        Kind(
            "G9: independence",
            "A batch entry or a head depends on its neighbours. Look at the strides of the batch "
            "and of the heads.",
            _found("G9", "v of the first batch entry for all", dataclasses.replace(_MANY, seed=1)),
        ),
        Kind(
            "G10: repeatability",
            "Two runs on the same inputs differ. Look for a race, or for sums by atomics: "
            "`atomic` declares outputs that are summed so.",
            _found("G10", "another result every call", _FP64),
        ),
        Kind(
            "G10: a refused second run",
            "The subject computes a problem once and refuses it later. Look for state that a call "
            "leaves behind.",
            _judged("refuses the second run", "G10"),
        ),
        *(
            Kind(
                f"G16: {title}",
                f"A call differs or fails {next(x for x in test_ways.WAYS if words in x)}. {look}",
                _way(fault),
            )
            for (fault, words), (title, look) in zip(
                test_ways.FAULTS.items(), _OF_WAYS, strict=True
            )
        ),
        Kind(
            "G13: state",
            "A call depends on an earlier call, here with another value of the named field. Look "
            "for a cache whose key lacks that argument.",
            _found("G13", "scale of the call before", _FP64),
        ),
        Kind(
            "G13: a call after one that differs in one argument",
            "A call has the result of an earlier call with another value of the named field. Look "
            "for a cache whose key lacks that argument. The check runs on a few fixed problems.",
            _found("sequence", "softcap of the first call", _FP64),
        ),
        Kind(
            "Outside the bound in one of two runs",
            "The subject does not promise equal bits for this guarantee, so both runs are compared "
            "with the bound. One of them leaves it. The same words end the messages of G3 to G13.",
            _found("G4", "reads padding", _MANY, "and leaves the bound", bitwise=()),
        ),
    ),
    "The same bits": (
        Kind(
            "I1: neighbours",
            "The bits of a batch entry depend on the number or the length of other entries. The "
            "message says where they part first, by how many representable numbers (ulp) at most, "
            "or that one of them is NaN or Inf, and in how many elements. Look for a schedule that "
            "reads the batch or the longest sequence.",
            _other_bits("batch", "tile by the longest sequence", test_same_bits.PADDED),
        ),
        Kind(
            "I2: chunks",
            "Queries have other bits in a chunk than among all queries. Look for a tile or a "
            "number of splits that depends on the number of rows.",
            _other_bits("chunks", "splits for one row", test_same_bits.CAUSAL),
        ),
        Kind(
            "I4: slices",
            "A slice of the heads has other bits alone. Look for a schedule that reads the number "
            "of heads.",
            _other_bits("heads", "tile by key/value heads", test_same_bits.CAUSAL),
        ),
        Kind(
            "I5: forms",
            "More padding, or packed sequences, change the bits. Look for a schedule that reads "
            "the sizes of the tensors instead of the lengths.",
            _other_bits("varlen", "splits by the keys of the tensor", test_same_bits.ONE_ROW),
        ),
        Kind(
            "I6: inference",
            "The forward has other bits where no gradient is required. Look for a second kernel, "
            "or another tile, for inference.",
            _other_bits("inference", "another tile without gradients", test_same_bits.CAUSAL),
        ),
    ),
    "Checks beside the bound": (
        Kind(
            "RMS: errors that are too large",
            "No element leaves its bound, but the errors together exceed the prediction for "
            "independent roundings. Look for one more rounding, or one of fewer digits.",
            _found("rms", "rounds to 6 digits", _ROWS),
        ),
        Kind(
            "Bias: errors on one side",
            "The errors prefer a sign; a negative mean is toward zero. Look for a cast that "
            "truncates.",
            _found("bias", "truncates", _ROWS),
        ),
        Kind(
            "Limit: an element",
            "An element lies within its bound, which adds the largest error of every rounding, and "
            "outside of what independent roundings add up to. Look for an operand of too few "
            "digits, and for a term that is lost.",
            lambda: _outside_limits("elements", "out", lambda out: out[0, 0, 5, 3].add_(1e-5)),
        ),
        Kind(
            "Limit: a row, a tile or an output",
            "`got` is the factor by which the values are too large. Every element may lie within "
            "its limit. Look for a scale or a constant of too few digits, and for a rescale that "
            "is lost.",
            lambda: _outside_limits("sums", "dq", lambda dq: dq[0, 0, 64:].mul_(1.00002)),
        ),
        Kind(
            "Limit: the mean of lse",
            "`got` is the mean error of lse. Look for weights that the softmax sum lacks or holds "
            "twice, and for a logarithm of too few digits.",
            lambda: _outside_limits("sums", "lse", lambda lse: lse.add_(3e-5)),
        ),
        Kind(
            "Limit: rows of both signs",
            "Some rows are too large and others too small, each by less than its limit. Look for a "
            "factor of a row that has too few digits, such as the one that rescales the sums.",
            lambda: _outside_limits("sums", "dq", _rows_of_both_signs),
        ),
        Kind(
            "Identities: one sum",
            "In each column, `dk` sums to 0 over the keys, and `dv` to the sum of `dout`. One "
            "column is wrong: look for a tile that is lost or added twice.",
            lambda: _wrong_sums("dv", 16.0, slice(3, 4)),
        ),
        Kind(
            "Identities: all sums",
            "No column is wrong alone, but all of them err by a little. Look for a small error "
            "that many elements share, as in delta.",
            lambda: _wrong_sums("dk", 3.0, slice(None)),
        ),
        Kind(
            "Closed form: the count of keys",
            "With k = 0, exp(lse) is the number of keys that a row sees. The kernel counts others.",
            _closed_form("counts", "sees one key more"),
        ),
        Kind(
            "Closed form: the mask read back",
            "With k = 0 and one-hot values, nonzero elements show which pairs the kernel sees. "
            "`want` is 1 for a visible pair.",
            _closed_form("mask", "sees one key more"),
        ),
        Kind(
            "Closed form: weights that sum to 1",
            "With k = 0 and v = 1, out is 1. Look at the normalisation: the sum and the product "
            "may use different weights.",
            _closed_form("ones", "divides by one too few"),
        ),
        Kind(
            "Closed form: linearity",
            "The forward is linear in v, to the bit for a power of two. Look for a clamp, or a "
            "format with too small a range.",
            _closed_form("doubled", "clips large values"),
        ),
        Kind(
            "Closed form: order of heads",
            "Reversing batch entries and heads reverses the outputs. One entry or head is treated "
            "differently.",
            _closed_form("permuted", "last head differs"),
        ),
    ),
    "Pooled probabilities": (
        Kind(
            "Pooled: the same guarantees",
            "The guarantees G1, G4 to G10 and T3 hold for pooled probabilities too. The place is a "
            "block of rows and keys.",
            _pooled("pooled G1", "one block off"),
        ),
        Kind(
            "Pooled: a hidden key",
            "A key that no row of the block sees changes the block.",
            _pooled("pooled G5", "of a hidden key"),
        ),
        Kind(
            "Pooled: a write out of bounds",
            "The kernel writes next to the result or next to scratch. The shape says which.",
            _pooled("pooled G6", "written past its end"),
        ),
    ),
    "Caches": (
        Kind(
            "G1: attention over a cache",
            "Look at the alignment of the queries, and at the lengths after the append.",
            lambda: test_cache_checks.claimed("accuracy"),
        ),
        Kind(
            "G1: a window over a cache",
            "The running maximum starts at -inf, and stays there until the row has seen a key.",
            lambda: test_cache_checks.claimed(
                "accuracy", test_cache_checks.starts_at_0, "hidden keys"
            ),
        ),
        Kind(
            "G1: an entry of many keys",
            "Look at what counts pages, tiles or splits: the short entries beside it are right.",
            lambda: test_cache_checks.claimed("many keys"),
        ),
        Kind(
            "G5: hidden keys of a cache",
            "Mask the loads of values that no row sees: 0 times NaN is NaN. An engine frees the "
            "pages that a window hides.",
            lambda: test_cache_checks.claimed("hidden keys"),
        ),
        Kind(
            "C1: pages",
            "Look at the entry of the table that each page is read from.",
            lambda: test_cache_checks.claimed("pages"),
        ),
        Kind(
            "C1: page sizes",
            "Tiles of keys begin at fixed keys, whatever the pages are.",
            lambda: test_cache_checks.claimed("page sizes"),
        ),
        Kind(
            "C2: free rows",
            "Mask the loads of keys, values and the table: 0 times NaN is NaN.",
            lambda: test_cache_checks.claimed("free rows"),
        ),
        Kind(
            "C3: an append",
            "An append writes its own rows. Attention reads them from the cache.",
            lambda: test_cache_checks.claimed("append"),
        ),
        Kind(
            "C4: far pages",
            "The product of a page and its stride needs 64 bits.",
            lambda: test_cache_checks.claimed("far pages"),
        ),
        Kind(
            "C5: nothing cached",
            "A query that sees no key has out 0 and lse -inf.",
            lambda: test_cache_checks.claimed("nothing cached"),
        ),
        Kind(
            "C5: unwritten memory",
            "A row that sees no key reads sums that nobody has written.",
            lambda: test_cache_checks.claimed(
                "nothing cached", test_cache_checks.reads_unwritten_sums
            ),
        ),
        Kind(
            "I1: neighbours in a cache",
            "The number of splits depends on the number of entries, or on the longest.",
            lambda: test_cache_checks.claimed("neighbours"),
        ),
        Kind(
            "I3: decoding",
            "The order of the keys depends on the number of queries.",
            lambda: test_cache_checks.claimed("decoding"),
        ),
    ),
    "Merged states": (
        Kind(
            "S1: outside the bound",
            "Look at the weights: relative to the largest lse, in the base of the lses.",
            _merging("accuracy"),
        ),
        Kind(
            "S1: an order of the parts",
            "The function treats a part by its place, as the first or the last.",
            _merging("groups"),
        ),
        Kind(
            "S1: parts in turn",
            "The result of earlier parts is a part of the next merge.",
            _merging("in turn"),
        ),
        Kind(
            "S1: a part that saw nothing",
            "Its weight is 0, and its out may be NaN: select, and do not multiply.",
            _merging("silent parts"),
        ),
        Kind(
            "S1: the gradient of a part that saw nothing",
            "Its gradients are zeros.",
            _merging("not 0"),
        ),
        Kind(
            "S1: one part",
            "The weight of a part alone is 1, and its logarithm 0.",
            _merging("one part"),
        ),
        Kind(
            "S1: one part beside silence",
            "The out of a part that saw nothing is multiplied by its weight of 0, and not left "
            "out. NaN and Inf survive.",
            _merging("beside"),
        ),
        Kind(
            "S1: storage",
            "The function takes a stride for granted, most often of the lses.",
            _merging("storage"),
        ),
        Kind(
            "S1: a slice",
            "Rows are merged independently of each other.",
            _merging("a slice"),
        ),
        Kind(
            "S1: distant elements",
            "An offset is computed in 32 bits.",
            _merging("far apart"),
        ),
        Kind(
            "S1: a hidden NaN",
            "A test such as `l > 0` is false for NaN, and the row looks empty.",
            _merging("not hidden"),
        ),
        Kind(
            "S1: a NaN of another row",
            "A reduction goes over rows.",
            _merging("another row"),
        ),
        Kind(
            "S1: a ring",
            "The calls of the parts are right alone. Look at their masks, and at the gradient of "
            "lse.",
            lambda: str(test_merging_checks.ring_finding()),
        ),
        Kind(
            "S2: the convention of lse",
            "The function returns another base, or another value where no part saw a key. Change "
            "it, or declare `lse_base` and `empty_lse`.",
            _conventions,
        ),
    ),
    "Streams and CUDA graphs": (
        Kind(
            "G15: other contents",
            "The graph holds a number, or an address, that a call computes anew: on the host, or "
            "from a tensor that is copied once.",
            _streams("replayed", "holds the first contents"),
        ),
        Kind(
            "G15: other calls",
            "A tensor that the graph reads was dropped from a cache, and another one has its "
            "memory.",
            _streams("replayed", "reads freed memory"),
        ),
        Kind(
            "G15: a first call in a capture",
            "The captured call cached what no kernel has computed yet.",
            _streams("first captured", "kept in a capture", test_streams.PREDICATE),
        ),
        Kind(
            "G15: a side stream",
            "A kernel runs on another stream than the current one, or on none that waits for it.",
            _streams("side stream", "its own stream"),
        ),
        Kind(
            "G15: two streams",
            "Two calls share scratch or a counter.",
            _streams("two streams", "its own stream"),
        ),
        Kind(
            "G15: the tensors of another stream",
            "The second call reads a cached tensor that a kernel of the first has yet to write.",
            _streams("two streams", "its own stream", test_streams.PREDICATE),
        ),
        Kind(
            "G15: other kernels",
            "Programs wait for each other, or rely on running together.",
            _streams("other kernels", "another result every call"),
        ),
        Kind(
            "G15: another device",
            "A kernel, or its scratch, goes to the current device, not to that of the tensors.",
            _streams("other device", "its own device"),
        ),
        Kind(
            "No graph",
            "The subject synchronises or copies from the host in a capture.",
            _not_captured,
        ),
    ),
    "Exceptions and wrong forms": (
        Kind(
            "An exception",
            "The subject raised something other than `NotImplementedError`. The line below the "
            "exception is the innermost one outside of libraries.",
            _raises,
        ),
        Kind(
            "A wrong dtype or shape",
            "An output has another form than the inputs ask for.",
            _judged("returns float64", problem=Problem(dtype="fp32")),
        ),
        Kind(
            "A changed input",
            "The kernel writes to a tensor that its caller owns. Every result after that call is "
            "of other inputs, so it is not judged.",
            _judged("scales q"),
        ),
        Kind(
            "A wrong number of values",
            "A subject returns `out`, or `(out, lse)`. Wrap a kernel that returns more.",
            _judged("two values"),
        ),
        Kind(
            "No gradient",
            "The output is not connected to the inputs. Return the output of an "
            "`autograd.Function`, or declare `backward=False`.",
            _judged("no gradient"),
        ),
    ),
    "Crashes and hangs": (
        Kind(
            "A hang",
            "A problem used more CPU time than `--problem-timeout` (and 1 s for every "
            "1e8 pairs of a row and a key), took 5 times as long by the "
            "clock, or compiled 10 times as long. With several workers, its test ran again with 5 "
            "times these limits. The stack begins at the innermost frame. A "
            "kernel that waits for itself shows the frame of its launch, and a compilation the "
            "frame of the compiler.",
            _hang,
        ),
        Kind(
            "A lost GPU",
            "After this error every later call on the GPU fails, so the process ends and another "
            "worker continues.",
            _lost_gpu,
        ),
        Kind(
            "A dead process",
            "The kernel ended its process in this problem. Replay it under compute-sanitizer or "
            "gdb.",
            lambda: _died(_FP64),
        ),
        Kind(
            "A process that died elsewhere",
            "No problem was running: the process died while it imported, compiled or ended.",
            lambda: _died(None),
        ),
        Kind(
            "Two processes that died in one line",
            "The kernel would end one worker after the other, so the run stops. Replay the "
            "problem, or run the other tests with the option.",
            lambda: _died(_FP64, times=2),
        ),
    ),
    "The report of `verify`": (
        Kind(
            "A call in place of a command",
            "`verify` receives a function, which has no name on a command line. Its replay line is "
            "a call. `Problem` comes from `fa_verify.oracles.problem`.",
            _report("leaves", "replay:", fault="out scaled", guarantees=("G1",)),
        ),
        Kind(
            "A guarantee that was not checked",
            "The declarations exclude every problem that the guarantee needs.",
            _report("not checked", masks=(), guarantees=("G1", "G4")),
        ),
        Kind(
            "A guarantee that is not applicable",
            "It says nothing about any of the problems, or the subject refuses the calls that it "
            "needs. The reason is the text of its `NotImplementedError`.",
            _not_applicable,
        ),
        Kind(
            "Nothing was verified",
            "The subject refused all problems, so the report is false. The reason is the text of "
            "its `NotImplementedError`.",
            _report("no problem", "unsupported", fault="refuses", guarantees=("G1",)),
        ),
        Kind(
            "A wrong argument",
            "Arguments of `verify` are checked by name.",
            _error(lambda: verify(Attention(), guarantees=("G1", "G99"))),
        ),
        Kind(
            "A process that died with the repaired interpreter",
            "Under Triton's interpreter `verify` runs in a fork that repairs it. The kernel ended "
            "this process.",
            _unrepaired(lambda: in_repaired_fork(lambda: os._exit(1))),
        ),
        Kind(
            "A report that cannot be returned from a fork",
            "The report refers to an object that cannot be pickled.",
            _unrepaired(lambda: in_repaired_fork(_Locked)),
        ),
        Kind(
            "An interpreter that no fork can repair",
            "A fork cannot use CUDA if its parent has.",
            _unrepaired(lambda: verify(Attention(), device="cuda")),
        ),
    ),
    "`assert_attention_close`": (
        Kind(
            "A tensor outside its bound",
            "The tensors come from your own test, so there is no problem to replay. The last line "
            "has the arguments of the call, and a test also prints the file that "
            "`fa-verify explain` judges again. If all elements are bad, compare mask and scale "
            "first.",
            _of_tensors(out=1.01),
        ),
        Kind(
            "An input that is not finite",
            "The mask does not hide this element, so a correct kernel has no finite results.",
            _of_tensors(k=math.inf),
        ),
        Kind(
            "Inputs out of range",
            "A correct kernel may overflow on these inputs: no accuracy is promised, so nothing is "
            "judged. Scale the inputs of the test.",
            _of_tensors(q=1e4, k=1e3),
        ),
    ),
    "Masks": (
        Kind(
            "The forms of a mask",
            "The dense form, the predicate in a kernel, and the tiles that it visits have to agree "
            "with `is_visible`. The message names the two forms, and the first pair on which they "
            "differ. No kernel computed attention: mend the mask first.",
            _mask_forms,
        ),
        Kind(
            "A class that is no mask",
            "`--mask` takes a subclass of `Mask`.",
            _error(
                lambda: mask_of(_config(mask="attention.py:Prefix")),
                files={"attention.py": "class Prefix:\n    pass\n"},
            ),
        ),
    ),
    "The gate": (
        Kind(
            "Coverage",
            "The baseline checked something that this run did not.",
            _gate("coverage"),
        ),
        Kind(
            "RMS of errors",
            "The errors grew, by more than chance explains, although they may lie within their "
            "bounds. The brackets hold the interval of the mean.",
            _gate("rms"),
        ),
        Kind(
            "Largest error",
            "The largest error/bound changed. It is an alarm above 1.",
            _gate("maxima"),
        ),
        Kind(
            "Compiled kernels",
            "A kernel spills registers, or takes a tenth more of them or of shared memory.",
            _gate("kernels"),
        ),
        Kind(
            "Speed",
            "The kernel lost 5 % or more against SDPA flash on the same GPU. The brackets hold the "
            "rounds' range, then the interval of the change.",
            _gate("speed"),
        ),
    ),
    "Arguments and declarations": (
        *(
            Kind(f"G14: {title}", meaning, _bad_call(then))
            for title, meaning, then in (
                (
                    "a bad call that returns",
                    "The kernel declares to refuse such calls, and computes something. Look at "
                    "what it checks of the named arguments.",
                    None,
                ),
                (
                    "a bad call that changes its inputs",
                    "The exception comes after the kernel has written to a tensor of the call.",
                    lambda q, k: k.fill_(0.0),
                ),
                (
                    "a bad call out of bounds",
                    "The kernel does not look at its arguments. An access out of bounds raises, in "
                    "the interpreter or by the GPU.",
                    test_bad_calls.outside,
                ),
            )
        ),
        Kind(
            "G14: an argument of the kernels",
            "The kernels of this repository name the argument, its value, and the value that it "
            "needs.",
            _error(_arguments),
        ),
        Kind(
            "An unknown declaration",
            "A misspelled declaration would have no effect, so it is refused.",
            _declared(head_dim=(64,)),
        ),
        Kind(
            "A wrong declaration",
            "The value of a declaration is not one of the known ones.",
            _declared(dtypes=("fp16", "fp8")),
        ),
        Kind(
            "A kernel without a file",
            "The path is relative to the current directory.",
            _kernel("kernels.py:attention"),
        ),
        Kind(
            "A kernel without its name",
            "The file has no such function. The message lists those that it has.",
            _kernel("attention.py:attn", _SIGNATURE),
        ),
        Kind(
            "A kernel that cannot be imported",
            "The file raised an exception; the message has its file and line.",
            _error(
                lambda: subject_of(_config(kernel="attention.py:attention")),
                files={"attention.py": "import flash_attn_9\n"},
            ),
        ),
        Kind(
            "A kernel that asks for a GPU at import",
            "There is no GPU, so the file runs in Triton's interpreter.",
            _error(
                lambda: subject_of(_config(kernel="attention.py:attention")),
                files={
                    "attention.py": "raise RuntimeError('0 active drivers ([]). "
                    "There should only be one.')\n"
                },
            ),
        ),
        Kind(
            "A kernel with another signature",
            "Write an adapter with the signature that the message names.",
            _kernel("attention.py:attention", "def attention(q, k):\n    pass\n"),
        ),
        Kind(
            "A kernel without such a name",
            "`--list-kernels` prints the names.",
            _kernel("sdpa-flsh"),
        ),
    ),
    "Options": (
        Kind(
            "Minutes",
            "A fuzzing run needs a positive number of minutes.",
            _error(lambda: minutes_of(_config(minutes="0"))),
        ),
        Kind(
            "Options that exclude each other",
            "The two options ask for different runs.",
            _error(lambda: minutes_of(_config(minutes="5", replay="{}"))),
        ),
        Kind(
            "The time limit of a problem",
            "The limit is in seconds.",
            _error(lambda: problem_timeout(_config(problem_timeout="1h"))),
        ),
        Kind(
            "A baseline without a file",
            "`--update-baseline` needs the file to write.",
            _error(lambda: Gate(_config(update_baseline=True, baseline=None))),
        ),
        Kind(
            "A corpus that is no folder",
            "`--corpus` names a folder, which may not exist yet.",
            _error(
                lambda: RegressionFiles(_config(corpus="corpus.json")), files={"corpus.json": ""}
            ),
        ),
        Kind(
            "A shared database without effect",
            "Only the profile `fuzz` keeps examples.",
            _error(lambda: example_database(_config(example_db="redis://host:6379"), None)),
        ),
    ),
    "Damaged files": (
        Kind(
            "A replay line",
            "Part of the JSON is missing: quote it as one word of the shell.",
            _error(lambda: Problem.from_json('{"version":1,"M"'), "ERROR: --replay: "),
        ),
        Kind(
            "A problem with an unknown field",
            "Another version of the suite wrote the problem, or the field is misspelled.",
            _error(lambda: Problem.from_json('{"version":1,"seqlen":7}'), "ERROR: --replay: "),
        ),
        Kind(
            "A regression file",
            "The test of this file fails. Restore the file, or delete it.",
            _error(
                lambda: CorpusEntry.read(Path("attention-g1.json")),
                "",
                {"attention-g1.json": '{"subject": "attention"}'},
            ),
        ),
        Kind(
            "A regression file of another mask",
            "The test of this file is skipped. Pass its class by `--mask`.",
            _error(
                lambda: CorpusEntry.read(Path("attention-g1.json")),
                "",
                {
                    "attention-g1.json": json.dumps(
                        {"problem": {"version": 1, "mask": {"type": "Prefix"}}}
                    )
                },
            ),
        ),
        Kind(
            "A baseline",
            "The file is damaged. `--update-baseline` cannot repair it: restore it, or delete it "
            "and write it again.",
            _error(
                lambda: Baseline.read(Path("baseline.json")),
                "ERROR: --baseline: ",
                {"baseline.json": '{"version": 2, "subject": "attention"}'},
            ),
        ),
    ),
}


def _rounded(message: str) -> str:
    """A message with 10 digits of each number, which are the same on every CPU."""
    long = r"-?\d+\.\d{10,}(?:e-?\d+)?"
    return re.sub(long, lambda x: repr(float(f"{float(x[0]):.10g}")), message)


def lines() -> list[str]:
    """The sections of the page."""
    found: list[str] = []
    for section, kinds in SECTIONS.items():
        found += [f"## {section}", ""]
        for kind in kinds:
            message = _rounded(kind.message()).strip()
            found += [f"### {kind.title}", "", "```text", message, "```", "", kind.meaning, ""]
    return found[:-1]
