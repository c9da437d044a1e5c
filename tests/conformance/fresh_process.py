"""Run problems in a fresh process; print a digest of each output of each problem as JSON.

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
    """Hash the bits of each output. All NaN are equal, and +0 equals -0."""
    found = {}
    for name, x in zip(OUTPUTS, outputs, strict=True):
        if x is not None:
            same = torch.where(x.isnan(), torch.nan, x + 0.0).contiguous().cpu()
            found[name] = hashlib.sha256(same.view(torch.uint8).numpy().tobytes()).hexdigest()
    return found


def main(kernel: str, *texts: str) -> None:
    """Run problems one after the other and print their digests, null for a refused problem."""
    # Set up the process as the plugin does, before kernels are loaded.
    import fa_verify.pytest_plugin.environment  # noqa: F401
    from fa_verify.oracles.problem import Problem
    from fa_verify.properties.execution.trial import run_subject
    from fa_verify.properties.inputs.tensors import make
    from fa_verify.properties.subjects.loading import load
    from fa_verify.registry import spec_of

    subject = load(spec_of(kernel))
    found: list[dict[str, str] | None] = []
    for problem in map(Problem.from_json, texts):
        try:
            found.append(digests(run_subject(subject, problem, make(problem))))
        except NotImplementedError:
            found.append(None)
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
