"""What trains the model in an arm of the step suite: plain torch, overspill, or a peer.

Runs in the peers' own environments too, so it imports a library only for the arm that it is.
All get the same model, still without memory, and fill it with the same weights; AdamW with torch's
defaults and a rate of 1e-4, and no clipping.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from .deepspeed_settings import settings
from .model import Llama, fill

LEARNING_RATE = 1e-4
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Trainee:
    """A model with what trains it.  ``step`` is one training step and returns its loss.

    ``optimizer_s``: seconds in the optimizer's own ``step()`` so far, where that is apart.
    """

    def __init__(self, model: nn.Module, optimizer: Any, device: torch.device) -> None:
        self.model, self.optimizer, self._device = model, optimizer, device
        self.optimizer_s = 0.0

    def step(self, tokens: torch.Tensor, between: Callable[[], None] | None = None) -> float:
        """``tokens``: (batch, tokens + 1), int64, on the host.  ``between``: called after forward,
        by the engines that have it apart."""
        loss = self.model(tokens.to(self._device))
        if between is not None:
            between()
        loss.backward()
        began = time.perf_counter()
        self.optimizer.step()
        self.optimizer_s += time.perf_counter() - began
        self.optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    def close(self) -> None:
        """Gives back what it holds."""
        if hasattr(self.optimizer, "close"):
            self.optimizer.close()


class DeepSpeedTrainee(Trainee):
    """DeepSpeed's engine does all three parts of a step."""

    def step(self, tokens: torch.Tensor, between: Callable[[], None] | None = None) -> float:
        loss = self.model(tokens.to(self._device))
        self.model.backward(loss)
        self.model.step()
        return float(loss.detach())

    def close(self) -> None:
        torch.distributed.destroy_process_group()


class WholeTrainee(Trainee):
    """An engine, in the optimizer's place, that does all three parts of a step and gives a loss."""

    def step(self, tokens: torch.Tensor, between: Callable[[], None] | None = None) -> float:
        return float(self.optimizer.step(tokens))


Options = Mapping[str, Any]


def filled(model: nn.Module, device: torch.device | str) -> nn.Module:
    """Gives the model memory on the device, and its first weights."""
    model.to_empty(device=device)
    for module in model.modules():
        fill(module)
    return model


def _torch(model: nn.Module, device: torch.device, options: Options) -> Trainee:
    adamw = torch.optim.AdamW(filled(model, device).parameters(), lr=LEARNING_RATE, fused=True)
    return Trainee(model, adamw, device)


def _overspill(model: nn.Module, device: torch.device, options: Options) -> Trainee:
    import overspill

    given = dict(options)
    if isinstance(given.get("rates"), dict):
        given["rates"] = overspill.Rates(**given["rates"])
    adamw = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    given.setdefault("device", str(device))
    return Trainee(model, overspill.wrap(model, adamw, init=fill, **given), device)


def _deepspeed(model: nn.Module, device: torch.device, options: Options) -> Trainee:
    import deepspeed

    _alone()
    config = settings(
        options["kind"], batch=options["batch"], rate=LEARNING_RATE,
        bf16=next(model.parameters()).dtype == torch.bfloat16, nvme=options.get("nvme"),
        pinned=device.type == "cuda",
    )  # fmt: skip
    engine, *_ = deepspeed.initialize(
        model=filled(model, "cpu"), config=config, dist_init_required=True
    )
    return DeepSpeedTrainee(engine, None, device)


def _torchao(model: nn.Module, device: torch.device, options: Options) -> Trainee:
    from torchao.optim import CPUOffloadOptimizer

    made = CPUOffloadOptimizer(
        filled(model, device).parameters(), torch.optim.AdamW, lr=LEARNING_RATE, fused=True,
        offload_gradients=options.get("offload_gradients", False),
    )  # fmt: skip
    return Trainee(model, made, device)


def _fsdp2(model: nn.Module, device: torch.device, options: Options) -> Trainee:
    from torch.distributed.fsdp import CPUOffloadPolicy

    _sharded(filled(model, "cpu"), device, CPUOffloadPolicy(pin_memory=device.type == "cuda"))
    adamw = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    return Trainee(model, adamw, device)


def _sharded(model: nn.Module, device: torch.device, policy: Any = None) -> nn.Module:
    """By FSDP2, block by block, over all ranks that there are."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import OffloadPolicy, fully_shard

    _join(device)
    mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    more = {"mesh": mesh, "offload_policy": policy or OffloadPolicy()}
    for block in model.get_submodule("blocks").children():
        fully_shard(block, **more)
    fully_shard(model, **more)
    return model


def _join(device: torch.device) -> None:
    _alone()
    torch.distributed.init_process_group("cuda:nccl,cpu:gloo" if device.type == "cuda" else "gloo")


def _fsdp2_in_memory(model: nn.Module, device: torch.device, options: Options) -> Trainee:
    _sharded(filled(model, device), device)
    adamw = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    return Trainee(model, adamw, device)


def _overspill_fsdp2(model: nn.Module, device: torch.device, options: Options) -> Trainee:
    import overspill

    _sharded(filled(model, device), device)
    adamw = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    return Trainee(model, overspill.wrap(model, adamw, **options), device)


def _overspill_ddp(model: nn.Module, device: torch.device, options: Options) -> Trainee:
    import overspill

    _join(device)
    replicas = nn.parallel.DistributedDataParallel(
        filled(model, device), device_ids=[device] if device.type == "cuda" else None
    )
    adamw = torch.optim.AdamW(replicas.parameters(), lr=LEARNING_RATE)
    return Trainee(replicas, overspill.wrap(replicas, adamw, **options), device)


def _bitsandbytes(model: nn.Module, device: torch.device, options: Options) -> Trainee:
    import bitsandbytes

    if device.type != "cuda":
        raise RuntimeError("bitsandbytes' paged optimizers need a CUDA device")
    weights = filled(model, device).parameters()
    return Trainee(model, bitsandbytes.optim.PagedAdamW(weights, LEARNING_RATE), device)


def _transformers(model: nn.Module, device: torch.device, options: Options) -> Trainee:
    from .as_transformers import AsTransformers

    _require_llama(model)
    made = AsTransformers(filled(model, device), device, offload=options["offload"])
    adamw = torch.optim.AdamW(made.parameters(), lr=LEARNING_RATE, fused=True)
    return Trainee(made, adamw, device)


def _require_llama(model: nn.Module) -> None:
    if not isinstance(model, Llama):
        raise RuntimeError("it is set up for the Llama of `make gpu` only")


def _megatrain(model: nn.Module, device: torch.device, options: Options) -> Trainee:
    from .megatrain import Engine, checkout

    _require_llama(model)
    checkout()  # before anything is filled
    batch, tokens = options["batch"], options["tokens"]
    made = Engine(filled(model, "cpu"), batch=batch, tokens=tokens, rate=LEARNING_RATE)
    return WholeTrainee(model, made, device)


def _roundpipe(model: nn.Module, device: torch.device, options: Options) -> Trainee:
    from .roundpipe import Engine

    _require_llama(model)
    if device.type != "cuda":
        raise RuntimeError("RoundPipe needs a GPU")
    return WholeTrainee(model, Engine(filled(model, "cpu"), rate=LEARNING_RATE), device)


def _torch_compiled(model: nn.Module, device: torch.device, options: Options) -> Trainee:
    _compile_blocks(model)
    return _torch(model, device, options)


def _overspill_compiled(model: nn.Module, device: torch.device, options: Options) -> Trainee:
    _compile_blocks(model)
    return _overspill(model, device, options)


def _compile_blocks(model: nn.Module) -> None:
    for block in model.get_submodule("blocks").children():
        block.compile()


def _alone() -> None:
    """The environment of a group of one process, at a free port, unless there is a group."""
    if "RANK" in os.environ:
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK="0", LOCAL_RANK="0", WORLD_SIZE="1"
    )


ENGINES: Mapping[str, Callable[[nn.Module, torch.device, Options], Trainee]] = {
    "torch": _torch,
    "overspill": _overspill,
    "deepspeed": _deepspeed,
    "torchao": _torchao,
    "fsdp2": _fsdp2,
    "fsdp2-memory": _fsdp2_in_memory,
    "overspill-fsdp2": _overspill_fsdp2,
    "overspill-ddp": _overspill_ddp,
    "bitsandbytes": _bitsandbytes,
    "transformers": _transformers,
    "megatrain": _megatrain,
    "roundpipe": _roundpipe,
    "torch-compiled": _torch_compiled,
    "overspill-compiled": _overspill_compiled,
}


def make(engine: str, model: nn.Module, device: str, options: Options) -> Trainee:
    """The trainee of an engine.  ``device``: of torch, or ``"sim"`` for overspill's."""
    if device == "sim":
        return ENGINES[engine](model, torch.device("cpu"), {**options, "device": "sim"})
    return ENGINES[engine](model, torch.device(device), options)
