import dataclasses
import hashlib
import math

import pytest
import torch
from hypothesis import given

from oracles.mask import Mask
from oracles.problem import DTYPES, LAYOUTS, TENSORS, Problem
from properties.families import DIRTY, DOUT, INPUTS, TORCH_DTYPES, last_visible
from properties.strategies import problems
from properties.tensors import make

DEVICES = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
HALF = ("fp16", "bf16")
PADDED = Problem(
    B=3,
    H=4,
    Hk=2,
    M=9,
    N=13,
    D=5,
    Dv=6,
    mask=Mask(seqlens_q=(9, 4, 0), seqlens_k=(0, 13, 7)),
    layouts=("bshd", "padded", "offset", "expanded"),
)
LONG = Problem(B=2, H=4, Hk=2, M=61, N=67, D=64, Dv=48, mask=Mask(causal=True))
SHIFTS = {"lse_low_90": -90.0, "lse_low_130": -130.0, "lse_low_6e3": -6e3, "lse_high_6e4": 6e4}
GOLDEN = {
    ("inputs", "normal"): "4193df77",
    ("inputs", "outliers"): "609cc071",
    ("inputs", "times8"): "41afcad1",
    ("inputs", "times40"): "49ce5fd3",
    ("inputs", "lse_low_90"): "38b9bb28",
    ("inputs", "lse_low_130"): "b9c698bd",
    ("inputs", "lse_low_6e3"): "f661d361",
    ("inputs", "lse_high_6e4"): "1bab100e",
    ("inputs", "needle_visible"): "fc4048d3",
    ("inputs", "needle_hidden"): "10cba729",
    ("inputs", "constant"): "ad25e570",
    ("inputs", "zero_k"): "a9123a42",
    ("inputs", "tiny"): "0403eaeb",
    ("inputs", "subnormal"): "91e61e73",
    ("inputs", "tiny_k"): "4c5c1a1c",
    ("inputs", "tiny_q"): "378b05de",
    ("dout", "normal"): "4193df77",
    ("dout", "zero"): "9a56a381",
    ("dout", "constant"): "4da5eb84",
    ("dout", "tiny"): "46d3660d",
    ("dout", "subnormal"): "d5298e1b",
    ("dout", "one_hot"): "ea751774",
    ("dirty", "zero"): "4193df77",
    ("dirty", "nan"): "9870a912",
    ("dirty", "inf"): "4c889a49",
    ("dirty", "max"): "19580da8",
    ("dirty", "noise"): "7c7f767d",
}


def digest(problem):
    """A hash of the bits of all four tensors; which NaN a NaN is does not count."""
    total = hashlib.sha256()
    for tensor in make(problem):
        is_nan = tensor.isnan()
        for part in (is_nan, bits(torch.where(is_nan, 0, tensor))):
            total.update(part.cpu().numpy().tobytes())
    return total.hexdigest()[:8]


def golden_problem(field, name, device="cpu"):
    """A causal fp16 problem with padding, of one family."""
    mask = Mask(causal=True, seqlens_q=(11, 7), seqlens_k=(13, 10))
    family = {field: name, "device": device}
    return Problem(B=2, H=4, Hk=2, M=11, N=13, D=6, Dv=9, dtype="fp16", mask=mask, **family)


def bits(tensor):
    """The elements as integers of their size."""
    return tensor.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize])


def same_bits(left, right):
    """Equal, signs of zeros and payloads of NaNs included."""
    return torch.equal(bits(left), bits(right))


def padding(problem):
    """For each tensor a bool (B, 1, rows, 1), True in padding, written row by row."""
    rows, keys = problem.mask.lengths(problem.B, problem.M, problem.N)
    of_rows = [[m >= rows[b] for m in range(problem.M)] for b in range(problem.B)]
    of_keys = [[n >= keys[b] for n in range(problem.N)] for b in range(problem.B)]
    for flags in (of_rows, of_keys, of_keys, of_rows):
        size = len(flags[0]) if flags else 0
        yield torch.tensor(flags, dtype=torch.bool).view(problem.B, 1, size, 1)


def scores(problem):
    """Scaled scores in float64, unmasked, (B, H, M, N)."""
    inputs = make(problem)
    q, k = inputs.q.double(), inputs.k.double().repeat_interleave(problem.G, 1)
    return q @ k.mT * problem.scale


def visible_keys(problem, b, m):
    return [
        n for n in range(problem.N) if problem.mask.visible(b, 0, m, n, M=problem.M, N=problem.N)
    ]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("field", "name"), list(GOLDEN))
def test_tensors_have_the_golden_hash_on_every_device(field, name, device):
    assert digest(golden_problem(field, name, device)) == GOLDEN[field, name]


def test_every_family_has_a_golden_hash():
    families = {"inputs": INPUTS, "dout": DOUT, "dirty": DIRTY}
    assert set(GOLDEN) == {(field, name) for field in families for name in families[field]}


@given(problems(dirty="zero"))
def test_every_element_is_finite(problem):
    assert all(tensor.isfinite().all() for tensor in make(problem))


@given(problems())
def test_tensors_have_the_shapes_and_dtype_of_the_problem(problem):
    q, k, v, dout = make(problem)
    B, H, Hk, M, N = problem.B, problem.H, problem.Hk, problem.M, problem.N
    assert q.shape == (B, H, M, problem.D)
    assert k.shape == (B, Hk, N, problem.D)
    assert v.shape == (B, Hk, N, problem.Dv)
    assert dout.shape == (B, H, M, problem.Dv)
    assert {x.dtype for x in (q, k, v, dout)} == {TORCH_DTYPES[problem.dtype]}


@given(problems())
def test_making_a_problem_twice_gives_the_same_bits(problem):
    first = make(problem)
    torch.manual_seed(1)
    assert all(same_bits(a, b) for a, b in zip(first, make(problem), strict=True))


@given(problems(padding=True))
def test_dirt_changes_padding_alone(problem):
    clean, dirty = make(problem, dirty="zero"), make(problem, dirty="nan")
    for a, b, pad in zip(clean, dirty, padding(problem), strict=True):
        assert same_bits(torch.where(pad, 0, a), torch.where(pad, 0, b))
        assert torch.where(pad, b, math.nan).isnan().all()
        assert not torch.where(pad, a, 0).any()


def test_an_overriding_dirty_family_is_that_of_the_problem():
    dirty = make(dataclasses.replace(PADDED, dirty="noise"))
    override = make(PADDED, dirty="noise")
    assert all(same_bits(a, b) for a, b in zip(dirty, override, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("dirty", "stands"),
    [
        ("zero", lambda x: x == 0),
        ("nan", lambda x: x.isnan()),
        ("inf", lambda x: x.isinf()),
        ("max", lambda x: x.abs() == torch.finfo(x.dtype).max),
        ("noise", lambda x: x.isfinite() & (x != 0)),
    ],
)
def test_padding_holds_its_family(dirty, stands, dtype):
    problem = dataclasses.replace(PADDED, dirty=dirty, dtype=dtype)
    for tensor, pad in zip(make(problem), padding(problem), strict=True):
        assert stands(tensor)[pad.expand(tensor.shape)].all()


@pytest.mark.parametrize("dirty", ["inf", "max"])
def test_large_padding_has_both_signs(dirty):
    for tensor, pad in zip(make(PADDED, dirty=dirty), padding(PADDED), strict=True):
        assert set(tensor[pad.expand(tensor.shape)].sign().tolist()) == {-1.0, 1.0}


@pytest.mark.parametrize("tensor", range(4))
@pytest.mark.parametrize("layout", LAYOUTS[:-1])
def test_a_layout_changes_no_value(tensor, layout):
    layouts = tuple(layout if place == tensor else "bhsd" for place in range(4))
    plain = make(dataclasses.replace(LONG, layouts=("bhsd",) * 4))
    laid = make(dataclasses.replace(LONG, layouts=layouts))
    assert all(same_bits(a, b) for a, b in zip(plain, laid, strict=True))


@pytest.mark.parametrize("tensor", range(4))
@pytest.mark.parametrize("inputs", INPUTS)
def test_expanded_gives_all_heads_the_same_memory(tensor, inputs):
    layouts = tuple("expanded" if place == tensor else "bhsd" for place in range(4))
    laid = make(dataclasses.replace(LONG, inputs=inputs, layouts=layouts))
    assert laid[tensor].stride(1) == 0
    assert all(x.stride(1) != 0 for place, x in enumerate(laid) if place != tensor)


def test_the_seed_changes_every_tensor():
    other = make(dataclasses.replace(LONG, seed=1))
    assert not any((a == b).all() for a, b in zip(make(LONG), other, strict=True))


def test_the_four_tensors_are_drawn_apart():
    square = Problem(M=8, N=8)
    made = make(square)
    for place, tensor in enumerate(made):
        assert not any(torch.equal(tensor, other) for other in made[place + 1 :])


@pytest.mark.parametrize("field", ["inputs", "dout", "dirty"])
def test_unknown_families_are_refused(field):
    with pytest.raises(ValueError, match=rf"^{field} is 'odd'; needs one of"):
        make(dataclasses.replace(PADDED, **{field: "odd"}))


def test_an_unknown_override_is_refused():
    with pytest.raises(ValueError, match=r"^dirty is 'odd'; needs one of"):
        make(PADDED, dirty="odd")


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_beyond_the_dtype_become_its_largest(dtype):
    smallest = 5e-324
    q = make(Problem(M=3, N=3, inputs="lse_high_6e4", dtype=dtype, sm_scale=smallest)).q
    assert (q[..., 0] == torch.finfo(q.dtype).max).all()


@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sm_scale", [5e-324, 1e308])
def test_extreme_scales_give_finite_values(inputs, dtype, sm_scale):
    problem = dataclasses.replace(LONG, inputs=inputs, dtype=dtype, sm_scale=sm_scale)
    assert all(tensor.isfinite().all() for tensor in make(problem))


@pytest.mark.parametrize("tensor", range(3))
@pytest.mark.parametrize("seed", range(8))
def test_outliers_has_an_outlier_in_every_tensor(tensor, seed):
    single = make(Problem(D=1, Dv=1, inputs="outliers", seed=seed))[tensor]
    assert single == 30
    assert (make(dataclasses.replace(LONG, inputs="outliers", seed=seed))[tensor] == 30).any()


@pytest.mark.parametrize(("inputs", "factor"), [("times8", 8), ("times40", 40)])
def test_scores_spread_by_the_factor(inputs, factor):
    spread = scores(dataclasses.replace(LONG, inputs=inputs)).std() / scores(LONG).std()
    # M D values determine the spread of q to a relative 1/sqrt(2 M D) = 0.8 %; the rest is room.
    assert 0.9 * factor < spread < 1.1 * factor


@pytest.mark.parametrize("inputs", SHIFTS)
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("D", [1, 3, 128])
@pytest.mark.parametrize("sm_scale", [0.02, None, 2.0])
def test_every_lse_is_near_the_shift(inputs, dtype, D, sm_scale):
    problem = Problem(M=17, N=33, D=D, dtype=dtype, inputs=inputs, sm_scale=sm_scale)
    lse = scores(problem).logsumexp(-1)
    # q and k of the constant channel are rounded once each; the other channels' scores have a
    # spread of at most 1, and their log-sum-exp over 33 keys adds log 33 and little more.
    rounding = 2 * torch.finfo(TORCH_DTYPES[dtype]).eps * abs(SHIFTS[inputs])
    assert ((lse - SHIFTS[inputs]).abs() < rounding + 2 * math.log(33)).all()


@given(problems(max_seqlen=24))
def test_the_last_visible_key_is_that_of_the_predicate(problem):
    got = last_visible(problem).tolist()
    for b in range(problem.B):
        want = [max(visible_keys(problem, b, m), default=-1) for m in range(problem.M)]
        assert got[b] == want


def needle_weight(problem, key):
    """The weight that each row (b, m) of every head has at a key of its own, nothing masked."""
    weights = scores(problem).softmax(-1)
    rows = [(b, m) for b in range(problem.B) for m in range(problem.M)]
    return {(b, m): weights[b, :, m, key(b, m)].min().item() for b, m in rows}


def spread_rows(problem, weights):
    """Rows with more than 0.9 of their weight at their key, per batch entry, by quarter."""
    dominated = [(b, m) for (b, m), weight in weights.items() if weight > 0.9]
    return {(b, 4 * m // problem.M) for b, m in dominated}


@pytest.mark.parametrize("mask", [Mask(causal=True), Mask(window_left=9, window_right=3)])
def test_needle_visible_fills_the_last_visible_key_all_along_the_sequence(mask):
    problem = dataclasses.replace(LONG, mask=mask, inputs="needle_visible")
    weights = needle_weight(problem, lambda b, m: max(visible_keys(problem, b, m)))
    assert len(spread_rows(problem, weights)) == 8


@pytest.mark.parametrize("mask", [Mask(causal=True), Mask(window_left=9, window_right=3)])
def test_needle_hidden_fills_the_first_hidden_key_all_along_the_sequence(mask):
    problem = dataclasses.replace(LONG, mask=mask, inputs="needle_hidden")
    last = problem.N - 1
    weights = needle_weight(problem, lambda b, m: min(max(visible_keys(problem, b, m)) + 1, last))
    assert len(spread_rows(problem, weights)) == 8


def test_needle_hidden_stays_on_the_last_visible_key_where_none_is_hidden():
    problem = dataclasses.replace(LONG, mask=Mask(), inputs="needle_hidden")
    weights = needle_weight(problem, lambda b, m: problem.N - 1)
    assert len(spread_rows(problem, weights)) == 8


def test_needle_hidden_never_aims_at_padding():
    mask = Mask(seqlens_k=(40, 67))
    problem = dataclasses.replace(LONG, mask=mask, inputs="needle_hidden")
    weights = needle_weight(problem, lambda b, m: mask.seqlens_k[b] - 1)
    assert len(spread_rows(problem, weights)) == 8


@pytest.mark.parametrize("inputs", ["needle_visible", "needle_hidden"])
@pytest.mark.parametrize("sizes", [{"D": 1}, {"M": 2}, {"M": 0}, {"N": 0}, {"N": 1}, {"B": 0}])
def test_needles_take_any_size(inputs, sizes):
    problem = dataclasses.replace(LONG, inputs=inputs, dtype="fp16", **sizes)
    assert all(tensor.isfinite().all() for tensor in make(problem))


@pytest.mark.parametrize("tensor", range(3))
def test_constant_has_one_value_a_tensor(tensor):
    assert make(dataclasses.replace(LONG, inputs="constant"))[tensor].unique().numel() == 1


def test_zero_k_is_zero():
    made = make(dataclasses.replace(LONG, inputs="zero_k"))
    assert not made.k.any()
    assert made.q.all()


def test_most_tiny_values_lie_between_1e_6_and_1e_4_in_fp16():
    v = make(dataclasses.replace(LONG, inputs="tiny", dtype="fp16")).v.double().abs()
    assert ((v > 1e-6) & (v < 1e-4)).double().mean() > 0.5
    assert v.max() < 1e-3


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize(
    ("family", "tensor"),
    [
        ({"inputs": "subnormal"}, "v"),
        ({"inputs": "tiny_k"}, "k"),
        ({"inputs": "tiny_q"}, "q"),
        ({"dout": "subnormal"}, "dout"),
    ],
)
def test_subnormal_values_are_subnormal(family, tensor, dtype):
    made = make(dataclasses.replace(LONG, dtype=dtype, **family))
    values = getattr(made, tensor).abs()
    assert (values < torch.finfo(values.dtype).tiny).all()
    assert (values != 0).double().mean() > 0.9
    others = [x for name, x in zip(TENSORS, made, strict=True) if name != tensor]
    assert all(x.double().std() > 0.9 for x in others)


def test_tiny_dout_is_about_1e_5():
    dout = make(dataclasses.replace(LONG, dout="tiny")).dout
    assert 5e-6 < dout.std() < 2e-5


@pytest.mark.parametrize(("family", "value"), [("zero", 0), ("constant", 1)])
def test_dout_of_one_value(family, value):
    assert (make(dataclasses.replace(LONG, dout=family)).dout == value).all()


@given(problems(dout="one_hot", dirty="zero"))
def test_one_hot_has_a_single_one_in_a_valid_row_of_each_head(problem):
    dout = make(problem).dout.double()
    rows, _ = problem.mask.lengths(problem.B, problem.M, problem.N)
    want = torch.tensor([float(length > 0) for length in rows]).view(-1, 1)
    assert (dout.sum((2, 3)) == want).all()
    assert (dout * (dout - 1) == 0).all()
