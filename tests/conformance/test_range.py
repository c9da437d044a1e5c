"""G12: offsets beyond 2**31 elements, many heads, and more than an axis of a grid allows."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from fa_verify.oracles.guarantee import G1, G12
from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.outputs import Outputs
from fa_verify.oracles.problem import LAYOUTS, Problem
from fa_verify.properties.guarantees import claims
from fa_verify.properties.guarantees.agreement import agree
from fa_verify.properties.inputs.alibi_families import NO_ALIBI
from fa_verify.properties.inputs.tensors import Inputs
from fa_verify.properties.running.trial import run_subject

# Small enough for all tensors to fit between the distant elements of one tensor.
SMALL = {"max_seqlen": 48, "max_cost": 12, "max_pairs": 0, "tile": 16}
TAIL = 4096
GIB_OF_LARGE_TENSORS = 40


@pytest.mark.asks(G12)
@pytest.mark.shards(0, 4)
def test_elements_2_to_the_31_apart_are_read_where_they_are(for_all, shard, subject):
    if not {"padded", "strided"} & set(subject.layouts or LAYOUTS):
        pytest.skip(f"{subject.name} declares layouts={subject.layouts}, which have no gaps")
    try:
        for_all(claims.far_offsets, shard, needs=SMALL)
    except MemoryError as error:
        pytest.skip(str(error))


# Batch entries, query heads and key/value heads.
HEADS = {"a prime": (1, 37, 37), "a group of 17": (1, 34, 2), "nine entries": (9, 5, 1)}


@pytest.mark.asks(G1)
@pytest.mark.parametrize("heads", HEADS)
def test_many_heads_and_entries_are_right(check_one, subject, device, heads):
    B, H, Hk = HEADS[heads]
    config = "16x16" if "16x16" in subject.configs else next(iter(subject.configs))
    size, D = subject.seqlen_multiple, min(subject.head_dims or (16,))
    M, N = 5 * size, 7 * size if subject.m_ne_n else 5 * size
    mask = Mask()
    if "padding" in subject.masks and B > 1:
        # Neighbours and distant entries differ in their lengths.
        lengths = tuple(1 + 3 * b % N for b in range(B))
        mask = Mask(seqlens_q=tuple(min(x, M) for x in lengths[::-1]), seqlens_k=lengths)
    problem = Problem(
        B=B, H=H, Hk=Hk, M=M, N=N, D=D, Dv=D, mask=mask, dtype=subject.dtypes[0], seed=1,
        config=config, device=device, alibi="normal" if "alibi" in subject.score_mods else NO_ALIBI,
    )  # fmt: skip
    check_one(problem, claims.accuracy)


@pytest.mark.asks(G12)
@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_more_heads_than_65535_are_right(check_one, device, dtype):
    if device == "cpu":
        pytest.skip("65,537 programs take minutes without a GPU; test_launch.py checks the grid")
    problem = Problem(
        B=2, H=65_538, Hk=32_769, M=3, N=5, dtype=dtype, mask=Mask(causal=True), device=device
    )
    check_one(problem, claims.accuracy)


@pytest.mark.asks(G12)
@pytest.mark.parametrize("long", ["queries", "keys"])
@pytest.mark.parametrize(("heads", "D"), [(2, 256), (1, 128)])
def test_tensors_of_more_than_2_to_the_31_elements_are_right(
    check_one, device, gpu_memory, heads, D, long
):
    if device == "cpu":
        pytest.skip("needs tensors of 4 GiB each")
    gpu_memory(GIB_OF_LARGE_TENSORS)
    # The last rows see only the last keys, so that a small problem has the same results.
    mask = Mask(causal=True, window_left=TAIL // 2) if long == "keys" else Mask()
    sizes = {"M": 16, "N": TAIL} if long == "keys" else {"M": TAIL, "N": 16}
    sizes |= {"H": heads, "Hk": heads, "D": D, "Dv": D}
    small = Problem(dtype="bf16", mask=mask, device=device, **sizes)
    check_one(small, at_the_end_of_large_tensors)


def at_the_end_of_large_tensors(trial):
    """Return findings where rows and keys give different results with zeros in front of them.

    The queries (or keys) in front make their tensors longer than 2**31 elements. They have dout = 0
    (or are hidden by the window), so they contribute exactly 0.
    """
    small = trial.problem
    longer = "M" if small.M == TAIL else "N"
    large = dataclasses.replace(small, **{longer: TAIL + 2**31 // (small.H * small.D)})
    moved = []
    for x, length in zip(trial.inputs.tensors, (large.M, large.N, large.N, large.M), strict=True):
        padded = torch.zeros((*x.shape[:2], length, x.shape[3]), dtype=x.dtype, device=x.device)
        padded[:, :, length - x.shape[2] :] = x
        moved.append(padded)
    got = run_subject(trial.subject, large, Inputs(*moved))
    tails = Outputs(
        *(
            None if x is None else x[:, :, x.shape[2] - want.shape[2] :]
            for x, want in zip(got, trial.want, strict=True)
        )
    )
    findings = agree(trial, tails, "G12 range", "is wrong at the end of 2**31 elements")
    del got, moved, tails
    torch.cuda.empty_cache()
    return findings
