"""From ``--kernel=path/to/file.py:name`` or ``package.module:name`` to a subject."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from properties.subject import Subject

__all__ = ["load"]

_NEEDS = "needs path/to/file.py:name or package.module:name"


def load(spec: str) -> Subject:
    """Imports a callable and reads its declarations.

    A file is run as a module of its own name; its folder is put last on ``sys.path``, so that it
    can import what lies beside it.

    Raises:
        ValueError: There is no such file, module or name, it cannot be imported, is not callable,
            takes other arguments, or declares what does not exist. The message is one paragraph.
    """
    source, colon, name = spec.rpartition(":")
    if not colon or not source or not name:
        raise ValueError(f"is {spec!r}; {_NEEDS}")
    module = _imported(source)
    call = module
    for part in name.split("."):
        if not hasattr(call, part):
            raise ValueError(f"{source} has no {name!r}; it has {_callables(module)}")
        call = getattr(call, part)
    if not callable(call) or inspect.isclass(call):
        raise ValueError(
            f"{name!r} in {source} is {type(call).__name__}; needs a function or an instance with "
            "__call__"
        )
    _check_signature(call, name)
    return Subject.of(call, name)


def _imported(source: str) -> ModuleType:
    """The module at a path or of a dotted name."""
    try:
        if source.endswith(".py"):
            return _run_file(Path(source))
        if "/" in source:
            raise ValueError(f"is {source!r}; {_NEEDS}")
        if "" not in sys.path:
            sys.path.append("")
        return importlib.import_module(source)
    except ValueError:
        raise
    except BaseException as error:  # whatever a user's file raises, SystemExit included
        raise ValueError(f"{source} cannot be imported: {_reason(error)}") from None


def _run_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)
    # Not its bare name, which may be that of an installed package.
    name = f"kernel_under_test_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except ValueError as error:
        raise ImportError(_reason(error)) from None
    return module


def _reason(error: BaseException) -> str:
    """The exception in a line, with the innermost place it came from."""
    text = f"{type(error).__name__}: {error}".splitlines()[0]
    frames = traceback.extract_tb(error.__traceback__)
    outside = [frame for frame in frames if "importlib" not in frame.filename]
    last = outside[-1] if outside else None
    if last is None or last.filename == __file__:
        return text
    return f"{text} ({last.filename}, line {last.lineno})"


def _callables(module: ModuleType) -> list[str]:
    """What in a module could have been meant."""
    return sorted(
        name
        for name, value in vars(module).items()
        if callable(value)
        and not inspect.isclass(value)
        and not name.startswith("_")
        and getattr(value, "__module__", None) == module.__name__
    )


def _check_signature(call: Callable[..., Any], name: str) -> None:
    """Whether ``call(q, k, v, mask=..., sm_scale=...)`` fits, as far as that can be seen."""
    try:
        signature = inspect.signature(call)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(None, None, None, mask=None, sm_scale=None)
    except TypeError as error:
        needs = "(q, k, v, *, mask, sm_scale)"
        raise ValueError(f"{name} takes {signature}; needs {needs} ({error})") from None
