"""Phrases for the problems and outputs that a declaration leaves."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fa_verify.properties.kernels.vocabulary import MASKS

__all__ = ["masks", "no", "only", "sizes_of", "without"]


def without(known: tuple[str, ...]) -> Callable[[Sequence[str]], str]:
    """Return a function that names what is missing, or what is left if that is shorter."""

    def phrase(given: Sequence[str]) -> str:
        missing = [x for x in known if x not in given]
        if given and len(given) < len(missing):
            return f"{' and '.join(given)} alone"
        return f"no {' or '.join(missing)}" if missing else ""

    return phrase


def masks(given: Sequence[str]) -> str:
    """Name the kinds of masks that are missing."""
    missing = [x for x in MASKS if x not in given]
    if not missing or not given:
        return "no mask" if missing else ""
    return f"no {' or '.join(missing)} masks"


def sizes_of(name: str) -> Callable[[Sequence[int] | None], str]:
    """Return a function that names the sizes that are left."""
    return lambda sizes: f"{name} of {', '.join(map(str, sizes))}" if sizes else ""


def only(phrase: str) -> Callable[[bool], str]:
    """Return a function that says a phrase if True is declared."""
    return lambda given: phrase if given else ""


def no(phrase: str) -> Callable[[bool], str]:
    """Return a function that says a phrase if False is declared."""
    return lambda given: "" if given else phrase
