"""A problem that was made for one subject is fitted to the declarations of another."""

from __future__ import annotations

import dataclasses

import pytest

from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.masks.prefix_lm import PrefixLM
from fa_verify.oracles.problem import Problem
from fa_verify.properties.guarantees.claims import BY_NAME
from fa_verify.properties.kernels.fitting import fitted
from fa_verify.quick import entries, entries_for
from tests.unit.properties.kernels.test_supported import DECLARED, subject

FULL = Problem(
    B=2, H=4, Hk=2, M=35, N=20, D=5, Dv=3, dtype="fp64", config="16x16",
    mask=Mask(causal=True, window_left=3, seqlens_q=(35, 20), seqlens_k=(20, 0)),
    layouts=("bshd", "padded", "transposed", "strided"), dirty="nan", softcap=2.0,
    alibi="normal", bias="normal/hmn", dlse="normal", dout="zero", sm_scale=0.3,
)  # fmt: skip


@pytest.mark.parametrize("declared", DECLARED)
def test_every_entry_is_fitted_or_left_out(declared):
    made = subject(**DECLARED[declared])
    device = made.devices[0]
    found = [*entries_for(made, device)]
    assert all(made.excludes(x.problem) is None for x in found)
    # Sizes of 0, and problems that become equal, are left out.
    assert len(found) >= len(entries()) // 3


def test_only_a_cpu_is_asked_for_sequences_of_calls():
    """On a GPU, their kernels compile for longer than all others."""
    made = subject(devices=("cpu", "cuda"))
    asked = {
        device: {name for x in entries_for(made, device) for name in x.checks}
        for device in made.devices
    }
    assert asked["cpu"] - asked["cuda"] == {"sequence"}


def test_the_entries_name_known_checks_and_no_problem_twice():
    found = entries()
    assert {name for x in found for name in x.checks} <= {*BY_NAME}
    assert len({(x.problem, x.checks) for x in found}) == len(found)


def test_what_a_subject_supports_stays():
    made = subject(score_mods=("softcap", "alibi", "bias"), lse_grad=True, configs={"16x16": {}})
    assert fitted(made, FULL, "cpu") == FULL


@pytest.mark.parametrize(
    ("declared", "changed"),
    [
        ({"dtypes": ("bf16", "fp32")}, {"dtype": "fp32"}),
        ({"head_dims": (4, 64)}, {"D": 64, "Dv": 4}),
        ({"head_dims": (2,)}, {"D": 2, "Dv": 2}),
        ({"dv_ne_d": False}, {"Dv": 5}),
        ({"gqa": False}, {"Hk": 4}),
        ({"seqlen_multiple": 16}, {"M": 48, "N": 32}),
        ({"m_ne_n": False}, {"N": 35}),
        ({"layouts": ("bhsd", "padded")}, {"layouts": ("bhsd", "padded", "bhsd", "bhsd")}),
        ({"dirty": ("zero",)}, {"dirty": "zero"}),
        ({"lse_grad": False}, {"dlse": "none", "dout": "normal"}),
        ({"score_mods": ("alibi",)}, {"softcap": None, "bias": "none"}),
        ({"configs": {"wide": {}}}, {"config": "wide"}),
        ({"masks": ("causal", "padding")}, {
            "mask": Mask(causal=True, seqlens_q=(35, 20), seqlens_k=(20, 0))
        }),
        ({"masks": ("window",)}, {"mask": Mask(window_left=3)}),
        ({"masks": ()}, {"mask": Mask()}),
        ({"fixed_scale": "1/sqrt(D)"}, {"sm_scale": None}),
        ({"max_seqlen": 30}, {
            "M": 30, "mask": Mask(causal=True, window_left=3, seqlens_q=(30, 20), seqlens_k=(20, 0))
        }),
    ],
    ids=str,
)  # fmt: skip
def test_what_a_subject_does_not_support_is_replaced(declared, changed):
    everything = {"score_mods": ("softcap", "alibi", "bias"), "lse_grad": True}
    made = subject(**{**everything, "configs": {"16x16": {}}, **declared})
    assert fitted(made, FULL, "cpu") == dataclasses.replace(FULL, **changed)


def test_a_predicate_is_dropped_with_its_class():
    problem = Problem(M=20, N=20, mask=PrefixLM(prefix=5, window_left=7))
    assert fitted(subject(), problem, "cpu") == problem
    found = fitted(subject(masks=("window",)), problem, "cpu")
    assert found.mask == Mask(window_left=7)


def test_a_problem_without_a_counterpart_is_left_out():
    assert fitted(subject(zero_sizes=False), Problem(N=0), "cpu") is None
    assert fitted(subject(devices=("cuda",)), Problem(), "cpu") is None
