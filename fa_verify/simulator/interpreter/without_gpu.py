"""Stand-ins for what the code around interpreted kernels asks of a GPU."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from fa_verify.simulator.interpreter.limits import CannotRunError

__all__ = ["stand_in_for_a_gpu", "take_first_configurations"]


def take_first_configurations() -> None:
    """Launch autotuned kernels with the first configuration that pruning leaves.

    Timings in the interpreter say nothing about a GPU, and Triton's benchmark needs one.
    """
    from triton.runtime.autotuner import Autotuner

    # The smallest of equal timings is the first.
    Autotuner._bench = lambda self, *args, config, **meta: [0.0, 0.0, 0.0]


def stand_in_for_a_gpu() -> None:
    """Let Triton's driver answer for the CPU where no GPU's driver is active.

    Files of kernels ask it for a device or an architecture when they are imported.
    """
    from triton.backends.compiler import GPUTarget
    from triton.backends.driver import DriverBase

    class Driver(DriverBase):  # type: ignore[misc]
        """The CPU: the torch device "cpu", and a target that no kernel is tuned for."""

        @classmethod
        def is_active(cls) -> bool:
            return True

        def map_python_to_cpp_type(self, ty: str) -> str:
            raise CannotRunError("the interpreter compiles nothing")

        def get_current_device(self) -> int:
            # Kernels that the interpreter does not run, such as those of Gluon, begin with it.
            raise CannotRunError("the kernel asks Triton's driver for a GPU")

        def get_current_stream(self, device: object = None) -> int:
            return self.get_current_device()

        @property
        def utils(self) -> Any:
            return self.get_current_device()

        def get_current_target(self) -> Any:
            return GPUTarget("cpu", 0, 1)

        def get_active_torch_device(self) -> torch.device:
            return torch.device("cpu")

        def get_benchmarker(self) -> Any:
            raise CannotRunError("the interpreter times nothing")

    module: Any = importlib.import_module("triton.runtime.driver")
    original = module._create_driver

    def create_driver() -> Any:
        try:
            return original()
        except RuntimeError:
            return Driver()

    module._create_driver = create_driver
