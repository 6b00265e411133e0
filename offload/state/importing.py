"""What a path names that weights or an optimizer's state are read from."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .hub_names import HubFiles, is_of_transformers
from .weight_files import DISTRIBUTED, OPTIMIZER, TensorFiles, WeightFiles


def open_weights(path: Path, model: nn.Module | None) -> TensorFiles:
    """What ``weights=`` names: safetensors, or a folder of ``torch.distributed.checkpoint``; by the
    names that ``model`` has in memory, or, without one, by those in the files.

    Raises:
        ValueError: it is neither, or cannot be read.
    """
    if (path / DISTRIBUTED).is_file():
        from .distributed_checkpoint import DistributedFolder  # imports much of torch

        return DistributedFolder(path)
    files = WeightFiles(path)
    if model is None or not is_of_transformers(model):
        return files
    return HubFiles(model, files)


def open_state(path: Path, model: nn.Module, groups: Sequence[dict[str, Any]]) -> Mapping[str, Any]:
    """A ``state_dict`` on disk: a torch file or an export's folder, mapped, or a folder of
    ``torch.distributed.checkpoint``.  Nothing is read yet.

    Raises:
        ValueError: there is none, or it does not fit the model.
    """
    if (path / DISTRIBUTED).is_file():
        from .distributed_checkpoint import optimizer_state

        return optimizer_state(path, model, groups)
    file = path / OPTIMIZER if path.is_dir() else path
    try:
        state: Mapping[str, Any] = torch.load(file, mmap=True, weights_only=True)
    except (OSError, RuntimeError, pickle.UnpicklingError) as error:
        raise ValueError(f"{file} cannot be read as a torch file: {error}") from error
    if not {"state", "param_groups"} <= set(state):
        raise ValueError(f"{file} holds no optimizer's state_dict; it has {list(state)[:5]}")
    return state
