"""Runs the commands of the page "The first hour", and writes what they print.

python -m docs.transcript [--here] [--wheel FILE] [--only NAMES] [--out FOLDER]

A wheel of this checkout and Triton are installed into an empty virtual environment, in an empty
folder with the kernel of docs/first_hour. ``--here`` uses the packages of this interpreter instead,
for a machine without the network, and ``--wheel`` a wheel made elsewhere. The kernel is changed
between the commands, as on the page.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
KERNELS = ROOT / "docs" / "first_hour"
PROBE = "fa-verify probe kernel.py:attention"
CHECK = "fa-verify check kernel.py:attention --quick"
EXPLAIN = "fa-verify explain --kernel=kernel.py:attention"
SMALLEST = """'{"version":1,"M":2,"N":36,"dtype":"fp16"}'"""
# By the file of the output: the command, and the file of the change that precedes it.
STEPS: Mapping[str, tuple[str, str | None]] = {
    "probe-1": (PROBE, None),
    "check-1": (CHECK, None),
    "explain-1": (f"{EXPLAIN} {SMALLEST}", None),
    "explain-2": (f"{EXPLAIN} {SMALLEST}", "fix.diff"),
    "probe-2": (PROBE, "numerics.diff"),
    "check-2": (f"{CHECK} --waive known.txt", None),
}


def main(arguments: list[str] | None = None) -> None:
    """Run all steps, and write each output to a file."""
    parser = argparse.ArgumentParser(
        prog="python -m docs.transcript",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--here", action="store_true", help="use the packages of this interpreter")
    parser.add_argument("--wheel", type=Path, metavar="FILE", help="install it, and make none")
    parser.add_argument("--out", default=KERNELS / "output", type=Path, metavar="FOLDER")
    parser.add_argument("--only", default=",".join(STEPS), metavar="NAMES")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="fa-verify-first-hour-") as temporary:
        place = Path(temporary)
        folder = place / "kernels"
        shutil.copytree(KERNELS, folder, ignore=shutil.ignore_patterns("output", "__pycache__"))
        environment = _installed(place, options)
        for name, (command, change) in STEPS.items():
            if change is not None:
                subprocess.run(["git", "apply", change], cwd=folder, check=True)
            if name in options.only.split(","):
                text = "\n".join(_said(command, folder, environment))
                (options.out / f"{name}.txt").write_text(text + "\n", encoding="utf-8")


def _installed(place: Path, options: argparse.Namespace) -> dict[str, str]:
    """Install the package; return the environment in which its command runs."""
    wheel = options.wheel or built_wheel(place, alone=options.here)
    pip = [sys.executable, "-m", "pip", "-q"]
    kept = {k: x for k, x in os.environ.items() if not k.startswith(("PYTEST_", "PYTHONPATH"))}
    if options.here:
        target = place / "site"
        alone = ["--no-deps", "--no-index", "--target", target]
        subprocess.run([*pip, "install", *alone, wheel], check=True)
        others = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        scripts = [target / "bin", Path(sys.executable).parent]
        path = os.pathsep.join([str(target), *filter(None, others)])
        return _with_path(kept | {"PYTHONPATH": path}, scripts)
    subprocess.run([sys.executable, "-m", "venv", place / "venv"], check=True)
    pip = [place / "venv/bin/python", "-m", "pip", "-q"]
    command = [*pip, "install", "-c", ROOT / "constraints" / "cpu.txt"]
    subprocess.run([*command, f"{wheel}[triton]"], check=True)
    return _with_path(kept, [place / "venv/bin"])


def built_wheel(place: Path, *, alone: bool) -> Path:
    """Build a wheel of the checkout in a folder; ``alone`` needs no network."""
    source = place / "source"
    tracked = ["git", "ls-files", "-co", "--exclude-standard"]
    for name in subprocess.check_output(tracked, cwd=ROOT, text=True).splitlines():
        if (ROOT / name).is_symlink() or (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, source / name, follow_symlinks=False)
    how = ["--no-deps", *(["--no-build-isolation", "--no-index"] if alone else [])]
    command = [sys.executable, "-m", "pip", "-q", "wheel", *how, "-w", place, source]
    subprocess.run(command, check=True)
    (wheel,) = place.glob("fa_verify-*.whl")
    return wheel


def _with_path(environment: dict[str, str], scripts: list[Path]) -> dict[str, str]:
    before = os.environ.get("PATH", "")
    return environment | {"PATH": os.pathsep.join([*map(str, scripts), before])}


def _said(command: str, folder: Path, environment: Mapping[str, str]) -> Iterator[str]:
    """Run a command; yield it, its output without paths of this machine, status and seconds."""
    began = time.monotonic()
    done = subprocess.run(
        shlex.split(command), cwd=folder, env=environment, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    seconds = time.monotonic() - began
    yield f"$ {command}"
    text = done.stdout.replace(str(folder), "/home/me").replace(str(folder.parent), "/opt")
    # Worker processes announce themselves with returns of the carriage.
    lines = (line.rpartition("\r")[2].rstrip() for line in text.splitlines())
    yield re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()
    yield f"$ echo $?\n{done.returncode}"
    print(f"{command}: status {done.returncode}, {seconds:.0f} s", flush=True)


if __name__ == "__main__":
    main()
