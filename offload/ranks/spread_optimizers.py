"""The optimizers that users hold of models that are spread over ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property, partial
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Protocol, TypeVar

import torch
from torch import nn

from ..durable.export import export_model
from ..durable.hub import as_on_hub, config_of
from ..engine import Engine
from ..errors import GradientError, LifecycleError, OffloadError, OptimizerStateError, RankError
from ..optim.formats import as_weight
from ..optimizer import OffloadedOptimizer
from ..paths import as_path
from ..private import optimizer_private, torch_private
from ..private.reentrancy import refuse_reentry
from ..state.averages import AroundExchange, Averaged
from ..state.materializing import Materialized
from .parts import LocalShard
from .shards import Shards
from .stores import export_run, find_run
from .whole_params import SpreadMaterializing
from .world import World

log = logging.getLogger("overspill")
T = TypeVar("T")


class AroundSteps(AroundExchange, Protocol):
    """Connects the model with its engine around steps and rollbacks."""

    def before_reading(self) -> None:
        """Make all weights current, and let modules have the parameters that users hold."""

    def before_step(self) -> None:
        """Prepare to apply the gradients."""

    def after_step(self) -> None:
        """Handle the end of a step that was taken."""

    def went_back(self) -> None:
        """Handle a step that was not taken: weights are those of the last commit instead."""

    def before_rollback(self) -> None:
        """Prepare for weights of the last commit."""

    def after_rollback(self) -> None:
        """Handle the end of a rollback: weights are those of the last commit, without gradients."""


class Holder(Protocol):
    """Owner of the model and of the connection to its ranks."""

    model: nn.Module
    world: World

    def let_go(self) -> None:
        """Detach overspill and restore the sharding from before ``wrap``."""

    def release(self, *, broken: bool = False) -> None:
        """Stop communication with the other ranks.

        Args:
            broken: messages may be left unread.
        """


class SpreadState(Mapping[torch.Tensor, dict[str, Any]]):
    """The state of each parameter of a model that is spread over ranks; it cannot be changed."""

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise OptimizerStateError(
            "optimizer.state cannot be changed: the engine holds it; use optimizer.load_state_dict"
        )

    __setitem__: Callable[..., None] = _refuse
    __delitem__: Callable[..., None] = _refuse
    clear: Callable[..., None] = _refuse


class SpreadOptimizer(OffloadedOptimizer):
    """The optimizer of a model that is spread over ranks.

    Its ``param_groups`` are those of the wrapped optimizer. Each rank updates its own rows of every
    parameter.
    """

    def __init__(
        self, engine: Engine, inner: torch.optim.Optimizer, steps: AroundSteps, shards: Shards,
        holder: Holder,
    ) -> None:  # fmt: skip
        super().__init__(engine, inner)
        self._steps, self._holder = steps, holder
        self._local_shards = list(zip(shards.shards, shards.local, strict=True))
        whole = [p for group in inner.param_groups for p in group["params"]]
        by_id: dict[int, LocalShard] = {id(s.param): s for s in shards.shards}
        # By number in the whole model's state dict: the shards that have rows on this rank, and
        # their numbers in the state dict of the shards.
        self._piece_of = {n: by_id[id(p)] for n, p in enumerate(whole) if id(p) in by_id}
        self._numbers = {number: place for place, number in enumerate(self._piece_of)}

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update all parameters that have a gradient, and return the closure's result, if any."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        external_forward = self._engine.external_forward
        external_forward.require_managed()
        self._steps.before_step()
        returns = external_forward.returns
        try:
            self._take_step()
        finally:  # if the engine was rolled back, so were all ranks, and each waits for the others
            if external_forward.returns != returns:
                self._steps.went_back()
        if external_forward.returns == returns:
            self._steps.after_step()
        return loss

    @torch_private.without_grad
    def _take_step(self) -> None:  # not ``super().step``, which may run all hooks a second time
        self._engine.step()

    def _whole_groups(self) -> list[dict[str, Any]]:
        """Return the param groups in the format of state dicts."""
        start, groups = 0, []
        for group in self.param_groups:
            count = len(group["params"])
            groups.append({**group, "params": list(range(start, start + count))})
            start += count
        return groups

    def load_state_dict(self, state_dict: Any) -> None:  # type: ignore[override]
        """Load state in torch's own format, as ``state_dict`` returns it.

        Raises:
            ValueError: the groups differ, or tensors have other shapes. Nothing was changed.
        """
        if not isinstance(state_dict, Mapping):
            raise RankError(
                "a model that is spread over ranks takes a state dict, not a path; load it with "
                "torch.distributed.checkpoint"
            )
        optimizer_private.load_with_hooks(self, state_dict, self._load)

    def _load(self, whole: Mapping[str, Any]) -> None:
        theirs = [len(group["params"]) for group in whole["param_groups"]]
        mine = [len(group["params"]) for group in self.param_groups]
        if theirs != mine:
            raise ValueError(f"the state has param groups of {theirs} parameters, expected {mine}")
        # The keys of the state are those in the groups; they need not be numbers.
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
        """Commit the current state; every rank must call it. See ``OffloadedOptimizer.commit``."""
        self._engine.quiesce()  # so that edits are included
        self._require_finite("commit")
        super().commit()

    def rollback(self) -> Any:
        """Restore the last commit; every rank must call it. See ``OffloadedOptimizer.rollback``."""
        runtime = self._engine.runtime
        if runtime.store.writer is None:
            return super().rollback()  # raises the error
        self._require_finite("rollback")
        self._steps.before_rollback()
        extra = super().rollback()
        self._steps.after_rollback()
        return extra

    def make_room(self) -> bool:
        """Raise ``OffloadError``: the other ranks would not repeat the micro-batch.

        Raises:
            OffloadError: always.
        """
        raise LifecycleError(
            "make_room() does not work on several ranks, since all of them would have to repeat "
            "the micro-batch; use fewer tokens, or activation checkpointing"
        )

    def sleep(self, *, host: bool = False) -> None:
        """Raise ``OffloadError``: FSDP2 and DDP hold views of the memory that this would free.

        Raises:
            OffloadError: always.
        """
        raise LifecycleError(
            "sleep() does not work on a model under FSDP2 or DDP, which hold views of the memory "
            "that it would free; to free it, call commit() and close(), and resume the run later"
        )

    def _require_finite(self, what: str) -> None:
        """Require finite values on all ranks.

        Raises:
            OffloadError: values are not finite on some rank, so its last step cannot be committed.
        """
        external_forward = self._engine.external_forward
        external_forward.landed()
        everyone = self._holder.world.gathered(external_forward.spoiled)
        spoiled = [rank for rank, is_so in enumerate(everyone) if is_so]
        if spoiled:
            raise GradientError(
                f"{what}: values are not finite on rank {spoiled[0]}, so that the last step is no "
                "commit there; end the run, resume it, and lower the learning rate in "
                "optimizer.param_groups"
            )

    def save(self, path: str | Path) -> None:
        """Commit, and export whole weights and state to the new folder ``path``, as on one rank.

        Every rank must call it. The first rank writes. It reads the stores of all ranks, which it
        must be able to access.

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
            files = config.weight_files
            export_run(run, Path(path), config=text, named=named, weights=files)

        self._holder.world.of_first(export)

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Iterate over the whole weights; every rank must take all of them.

        See ``overspill.named_weights``.
        """
        external_forward = self._engine.external_forward
        external_forward.require_managed()
        for name, _ in self._holder.model.named_parameters():
            yield name, self.read_whole(name)

    # -- whole parameters -----------------------------------------------------------------------

    def materialized(self, part: nn.Module, given: T, *, writeback: bool) -> Materialized[T]:
        """Give a part of the model whole parameters; every rank must use the block.

        See ``overspill.materialized``; the block returns ``given`` at its start.
        """
        by = SpreadMaterializing(self._engine.materializing, self, self._holder.world)
        return self._engine.materialized(part, given, writeback=writeback, by=by)

    def current_names(self) -> Mapping[int, str]:
        """See ``WholeWeights``."""
        self._engine.quiesce()
        self._steps.before_reading()
        return {id(p): name for name, p in self._holder.model.named_parameters()}

    def read_whole(self, name: str) -> torch.Tensor:
        """See ``WholeWeights``."""
        raise NotImplementedError

    def write_wholes(self, values: Mapping[str, torch.Tensor]) -> None:
        """See ``WholeWeights``."""
        raise NotImplementedError

    # -- averages -------------------------------------------------------------------------------

    def averaged(self) -> Averaged:
        """Compute with the averages instead of the weights; every rank must use the block.

        See ``OffloadedOptimizer.averaged``.
        """
        return self._engine.averaged(self._holder.model, self._steps)

    def named_averages(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Iterate over the whole averages; every rank must take all of them.

        See ``OffloadedOptimizer.named_averages``.
        """
        self._engine.require_average()
        for name, _ in self._holder.model.named_parameters():
            yield name, self._average(name)

    @cached_property
    def _numbers_here(self) -> dict[str, int]:
        """By the name of a parameter of which this rank has a part, its number in the engine."""
        index = {id(p): number for number, p in enumerate(self._engine.parameters)}
        return {shard.name: index[id(p)] for shard, p in self._local_shards}

    def _average(self, name: str) -> torch.Tensor:
        """Return the whole average of a parameter; every rank must call it."""
        number = self._numbers_here.get(name)
        mine = None if number is None else self._engine.average(number)
        dtype = self._holder.world.gathered(None if mine is None else mine.dtype)[0]
        assert dtype is not None, "the first rank has rows of every parameter"
        return self._whole_of(name, mine, dtype)

    def _whole_of(self, name: str, rows: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
        """Return a whole tensor of a parameter, on the CPU, from the rows of all ranks."""
        raise NotImplementedError

    def save_average(self, path: str | Path) -> None:
        """Write the averages from the first rank; every rank must call it.

        See ``OffloadedOptimizer.save_average``.
        """
        out, world, model = as_path(path, "path"), self._holder.world, self._holder.model
        name_of = {id(p): name for name, p in model.named_parameters()}
        self._engine.require_average()

        def read(t: torch.Tensor) -> torch.Tensor:
            if (name := name_of.get(id(t))) is None:
                return t.detach().clone()
            world.gathered(name)
            return as_weight(self._average(name), t.dtype)

        def write() -> None:
            if world.rank == 0:
                export_model(model, out, self._engine.step_count, read)
                world.gathered(None)
            else:
                while (name := world.gathered(None)[0]) is not None:
                    self._average(name)

        world.all_or_none(write)

    def give_back(self) -> None:
        """Unwrap the model: it is ordinary again, spread as before, with its trained weights.

        Every rank must call it.
        """
        self._engine.give_back()
        self._holder.let_go()
        self.close()

    @property
    def _broken(self) -> bool:
        """Whether messages between ranks may be left unread."""
        return False

    def __exit__(
        self, kind: type[BaseException] | None, raised: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        if raised is not None:  # the error would be hidden while this waits for the other ranks
            self._holder.world.votes.ends(failing=True)
        super().__exit__(kind, raised, trace)

    def close(self) -> None:
        """End all threads and free all memory; every rank must call it."""
        try:
            super().close()
        except OffloadError as error:
            if not self._holder.world.votes.abandoned:
                raise
            log.warning("overspill: closed; %s", error)
        finally:
            self._holder.release(broken=self._broken)
