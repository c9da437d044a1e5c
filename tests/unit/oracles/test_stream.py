import hashlib
import math
import warnings

import pytest
import torch

from fa_verify.oracles import stream

DEVICES = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
SAMPLES = 2**18
SPREADS = 6  # a right stream fails a test of one statistic with probability 2e-9


def digest(values):
    return hashlib.sha256(values.cpu().numpy().tobytes()).hexdigest()[:16]


def by_hand(seed, name_hash, index):
    """SplitMix64 on Python integers."""

    def mix(bits):
        bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        bits = (bits ^ bits >> 27) * 0x94D049BB133111EB % 2**64
        return bits ^ bits >> 31

    golden = 0x9E3779B97F4A7C15
    start = mix((name_hash * golden + seed * 0xD1342543DE82EF95) % 2**64)
    return mix((start + (index + 1) * golden) % 2**64)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("draw", "golden"),
    [
        (stream.integers, "0d55fedf5752a084"),
        (stream.uniform, "2108a9e03de48f28"),
        (stream.normal, "0c332333d62a556e"),
    ],
)
def test_values_have_the_golden_hash(draw, golden, device):
    assert digest(draw(7, "q", (3, 5, 7), device)) == golden


@pytest.mark.parametrize("seed", [0, 1, 2**31 - 1])
def test_integers_are_splitmix64(seed):
    crc_of_name_and_word = 0x9EB7D3B4  # CRC-32 of b"q/0"
    want = [by_hand(seed, crc_of_name_and_word, index) for index in range(9)]
    got = [value % 2**64 for value in stream.integers(seed, "q", (9,)).tolist()]
    assert got == want


@pytest.mark.parametrize("draw", [stream.integers, stream.uniform, stream.normal])
def test_values_do_not_depend_on_the_shape(draw):
    assert torch.equal(draw(1, "k", (2, 3, 4)).flatten(), draw(1, "k", (24,)))
    assert torch.equal(draw(1, "k", (100,))[:24], draw(1, "k", (24,)))


@pytest.mark.parametrize("draw", [stream.integers, stream.uniform, stream.normal])
def test_values_do_not_depend_on_what_was_drawn_before(draw):
    first = draw(1, "k", (8,))
    draw(2, "v", (5,))
    torch.manual_seed(99)
    assert torch.equal(draw(1, "k", (8,)), first)


@pytest.mark.parametrize("draw", [stream.integers, stream.uniform, stream.normal])
def test_seed_and_name_each_change_every_value(draw):
    base = draw(1, "k", (64,))
    assert not (base == draw(2, "k", (64,))).any()
    assert not (base == draw(1, "v", (64,))).any()


@pytest.mark.parametrize("draw", [stream.integers, stream.uniform, stream.normal])
def test_drawing_does_not_wait_for_the_gpu(draw):
    if not torch.cuda.is_available():
        pytest.skip("a CPU has nothing to wait for")
    draw((1, 2), "k", (64,), "cuda")
    try:
        with warnings.catch_warnings(action="ignore"):  # PyTorch calls the mode a prototype
            torch.cuda.set_sync_debug_mode("error")
        draw((1, 2), "k", (64,), "cuda")
    finally:
        torch._C._cuda_set_sync_debug_mode(0)


def test_draws_in_a_row_do_not_mix_their_starts():
    """The host's memory of one draw holds the next while a GPU may be yet to begin."""
    if not torch.cuda.is_available():
        pytest.skip("without a GPU, the starts are not copied")
    drawn = [stream.normal((seed, seed + 1), "k", (2, 3), "cuda") for seed in range(200)]
    again = [stream.normal((seed, seed + 1), "k", (2, 3)) for seed in range(200)]
    assert all(torch.equal(x.cpu(), y) for x, y in zip(drawn, again, strict=True))


def test_words_are_independent_streams():
    first = stream.integers(1, "k", (64,), word=0)
    assert not (first == stream.integers(1, "k", (64,), word=1)).any()


@pytest.mark.parametrize("shape", [(0,), (2, 0, 3)])
def test_empty_shapes_stay_empty(shape):
    assert stream.normal(0, "q", shape).shape == shape


def test_every_bit_of_the_integers_is_even():
    bits = stream.integers(3, "q", (SAMPLES,))
    ones = torch.stack([(bits >> place & 1).sum() for place in range(64)])
    deviation = (ones - SAMPLES / 2).abs().max()
    assert deviation < SPREADS * math.sqrt(SAMPLES / 4)


def test_uniform_lies_in_the_unit_interval():
    values = stream.uniform(3, "q", (SAMPLES,))
    assert values.min() >= 0
    assert values.max() < 1


def test_uniform_has_mean_one_half():
    values = stream.uniform(3, "q", (SAMPLES,))
    assert abs(values.mean() - 0.5) < SPREADS * math.sqrt(1 / 12 / SAMPLES)


def test_normal_has_mean_zero():
    assert abs(stream.normal(3, "q", (SAMPLES,)).mean()) < SPREADS / math.sqrt(SAMPLES)


def test_normal_has_variance_one():
    square = stream.normal(3, "q", (SAMPLES,)) ** 2
    # The variance of x^2 is E x^4 - 1, and E x^4 = 3 - 1.2 / 12 for the sum of twelve uniforms.
    assert abs(square.mean() - 1) < SPREADS * math.sqrt(1.9 / SAMPLES)


def test_normal_is_symmetric():
    values = stream.normal(3, "q", (SAMPLES,))
    # Both have expectation 0; E x^6 < 15, the value of the normal distribution.
    assert abs((values**3).mean()) < SPREADS * math.sqrt(15 / SAMPLES)
    assert abs(values.sign().mean()) < SPREADS / math.sqrt(SAMPLES)


def test_normal_is_bounded_by_six():
    assert stream.normal(3, "q", (SAMPLES,)).abs().max() <= 6


def test_neighbouring_values_are_uncorrelated():
    values = stream.normal(3, "q", (SAMPLES,))
    assert abs((values[1:] * values[:-1]).mean()) < SPREADS / math.sqrt(SAMPLES - 1)
