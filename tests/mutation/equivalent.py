"""Mechanical mutants that no input of the contract can show, each with the reason."""

from __future__ import annotations

__all__ = ["EQUIVALENT"]

# Reason, and the names of the mutants that it holds for.
_REASONS: dict[str, tuple[str, ...]] = {}

EQUIVALENT: dict[str, str] = {name: reason for reason, names in _REASONS.items() for name in names}
