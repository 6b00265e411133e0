"""What users hold of a model whose shards are an engine's."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..durable.hub import as_on_hub, config_of
from ..engine import Engine
from ..errors import OffloadError
from ..optimizer import OffloadedOptimizer
from ..state.lazy_state import LazyState
from ..training import optimizer_private, torch_private
from ..training.reentrancy import refuse_reentry
from .exporting import export_run
from .fsdp_private import Shard
from .parts import LocalShard
from .shards import Shards
from .stores import find_run
from .world import World

log = logging.getLogger("overspill")


class AroundSteps(Protocol):
    """Who stands between the model and its engine where a step is taken."""

    def before_step(self) -> None:
        """Gradients are about to be applied."""

    def after_step(self) -> None:
        """They were."""

    def went_back(self) -> None:
        """They were not: weights are those of the last commit instead."""

    def before_rollback(self) -> None:
        """Weights are about to be those of the last commit."""

    def after_rollback(self) -> None:
        """They are, and there is no gradient."""


class Holder(Protocol):
    """Who has the model and its ranks."""

    model: nn.Module
    world: World

    def let_go(self) -> None:
        """The model is nobody's, and as it was spread before."""

    def release(self, *, broken: bool = False) -> None:
        """Nobody speaks with the other ranks any more; ``broken``: something may be on its way."""


class ShardedState(Mapping[torch.Tensor, dict[str, Any]]):
    """By parameter of the sharded model, its state: tensors are sharded as the parameter is."""

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

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, p: object) -> bool:
        found = self._local.get(p)  # type: ignore[call-overload]
        return found is not None and found[1] in self._of_shards

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise OffloadError(
            "optimizer.state cannot be changed: the engine holds it; use optimizer.load_state_dict"
        )

    __setitem__: Callable[..., None] = _refuse
    __delitem__: Callable[..., None] = _refuse
    clear: Callable[..., None] = _refuse


def spread(shard: Shard, state: Mapping[str, Any]) -> dict[str, Any]:
    """A shard's state, of which every tensor of its shape is a part of a whole one."""
    return {
        name: shard.like_whole(value)
        if isinstance(value, torch.Tensor) and value.shape == shard.local.shape
        else value
        for name, value in state.items()
    }


class SpreadOptimizer(OffloadedOptimizer):
    """The optimizer over a model that is spread over ranks: ``param_groups`` are the wrapped one's;
    each rank updates its own rows of every parameter."""

    def __init__(
        self, engine: Engine, inner: torch.optim.Optimizer, steps: AroundSteps, shards: Shards,
        holder: Holder,
    ) -> None:  # fmt: skip
        super().__init__(engine, inner)
        self._steps, self._holder = steps, holder
        whole = [p for group in inner.param_groups for p in group["params"]]
        by_id: dict[int, LocalShard] = {id(s.param): s for s in shards.shards}
        # By number in the whole model's state dict: those that this rank has rows of, and the
        # number in that of the shards.
        self._piece_of = {n: by_id[id(p)] for n, p in enumerate(whole) if id(p) in by_id}
        self._numbers = {number: place for place, number in enumerate(self._piece_of)}

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Updates all parameters that have a gradient; returns the closure's result, if any."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._steps.before_step()
        external_forward = self._engine.external_forward
        returns = external_forward.returns
        try:
            self._take_step()
        finally:  # every rank went back, and waits for the others
            if external_forward.returns != returns:
                self._steps.went_back()
        if external_forward.returns == returns:
            self._steps.after_step()
        return loss

    @torch_private.without_grad
    def _take_step(self) -> None:  # not by ``super().step``, which may run all hooks a second time
        self._engine.step()

    def _whole_groups(self) -> list[dict[str, Any]]:
        """The param groups, as state dicts have them."""
        start, groups = 0, []
        for group in self.param_groups:
            count = len(group["params"])
            groups.append({**group, "params": list(range(start, start + count))})
            start += count
        return groups

    def load_state_dict(self, state_dict: Any) -> None:  # type: ignore[override]
        """Takes over state in torch's own format, as ``state_dict`` gives it.

        Raises:
            ValueError: other groups, or tensors of other shapes; nothing was changed.
        """
        if not isinstance(state_dict, Mapping):
            raise OffloadError(
                "a model that is spread over ranks takes a state dict, not a path; load it with "
                "torch.distributed.checkpoint"
            )
        optimizer_private.load_with_hooks(self, state_dict, self._load)

    def _load(self, whole: Mapping[str, Any]) -> None:
        theirs = [len(group["params"]) for group in whole["param_groups"]]
        mine = [len(group["params"]) for group in self.param_groups]
        if theirs != mine:
            raise ValueError(f"the state has param groups of {theirs} parameters, expected {mine}")
        # A state has the key that its param has in the groups, whatever that is.
        keys = [key for given in whole["param_groups"] for key in given["params"]]
        given_state = whole["state"]
        state = {
            place: {
                k: self._piece_of[number].part_of(v) for k, v in given_state[keys[number]].items()
            }
            for number, place in self._numbers.items() if keys[number] in given_state
        }  # fmt: skip
        start, groups = 0, []
        for group, given in zip(self.param_groups, whole["param_groups"], strict=True):
            numbers = range(start, start + len(group["params"]))
            start += len(group["params"])
            kept = [self._numbers[n] for n in numbers if n in self._numbers]
            groups.append({**given, "params": kept})
            groups[-1].pop("param_names", None)
        self._engine.load_state({"state": state, "param_groups": groups})

    def commit(self) -> None:
        """See ``OffloadedOptimizer.commit``; every rank calls it."""
        self._engine.quiesce()  # so that edits count
        self._require_finite("commit")
        super().commit()

    def rollback(self) -> Any:
        """See ``OffloadedOptimizer.rollback``; every rank calls it."""
        runtime = self._engine.runtime
        if runtime.store.writer is None:
            return super().rollback()  # which says so
        self._require_finite("rollback")
        self._steps.before_rollback()
        extra = super().rollback()
        self._steps.after_rollback()
        return extra

    def _require_finite(self, what: str) -> None:
        """
        Raises:
            OffloadError: values are not finite on some rank, whose last step is no commit.
        """
        external_forward = self._engine.external_forward
        external_forward.landed()
        everyone = self._holder.world.gathered(external_forward.spoiled)
        spoiled = [rank for rank, is_so in enumerate(everyone) if is_so]
        if spoiled:
            raise OffloadError(
                f"{what}: values are not finite on rank {spoiled[0]}, so that the last step is no "
                "commit there; end the run, resume it, and lower the learning rate in "
                "optimizer.param_groups"
            )

    def save(self, path: str | Path) -> None:
        """Commits, and exports whole weights and state to the new folder ``path``, as on one rank.
        Every rank calls it; the first one writes, out of the stores of all, which it must see.

        Raises:
            OffloadError: as on one rank.
        """
        refuse_reentry()
        config, model = self._engine.config, self._holder.model
        self._engine.quiesce()
        self._require_finite("save")
        self._engine.commit("save")
        assert config.nvme is not None
        folders = [folder.parent for folder in config.nvme]

        def export() -> None:
            run = find_run(folders)
            assert run is not None
            text, named = config_of(model), partial(as_on_hub, model)
            export_run(run, Path(path), config=text, named=named)

        self._holder.world.of_first(export)

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See ``overspill.named_weights``; every rank takes all of them."""
        for name, p in self._holder.model.named_parameters():
            whole = self._holds(name, p).detach()
            yield name, whole.full_tensor() if isinstance(whole, DTensor) else whole.clone()

    def _holds(self, name: str, p: nn.Parameter) -> nn.Parameter:
        """What holds a parameter's weight, which the model shows as ``p``."""
        return p

    def give_back(self) -> None:
        """The model is an ordinary one again, spread as before, with its trained weights; every
        rank calls it."""
        self._engine.give_back()
        self._holder.let_go()
        self.close()

    @property
    def _broken(self) -> bool:
        """Whether something may be left on its way between ranks."""
        return False

    def __exit__(
        self, kind: type[BaseException] | None, raised: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        if raised is not None:  # nobody would see the error while this waits for the others
            self._holder.world.votes.ends(failing=True)
        super().__exit__(kind, raised, trace)

    def close(self) -> None:
        """Ends all threads and frees all memory; every rank calls it."""
        try:
            super().close()
        except OffloadError as error:
            if not self._holder.world.votes.abandoned:
                raise
            log.warning("overspill: closed; %s", error)
        finally:
            self._holder.release(broken=self._broken)


class ShardedOptimizer(SpreadOptimizer):
    """Over a model that FSDP2 has sharded: its parameters are ``DTensor``s, and so is its state."""

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

    def _holds(self, name: str, p: nn.Parameter) -> nn.Parameter:
        shard = self._by_name.get(name)  # what is shown may be gathered, and in another dtype
        return p if shard is None else shard.param

    def _state(self) -> dict[str, Any]:  # of ``DTensor``s; every rank calls it
        found = self._engine.state_dict()["state"]
        state = {
            number: spread(self._sharded[number], found[place])
            for number, place in self._numbers.items() if place in found
        }  # fmt: skip
        # The first rank has rows of every parameter, and so knows what each has for state.
        likes = {number: _like(each) for number, each in state.items()}
        for number, like in self._holder.world.gathered(likes)[0].items():
            if number not in state:
                state[number] = _empty(self._sharded[number], like)
        return {"state": dict(sorted(state.items())), "param_groups": self._whole_groups()}


def _like(state: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter's state without its values: of what is sharded, the dtype."""
    return {
        name: value.dtype if isinstance(value, DTensor) else value for name, value in state.items()
    }


def _empty(shard: Shard, like: Mapping[str, Any]) -> dict[str, Any]:
    """The state of a parameter of which this rank has no rows."""
    return {
        name: shard.like_whole(torch.empty_like(shard.local, dtype=value))
        if isinstance(value, torch.dtype)
        else value
        for name, value in like.items()
    }
