"""What is in the table of remedies without a test in this folder."""

from __future__ import annotations

from tests.remedies.of_activations import OF_ACTIVATIONS

# Tests of other folders that execute the remedy.
ELSEWHERE: dict[tuple[str, str], str] = {
    **OF_ACTIVATIONS,
    ("offload/facts/stats.py", "first try larger micro-batches (instead of accumulation)"): (
        "tests/unit/test_plan_machines.py::test_the_command_answers_in_json_and_writes_a_trace"
    ),
    ("offload/ranks/sharding.py", "they have their weights where they are; leave it out"): (
        "tests/ranks/test_drop_in.py::test_on_two_ranks"
    ),
    ("offload/integrations/accelerate.py", "prepare one of each in one call, or"): (
        "tests/ranks/test_trainers.py::test_losses_are_the_framework_s"
    ),
    (
        "offload/integrations/transformers.py",
        "set --fsdp-version 2",
    ): ("tests/ranks/test_trainers.py::test_losses_are_the_framework_s"),
    ("offload/ranks/planned.py", "give tokens= instead"): (
        "tests/ranks/test_planned.py::test_what_cannot_be_planned"
    ),
    ("offload/ranks/ddp.py", "convert the model before creating DDP, or shard it with"): (
        "tests/ranks/test_remedies.py::test_remedies"
    ),
    ("offload/ranks/ddp.py", "since all weights stay on the device; leave it out"): (
        "tests/ranks/test_remedies.py::test_remedies"
    ),
    ("offload/ranks/sharding.py", "whose head may be on other ranks; leave it out"): (
        "tests/ranks/test_drop_in.py::test_on_two_ranks"
    ),
    ("offload/checks.py", "weights={{}: PATH, ...}, or pass init="): (
        "tests/parity/test_several_models.py::test_an_untrained_model_without_weights_is_refused"
    ),
    ("offload/joint_steps.py", "See docs/optimizers.md for commits"): (
        "tests/optimizers/test_half_iterations.py::test_whole_iterations_are_committed"
    ),
    ("offload/ranks/spread_optimizers.py", "and resume the run later"): (
        "tests/ranks/test_remedies.py::test_remedies"
    ),
    ("offload/movement/arena_copies.py", "pass nvme= (a directory) to wrap"): (
        "tests/robust/test_sleep_refused.py::test_no_disk_for_host_memory"
    ),
    ("offload/movement/memory.py", "or pass nvme= to wrap, so that"): (
        "tests/robust/test_sleep_refused.py::test_no_room_for_copies_of_device_memory"
    ),
    ("offload/movement/sleeping.py", "delete them (del loss, output)"): (
        "tests/robust/test_sleep_refused.py::test_a_tensor_over_a_slot"
    ),
    ("offload/movement/sleeping.py", "call backward(), or delete its loss"): (
        "tests/robust/test_sleep_refused.py::test_activations_in_host_memory"
    ),
    ("offload/movement/sleeping.py", "free what uses it now"): (
        "tests/robust/test_sleep_refused.py::test_memory_that_is_taken_meanwhile"
    ),
    ("offload/api.py", "unwrap all of them in one call"): (
        "tests/parity/test_several_models.py::test_weights_of_one_model_and_of_all"
    ),
    ("offload/api.py", "give the same dict, or, to"): (
        "tests/parity/test_several_models.py::test_weights_of_one_model_and_of_all"
    ),
    ("offload/arguments.py", "pass at least one model"): (
        "tests/parity/test_several_models.py::test_what_cannot_be_models"
    ),
    ("offload/arguments.py", "give modules by name"): (
        "tests/parity/test_several_models.py::test_what_cannot_be_models"
    ),
    ("offload/arguments.py", "are the same module; give it once"): (
        "tests/parity/test_several_models.py::test_what_cannot_be_models"
    ),
    ("offload/config.py", "give a path for at least one model"): (
        "tests/parity/test_several_models.py::test_what_cannot_be_models"
    ),
    ("offload/state/importing.py", "pass a dict of models"): (
        "tests/parity/test_several_models.py::test_what_cannot_be_models"
    ),
    ("offload/over_ranks.py", "wrap it in a call of its own"): (
        "tests/ranks/test_remedies.py::test_remedies"
    ),
    ("offload/step/stepping.py", "Call step() of all optimizers before"): (
        "tests/optimizers/test_several_optimizers.py::test_steps_apart_are_refused_where_backward_updates"
    ),
    ("optim/joint.py", "pass None to train nothing"): (
        "tests/optimizers/test_several_optimizers.py::test_lists_that_make_no_sense_are_refused"
    ),
    ("optim/joint.py", "build all of them in the same way"): (
        "tests/optimizers/test_several_optimizers.py::test_lists_that_make_no_sense_are_refused"
    ),
    ("optim/joint.py", "leave it to one of them"): (
        "tests/optimizers/test_several_optimizers.py::test_lists_that_make_no_sense_are_refused"
    ),
    ("offload/durable/source.py", "resume the store with its optimizer, and"): (
        "tests/optimizers/test_streamed_optimizers.py::test_an_export_of_objects_is_refused"
    ),
    ("offload/ranks/sharding.py", "give all parameters to the param groups of one"): (
        "tests/ranks/test_remedies.py::test_remedies"
    ),
    ("offload/ranks/sharding.py", "use an optimizer that updates element by element"): (
        "tests/ranks/test_remedies.py::test_remedies"
    ),
    ("optim/registry.py", "Use an optimizer whose step needs"): (
        "tests/optimizers/test_streamed_optimizers.py::"
        "test_what_cannot_be_stepped_alone_is_refused_with_the_reason"
    ),
    ("offload/durable/resume.py", "build them and pass a list to resume"): (
        "tests/optimizers/test_whole_rules.py::"
        "test_a_store_of_several_optimizers_is_resumed_with_a_list"
    ),
    ("optim/registry.py", "Use torch.optim.AdamW, with moments='int8' for"): (
        "tests/optimizers/test_odd_optimizers.py::test_instead_of_torchaos"
    ),
    ("offload/blueprints.py", "of all parameters at once; leave update out"): (
        "tests/optimizers/test_coupled_optimizers.py::"
        "test_the_plan_says_so_and_other_modes_are_refused"
    ),
    ("offload/blueprints.py", "use an optimizer that updates each parameter on its own"): (
        "tests/optimizers/test_coupled_optimizers.py::test_what_does_not_fit_in_host_memory_is_told"
    ),
    ("offload/durable/moving.py", "pass one with the options of the run before"): (
        "tests/optimizers/test_odd_optimizers.py::test_state_that_grows_ends_the_run_and_is_resumed"
    ),
    ("optim/streamed.py", "resume the last commit with an optimizer that has it, and"): (
        "tests/optimizers/test_odd_optimizers.py::test_state_that_grows_ends_the_run_and_is_resumed"
    ),
    ("optim/streamed.py", "give the state of an optimizer of the same class"): (
        "tests/optimizers/test_odd_optimizers.py::test_state_of_another_optimizer_is_refused"
    ),
    ("optim/streamed.py", "resume the last commit with an optimizer that has it"): (
        "tests/optimizers/test_odd_optimizers.py::"
        "test_objects_that_come_later_end_the_run_and_are_resumed"
    ),
    ("optim/streamed.py", "leave moments out"): (
        "tests/optimizers/test_streamed_optimizers.py::"
        "test_options_that_a_streamed_optimizer_does_not_have_are_refused"
    ),
    ("offload/grads/gradient_tensor.py", "take p.grad.clone(), or p.grad.untyped_storage()"): (
        "tests/parity/test_uses_of_parameters.py::test_a_gradient_has_no_address"
    ),
    ("offload/state/param_access.py", "Change one of them, and then read the parameter again"): (
        "tests/parity/test_state_edits.py::test_changes_in_two_copies_are_refused"
    ),
    ("offload/params/parameters.py", "share copies (overspill.named_weights(model)), or call"): (
        "tests/parity/test_uses_of_parameters.py::test_shared_memory_is_refused"
    ),
    ("offload/params/parameters.py", "supported; pass p.data or p.detach() instead of p"): (
        "tests/parity/test_uses_of_parameters.py::test_a_parameter_of_a_parameter_is_refused"
    ),
    (
        "offload/cli/inspect.py",
        "repair mends one store; name the folder of the rank that is damaged",
    ): ("tests/ranks/test_remedies.py::test_remedies"),
    (
        "offload/ranks/bridge.py",
        "old one back, and copy the new values into it (p.data.copy_(new))",
    ): ("tests/ranks/test_remedies.py::test_remedies"),
    (
        "offload/ranks/fsdp_private.py",
        "the old one; put that back, and copy the new values into it",
    ): ("tests/ranks/test_remedies.py::test_remedies"),
    ("offload/ranks/ddp_bridge.py", "is sparse; use dense ones"): (
        "tests/ranks/test_remedies.py::test_remedies"
    ),
    ("offload/ranks/spread_optimizers.py", "path; load it with torch.distributed.checkpoint"): (
        "tests/ranks/test_drop_in.py::test_on_two_ranks"
    ),
    (
        "offload/ranks/spread_optimizers.py",
        "there; end the run, resume it, and lower the learning rate in",
    ): ("tests/ranks/test_remedies.py::test_remedies"),
    ("offload/ranks/resuming.py", "modules); pass nvme= with another folder to continue in"): (
        "tests/ranks/test_remedies.py::test_remedies"
    ),
    (
        "offload/ranks/stores.py",
        "), remove its files if it is of no use any more, or choose another",
    ): ("tests/ranks/test_failures.py::test_failures"),
    (
        "offload/ranks/voting.py",
        "); where all of them have it, resume finds it, else the one before",
    ): ("tests/ranks/test_resume.py::test_a_commit_that_one_rank_lacks_is_none"),
    (
        "offload/movement/commit_writer.py",
        "them; change them between step() and the next forward, or inside",
    ): ("tests/parity/test_readers.py::test_a_commit_of_weights_that_change_under_it_is_not_made"),
    ("offload/movement/accelerators/ordering.py", ": wait for its event first"): (
        "tests/conformance/test_accelerator_sim.py::test_a_copy_in_over_memory_in_use_raises"
    ),
    (
        "offload/integrations/accelerate.py",
        "optimizers; wrap all that is trained before accelerator.prepare,",
    ): ("tests/integrations/test_accelerate.py::test_what_is_not_wrapped_is_left_to_accelerate"),
    (
        "offload/integrations/axolotl.py",
        "; use TRL's trainer in a script, by overspill.integrations.transformer",
    ): ("tests/integrations/test_trl.py::test_the_losses_are_those_of_the_trainer_alone"),
    (
        "offload/integrations/experts.py",
        "; split the model before peft has it, or leave them out",
    ): ("tests/integrations/test_experts.py::test_frozen_experts_are_packed_section_by_section"),
    (
        "offload/integrations/experts.py",
        "; call join_experts(model) before you change it",
    ): (
        "tests/integrations/test_experts_split.py::test_a_config_that_others_have_too_stays_as_it_is"
    ),
    ("offload/state/distributed_checkpoint.py", "); load its weights alone, with weights="): (
        "tests/durable/test_distributed.py::test_another_model_is_refused"
    ),
    ("offload/state/original_weights.py", "now: build the model again"): (
        "tests/robust/test_wrap_undone.py::test_values_that_are_not_exact_are_not_given_back"
    ),
    ("offload/train/outputs.py", "to; give this user permission, or name another"): (
        "tests/unit/test_train_outputs.py::test_out_that_cannot_be_written_is_refused"
    ),
    ("offload/durable/resume.py", "set it in optimizer.param_groups after resume"): (
        "tests/durable/test_resume.py::"
        "test_hyper_parameters_that_give_way_to_those_of_the_commit_are_named"
    ),
    ("offload/state/module_states.py", "module adds it to its state dict; build the model as"): (
        "tests/durable/test_modules_own_state.py::test_a_model_without_it_is_refused"
    ),
    ("offload/state/module_states.py", "set it in your script, or build the model as it was"): (
        "tests/durable/test_modules_own_state.py::test_what_has_no_place_is_named"
    ),
    ("offload/state/module_states.py", "extra state of these modules; save it in your script"): (
        "tests/ranks/test_resume.py::test_that_states_of_modules_are_not_committed_is_said"
    ),
    ("offload/integrations/accelerate.py", "save_state writes safetensors only; leave"): (
        "tests/integrations/test_accelerate.py::test_a_folder_is_written_again"
    ),
    ("offload/integrations/accelerate.py", "set accelerator.project_configuration.iteration to"): (
        "tests/integrations/test_accelerate.py::test_a_number_that_is_taken"
    ),
    ("offload/integrations/checkpoints.py", "remove them to start from the beginning, or pass"): (
        "tests/integrations/test_checkpoint_folders.py::"
        "test_without_a_complete_checkpoint_nothing_is_trained"
    ),
    (
        "offload/integrations/transformers.py",
        "; name another one, or pass resume_from_checkpoint=",
    ): (
        "tests/integrations/test_checkpoint_folders.py::"
        "test_without_a_complete_checkpoint_nothing_is_trained"
    ),
    ("offload/integrations/experts.py", "the model is wrapped; overspill.unwrap(model) first"): (
        "tests/integrations/test_experts_split.py::"
        "test_a_model_that_is_wrapped_is_neither_split_nor_joined"
    ),
    ("offload/integrations/experts.py", "the model is wrapped already; call it before wrap"): (
        "tests/integrations/test_experts_split.py::"
        "test_a_model_that_is_wrapped_is_neither_split_nor_joined"
    ),
    ("offload/integrations/experts.py", ") computes otherwise than sections do; try arithmetic="): (
        "tests/integrations/test_experts_split.py::test_experts_that_compute_otherwise_are_refused"
    ),
    ("offload/integrations/lightning.py", "call overspill.unwrap(model) before this fit"): (
        "tests/integrations/test_lightning.py::test_a_fit_with_another_kind_of_optimizer"
    ),
    ("offload/integrations/transformers.py", "(set max_grad_norm=0)"): (
        "tests/integrations/test_transformers.py::test_what_people_set"
    ),
    ("offload/ranks/whole_params.py", "give the same one on every rank"): (
        "tests/ranks/test_materialized.py::test_a_layer_is_read_and_edited"
    ),
    (
        "offload/ranks/whole_params.py",
        "was replaced while the model was materialized; copy the",
    ): ("tests/ranks/test_materialized.py::test_a_layer_is_read_and_edited"),
    ("offload/ranks/whole_params.py", "edit weights in the same"): (
        "tests/ranks/test_materialized.py::test_a_layer_is_read_and_edited"
    ),
    (
        "offload/ranks/ddp.py",
        "if this is a frozen parameter that DDP ignores, pass weights= to wrap",
    ): ("tests/ranks/test_remedies.py::test_remedies"),
    ("offload/ranks/ddp.py", "over; use update='next_forward'"): (
        "tests/ranks/test_remedies.py::test_remedies"
    ),
    ("offload/ranks/ddp_bridge.py", "them: give every rank as many batches"): (
        "tests/ranks/test_remedies.py::test_remedies"
    ),
    ("offload/ranks/fsdp.py", "fully_shard; call fully_shard on the whole model too, without"): (
        "tests/ranks/test_remedies.py::test_remedies"
    ),
    ("offload/ranks/fsdp.py", "meta; pass weights= (safetensors, or a Hugging Face folder), or"): (
        "tests/ranks/test_remedies.py::test_remedies"
    ),
    ("offload/ranks/fsdp.py", "recomputes; use 'auto', 'host' or 'nvme'"): (
        "tests/ranks/test_activations.py::test_bits_of_tensor_parallelism"
    ),
    ("offload/ranks/fsdp.py", "supported; call fully_shard on all of them with one"): (
        "tests/ranks/test_remedies.py::test_remedies"
    ),
    ("offload/ranks/spread_optimizers.py", "it; use optimizer.load_state_dict"): (
        "tests/ranks/test_remedies.py::test_remedies"
    ),
    (
        "offload/ranks/sharding.py",
        "the model is wrapped already; call overspill.unwrap(model) first",
    ): ("tests/ranks/test_remedies.py::test_remedies"),
    ("offload/ranks/resuming.py", "the run, or on the meta device: build the model again"): (
        "tests/ranks/test_files_in_place.py::test_files_that_were_moved"
    ),
    ("offload/ranks/resuming.py", "{}= is for wrap: resume takes the weights of the store"): (
        "tests/ranks/test_files_in_place.py::test_weights_are_for_runs_that_read_them"
    ),
    ("offload/ranks/sharding.py", "commit; use fewer ranks, or leave nvme out"): (
        "tests/ranks/test_remedies.py::test_remedies"
    ),
    (
        "offload/ranks/sharding.py",
        "model; build the optimizer from model.parameters(), after the model",
    ): ("tests/ranks/test_remedies.py::test_remedies"),
    (
        "offload/ranks/sharding.py",
        "is not sharded by fully_shard; call fully_shard on the whole model",
    ): ("tests/ranks/test_remedies.py::test_remedies"),
    ("offload/ranks/sharding.py", "DistributedDataParallel; leave it out"): (
        "tests/ranks/test_remedies.py::test_remedies"
    ),
    ("offload/grads/held_gradients.py", "on: ask after the next backward()"): (
        "tests/parity/test_held_gradients.py::"
        "test_norms_that_nobody_asked_for_in_the_first_step_are_not_taken"
    ),
    ("offload/movement/engine_port.py", "_memory, or free graphs that still hold weights"): (
        "tests/robust/test_slots.py::test_graphs_that_keep_all_room_end_in_a_clear_error"
    ),
    ("io_engine/atomic_files.py", "that others had created meanwhile are in {}: move them back"): (
        "tests/unit/test_replaced_folders.py::test_files_of_others_that_cannot_be_moved_back"
    ),
    ("offload/state/importing.py", "have their weights; leave weights= out, or build the model"): (
        "tests/quantised/test_qlora.py::test_a_model_with_quantised_layers_takes_no_files"
    ),
    ("offload/private/peft_private.py", "freeze it (requires_grad_(False))"): (
        "tests/quantised/test_target_parameters.py::test_an_adapted_weight_stays_frozen"
    ),
    ("offload/private/peft_private.py", "call overspill.unwrap(model) and join_experts(model)"): (
        "tests/integrations/test_experts_adapted.py::test_merging_needs_whole_stacks"
    ),
    ("offload/planning/planner.py", ", or give split_experts a smaller section"): (
        "tests/integrations/test_experts.py::test_training_with_less_room_than_one_layer"
    ),
    ("offload/private/peft_private.py", "split_experts, or call join_experts(model) first"): (
        "tests/integrations/test_experts_adapted.py::test_adapters_come_before_sections"
    ),
    ("offload/checks.py", "found it; call get_peft_model before split_experts"): (
        "tests/integrations/test_experts_adapted.py::"
        "test_a_model_that_was_split_first_is_not_trained_in_part"
    ),
    ("offload/integrations/experts.py", "adapts a stack of one expert; leave it whole"): (
        "tests/integrations/test_experts_adapted.py::test_what_cannot_be_split"
    ),
    ("offload/integrations/experts.py", "is merged; unmerge it first"): (
        "tests/integrations/test_experts_adapted.py::test_what_cannot_be_split"
    ),
    ("offload/private/peft_private.py", "in sections; activate one adapter at a time"): (
        "tests/integrations/test_experts_adapted.py::test_several_adapters_one_at_a_time"
    ),
    ("offload/checks.py", "load the model again, and wrap it before its first forward"): (
        "tests/parity/test_packed_by_others.py::test_codes_in_another_order_are_refused"
    ),
    ("offload/state/module_states.py", "load the same base in the same way"): (
        "tests/parity/test_packed_by_others.py::test_a_base_that_is_quantised_otherwise_is_refused"
    ),
    (
        "offload/quantised/format_table.py",
        "need the folder's config.json (or quantize_config.json of",
    ): ("tests/quantised/test_formats.py::test_refuse"),
    ("offload/checks.py", "bnb_4bit_quant_storage=torch.uint8, or leave precision out"): (
        "tests/parity/test_packed_by_others.py::"
        "test_codes_that_are_stored_as_numbers_are_not_converted"
    ),
    ("offload/checks.py", "is not quantised yet: its class does that when"): (
        "tests/parity/test_packed_by_others.py::test_layers_that_are_not_quantised_yet_are_refused"
    ),
    ("offload/durable/commits.py", "(weights_only); use numbers, strings, tensors, and lists"): (
        "tests/durable/test_modules_own_state.py::test_it_is_resumed"
    ),
    ("offload/state/unmanaged.py", "load the model unquantised and pass frozen='nf4' or 'int8'"): (
        "tests/parity/test_packed_by_others.py::test_the_base_moves_if_overspill_packs_it"
    ),
    ("offload/state/module_states.py", "in a file of its own (torch.save)"): (
        "tests/durable/test_modules_own_state.py::test_tensors_of_it_are_in_files"
    ),
    ("io_engine/atomic_files.py", ": move them to {}, or write it again"): (
        "tests/unit/test_replaced_folders.py::test_what_fails_between_files_leaves_a_complete_set"
    ),
    ("offload/integrations/transformers.py", "leave optim_args out"): (
        "tests/integrations/test_transformers.py::"
        "test_compact_optimizers_are_adamw_with_compact_moments"
    ),
    ("offload/movement/health.py", "use the model in the parent, or wrap one here"): (
        "tests/robust/test_fork.py::test_a_child_may_not_use_the_engine_and_harms_nothing"
    ),
    ("offload/train/job.py", "ask for more steps to continue training"): (
        "tests/unit/test_train_outputs.py::"
        "test_resuming_a_finished_run_writes_the_files_that_are_missing"
    ),
    ("offload/train/job.py", "ask for more steps than it has done, or write its weights"): (
        "tests/unit/test_train_outputs.py::test_the_alternative_that_is_named_works"
    ),
    ("offload/train/outputs.py", "run the same command with --resume {} instead of --nvme"): (
        "tests/unit/test_train_outputs.py::test_a_disk_that_fills_up_meanwhile"
    ),
    ("offload/train/job_state.py", "the run was begun with {} {}, not {}; give the same"): (
        "tests/unit/test_train_job_resume.py::test_another_job_is_refused"
    ),
    (
        "offload/step/forward_stack.py",
        "keep it on the device: resident=[%r] (or a larger budget: %s)",
    ): (
        "tests/parity/test_nested_units.py::"
        "test_what_nothing_refers_to_is_onloaded_in_turns_and_said_once"
    ),
    ("offload/state/param_access.py", "the change is lost. Use update='next_forward'"): (
        "tests/parity/test_changes_in_forward.py::test_under_a_checkpoint"
    ),
    ("offload/step/param_group_check.py", "set p.grad = None, or {}"): (
        "tests/parity/test_param_group_check.py::test_a_gradient_of_what_is_not_trained_is_not_dropped"
    ),
}

# Messages about another machine or environment than the one that runs the tests.
NOT_HERE: dict[tuple[str, str], str] = {
    ("io_engine/aiofiles_backend.py", "pip install aiofiles"): (
        "an environment without the package"
    ),
    ("io_engine/backend.py", "install with a C++ compiler, unset OVERSPILL_NATIVE"): (
        "an environment without the extension"
    ),
    ("io_engine/dispatch.py", "nothing has moved for {} s; see the kernel log"): (
        "a disk that hangs; the remedy is to look"
    ),
    ("io_engine/manifest.py", "export it with the version that wrote it, and import it here"): (
        "another version of this package"
    ),
    ("io_engine/probe.py", "leave this directory out, or see the kernel log"): (
        "a disk that fails while it is measured"
    ),
    ("io_engine/dispatch.py", "go back to the last commit, on another device"): (
        "a disk that loses data, and another one"
    ),
    ("offload/checks.py", "move the model to the CPU{} before wrap"): (
        "a model on another device than the one that is asked for"
    ),
    ("offload/doctor/device.py", "update the driver, or in a container run with --gpus all"): (
        "a machine whose driver fails"
    ),
    ("offload/doctor/disks.py", "look at the disk's rated writes"): ("a disk's own figures"),
    ("offload/doctor/host.py", "use a processor with AVX2, AVX-512 or NEON"): ("another processor"),
    ("offload/durable/files.py", "export with another"): ("another version of torch"),
    ("offload/durable/hub.py", "leave the config out for the names in memory"): (
        "transformers of another version, or none"
    ),
    ("offload/facts/machine.py", "write the same keys as JSON"): ("Python 3.10"),
    (
        "offload/integrations/transformers.py",
        "more than one GPU in one process (set CUDA_VISIBLE_DEVICES)",
    ): ("several GPUs"),
    ("offload/movement/accelerators/vendors.py", "raise the limit on locked memory"): (
        "CUDA, or a limit on locked memory"
    ),
    ("offload/observe/pictures.py", 'pip install "overspill[plot]"'): (
        "an environment without matplotlib"
    ),
    ("offload/train/shapes.py", 'pip install "overspill[hf]"'): (
        "an environment without transformers"
    ),
    ("offload/private/torch_private.py", "compare the first losses with a run in memory"): (
        "another version of torch"
    ),
    ("optim/kernels.py", "the native kernels are not there; use reference.update"): (
        "an environment without the extension"
    ),
}

# Texts that look like advice and are none.
NO_ADVICE: set[tuple[str, str]] = {
    ("offload/cli/options.py", "What autograd saves for backward"),
    ("offload/cli/options.py", "fp32 masters of low-precision weights"),
    ("offload/cli/plan_text.py", "in words of overspill plan"),
    ("offload/wrapping.py", "until then what has no room stays"),
    ("offload/wrapping.py", "wrap could not be undone completely"),
}
