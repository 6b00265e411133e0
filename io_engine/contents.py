"""What an extent holds: nothing yet, whole contents with their checksums, or ruins."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .errors import CorruptionError, LifecycleError, OffloadError
from .types import Extent


class Fill(enum.Enum):
    """State of an extent's contents."""

    EMPTY = "never written"
    WHOLE = "written"
    BROKEN = "partly written"


@dataclass(eq=False)
class ExtentContents:
    """The facts about one extent that are kept in memory, apart from its bytes.

    ``checksums``: CRC-32 of each block, uint32, or ``None`` if checking is off.
    """

    extent: Extent
    checksums: NDArray[np.uint32] | None
    fill: Fill = Fill.EMPTY
    broken_by: str = ""

    def unreadable(self) -> OffloadError | None:
        """Why a read cannot give what was written; ``None`` if it can."""
        if self.fill is Fill.WHOLE:
            return None
        if self.fill is Fill.EMPTY:
            return LifecycleError(
                f"{self.extent} has never been written, so there is nothing to read; write it first"
            )
        return CorruptionError(
            f"{self.extent} is incomplete, because a write of it failed ({self.broken_by}); write "
            "it again",
            nbytes=self.extent.nbytes,
        )
