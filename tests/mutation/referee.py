"""Mutants of the referee itself: of what says what is true, and of what checks it.

Written by hand, in the manner of slips. ``caught_by`` names the files of tests/unit that are to
kill each, the quickest first.
"""

from __future__ import annotations

from tests.mutation.mutant import Mutant
from tests.mutation.referee_oracles import ORACLES
from tests.mutation.referee_properties import PROPERTIES

__all__ = ["REFEREE"]

REFEREE: tuple[Mutant, ...] = (*ORACLES, *PROPERTIES)
