"""Speed up the interpreter's launches: patch the language once, and skip work without effect."""

from __future__ import annotations

import inspect
from types import FunctionType, SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from fa_verify.simulator.interpreter.block_pointers import add_block_pointers
from fa_verify.simulator.interpreter.functions import compute_functions_directly
from fa_verify.simulator.interpreter.limits import limit_of
from fa_verify.simulator.interpreter.operators import compute_operators_directly
from fa_verify.simulator.interpreter.types import call_builtins_directly, work_types_out_once

__all__ = ["leave_tensors_on_the_cpu", "repair_launches", "skip_idle_work", "with_room"]

_ABSENT = object()
_MOST_INTS = 2**16
_ROOM = 2**16  # stack slots of a frame, 8 bytes each


class _LanguagePatch:
    """The interpreter's replacements in triton.language, installed and removed together."""

    def __init__(self) -> None:
        self.active = 0
        self._quiet = np.errstate(all="ignore")
        self._changes: dict[tuple[int, str], tuple[Any, str, object, object]] = {}

    def set_attr(self, owner: Any, name: str, value: object) -> None:
        """Replace an attribute and record it, with the interface of the interpreter's own scope."""
        key = id(owner), name
        # Only the object's own attribute: restoring must not copy an inherited one to it.
        before = self._changes[key][2] if key in self._changes else vars(owner).get(name, _ABSENT)
        self._changes[key] = owner, name, before, value
        setattr(owner, name, value)

    def enter(self) -> _LanguagePatch:
        """Install the replacements, unless an enclosing launch has done so."""
        if not self.active:
            for owner, name, _, value in self._changes.values():
                setattr(owner, name, value)
            self._quiet = np.errstate(all="ignore")
            self._quiet.__enter__()
        self.active += 1
        return self

    def restore(self) -> None:
        """Remove the replacements when the outermost launch ends."""
        self.active -= 1
        if not self.active:
            self._quiet.__exit__(None, None, None)
            self.take_out()

    def take_out(self) -> None:
        """Restore every attribute, and delete those that did not exist."""
        for owner, name, before, _ in self._changes.values():
            if before is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, before)


def repair_launches(interpreter: Any) -> None:
    """Patch the language once for a launch and all of its nested calls.

    Args:
        interpreter: The module ``triton.runtime.interpreter``.
    """
    import triton.language as tl

    patch = _LanguagePatch()
    original_scope, original_launch = interpreter._LangPatchScope, interpreter.GridExecutor.__call__
    original_patch = interpreter._patch_attr
    interpreter._LangPatchScope = lambda: patch
    interpreter._patch_attr = call_builtins_directly(interpreter)
    try:
        # Kernels access the language as tl, the jit functions of tl as core.
        interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
        work_types_out_once(interpreter, patch.set_attr)
        compute_operators_directly(interpreter, patch.set_attr)
        # Before the plans of loads and stores, which leave block pointers to it.
        add_block_pointers(interpreter, patch.set_attr)
        compute_functions_directly(interpreter, patch.set_attr)
    finally:
        interpreter._LangPatchScope = original_scope
        interpreter._patch_attr = original_patch
        patch.take_out()

    def launch(self: Any, *args: Any, **kwargs: Any) -> None:
        # The executor asks twice for the parameters of a kernel, which has many.
        if "__signature__" not in vars(self.fn):
            self.fn.__signature__ = inspect.signature(self.fn)
        try:
            original_launch(self, *args, **kwargs)
        except interpreter.InterpreterError as error:
            cause: Any = error
            while isinstance(cause, interpreter.InterpreterError) and cause.__cause__:
                cause = cause.__cause__
            if limit := limit_of(cause, interpreter):
                raise limit from error
            raise

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        function = self.rewrite()
        if patch.active:
            return function(*args, **kwargs)
        patch.enter()
        try:
            return function(*args, **kwargs)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error
        finally:
            patch.restore()

    interpreter._implicit_cvt = _ints_converted_once(interpreter)
    interpreter._patch_lang = lambda _: patch.enter()
    interpreter.inspect = _arguments_bound_directly(interpreter.inspect)
    interpreter.GridExecutor.__init__ = _annotations_read_once(interpreter.GridExecutor)
    interpreter.GridExecutor.__call__ = with_room(launch)
    interpreter.InterpretedFunction.__call__ = call


def _arguments_bound_directly(inspect: Any) -> Any:
    """Return the module ``inspect``, with faster answers about launches."""
    argspecs: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()

    def getfullargspec(function: Any) -> Any:
        if function not in argspecs:
            argspecs[function] = inspect.getfullargspec(function)
        return argspecs[function]

    def getcallargs(function: Any, /, *args: Any, **kwargs: Any) -> Any:
        argspec = getfullargspec(function)
        if args or argspec.kwonlyargs or kwargs.keys() != {*argspec.args}:
            return inspect.getcallargs(function, *args, **kwargs)
        return kwargs

    faster = {"getfullargspec": getfullargspec, "getcallargs": getcallargs}
    return SimpleNamespace(**vars(inspect) | faster)


def _annotations_read_once(executor: Any) -> Any:
    """Return the constructor of an executor, which reads the annotations of each kernel once."""
    original = executor.__init__
    constexprs: WeakKeyDictionary[Any, list[str]] = WeakKeyDictionary()

    def init(self: Any, fn: Any, arg_names: Any, grid: Any, pre_run_hooks: Any = ()) -> None:
        if fn not in constexprs:
            original(self, fn, arg_names, grid, pre_run_hooks)
            constexprs[fn] = self.constexprs
        self.fn, self.arg_names, self.grid = fn, arg_names, grid
        self.pre_run_hooks, self.constexprs = pre_run_hooks, constexprs[fn]

    return init


def leave_tensors_on_the_cpu(interpreter: Any) -> None:
    """Skip the copies from and to a device for launches whose tensors are all on the CPU.

    Args:
        interpreter: The module ``triton.runtime.interpreter``.
    """
    executor = interpreter.GridExecutor
    to_host, to_device = executor._init_args_hst, executor._restore_args_dev
    descriptor = interpreter.TensorDescriptor

    def is_on_cpu(x: Any) -> bool:
        if isinstance(x, tuple):
            return all(map(is_on_cpu, x))
        x = x.base if isinstance(x, descriptor) else x
        return not hasattr(x, "data_ptr") or x.device.type == "cpu"

    def init_args_hst(self: Any, args: Any, kwargs: Any) -> Any:
        if is_on_cpu((*args, *kwargs.values())):
            return args, kwargs
        return to_host(self, args, kwargs)

    def restore_args_dev(self: Any, args: Any, hosted: Any, kwargs: Any, named: Any) -> None:
        if hosted is not args or named is not kwargs:
            to_device(self, args, hosted, kwargs, named)

    executor._init_args_hst, executor._restore_args_dev = init_args_hst, restore_args_dev


def _ints_converted_once(interpreter: Any) -> Any:
    """Return a conversion of a launch's arguments that caches ints: sizes, strides, flags."""
    original = interpreter._implicit_cvt
    known: dict[int, Any] = {}

    def convert(argument: Any) -> Any:
        if argument.__class__ is not int:
            return original(argument)
        found = known.get(argument)
        if found is None:
            if len(known) >= _MOST_INTS:
                known.clear()
            found = known[argument] = original(argument)
            # Data of tensors is never written; read-only arrays make a write raise.
            found.handle.data.flags.writeable = False
        return found

    return convert


def with_room(function: Any) -> Any:
    """Return a copy of a function whose frame reserves 512 KiB of Python's data stack.

    CPython allocates frames in chunks of 16 KiB. If a loop runs near the end of a chunk, each call
    maps a new chunk and each return unmaps it, which takes longer than the call itself. A frame
    that needs more than a chunk gets a chunk of its size, and nested calls use the rest of it.
    """
    code = function.__code__.replace(co_stacksize=_ROOM)
    return FunctionType(
        code, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )


def skip_idle_work(interpreter: Any) -> None:
    """Skip work without effect: overflow checks without debug mode, and repeated type look-ups.

    Args:
        interpreter: The module ``triton.runtime.interpreter``.
    """
    original_type, semantic = interpreter._get_np_dtype, interpreter.interpreter_semantic
    original_check = semantic.binary_op_sanitize_overflow_impl
    known: dict[str, Any] = {}

    def numpy_type(triton_type: Any) -> Any:
        name = triton_type.scalar.name
        if name not in known:
            known[name] = original_type(triton_type.scalar)
        return known[name]

    def check_overflow(*args: Any) -> None:
        # The check ends in a device assertion, which does nothing outside debug mode.
        if interpreter.interpreter_builder.options.debug:
            original_check(*args)

    interpreter._get_np_dtype = numpy_type
    semantic.binary_op_sanitize_overflow_impl = check_overflow
