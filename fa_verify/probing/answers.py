"""The answers of a probe: a word, its value, the evidence and the certainty."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

__all__ = ["CERTAINTIES", "Answer", "alike", "lines", "undecided"]

# "shown": an exception, or results that no other known answer explains.
# "tried": every trial agrees, and other inputs may not.
# "undecided": several answers explain the results, or none does.
CERTAINTIES = ("shown", "tried", "undecided")


@dataclass(frozen=True)
class Answer:
    """A finding about one property of a kernel.

    Args:
        word: The property: the name of a declaration, or another word that has none.
        value: Its value; None if it is undecided, or None is what a declaration says.
        certainty: "shown", "tried" or "undecided".
        evidence: The observation, as a sentence.
        replay: The input that shows it, one line of JSON: a problem, or an experiment. Empty if no
            input was made.

    Raises:
        ValueError: The certainty is unknown, or an undecided answer has a value.
    """

    word: str
    value: Any
    certainty: str
    evidence: str
    replay: str = ""

    def __post_init__(self) -> None:
        if self.certainty not in CERTAINTIES:
            raise ValueError(f"certainty is {self.certainty!r}; needs one of {CERTAINTIES}")
        if self.certainty == "undecided" and self.value is not None:
            raise ValueError(f"value is {self.value!r}; needs None for an undecided answer")

    def to_record(self) -> dict[str, Any]:
        """Return the answer as plain values; the replay line is a string of JSON."""
        return json.loads(json.dumps(dataclasses.asdict(self)))


def alike(message: str) -> str:
    """Return a message without numbers and dtypes: that of the same fault on another problem."""
    return re.sub(r"torch\.\w+|\d+", "#", message)


def undecided(word: str, evidence: str, replay: str = "") -> Answer:
    """Return an answer without a value."""
    return Answer(word, None, "undecided", evidence, replay)


def lines(answers: Iterable[Answer]) -> list[str]:
    """Format answers: a line for the finding, and one for the input that shows it."""
    answers = [*answers]
    width = max((len(answer.word) for answer in answers), default=0)
    found = []
    for answer in answers:
        value = "?" if answer.certainty == "undecided" else repr(answer.value)
        found.append(f"{answer.word:{width}}  {value}  ({answer.certainty}) {answer.evidence}")
        if answer.replay:
            found.append(f"{'':{width}}    {answer.replay}")
    return found
