"""Memory and first values for sharded models on ``meta``."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

from ..private import module_private, torch_private
from ..state.adapters import adapter_parameters, begin_adapters
from ..state.importing import open_weights
from ..state.unmanaged import require_buffers
from .fsdp_private import ShardedModule
from .shards import Shards
from .world import World


def memory_of(device: torch.device | str | None) -> torch.device:
    """Return the torch device of parameters on ``device``.

    ``None`` means the current accelerator if there is one, else the CPU.
    """
    if device is None:
        return torch.accelerator.current_accelerator() or torch.device("cpu")
    return torch.device("cpu" if str(device) == "sim" else device)


def leave_on_meta(
    model: nn.Module, parts: Sequence[ShardedModule], device: torch.device | str | None
) -> frozenset[int]:
    """Let parameters on ``meta`` report ``device`` while their shards have no memory.

    Buffers get memory there. Persistent ones that were on ``meta`` stay uninitialised until the
    files are read.

    Returns:
        The ids of these parameters, and of these buffers.

    Raises:
        OffloadError: a buffer is on ``meta`` that is not persistent, so that no file has it.
    """
    persistent = {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        for name, _ in module.named_buffers(recurse=False)
        if module_private.is_persistent(module, name)
    }
    require_buffers(model, persistent)
    there, left = memory_of(device), set[int]()
    for shard in (shard for each in parts for shard in each.shards):
        if shard.param.is_meta:
            left.add(id(shard.param))
            shard.put(shard.local, there)
    moved: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            if id(buffer) not in moved:
                at = torch.empty_like(buffer, device=there) if buffer.is_meta else buffer.to(there)
                moved[id(buffer)] = at
            if buffer.is_meta:
                left.add(id(moved[id(buffer)]))
            setattr(module, name, moved[id(buffer)])
    return frozenset(left)


def require_files_of_buffers(
    model: nn.Module, without_values: Container[int], weights: Path | Mapping[str, Path]
) -> None:
    """Require that files have the buffers that were on ``meta``.

    Raises:
        ValueError: they lack one.
    """
    lacking = [name for name, buffer in model.named_buffers() if id(buffer) in without_values]
    files = open_weights(weights, model) if lacking else None
    for name in lacking:
        if files is not None and files.shape(name) is None:
            raise ValueError(f"weights: {files.path} lacks {name}, which is on meta")


def draw_adapters(
    model: nn.Module, shards: Shards, without_values: Container[int], world: World
) -> None:
    """Draw the first values of peft's adapters on ``meta``, the same on all ranks.

    Each rank draws them whole, as on one device, from the first rank's random numbers, and keeps
    its regions.

    Args:
        without_values: ids of the parameters on ``meta``.

    Raises:
        OffloadError: they have an initialisation that is not known.
    """
    added = adapter_parameters(model)
    places = [
        (module, name, p) for module in model.modules()
        for name, p in module.named_parameters(recurse=False, remove_duplicate=False)
        if id(p) in without_values and p in added
    ]  # fmt: skip
    if not places:
        return
    before, shared = torch.get_rng_state(), world.gathered(torch.get_rng_state())[0]
    whole = {id(p): nn.Parameter(torch.empty(p.shape, dtype=p.dtype, device="meta"))
             for _, _, p in places}  # fmt: skip
    try:
        for module, name, p in places:
            setattr(module, name, whole[id(p)])
        torch.set_rng_state(shared)
        begin_adapters(model, lambda _: None, trains=True)
    finally:
        for module, name, p in places:
            setattr(module, name, p)
        if world.rank:
            torch.set_rng_state(before)
    for shard, local in zip(shards.shards, shards.local, strict=True):
        if (value := whole.get(id(shard.param))) is not None:
            torch_private.become(local, shard.region.of(value.detach()).clone())
