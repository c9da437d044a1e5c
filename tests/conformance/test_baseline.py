"""The problems of --fa-baseline: judge and measure each, and run the check that its entry names."""

from __future__ import annotations

import pytest

from fa_verify.properties.guarantees.compare import Violation
from fa_verify.properties.kernels.refusals import RefusedError
from fa_verify.properties.regression.measurement import measured
from fa_verify.reporting.gate.problems import CHECKS


def test_problem(runner, place, entry, record_property):
    __tracebackhide__ = True
    errors = {}

    def claim(trial):
        errors.update(measured(trial))
        if entry.check not in CHECKS:
            raise RefusedError(f"there is no guarantee {entry.check!r}")
        try:
            return CHECKS[entry.check](trial)
        except MemoryError as error:
            raise RefusedError(str(error)) from error

    findings = runner.findings(entry.problem, claim)
    unchecked = ", ".join(runner.refusals) or ("out of range" if not errors else "")
    if findings:
        unchecked = "it failed"
    record_property("baseline", {"place": place, "errors": errors, "unchecked": unchecked})
    if findings:
        raise Violation(findings, claim)
    if unchecked:
        pytest.skip(unchecked)
