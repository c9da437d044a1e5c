"""Check every guarantee on the regression files and on the problem of --fa-replay."""

from __future__ import annotations

import contextlib
import dataclasses

import pytest

from fa_verify.oracles.merge_problem import MergeProblem
from fa_verify.oracles.problem import Problem
from fa_verify.properties.checks.caches import CACHES, found_in_cache
from fa_verify.properties.checks.guarantees import (
    CALLS,
    CLOSED_FORM,
    GUARANTEES,
    OF_ADDED,
    POOLED,
    STATISTICS,
    STREAMS,
    backward,
    in_turn,
)
from fa_verify.properties.checks.merging import MERGES, found_in
from fa_verify.properties.checks.same_bits import CHECKS as SAME_BITS
from fa_verify.properties.comparison.compare import Violation
from fa_verify.properties.search.corpus import CorpusEntry, NotReplayableError
from fa_verify.properties.search.search import plainest
from fa_verify.session import NOT_ASKED, is_ours
from fa_verify.simulator.interpreter.dot_order import dots_in_order

# Largest number of pairs on which a replay compares all elements of two forms of a mask.
MOST_PAIRS = 2**22


def pytest_generate_tests(metafunc):
    """Parametrize with the regression files."""
    if "path" in metafunc.fixturenames:
        files = metafunc.config.pluginmanager.get_plugin("regression-files")
        metafunc.parametrize("path", files.paths, ids=[path.stem for path in files.paths])


def every_guarantee(trial, beside, failing, unchecked):
    """Return the findings of all guarantees, statistics and closed forms, and of more checks.

    ``failing`` receives the check that gives the findings of each guarantee, ``unchecked`` the
    reason why a check was not made.
    """
    beyond = {"backward": backward, **STATISTICS, **CLOSED_FORM, **OF_ADDED, **POOLED}
    checks = {**GUARANTEES, **beyond}
    checks |= dict(beside)
    if trial.problem.device == "cuda":
        checks |= STREAMS
    checks = {name: noting(check, failing) for name, check in checks.items()}
    findings = in_turn(checks, unchecked)(trial)
    if len(unchecked) == len(checks) and not findings:
        reasons = (f"{name} was not checked: {why}" for name, why in unchecked.items())
        raise NotImplementedError("; ".join(reasons))
    return findings


def noting(check, failing):
    """Return a check that enters itself into ``failing``, by the guarantee of a finding."""

    def noted(trial):
        findings = check(trial)
        for finding in findings:
            failing.setdefault(finding.guarantee, check)
        return findings

    return noted


def check(runner, problem, device, record, beside=(), shrink=False):
    """Check every guarantee on a problem.

    ``record`` receives the checks that were not made. With ``shrink``, a failure is shown on the
    simplest problem on which it occurs.
    """
    __tracebackhide__ = True
    configs = runner.subject.configs
    config = problem.config if problem.config in configs else next(iter(configs))
    problem = dataclasses.replace(problem, device=device, config=config)
    failing, unchecked = {}, {}

    def claim(trial):
        return every_guarantee(trial, beside, failing, unchecked)

    findings = runner.findings(problem, claim)
    if findings and shrink:
        found = plainest(runner, findings, failing.get(findings[0].guarantee, claim))
        found = runner.findings(found[0].problem, claim) or found
        # Guarantees that hold on the simplest problem may have another cause.
        named = {finding.guarantee for finding in found}
        findings = [*found, *(x for x in findings if x.guarantee not in named)]
    if findings:
        raise Violation(findings, failing.get(findings[0].guarantee, claim))
    if runner.refusals:
        pytest.skip(", ".join(runner.refusals))
    for name, why in unchecked.items():
        record(NOT_ASKED, f"{name}: {why}")


def check_parts(runner, problem, device):
    """Check the bits of parts of a problem that the subject declares."""
    __tracebackhide__ = True
    claim = in_turn(SAME_BITS, {})
    if findings := runner.findings(dataclasses.replace(problem, device=device), claim):
        raise Violation(findings, claim)


def check_the_mask(problem):
    """Fail if two forms of the problem's mask disagree, so that no kernel is blamed for it."""
    from fa_verify.mask_forms import FORMS

    __tracebackhide__ = True
    pairs = problem.B * problem.H * problem.M * problem.N
    for form, compare in FORMS.items():
        # Block maps take the interpreter longer than the kernels.
        if pairs > (MOST_PAIRS if form in ("definition", "kernel") else MOST_PAIRS // 256):
            continue
        # Without a jit form, the kernels refuse the mask.
        with contextlib.suppress(NotImplementedError):
            if faults := compare(problem):
                pytest.fail(str(faults[0]), pytrace=False)


def check_calls(subject, problem, device, mask):
    """Check every guarantee of calls with a cache, or of merges, on a problem of them."""
    __tracebackhide__ = True
    if isinstance(problem, MergeProblem):
        problem = dataclasses.replace(problem, device=device)
        checks, found_of = MERGES, found_in
    else:
        attention = dataclasses.replace(problem.attention, device=device)
        problem = dataclasses.replace(problem, attention=attention)
        checks, found_of = CACHES, found_in_cache
    findings, refused = [], []
    for claim in checks.values():
        try:
            with dots_in_order():
                findings += found_of(subject, problem, claim)
        except NotImplementedError as reason:
            refused.append(str(reason))
    if findings:
        told = (str(dataclasses.replace(x, mask=mask)) for x in findings)
        pytest.fail("\n".join(told), pytrace=False)
    if len(refused) == len(checks):
        pytest.skip(refused[0])


def test_replay(runner, device, replayed, pytestconfig, record_property):
    if replayed is None:
        pytest.skip("no --fa-replay given")
    if not isinstance(replayed, Problem):
        check_calls(runner.subject, replayed, device, pytestconfig.getoption("--fa-mask") or "")
        return
    if is_ours(pytestconfig) and not replayed.mask.is_plain:
        check_the_mask(dataclasses.replace(replayed, device=device))
    # On a GPU, the kernels of many calls take minutes to compile beside other tests.
    check(runner, replayed, device, record_property, CALLS)
    if runner.subject.same_bits:
        with dots_in_order():
            check_parts(runner, replayed, device)


def test_regression(runner, device, replayed, path, record_property):
    if replayed is not None:
        pytest.skip("--fa-replay runs only its own problem")
    try:
        problem = CorpusEntry.read(path).problem
    except NotReplayableError as reason:
        pytest.skip(str(reason))
    except ValueError as damage:
        pytest.fail(str(damage), pytrace=False)
    # Its inputs and dtype show the fault for which it was stored, and may have no part in this one.
    calls = CALLS if device == "cpu" else ()
    check(runner, problem, device, record_property, calls, shrink=True)
