"""The kinds of calls by name."""

from __future__ import annotations

from fa_verify.oracles.call import Call
from fa_verify.properties.kernels.subject import Subject
from fa_verify.properties.kinds.attention import ATTENTION
from fa_verify.properties.kinds.caches import CACHE
from fa_verify.properties.kinds.kind import Kind
from fa_verify.properties.kinds.merges import MERGE
from fa_verify.properties.kinds.quantised import QUANTISED
from fa_verify.properties.kinds.rings import RING

__all__ = ["KINDS", "kind_of", "kinds_of"]

KINDS: dict[str, Kind] = {
    "attention": ATTENTION, "merge": MERGE, "ring": RING, "cache": CACHE, "quantised": QUANTISED
}  # fmt: skip


def kind_of(call: Call) -> Kind:
    """Return the kind of a call."""
    return KINDS[call.kind]


def kinds_of(subject: Subject) -> tuple[str, ...]:
    """Return the names of the kinds of calls that a kernel takes."""
    rings = subject.attends and subject.backward and subject.lse_grad
    takes = {
        "attention": subject.attends,
        "merge": subject.states is not None,
        "ring": subject.states is not None and rings,
        "cache": subject.kvcache is not None,
        "quantised": subject.quantised is not None,
    }
    return tuple(name for name in KINDS if takes[name])
