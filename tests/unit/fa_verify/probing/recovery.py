"""Measure how much of the declarations of subjects, and of black boxes, a probe recovers.

``python -m tests.unit.fa_verify.probing.recovery`` prints both tables. A subject is probed without
its declarations, and without the orders of its sums, which no declaration states.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator
from typing import Any

from fa_verify.pytest_plugin import environment  # isort: skip  # before torch

from fa_verify.oracles.problem import Problem
from fa_verify.probing.probe import Probed, probe, refuted
from fa_verify.properties.kernels.declared import NUMERICS
from fa_verify.properties.kernels.loading import load
from fa_verify.properties.kernels.subject import Subject
from tests.unit.fa_verify.probing.black_boxes import BOXES, kernel, truth

OTHERS = {
    "sdpa-math": "fa_verify.adapters.sdpa:math",
    "rounded_products": "tests.altered.worse:rounded_products",
    "order_0 (Hopper, emulated)": "tests.altered.emulated:order_0",
}


def others() -> dict[str, str]:
    """The specs of ``OTHERS`` that load: emulated kernels need Triton's interpreter."""
    return {
        name: spec
        for name, spec in OTHERS.items()
        if environment.INTERPRETED or "emulated" not in spec
    }


def subjects() -> Iterator[tuple[str, Subject]]:
    """The subjects that run on a CPU, and each configuration of this project's kernels."""
    ours = load("fa_verify.adapters.ours:flash_attention")
    for name, replaced in ours.configs.items():
        call = functools.partial(ours.call, config=name)
        numerics = {word: x for word, x in ours.declarations().items() if word in NUMERICS}
        words = {word: x for word, x in ours.declarations().items() if word not in NUMERICS}
        words.pop("configs")
        declared = words | numerics | dict(replaced)
        problem = Problem(M=64, N=256, D=64, Dv=64, dtype=declared.get("dtypes", ("bf16",))[0],
                          config=name)  # fmt: skip
        width = ours.tile_of(problem)[1]
        yield f"ours {name}", Subject("ours", call).assuming({**declared, "block_n": width})
    for name, spec in others().items():
        subject = load(spec)
        yield (
            name,
            Subject(name, subject.call).assuming(
                {
                    word: x
                    for word, x in subject.declarations().items()
                    if word not in ("configs", "takes")
                }
            ),
        )


def compared(subject: Subject, probed: Probed) -> dict[str, str]:
    """Each declaration, with "same", "other: VALUE" or the reason why it is undecided."""
    found = {}
    for word, declared in subject.declarations().items():
        try:
            answer = probed[word]
        except KeyError:
            found[word] = "not asked"
            continue
        if answer.value is None:
            found[word] = f"undecided: {answer.evidence}"
        else:
            same = answer.value == declared
            found[word] = "same" if same else f"other: {answer.value!r} for {declared!r}"
    return found


def main() -> None:
    """Print both tables."""
    if environment.HAS_TRITON:
        for name, subject in subjects():
            probed = probe(subject, topics=("domain", "conventions", "numerics"))
            words = compared(subject, probed)
            counts = Counter(x.partition(":")[0] for x in words.values())
            print(f"{name}: {dict(counts)}, refuted {len(refuted(subject, probed))}", flush=True)
            for word, outcome in words.items():
                if outcome != "same":
                    print(f"    {word}: {outcome[:150]}")
    total: Counter[str] = Counter()
    for name, how in BOXES.items():
        outcome = Counter(_judged(probe(Subject("box", kernel(**how))), truth(**how)))
        total += outcome
        print(f"{name}: {dict(outcome)}", flush=True)
    print(f"black boxes: {dict(total)}")


def _judged(probed: Probed, want: dict[str, Any]) -> Iterator[str]:
    """Judge each answer: right, wrong, undecided where it has a value, or rightly undecided."""
    for word, value in want.items():
        found = probed[word].value
        if found is None:
            yield "rightly undecided" if value is None else "undecided"
        else:
            yield "right" if found == value else "wrong"


if __name__ == "__main__":
    main()
