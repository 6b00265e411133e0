"""TRL's trainers on several ranks: the losses of the trainers alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import overspill
from overspill.integrations.transformers import offloaded
from tests.integrations.test_trl import CASES, llama, rows, tokenizer_of_words

from .spawned import RATES, spawn
from .test_trainers import LAYER, free_port, join, sharding

SHARDED = {"fsdp": "full_shard auto_wrap", "fsdp_config": {
    "version": 2, "transformer_layer_cls_to_wrap": [LAYER],
}}  # fmt: skip


def losses(name: str, folder: Path, shards: bool, options: dict[str, Any] | None) -> list[float]:
    """Of four steps; ``options``: of overspill, ``None`` without it."""
    kind, arguments, columns, given, more = CASES[name]
    given = {
        "report_to": [], "use_cpu": True, "bf16": False, "gradient_checkpointing": False,
        "per_device_train_batch_size": 2, "max_steps": 4, "logging_steps": 1, "disable_tqdm": True,
        "learning_rate": 1e-3, "save_strategy": "no", **given, **(SHARDED if shards else {}),
    }  # fmt: skip
    trainer = (kind if options is None else offloaded(kind))(
        model=llama(), args=arguments(str(folder), **given), train_dataset=rows(*columns),
        processing_class=tokenizer_of_words(), **more(),
        **({} if options is None else {"overspill": options}),
    )  # fmt: skip
    trainer.train()
    wrapped = isinstance(trainer.optimizer.optimizer, overspill.OffloadedOptimizer)
    assert wrapped == (options is not None)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def trains(rank: int, size: int, folder: Path, port: int, shards: bool) -> None:
    join(rank, size, port)
    options: dict[str, Any] = {"device": "sim", "host_memory": "1GiB", "rates": RATES}
    if shards:
        sharding(LAYER)
        options["device_memory"] = "400KiB"
    for name in ("sft", "sft lora", "dpo with a reference"):
        expected = losses(name, folder / name, shards, None)
        assert losses(name, folder / name, shards, options) == pytest.approx(expected, rel=1e-5)


@pytest.mark.soak
@pytest.mark.parametrize("shards", [False, True], ids=["ddp", "fsdp2"])
def test_losses_are_trl_s(shards: bool, tmp_path: Path) -> None:
    spawn(2, trains, tmp_path, free_port(), shards)
