"""Compare declarations that are offered for a failure with what a probe of the kernel finds."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

from fa_verify.properties.subjects.subject import Subject

__all__ = ["agrees", "answers_of"]


def answers_of(subject: Subject, device: str) -> dict[str, Any]:
    """Return the values that a probe shows, by word; none where it ends in an error."""
    # Imported where a failure needs it.
    from fa_verify.probing.probe import probe

    try:
        probed = probe(subject, device, topics=("conventions", "numerics"))
    except Exception:
        return {}
    return {x.word: x.value for x in probed.answers if x.value is not None}


def agrees(declaration: str, answers: Mapping[str, Any]) -> bool:
    """Return whether no answer contradicts a declaration such as ``group_sum="dtype"``."""
    call = ast.parse(f"f({declaration})", mode="eval").body
    assert isinstance(call, ast.Call)
    given = {x.arg: ast.literal_eval(x.value) for x in call.keywords}
    return all(answers.get(word, value) == value for word, value in given.items())
