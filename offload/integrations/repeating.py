"""Training steps of ``transformers`` trainers that are repeated after they ran out of memory."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import Trainer

from ..optimizer import OffloadedOptimizer
from ..private import checkpoint_private


class Repeating(Trainer):
    """Mixed in before a trainer's own class.

    The batch of a repeated step is that of the first try: trainers that generate it do so once.
    """

    _offloaded: OffloadedOptimizer | None
    # Of the step that runs: the batch that was prepared, and the random numbers then.
    _batches: list[tuple[Any, checkpoint_private.Random]] | None = None

    def training_step(self, *args: Any, **more: Any) -> torch.Tensor:
        offloaded = self._offloaded
        assert offloaded is not None, "made before the first step"

        def run() -> torch.Tensor:
            with offloaded.accumulate(final=self.accelerator.sync_gradients):
                loss: torch.Tensor = super(Repeating, self).training_step(*args, **more)
            return loss

        self._batches = []
        try:
            return offloaded.with_room(run)
        finally:
            self._batches = None

    def _prepare_inputs(self, inputs: Any) -> Any:
        if self._batches is None:
            return super()._prepare_inputs(inputs)
        device = self.accelerator.device
        if self._batches:
            batch, drawn = self._batches[0]
            checkpoint_private.restore_random_states(drawn, device)
        else:
            batch = super()._prepare_inputs(inputs)
            self._batches.append((batch, checkpoint_private.random_states(device)))
        return copy.copy(batch)  # losses take entries out of it
