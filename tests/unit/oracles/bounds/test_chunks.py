"""Chunks of rows leave out keys that their rows do not see; results are those of one chunk."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn.functional import pad

from fa_verify.oracles import stream
from fa_verify.oracles.bounds.backward import add_keys, backward_error, read_of, terms_of
from fa_verify.oracles.bounds.constants import Constants, constants
from fa_verify.oracles.bounds.error_model import chunks, gather, judge
from fa_verify.oracles.bounds.forward import forward_error
from fa_verify.oracles.bounds.given_forward import Returned, given_forward
from fa_verify.oracles.bounds.replay import running_sums
from fa_verify.oracles.bounds.sinks import sink_error
from fa_verify.oracles.bounds.spread import Weights, spreads
from fa_verify.oracles.bounds.variance import variances
from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.masks.prefix_lm import PrefixLM
from fa_verify.oracles.outputs import Numerics
from fa_verify.oracles.reference.torch_reference import RowMasks, attention, row_chunks

M, N, D, DV = 200, 700, 8, 4
SCALE = 0.3
LENGTHS = {"seqlens_q": (M, 90), "seqlens_k": (N - 3, 533)}
MASKS = {
    "causal": Mask(causal=True),
    "window": Mask(window_left=40, window_right=3, **LENGTHS),
    "no key": Mask(causal=True, seqlens_q=(M, 110), seqlens_k=(0, 20)),
    "ahead": Mask(window_right=5, seqlens_q=(M, M), seqlens_k=(100, 600)),
    "predicate": PrefixLM(prefix=30, window_left=60, **LENGTHS),
}


def inputs(dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    shapes = {"q": (2, 2, M, D), "k": (2, 1, N, D), "v": (2, 1, N, DV), "dout": (2, 2, M, DV)}
    return [stream.normal(3, name, shape).to(dtype) for name, shape in shapes.items()]


def assert_same(got: tuple[object, ...], want: tuple[object, ...]) -> None:
    for x, y in zip(got, want, strict=True):
        assert (x is None) == (y is None)
        if x is None:
            continue
        x, y = (torch.as_tensor(z, dtype=torch.float64) for z in (x, y))
        finite = y[y.isfinite()]
        largest = float(finite.abs().amax()) if finite.numel() else 0.0
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-13 * largest)


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("height", [16, 64])
def test_a_chunk_has_the_keys_that_its_rows_see(mask, height):
    masks = RowMasks(mask, 2, 2, M, N, torch.device("cpu"))
    dense = mask.dense(2, 2, M, N).expand(2, 2, M, N)
    seen, pairs, next_row = torch.zeros_like(dense), 0, 0
    for rows, keys in row_chunks(masks, height, row_step=16, key_step=32):
        assert rows.start == next_row
        assert rows.start % 16 == keys.start % 32 == 0
        assert 0 <= keys.start < keys.stop <= N
        next_row = rows.stop
        part = masks.between(rows.start, rows.stop, keys)
        seen[:, :, rows, keys] = part
        assert part.shape[2] * part.shape[3] <= height * N
        pairs += part.shape[2] * part.shape[3]
    assert next_row == M
    assert torch.equal(seen, dense)
    assert pairs < 0.95 * M * N


def test_a_mask_of_another_class_has_all_keys():
    class Dense:
        def dense(self, *sizes, device=None):
            return Mask(causal=True).dense(*sizes, device=device)

    masks = RowMasks(Dense(), 1, 1, 40, 50, torch.device("cpu"))
    assert [keys for _, keys in row_chunks(masks, 8)] == [slice(0, 50)] * 5


@pytest.mark.parametrize("mask", [*MASKS.values(), Mask()], ids=[*MASKS, "full"])
@pytest.mark.parametrize(
    "numerics",
    [Numerics(block_n=32), Numerics(block_n=96, splits=3, group_sum="dtype", atomic=())],
    ids=["tiles", "splits"],
)
def test_chunks_agree_with_the_whole(mask, numerics):
    given = inputs()
    dlse = stream.normal(4, "dlse", (2, 2, M))
    call = {"mask": mask, "sm_scale": SCALE}
    bounds = {**call, "in_dtype": "bf16", "numerics": numerics}
    whole = attention(*given, dlse, **call)
    assert_same(attention(*given, dlse, **call, rows=16), whole)
    judged, want = (judge(*given, dlse, **bounds, rows=rows) for rows in (16, M))
    assert_same(judged.bound, want.bound)
    assert_same(judged.terms, want.terms)
    assert judged.out_of_range == want.out_of_range is None
    read = Returned(whole.out.to(torch.bfloat16), whole.lse.float())
    back, of_all = (
        given_forward(*given, dlse, given=read, **bounds, rows=rows) for rows in (16, M)
    )
    assert_same(back, of_all)
    assert_same(*(variances(*given, dlse, **bounds, rows=rows) for rows in (16, M)))
    weights = Weights(whole.out, whole.dq, whole.dk, whole.dv)
    parts, of_whole = (
        spreads(*given, dlse, given=read, weights=weights, **bounds, rows=rows) for rows in (16, M)
    )
    assert parts.keys() == of_whole.keys() == {"out", "lse", "dq", "dk", "dv"}
    for name, part in parts.items():
        assert_same(part, of_whole[name])
    sinks = torch.tensor([0.5, -1.0])
    assert_same(*(
        sink_error(*given, dlse, None, None, sinks, **bounds, rows=rows) for rows in (16, M)
    ))  # fmt: skip


@pytest.mark.parametrize("terms", [1, 255, 256, 300])
@pytest.mark.parametrize("zeros", [0, 1, 256, 257, 800])
@pytest.mark.parametrize("tile", [64, 176])
def test_running_sums_of_zeros_count_their_additions(terms, zeros, tile):
    weights, y, before = (
        stream.normal(7, name, shape)
        for name, shape in (("w", (2, 3, terms)), ("y", (2, terms, 4)), ("before", (2, 3, 4)))
    )
    longer = pad(weights, (0, zeros)), pad(y, (0, 0, 0, zeros))
    for earlier in (None, before):
        want = running_sums(*longer, tile, earlier)
        assert_same((running_sums(weights, y, tile, earlier, zeros=zeros),), (want,))


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_sums_of_keys_are_those_of_chunks_with_all_keys(mask, monkeypatch):
    # The bound by running sums is then the smaller one, however few keys there are.
    monkeypatch.setattr(Constants, "g", lambda self, terms: 0 * terms + 0.01)
    q, k, v, dout = inputs()
    k, v = (x.expand(2, 2, N, -1) for x in (k, v))
    numerics = Numerics(block_n=64)
    c = constants("bf16", numerics)
    masks = RowMasks(mask, 2, 2, M, N, torch.device("cpu"))
    options = {"sm_scale": SCALE, "c": c, "numerics": numerics}
    call = {"mask": mask, "apart": 1, "rows": 16, "tile": 64}
    found, sums = [None, None], []
    for rows, x in chunks(q, k, v, dout, None, None, None, None, **call):
        seen = masks.between(rows.start, rows.stop)
        any_order = masks.has_predicate
        whole = gather(q[:, :, rows], k, v, dout[:, :, rows], None, seen, (), any_order)
        both = []
        for i, chunk in enumerate((x, whole)):
            read = read_of(forward_error(chunk, **options, exact_spread=False), c)
            found[i] = copy.deepcopy(found[i])
            of = backward_error(chunk, read, **options, in_dtype="bf16", before=found[i])
            found[i] = add_keys(found[i], of.keys, chunk)
            terms = terms_of(chunk, read, of.grads, SCALE, "exact")
            both.append((of.dq, of.dq_bound, terms.dq, terms.dq_reach))
        assert_same(*both)
        assert_same(*found)
        sums.append(found[0])
    assert len(sums) > 1
    running = sums[-1].dk_running
    assert mask.is_plain == (running is not None and bool(running.isfinite().all()))


def test_chunks_of_terms_agree_with_the_whole():
    given = inputs(torch.float32)
    mask = MASKS["window"]
    for bias in (stream.normal(5, "bias", (2, 1, M, N)), stream.normal(5, "bias", (1, 2, 1, 1))):
        terms = (None, torch.tensor([0.1, 0.3]), bias, torch.tensor([0.5, -1.0]))
        call = {"mask": mask, "sm_scale": SCALE, "softcap": 5.0}
        assert_same(*(attention(*given, *terms, **call, rows=rows) for rows in (16, M)))
        call |= {"in_dtype": "fp32", "numerics": Numerics(block_n=64)}
        assert_same(*(judge(*given, *terms, **call, rows=rows).bound for rows in (16, M)))
        assert_same(*(variances(*given, *terms, **call, rows=rows) for rows in (16, M)))


@pytest.mark.parametrize(
    ("mask", "part"),
    [(Mask(window_left=100, window_right=0), 0.15), (Mask(causal=True), 0.6),
     (Mask(window_left=300), 0.6)],
    ids=["window", "causal", "left alone"],
)  # fmt: skip
def test_the_chunks_of_a_long_sequence_have_few_sizes_and_begin_with_the_largest(mask, part):
    long, height = 2**16, 256
    masks = RowMasks(mask, 1, 1, long, long, torch.device("cpu"))
    sizes = [
        (rows.stop - rows.start, keys.stop - keys.start)
        for rows, keys in row_chunks(masks, height, row_step=16, key_step=256)
    ]
    pairs = [rows * keys for rows, keys in sizes]
    assert len({*sizes}) <= 20
    assert max(pairs) == pairs[0] <= height * long
    assert sum(pairs) <= part * long * long
    assert len(pairs) < 200
