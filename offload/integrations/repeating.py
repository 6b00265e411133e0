"""Training steps of ``transformers`` trainers that are repeated after they ran out of memory."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import Trainer

from ..optimizer import OffloadedOptimizer
from ..room import with_room


class Repeating(Trainer):
    """Mixed in before a trainer's own class.

    The batch of a repeated step is that of the first try: trainers that generate it do so once.
    """

    _offloaded: OffloadedOptimizer | None
    _batches: list[Any] | None = None  # of the step that runs: what was prepared

    def training_step(self, *args: Any, **more: Any) -> torch.Tensor:
        offloaded = self._offloaded
        assert offloaded is not None, "made before the first step"

        def run() -> torch.Tensor:
            with offloaded.accumulate(final=self.accelerator.sync_gradients):
                loss: torch.Tensor = super(Repeating, self).training_step(*args, **more)
            return loss

        self._batches = []
        try:
            return with_room(offloaded, run)
        finally:
            self._batches = None

    def _prepare_inputs(self, inputs: Any) -> Any:
        if self._batches is None:
            return super()._prepare_inputs(inputs)
        if not self._batches:
            self._batches.append(super()._prepare_inputs(inputs))
        return copy.copy(self._batches[0])  # losses take entries out of it
