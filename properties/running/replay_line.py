"""The command that checks every guarantee on one problem, as failure messages print it."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

__all__ = ["COMMAND", "PLUGIN", "replay_line", "set_form"]

# The program, the start of its options, and what the problem follows: of pytest with the plugin,
# and of the command that the package installs.
PLUGIN = ("pytest", "--fa-", "--fa-replay=")
COMMAND = ("fa-verify explain", "--", "")

_form: tuple[str, str, str] = PLUGIN
_more: tuple[str, ...] = ()


def set_form(form: tuple[str, str, str], more: Sequence[str] = ()) -> None:
    """Choose the command that this process prints.

    Args:
        form: PLUGIN or COMMAND.
        more: Further options of the run, by name, with their quoted values.
    """
    global _form, _more
    _form, _more = form, tuple(more)


def replay_line(
    problem: str, kernel: str = "", mask: str = "", form: tuple[str, str, str] | None = None
) -> str:
    """Return the command that checks every guarantee on a problem.

    Args:
        problem: The problem as JSON.
        kernel: Value of --fa-kernel; empty for the project's own kernels.
        mask: Value of --fa-mask; empty if the mask is not the user's.
        form: PLUGIN or COMMAND; None for that of this process.
    """
    program, start, last = form or _form
    given = {"kernel": kernel, "mask": mask}
    options = [f"{start}{name}={shlex.quote(value)}" for name, value in given.items() if value]
    options += [f"{start}{name}" for name in _more]
    return " ".join([program, *options, f"{last}{shlex.quote(problem)}"])
