"""Trainers and accelerate's loops on several ranks: the losses of the frameworks alone."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import overspill
from overspill.integrations.accelerate import OffloadAccelerator
from overspill.integrations.transformers import OverspillTrainer
from overspill.logits import rows
from overspill.logits.heads import defer_logits

from .spawned import RATES, VOCABULARY, adamw, net, spawn

LAYER = "LlamaDecoderLayer"
OPTIONS: dict[str, Any] = {"device": "sim", "host_memory": "1GiB", "rates": RATES}
TIGHT: dict[str, Any] = {**OPTIONS, "device_memory": "100KiB", "activations": "recompute"}


def join(rank: int, size: int, port: int) -> None:
    """What torchrun sets."""
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port), LOCAL_WORLD_SIZE=str(size),
    )  # fmt: skip


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def sharding(layer: str, monkeypatch: Any = None) -> None:
    """accelerate shards on GPUs alone; this lets it do so on CPUs."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", cpu_ram_efficient_loading=False,
        transformer_cls_names_to_wrap=[layer],
    )  # fmt: skip
    for kind in (Accelerator, AcceleratorState):
        kind.distributed_type = property(  # type: ignore[method-assign,assignment]
            lambda self: DistributedType.FSDP, lambda self, value: None
        )
        kind.is_fsdp2 = property(lambda self: True)  # type: ignore[method-assign,assignment]
    AcceleratorState.fsdp_plugin = property(  # type: ignore[attr-defined]
        lambda self: plugin, lambda self, value: None
    )


# -- accelerate -----------------------------------------------------------------------------------


def batches(rank: int, size: int) -> list[torch.Tensor]:
    drawn = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, VOCABULARY, (24, 9), generator=drawn)
    return [each for number, each in enumerate(tokens.split(2)) if number % size == rank]


def loop(accelerator: Any, rank: int, size: int, folder: Path | None = None) -> list[float]:
    """A loop as accelerate's documentation has it, with accumulation, clipping and a schedule."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 4)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    again = accelerator.prepare(model, optimizer, schedule)  # a notebook's cell that is run twice
    assert all(one is other for one, other in zip(again, (model, optimizer, schedule), strict=True))
    losses = []
    for tokens in batches(rank, size):
        with accelerator.accumulate(model):
            logits = model(tokens[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    if folder is not None:
        accelerator.save_state(str(folder))
        accelerator.wait_for_everyone()  # under DDP, the first rank writes alone
        after = [p.detach().clone() for p in model.parameters()]
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(0.5)
        accelerator.load_state(str(folder))
        for p, kept in zip(model.parameters(), after, strict=True):
            assert torch.equal(_local(p), _local(kept))
    return losses


def _local(p: Any) -> torch.Tensor:
    found: torch.Tensor = p.to_local() if hasattr(p, "to_local") else p
    return found.detach()


def accelerates(rank: int, size: int, folder: Path, port: int, shards: bool) -> None:
    join(rank, size, port)
    if shards:
        sharding("Block")
    given: dict[str, Any] = {"cpu": True, "gradient_accumulation_steps": 2}
    expected = loop(Accelerator(**given), rank, size)
    options = {**TIGHT, "device_memory": "160KiB"} if shards else OPTIONS
    accelerator = OffloadAccelerator(**given, overspill=options)
    assert accelerator.is_fsdp2 == shards
    assert loop(accelerator, rank, size, folder / "state") == pytest.approx(expected, rel=5e-6)
    (model,) = accelerator._models[-1:]
    assert isinstance(model, FSDPModule) == shards
    with pytest.raises(ValueError, match="prepare one of each in one call"):
        two = net(), net()
        OffloadAccelerator(**given, overspill=options).prepare(*two, adamw(two[0]))
    with pytest.raises(TypeError, match="strange"):
        OffloadAccelerator(**given, overspill={"strange": 1})


# -- transformers ---------------------------------------------------------------------------------


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=VOCABULARY, use_cache=False, tie_word_embeddings=False,
    ))  # fmt: skip


class Rows(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        drawn = torch.Generator().manual_seed(index)
        tokens = torch.randint(0, VOCABULARY, (8,), generator=drawn)
        return {"input_ids": tokens, "labels": tokens}


def arguments(folder: Path, shards: bool, **more: Any) -> TrainingArguments:
    sharded = {"fsdp": "full_shard auto_wrap", "fsdp_config": {
        "version": 2, "transformer_layer_cls_to_wrap": [LAYER],
    }}  # fmt: skip
    return TrainingArguments(**{
        "output_dir": str(folder), "use_cpu": True, "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2, "learning_rate": 1e-2, "max_steps": 6,
        "logging_steps": 1, "report_to": [], "save_steps": 3, "disable_tqdm": True,
        "eval_strategy": "steps", "eval_steps": 3, **(sharded if shards else {}), **more,
    })  # fmt: skip


def history(trainer: Trainer) -> list[float]:
    keys = ("loss", "grad_norm", "eval_loss")
    return [entry[key] for entry in trainer.state.log_history for key in keys if key in entry]


def trains(rank: int, size: int, folder: Path, port: int, shards: bool) -> None:
    join(rank, size, port)
    if shards:
        sharding(LAYER)
    data: dict[str, Any] = {"train_dataset": Rows(), "eval_dataset": Rows()}
    plain = Trainer(llama(), arguments(folder / "plain", shards), **data)
    plain.train()
    first = history(plain)
    plain.train()  # once more, with the same optimizer
    options = TIGHT if shards else OPTIONS
    trainer = OverspillTrainer(
        llama(), arguments(folder / "ours", shards), **data, overspill=options
    )  # type: ignore[call-arg]
    trainer.train()
    assert isinstance(trainer.optimizer.optimizer, overspill.OffloadedOptimizer)
    ours = history(trainer)
    assert ours == pytest.approx(first, rel=2e-4)
    again = OverspillTrainer(llama(), arguments(folder / "ours", shards), **data, overspill=options)  # type: ignore[call-arg]
    again.train(resume_from_checkpoint=str(folder / "ours" / "checkpoint-3"))
    assert history(again)[-3:] == pytest.approx(ours[-3:], rel=1e-6)
    trainer.train()
    assert history(trainer) == pytest.approx(history(plain), rel=2e-3)
    if shards:
        plugin = trainer.accelerator.state.fsdp_plugin
        plugin.fsdp_version = 1
        with pytest.raises(ValueError, match="set --fsdp-version 2"):
            OverspillTrainer(llama(), arguments(folder / "old", shards), **data)
        plugin.fsdp_version = 2
    trainer.save_model(str(folder / "model"))
    if rank == 0 and not shards:
        kept = LlamaForCausalLM.from_pretrained(folder / "model")
        for p, own in zip(kept.parameters(), trainer.model.parameters(), strict=True):
            assert torch.equal(p, own.detach())


def losses_in_chunks(rank: int, size: int, folder: Path, port: int) -> None:
    """FSDP2 hooks all that its model returns, also logits that the loss has not computed."""
    join(rank, size, port)
    dist.init_process_group("gloo")
    found = []
    for deferred in (False, True):
        model: Any = llama()
        if deferred:
            defer_logits(model)
        for layer in (*model.model.layers, model):
            fully_shard(layer)
        tokens = torch.arange(4 * 64).reshape(4, 64) % VOCABULARY
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        chunks = mock.patch.multiple(rows, CHUNK_BYTES=4096, LEAST_TOKENS=16)
        with chunks, overspill.wrap(model, optimizer, **OPTIONS) as wrapped:
            for _ in range(3):
                loss = model(input_ids=tokens, labels=tokens).loss
                loss.backward()
                wrapped.step()
                wrapped.zero_grad()
                found.append(loss.item())
    assert found[3:] == pytest.approx(found[:3], rel=1e-5) and found[3:] != found[:3]
    dist.destroy_process_group()


def adapted() -> nn.Module:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(
        hidden_size=128, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=VOCABULARY, use_cache=False,
    ))  # fmt: skip
    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "up_proj"]))  # type: ignore[arg-type]


def trains_adapters(rank: int, size: int, folder: Path, port: int) -> None:
    """LoRA under DDP, whose frozen base leaves the device in int8."""
    join(rank, size, port)
    data: dict[str, Any] = {"train_dataset": Rows(), "eval_dataset": Rows()}
    options = {**OPTIONS, "device_memory": "600KiB", "frozen": "int8"}

    def trainer() -> Any:
        given = arguments(folder / "adapters", False)
        return OverspillTrainer(adapted(), given, **data, overspill=options)  # type: ignore[call-arg]

    first, again = trainer(), trainer()
    first.train()
    layout = first.optimizer.optimizer.plan.detail.layout
    assert any(layout.streamed) and layout.shared_places
    again.train(resume_from_checkpoint=str(folder / "adapters" / "checkpoint-3"))
    assert history(again)[-3:] == pytest.approx(history(first)[-3:], rel=1e-6)
    plain, packed = adapted(), dict(overspill.named_weights(first.model_wrapped))
    for name, p in plain.named_parameters():
        if not p.requires_grad:
            p.data.copy_(packed[name])
    alone = Trainer(plain, arguments(folder / "alone", False), **data)
    alone.train()
    assert history(first) == pytest.approx(history(alone), rel=1e-5)
    first.save_model(str(folder / "adapter"))
    dist.barrier()
    kept = load_file(folder / "adapter" / "adapter_model.safetensors")
    own = {n.replace(".default", ""): p for n, p in first.model.named_parameters() if "lora" in n}
    assert kept.keys() == own.keys()
    assert all(torch.equal(kept[name], p.detach()) for name, p in own.items())


def both(rank: int, size: int, folder: Path, port: int, shards: bool) -> None:
    """In one process a rank, which takes long to import the frameworks."""
    accelerates(rank, size, folder, port, shards)
    trains(rank, size, folder, port, shards)
    if shards:
        dist.destroy_process_group()
    (losses_in_chunks if shards else trains_adapters)(rank, size, folder, port)


@pytest.mark.parametrize("shards", [False, True], ids=["ddp", "fsdp2"])
def test_losses_are_the_framework_s(shards: bool, tmp_path: Path) -> None:
    spawn(2, both, tmp_path, free_port(), shards)
