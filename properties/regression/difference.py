"""What is not as it was, as a value."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Difference"]


@dataclass(frozen=True)
class Difference:
    """One thing that moved.

    Args:
        part: "coverage", "rms", "maxima", "kernels" or "speed".
        text: What moved and by how much, a line.
        alarm: Whether it stops the run; what is better or within chance does not.
    """

    part: str
    text: str
    alarm: bool = False

    def __str__(self) -> str:
        return f"{'ALARM ' if self.alarm else ''}{self.part}: {self.text}"
