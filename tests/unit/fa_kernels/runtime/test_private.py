"""Private attributes of PyTorch, and undocumented ones of Triton: each exists, and does its part.

Seen with PyTorch 2.11 and 2.13, and Triton 3.6 and 3.9. A failure here names the attribute that a
release dropped or changed.
"""

from __future__ import annotations

import ast
import warnings
from pathlib import Path

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")

import triton

import fa_kernels
from fa_kernels.launch import hopper
from fa_kernels.runtime import private

ROOT = Path(fa_kernels.__file__).parent
LIBRARIES = {"torch", "triton", "tl", "gl", "gluon"}


def private_names(tree: ast.Module) -> set[str]:
    """Dotted names of a library with a private part, dunder names left out."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            name = ast.unparse(node)
            first, *rest = name.split(".")
            if first in LIBRARIES and any(x[0] == "_" and x[:2] != "__" for x in rest):
                found.add(name)
        elif isinstance(node, ast.ImportFrom | ast.Import):
            modules = [getattr(node, "module", None) or "", *(x.name for x in node.names)]
            if modules[0].split(".")[0] in LIBRARIES:
                found |= {x for x in modules if x.startswith("_") or "._" in x}
    return found


def test_one_module_names_private_attributes():
    found = {
        path.relative_to(ROOT).as_posix(): names
        for path in ROOT.rglob("*.py")
        if (names := private_names(ast.parse(path.read_text(encoding="utf-8"))))
    }
    assert list(found) == ["runtime/private.py"]
    bound = set(private.ATTRIBUTES) - {"torch.autograd.forward_ad._current_level"}
    assert bound <= found["runtime/private.py"]


@pytest.mark.parametrize("name", private.ATTRIBUTES)
def test_an_attribute_that_is_gone_is_named_with_the_releases_that_have_it(name, monkeypatch):
    private.check(name)
    owner, _, last = name.rpartition(".")
    place = torch
    for part in owner.split(".")[1:]:
        place = getattr(place, part)
    monkeypatch.delattr(place, last)
    says = f"torch {torch.__version__} has no {name}, which fa_kernels needs to "
    with pytest.raises(ImportError) as info:
        private.check(name)
    assert str(info.value).startswith(says)
    assert str(info.value).endswith("; it was seen with torch 2.11, 2.13")


class SeenByDispatch(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


class SeenByFunction(TorchFunctionMode):
    pass


def test_len_torch_dispatch_stack_counts_modes():
    assert private.dispatch_modes() == 0
    with SeenByDispatch():
        assert private.dispatch_modes() == 1


def test_len_torch_function_stack_counts_modes():
    assert private.function_modes() == 0
    with SeenByFunction():
        assert private.function_modes() == 1


def test_are_functorch_transforms_active_is_true_within_a_transform():
    seen = []
    torch.func.grad(lambda x: seen.append(private.is_transformed()) or x.sum())(torch.ones(2))
    assert (private.is_transformed(), seen) == (False, [True])


def test_get_tracing_state_is_none_outside_of_a_trace():
    assert private.tracing_state() is None
    seen = []

    def traced(x):
        seen.append(private.tracing_state())
        return x + 1

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.jit.trace(traced, torch.ones(2), check_trace=False)
    assert seen[0] is not None


def test_profiler_enabled_is_true_within_the_profiler():
    assert not private.is_profiled()
    with torch.autograd.profiler.profile():
        assert private.is_profiled()


def test_is_legacy_batchedtensor_is_true_of_batched_gradients():
    seen = []

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(_ctx, x):
            return 2 * x

        @staticmethod
        def backward(_ctx, gradient):
            seen.append(private.is_batched_gradient(gradient))
            return 2 * gradient

    x = torch.ones(2, requires_grad=True)
    torch.autograd.grad(Twice.apply(x), x, torch.eye(2), is_grads_batched=True)
    torch.autograd.grad(Twice.apply(x), x, torch.ones(2))
    assert seen == [True, False]


def test_current_level_counts_forward_mode_differentiation():
    assert private.forward_ad_level() == -1
    with torch.autograd.forward_ad.dual_level():
        assert private.forward_ad_level() == 0


def test_auto_dispatch_below_autograd_records_nothing():
    x = torch.ones(2, requires_grad=True)
    with private.below_autograd():
        assert not (x + 1).requires_grad
    assert (x + 1).requires_grad


def test_the_mark_of_a_constant_is_the_one_that_assume_constant_result_sets():
    ours = private.traced_as_constant(lambda: 1)
    theirs = torch.compiler.assume_constant_result(lambda: 1)
    assert vars(ours) == vars(theirs) == {"_dynamo_marked_constant": True}


def test_a_frozen_dataclass_says_so():
    # ``opaque_handles`` reads ``__dataclass_params__``, which Python does not document.
    assert fa_kernels.Config.__dataclass_params__.frozen


def compiled_kernel(x_ptr, count, BLOCK: triton.language.constexpr):
    """Not run."""


def test_a_jit_function_has_its_function_and_its_parameters_in_order():
    jitted = triton.JITFunction(compiled_kernel)
    assert jitted.fn is compiled_kernel
    assert jitted.arg_names == ["x_ptr", "count", "BLOCK"]
    assert [x.name for x in jitted.params] == jitted.arg_names
    assert [x.is_constexpr for x in jitted.params] == [False, False, True]


def test_a_compiled_kernel_is_launched_by_its_grid():
    assert callable(triton.compiler.CompiledKernel.__getitem__)


def test_a_descriptor_made_without_checks_is_one_that_triton_makes():
    kind, layout = hopper._descriptors()
    x = torch.zeros(2, 3, 128, 64, dtype=torch.float16)
    made = hopper._described(x, 64, 64)
    checked = kind(x, [2, 3, 128, 64], list(x.stride()), [1, 1, 64, 64], layout)
    assert type(made) is kind
    # Fields that newer releases added have defaults on the class.
    for name, value in vars(checked).items():
        found = getattr(made, name)
        assert found is value if name in ("base", "layout") else found == value, name
