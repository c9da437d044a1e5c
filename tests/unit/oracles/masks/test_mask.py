import itertools

import pytest
import torch

from fa_verify.oracles.masks.mask import Mask

BOUNDS = (None, 0, 1, 2, 7)
SIZES = (0, 1, 2, 3, 5)


def sees(mask, b, m, n, M, N):
    """An independent definition: keys as a set of integers around the row's position."""
    rows = mask.seqlens_q[b] if mask.seqlens_q is not None else M
    keys = mask.seqlens_k[b] if mask.seqlens_k is not None else N
    if m not in range(rows):
        return False
    position = m - rows + keys
    far = rows + keys + M + N
    before = far if mask.window_left is None else mask.window_left
    after = far if mask.window_right is None else mask.window_right
    after = 0 if mask.causal else after
    window = set(range(position - before, position + after + 1))
    return n in window & set(range(keys))


def lengths(size):
    """No lengths, full lengths, and two entries of which one is 0, or one short of full."""
    return (None, (size, 0), (max(0, size - 1), size))


def masks(M, N):
    for causal, left, right in itertools.product((False, True), BOUNDS, BOUNDS):
        if causal and right not in (None, 0):
            continue
        for rows, keys in itertools.product(lengths(M), lengths(N)):
            yield Mask(
                causal=causal,
                window_left=left,
                window_right=right,
                seqlens_q=rows,
                seqlens_k=keys,
            )


@pytest.mark.parametrize("M", SIZES)
@pytest.mark.parametrize("N", SIZES)
def test_visible_is_the_definition(M, N):
    for mask in masks(M, N):
        for b, m, n in itertools.product(range(2), range(M), range(N)):
            assert mask.is_visible(b, 0, m, n, M=M, N=N) == sees(mask, b, m, n, M, N), (
                mask,
                b,
                m,
                n,
            )


@pytest.mark.parametrize("M", SIZES)
@pytest.mark.parametrize("N", SIZES)
def test_dense_is_visible(M, N):
    for mask in masks(M, N):
        want = torch.tensor(
            [
                [[mask.is_visible(b, 0, m, n, M=M, N=N) for n in range(N)] for m in range(M)]
                for b in range(2)
            ]
        ).view(2, 1, M, N)
        got = mask.dense(2, 3, M, N).expand(2, 1, M, N)
        assert torch.equal(got, want.to(torch.bool)), mask


@pytest.mark.parametrize("mask", [Mask(), Mask(causal=True, window_left=1)])
def test_dense_without_lengths_has_one_batch_entry(mask):
    assert mask.dense(3, 2, 4, 5).shape == (1, 1, 4, 5)


def test_dense_of_no_batch_entries_is_empty():
    assert Mask(causal=True, seqlens_k=()).dense(0, 2, 4, 5).shape == (0, 1, 4, 5)


def test_causal_is_a_right_bound_of_zero():
    assert Mask(causal=True).right == Mask(window_right=0).right == 0
    assert Mask(window_right=3).right == 3
    assert Mask(window_left=3).right is None


def test_causal_takes_a_right_bound_that_agrees():
    assert Mask(causal=True, window_right=0).right == 0


def test_masks_are_values():
    mask = Mask(causal=True, seqlens_q=[3, 0])
    assert mask == Mask(causal=True, seqlens_q=(3, 0))
    assert len({mask, Mask(causal=True, seqlens_q=(3, 0))}) == 1
    with pytest.raises(AttributeError):
        mask.causal = False


def test_masks_print_as_the_call_that_makes_them():
    mask = Mask(window_left=2, seqlens_k=(1, 4))
    assert eval(repr(mask)) == mask


def test_lengths_default_to_full():
    assert Mask().lengths(2, 5, 7) == ((5, 5), (7, 7))
    assert Mask(seqlens_k=(0, 7)).lengths(2, 5, 7) == ((5, 5), (0, 7))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"causal": 1}, "causal is 1; needs a bool"),
        ({"causal": None}, "causal is None; needs a bool"),
        ({"window_left": 1.0}, "window_left is 1.0; needs None or an int"),
        ({"window_right": True}, "window_right is True; needs None or an int"),
        ({"seqlens_q": 3}, "seqlens_q is 3; needs None or a sequence of ints"),
        ({"seqlens_q": "12"}, "seqlens_q is '12'; needs None or a sequence of ints"),
        ({"seqlens_k": (1, 2.0)}, "seqlens_k holds 2.0; needs ints"),
        ({"seqlens_k": (True,)}, "seqlens_k holds True; needs ints"),
    ],
)
def test_fields_of_the_wrong_type_are_refused(fields, message):
    with pytest.raises(TypeError, match=f"^{message}$"):
        Mask(**fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"window_left": -1}, "window_left is -1; needs None or an int >= 0"),
        ({"window_right": -2}, "window_right is -2; needs None or an int >= 0"),
        ({"seqlens_q": (1, -1)}, "seqlens_q holds -1; needs lengths >= 0"),
        ({"seqlens_k": (-3,)}, "seqlens_k holds -3; needs lengths >= 0"),
        ({"causal": True, "window_right": 1}, "causal=True contradicts window_right=1"),
    ],
)
def test_fields_out_of_range_are_refused(fields, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        Mask(**fields)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (Mask(seqlens_q=(1, 2, 3)), "seqlens_q has 3 lengths; needs one per batch entry, 2"),
        (Mask(seqlens_k=(1,)), "seqlens_k has 1 lengths; needs one per batch entry, 2"),
        (Mask(seqlens_q=(5, 6)), r"seqlens_q is \(5, 6\); needs lengths <= 5"),
        (Mask(seqlens_k=(8, 0)), r"seqlens_k is \(8, 0\); needs lengths <= 7"),
    ],
)
@pytest.mark.parametrize(
    "use", [lambda mask: mask.lengths(2, 5, 7), lambda mask: mask.dense(2, 1, 5, 7)]
)
def test_lengths_that_do_not_fit_are_refused(mask, message, use):
    with pytest.raises(ValueError, match=f"^{message}$"):
        use(mask)
