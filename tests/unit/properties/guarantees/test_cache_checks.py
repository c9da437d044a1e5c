"""Every check of caches finds a subject that is wrong in its way, and passes a correct one."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from fa_verify.oracles.call import changed
from fa_verify.oracles.calls.cache import CacheProblem
from fa_verify.oracles.calls.codec import call_from_json
from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.problem import Problem
from fa_verify.properties.guarantees.claims import checks_of, claims_of
from fa_verify.properties.kernels.loading import load
from fa_verify.properties.kernels.subject import Subject
from fa_verify.properties.kernels.supported import ExcludedError
from fa_verify.properties.kernels.supported_caches import cached, hidden_first, lengthened
from fa_verify.properties.kinds.registry import KINDS
from tests.quantised import faults, kernel
from tests.unit.properties.guarantees.calls import found_on
from tests.unit.properties.problems.sampling import drawn

CACHES = checks_of("call", kind="cache")
MASK = Mask(causal=True, seqlens_k=(21, 9))
ATTENTION = Problem(B=2, H=2, N=24, M=3, D=8, Dv=5, dtype="fp32", mask=MASK, seed=3)
PROBLEM = CacheProblem(attention=ATTENTION, page_size=4, new=3, shared=1, spare=2)


def attend(
    q, k_cache, v_cache, *, k=None, v=None, cache_seqlens, page_table=None, cache_batch_idx=None,
    causal, window_size, sm_scale, least=-math.inf,
):  # fmt: skip
    """Attention over a cache in PyTorch, row by row and key by key, in float32."""
    page_size = k_cache.shape[1]
    table = cache_batch_idx[:, None] if page_table is None else page_table
    B, H, M, _ = q.shape
    group = H // k_cache.shape[2]
    out, lse = torch.empty(B, H, M, v_cache.shape[3]), torch.empty(B, H, M)
    for b in range(B):
        rows = [int(page) * page_size + n for page in table[b] for n in range(page_size)]
        held = int(cache_seqlens[b])
        for cache, new in ((k_cache, k), (v_cache, v)):
            for i in range(0 if new is None else new.shape[2]):
                page, row = divmod(rows[held + i], page_size)
                cache[page, row] = new[b, :, i]
        held += 0 if k is None else k.shape[2]
        places = [divmod(row, page_size) for row in rows[:held]]
        for h in range(H):
            keys = [k_cache[page, row, h // group] for page, row in places]
            values = [v_cache[page, row, h // group] for page, row in places]
            for m in range(M):
                last = m + held - M
                first = 0 if window_size[0] is None else max(0, last - window_size[0])
                seen = slice(first, max(0, last + 1) if causal else held)
                scores = [sm_scale * (q[b, h, m] * x).sum() for x in keys[seen]]
                out[b, h, m], lse[b, h, m] = softmax(scores, values[seen], least)
    return out, lse


def softmax(scores, values, least):
    """The weighted sum of values and the log of the sum, from first to last."""
    if not scores:
        return 0.0, -math.inf
    top = max(*scores, torch.tensor(least))
    weights = [(x - top).exp() for x in scores]
    total = sum(weights)
    return sum(w * x for w, x in zip(weights, values, strict=False)) / total, top + total.log()


def drops_the_append(q, k_cache, v_cache, *, k=None, v=None, **given):
    return attend(q, k_cache, v_cache, **given)


def starts_at_0(q, k_cache, v_cache, **given):
    return attend(q, k_cache, v_cache, **given, least=0.0)


def weighs_hidden_values_by_0(q, k_cache, v_cache, *, page_table=None, window_size, **given):
    """Attention to a window, which loads the values of pages that it hides."""
    out, lse = attend(
        q, k_cache, v_cache, page_table=page_table, window_size=window_size, **given
    )  # fmt: skip
    if page_table is not None and window_size[0] is not None:
        first = page_table[:, 0].long()
        out += 0 * v_cache[first].sum((1, 2, 3)).view(-1, 1, 1, 1)
    return out, lse


def folds_the_table(q, k_cache, v_cache, *, page_table=None, **given):
    if page_table is not None:
        page_table = page_table[:, torch.arange(page_table.shape[1]) % 64]
    return attend(q, k_cache, v_cache, page_table=page_table, **given)


def reads_free_rows(q, k_cache, v_cache, **given):
    out, lse = attend(q, k_cache, v_cache, **given)
    return out + 0 * v_cache.sum(), lse


def perturbed(found, is_wrong: bool):
    out, lse = found
    return (out * (1 + 2.0**-20) if is_wrong else out), lse


def rounds_by_places(q, k_cache, v_cache, *, page_table=None, **given):
    found = attend(q, k_cache, v_cache, page_table=page_table, **given)
    return perturbed(found, page_table is not None and int(page_table[0, 0]) % 2 == 1)


def rounds_by_the_longest(q, k_cache, v_cache, *, cache_seqlens, **given):
    found = attend(q, k_cache, v_cache, cache_seqlens=cache_seqlens, **given)
    return perturbed(found, int(cache_seqlens.max()) != max(MASK.seqlens_k))


def rounds_by_pages(q, k_cache, v_cache, **given):
    found = attend(q, k_cache, v_cache, **given)
    return perturbed(found, k_cache.shape[1] != 4)


def rounds_by_appends(q, k_cache, v_cache, *, k=None, **given):
    found = attend(q, k_cache, v_cache, k=k, **given)
    return perturbed(found, k is not None and q.shape[2] == k.shape[2])


def appends_badly(q, k_cache, v_cache, **given):
    found = rounds_by_appends(q, k_cache, v_cache, **given)
    k_cache[k_cache.isnan()] = 1.0
    return found


def hides_empty_rows(q, k_cache, v_cache, **given):
    out, lse = attend(q, k_cache, v_cache, **given)
    return out, lse.clamp(min=-1e30)


def reads_unwritten_sums(q, k_cache, v_cache, *, cache_seqlens, **given):
    out, lse = attend(q, k_cache, v_cache, cache_seqlens=cache_seqlens, **given)
    sums = torch.empty_like(lse)
    held = (0 if given.get("k") is None else given["k"].shape[2]) + cache_seqlens
    sums[held > 0] = lse[held > 0].exp()
    return out, torch.where(sums > 0, sums.log(), -math.inf)


def is_far_by_64_bits(q, k_cache, v_cache, **given):
    found = attend(q, k_cache, v_cache, **given)
    return perturbed(found, max(k_cache.stride(0), v_cache.stride(0)) > 2**20)


def keeps_lengths_by_address(q, k_cache, v_cache, *, cache_seqlens, **given):
    held = KEPT.setdefault(cache_seqlens.data_ptr(), cache_seqlens.clone())
    return attend(q, k_cache, v_cache, cache_seqlens=held, **given)


KEPT: dict[int, torch.Tensor] = {}
# Calls as they are drawn for a check, where it needs more than PROBLEM has.
DRAWN = {
    "hidden keys": lambda problem: hidden_first(problem, 17), "many keys": lengthened,
    "ways": lambda problem: changed(problem, seed=0),
    "places": lambda problem: changed(problem, stored="e4m3fn", scales="token_head"),
    "codes written": lambda problem: changed(problem, stored="e4m3fn"),
}  # fmt: skip
WRONG = {
    "accuracy": drops_the_append, "written": drops_the_append,
    "many keys": folds_the_table, "hidden keys": weighs_hidden_values_by_0,
    "pages": rounds_by_places, "page sizes": rounds_by_pages, "free rows": reads_free_rows,
    "append": appends_badly, "nothing cached": hides_empty_rows,
    "neighbours": rounds_by_the_longest, "decoding": rounds_by_appends,
    "far pages": is_far_by_64_bits, "ways": keeps_lengths_by_address,
    "places": faults.ScaleOfTheNeighbouringToken, "codes written": faults.DoesNotSaturate,
}  # fmt: skip


def asked(check: str, problem: CacheProblem) -> CacheProblem:
    """A call that a check is drawn for."""
    return DRAWN.get(check, lambda x: x)(problem)


def claimed(check: str, function=None, drawn_for: str = "") -> str:
    """The first finding of each claim of a check, about its fault or another one."""
    subject = subject_of(function or WRONG[check])
    findings = found_on(subject, asked(drawn_for or check, PROBLEM), CACHES[check])
    return "\n".join({x.claim: str(x) for x in findings[::-1]}.values())


def subject_of(function, **declared) -> Subject:
    """A subject that promises bits, unless other declarations replace that."""

    def attention(q, k, v, **given):
        raise NotImplementedError

    promised = {"bitwise": ("G10",), "same_bits": ("batch", "chunks", "varlen")}
    of_codes = ("cache_formats", "cache_scales", "writing")
    promised |= {word: getattr(function, word) for word in of_codes if hasattr(function, word)}
    for word, value in {"kvcache": function, **promised, **declared}.items():
        setattr(attention, word, value)
    return Subject.of(attention, "attention")


@pytest.mark.parametrize("check", CACHES)
def test_a_check_finds_its_fault_and_passes_a_correct_subject(check):
    problem = asked(check, PROBLEM)
    right = attend if problem.format is None else kernel.attention
    assert found_on(subject_of(right), problem, CACHES[check]) == []
    findings = found_on(subject_of(WRONG[check]), problem, CACHES[check])
    assert findings
    assert str(findings[0])


def test_every_check_is_listed():
    assert {*CACHES} == {*WRONG}


@pytest.mark.parametrize("one_query", [False, True])
def test_low_scores_are_asked_for_behind_a_window(one_query):
    calls = []

    def records(q, k_cache, v_cache, *, cache_seqlens, causal, window_size, k=None, **given):
        held = [x + (0 if k is None else k.shape[2]) for x in cache_seqlens.tolist()]
        calls.append((q.shape[2], held, causal, window_size))
        return attend(
            q, k_cache, v_cache, k=k, cache_seqlens=cache_seqlens, causal=causal,
            window_size=window_size, **given,
        )  # fmt: skip

    subject = subject_of(records, one_query=one_query, dtypes=("fp32",))
    draw = KINDS["cache"].draw
    needs = claims_of(kind="cache")["hidden keys"].needs
    for problem in drawn(draw(subject, dtype="fp32", device="cpu", **needs), 5):
        assert _told(subject, problem, "accuracy") == []
        assert (problem.attention.inputs, problem.attention.softcap) == ("lse_low_130", None)
    for rows, held, causal, (left, right) in calls:
        assert rows == (1 if one_query else 17)
        assert min(held) >= 33
        assert causal
        assert 0 <= left < 21
        assert right is None
    with pytest.raises(ExcludedError, match=r"declares masks \('causal',\), and one_query"):
        draw(
            subject_of(records, masks=("causal",), one_query=True), dtype="fp32", device="cpu",
            **needs,
        )  # fmt: skip


def test_a_subject_that_writes_to_the_table_is_found():
    def wrong(q, k_cache, v_cache, *, page_table=None, **given):
        page_table.add_(0 * page_table).fill_(0)
        return attend(q, k_cache, v_cache, page_table=page_table, **given)

    findings = found_on(subject_of(wrong), PROBLEM, CACHES["accuracy"])
    assert "page_table differs" in str(findings[0])


def test_a_replay_line_holds_the_whole_problem():
    (finding, *_) = found_on(subject_of(drops_the_append), PROBLEM, CACHES["accuracy"])
    line = str(finding).splitlines()[-1]
    assert line == f"  replay: pytest --fa-replay='{PROBLEM.to_json()}'"
    assert call_from_json(PROBLEM.to_json()) == PROBLEM


@pytest.mark.parametrize(
    "record",
    [
        '{"version":1,"mask":{"type":"Mask","seqlens_k":[1]},"cache":{"pages":3}}',
        '{"version":1,"mask":{"type":"Mask","seqlens_k":[1]},"cache":3}',
        '{"version":1,"cache":{}}',
        '{"version":2,"merge":{}}',
        '{"version":1,"merge":{"part":[1]}}',
        '{"version":1,"merge":{"parts":3}}',
        '{"version":1,"merge":3}',
        '{"version":1,"merge":{},"B":2}',
        "[",
    ],
)
def test_a_malformed_problem_is_refused(record):
    with pytest.raises(ValueError, match=r"problem|needs"):
        call_from_json(record)


# Wrong by less than the bound.
SLIGHT = (
    ("page sizes", lambda k_cache, **_: k_cache.shape[1] != 4),
    ("neighbours", lambda q, **_: len(q) == 1),
    ("decoding", lambda q, **_: q.shape[2] < 3),
)


@pytest.mark.parametrize(("check", "is_wrong"), SLIGHT)
def test_bits_are_compared_where_they_are_promised_alone(check, is_wrong):
    def slightly_wrong(q, k_cache, v_cache, **given):
        out, lse = attend(q, k_cache, v_cache, **given)
        return (out.nextafter(out + 1) if is_wrong(q=q, k_cache=k_cache) else out), lse

    assert found_on(subject_of(slightly_wrong), PROBLEM, CACHES[check])
    silent = subject_of(slightly_wrong, same_bits=())
    assert found_on(silent, PROBLEM, CACHES[check]) == []

    def grossly_wrong(q, k_cache, v_cache, **given):
        out, lse = attend(q, k_cache, v_cache, **given)
        return (out * 1.01 if is_wrong(q=q, k_cache=k_cache) else out), lse

    assert found_on(subject_of(grossly_wrong, same_bits=()), PROBLEM, CACHES[check])


def paged(q, k_cache, v_cache, *, cache_seqlens, page_table):
    """A decoding kernel of pages, which returns no lse."""
    return attend(
        q, k_cache, v_cache, cache_seqlens=cache_seqlens, page_table=page_table, causal=False,
        window_size=(None, None), sm_scale=q.shape[3] ** -0.5,
    )[0]  # fmt: skip


PAGED = {
    "cache": ("paged",), "page_sizes": (4, 8), "masks": (), "fixed_scale": "1/sqrt(D)",
    "one_query": True, "dtypes": ("fp32",), "bitwise": ("G10",), "backward": False,
    "same_bits": ("batch", "varlen"),
}  # fmt: skip


def of_pages(function=paged, **declared) -> Subject:
    """A subject that is a function of caches."""

    def decode(q, k_cache, v_cache, *, cache_seqlens, page_table):
        return function(q, k_cache, v_cache, cache_seqlens=cache_seqlens, page_table=page_table)

    for word, value in {**PAGED, **declared}.items():
        setattr(decode, word, value)
    return Subject.of(decode, "decode")


def plain(**fields) -> CacheProblem:
    attention = dataclasses.replace(ATTENTION, M=1, mask=Mask(seqlens_k=(21, 9)))
    return CacheProblem(attention=attention, page_size=4, shared=1, spare=2, **fields)


def test_a_kernel_of_caches_alone_is_called_with_what_it_declares():
    decode = of_pages()
    assert decode.reads_caches_alone
    assert decode.cache_keywords == ("cache_seqlens", "page_table")
    assert "cache=('paged',)" in decode.declared()
    for check in CACHES:
        assert _told(decode, plain(), check) == []
    # One row has no chunks, and it takes no window.
    trial = KINDS["cache"].run(decode, plain())
    assert CACHES["decoding"](trial) == []
    assert [*trial.asked] == ["I3"]
    needs = claims_of(kind="cache")["hidden keys"].needs
    with pytest.raises(ExcludedError, match="declares masks"):
        KINDS["cache"].draw(decode, dtype="fp32", device="cpu", **needs)
    with pytest.raises(NotImplementedError, match="takes no padded tensors"):
        decode.run(*[torch.zeros(1, 1, 1, 8)] * 3, Problem(D=8, Dv=8, M=1, N=1))


def _told(subject, problem, check) -> list[str]:
    """The findings of a check, or the reason why the subject refuses it."""
    try:
        return list(map(str, found_on(subject, problem, CACHES[check])))
    except NotImplementedError as reason:
        return [f"refused: {reason}"]


@pytest.mark.parametrize(
    ("problem", "declared", "why"),
    [
        (plain(new=1), {}, "declares cache ('paged',)"),
        (dataclasses.replace(plain(), page_size=0, shared=0), {}, "declares cache ('paged',)"),
        (dataclasses.replace(plain(), page_size=3), {}, "declares page_sizes (4, 8)"),
        (PROBLEM, {"cache": ("paged", "append")}, "declares one_query True"),
        (plain(), {"head_dims": (16,)}, "declares head_dims (16,)"),
    ],
)
def test_a_call_that_declarations_exclude_is_refused(problem, declared, why):
    assert _told(of_pages(**declared), problem, "accuracy") == [f"refused: decode {why}"]


def test_an_entry_without_keys_is_a_zero_size():
    empty = dataclasses.replace(ATTENTION, M=1, mask=Mask(seqlens_k=(3, 0)))
    problem = CacheProblem(attention=empty, page_size=4)
    assert _told(of_pages(), problem, "accuracy") == []
    (told,) = _told(of_pages(zero_sizes=False), problem, "accuracy")
    assert told == "refused: decode declares zero_sizes False"


@pytest.mark.parametrize(
    ("words", "is_right"), [("cache_seqlens, page_table", True), ("mask", False)]
)
def test_a_kernel_of_caches_is_loaded_by_its_signature(words, is_right, tmp_path):
    file = tmp_path / "decoding.py"
    declared = "decode.cache, decode.masks, decode.fixed_scale = ('paged',), (), 1.0\n"
    file.write_text(f"def decode(q, k, v, *, {words}):\n    pass\n\n\n{declared}")
    if is_right:
        assert load(f"{file}:decode").reads_caches_alone
        return
    with pytest.raises(ValueError, match=r"needs \(q, k_cache, v_cache, \*, cache_seqlens, page_t"):
        load(f"{file}:decode")


@pytest.mark.parametrize("declared", [{}, {"zero_sizes": False, "head_dims": (8, 16)}])
def test_problems_are_drawn_that_the_subject_takes(declared):
    decode = of_pages(**declared)
    problems = drawn(cached(decode, "fp32", "cpu", ("default",)), 15)
    assert {problem.page_size for problem in problems} == {4, 8}
    for problem in problems:
        assert found_on(decode, problem, CACHES["accuracy"]) == []


@pytest.mark.parametrize("kernels", ["fp32", "fp16"])
def test_calls_are_drawn_for_few_kernels(kernels):
    decode, configs = of_pages(score_mods=("softcap", "alibi")), ("a", "b")
    problems = drawn(cached(decode, "fp32", "cpu", configs, kernels=kernels), 80)
    found = {
        (x.config, x.D > 16, x.Dv > 16, x.softcap is None, x.alibi == "none")
        for x in (problem.attention for problem in problems)
    }
    assert len(found) <= 4
    # Each value of each of them occurs, and so do keys of columns that a tile has in two parts.
    assert all(len({*values}) == 2 for values in zip(*found, strict=True))
    assert any(problem.attention.D > 128 for problem in problems)


def test_sums_of_an_empty_entry_that_are_read_and_not_written_are_found():
    told = claimed("nothing cached", reads_unwritten_sums)
    assert "lse of attention is not that of no key in the cache, where new memory holds 1" in told


def takes_unwritten_maxima(q, k_cache, v_cache, *, cache_seqlens, **given):
    """Parts of 8 keys, whose maxima are combined: those past the last key are not written."""
    out, lse = attend(q, k_cache, v_cache, cache_seqlens=cache_seqlens, **given)
    held = (0 if given.get("k") is None else given["k"].shape[2]) + cache_seqlens
    maxima = lse.new_empty(*lse.shape, int(held.max()) // 8 + 1)
    for b, length in enumerate(held.tolist()):
        maxima[b, ..., : length // 8 + 1] = lse[b, ..., None]
    top = lse.new_full(lse.shape, -math.inf)
    for part in maxima.unbind(3):
        top = torch.where(part > top, part, top)
    return out, top


@pytest.mark.parametrize("seed", [2, 5])
def test_maxima_that_are_read_and_not_written_are_found_by_a_plausible_number(seed):
    attention = dataclasses.replace(ATTENTION, inputs="lse_low_90", seed=seed)
    problem = dataclasses.replace(PROBLEM, attention=attention)
    subject = subject_of(takes_unwritten_maxima)
    found = [check for check in CACHES if found_on(subject, problem, CACHES[check])]
    # No number is below NaN. A call without a key is asked with a number too.
    assert {*found} <= {"nothing cached"} if seed % 2 == 0 else "accuracy" in found


def test_free_rows_that_a_kernel_of_pages_reads_are_found():
    def reads(q, k_cache, v_cache, **given):
        return paged(q, k_cache, v_cache, **given) + 0 * v_cache.sum()

    assert "C2 free rows" in _told(of_pages(reads), plain(), "free rows")[0]


def test_calls_have_groups_past_8_where_heads_are_grouped():
    def groups(**declared):
        problems = drawn(cached(of_pages(**declared), "fp32", "cpu", ("default",)), 60)
        return {problem.attention.G for problem in problems}

    assert {1, 9, 16} <= groups()
    assert groups(gqa=False) == {1}


def test_a_hidden_key_that_leaks_into_an_earlier_row_is_found():
    def leaks(q, k_cache, v_cache, *, cache_seqlens, page_table=None, k=None, v=None, **given):
        found = attend(
            q, k_cache, v_cache, cache_seqlens=cache_seqlens, page_table=page_table, k=k, v=v,
            **given,
        )  # fmt: skip
        return found[0] + 2.0**-100 * v[:, :, -1:], found[1]

    told = claimed("hidden keys", leaks)
    assert "G5 hidden positions: out of attention depends on a key that the row does not" in told
    assert found_on(subject_of(leaks), PROBLEM, CACHES["accuracy"]) == []


def test_hidden_values_beside_visible_ones_may_be_multiplied_by_0():
    def multiplies(q, k_cache, v_cache, *, page_table=None, **given):
        out, lse = attend(q, k_cache, v_cache, page_table=page_table, **given)
        if page_table is not None:
            # Key 8: a row of entry 1 sees it, and those of entry 0 see key 9 beside it.
            out = out + 0 * v_cache[page_table[:, 2].long(), 0].amax((1, 2)).view(-1, 1, 1, 1)
        return out, lse

    problem = dataclasses.replace(
        PROBLEM, new=0,
        attention=dataclasses.replace(
            ATTENTION, mask=Mask(causal=True, window_left=0, seqlens_k=(12, 9))
        ),
    )  # fmt: skip
    trial = KINDS["cache"].run(subject_of(multiplies), problem)
    assert CACHES["hidden keys"](trial) == []
    assert trial.asked == {"G5": ""}


def test_a_call_that_hides_no_key_asks_nothing_of_hidden_keys():
    trial = KINDS["cache"].run(of_pages(), plain())
    assert CACHES["hidden keys"](trial) == []
    assert trial.asked == {"G5": "not applicable where every row sees every key"}
