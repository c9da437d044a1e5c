"""Runs problems in a process of its own; prints a digest of each output of the last, as JSON.

``python -m fa_verify.conformance.fresh_process SUBJECT PROBLEM [PROBLEM ...]``
"""

from __future__ import annotations

import hashlib
import json
import sys

import torch

from fa_verify.oracles.outputs import OUTPUTS, Outputs

__all__ = ["digests", "main"]


def digests(outputs: Outputs) -> dict[str, str]:
    """A hash of the bits of each output; which NaN a NaN is, and the sign of 0, do not count."""
    found = {}
    for name, x in zip(OUTPUTS, outputs, strict=True):
        if x is not None:
            same = torch.where(x.isnan(), torch.nan, x + 0.0).contiguous().cpu()
            found[name] = hashlib.sha256(same.view(torch.uint8).numpy().tobytes()).hexdigest()
    return found


def main(kernel: str, *texts: str) -> None:
    """Runs problems one after the other and prints the digests of the last one's outputs."""
    # Sets up the process as a run does, before kernels are loaded.
    import fa_verify.pytest_plugin.environment  # noqa: F401
    from fa_verify.oracles.problem import Problem
    from fa_verify.properties.execution.trial import run_subject
    from fa_verify.properties.inputs.tensors import make
    from fa_verify.properties.subjects.loading import load
    from fa_verify.registry import spec_of

    subject = load(spec_of(kernel))
    for problem in map(Problem.from_json, texts):
        outputs = run_subject(subject, problem, make(problem))
    print(json.dumps(digests(outputs)))


if __name__ == "__main__":
    main(*sys.argv[1:])
