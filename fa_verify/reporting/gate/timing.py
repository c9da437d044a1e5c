"""Measure the speed of a subject relative to SDPA flash, for the gate."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from fa_verify import timing
from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.problem import Problem
from fa_verify.properties.kernels.subject import Subject
from fa_verify.properties.regression.baseline import digits
from fa_verify.properties.regression.speed_ratio import shift_of

__all__ = ["decoding", "timed"]

ROUNDS = 15
PAGE_SIZE = 16

Ratios = dict[str, tuple[float, ...]]


def timed(
    subject: Subject,
    then: Mapping[str, Sequence[float]],
    measure: Callable[[Subject], Ratios] | None = None,
) -> tuple[Ratios, str]:
    """Measure a subject's speed relative to SDPA flash.

    An apparent loss is measured once more and the second measurement counts, so that another
    program on the GPU does not cause an alarm.

    Args:
        subject: The subject. Nothing else may run on the GPU during the measurement.
        then: The ratios of the baseline.
        measure: Function that returns the ratios; None measures on the GPU.

    Returns:
        For each timed pass, SDPA flash's time divided by the subject's, one ratio per round; and
        the reason why there are none, or an empty string.
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
    """Time the passes on ``timing.GATE_PROBLEMS``, and decoding from ``timing.GATE_CACHES``."""
    found: Ratios = {}
    for B, N, H, D, causal in timing.GATE_PROBLEMS if subject.attends else ():
        attention = _attention(subject, B, N, H, D, causal)
        calls = {"subject": attention, "SDPA flash": timing.sdpa_flash}
        mask = "causal" if causal else "full"
        for name, times in timing.measure(calls, B, N, H, D, causal, rounds=ROUNDS).items():
            found[f"{B}x{N}x{H}x{D} bf16 {mask} {name}"] = _ratios(times)
    for B, N, H, Hk, D in () if subject.kvcache is None else timing.GATE_CACHES:
        times = timing.interleaved(decoding(subject, B, N, H, Hk, D), ROUNDS)
        found[f"{B}x{N}x{H} ({Hk})x{D} bf16 decoding"] = _ratios(times)
    return found


def _ratios(times: Mapping[str, Sequence[float]]) -> tuple[float, ...]:
    """Divide SDPA flash's time by the subject's, round by round."""
    rounds = zip(times["SDPA flash"], times["subject"], strict=True)
    return tuple(digits(flash / mine) for flash, mine in rounds)


def _config(subject: Subject) -> str:
    return "default" if "default" in subject.configs else next(iter(subject.configs))


def decoding(
    subject: Subject, B: int, N: int, H: int, Hk: int, D: int, device: str = "cuda"
) -> dict[str, Callable[[], torch.Tensor]]:
    """Return calls of a subject and of SDPA flash that decode one bf16 query of each entry.

    The subject reads pages of ``PAGE_SIZE`` rows in a random order, or of the first size that it
    declares. If it declares no pages, it reads a contiguous cache, as SDPA flash does.

    Args:
        subject: A subject with ``kvcache``.
        B: Entries.
        N: Keys of an entry, whole pages.
        H: Query heads.
        Hk: Heads of the cache.
        D: Head dim.
        device: Device of the tensors.

    Returns:
        Calls by the names "subject" and "SDPA flash", which return out (B, H, 1, D).

    Raises:
        NotImplementedError: From the subject's call, if it declares that it does not support it.
    """
    torch.manual_seed(0)
    q = torch.randn(B, H, 1, D, device=device, dtype=torch.bfloat16)
    k, v = (torch.randn(B, N, Hk, D, device=device, dtype=torch.bfloat16) for _ in range(2))
    sizes, is_paged = subject.page_sizes, "paged" in subject.cache
    rows = (PAGE_SIZE if sizes is None or PAGE_SIZE in sizes else sizes[0]) if is_paged else N
    numbers = torch.randperm(B * N // rows, device=device)
    # Entry b's page i has number table[b, i].
    caches = [torch.empty_like(x).view(-1, rows, Hk, D) for x in (k, v)]
    for cache, x in zip(caches, (k, v), strict=True):
        cache[numbers] = x.view(-1, rows, Hk, D)
    table = numbers.int().view(B, -1)
    lengths = torch.full((B,), N, dtype=torch.int32, device=device)
    problem = Problem(
        B=B, H=H, Hk=Hk, M=1, N=N, D=D, Dv=D, dtype="bf16", mask=Mask(seqlens_k=(N,) * B),
        config=_config(subject), device=device,
    )  # fmt: skip

    def decode() -> torch.Tensor:
        return subject.run_kvcache(
            q, *caches, problem, cache_seqlens=lengths, page_table=table if is_paged else None,
            cache_batch_idx=None if is_paged else table[:, 0].contiguous(), k=None, v=None,
            alibi_slopes=None, sinks=None,
        )[0]  # fmt: skip

    contiguous = q, k.transpose(1, 2), v.transpose(1, 2)
    return {"subject": decode, "SDPA flash": lambda: timing.sdpa_flash(*contiguous, False)}


def _attention(subject: Subject, B: int, N: int, H: int, D: int, causal: bool) -> Callable:
    """Wrap the subject for ``timing.measure``.

    Raises:
        NotImplementedError: The subject declares that it does not support the problem, or that it
            has no gradients.
    """
    mask = Mask(causal=causal)
    config = _config(subject)
    problem = Problem(
        B=B, H=H, Hk=H, M=N, N=N, D=D, Dv=D, dtype="bf16", mask=mask,
        layouts=("bshd",) * 4, config=config, device="cuda",
    )  # fmt: skip
    reason = subject.excludes(problem)
    if reason is not None or not subject.backward:
        raise NotImplementedError(reason or f"{subject.name} declares backward False")

    chosen = {"config": config} if len(subject.configs) > 1 else {}

    def attention(q, k, v, causal):
        """Call the kernel directly, without the overhead of ``Subject.run``; return out."""
        result = subject.call(q, k, v, mask=mask, sm_scale=problem.scale, **chosen)
        return result[0] if isinstance(result, tuple | list) else result

    return attention
