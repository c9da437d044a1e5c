"""The speed of a subject beside SDPA flash, for the gate."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from fa_verify import timing
from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.problem import Problem
from fa_verify.properties.regression.baseline import digits
from fa_verify.properties.regression.speed_ratio import shift_of
from fa_verify.properties.subjects.subject import Subject

__all__ = ["timed"]

ROUNDS = 15

Ratios = dict[str, tuple[float, ...]]


def timed(
    subject: Subject,
    then: Mapping[str, Sequence[float]],
    measure: Callable[[Subject], Ratios] | None = None,
) -> tuple[Ratios, str]:
    """Ratios to SDPA flash by timed pass, one a round; and, where there are none, why.

    What seems to be a loss is timed once more, and the second time counts: something else that ran
    on the GPU for a while is no loss.

    Args:
        subject: The subject; nothing else may run on the GPU meanwhile.
        then: The ratios of the baseline.
        measure: Times a subject; None times it on the GPU.
    """
    measure = measure or _measured
    try:
        found = measure(subject)
        if any(shift_of(then[name], found[name]).is_loss for name in found if name in then):
            found = measure(subject)
    except (NotImplementedError, RuntimeError) as error:
        return {}, f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return found, ""


def _measured(subject: Subject) -> Ratios:
    """Forward and backward on ``timing.GATE_PROBLEMS``."""
    found: Ratios = {}
    for B, N, H, D, causal in timing.GATE_PROBLEMS:
        attention = _attention(subject, B, N, H, D, causal)
        calls = {"subject": attention, "SDPA flash": timing.sdpa_flash}
        for name, times in timing.measure(calls, B, N, H, D, causal, rounds=ROUNDS).items():
            rounds = zip(times["SDPA flash"], times["subject"], strict=True)
            mask = "causal" if causal else "full"
            label = f"{B}x{N}x{H}x{D} bf16 {mask} {name}"
            found[label] = tuple(digits(flash / mine) for flash, mine in rounds)
    return found


def _attention(subject: Subject, B: int, N: int, H: int, D: int, causal: bool) -> Callable:
    """The subject as ``timing.measure`` calls it.

    Raises:
        NotImplementedError: It declares that it cannot, or that it has no gradients.
    """
    mask = Mask(causal=causal)
    config = "default" if "default" in subject.configs else next(iter(subject.configs))
    problem = Problem(
        B=B, H=H, Hk=H, M=N, N=N, D=D, Dv=D, dtype="bf16", mask=mask,
        layouts=("bshd",) * 4, config=config, device="cuda",
    )  # fmt: skip
    reason = subject.excludes(problem)
    if reason is not None or not subject.backward:
        raise NotImplementedError(reason or f"{subject.name} declares backward False")

    chosen = {"config": config} if len(subject.configs) > 1 else {}

    def attention(q, k, v, causal):
        """Out alone, of the callable itself: what ``Subject.run`` adds is not its time."""
        result = subject.call(q, k, v, mask=mask, sm_scale=problem.scale, **chosen)
        return result[0] if isinstance(result, tuple | list) else result

    return attention
