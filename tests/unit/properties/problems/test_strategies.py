import math
import random
from functools import lru_cache

import pytest
from hypothesis import find, given

from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.problem import DTYPES, LAYOUTS, Problem
from fa_verify.properties.inputs.families import DOUT, INPUTS, PADDING_VALUES
from fa_verify.properties.problems.strategies import HEAD_DIMS, problems
from tests.unit.properties.problems.sampling import drawn

TILE = 16
DRAWS = 1000
FORCED = 400  # draws of a strategy with a forced feature
SHARE = 0.1  # least share of every interesting case
# The smallest problems with a row without a visible key.
EMPTY_ROWS = (
    Problem(N=0),
    Problem(M=2, mask=Mask(causal=True)),
    Problem(mask=Mask(seqlens_k=(0,))),
)


@lru_cache(maxsize=1)
def sample():
    return drawn(problems(tile=TILE), DRAWS)


def lengths(problem):
    return problem.mask.lengths(problem.B, problem.M, problem.N)


def first_keys(problem, b):
    """The first visible key of each valid row of batch entry b; None for an empty row."""
    rows, keys = lengths(problem)
    size = {"M": problem.M, "N": problem.N}
    for m in range(rows[b]):
        seen = (n for n in range(keys[b]) if problem.mask.is_visible(b, 0, m, n, **size))
        yield next(seen, None)


def has_empty_row(problem):
    return any(None in first_keys(problem, b) for b in range(problem.B))


def has_late_row(problem):
    """Whether a row's first visible key lies past the first key tile that its tile visits."""
    for b in range(problem.B):
        tiles = [None if n is None else n // TILE for n in first_keys(problem, b)]
        for start in range(0, len(tiles), TILE):
            visited = {tile for tile in tiles[start : start + TILE] if tile is not None}
            if len(visited) > 1:
                return True
    return False


def has_hidden(problem, b):
    rows, keys = lengths(problem)
    size = {"M": problem.M, "N": problem.N}
    return any(
        not problem.mask.is_visible(b, 0, m, n, **size)
        for m in range(rows[b])
        for n in range(keys[b])
    )


def has_length_zero(problem):
    rows, keys = lengths(problem)
    return 0 in (problem.M, problem.N, *rows, *keys)


def cost(problem):
    tiles = math.ceil(problem.M / TILE) * math.ceil(problem.N / TILE)
    return problem.B * problem.H * tiles


CASES = {
    "empty rows": has_empty_row,
    "a tail tile of rows": lambda p: p.B > 0 and p.M % TILE != 0,
    "a tail tile of keys": lambda p: p.B > 0 and p.N % TILE != 0,
    "a length of 0": has_length_zero,
    "M > N": lambda p: p.M > p.N,
    "M < N": lambda p: p.M < p.N,
    "a row whose first visited tile is hidden": has_late_row,
    "grouped heads": lambda p: p.G > 1,
    "several key heads": lambda p: p.Hk > 1,
    "padding keys": lambda p: any(length < p.N for length in lengths(p)[1]),
    "padding rows": lambda p: any(length < p.M for length in lengths(p)[0]),
    "hidden valid positions": lambda p: any(has_hidden(p, b) for b in range(p.B)),
    "a causal mask": lambda p: p.mask.causal,
    "a sliding causal window": lambda p: p.mask.causal and p.mask.window_left is not None,
    "a window with two sides": lambda p: None not in (p.mask.window_left, p.mask.window_right),
    "the default scale": lambda p: p.sm_scale is None,
    "another scale": lambda p: p.sm_scale not in (None, 1.0),
    "distinct B, H, Hk": lambda p: len({p.B, p.H, p.Hk}) == 3,
    "distinct sizes throughout": lambda p: len({p.B, p.H, p.Hk, p.M, p.N, p.D, p.Dv}) == 7,
    "D that is no power of two": lambda p: p.D & (p.D - 1) != 0,
    "D = Dv": lambda p: p.Dv == p.D,
    "normal inputs": lambda p: p.inputs == "normal",
    "normal dout": lambda p: p.dout == "normal",
    "four layouts": lambda p: len({*p.layouts}) == 4,
}


@pytest.mark.parametrize("case", CASES)
def test_every_interesting_case_is_drawn_often(case):
    hits = sum(map(CASES[case], sample()))
    assert hits >= SHARE * len(sample())


def test_at_least_half_of_the_problems_span_two_tiles_both_ways():
    several = sum(p.B > 0 and p.M > TILE and p.N > TILE for p in sample())
    assert several >= len(sample()) / 2


@pytest.mark.parametrize(
    ("field", "known"),
    [
        ("dtype", DTYPES),
        ("inputs", INPUTS),
        ("dout", DOUT),
        ("dirty", PADDING_VALUES),
        ("D", HEAD_DIMS),
        ("Dv", HEAD_DIMS),
        ("B", range(4)),
    ],
)
def test_every_value_of_a_field_is_drawn(field, known):
    assert {getattr(p, field) for p in sample()} == set(known)


@pytest.mark.parametrize("size", ["B", "M", "N"])
def test_a_size_of_zero_is_drawn(size):
    assert any(getattr(p, size) == 0 for p in sample())


@pytest.mark.parametrize(("size", "which"), [("M", 0), ("N", 1)])
def test_a_batch_entry_of_length_zero_is_drawn(size, which):
    assert any(0 in lengths(p)[which] and getattr(p, size) > 0 for p in sample())


@pytest.mark.parametrize("tensor", range(4))
def test_every_layout_of_a_tensor_is_drawn(tensor):
    assert {p.layouts[tensor] for p in sample()} == set(LAYOUTS)


@pytest.mark.parametrize("size", ["M", "N"])
def test_sizes_gather_around_tile_edges(size):
    near = sum(abs((getattr(p, size) + 1) % TILE - 1) <= 1 for p in sample())
    assert near > 2 * 3 / TILE * len(sample())


def test_the_seed_differs_from_problem_to_problem():
    assert len({p.seed for p in sample()}) > 0.5 * len(sample())


def test_problems_hardly_repeat():
    assert len(set(sample())) > 0.9 * len(sample())


def test_the_budget_holds():
    assert max(map(cost, sample())) <= 48


def test_the_budget_is_used():
    assert sum(map(cost, sample())) > 0.25 * 48 * len(sample())


def test_a_small_budget_holds():
    assert max(map(cost, drawn(problems(max_cost=4, tile=TILE), FORCED))) <= 4


@pytest.mark.parametrize("max_cost", [4, 48])
def test_an_empty_batch_is_rare(max_cost):
    # Otherwise a budget could be met by an empty batch.
    empty = sum(p.B == 0 for p in drawn(problems(max_cost=max_cost, tile=TILE), FORCED))
    assert empty < SHARE / 2 * FORCED


@lru_cache(maxsize=1)
def many_heads():
    """Problems with many heads, out of a sample that allows B H of up to 40."""
    found = drawn(problems(tile=TILE, max_cost=20, max_pairs=40), 2 * DRAWS)
    return [p for p in found if p.B > 3 or p.H > 4], len(found)


def test_few_problems_have_many_heads_and_those_have_one_tile():
    found, of = many_heads()
    assert 0.01 * of < len(found) < 0.08 * of
    assert all(0 < p.M <= TILE and 0 < p.N <= TILE and p.B * p.H <= 40 for p in found)
    assert max(p.B for p in found) <= 9


@pytest.mark.parametrize(
    "case",
    [
        lambda p: p.G > 4,
        lambda p: p.G > 8 and p.G & (p.G - 1),
        lambda p: p.H > 16,
        lambda p: p.H > 32,
        lambda p: p.H in (11, 13, 17, 19, 23, 29, 31, 37),
        lambda p: p.B > 4,
    ],
)
def test_many_heads_are_of_every_kind(case):
    assert any(map(case, many_heads()[0]))


def test_heads_are_not_grouped_where_they_may_not_be():
    found = drawn(problems(tile=TILE, max_pairs=40, gqa=False), FORCED)
    assert {p.G for p in found if p.B} == {1}
    assert max(p.H for p in found) > 4


def test_no_size_is_zero_where_none_may_be():
    found = drawn(problems(zero_sizes=False, tile=TILE), FORCED)
    assert all(0 not in (p.B, p.M, p.N) for p in found)


def test_padding_keys_alone_are_dirty():
    assert any(
        p.dirty != "zero" and set(lengths(p)[0]) == {p.M} and min(lengths(p)[1]) < p.N
        for p in sample()
        if p.B > 0
    )


def test_forced_padding_is_there():
    for problem in drawn(problems(padding=True), FORCED):
        assert lengths(problem)[1][0] < problem.N


def test_forced_hidden_positions_are_there():
    for problem in drawn(problems(hidden=True), FORCED):
        assert has_hidden(problem, 0)


def test_forced_empty_rows_are_there():
    for problem in drawn(problems(empty_rows=True), FORCED):
        assert None in first_keys(problem, 0)


@given(problems(empty_rows=True, masks=("full", "padding")))
def test_empty_rows_come_from_lengths_where_no_bound_is_allowed(problem):
    assert None in first_keys(problem, 0)
    assert problem.mask.right is None


@given(problems(empty_rows=True, masks=("full",)))
def test_empty_rows_come_from_no_keys_where_no_mask_is_allowed(problem):
    assert problem.N == 0 < problem.M


@given(problems(empty_rows=True, hidden=True, padding=True))
def test_all_three_can_be_forced(problem):
    assert lengths(problem)[1][0] < problem.N
    assert has_hidden(problem, 0)
    assert None in first_keys(problem, 0)


@given(problems(empty_rows=True, hidden=True, padding=True, m_ne_n=False))
def test_all_three_can_be_forced_where_m_equals_n(problem):
    assert problem.M == problem.N
    assert lengths(problem)[1][0] < problem.N
    assert has_hidden(problem, 0)
    assert None in first_keys(problem, 0)


@given(problems(hidden=True, padding=True, masks=("window", "padding")))
def test_windows_alone_can_be_forced_to_hide(problem):
    assert has_hidden(problem, 0)
    assert lengths(problem)[1][0] < problem.N


@given(
    problems(
        dtypes=("fp16", "bf16"),
        configs=("a", "b"),
        masks=("causal",),
        max_seqlen=96,
        seqlen_multiple=32,
        max_batch=2,
        max_heads=6,
        gqa=False,
        m_ne_n=False,
        dv_ne_d=False,
        head_dims=(64, 128),
        scales=(1.0, 2.0),
        layouts=("bshd", "offset"),
        device="cuda",
    )
)
def test_a_declared_domain_is_kept(problem):
    assert problem.dtype in ("fp16", "bf16")
    assert problem.config in ("a", "b")
    assert problem.mask == Mask(causal=True)
    assert problem.M == problem.N
    assert problem.M <= 96
    assert problem.M % 32 == 0
    assert problem.B <= 2
    assert problem.H == problem.Hk <= 6
    assert problem.Dv == problem.D
    assert problem.D in (64, 128)
    assert problem.sm_scale in (1.0, 2.0)
    assert set(problem.layouts) <= {"bshd", "offset"}
    assert problem.device == "cuda"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("dtype", "fp16"),
        ("config", "wide"),
        ("inputs", "times8"),
        ("dout", "one_hot"),
        ("dirty", "nan"),
    ],
)
def test_a_given_value_is_fixed(field, value):
    configs = ("default", "wide")
    found = drawn(problems(configs=configs, **{field: value}), 50)
    assert {getattr(p, field) for p in found} == {value}


@given(problems(masks=("padding",)))
def test_padding_alone_gives_lengths_alone(problem):
    assert problem.mask.right is None
    assert problem.mask.window_left is None
    assert (problem.mask.seqlens_q, problem.mask.seqlens_k) != (None, None)


@given(problems(max_seqlen=4096, tile=128, max_cost=20_000, max_heads=16))
def test_long_sequences_are_drawn_within_bounds(problem):
    assert problem.M <= 4096
    assert problem.N <= 4096
    assert problem.H <= 16


def minimal(condition, **domain):
    return find(problems(**domain), condition, random=random.Random(0))


@pytest.mark.parametrize(
    ("condition", "smallest"),
    [
        (lambda p: True, Problem()),
        (lambda p: p.M < p.N, Problem(N=2)),
        (lambda p: p.G > 1, Problem(H=2)),
        (lambda p: p.B > 1, Problem(B=2)),
        (lambda p: p.mask.causal, Problem(mask=Mask(causal=True))),
        (lambda p: p.mask.window_left is not None, Problem(mask=Mask(window_left=0))),
        (lambda p: p.sm_scale is not None, Problem(sm_scale=1.0)),
        (lambda p: p.D != 16, Problem(D=2, Dv=2)),
        (lambda p: p.M > TILE and p.N > TILE, Problem(M=17, N=18)),
        (lambda p: p.dtype == "bf16", Problem(dtype="bf16")),
    ],
)
def test_problems_shrink_to_the_smallest(condition, smallest):
    assert minimal(condition) == smallest


@pytest.mark.parametrize(
    ("condition", "smallest"),
    [
        (lambda p: p.M > p.N, (Problem(M=2), Problem(N=0))),
        (has_empty_row, EMPTY_ROWS),
        (lambda p: p.N > 0 and has_empty_row(p), EMPTY_ROWS[1:]),
    ],
)
def test_surplus_rows_shrink_to_one_surplus_row(condition, smallest):
    assert minimal(condition) in smallest


@pytest.mark.parametrize(
    ("forced", "smallest"),
    [
        ({"padding": True}, Problem(M=2, N=2, mask=Mask(seqlens_k=(1,)))),
        ({"hidden": True}, Problem(M=2, N=2, mask=Mask(causal=True))),
        ({"empty_rows": True}, Problem(M=3, N=2, mask=Mask(causal=True))),
    ],
)
def test_forced_problems_shrink_to_the_smallest(forced, smallest):
    assert minimal(lambda p: True, **forced) == smallest


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dtype": "fp8"}, "dtype is 'fp8'; needs None or one of"),
        ({"dtypes": ("fp8",)}, "dtypes is .*; needs some of"),
        ({"dtypes": ()}, "dtypes is .*; needs some of"),
        ({"config": "wide"}, "config is 'wide'; needs None or one of"),
        ({"configs": ()}, "configs is empty; needs at least one"),
        ({"masks": ("causal", "prefix")}, "masks is .*; needs some of"),
        ({"masks": ()}, "masks is .*; needs some of"),
        ({"max_seqlen": 0}, "max_seqlen is 0; needs at least 1"),
        ({"seqlen_multiple": 0}, "seqlen_multiple is 0; needs at least 1"),
        ({"tile": 0}, "tile is 0; needs at least 1"),
        ({"max_batch": 0}, "max_batch is 0; needs at least 1"),
        ({"max_heads": 0}, "max_heads is 0; needs at least 1"),
        ({"max_cost": 0}, "max_cost is 0; needs at least 1"),
        ({"max_pairs": -1}, "max_pairs is -1; needs at least 0"),
        ({"head_dims": ()}, "head_dims is empty; needs at least one"),
        ({"head_dims": (0, 16)}, "head_dims is .*; needs sizes of at least 1"),
        ({"scales": ()}, "scales is empty; needs at least one"),
        ({"layouts": ("sbhd",)}, "layouts is .*; needs some of"),
        ({"inputs": "odd"}, "inputs is 'odd'; needs None or one of"),
        ({"dout": "odd"}, "dout is 'odd'; needs None or one of"),
        ({"dirty": "odd"}, "dirty is 'odd'; needs None or one of"),
        ({"device": "tpu"}, "device is .*; needs some of"),
        ({"padding": True, "masks": ("causal",)}, "padding=True needs 'padding' among masks"),
        ({"hidden": True, "masks": ("full", "padding")}, "hidden=True needs 'causal' or 'window'"),
        (
            {"empty_rows": True, "m_ne_n": False, "masks": ("causal",)},
            "empty_rows=True with m_ne_n=False needs 'padding' among masks",
        ),
        ({"hidden": True, "max_seqlen": 1}, "no sequence lengths satisfy max_seqlen=1"),
        (
            {"empty_rows": True, "masks": ("causal",), "max_seqlen": 2},
            "no sequence lengths satisfy max_seqlen=2",
        ),
    ],
)
def test_impossible_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        problems(**arguments)
