"""Trainers on several ranks: the model is wrapped once accelerate has prepared it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from transformers import Trainer

from ..optimizer import OffloadedOptimizer
from .accelerate import prepared_again, wrap_prepared


class OverRanks(Trainer):
    """Mixed in before a trainer's own class.

    Checkpoints, evaluation and casts are those of the trainer.
    """

    _offloaded: OffloadedOptimizer | None

    @property
    def _over_ranks(self) -> bool:
        """Whether several ranks train the model, by FSDP2 or ``DistributedDataParallel``."""
        return bool(self.args.world_size > 1)

    @property
    def _is_fsdp1(self) -> bool:
        """Whether accelerate would shard the model by ``FullyShardedDataParallel``."""
        plugin = getattr(self.accelerator.state, "fsdp_plugin", None)
        return plugin is not None and getattr(plugin, "fsdp_version", 1) == 1

    def _options_for(self) -> dict[str, Any]:
        """Return the options of ``wrap``."""
        raise NotImplementedError

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        if self._over_ranks:
            own = functools.partial(self._prepare, self.accelerator.prepare)
            setattr(self.accelerator, "prepare", own)  # noqa: B010 (a method)

    def _prepare(self, prepare: Callable[..., Any], *args: Any, **more: Any) -> Any:
        """Let accelerate prepare the model for several ranks, and wrap it."""
        again = prepared_again(self.accelerator, prepare, args, **more)
        if again is not None:  # an earlier call of ``train`` has wrapped the model
            return again
        prepared = prepare(*args, **more)
        kinds = (torch.nn.Module, torch.optim.Optimizer)
        if all(any(isinstance(each, kind) for each in args) for kind in kinds):
            self._offloaded = wrap_prepared(prepared, self._options_for())
        return prepared

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not self._over_ranks or self.is_fsdp_enabled:
            return super()._save_optimizer_and_scheduler(output_dir)
        kept: Any = self.optimizer
        try:
            # Each rank has a part of the state. All collect it; one rank writes it.
            self.optimizer = _Collected(kept.state_dict())  # type: ignore[assignment]
            super()._save_optimizer_and_scheduler(output_dir)
        finally:
            self.optimizer = kept
        return None


class _Collected:
    """Stands for an optimizer whose state was collected from all ranks."""

    def __init__(self, state: dict[str, Any]) -> None:
        self._state = state

    def state_dict(self) -> dict[str, Any]:
        return self._state
