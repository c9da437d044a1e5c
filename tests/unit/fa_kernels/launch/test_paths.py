"""The paths that the project's own subject declares are those of the kernels that it launches."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

import fa_kernels
from fa_kernels.launch import hopper, portable
from fa_verify.adapters.ours import flash_attention
from fa_verify.oracles.masks.block_sparse import BlockSparse
from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.masks.prefix_lm import PrefixLM
from fa_verify.oracles.problem import Problem
from fa_verify.properties.inputs.tensors import make
from fa_verify.properties.kernels.subject import Subject
from fa_verify.properties.running.trial import run_subject
from tests.altered.emulation import emulate

SUBJECT = Subject.of(flash_attention, "ours")
CONFIGS = (
    "default", "default-one_pass", "default-packed", "default-one_pass-packed", "portable",
    "16x16-split3-packed", "split8",
)  # fmt: skip
FIELDS = {
    "D 16": {"D": 16, "Dv": 16},
    "D 64": {"D": 64, "Dv": 40},
    "D 128": {"D": 64, "Dv": 128},
    "fp32": {"D": 64, "Dv": 64, "dtype": "fp32"},
    "predicate": {"D": 64, "Dv": 64, "mask": PrefixLM(prefix=3)},
    "block mask": {"D": 64, "Dv": 64, "mask": BlockSparse(percent=60, seed=2)},
    "softcap": {"D": 64, "Dv": 64, "softcap": 2.0},
    "alibi": {"D": 64, "Dv": 64, "alibi": "normal"},
    "bias": {"D": 64, "Dv": 64, "bias": "normal/hn"},
}


def launched_paths(problem: Problem, monkeypatch) -> set[str]:
    """The paths of a problem, from the names and constants of the kernels that it launches."""
    found: set[str] = set()
    run = portable.run

    def recorded(kernel, grid, named, kinds=None):
        descriptors = [x for key, x in named.items() if key.endswith("_desc")]
        columns = max((x.block_shape[3] for x in descriptors), default=0)
        where = f"hopper-{columns}" if columns else "portable"
        # Every kernel on tiles reads K; of these, the forward writes out, and dbias_kernel dbias.
        if "k_desc" in named or ("k_ptr" in named and "dbias_ptr" not in named):
            if "out_ptr" not in named:
                found.add(f"{where} {'one-pass' if named.get('ONE_PASS') else 'two-pass'}")
            features = {
                "split": named.get("IS_SPLIT"), "packed": named["VARLEN"],
                "block map": named.get("PREDICATE"), "score mods": named.get("SCORE_MODS"),
            }  # fmt: skip
            found.update(f"{where} {feature}" for feature, has in features.items() if has)
        run(kernel, grid, named, kinds)

    for module in (portable, hopper):
        monkeypatch.setattr(module, "run", recorded)
    run_subject(SUBJECT, problem, make(problem))
    return found


@pytest.mark.parametrize("fields", FIELDS.values(), ids=FIELDS)
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("is_emulated", [False, True], ids=["as it is", "emulated"])
def test_declared_paths_are_those_of_the_launched_kernels(config, fields, is_emulated, monkeypatch):
    if torch.cuda.is_available() and is_emulated:
        pytest.skip("the emulation needs the interpreter")
    if is_emulated:
        emulate(fa_kernels, replace=monkeypatch.setattr)
    mask = fields.get("mask", Mask())
    if "packed" in config:
        if "bias" in fields:
            pytest.skip("packed sequences take no bias")
        mask = type(mask)(**{**vars(mask), "seqlens_q": (3,), "seqlens_k": (5,)})
    device = "cuda" if torch.cuda.is_available() else "cpu"
    problem = Problem(
        **{"dtype": "bf16", "M": 3, "N": 5, "config": config, "device": device}
        | fields | {"mask": mask}
    )  # fmt: skip
    declared = flash_attention.paths(problem)
    assert len(declared) == len(set(declared))
    assert set(declared) == launched_paths(problem, monkeypatch)
