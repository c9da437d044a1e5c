"""The counts of a run, its status, and the first line of its verdict."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest

from fa_verify.conformance_process import Status
from fa_verify.properties.kernels.without_gpu import CANNOT_RUN
from fa_verify.session import CONFORMANCE

__all__ = ["Counts", "alike", "first_line", "gives_status", "plural"]

# Options with which a run judges a kernel, and nothing else.
_JUDGING = ("kernel", "mask", "replay", "quick")
# Guarantees that the first line names.
_NAMED = 4


@dataclass(frozen=True)
class Counts:
    """Counts of the checks of a run, which are its tests.

    Args:
        failed: Checks that failed by a fault of the kernel.
        hold: Checks that passed.
        reasons: Number of checks that were not made, by reason.
        broken: Checks that ended in an error of the suite.
        too_few: Checks that judged too few problems.
        judged: Distinct problems that were judged.
        refused: Share of the calls that the kernel refused, though no declaration excludes them.
        mostly: The share by guarantee, where it exceeds a half; "" stands for several guarantees.
        contradiction: The evidence against a run without findings, see ``Tally.contradiction``.
        waived: Numbers of the findings that were waived, and of the waivers that matched.
        assumed: Narrowings that the run assumes and the kernel does not declare: "always causal".
        not_drawn: Declared values that no judged problem had, by declaration.
        interrupted: Whether the run was interrupted.
    """

    failed: int
    hold: int
    reasons: Mapping[str, int]
    broken: int = 0
    too_few: int = 0
    judged: int = 0
    refused: float = 0.0
    mostly: Mapping[str, float] | tuple[()] = ()
    contradiction: str = ""
    waived: tuple[int, int] = (0, 0)
    assumed: tuple[str, ...] = ()
    not_drawn: Mapping[str, str] = field(default_factory=dict)
    interrupted: bool = False

    @property
    def status(self) -> Status:
        """The status, if no interrupt ends the run."""
        if self.failed:
            return Status.FAILED
        if self.broken or (self.contradiction and not self.waived[0]):
            return Status.SUITE
        return Status.NOT_VERIFIED if self.why_not else Status.HOLDS

    @property
    def why_not(self) -> list[str]:
        """The reasons for which a run without findings is not verified."""
        shares = [f"{_percent(x)} of {key}" for key, x in dict(self.mostly).items() if key]
        it, promise = ("it", "a promise") if len(self.assumed) == 1 else ("them", "promises")
        promise = f"assumed: declare {it} to make {it} {promise}"
        more = [f"{len(shares) - _NAMED} more guarantees"] * (len(shares) > _NAMED)
        named = f" ({', '.join([*shares[:_NAMED], *more])})" * bool(shares)
        return [
            *(["interrupted"] if self.interrupted else []),
            *([f"refuses most problems{named}"] if self.mostly else []),
            *([f"{plural(self.too_few, 'check')} judged too few problems"] if self.too_few else []),
            *(["no problem was judged"] if not self.judged else []),
            *([f"some problems {CANNOT_RUN.removesuffix(': ')}"] if self.limited else []),
            *([f"holds for {', '.join(self.assumed)} ({promise})"] if self.assumed else []),
        ]

    @property
    def limited(self) -> bool:
        """Whether problems cannot run on this machine, whatever the kernel."""
        return any(CANNOT_RUN in why for why in self.reasons)


def first_line(name: str, counts: Counts, causes: int) -> str:
    """Return the first line of the verdict.

    Args:
        name: Name of the kernel, or its source.
        counts: The counts of the run.
        causes: Number of causes of its failures.
    """
    skipped = sum(counts.reasons.values())
    kinds = len({alike(x) for x in counts.reasons})
    holds = f"{'holds' if counts.hold == 1 else 'hold'}"
    not_asked = f", {skipped:,} not asked" + f" ({plural(kinds, 'reason')})" * bool(skipped)
    not_asked += f", {_percent(counts.refused)} of the problems refused" * bool(counts.refused)
    missing = "; ".join(f"{word} {values}".strip() for word, values in counts.not_drawn.items())
    not_asked += f"; not drawn: {missing}" * bool(missing)
    hold = f"{plural(counts.hold, 'check')} {holds}{not_asked}"
    findings, waivers = counts.waived
    waived = f"{plural(findings, 'waived finding')} ({plural(waivers, 'waiver')})"
    errors = f"{plural(counts.broken, 'check')} ended in an error of the suite"
    match counts.status:
        case Status.FAILED:
            total = counts.failed + counts.hold
            return (
                f"{name}  FAILED  {plural(causes, 'cause')}, {plural(total, 'check')}: "
                f"{counts.failed:,} failed, {counts.hold:,} {holds}{not_asked}"
                + f", {waived}" * bool(findings)
                + f", {errors}" * bool(counts.broken)
            )
        case Status.SUITE if counts.broken:
            return f"{name}  ERROR OF THE SUITE  {errors}, {hold}"
        case Status.SUITE:
            return f"{name}  CONTRADICTS ITSELF  {counts.contradiction}, but {hold}"
        case Status.NOT_VERIFIED:
            also = f", {waived}" * bool(findings)
            return f"{name}  NOT VERIFIED  {'; '.join(counts.why_not)}; {hold}{also}"
        case _:
            but = f" but for {waived}" * bool(findings)
            return f"{name}  HOLDS{but}  {hold}"


def alike(message: str) -> str:
    """Return a message without numbers: that of the same fault on other problems."""
    return re.sub(r"\d[\w.,+-]*", "#", message.partition("\n")[0])


def plural(count: int, word: str) -> str:
    """Return a number and a word: "1 check", "2,000 checks"."""
    return f"{count:,} {word}{'' if count == 1 else 's'}"


def _percent(share: float) -> str:
    return "under 1 %" if share < 0.01 else f"{100 * share:.0f} %"


def gives_status(config: pytest.Config) -> bool:
    """Return whether a run judges a kernel, so that the verdict determines its status."""
    by_command = config.rootpath == CONFORMANCE
    return by_command or any(
        config.getoption(f"--fa-{name}", None) not in (None, False) for name in _JUDGING
    )
