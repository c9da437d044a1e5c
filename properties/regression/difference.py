"""A difference between a run and its baseline, as a value."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Difference"]


@dataclass(frozen=True)
class Difference:
    """A difference between a run and its baseline.

    Args:
        part: "coverage", "rms", "maxima", "kernels" or "speed".
        text: Description of the change, one line.
        alarm: Whether it fails the run. Improvements and changes within chance do not.
    """

    part: str
    text: str
    alarm: bool = False

    def __str__(self) -> str:
        return f"{'ALARM ' if self.alarm else ''}{self.part}: {self.text}"
