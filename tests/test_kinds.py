"""Where each kind of trouble that people have with graph files, partitions, ranks and answers is held by a test.

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

RANKS = {
    "losses that hang on the number of ranks": ("test_exactness", "test_training_equals_one_process"),
    "options in which they do": ("test_exactness", "test_options_that_change_the_model"),
    "graphs whose cut is not symmetric": ("test_exactness", "test_any_multigraph_in_any_parts"),
    "gradients of exchanged rows": ("test_exactness", "test_backward_is_the_transpose"),
    "a mean of means": ("test_metrics", "test_loss_over_weight_is_torchs_mean"),
    "a rank without training nodes": ("test_metrics", "test_a_rank_without_nodes_adds_nothing_and_has_a_gradient"),
    "a kernel that sums to zero": ("test_doctor", "test_a_kernel_that_gives_zeros_for_large_sums_is_named"),
    "more ranks than parts": ("test_merge", "test_more_ranks_than_parts_is_one_message"),
    "shards of two builds": ("test_train", "test_ranks_that_read_different_builds"),
    "halo lists that do not fit": ("test_train", "test_halo_lists_that_do_not_fit"),
    "a rank that sees no folder": ("test_train", "test_one_rank_that_does_not_see_the_folder"),
    "ranks started with other options": ("test_train", "test_ranks_that_were_started_differently"),
    "weights that differ between ranks": ("test_train", "test_weights_that_differ_are_refused"),
    "masks that hang on the rank": ("test_dropout", "test_mask_depends_on_the_ids_and_not_on_their_order_or_company"),
    "numbers that are not finite": ("test_train", "test_a_loss_that_is_not_finite_stops_all_ranks_and_keeps_the_best"),
    "memory that is not there": ("test_room", "test_a_run_that_does_not_fit_is_refused_with_numbers_and_remedies"),
    "parts that only some hosts have": ("test_merge", "test_parts_go_to_the_ranks_that_can_read_them"),
    "one process, with a launcher and without": ("test_launch", "test_one_rank_under_a_launcher_is_one_process"),
}

COLLECTIVES = {
    "ranks that send nothing, uneven counts": ("test_world", "test_exchange_brings_every_row_to_its_place"),
    "rows without columns": ("test_world", "test_rows_of_no_columns_do_not_travel"),
    "exchanges that are too large at once": ("test_world", "test_blocks_of_columns_equal_one_block"),
    "views that are no block of memory": ("test_world", "test_sums_of_views_leave_the_rest_alone"),
    "types of numbers": ("test_world", "test_exchange_brings_every_row_to_its_place"),
    "a rank that raises": ("test_launch", "test_an_error_on_one_rank_ends_all_with_its_message_once"),
    "a rank that dies": ("test_launch", "test_a_rank_that_dies_is_named_by_one_of_the_others"),
    "a rank that hangs": ("test_launch", "test_a_rank_that_does_not_answer_is_named_after_the_timeout"),
    "ranks that never come": ("test_launch", "test_ranks_that_do_not_come_are_waited_for_as_long_as_asked"),
    "a port in use, a name that does not resolve": ("test_faults", "test_every_fault"),
    "sockets open to others": ("test_launch", "test_ctrl_c_ends_ranks_that_meet_on_loopback_with_a_summary"),
    "threads that a launcher takes away": ("test_launch", "test_threads_are_the_cores_over_the_local_ranks"),
    "states that need unpickling": ("test_runlog", "test_state_is_tensors_and_plain_values"),
}

FILES = {
    "locks that a file system refuses": ("test_shards", "test_a_lock_on_a_shard_does_not_keep_readers_out"),
    "locks that the environment forces": (
        "test_doctor",
        "test_forced_locks_are_named_where_a_shard_cannot_be_read",
    ),
    "handles that stay open": ("test_shards", "test_reading_leaves_nothing_open"),
    "a writer that is killed": ("test_build", "test_a_killed_build_leaves_nothing_that_loads"),
    "a copy that was cut": ("test_faults", "test_a_shard_cut_short_anywhere_is_named"),
    "a flipped byte": ("test_faults", "test_a_flipped_byte_in_each_dataset_is_named"),
    "a state that is cut or flipped": ("test_faults", "test_a_state_that_is_cut_short_or_flipped_is_named"),
    "text that is not ASCII": ("test_shards", "test_a_shard_reads_with_plain_h5py"),
    "filters, chunks and links": ("test_shards", "test_damage_that_a_checksum_does_not_show_is_named"),
    "another version of the format": ("test_shards", "test_damage_that_a_checksum_does_not_show_is_named"),
    "the first version of the format": ("test_shards", "test_version_1_of_the_format_is_still_read"),
    "a disk that fills up": ("test_faults", "test_every_fault"),
    "a build replaced under its readers": ("test_faults", "test_a_build_is_replaced_under_readers"),
    "hostile files of any format": ("test_fuzz", "test_a_damaged_file_is_refused_or_read"),
}

HISTORIES = {
    "rows that are not where they should be": (
        "test_history",
        "test_what_was_pushed_is_pulled_by_index_and_has_its_age",
    ),
    "rows that were never filled": ("test_history", "test_a_store_is_never_read_before_it_is_filled"),
    "bytes that are not as stated": ("test_codec", "test_a_row_takes_the_bytes_that_were_stated"),
    "settings that should change nothing": (
        "test_policy",
        "test_trivial_settings_are_the_exact_run_bit_for_bit",
    ),
}

TABLES = {
    "partition": PARTITION,
    "data": DATA,
    "answers": ANSWERS,
    "ranks": RANKS,
    "collectives": COLLECTIVES,
    "files": FILES,
    "histories": HISTORIES,
}


@pytest.mark.parametrize("kinds", TABLES.values(), ids=TABLES)
def test_every_kind_has_its_test(kinds: dict[str, tuple[str, str]]) -> None:
    for kind, (module, test) in kinds.items():
        tree = ast.parse((Path(__file__).parent / f"{module}.py").read_text())
        names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert test in names, f"{kind}: tests/{module}.py has no {test}"
