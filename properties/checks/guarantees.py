"""The guarantees of a correct kernel, each a function from a trial to its findings."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from fa_verify.properties.checks import pooled
from fa_verify.properties.checks.accuracy import accuracy, finite, logic
from fa_verify.properties.checks.added_gradients import bias_gradient, sink_gradient
from fa_verify.properties.checks.backward import backward
from fa_verify.properties.checks.closed_form import (
    counts,
    doubled_values,
    mask_read_back,
    permuted,
    unit_values,
)
from fa_verify.properties.checks.identities import identities
from fa_verify.properties.checks.invariance import (
    independence,
    layout,
    repeatable,
    sequence,
    state,
)
from fa_verify.properties.checks.limits import limits
from fa_verify.properties.checks.masking import dirty_padding, empty_rows, hidden_positions
from fa_verify.properties.checks.memory import (
    far_offsets,
    full_overwrite,
    gradient_sets,
    reads_in_bounds,
)
from fa_verify.properties.checks.statistics import bias, rms
from fa_verify.properties.checks.streams import (
    beside_other_kernels,
    first_captured,
    on_a_side_stream,
    on_another_device,
    on_two_streams,
    replayed,
)
from fa_verify.properties.comparison.compare import Finding
from fa_verify.properties.execution.trial import SubjectError, Trial

__all__ = [
    "BY_NAME",
    "CALLS",
    "CLOSED_FORM",
    "GUARANTEES",
    "OF_ADDED",
    "POOLED",
    "STANDING",
    "STATISTICS",
    "STREAMS",
    "Check",
    "accuracy",
    "backward",
    "dirty_padding",
    "empty_rows",
    "far_offsets",
    "finite",
    "full_overwrite",
    "gradient_sets",
    "hidden_positions",
    "in_turn",
    "independence",
    "layout",
    "limits",
    "logic",
    "reads_in_bounds",
    "repeatable",
    "sequence",
    "state",
]

Check = Callable[[Trial], list[Finding]]

# STATISTICS and CLOSED_FORM detect faults that the worst-case bound misses. --fa-replay runs them
# too.
STATISTICS: dict[str, Check] = {"rms": rms, "bias": bias, "identities": identities}
CLOSED_FORM: dict[str, Check] = {
    "counts": counts,
    "mask": mask_read_back,
    "ones": unit_values,
    "doubled": doubled_values,
    "permuted": permuted,
}
GUARANTEES: dict[str, Check] = {
    "G1": accuracy,
    "G2": finite,
    "G3": empty_rows,
    "G4": dirty_padding,
    "G5": hidden_positions,
    "G6": full_overwrite,
    "G7": reads_in_bounds,
    "G8": layout,
    "G9": independence,
    "G10": repeatable,
    "G12": far_offsets,
    "G13": state,
    "T3": logic,
}
# The guarantees of pooled probabilities, for subjects that support them. --fa-replay runs them too.
POOLED: dict[str, Check] = {
    "pooled G1": pooled.accuracy,
    "pooled G4": pooled.dirty_padding,
    "pooled G5": pooled.hidden_positions,
    "pooled G6": pooled.full_overwrite,
    "pooled G7": pooled.reads_in_bounds,
    "pooled G8": pooled.layout,
    "pooled G9": pooled.independence,
    "pooled G10": pooled.repeatable,
    "pooled T3": pooled.logic,
}
# Checks of many calls: those that differ in one argument each, and those of any set of gradients.
# --fa-replay runs them too.
CALLS: dict[str, Check] = {"sequence": sequence, "sets": gradient_sets}
# The checks of dbias and dsinks, for problems with a bias or sinks.
OF_ADDED: dict[str, Check] = {"dbias": bias_gradient, "dsinks": sink_gradient}
# G15, on a GPU. --fa-replay runs them there too.
STREAMS: dict[str, Check] = {
    "replayed": replayed,
    "first captured": first_captured,
    "side stream": on_a_side_stream,
    "two streams": on_two_streams,
    "other kernels": beside_other_kernels,
    "other device": on_another_device,
}
# Every check by name.
BY_NAME: dict[str, Check] = {
    **GUARANTEES, "backward": backward, "limit": limits, **STATISTICS, **CLOSED_FORM, **POOLED,
    **OF_ADDED, **CALLS, **STREAMS,
}  # fmt: skip
# The standing checks, which run on every problem. The key is the first word of their findings.
STANDING: dict[str, Check] = {
    "G1": accuracy, "backward": backward, "limit": limits, "RMS": rms, "bias": bias
}  # fmt: skip


def in_turn(checks: Mapping[str, Check], unchecked: dict[str, str]) -> Check:
    """Return a check that makes several checks, and goes on after an exception of the subject.

    Args:
        checks: The checks, by name.
        unchecked: Receives the reason why a check was not made, by name.
    """

    def every(trial: Trial) -> list[Finding]:
        findings: list[Finding] = []
        for name, check in checks.items():
            try:
                findings += check(trial)
            except (MemoryError, NotImplementedError) as reason:
                unchecked[name] = str(reason)
            except SubjectError as error:
                raised = Finding.of_exception(error, trial.subject, trial.problem)
                findings += [raised] * (raised not in findings)
        return findings

    return every
