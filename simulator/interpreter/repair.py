"""Repair Triton's interpreter, so that every interpreted kernel computes the bits of a GPU.

The interpreter of Triton 3.9 stores bfloat16 as uint16 and computes with these integers. It
truncates instead of rounding. It fills the masked-off lanes of a load with zeros, which hides
kernels that rely on them. It spends two thirds of its time on patching the language at every call
of a nested function, on overflow checks without effect, and on building equal types.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from fa_verify.simulator.interpreter.addresses import watch_addresses
from fa_verify.simulator.interpreter.dot_order import product_in_order
from fa_verify.simulator.interpreter.eight_bit_floats import EIGHT_BIT_FLOATS, read, saturated
from fa_verify.simulator.interpreter.launches import (
    leave_tensors_on_the_cpu,
    repair_launches,
    skip_idle_work,
)
from fa_verify.simulator.interpreter.libdevice import interpret_libdevice
from fa_verify.simulator.interpreter.limits import CannotRunError
from fa_verify.simulator.interpreter.rounding import (
    fma_bf16,
    nearest_bf16,
    step_toward_zero,
    tree_sum_16_bit,
    truncate_to_tf32,
    widen_bf16,
)
from fa_verify.simulator.interpreter.without_gpu import (
    stand_in_for_a_gpu,
    take_first_configurations,
)

__all__ = ["describe", "is_needed", "repair"]

# Arrays of any element type. The Triton type of the handle determines the meaning of the elements.
Array = npt.NDArray[Any]

_NARROW_FLOATS = ("fp16", "bf16")
_repaired = False


def repair() -> None:
    """Repair the interpreter of the installed Triton. Later calls do nothing.

    Call this with TRITON_INTERPRET=1 in the environment, before Triton is imported and before any
    kernel is loaded. Afterwards:

    - Casts between fp16, bf16, fp32 and fp64, and from integers, round once: to nearest, ties to
      even, or toward zero if the kernel requests it. bf16 widens exactly.
    - Casts to fp8e4nv and fp8e5 round once too, and saturate. NaN in them is read as NaN.
    - Elementwise operations on bf16 compute in fp32 and round to bf16. ``fma`` rounds once.
    - A comparison of scalars can be part of a mask of blocks.
    - ``tl.sum`` and the scans over fp16 and bf16 round after every addition. The sum is a tree.
    - ``tl.dot`` multiplies bf16 operands as fp32 (their products are exact), as it does for fp16.
      With TF32, the default for fp32, it truncates each operand to 10 bits of mantissa. "tf32x3"
      runs as "ieee".
    - A masked-off lane of ``tl.load`` without ``other`` is NaN, or 0x5A in every byte.
    - A load, store or atomic outside of the tensors of its launch raises OutOfBoundsError.
    - ``libdevice``, block pointers and atomic additions of bf16 work.
    - A launch that needs what the interpreter lacks raises CannotRunError, for example for scaled
      dot products of bf16. Every other exception is an InterpreterError, as before.
    - NumPy's floating-point warnings are disabled inside a launch.
    - The language is patched once per launch and restored afterwards.
    - Operators of tensors and some functions look up their types, and call NumPy directly.
    - Integer overflow is checked only in debug mode; otherwise the result was unused.
    - An autotuned kernel takes its first configuration, and Triton's driver answers for the CPU.

    Raises:
        RuntimeError: The interpreter is disabled, or the installed Triton lacks an attribute that
            the repair replaces.
    """
    global _repaired
    if _repaired:
        return
    found = os.environ.get("TRITON_INTERPRET")
    if found is None:
        raise RuntimeError("TRITON_INTERPRET is not set; the repair needs TRITON_INTERPRET=1")
    import triton
    import triton.language as tl
    from triton.runtime import interpreter

    if not triton.knobs.runtime.interpret:
        raise RuntimeError(f"TRITON_INTERPRET is {found!r}; the repair needs TRITON_INTERPRET=1")
    if not isinstance(tl.sum, interpreter.InterpretedFunction):
        raise RuntimeError(
            f"tl.sum is a {type(tl.sum).__name__}; the repair needs an InterpretedFunction: "
            "set TRITON_INTERPRET=1 before Triton is imported"
        )
    _check_attributes(triton.__version__, interpreter)
    _repair_casts(interpreter)
    _repair_elementwise(interpreter)
    _repair_reductions(interpreter)
    _repair_dots(interpreter)
    _repair_memory(interpreter)
    leave_tensors_on_the_cpu(interpreter)
    watch_addresses(interpreter)
    interpret_libdevice(interpreter)
    repair_launches(interpreter)
    skip_idle_work(interpreter)
    take_first_configurations()
    stand_in_for_a_gpu()
    _repaired = True


def is_needed() -> bool:
    """Return whether this process has loaded Triton for the interpreter without a repair."""
    triton = sys.modules.get("triton")
    return triton is not None and not _repaired and bool(triton.knobs.runtime.interpret)


def describe() -> str:
    """Return one line for the header of a test run, which says whether the repair is installed."""
    if not _repaired:
        return "interpreter not repaired"
    return (
        "interpreter repaired: bf16 round-to-nearest-even casts, saturating casts to e4m3 and "
        "e5m2, bf16 arithmetic and dots, "
        "poisoned masked loads, checked addresses, TF32 truncation, libdevice, block pointers, "
        "one language patch a launch, "
        "first configurations of autotuners"
    )


_REPLACED = {
    "InterpreterBuilder": (
        "cast_impl create_fp_to_fp get_bf16 binary_op unary_op ternary_op create_fma create_dot "
        "create_dot_scaled create_masked_load create_masked_store create_atomic_rmw "
        "create_atomic_cas create_int_to_ptr create_extern_elementwise"
    ),
    "ReduceOps": "min_max sum",
    "ScanOps": "cumsum cumprod",
    "GridExecutor": "__call__ __init__ _init_args_hst _restore_args_dev",
    "InterpretedFunction": "__call__ rewrite",
    "TensorHandle": "__post_init__",
    "interpreter_semantic": (
        "load binary_op_sanitize_overflow_impl binary_op_type_checking_impl broadcast_impl_value "
        "cast make_tensor"
    ),
}
_USED = (
    "TensorHandle InterpreterError _LangPatchScope _get_np_dtype _patch_attr _patch_lang "
    "tl.block_type tl.dtype tl.pointer_type tl.tensor tl.core.builtin tl.core._unwrap_if_constexpr "
    "interpreter_builder.options.debug TensorDescriptor InterpreterOptions inspect.getcallargs "
    "_ir.ROUNDING_MODE.RTZ _ir.INPUT_PRECISION.TF32 _ir.ATOMIC_OP.FADD"
)


def _check_attributes(version: str, interpreter: Any) -> None:
    """Raise RuntimeError if the interpreter lacks an attribute, before any is replaced."""
    needed = [f"{owner}.{name}" for owner, names in _REPLACED.items() for name in names.split()]
    for path in [*_USED.split(), *needed]:
        place = interpreter
        for name in path.split("."):
            if not hasattr(place, name):
                raise RuntimeError(
                    f"Triton {version} has no triton.runtime.interpreter.{path}, "
                    "which the repair of the interpreter needs"
                )
            place = getattr(place, name)


def _is_bf16(handle: Any) -> bool:
    """Return whether a handle holds bfloat16 bits."""
    return bool(handle.dtype.scalar.name == "bf16" and handle.data.dtype == np.uint16)


def _is_8_bit_float(handle: Any) -> bool:
    """Return whether a handle holds codes of e4m3 or e5m2."""
    return handle.dtype.scalar.name in EIGHT_BIT_FLOATS and handle.data.dtype == np.uint8


def _values(handle: Any) -> Array:
    """Return a handle's data as NumPy numbers, bfloat16, e4m3 and e5m2 as float32."""
    data: Array = handle.data
    if _is_8_bit_float(handle):
        return read(data, handle.dtype.scalar.name)
    return widen_bf16(data) if _is_bf16(handle) else data


def _is_other_fp8(kind: Any) -> bool:
    """Return whether a type is one of the formats of 8 bits that are not repaired."""
    return bool(kind.is_fp8() and kind.name not in EIGHT_BIT_FLOATS)


def _repair_casts(interpreter: Any) -> None:
    """Make every cast between the standard types round once."""
    import triton.language as tl

    builder, handle_of = interpreter.InterpreterBuilder, interpreter.TensorHandle
    original_cast, original_fp_to_fp = builder.cast_impl, builder.create_fp_to_fp
    toward_zero = interpreter._ir.ROUNDING_MODE.RTZ

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        target = dst_type.scalar
        if _is_other_fp8(src.dtype.scalar) or _is_other_fp8(target):
            return original_cast(self, src, dst_type)
        values = _values(src)
        if target.name in EIGHT_BIT_FLOATS:
            return handle_of(saturated(values, target.name), target)
        if target.is_bf16():
            return handle_of(nearest_bf16(values), target)
        return handle_of(values.astype(interpreter._get_np_dtype(target)), target)

    def create_fp_to_fp(self: Any, src: Any, dst_type: Any, rounding_mode: Any) -> Any:
        target = dst_type.scalar
        if _is_other_fp8(src.dtype.scalar) or _is_other_fp8(target):
            return original_fp_to_fp(self, src, dst_type, rounding_mode)
        if target.name in EIGHT_BIT_FLOATS and rounding_mode == toward_zero:
            return handle_of(saturated(_values(src), target.name, toward_zero=True), target)
        nearest = cast_impl(self, src, dst_type)
        if rounding_mode != toward_zero:
            return nearest
        return handle_of(step_toward_zero(_values(src), nearest.data, _values(nearest)), target)

    def get_bf16(self: Any, value: Any) -> Any:
        return handle_of(nearest_bf16(np.array([value], dtype=np.float64)), tl.bfloat16)

    builder.cast_impl = cast_impl
    builder.create_fp_to_fp = create_fp_to_fp
    builder.get_bf16 = get_bf16


def _repair_elementwise(interpreter: Any) -> None:
    """Compute elementwise bfloat16 operations in float32 and round the result."""
    import triton.language as tl

    builder, handle_of = interpreter.InterpreterBuilder, interpreter.TensorHandle
    original_binary, original_unary = builder.binary_op, builder.unary_op
    original_ternary, original_fma = builder.ternary_op, builder.create_fma

    def widened(handle: Any) -> Any:
        return handle_of(widen_bf16(handle.data), tl.float32) if _is_bf16(handle) else handle

    def narrowed(handle: Any) -> Any:
        # The result of a comparison is not a float.
        if handle.data.dtype != np.float32:
            return handle
        return handle_of(nearest_bf16(handle.data), tl.bfloat16)

    def binary_op(self: Any, lhs: Any, rhs: Any, op: Callable[..., Array]) -> Any:
        if _is_bf16(lhs):
            result = narrowed(original_binary(self, widened(lhs), widened(rhs), op))
        else:
            result = original_binary(self, lhs, rhs, op)
        if result.data.dtype == np.bool_:
            # Triton 3.9 names the operands' type, and so makes a block of integers of a scalar
            # comparison, which no load takes as a mask.
            result.dtype = tl.int1
        return result

    def unary_op(self: Any, arg: Any, op: Callable[..., Array]) -> Any:
        if _is_bf16(arg):
            return narrowed(original_unary(self, widened(arg), op))
        return original_unary(self, arg, op)

    def ternary_op(self: Any, lhs: Any, rhs: Any, other: Any, op: Callable[..., Array]) -> Any:
        # A selection copies bits, so it needs no conversion.
        if op is np.where or not _is_bf16(other):
            return original_ternary(self, lhs, rhs, other, op)
        return narrowed(original_ternary(self, widened(lhs), widened(rhs), widened(other), op))

    def create_fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        if _is_bf16(z):
            return handle_of(fma_bf16(_values(x), _values(y), _values(z)), tl.bfloat16)
        return original_fma(self, x, y, z)

    builder.binary_op = binary_op
    builder.unary_op = unary_op
    builder.ternary_op = ternary_op
    builder.create_fma = create_fma


def _repair_reductions(interpreter: Any) -> None:
    """Reduce and scan bfloat16 as numbers, and round 16-bit sums after every addition."""
    import triton.language as tl

    handle_of = interpreter.TensorHandle
    reduction, scan = interpreter.ReduceOps, interpreter.ScanOps
    original_min_max, original_sum = reduction.min_max, reduction.sum
    original_cumsum, original_cumprod = scan.cumsum, scan.cumprod

    def min_max(self: Any, input: Any, val_reduce_op: Any, idx_reduce_op: Any = None) -> Any:
        input = input[0] if isinstance(input, tuple) else input
        if not _is_bf16(input.handle):
            return original_min_max(self, input, val_reduce_op, idx_reduce_op)
        wide = self.to_tensor(widen_bf16(input.handle.data), tl.float32)
        result = original_min_max(self, wide, val_reduce_op, idx_reduce_op)
        value, *index = result if isinstance(result, tuple) else (result,)
        value = interpreter.interpreter_semantic.cast(value, tl.bfloat16)
        return (value, *index) if index else value

    def sum_16_bit(self: Any, input: Any) -> Any:
        if input.dtype.name not in _NARROW_FLOATS:
            return original_sum(self, input)
        total = tree_sum_16_bit(input.handle.data, self.axis, self.keep_dims)
        return self.to_tensor(total, input.dtype)

    def rounding_scan(original: Any, op: np.ufunc) -> Any:
        def scan_bf16(self: Any, input: Any) -> Any:
            if not _is_bf16(input.handle):
                return original(self, input)
            bits = np.moveaxis(input.handle.data.copy(), self.axis, 0)
            for i in range(1, len(bits)):
                bits[i] = nearest_bf16(op(widen_bf16(bits[i - 1]), widen_bf16(bits[i])))
            bits = np.moveaxis(bits, 0, self.axis)
            return [tl.core.tensor(handle_of(bits, tl.bfloat16), input.type)]

        return scan_bf16

    reduction.min_max = min_max
    reduction.sum = sum_16_bit
    scan.cumsum = rounding_scan(original_cumsum, np.add)
    scan.cumprod = rounding_scan(original_cumprod, np.multiply)


def _repair_dots(interpreter: Any) -> None:
    """Convert the operands of dot products as tensor cores do."""
    import triton.language as tl

    builder, handle_of = interpreter.InterpreterBuilder, interpreter.TensorHandle
    original_dot, original_scaled = builder.create_dot, builder.create_dot_scaled
    tf32 = interpreter._ir.INPUT_PRECISION.TF32

    def create_dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, *rest: Any) -> Any:
        if _is_bf16(a) or _is_8_bit_float(a):
            a, b = (handle_of(_values(x), tl.float32) for x in (a, b))
        elif a.data.dtype == np.float32 and input_precision == tf32:
            a, b = (handle_of(truncate_to_tf32(x.data), tl.float32) for x in (a, b))
        elif a.data.dtype == np.float16 and d.data.dtype == np.float32:
            # The same products and sums, but faster: NumPy has no fast path for mixed dtypes.
            a, b = (handle_of(x.data.astype(np.float32), tl.float32) for x in (a, b))
        product = product_in_order(a.data, b.data, d.data.dtype)
        if product is not None:
            return handle_of(product + d.data, d.dtype.scalar)
        return original_dot(self, a, b, d, input_precision, *rest)

    def create_dot_scaled(self: Any, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(x, handle_of) and _is_bf16(x) for x in (*args, *kwargs.values())):
            raise CannotRunError("the interpreter has no tl.dot_scaled of bf16")
        return original_scaled(self, *args, **kwargs)

    builder.create_dot = create_dot
    builder.create_dot_scaled = create_dot_scaled


# The value of a masked-off lane: NaN if the type has one. Integers are 0x5A in every byte.
_POISON: dict[str, float] = {
    **dict.fromkeys(("fp16", "fp32", "fp64"), np.nan),
    "bf16": 0x7FC0,
    **dict.fromkeys(("fp8e5", "fp8e4nv", "fp8e4b15"), 0x7F),
    **dict.fromkeys(("fp8e4b8", "fp8e5b16"), 0x80),
    "int1": True,
}
_WILD = 0x5A5A5A5A5A5A5A5A


def _repair_memory(interpreter: Any) -> None:
    """Poison masked-off lanes without ``other``, and add bfloat16 by atomics."""
    builder, handle_of = interpreter.InterpreterBuilder, interpreter.TensorHandle
    original_load, original_rmw = builder.create_masked_load, builder.create_atomic_rmw
    semantic = interpreter.interpreter_semantic
    original_semantic_load = semantic.load
    add = interpreter._ir.ATOMIC_OP.FADD
    other_given = False

    def load(ptr: Any, mask: Any, other: Any, *rest: Any) -> Any:
        nonlocal other_given
        # Triton 3.9's load tests `if other`, and so drops a one-element `other` that is false.
        other_given = other is not None
        try:
            return original_semantic_load(ptr, mask, other, *rest)
        finally:
            other_given = False

    # Triton 3.9 passes keywords from the load of a tensor descriptor.
    def create_masked_load(
        self: Any, ptrs: Any, mask: Any, other: Any, *rest: Any, **named: Any
    ) -> Any:
        if other is None and not other_given:
            element = ptrs.get_element_ty()
            dtype = interpreter._get_np_dtype(element)
            poison = np.array(_POISON.get(element.name, _WILD)).astype(dtype)
            other = handle_of(np.full(ptrs.data.shape, poison), element)
        return original_load(self, ptrs, mask, other, *rest, **named)

    def create_atomic_rmw(self: Any, op: Any, ptr: Any, val: Any, mask: Any, *rest: Any) -> Any:
        if op != add or not _is_bf16(val):
            return original_rmw(self, op, ptr, val, mask, *rest)
        left = np.flatnonzero(np.broadcast_to(mask.data, ptr.data.shape))
        addresses, values, before = ptr.data.ravel(), val.data.ravel(), np.zeros_like(val.data)
        while left.size:
            # Lanes of one address take turns, and each addition rounds.
            _, turn = np.unique(addresses[left], return_index=True)
            lanes = left[turn]
            pointers = handle_of(addresses[lanes], ptr.dtype)
            old = self.create_load(pointers, None, False).data
            total = nearest_bf16(widen_bf16(old) + widen_bf16(values[lanes]))
            self.create_store(pointers, handle_of(total, val.dtype), None)
            before.flat[lanes] = old
            left = np.delete(left, turn)
        return handle_of(before, val.dtype.scalar)

    semantic.load = load
    builder.create_masked_load = create_masked_load
    builder.create_atomic_rmw = create_atomic_rmw
