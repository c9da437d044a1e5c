"""The two writings of appends and of gathered keys agree with each other and with the inputs."""

from __future__ import annotations

import hypothesis
import pytest
import torch

from fa_verify.oracles.calls.cache import CacheProblem
from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.problem import Problem
from fa_verify.oracles.reference import caches, numpy_caches
from fa_verify.properties.inputs.caches import make_cache, shared_inputs
from fa_verify.properties.kernels.subject import Subject
from fa_verify.properties.kernels.supported_caches import cached


def takes_all(q, k, v, *, mask, sm_scale):
    """A subject whose declarations exclude no cache; it is not called."""


takes_all.score_mods = ("softcap", "alibi")


@hypothesis.given(cached(Subject.of(takes_all, "takes_all"), "fp32", "cpu", ("default",)))
def test_both_writings_gather_the_keys_that_the_problem_has(problem):
    inputs = shared_inputs(problem)
    x = make_cache(problem, inputs)
    seqlens, N = torch.tensor(problem.seqlens), problem.attention.N
    for cache, new, want in ((x.k_cache, x.k, inputs.k), (x.v_cache, x.v, inputs.v)):
        kept, second = cache, cache.numpy()
        if new is not None:
            kept = caches.appended(cache, new, x.cache_seqlens, x.table)
            second = numpy_caches.appended(
                cache.numpy(), new.numpy(), x.cache_seqlens.numpy(), x.table.numpy()
            )
        assert kept.isnan().eq(torch.from_numpy(second).isnan()).all()
        assert kept.nan_to_num().eq(torch.from_numpy(second).nan_to_num()).all()
        found = caches.gathered(kept, seqlens, x.table, N)
        again = numpy_caches.gathered(second, seqlens.numpy(), x.table.numpy(), N)
        assert found.eq(torch.from_numpy(again)).all()
        for b, length in enumerate(problem.seqlens):
            assert found[b, :, :length].eq(want[b, :, :length]).all()
            assert found[b, :, length:].eq(0).all()


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"attention": Problem()}, "needs seqlens_k"),
        ({"spare": -1}, "spare is -1"),
        ({"new": 2}, "new is 2; needs at most"),
        ({"shared": 1}, "shared is 1; needs pages"),
        ({"shared": 1, "page_size": 2}, "shared is 1; needs pages"),
        ({"stored": "fp8"}, "stored is 'fp8'; needs one of"),
        ({"stored": "int8", "scales": "row"}, "scales is 'row'; needs one of"),
        ({"scales": "head"}, "scales is 'head'; needs 'tensor' without codes"),
        ({"divides": True}, "scales is 'tensor'; needs 'tensor' without codes"),
        ({"stored": "int8", "scales": "page"}, "scales is 'page'; needs pages"),
        ({"stored": "int8", "scales": "page", "page_size": 2, "new": 1}, "needs pages, and no new"),
        (
            {"stored": "int8", "scales": "token_head", "divides": True, "new": 1},
            "needs scales that multiply",
        ),
    ],
)
def test_contradictions_are_refused_by_name(fields, says):
    with pytest.raises(ValueError, match=says):
        CacheProblem(**fields)


def test_lengths_before_the_call_lack_the_new_keys():
    problem = CacheProblem(attention=Problem(B=2, N=5, mask=Mask(seqlens_k=(3, 5))), new=2)
    assert (problem.seqlens, problem.before) == ((3, 5), (1, 3))
