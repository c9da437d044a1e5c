"""docs/failure-messages.md shows every guarantee and every text of a finding.

``test_docs.py`` finds the page stale where a message has changed.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from docs.failures import SECTIONS
from fa_verify.oracles.guarantee import GUARANTEES

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "failure-messages.md").read_text(encoding="utf-8")
MODULES = [
    path.relative_to(ROOT).as_posix()
    for folder in ("checks", "comparison")
    for path in sorted((ROOT / "properties" / folder).glob("*.py"))
    if path.name != "claims.py"  # its rows name tests
]
# Texts that are not on the page, and why.
LEFT_OUT = {
    "offsets past 2**31 need ": "needs a machine with little memory",
    " GiB of memory on ": "needs a machine with little memory",
    "the bound is not finite, so nothing was judged: ": "needs a fault of the suite",
    "the bound given the forward is not finite: ": "needs a fault of the suite",
    ", which have no gaps": "is the reason why a check is not made, and no finding",
    " without an axis longer than 1": "is the reason why a check is not made, and no finding",
    "to empty entries, and masks with a predicate": "is the reason why a check is not made",
    ", which declares no refuses": "is the reason why a check is not made, and no finding",
    "to a contiguous cache": "is the reason why a check is not made, and no finding",
    ", which declares no same_bits ": "is the reason why a check is not made, and no finding",
    "to a problem without parts for ": "is the reason why a check is not made, and no finding",
    ", which has no gradients": "is the reason why a check is not made, and no finding",
    "to a causal call that is out of the range of the bound": "is why a check is not made",
    ", which takes no call that ": "is the reason why a check is not made, and no finding",
    "to a mask with a predicate, of these entries alone": "is the reason why a check is not made",
    "to a cache of one page": "is the reason why a check is not made, and no finding",
    "its forward's results as returned": "names the results for dbias in a message shown for dq",
    # Why limits do not judge a call, which ``assert_attention_close`` says in its figures.
    **dict.fromkeys(
        (
            "the inputs are float64",
            "rows have fewer than ",
            "a softcap modifies the scores",
            'tf32_conversion is "unknown"',
            "the call has no pair",
            "there are none",
            "lse is not returned",
            'backward_reads=("out", "lse") is not declared',
            "heads of a group are rounded before they are added",
            "partial sums of ",
        ),
        "is the reason why limits are not asked, and no finding",
    ),
}


def texts(module: str) -> set[str]:
    """The strings of a module with three words or more, except for docstrings."""
    tree = ast.parse((ROOT / module).read_text(encoding="utf-8"))
    alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    strings = {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in alone
    }
    return {text for text in strings if len(text.split()) >= 3}


@pytest.mark.parametrize("module", MODULES)
def test_every_text_of_a_finding_is_on_the_page(module):
    missing = {x for x in texts(module) if any(part.strip() not in PAGE for part in x.split("{}"))}
    assert missing <= {*LEFT_OUT}


def test_texts_that_are_left_out_are_texts():
    assert {*LEFT_OUT} <= set().union(*map(texts, MODULES))


def test_every_guarantee_is_on_the_page():
    missing = [x for x in GUARANTEES if not re.search(rf"^(?:### .*)?\b{x}\b", PAGE, re.MULTILINE)]
    # Whether the bound is attained is asked of the kernels of this repository alone.
    assert missing == ["attained"]


def test_every_message_has_a_meaning_of_its_own():
    kinds = [kind for section in SECTIONS.values() for kind in section]
    assert len({kind.title for kind in kinds}) == len(kinds) >= 40
    assert len({kind.meaning for kind in kinds}) == len(kinds)
