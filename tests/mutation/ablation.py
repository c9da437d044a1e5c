"""An ablation of the checks beside the bound: ``python -m tests.mutation.ablation``.

Each check has a fault and a problem on which the check finds the fault and the bound does not.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from functools import partial

from fa_verify.forks import in_forks
from tests.mutation.catalogue.copies import PACKAGE, sources_of
from tests.mutation.catalogue.subtle import SUBTLE
from tests.mutation.judging.interpreting import interpret

__all__ = ["ABLATION"]

_SECONDS = 120.0
# (fault, index of its problem in ``trials.ORDINARY``) by check, or by a part of one.
ABLATION: dict[str, tuple[str, int]] = {
    "backward": ("delta: products are rounded to the input dtype", 0),
    "limit": ("forward: P has 17 digits in fp32", 11),
    "limit lse": ("forward: the softmax sum of 16-bit inputs takes 16 of the digits of P", 0),
    "limit rows": ("forward: the factor that rescales acc is rounded to the input dtype", 12),
    "limit tf32": ("dkdv: P of the first tile of TF32 dots is too large by one part in 512", 13),
    "rms": ("dkdv: dS is made from the rounded P", 2),
    "bias": ("dq: dq is too large by one part in a thousand", 0),
    "identities": ("delta: it is truncated to the input dtype", 8),
    "counts": ("forward: the far edge of a window of thousands of keys is one key short", 10),
    "mask": (
        "dkdv: the first key and the last row of a sequence are taken for hidden from each other",
        9,
    ),
    "ones": ("forward: out is too large by one part in two thousand", 1),
    "doubled": ("forward: an epsilon is added to the numerator too", 0),
    "permuted": (
        "forward: the last head of several runs over the keys of full tiles backwards",
        4,
    ),
}


def main() -> int:
    """Prints the checks that find each fault; returns 0 if only its own check finds it."""
    interpret()
    from tests.mutation.judging.trials import ORDINARY
    from tests.mutation.judging.verdict import asked, judged_kernels, warmed

    sources = sources_of(PACKAGE)
    mutants = {mutant.name: mutant for mutant in SUBTLE}
    steps = {
        check: replace(ORDINARY[place], checks=("G1", check.split()[0]))
        for check, (_, place) in ABLATION.items()
    }
    questions = {check: asked((step,)) for check, step in steps.items()}
    warmed(questions["rms"])
    works = [
        partial(
            judged_kernels, sources, mutants[name], (steps[check],), questions[check],
            full=True, units=-1,
        )
        for check, (name, _) in ABLATION.items()
    ]  # fmt: skip
    dispensable = 0
    for ended in in_forks(works, jobs=os.cpu_count() or 1, seconds=_SECONDS):
        check = tuple(ABLATION)[ended.number]
        found = [kill.check for kill in ended.value.kills] if ended.how == "returned" else []
        by = " and ".join(found) or ended.how
        print(f"{check}: {ABLATION[check][0]}: found by {by}", flush=True)
        dispensable += found != [check.split()[0]]
    return int(dispensable > 0)


if __name__ == "__main__":
    sys.exit(main())
