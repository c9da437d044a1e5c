"""I1, I2, I4 and I5 at the sizes at which schedulers change.

For subjects that declare ``same_bits``.
``properties/guarantees/same_bits.py`` holds the checks.
"""

from __future__ import annotations

import pytest

from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.problem import Problem
from fa_verify.properties.guarantees.same_bits import CHECKS
from fa_verify.properties.kernels.vocabulary import SAME_BITS
from fa_verify.simulator.interpreter.dot_order import dots_in_order

# Sizes at which schedulers of other kernels change: one row, few rows against long keys, many
# entries, many heads, rows of several tiles.
SIZES = {
    "cpu": {"keys": 120, "entries": (5, 120), "heads": (6, 60), "rows": 50, "dim": 16},
    # The oracle needs up to 3 GiB for the keys of all entries, or of all heads.
    "cuda": {"keys": 65_536, "entries": (64, 8192), "heads": (64, 8192), "rows": 4096, "dim": 64},
}


@pytest.fixture(autouse=True)
def in_order():
    """Add the products of the interpreter's dots in one order, as tensor cores do."""
    with dots_in_order():
        yield


def promised(subject, word: str, config: str) -> None:
    """Skip a subject that does not declare a word of ``same_bits``."""
    if word != "inference" and not subject.promises(SAME_BITS[word], config):
        pytest.skip(f"{subject.name} declares no same_bits {word!r}")


def scheduled(device: str) -> dict[str, Problem]:
    """Return problems at which a scheduler may take another path for a part than for the whole."""
    keys, (entries, of_entries), (heads, of_heads), rows, dim = SIZES[device].values()
    sizes = {"D": dim, "Dv": dim, "dtype": "bf16", "device": device}
    lengths = tuple(max(1, of_entries * (b + 1) // entries - b) for b in range(entries))
    return {
        "one row of many entries": Problem(
            B=entries, H=2, M=1, N=of_entries, mask=Mask(causal=True, seqlens_k=lengths), **sizes
        ),
        "few rows, long keys": Problem(B=2, H=2, M=3, N=keys, mask=Mask(causal=True), **sizes),
        "many heads": Problem(
            B=1, H=heads, Hk=heads // 2, M=2, N=of_heads, mask=Mask(causal=True), seed=2, **sizes
        ),
        "many rows": Problem(M=rows, N=rows + 5, mask=Mask(causal=True), seed=rows // 3, **sizes),
    }  # fmt: skip


@pytest.mark.parametrize("word", [word for word in SAME_BITS if word != "inference"])
@pytest.mark.parametrize("case", scheduled("cpu"))
def test_bits_do_not_depend_on_what_a_scheduler_may_read(check_one, subject, device, case, word):
    problem = scheduled(device)[case]
    promised(subject, word, problem.config)
    check_one(problem, CHECKS[SAME_BITS[word]])
