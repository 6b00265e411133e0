"""A strategy for Lightning's Trainer whose models live on several tiers.

    from overspill.integrations.lightning import OverspillStrategy

    trainer = lightning.Trainer(
        strategy=OverspillStrategy(host_memory="24GiB", nvme="/scratch/run"), accelerator="auto"
    )

What ``configure_optimizers`` gives is wrapped when a fit begins: an optimizer, or several for
manual optimization.  Checkpoints are Lightning's own, written and read tensor by tensor.  For
Fabric: wrap first, then ``fabric.setup(model, optimizer, move_to_device=False)``.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial
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
        """Create the optimizers, and wrap the model.

        Raises:
            ValueError: there are none, or they differ from those of the fit before.
        """
        super().setup_optimizers(trainer)
        made = list(self.optimizers)
        if not any(each.param_groups for each in made):
            raise ValueError(
                "OverspillStrategy needs an optimizer; configure_optimizers returned none"
            )
        if engine_of(self._module) is None:
            micro_steps = trainer.accumulate_grad_batches
            own = {"accumulate": micro_steps, "durable": False, "loss": "auto", "tile": "auto"}
            options = {**own, **self._options}
            wrap(self._module, made if len(made) > 1 else made[0], **options)
        else:  # a fit before this one has wrapped the model
            _start_anew(self._wrapped, made)
        self.optimizers = self._wrapped

    def optimizer_step(
        self, optimizer: Any, closure: Any, model: Any = None, **more: Any
    ) -> Any:  # fmt: skip
        """Repeat the last micro-batch of a step if it runs out of memory."""
        if isinstance(optimizer, OffloadedOptimizer):
            closure = partial(optimizer.with_room, closure)
        return super().optimizer_step(optimizer, closure, model, **more)

    @property
    def _wrapped(self) -> list[Any]:
        """The optimizers of a wrapped module."""
        one = optimizer_of(self._module)
        assert one is not None
        return list(one.all_optimizers)

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
        if not isinstance(optimizer, OffloadedOptimizer):
            return super().optimizer_state(optimizer)
        return optimizer.streamed_state(
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


def _start_anew(
    wrapped: Sequence[OffloadedOptimizer], made: Sequence[torch.optim.Optimizer]
) -> None:
    """Begin a fit with the new optimizers' hyper-parameters, and without state.

    Raises:
        ValueError: one is another kind, or has other param groups, than that which the model is
            wrapped with.
    """
    pairs = list(zip(wrapped, made, strict=False))
    alike = len(wrapped) == len(made) and all(
        _members(ours) == _members(theirs) and ours.defaults.keys() == theirs.defaults.keys()
        for ours, theirs in pairs
    )
    if not alike:
        raise ValueError(
            "configure_optimizers returned another optimizer, or other param groups, than in the "
            "fit before; call overspill.unwrap(model) before this fit"
        )
    for ours, theirs in pairs:
        if ours is not theirs:
            ours.load_state_dict({**theirs.state_dict(), "state": {}})
            theirs.param_groups = ours.param_groups  # which its schedulers change
            optimizer_private.count_step(theirs)


def _members(optimizer: torch.optim.Optimizer) -> list[list[int]]:
    return [list(map(id, group["params"])) for group in optimizer.param_groups]
