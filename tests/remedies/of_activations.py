"""Remedies for activations and logits, and the tests of other folders that execute them."""

from __future__ import annotations

OF_ACTIVATIONS: dict[tuple[str, str], str] = {
    ("offload/config.py", "activations='auto', 'host' or 'nvme', or leave it out"): (
        "tests/parity/test_packed_activations.py::test_policies_that_move_nothing_are_refused"
    ),
    ("offload/blueprints.py", "moved; pass nvme= (a directory), or leave it out"): (
        "tests/parity/test_packed_activations.py::test_formats_are_checked"
    ),
    ("offload/config.py", "where they are; pass activations='host' or 'nvme'"): (
        "tests/parity/test_packed_activations.py::test_formats_are_checked"
    ),
    ("offload/ranks/sharding.py", "one inside of DistributedDataParallel; leave it out"): (
        "tests/ranks/test_drop_in.py::test_on_two_ranks"
    ),
    ("offload/grads/gradients.py", "zero_grad(), and repeat all micro-batches of this step"): (
        "tests/robust/test_make_room.py::test_lost_sums_of_earlier_micro_steps_are_an_error"
    ),
    ("offload/ranks/spread_optimizers.py", "use fewer tokens, or activation checkpointing"): (
        "tests/ranks/test_drop_in.py::test_on_two_ranks"
    ),
    ("offload/activations/attention.py", "make its forward the same each time, or pass"): (
        "tests/parity/test_kept_attention.py::test_a_forward_that_differs_is_an_error"
    ),
    ("offload/activations/tiles.py", "so it cannot run in tiles; leave it out"): (
        "tests/parity/test_tiled_layers.py::test_modules_that_are_no_feed_forward_layers_are_refused"
    ),
    ("offload/activations/tiles.py", "so it cannot run in tiles; leave it out of tile"): (
        "tests/parity/test_tiled_layers.py::test_a_layer_that_mixes_tokens_is_refused"
    ),
    ("offload/activations/tiles.py", "change it after backward, or leave it out of tile"): (
        "tests/parity/test_tiled_layers.py::test_state_that_changes_before_backward_is_an_error"
    ),
    ("offload/activations/tiles.py", "backward before step() and before such a change"): (
        "tests/parity/test_tiled_layers.py::test_weights_changed_between_forward_and_backward_are_an_error"
    ),
    ("offload/planning/fitting.py", "pass tile='auto', use fewer tokens, or smaller units"): (
        "tests/parity/test_tiles.py::test_auto_tiles_if_tokens_fit_only_then"
    ),
    ("offload/logits/deferred.py", "change a clone(), or leave loss out"): (
        "tests/logits/test_uses.py::test_a_function_returns_logits_that_are_changed_in_place"
    ),
    ("offload/logits/deferred.py", "leave loss out to watch it"): (
        "tests/logits/test_uses.py::test_what_cannot_be_seen_is_refused"
    ),
    ("offload/logits/heads.py", "layer from its hidden states to its vocabulary; leave loss out"): (
        "tests/parity/test_chunked_loss.py::test_what_has_no_head_is_refused_before_anything_changes"
    ),
    ("offload/logits/heads.py", "or leave adapters away from the head"): (
        "tests/logits/test_uses.py::test_where_the_head_is"
    ),
    ("offload/logits/rows.py", "use logits before step(), or leave loss out"): (
        "tests/parity/test_chunked_loss.py::test_logits_of_an_earlier_step_are_refused"
    ),
    ("offload/planning/fitting.py", "pass loss='chunked', or use fewer tokens"): (
        "tests/parity/test_chunked_loss.py::test_auto_follows_the_plan"
    ),
    ("offload/planning/fitting.py", "which loss='chunked' avoids: pass it, or"): (
        "tests/parity/test_chunked_loss.py::test_plans_name_the_logits"
    ),
    ("offload/activations/recompute.py", "set model.config.use_cache = False"): (
        "tests/parity/test_activations.py::test_a_cache_is_not_filled_twice"
    ),
    ("offload/logits/rows.py", "no second derivatives (create_graph=True); leave loss out"): (
        "tests/logits/test_uses.py::test_second_derivatives_are_refused"
    ),
    ("offload/activations/offloader.py", "pass loss='chunked', or raise %s_memory"): (
        "tests/parity/test_large_activations.py::test_the_budget_holds_where_two_large_tensors_fit"
    ),
}
