"""The titles of the guarantees, and the guarantee that each conformance test checks."""

from __future__ import annotations

__all__ = ["ASKED", "GUARANTEES", "guarantee_of"]

# First word of a finding's guarantee to the rest of its title, in the order of the document.
GUARANTEES = {
    "G1": "accuracy",
    "G2": "finite",
    "G3": "empty rows",
    "G4": "dirty padding",
    "G5": "hidden positions",
    "G6": "full overwrite",
    "G7": "reads in bounds",
    "G8": "layout",
    "G9": "independence",
    "G10": "repeatable",
    "G11": "tiles",
    "G12": "range",
    "G13": "state",
    "G14": "errors",
    "T3": "logic in float64",
    "RMS": "of errors",
    "bias": "of errors",
    "backward": "given the forward",
    "identities": "of dk and dv",
    "exact": "exact closed forms",
    "attained": "bound attained",
    "forms": "of a mask agree",
    "exception": "computes or refuses",
}
# Name of a test to the guarantee that it checks; None if it checks all of them.
ASKED: dict[str, str | None] = {
    "test_every_element_lies_within_the_derived_bound": "G1",
    "test_batched_problems_lie_within_the_derived_bound": "G1",
    "test_outputs_are_finite_however_far_the_logits_are_shifted": "G2",
    "test_long_sequences_lie_within_the_derived_bound": "G1",
    "test_long_rows_count_their_keys": "exact",
    "test_errors_are_those_of_independent_roundings": "RMS",
    "test_errors_of_many_rows_are_those_of_independent_roundings": "RMS",
    "test_the_valid_arguments_are_accepted": "G14",
    "test_bad_arguments_are_refused_by_name": "G14",
    "test_an_unknown_configuration_is_refused_by_name": "G14",
    "test_any_strides_give_what_contiguous_copies_give": "G8",
    "test_batch_entries_and_heads_do_not_influence_each_other": "G9",
    "test_the_same_inputs_give_the_same_bits_run_after_run": "G10",
    "test_calls_of_other_shapes_in_between_change_nothing": "G13",
    "test_float64_agrees_with_the_oracle_to_rounding": "T3",
    "test_float64_lies_within_its_bound_for_every_family": "G1",
    "test_every_element_is_written_and_nothing_outside": "G6",
    "test_nothing_outside_the_tensors_elements_is_read": "G7",
    "test_closed_form_outputs_show_what_was_seen_and_summed": "exact",
    "test_elements_2_to_the_31_apart_are_read_where_they_are": "G12",
    "test_many_heads_and_entries_are_right": "G1",
    "test_more_heads_than_65535_are_right": "G12",
    "test_tensors_of_more_than_2_to_the_31_elements_are_right": "G12",
    "test_replay": None,
    "test_regression": None,
    "test_problem": None,
    "test_empty_rows_give_zero_output_and_take_no_part": "G3",
    "test_dirty_padding_changes_nothing_and_gets_zero_gradients": "G4",
    "test_dirty_padding_of_one_tensor_changes_nothing": "G4",
    "test_hidden_positions_add_exactly_nothing": "G5",
    "test_the_hundredth_call_gives_what_the_first_gave": "G13",
    "test_calls_that_differ_in_one_argument_do_not_depend_on_their_order": "G13",
    "test_every_tile_configuration_is_within_the_bound": "G11",
    "test_few_rows_against_long_keys_keep_every_guarantee": None,
    "test_modified_scores_lie_within_the_derived_bound": "G1",
    "test_modified_scores_have_the_logic_of_float64": "T3",
    "test_modified_scores_keep_every_guarantee": None,
    "test_the_gradient_of_a_bias_lies_within_the_derived_bound": "G1",
    "test_the_gradient_of_a_bias_has_the_logic_of_float64": "T3",
    "test_the_forms_of_a_mask_agree": "forms",
    "test_a_kernel_that_evaluates_a_mask_is_within_the_bound": "G1",
    "test_a_kernel_that_evaluates_a_mask_has_the_logic_of_float64": "T3",
    "test_every_pooled_probability_lies_within_the_derived_bound": "G1",
    "test_pooled_probabilities_have_the_logic_of_float64": "T3",
    "test_dirty_padding_changes_no_pooled_probability": "G4",
    "test_hidden_keys_change_no_pooled_probability": "G5",
    "test_any_strides_give_the_same_pooled_probabilities": "G8",
    "test_pooled_probabilities_keep_every_guarantee": None,
    "test_fp16_comes_close_to_the_bound_where_it_underflows": "attained",
}


def guarantee_of(finding: str) -> str:
    """Return a guarantee's key, "G1" for "G1 accuracy". ``GUARANTEES`` may lack it."""
    return finding.partition(" ")[0]
