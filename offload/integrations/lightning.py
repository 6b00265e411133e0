"""A strategy for Lightning's Trainer whose models live on several tiers.

    from overspill.integrations.lightning import OverspillStrategy

    trainer = lightning.Trainer(
        strategy=OverspillStrategy(host_memory="24GiB", nvme="/scratch/run"), accelerator="auto"
    )

The optimizer that ``configure_optimizers`` gives is wrapped when a fit begins.  Checkpoints are
Lightning's own, written and read tensor by tensor.  For Fabric: wrap first, then
``fabric.setup(model, optimizer, move_to_device=False)``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.strategies.single_device import SingleDeviceStrategy

from ..api import wrap
from ..config import OffloadConfig
from ..durable.files import write_torch
from ..durable.hub import all_of
from ..durable.tensors import lazy
from ..engine import engine_of
from ..optimizer import OffloadedOptimizer


class OverspillStrategy(SingleDeviceStrategy):
    """One device; the options are those of ``overspill.wrap``.

    ``device`` is the accelerator, where there is one, else the CPU; ``accumulate`` the trainer's
    ``accumulate_grad_batches``.  A model that is only validated or tested is not wrapped.

    Raises:
        TypeError, ValueError: as ``wrap`` for its options.
    """

    strategy_name = "overspill"

    def __init__(self, **options: Any) -> None:
        OffloadConfig(**options)  # raises before anything is loaded
        device = options.get("device")
        if device is None:
            device = torch.accelerator.current_accelerator() or torch.device("cpu")
        super().__init__(torch.device("cpu" if str(device) == "sim" else device))
        self._options = {"device": device, **options}
        self._offloaded: OffloadedOptimizer | None = None

    # -- what is wrapped, and when --------------------------------------------------------------

    @property
    def _module(self) -> Any:
        return self.lightning_module

    def model_to_device(self) -> None:
        """What is trained the engine brings there, unit by unit."""
        state = getattr(self._module.trainer, "state", None)
        if engine_of(self._module) is None and getattr(state, "fn", None) != "fit":
            super().model_to_device()

    def setup_optimizers(self, trainer: Any) -> None:
        """Makes them, and wraps the model.

        Raises:
            ValueError: there is not just one.
        """
        super().setup_optimizers(trainer)
        if engine_of(self._module) is not None:
            if isinstance(self._offloaded, OffloadedOptimizer):  # a second fit goes on with it
                self.optimizers = [self._offloaded]
            return
        if len(self.optimizers) != 1:
            raise ValueError(
                f"OverspillStrategy trains with one optimizer, and configure_optimizers gave "
                f"{len(self.optimizers)}"
            )
        options = {"accumulate": trainer.accumulate_grad_batches, **self._options}
        self._offloaded = wrap(self._module, self.optimizers[0], **options)
        self.optimizers = [self._offloaded]

    def teardown(self) -> None:
        """Ends the run; the model stays wrapped, and where it is."""
        if engine_of(self._module) is None:
            super().teardown()
            return
        self.precision_plugin.teardown()
        assert self.accelerator is not None
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    # -- checkpoints ----------------------------------------------------------------------------

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """In a checkpoint, each tensor is read when its turn comes."""
        if engine_of(self._module) is None:
            return super().lightning_module_state_dict()
        return {each.name: each for each in all_of(self._module)}

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """As ``lightning_module_state_dict``."""
        engine = engine_of(self._module)
        if engine is None:
            return super().optimizer_state(optimizer)
        return engine.streamed_state(
            lambda name, shape, read: lazy(name, torch.float32, shape, read)
        )

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """One torch file, as Lightning writes it."""
        if engine_of(self._module) is None:
            super().save_checkpoint(checkpoint, filepath, storage_options)
        elif self.is_global_zero:
            path = Path(filepath)
            path.parent.mkdir(parents=True, exist_ok=True)
            draft = path.with_name(f"{path.name}.part")
            write_torch(checkpoint, draft, lambda nbytes: None)
            draft.replace(path)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> Any:
        """Mapped: what is taken from it is read."""
        if not Path(checkpoint_path).is_file():
            return super().load_checkpoint(checkpoint_path, weights_only)
        return torch.load(
            checkpoint_path, map_location="cpu", mmap=True, weights_only=bool(weights_only)
        )

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Streamed to where the state lives."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            optimizer.load_state_dict(state)
