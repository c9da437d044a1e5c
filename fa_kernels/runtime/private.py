"""The private attributes of PyTorch that the package uses. No other module may name one.

Each is looked up once, on import. If a release of PyTorch drops one, the import fails and names it.
``ATTRIBUTES`` says what each is for. tests/unit/fa_kernels/runtime/test_private.py tests each, and
the undocumented attributes of Triton that ``launch_cache`` and ``launch.hopper`` read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = [
    "ATTRIBUTES",
    "SEEN_WITH",
    "below_autograd",
    "check",
    "dispatch_modes",
    "forward_ad_level",
    "function_modes",
    "is_batched_gradient",
    "is_profiled",
    "is_transformed",
    "traced_as_constant",
    "tracing_state",
]

# Releases of PyTorch that the attributes have been seen with.
SEEN_WITH = ("2.11", "2.13")
ATTRIBUTES = {
    "torch._C._len_torch_dispatch_stack": "count modes that see operators",
    "torch._C._len_torch_function_stack": "count modes that see functions",
    "torch._C._are_functorch_transforms_active": "refuse torch.func transforms",
    "torch._C._get_tracing_state": "notice torch.jit.trace",
    "torch.autograd._profiler_enabled": "notice the profiler",
    "torch._C._functorch.is_legacy_batchedtensor": "notice gradients of is_grads_batched",
    "torch.autograd.forward_ad._current_level": "refuse forward-mode derivatives",
    "torch._C._AutoDispatchBelowAutograd": "call an operator below autograd",
}


def check(name: str) -> None:
    """Checks that PyTorch has a private attribute, a name in ``ATTRIBUTES``.

    Raises:
        ImportError: It has none of that name.
    """
    owner: Any = torch
    for part in name.split(".")[1:]:
        if not hasattr(owner, part):
            raise ImportError(
                f"torch {torch.__version__} has no {name}, which fa_kernels needs to "
                f"{ATTRIBUTES[name]}; it was seen with torch {', '.join(SEEN_WITH)}"
            )
        owner = getattr(owner, part)


for _name in ATTRIBUTES:
    check(_name)
# Functions and a class of C, called without another frame: they are on the way of every call.
dispatch_modes = torch._C._len_torch_dispatch_stack
function_modes = torch._C._len_torch_function_stack
is_transformed = torch._C._are_functorch_transforms_active
tracing_state = torch._C._get_tracing_state
is_profiled = torch.autograd._profiler_enabled
is_batched_gradient = torch._C._functorch.is_legacy_batchedtensor
below_autograd = torch._C._AutoDispatchBelowAutograd
_forward_ad = torch.autograd.forward_ad


def forward_ad_level() -> int:
    """The level of forward-mode differentiation, -1 outside of it."""
    return _forward_ad._current_level


def traced_as_constant(function: Callable[..., Any]) -> Callable[..., Any]:
    """Has ``torch.compile`` call a function, and take the result for a constant.

    ``torch.compiler.assume_constant_result`` does the same; to import it takes a second.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
