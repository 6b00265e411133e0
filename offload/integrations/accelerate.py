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

from ..durable.files import replacing, write_safetensors, write_torch
from ..durable.hub import of_state_dict
from ..durable.tensors import lazy
from ..engine import engine_of
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
    left: list[dict[str, Any]] = []

    def take(models: Any, states: list[dict[str, Any]], path: str) -> None:
        left.extend(states)  # that the hooks before have left
        states.clear()

    ours = _Ours(accelerator)
    hook = accelerator.register_save_state_pre_hook(take)
    try:
        with ours:
            folder = Path(accelerator.save_state(output_dir, **more))
    finally:
        hook.remove()
    if accelerator.is_main_process:
        parameters = [p for _, engine in ours.models for p in engine.parameters]
        for number, state in enumerate(left):
            name = f"{_numbered(SAFE_MODEL_NAME, number)}.safetensors"
            with replacing(folder / name) as draft:
                write_safetensors(of_state_dict(state, parameters), draft, lambda nbytes: None)
        for number, (_, engine) in enumerate(ours.optimizers):
            tree = engine.streamed_state(
                lambda name, shape, read: lazy(name, torch.float32, shape, read)
            )
            with replacing(folder / f"{_numbered(OPTIMIZER_NAME, number)}.bin") as draft:
                write_torch(tree, draft, lambda nbytes: None)
    return str(folder)


def load_state(accelerator: Accelerator, input_dir: str | None = None, **more: Any) -> None:
    """As ``accelerator.load_state``, of what either has saved.

    Raises:
        OffloadError: a model or an optimizer of the accelerator is not wrapped.
        ValueError: the files do not fit the model.
    """
    found: list[Path] = []
    left: list[Any] = []

    def take(models: list[Any], path: str) -> None:
        found.append(Path(path))
        left.extend(models)  # that the hooks before have left
        models.clear()

    ours = _Ours(accelerator)
    hook = accelerator.register_load_state_pre_hook(take)
    try:
        with ours:
            accelerator.load_state(input_dir, **more)
    finally:
        hook.remove()
    (folder,) = found
    for number, each in enumerate(left):
        model = accelerator.unwrap_model(each)
        engine = engine_of(model)
        assert engine is not None
        file = folder / f"{_numbered(SAFE_MODEL_NAME, number)}.safetensors"
        old = folder / f"{_numbered(MODEL_NAME, number)}.bin"
        if file.is_file() or not old.is_file():
            engine.load_weights(file, hub=False)
        else:
            model.load_state_dict(torch.load(old, mmap=True, weights_only=True))
    for number, (optimizer, _) in enumerate(ours.optimizers):
        optimizer.load_state_dict(folder / f"{_numbered(OPTIMIZER_NAME, number)}.bin")


def _numbered(name: str, number: int) -> str:
    return f"{name}_{number}" if number else name


class _Ours:
    """What is wrapped of an accelerator's.  Inside its block weights are not read for a state dict,
    but stand there as their parameters, and the accelerator knows of no optimizer."""

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

    def __enter__(self) -> None:
        self._before = self._accelerator._optimizers
        self._accelerator._optimizers = []
        self._accelerator.__dict__["get_state_dict"] = self._state_dict

    def _state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        found: dict[str, Any] = self._accelerator.unwrap_model(model).state_dict(keep_vars=True)
        return found

    def __exit__(self, *_: object) -> None:
        del self._accelerator.__dict__["get_state_dict"]
        self._accelerator._optimizers = self._before
