"""Where each kind of trouble that people have with graph files, partitions and answers is held by a test.

The table is for a reader who asks whether a kind is covered. The tests it names are looked up, so it stays true.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PARTITION = {
    "one-way edges reach METIS": ("test_assign", "test_directed_input_is_symmetrised"),
    "edges given several times": ("test_assign", "test_loops_duplicates_direction_and_order_change_nothing"),
    "a small graph in many parts": ("test_assign", "test_small_graphs_into_many_parts"),
    "as many parts as nodes, or nearly": ("test_assign", "test_every_part_gets_a_node"),
    "more parts than nodes": ("test_assign", "test_more_parts_than_nodes_are_refused"),
    "parts that METIS leaves empty": ("test_assign", "test_a_refill_is_said"),
    "parts that a file leaves empty": ("test_partition_cli", "test_one_empty_part_and_several_are_said"),
    "one part": ("test_assign", "test_one_part_needs_no_partitioner"),
    "METIS aborts, hangs or is ended": ("test_metis", "test_a_dying_child_becomes_one_error"),
    "METIS answers wrongly": ("test_metis", "test_an_answer_is_recounted"),
    "arrays that would crash METIS": ("test_adjacency", "test_arrays_that_would_crash_metis_are_refused"),
    "one node outweighs all others": ("test_assign", "test_one_heavy_node_cannot_empty_the_other_parts"),
    "weights of nodes of wrong shape or sign": ("test_assign", "test_node_weights_are_checked"),
    "weights of edges that are no integers": ("test_assign", "test_edge_weights_of_any_scale_give_the_same_partition"),
    "weights of edges that are zero or NaN": ("test_assign", "test_edge_weights_are_checked"),
    "weights that nobody uses": ("test_assign", "test_unused_weights_are_said"),
    "another partition on every run": ("test_assign", "test_random_follows_its_seed"),
    "part ids that are none": ("test_assign", "test_faults_in_a_text_file_are_named"),
    "a node owned twice or never": ("test_build", "test_nodes_owned_twice_and_never"),
    "a node or an edge is lost": ("test_pipeline", "test_every_node_edge_id_and_label_comes_through"),
    "which part stores a cut edge": ("test_build", "test_every_shard_is_the_one_made_by_hand"),
    "doubled or halved counts of edges": ("test_prepare", "test_the_summary_counts_what_a_count_by_hand_gives"),
    "cuts that are no better than chance": ("test_report", "test_a_clique_is_no_better_than_random"),
    "edges a row in place of a column": ("test_sources", "test_a_bad_plain_file_is_refused_by_name"),
    "a rank that owns nothing": ("test_exactness", "test_training_equals_one_process"),
}

DATA = {
    "the last nodes have no edge": ("test_tables", "test_features_by_row_keep_their_type"),
    "edges name nodes beyond the features": ("test_sources", "test_a_bad_plain_file_is_refused_by_name"),
    "directed data, loops and duplicates": ("test_load", "test_steps_come_in_their_order_and_are_said"),
    "features of any type": ("test_build", "test_features_keep_their_dtype"),
    "features that would blow up if dense": ("test_build", "test_features_are_sparse_below_a_tenth"),
    "features that are NaN": ("test_load", "test_values_that_are_no_numbers_are_filled_on_request"),
    "no features": ("test_load", "test_features_made_from_the_graph"),
    "masks of any shape": ("test_sources", "test_forms_of_masks"),
    "masks of floats": ("test_load", "test_masks_of_floats_are_masks"),
    "lists of nodes in place of masks": ("test_load", "test_lists_of_nodes_in_place_of_masks"),
    "a mask taken for a list": ("test_load", "test_a_list_of_nodes_that_is_a_mask_is_pointed_out"),
    "lists of the user's own ids": ("test_tables", "test_lists_of_nodes_name_the_graphs_own_ids"),
    "masks that overlap or cover nothing": ("test_prepare", "test_overlaps_and_empty_splits_are_warned_of"),
    "labels of any form": ("test_sources", "test_forms_of_labels"),
    "labels that count from 1": ("test_load", "test_labels_keep_the_users_names"),
    "codes for no label": ("test_load", "test_odd_labels_are_pointed_out"),
    "a class number far too large": (
        "test_load",
        "test_a_class_far_beyond_the_others_is_refused_before_anything_is_counted",
    ),
    "a label missing in a mask": ("test_tables", "test_labels_missing_in_a_mask_are_an_error_with_a_count"),
    "one 1 in each row": ("test_sources", "test_one_hot_rows_are_pointed_out"),
    "ids of text, with gaps, or huge": ("test_edge_list", "test_ids_are_kept_as_they_are"),
    "ids written as floats": ("test_edge_list", "test_ids_of_which_one_column_is_written_as_floats"),
    "negative ids": ("test_edge_list", "test_what_is_wrong_is_named_with_its_line"),
    "comments, blanks, headers, byte order marks": ("test_edge_list", "test_every_way_to_write_an_edge_list"),
    "a comment sign inside a name": ("test_edge_list", "test_a_comment_sign_inside_a_name_is_no_comment"),
    "a blank line among labels": ("test_tables", "test_a_blank_line_between_labels_by_row_shifts_no_node"),
    "ids that count from 1": ("test_load", "test_nodes_numbered_from_one"),
    "degrees at the border of a part": ("test_build", "test_every_shard_is_the_one_made_by_hand"),
    "files that look alike": ("test_load", "test_a_look_alike_is_told_what_it_is"),
    "pickles": ("test_sources", "test_a_pickle_that_runs_a_command_is_refused_by_name"),
    "sizes that a header invents": ("test_sources", "test_sizes_that_a_header_declares_are_checked_first"),
    "damaged files": ("test_hdf5_graph", "test_a_flipped_or_cut_file_never_gives_other_data"),
}

ANSWERS = {
    "rows in another order than the user's": ("test_inference", "test_predictions_are_in_order_on_any_number_of_ranks"),
    "ids that are not the user's": ("test_inference", "test_every_form_says_the_same_under_the_users_ids"),
    "classes that are not called as the user's": ("test_inference", "test_predictions_are_called_as_the_labels_are"),
    "trained elsewhere": ("test_inference", "test_another_graph_of_the_same_features_is_predicted"),
    "scores against classes of other names": ("test_inference", "test_classes_of_other_names_are_not_compared"),
    "errors after the ranks have started": (
        "test_checks",
        "test_what_cannot_be_done_is_refused_before_any_rank_starts",
    ),
    "the graph seen in training": ("test_inputs", "test_losses_are_those_of_the_subgraph_that_was_built_offline"),
    "features of edges": ("test_inputs", "test_a_layer_of_ones_own_with_edge_features_is_exact"),
    "features that are learned": (
        "test_inputs",
        "test_learned_features_are_saved_whole_and_serve_any_number_of_ranks",
    ),
    "weights of zero and below": ("test_inputs", "test_weights_of_zero_and_below_have_a_defined_result"),
    "examples that do not run": ("test_readme", "test_the_steps_from_python_run"),
}


@pytest.mark.parametrize("kinds", [PARTITION, DATA, ANSWERS], ids=["partition", "data", "answers"])
def test_every_kind_has_its_test(kinds: dict[str, tuple[str, str]]) -> None:
    for kind, (module, test) in kinds.items():
        tree = ast.parse((Path(__file__).parent / f"{module}.py").read_text())
        names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert test in names, f"{kind}: tests/{module}.py has no {test}"
