"""The probe finds which parts of a problem have the same bits, and where they first differ."""

from __future__ import annotations

import json
import math

import pytest
import torch

from fa_verify.__main__ import main
from fa_verify.oracles.calls.codec import call_from_json
from fa_verify.oracles.problem import Problem
from fa_verify.probing import same_bits, trying
from fa_verify.probing.probe import probe, refuted
from fa_verify.probing.same_bits import same_bits_of
from fa_verify.properties.inputs import tensors
from fa_verify.properties.kernels.attention_kernel import attention_kernel
from fa_verify.properties.kernels.subject import Subject
from fa_verify.properties.kernels.vocabulary import SAME_BITS

KERNEL = """
import torch
from fa_verify import attention_kernel


@attention_kernel(dtypes=("bf16",), same_bits={})
def attention(q, k, v, *, mask, sm_scale):
    (B, H, M, _), N = q.shape, k.shape[2]
    k, v = (x.double().repeat_interleave(H // k.shape[1], 1) for x in (k, v))
    seen = mask.dense(B, H, M, N, device=q.device)
    scores = (q.double() @ k.mT * sm_scale).masked_fill(~seen, -torch.inf)
    return (torch.softmax(scores, -1).nan_to_num(0.0) @ v).to(q.dtype)
"""
# Float64 sums differ by far less than bf16 rounds to, so no bit of this kernel depends on sizes.
FAULTS = {
    "batch": lambda q, k, mask: q.shape[0] > 8,
    "chunks": lambda q, k, mask: q.shape[2] < 17,
    "heads": lambda q, k, mask: q.shape[1] < 3,
    "varlen": lambda q, k, mask: max(mask.lengths(*q.shape[:3:2], k.shape[2])[1]) < k.shape[2],
    "inference": lambda q, k, mask: q.requires_grad,
}


# Rows and entries of the first size at which each fault shows.
FIRST = {"batch": (1, 9), "chunks": (33, 2), "heads": (1, 3), "varlen": (1, 3), "inference": (1, 3)}


@pytest.fixture(autouse=True)
def few_sizes(monkeypatch):
    """The five cheapest sizes, up to 9 entries and 33 rows, which take a second."""
    few = same_bits._SIZES[:5]
    monkeypatch.setattr(same_bits, "_SIZES", few)
    monkeypatch.setattr(same_bits, "_SIZES_OF_A_GPU", few)


def kernel(fault: str = "", **declared):
    def attention(q, k, v, *, mask, sm_scale):
        (B, H, M, _), N = q.shape, k.shape[2]
        wide = (x.double().repeat_interleave(H // k.shape[1], 1) for x in (k, v))
        seen = mask.dense(B, H, M, N, device=q.device)
        scores = (q.double() @ next(wide).mT * sm_scale).masked_fill(~seen, -torch.inf)
        out = (torch.softmax(scores, -1).nan_to_num(0.0) @ next(wide)).to(q.dtype)
        return out * 1.25 if fault and FAULTS[fault](q, k, mask) else out

    return Subject.of(attention_kernel(**{"dtypes": ("bf16",), **declared})(attention), "kernel")


def answers(subject: Subject, seconds: float = math.inf):
    return {answer.word: answer for answer in same_bits_of(subject, "cpu", seconds)}


def test_a_kernel_whose_bits_depend_on_nothing_else_holds_every_word():
    found = answers(kernel())
    assert found.pop("same_bits").value == tuple(SAME_BITS)
    assert [answer.value for answer in found.values()] == [True] * len(SAME_BITS)
    assert {answer.certainty for answer in found.values()} == {"tried"}
    assert "I1 holds in " in found["same_bits_batch"].evidence


@pytest.mark.parametrize("word", FAULTS)
def test_a_word_fails_at_the_first_size_that_shows_it(word):
    found = answers(kernel(word))
    wrong = found[f"same_bits_{word}"]
    assert (wrong.value, wrong.certainty) == (False, "shown")
    shown = Problem.from_json(wrong.replay)
    assert (shown.M, shown.B) == FIRST[word]
    assert f"{SAME_BITS[word]} fails first at B={shown.B}, " in wrong.evidence
    assert "out parts first at b=" in wrong.evidence
    assert word not in found["same_bits"].value


def test_a_word_without_parts_is_undecided():
    found = answers(kernel(backward=False, masks=(), m_ne_n=False))
    undecided = {word for word in SAME_BITS if found[f"same_bits_{word}"].certainty == "undecided"}
    assert undecided == {"chunks", "varlen", "inference"}
    assert found["same_bits"].value == ("batch", "heads")


def test_a_kernel_that_takes_no_size_has_no_answer():
    found = answers(kernel(max_seqlen=20))
    assert {answer.certainty for answer in found.values()} == {"undecided"}
    assert "same_bits" not in found


def test_no_size_begins_after_the_limit_of_time():
    assert "same_bits" not in answers(kernel(), seconds=-1.0)


def test_a_size_that_needs_too_much_memory_is_the_end(monkeypatch):
    def make(problem):
        if problem.N > 40:
            raise torch.OutOfMemoryError
        return tensors.make(problem)

    monkeypatch.setattr(trying, "make", make)
    monkeypatch.setattr(same_bits, "_SIZES", ((3, 5, 40), (3, 1, 60), (3, 5, 40)))
    found = answers(kernel())
    assert found["same_bits_heads"].value is True
    assert "I4 holds in 6 comparisons, to B=3, 5 rows, 40 keys" in found["same_bits_heads"].evidence


def test_a_kernel_of_as_many_keys_as_rows_gets_both_of_several_tiles(monkeypatch):
    monkeypatch.setattr(same_bits, "_SIZES", ((2, 1, 500),))
    found = answers(kernel(m_ne_n=False))["same_bits_heads"]
    assert found.value is True
    assert "to B=2, 130 rows, 130 keys" in found.evidence


def test_a_declared_word_that_fails_is_refuted():
    subject = kernel("heads", same_bits=("heads", "chunks"))
    probed = probe(subject, topics=("domain", "bits"))
    (wrong,) = refuted(subject, probed)
    assert wrong.startswith("kernel declares same_bits=('chunks', 'heads'), and I4 fails first at ")
    assert probed.declarations()["same_bits"] == ("batch", "chunks", "varlen", "inference")


@pytest.mark.parametrize("declared", [(), ("batch", "heads"), tuple(SAME_BITS)])
def test_a_check_prints_the_words_that_are_not_declared(declared, tmp_path, capsys):
    (tmp_path / "my.py").write_text(KERNEL.format(declared))
    file = tmp_path / "assumed.json"
    assert main(["probe", f"{tmp_path}/my.py:attention", f"--assume={file}", "--bits"]) == 0
    printed = capsys.readouterr().out
    left = [word for word in SAME_BITS if word not in declared]
    assert [line.split()[0] for line in printed.splitlines() if line.startswith("same_bits")] == [
        f"same_bits_{word}" for word in left
    ]
    assert ("no check asks for them" in printed) == bool(left)
    assert not file.exists()


def test_a_check_prints_the_words_of_a_kernel_without_declarations(tmp_path, capsys):
    code = KERNEL.format("").replace('@attention_kernel(dtypes=("bf16",), same_bits=)\n', "")
    (tmp_path / "my.py").write_text(code)
    file = tmp_path / "assumed.json"
    assert main(["probe", f"{tmp_path}/my.py:attention", f"--assume={file}", "--bits"]) == 0
    assert "same_bits_batch" in capsys.readouterr().out
    assert "same_bits" not in json.loads(file.read_text())


# Faults of a call with a cache, and the sizes at which each shows first.
CACHE_FAULTS = {
    "batch": (lambda q, k_cache: len(q) > 5, "I1 fails first at B=3, 1 row, 60 keys"),
    "chunks": (lambda q, k_cache: q.shape[2] == 33, "I2 fails first at B=2, 33 rows, 33 keys"),
    "varlen": (lambda q, k_cache: k_cache.shape[1] == 32, "I5 fails first at B=3, 1 row, 60 keys"),
}


def kernel_of_caches(fault: str = "") -> Subject:
    """Attention to pages of 16 or 32 rows in float64, which rounds once, or twice for a fault."""

    @attention_kernel(
        cache=("paged",), page_sizes=(16, 32), masks=("causal",), dtypes=("bf16",), dv_ne_d=False
    )
    def attend(q, k_cache, v_cache, *, cache_seqlens, page_table, causal, sm_scale):
        out = torch.empty_like(q)
        M, group = q.shape[2], q.shape[1] // k_cache.shape[2]
        for b, length in enumerate(cache_seqlens.tolist()):
            pages = page_table[b, : -(-length // k_cache.shape[1])]
            k, v = (
                x[pages].flatten(0, 1)[:length].transpose(0, 1).repeat_interleave(group, 0).double()
                for x in (k_cache, v_cache)
            )
            seen = torch.ones(M, length, dtype=torch.bool).tril(length - M if causal else length)
            scores = (q[b].double() @ k.mT * sm_scale).masked_fill(~seen, -torch.inf)
            out[b] = torch.softmax(scores, -1).nan_to_num(0.0) @ v
        return out * 1.01 if fault and CACHE_FAULTS[fault][0](q, k_cache) else out

    return Subject.of(attend, "attend")


@pytest.mark.parametrize("fault", ["", *CACHE_FAULTS])
def test_the_first_size_at_which_bits_over_a_cache_differ_is_found(fault):
    probed = probe(kernel_of_caches(fault), topics=("bits",))
    for word in CACHE_FAULTS:
        answer = probed[f"same_bits_{word}"]
        assert answer.value is (word != fault), answer
        assert "pages of 16 rows" in answer.evidence
        assert call_from_json(answer.replay).page_size == 16
    if fault:
        assert CACHE_FAULTS[fault][1] in probed[f"same_bits_{fault}"].evidence
    assert probed["same_bits"].value == tuple(word for word in CACHE_FAULTS if word != fault)
