"""Weight files of which a rank reads only its rows."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from pathlib import Path

import torch

from ..io_engine.file_ranges import FileState
from .weight_files import InFiles, QuantisedInFiles, TensorFiles, cut_runs, read_runs


class RowFiles:
    """A view of ``TensorFiles`` that limits some tensors to a range of rows."""

    def __init__(self, files: TensorFiles, rows: Mapping[str, tuple[int, int]]) -> None:
        """
        Args:
            rows: by name, the first row and the number of rows.
        """
        self.path: Path = files.path
        self._files, self._rows = files, rows

    @property
    def names(self) -> list[str]:
        """See ``TensorFiles``."""
        return self._files.names

    def shape(self, name: str) -> tuple[int, ...] | None:
        """See ``TensorFiles``."""
        whole = self._files.shape(name)
        return (
            whole if whole is None or name not in self._rows else (self._rows[name][1], *whole[1:])
        )

    def dtypes(self, name: str) -> Collection[torch.dtype]:
        """See ``TensorFiles``."""
        return self._files.dtypes(name)

    def read(self, name: str) -> torch.Tensor:
        """See ``TensorFiles``."""
        if name not in self._rows:
            return self._files.read(name)
        if (found := self.find(name)) is not None:
            return read_runs(found, self.shape(name) or ())
        first, count = self._rows[name]
        return self._files.read(name)[first : first + count].clone()

    def find(self, name: str) -> InFiles | None:
        """See ``TensorFiles``."""
        whole = self._files.find(name)
        if whole is None or name not in self._rows:
            return whole
        first, count = self._rows[name]
        each = math.prod((self._files.shape(name) or ())[1:]) * whole.dtype.itemsize
        return InFiles(whole.dtype, tuple(cut_runs(whole.runs, first * each, count * each)))

    def find_quantised(self, name: str) -> QuantisedInFiles | None:
        """See ``TensorFiles``; ``None`` for rows, which are dequantised when they are read."""
        return None if name in self._rows else self._files.find_quantised(name)

    def state(self, path: Path) -> FileState:
        """See ``TensorFiles``."""
        return self._files.state(path)
