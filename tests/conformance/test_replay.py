"""Check every guarantee on the regression files and on the problem of --fa-replay."""

from __future__ import annotations

import contextlib
import dataclasses

import pytest

from fa_verify.oracles.call import changed
from fa_verify.oracles.problem import Problem
from fa_verify.properties.guarantees.claims import checks_of, in_turn
from fa_verify.properties.guarantees.compare import Violation
from fa_verify.properties.guarantees.same_bits import CHECKS as SAME_BITS
from fa_verify.properties.kernels.refusals import RefusedError
from fa_verify.properties.kinds.registry import kinds_of
from fa_verify.properties.running.large_memory import larger_than_the_machine
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


# Groups of claims that a replay asks beside the standing ones.
USUAL = ("call", "elements", "statistics", "closed forms", "pooled", "added")


def asked_of(subject, problem, calls):
    """Return the checks of a call by name; with ``calls``, those of many calls too."""
    refused = ("refused",) if subject.refuses else ()
    if problem.kind != "attention":
        return checks_of("call", *refused, kind=problem.kind)
    more = [*(("calls",) if calls else ()), *(("streams",) if problem.device == "cuda" else ())]
    return checks_of(*USUAL, *refused, *more)


def every_guarantee(trial, checks, failing, unchecked):
    """Return the findings of all checks.

    ``failing`` receives the check that gives the findings of each guarantee, ``unchecked`` the
    reason why a check was not made.
    """
    checks = {name: noting(check, failing) for name, check in checks.items()}
    findings = in_turn(checks, unchecked)(trial)
    if len(unchecked) == len(checks) and not findings:
        reasons = (f"{name} was not checked: {why}" for name, why in unchecked.items())
        raise RefusedError("; ".join(reasons))
    return findings


def noting(check, failing):
    """Return a check that enters itself into ``failing``, by the guarantee of a finding."""

    def noted(trial):
        findings = check(trial)
        for finding in findings:
            failing.setdefault(finding.guarantee, check)
        return findings

    return noted


def check(runner, problem, device, record, calls=False, shrink=False):
    """Check every guarantee on a call of any kind.

    ``record`` receives the checks that were not made. With ``shrink``, a failure is shown on the
    simplest call on which it occurs.
    """
    __tracebackhide__ = True
    fields = {"device": device}
    configs = runner.subject.configs
    if problem.attention is not None and problem.config not in configs:
        fields["config"] = next(iter(configs))
    problem = changed(problem, **fields)
    failing, unchecked = {}, {}
    checks = asked_of(runner.subject, problem, calls)

    def claim(trial):
        return every_guarantee(trial, checks, failing, unchecked)

    # In the interpreter, a product's bits else depend on its row in the tile.
    with dots_in_order() if problem.kind == "cache" else contextlib.nullcontext():
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


def test_replay(runner, device, replayed, pytestconfig, record_property):
    __tracebackhide__ = True
    if replayed is None:
        pytest.skip("no --fa-replay given")
    if not isinstance(replayed, Problem):
        check(runner, replayed, device, record_property)
        return
    if is_ours(pytestconfig) and not replayed.mask.is_plain:
        check_the_mask(dataclasses.replace(replayed, device=device))
    # On a GPU, the kernels of many calls take minutes to compile beside other tests.
    check(runner, replayed, device, record_property, calls=True)
    if runner.subject.same_bits:
        with dots_in_order():
            check_parts(runner, replayed, device)


def test_regression(runner, device, replayed, path, record_property):
    __tracebackhide__ = True
    if replayed is not None:
        pytest.skip("--fa-replay runs only its own problem")
    try:
        problem = CorpusEntry.read(path).problem
    except NotReplayableError as reason:
        pytest.skip(str(reason))
    except ValueError as damage:
        pytest.fail(str(damage), pytrace=False)
    if device == "cpu" and (too_large := larger_than_the_machine(problem)):
        pytest.skip(f"{path}: {too_large}")
    if problem.kind not in kinds_of(runner.subject):
        pytest.skip(f"{runner.subject.name} takes no {problem.kind}")
    # Its inputs and dtype show the fault for which it was stored, and may have no part in this one.
    check(runner, problem, device, record_property, calls=device == "cpu", shrink=True)
