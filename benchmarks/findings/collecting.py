"""Summarise the recorded outcomes of tests as a dict that is written to JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fa_verify.oracles.guarantee import EXCEPTION, GUARANTEES, guarantee_of

__all__ = ["collected", "recorded"]

# Number of findings kept per guarantee; findings that say the same count once.
MOST_FINDINGS = 3


def recorded(path: Path) -> list[dict[str, Any]]:
    """Read the records of ``Recording``, up to the first that is incomplete."""
    records: list[dict[str, Any]] = []
    if path.is_file():
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                records.append(json.loads(line))
            except ValueError:
                break
    return records


def collected(records: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Summarise the records of a run.

    Returns:
        A dict with the keys

        * ``declares``, ``declared`` and ``profile``: of the subject.
        * ``tests``: number of tests that ended.
        * ``judged``, ``out_of_range``, ``refusals`` and ``worst``: of the tally, if the run ended.
        * ``guarantees``: for each guarantee the numbers of tests that ``passed``, ``failed`` or
          were ``undecided`` because another guarantee failed first. Also the reasons for which
          tests were ``skipped``, and the ``findings``, smallest problem first.
    """
    found: dict[str, Any] = {
        "tests": 0, "judged": 0, "worst": {}, "declares": {}, "declared": "nothing",
        "refusals": {},
    }  # fmt: skip
    guarantees: dict[str, dict[str, Any]] = {}

    def of(key: str) -> dict[str, Any]:
        fresh = {"passed": 0, "failed": 0, "undecided": 0, "skipped": Counter(), "findings": []}
        return guarantees.setdefault(key, fresh)

    for record in records:
        if record["kind"] == "test":
            found["tests"] += 1
            _count(record, of)
        elif record["kind"] != "cause":
            found |= {key: value for key, value in record.items() if key not in ("kind", "name")}
    for each in guarantees.values():
        each["skipped"] = dict(each["skipped"])
        each["findings"] = _simplest(each["findings"])
    order = [*GUARANTEES, *sorted(guarantees)]
    found["guarantees"] = dict(sorted(guarantees.items(), key=lambda item: order.index(item[0])))
    return found


def _count(record: Mapping[str, Any], of: Any) -> None:
    """Add a test's outcome to the counts of the guarantees that it checks or violates."""
    asked = record["asks"]
    if record["outcome"] == "passed":
        if asked is not None:
            of(asked)["passed"] += 1
    elif record["outcome"] == "skipped":
        if asked is not None:
            of(asked)["skipped"][record["said"]] += 1
    else:
        # A crash violates one guarantee only: that the kernel computes or refuses a problem.
        exception = EXCEPTION.key
        of_no_finding = exception if record["outcome"] == "crashed" else asked or exception
        said = {"guarantee": of_no_finding, "message": record["said"], "problem": ""}
        failed: dict[str, list[Mapping[str, str]]] = {}
        for finding in record["findings"] or [said]:
            failed.setdefault(guarantee_of(finding["guarantee"]), []).append(finding)
        for key, those in failed.items():
            of(key)["failed"] += 1
            of(key)["findings"] += [
                {"message": x["message"], "problem": x["problem"], "test": record["test"]}
                for x in those
            ]
        if asked is not None and asked not in failed:
            of(asked)["undecided"] += 1


def _simplest(findings: list[dict[str, str]]) -> list[dict[str, str]]:
    """Keep one finding, with the smallest problem, of those with equal messages; smallest first."""
    smallest: dict[str, dict[str, str]] = {}
    for finding in sorted(findings, key=lambda x: (len(x["problem"]), x["problem"], x["test"])):
        first, second = (*finding["message"].splitlines(), "", "")[:2]
        # The second line holds numbers, or describes the exception.
        has_numbers = second.lstrip().startswith(("worst at ", "mean over ", "writes byte "))
        smallest.setdefault(first if has_numbers else f"{first}\n{second}", finding)
    return [*smallest.values()][:MOST_FINDINGS]
