"""What a path names that weights or an optimizer's state are read from."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..planning.sections import has_sections
from .adapters import base_of
from .hub_names import HubFiles, is_of_transformers, tensors_of
from .section_files import SectionFiles
from .weight_files import DISTRIBUTED, OPTIMIZER, TensorFiles, WeightFiles

log = logging.getLogger("overspill")
EXTRA = "_extra_state"  # torch's name for it in a state dict


def open_weights(path: Path, model: nn.Module | None) -> TensorFiles:
    """What ``weights=`` names: safetensors, or a folder of ``torch.distributed.checkpoint``; by the
    names that ``model`` has in memory, or, without one, by those in the files.

    Raises:
        ValueError: it is neither, or cannot be read.
    """
    base = None if model is None else base_of(model)
    files: TensorFiles
    if (path / DISTRIBUTED).is_file():
        from .distributed_checkpoint import DistributedFolder  # imports much of torch

        files = DistributedFolder(path)
    elif base is not None and is_of_transformers(base):
        files = HubFiles(base, WeightFiles(path))
    else:
        files = WeightFiles(path)
    return files if base is None or not has_sections(base) else SectionFiles(base, files)


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


class Others:
    """What files have besides weights: buffers and modules' own state.  Checked before anything is
    changed."""

    def __init__(
        self, files: TensorFiles, model: nn.Module, weights: Collection[str],
        managed: Collection[int],
    ) -> None:  # fmt: skip
        """
        Raises:
            ValueError: a buffer has another shape.
        """
        self._files, self._model = files, model
        self._buffers = {
            name: buffer for name, buffer in tensors_of(model).items() if id(buffer) not in managed
        }
        shapes = {name: files.shape(name) for name in self._buffers}
        for name, buffer in self._buffers.items():
            if shapes[name] not in (None, tuple(buffer.shape)):
                raise ValueError(
                    f"weights: {files.path}: buffer {name} has shape {shapes[name]}, expected "
                    f"{tuple(buffer.shape)}"
                )
        missing = [name for name, shape in shapes.items() if shape is None]
        known = {*weights, *tensors_of(model)}
        unknown = [name for name in files.names if name not in known]
        self._extra = [name for name in unknown if name.rpartition(".")[2] == EXTRA]
        strange = [name for name in unknown if name not in self._extra]
        for what, found in (("lacks buffer", missing), ("also has", strange)):
            if found:
                more = f" and {len(found) - 1} more" if len(found) > 1 else ""
                log.warning("overspill: %s %s %s%s", files.path, what, found[0], more)

    def load(self) -> None:
        """Puts them into the model."""
        for name, buffer in self._buffers.items():
            if self._files.shape(name) is not None:
                buffer.detach().copy_(self._files.read(name))
        for name in self._extra:
            module = self._model.get_submodule(name.rpartition(".")[0])
            module.set_extra_state(self._files.read(name))
