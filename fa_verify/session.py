"""The subject, mask and device under test in a pytest session."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from fa_verify.adapters.registry import NAMED, spec_of
from fa_verify.oracles.masks.mask import Mask
from fa_verify.properties.kernels.loading import load, load_mask
from fa_verify.properties.kernels.subject import Subject

__all__ = [
    "CONFORMANCE",
    "NOT_ASKED",
    "OURS",
    "TURN_OVER",
    "TooFewError",
    "assumed_by",
    "device_of",
    "in_checkout",
    "is_ours",
    "is_turn",
    "is_whole",
    "mask_of",
    "paths_of",
    "select",
    "selects",
    "subject_of",
]

# In a checkout this is a link to tests/conformance.
_PLACE = Path(__file__).parent / "conformance"
CONFORMANCE = _PLACE.resolve()
_PACKAGE = "fa_verify.conformance"
OURS = NAMED["ours"].spec
# Name of the properties of a report that say which parts of a test were not asked, and why.
NOT_ASKED = "not asked"
# The reason for which a fuzzing run skips a test whose turn has found nothing.
TURN_OVER = "the turn is over"
_SUBJECT = pytest.StashKey[Subject]()
_MASK = pytest.StashKey[type[Mask] | None]()


class TooFewError(pytest.fail.Exception):
    """A check judged too few problems to say anything of the kernel."""

    __module__ = "builtins"  # as pytest's own, so that messages begin with the bare name


def is_ours(config: pytest.Config) -> bool:
    """Return whether the project's own kernels are under test."""
    return config.getoption("--fa-kernel", None) in (None, "ours", OURS)


def is_turn(report: Any) -> bool:
    """Return whether a test was skipped because its turn was over, and found nothing."""
    return bool(report.skipped and TURN_OVER in str(report.longrepr))


def in_checkout(config: pytest.Config) -> bool:
    """Return whether pytest runs in the root of the checkout that holds this module."""
    return _PLACE.is_symlink() and config.rootpath.resolve() == Path(__file__).resolve().parents[1]


def select(config: pytest.Config, *modules: str) -> None:
    """Replace the tests of the command line by the conformance tests, or by modules of them."""
    if _PLACE.is_symlink():
        config.args[:] = [str(CONFORMANCE / f"{x}.py") for x in modules] or [str(CONFORMANCE)]
    else:
        # By name: for a path, pytest would collect every folder above the package.
        config.option.pyargs = True
        config.args[:] = [f"{_PACKAGE}.{x}" for x in modules] or [_PACKAGE]


def paths_of(config: pytest.Config) -> list[Path]:
    """Return the files and folders that the command line names, without links."""
    found = []
    for argument in config.args:
        name = argument.partition("::")[0]
        path = Path(name)
        if getattr(config.option, "pyargs", False) and f"{name}.".startswith(f"{_PACKAGE}."):
            path = CONFORMANCE.joinpath(*name.split(".")[2:])
            path = path if path.is_dir() else path.with_suffix(".py")
        found.append(path.resolve())
    return found


def is_whole(config: pytest.Config) -> bool:
    """Return whether the command line selects all conformance tests."""
    return not selects(config) and any(CONFORMANCE.is_relative_to(x) for x in paths_of(config))


def selects(config: pytest.Config) -> bool:
    """Return whether options such as -k select some of the tests."""
    option = config.option
    return bool(
        option.keyword or option.markexpr or option.deselect or getattr(option, "lf", False)
    )


def subject_of(config: pytest.Config) -> Subject:
    """Return the subject of --fa-kernel, or the project's own kernels without the option.

    Raises:
        pytest.UsageError: The subject cannot be loaded, or its declarations are invalid.
    """
    if _SUBJECT not in config.stash:
        if is_ours(config) and importlib.util.find_spec("triton") is None:
            raise pytest.UsageError(
                "the project's own kernels need Triton, which cannot be imported; "
                "--fa-kernel=path/to/file.py:name verifies a kernel that does not need Triton"
            )
        try:
            subject = subject_from(**options_of(config))
        except ValueError as error:
            raise pytest.UsageError(str(error)) from None
        config.stash[_SUBJECT] = subject
        device_of(config)
    return config.stash[_SUBJECT]


def options_of(config: pytest.Config) -> dict[str, Any]:
    """Return the arguments of ``subject_from`` that the options of a run give."""
    return {
        "kernel": None if is_ours(config) else config.getoption("--fa-kernel", None),
        "assumed": config.getoption("--fa-assume", None),
        "forward_only": bool(config.getoption("--fa-forward-only", False)),
    }


def subject_from(
    kernel: str | None, assumed: str | None = None, *, forward_only: bool = False
) -> Subject:
    """Return the subject that options name.

    Args:
        kernel: Value of --fa-kernel; None for the project's own kernels.
        assumed: Value of --fa-assume.
        forward_only: Whether the backward is left out.

    Raises:
        ValueError: The subject cannot be loaded, or its declarations are invalid.
    """
    try:
        with warnings.catch_warnings():
            if kernel is not None:
                # A warning is not a wrong result, whatever filters the user's tests have.
                warnings.simplefilter("default")
            subject = load(OURS if kernel is None else spec_of(kernel))
    except ValueError as error:
        raise ValueError(f"--fa-kernel: {error}") from None
    if assumed is not None:
        try:
            subject = subject.assuming(json.loads(assumed))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"--fa-assume: {error}") from None
    if kernel is not None:
        name = kernel if kernel in NAMED else subject.name
        subject = dataclasses.replace(subject, name=name, source=kernel)
    return dataclasses.replace(subject, backward=False) if forward_only else subject


def assumed_by(config: pytest.Config) -> tuple[str, ...]:
    """Return phrases for what --fa-assume leaves out of a run; a replay leaves nothing out."""
    whole = config.getoption("--fa-replay", None) is None
    assumes = config.getoption("--fa-assume", None) is not None
    return subject_of(config).assumed if whole and assumes else ()


def mask_of(config: pytest.Config) -> type[Mask] | None:
    """Return the mask class of --fa-mask, or None without the option.

    Raises:
        pytest.UsageError: The class cannot be loaded, or no mask can be drawn from it.
    """
    if _MASK not in config.stash:
        given = config.getoption("--fa-mask", None)
        try:
            config.stash[_MASK] = None if given is None else load_mask(given)
        except ValueError as error:
            raise pytest.UsageError(f"--fa-mask: {error}") from None
    return config.stash[_MASK]


def device_of(config: pytest.Config) -> str:
    """Return "cuda" if a GPU is visible and the subject declares "cuda", else "cpu".

    Raises:
        pytest.UsageError: The subject declares GPUs only, and none is visible.
    """
    declared = config.stash[_SUBJECT].devices if _SUBJECT in config.stash else ("cpu", "cuda")
    if torch.cuda.is_available() and "cuda" in declared:
        return "cuda"
    if "cpu" not in declared:
        raise pytest.UsageError(
            f"--fa-kernel: {config.stash[_SUBJECT].name} declares devices {declared}; "
            "needs a GPU, and none is visible"
        )
    return "cpu"
