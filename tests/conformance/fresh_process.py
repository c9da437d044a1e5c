"""Run problems in a fresh process; print a digest of each output of each problem as JSON.

``python -m fa_verify.conformance.fresh_process SUBJECT [--apart] PROBLEM [PROBLEM ...]``
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import sys
from functools import partial

import torch

from fa_verify.oracles.outputs import OUTPUTS, Outputs

__all__ = ["digests", "main"]

# Time limit of a problem in a fork.
_SECONDS = 120.0


def digests(outputs: Outputs) -> dict[str, str]:
    """Hash the bits of each output. All NaN are equal, and +0 equals -0."""
    found = {}
    for name, x in zip(OUTPUTS, outputs, strict=True):
        if x is not None:
            same = torch.where(x.isnan(), torch.nan, x + 0.0).cpu()
            # An axis of one element may have any stride, which a view as bytes refuses.
            same = same.clone(memory_format=torch.contiguous_format)
            found[name] = hashlib.sha256(same.view(torch.uint8).numpy().tobytes()).hexdigest()
    return found


def main(kernel: str, *texts: str) -> None:
    """Run problems one after the other and print their digests, null for a refused problem.

    After ``--apart``, each problem runs in a fork of its own, so that no problem finds
    what another one left behind.
    """
    # Set up the process as the plugin does, before kernels are loaded.
    import fa_verify.pytest_plugin.environment  # noqa: F401
    from fa_verify.adapters.registry import spec_of
    from fa_verify.forks import in_forks
    from fa_verify.oracles.masks.mask import Mask
    from fa_verify.oracles.problem import Problem
    from fa_verify.properties.inputs.tensors import make
    from fa_verify.properties.kernels.loading import load
    from fa_verify.properties.running.trial import run_subject

    subject = load(spec_of(kernel))

    def run(problem: Problem) -> dict[str, str] | None:
        try:
            return digests(run_subject(subject, problem, make(problem)))
        except NotImplementedError:
            return None

    apart = texts[:1] == ("--apart",)
    problems = [Problem.from_json(text) for text in texts[apart:]]
    if apart:
        # The first call of a process takes ten times as long: it imports modules, and the
        # interpreter reads the kernels. A call of other sizes does so for all forks.
        size = subject.seqlen_multiple
        run(dataclasses.replace(problems[-1], M=size, N=size, mask=Mask()))
        works = [partial(run, problem) for problem in problems]
        ended = sorted(in_forks(works, jobs=1, seconds=_SECONDS))
        failed = [problems[x.number].to_json() for x in ended if x.how != "returned"]
        assert not failed, failed
        found = [x.value for x in ended]
    else:
        found = [run(problem) for problem in problems]
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
    sys.stdout.flush()
    # Symptom: "terminate called without an active exception" at the end of some processes on a GPU,
    # seen with PyTorch 2.11. Threads of PyTorch outlive the interpreter; they are not waited for.
    os._exit(0)
