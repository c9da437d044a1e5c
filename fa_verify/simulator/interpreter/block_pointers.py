"""Block pointers for interpreted kernels: ``tl.make_block_ptr`` and ``tl.advance``.

Triton 3.9 has removed them, and kernels that were written for 3.6 use them. A load or store by a
block pointer becomes one by a block of pointers, whose addresses are checked as any others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["add_block_pointers"]

# One object, so that a plan of a load that fills with it is found again: NaN equals no number.
_PADDING: dict[str, float] = {"zero": 0, "nan": float("nan")}


@dataclass(frozen=True, eq=False)
class _BlockPointer:
    """A block of a tensor in memory.

    Args:
        base: The pointer to the tensor's first element, of the language.
        shape: The tensor's sizes.
        strides: Its strides, in elements.
        offsets: The first index of the block in each dimension, of 32 bits.
        block_shape: The sizes of the block.
        type: A pointer to a block, of the language.
    """

    base: Any
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offsets: tuple[int, ...]
    block_shape: tuple[int, ...]
    type: Any

    @property
    def dtype(self) -> Any:
        """The type, as a scalar of the language has it."""
        return self.type

    def advance(self, offsets: Sequence[Any]) -> _BlockPointer:
        """Return the pointer to the block that lies ``offsets`` elements further."""
        steps = _numbers("offsets", offsets, 32)
        if len(steps) != len(self.offsets):
            raise ValueError(f"got {len(steps)} offsets; needs {len(self.offsets)}")
        # The sum has 32 bits, as on a GPU.
        sums = (np.array(self.offsets, np.int64) + steps).astype(np.int32)
        return replace(self, offsets=tuple(sums.tolist()))

    def elements(self, checked: Sequence[int]) -> tuple[npt.NDArray[np.uint64], Any]:
        """Return the addresses of the block, and which lie inside of the checked dimensions."""
        kind = self.base.dtype.element_ty
        width = max(1, kind.primitive_bitwidth // 8)
        addresses: Any = self.base.handle.data.reshape((1,) * len(self.shape)).astype(np.int64)
        inside: Any = np.ones((), bool)
        for axis, size in enumerate(self.block_shape):
            sides = [1] * len(self.block_shape)
            sides[axis] = size
            at = (self.offsets[axis] + np.arange(size, dtype=np.int64)).reshape(sides)
            addresses = addresses + width * self.strides[axis] * at
            if axis in checked:
                inside = inside & (at >= 0) & (at < self.shape[axis])
        return addresses.view(np.uint64), np.broadcast_to(inside, addresses.shape)


def add_block_pointers(interpreter: Any, set_attr: Callable[[Any, str, object], None]) -> None:
    """Let kernels make, advance, load and store block pointers.

    Args:
        interpreter: The module ``triton.runtime.interpreter``.
        set_attr: Function (owner, name, value) that replaces an attribute of the language inside
            launches.
    """
    import triton.language as tl

    handle_of = interpreter.TensorHandle
    load_tensor, store_tensor = tl.load, tl.store

    def make(
        base: Any, shape: Any, strides: Any, offsets: Any, block_shape: Any, order: Any
    ) -> _BlockPointer:
        if not (isinstance(base, tl.tensor) and base.type.is_ptr()):
            raise ValueError(f"base is {getattr(base, 'type', base)}; needs a pointer")
        sizes = _numbers("block_shape", block_shape, 32)
        numbers = (
            _numbers("shape", shape, 64),
            _numbers("strides", strides, 64),
            _numbers("offsets", offsets, 32),
        )
        axes = sorted(_numbers("order", order, 32))
        if axes != [*range(len(sizes))] or any(len(x) != len(sizes) for x in numbers):
            raise ValueError(
                "shape, strides, offsets, block_shape and order need a number for each dimension, "
                f"and order each dimension once; got {shape}, {strides}, {offsets}, "
                f"{block_shape} and {order}"
            )
        if base.dtype.element_ty.is_int1():
            base = base.to(tl.pointer_type(tl.int8, base.dtype.address_space))
        block = tl.block_type(base.dtype.element_ty, [*sizes])
        kind = tl.pointer_type(block, base.dtype.address_space)
        return _BlockPointer(base, *numbers, sizes, kind)

    def elements(pointer: _BlockPointer, boundary_check: Any) -> tuple[Any, Any]:
        """Return a block of pointers, and the mask; None if no dimension is checked."""
        boundary_check = getattr(boundary_check, "value", boundary_check)
        if not isinstance(boundary_check, tuple | list):
            boundary_check = (boundary_check,)
        rank, checked = len(pointer.block_shape), _numbers("boundary_check", boundary_check, 32)
        if any(not -rank <= axis < rank for axis in checked):
            raise ValueError(f"boundary_check is {checked}; the block has {rank} dimensions")
        addresses, inside = pointer.elements([axis % rank for axis in checked])
        sizes = [*pointer.block_shape]
        kind = tl.block_type(pointer.base.dtype, sizes)
        pointers = tl.tensor(handle_of(addresses, pointer.base.dtype), kind)
        if not checked:
            return pointers, None
        return pointers, tl.tensor(handle_of(inside, tl.int1), tl.block_type(tl.int1, sizes))

    def load(
        pointer: Any, mask: Any = None, other: Any = None, boundary_check: Any = (),
        padding_option: Any = "", cache_modifier: Any = "", eviction_policy: Any = "",
        volatile: Any = False,
    ) -> Any:  # fmt: skip
        padding = getattr(padding_option, "value", padding_option)
        if not isinstance(pointer, _BlockPointer):
            _refuse_block_options(boundary_check or padding)
            return load_tensor(
                pointer, mask, other, cache_modifier=cache_modifier,
                eviction_policy=eviction_policy, volatile=volatile,
            )  # fmt: skip
        if mask is not None or other is not None:
            raise ValueError("mask and other need a block of pointers; got a block pointer")
        if padding and padding not in _PADDING:
            raise ValueError(f'padding_option is {padding!r}; needs "zero" or "nan"')
        if padding == "nan" and not pointer.base.dtype.element_ty.is_floating():
            raise ValueError('padding_option "nan" needs floats; got integers')
        pointers, inside = elements(pointer, boundary_check)
        if inside is None:
            return tl.load(pointers)
        # Without padding the elements outside are undefined.
        return tl.load(pointers, inside, _PADDING[padding] if padding else None)

    def store(
        pointer: Any, value: Any, mask: Any = None, boundary_check: Any = (),
        cache_modifier: Any = "", eviction_policy: Any = "",
    ) -> Any:  # fmt: skip
        if not isinstance(pointer, _BlockPointer):
            _refuse_block_options(boundary_check)
            return store_tensor(
                pointer, value, mask, cache_modifier=cache_modifier,
                eviction_policy=eviction_policy,
            )  # fmt: skip
        if mask is not None:
            raise ValueError("mask needs a block of pointers; got a block pointer")
        value = interpreter.interpreter_semantic.to_tensor(value)
        sizes, kind = pointer.block_shape, pointer.base.dtype.element_ty
        if value.type.is_block() and tuple(value.handle.data.shape) != sizes:
            raise ValueError(f"value has shape {value.handle.data.shape}; its block has {sizes}")
        if value.dtype.scalar != kind:
            raise ValueError(f"value is {value.dtype.scalar}; its block has elements of {kind}")
        pointers, inside = elements(pointer, boundary_check)
        return tl.store(pointers, value, inside)

    def advance(base: Any, offsets: Any) -> Any:
        return base.advance(offsets)

    replacements: dict[str, Callable[..., Any]] = {
        "make_block_ptr": make,
        "advance": advance,
        "load": load,
        "store": store,
    }
    for owner in (tl, tl.core):
        for name, function in replacements.items():
            set_attr(owner, name, function)


def _refuse_block_options(given: Any) -> None:
    if given:
        raise ValueError(
            "boundary_check and padding_option need a block pointer; got a block of pointers"
        )


def _numbers(name: str, values: Any, bits: int) -> tuple[int, ...]:
    """Return the ints of ints, constexprs and scalars of the language.

    Args:
        name: The argument, for the error.
        values: A sequence of them.
        bits: The bits that each has, at most.
    """
    values = getattr(values, "value", values)
    found = []
    for value in values:
        value = getattr(value, "value", value)
        if hasattr(value, "handle"):
            data = value.handle.data
            if data.size != 1 or data.dtype.kind not in "iu":
                raise ValueError(f"{name} holds {value.type}; needs scalar integers")
            if bits == 32 and data.dtype.itemsize == 8:
                raise ValueError(f"{name} holds {value.type}; needs integers of 32 bits")
            value = data.item()
        if not -(2 ** (bits - 1)) <= value < 2 ** (bits - 1):
            raise ValueError(f"{name} holds {value}; needs integers of {bits} bits")
        found.append(value)
    return tuple(found)
