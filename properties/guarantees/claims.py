"""The claims: one row for each check of a guarantee, with all that concerns it.

``verify``, ``fa-verify explain``, the baseline and the conformance tests choose their checks from
these rows; ``--fa-quick`` names some of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

from fa_verify.oracles.guarantee import (
    BACKWARD,
    BIAS,
    C1,
    C2,
    C3,
    C4,
    C5,
    C6,
    C7,
    EXACT,
    G1,
    G2,
    G3,
    G4,
    G5,
    G6,
    G7,
    G8,
    G9,
    G10,
    G12,
    G13,
    G14,
    G15,
    G16,
    I1,
    I2,
    I3,
    I4,
    I5,
    I6,
    IDENTITIES,
    LIMIT,
    Q1,
    RMS,
    S1,
    S2,
    T3,
    Guarantee,
)
from fa_verify.oracles.problem import Problem
from fa_verify.properties.guarantees import caches, merging, pooled, quantised, same_bits
from fa_verify.properties.guarantees.accuracy import accuracy, finite, logic
from fa_verify.properties.guarantees.added_gradients import bias_gradient, sink_gradient
from fa_verify.properties.guarantees.backward import backward
from fa_verify.properties.guarantees.bad_calls import bad_calls, bad_calls_of_caches
from fa_verify.properties.guarantees.cache_places import places
from fa_verify.properties.guarantees.cache_writing import codes_written
from fa_verify.properties.guarantees.closed_form import (
    counts,
    doubled_values,
    mask_read_back,
    permuted,
    unit_values,
)
from fa_verify.properties.guarantees.compare import Finding
from fa_verify.properties.guarantees.identities import identities
from fa_verify.properties.guarantees.invariance import (
    independence,
    layout,
    repeatable,
    sequence,
    state,
)
from fa_verify.properties.guarantees.limits import limits
from fa_verify.properties.guarantees.masking import dirty_padding, empty_rows, hidden_positions
from fa_verify.properties.guarantees.memory import (
    far_offsets,
    full_overwrite,
    gradient_sets,
    reads_in_bounds,
)
from fa_verify.properties.guarantees.statistics import bias, is_valid, rms
from fa_verify.properties.guarantees.streams import (
    beside_other_kernels,
    first_captured,
    on_a_side_stream,
    on_another_device,
    on_two_streams,
    replayed,
)
from fa_verify.properties.guarantees.ways import one_way
from fa_verify.properties.inputs.bias_families import grouped_biases
from fa_verify.properties.inputs.families import NO_ALIBI, NO_BIAS, NO_SINKS
from fa_verify.properties.kernels.refusals import RefusedError
from fa_verify.properties.running.trial import SubjectError, Trial

__all__ = [
    "BY_NAME", "CLAIMS", "Check", "Claim", "Drawn", "accuracy", "accuracy_of_all", "backward",
    "checks_of",
    "claims_of", "dirty_padding", "empty_rows", "far_offsets", "finite", "full_overwrite",
    "gradient_sets", "hidden_positions", "in_turn", "independence", "layout", "limits", "logic",
    "reads_in_bounds", "repeatable", "sequence", "standing_of", "state",
]  # fmt: skip

Check = Callable[[Any], list[Finding]]
Needs = Mapping[str, Any]
# The subject of a claim. ``verify`` asks "call" and "pooled". Elements, statistics and closed forms
# show faults that the bound misses. "added" are the gradients of a bias and of sinks, "calls" many
# calls in turn, "streams" those of CUDA, and "parts" give the bits of the whole. A kernel declares
# to refuse the calls of "refused".
Group = Literal[
    "call", "elements", "statistics", "closed forms", "pooled", "added", "calls", "streams",
    "parts", "refused",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True, eq=False)
class Drawn:
    """A conformance test that draws problems of attention for a claim, shard by shard.

    Args:
        words: The statement of the test, which names it.
        seed: The file and function that the seed of the draw begins with. Changing it changes every
            problem that the test draws.
        part: Text that follows the shard in the seed, for tests that differ in ``needs`` alone.
        needs: Properties of drawn problems: arguments of ``problems_of``. A function of the shard
            returns them where they depend on it.
        shards: The first shard, and the step to the next one.
        float64: Whether the shards are those of float64.
        larger: Whether the shards are those of larger head_dims.
        runs: How often the check runs a problem, by which the cost of a problem is divided.
        batched: Whether batches of problems are drawn.
        kernels: Combinations of the fields that select a kernel, on a GPU: 0 draws from all;
            "shared" are those that the tests of a shard share.
        choices: Further axes of these combinations.
        masked: Whether the test runs with the masks of --fa-mask too.
    """

    test: str
    part: str = ""
    needs: Needs | Callable[[Any], Needs] = field(default_factory=dict)
    shards: tuple[int, int] = (0, 1)
    float64: bool = False
    larger: bool = False
    runs: int = 1
    batched: bool = False
    kernels: int | Literal["shared"] = 0
    choices: Needs = field(default_factory=dict)
    masked: bool = False

    @property
    def words(self) -> str:
        """The claim of the test, "every_element_lies_within_the_derived_bound"."""
        return self.test.partition("::test_")[2]

    def of(self, shard: object) -> str:
        """Return the name of a shard, and of the part if there is one."""
        return f"{shard}-{self.part}" if self.part else str(shard)

    def needs_of(self, shard: Any) -> Needs:
        """Return what the problems of a shard have."""
        return self.needs(shard) if callable(self.needs) else self.needs


@dataclass(frozen=True, kw_only=True, eq=False)
class Claim:
    """A check of a guarantee.

    Args:
        guarantee: The guarantee.
        name: Name of the check in baselines, quick lists and regression files; empty is the key of
            the guarantee.
        check: Returns the findings of a trial.
        kind: The kind of the calls that it judges, a key of ``KINDS``.
        group: Its subject, one of ``Group``.
        needs: Properties of drawn calls, without which they do not ask for the guarantee: arguments
            of the kind's ``draw``.
        standing: Whether it runs on every call of its kind, beside the check that the call was
            drawn for. Such a check does not run the kernel.
        bounded: Whether it fails exactly where an output leaves its bound.
        promise: The guarantee by which a kernel promises it; without it, the claim is not asked.
        applies: Returns whether a problem of a baseline shows anything of the claim.
        drawn: The conformance tests that draw problems for it.
    """

    guarantee: Guarantee
    check: Check
    name: str = ""
    kind: str = "attention"
    group: Group = "call"
    needs: Needs = field(default_factory=dict)
    standing: bool = False
    bounded: bool = False
    promise: str = ""
    applies: Callable[[Problem], bool] = lambda problem: True
    drawn: tuple[Drawn, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", self.name or self.guarantee.key)


def _one_tile(shard: Any) -> Needs:
    """Leave the limit on cost to batch entries and heads: lengths of one tile."""
    return {"max_seqlen": shard.tile}


def _ordinary(shard: Any) -> Needs:
    """Return what the data of statistics has."""
    return {
        "scales": (None, shard.head_dims[0] ** -0.5), "inputs": "normal", "dout": "normal",
        "layouts": ("bhsd", "bshd", "padded"),
    }  # fmt: skip


def _drawn(test: str, **fields: Any) -> tuple[Drawn, ...]:
    return (Drawn(test=test, **fields),)


_MODS = ("softcap", "alibi", "bias", "sinks")
_ACCURACY = (
    Drawn(test="test_accuracy.py::test_every_element_lies_within_the_derived_bound", masked=True),
    Drawn(
        test="test_accuracy.py::test_batched_problems_lie_within_the_derived_bound",
        shards=(0, 3), batched=True, masked=True,
    ),
    Drawn(
        test="test_accuracy.py::test_larger_head_dims_lie_within_the_derived_bound", larger=True
    ),
    Drawn(
        test="test_logic.py::test_float64_lies_within_its_bound_for_every_family", float64=True,
        masked=True,
    ),
    *(
        Drawn(
            test="test_score_mods.py::test_modified_scores_lie_within_the_derived_bound", part=mod,
            shards=(2, 14), kernels="shared", needs={"score_mods": (mod,)},
        )
        for mod in _MODS
    ),
)  # fmt: skip
_LOGIC = (
    *(
        Drawn(
            test="test_logic.py::test_float64_agrees_with_the_oracle_to_rounding", part=family,
            float64=True, needs={"inputs": family}, masked=True,
        )
        for family in ("normal", "outliers", "needle_visible", "needle_hidden")
    ),
    *(
        Drawn(
            test="test_score_mods.py::test_modified_scores_have_the_logic_of_float64", part=mod,
            shards=(0, 5), float64=True, kernels="shared", needs={"score_mods": (mod,)},
        )
        for mod in _MODS
    ),
)  # fmt: skip
_FINITE = tuple(
    Drawn(
        test="test_accuracy.py::test_outputs_are_finite_however_far_the_logits_are_shifted",
        part=family, shards=(0, 6), needs={"inputs": family}, masked=True,
    )
    for family in (
        "lse_low_90", "lse_low_130", "lse_low_6e3", "lse_high_6e4", "lse_low_1e5", "lse_high_1e5"
    )
)  # fmt: skip
_PADDING = "test_rows_and_padding.py"
_DIRTY = (
    *(
        Drawn(
            test=f"{_PADDING}::test_dirty_padding_changes_nothing_and_gets_zero_gradients",
            part=dirty, shards=(2, 5), runs=2, needs={"padding": True, "dirty": dirty}, masked=True,
        )
        for dirty in ("nan", "inf", "max", "noise")
    ),
    *(
        Drawn(
            test=f"{_PADDING}::test_dirty_padding_of_one_tensor_changes_nothing", part=name,
            shards=(1, 9), runs=2, needs={"padding": True, "dirty": f"nan_{name}"}, masked=True,
        )
        for name in ("q", "k", "v", "dout")
    ),
)  # fmt: skip


def _closed_form(name: str) -> tuple[Drawn, ...]:
    """Return the test of a closed form, whose check replaces all values outside of padding."""
    return _drawn(
        "test_closed_form.py::test_closed_form_outputs_show_what_was_seen_and_summed", part=name,
        shards=(0, 8), runs=2, needs={"inputs": "normal", "dout": "normal"}, masked=True,
    )  # fmt: skip


# One of them only, as each combination of score modifications compiles another kernel.
_NO_OTHERS = {"softcaps": (None,), "alibis": (NO_ALIBI,)}
# The kernel of dbias has constants for the dtype of a bias and for the axes along which it varies.
# The other kernels have none for the axes, so that two shapes share them.
_SHAPES = {"biases": grouped_biases(shapes=2)}
_BIAS_ALONE = {"score_mods": ("bias",), **_NO_OTHERS, "sinks": (NO_SINKS,)}
_SINKS_ALONE = {"score_mods": ("sinks",), **_NO_OTHERS, "biases": (NO_BIAS,)}
# Some G12 problems of a baseline: elements 2**31 apart take gigabytes, and leave little room.
_SMALL = 48

_OF_ATTENTION = (
    Claim(
        guarantee=G1, check=accuracy, standing=True, bounded=True, drawn=_ACCURACY
    ),
    Claim(guarantee=G2, check=finite, drawn=_FINITE),
    Claim(
        guarantee=G3, check=empty_rows, needs={"empty_rows": True},
        applies=lambda x: x.mask.seqlens_q is not None,
        drawn=_drawn(
            "test_rows_and_padding.py::test_empty_rows_give_zero_output_and_take_no_part",
            shards=(1, 3), runs=2, needs={"empty_rows": True}, masked=True,
        ),
    ),
    Claim(
        guarantee=G4, check=dirty_padding, needs={"padding": True},
        applies=lambda x: x.mask.seqlens_k is not None, drawn=_DIRTY,
    ),
    Claim(
        guarantee=G5, check=hidden_positions, needs={"hidden": True},
        applies=lambda x: x.mask.right is not None,
        drawn=_drawn(
            "test_rows_and_padding.py::test_hidden_positions_add_exactly_nothing",
            shards=(0, 2), runs=3, needs={"hidden": True}, masked=True,
        ),
    ),
    Claim(
        guarantee=G6, check=full_overwrite,
        drawn=_drawn(
            "test_memory.py::test_every_element_is_written_and_nothing_outside",
            shards=(0, 3), runs=2, masked=True,
        ),
    ),
    Claim(
        guarantee=G7, check=reads_in_bounds,
        drawn=_drawn(
            "test_memory.py::test_nothing_outside_the_tensors_elements_is_read",
            shards=(2, 3), runs=2, masked=True,
            needs={"layouts": ("padded", "strided", "packed", "bshd")},
        ),
    ),
    Claim(
        guarantee=G8, check=layout,
        drawn=_drawn(
            "test_invariance.py::test_any_strides_give_what_contiguous_copies_give",
            shards=(1, 2), runs=4, masked=True,
        ),
    ),
    Claim(
        guarantee=G9, check=independence,
        drawn=_drawn(
            "test_invariance.py::test_batch_entries_and_heads_do_not_influence_each_other",
            shards=(0, 3), needs=_one_tile, masked=True,
        ),
    ),
    Claim(
        guarantee=G10, check=repeatable,
        drawn=_drawn(
            "test_invariance.py::test_the_same_inputs_give_the_same_bits_run_after_run",
            shards=(2, 4), runs=4, masked=True,
        ),
    ),
    Claim(
        guarantee=G12, check=far_offsets,
        # Elements lie 2**31 apart: short sequences keep the buffers small.
        needs={"max_seqlen": 32},
        applies=lambda x: x.dtype in ("fp16", "bf16") and max(x.M, x.N) <= _SMALL,
    ),
    Claim(
        guarantee=G13, check=state,
        drawn=_drawn(
            "test_invariance.py::test_calls_of_other_shapes_in_between_change_nothing",
            # The calls of another dtype in between compile kernels of their own.
            shards=(3, 6), runs=17, kernels=2, masked=True,
        ),
    ),
    Claim(
        guarantee=T3, check=logic, drawn=_LOGIC,
        applies=lambda x: x.dtype == "fp64",
    ),
    Claim(guarantee=BACKWARD, name="backward", check=backward, group="elements", standing=True),
    Claim(guarantee=LIMIT, name="limit", check=limits, group="elements", standing=True),
    Claim(
        guarantee=RMS, name="rms", check=rms, group="statistics", standing=True, applies=is_valid,
    ),
    Claim(
        guarantee=BIAS, name="bias", check=bias, group="statistics", standing=True,
        applies=is_valid,
    ),
    Claim(
        guarantee=IDENTITIES, name="identities", check=identities, group="statistics",
        applies=is_valid,
        # RMS and bias stand on these problems too.
        drawn=_drawn(
            "test_statistics.py::test_errors_are_those_of_independent_roundings",
            shards=(2, 5), needs=_ordinary,
        ),
    ),
    Claim(guarantee=EXACT, name="counts", check=counts, group="closed forms"),
    Claim(
        guarantee=EXACT, name="mask", check=mask_read_back, group="closed forms",
        drawn=_closed_form("mask"),
    ),
    Claim(
        guarantee=EXACT, name="ones", check=unit_values, group="closed forms",
        applies=lambda x: x.dtype in ("fp16", "bf16"),
        drawn=_closed_form("ones"),
    ),
    Claim(
        guarantee=EXACT, name="doubled", check=doubled_values, group="closed forms",
        drawn=_closed_form("doubled"),
    ),
    Claim(
        guarantee=EXACT, name="permuted", check=permuted, group="closed forms",
        drawn=_closed_form("permuted"),
    ),
    Claim(
        guarantee=G1, name="dbias", check=bias_gradient, group="added",
        needs={"score_mods": ("bias",)},
        drawn=(
            Drawn(
                test="test_score_mods.py::test_the_gradient_of_a_bias_lies_within_the_derived_bound",
                shards=(0, 13), runs=2, kernels=4, choices=_SHAPES, needs=_BIAS_ALONE,
            ),
            Drawn(
                test="test_score_mods.py::test_the_gradient_of_a_bias_has_the_logic_of_float64",
                shards=(1, 6), float64=True, runs=2, kernels=4, choices=_SHAPES,
                needs={"inputs": "normal", **_BIAS_ALONE},
            ),
        ),
    ),
    Claim(
        guarantee=G1, name="dsinks", check=sink_gradient, group="added",
        needs={"score_mods": ("sinks",)},
        drawn=_drawn(
            "test_score_mods.py::test_the_gradient_of_sinks_lies_within_the_derived_bound",
            shards=(0, 13), runs=2, kernels=5, needs=_SINKS_ALONE,
        ),
    ),
    Claim(
        guarantee=G16, check=one_way,
        drawn=_drawn(
            "test_invariance.py::test_every_way_of_making_a_call_gives_the_same",
            shards=(4, 5), runs=4, kernels=2, masked=True,
        ),
    ),
    Claim(
        guarantee=G14, check=bad_calls, group="refused",
        drawn=_drawn(
            "test_errors.py::test_the_bad_calls_that_are_declared_are_refused",
            shards=(6, 14), needs=_one_tile,
        ),
    ),
    Claim(guarantee=G13, name="sequence", check=sequence, group="calls"),
    Claim(guarantee=G6, name="sets", check=gradient_sets, group="calls"),
    Claim(guarantee=G15, name="replayed", check=replayed, group="streams"),
    Claim(guarantee=G15, name="first captured", check=first_captured, group="streams"),
    Claim(guarantee=G15, name="side stream", check=on_a_side_stream, group="streams"),
    Claim(guarantee=G15, name="two streams", check=on_two_streams, group="streams"),
    Claim(guarantee=G15, name="other kernels", check=beside_other_kernels, group="streams"),
    Claim(guarantee=G15, name="other device", check=on_another_device, group="streams"),
)  # fmt: skip


def _parts(guarantee: Guarantee, test: str, **fields: Any) -> Claim:
    """Return the claim that parts, or other forms, of a problem give the bits of the whole."""
    promise = "" if guarantee == I6 else guarantee.key
    return Claim(
        guarantee=guarantee, check=same_bits.CHECKS[guarantee.key],
        group="parts", promise=promise, drawn=_drawn(f"test_same_bits.py::{test}", **fields),
    )  # fmt: skip


_OF_PARTS = (
    _parts(
        I1, "test_an_entry_has_the_same_bits_beside_any_neighbours", shards=(0, 5), runs=5,
    ),
    _parts(
        I2, "test_queries_have_the_same_bits_in_any_chunks", shards=(1, 5), runs=4,
    ),
    _parts(
        I4, "test_slices_of_heads_have_the_same_bits",
        # Cases of their own have long keys.
        shards=(2, 5), needs=_one_tile,
    ),
    _parts(
        I5, "test_padded_packed_and_contiguous_sequences_have_the_same_bits",
        # A padded problem, and the packed one, compile kernels that other tests do not.
        shards=(3, 5), runs=4, kernels=3,
    ),
    _parts(
        I6, "test_the_forward_without_gradients_agrees_with_that_of_training",
        shards=(4, 5), runs=2,
    ),
)  # fmt: skip


def _pooled(guarantee: Guarantee, check: Check, test: str = "", **fields: Any) -> Claim:
    """Return a claim about pooled probabilities."""
    drawn = _drawn(f"test_pooled.py::{test}", **fields) if test else ()
    return Claim(
        guarantee=guarantee, name=f"pooled {guarantee.key}", check=check, group="pooled",
        drawn=drawn,
    )  # fmt: skip


_OF_POOLED = (
    _pooled(
        G1, pooled.accuracy,
        "test_every_pooled_probability_lies_within_the_derived_bound", shards=(13, 7), runs=4,
    ),
    _pooled(
        G4, pooled.dirty_padding,
        "test_dirty_padding_changes_no_pooled_probability", shards=(20, 22), runs=5,
        needs={"padding": True, "dirty": "nan"},
    ),
    _pooled(
        G5, pooled.hidden_positions,
        "test_hidden_keys_change_no_pooled_probability", shards=(5, 22), runs=5,
        needs={"hidden": True},
    ),
    _pooled(G6, pooled.full_overwrite),
    _pooled(G7, pooled.reads_in_bounds),
    _pooled(
        G8, pooled.layout,
        "test_any_strides_give_the_same_pooled_probabilities", shards=(6, 22), runs=5,
    ),
    _pooled(G9, pooled.independence),
    _pooled(G10, pooled.repeatable),
    _pooled(
        T3, pooled.logic,
        "test_pooled_probabilities_have_the_logic_of_float64", shards=(0, 6), float64=True, runs=4,
        needs={"inputs": "normal"},
    ),
)  # fmt: skip


def _merge(guarantee: Guarantee, name: str, check: Check, **fields: Any) -> Claim:
    return Claim(guarantee=guarantee, name=name, check=check, kind="merge", **fields)


def _cache(guarantee: Guarantee, name: str, check: Check, **fields: Any) -> Claim:
    return Claim(guarantee=guarantee, name=name, check=check, kind="cache", **fields)


_OF_MERGES = (
    _merge(S1, "accuracy", merging.accuracy, standing=True, bounded=True),
    _merge(S1, "grouping", merging.grouping),
    _merge(S1, "silent parts", merging.silent_parts),
    _merge(S1, "one part", merging.alone),
    _merge(S1, "storage", merging.storage),
    _merge(S1, "not hidden", merging.not_hidden),
    _merge(S1, "far apart", merging.far_apart),
    _merge(S2, "conventions", merging.conventions, needs={"hidden": 8}),
    _merge(G16, "ways", one_way),
    Claim(
        guarantee=S1, name="ring", check=merging.of_a_ring, kind="ring", standing=True,
        bounded=True,
    ),
)  # fmt: skip
_OF_CACHES = (
    _cache(G1, "accuracy", caches.accuracy, standing=True, bounded=True),
    _cache(G1, "many keys", caches.accuracy, needs={"many_keys": True}),
    # Low scores behind a window ask for G1 too, which stands on every call.
    _cache(G5, "hidden keys", caches.hidden_keys, needs={"hides": True}),
    _cache(C1, "pages", caches.pages),
    _cache(C1, "page sizes", caches.page_sizes),
    _cache(C2, "free rows", caches.free_rows),
    _cache(C3, "written", caches.written, standing=True),
    _cache(C3, "append", caches.append),
    _cache(C5, "nothing cached", caches.nothing),
    _cache(I1, "neighbours", caches.neighbours),
    _cache(I3, "decoding", caches.decoding),
    _cache(C4, "far pages", caches.far_pages),
    _cache(C6, "places", places),
    _cache(C7, "codes written", codes_written),
    _cache(G14, "bad calls", bad_calls_of_caches, group="refused"),
    _cache(G16, "ways", one_way),
)  # fmt: skip


def _quantised(guarantee: Guarantee, name: str, check: Check, **fields: Any) -> Claim:
    return Claim(guarantee=guarantee, name=name, check=check, kind="quantised", **fields)


_OF_CODES = (
    _quantised(G1, "accuracy", quantised.accuracy, standing=True, bounded=True),
    _quantised(G16, "ways", one_way),
    _quantised(Q1, "padded codes", quantised.padded_codes, needs={"padding": True}),
    _quantised(Q1, "hidden codes", quantised.hidden_codes, needs={"hidden": True}),
)

CLAIMS: tuple[Claim, ...] = (
    *_OF_ATTENTION, *_OF_PARTS, *_OF_POOLED, *_OF_MERGES, *_OF_CACHES, *_OF_CODES
)  # fmt: skip


def claims_of(*groups: Group, kind: str = "attention") -> dict[str, Claim]:
    """Return the claims of a kind by name: those of some groups, or of all."""
    return {x.name: x for x in CLAIMS if x.kind == kind and (not groups or x.group in groups)}


def checks_of(*groups: Group, kind: str = "attention") -> dict[str, Check]:
    """Return the checks of ``claims_of`` by name."""
    return {name: claim.check for name, claim in claims_of(*groups, kind=kind).items()}


@cache
def standing_of(kind: str) -> tuple[Claim, ...]:
    """Return the claims that stand on every call of a kind."""
    return tuple(claim for claim in CLAIMS if claim.kind == kind and claim.standing)


# Every check of attention by name.
BY_NAME: dict[str, Check] = checks_of()


def in_turn(checks: Mapping[str, Check], unchecked: dict[str, str]) -> Check:
    """Return a check that makes several checks, and goes on after an exception of the kernel.

    Args:
        checks: The checks, by name.
        unchecked: Receives the reason why a check was not made, by name.
    """

    def every(trial: Trial) -> list[Finding]:
        findings: list[Finding] = []
        for name, check in checks.items():
            try:
                raised = {x.raised.partition("\n")[0] for x in findings if x.raised}
                found = check(trial)
                findings += [x for x in found if x.raised.partition("\n")[0] not in raised]
            except (MemoryError, RefusedError) as reason:
                unchecked[name] = str(reason)
            except SubjectError as error:
                one = Finding.of_exception(error, trial.subject, trial.problem)
                findings += [one] * (one not in findings)
        return findings

    # The search for a cause looks for the one that fails.
    every.checks = checks  # type: ignore[attr-defined]
    return every


# G1 of out, lse and all gradients, those of a bias and of sinks too.
accuracy_of_all = in_turn(
    {"accuracy": accuracy, "dbias": bias_gradient, "dsinks": sink_gradient}, {}
)
