"""Mutants that only a GPU kills, each with the problems that kill it.

In the interpreter these mutants give the same results or cannot run. It sums in one order, ignores
alignment, has no limit on grids and uses NumPy's integers and memory.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from typing import Any

from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.masks.prefix_lm import PrefixLM
from fa_verify.oracles.problem import Problem
from tests.mutation.catalogue.copies import PACKAGE, sources_of
from tests.mutation.catalogue.faults import FAULTS
from tests.mutation.catalogue.mutant import Edit, Mutant
from tests.mutation.judging.trials import Step
from tests.mutation.judging.verdict import asked, judged_kernels

__all__ = ["HARDWARE", "OnHardware"]

_LAUNCH = "fa_kernels/launch/portable.py"
_ARGUMENTS = "fa_kernels/launch/named_arguments.py"
_WIDE: dict[str, Any] = {"D": 64, "Dv": 64, "dtype": "bf16", "device": "cuda"}


@dataclass(frozen=True)
class OnHardware:
    """A mutant and the steps that can kill it."""

    mutant: Mutant
    steps: tuple[Step, ...]


def _step(*checks: str, **fields: Any) -> Step:
    return Step(Problem(**{"device": "cuda", **fields}), ("G1", "G2", *checks))


def _named(*parts: str) -> list[Mutant]:
    """Recorded faults whose names end in one of ``parts``."""
    return [fault for fault in FAULTS if fault.name.endswith(parts)]


_PLAIN_DELTA = Mutant(
    "delta: rows are summed by tl.sum, in an order that follows the layout of the loads",
    (
        Edit(
            "fa_kernels/kernels/portable/bwd_preprocess.py",
            "delta = _row_sums(out.to(ACC) * dout.to(ACC))",
            "delta = tl.sum(out.to(ACC) * dout.to(ACC), 1)",
        ),
    ),
)
_UNALIGNED = Mutant(
    "launch: tensors that start anywhere are loaded 16 bytes at a time",
    (Edit(_ARGUMENTS, "if x.data_ptr() % 16 or", "if x.data_ptr() % 2 or"),),
)
_UNPADDED = Mutant(
    "launch: head_dims below 16 are not padded to 16",
    (
        Edit(
            _ARGUMENTS,
            "return max(16, triton.next_power_of_2(head_dim))",
            "return triton.next_power_of_2(head_dim)",
        ),
    ),
)
_LAYOUTS = ("bhsd", "bhsd", "bhsd", "transposed")


_CACHE = "fa_kernels/runtime/device_cache.py"
_NO_WAIT = Edit(
    _CACHE,
    "torch.cuda.current_stream(device).synchronize()",
    "torch.cuda.current_stream(device)",
)
_PREDICATE: dict[str, Any] = {"M": 256, "N": 256, "mask": PrefixLM(prefix=40)}
# Faults of streams and graphs, with the check of ``STREAMS`` and the problem that show them.
_STREAMS: tuple[tuple[Mutant, str, dict[str, Any]], ...] = (
    (
        Mutant(
            "streams: tensors that a graph reads are dropped from the caches",
            (Edit(_CACHE, "_of_graphs[id(value)] = value", "_of_graphs[id(value)] = None"),),
        ),
        "replayed",
        {"M": 256, "N": 256},
    ),
    (
        Mutant("streams: another stream reads a block map before it is written", (_NO_WAIT,)),
        "two streams",
        _PREDICATE,
    ),
    (
        Mutant(
            "streams: a captured call caches a block map that is not written yet",
            (
                _NO_WAIT,
                Edit(
                    _CACHE,
                    "            if is_capturing():\n                raise",
                    "            if is_capturing() and most < 0:\n                raise",
                ),
            ),
        ),
        "first captured",
        _PREDICATE,
    ),
    (
        Mutant(
            "streams: kernels run on the default stream",
            (
                Edit(
                    "fa_kernels/runtime/launch_cache.py",
                    "given = code[(*grid, 1, 1)],",
                    "given = (lambda *of: code[(*grid, 1, 1)](*of, stream=0)),",
                ),
            ),
        ),
        "side stream",
        {"M": 256, "N": 256},
    ),
)


def _on_hopper(name: str, old: str, new: str, kernel: str = "forward") -> Mutant:
    return Mutant(f"hopper: {name}", (Edit(f"fa_kernels/kernels/hopper/{kernel}.py", old, new),))


def _behind(name: str, old: str, new: str) -> Mutant:
    return _on_hopper(f"backward, {name}", old, new, kernel="backward")


_PADDED = Mask(causal=True, seqlens_q=(300, 129), seqlens_k=(300, 131))
_OF_TWO_WINDOWS = Mask(window_left=140, window_right=3)
# Packed sequences; NaN follow the last key of the longest.
_NEXT: dict[str, Any] = {
    "B": 2, "M": 200, "N": 300, "mask": Mask(seqlens_q=(129, 200), seqlens_k=(131, 300)),
    "dirty": "nan", "config": "default-packed",
}  # fmt: skip
# Enough short sequences that the kernels enumerate the tiles of all sequences in one grid axis.
_IN_A_ROW: dict[str, Any] = _NEXT | {
    "B": 5, "mask": Mask(causal=True, seqlens_q=(3, 200, 0, 70, 1), seqlens_k=(10, 300, 20, 67, 5)),
}  # fmt: skip
# Rows of a tile whose maxima rise in different key tiles.
_RISING: dict[str, Any] = {
    "M": 200, "N": 500, "D": 128, "Dv": 128, "mask": Mask(causal=True), "inputs": "rising_max",
}  # fmt: skip
_HOPPER: tuple[tuple[Mutant, dict[str, Any]], ...] = (
    (
        _on_hopper("values of padding are not cleared", "(seqlen_k < N)", "(seqlen_k < 0)"),
        {"B": 2, "M": 300, "N": 300, "mask": _PADDED, "dirty": "nan"},
    ),
    (
        _on_hopper(
            "a row that has seen nothing subtracts -inf",
            'gl.where(m_new == -float("inf"), 0.0, m_new)',
            "m_new",
        ),
        {"M": 300, "N": 500, "mask": _OF_TWO_WINDOWS},
    ),
    (
        _on_hopper(
            "tiles at the window's far edge are whole",
            "is_edge(key_tile, tile.tiles)",
            "(key_tile >= tile.tiles.full_hi)",
        ),
        {"M": 300, "N": 500, "mask": _OF_TWO_WINDOWS},
    ),
    (
        _on_hopper(
            "tiles at the diagonal are whole",
            "is_edge(key_tile, tile.tiles)",
            "(key_tile < tile.tiles.full_lo)",
        ),
        {"M": 300, "N": 300, "mask": Mask(causal=True)},
    ),
    (
        _on_hopper(
            "sums are not rescaled",
            "acc = acc * gl.convert_layout(alpha, ROWS_OF_SUMS)[:, None]\n",
            "acc = acc * 1.0\n",
        ),
        {"M": 200, "N": 500, "inputs": "rising_max"},
    ),
    (
        _on_hopper(
            "sums are rescaled only where all rows have risen",
            "acc = acc * gl.convert_layout(alpha, ROWS_OF_SUMS)[:, None]\n",
            "acc = acc * gl.convert_layout("
            "gl.where(gl.max(alpha, 0) < 1.0, alpha, 1.0), ROWS_OF_SUMS)[:, None]\n",
        ),
        _RISING,
    ),
    (
        _on_hopper(
            "l is not rescaled", "state.l_i * alpha + gl.sum(p, 1)", "state.l_i + gl.sum(p, 1)"
        ),
        {"M": 200, "N": 500, "inputs": "rising_max"},
    ),
    (
        _on_hopper(
            "l is summed from what is rounded",
            "state.l_i * alpha + gl.sum(p, 1)",
            "state.l_i * alpha + gl.sum(p.to(DTYPE).to(gl.float32), 1)",
        ),
        {"M": 200, "N": 700},
    ),
    (
        _on_hopper("the heads of a group are those of the queries", "tile.h // call.G,", "tile.h,"),
        {"H": 4, "Hk": 2, "M": 200, "N": 300},
    ),
    (
        _on_hopper(
            "the second consumer has the rows of the first",
            "start_m = tile.start_m + consumer * WARPGROUP_ROWS\n    offs_m = start_m + "
            "gl.arange(0, WARPGROUP_ROWS, ROWS)\n    if HAS_SINKS",
            "start_m = tile.start_m\n    offs_m = start_m + "
            "gl.arange(0, WARPGROUP_ROWS, ROWS)\n    if HAS_SINKS",
        ),
        {"M": 200, "N": 300},
    ),
    (
        _on_hopper(
            "tiles begin where wide ones would",
            "(m_block * CONSUMERS - min(m_block, call.narrow))",
            "(m_block * CONSUMERS)",
        ),
        {"M": 300, "N": 300},
    ),
    (
        _on_hopper(
            "one turn is left out",
            "following = gl.num_programs(0) + gl.atomic_add",
            "following = gl.num_programs(0) + 1 + gl.atomic_add",
        ),
        {"B": 2, "H": 80, "Hk": 80, "M": 100, "N": 150},
    ),
    (_on_hopper("values of the next sequence are not cleared", "VARLEN | ", "False | "), _NEXT),
    (
        _on_hopper(
            "blocks of packed sequences begin at the tensor's first row",
            "coordinates = (0, h, offset + start, 0)",
            "coordinates = (0, h, start, 0)",
            "pipeline",
        ),
        _NEXT,
    ),
    (
        _on_hopper(
            "the keys of a sequence begin where its queries do",
            "call.G, key_tile * BLOCK_N, VARLEN",
            "call.G, key_tile * BLOCK_N + (tile.info.offset_q - tile.info.offset_k), VARLEN",
        ),
        _NEXT,
    ),
    (
        _on_hopper(
            "tiles in a row are counted in those of two consumers",
            "call.batch.total_q, BLOCK_M\n            )\n    consumers",
            "call.batch.total_q, 2 * WARPGROUP_ROWS\n            )\n    consumers",
        ),
        _IN_A_ROW,
    ),
)
_IN_ONE_PASS: dict[str, Any] = {"config": "default-one_pass"}
_DIRTY: dict[str, Any] = {"B": 2, "M": 300, "N": 300, "mask": _PADDED, "dirty": "nan"}
_HOPPER_BACKWARD: tuple[tuple[Mutant, dict[str, Any]], ...] = (
    (
        _behind("keys of the next sequence are not cleared", "VARLEN | ", "False | "),
        _NEXT | {"config": "default-one_pass-packed"},
    ),
    (
        _behind(
            "rows of a sequence's first head are those of the group's",
            "scratch_row(b, h_k * G, H,",
            "scratch_row(b, h_k, H,",
        ),
        _IN_A_ROW | {"H": 4, "Hk": 2},
    ),
    (
        _behind(
            "key tiles in a row are found by queries",
            "sequence_of_tile(n_block, seqlens_k_ptr,",
            "sequence_of_tile(n_block, seqlens_q_ptr,",
        ),
        _IN_A_ROW,
    ),
    (
        _behind(
            "keys of padding are not cleared", "(mask.seqlen_k < end_key)", "(mask.seqlen_k < 0)"
        ),
        _DIRTY | _IN_ONE_PASS,
    ),
    (
        _behind(
            "rows of dout without a key are not cleared",
            "_zero_dead(dout, lse2_row, step.start_m, step.start_m + BLOCK_M, mask)",
            "pass",
        ),
        _DIRTY,
    ),
    (
        _behind(
            "rows of q without a key are not cleared",
            "_zero_dead(q, lse2_row, begin, begin + BLOCK_M, mask)",
            "pass",
        ),
        _DIRTY,
    ),
    (
        _behind(
            "the first rows of q are not cleared",
            "_zero_dead(tile_at(shared.q_pipe, 0), shared.lse2_rows.index(0), begin, end, mask)\n",
            "pass\n",
        ),
        {"B": 2, "M": 100, "N": 100, "mask": Mask(seqlens_q=(60, 100)), "dirty": "nan"},
    ),
    (
        _behind(
            "p of hidden keys counts",
            "p = _only_visible(p, offs_m, offs_n, mask)",
            "offs_m += 0",
        ),
        {"M": 300, "N": 300, "mask": Mask(causal=True)},
    ),
    (
        _behind("dk is not scaled", "(state.dk * sm_scale).to(DTYPE)", "state.dk.to(DTYPE)"),
        {"M": 200, "N": 300},
    ),
    (
        _behind(
            "the heads of a group are its first",
            "tile.h_k * tile.G + g, start_m, VARLEN",
            "tile.h_k * tile.G, start_m, VARLEN",
        ),
        {"H": 4, "Hk": 2, "M": 200, "N": 300},
    ),
    (
        _behind(
            "lse and delta are those of a group's first head",
            "row = scratch.first_row + gl.cast(g, gl.int64) * scratch.M_padded + start_m\n",
            "row = scratch.first_row + start_m\n",
        ),
        {"H": 4, "Hk": 2, "M": 200, "N": 300},
    ),
    (
        _behind(
            "dq is added to a group's first head",
            "scratch.first_row + gl.cast(step.g, gl.int64) * scratch.M_padded + step.start_m\n",
            "scratch.first_row + step.start_m\n",
        ),
        {"H": 4, "Hk": 2, "M": 200, "N": 300, **_IN_ONE_PASS},
    ),
    (
        _behind(
            "dq has the keys of one consumer, twice",
            "shared.ds_tiles.index(buffer * 2 + each)",
            "shared.ds_tiles.index(buffer * 2 + half)",
        ),
        {"M": 200, "N": 300, **_IN_ONE_PASS},
    ),
    (
        _behind(
            "both consumers make the same rows of dq",
            "left = left.slice(half * 64, 64, 0)",
            "left = left.slice(0 * 64, 64, 0)",
        ),
        {"M": 200, "N": 300, **_IN_ONE_PASS},
    ),
    (
        _behind(
            "dq of a step is added to the rows of the next",
            "add_block(scratch.dq_ptr, row, BLOCK_D, half, dq)\n        #",
            "add_block(scratch.dq_ptr, scratch.first_row + gl.cast(step.g, gl.int64) * "
            "scratch.M_padded + step.start_m, BLOCK_D, half, dq)\n        #",
        ),
        {"M": 200, "N": 300, **_IN_ONE_PASS},
    ),
    (
        _behind("dq of no step is added", "if step.i > 0:\n", "if step.i >= 0:\n"),
        # More programs than run at once, so that a program finds the data of the one before it.
        {"H": 96, "Hk": 96, "M": 200, "N": 300, **_IN_ONE_PASS},
    ),
    (
        _behind(
            "dq of the last step is left out",
            "    add_block(dq_ptr, row, shared.k_tiles.shape[4], half, dq)\n",
            "",
        ),
        {"M": 200, "N": 300, **_IN_ONE_PASS},
    ),
    (
        _on_hopper(
            "backward, warps have blocks of dq in the order of rows",
            ".permute([3, 0, 2, 4, 1, 5])",
            ".permute([3, 2, 0, 4, 1, 5])",
            "pipeline",
        ),
        {"M": 200, "N": 300, **_IN_ONE_PASS},
    ),
    (
        Mutant(
            "dq of sums: blocks are read as rows",
            (
                Edit(
                    "fa_kernels/kernels/portable/dq_postprocess.py",
                    "    if IN_BLOCKS:\n",
                    "    if IN_BLOCKS and M < 0:\n",
                ),
            ),
        ),
        {"M": 200, "N": 300, **_IN_ONE_PASS},
    ),
    (
        _behind("delta is not subtracted", "ds = p * (dp - delta[None, :])", "ds = p * dp"),
        {"M": 200, "N": 300},
    ),
)
_HOPPER_DQ: tuple[tuple[Mutant, dict[str, Any]], ...] = (
    (
        _on_hopper(
            "dq, keys of padding are not cleared", "(seqlen_k < N)", "(seqlen_k < 0)", "dq"
        ),
        _DIRTY,
    ),
    (
        _on_hopper(
            "dq, rows without a key are written", "gl.where(live[:, None], dq * sm_scale, 0.0)",
            "dq * sm_scale", "dq",
        ),
        _DIRTY,
    ),
    (
        _on_hopper(
            "dq, dS of hidden keys counts",
            "ds = gl.where(visible(offs_m, offs_n, mask), ds, 0.0)",
            "offs_n += 0", "dq",
        ),
        {"M": 300, "N": 300, "mask": Mask(causal=True)},
    ),
    (
        _on_hopper(
            "dq, tiles at the window's far edge are whole", "is_edge(key_tile, tiles)",
            "(key_tile >= tiles.full_hi)", "dq",
        ),
        {"M": 300, "N": 500, "mask": _OF_TWO_WINDOWS},
    ),
    (
        _on_hopper(
            "dq, keys of the next sequence are not cleared", "VARLEN | ", "False | ", "dq"
        ),
        _NEXT,
    ),
    (
        _on_hopper("dq, it is not scaled", "dq * sm_scale, 0.0", "dq, 0.0", "dq"),
        {"M": 200, "N": 300},
    ),
    (
        _on_hopper("dq, delta is not subtracted", "p * (dp - delta[:, None])", "p * dp", "dq"),
        {"M": 200, "N": 300},
    ),
    (
        _on_hopper(
            "dq, the heads of a group are those of the queries", "tile.h // G,", "tile.h,", "dq"
        ),
        {"H": 4, "Hk": 2, "M": 200, "N": 300},
    ),
    (
        _on_hopper(
            "dq, the second consumer has the rows of the first",
            "start_m = tile.start_m + half * WARPGROUP_ROWS\n",
            "start_m = tile.start_m\n", "dq",
        ),
        {"M": 200, "N": 300},
    ),
    (
        _on_hopper(
            "dq, the second consumer has the lse and delta of the first",
            "offs_tile = half * WARPGROUP_ROWS", "offs_tile = 0 * WARPGROUP_ROWS", "dq",
        ),
        {"M": 200, "N": 300},
    ),
    (
        _on_hopper(
            "dq, lse and delta are those of the first head",
            "row = scratch_row(b, h, H,", "row = scratch_row(b, 0, H,", "dq",
        ),
        {"H": 4, "Hk": 2, "M": 200, "N": 300},
    ),
)  # fmt: skip

HARDWARE: tuple[OnHardware, ...] = (
    *(
        OnHardware(mutant, tuple(_step(**{**_WIDE, "dtype": dtype, **fields})
                                 for dtype in ("bf16", "fp16")))
        for mutant, fields in (*_HOPPER, *_HOPPER_BACKWARD, *_HOPPER_DQ)
    ),
    *(
        OnHardware(fault, (_step(M=64, N=64, D=32, Dv=32, dtype="fp32"),))
        for fault in _named("is in TF32")
    ),
    *(
        OnHardware(fault, (_step(B=2, H=32_769, Hk=32_769, M=3, N=5, dtype="fp16"),))
        for fault in _named("axis 1 of the grid")
    ),
    *(
        OnHardware(mutant, (_step(check, H=4, Hk=4, **_WIDE, **fields),))
        for mutant, check, fields in _STREAMS
    ),
    *(
        OnHardware(fault, (_step(M=64, N=40_000, **_WIDE),))
        for fault in _named("at most 256 others")
    ),
    OnHardware(
        _PLAIN_DELTA,
        tuple(_step("G8", M=96, N=64, layouts=_LAYOUTS, seed=seed, **_WIDE) for seed in range(4)),
    ),
    OnHardware(_UNPADDED, (_step(M=20, N=20, D=5, Dv=3, dtype="fp16"),)),
    OnHardware(
        _UNALIGNED,
        (_step("G8", M=96, N=64, layouts=("offset", "offset", "offset", "offset"), **_WIDE),),
    ),
)  # fmt: skip


def main(name: str) -> None:
    """Judges one mutant in this process and prints its verdict as JSON."""
    (chosen,) = (x for x in HARDWARE if x.mutant.name == name)
    questions = asked(chosen.steps)
    sources = sources_of(PACKAGE)
    verdict = judged_kernels(sources, chosen.mutant, chosen.steps, questions, units=-1)
    print(json.dumps(asdict(verdict)))


if __name__ == "__main__":
    main(sys.argv[1])
