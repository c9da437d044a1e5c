"""How the repaired interpreter launches kernels: the language patched once, idle work left out."""

from __future__ import annotations

from types import FunctionType, SimpleNamespace
from typing import Any

import numpy as np

from fa_verify.simulator.interpreter.types import call_builtins_directly, work_types_out_once

__all__ = ["repair_launches", "skip_idle_work", "with_room"]

_ABSENT = object()
_ROOM = 2**16  # slots of a frame, eight bytes each


class _LanguagePatch:
    """The interpreter's replacements in triton.language, put in and taken out as one."""

    def __init__(self) -> None:
        self.active = 0
        self._quiet = np.errstate(all="ignore")
        self._changes: dict[tuple[int, str], tuple[Any, str, object, object]] = {}

    def set_attr(self, owner: Any, name: str, value: object) -> None:
        """Replaces one attribute and records it; what the interpreter's own scope offers."""
        key = id(owner), name
        # The object's own attribute: an inherited one must not become its own on the way back.
        before = self._changes[key][2] if key in self._changes else vars(owner).get(name, _ABSENT)
        self._changes[key] = owner, name, before, value
        setattr(owner, name, value)

    def enter(self) -> _LanguagePatch:
        """Puts the replacements in, unless a launch that is under way has done so."""
        if not self.active:
            for owner, name, _, value in self._changes.values():
                setattr(owner, name, value)
            self._quiet = np.errstate(all="ignore")
            self._quiet.__enter__()
        self.active += 1
        return self

    def restore(self) -> None:
        """Takes the replacements out when the outermost launch ends."""
        self.active -= 1
        if not self.active:
            self._quiet.__exit__(None, None, None)
            self.take_out()

    def take_out(self) -> None:
        """Puts every attribute back, and removes those that were not there."""
        for owner, name, before, _ in self._changes.values():
            if before is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, before)


def repair_launches(interpreter: Any) -> None:
    """Patches the language once for a launch and all of its nested calls.

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
        # Kernels see the language as tl, and tl's own jit functions as core.
        interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
        work_types_out_once(interpreter, patch.set_attr)
    finally:
        interpreter._LangPatchScope = original_scope
        interpreter._patch_attr = original_patch
        patch.take_out()

    def launch(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            original_launch(self, *args, **kwargs)
        except interpreter.InterpreterError as error:
            if isinstance(error.__cause__, NotImplementedError):
                raise error.__cause__ from None
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

    interpreter._patch_lang = lambda _: patch.enter()
    interpreter.GridExecutor.__call__ = with_room(launch)
    interpreter.InterpretedFunction.__call__ = call


def with_room(function: Any) -> Any:
    """A function whose calls have half a mebibyte of Python's stack to themselves.

    Python keeps frames in chunks of 16 KiB. Where a loop stands near the end of one, each call that
    crosses it maps a chunk and each return gives it back, which takes longer than the call. A frame
    that asks for more than a chunk gets one that is large enough, and what is left of it is for the
    calls below.
    """
    code = function.__code__.replace(co_stacksize=_ROOM)
    return FunctionType(
        code, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )


def skip_idle_work(interpreter: Any) -> None:
    """Leaves out work without a result: checks that nobody reads, a table built at each look-up.

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
