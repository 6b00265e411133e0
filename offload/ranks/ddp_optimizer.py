"""The optimizer of a model that ``DistributedDataParallel`` replicates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

from ..engine import Engine
from ..state.lazy_state import LazyState
from .ddp import Replica
from .ddp_bridge import ReplicaBridge
from .shards import Shards
from .spread_optimizers import Holder, SpreadOptimizer, SpreadState
from .world import World


class ReplicatedState(SpreadState):
    """The whole state of each parameter, gathered from all ranks; every rank must ask for it."""

    def __init__(
        self, of_shards: LazyState, bridge: ReplicaBridge, shards: Shards, world: World
    ) -> None:
        self._of_shards, self._world = of_shards, world
        self._replicas = {replica.param: replica for replica in bridge.replicas}
        self._local = {s.param: p for s, p in zip(shards.shards, shards.local, strict=True)}

    def __getitem__(self, p: torch.Tensor) -> dict[str, Any]:
        replica = self._replicas[p]  # type: ignore[index]
        self._world.together("optimizer.state")
        local = self._local.get(p)  # type: ignore[call-overload]
        return whole_state(replica, dict(self._of_shards.get(local, {})), self._world)

    def __iter__(self) -> Iterator[torch.Tensor]:
        self._world.together("optimizer.state")
        has = [p in self for p in self._replicas]
        # The first rank has rows of all parameters.
        return (
            p
            for p, found in zip(self._replicas, self._world.gathered(has)[0], strict=True)
            if found
        )

    def __contains__(self, p: object) -> bool:
        return self._local.get(p) in self._of_shards  # type: ignore[call-overload]


def whole_state(replica: Replica, mine: Mapping[str, Any], world: World) -> dict[str, Any]:
    """Assemble a parameter's state from the rows of all ranks; every rank must call it."""
    rows = replica.local.shape if replica.local.numel() else None
    split = {
        k: v.dtype for k, v in mine.items() if isinstance(v, torch.Tensor) and v.shape == rows
    }  # fmt: skip
    rest = {k: v for k, v in mine.items() if k not in split}
    split, rest = world.gathered((split, rest))[0]  # the first rank has rows of every parameter
    joined = {k: _whole(replica, mine.get(k), dtype, world) for k, dtype in split.items()}
    return {**rest, **joined}


def _whole(
    replica: Replica, rows: torch.Tensor | None, dtype: torch.dtype, world: World
) -> torch.Tensor:
    whole = torch.empty(replica.param.shape, dtype=dtype, device="cpu")
    padded = torch.empty(replica.of_rank(whole, 0).shape, dtype=dtype, device="cpu")
    if rows is not None:
        (padded[: rows.shape[0]] if rows.dim() else padded).copy_(rows)
    parts = [torch.empty_like(padded) for _ in range(world.size)]
    dist.all_gather(parts, padded, group=world.group)
    for rank, part in enumerate(parts):
        there = replica.of_rank(whole, rank)
        if there.numel():
            there.copy_(part[: there.shape[0]] if there.dim() else part)
    return whole


class ReplicatedOptimizer(SpreadOptimizer):
    """The optimizer of a replicated model. Each rank has the state of its rows.

    ``state_dict`` and ``state`` are whole on every rank, as with torch's optimizers. Every rank
    must ask for them.
    """

    def __init__(
        self, engine: Engine, inner: torch.optim.Optimizer, bridge: ReplicaBridge, shards: Shards,
        holder: Holder, world: World,
    ) -> None:  # fmt: skip
        super().__init__(engine, inner, bridge, shards, holder)
        self._bridge, self._world = bridge, world
        self._replicas = {replica.name: replica for replica in bridge.replicas}
        # Also of parameters that the engine has; each waits for its weights when it is used.
        self._params = dict(holder.model.named_parameters())
        self.__dict__["state"] = ReplicatedState(LazyState(engine.state), bridge, shards, world)

    def read_whole(self, name: str) -> torch.Tensor:
        """See ``WholeWeights``."""
        return self._params[name].detach().clone()

    def write_wholes(self, values: Mapping[str, torch.Tensor]) -> None:
        """See ``WholeWeights``."""
        changed = {  # the master of another one would be rounded
            name: value for name, value in values.items()
            if not torch.equal(self._params[name], value.to(self._params[name].dtype))
        }  # fmt: skip
        hooked = {self._numbers_here[n]: changed.pop(n) for n in list(changed.keys())
                  if n not in self._replicas}  # fmt: skip
        external_forward = self._engine.external_forward
        if hooked:  # first, since these may be refused
            external_forward.replace(hooked)
        for name, value in changed.items():
            self._params[name].copy_(value)

    def _whole_of(self, name: str, rows: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
        if (replica := self._replicas.get(name)) is None:
            assert rows is not None
            return rows.cpu()
        return _whole(replica, rows, dtype, self._world)

    def _state(self) -> dict[str, Any]:  # whole: every rank must call it and have memory for it
        self._world.together("optimizer.state_dict()")
        found = self._engine.state_dict()["state"]
        replicas = {id(replica.param): replica for replica in self._bridge.replicas}
        mine = {number: found.get(place) for number, place in self._numbers.items()}
        has = self._world.gathered(sorted(n for n, state in mine.items() if state))[0]
        whole = [p for group in self.param_groups for p in group["params"]]
        state = {
            number: whole_state(replicas[id(whole[number])], mine.get(number) or {}, self._world)
            for number in has
        }
        return {"state": state, "param_groups": self._whole_groups()}

    @property
    def _broken(self) -> bool:
        return self._bridge.failed

    def give_back(self) -> None:
        """Unwrap the model with its trained weights; see ``SpreadOptimizer.give_back``."""
        self._bridge.arrive_all()
        super().give_back()
