"""A baseline: stored measurements of a kernel, in a file that is readable and easy to diff."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from fa_verify.oracles.outputs import OUTPUTS
from fa_verify.oracles.problem import Problem
from fa_verify.oracles.renamed import ARGUMENTS, CONSTANTS, KERNELS
from fa_verify.properties.regression.compiled_kernels import Resources
from fa_verify.properties.running.atomic_write import write_atomically

__all__ = ["VERSION", "Baseline", "Entry", "Environment", "digits"]

# Version 1 has the names that kernels of fa_kernels and their constants had then.
VERSION = 2
_T = TypeVar("_T")


def digits(value: float) -> float:
    """Round to five significant digits, the precision of the file and of comparisons with it."""
    return float(f"{value:.5g}")


@dataclass(frozen=True)
class Environment:
    """The environment of a run. Results are comparable only within the same environment.

    Args:
        device: Name of the GPU or of the CPU's architecture.
        torch: Version of torch.
        triton: Version of Triton; "none" if it is not installed.
    """

    device: str
    torch: str
    triton: str

    def differences(self, other: Environment) -> list[str]:
        """Return a clause for each difference, such as "torch 2.11.0, here 2.13.0"."""
        return [
            f"{word} {mine}, here {theirs}"
            for word, mine, theirs in (
                ("device", self.device, other.device),
                ("torch", self.torch, other.torch),
                ("Triton", self.triton, other.triton),
            )
            if mine != theirs
        ]


@dataclass(frozen=True)
class Entry:
    """A problem and its measurements.

    Args:
        problem: The problem.
        check: Name of the guarantee or other check that runs on it.
        arithmetic: Its column in the summary: its dtype, or "tf32" for fp32 with TF32 dot products.
        errors: Output to its largest error/bound and root mean square, see
            ``measurement.measured``.
    """

    problem: Problem
    check: str
    arithmetic: str
    errors: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    @property
    def mask(self) -> str:
        """The parts of the problem's mask, such as "causal+padding"; "full" without a mask."""
        mask = self.problem.mask
        parts = (
            ("causal", mask.causal),
            ("window", (mask.window_left, mask.window_right) != (None, None)),
            ("padding", (mask.seqlens_q, mask.seqlens_k) != (None, None)),
        )
        return "+".join(name for name, present in parts if present) or "full"


@dataclass(frozen=True)
class Baseline:
    """The measurements of a run.

    Args:
        subject: Name of the subject.
        environment: The environment.
        entries: The problems with their errors.
        kernels: Name of a compiled kernel to its resources; empty if nothing is compiled.
        speed: Name of a timed pass to its ratios to SDPA flash, one per round; empty if none was
            timed.
    """

    subject: str
    environment: Environment
    entries: tuple[Entry, ...]
    kernels: Mapping[str, Resources] = field(default_factory=dict)
    speed: Mapping[str, tuple[float, ...]] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Baseline:
        """Read a baseline from a file, without evaluating or importing its content.

        Raises:
            ValueError: The file does not exist, is damaged or has another version. The message
                names the file and the problem.
        """
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            return cls._from_record(record)
        except OSError as error:
            raise ValueError(f"{path} cannot be read: {error.strerror}") from None
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path} is damaged: {error}") from None

    def write(self, path: Path) -> None:
        """Write the baseline atomically, with one line per problem, kernel and timed pass.

        Raises:
            OSError: The file cannot be written. An existing file is unchanged.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, self._text())

    def _text(self) -> str:
        head = {"version": VERSION, "subject": self.subject, **vars(self.environment)}
        lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in head.items()]
        entries = [f"  {_line(_record(entry))}" for entry in self.entries]
        kernels = [f"  {json.dumps(k)}: {_line(vars(x))}" for k, x in sorted(self.kernels.items())]
        speed = [f"  {json.dumps(k)}: {_line(list(x))}" for k, x in sorted(self.speed.items())]
        for name, (opening, closing), part in (
            ("problems", "[]", entries), ("kernels", "{}", kernels), ("speed", "{}", speed)
        ):  # fmt: skip
            inside = "\n" + ",\n".join(part) + "\n" if part else ""
            lines.append(f'"{name}": {opening}{inside}{closing}')
        return "{\n" + ",\n".join(lines) + "\n}\n"

    @classmethod
    def _from_record(cls, record: object) -> Baseline:
        whole = _typed(record, dict, "it")
        version = whole.get("version")
        if version not in range(1, VERSION + 1):
            raise ValueError(f"version is {version!r}; this suite reads versions 1 to {VERSION}")
        words = [_of(whole, name, str) for name in ("subject", "device", "torch", "triton")]
        kernels = _each(whole, "kernels", _resources)
        if version == 1 and words[0] == "flash_attention":
            kernels = _of_today(kernels)
        return cls(
            words[0],
            Environment(*words[1:]),
            tuple(
                _entry(_typed(x, dict, f"problems[{i}]"), f"problems[{i}]")
                for i, x in enumerate(_of(whole, "problems", list))
            ),
            kernels,
            _each(whole, "speed", _ratios),
        )


def _of_today(kernels: Mapping[str, Resources]) -> dict[str, Resources]:
    """The kernels of version 1 by their names of today.

    Kernels that differ only in former constants are one kernel, with the most that any took.
    """
    found: dict[str, Resources] = {}
    for name, taken in kernels.items():
        today = _renamed(name)
        found[today] = taken.most(found.get(today))
    return found


def _renamed(kernel: str) -> str:
    """The name that ``compiled_kernels.name_of`` gives a kernel of version 1 today."""
    function, rest = kernel.split("(", 1)
    function = KERNELS.get(function, function)
    types, *constants = rest.split(")", 1)
    words = (word.partition("=") for word in "".join(constants).split())
    named = [
        f"{CONSTANTS.get(name, name)}={value}"
        for name, _, value in words
        if name not in ARGUMENTS.get(function, ())
    ]
    return " ".join([f"{function}({types})", *named])


def _line(record: object) -> str:
    return json.dumps(record, separators=(",", ":"))


def _record(entry: Entry) -> dict[str, Any]:
    return {
        "problem": json.loads(entry.problem.to_json()),
        "check": entry.check,
        "arithmetic": entry.arithmetic,
        "errors": {name: [digits(x) for x in pair] for name, pair in entry.errors.items()},
    }


def _typed(value: object, kind: type[_T], where: str) -> _T:
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ValueError(f"{where} is {str(value)[:60]!r}; needs a JSON {_JSON[kind]}")
    return value


_JSON = {dict: "object", list: "array", str: "string", int: "integer"}


def _of(record: Mapping[str, Any], name: str, kind: type[_T], where: str = "") -> _T:
    place = f"{where}.{name}" if where else name
    if name not in record:
        raise ValueError(f"{place} is missing")
    return _typed(record[name], kind, place)


def _each(record: Mapping[str, Any], name: str, made: Callable[[Any, str], _T]) -> dict[str, _T]:
    return {key: made(x, f"{name}[{key!r}]") for key, x in _of(record, name, dict).items()}


def _entry(record: Mapping[str, Any], where: str) -> Entry:
    errors = _of(record, "errors", dict, where)
    unknown = sorted(set(errors) - set(OUTPUTS))
    if unknown:
        raise ValueError(f"{where}.errors has {unknown}; needs some of {OUTPUTS}")
    try:
        problem = Problem.from_record(record.get("problem"))
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    pairs = {name: _numbers(x, f"{where}.errors.{name}") for name, x in errors.items()}
    if any(len(pair) != 2 for pair in pairs.values()):
        raise ValueError(f"{where}.errors is {errors!r}; needs two numbers for each output")
    return Entry(
        problem,
        _of(record, "check", str, where),
        _of(record, "arithmetic", str, where),
        {name: (pair[0], pair[1]) for name, pair in pairs.items()},
    )


def _resources(record: object, where: str) -> Resources:
    fields = _typed(record, dict, where)
    return Resources(*(_of(fields, name, int, where) for name in Resources.__dataclass_fields__))


def _ratios(record: object, where: str) -> tuple[float, ...]:
    return _numbers(record, where, least=2)


def _numbers(value: object, where: str, least: int = 0) -> tuple[float, ...]:
    """Convert a JSON array to a tuple of finite, non-negative numbers."""
    found: Sequence[object] = _typed(value, list, where)
    numbers = [float(x) for x in found if isinstance(x, int | float) and not isinstance(x, bool)]
    if len(numbers) < max(least, len(found)) or any(not 0 <= x < math.inf for x in numbers):
        raise ValueError(f"{where} is {str(value)[:60]!r}; needs {least} or more numbers >= 0")
    return tuple(numbers)
