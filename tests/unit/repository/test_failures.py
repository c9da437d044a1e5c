"""docs/failure-messages.md has every guarantee and every text of a finding in a kind."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from fa_verify.oracles.guarantee import GUARANTEES
from fa_verify.oracles.problem import Problem
from fa_verify.properties.guarantees.masking import hidden_positions
from fa_verify.properties.kernels.subject import Subject
from fa_verify.properties.running.trial import run_trial
from tests.unit.properties.kernels.broken_subjects import Eager

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "failure-messages.md").read_text(encoding="utf-8")
MODULES = [
    path.relative_to(ROOT).as_posix()
    for path in sorted((ROOT / "properties" / "guarantees").glob("*.py"))
    if path.name != "claims.py"  # its rows name tests
]
KINDS = dict(re.findall(r"^## ([^\n]*)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))
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
    "modified by an inplace operation": "is what PyTorch says of a backward that refuses",
    "to a problem without parts for ": "is the reason why a check is not made, and no finding",
    ", which has no gradients": "is the reason why a check is not made, and no finding",
    "to a causal call that is out of the range of the bound": "is why a check is not made",
    ", which takes no call that ": "is the reason why a check is not made, and no finding",
    "to a mask with a predicate, of these entries alone": "is the reason why a check is not made",
    "to a cache of the dtype of q": "is the reason why a check is not made, and no finding",
    "to a mask with a predicate": "is the reason why a check is not made, and no finding",
    "where the last row of no entry sees a key": "is the reason why a check is not made",
    "to a call that appends to no cache of codes": "is the reason why a check is not made",
    "to scales of pages, of which others would have others": "is why a check is not made",
    "to a call without appends, which is out of range": "is why a check is not made",
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


def texts(module: str, words: int = 3) -> set[str]:
    """The strings of a module with so many words or more, except for docstrings."""
    tree = ast.parse((ROOT / module).read_text(encoding="utf-8"))
    alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    strings = {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in alone
    }
    return {text for text in strings if len(text.split()) >= words}


# Parts of messages of all sources.
SPOKEN = {
    part.strip()
    for folder in ("properties", "oracles", "fa_verify", "fa_kernels")
    for module in sorted((ROOT / folder).rglob("*.py"))
    for text in texts(module.relative_to(ROOT).as_posix(), 2)
    for part in text.split("{}")
    if len(part.split()) >= 2
}


@pytest.mark.parametrize("module", MODULES)
def test_every_text_of_a_finding_belongs_to_a_kind(module):
    missing = {x for x in texts(module) if any(part.strip() not in PAGE for part in x.split("{}"))}
    assert missing <= {*LEFT_OUT}


def test_texts_that_are_left_out_are_texts():
    assert {*LEFT_OUT} <= set().union(*map(texts, MODULES))


def test_every_guarantee_belongs_to_a_kind():
    heads = re.sub(r"(\w)(\d) to \w(\d)", _listed, "\n".join(KINDS.values()))
    missing = [x for x in GUARANTEES if not re.search(rf"\b({x}|{GUARANTEES[x]})\b", heads)]
    # Whether the bound is attained is asked of the kernels of this repository alone.
    assert missing == ["attained"]


def _listed(found: re.Match[str]) -> str:
    """Returns "C1 to C3" as "C1 C2 C3"."""
    first, last = int(found[2]), int(found[3])
    return " ".join(f"{found[1]}{number}" for number in range(first, last + 1))


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_has_actions_for_messages_that_exist(kind):
    """A row holds a text of the sources, so that a changed message shows."""
    rows = re.findall(r"^\| (`.*) \| (\S.*) \|$", KINDS[kind], re.MULTILINE)
    assert len(rows) == KINDS[kind].count("\n| ") - 1 >= 5
    # The gate puts its messages together from single words.
    stale = [x for x, _ in rows if not any(text in x for text in SPOKEN) and "`ALARM" not in x]
    assert not stale


def test_the_message_on_the_page_is_that_of_a_planted_fault():
    subject = Subject.of(Eager("sees one key more"), "attention")
    trial = run_trial(subject, Problem.from_json(re.search(r"--fa-replay='(.*)'", PAGE)[1]))
    (message,) = re.findall(r"```text\n(.*?)\n```", PAGE, re.DOTALL)
    found = next(x for x in hidden_positions(trial) if "depends on a key" in x.claim)
    # Other processors round the last digits otherwise.
    assert re.sub(r"0\.2638109461\d*", "0.2638109461", str(found)) == message
