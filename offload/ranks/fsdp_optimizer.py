"""The optimizer of a model that FSDP2 has sharded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ..engine import Engine
from ..state.lazy_state import LazyState
from .fsdp_private import Shard
from .shards import Shards
from .spread_optimizers import AroundSteps, Holder, SpreadOptimizer, SpreadState


class ShardedState(SpreadState):
    """The state of each parameter of the sharded model, with tensors sharded like the parameter."""

    def __init__(self, of_shards: LazyState, shards: Shards) -> None:
        self._of_shards = of_shards
        self._local = {
            shard.param: (shard, p)
            for shard, p in zip(shards.shards, shards.local, strict=True)
            if isinstance(shard, Shard)
        }

    def __getitem__(self, p: torch.Tensor) -> dict[str, Any]:
        shard, local = self._local[p]  # type: ignore[index]
        return spread(shard, self._of_shards[local])

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (p for p, (_, local) in self._local.items() if local in self._of_shards)

    def __contains__(self, p: object) -> bool:
        found = self._local.get(p)  # type: ignore[call-overload]
        return found is not None and found[1] in self._of_shards


def spread(shard: Shard, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a shard's state, with each tensor of the shard's shape as part of a whole one."""
    return {
        name: shard.like_whole(value)
        if isinstance(value, torch.Tensor) and value.shape == shard.local.shape
        else value
        for name, value in state.items()
    }


class ShardedOptimizer(SpreadOptimizer):
    """The optimizer of a model that FSDP2 has sharded; parameters and state are ``DTensor``s."""

    def __init__(
        self, engine: Engine, inner: torch.optim.Optimizer, steps: AroundSteps, shards: Shards,
        holder: Holder,
    ) -> None:  # fmt: skip
        super().__init__(engine, inner, steps, shards, holder)
        self.__dict__["state"] = ShardedState(LazyState(engine.state), shards)
        every = {id(s.param): s for s in [*shards.shards, *shards.empty] if isinstance(s, Shard)}
        whole = [p for group in inner.param_groups for p in group["params"]]
        self._by_name = {shard.name: shard for shard in every.values()}
        self._sharded = {number: every[id(p)] for number, p in enumerate(whole)}  # as ``_piece_of``

    def read_whole(self, name: str) -> torch.Tensor:
        """See ``WholeWeights``."""
        shard = self._by_name[name]
        p: Any = shard.param
        whole: torch.Tensor = p.detach().full_tensor()
        return whole.clone() if shard.ranks == 1 else whole  # that of one rank is not a copy

    def write_wholes(self, values: Mapping[str, torch.Tensor]) -> None:
        """See ``WholeWeights``."""
        edited: dict[int, torch.Tensor] = {}
        for name, value in values.items():
            if name in self._numbers_here:
                p: Any = self._by_name[name].param
                part, present = self._by_name[name].region.of(value), p.to_local()
                if not torch.equal(part.to(present.dtype), present):
                    edited[self._numbers_here[name]] = part
        external_forward = self._engine.external_forward
        external_forward.replace(edited)
        self._steps.after_exchange()

    def _whole_of(self, name: str, rows: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
        shard = self._by_name[name]
        mine = torch.empty(shard.local.shape, dtype=dtype, device="cpu") if rows is None else rows
        whole: Any = shard.like_whole(mine.to(shard.param.device))
        found: torch.Tensor = whole.full_tensor()
        return found.cpu()

    def _state(self) -> dict[str, Any]:  # has ``DTensor``s; every rank must call it
        found = self._engine.state_dict()["state"]
        state = {
            number: spread(self._sharded[number], found[place])
            for number, place in self._numbers.items() if place in found
        }  # fmt: skip
        # The first rank has rows of every parameter, so it knows the state of each.
        likes = {number: _like(each) for number, each in state.items()}
        for number, like in self._holder.world.gathered(likes)[0].items():
            if number not in state:
                state[number] = _empty(self._sharded[number], like)
        return {"state": dict(sorted(state.items())), "param_groups": self._whole_groups()}


def _like(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a parameter's state with the dtype in place of each sharded tensor."""
    return {
        name: value.dtype if isinstance(value, DTensor) else value for name, value in state.items()
    }


def _empty(shard: Shard, like: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of a parameter of which this rank has no rows."""
    return {
        name: shard.like_whole(torch.empty_like(shard.local, dtype=value))
        if isinstance(value, torch.dtype)
        else value
        for name, value in like.items()
    }
