"""Problems of every kind of call, read from one line of JSON."""

from __future__ import annotations

import json

from fa_verify.oracles.cache_problem import CacheProblem
from fa_verify.oracles.merge_problem import MergeProblem
from fa_verify.oracles.problem import Problem

__all__ = ["AnyProblem", "problem_from_json"]

AnyProblem = Problem | CacheProblem | MergeProblem


def problem_from_json(text: str) -> AnyProblem:
    """Reads the output of ``to_json`` of a problem; nothing in it is evaluated or imported.

    Raises:
        ValueError: The text is not JSON, has another version or an unknown field or mask, or a
            value is out of range.
    """
    try:
        record = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"problem is not JSON ({error}): {text[:80]!r}") from None
    if isinstance(record, dict):
        if "cache" in record:
            return CacheProblem.from_record(record)
        if "merge" in record:
            return MergeProblem.from_record(record)
    return Problem.from_record(record)
