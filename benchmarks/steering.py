"""The effect of ``hypothesis.target``: its worst error/bound, compared with as many random draws.

``python -m benchmarks.steering [--problems 200] [--seeds 3]``; one process per search.
"""

from __future__ import annotations

import argparse
import os
import statistics
from concurrent.futures import ProcessPoolExecutor
from itertools import product, repeat
from multiprocessing import get_context

from benchmarks.spread import spread

__all__ = ["worst_of"]

DTYPES = ("fp16", "bf16", "fp32")


def worst_of(dtype: str, seed: int, steer: bool, problems: int) -> dict[str, float]:
    """Returns the worst error/bound of each output over ``problems`` problems."""
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    # Set before torch and Triton are imported, because they read the environment.
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")
        from fa_verify.simulator.interpreter import repair

        repair.repair()
    from fa_verify.oracles.outputs import OUTPUTS
    from fa_verify.properties.guarantees import claims
    from fa_verify.properties.kernels.loading import load
    from fa_verify.properties.kernels.supported import problems_of
    from fa_verify.properties.running.tally import Tally
    from fa_verify.properties.search.search import Runner, attack, draws

    subject = load("fa_verify.adapters.ours:flash_attention")
    strategy = problems_of(
        subject, dtype=dtype, device=device, configs=("16x16",), max_seqlen=64, max_cost=12,
        head_dims=(16, 24, 32),
    )  # fmt: skip
    tally = Tally()
    attack(
        Runner(subject, tally), claims.accuracy, strategy,
        seed=f"{dtype}/{seed}", steer=steer, settings=draws(problems),
    )  # fmt: skip
    return {name: tally.worst[f"{name} {dtype}"][0] for name in OUTPUTS}


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.steering", description=__doc__)
    parser.add_argument("--problems", type=int, default=200, help="for each seed and each way")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="searches at a time")
    options = parser.parse_args()
    searches = list(product(DTYPES, range(options.seeds), (False, True)))
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        found = pool.map(worst_of, *zip(*searches, strict=True), repeat(options.problems))
        worst = dict(zip(searches, found, strict=True))
    print(f"{options.problems} problems, {options.seeds} seeds: median [range] of the worst")
    print("| dtype | output | random | steered | steered / random |")
    print("|---|---|---|---|---|")
    for dtype, name in product(DTYPES, worst[searches[0]]):
        plain, steered = (
            [worst[dtype, seed, steer][name] for seed in range(options.seeds)]
            for steer in (False, True)
        )
        ratio = statistics.median(steered) / statistics.median(plain)
        print(f"| {dtype} | {name} | {spread(plain)} | {spread(steered)} | {ratio:.2f} |")


if __name__ == "__main__":
    main()
