"""Mechanical mutants of the harness, and the unit tests that have to kill them.

The harness judges kernels: oracles, bounds, generators, checks, the search and the gate. It has too
many mutants to run them all; ``sample`` takes one in ``every``.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import replace

from tests.mutation.catalogue.mutant import Mutant
from tests.mutation.catalogue.operators import mechanical
from tests.mutation.harness.operators import HARNESS_OPERATORS

__all__ = ["FOLDERS", "TESTS", "rate_interval", "sample"]

# Folders of the harness whose code affects a verdict.
FOLDERS = (
    "oracles",
    "properties",
    "fa_verify/simulator/interpreter",
    "fa_verify/reporting/gate",
)
_BOUNDS = "test_bounds_agree test_error_model"
_MASKS = "test_custom_masks test_mask"
# Files of tests/unit that have to kill a module's mutants, the quickest first.
TESTS: dict[str, str] = {
    "fa_verify/reporting/gate/comparison.py": "test_gate_problems test_gate",
    "fa_verify/reporting/gate/environment.py": "test_gate",
    "fa_verify/reporting/gate/plugin.py": "test_gate",
    "fa_verify/reporting/gate/problems.py": "test_gate_problems test_gate",
    "fa_verify/reporting/gate/timing.py": "test_speed_ratio test_gate",
    "fa_verify/verification.py": "test_verification test_repaired_fork test_statistics",
    "oracles/bounds/backward.py": f"{_BOUNDS} test_softcap test_lse_gradient test_chunks",
    "oracles/bounds/bias.py": "test_bias",
    "oracles/bounds/constants.py": _BOUNDS,
    "oracles/bounds/error_model.py": "test_error_model test_bounds_agree test_alibi",
    "oracles/bounds/forward.py": f"{_BOUNDS} test_softcap test_alibi",
    "oracles/bounds/given_forward.py": "test_given_forward",
    "oracles/bounds/merging.py": "test_merging test_merging_checks",
    "oracles/bounds/in_numpy/bias.py": "test_bias",
    "oracles/bounds/in_numpy/bound.py": "test_numpy_bound_by_hand test_bounds_agree test_softcap "
    "test_alibi test_numpy_bound test_sinks",
    "oracles/bounds/in_numpy/given_forward.py": "test_given_forward",
    "oracles/bounds/in_numpy/merging.py": "test_merging test_merging_checks",
    "oracles/bounds/in_numpy/pooled.py": "test_pooled_oracles",
    "oracles/bounds/in_numpy/quantised.py": "test_quantised_bound",
    "oracles/bounds/in_numpy/sinks.py": "test_sinks",
    "oracles/bounds/in_numpy/spread.py": "test_spread",
    "oracles/bounds/in_numpy/units.py": "test_numpy_bound_by_hand test_bounds_agree "
    "test_given_forward",
    "oracles/bounds/pooled.py": "test_pooled_oracles",
    "oracles/bounds/quantised.py": "test_quantised_bound test_quantised_checks",
    "oracles/bounds/replay.py": "test_given_forward test_backward_check",
    "oracles/bounds/ring.py": "test_merging_checks",
    "oracles/bounds/sinks.py": "test_sinks",
    "oracles/bounds/spread.py": "test_spread test_limits",
    "oracles/bounds/softcap.py": "test_softcap",
    "oracles/bounds/variance.py": "test_variance test_softcap test_alibi test_lse_gradient",
    "oracles/masks/block_sparse.py": f"{_MASKS} test_block_mask",
    "oracles/masks/codec.py": "test_problem test_custom_masks",
    "oracles/masks/dilated.py": _MASKS,
    "oracles/masks/document.py": f"{_MASKS} test_batched",
    "oracles/masks/mask.py": "test_mask test_custom_masks",
    "oracles/masks/neighbourhood.py": _MASKS,
    "oracles/masks/prefix_lm.py": _MASKS,
    "oracles/masks/sink_window.py": _MASKS,
    "oracles/masks/tree.py": _MASKS,
    "oracles/masks/triton_or_none.py": _MASKS,
    "oracles/masks/triton_predicates.py": f"{_MASKS} test_block_map",
    "oracles/call.py": "test_calls test_kinds",
    "oracles/calls/cache.py": "test_calls test_cache_oracles test_cache_checks",
    "oracles/calls/codec.py": "test_calls test_cache_checks",
    "oracles/calls/merge.py": "test_calls test_merging_checks",
    "oracles/calls/of_attention.py": "test_calls test_kinds",
    "oracles/calls/quantised.py": "test_calls test_kinds test_quantised_checks",
    "oracles/calls/ring.py": "test_calls test_merging_checks",
    "oracles/declaration.py": "test_declarations",
    "oracles/formats/element.py": "test_formats",
    "oracles/formats/in_numpy.py": "test_formats test_stored_caches",
    "oracles/formats/in_torch.py": "test_formats test_stored_caches",
    "oracles/formats/writing.py": "test_stored_caches test_declarations",
    "oracles/guarantee.py": "test_claims test_verification",
    "oracles/outputs.py": "test_outputs",
    "oracles/problem.py": "test_problem test_batched",
    "oracles/quantised_numerics.py": "test_quantised_bound test_quantised_checks",
    "oracles/reference/caches.py": "test_cache_oracles test_cache_checks",
    "oracles/reference/numpy_caches.py": "test_cache_oracles",
    "oracles/reference/numpy_stored_caches.py": "test_stored_caches",
    "oracles/reference/stored_caches.py": "test_stored_caches",
    "oracles/reference/merging.py": "test_merging test_merging_checks",
    "oracles/reference/numpy_reference.py": "test_numpy_reference test_softcap test_alibi "
    "test_numpy_bound test_sinks",
    "oracles/reference/pooled.py": "test_pooled_oracles",
    "oracles/reference/score_mods.py": "test_alibi test_bias",
    "oracles/reference/softcap.py": "test_softcap",
    "oracles/reference/torch_reference.py": "test_reference test_lse_gradient test_custom_masks "
    "test_softcap test_bias test_bounds_agree test_closed_form",
    "oracles/renamed.py": "test_problem test_custom_masks test_options",
    "oracles/stream.py": "test_stream",
    "properties/guarantees/accuracy.py": "test_guarantees",
    "properties/guarantees/added_gradients.py": "test_bias test_sinks",
    "properties/guarantees/backward.py": "test_backward_check",
    "properties/guarantees/closed_form.py": "test_closed_form",
    "properties/guarantees/claims.py": "test_guarantees test_claims",
    "properties/guarantees/identities.py": "test_identities test_softcap test_lse_gradient",
    "properties/guarantees/independence.py": "test_attention_close_limits",
    "properties/guarantees/invariance.py": "test_invariance test_guarantees",
    "properties/guarantees/limits.py": "test_limits",
    "properties/guarantees/masking.py": "test_masking test_guarantees test_lse_gradient",
    "properties/guarantees/memory.py": "test_memory_checks test_guarantees",
    "properties/guarantees/cache_places.py": "test_cache_checks",
    "properties/guarantees/cache_writing.py": "test_cache_checks",
    "properties/guarantees/caches.py": "test_cache_checks",
    "properties/guarantees/merging.py": "test_merging_checks",
    "properties/guarantees/pooled.py": "test_pooled_checks",
    "properties/guarantees/quantised.py": "test_quantised_checks",
    "properties/guarantees/same_bits.py": "test_same_bits",
    "properties/guarantees/statistics.py": "test_statistics test_bias test_alibi test_softcap",
    "properties/guarantees/streams.py": "test_streams",
    "properties/guarantees/ways.py": "test_ways",
    "properties/guarantees/bad_calls.py": "test_bad_calls",
    "properties/guarantees/agreement.py": "test_agreement",
    "properties/guarantees/compare.py": "test_compare test_agreement test_guarantees test_search",
    "properties/guarantees/heat_map.py": "test_heat_map",
    "properties/running/atomic_write.py": "test_corpus",
    "properties/running/coverage.py": "test_coverage",
    "properties/running/guard_bands.py": "test_guard_bands",
    "properties/running/large_memory.py": "test_large_memory",
    "properties/running/ratios.py": "test_compare test_agreement test_guarantees test_search",
    "properties/running/replay_line.py": "test_compare test_command",
    "properties/running/settings.py": "test_search",
    "properties/running/tally.py": "test_tally",
    "properties/running/taking_turns.py": "test_ways",
    "properties/running/trial.py": "test_trial test_lse_gradient test_search test_guarantees "
    "test_cache_checks",
    "properties/running/watchdog.py": "test_watchdog test_crashes",
    "properties/running/workers.py": "test_workers",
    "properties/inputs/alibi_families.py": "test_alibi",
    "properties/inputs/bad_calls.py": "test_bad_calls",
    "properties/inputs/bias_families.py": "test_bias",
    "properties/inputs/dlse_families.py": "test_lse_gradient",
    "properties/inputs/dout_families.py": "test_input_families test_families",
    "properties/inputs/families.py": "test_families",
    "properties/inputs/input_families.py": "test_input_families test_families",
    "properties/inputs/layouts.py": "test_layouts",
    "properties/inputs/padding_values.py": "test_padding_values test_batched",
    "properties/inputs/quantised.py": "test_quantised_checks test_quantised_bound",
    "properties/inputs/parts.py": "test_parts test_same_bits",
    "properties/inputs/sampling.py": "test_batched test_input_families",
    "properties/inputs/score_families.py": "test_score_families",
    "properties/inputs/caches.py": "test_cache_oracles test_cache_checks",
    "properties/inputs/stored.py": "test_stored_caches",
    "properties/inputs/sink_families.py": "test_sinks",
    "properties/inputs/states.py": "test_merging_checks",
    "properties/inputs/tensors.py": "test_padding_values test_families test_bias test_alibi "
    "test_lse_gradient",
    "properties/kinds/attention.py": "test_kinds",
    "properties/kinds/caches.py": "test_kinds test_cache_checks",
    "properties/kinds/quantised.py": "test_kinds test_quantised_checks",
    "properties/kinds/feature.py": "test_features test_kinds test_causes",
    "properties/kinds/features.py": "test_features test_causes",
    "properties/kinds/kind.py": "test_kinds",
    "properties/kinds/merges.py": "test_kinds test_merging_checks",
    "properties/kinds/reductions.py": "test_minimize test_kinds",
    "properties/kinds/registry.py": "test_kinds test_verification",
    "properties/kinds/rings.py": "test_kinds test_merging_checks",
    "properties/problems/batched.py": "test_batched test_bias",
    "properties/problems/covering.py": "test_covering",
    "properties/problems/drawn_masks.py": "test_strategies test_custom_masks",
    "properties/problems/kernel_classes.py": "test_kernel_classes",
    "properties/problems/mask_classes.py": "test_custom_masks test_mask_forms",
    "properties/problems/mask_examples.py": "test_mask_forms",
    "properties/kernels/supported_caches.py": "test_cache_oracles test_cache_checks",
    "properties/problems/merges.py": "test_merges",
    "properties/problems/seqlens.py": "test_strategies",
    "properties/problems/strategies.py": "test_strategies",
    "properties/regression/baseline.py": "test_baseline",
    "properties/regression/bootstrap.py": "test_bootstrap",
    "properties/regression/compiled_kernels.py": "test_compiled_kernels",
    "properties/regression/difference.py": "test_drift",
    "properties/regression/drift.py": "test_drift",
    "properties/regression/measurement.py": "test_measurement",
    "properties/regression/speed_ratio.py": "test_speed_ratio",
    "properties/search/causes.py": "test_causes",
    "properties/search/failure.py": "test_causes",
    "properties/search/corpus.py": "test_corpus",
    "properties/search/declaring.py": "test_causes",
    "properties/search/minimize.py": "test_minimize",
    "properties/search/sizing.py": "test_sizing",
    "properties/search/search.py": "test_search test_batched test_statistics",
    "properties/kernels/attention_kernel.py": "test_attention_kernel",
    "properties/kernels/declarations.py": "test_declarations test_supported test_subject",
    "properties/kernels/declared.py": "test_declarations test_assumptions",
    "properties/kernels/phrases.py": "test_assumptions",
    "properties/kernels/vocabulary.py": "test_subject test_supported",
    "properties/kernels/covering_caches.py": "test_covering_caches",
    "properties/kernels/covering_calls.py": "test_covering_problems",
    "properties/kernels/covering_merges.py": "test_covering_merges",
    "properties/kernels/covering_problems.py": "test_covering_problems",
    "properties/kernels/declared_values.py": "test_declared_values",
    "properties/kernels/fitting.py": "test_fitting",
    "properties/kernels/loading.py": "test_loading test_custom_masks",
    "properties/kernels/narrowing.py": "test_inference_kernels",
    "properties/kernels/packing.py": "test_inference_kernels test_ways",
    "properties/kernels/refusals.py": "test_search",
    "properties/kernels/subject.py": "test_subject test_pooled_checks test_assumptions "
    "test_cache_adapters test_cache_checks",
    "properties/kernels/supported.py": "test_supported",
    "properties/kernels/tutorial_call.py": "test_tutorial_call",
    "properties/kernels/ways.py": "test_ways",
    "properties/kernels/without_gpu.py": "test_without_gpu",
    "fa_verify/simulator/interpreter/addresses.py": "test_interpreter_addresses",
    "fa_verify/simulator/interpreter/block_pointers.py": "test_interpreter_block_pointers",
    "fa_verify/simulator/interpreter/dot_order.py": "test_dot_order",
    "fa_verify/simulator/interpreter/eight_bit_floats.py": "test_interpreter_eight_bits",
    "fa_verify/simulator/interpreter/functions.py": "test_interpreter_functions",
    "fa_verify/simulator/interpreter/launches.py": "test_interpreter",
    "fa_verify/simulator/interpreter/libdevice.py": "test_interpreter_libdevice",
    "fa_verify/simulator/interpreter/limits.py": "test_interpreter",
    "fa_verify/simulator/interpreter/operators.py": "test_interpreter_operators",
    "fa_verify/simulator/interpreter/repair.py": "test_interpreter test_interpreter_eight_bits",
    "fa_verify/simulator/interpreter/rounding.py": "test_interpreter",
    "fa_verify/simulator/interpreter/types.py": "test_interpreter_types test_interpreter",
    "fa_verify/simulator/interpreter/without_gpu.py": "test_interpreter_without_gpu",
}


def sample(sources: Mapping[str, str], every: int, seed: int) -> list[Mutant]:
    """A sample of the mechanical mutants of the harness, with the tests that judge each.

    Args:
        sources: Path from the root of the repository to text.
        every: One in so many mutants is sampled, at the same rate in every file.
        seed: Seed of the sample.
    """
    made = mechanical(sources, tuple(TESTS), HARNESS_OPERATORS, constants=True)
    first = random.Random(seed).randrange(every)
    return [
        replace(mutant, caught_by=tuple(TESTS[mutant.edits[0].file].split()))
        for mutant in made[first::every]
    ]


def rate_interval(successes: int, trials: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's confidence interval of a rate, 95 % by default."""
    if trials == 0:
        return 0.0, 1.0
    rate = successes / trials
    centre = (rate + z * z / (2 * trials)) / (1 + z * z / trials)
    half = (
        z * math.sqrt(rate * (1 - rate) / trials + z * z / (4 * trials**2)) / (1 + z * z / trials)
    )
    return centre - half, centre + half
