"""A subject that breaks a guarantee is caught with a minimal problem, for each guarantee."""

from __future__ import annotations

import dataclasses

import pytest

from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.problem import Problem
from fa_verify.properties.guarantees import claims
from fa_verify.properties.guarantees.compare import Violation
from fa_verify.properties.kernels.subject import Subject
from fa_verify.properties.kernels.supported import problems_of
from fa_verify.properties.running.tally import Tally
from fa_verify.properties.search.search import Runner, attack
from tests.unit.properties.kernels.broken_subjects import Eager

# guarantee: (fault, check, problems to draw, the smallest problems that show the fault)
BROKEN = {
    "G1": ("out scaled", claims.accuracy, {}, [Problem()]),
    "G2": (
        "no maximum subtracted",
        claims.finite,
        {"inputs": "lse_high_6e4"},
        [Problem(inputs="lse_high_6e4")],
    ),
    "G3": (
        "lse of empty rows is 0",
        claims.empty_rows,
        {"empty_rows": True},
        [Problem(M=2, mask=Mask(causal=True))],
    ),
    "G4": (
        "reads padding",
        claims.dirty_padding,
        {"padding": True, "dirty": "nan"},
        [Problem(N=2, dirty="nan", mask=Mask(seqlens_k=(1,)))],
    ),
    "G5": (
        "sees one key more",
        claims.hidden_positions,
        {"hidden": True},
        [Problem(M=2, N=2, mask=Mask(causal=True))],
    ),
    "G6": ("last row not written", claims.full_overwrite, {}, [Problem(M=17)]),
    "G6 outside": ("writes past the end", claims.full_overwrite, {}, [Problem()]),
    "G7": ("reads past the end", claims.reads_in_bounds, {}, [Problem()]),
    "G8": (
        "ignores strides",
        claims.layout,
        {"layouts": ("bhsd", "padded")},
        [Problem(N=2, layouts=("bhsd", "bhsd", "padded", "bhsd"))],
    ),
    "G9": ("v of the first batch entry for all", claims.independence, {}, [Problem(B=2)]),
    "G10": ("another result every call", claims.repeatable, {}, [Problem()]),
    "G11": (
        "another tile past 16 keys",
        claims.accuracy,
        {"configs": ("wide",)},
        [Problem(N=17, config="wide")],
    ),
    "G12": ("offsets of 32 bits", claims.far_offsets, {"max_seqlen": 20}, [Problem()]),
    "G13": ("scale of the call before", claims.state, {}, [Problem()]),
}


def first_violation(fault, check, drawn):
    """The findings of the smallest problem that the search finds."""
    subject = Eager(fault)
    # Without a promise of equal bits a second run would be compared with the bound, which the
    # faulty first run already exceeds.
    subject.bitwise = ("G4", "G5", "G8", "G10")
    subject.configs = {name: {} for name in ("default", *drawn.get("configs", ()))}
    runner = Runner(Subject.of(subject, "broken"), Tally())
    domain = {"dtype": "fp64", "device": "cpu", "max_seqlen": 48, "max_cost": 24, **drawn}
    with pytest.raises(Violation) as caught:
        attack(runner, check, problems_of(runner.subject, **domain), seed=fault)
    return caught.value.findings


@pytest.mark.parametrize("name", BROKEN)
def test_a_subject_that_breaks_a_guarantee_is_caught_with_a_minimal_problem(name):
    fault, check, drawn, smallest = BROKEN[name]
    findings = first_violation(fault, check, drawn)
    assert findings[0].guarantee.split()[0] == {"G11": "G1"}.get(name, name.split()[0])
    assert findings[0].problem in [dataclasses.replace(p, dtype="fp64") for p in smallest]
