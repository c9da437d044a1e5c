import dataclasses
import json

import pytest
from hypothesis import given

from fa_verify.oracles.masks.codec import MASKS
from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.problem import VERSION, Problem
from fa_verify.properties.problems.strategies import problems


@given(problems())
def test_json_round_trips(problem):
    assert Problem.from_json(problem.to_json()) == problem


@given(problems())
def test_a_record_round_trips(problem):
    assert Problem.from_record(json.loads(problem.to_json())) == problem


@given(problems())
def test_json_is_one_line_of_plain_json(problem):
    text = problem.to_json()
    assert "\n" not in text
    assert json.loads(text)["version"] == VERSION


@given(problems())
def test_problems_are_values(problem):
    twin = dataclasses.replace(problem)
    assert hash(twin) == hash(problem)
    assert eval(repr(problem)) == problem


def test_every_field_survives_the_codec():
    fields = {
        "B": 2,
        "H": 6,
        "Hk": 3,
        "M": 5,
        "N": 7,
        "D": 24,
        "Dv": 40,
        "dtype": "bf16",
        "mask": Mask(causal=True, window_left=3, seqlens_q=(5, 0), seqlens_k=(7, 1)),
        "sm_scale": 0.1,
        "layouts": ("bshd", "padded", "offset", "expanded"),
        "inputs": "times8",
        "dout": "one_hot",
        "dlse": "normal",
        "dirty": "nan",
        "config": "wide",
        "seed": 2**40 + 1,
        "device": "cuda",
        "softcap": 30.0,
        "alibi": "halving",
        "bias": "normal/hn",
        "sinks": "ordinary",
    }
    # A batched problem has seeds instead of a seed: see test_batched.
    assert {*fields, "seeds"} == {field.name for field in dataclasses.fields(Problem)}
    problem = Problem(**fields)
    for name, value in fields.items():
        assert value != getattr(Problem(), name), name
        assert getattr(Problem.from_json(problem.to_json()), name) == value


@pytest.mark.parametrize("scale", [0.1, 1 / 3, 5e-324, 1.7976931348623157e308])
def test_a_scale_keeps_every_digit(scale):
    assert Problem.from_json(Problem(sm_scale=scale).to_json()).sm_scale == scale


def test_defaults_are_left_out():
    assert Problem().to_json() == f'{{"version":{VERSION}}}'


def test_a_mask_is_written_with_its_registered_name():
    record = json.loads(Problem(mask=Mask(causal=True)).to_json())
    assert record["mask"] == {"type": "Mask", "causal": True}
    assert all(MASKS[name].__name__ == name for name in MASKS)


def test_the_scale_defaults_to_the_inverse_root_of_the_true_head_dim():
    assert Problem(D=25).scale == 25**-0.5
    assert Problem(D=25, sm_scale=2).scale == 2.0


def test_the_group_size_is_query_heads_per_key_head():
    assert Problem(H=6, Hk=2).G == 3


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"B": 1.0}, "B is 1.0; needs an int"),
        ({"M": True}, "M is True; needs an int"),
        ({"seed": "1"}, "seed is '1'; needs an int"),
        ({"inputs": 3}, "inputs is 3; needs a str"),
        ({"dout": None}, "dout is None; needs a str"),
        ({"dlse": None}, "dlse is None; needs a str"),
        ({"dirty": 0}, "dirty is 0; needs a str"),
        ({"config": b"x"}, "config is b'x'; needs a str"),
        ({"sm_scale": "1"}, "sm_scale is '1'; needs None or a float"),
        ({"sm_scale": True}, "sm_scale is True; needs None or a float"),
        ({"softcap": "1"}, "softcap is '1'; needs None or a float"),
        ({"mask": "causal"}, "mask is 'causal'; needs a Mask"),
        ({"mask": None}, "mask is None; needs a Mask"),
    ],
)
def test_fields_of_the_wrong_type_are_refused(fields, message):
    with pytest.raises(TypeError, match=f"^{message}$"):
        Problem(**fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"B": -1}, "B is -1; needs to be in"),
        ({"M": -1}, "M is -1; needs to be in"),
        ({"N": -1}, "N is -1; needs to be in"),
        ({"H": 0}, "H is 0; needs to be in"),
        ({"Hk": 0}, "Hk is 0; needs to be in"),
        ({"D": 0}, "D is 0; needs to be in"),
        ({"Dv": 0}, "Dv is 0; needs to be in"),
        ({"seed": -1}, "seed is -1; needs to be in"),
        ({"H": 3, "Hk": 2}, "H is 3; needs a multiple of Hk = 2"),
        ({"B": 10**12}, "B is 1000000000000; needs at most"),
        ({"H": 2**20, "Hk": 1, "M": 2**20}, "q has 17,592,186,044,416 elements; needs at most"),
        ({"N": 2**40}, "k has 17,592,186,044,416 elements; needs at most"),
        ({"dtype": "fp8"}, "dtype is 'fp8'; needs one of"),
        ({"device": "tpu"}, "device is 'tpu'; needs one of"),
        ({"layouts": ("bhsd",) * 3}, "layouts is .*; needs four of"),
        ({"layouts": ("bhsd", "bhsd", "bhsd", "sbhd")}, "layouts is .*; needs four of"),
        ({"sm_scale": 0.0}, "sm_scale is 0.0; needs to be finite and > 0"),
        ({"sm_scale": -1.0}, "sm_scale is -1.0; needs to be finite and > 0"),
        ({"sm_scale": float("inf")}, "sm_scale is inf; needs to be finite and > 0"),
        ({"sm_scale": float("nan")}, "sm_scale is nan; needs to be finite and > 0"),
        ({"softcap": 0.0}, "softcap is 0.0; needs to be finite and > 0"),
        ({"mask": Mask(seqlens_q=(1, 1))}, "seqlens_q has 2 lengths"),
        ({"mask": Mask(seqlens_k=(2,))}, r"seqlens_k is \(2,\); needs lengths <= 1"),
    ],
)
def test_fields_out_of_range_are_refused(fields, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        Problem(**fields)


@pytest.mark.parametrize("size", ["B", "M", "N"])
def test_the_default_problem_is_valid(size):
    assert getattr(Problem(**{size: 0}), size) == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "problem is not JSON"),
        ("", "problem is not JSON"),
        ('{"version":' + "[" * 100_000, "problem is nested too deeply"),
        ("[]", r"problem is \[\]; needs a JSON object"),
        ("7", "problem is 7; needs a JSON object"),
        ("{}", "problem has version None; this suite reads version 1"),
        ('{"version":2}', "problem has version 2; this suite reads version 1"),
        ('{"version":1,"m":3}', r"problem has unknown fields \['m'\]; known are"),
        ('{"version":1,"mask":"causal"}', "mask is 'causal'; needs a JSON object"),
        ('{"version":1,"mask":{}}', "mask type None is not replayable; known are"),
        ('{"version":1,"mask":{"type":"os"}}', "mask type 'os' is not replayable; known are"),
        ('{"version":1,"mask":{"type":"Mask","left":1}}', "problem is malformed: .*'left'"),
        ('{"version":1,"mask":{"type":["Mask"]}}', "mask type \\['Mask'\\] is not replayable"),
        ('{"version":1,"mask":{"type":"Mask","window_left":-1}}', "window_left is -1"),
        ('{"version":1,"layouts":4}', "problem is malformed"),
        ('{"version":1,"B":"2"}', "problem is malformed: B is '2'; needs an int"),
        ('{"version":1,"sm_scale":NaN}', "sm_scale is nan"),
        ('{"version":1,"H":3,"Hk":2}', "H is 3"),
    ],
)
def test_json_that_is_not_a_problem_is_refused(text, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        Problem.from_json(text)
