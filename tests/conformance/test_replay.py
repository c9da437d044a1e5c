"""Check every guarantee on the regression files and on the problem of --replay."""

from __future__ import annotations

import dataclasses

import pytest

from fa_verify.properties.checks.guarantees import (
    CALLS,
    CLOSED_FORM,
    GUARANTEES,
    OF_BIAS,
    POOLED,
    STATISTICS,
    STREAMS,
    backward,
    in_turn,
)
from fa_verify.properties.search.corpus import CorpusEntry, NotReplayableError
from fa_verify.session import is_ours


def pytest_generate_tests(metafunc):
    """Parametrize with the regression files."""
    if "path" in metafunc.fixturenames:
        files = metafunc.config.pluginmanager.get_plugin("regression-files")
        metafunc.parametrize("path", files.paths, ids=lambda path: path.stem)


def every_guarantee(trial, beside=()):
    """Return the findings of all guarantees, statistics and closed forms, and of more checks."""
    unchecked = {}
    beyond = {"backward": backward, **STATISTICS, **CLOSED_FORM, **OF_BIAS, **POOLED}
    checks = {**GUARANTEES, **beyond}
    checks |= dict(beside)
    if trial.problem.device == "cuda":
        checks |= STREAMS
    findings = in_turn(checks, unchecked)(trial)
    if unchecked and not findings:
        reasons = (f"{name} was not checked: {why}" for name, why in unchecked.items())
        raise NotImplementedError("; ".join(reasons))
    return findings


def check(check_one, subject, problem, device, beside=()):
    __tracebackhide__ = True
    config = problem.config if problem.config in subject.configs else next(iter(subject.configs))
    problem = dataclasses.replace(problem, device=device, config=config)
    check_one(problem, lambda trial: every_guarantee(trial, beside))


def check_the_mask(problem):
    """Fail if two forms of the problem's mask disagree, so that no kernel is blamed for it."""
    from fa_verify.mask_forms import FORMS

    __tracebackhide__ = True
    faults = [fault for compare in FORMS.values() for fault in compare(problem)]
    if faults:
        pytest.fail(str(faults[0]), pytrace=False)


def test_replay(check_one, subject, device, replayed, pytestconfig):
    if replayed is None:
        pytest.skip("no --replay given")
    if is_ours(pytestconfig) and not replayed.mask.is_plain:
        check_the_mask(dataclasses.replace(replayed, device=device))
    # On a GPU, the kernels of many calls take minutes to compile beside other tests.
    check(check_one, subject, replayed, device, CALLS)


def test_regression(check_one, subject, device, replayed, path):
    if replayed is not None:
        pytest.skip("--replay runs only its own problem")
    try:
        problem = CorpusEntry.read(path).problem
    except NotReplayableError as reason:
        pytest.skip(str(reason))
    except ValueError as damage:
        pytest.fail(str(damage), pytrace=False)
    check(check_one, subject, problem, device, CALLS if device == "cpu" else ())
