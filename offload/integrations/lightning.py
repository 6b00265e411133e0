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

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.strategies.single_device import SingleDeviceStrategy

from ..api import wrap
from ..config import OffloadConfig
from ..durable.files import write_torch
from ..durable.hub import in_full, streamed
from ..durable.tensors import lazy
from ..engine import engine_of
from ..io_engine.atomic_files import make_folder, replacing
from ..optimizer import OffloadedOptimizer, optimizer_of
from ..private import optimizer_private

log = logging.getLogger("overspill")


class OverspillStrategy(SingleDeviceStrategy):
    """One device; the options are those of ``overspill.wrap``, but that steps are not committed
    beside Lightning's checkpoints where ``durable`` is not given.

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

    # -- what is wrapped, and when --------------------------------------------------------------

    @property
    def _module(self) -> Any:
        return self.lightning_module

    def model_to_device(self) -> None:
        """Leave a model for training where it is: the engine moves it unit by unit."""
        state = getattr(self._module.trainer, "state", None)
        if engine_of(self._module) is None and getattr(state, "fn", None) != "fit":
            super().model_to_device()

    def setup_optimizers(self, trainer: Any) -> None:
        """Makes them, and wraps the model.

        Raises:
            ValueError: there is not just one.
        """
        super().setup_optimizers(trainer)
        if len(self.optimizers) != 1:
            raise ValueError(
                f"OverspillStrategy trains with one optimizer, and configure_optimizers gave "
                f"{len(self.optimizers)}"
            )
        made, wrapped = self.optimizers[0], optimizer_of(self._module)
        if wrapped is None:
            micro_steps = trainer.accumulate_grad_batches
            options = {"accumulate": micro_steps, "durable": False, **self._options}
            self.optimizers = [wrap(self._module, made, **options)]
        elif made is not wrapped:  # a fit before this one has wrapped the model
            _start_anew(wrapped, made)
            self.optimizers = [wrapped]

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
        """In a checkpoint, each weight is read when its turn comes: until then its parameter."""
        if engine_of(self._module) is None:
            return super().lightning_module_state_dict()
        found: dict[str, Any] = self._module.state_dict(keep_vars=True)
        return found

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
        """Write one torch file, as Lightning does.  A local file is streamed, and appears complete
        or not at all.  For another ``CheckpointIO`` or a remote path, the checkpoint is first built
        in memory as a whole.

        Raises:
            IoError: the file cannot be written; a checkpoint that was there stays.
        """
        engine = engine_of(self._module)
        if engine is None:
            return super().save_checkpoint(checkpoint, filepath, storage_options)
        tree = streamed(checkpoint, engine.parameters)
        own = type(self.checkpoint_io) is not TorchCheckpointIO or storage_options is not None
        if own or "://" in str(filepath):
            log.info("overspill: the checkpoint for %s is put together in memory", filepath)
            return super().save_checkpoint(in_full(tree), filepath, storage_options)
        if self.is_global_zero:
            path = Path(filepath)
            make_folder(path.parent)
            with replacing(path) as draft:
                write_torch(tree, draft, lambda nbytes: None)
        return None

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


def _start_anew(wrapped: OffloadedOptimizer, made: torch.optim.Optimizer) -> None:
    """Begin a fit with the new optimizer's hyper-parameters, and without state.

    Raises:
        ValueError: it is another kind, or has other param groups, than the one that the model is
            wrapped with.
    """
    mine, theirs = wrapped.param_groups, made.param_groups
    groups = [[list(map(id, group["params"])) for group in each] for each in (mine, theirs)]
    if groups[0] != groups[1] or made.defaults.keys() != wrapped.defaults.keys():
        raise ValueError(
            "the model is wrapped with another optimizer than configure_optimizers now gives; "
            "overspill.unwrap(model) before this fit"
        )
    wrapped.load_state_dict({**made.state_dict(), "state": {}})
    made.param_groups = mine  # which its schedulers change
    optimizer_private.count_step(made)
