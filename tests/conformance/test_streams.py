"""G15: CUDA graphs, streams and other kernels change no result."""

from __future__ import annotations

import pytest

from fa_verify.oracles.guarantee import G15
from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.masks.prefix_lm import PrefixLM
from fa_verify.oracles.problem import Problem
from fa_verify.properties.guarantees.claims import checks_of

PROBLEMS = {
    "plain": {"M": 256, "N": 256},
    "causal": {"M": 256, "N": 256, "mask": Mask(causal=True)},
    "one pass": {"M": 256, "N": 256, "config": "default-one_pass"},
    "split keys": {"M": 3, "N": 1024, "config": "split8"},
    "lengths": {"B": 2, "M": 256, "N": 256, "mask": Mask(seqlens_q=(256, 70), seqlens_k=(9, 256))},
    "a predicate": {"M": 256, "N": 256, "mask": PrefixLM(prefix=40)},
    # 160 tiles: more than multiprocessors, so that programs share tiles and wait for sums.
    "many tiles": {"H": 32, "Hk": 32, "M": 640, "N": 640},
}
ASKED = (
    *(("replayed", name) for name in PROBLEMS),
    *(("side stream", name) for name in ("causal", "split keys", "a predicate", "many tiles")),
    *(("two streams", name) for name in ("causal", "a predicate", "many tiles")),
    ("other kernels", "one pass"),
    ("other kernels", "many tiles"),
    ("first captured", "a predicate"),
    ("other device", "many tiles"),
)


@pytest.mark.asks(G15)
@pytest.mark.parametrize(("check", "name"), ASKED, ids=lambda x: x.replace(" ", "_"))
def test_streams_and_graphs_change_no_result(check_one, subject, device, check, name):
    if device == "cpu":
        pytest.skip("a CPU has no streams and no CUDA graphs")
    if check in ("replayed", "first captured") and not subject.cuda_graphs:
        pytest.skip(f"{subject.name} declares cuda_graphs=False")
    dims = subject.head_dims or (64,)
    D = 64 if 64 in dims else dims[0]
    fields = {"H": 4, "Hk": 4, "D": D, "Dv": D, "dtype": subject.dtypes[0], "seed": 1}
    check_one(Problem(device=device, **(fields | PROBLEMS[name])), checks_of("streams")[check])
