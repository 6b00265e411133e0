"""Models that FSDP2 has sharded, as a ``ParallelStrategy``."""

from __future__ import annotations

import logging

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from ..config import OffloadConfig
from ..errors import ModelError
from .filling import leave_on_meta
from .fsdp_private import HostPolicy, ShardedModule, ranks_of, sharded_modules

log = logging.getLogger("overspill")


class FullySharded:
    """A model after ``fully_shard``. See ``ParallelStrategy``."""

    def __init__(
        self, model: nn.Module, *, device: torch.device | str | None, filled: bool
    ) -> None:
        """
        Args:
            filled: weights come from elsewhere, so shards need no memory yet and get it here.
            device: the device of that memory.

        Raises:
            OffloadError: the model is not sharded in a way that can be wrapped.
        """
        self.model, self.held = model, (model,)
        self.parts: list[ShardedModule] = []
        # Ids of parameters and buffers that were on ``meta``.
        self.without_values = frozenset[int]()
        self._host_policy = HostPolicy(model)
        try:
            if self._host_policy.device is not None:
                self._host_policy.drop()
                log.info(
                    "overspill: fully_shard's CPUOffloadPolicy is not used while the model is "
                    "wrapped: its shards are on %s, and their state is where overspill plans it",
                    self._host_policy.device,
                )
            self.parts = sharded_modules(model)
            if filled:
                self.without_values = leave_on_meta(model, self.parts, device)
            _refuse(model, self.parts)
        except BaseException:
            self.give_back()
            raise

    @property
    def shard_rank(self) -> int:
        """This rank's number among those that have other rows."""
        return self._shard_rank_of[0]

    @property
    def shard_size(self) -> int:
        """The number of these ranks."""
        return self._shard_rank_of[1]

    @property
    def _shard_rank_of(self) -> tuple[int, int]:
        return next(each for part in self.parts for each in part.shard_ranks)

    @property
    def replicas(self) -> int:
        """How many ranks have each row."""
        return len(ranks_of(self.model) or ()) // self.shard_size

    def refuse(self, config: OffloadConfig) -> None:
        """Refuse commits of replicated shards; see ``ParallelStrategy``."""
        if self.replicas > 1 and config.nvme is not None and config.durable:
            raise ValueError(
                "commits are not supported for shards that are replicated (HSDP): pass "
                "durable=False, and save with torch.distributed.checkpoint"
            )

    def give_back(self) -> None:
        """Restore FSDP2's own policy; shards that got no values are on ``meta`` again."""
        shards = [shard for each in self.parts for shard in each.shards]
        if any(shard.local.is_meta for shard in shards):
            for shard in shards:
                if id(shard.param) in self.without_values:
                    shard.put(shard.local, torch.device("meta"))
            for module in self.model.modules():
                for name, buffer in list(module.named_buffers(recurse=False)):
                    if id(buffer) in self.without_values:
                        setattr(module, name, buffer.to("meta"))
        self._host_policy.restore()


def _refuse(model: nn.Module, modules: list[ShardedModule]) -> None:
    known = {id(shard.param) for each in modules for shard in each.shards}
    for name, p in model.named_parameters():
        if id(p) not in known:
            raise ModelError(
                f"parameter {name!r} is not sharded by fully_shard; call fully_shard on the whole "
                "model too, without ignored_params"
            )
        if p.is_meta:
            raise ModelError(
                f"parameter {name!r} is on meta; pass weights= (safetensors, or a Hugging Face "
                "folder), or model.to_empty(device=...) and initialise it first"
            )
    meshes = [mesh.mesh for each in modules for mesh in each.meshes]
    alike = all(torch.equal(mesh, meshes[0]) for mesh in meshes)
    if not alike or len({each for part in modules for each in part.shard_ranks}) > 1:
        raise ModelError(
            "modules are sharded over different ranks (several meshes), which is not supported; "
            "call fully_shard on all of them with one mesh"
        )
    order = meshes[0].flatten().tolist()
    if order != sorted(order):
        raise ModelError(
            f"the ranks of the mesh are not in ascending order ({order}), which is not supported"
        )
    for name, p in model.named_parameters():
        assert isinstance(p, DTensor)
        if p.placements not in ((Shard(0),), (Replicate(), Shard(0))):
            raise ModelError(
                f"parameter {name!r} is sharded as {p.placements}, and not by its rows; leave "
                "shard_placement_fn out (tensor parallelism is not supported either)"
            )
