"""Mutants of the referee itself: of what says what is true, and of what checks it.

Written by hand, in the manner of slips. ``caught_by`` names the files of tests/unit that are to
kill each, the quickest first.
"""

from __future__ import annotations

from fa_verify.diagnosis.mutant import Mutant
from tests.mutation.referee_checks import CHECKS
from tests.mutation.referee_gate import GATE
from tests.mutation.referee_oracles import ORACLES
from tests.mutation.referee_pooled import POOLED
from tests.mutation.referee_problems import PROBLEMS
from tests.mutation.referee_reports import REPORTS
from tests.mutation.referee_runs import RUNS

__all__ = ["REFEREE"]

REFEREE: tuple[Mutant, ...] = (*ORACLES, *POOLED, *PROBLEMS, *RUNS, *CHECKS, *REPORTS, *GATE)
