"""Findings of one check on one call, without the standing checks of a run."""

from __future__ import annotations

from fa_verify.properties.guarantees.compare import Finding
from fa_verify.properties.kinds.registry import kind_of
from fa_verify.properties.running.trial import SubjectError

__all__ = ["found_on"]


def found_on(subject, call, check):
    """Return the findings of a check; an exception of the kernel is one.

    Raises NotImplementedError where the kernel refuses the call, or the call is out of range.
    """
    try:
        trial = kind_of(call).run(subject, call)
        if trial is None:
            raise NotImplementedError("out of range")
        return check(trial)
    except SubjectError as error:
        return [Finding.of_exception(error, subject, call)]
