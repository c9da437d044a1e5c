"""The subject, mask and device under test in a pytest session."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from pathlib import Path

import pytest
import torch

from fa_verify.oracles.masks.mask import Mask
from fa_verify.properties.subjects.loading import load, load_mask
from fa_verify.properties.subjects.subject import Subject
from fa_verify.registry import NAMED, spec_of

__all__ = ["CONFORMANCE", "OURS", "device_of", "is_ours", "is_whole", "mask_of", "subject_of"]

# In a checkout this is a link to tests/conformance.
CONFORMANCE = (Path(__file__).parent / "conformance").resolve()
OURS = NAMED["ours"].spec
_SUBJECT = pytest.StashKey[Subject]()
_MASK = pytest.StashKey[type[Mask] | None]()


def is_ours(config: pytest.Config) -> bool:
    """Return whether the project's own kernels are under test."""
    return config.getoption("--kernel", None) in (None, "ours", OURS)


def is_whole(config: pytest.Config) -> bool:
    """Return whether the command line selects all conformance tests."""
    named = [Path(argument.partition("::")[0]).resolve() for argument in config.args]
    option = config.option
    selects = option.keyword or option.markexpr or option.deselect or getattr(option, "lf", False)
    return not selects and any(CONFORMANCE.is_relative_to(x) for x in named)


def subject_of(config: pytest.Config) -> Subject:
    """Return the subject of --kernel, or the project's own kernels without the option.

    Raises:
        pytest.UsageError: The subject cannot be loaded, or its declarations are invalid.
    """
    if _SUBJECT not in config.stash:
        if is_ours(config) and importlib.util.find_spec("triton") is None:
            raise pytest.UsageError(
                "the project's own kernels need Triton, which is not installed; "
                "--kernel=path/to/file.py:name verifies a kernel that does not need Triton"
            )
        given = config.getoption("--kernel", None)
        try:
            subject = load(OURS if given is None else spec_of(given))
        except ValueError as error:
            raise pytest.UsageError(f"--kernel: {error}") from None
        if (assumed := config.getoption("--assume", None)) is not None:
            try:
                subject = subject.assuming(json.loads(assumed))
            except ValueError as error:
                raise pytest.UsageError(f"--assume: {error}") from None
        if not is_ours(config):
            name = given if given in NAMED else subject.name
            subject = dataclasses.replace(subject, name=name, source=given)
        if config.getoption("--forward-only", False):
            subject = dataclasses.replace(subject, backward=False)
        config.stash[_SUBJECT] = subject
        device_of(config)
    return config.stash[_SUBJECT]


def mask_of(config: pytest.Config) -> type[Mask] | None:
    """Return the mask class of --mask, or None without the option.

    Raises:
        pytest.UsageError: The class cannot be loaded, or no mask can be drawn from it.
    """
    if _MASK not in config.stash:
        given = config.getoption("--mask", None)
        try:
            config.stash[_MASK] = None if given is None else load_mask(given)
        except ValueError as error:
            raise pytest.UsageError(f"--mask: {error}") from None
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
            f"--kernel: {config.stash[_SUBJECT].name} declares devices {declared}; "
            "needs a GPU, and none is visible"
        )
    return "cpu"
