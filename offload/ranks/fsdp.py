"""Models that FSDP2 has sharded, as a ``ParallelStrategy``."""

from __future__ import annotations

import logging

import torch
from torch import nn

from ..config import OffloadConfig
from ..errors import ModelError
from .filling import leave_on_meta
from .fsdp_private import HostPolicy, Kept, Shard, ShardedModule, ranks_of, sharded_modules
from .parts import WholeParam

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
        self.hooked: dict[str, list[WholeParam]] = {}
        self.parts: list[ShardedModule] = []
        # Ids of parameters and buffers that were on ``meta``.
        self.without_values = frozenset[int]()
        self._host_policy = HostPolicy(model)
        self._cast: list[tuple[Shard, Kept]] = []  # their state in the former dtype
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
    def ranks(self) -> int:
        """The number of ranks from which FSDP2 gathers weights: the most of any module."""
        return max(ranks for part in self.parts for ranks in part.shard_sizes)

    @property
    def tensor_ranks(self) -> int:
        """The number of ranks among which a parameter was divided before ``fully_shard``."""
        return max(
            (shard.ranks // min(part.shard_sizes)
             for part in self.parts for shard in part.shards if shard.of_dtensor),
            default=1,
        )  # fmt: skip

    def offload_frozen(self) -> None:
        """Do nothing: frozen shards leave the device in any case."""

    def refuse(self, config: OffloadConfig) -> None:
        """Refuse recomputation under tensor parallelism; see ``ParallelStrategy``."""
        if self.tensor_ranks > 1 and config.activations in ("recompute", "selective"):
            raise ValueError(
                f"activations={config.activations!r} is not for tensor parallelism, under which a "
                "recomputation sends messages, and each rank chooses what it recomputes; use "
                "'auto', 'host' or 'nvme'"
            )

    def cast(self, dtype: torch.dtype | None) -> None:
        """See ``ParallelStrategy``."""
        for part in self.parts:
            for shard in part.shards:
                local = shard.local
                if dtype not in (None, local.dtype) and local.is_floating_point():
                    self._cast.append((shard, shard.kept()))
                    shard.put(
                        torch.empty_like(local, dtype=dtype, device="meta"), shard.param.device
                    )
        self._renew_dtypes()

    def _renew_dtypes(self) -> None:
        for part in self.parts if self._cast else ():
            part.renew_dtypes()

    def begin(self) -> None:
        """Drop what ``give_back`` would restore: every rank has an engine."""
        self._cast.clear()

    def give_back(self) -> None:
        """Restore dtypes and FSDP2's policy; shards that got no values are on ``meta`` again."""
        for shard, kept in self._cast:
            shard.put(kept[0], shard.param.device)
            shard.restore(kept)
        self._renew_dtypes()
        self._cast.clear()
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
    everyone, shards = set(ranks_of(model) or ()), [s for each in modules for s in each.shards]
    # Under tensor parallelism, parameters that it leaves out are the same on all of its ranks.
    rows = [
        set(row) for shard in shards for every, row in (shard.members,)
        if shard.of_dtensor and set(every) == everyone
    ]  # fmt: skip
    for shard in shards:
        members = set(shard.members[0])
        if members != everyone and (shard.of_dtensor or members not in rows):
            raise ModelError(
                "modules are sharded over different ranks (several meshes), which is not "
                "supported; call fully_shard on all of them with one mesh"
            )
        if shard.region.shape != tuple(shard.local.shape):
            raise ModelError(
                f"parameter {shard.name!r} is sharded in a way that is not supported: "
                f"its shard has shape {tuple(shard.local.shape)}, and not {shard.region.shape}"
            )
