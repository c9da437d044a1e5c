"""Calls of every kind, read from one line of JSON."""

from __future__ import annotations

from fa_verify.oracles.call import Call, record_from_json
from fa_verify.oracles.calls.cache import CacheProblem
from fa_verify.oracles.calls.merge import MergeProblem
from fa_verify.oracles.calls.quantised import QuantisedProblem
from fa_verify.oracles.calls.ring import RingProblem
from fa_verify.oracles.problem import Problem

__all__ = ["call_from_json", "call_from_record"]

# The key of a record that only calls of one kind have.
_OF_KEY: dict[str, type[CacheProblem | MergeProblem | QuantisedProblem | RingProblem]] = {
    "cache": CacheProblem, "merge": MergeProblem, "quantised": QuantisedProblem,
    "ring": RingProblem,
}  # fmt: skip


def call_from_json(text: str) -> Call:
    """Reads the output of ``to_json`` of a call; nothing in it is evaluated or imported.

    Raises:
        ValueError: The text is not JSON, has another version or an unknown field or mask, or a
            value is out of range.
    """
    return call_from_record(record_from_json(text))


def call_from_record(record: object) -> Call:
    """Reads the output of ``Call.record``, also after JSON; raises as ``call_from_json``."""
    if isinstance(record, dict):
        for key, cls in _OF_KEY.items():
            if key in record:
                return cls.from_record(record)
    return Problem.from_record(record)
