"""Long sequences, judged in chunks or samples of rows; shorter ones on a CPU."""

from __future__ import annotations

import dataclasses

import pytest

from fa_verify.conformance.sampled_rows import findings_in_rows, sampled
from fa_verify.oracles.guarantee import EXACT, G1, G12
from fa_verify.oracles.masks.block_sparse import BlockSparse
from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.masks.prefix_lm import PrefixLM
from fa_verify.oracles.problem import Problem
from fa_verify.properties.guarantees import claims
from fa_verify.properties.guarantees.claims import checks_of
from fa_verify.properties.guarantees.compare import Violation
from fa_verify.properties.inputs.families import DOUT, INPUTS
from fa_verify.properties.kernels.fitting import fitted
from fa_verify.properties.kernels.refusals import RefusedError
from fa_verify.properties.running.large_memory import refusal_without_room
from fa_verify.shards import shared_kernels

LENGTH = {"cpu": 700, "cuda": 65_536}
# Beyond some 5,000 keys the bound on lse misses a key too many or too few.
COUNTED = {"cpu": 8_192, "cuda": 65_536}
LENGTHS = {"cpu": (90,), "cuda": (4_096, 16_384, 65_536)}
ROWS = {"cpu": 12, "cuda": 400}
MANY_TILES = 16 * 257
MILLION = 2**20
GIB_OF_ROWS = 60
GIB_OF_A_MILLION = 16

SMALL = {"D": 16, "Dv": 16}
# Every path of the kernels: the portable ones and Hopper's, in one pass and two, for packed
# sequences, lists of tiles, splits and groups.
PATHS = {
    "portable": {"dtype": "bf16", "config": "portable", "mask": Mask(causal=True)},
    "portable, wide": {"D": 128, "Dv": 128, "dtype": "fp16", "config": "portable"},
    "portable, one pass": {"D": 32, "Dv": 32, "dtype": "fp16", "config": "default-one_pass"},
    "float32": {"dtype": "fp32", "D": 32, "Dv": 32, "mask": Mask(window_left=900)},
    "default": {"dtype": "fp16", "mask": Mask(causal=True)},
    "default, wide": {"D": 128, "Dv": 128, "dtype": "bf16", "mask": Mask(causal=True)},
    "default, no mask": {"dtype": "bf16"},
    "one pass": {"dtype": "bf16", "config": "default-one_pass", "mask": Mask(causal=True)},
    "one pass, wide": {"D": 128, "Dv": 128, "dtype": "fp16", "config": "default-one_pass"},
    "a group": {"H": 4, "Hk": 1, "dtype": "bf16", "mask": Mask(causal=True)},
    "packed": {"B": 2, "dtype": "bf16", "config": "default-packed", "mask": "lengths"},
    "packed, one pass": {
        "B": 2, "dtype": "fp16", "config": "default-one_pass-packed", "mask": "lengths",
    },
    "a predicate": {"dtype": "bf16", "mask": PrefixLM(prefix=70)},
    "a block mask": {"D": 32, "Dv": 32, "dtype": "fp16", "mask": BlockSparse(percent=30, seed=1)},
    "8 splits": {"dtype": "bf16", "config": "split8", "mask": Mask(causal=True)},
    "64 splits": {**SMALL, "dtype": "fp16", "config": "16x16-split64"},
}  # fmt: skip
# Many keys, many rows, and both; sizes that no tile divides.
LONG_SHAPES = {
    "keys": {"M": 3, "N": 2_000}, "rows": {"M": 2_000, "N": 3},
    "square": {"M": 2_100, "N": 2_100, "mask": Mask(causal=True)},
}  # fmt: skip
# The families share four tests of each shape.
PARTS = 4
# The families of squares on a CPU, where one takes seconds.
SQUARES_ON_A_CPU = ("rising_max",)
# Largest head_dim, so that the oracle takes little time.
FEW_COLUMNS = 32
# On a CPU, where the default tiles are slow.
ON_A_CPU = ("packed", "64 splits", "a predicate")


@pytest.mark.asks(G1)
@pytest.mark.parametrize(
    "mask", [Mask(causal=True), Mask(causal=True, window_left=300)], ids=["causal", "window"]
)
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_long_sequences_lie_within_the_derived_bound(check_one, subject, device, dtype, mask):
    N = LENGTH[device]
    M = N - 3 if subject.m_ne_n and subject.causal_alignment == "bottom-right" else N
    M, N = (x // subject.seqlen_multiple * subject.seqlen_multiple for x in (M, N))
    problem = Problem(M=M, N=N, D=64, Dv=64, dtype=dtype, mask=mask, seed=1, device=device)
    check_one(problem, claims.accuracy)


@pytest.mark.asks(EXACT)
def test_long_rows_count_their_keys(check_one, device):
    N = COUNTED[device]
    problem = Problem(M=64, N=N, dtype="fp16", mask=Mask(causal=True), seed=1, device=device)
    check_one(problem, checks_of("closed forms")["counts"])


@pytest.mark.asks(G1)
@pytest.mark.parametrize("mask", [Mask(), PrefixLM(prefix=5)], ids=["full", "predicate"])
@pytest.mark.parametrize("long", ["rows", "keys"])
def test_more_than_256_tiles_in_a_row_are_visited(check_one, subject, device, long, mask):
    if not mask.is_plain and "custom" not in subject.masks:
        pytest.skip(f"{subject.name} declares masks {subject.masks}")
    config = "16x16" if "16x16" in subject.configs else next(iter(subject.configs))
    size = subject.seqlen_multiple
    short, length = 7 * size, MANY_TILES // size * size
    problem = Problem(
        M=short if long == "keys" else length, N=length if long == "keys" else short,
        dtype=subject.dtypes[-1], D=min(subject.head_dims or (3,)),
        Dv=min(subject.head_dims or (3,)), config=config, mask=mask, seed=1, device=device,
    )  # fmt: skip
    check_one(problem, claims.accuracy)


@pytest.mark.asks(G1)
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("shape", LONG_SHAPES)
def test_every_family_lies_within_the_bound_at_long_rows(
    check_one, subject, device, is_fast, shape, part
):
    if not is_fast:
        pytest.skip("takes minutes on a CPU")
    # Kernels that other tests compile.
    kernels = [
        (x.dtype, x.config, x.head_dim)
        for x in shared_kernels(subject, device)
        if x.head_dim <= FEW_COLUMNS
    ] or [(x, "default", 16) for x in subject.dtypes]
    families, douts = [*INPUTS], [*DOUT]
    for number in range(part, len(families), PARTS):
        family = families[number]
        if device == "cpu" and shape == "square" and family not in SQUARES_ON_A_CPU:
            continue
        dtype, config, D = kernels[(number + number // len(kernels)) % len(kernels)]
        problem = Problem(
            D=D, Dv=D, dtype=dtype, config=config, inputs=family, seed=1,
            dout=douts[number % len(douts)] if shape == "rows" else "normal",
            **LONG_SHAPES[shape],
        )  # fmt: skip
        fitting = fitted(subject, problem, device)
        if fitting is not None:
            check_one(fitting, claims.accuracy)


@pytest.mark.asks(G1)
def test_a_maximum_that_rises_in_small_steps_is_kept_in_range(check_one, subject, device):
    config = "16x16" if "16x16" in subject.configs else next(iter(subject.configs))
    problem = Problem(M=3, dtype="bf16", config=config, inputs="rising_max", seed=1)
    # A step for each tile: the maximum rises by 96 in all.
    problem = dataclasses.replace(problem, N=25 * subject.numerics_of(problem).block_n)
    fitting = fitted(subject, problem, device)
    if fitting is None:
        pytest.skip(f"{subject.name} excludes such problems")
    check_one(fitting, claims.accuracy)


@pytest.fixture
def check_rows(runner):
    """A function that judges sampled rows of a problem, and skips if the subject refuses it."""

    def check(problem: Problem, rows: list[int], **options: object) -> None:
        __tracebackhide__ = True
        try:
            if reason := runner.subject.excludes(problem):
                pytest.skip(reason)
            with runner.watching(problem), refusal_without_room():
                findings = findings_in_rows(runner.subject, problem, rows, **options)
        except RefusedError as refusal:
            pytest.skip(str(refusal))
        if findings:
            raise Violation(findings)
        if findings is None:
            runner.tally.rejected(problem)
        else:
            runner.tally.sampled(runner.subject, problem)

    return check


@pytest.mark.asks(G1)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("place", range(3), ids=["short", "middle", "long"])
def test_sampled_rows_of_every_path_lie_within_the_bound(check_rows, subject, device, path, place):
    if device == "cpu" and (place or path not in ON_A_CPU):
        pytest.skip("one length of few paths on a CPU")
    N = LENGTHS[device][place]
    fields = {"H": 2, "Hk": 2, "D": 64, "Dv": 64, **PATHS[path]}
    if device == "cpu":
        fields |= SMALL | {"config": fields.get("config", "16x16").replace("default", "16x16")}
    if fields.get("mask") == "lengths":
        fields["mask"] = Mask(causal=True, seqlens_q=(N // 3, N), seqlens_k=(N // 2, N - 5))
    problem = Problem(M=N, N=N, seed=1, device=device, **fields)
    check_rows(problem, sampled(N, ROWS[device]))


@pytest.mark.asks(G1)
def test_a_million_rows_and_keys_are_right(check_rows, device, gpu_memory):
    if device == "cpu":
        pytest.skip("takes days without a GPU")
    gpu_memory(GIB_OF_A_MILLION)
    problem = Problem(
        M=MILLION, N=MILLION, D=64, Dv=64, dtype="bf16", mask=Mask(causal=True), seed=1,
        device=device,
    )  # fmt: skip
    # Tensor cores truncate sums, by as much as the roundings here: the statistics do not apply.
    check_rows(problem, sampled(MILLION, 60), with_rms=False)


@pytest.mark.asks(G12)
def test_more_than_2_to_the_31_rows_are_right(check_rows, device, gpu_memory):
    if device == "cpu":
        pytest.skip("needs tensors of 4 GiB and more")
    gpu_memory(GIB_OF_ROWS)
    H, M = 4097, 2**19
    assert H * M > 2**31
    problem = Problem(H=H, Hk=H, M=M, N=16, D=1, Dv=1, dtype="bf16", seed=1, device=device)
    check_rows(problem, [0, 1000, M // 2, M - 130, M - 1], is_sparse=True)
