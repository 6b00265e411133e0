"""The weight files of several models, as one set of tensors."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from ..io_engine.file_ranges import FileState
from .weight_files import InFiles, QuantisedInFiles, TensorFiles


class FilesOfModel(NamedTuple):
    """The files of one model; ``prefix`` is that of its tensors among those of all."""

    prefix: str
    model: nn.Module
    files: TensorFiles


class JoinedFiles:
    """``TensorFiles`` of several models, each under the prefix of its model."""

    def __init__(self, parts: Collection[FilesOfModel]) -> None:
        self.parts = list(parts)
        self.path: Path = self.parts[0].files.path

    def _find(self, name: str) -> tuple[TensorFiles, str]:
        """Return the files that may have a tensor, and its name in them."""
        for prefix, _, files in self.parts:
            if name.startswith(prefix):
                return files, name.removeprefix(prefix)
        raise KeyError(name)

    def _has(self, name: str) -> bool:
        return any(name.startswith(each.prefix) for each in self.parts)

    @property
    def names(self) -> list[str]:
        """See ``TensorFiles``."""
        return [prefix + name for prefix, _, files in self.parts for name in files.names]

    def shape(self, name: str) -> tuple[int, ...] | None:
        """See ``TensorFiles``."""
        if not self._has(name):
            return None
        files, own = self._find(name)
        return files.shape(own)

    def dtypes(self, name: str) -> Collection[torch.dtype]:
        """See ``TensorFiles``."""
        files, own = self._find(name)
        return files.dtypes(own)

    def read(self, name: str) -> torch.Tensor:
        """See ``TensorFiles``."""
        files, own = self._find(name)
        return files.read(own)

    def find(self, name: str) -> InFiles | None:
        """See ``TensorFiles``."""
        files, own = self._find(name)
        return files.find(own)

    def find_quantised(self, name: str) -> QuantisedInFiles | None:
        """See ``TensorFiles``."""
        files, own = self._find(name)
        return files.find_quantised(own)

    def state(self, path: Path) -> FileState:
        """See ``TensorFiles``."""
        for each in self.parts:
            try:
                return each.files.state(path)
            except KeyError:
                pass
        raise KeyError(path)
