"""How DeepSpeed is tuned in the step suite: what was changed from its defaults, and why."""

from __future__ import annotations

from typing import Any

KINDS = ("zero2-cpu", "zero3-cpu", "zero3-all-cpu", "zero3-nvme", "superoffload", "zenflow")


def settings(
    kind: str, *, batch: int, rate: float, bf16: bool, nvme: str | None, pinned: bool = False
) -> dict[str, Any]:
    """DeepSpeed's configuration for one process.  ``nvme``: a directory, for ``"zero3-nvme"``.
    ``pinned``: host memory is page-locked, as copies to a GPU want it.

    No clipping, as in every arm.  ``sub_group_size``: its default of 1e9 parameters would make
    one piece of the whole model, with buffers of that size and nothing to overlap.
    ``buffer_count``: four buffers serve one piece at a time (weight, gradient, two moments); with
    both pipelines three pieces are on their way, and the default of 4 dies with "Not enough
    buffers".  Tried at 319 M parameters, 2 x 256 tokens: pieces of 50 million 7.4-10.5 s a step and
    9.7 GiB, of 100 million 7.6-15.2 s and 11.6 GiB, 50 million without pipelines 11.0-13.1 s and
    6.3 GiB.  I/O of 1 MiB at depth 32 by four threads is the fastest of its handle here.
    """
    zero: dict[str, Any] = {
        "stage": 2 if kind in ("zero2-cpu", "zenflow") else 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": pinned},
        "overlap_comm": True,
        "contiguous_gradients": True,
    }
    if zero["stage"] == 3:
        zero["sub_group_size"] = 50_000_000
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": batch,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "bf16": {"enabled": bf16},
        "optimizer": {"type": "AdamW", "params": {"lr": rate, "weight_decay": 0.01}},
        "zero_optimization": zero,
        "steps_per_print": 1_000_000,
    }
    if kind == "zero3-all-cpu":
        zero["offload_param"] = {"device": "cpu", "pin_memory": pinned}
    if kind == "zero3-nvme":
        zero["offload_optimizer"] = {
            "device": "nvme", "nvme_path": nvme, "pin_memory": pinned, "buffer_count": 12,
            "pipeline_read": True, "pipeline_write": True,
        }  # fmt: skip
        config["aio"] = {
            "block_size": 1 << 20, "queue_depth": 32, "intra_op_parallelism": 4,
            "single_submit": False, "overlap_events": True,
        }  # fmt: skip
    if kind == "superoffload":
        zero["offload_optimizer"] |= {"super_offload": True, "cpuadam_cores_perc": 0.8}
    if kind == "zenflow":
        zero["zenflow"] = {
            "topk_ratio": 0.1, "update_interval": 4, "full_warm_up_rounds": 0,
            "overlap_step": True, "select_strategy": "auto",
        }  # fmt: skip
    return config
