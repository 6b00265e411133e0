"""Weight files of which a rank reads only its regions."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from pathlib import Path

import torch

from ..io_engine.file_ranges import FileState
from ..planning.regions import TensorRegion
from .weight_files import InFiles, QuantisedInFiles, TensorFiles, cut_runs, read_runs


class RegionFiles:
    """A view of ``TensorFiles`` that limits some tensors to a region."""

    def __init__(self, files: TensorFiles, regions: Mapping[str, TensorRegion]) -> None:
        """
        Args:
            regions: by name.
        """
        self.path: Path = files.path
        self._files, self._regions = files, regions

    @property
    def names(self) -> list[str]:
        """See ``TensorFiles``."""
        return self._files.names

    def shape(self, name: str) -> tuple[int, ...] | None:
        """See ``TensorFiles``."""
        whole, region = self._files.shape(name), self._regions.get(name)
        return whole if whole is None or region is None else region.shape

    def dtypes(self, name: str) -> Collection[torch.dtype]:
        """See ``TensorFiles``."""
        return self._files.dtypes(name)

    def read(self, name: str) -> torch.Tensor:
        """See ``TensorFiles``."""
        if (region := self._regions.get(name)) is None:
            return self._files.read(name)
        whole = self._files.find(name)
        if whole is None:
            return region.of(self._files.read(name)).clone()
        rows = region.rows
        read = read_runs(_rows(whole, rows), rows.shape)
        return read if region.is_rows else region.inside(read, rows).clone()

    def find(self, name: str) -> InFiles | None:
        """See ``TensorFiles``; ``None`` for a region that is not of whole rows."""
        whole, region = self._files.find(name), self._regions.get(name)
        if whole is None or region is None:
            return whole
        return _rows(whole, region) if region.is_rows else None

    def find_quantised(self, name: str) -> QuantisedInFiles | None:
        """See ``TensorFiles``; ``None`` for regions, which are dequantised when they are read."""
        return None if name in self._regions else self._files.find_quantised(name)

    def state(self, path: Path) -> FileState:
        """See ``TensorFiles``."""
        return self._files.state(path)


def _rows(whole: InFiles, rows: TensorRegion) -> InFiles:
    each = math.prod(rows.whole[1:]) * whole.dtype.itemsize
    first, count = (rows.first[0], rows.shape[0]) if rows.shape else (0, 1)
    return InFiles(whole.dtype, tuple(cut_runs(whole.runs, first * each, count * each)))
