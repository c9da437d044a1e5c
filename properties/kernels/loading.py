"""Load a subject or a mask class from ``path/to/file.py:name`` or ``package.module:name``."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from fa_verify.oracles.masks.codec import SHIPPED, mask_class, register
from fa_verify.oracles.masks.mask import Mask
from fa_verify.properties.kernels.subject import Subject
from fa_verify.properties.kernels.without_gpu import advice
from fa_verify.properties.problems.mask_classes import check_mask_class

__all__ = ["load", "load_mask"]

_NEEDS = "needs path/to/file.py:name or package.module:name"
_MOST_NAMES = 20
# Files whose frames belong to the import machinery.
_IMPORTING = (__file__, importlib.__file__, "<frozen importlib")


def load(spec: str) -> Subject:
    """Import a callable and read its declarations.

    A file is executed as a module named ``kernel_under_test_`` and its stem. Its folder is appended
    to ``sys.path``, so that it can import its neighbours.

    Args:
        spec: ``path/to/file.py:name`` or ``package.module:name``; the name may have dots.

    Raises:
        ValueError: The file, module or name does not exist, the import fails, the object is not
            callable or has another signature, or a declaration is invalid. The message is one
            line.
    """
    try:
        if spec.endswith(".py") and Path(spec).expanduser().is_file():
            there = ", ".join(_callables(_imported(spec), "")) or "no functions"
            raise ValueError(f"got {spec!r}, a file; needs {spec}:name; it has {there}")
        source, name = _split(spec)
        found = _found(_imported(source), source, name)
        if inspect.isclass(found) or not callable(found):
            raise ValueError(
                f"{name!r} in {source} is {_kind(found)}; needs a function or an instance with "
                "__call__"
            )
        subject = Subject.of(found, name)
        _check_signature(subject)
    except ValueError as error:
        # The repr of a user's value may contain line breaks.
        raise ValueError(" ".join(str(error).split())) from None
    return subject


def load_mask(spec: str) -> type[Mask]:
    """Import a class of masks, check that masks can be drawn from it, and register it by its name.

    Args:
        spec: ``path/to/file.py:Name`` or ``package.module:Name``, imported as by ``load``.

    Raises:
        ValueError: The class does not exist, the import fails, it is not a subclass of Mask, or no
            mask can be drawn from it.
    """
    try:
        source, name = _split(spec)
        found = _found(_imported(source), source, name)
        if not (inspect.isclass(found) and issubclass(found, Mask)) or found is Mask:
            raise ValueError(f"{name!r} in {source} is {_kind(found)}; needs a subclass of Mask")
        check_mask_class(found)
        if _is_shipped(found, source):
            return mask_class(found.__name__)
        register(found)
    except ValueError as error:
        raise ValueError(" ".join(str(error).split())) from None
    return found


def _is_shipped(mask: type[Mask], source: str) -> bool:
    """Return whether a class is one of the suite's masks, loaded by file or by module."""
    if mask.__name__ not in SHIPPED:
        return False
    shipped = mask_class(mask.__name__)
    return shipped is mask or Path(source).resolve() == Path(inspect.getfile(shipped)).resolve()


def _split(spec: str) -> tuple[str, str]:
    """Split a spec into the file or module and the name in it."""
    source, _, name = spec.rpartition(":")
    if not source or not name or ("/" in source and not source.endswith(".py")):
        raise ValueError(f"got {spec!r}; {_NEEDS}")
    return source, name


def _kind(found: object) -> str:
    """Describe the type of an object for a message."""
    return "a class" if inspect.isclass(found) else f"of type {type(found).__name__}"


def _imported(source: str) -> ModuleType:
    """Import a module by path or by dotted name."""
    is_file = source.endswith(".py")
    path = Path(source).expanduser()
    if is_file and not path.is_file():
        raise ValueError(f"there is no file {path}")
    try:
        if is_file:
            return _run_file(path)
        if "" not in sys.path:
            sys.path.append("")
        return importlib.import_module(source)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a user's file may raise anything, including SystemExit
        raise ValueError(f"{source} cannot be imported: {_reason(error)}") from None


def _run_file(path: Path) -> ModuleType:
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)
    # Not the stem alone, which may be the name of an installed package.
    name = f"kernel_under_test_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _reason(error: BaseException) -> str:
    """Format an exception in one line, with the innermost file and line outside of the import."""
    text = f"{type(error).__name__}: {error}".splitlines()[0].removesuffix(": ")
    frames = traceback.extract_tb(error.__traceback__)
    places = [frame for frame in frames if not frame.filename.startswith(_IMPORTING)]
    text = f"{text} ({places[-1].filename}, line {places[-1].lineno})" if places else text
    return "; ".join(filter(None, (text, advice(error))))


def _found(module: ModuleType, source: str, name: str) -> Any:
    """Look up a dotted name in a module."""
    found: Any = module
    parts = name.split(".")
    for depth, part in enumerate(parts):
        if not hasattr(found, part):
            there = ", ".join(_callables(found, part)) or "no functions"
            owner = f"{'.'.join(parts[:depth])} in {source}" if depth else source
            raise ValueError(f"{owner} has no {part!r}; it has {there}")
        found = getattr(found, part)
    return found


def _callables(owner: object, wanted: str) -> list[str]:
    """List callables for a message: similar names first, then those that the module defines."""
    members = {name: getattr(owner, name, None) for name in dir(owner) if not name.startswith("_")}
    calls = {k: v for k, v in members.items() if callable(v) and not inspect.isclass(v)}
    close = difflib.get_close_matches(wanted, calls)
    home = getattr(owner, "__name__", None)
    own = [name for name, call in calls.items() if getattr(call, "__module__", None) == home]
    return [*dict.fromkeys((*close, *(own or calls)))][:_MOST_NAMES]


def _check_signature(subject: Subject) -> None:
    """Check that the signature, if known, accepts the tensors and the subject's keywords."""
    words = subject.keywords
    function = getattr(subject.call, "__self__", None)
    if inspect.isclass(function) and issubclass(function, torch.autograd.Function):
        takes = inspect.signature(function.forward)
        raise ValueError(
            f"{subject.name} is {function.__name__}.apply, whose forward takes {takes}; needs "
            "(ctx, q, k, v, causal, sm_scale), or a function (q, k, v, *, mask, sm_scale) that "
            "calls it"
        )
    try:
        # The signature of the wrapper itself, which may adapt the function that it wraps.
        signature = inspect.signature(subject.call, follow_wrapped=False)
    except (TypeError, ValueError):
        return
    if subject.merges_alone:
        try:
            signature.bind(None, None)
        except TypeError as error:
            raise ValueError(
                f"{subject.name} takes {signature}; needs (outs, lses), as it declares "
                f"states=True: {error}"
            ) from None
        return
    if subject.reads_caches_alone:
        try:
            signature.bind(None, None, None, **dict.fromkeys(subject.cache_keywords))
        except TypeError as error:
            raise ValueError(
                f"{subject.name} takes {signature}; needs (q, k_cache, v_cache, *, "
                f"{', '.join(subject.cache_keywords)}), as it declares cache={subject.cache!r}: "
                f"{error}"
            ) from None
        return
    if subject.quantised_alone:
        try:
            signature.bind(*(None,) * 6, **dict.fromkeys(subject.quantised_keywords))
        except TypeError as error:
            raise ValueError(
                f"{subject.name} takes {signature}; needs (q, k, v, q_scale, k_scale, v_scale, *, "
                f"{', '.join(subject.quantised_keywords)}), as it declares quantised=True: {error}"
            ) from None
        return
    try:
        signature.bind(None, None, None, **dict.fromkeys(words))
    except TypeError as error:
        needs = f"(q, k, v{', *, ' if words else ''}{', '.join(words)})"
        if words == ("mask", "sm_scale"):
            needs += " or (q, k, v, causal, sm_scale)"
        raise ValueError(f"{subject.name} takes {signature}; needs {needs}: {error}") from None
