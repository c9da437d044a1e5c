"""The command ``fa-verify``: verify a kernel or a mask, and say what can run on this machine.

It starts pytest in another process, on the conformance tests of the installed package, with the
options of ``pytest_plugin``. No code of a kernel runs in this one. The configuration of the current
directory has no part in the run.
"""

from __future__ import annotations

import argparse
import ast
import importlib.metadata
import importlib.util
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from fa_verify.conformance_process import Status, run

__all__ = ["main", "parsed"]

# In a checkout this is a link to tests/conformance.
_TESTS = (Path(__file__).parent / "conformance").resolve()
_PLUGIN = "fa_verify.pytest_plugin.running"
# Packages that ``doctor`` lists, and their use.
_PACKAGES = {
    "torch": "computes the exact results and the bounds",
    "triton": "runs Triton kernels",
    "numpy": "runs Triton's interpreter",
    "hypothesis": "draws problems",
    "pytest": "runs the checks",
    "pytest-xdist": "runs them in several processes, so that a crash is a finding",
    "pytest-timeout": "ends a test that hangs",
    "mpmath": "checks the bounds in the tests of this package",
    "redis": "shares Hypothesis's examples",
}
_NEEDED = ("hypothesis", "pytest")
# The option of pytest that prints everything.
_VERBOSE = re.compile(r"-[lqsx]*v[lqsvx]*|--verbose(=.*)?|--verbosity(=.*)?")
# The replay line of ``verify``, and the string in it.
_CALL = re.compile(r"""verify\(.*[._]from_json\(('(?:[^'\\]|\\.)*')\)""")
# Options of the command that the plugin has too, with a value.
_GIVEN_TO_PYTEST = (
    "kernel", "assume", "mask", "replay", "minutes", "breadth", "report", "waive", "sarif"
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command, and return its exit status: see docs/command.md."""
    options = parsed(sys.argv[1:] if arguments is None else arguments)
    if options.command == "list":
        from fa_verify.adapters.registry import kernel_table

        print("\n".join(kernel_table()))
        return Status.HOLDS
    if options.command == "doctor":
        print("\n".join(_doctor()))
        return Status.HOLDS
    if options.command == "explain" and options.file is not None:
        return _explain(options.file, options.mask)
    if options.command == "probe":
        from fa_verify.probing.command import run as probe

        return probe(options)
    if why_not := _without_tests():
        print(f"fa-verify {options.command} {why_not}", file=sys.stderr)
        return Status.USAGE
    assumed = []
    # The replay line of ``explain`` carries what was assumed.
    if options.command == "check":
        assumed = _assumed(options.kernel, options.of_pytest, bits=not options.quick)
    named = options.kernel or getattr(options, "mask", None) or "the kernel"
    return _run([*assumed, *options.of_pytest], named)


def _assumed(kernel: str | None, of_pytest: Sequence[str], *, bits: bool) -> list[str]:
    """Probe a kernel in another process; return pytest's option with the assumed declarations.

    Registered kernels declare what they need. ``bits`` also prints which parts of a problem have
    the same bits. A kernel that cannot be loaded, crashes or hangs is left to the checks.
    """
    if kernel is None or (":" not in kernel and not bits):
        return []
    with tempfile.TemporaryDirectory() as folder:
        file, record = Path(folder) / "assumed.json", Path(folder) / "record.json"
        command = [
            sys.executable, "-m", "fa_verify", "probe", kernel, f"--assume={file}",
            f"--record={record}", *["--bits"] * bits,
            *(x.replace("--fa-", "--") for x in of_pytest if x.startswith("--fa-problem-timeout=")),
        ]  # fmt: skip
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
        if done.returncode not in (Status.HOLDS, Status.USAGE):
            from fa_verify.properties.running.watchdog import Record

            last = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
            if done.returncode < 0:
                last = f"signal {-done.returncode} ({signal.strsignal(-done.returncode)})"
            if running := Record.read(record):
                how = f"{running.state}: {running.detail}" if running.detail else last
                last = f"{how}, with {running.problem}"
            so = "" if file.is_file() else ", so nothing is assumed"
            print(f"{kernel} ended the probe{so}: {last}")
        return [f"--fa-assume={file.read_text(encoding='utf-8')}"] if file.is_file() else []


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse a command line; ``of_pytest`` holds the arguments of pytest, if it is started.

    Raises:
        SystemExit: The command line is wrong, with status 2.
    """
    given = list(arguments)
    end = given.index("--") if "--" in given else len(given)
    given, beyond = given[:end], given[end + 1 :]
    parser, replays = _parsers()
    options = parser.parse_args(given)
    if options.command in ("list", "doctor", "probe"):
        if beyond:
            parser.error(f"{options.command} starts no pytest, and got {shlex.join(beyond)}")
        return options
    if options.command == "explain":
        _read_replay(options, replays)
    of_pytest = [
        f"--fa-{name}={value}"
        for name in _GIVEN_TO_PYTEST
        if (value := getattr(options, name, None)) is not None
    ]
    if getattr(options, "junit", None) is not None:
        of_pytest += [f"--junit-xml={options.junit}", "-o", "junit_suite_name=fa-verify"]
    if options.forward_only:
        of_pytest.append("--fa-forward-only")
    if options.json is not None:
        of_pytest.append(f"--fa-findings={options.json}")
    if getattr(options, "quick", False):
        of_pytest.append("--fa-quick")
    if options.command == "check":
        of_pytest.append(f"--fa-corpus={options.corpus}")
    if options.command != "explain" and _version("pytest-xdist") is not None:
        of_pytest += ["-n", "auto"]
        # In every worker, pytest-benchmark warns that it measures nothing there.
        of_pytest += ["-p", "no:benchmark"]
    options.of_pytest = [*of_pytest, *beyond]
    return options


def _parsers() -> tuple[argparse.ArgumentParser, argparse.ArgumentParser]:
    """Return the parser of the command, and that of ``explain``."""
    parser = argparse.ArgumentParser(
        prog="fa-verify",
        description="Verify attention kernels. Exit status: 0 HOLDS, 1 FAILED, 2 wrong usage or a "
        "kernel that cannot be loaded, 3 an error of the suite, 4 NOT VERIFIED.",
        epilog="Arguments after -- are passed to pytest: fa-verify check my.py:attention -- -x",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    check = commands.add_parser("check", help="verify a kernel", description="Verify a kernel.")
    check.add_argument(
        "kernel", metavar="KERNEL", help="my.py:attention, package.module:name, or a name of list"
    )
    much = check.add_mutually_exclusive_group()
    much.add_argument(
        "--quick",
        action="store_true",
        help="run only the problems that kill most known faults: a minute on two cores",
    )
    much.add_argument("--minutes", metavar="NUMBER", help="draw new problems for so many minutes")
    check.add_argument("--report", metavar="DIR", help="write report.html and report.json there")
    check.add_argument(
        "--corpus", metavar="DIR", default="fa-verify-problems",
        help="replay the problems of this folder first; --minutes adds those that fail "
        "(default: %(default)s)",
    )  # fmt: skip
    check.add_argument("--junit", metavar="FILE", help="write the outcomes of all tests as JUnit")
    check.add_argument("--sarif", metavar="FILE", help="write the findings as SARIF 2.1.0")
    check.add_argument(
        "--breadth", choices=("wide", "medium", "narrow"),
        help="number and size of the problems on a CPU (default: by the speed of the kernel)",
    )  # fmt: skip
    check.add_argument(
        "--waive", metavar="FILE",
        help="known failures, lines of 'guarantee, pattern, reason': they do not fail the run",
    )  # fmt: skip
    probe = commands.add_parser(
        "probe",
        help="find out what a kernel takes and how it rounds",
        description="Find out what a kernel takes, its conventions and how it rounds. Exit status "
        "1 if that refutes one of its declarations.",
    )
    probe.add_argument("kernel", metavar="KERNEL", help="as for check")
    probe.add_argument("--json", metavar="FILE", help="write the answers, one JSON object")
    probe.add_argument(
        "--pictures", metavar="DIR", help="draw the orders of the sums there, as SVG"
    )
    probe.add_argument("--replay", metavar="JSON", help="run one experiment of an answer again")
    probe.add_argument("--assume", metavar="FILE", help=argparse.SUPPRESS)
    probe.add_argument("--bits", action="store_true", help=argparse.SUPPRESS)
    probe.add_argument("--record", metavar="FILE", help=argparse.SUPPRESS)
    probe.add_argument(
        "--problem-timeout", metavar="SECONDS", type=float, default=60.0,
        help="end the probe if a call uses more CPU time, 5 times as long by the clock, or 10 "
        "times as long to compile (default: %(default)g)",
    )  # fmt: skip
    explain = commands.add_parser(
        "explain",
        help="run every check on the problem of a failure",
        description="Run every check on the problem of a failure, and show all that fail.",
    )
    explain.add_argument(
        "line",
        nargs="*",
        metavar="REPLAY",
        help="a replay line, as printed, its JSON, or a file that "
        "assert_attention_close has written",
    )
    explain.add_argument(
        "--kernel", "--fa-kernel", metavar="KERNEL", help="the kernel, for JSON alone"
    )
    explain.add_argument(
        "--mask", "--fa-mask", metavar="FILE:CLASS", help="the mask, for JSON alone"
    )
    explain.add_argument(
        "--assume", "--fa-assume", metavar="JSON",
        help="the declarations that check assumed, as the replay line has them",
    )  # fmt: skip
    explain.add_argument("--replay", "--fa-replay", metavar="JSON", help=argparse.SUPPRESS)
    mask = commands.add_parser(
        "mask", help="verify kernels on a class of masks", description="Verify a class of masks."
    )
    mask.add_argument("mask", metavar="FILE:CLASS", help="my.py:Prefix or package.module:Name")
    mask.add_argument("--kernel", metavar="KERNEL", help="the kernel (default: fa_kernels)")
    for one in (check, explain, mask):
        one.add_argument(
            "--forward-only", "--fa-forward-only", action="store_true", help="verify no gradients"
        )
        one.add_argument("--json", metavar="FILE", help="write outcomes and findings, JSON lines")
    commands.add_parser("list", help="the kernels with names, and which can run here")
    commands.add_parser("doctor", help="what is installed, and what can run here")
    return parser, explain


def _read_replay(options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Take kernel, mask and problem from a replay line, in one word or in several."""
    words = options.line
    options.file = None
    if len(words) == 1 and words[0].endswith(".npz"):
        ignored = [x for x in ("kernel", "assume", "json", "forward_only") if getattr(options, x)]
        if ignored:
            parser.error(f"a file of results takes no --{ignored[0].replace('_', '-')}")
        options.file = words[0]
        return
    if len(words) == 1 and (call := _CALL.search(words[0])):
        # The line of ``verify`` is Python: it names a function, and no file to load it from.
        if options.kernel is None:
            parser.error(
                "the replay line is a call of verify; needs --kernel=FILE:NAME for its function"
            )
        options.replay = ast.literal_eval(call[1])
        return
    if len(words) == 1 and " " in words[0] and not words[0].startswith("{"):
        line = words[0].removeprefix("fa-verify explain ")
        parser.parse_args(shlex.split(line), options)
        words = options.line
    if len(words) == 1 and words[0].startswith("{") and options.replay is None:
        if options.kernel is None and options.mask is None:
            parser.error("the JSON alone needs --kernel=FILE:NAME, or a name of fa-verify list")
        options.replay = words[0]
    elif words not in ([], ["pytest"]) or options.replay is None:
        parser.error(
            f"REPLAY is {shlex.join(words)!r}; needs a replay line, as a failure prints it, "
            "its JSON, or a file of assert_attention_close"
        )


def _explain(file: str, mask: str | None) -> int:
    """Judge the results in a file of ``assert_attention_close`` again, and print the findings."""
    from fa_verify.attention_close import assert_attention_close
    from fa_verify.replay_files import read

    try:
        if mask is not None:
            from fa_verify.properties.kernels.loading import load_mask

            load_mask(mask)
        assert_attention_close(**read(file), replay_folder=None)
    except AssertionError as found:
        print(found)
        return Status.FAILED
    except (TypeError, ValueError) as error:
        print(f"fa-verify explain: {error}", file=sys.stderr)
        return Status.USAGE
    print("every result lies within its bound")
    return Status.HOLDS


def _run(of_pytest: Sequence[str], kernel: str) -> int:
    """Run the conformance tests, and return the exit status of the command."""
    arguments = [
        str(_TESTS), f"--rootdir={_TESTS}", f"--confcutdir={_TESTS}", f"--config-file={os.devnull}",
        # Assertions of the suite need no rewriting, which takes longer than many a check.
        "--assert=plain",
        "-p", _PLUGIN, "-p", "no:cacheprovider", "-o", "console_output_style=classic",
    ]  # fmt: skip
    if _version("pytest-timeout") is not None:
        arguments.append("--timeout=900")
    # One screen: pytest's header and warnings, and most tables, are printed with -v.
    if not any(_VERBOSE.fullmatch(x) for x in of_pytest):
        arguments += ["-q", "--disable-warnings"]
    return run([*arguments, *of_pytest], kernel)


def _version(package: str) -> str | None:
    """Return the version of an installed distribution, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _doctor() -> Iterator[str]:
    """Yield the lines of ``doctor``."""
    yield f"fa-verify {_version('fa-verify') or '(not installed)'} in {Path(__file__).parent}"
    yield (
        f"Python {platform.python_version()}, {platform.system()} {platform.machine()}, "
        f"{os.cpu_count()} CPUs"
    )
    width = max(map(len, _PACKAGES))
    for name, use in _PACKAGES.items():
        yield f"  {name:{width}}  {_version(name) or 'not installed':16}{use}"
    for what, why_not in (
        ("a PyTorch function on the CPU", None),
        ("a kernel on a GPU", _without_gpu()),
        ("a Triton kernel in the interpreter", _without_interpreter()),
        ("fa-verify check, explain and mask", _without_tests()),
    ):
        yield f"{what}: {'can run' if why_not is None else f'cannot run: {why_not}'}"


def _without_gpu() -> str | None:
    """Return why no kernel can run on a GPU, or None."""
    import torch

    if torch.version.hip:
        return "AMD GPUs are not supported"
    if not torch.version.cuda:
        return f"torch {torch.__version__} is built without CUDA"
    return None if torch.cuda.is_available() else "no GPU is visible"


def _without_interpreter() -> str | None:
    """Return why the interpreter cannot be repaired, or None."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed: pip install 'fa-verify[triton]'"
    os.environ["TRITON_INTERPRET"] = "1"
    from fa_verify.simulator.interpreter.repair import repair

    try:
        repair()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def _without_tests() -> str | None:
    """Return the packages that are missing for a run, or None."""
    missing = [name for name in _NEEDED if _version(name) is None]
    return f"needs {' and '.join(missing)}: pip install {' '.join(missing)}" if missing else None


if __name__ == "__main__":
    sys.exit(main())
