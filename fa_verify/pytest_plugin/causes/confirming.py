"""Compare declarations that are offered for a failure with what a probe of the kernel finds."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fa_verify.properties.kernels.subject import Subject

__all__ = ["answers_of", "confirmed"]

# Declarations that are offered where nothing tells them apart.
_MOST = 2


def answers_of(subject: Subject, device: str) -> dict[str, Any]:
    """Return the values that a probe shows, by word; none where it ends in an error."""
    # Imported where a failure needs it.
    from fa_verify.probing.probe import probe

    try:
        probed = probe(subject, device, topics=("conventions", "numerics"))
    except Exception:
        return {}
    return {x.word: x.value for x in probed.answers if x.value is not None}


def confirmed(
    declarations: Sequence[str], answers: Mapping[str, Any], outputs: Iterable[str]
) -> tuple[str, ...]:
    """Return the declarations, such as ``group_sum="dtype"``, that a cause may offer.

    These are the ones that the answers give; else one that no answer contradicts, or two. Three or
    more are not told apart, and none of them is offered.

    Args:
        declarations: The declarations with each of which the failing problems pass.
        answers: The answers of a probe, see ``answers_of``.
        outputs: The outputs that are wrong.
    """
    if {*outputs} <= {"out", "lse"}:
        # That P is rounded in the backward says nothing of them.
        answers = {**answers, "p_dtype": answers.get("p_dtype_of_out")}
    known = {word: value for word, value in answers.items() if value is not None}
    shown, possible = [], []
    for declaration in declarations:
        call = ast.parse(f"f({declaration})", mode="eval").body
        assert isinstance(call, ast.Call)
        given = {x.arg: ast.literal_eval(x.value) for x in call.keywords}
        if all(known.get(word, value) == value for word, value in given.items()):
            possible.append(declaration)
            shown += [declaration] * ({*given} <= {*known})
    return tuple(shown or possible * (len(possible) <= _MOST))
