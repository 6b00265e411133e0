"""Checkpoints of an ``accelerate`` loop whose model and optimizer are wrapped.

Wrap first, then prepare; accelerate is to move neither the model nor the optimizer::

    optimizer = overspill.wrap(model, torch.optim.AdamW(model.parameters()), nvme="/scratch/run")
    model, optimizer, loader = accelerator.prepare(
        model, optimizer, loader, device_placement=[False, False, True]
    )

All else in the loop stays as it is, but for ``accelerator.save_state`` and ``load_state``, which
take all weights and state into memory at once.  These write and read the same files tensor by
tensor.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from accelerate.accelerator import Accelerator
from accelerate.utils.constants import MODEL_NAME, OPTIMIZER_NAME, SAFE_MODEL_NAME
from torch import nn

from ..durable.files import write_safetensors, write_torch
from ..durable.hub import as_in_memory
from ..durable.tensors import lazy
from ..engine import Engine, engine_of
from ..errors import OffloadError
from ..optimizer import OffloadedOptimizer


def save_state(accelerator: Accelerator, output_dir: str | None = None, **more: Any) -> str:
    """As ``accelerator.save_state``, whose files these are: ``accelerator.load_state`` of a plain
    run reads them.

    Returns:
        The folder.

    Raises:
        OffloadError: a model or an optimizer of the accelerator is not wrapped, or not for safe
            files.
    """
    if not more.get("safe_serialization", True):
        raise OffloadError("save_state writes safetensors only; leave safe_serialization out")
    with _WithoutOurs(accelerator) as (models, optimizers):
        folder = Path(accelerator.save_state(output_dir, **more))
    if accelerator.is_main_process:
        for number, (model, _) in enumerate(models):
            file = folder / f"{_numbered(SAFE_MODEL_NAME, number)}.safetensors"
            write_safetensors(as_in_memory(model), file, lambda nbytes: None)
        for number, (_, engine) in enumerate(optimizers):
            tree = engine.streamed_state(
                lambda name, shape, read: lazy(name, torch.float32, shape, read)
            )
            file = folder / f"{_numbered(OPTIMIZER_NAME, number)}.bin"
            write_torch(tree, file, lambda nbytes: None)
    return str(folder)


def load_state(accelerator: Accelerator, input_dir: str | None = None, **more: Any) -> None:
    """As ``accelerator.load_state``, of what either has saved.

    Raises:
        OffloadError: a model or an optimizer of the accelerator is not wrapped.
        ValueError: the files do not fit the model.
    """
    found: list[Path] = []
    hook = accelerator.register_load_state_pre_hook(lambda _, path: found.append(Path(path)))
    try:
        with _WithoutOurs(accelerator) as (models, optimizers):
            accelerator.load_state(input_dir, **more)
    finally:
        hook.remove()
    (folder,) = found
    for number, (model, engine) in enumerate(models):
        file = folder / f"{_numbered(SAFE_MODEL_NAME, number)}.safetensors"
        if file.is_file():
            engine.load_weights(file, hub=False)
        else:
            file = folder / f"{_numbered(MODEL_NAME, number)}.bin"
            model.load_state_dict(torch.load(file, mmap=True, weights_only=True))
    for number, (optimizer, _) in enumerate(optimizers):
        optimizer.load_state_dict(folder / f"{_numbered(OPTIMIZER_NAME, number)}.bin")


def _numbered(name: str, number: int) -> str:
    return f"{name}_{number}" if number else name


class _WithoutOurs:
    """A block in which an accelerator knows of no model and no optimizer; gives those it has."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        found = [accelerator.unwrap_model(each) for each in accelerator._models]
        inner = [getattr(each, "optimizer", each) for each in accelerator._optimizers]
        self.models = [(m, engine) for m in found if (engine := engine_of(m)) is not None]
        self.optimizers = [
            (each, engine)
            for each in inner
            if isinstance(each, OffloadedOptimizer)
            for _, engine in self.models
            if each.plan is engine.plan
        ]
        lacking = len(self.models) < len(found) or len(self.optimizers) < len(inner)
        if lacking or not self.models:
            raise OffloadError(
                "overspill saves and loads what it has wrapped: wrap every model and optimizer "
                "before accelerator.prepare, or use the accelerator's own save_state and load_state"
            )

    def __enter__(self) -> tuple[Models, Optimizers]:
        self._before = self._accelerator._models, self._accelerator._optimizers
        self._accelerator._models, self._accelerator._optimizers = [], []
        return self.models, self.optimizers

    def __exit__(self, *_: object) -> None:
        self._accelerator._models, self._accelerator._optimizers = self._before


Models = list[tuple[nn.Module, Engine]]
Optimizers = list[tuple[OffloadedOptimizer, Engine]]
