"""Weights that a store lacks, since they are read in place from files of somebody's: any bytes of
them, for exports."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from io import BufferedReader
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..io_engine.ranges import RangeReader
from ..planning.sources import described_sources

Bytes = NDArray[np.uint8]


class InPlaceReader:
    """Every unit is checked as a whole before anything of it is given.  Close it."""

    def __init__(
        self, description: Mapping[str, Any], digests: Mapping[int, int], moved: Path | None
    ) -> None:
        """
        Args:
            description: the store's.
            digests: what its last commit knows of the files, by unit.
            moved: the folder that has the files now, if not where they were.

        Raises:
            OffloadError: a file is not there any more.
        """
        sources = described_sources(description, digests, moved)
        self._ranges, self._checked = sources.ranges, set[int]()
        self._reader = RangeReader(sources.files) if sources.ranges else None
        for unit, digest in digests.items():
            if self._reader is not None and unit in self._ranges:
                self._reader.expect(self._ranges[unit], digest)
        self._files: list[BufferedReader] = []
        try:
            for path in sources.files:
                self._files.append(path.open("rb"))
        except BaseException:
            self.close()
            raise

    def has(self, unit: int) -> bool:
        """Whether a unit's weights are in the files."""
        return unit in self._ranges

    @property
    def units(self) -> list[int]:
        """Those whose weights are in the files."""
        return sorted(self._ranges)

    def check(self, unit: int) -> None:
        """Reads a unit once.

        Raises:
            CorruptionError: the files are not what they were when they were first read.
        """
        if unit not in self._checked:
            assert self._reader is not None
            self._reader.check(self._ranges[unit])
            self._checked.add(unit)

    def begin(self, unit: int, low: int, high: int) -> Callable[[], Bytes]:
        """As ``StoreReader.begin``, for bytes of a unit's slot.

        Raises:
            CorruptionError: the files are not what they were when they were first read.
        """
        self.check(unit)

        def wait() -> Bytes:
            out = np.zeros(high - low, np.uint8)
            for part in self._ranges[unit].parts:
                start, stop = max(low, part.to), min(high, part.to + part.nbytes)
                if start < stop:
                    file = self._files[part.file]
                    file.seek(part.offset + start - part.to)
                    file.readinto(out.data[start - low : stop - low])
            return out

        return wait

    def close(self) -> None:
        """Closes the files."""
        if self._reader is not None:
            self._reader.close()
        for file in self._files:
            file.close()
