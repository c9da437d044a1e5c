"""What ``hypothesis.target`` adds: the worst error/bound it reaches, beside random draws as many.

``python -m benchmarks.steering [--problems 200] [--seeds 3]``; one process for each dtype.
"""

from __future__ import annotations

import argparse
import os
import statistics
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

__all__ = ["worst_of"]

DTYPES = ("fp16", "bf16", "fp32")

Worst = dict[tuple[bool, str], list[float]]


def worst_of(dtype: str, problems: int, seeds: int) -> Worst:
    """By (steered, output): the worst error/bound that each seed's draws reach."""
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    # What follows imports torch and Triton, which read the environment.
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")
        from properties import interpreter

        interpreter.repair()
    from oracles.outputs import OUTPUTS
    from properties import guarantees
    from properties.domain import problems_of
    from properties.ledger import Ledger
    from properties.loading import load
    from properties.search import Examiner, attack, draws

    subject = load("tests.subjects.ours:flash_attention")
    strategy = problems_of(
        subject, dtype=dtype, device=device, configs=("16x16",), max_seqlen=64, max_cost=12,
        head_dims=(16, 24, 32),
    )  # fmt: skip
    found: Worst = {(steer, name): [] for steer in (False, True) for name in OUTPUTS}
    for seed in range(seeds):
        for steer in (False, True):
            ledger = Ledger()
            attack(
                Examiner(subject, ledger), guarantees.accuracy, strategy,
                seed=f"{dtype}/{seed}", steer=steer, settings=draws(problems),
            )  # fmt: skip
            for name in OUTPUTS:
                found[steer, name].append(ledger.worst[f"{name} {dtype}"][0])
    return found


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.steering", description=__doc__)
    parser.add_argument("--problems", type=int, default=200, help="for each seed and each way")
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    with ProcessPoolExecutor(len(DTYPES), mp_context=get_context("spawn")) as pool:
        tables = [pool.submit(worst_of, dtype, options.problems, options.seeds) for dtype in DTYPES]
        print(f"{options.problems} problems, {options.seeds} seeds: median [range] of the worst")
        print("| dtype | output | random | steered | steered / random |")
        print("|---|---|---|---|---|")
        for dtype, table in zip(DTYPES, tables, strict=True):
            worst = table.result()
            for name in dict.fromkeys(name for _, name in worst):
                plain, steered = worst[False, name], worst[True, name]
                ratio = statistics.median(steered) / statistics.median(plain)
                print(f"| {dtype} | {name} | {_spread(plain)} | {_spread(steered)} | {ratio:.2f} |")


def _spread(values: list[float]) -> str:
    return f"{statistics.median(values):.3f} [{min(values):.3f}, {max(values):.3f}]"


if __name__ == "__main__":
    main()
