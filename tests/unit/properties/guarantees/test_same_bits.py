"""I1, I2, I4, I5 and I6: fixed tiles hold them, and each fault of a scheduler shows."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch

from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.outputs import OUTPUTS, Outputs
from fa_verify.oracles.problem import Problem
from fa_verify.properties.guarantees.same_bits import CHECKS, difference
from fa_verify.properties.kernels.subject import Subject
from fa_verify.properties.kernels.vocabulary import SAME_BITS
from fa_verify.properties.running.trial import run_trial

TILE = 4
# Lengths off the borders of tiles; more keys than rows; groups of two query heads.
CAUSAL = Problem(
    B=3, H=4, Hk=2, M=9, N=22, D=4, Dv=3, dtype="fp32", mask=Mask(causal=True), seed=5
)  # fmt: skip
PADDED = dataclasses.replace(
    CAUSAL, mask=Mask(causal=True, seqlens_q=(9, 5, 7), seqlens_k=(22, 13, 17))
)
ONE_ROW = dataclasses.replace(CAUSAL, M=1, N=40, B=4, mask=Mask())
ONE_GROUP = dataclasses.replace(CAUSAL, Hk=1, seed=6)
PROBLEMS = (CAUSAL, PADDED, ONE_ROW, ONE_GROUP)


class Tiled:
    """Attention whose key tiles and splits are those of a fixed or a faulty schedule.

    Products and keys add one by one, so that no bit depends on the place of a row in memory.
    """

    returns_lse = True
    devices = ("cpu",)
    masks = ("causal", "padding")
    bitwise = ("G9",)
    same_bits = tuple(SAME_BITS)
    backward_reads = ()

    def __init__(self, fault: str = "") -> None:
        self.fault = fault

    def __call__(self, q, k, v, *, mask, sm_scale):
        (B, H, M, _), (Hk, N) = q.shape, k.shape[1:3]
        seen = mask.dense(B, H, M, N).expand(B, H, M, N)
        _, keys = mask.lengths(B, M, N)
        size, splits = self.schedule(B, H, Hk, M, N, keys, q.requires_grad)
        k, v = (x.repeat_interleave(H // Hk, 1) for x in (k, v))
        starts = list(range(0, N, size))
        if self.fault == "tiles end at the last key":
            starts = [0, *range(N % size or size, N, size)]
        borders = [*starts, N]
        each = -(-len(starts) // splits)
        tiles = list(itertools.pairwise(borders))
        if self.fault == "even entries from the last tile":
            backwards = self.summed(q, k, v, seen, sm_scale, [tiles[::-1]])
            forwards = self.summed(q, k, v, seen, sm_scale, [tiles])
            even = (torch.arange(B) % 2 == 0).view(-1, 1, 1, 1)
            return self.chosen(even, backwards, forwards)
        if self.fault == "odd heads from the last tile":
            backwards = self.summed(q, k, v, seen, sm_scale, [tiles[::-1]])
            forwards = self.summed(q, k, v, seen, sm_scale, [tiles])
            odd = (torch.arange(H) % 2 == 1).view(1, -1, 1, 1)
            return self.chosen(odd, backwards, forwards)
        if self.fault == "the last tile of rows is another":
            wide = list(itertools.pairwise([*range(0, N, 7), N]))
            other = self.summed(q, k, v, seen, sm_scale, [wide])
            usual = self.summed(q, k, v, seen, sm_scale, [tiles])
            last = (torch.arange(M) >= M // TILE * TILE).view(1, 1, -1, 1)
            return self.chosen(last, other, usual)
        parts = [tiles[first : first + each] for first in range(0, len(tiles), each)]
        return self.summed(q, k, v, seen, sm_scale, parts)

    def chosen(self, where, one, other):
        return tuple(
            torch.where(where if x.ndim == 4 else where[..., 0], x, y)
            for x, y in zip(one, other, strict=True)
        )

    def schedule(self, B, H, Hk, M, N, keys, trains) -> tuple[int, int]:
        """The width of key tiles, and the number of programs that share those of a row."""
        programs = B * H * -(-M // TILE)
        of_faults = {
            "splits by the number of programs": (TILE, 3 if B * H <= 4 else 1),
            "splits for one row": (TILE, 3 if M == 1 else 1),
            "splits until the multiprocessors are busy": (TILE, max(1, 24 // programs)),
            "tile by rows": (TILE if M > 4 else 7, 1),
            "tile by heads": (TILE if H > 2 else 7, 1),
            "tile by key/value heads": (TILE if Hk > 1 else 7, 1),
            "tile by the longest sequence": (TILE if max(keys, default=0) <= 22 else 7, 1),
            "splits by the keys of the tensor": (TILE, 1 + (N > 22)),
            "tile by packed rows": (TILE if M * H // Hk > 9 else 7, 1),
            "another tile without gradients": (TILE if trains else 7, 1),
        }  # fmt: skip
        return of_faults.get(self.fault, (TILE, 1))

    def summed(self, q, k, v, seen, sm_scale, parts):
        """Out and lse from the tiles of each part; the parts are merged in order."""
        states = [self.attend(q, k, v, seen, sm_scale, tiles) for tiles in parts]
        m = q.new_full((*q.shape[:3], 1), -math.inf)
        total, acc = torch.zeros_like(m), q.new_zeros((*q.shape[:3], v.shape[3]))
        for m_part, total_part, acc_part in states:
            new = torch.maximum(m, m_part)
            pivot = torch.where(new == -math.inf, 0.0, new)
            old, fresh = torch.exp(m - pivot), torch.exp(m_part - pivot)
            total, acc, m = total * old + total_part * fresh, acc * old + acc_part * fresh, new
        live = total > 0
        safe = torch.where(live, total, 1.0)
        lse = torch.where(live, m + safe.log(), -math.inf)
        return acc / safe, lse.squeeze(3).detach()

    def attend(self, q, k, v, seen, sm_scale, tiles):
        """The maximum, the sum of weights and the weighted values over some tiles."""
        m = q.new_full((*q.shape[:3], 1), -math.inf)
        total, acc = torch.zeros_like(m), q.new_zeros((*q.shape[:3], v.shape[3]))
        for start, end in tiles:
            scores = sum(q[..., :, d, None] * k[..., None, start:end, d] for d in range(q.shape[3]))
            scores = torch.where(seen[..., start:end], scores * sm_scale, -math.inf)
            highest = scores.detach().amax(3, keepdim=True)
            if self.fault == "one maximum for the batch":
                highest = highest.amax(0, keepdim=True).expand(highest.shape)
            new = torch.maximum(m, highest)
            pivot = torch.where(new == -math.inf, 0.0, new)
            shrink = torch.exp(m - pivot)
            weights = torch.exp(scores - pivot)
            total = total * shrink + sum(weights[..., n, None] for n in range(end - start))
            acc = acc * shrink + sum(
                weights[..., n, None] * v[..., None, start + n, :] for n in range(end - start)
            )
            m = new
        return m, total, acc


def subject(fault: str = "", **declared) -> Subject:
    """The kernel with a fault, whose function of packed sequences loops over them."""
    tiled = Tiled("" if fault.startswith("packed") else fault)

    def packed(q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, mask, sm_scale):
        kernel = Tiled("tile by rows") if fault == "packed: tile by rows" else tiled
        kernel = Tiled("splits for one row") if fault == "packed: splits for one row" else kernel
        outs, lses = [], []
        starts = zip(*(x.tolist() for x in (cu_seqlens_q, cu_seqlens_k)), strict=True)
        plain = dataclasses.replace(mask, seqlens_q=None, seqlens_k=None)
        for (row, key), (row_end, key_end) in itertools.pairwise(starts):
            one = [
                x[a:b].transpose(0, 1).unsqueeze(0)
                for x, a, b in ((q, row, row_end), (k, key, key_end), (v, key, key_end))
            ]
            out, lse = kernel(*one, mask=plain, sm_scale=sm_scale)
            outs.append(out[0].transpose(0, 1))
            lses.append(lse[0])
        return torch.cat(outs), torch.cat(lses, 1)

    made = Subject.of(tiled, "tiled")
    return dataclasses.replace(made, packed=packed, **declared)


def found(kernel: Subject, problem: Problem) -> dict[str, str]:
    """Return the words of ``same_bits`` that fail, with their first finding."""
    # Automatic differentiation adds rows in an order of its own.
    forward = run_trial(dataclasses.replace(kernel, backward=False), problem)
    training = run_trial(kernel, problem)
    assert forward is not None
    assert training is not None
    findings = {
        word: CHECKS[SAME_BITS[word]](training if word == "inference" else forward)
        for word in SAME_BITS
    }
    return {word: str(some[0]) for word, some in findings.items() if some}


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: f"{problem.M}x{problem.N}")
def test_a_kernel_of_fixed_tiles_holds_every_word(problem):
    assert found(subject(), problem) == {}


# Fault: the words of same_bits that find it on one of the problems.
FAULTS = {
    "splits by the number of programs": ("batch", "heads", "varlen"),
    "splits for one row": ("batch", "chunks", "varlen"),
    "splits until the multiprocessors are busy": ("batch", "chunks", "heads", "varlen"),
    "tile by rows": ("chunks",),
    "tile by heads": ("heads",),
    "tile by key/value heads": ("heads",),
    "tile by the longest sequence": ("batch",),
    "splits by the keys of the tensor": ("batch", "varlen"),
    "tile by packed rows": ("chunks", "heads"),
    "tiles end at the last key": ("batch", "chunks", "varlen"),
    "even entries from the last tile": ("batch", "varlen"),
    "odd heads from the last tile": ("heads",),
    "the last tile of rows is another": ("batch", "chunks", "varlen"),
    "one maximum for the batch": ("batch", "varlen"),
    "packed: tile by rows": ("varlen",),
    "packed: splits for one row": ("varlen",),
    "another tile without gradients": ("inference",),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_of_a_scheduler_is_found(fault):
    words = set().union(*(found(subject(fault), problem) for problem in PROBLEMS))
    assert words == {*FAULTS[fault]}


def reasons(kernel: Subject, word: str, problem: Problem = CAUSAL) -> dict[str, str]:
    """Return why the check of a word was not made, where it finds nothing."""
    trial = run_trial(dataclasses.replace(kernel, backward=False), problem)
    assert CHECKS[SAME_BITS[word]](trial) == []
    return trial.asked


@pytest.mark.parametrize("word", [word for word in SAME_BITS if word != "inference"])
def test_a_word_that_is_not_declared_is_not_asked_for(word):
    others = tuple(x for x in SAME_BITS if x != word)
    why = reasons(subject("splits until the multiprocessors are busy", same_bits=others), word)
    assert why == {
        SAME_BITS[word]: f"not applicable to tiled, which declares no same_bits {word!r}"
    }


def test_a_part_that_the_kernel_refuses_is_left_out():
    made = subject()

    def refusing(q, k, v, **arguments):
        if q.shape[0] == 1:
            raise NotImplementedError("one entry")
        return made.call(q, k, v, **arguments)

    assert reasons(dataclasses.replace(made, call=refusing), "batch") == {"I1": ""}


def test_a_word_whose_every_part_is_refused_is_not_applicable():
    made = subject()

    def refusing(q, k, v, **arguments):
        if q.shape[1] < CAUSAL.H:
            raise NotImplementedError("few heads")
        return made.call(q, k, v, **arguments)

    why = reasons(dataclasses.replace(made, call=refusing), "heads")["I4"]
    assert why == "not applicable to tiled, which refuses heads 0 to 1 alone: few heads"


@pytest.mark.parametrize(
    ("word", "problem"),
    [
        ("heads", dataclasses.replace(CAUSAL, H=1, Hk=1)),
        ("chunks", dataclasses.replace(CAUSAL, M=1)),
        ("chunks", dataclasses.replace(CAUSAL, mask=Mask(), alibi="halving")),
    ],
)
def test_a_problem_without_parts_is_not_asked_about(word, problem):
    made = dataclasses.replace(subject(), score_mods=("alibi",))
    trial = run_trial(dataclasses.replace(subject(), backward=False), CAUSAL)
    trial = dataclasses.replace(trial, subject=made, problem=problem)
    assert CHECKS[SAME_BITS[word]](trial) == []
    why = f"not applicable to a problem without parts for {word!r}"
    assert trial.asked == {SAME_BITS[word]: why}


def test_a_kernel_without_gradients_has_one_forward():
    assert reasons(subject("another tile without gradients"), "inference") == {
        "I6": "not applicable to tiled, which has no gradients"
    }


def test_a_forward_that_does_not_promise_bits_is_held_to_the_bound():
    trial = run_trial(subject("another tile without gradients", same_bits=()), CAUSAL)
    assert CHECKS["I6"](trial) == []
    far = dataclasses.replace(trial, got=trial.got._replace(out=trial.got.out + 0.1), asked={})
    (found,) = CHECKS["I6"](far)
    assert found.claim.endswith("and leaves the bound")


def test_a_configuration_replaces_the_words():
    made = subject(configs={"default": {}, "splits": {"same_bits": ("batch",)}})
    assert made.promises("I2", "default") == OUTPUTS
    assert (made.promises("I1", "splits"), made.promises("I2", "splits")) == (OUTPUTS, ())


@pytest.mark.parametrize(
    ("dtype", "other", "apart"),
    [
        (torch.float32, 1 + 2**-22, "at most 2 ulp"),
        (torch.float16, 1 + 2**-10, "at most 1 ulp"),
        (torch.bfloat16, 1 - 2**-8, "at most 1 ulp"),
        (torch.float64, 1 + 3 * 2**-52, "at most 3 ulp"),
        (torch.float32, math.nan, "NaN or Inf"),
        (torch.float32, math.inf, "NaN or Inf"),
    ],
)
def test_a_difference_counts_numbers_of_the_format(dtype, other, apart):
    one = Outputs(*(torch.ones(1, 2, 3, 4, dtype=dtype) for _ in OUTPUTS))
    two = Outputs(*(x.clone() for x in one))
    two.dk[0, 1, 2, 3] = other
    told = f"dk parts first at b=0 h=1 n=2 d=3, by {apart}, in 1 of 24 elements"
    assert difference(one, two) == told
    assert difference(one, two, ("out", "dq")) == ""
    assert difference(one, two._replace(dk=None)) == ""


def test_zeros_of_both_signs_are_equal_and_apart_from_small_numbers():
    zero = Outputs(*(torch.zeros(1, 1, 1, 1) for _ in OUTPUTS))
    negative = Outputs(*(-x for x in zero))
    assert difference(zero, negative) == ""
    tiny = negative._replace(out=torch.full((1, 1, 1, 1), -(2.0**-149)))
    assert "at most 1 ulp, in 1 of 1" in difference(zero, tiny)
