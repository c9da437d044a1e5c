"""Cache the interpreter's work on types for each pair of operand types.

For an operation on two tiles, NumPy takes a microsecond and the language fifty: it compares types
by their parts, builds new types, and writes the same shape into every tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy.typing as npt

__all__ = ["ONE_CAST", "call_builtins_directly", "tensors_like", "work_types_out_once"]

# Largest number of scalar operands that are cached as tensors.
_MOST_CONSTANTS = 1024


def work_types_out_once(interpreter: Any, set_attr: Callable[[Any, str, object], None]) -> None:
    """Make operations look up their types. Results and errors do not change.

    Args:
        interpreter: The module ``triton.runtime.interpreter``.
        set_attr: Function (owner, name, value) that replaces an attribute of the language inside
            launches.
    """
    import triton.language as tl

    # Created before the constructors are replaced, since it calls the original ones.
    tensors = _Attributes(tl)
    set_attr(tl.block_type, "__init__", _block_types_built_once(tl, tensors))
    tensor_init = _tensors_built_by_type(tl, tensors)
    # The number of a tensor's type, if its handle names the same type.
    set_attr(tl.tensor, "_kind", None)
    set_attr(tl.tensor, "__init__", tensor_init)
    set_attr(tl.dtype, "__eq__", _equality(tl.dtype))
    set_attr(tl.core, "_unwrap_if_constexpr", _unwrapping(tl))
    semantic = interpreter.interpreter_semantic
    semantic.make_tensor = _tensors_made(tl.tensor, tensor_init)
    semantic.cast = _casts(semantic, tl)
    semantic.broadcast_impl_value = _broadcasts(semantic, tl)
    semantic.binary_op_type_checking_impl = _operands(semantic, tl)
    _check_sizes_once(interpreter.TensorHandle)


def call_builtins_directly(interpreter: Any) -> Callable[..., None]:
    """Return a replacement of the interpreter's ``_patch_attr`` that saves two of three calls.

    The interpreter's ``_patch_attr`` passes its semantic to the builtin's wrapper, which only
    checks that it is present. The replacement calls the wrapped function directly.
    """
    import triton.language as tl

    semantic = interpreter.interpreter_semantic
    asking = tl.core.builtin(lambda: None).__code__

    def patch_attr(owner: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        function = member.__wrapped__ if member.__code__ is asking else member

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return function(*args, **kwargs)

        scope.set_attr(owner, name, call)

    return patch_attr


def tensors_like(interpreter: Any) -> Callable[[Any], Callable[[npt.NDArray[Any]], Any]]:
    """Return a function of a tensor that returns a function of data.

    The latter makes tensors of the same type.

    Args:
        interpreter: The module ``triton.runtime.interpreter``.
    """
    import triton.language as tl

    new, tensor_type, handle_type = object.__new__, tl.tensor, interpreter.TensorHandle

    def like(x: Any) -> Callable[[npt.NDArray[Any]], Any]:
        of_handle, kind, number = x.handle.dtype, x.type, x._kind
        shape, numel, dtype = x.shape, x.numel, x.dtype

        def build(data: npt.NDArray[Any]) -> Any:
            handle = new(handle_type)
            handle.data, handle.dtype, handle.attr = data, of_handle, {}
            tensor = new(tensor_type)
            tensor.handle, tensor.type, tensor.shape, tensor.numel = handle, kind, shape, numel
            tensor.dtype, tensor._kind = dtype, number
            return tensor

        return build

    return like


class _Shared(NamedTuple):
    """Attributes of all tensors of a type.

    Args:
        shape: As in the language.
        numel: As in the language.
        dtype: As in the language.
        kind: The number of the type, equal for equal types; None for a pointer to a pointer.
    """

    shape: Any
    numel: Any
    dtype: Any
    kind: int | None


class _Attributes:
    """The attributes that all tensors of a type share, by type."""

    def __init__(self, tl: Any) -> None:
        self._build, self._tensor = tl.tensor.__init__, tl.tensor
        self._of_scalars: dict[object, _Shared] = {}
        self._kinds: dict[object, int] = {}
        self._scalar, self._block, self._pointer = tl.dtype, tl.block_type, tl.pointer_type

    def of(self, kind: Any) -> _Shared | None:
        """Return the attributes; None for a type that is not cached, such as void."""
        if kind.__class__ is self._block:
            found: _Shared | None = kind.__dict__.get("_of_tensors")
            return found
        key = _plain(kind, self._scalar, self._pointer)
        if key is None or key == "void":
            return None
        if key not in self._of_scalars:
            self._of_scalars[key] = self.built(kind, key)
        return self._of_scalars[key]

    def built(self, kind: Any, key: object) -> _Shared:
        """Return the shared attributes, as computed by the language's constructor.

        Args:
            kind: The type.
            key: The key of equal types; None if there is none.
        """
        tensor = object.__new__(self._tensor)
        self._build(tensor, None, kind)
        number = None if key is None else self._kinds.setdefault(key, len(self._kinds))
        return _Shared(tensor.shape, tensor.numel, tensor.dtype, number)


def _block_types_built_once(tl: Any, tensors: _Attributes) -> Callable[..., None]:
    """Return a constructor of block types that copies the attributes of an equal earlier type."""
    original, scalar_type, pointer_type = tl.block_type.__init__, tl.dtype, tl.pointer_type
    known: dict[tuple[object, ...], dict[str, object]] = {}

    def init(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = [getattr(size, "value", size) for size in shape]
        # The types of sizes are part of the key: values of other types may equal ints.
        key = (_plain(element_ty, scalar_type, pointer_type), *sizes, *map(type, sizes))
        if key not in known or key[0] is None:
            original(self, element_ty, shape)
            self._of_tensors = tensors.built(self, None if key[0] is None else key)
            known[key] = vars(self).copy()
        self.__dict__.update(known[key])

    return init


def _plain(element: Any, scalar_type: Any, pointer_type: Any) -> object:
    """Return a key that identifies a scalar type or a pointer to one; None for other types.

    A pointer's name alone does not suffice, as it omits the address space.
    """
    if element.__class__ is scalar_type:
        return element.name
    if element.__class__ is pointer_type and element.element_ty.__class__ is scalar_type:
        return (element.name, element.address_space, element.const)
    return None


def _tensors_built_by_type(tl: Any, tensors: _Attributes) -> Callable[..., None]:
    original, of = tl.tensor.__init__, tensors.of

    def init(self: Any, handle: Any, type: Any) -> None:
        shared = of(type)
        if shared is None:
            original(self, handle, type)
            return
        self.handle = handle
        self.type = type
        self.shape, self.numel, self.dtype, kind = shared
        if handle.dtype.name == self.dtype.name:
            self._kind = kind

    return init


def _tensors_made(tensor: Any, init: Callable[..., None]) -> Callable[[Any, Any], Any]:
    """Return the semantic's constructor of tensors, with one call less."""
    new = object.__new__

    def make_tensor(handle: Any, type: Any) -> Any:
        made = new(tensor)
        init(made, handle, type)
        return made

    return make_tensor


def _check_sizes_once(handle_of: Any) -> None:
    """Make the interpreter check the width of elements once for each pair of types."""
    original = handle_of.__post_init__
    checked: set[tuple[int, str]] = set()

    def check(self: Any) -> None:
        key = self.data.itemsize, self.dtype.name
        if key not in checked:
            original(self)
            checked.add(key)

    handle_of.__post_init__ = check


def _equality(scalar_type: Any) -> Callable[[Any, object], bool]:
    original = scalar_type.__eq__

    def equal(self: Any, other: Any) -> bool:
        if other.__class__ is scalar_type:
            same: bool = self.name == other.name
            return same
        return bool(original(self, other))

    return equal


# Pairs of types for which the language requests one cast from its builder. The different names of
# the builder's casts matter only on a GPU.
_WIDE = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "fp32", "fp64")
_NARROW = ("fp16", "bf16")
ONE_CAST = {
    *((source, target) for source in (*_WIDE, "int1") for target in _WIDE),
    *((source, target) for source in (*_WIDE, "int1") for target in _NARROW),
    *((source, "fp32") for source in _NARROW),
}


def _casts(semantic: Any, tl: Any) -> Callable[..., Any]:
    original, builder = semantic.cast, semantic.builder
    block_type, scalar_type = tl.block_type, tl.dtype

    def cast(input: Any, dst_ty: Any, fp_downcast_rounding: str | None = None) -> Any:
        if dst_ty.__class__ is not scalar_type:
            return original(input, dst_ty, fp_downcast_rounding)
        source, target = input.dtype.name, dst_ty.name
        if source == target:
            return input
        if fp_downcast_rounding is not None or (source, target) not in ONE_CAST:
            return original(input, dst_ty, fp_downcast_rounding)
        kind = input.type
        if kind.__class__ is block_type:
            dst_ty = block_type(dst_ty, kind.shape.values)
        return semantic.make_tensor(builder.cast_impl(input.handle, dst_ty), dst_ty)

    return cast


def _unwrapping(tl: Any) -> Callable[[Any], Any]:
    """Return a function that unwraps constexprs and tests for the most common types first."""
    original, constexpr = tl.core._unwrap_if_constexpr, tl.constexpr
    values = frozenset((tl.tensor, int, float, bool, str, type(None)))

    def unwrap(x: Any) -> Any:
        kind = x.__class__
        if kind in values:
            return x
        return x.value if kind is constexpr else original(x)

    return unwrap


class _Plan(NamedTuple):
    """The conversion of an operand: its new type in the language and in the interpreter."""

    type: Any
    ir_type: Any
    is_block: bool


def _broadcasts(semantic: Any, tl: Any) -> Callable[..., Any]:
    original, builder = semantic.broadcast_impl_value, semantic.builder
    block_type, scalar_type, pointer_type = tl.block_type, tl.dtype, tl.pointer_type
    known: dict[tuple[object, ...], tuple[_Plan | None, _Plan | None]] = {}

    def planned(before: Any, after: Any) -> _Plan | None:
        if after is before:
            return None
        return _Plan(after.type, after.type.to_ir(builder), before.type.__class__ is block_type)

    def carried_out(plan: _Plan | None, operand: Any) -> Any:
        if plan is None:
            return operand
        if plan.is_block:
            handle = builder.create_broadcast(operand.handle, plan.type.shape)
        else:
            handle = builder.create_splat(plan.ir_type, operand.handle)
        return semantic.make_tensor(handle, plan.type)

    def broadcast(lhs: Any, rhs: Any) -> Any:
        left, right = lhs.type, rhs.type
        if left.__class__ is not block_type and right.__class__ is not block_type:
            return lhs, rhs
        if left.name == right.name:
            return lhs, rhs
        kinds = (
            _plain(lhs.dtype, scalar_type, pointer_type),
            _plain(rhs.dtype, scalar_type, pointer_type),
        )
        if None in kinds or (len(lhs.shape) != len(rhs.shape) and lhs.shape and rhs.shape):
            return original(lhs, rhs)
        key = (*kinds, left.name, right.name)
        if key not in known:
            made = original(lhs, rhs)
            known[key] = planned(lhs, made[0]), planned(rhs, made[1])
            return made
        plans = known[key]
        return carried_out(plans[0], lhs), carried_out(plans[1], rhs)

    return broadcast


def _operands(semantic: Any, tl: Any) -> Callable[..., Any]:
    original = semantic.binary_op_type_checking_impl
    tensor, scalar_type, pointer_type = tl.tensor, tl.dtype, tl.pointer_type
    constants: dict[tuple[object, ...], Any] = {}
    known: dict[tuple[object, ...], tuple[Any, Any]] = {}

    def of_tensors(lhs: Any, rhs: Any, *rest: bool) -> Any:
        left = _plain(lhs.dtype, scalar_type, pointer_type)
        right = _plain(rhs.dtype, scalar_type, pointer_type)
        if left is None or right is None:
            return original(lhs, rhs, *rest)
        # Shapes are not part of the key; the broadcast handles them.
        key = (left, right, *rest)
        if key not in known:
            made = original(lhs, rhs, *rest)
            known[key] = made[0].dtype, made[1].dtype
            return made
        to_left, to_right = known[key]
        return semantic.broadcast_impl_value(
            lhs if lhs.dtype.name == to_left.name else semantic.cast(lhs, to_left),
            rhs if rhs.dtype.name == to_right.name else semantic.cast(rhs, to_right),
        )

    def operands(
        lhs: Any, rhs: Any, allow_lhs_ptr: bool = False, allow_rhs_ptr: bool = False,
        arithmetic_check: bool = True, div_or_mod: bool = False,
    ) -> Any:  # fmt: skip
        rest = (allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)
        left, right = lhs.__class__ is tensor, rhs.__class__ is tensor
        if left and right:
            # Division of 16-bit floats converts to fp32.
            if (
                not div_or_mod
                and lhs.type.name == rhs.type.name
                and lhs.dtype.__class__ is scalar_type
            ):
                return lhs, rhs
            return of_tensors(lhs, rhs, *rest)
        kept, number = (lhs, rhs) if left else (rhs, lhs)
        if not (left or right) or number.__class__ not in (int, float):
            return original(lhs, rhs, *rest)
        if kept.dtype.__class__ is not scalar_type:
            return original(lhs, rhs, *rest)
        # The repr, since 0.0 == -0.0 and 1 == 1.0.
        key = (kept.type.name, repr(number), left, arithmetic_check, div_or_mod)
        constant = constants.get(key)
        if constant is not None:
            return (lhs, constant) if left else (constant, rhs)
        made = original(lhs, rhs, *rest)
        same, constant = made if left else made[::-1]
        if same is kept:
            if len(constants) >= _MOST_CONSTANTS:
                constants.clear()
            # Data of tensors is never written; read-only arrays make a write raise.
            constant.handle.data.flags.writeable = False
            constants[key] = constant
        return made

    return operands
