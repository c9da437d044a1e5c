"""Code around interpreted kernels that needs a GPU works without one."""

from __future__ import annotations

import os

import pytest
import torch

from fa_verify.simulator.interpreter import repair as repaired
from tests.unit.properties.kernels.test_without_gpu import no_gpu

__all__ = ["no_gpu"]

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip(
        "the Triton interpreter is not in use: kernels run on the GPU", allow_module_level=True
    )
repaired.repair()

CONFIGS = [triton.Config({"WIDTH": width}) for width in (64, 16, 32)]


def fill_width(configs, **options):
    """A kernel that writes the width that the autotuner chooses."""

    def body(target, N, WIDTH: tl.constexpr):
        tl.store(target, WIDTH)

    kernel = triton.autotune(configs, key=["N"], **options)(triton.jit(body))
    target = torch.zeros(1, dtype=torch.int32)
    kernel[(1,)](target, 3)
    return target.item()


def test_an_autotuned_kernel_takes_its_first_configuration(no_gpu):
    assert fill_width(CONFIGS) == 64


def test_the_first_configuration_is_that_of_the_pruned_ones(no_gpu):
    def narrow(configs, named, **given):
        return [x for x in configs if x.kwargs["WIDTH"] < 64]

    assert fill_width(CONFIGS, prune_configs_by={"early_config_prune": narrow}) == 16


def test_hooks_of_an_autotuner_run_for_the_launch_alone(no_gpu):
    target = torch.ones(1)

    def add(target, N, WIDTH: tl.constexpr):
        tl.store(target, tl.load(target) + 1)

    kernel = triton.autotune(CONFIGS, key=["N"], reset_to_zero=["target"])(triton.jit(add))
    kernel[(1,)](target, 3)
    assert target.item() == 1


def test_triton_answers_for_the_cpu(no_gpu):
    active = triton.runtime.driver.active
    assert active.get_active_torch_device() == torch.device("cpu")
    assert active.get_current_target().backend == "cpu"


def test_the_header_says_so():
    assert "first configurations of autotuners" in repaired.describe()
