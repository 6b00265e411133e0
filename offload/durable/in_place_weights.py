"""Access, for exports, to weights that a store reads in place from the user's files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from io import BufferedReader
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..io_engine.file_ranges import RangeReader
from ..planning.sources import described_sources

Bytes = NDArray[np.uint8]


class InPlaceReader:
    """Reads bytes of weights from those files.  Must be closed.

    Each unit is verified as a whole before any of its bytes are returned.
    """

    def __init__(
        self,
        description: Mapping[str, Any],
        digests: Mapping[int, int],
        moved: Path | Mapping[str, Path] | None,
    ) -> None:
        """
        Args:
            description: the store's description.
            digests: checksums of the files in the store's last commit, by unit.
            moved: the present folder of the files, if they were moved.

        Raises:
            OffloadError: a file is missing.
        """
        sources = described_sources(description, digests, moved)
        self.paths, self.root = sources.files, sources.root
        # The units that the commit has a checksum of.
        self.digested = sorted(sources.ranges.keys() & digests.keys())
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
        """Return whether a unit's weights are in the files."""
        return unit in self._ranges

    @property
    def units(self) -> list[int]:
        """The units whose weights are in the files."""
        return sorted(self._ranges)

    def check(self, unit: int) -> None:
        """Verify a unit, once.

        Raises:
            CorruptionError: the files have changed since they were first read.
        """
        if unit not in self._checked:
            assert self._reader is not None
            self._reader.check(self._ranges[unit])
            self._checked.add(unit)

    def begin(self, unit: int, low: int, high: int) -> Callable[[], Bytes]:
        """Do as ``StoreReader.begin``, for bytes of a unit's slot.

        Raises:
            CorruptionError: the files have changed since they were first read.
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
        """Close the files."""
        if self._reader is not None:
            self._reader.close()
        for file in self._files:
            file.close()
