"""Claim K12: a backward in one pass, whose dq is summed by atomics."""

from __future__ import annotations

import pytest
import torch

from fa_verify.oracles.bounds import error_model
from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.outputs import Numerics
from fa_verify.oracles.problem import Problem
from fa_verify.oracles.reference import torch_reference
from fa_verify.properties.guarantees.compare import ratios
from fa_verify.properties.inputs.tensors import make
from tests.claims.launching import differentiate


@pytest.mark.parametrize(
    "mask", [Mask(), Mask(causal=True, seqlens_q=(50,))], ids=["full", "ragged"]
)
def test_k12_the_single_pass_has_the_gradients_of_two_passes(kernels, device, mask):
    """dk and dv are equal bitwise; dq, summed in another order, lies within its bound."""
    problem = Problem(H=4, Hk=2, M=70, N=90, D=24, Dv=16, dtype="bf16", mask=mask, device=device)
    inputs = make(problem)
    call = {"mask": mask, "sm_scale": problem.scale}
    two = differentiate(kernels, *inputs.tensors, **call)
    one = differentiate(kernels, *inputs.tensors, **call, deterministic=False)
    assert torch.equal(one.dk, two.dk)
    assert torch.equal(one.dv, two.dv)
    want = torch_reference.attention(*inputs, **call).dq
    bound = error_model.judge(*inputs, **call, in_dtype="bf16", numerics=Numerics()).bound.dq
    assert float(ratios(one.dq, want, bound).amax()) <= 1
