"""Run a function in a fork of this process that repairs Triton's interpreter."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

from fa_verify.forks import in_forks
from fa_verify.simulator.interpreter.repair import repair

__all__ = ["REPAIR_FIRST", "in_repaired_fork"]

REPAIR_FIRST = (
    "call fa_verify.simulator.interpreter.repair.repair() before the kernel is imported, so that "
    "the checks run in this process"
)

Value = TypeVar("Value")
WEEK = 7 * 86_400.0


def in_repaired_fork(work: Callable[[], Value]) -> Value:
    """Return what ``work`` returns in a fork that has repaired the interpreter.

    The interpreter of this process stays as it is. A fork has the kernels and closures of this
    process, so nothing but the result has to be pickled.

    Raises:
        Exception: ``work`` or the repair has raised it.
        RuntimeError: The fork died, or the result cannot be pickled.
    """
    (ended,) = in_forks([lambda: _attempt(work)], jobs=1, seconds=WEEK)
    if ended.how != "returned":
        raise RuntimeError(
            f"the process with the repaired interpreter died; to see where, {REPAIR_FIRST}"
        )
    result, error = pickle.loads(ended.value)
    if error is not None:
        raise error
    return cast(Value, result)


def _attempt(work: Callable[[], object]) -> bytes:
    """Return the pickled pair of the result and the exception, one of which is None."""
    # The threads of OpenMP are not in the fork, which would wait for them.
    torch.set_num_threads(1)
    pair: tuple[Any, BaseException | None]
    try:
        repair()
        pair = work(), None
    except BaseException as error:
        pair = None, error
    try:
        pickled = pickle.dumps(pair)
        pickle.loads(pickled)
    except Exception as error:
        value = next(x for x in pair if x is not None)
        said = RuntimeError(
            f"the process with the repaired interpreter cannot return {value!r} ({error}); "
            f"{REPAIR_FIRST}"
        )
        return pickle.dumps((None, said))
    return pickled
