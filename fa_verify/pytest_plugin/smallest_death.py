"""The smallest call that ends or hangs a process of the kernel, and the features that it needs.

``death_of`` runs this module in another process, which loads the kernel and calls it in forks.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import fa_verify.pytest_plugin.environment  # noqa: F401
from fa_verify.forks import in_forks
from fa_verify.oracles.call import Call
from fa_verify.oracles.calls.codec import call_from_json
from fa_verify.properties.kernels.subject import Subject
from fa_verify.properties.kinds.feature import Feature, is_soft, phrase
from fa_verify.properties.kinds.registry import kind_of
from fa_verify.properties.running.replay_line import COMMAND, replay_line
from fa_verify.properties.running.workers import keep_to_one_thread
from fa_verify.properties.search.causes import described, difference
from fa_verify.properties.search.minimize import minimized
from fa_verify.session import subject_from

__all__ = ["Death", "death_of", "main"]

# Time of the search, the minimiser's share of it, and the time of the imports before.
SECONDS, _TO_MINIMISE, _IMPORTS = 60.0, 2 / 3, 60.0
# Limit of a call, the one while calls are minimised, and both as a multiple of a plain call's time.
_LIMIT, _EARLY, _OF_PLAIN = 5.0, 1.0, 5


class Death(NamedTuple):
    """The smallest call that ends a process: a title and evidence, and the features it needs."""

    lines: Sequence[str] = ()
    features: Sequence[Feature] = ()

    def explains(self, problem: str) -> bool:
        """Return whether a call, as JSON, has all the features."""
        call = call_from_json(problem)
        return all(kind_of(call).holds(x, call) for x in self.features)


def death_of(kernel: Mapping[str, Any], problem: str, how: str) -> Death:
    """Search for the smallest call that dies; without lines if no call of its own shows it.

    Args:
        kernel: The arguments of ``subject_from``.
        problem: The call as JSON.
        how: How the process ended, such as "died of signal 6 (Aborted)"; "hang" if it hung.
    """
    # A process that has asked CUDA for its devices cannot fork, but NVML tells their number, too.
    environ = {**os.environ, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    keep_to_one_thread(environ)
    process = subprocess.Popen(
        [sys.executable, "-m", __name__, json.dumps(kernel), problem, how], env=environ, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    try:
        said, _ = process.communicate(timeout=SECONDS + _IMPORTS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        said, _ = process.communicate()
    if process.returncode != 0:
        return Death()
    # The kernel may print, too.
    lines, features = json.loads(said.splitlines()[-1])
    return Death(lines, [Feature(x, tuple(y) if isinstance(y, list) else y) for x, y in features])


@dataclass
class _Dead:
    """A call that dies, as the minimiser takes failures."""

    problem: Call
    guarantee: str = "returns"


class _Search:
    """Calls the kernel in forks, each call once."""

    def __init__(self, subject: Subject, how: str, end: float) -> None:
        self.subject = subject
        self.ends_as = "timed out" if how == "hang" else "crashed"
        self.limit = _LIMIT
        self.end = end
        self._seen: dict[Call, bool] = {}

    def ended(self, call: Call) -> tuple[str, float]:
        """Return how a call ended, and after how many seconds."""
        (ended,) = in_forks([lambda: _run(self.subject, call)], jobs=1, seconds=self.limit)
        return ended.how, ended.seconds

    def dies(self, call: Call) -> bool:
        """Return whether a call dies in the way that is sought; False if no time is left."""
        if call not in self._seen:
            late = time.monotonic() > self.end
            if late or kind_of(call).excludes(self.subject, call):
                return False
            self._seen[call] = self.ended(call)[0] == self.ends_as
        return self._seen[call]

    def smallest(self, call: Call) -> Call:
        """Minimise a call that dies, beyond the minimiser's own limit of time."""
        while True:
            found = minimized(call, [_Dead(call)], lambda x: [_Dead(x)] * self.dies(x))
            if found[0].problem == call:
                return call
            call = found[0].problem

    def needs(self, call: Call) -> Iterator[tuple[Feature, Call]]:
        """Yield features of a call, each with a call beside it that lacks it and returns."""
        kind, needed = kind_of(call), []
        for feature in kind.features(call):
            for beside in kind.without(feature, call, self.subject.configs):
                has_needed = all(kind.holds(x, beside) for x in needed)
                if kind.excludes(self.subject, beside) or not has_needed:
                    continue
                is_late = beside not in self._seen and time.monotonic() > self.end
                if feature.name != "dtype" and not is_late and not self.dies(beside):
                    needed.append(feature)
                    yield feature, beside
                break


def _run(subject: Subject, call: Call) -> bool:
    """Run a call; an exception is no death."""
    try:
        kind_of(call).run(subject, call)
    except Exception:
        return False
    return True


def _plainest(subject: Subject, call: Call) -> Call:
    """Return the simplest call that the minimiser may reach, without calling the kernel."""
    kind = kind_of(call)
    while True:
        simpler = (x for x in kind.reductions(call) if not kind.excludes(subject, x))
        if (found := next(simpler, None)) is None:
            return call
        call = found


def main(kernel: str, problem: str, how: str) -> Death:
    """Search in this process; see ``death_of``."""
    # The first call of each fork would import it, in two seconds.
    import torch.fx.experimental.symbolic_shapes  # noqa: F401

    # A core file takes longer to write than the search.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    options = json.loads(kernel)
    subject, call = subject_from(**options), call_from_json(problem)
    search = _Search(subject, how, time.monotonic() + SECONDS * _TO_MINIMISE)
    ended, seconds = search.ended(_plainest(subject, call))
    plain = seconds * (ended == "returned")
    limit, search.limit = max(_LIMIT, _OF_PLAIN * plain), max(_EARLY, _OF_PLAIN * plain)
    if not search.dies(call):
        return Death()
    smallest = search.smallest(call)
    search.end += SECONDS * (1 - _TO_MINIMISE)
    needs = [*search.needs(smallest)]
    is_late, search.limit = time.monotonic() > search.end, limit
    if search.ended(smallest)[0] != search.ends_as:
        return Death()  # it was slow
    hard = [x for x, _ in needs if not is_soft(x)] or [x for x, _ in needs]
    about = f"Problems with {' and '.join(map(phrase, hard))}" if hard else "Some problems"
    does = f"do not return within {limit:.0f} s (hang)"
    said = [f"{about} {does if how == 'hang' else f'end the process, which {how}'}"]
    if needs:
        said.append(f"  needs {', '.join(phrase(x) for x, _ in needs)}")
    if is_late:
        said.append("  not tried, as no time was left: other features that it may need")
    said.append(f"  smallest: {described(smallest)}")
    said += [f"  passes with {difference(smallest, beside)}" for _, beside in needs[:1]]
    replay = replay_line(smallest.to_json(), options["kernel"] or "", "", COMMAND)
    said.append(f"  replay: {replay}")
    return Death(said, [x for x, _ in needs])


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])), flush=True)
