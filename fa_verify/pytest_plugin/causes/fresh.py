"""Run calls in a fresh process, in which a kernel finds nothing of the calls before.

``python -m fa_verify.pytest_plugin.causes.fresh`` reads the kernel and the calls from its
standard input. The last line of its output says of each call whether it passes the check.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence

import pytest

from fa_verify.oracles.call import Call
from fa_verify.session import options_of

__all__ = ["FreshProcesses"]

# Time limit of a process.
_SECONDS = 120.0


class FreshProcesses:
    """Runs sequences of calls of the kernel of a run, each in a process of its own.

    Args:
        config: The pytest configuration.
    """

    def __init__(self, config: pytest.Config) -> None:
        self._folder = config.invocation_params.dir
        self._kernel = options_of(config)
        # A mask of the user's is a class of this process.
        self._works = not config.getoption("--fa-mask", None)
        self._known: dict[tuple[str, tuple[Call, ...]], list[bool | None] | None] = {}

    def __call__(self, calls: Sequence[Call], check: str) -> list[bool | None] | None:
        """Return whether each call passes; None for one that is not judged, or for all.

        Args:
            calls: The calls, in their order.
            check: Name of the claim to check beside the standing ones; empty for none.
        """
        key = check, tuple(calls)
        if not self._works:
            return None
        if key not in self._known:
            self._known[key] = self._run([x.to_json() for x in calls], check)
        return self._known[key]

    def _run(self, calls: list[str], check: str) -> list[bool | None] | None:
        environment = {name: x for name, x in os.environ.items() if not name.startswith("PYTEST_")}
        try:
            done = subprocess.run(
                [sys.executable, "-m", __name__],
                input=json.dumps({**self._kernel, "calls": calls, "check": check}),
                cwd=self._folder, env=environment, capture_output=True, text=True,
                timeout=_SECONDS, check=False,
            )  # fmt: skip
            found = json.loads(done.stdout.splitlines()[-1])
        except (subprocess.TimeoutExpired, ValueError, IndexError):
            # The kernel cannot be loaded there, or it ends the process.
            self._works = False
            return None
        return found if isinstance(found, list) and len(found) == len(calls) else None


def _main(text: str) -> list[bool | None]:
    # Set up the process as the plugin does, before kernels are loaded.
    import fa_verify.pytest_plugin.environment  # noqa: F401
    from fa_verify.oracles.calls.codec import call_from_json
    from fa_verify.properties.guarantees.claims import BY_NAME
    from fa_verify.properties.running.tally import Tally
    from fa_verify.properties.search.search import Runner
    from fa_verify.session import subject_from

    given = json.loads(text)
    calls = [call_from_json(x) for x in given.pop("calls")]
    name = given.pop("check")
    check = BY_NAME[name] if name else lambda trial: []
    runner = Runner(subject_from(**given), Tally())
    found: list[bool | None] = []
    for call in calls:
        judged = runner.judged
        wrong = bool(runner.findings(call, check))
        found.append(not wrong if wrong or runner.judged > judged else None)
    return found


if __name__ == "__main__":
    print(json.dumps(_main(sys.stdin.read())))
    sys.stdout.flush()
    os._exit(0)  # threads of PyTorch outlive the interpreter
