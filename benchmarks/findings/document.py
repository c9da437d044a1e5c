"""The text of FINDINGS.md, derived from the files results/DEVICE/findings.json and one of prose."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.findings.process import FINISHED
from benchmarks.findings.unpromised import unpromised
from fa_verify.oracles.guarantee import GUARANTEES
from fa_verify.properties.guarantees.claims import CLAIMS

__all__ = ["document", "verdict"]

_HEAD = """# Findings

Results of the conformance tests on every registered kernel. `make findings` generates this file
from `results/*/findings.json`; edits by hand are lost.

| cell | meaning |
|---|---|
| holds | Every test of the guarantee passed. |
| **fails** | A test failed. The smallest failing problem and its replay line are listed below. |
| *undecided* | A test ended early because another guarantee failed first. |
| unsupported | The kernel declares or refuses every input to which the guarantee applies. |
| not tested | No test of the guarantee applies to this kernel. |
| † | The kernel's authors do not promise this guarantee. |

`README.md` describes the guarantees. The last section, on kernels of other repositories, is
`results/other-repositories.md`.
"""

_FAILS = "**fails**"


def document(
    results: Sequence[Mapping[str, Any]], damaged: Sequence[str] = (), others: str = ""
) -> str:
    """Return the text of FINDINGS.md.

    Args:
        results: Contents of the files, in the order of the sections.
        damaged: For each file that could not be read, a sentence that says why. The document
            lists them.
    """
    parts = [_HEAD]
    if damaged:
        parts.append("**Not included:**\n\n" + "".join(f"- {why}\n" for why in damaged))
    if not results:
        parts.append("There are no results yet.\n")
    for result in results:
        parts.append(f"## {result['device']}\n")
        parts.append("".join(f"{line}\n" for line in _table(result["subjects"])))
        if result["missing"]:
            parts.append("".join(f"- {x} was not run: {y}\n" for x, y in result["missing"].items()))
        parts += [_section(name, subject) for name, subject in result["subjects"].items()]
    return "\n".join([*parts, *([others] if others else [])])


def verdict(guarantee: Mapping[str, Any] | None, refusals: Mapping[str, Any]) -> str:
    """Return the verdict on a guarantee, such as "holds".

    Args:
        guarantee: The counts of the guarantee, see ``collected``; None if no test checks it.
        refusals: Reasons for which the kernel refused problems.
    """
    if guarantee is None:
        return "not tested"
    if guarantee["failed"]:
        return _FAILS
    if guarantee["undecided"]:
        return "*undecided*"
    if guarantee["passed"]:
        return "holds"
    declared = any(" declares " in why or why in refusals for why in guarantee["skipped"])
    return "unsupported" if declared else "not tested"


def _table(subjects: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of the table of guarantees by kernels."""
    yield f"| guarantee | {' | '.join(subjects)} |"
    yield "|---" * (1 + len(subjects)) + "|"
    cut = [name for name, subject in subjects.items() if subject["ended"] != FINISHED]
    met = dict.fromkeys(key for subject in subjects.values() for key in subject["guarantees"])
    claimed = {claim.guarantee.key for claim in CLAIMS}
    for key in dict.fromkeys((*GUARANTEES, *met)):
        # A guarantee that no test checks by itself has a row only if it failed.
        if key in met or (cut and key in claimed):
            cells = (_cell(key, subject) for subject in subjects.values())
            yield f"| {_title(key)} | {' | '.join(cells)} |"
    if cut:
        yield ""
        yield f"\\* in an incomplete run: {', '.join(cut)} did not finish."


def _cell(key: str, subject: Mapping[str, Any]) -> str:
    """Return a verdict with its marks: † for unpromised, * for an incomplete run."""
    said = verdict(subject["guarantees"].get(key), subject["refusals"])
    if said == _FAILS and key in subject["never_promised"]:
        return f"{said} †"
    if subject["ended"] != FINISHED and said == "holds":
        return f"{said}\\*"
    if subject["ended"] != FINISHED and key not in subject["guarantees"]:
        return "not reached\\*"
    return said


def _title(key: str) -> str:
    return GUARANTEES[key].row if key in GUARANTEES else key


def _section(name: str, subject: Mapping[str, Any]) -> str:
    """Return the section of one kernel."""
    there = ", ".join(f"{package} {version}" for package, version in subject["versions"].items())
    judged = f", {subject['judged']:,} problems judged" if subject["judged"] else ""
    lines = [
        f"### {name}: {subject['about']}",
        "",
        f"{there}; profile {subject['profile'] or 'unknown'}, {subject['tests']:,} tests{judged}.",
        "",
    ]
    if subject["ended"] != FINISHED:
        lines += [f"**The run did not finish: {subject['ended']}.** Its last output:", ""]
        lines += [*_quoted(subject["said"] or "nothing"), ""]
    if subject["worst"]:
        lines += [f"- worst error/bound: {_worst(subject['worst'])}"]
    lines += [f"- declares {subject['declared']}"]
    lines += [f"- refuses: {why} ({count:,} problems)" for why, count in _by_count(subject)]
    lines += [f"- never promised: {clause}" for clause in unpromised(subject["declares"])]
    for key, guarantee in subject["guarantees"].items():
        said = verdict(guarantee, subject["refusals"])
        if said in ("unsupported", "not tested"):
            lines.append(f"- {_title(key)} is {said}: {'; '.join(guarantee['skipped'])}")
    lines.append("")
    for key, guarantee in subject["guarantees"].items():
        if guarantee["failed"]:
            ended = guarantee["passed"] + guarantee["failed"]
            why = subject["never_promised"].get(key)
            promised = f", which it never promised: {why}" if why else ""
            lines += [
                f"**{_title(key)} fails** in {guarantee['failed']} of {ended} tests{promised}.",
                "",
            ]
            for finding in guarantee["findings"]:
                lines += [*_quoted(finding["message"]), ""]
    return "\n".join(lines)


def _worst(ratios: Mapping[str, float]) -> str:
    """Format each output's largest error/bound over all dtypes."""
    largest: dict[str, tuple[float, str]] = {}
    for key, ratio in ratios.items():
        output, _, dtype = key.partition(" ")
        largest[output] = max(largest.get(output, (0.0, "")), (ratio, dtype))
    return ", ".join(
        f"{output} {ratio:.3f} ({dtype})" for output, (ratio, dtype) in largest.items()
    )


def _by_count(subject: Mapping[str, Any]) -> list[tuple[str, int]]:
    """Return the refusals, most frequent first."""
    return sorted(subject["refusals"].items(), key=lambda item: (-item[1], item[0]))


def _quoted(text: str) -> list[str]:
    """Indent a text as a block of preformatted lines."""
    return [f"    {line}".rstrip() for line in text.splitlines()]
