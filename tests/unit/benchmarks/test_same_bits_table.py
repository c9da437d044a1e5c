"""The table of kernels that have the same bits in parts of a problem."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.same_bits import KERNELS, table
from fa_verify.properties.kernels.vocabulary import SAME_BITS

ROOT = Path(__file__).parents[3]


def test_a_row_names_the_first_difference():
    found = dict.fromkeys(SAME_BITS, (True, "I1 holds in 3 comparisons, to B=2"))
    wrong = {**found, "chunks": (False, "I2 fails first at B=3"), "inference": (None, "no parts")}
    lines = table({"kernels": {"right": found, "wrong": wrong}})
    assert [line.split(" | ")[0].strip("| ") for line in lines[2:]] == ["right", "wrong"]
    assert "| holds | holds | holds | holds | holds | none up to B=2 |" in lines[2]
    assert "| holds | fails | holds | holds | - | I2 fails first at B=3 |" in lines[3]


def test_the_record_has_a_row_for_every_kernel():
    record = json.loads((ROOT / "results/cpu/same_bits.json").read_text(encoding="utf-8"))
    assert [*record["kernels"]] == [*KERNELS["cpu"]]
