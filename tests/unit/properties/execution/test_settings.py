from __future__ import annotations

import contextlib

import pytest
import torch

from fa_verify.properties.execution.settings import changed_settings


def _deterministic() -> None:
    torch.utils.deterministic.fill_uninitialized_memory ^= True


def _read() -> dict[str, object]:
    return {
        "device": torch.get_default_device(),
        "dtype": torch.get_default_dtype(),
        "grad": torch.is_grad_enabled(),
        "deterministic": torch.get_deterministic_debug_mode(),
        "fill": torch.utils.deterministic.fill_uninitialized_memory,
        "threads": torch.get_num_threads(),
        "precision": torch.get_float32_matmul_precision(),
        "seed": torch.get_rng_state().tolist(),
    }


# How a kernel changes each setting, and what is said of it.
CHANGES = {
    "the default device": (lambda: torch.set_default_device("meta"), " from cpu to meta"),
    "the default dtype": (
        lambda: torch.set_default_dtype(torch.float64), " from torch.float32 to torch.float64",
    ),
    "the grad mode": (lambda: torch.set_grad_enabled(False), " from True to False"),
    "the deterministic mode": (lambda: torch.set_deterministic_debug_mode(1), " from 0 to 1"),
    "fill_uninitialized_memory": (_deterministic, " from True to False"),
    "the number of threads": (lambda: torch.set_num_threads(torch.get_num_threads() + 1), " from "),
    "the precision of float32 products": (
        lambda: torch.set_float32_matmul_precision("high"), " from highest to high",
    ),
    "the state of the default generator": (lambda: torch.rand(1), ""),
}  # fmt: skip


@pytest.mark.parametrize("raises", [False, True])
@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_setting_is_named_and_restored(name, raises):
    change, said = CHANGES[name]
    before = _read()
    ended = pytest.raises(ValueError, match="once") if raises else contextlib.nullcontext()
    with ended, changed_settings() as changed:
        change()
        if raises:
            raise ValueError("once")
    assert len(changed) == 1
    assert changed[0].startswith(name + said)
    assert _read() == before


def test_a_block_that_changes_nothing_has_changed_nothing():
    with changed_settings() as changed:
        torch.ones(3) + 1
    assert changed == []
